"""FASER as SGLang sees it: a registered algorithm with its argument resolution.

Resolution runs once, in the launching process; what it writes travels with SGLang's arguments.
Every other process gets the same answers of ``is_*`` from this class.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec

from faser_sglang import config
from faser_sglang.compat import ALGORITHM

logger = logging.getLogger(__name__)

DEFAULT_MAX_RUNNING_REQUESTS = 48


class FaserAlgorithm(CustomSpecAlgo):
    """Answers SGLang's questions; the draft checkpoint's kind decides, in every process alike.

    ``is_standalone`` (a language model) makes SGLang size the draft's KV, load its config, keep
    plain radix keys and capture no hidden states. ``is_eagle`` (a head) adds radix keys of token
    pairs, as a head's slot depends on the token behind it; ``is_eagle3`` the target's inner
    layers. Lookup alone has no draft KV and none of these.
    """

    def is_standalone(self) -> bool:
        settings = config.load()
        return settings.has_model and not settings.is_head

    def is_eagle(self) -> bool:
        return config.load().is_head

    def is_eagle3(self) -> bool:
        settings = config.load()
        return settings.is_head and settings.model_kind == "eagle3"

    def has_draft_kv(self) -> bool:
        return config.load().has_model

    def need_topk(self) -> bool:
        return False  # nothing but the bonus token is relayed between rounds

    def supports_grammar_overlap(self) -> bool:
        return True  # the verifier lets the scheduler advance grammars behind the target's pass

    def carries_draft_hidden_states(self) -> bool:
        return False

    def get_platform_worker_cls(self) -> None:
        return None

    # SGLang's own builder; it asks nothing but the methods of this class.
    create_future_map = SpeculativeAlgorithm.create_future_map

    def handle_server_args(self, server_args: Any) -> None:
        """Fill in what follows from FASER: depth cap, width, limits. Writes are declared."""
        args = server_args
        args.speculative_num_steps = depth_cap(args)
        args.speculative_eagle_topk = 1
        args.speculative_num_draft_tokens = args.speculative_num_steps + 1
        config.load().check_cap(args.speculative_num_steps)
        if args.max_running_requests is None:
            args.max_running_requests = DEFAULT_MAX_RUNNING_REQUESTS
            logger.info(
                "FASER: --max-running-requests is unset, using %d.", DEFAULT_MAX_RUNNING_REQUESTS
            )
        if args.enable_mixed_chunk:
            args.enable_mixed_chunk = False  # flags.py warns of it
        _disable_decode_graphs(args)


def depth_cap(args: Any) -> int:
    """The largest draft depth: ``--speculative-num-steps``, else 8."""
    steps = args.speculative_num_steps
    return config.DEFAULT_DEPTH_CAP if steps is None else int(steps)


def register_algorithm() -> None:
    """Register FASER with SGLang; a second call does nothing."""
    if get_spec(ALGORITHM) is not None:
        return

    from faser_sglang.validation import validate

    logging.getLogger("sglang.srt.arg_groups.speculative_hook").addFilter(keeps_warning)

    @SpeculativeAlgorithm.register(
        ALGORITHM,
        supports_overlap=True,
        validate_server_args=validate,
        spec_class=FaserAlgorithm,
    )
    def worker_class(_server_args: Any) -> type:
        from faser_sglang import hooks
        from faser_sglang.worker.faser_worker import FaserWorker

        hooks.install("scheduler")
        return FaserWorker


def keeps_warning(record: logging.LogRecord) -> bool:
    """Drops SGLang's warning that a draft window has no effect with an algorithm of a plugin.

    It comes before ``validate``, which refuses the window where nothing would honour it.
    """
    is_of_window = "--speculative-draft-window-size has no effect" in str(record.msg)
    return not (is_of_window and record.args == (ALGORITHM,))


def _disable_decode_graphs(args: Any) -> None:
    """CUDA graphs of a ragged verification are not built yet: run it eagerly, and say so.

    SGLang would capture graphs of a uniform width, which a ragged batch could enter silently.
    """
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    graphs = args.cuda_graph_config
    if graphs is None or graphs.decode.backend == Backend.DISABLED:
        return
    args.cuda_graph_config = with_phase(graphs, Phase.DECODE, backend=Backend.DISABLED)
    if str(args.device).startswith("cuda"):
        logger.warning("FASER verifies without CUDA graphs for now; decode graphs are off.")
