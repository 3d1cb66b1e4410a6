"""The records of last rounds: what was accepted follows from the committed lengths."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_sglang.control.record import OutcomeRecord, RoundRecord

POOL_ROWS, CAP = 6, 8


def ints(*values):
    return np.array(values, np.int64)


def settled(record, rows, lengths):
    depths, accepted = record.settle(ints(*rows), ints(*lengths))
    return list(zip(depths.tolist(), accepted.tolist(), strict=True))


@pytest.mark.parametrize(
    ("depth", "accepted"), [(0, 0), (1, 0), (1, 1), (4, 0), (4, 2), (4, 4), (8, 7)]
)
def test_a_round_emits_its_accepted_drafts_and_one_token_more(depth, accepted):
    record = RoundRecord(POOL_ROWS)
    record.begin(ints(0), ints(10))
    record.plan(ints(0), ints(10), ints(depth))
    assert settled(record, [0], [10 + accepted + 1]) == [(depth, accepted)]


def test_a_request_fresh_from_prefill_has_no_round_to_report():
    record = RoundRecord(POOL_ROWS)
    record.plan(ints(0), ints(10), ints(3))
    record.begin(ints(0), ints(7))  # a new request on the row, with a shorter prompt
    assert settled(record, [0], [7]) == [(0, 0)]


def test_a_row_that_was_never_used_has_no_round_to_report():
    assert settled(RoundRecord(POOL_ROWS), [2], [0]) == [(0, 0)]


def test_settling_forgets_nothing():
    """The worker and the draft KV each settle the same round."""
    record = RoundRecord(POOL_ROWS)
    record.plan(ints(1), ints(5), ints(2))
    assert settled(record, [1], [7]) == settled(record, [1], [7]) == [(2, 1)]


def test_rounds_of_other_rows_do_not_matter():
    record = RoundRecord(POOL_ROWS)
    record.begin(ints(4, 1, 3), ints(9, 2, 5))
    record.plan(ints(3, 4), ints(5, 9), ints(2, 6))
    record.plan(ints(1), ints(2), ints(1))
    assert settled(record, [4, 3, 1], [13, 6, 4]) == [(6, 3), (2, 0), (1, 1)]


def test_the_numbers_of_a_plan_are_copied():
    """The depths of a round are an array that its maker may write again."""
    record, depths = RoundRecord(POOL_ROWS), ints(3)
    record.plan(ints(0), ints(4), depths)
    depths[:] = 0
    assert settled(record, [0], [5]) == [(3, 0)]


numbers = st.lists(st.integers(0, CAP), min_size=POOL_ROWS, max_size=POOL_ROWS)
steps = st.lists(
    st.tuples(
        st.permutations(range(POOL_ROWS)),
        numbers,  # drafted
        numbers,  # of them verified, at most
        numbers,  # of them right, at most
        st.lists(st.booleans(), min_size=POOL_ROWS, max_size=POOL_ROWS),  # a new request instead
        st.integers(1, POOL_ROWS),
    ),
    min_size=1,
    max_size=12,
)
NOTHING = (0, 0, 0, 0, [0.0] * CAP)


def chances_of(row, drafted):
    """Of all drafts in a round of the row."""
    return [round(0.9 - 0.1 * place - 0.01 * row, 2) for place in range(drafted)]


@given(steps)
@settings(deadline=None, derandomize=True, max_examples=60)
def test_whatever_rows_run_a_round_each_reports_its_own_last_one(rounds):
    """Against a dictionary; in each round some rows get a new request instead."""
    record = OutcomeRecord(POOL_ROWS, CAP)
    lengths = np.zeros(POOL_ROWS, np.int64)
    last = dict.fromkeys(range(POOL_ROWS), NOTHING)
    for order, drafts, verifies, accepts, is_new, size in rounds:
        rows = np.array(order[:size], np.int64)
        found = zip(*map(np.ndarray.tolist, record.settle(rows, lengths[rows])), strict=True)
        assert list(found) == [last[row] for row in rows.tolist()]
        fresh = [row for row in order[:size] if is_new[row]]
        old = [row for row in order[:size] if not is_new[row]]
        lengths[fresh] = [drafts[row] for row in fresh]
        record.begin(ints(*fresh), lengths[fresh])
        last |= dict.fromkeys(fresh, NOTHING)
        deepest = max((drafts[row] for row in old), default=0)
        chances = np.zeros((len(old), deepest))
        for i, row in enumerate(old):
            verified = min(verifies[row], drafts[row])
            right = min(accepts[row], verified)
            sure = chances_of(row, drafts[row])
            chances[i, : drafts[row]] = sure
            last[row] = row % 2, drafts[row], verified, right, sure + [0.0] * (CAP - len(sure))
        parts = zip(*(last[row][:3] for row in old), strict=True) if old else ([], [], [])
        arms, drafted, verified = (ints(*part) for part in parts)
        record.note(ints(*old), lengths[old], arms, drafted, verified, chances if deepest else None)
        for row in old:
            lengths[row] += last[row][3] + 1


def test_only_verified_drafts_can_have_been_accepted():
    """Three of five drafts were verified and all were right; the other two were never seen."""
    record = OutcomeRecord(POOL_ROWS, CAP)
    record.note(ints(2), ints(10), ints(1), ints(5), ints(3), np.full((1, 5), 0.5))
    outcome = record.settle(ints(2), ints(14))
    assert [int(part[0]) for part in outcome[:4]] == [1, 5, 3, 3]


def test_the_probabilities_of_a_deeper_round_do_not_stay():
    record = OutcomeRecord(POOL_ROWS, CAP)
    record.note(ints(0), ints(4), ints(0), ints(4), ints(4), np.full((1, 4), 0.9))
    record.note(ints(0), ints(6), ints(0), ints(1), ints(1), np.full((1, 1), 0.3))
    assert record.settle(ints(0), ints(7)).chances.tolist() == [[0.3] + [0.0] * (CAP - 1)]


def test_what_a_round_reports_is_no_view_of_the_record():
    record = OutcomeRecord(POOL_ROWS, CAP)
    record.note(ints(0), ints(4), ints(0), ints(2), ints(2), np.full((1, 2), 0.9))
    outcome = record.settle(ints(0), ints(6))
    record.note(ints(0), ints(6), ints(1), ints(0), ints(0), None)
    assert outcome.drafted.tolist() == [2] and outcome.chances[0, :2].tolist() == [0.9, 0.9]
