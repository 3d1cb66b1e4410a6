"""Requests of made-up prompts, run through the worker without a scheduler."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.sampling.sampling_params import SamplingParams

from faser_sglang.control.types import IntArray

if TYPE_CHECKING:
    from faser_sglang.worker.faser_worker import FaserWorker

PREFILL = 2048  # tokens at once


class MadeUpRequests:
    """Batches that hold slots of the pool like any others, and give all of them back."""

    def __init__(self, worker: FaserWorker) -> None:
        self.worker = worker
        self.allocator = worker.token_to_kv_pool_allocator
        self.tree = RadixCache(
            CacheInitParams(
                disable=True,
                req_to_token_pool=worker.req_to_token_pool,
                token_to_kv_pool_allocator=self.allocator,
                page_size=self.allocator.page_size,
            )
        )
        self.random = np.random.default_rng(0)

    def begin(self, size: int, tokens: int) -> ScheduleBatch:
        """``size`` new requests, by prefills that no server is too small for."""
        piece = max(PREFILL // tokens, 1)
        batch = self._prefill(min(size, piece), tokens)
        while batch.batch_size() < size:
            batch.merge_batch(self._prefill(min(size - batch.batch_size(), piece), tokens))
        return batch

    def run(self, batch: ScheduleBatch) -> None:
        """A decode round."""
        batch.prepare_for_decode()
        result = self.worker.forward_batch_generation(batch)
        batch.spec_info = result.next_draft_input
        batch.seq_lens = result.new_seq_lens
        batch.seq_lens_cpu = result.new_seq_lens.to("cpu")
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        emitted = result.accept_lens.cpu().numpy()
        self._note(batch, result.next_token_ids.reshape(len(batch.reqs), -1), emitted)

    def _note(self, batch: ScheduleBatch, tokens: Any, emitted: IntArray) -> None:
        """What SGLang's scheduler writes into requests when it reads a result."""
        for req, row, count in zip(batch.reqs, tokens.tolist(), emitted.tolist(), strict=True):
            req.output_ids.extend(row[: max(count, 1)])
            req.kv.kv_committed_len += count

    def release(self, batch: ScheduleBatch) -> None:
        """Their slots go back to the pool."""
        for req in batch.reqs:
            release_kv_cache(req, self.tree, checkpoint=False)

    def _prefill(self, count: int, tokens: int) -> ScheduleBatch:
        """``count`` new requests of made-up prompts."""
        worker = self.worker
        config = worker.target_worker.model_runner.model_config
        reqs = []
        for number in range(count):
            params = SamplingParams(max_new_tokens=worker.context_len, temperature=0.0)
            params.ignore_eos = True
            params.normalize(None)
            ids = self.random.integers(0, config.vocab_size, tokens)
            req = Req(f"faser-profile-{number}", "", array("q", ids.tolist()), params)
            req.full_untruncated_fill_ids = req.origin_input_ids
            req.logprob_start_len = -1
            req.extend_end = tokens
            reqs.append(req)
        batch = ScheduleBatch.init_new(
            reqs,
            worker.req_to_token_pool,
            self.allocator,
            self.tree,
            config,
            enable_overlap=False,
            spec_algorithm=worker.target_worker.model_runner.spec_algorithm,
        )
        batch.prepare_for_extend()
        batch.input_ids = batch.prefill_input_ids_cpu.to(batch.device)
        batch.prefill_input_ids_cpu = None
        result = worker.forward_batch_generation(batch)
        batch.spec_info = result.next_draft_input
        batch.input_ids = None
        self._note(batch, result.next_token_ids[:, None], np.zeros(count, np.int64))
        return batch
