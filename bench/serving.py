"""Output tokens per second of FASER against no speculation and every fixed depth, under load.

    python bench/serving.py --quick        closed loop at 1, 4, 16 and 32 requests, mixed prompts
    python bench/serving.py                all workloads, loads and rivals (about two hours)
    python bench/serving.py --check        no speed: greedy ids of all servers in float32
    python bench/serving.py --compare A.json B.json

``sglang.bench_serving`` sends and measures. One server without speculation, one FASER server that
is switched between turns, and one a rival are up at once; an idle server sleeps. In each repeat
every server serves the same prompts, and ratios are taken between means over the repeats, with the
lowest and the highest ratio of one repeat beside. The best fixed depth is the best of several
means, so noise favours it. The last line is FASER's ratios by load; the exit status is 1 where
FASER is below ``FLOOR`` of the best other at any closed load, or misses a goal.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import report  # noqa: E402
from bench.load import Load, Prompts, bursts, closed, poisson, ramp, run  # noqa: E402
from launch import demo_models  # noqa: E402
from launch.servers import Server, start_all  # noqa: E402

SHIMS = Path(__file__).resolve().parent / "shims"
CAP = 8
FIXED = (1, 2, 3, 5, 8)
FLOOR = 0.98  # of the better of no speculation and the best fixed depth, at every closed load
GOALS = {1: 1.7, 4: 1.3, 16: 1.05}  # over no speculation, by concurrency
SINGLE_GOAL = 1.05  # over the fixed depth that is best for mixed prompts or the ramp as a whole
BAR = {1: 72.0, 4: 246.0}  # tokens a second of vLLM 0.32's CPU build (one trial elsewhere)
MIXED = ("mtbench", "humaneval", "gsm8k")
WORKLOADS = {"mtbench": MIXED[:1], "humaneval": MIXED[1:2], "gsm8k": MIXED[2:], "mixed": MIXED}
CONCURRENCY = (1, 4, 16, 32)


@dataclass(frozen=True)
class Case:
    """One server and the settings that it is switched to."""

    server: str
    switch: dict[str, int] = field(default_factory=dict)


def _auto(**changes: int) -> Case:
    return Case("faser", {"faser_depth": -1, "faser_stop": -1, "faser_trim": -1, **changes})


NONE, AUTO = "none", "auto"
CASES = {
    NONE: Case("none"),
    **{
        f"fixed-{depth}": Case("faser", {"faser_depth": depth, "faser_stop": -1, "faser_trim": -1})
        for depth in FIXED
    },
    AUTO: _auto(),
}
ABLATIONS = {
    "auto-no-stop": _auto(faser_stop=0),
    "auto-no-trim": _auto(faser_trim=0),
    "auto-one-depth": Case("one-depth"),
    "batch-adaptive": Case("batch-adaptive"),
    "dspark": Case("dspark"),
}
RIVALS = ("one-depth", "batch-adaptive", "dspark")  # of bench/shims/rivals.py


def start_servers(cases: dict[str, Case], dtype: str) -> dict[str, Server]:
    """All servers that the cases name."""
    model, draft = demo_models.build("target"), demo_models.build("eagle3")
    shared = ["--dtype", dtype, "--max-total-tokens", "20000", "--max-running-requests", "32"]
    faser = [*shared, "--faser-drafter", "hybrid", "--speculative-num-steps", str(CAP)]
    servers = {}
    for name in dict.fromkeys(case.server for case in cases.values()):
        if name == "none":
            servers[name] = Server(model, args=shared, name=name)
            continue
        env = {"PYTHONPATH": str(SHIMS), "FASER_RIVAL": name} if name in RIVALS else None
        servers[name] = Server(model, draft=draft, args=faser, env=env, name=name)
    for server in servers.values():  # one after the other: each measures its cost table alone
        start_all([server], progress=print)
    return servers


def switch(servers: dict[str, Server], case: Case) -> Server:
    """The case's server, with its settings in force."""
    server = servers[case.server]
    if case.switch:
        server.post("/set_internal_state", {"server_args": case.switch}).raise_for_status()
    return server


def loads_of(concurrency: list[int], *, clients: int, is_full: bool) -> dict[str, Load]:
    """Loads by name; the open ones have no figure of their own in the goals."""
    loads = {f"closed-{n}": closed(n, max(6, clients * n)) for n in concurrency}
    if is_full:
        loads |= {
            "poisson": poisson(rate=2.0, requests=24),
            "bursts": bursts(size=12, count=2),
            "ramp": ramp((1, 4, 16, 32, 8, 2)),
        }
    return loads


