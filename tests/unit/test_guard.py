"""A drafter that fails costs its requests their drafts, and nobody anything else."""

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from faser_sglang.control.rounds import LOOKUP, MODEL, offer_of
from faser_sglang.worker.agreement import Agreement
from faser_sglang.worker.drafter import Drafter, Drafts
from faser_sglang.worker.guard import GuardedDrafter

VOCAB, ROWS = 10, 6


class Drafting(Drafter):
    """Drafts what it is told; raises in the methods that it is told to raise in."""

    kind, context_len, draft_worker = "test", 99, None

    def __init__(
        self,
        tokens=((1, 2), (3, 4)),
        chances=((0.5, 0.5), (0.5, 0.5)),
        counts=(2, 2),
        raises=(),
    ):
        self.drafts = Drafts(torch.tensor(tokens), torch.tensor(chances), np.array(counts))
        self.raises = set(raises)
        self.calls = []

    def _called(self, name):
        self.calls.append(name)
        if name in self.raises:
            raise ValueError("no luck")

    def attach_pools(self, req_to_token_pool, slots):
        self._called("attach_pools")

    def prefill(self, batch, bonus, hidden, *, is_off):
        self._called("prefill")

    def offer(self, rows, lengths):
        self._called("offer")
        return offer_of(MODEL, np.full_like(lengths, 2), behind=np.arange(len(rows)))

    def draft(self, this_round):
        self._called("draft")
        return self.drafts

    def commit(self, this_round, window, verdict, hidden):
        self._called("commit")

    def finish(self, batch, row, end):
        self._called("finish")


def guarded(**how):
    alone = Agreement(SimpleNamespace(world_size=1))
    guard = GuardedDrafter(Drafting(**how), VOCAB, alone)
    guard.attach_pools(SimpleNamespace(req_to_token=torch.zeros(ROWS, 8)), 8)
    return guard


def a_round(rows=(4, 1), depths=(2, 2)):
    rows, depths = np.array(rows), np.array(depths)
    return SimpleNamespace(
        rows_cpu=rows,
        size=len(rows),
        max_depth=int(depths.max()),
        depths_cpu=depths,
        bonus=torch.zeros(len(rows), dtype=torch.int32),
    )


def limits(guard, rows=(4, 1, 2)):
    rows = np.array(rows)
    offer = guard.offer(rows, np.full_like(rows, 5))
    assert not offer.limits[LOOKUP].any()
    return offer.limits[MODEL].tolist()


def test_nothing_is_changed_while_all_is_well():
    guard = guarded()
    drafts = guard.draft(a_round())
    assert drafts.tokens.tolist() == [[1, 2], [3, 4]] and drafts.chances.tolist() == [[0.5] * 2] * 2
    assert drafts.counts.tolist() == [2, 2]
    offer = guard.offer(np.array([4, 1, 2]), np.full(3, 5))
    assert offer.behind.tolist() == [0, 1, 2]
    assert limits(guard) == [2, 2, 2] and guard.faults == 0


@pytest.mark.parametrize("token", [-1, VOCAB, 2**40])
def test_an_id_outside_the_vocabulary_bars_its_own_request(token, caplog):
    guard = guarded(tokens=((1, 2), (3, token)))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert guard.draft(a_round()).tokens.tolist() == [[1, 2], [3, 0]]
        assert limits(guard) == [2, 0, 2]
    assert guard.faults == 1
    assert len(caplog.records) == 1 and "draft_faults" in caplog.text


def test_a_probability_that_is_no_number_bars_its_own_request():
    guard = guarded(chances=((float("nan"), 0.5), (0.5, 0.5)))
    drafts = guard.draft(a_round())
    assert drafts.chances.tolist() == [[0, 0.5], [0.5, 0.5]] and drafts.tokens[0, 0] == 0
    assert limits(guard) == [0, 2, 2]


def test_what_lies_beyond_a_requests_drafts_may_be_anything():
    """Its depth, or the place where its chain was stopped."""
    nan = float("nan")
    guard = guarded(tokens=((1, -7), (3, 4)), chances=((0.5, nan), (0.5, 0.5)), counts=(1, 2))
    drafts = guard.draft(a_round())
    assert drafts.counts.tolist() == [1, 2]
    assert drafts.tokens[0].tolist() == [1, 0] and drafts.chances[0].tolist() == [0.5, 0]
    assert limits(guard) == [2, 2, 2] and guard.faults == 0


def test_a_draft_that_raises_bars_its_batch_and_yields_some_tokens(caplog):
    guard = guarded(raises=["draft"])
    with caplog.at_level(logging.WARNING):
        drafts = guard.draft(a_round())
        guard.draft(a_round())
    assert drafts.tokens.tolist() == [[0, 0], [0, 0]] and drafts.chances.tolist() == [[0, 0]] * 2
    assert drafts.counts.tolist() == [2, 2]
    assert limits(guard) == [0, 0, 2] and guard.faults == 2
    assert len(caplog.records) == 1 and caplog.records[0].exc_info is not None


def test_the_counts_of_a_failed_draft_are_not_the_rounds_own_depths():
    """The round's depths are rewritten by what is trimmed."""
    this_round = a_round(depths=(2, 1))
    counts = guarded(raises=["draft"]).draft(this_round).counts
    assert counts.tolist() == [2, 1] and counts is not this_round.depths_cpu


@pytest.mark.parametrize("method", ["prefill", "commit", "finish", "offer"])
def test_other_calls_that_raise_bar_their_requests(method):
    guard = guarded(raises=[method])
    batch = SimpleNamespace(req_pool_indices_cpu=torch.tensor([4, 1]))
    guard.prefill(batch, None, None, is_off=False)
    guard.commit(a_round(), None, None, None)
    guard.finish(None, 2, 3)
    expected = {"prefill": [0, 0, 2], "commit": [0, 0, 2], "finish": [2, 2, 0]}
    assert limits(guard) == expected.get(method, [0, 0, 0])


def test_a_new_request_on_a_row_drafts_again():
    guard = guarded(tokens=((1, 2), (3, -1)))
    guard.draft(a_round())
    batch = SimpleNamespace(req_pool_indices_cpu=torch.tensor([1]))
    guard.prefill(batch, None, None, is_off=False)
    assert limits(guard) == [2, 2, 2] and guard.faults == 1


def test_a_barred_request_is_not_finished_by_the_drafter():
    guard = guarded(tokens=((-1, 2), (3, 4)))
    guard.draft(a_round())
    limits(guard)
    guard.finish(None, 4, 3)
    guard.finish(None, 1, 3)
    assert guard.drafter.calls.count("finish") == 1


def test_start_up_errors_are_not_caught():
    with pytest.raises(ValueError, match="no luck"):
        guarded(raises=["attach_pools"])
