"""Which policy the configuration asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from faser_sglang.control.controller import Settings
from faser_sglang.control.policy import FixedDepth, RandomDepth

if TYPE_CHECKING:
    from faser_sglang.config import FaserConfig
    from faser_sglang.control.rounds import Policy


def needs_table(config: FaserConfig) -> bool:
    """Whether rounds are planned by what they cost, which is the controller's work."""
    return config.depth != "random" and (config.depth == "auto" or config.stops or config.trims)


def settings_of(config: FaserConfig) -> Settings:
    """What the controller may decide."""
    return Settings(
        depth=config.fixed_depth,
        stops=config.stops,
        trims=config.trims,
        token_limit_ms=config.token_limit_ms,
    )


def make_policy(config: FaserConfig, cap: int, seed: int) -> Policy:
    """The policy of a configuration that asks for no controller."""
    if config.depth == "random":
        return RandomDepth(cap, seed, stops=config.stops, trims=config.trims)
    return FixedDepth(int(config.depth))