def measure(
    servers: dict[str, Server],
    cases: dict[str, Case],
    prompts: Prompts,
    sets: tuple[str, ...],
    load: Load,
    repeats: int,
) -> dict[str, Any]:
    """Interleaved runs of every case."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    names = list(cases)
    for repeat in range(repeats):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            found[name].append(run(switch(servers, cases[name]), prompts, sets, load))
    return {name: _summary(name, found, load) for name in names}


def _summary(name: str, found: dict[str, list[dict[str, Any]]], load: Load) -> dict[str, Any]:
    """Means of a case over its runs, and how it compares."""
    own = found[name]
    summary: dict[str, Any] = {"runs": len(own)}
    for key in own[0]:
        if key == "texts":
            continue
        values = [each[key] for each in own if each[key] is not None]
        summary[key] = round(statistics.fmean(values), 3) if values else None
    figures = {each: [_figure(result, load) for result in found[each]] for each in found}
    summary["figure"] = statistics.fmean(figures[name])
    if NONE in found:
        ratios = [mine / base for mine, base in zip(figures[name], figures[NONE], strict=True)]
        summary["over_none"] = round(summary["figure"] / statistics.fmean(figures[NONE]), 4)
        summary["over_none_low"] = round(min(ratios), 4)
        summary["over_none_high"] = round(max(ratios), 4)
    return summary


def _figure(result: dict[str, Any], load: Load) -> float:
    """What is compared: tokens a second; where arrivals do not wait, how soon answers are there."""
    return 1e3 / result["mean_e2e_latency_ms"] if load.is_open else result["tokens_per_second"]


def verdict(by_case: dict[str, Any]) -> dict[str, Any]:
    """FASER against the best of no speculation and the fixed depths."""
    others = {
        name: row["figure"]
        for name, row in by_case.items()
        if name == NONE or name.startswith("fixed-")
    }
    best = max(others, key=lambda name: others[name])
    fixed = {name: value for name, value in others.items() if name != NONE}
    best_fixed = max(fixed, key=lambda name: fixed[name])
    auto = by_case[AUTO]["figure"]
    return {
        "over_none": round(auto / others[NONE], 4),
        "best_fixed": best_fixed,
        "over_best_fixed": round(auto / fixed[best_fixed], 4),
        "best_other": best,
        "over_best_other": round(auto / others[best], 4),
    }


def over_single(results: dict[str, Any], keys: list[str]) -> tuple[str, float]:
    """FASER over the one fixed depth that serves several loads best: means of the ratios.

    Loads count alike: each one's figure is taken as a share of no speculation's.
    """
    shares = {
        name: statistics.fmean(math.log(results[key]["cases"][name]["over_none"]) for key in keys)
        for name in results[keys[0]]["cases"]
    }
    best = max((n for n in shares if n.startswith("fixed-")), key=lambda name: shares[name])
    return best, math.exp(shares[AUTO] - shares[best])


def show(key: str, by_case: dict[str, Any]) -> None:
    print(f"{key}")
    for name, row in by_case.items():
        length = "" if row["accept_length"] is None else f"  length {row['accept_length']:.2f}"
        print(
            f"  {name:15s} {row['tokens_per_second']:7.1f} tok/s  x{row['over_none']:.3f} "
            f"({row['over_none_low']:.3f} to {row['over_none_high']:.3f})  "
            f"ttft {row['median_ttft_ms']:6.0f}  tpot {row['median_tpot_ms']:6.1f}  "
            f"itl p99 {row['p99_itl_ms']:6.1f} ms{length}"
        )
    print(f"  -> {verdict(by_case)}", flush=True)


def judge(results: dict[str, Any]) -> tuple[str, list[str]]:
    """The last line, and the goals that were missed."""
    said, missed = [], []
    for key, result in results.items():
        by_case, found = result["cases"], result["verdict"]
        workload, load = key.split("/")
        if not load.startswith("closed-"):
            continue
        n = int(load.removeprefix("closed-"))
        said.append(f"{key} {found['over_none']:.3f} / {found['over_best_fixed']:.3f}")
        if found["over_best_other"] < FLOOR:
            missed.append(f"{key}: {found['over_best_other']:.3f} of {found['best_other']}")
        if workload == "mixed" and found["over_none"] < GOALS.get(n, 0.0):
            missed.append(f"{key}: {found['over_none']:.3f} over none, goal {GOALS[n]}")
        if workload == "mixed" and by_case[AUTO]["tokens_per_second"] < BAR.get(n, 0.0):
            rate = by_case[AUTO]["tokens_per_second"]
            missed.append(f"{key}: {rate:.0f} tokens a second, bar {BAR[n]:.0f}")
    mixed = [key for key in results if key.startswith("mixed/closed-")]
    for what, keys in (("mixed loads", mixed), ("ramp", ["mixed/ramp"])):
        if all(key in results for key in keys) and keys:
            best, ratio = over_single(results, keys)
            said.append(f"{what} over {best} {ratio:.3f}")
            if ratio < SINGLE_GOAL:
                missed.append(f"{what}: {ratio:.3f} over {best}, goal {SINGLE_GOAL}")
    return "serving, over none / best fixed: " + "; ".join(said), missed


def check(servers: dict[str, Server], cases: dict[str, Case], prompts: Prompts, count: int) -> int:
    """Greedy ids of every case against those without speculation."""
    from concurrent.futures import ThreadPoolExecutor

    rows = prompts.rows(MIXED, count)

    def ask(server: Server) -> list[list[int]]:
        def one(row: Any) -> list[int]:
            return server.generate(row.prompt, max_new_tokens=row.output_len, temperature=0)[
                "output_ids"
            ]

        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(one, rows))

    right = ask(servers["none"])
    wrong = 0
    for name, case in cases.items():
        if name == NONE:
            continue
        own = ask(switch(servers, case))
        differ = sum(mine != ids for mine, ids in zip(own, right, strict=True))
        wrong += differ
        print(f"  {name:15s} {count - differ}/{count} equal", flush=True)
    total = count * (len(cases) - 1)
    print(f"serving, float32 greedy ids: {total - wrong}/{total} equal")
    return 0 if wrong == 0 else 1


def compare(old: Path, new: Path) -> int:
    """Ratios of two results, load by load."""
    first, second = (json.loads(path.read_text())["results"] for path in (old, new))
    for key in first:
        if key not in second:
            continue
        for name, row in first[key]["cases"].items():
            other = second[key]["cases"].get(name)
            if other is not None:
                print(
                    f"{key:22s} {name:15s} over none {row['over_none']:.3f} -> "
                    f"{other['over_none']:.3f}  ({other['over_none'] / row['over_none']:.3f})"
                )
    return 0


def draw(results: dict[str, Any], path: Path) -> None:
    """Ratio to no speculation over concurrency, one panel a workload."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    workloads = sorted({key.split("/")[0] for key in results if "/closed-" in key})
    figure, panels = pyplot.subplots(
        1, len(workloads), figsize=(5 * len(workloads), 4), squeeze=False, sharey=True
    )
    for panel, workload in zip(panels[0], workloads, strict=True):
        loads = [key for key in results if key.startswith(f"{workload}/closed-")]
        at = [int(key.split("-")[-1]) for key in loads]
        for name in results[loads[0]]["cases"]:
            values = [results[key]["cases"][name]["over_none"] for key in loads]
            style = {"lw": 2.5, "color": "black"} if name == AUTO else {"lw": 1, "alpha": 0.8}
            panel.plot(at, values, marker="o", ms=3, label=name, **style)
        panel.set_xscale("log", base=2)
        panel.set_xticks(at, [str(n) for n in at])
        panel.set_xlabel("requests at once")
        panel.set_title(workload)
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("output tokens/s over no speculation")
    panels[0][-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="mixed prompts, closed loops")
    parser.add_argument("--check", action="store_true", help="ids in float32 instead of speed")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("OLD", "NEW"))
    parser.add_argument("--concurrency", type=int, nargs="*", default=list(CONCURRENCY))
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--cases", nargs="*", choices=[*CASES, *ABLATIONS])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clients", type=int, default=2, help="requests a client (closed loops)")
    parser.add_argument("--new-tokens", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", metavar="NAME", help="write bench/results/NAME.json and .svg")
    options = parser.parse_args()
    if options.compare:
        return compare(*options.compare)
    began = time.monotonic()
    every = CASES | ABLATIONS
    names = options.cases or list(CASES if options.quick else every)
    cases = {name: every[name] for name in dict.fromkeys([NONE, AUTO, *names])}
    prompts = Prompts(demo_models.build("target"), options.new_tokens, options.seed)
    servers = start_servers(cases, "float32" if options.check else "bfloat16")
    try:
        if options.check:
            return check(servers, cases, prompts, 24)
        workloads = ["mixed"] if options.quick else options.workloads
        loads = loads_of(options.concurrency, clients=options.clients, is_full=not options.quick)
        warm = closed(max(options.concurrency), max(options.concurrency))
        for case in cases.values():
            run(switch(servers, case), prompts, MIXED, warm)
        results = {}
        for workload in workloads:
            for name, load in loads.items():
                if workload != "mixed" and not name.startswith("closed-"):
                    continue
                key = f"{workload}/{name}"
                by_case = measure(
                    servers, cases, prompts, WORKLOADS[workload], load, options.repeats
                )
                results[key] = {"verdict": verdict(by_case), "cases": by_case}
                show(key, by_case)
        faser = servers["faser"].faser()
    finally:
        for server in servers.values():
            server.stop()
    line, missed = judge(results)
    if options.save:
        path = report.save(
            options.save,
            {
                "models": "SmolLM2-135M-Instruct with EAGLE3 head and lookup",
                "dtype": "bf16",
                "new_tokens": options.new_tokens,
                "repeats": options.repeats,
                "minutes": round((time.monotonic() - began) / 60, 1),
                "missed": missed,
                "host_ms_per_round": faser["host_ms_per_round"],
                "controller": faser["controller"],
                "results": results,
            },
        )
        draw(results, path.with_suffix(".svg"))
        print(path.relative_to(report.ROOT))
    for goal in missed:
        print(f"missed: {goal}")
    print(line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
