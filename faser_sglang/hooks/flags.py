"""Adds ``--faser-*`` to SGLang's command line and keeps what was given.

SGLang: ``ServerArgs.add_cli_args(parser)`` and ``ServerArgs.from_cli_args(args) -> ServerArgs``,
which drops the names that are no fields of its own. Ours run after each.
"""

from __future__ import annotations

from typing import Any

from faser_sglang import config
from faser_sglang.compat import HookType
from faser_sglang.hooks import Hook

_MODULE = "sglang.srt.server_args"


def _add(_result: None, parser: Any) -> None:
    config.add_cli_args(parser)


def _take(_result: Any, _cls: type, namespace: Any) -> None:
    config.take_cli_args(namespace)


HOOKS = (
    Hook(f"{_MODULE}.ServerArgs.add_cli_args", _MODULE, _add, HookType.AFTER, ("launcher",)),
    Hook(f"{_MODULE}.ServerArgs.from_cli_args", _MODULE, _take, HookType.AFTER, ("launcher",)),
)
