"""The ``--faser-*`` flags: one table, one carrier, one frozen record.

SGLang drops command-line names that it does not know and seals its argument record, so the
values travel in one environment variable, which child processes inherit. This module is the
only reader and the only writer of it. Standard library only: it must import anywhere.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Mapping
from typing import Any

CARRIER = "FASER_SGLANG_CONFIG"

MODES = ("auto", "serial", "off")
DRAFTERS = ("auto", "lm", "eagle", "ngram", "hybrid")
SWITCHES = ("auto", "on", "off")
# What a draft checkpoint turned out to be; "" before it was looked at.
MODEL_KINDS = ("", "none", "lm", "eagle", "eagle3")
DEFAULT_DEPTH_CAP = 8


class FaserConfigError(ValueError):
    """A ``--faser-*`` value that cannot be served; the message names the allowed ones."""


@dataclasses.dataclass(frozen=True)
class FaserConfig:
    """Values of the ``--faser-*`` flags, checked at construction.

    ``depth`` is "auto" (what brings the most tokens for its time), "random" (tests), or a number
    of draft tokens for every request. ``stop`` and ``trim`` are on with depth auto, off with
    others, where they say auto. ``token_limit`` is in milliseconds. ``model_kind`` and ``profile``
    are no flags: the former start-up resolves once, and every process finds the same answer here;
    the latter ``python -m faser_sglang.profile`` sets, see ``worker/start_profile.Effort``. Raises
    FaserConfigError for any other value.
    """

    mode: str = "auto"
    depth: str = "auto"
    drafter: str = "auto"
    stop: str = "auto"
    trim: str = "auto"
    token_limit: float | None = None
    cost_table: str | None = None
    trace: str | None = None
    model_kind: str = dataclasses.field(default="", metadata={"is_flag": False})
    profile: dict[str, Any] | None = dataclasses.field(default=None, metadata={"is_flag": False})

    def __post_init__(self) -> None:
        object.__setattr__(self, "depth", str(self.depth))
        _check_choice("--faser-mode", self.mode, MODES)
        _check_choice("--faser-drafter", self.drafter, DRAFTERS)
        _check_choice("--faser-stop", self.stop, SWITCHES)
        _check_choice("--faser-trim", self.trim, SWITCHES)
        _check_choice("model_kind", self.model_kind, MODEL_KINDS)
        if self.depth not in ("auto", "random") and not _is_number(self.depth):
            raise FaserConfigError(
                f"--faser-depth is {self.depth!r}; it takes auto, random, or a number of tokens "
                "from 0 to --speculative-num-steps."
            )
        if self.token_limit is not None:
            object.__setattr__(self, "token_limit", _milliseconds(self.token_limit))

    @property
    def stops(self) -> bool:
        """Chains end where the drafter is not confident enough."""
        return self.stop == "on" or (self.stop == "auto" and self.depth == "auto")

    @property
    def trims(self) -> bool:
        """Drafts that are not worth their rows are not verified."""
        return self.trim == "on" or (self.trim == "auto" and self.depth == "auto")

    @property
    def token_limit_ms(self) -> float:
        return math.inf if self.token_limit is None else self.token_limit

    @property
    def looks_up(self) -> bool:
        """Drafts come from the text itself, where it repeats."""
        return self.drafter in ("ngram", "hybrid")

    @property
    def has_model(self) -> bool:
        """There is a draft model (a plain language model until start-up knows better)."""
        return self.drafter != "ngram" and self.model_kind != "none"

    @property
    def is_head(self) -> bool:
        """The draft model is an EAGLE or EAGLE3 head."""
        return self.has_model and self.model_kind in ("eagle", "eagle3")

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
    "depth": "Draft depth: auto (what brings the most tokens for its time, by acceptance, "
    "confidence and cost), a fixed number for every request, or random (tests).",
    "drafter": "What drafts: auto takes the kind from the draft checkpoint; lm is a language "
    "model with the target's vocabulary; eagle is an EAGLE or EAGLE3 head; ngram looks the text's "
    "end up in the text, without a model; hybrid does so where it finds three tokens or more, and "
    "may ask the draft model.",
    "stop": "End a chain of drafts where going on is not worth it, by the drafter's confidence. "
    "auto: on with depth auto.",
    "trim": "Withhold drafts from verification that are not worth their rows, by the drafter's "
    "confidence. auto: on with depth auto.",
    "token_limit": "Milliseconds that a round may take by prediction, which bounds what a request "
    "waits for its next token (depth auto).",
    "cost_table": "File of python -m faser_sglang.profile; measured briefly at start-up without.",
    "trace": "File to write a record of each round to, for replay.",
}
CHOICES: dict[str, tuple[str, ...]] = {
    "mode": MODES,
    "drafter": DRAFTERS,
    "stop": SWITCHES,
    "trim": SWITCHES,
}


def add_cli_args(parser: Any) -> None:
    """Add the ``--faser-*`` group to an argparse parser; a second call does nothing."""
    known = {option for action in parser._actions for option in action.option_strings}
    if "--faser-mode" in known:
        return
    group = parser.add_argument_group("FASER", "with --speculative-algorithm FASER")
    for field in _flags():
        group.add_argument(
            f"--faser-{field.name.replace('_', '-')}",
            default=None,
            choices=CHOICES.get(field.name),
            metavar=None if field.name in CHOICES else "VALUE",
            help=f"{HELP[field.name]} Default: {field.default}.",
        )


def take_cli_args(namespace: Any) -> None:
    """Write the values of a parsed command line to the carrier, replacing what it held."""
    given = {}
    for field in _flags():
        value = getattr(namespace, f"faser_{field.name}", None)
        if value is not None:
            given[field.name] = value
    _write(given)


def configure(**values: Any) -> FaserConfig:
    """Set ``--faser-*`` values for an Engine that this process starts next.

    Names are the flags' without the prefix: ``configure(depth=3)`` is ``--faser-depth 3``.
    Raises FaserConfigError for an unknown name or value. Without arguments: the defaults.
    """
    allowed = [field.name for field in _flags()]
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
    return _parse(os.environ.get(CARRIER) or "{}")


@functools.lru_cache(maxsize=8)
def _parse(text: str) -> FaserConfig:
    return FaserConfig(**json.loads(text))


def resolve_model_kind(kind: str) -> FaserConfig:
    """Record what the draft checkpoint is, for this process and those that it starts."""
    return _add({"model_kind": kind})


def ask_profile(**effort: Any) -> FaserConfig:
    """Let the next Engine of this process measure a cost table (``start_profile.Effort``)."""
    return _add({"profile": effort})


def _flags() -> list[dataclasses.Field]:
    fields = dataclasses.fields(FaserConfig)
    return [field for field in fields if field.metadata.get("is_flag", True)]


def _add(more: Mapping[str, Any]) -> FaserConfig:
    given = json.loads(os.environ.get(CARRIER) or "{}") | more
    config = FaserConfig(**given)
    _write(given)
    return config


def _write(given: Mapping[str, Any]) -> None:
    os.environ[CARRIER] = json.dumps(dict(given))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _milliseconds(value: Any) -> float:
    try:
        limit = float(value)
    except (TypeError, ValueError):
        limit = math.nan
    if not 0 < limit < math.inf:
        raise FaserConfigError(
            f"--faser-token-limit is {value!r}; it takes a number of milliseconds above 0."
        )
    return limit


def _check_choice(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise FaserConfigError(f"{flag} is {value!r}; it takes {', '.join(allowed)}.")
