"""What attention needs to know about a pass, computed once for all layers.

A pass is a packed batch: request i brings ``q_lens[i]`` query rows, the last of its
``kv_lens[i]`` cached tokens. Requests of similar shape form a group, padded to its longest
member, and each layer runs one gather and one SDPA call a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

# What a call takes beside its work, and what reading a cached token takes: as many products of a
# query row and a cached token take as long (fitted on two cores with AVX-512; about 90 us a call).
CALL, READ = 4500, 4
MAX_SEGMENT_ROWS = 256


@dataclass
class Group:
    """``size`` requests padded to ``q_len`` query rows and ``kv_len`` cached tokens each.

    ``q_rows`` [size * q_len] picks packed query rows (None: they are the whole batch in order);
    ``out_rows`` and ``out_from`` say which padded rows go back where (None: all, in order).
    ``kv_slots`` [size * kv_len] are pool slots, or ``kv_start`` is the first of a dense run.
    """

    q_lens: torch.Tensor
    kv_lens: torch.Tensor
    q_len: int
    kv_len: int
    q_rows: torch.Tensor | None
    out_rows: torch.Tensor | None
    out_from: torch.Tensor | None
    kv_slots: torch.Tensor | None
    kv_start: int
    _masks: dict[tuple, torch.Tensor | None] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.q_lens.numel()

    def extended(self, slots: torch.Tensor) -> Group:
        """The next decode step of the same requests: ``slots`` [size] hold one token more each."""
        kv_lens, kv_len = self.kv_lens + 1, self.kv_len + 1
        is_dense = self.kv_slots is None and int(slots[0]) == self.kv_start + self.kv_len
        table = None
        if not is_dense:
            known = self.kv_slots
            if known is None:
                known = torch.arange(self.kv_start, self.kv_start + self.kv_len)
            table = known.new_empty(self.size, kv_len)
            table[:, :-1] = known.view(self.size, -1)
            table[:, -1] = slots  # of the longest; for the others padding that a mask covers
            table[torch.arange(self.size), kv_lens - 1] = slots
            table = table.view(-1)
        return replace(self, kv_lens=kv_lens, kv_len=kv_len, kv_slots=table, _masks={})

    def mask(
        self, heads_per_group: int, window: int | None, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Additive mask [size, 1, heads_per_group * q_len, kv_len], or None if all is seen.

        Row r of request i sits at position kv_len_i - q_len_i + r and sees the positions up to
        its own, the last ``window`` + 1 of them where a window is given.
        """
        key = (heads_per_group, window, dtype)
        if key not in self._masks:
            self._masks[key] = self._build_mask(*key)
        return self._masks[key]

    def _build_mask(
        self, heads_per_group: int, window: int | None, dtype: torch.dtype
    ) -> torch.Tensor | None:
        columns = torch.arange(self.kv_len)
        rows = (self.kv_lens - self.q_lens)[:, None] + torch.arange(self.q_len)
        # A padded query row must see something, or its softmax is NaN: it sees all that is real.
        rows = torch.minimum(rows, self.kv_lens[:, None] - 1)[:, :, None]
        seen = columns <= rows  # [size, q_len, kv_len]
        if window is not None:
            seen = seen & (columns >= rows - window)
        if bool(seen.all()):
            return None
        mask = torch.zeros(self.size, self.q_len, self.kv_len, dtype=dtype)
        mask.masked_fill_(~seen, float("-inf"))
        return mask.repeat(1, heads_per_group, 1).unsqueeze(1)


class Window(NamedTuple):
    """Of a long text, a row sees its first ``sink`` tokens and the ``recent`` before it."""

    recent: int
    sink: int


class Segment(NamedTuple):
    """Rows ``row`` .. ``row + q_len`` of the packed pass, the last of ``kv_len`` tokens.

    Of the request's tokens, ``skipped`` behind a window's sink are left out.
    """

    request: int
    row: int
    q_len: int
    kv_len: int
    skipped: int = 0


def make_groups(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    window: Window | None = None,
) -> list[Group]:
    """Groups of a packed pass over CPU tensors.

    Args:
        q_lens, kv_lens: per request, kv_lens[i] >= q_lens[i] >= 0 with the queries included;
            requests without rows are left out.
        req_to_token: [pool rows, tokens] slots. req_pool_indices: [requests].
        window: what the first row of a segment sees; the rows behind it see as much and the
            rows between. None: all.
    """
    segments = split(q_lens, kv_lens, window)
    return [
        _make_group(
            members, sum(q_lens), req_to_token, req_pool_indices, window.sink if window else 0
        )
        for members in partition(segments)
    ]


def split(
    q_lens: Sequence[int], kv_lens: Sequence[int], window: Window | None = None
) -> list[Segment]:
    """Segments of every request: a long prompt becomes several, each sees only what is before.

    That bounds the masks and skips the upper triangle of the attention.
    """
    segments = []
    row = 0
    for i, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        for done in range(0, q_len, MAX_SEGMENT_ROWS):
            rows = min(MAX_SEGMENT_ROWS, q_len - done)
            seen = kv_len - q_len + done + rows
            kept = seen if window is None else min(seen, sum(window) + rows)
            segments.append(Segment(i, row + done, rows, kept, seen - kept))
        row += q_len
    return segments


def partition(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Group the segments whose padding costs less than another call; packed order inside."""
    groups: list[list[Segment]] = []
    for segment in sorted(segments, key=lambda s: (-s.q_len, -s.kv_len)):
        if groups and _is_worth_padding([*groups[-1], segment]):
            groups[-1].append(segment)
        else:
            groups.append([segment])
    return [sorted(group, key=lambda s: s.row) for group in groups]


def _is_worth_padding(group: list[Segment]) -> bool:
    """What padding wastes is less than what another gather and SDPA call take."""
    padded = len(group) * _work(max(s.q_len for s in group), max(s.kv_len for s in group))
    return padded - sum(_work(s.q_len, s.kv_len) for s in group) <= CALL


def _work(q_len: int, kv_len: int) -> int:
    return kv_len * (READ + q_len)


def _make_group(
    members: list[Segment],
    total_rows: int,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    sink: int,
) -> Group:
    requests, first, q, kv, skipped = torch.tensor(members).unbind(1)
    q_len, kv_len = int(q.max()), int(kv.max())
    q_rows = out_rows = out_from = None
    is_whole_batch = len(members) * q_len == int(q.sum()) == total_rows
    if not is_whole_batch:
        offsets = torch.arange(q_len)
        q_rows = (first[:, None] + torch.minimum(offsets, (q - 1)[:, None])).reshape(-1)
        out_from = (offsets < q[:, None]).reshape(-1).nonzero().squeeze(1)
        out_rows = q_rows[out_from]
    columns = torch.minimum(torch.arange(kv_len), (kv - 1)[:, None])
    if bool(skipped.any()):
        columns = columns + torch.where(columns >= sink, skipped[:, None], 0)
    slots = req_to_token[req_pool_indices[requests].long()[:, None], columns].reshape(-1).long()
    is_dense = len(members) == 1 and _is_run(slots)
    return Group(
        q_lens=q,
        kv_lens=kv,
        q_len=q_len,
        kv_len=kv_len,
        q_rows=q_rows,
        out_rows=out_rows,
        out_from=out_from,
        kv_slots=None if is_dense else slots,
        kv_start=int(slots[0]) if is_dense else -1,
    )


def _is_run(slots: torch.Tensor) -> bool:
    return bool((slots[1:] - slots[:-1] == 1).all())
