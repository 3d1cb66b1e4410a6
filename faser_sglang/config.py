"""The ``--faser-*`` flags: one table, one carrier, one frozen record.

SGLang drops command-line names that it does not know and seals its argument record, so the
values travel in one environment variable, which child processes inherit. This module is the
only reader and the only writer of it. Standard library only: it must import anywhere.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

CARRIER = "FASER_SGLANG_CONFIG"

MODES = ("auto", "serial", "off")
DRAFTERS = ("auto", "lm")
DEFAULT_DEPTH_CAP = 8


class FaserConfigError(ValueError):
    """A ``--faser-*`` value that cannot be served; the message names the allowed ones."""


@dataclasses.dataclass(frozen=True)
class FaserConfig:
    """Values of the ``--faser-*`` flags, checked at construction.

    ``depth`` is "auto" (an average of each request's acceptance), "random" (tests), or a number
    of draft tokens for every request. Raises FaserConfigError for any other value.
    """

    mode: str = "auto"
    depth: str = "auto"
    drafter: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "depth", str(self.depth))
        _check_choice("--faser-mode", self.mode, MODES)
        _check_choice("--faser-drafter", self.drafter, DRAFTERS)
        if self.depth not in ("auto", "random") and not _is_number(self.depth):
            raise FaserConfigError(
                f"--faser-depth is {self.depth!r}; it takes auto, random, or a number of tokens "
                "from 0 to --speculative-num-steps."
            )

    @property
    def fixed_depth(self) -> int | None:
        """The number given to ``--faser-depth``, or None for auto and random."""
        return int(self.depth) if _is_number(self.depth) else None

    def check_cap(self, cap: int) -> None:
        """Raises FaserConfigError if the fixed depth exceeds ``cap`` (--speculative-num-steps)."""
        if self.fixed_depth is not None and self.fixed_depth > cap:
            raise FaserConfigError(
                f"--faser-depth {self.fixed_depth} exceeds --speculative-num-steps {cap}; "
                "raise the latter or lower the former."
            )


HELP: dict[str, str] = {
    "mode": "How FASER runs a round: serial drafts, then verifies; off never drafts "
    "(every request at depth 0); auto chooses.",
    "depth": "Draft depth: auto (each request's own acceptance decides), a fixed number for "
    "every request, or random (tests).",
    "drafter": "What drafts: auto takes the kind from the draft checkpoint; lm is a language "
    "model with the target's vocabulary.",
}
CHOICES: dict[str, tuple[str, ...]] = {"mode": MODES, "drafter": DRAFTERS}


def add_cli_args(parser: Any) -> None:
    """Add the ``--faser-*`` group to an argparse parser; a second call does nothing."""
    known = {option for action in parser._actions for option in action.option_strings}
    if "--faser-mode" in known:
        return
    group = parser.add_argument_group("FASER", "with --speculative-algorithm FASER")
    for field in dataclasses.fields(FaserConfig):
        group.add_argument(
            f"--faser-{field.name}",
            default=None,
            choices=CHOICES.get(field.name),
            metavar=None if field.name in CHOICES else "VALUE",
            help=f"{HELP[field.name]} Default: {field.default}.",
        )


def take_cli_args(namespace: Any) -> None:
    """Write the values of a parsed command line to the carrier, replacing what it held."""
    given = {}
    for field in dataclasses.fields(FaserConfig):
        value = getattr(namespace, f"faser_{field.name}", None)
        if value is not None:
            given[field.name] = value
    _write(given)


def configure(**values: Any) -> FaserConfig:
    """Set ``--faser-*`` values for an Engine that this process starts next.

    Names are the flags' without the prefix: ``configure(depth=3)`` is ``--faser-depth 3``.
    Raises FaserConfigError for an unknown name or value. Without arguments: the defaults.
    """
    allowed = [field.name for field in dataclasses.fields(FaserConfig)]
    unknown = sorted(set(values) - set(allowed))
    if unknown:
        raise FaserConfigError(
            f"configure() does not know {', '.join(unknown)}; it takes {', '.join(allowed)}."
        )
    config = FaserConfig(**values)
    _write({name: getattr(config, name) for name in values})
    return config


def load() -> FaserConfig:
    """The configuration that the carrier holds; the defaults when it is not set."""
    return FaserConfig(**json.loads(os.environ.get(CARRIER) or "{}"))


def _write(given: Mapping[str, Any]) -> None:
    os.environ[CARRIER] = json.dumps(dict(given))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _check_choice(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise FaserConfigError(f"{flag} is {value!r}; it takes {', '.join(allowed)}.")
