"""The account of rounds, for the server and for each request.

Kept on the host when the scheduler reads a round's result, so it costs no wait for the device.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from faser_sglang.control.metrics import Account, RoundCounters
from faser_sglang.control.types import IntArray
from faser_sglang.request_params import KEY

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


class Receipt:
    """A request's account as SGLang's ``customized_info`` wants it: a value for any tokens."""

    def __init__(self) -> None:
        self.account = Account()

    def __getitem__(self, _tokens: Any) -> list[dict[str, Any]]:
        return [self.account.snapshot()]


class _Unread(NamedTuple):
    batch: ScheduleBatch
    reqs: list[Req]
    drafted: IntArray
    verified: IntArray


class Ledger:
    """Counts rounds, in the order in which they ran and are read."""

    def __init__(self) -> None:
        self.counters = RoundCounters()
        self._unread: deque[_Unread] = deque()
        self._read: _Unread | None = None  # the round that is being read
        self._being_read: dict[str, Req] = {}
        self.interval = (0, 0)  # accepted and verified since SGLang's last report

    @property
    def last_verified(self) -> int:
        """Drafts verified in the round that is being read."""
        return 0 if self._read is None else int(self._read.verified.sum())

    def begin(self, reqs: list[Req]) -> None:
        """Requests were prefilled; one that was retracted keeps its account."""
        for req in reqs:
            if req.customized_info is None:
                req.customized_info = {}
            req.customized_info.setdefault(KEY, Receipt())

    def note_round(self, batch: ScheduleBatch, drafted: IntArray, verified: IntArray) -> None:
        """A round has run; [n] each."""
        self._unread.append(_Unread(batch, list(batch.reqs), drafted, verified))

    def read(self, accepted: list[int]) -> None:
        """The accepted drafts [n] of the oldest round whose result was not read."""
        self._read = self._unread.popleft()
        self._being_read = {req.rid: req for req in self._read.reqs}
        self.counters.passes += 1
        rounds = zip(
            self._read.reqs,
            self._read.drafted.tolist(),
            self._read.verified.tolist(),
            accepted,
            strict=True,
        )
        for req, drafted, verified, right in rounds:
            if req.finished() or req.is_retracted:
                self.counters.add_overshoot(right)
            else:
                self.counters.add(drafted, verified, right)
                req.customized_info[KEY].account.add(drafted, verified, right)

    def finish(self, rid: str) -> tuple[ScheduleBatch, Req] | None:
        """A request of the round being read ended: its round's batch and itself.

        What lies behind its end is cut. None where the request is not of that round.
        """
        req = self._being_read.get(rid)
        if req is None:
            return None
        if req.finished_len is not None:
            cut = len(req.output_ids) - req.finished_len
            self.counters.cut += cut
            req.customized_info[KEY].account.cut += cut
        return self._read.batch, req
