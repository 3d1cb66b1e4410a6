"""Every way in knows FASER: the command line, ``sglang serve``, the Engine API."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytestmark = [pytest.mark.server, pytest.mark.models]

PROMPT = [11, 200, 3000, 41, 7]


def run(*command: str, timeout: float = 300) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=timeout, check=False
    )


def test_help_of_both_commands_shows_the_flags():
    launch = run("-m", "sglang.launch_server", "--help")
    assert launch.returncode == 0
    for flag in ("--faser-mode", "--faser-depth", "--faser-drafter"):
        assert flag in launch.stdout


def serve(*arguments: str) -> subprocess.CompletedProcess:
    """``sglang serve`` with arguments that must end it before it serves."""
    return run("-c", "from sglang.cli.main import main; main()", "serve", *arguments)


def test_sglang_serve_knows_faser_in_any_case_and_says_what_is_missing(tiny_models):
    ended = serve("--model-path", tiny_models[0], "--speculative-algorithm", "faser")
    assert ended.returncode != 0
    assert "--speculative-draft-model-path" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--faser-depth", "9"], "exceeds --speculative-num-steps 8"),
        (["--speculative-eagle-topk", "4"], "FASER drafts chains"),
        (["--speculative-num-steps", "5", "--speculative-num-draft-tokens", "3"], "disagrees"),
        (["--pp-size", "2"], "--pp-size 2 is not served"),
    ],
)
def test_flags_that_cannot_be_served_end_the_start_with_one_sentence(
    tiny_models, arguments, sentence
):
    target, draft = tiny_models
    ended = run(
        "-m", "sglang.launch_server", "--model-path", target, "--speculative-algorithm", "FASER",
        "--speculative-draft-model-path", draft, *arguments,
    )  # fmt: skip
    assert ended.returncode != 0
    assert sentence in ended.stderr
    assert "Load weight" not in ended.stderr + ended.stdout


def test_engine_with_configure_gives_the_ids_of_the_server(tiny_servers, tiny_models, tmp_path):
    target, draft = tiny_models
    script = tmp_path / "engine.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import faser_sglang
            import sglang as sgl

            if __name__ == "__main__":
                faser_sglang.configure(depth=3)
                engine = sgl.Engine(
                    model_path={target!r},
                    speculative_algorithm="FASER",
                    speculative_draft_model_path={draft!r},
                    dtype="float32",
                    context_length=512,
                    max_total_tokens=4000,
                )
                params = {{"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}}
                answer = engine.generate(input_ids={PROMPT!r}, sampling_params=params)
                state = engine.get_server_info()["internal_states"][0]["faser"]
                print("IDS", answer["output_ids"])
                print("DEPTH", state["depth"], state["counters"]["drafted"] > 0)
                engine.shutdown()
            """
        )
    )
    ended = run(str(script))
    assert ended.returncode == 0, ended.stderr[-3000:]
    expected = tiny_servers[0].generate(PROMPT, temperature=0, max_new_tokens=20, ignore_eos=True)[
        "output_ids"
    ]
    assert f"IDS {expected}" in ended.stdout
    assert "DEPTH 3 True" in ended.stdout
