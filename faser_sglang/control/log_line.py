"""FASER's line in the server's log: what happened since the last one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from faser_sglang.control.growth import Key

SHOWN_DEPTHS = 4  # the most frequent


def log_line(grown: Mapping[Key, float], state: Mapping[str, Any]) -> str:
    """One line for people.

    Args:
        grown: what the sums grew by since the last line. state: "mode" and "drafter", and the
            planner's "depth", "stop", "trim" and "controller", as in ``/server_info``.
    """
    rounds = _sum(grown, "rounds")
    parts = []
    if rounds:
        verified, drafted = _sum(grown, "verified_drafts"), _sum(grown, "drafts")
        parts += [
            f"accept len: {_sum(grown, 'emitted_tokens') / rounds:.2f}",
            f"depth: {verified / rounds:.2f} ({_depths(grown, rounds)})",
            f"accepted: {_sum(grown, 'accepted_drafts'):.0f} of {verified:.0f} verified",
            f"trimmed: {_sum(grown, 'trimmed_drafts'):.0f} of {drafted:.0f} drafted",
        ]
    else:
        parts.append("no round of a running request")
    parts += _times(grown, state["controller"])
    if _sum(grown, "draft_faults"):
        parts.append(f"draft faults: {_sum(grown, 'draft_faults'):.0f}")
    parts.append(f"mode: {state['mode']}, depth {state['depth']}, drafter {state['drafter']}")
    return "FASER: " + ", ".join(parts)


def _sum(grown: Mapping[Key, float], name: str) -> float:
    return grown.get((name, ""), 0.0)


def _labelled(grown: Mapping[Key, float], name: str) -> dict[str, float]:
    return {label: value for (sum_name, label), value in grown.items() if sum_name == name}


def _depths(grown: Mapping[Key, float], rounds: float) -> str:
    """The most frequent depths with their share, and the deepest."""
    by_depth = {int(depth): n for depth, n in _labelled(grown, "rounds_by_depth").items()}
    often = sorted(sorted(by_depth, key=lambda depth: -by_depth[depth])[:SHOWN_DEPTHS])
    shares = " ".join(f"{depth}:{by_depth[depth] / rounds:.0%}" for depth in often)
    return f"{shares} top {max(by_depth)}"


def _times(grown: Mapping[Key, float], controller: Mapping[str, Any] | None) -> list[str]:
    """Host time of a pass by phase, and how far predictions were off."""
    parts, phases = [], _labelled(grown, "phase_seconds")
    passes, seconds = _sum(grown, "begun_passes"), sum(phases.values())
    if passes and seconds:
        shares = " ".join(f"{phase} {each / seconds:.0%}" for phase, each in phases.items())
        parts.append(f"pass: {1e3 * seconds / passes:.1f} ms ({shares})")
    if controller is not None and controller["rounds_timed"]:
        parts.append(f"prediction off by: {controller['round_time_error']:.0%}")
    return parts
