"""What a request may ask of FASER: ``custom_params: {"faser": {"max_depth": n}}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEY = "faser"


def max_depth(custom_params: Mapping[str, Any] | None, cap: int) -> int:
    """The deepest draft that a request admits; ``cap`` where it says nothing.

    Raises ValueError, with what is allowed, for anything else than a depth from 0 to ``cap``.
    """
    asked = (custom_params or {}).get(KEY)
    if asked is None:
        return cap
    if not isinstance(asked, Mapping) or set(asked) - {"max_depth"}:
        raise ValueError(
            f'custom_params["faser"] is {asked!r}; it takes {{"max_depth": n}} and nothing else.'
        )
    depth = asked.get("max_depth", cap)
    if isinstance(depth, bool) or not isinstance(depth, int) or not 0 <= depth <= cap:
        raise ValueError(
            f'custom_params["faser"]["max_depth"] is {depth!r}; it takes a whole number from 0 to '
            f"{cap} (--speculative-num-steps)."
        )
    return depth
