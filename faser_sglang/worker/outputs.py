"""What a row of a window must know of its request's output: penalties, minimum length, text.

SGLang accumulates penalties a token a round, for the newest token that the host has read. A
window needs them at every row: over the committed output, which may be ahead of the host, and the
drafts before the row. So the output of every request that asks for any of it is recorded on the
device, and the terms of a window are built from that record, anew each round: nothing has to
follow the batch as it is filtered, merged or retracted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from faser_sglang.control.types import IntArray

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from faser_sglang.worker.packing import Round


# Frequency, presence and repetition of a request that asks for none.
NO_PENALTIES = np.array([[0.0], [0.0], [1.0]])


class LogitTerms(NamedTuple):
    """What SGLang adds to logits, and then scales them by (see its SamplingBatchInfo)."""

    additive: torch.Tensor  # [rows, vocabulary]
    scaling: torch.Tensor | None  # [rows, vocabulary]


class OutputRecord:
    """Output tokens of the running requests that ask for penalties or custom logit processors.

    Args:
        width: positions a request can have. vocab_size: columns of the logits.
    """

    def __init__(
        self, pool_rows: int, width: int, vocab_size: int, device: torch.device | str
    ) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self._shape = (pool_rows, width)
        self._tokens: torch.Tensor | None = None  # by pool row and position; made when asked for
        self._is_kept = np.zeros(pool_rows, np.bool_)
        self._is_penalised = np.zeros(pool_rows, np.bool_)
        self._prompt: IntArray = np.zeros(pool_rows, np.int64)
        # Frequency, presence and repetition penalty of each row of the pool.
        self._penalties = np.zeros((3, pool_rows), np.float32)
        self._least: IntArray = np.zeros(pool_rows, np.int64)
        self._stop_ids: dict[int, list[int]] = {}

    def begin(self, batch: ScheduleBatch) -> None:
        """New or resumed requests, before the target runs their prefill."""
        rows = batch.req_pool_indices_cpu.tolist()
        for row, req in zip(rows, batch.reqs, strict=True):
            params = req.sampling_params
            penalties = np.array(
                [params.frequency_penalty, params.presence_penalty, params.repetition_penalty]
            )
            is_penalised = (penalties != NO_PENALTIES[:, 0]).any() or params.min_new_tokens > 0
            self._is_penalised[row] = is_penalised
            self._is_kept[row] = is_penalised or bool(req.custom_logit_processor)
            if not self._is_kept[row]:
                continue
            self._prompt[row] = len(req.origin_input_ids)
            self._penalties[:, row] = penalties
            self._least[row] = params.min_new_tokens
            if params.min_new_tokens > 0:
                self._stop_ids[row] = _stop_ids(req)
            if req.output_ids:  # it was retracted
                self._write(row, self._prompt[row], list(req.output_ids))

    def note_bonus(self, batch: ScheduleBatch, bonus: torch.Tensor) -> None:
        """A prefill sampled ``bonus`` [n], behind what it ran."""
        rows = batch.req_pool_indices_cpu.numpy()
        members = np.flatnonzero(self._is_kept[rows])
        if members.size:
            ends = np.asarray(batch.prefix_lens, np.int64) + np.asarray(batch.extend_lens, np.int64)
            kept = self._on_device(members)
            self._table()[self._on_device(rows[members]), self._on_device(ends[members])] = bonus[
                kept
            ].to(torch.int64)

    def commit(self, this_round: Round, tokens: torch.Tensor) -> None:
        """Record the tokens [n, width] of a verdict; later rounds overwrite the rejected ones."""
        members = np.flatnonzero(self._is_kept[this_round.rows_cpu])
        if members.size:
            starts = this_round.lengths_cpu[members, None] + 1
            columns = starts + np.arange(tokens.shape[1])
            rows = np.broadcast_to(this_round.rows_cpu[members, None], columns.shape)
            self._table()[self._on_device(rows), self._on_device(columns)] = tokens[
                self._on_device(members)
            ].to(torch.int64)

    def has_penalties(self, rows_cpu: IntArray) -> bool:
        """Whether any request of these rows of the pool asks for a penalty or minimum length."""
        return bool(self._is_penalised[rows_cpu].any())

    def terms(
        self,
        rows_cpu: IntArray,
        ends_cpu: IntArray,
        owners: torch.Tensor,
        offsets: torch.Tensor,
        drafts: torch.Tensor | None,
        counts_cpu: IntArray,
    ) -> LogitTerms:
        """Terms of packed rows that each follow the first ``offsets`` drafts of their request.

        Args:
            rows_cpu, ends_cpu: [n] rows of the pool, and the position behind the output so far.
            owners, offsets: [rows]. drafts: [n, depth] or None. counts_cpu: [n] rows of each.
        """
        asks = self._is_penalised[rows_cpu]
        lengths = np.where(asks, np.maximum(ends_cpu - self._prompt[rows_cpu], 0), 0)
        frequency, presence, repetition = np.where(
            asks, self._penalties[:, rows_cpu], NO_PENALTIES
        ).astype(np.float32)
        additive, seen = self._past(rows_cpu, lengths, self._on_device(frequency))
        additive, seen = additive[owners], seen[owners]
        if drafts is not None:
            places = torch.arange(drafts.shape[1], device=self.device)
            before = places < offsets[:, None]
            ids = torch.where(before, drafts[owners].to(torch.int64), self.vocab_size)
            weight = -self._on_device(frequency)[owners, None]
            additive.scatter_add_(1, ids, weight.expand(ids.shape).contiguous())
            seen.scatter_(1, ids, True)
        additive, seen = additive[:, : self.vocab_size], seen[:, : self.vocab_size]
        if presence.any():
            additive = additive - self._on_device(presence)[owners, None] * seen
        scaling = None
        if (repetition != 1.0).any():
            scaling = torch.where(seen, self._on_device(repetition)[owners, None], 1.0)
        return LogitTerms(self._forbid_stops(additive, rows_cpu, lengths, counts_cpu), scaling)

    def known_output(self, row: int, end: int) -> list[int]:
        """Output of the request on ``row`` up to position ``end``; the host waits for it."""
        return self._table()[row, int(self._prompt[row]) : end].tolist()

    def _past(
        self, rows_cpu: IntArray, lengths: IntArray, frequency: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Frequency penalties of the output [n, vocabulary + 1], and which ids occur in it."""
        shape = (len(rows_cpu), self.vocab_size + 1)
        additive = torch.zeros(shape, dtype=torch.float32, device=self.device)
        seen = torch.zeros(shape, dtype=torch.bool, device=self.device)
        longest = int(lengths.max(initial=0))
        if longest:
            places = np.arange(longest)
            columns = np.minimum(self._prompt[rows_cpu, None] + places, self._shape[1] - 1)
            rows = np.broadcast_to(rows_cpu[:, None], columns.shape)
            ids = self._table()[self._on_device(rows), self._on_device(columns)]
            ids = torch.where(self._on_device(places < lengths[:, None]), ids, self.vocab_size)
            # One addition a token, as SGLang does it: the same rounding.
            additive.scatter_add_(1, ids, -frequency[:, None].expand(ids.shape).contiguous())
            seen.scatter_(1, ids, True)
        return additive, seen

    def _forbid_stops(
        self, additive: torch.Tensor, rows_cpu: IntArray, lengths: IntArray, counts_cpu: IntArray
    ) -> torch.Tensor:
        """Forbid the stop tokens at rows that come before the minimum length."""
        missing = np.where(self._is_penalised[rows_cpu], self._least[rows_cpu] - lengths, 0)
        starts = np.cumsum(counts_cpu) - counts_cpu
        rows, ids = [], []
        for i in np.flatnonzero(missing > 0):
            stops = self._stop_ids[int(rows_cpu[i])]
            for row in range(int(starts[i]), int(starts[i] + min(missing[i], counts_cpu[i]))):
                rows += [row] * len(stops)
                ids += stops
        if rows:
            places = (self._on_device(np.array(rows)), self._on_device(np.array(ids)))
            additive = additive.index_put(places, additive.new_tensor(-torch.inf))
        return additive

    def _write(self, row: int, start: int, tokens: list[int]) -> None:
        self._table()[row, start : start + len(tokens)] = torch.tensor(tokens, device=self.device)

    def _table(self) -> torch.Tensor:
        if self._tokens is None:
            self._tokens = torch.zeros(self._shape, dtype=torch.int64, device=self.device)
        return self._tokens

    def _on_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)


def _stop_ids(req: Req) -> list[int]:
    """The tokens that end a request, as SGLang's minimum-length penalty counts them."""
    tokenizer = req.tokenizer
    ids = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    ids |= set(tokenizer.additional_stop_token_ids or ()) | {tokenizer.eos_token_id}
    return sorted(ids - {None})
