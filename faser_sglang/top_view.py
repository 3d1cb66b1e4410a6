"""How ``top`` draws what it knows of a server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from faser_sglang.top_samples import Sums, Watch

BAR = 24  # characters
NONE = "-"


def render(watch: Watch) -> RenderableType:
    """One frame of a watch that has a sample."""
    assert watch.last is not None, "take a sample first"
    faser = watch.last.faser
    parts: list[RenderableType] = [_head(watch)]
    if watch.note:
        parts.append(Text(watch.note, style="bold yellow"))
    parts.append(_figures(watch))
    has_recent = watch.recent is not None and watch.recent["rounds"] > 0
    shown = watch.recent if has_recent else watch.total
    assert shown is not None
    when = f"last {watch.seconds:.1f} s" if has_recent else "since start or flush"
    parts.append(
        Columns(
            [
                Panel(_positions(shown), title=f"acceptance by position, {when}"),
                Panel(_depths(shown), title=f"rounds by depth, {when}"),
            ]
        )
    )
    parts.append(_controller(faser["controller"]))
    return Group(*parts)


def _head(watch: Watch) -> Text:
    assert watch.last is not None
    last, faser = watch.last, watch.last.faser
    text = Text(f"FASER at {watch.url}", style="bold")
    settings = [f"{name} {faser[name]}" for name in ("mode", "drafter", "depth", "stop", "trim")]
    settings.insert(3, f"cap {faser['depth_cap']}")
    text.append("\n" + ", ".join(settings), style="not bold")
    if last.running is not None:
        text.append(f"\nrequests: {last.running} running, {last.waiting} waiting", style="not bold")
    faults = faser["draft_faults"]
    style = "bold red" if faults else "not bold"
    text.append(f"\ndraft faults: {faults}", style=style)
    return text


def _figures(watch: Watch) -> Table:
    table = Table(expand=False)
    table.add_column("")
    title = f"last {watch.seconds:.1f} s" if watch.recent is not None else "last interval"
    table.add_column(title, justify="right")
    table.add_column("since start or flush", justify="right")
    recent = dict(_rows(watch.recent)) if watch.recent is not None else {}
    speed = NONE
    if watch.recent is not None and watch.seconds > 0:
        speed = f"{watch.recent['emitted'] / watch.seconds:.1f}"
    table.add_row("tokens/s in decode rounds", speed, "")
    for name, value in _rows(watch.total):
        table.add_row(name, recent.get(name, NONE), value)
    return table


def _rows(sums: Sums) -> Iterator[tuple[str, str]]:
    rounds = sums["rounds"]
    yield "accept length", f"{sums['emitted'] / rounds:.2f}" if rounds else NONE
    yield "mean depth", f"{sums['verified'] / rounds:.2f}" if rounds else NONE
    yield "accepted of verified drafts", _of(sums["accepted"], sums["verified"])
    yield "trimmed of drafts made", _of(sums["trimmed"], sums["drafted"])
    yield "rounds saved", _of(sums["emitted"] - rounds, sums["emitted"])
    yield "decode passes", str(sums["passes"])
    spent = sum(sums.host_ms.values())
    has_time = bool(sums["passes"] and spent)
    yield "host ms a pass", f"{spent / sums['passes']:.1f}" if has_time else NONE
    for phase, ms in sums.host_ms.items():
        yield f"  {phase}", f"{ms / spent:.0%}" if has_time else NONE


def _of(part: int, whole: int) -> str:
    return f"{part} of {whole} ({part / whole:.0%})" if whole else NONE


def _bars(rows: list[tuple[str, float, str]]) -> Table:
    """Name, share and remark of each row."""
    table = Table.grid(padding=(0, 1))
    for name, share, remark in rows:
        length = round(min(max(share, 0.0), 1.0) * BAR)
        table.add_row(name, "█" * length + "·" * (BAR - length), f"{share:.2f}", remark)
    if not rows:
        table.add_row("none yet")
    return table


def _positions(sums: Sums) -> Table:
    tests = enumerate(zip(sums.accepted, sums.tested, strict=True), start=1)
    return _bars(
        [(str(place), right / tested, f"of {tested}") for place, (right, tested) in tests if tested]
    )


def _depths(sums: Sums) -> Table:
    rounds = max(sums["rounds"], 1)
    return _bars([(str(depth), n / rounds, str(n)) for depth, n in sorted(sums.depths.items())])


def _controller(state: Mapping[str, Any] | None) -> Text:
    if state is None:
        return Text("No controller: depths are not chosen by cost.")
    times = ", ".join(f"{phase} {factor:.2f}" for phase, factor in state["time_over_table"].items())
    return Text(
        f"Controller: {state['drafter_passes']} passes of the drafter are best; a verified row "
        f"must bring {state['price_of_a_row']:.3f} tokens.\n"
        f"Predicted against measured round time: off by {state['round_time_error']:.0%} "
        f"({state['rounds_timed']} rounds timed); measured over the cost table: {times}."
    )
