"""Chains that a plan stops: whoever goes on drafts what it would have drafted anyway."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_sglang.control.rounds import MODEL, FixedPlan
from faser_sglang.worker.chain import ChainDrafter, Step
from tests.support.rounds import make_round

CAP = 5
checked = settings(deadline=None, derandomize=True, max_examples=100)


def after(token, row, position):
    """The draft behind ``token`` of the request on ``row``, which is unlike any other."""
    return (token * 31 + row * 7 + position * 3 + 1) % 1009


def sure(token):
    return (token % 97 + 1) / 100


class Chain(ChainDrafter):
    """Drafts by arithmetic; each pass is noted as the requests in it."""

    kind = "test"

    def __init__(self, with_state):
        config = SimpleNamespace(context_len=99)
        super().__init__(SimpleNamespace(draft_runner=SimpleNamespace(model_config=config)))
        self.with_state = with_state
        self.members = []

    def _first_step(self, this_round, members, rows):
        return self._drafted(members, rows, this_round.bonus[members], this_round, 0)

    def _step(self, this_round, members, rows, tokens, state, step):
        assert (state is None) != self.with_state
        if self.with_state:  # what the step before left, of these requests
            assert state.tolist() == [[float(token)] for token in tokens]
        return self._drafted(members, rows, tokens, this_round, step)

    def _drafted(self, members, rows, tokens, this_round, step):
        assert rows.tolist() == this_round.rows_cpu[members].tolist()
        assert len(tokens) == len(members)
        self.members.append(members.tolist())
        positions = (this_round.lengths_cpu[members] + step).tolist()
        said = [after(*of) for of in zip(tokens.tolist(), rows.tolist(), positions, strict=True)]
        state = torch.tensor(said, dtype=torch.float32)[:, None] if self.with_state else None
        return Step(torch.tensor(said), torch.tensor([sure(token) for token in said]), state)

    prefill = offer = commit = None


Chain.__abstractmethods__ = frozenset()


class Stopping(FixedPlan):
    """Requests draft ``wanted`` tokens, as far as the plan is asked; what it saw is noted."""

    stops = True

    def __init__(self, depths, wanted):
        super().__init__(depths, np.full_like(depths, MODEL))
        self.wanted = np.array(wanted)
        self.seen = []

    def goes_on(self, members, chances):
        assert chances.dtype == np.float64 and len(chances) == len(members)
        self.seen.append((members.tolist(), chances.tolist()))
        return self.wanted[members] > chances.shape[1]


def draft(depths, wanted=None, with_state=False):
    """The drafts of requests on rows 10, 11, … of a plan that stops them, or of one that does not.

    With the chain itself and its plan.
    """
    depths = np.array(depths)
    rows = 10 + np.arange(len(depths))
    plan = None if wanted is None else Stopping(depths, wanted)
    this_round = make_round(rows, 20 + rows, 100 * rows, depths, plan=plan)
    chain = Chain(with_state)
    return chain.draft(this_round), chain, plan


requests = st.lists(
    st.tuples(st.integers(0, CAP), st.integers(1, CAP + 1)), min_size=1, max_size=6
).filter(lambda drawn: any(depth for depth, _ in drawn))


@given(requests, st.booleans())
@checked
def test_a_stopped_request_keeps_its_count_and_the_others_their_tokens(drawn, with_state):
    depths, wanted = zip(*drawn, strict=True)
    whole, *_ = draft(depths, with_state=with_state)
    stopped, *_ = draft(depths, wanted, with_state)
    assert whole.counts.tolist() == list(depths)
    assert stopped.counts.tolist() == list(map(min, depths, wanted))
    for i, count in enumerate(stopped.counts):
        assert torch.equal(stopped.tokens[i, :count], whole.tokens[i, :count])
        assert torch.equal(stopped.chances[i, :count], whole.chances[i, :count])


@given(requests, st.booleans())
@checked
def test_a_pass_runs_those_that_want_another_draft_and_no_stopped_request(drawn, with_state):
    depths, wanted = zip(*drawn, strict=True)
    counts = np.minimum(depths, wanted)
    _, chain, _ = draft(depths, wanted, with_state)
    assert len(chain.members) == counts.max()
    for step, members in enumerate(chain.members):
        assert sorted(members) == np.flatnonzero(counts > step).tolist()


@given(requests)
@checked
def test_the_plan_is_asked_of_those_that_may_draft_on_with_all_their_probabilities(drawn):
    depths, wanted = zip(*drawn, strict=True)
    drafts, _, plan = draft(depths, wanted)
    may_go_on = [
        [i for i in range(len(depths)) if depths[i] > step and min(depths[i], wanted[i]) >= step]
        for step in range(1, CAP)
    ]
    assert [sorted(members) for members, _ in plan.seen] == [some for some in may_go_on if some]
    for members, chances in plan.seen:
        for i, known in zip(members, chances, strict=True):
            assert known == drafts.chances[i, : len(known)].tolist()


def test_no_plan_is_asked_where_it_does_not_stop():
    depths = np.array([3, 2])
    plan = Stopping(depths, [1, 1])
    plan.stops = False
    drafts = Chain(False).draft(make_round([1, 2], [5, 5], [7, 8], depths, plan=plan))
    assert plan.seen == [] and drafts.counts.tolist() == [3, 2]


def test_a_plan_that_stops_all_ends_the_chain_at_once():
    drafts, chain, plan = draft([4, 0, 4], [1, 1, 1])
    assert chain.members == [[0, 2]] and len(plan.seen) == 1
    assert drafts.counts.tolist() == [1, 0, 1]


@pytest.mark.parametrize("wanted", [None, [1, 2, 3]])
def test_counts_are_no_view_of_the_rounds_depths(wanted):
    depths = np.array([2, 2, 3])
    plan = None if wanted is None else Stopping(depths, wanted)
    this_round = make_round([1, 2, 3], [5] * 3, [7] * 3, depths, plan=plan)
    counts = Chain(False).draft(this_round).counts
    counts[:] = -1
    assert this_round.depths_cpu.tolist() == [2, 2, 3]


def test_what_lies_behind_a_count_is_zero_and_no_leftover():
    drafts, *_ = draft([4, 4], [2, 4])
    assert drafts.tokens[0, 2:].tolist() == [0, 0] and drafts.chances[0, 2:].tolist() == [0, 0]
