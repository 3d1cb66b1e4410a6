"""Puts each request's account into its ``meta_info``, under ``faser``.

SGLang: ``TokenizerManager.update_request_meta_info(self, meta_info, state, customized_info,
index, finish_reason)`` collects what the scheduler reports beside tokens in a list that grows with
them; ours keeps the latest account alone. ``_calculate_spec_decoding_metrics(self, meta_info,
recv_obj, i)`` comes later and takes every round for one of the largest depth; ours puts
``spec_accept_rate`` and ``spec_num_proposed_drafts`` right.
"""

from __future__ import annotations

from typing import Any

from faser_sglang.compat import HookType
from faser_sglang.hooks import Hook
from faser_sglang.request_params import KEY

_MODULE = "sglang.srt.managers.tokenizer_manager"


def _keep_latest(_result: None, _manager: Any, meta_info: dict, state: Any, *_: Any, **__: Any):
    if KEY not in meta_info:
        return
    accounts = [account for account in meta_info.pop(KEY) if account is not None]
    # Chunks of a stream are cut and joined by the keys of these: ours is no list.
    state.customized_info_accumulated.pop(KEY)
    state.customized_info_reported_keys.discard(KEY)
    if accounts:
        meta_info[KEY] = accounts[-1]


def _correct(_result: None, _manager: Any, meta_info: dict, *_: Any, **__: Any) -> None:
    account = meta_info.get(KEY)
    if account is not None and "spec_accept_rate" in meta_info:
        meta_info["spec_num_proposed_drafts"] = account["verified"]
        meta_info["spec_accept_rate"] = account["accepted"] / max(account["verified"], 1)


HOOKS = tuple(
    Hook(f"{_MODULE}.TokenizerManager.{method}", _MODULE, ours, HookType.AFTER, ("launcher",))
    for method, ours in (
        ("update_request_meta_info", _keep_latest),
        ("_calculate_spec_decoding_metrics", _correct),
    )
)
