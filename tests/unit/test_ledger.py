"""The account of rounds: of the server and of each request, whatever comes between."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_sglang.request_params import KEY
from faser_sglang.worker.ledger import Ledger

CAP = 4
SUMS = ("rounds", "drafted", "trimmed", "verified", "accepted", "cut", "emitted")


class Req:
    """SGLang's request, as far as the ledger looks at it."""

    def __init__(self, rid):
        self.rid = str(rid)
        self.customized_info = None
        self.is_retracted = False
        self.output_ids = [0]  # sampled by the prefill
        self.finished_len = None
        self.is_over = False

    def finished(self):
        return self.is_over

    @property
    def account(self):
        return self.customized_info[KEY].account


def note(ledger, reqs, drafted, verified=None):
    batch = SimpleNamespace(reqs=list(reqs))
    verified = drafted if verified is None else verified
    ledger.note_round(batch, np.array(drafted), np.array(verified))
    return batch


def started(count):
    ledger, reqs = Ledger(), [Req(i) for i in range(count)]
    ledger.begin(reqs)
    return ledger, reqs


def sums(account):
    return [getattr(account, name) for name in SUMS]


def test_each_request_is_charged_its_own_rounds_and_the_server_all():
    ledger, (one, other) = started(2)
    note(ledger, [one, other], [3, 0])
    note(ledger, [other, one], [4, 1], [2, 1])
    ledger.read([2, 0])
    ledger.read([2, 0])
    assert sums(one.account) == [2, 4, 0, 4, 2, 0, 4]
    assert sums(other.account) == [2, 4, 2, 2, 2, 0, 4]
    assert sums(ledger.counters) == [4, 8, 2, 6, 4, 0, 8]
    assert ledger.counters.passes == 2


def test_rounds_are_read_in_the_order_in_which_they_ran():
    """Under the overlap scheduler the next round runs before the last one is read."""
    ledger, (one, other) = started(2)
    note(ledger, [one], [3])
    note(ledger, [other, one], [2, 0])
    ledger.read([3])
    assert (one.account.accepted, other.account.rounds) == (3, 0)
    ledger.read([1, 0])
    assert sums(other.account) == [1, 2, 0, 2, 1, 0, 2]


def test_a_batch_that_changes_behind_a_round_does_not_change_the_round():
    ledger, (one, other) = started(2)
    batch = note(ledger, [one, other], [1, 2])
    batch.reqs.reverse()
    ledger.read([0, 2])
    assert (one.account.accepted, other.account.accepted) == (0, 2)


@pytest.mark.parametrize("state", ["is_over", "is_retracted"])
def test_a_round_of_a_request_that_was_gone_before_it_is_overshoot(state):
    ledger, (gone, running) = started(2)
    note(ledger, [gone, running], [3, 2])
    setattr(gone, state, True)
    ledger.read([3, 1])
    assert sums(gone.account) == [0] * len(SUMS)
    assert sums(ledger.counters) == sums(running.account) == [1, 2, 0, 2, 1, 0, 2]
    assert (ledger.counters.overshoot_rounds, ledger.counters.overshoot_tokens) == (1, 4)


def test_a_retracted_request_keeps_its_account_and_a_new_one_starts_at_zero():
    ledger, (req,) = started(1)
    note(ledger, [req], [2])
    ledger.read([1])
    ledger.begin([req])  # its second prefill
    note(ledger, [req], [1])
    ledger.read([1])
    assert sums(req.account) == [2, 3, 0, 3, 2, 0, 4]
    new = Req(0)
    ledger.begin([new])
    assert sums(new.account) == [0] * len(SUMS)


def test_other_info_of_a_request_stays():
    req = Req(0)
    req.customized_info = {"other": 1}
    Ledger().begin([req])
    assert req.customized_info["other"] == 1 and KEY in req.customized_info


def test_what_lies_behind_a_stop_is_cut():
    ledger, (req,) = started(1)
    batch = note(ledger, [req], [4])
    ledger.read([4])
    req.output_ids += [1, 2, 3, 4, 5]
    req.finished_len = 3  # one by the prefill, two of this round
    assert ledger.finish(req.rid) == (batch, req)
    assert sums(req.account) == sums(ledger.counters) == [1, 4, 0, 4, 4, 3, 2]


def test_a_request_that_ends_by_its_length_or_an_abort_is_cut_nothing():
    ledger, (req,) = started(1)
    note(ledger, [req], [1])
    ledger.read([1])
    assert ledger.finish(req.rid) is not None
    assert req.account.cut == ledger.counters.cut == 0


def test_a_request_of_another_round_is_not_found():
    ledger, (one, other) = started(2)
    assert ledger.finish(one.rid) is None  # no round was read yet: it ended with its prefill
    note(ledger, [one], [1])
    ledger.read([1])
    assert ledger.finish(other.rid) is None
    note(ledger, [other], [1])
    assert ledger.finish(other.rid) is None  # ran, but is not read
    ledger.read([0])
    assert ledger.finish(one.rid) is None and ledger.finish(other.rid) is not None


def test_a_receipt_is_one_snapshot_for_any_tokens():
    ledger, (req,) = started(1)
    receipt = req.customized_info[KEY]
    for tokens in (slice(0, 4), slice(None), slice(2, None, 3), 0):
        assert receipt[tokens] == [req.account.snapshot()]
    before = receipt[:]
    note(ledger, [req], [2])
    ledger.read([2])
    assert before[0]["rounds"] == 0 and receipt[:][0]["rounds"] == 1


drafted = st.tuples(*[st.integers(0, CAP)] * 3).map(lambda three: sorted(three, reverse=True))
rounds = st.lists(
    st.dictionaries(st.integers(0, 3), st.tuples(drafted, st.booleans()), min_size=1), max_size=12
)


@given(rounds, st.booleans())
@settings(deadline=None, derandomize=True, max_examples=100)
def test_the_accounts_of_the_requests_add_up_to_the_servers(drawn, is_overlapped):
    """Requests end at random; the round that had begun meanwhile is overshoot."""
    ledger, reqs = started(4)
    emitted, late = 0, []
    for asked in [*drawn, {}]:
        late.append(asked)
        if asked:
            made, verified, _ = zip(*(triple for triple, _ in asked.values()), strict=True)
            note(ledger, [reqs[i] for i in asked], made, verified)
        while late and (not is_overlapped or len(late) > 1 or not asked):
            read = late.pop(0)
            if not read:
                break
            ledger.read([right for (_, _, right), _ in read.values()])
            for i, ((_, _, right), ends) in read.items():
                if not reqs[i].is_over:
                    reqs[i].output_ids += [0] * (right + 1)
                    emitted += right + 1
                if ends and not reqs[i].is_over:
                    reqs[i].is_over, reqs[i].finished_len = True, len(reqs[i].output_ids) - right
                    assert ledger.finish(reqs[i].rid)[1] is reqs[i]
                    emitted -= right
    for name in SUMS:
        assert getattr(ledger.counters, name) == sum(getattr(req.account, name) for req in reqs)
    assert ledger.counters.emitted == emitted
    assert ledger.counters.drafted == ledger.counters.verified + ledger.counters.trimmed
    assert ledger.counters.rounds + ledger.counters.overshoot_rounds == sum(map(len, drawn))
