"""Entry point ``sglang.srt.plugins``: registers FASER, and never vanishes silently.

SGLang logs and swallows whatever a plugin raises, after which the user would only see "unknown
speculative algorithm". So this module imports nothing but the standard library at its top, and
a failure while loading registers FASER as an algorithm whose use raises that failure.
"""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version

logger = logging.getLogger(__name__)

REQUIRED_SGLANG = "0.5.23"

_registered = False


class FaserLoadError(RuntimeError):
    """FASER was asked for, but its plugin could not load; the cause is the original error."""


def register() -> None:
    """Register the flags and the algorithm in this process; a second call does nothing."""
    global _registered
    if _registered:
        return
    _registered = True
    try:
        _check_version()
        from faser_sglang import hooks

        hooks.register_all()
        from faser_sglang.algorithm import register_algorithm

        register_algorithm()
    except Exception as error:
        logger.exception("FASER could not load; using it will raise this error.")
        _register_broken(error)


def installed_sglang() -> str:
    """Version of the installed SGLang, or "none"."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "none"


def _check_version() -> None:
    found = installed_sglang()
    if found != REQUIRED_SGLANG:
        raise FaserLoadError(
            f"faser-sglang needs sglang {REQUIRED_SGLANG}, found {found}; "
            f"run: pip install sglang=={REQUIRED_SGLANG}"
        )


def _register_broken(error: Exception) -> None:
    """Keep the name FASER known, so that asking for it raises ``error``."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import get_spec

    if get_spec("FASER") is not None:
        return

    def refuse(*_args: object) -> None:
        way_out = (
            ""
            if isinstance(error, FaserLoadError)
            else (" (python -m faser_sglang.doctor checks the environment)")
        )
        raise FaserLoadError(f"FASER could not load: {error}{way_out}") from error

    SpeculativeAlgorithm.register("FASER", supports_overlap=True, validate_server_args=refuse)(
        refuse
    )
    try:
        from faser_sglang import hooks

        hooks.register_flags()
    except Exception:
        logger.exception("FASER's flags could not be added.")
