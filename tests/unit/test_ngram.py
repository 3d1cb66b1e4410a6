"""Lookup against its own definition, tried at every place of the text."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from faser_sglang.control.ngram import LONGEST, NO_MATCH, Match, continuation, longest_match

checked = settings(deadline=None, derandomize=True, max_examples=300)
# Few different tokens: long matches and many candidates.
texts = st.lists(st.integers(0, 2), max_size=40)


def array(text):
    return np.array(text, np.int32)


def searched(text, longest):
    """The definition: try every length from the longest, every place from the latest."""
    n = len(text)
    for length in range(min(longest, n - 1), 0, -1):
        for follows in range(n - 1, length - 1, -1):
            if text[follows - length : follows] == text[n - length :]:
                return Match(length, follows)
    return NO_MATCH


@given(texts, st.integers(1, 20))
@example([], 4)
@example([1], 4)
@example([1, 2], 4)
@example([1, 1], 4)
@example([0] * 40, 16)  # the match overlaps what it matches
@example([1, 2, 0, 1, 2], 4)
@example([1, 2, 1, 2], 20)  # a match that begins with the text
@example([2, 0, 1, 0, 1], 1)
@checked
def test_the_longest_match_is_found_and_of_several_the_latest(text, longest):
    assert longest_match(array(text), longest) == searched(text, longest)


@given(st.lists(st.integers(0, 1), min_size=30, max_size=80))
@checked
def test_a_match_is_no_longer_than_sixteen_tokens_by_default(text):
    found = longest_match(array(text))
    assert found == searched(text, LONGEST)
    assert found.length <= LONGEST == 16


def test_a_text_without_a_repetition_has_no_match():
    assert longest_match(np.arange(50)) == NO_MATCH


def test_the_text_itself_is_no_match_of_its_end():
    assert longest_match(array([7, 8, 9])).length == 0


def test_the_latest_of_equally_long_matches_is_taken():
    """What was said last is the better guess."""
    text = [5, 1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 3]
    assert longest_match(array(text)) == Match(3, 8)


def test_a_longer_match_beats_a_later_one():
    text = [4, 1, 2, 3, 8, 2, 3, 9, 1, 2, 3]
    assert longest_match(array(text)) == Match(3, 4)


def test_positions_are_plain_numbers():
    found = longest_match(array([3, 4, 3]))
    assert type(found.length) is type(found.follows) is int


# -- what comes next ------------------------------------------------------------------------------


def goes_on(text, match, count):
    """Copy token by token, reading what was just copied."""
    longer = list(text)
    for i in range(count):
        longer.append(longer[match.follows + i])
    return longer[len(text) :]


@given(st.lists(st.integers(0, 2), min_size=2, max_size=40), st.integers(1, 30))
@example([6, 1, 2, 1, 2], 1)
@example([6, 1, 2, 1, 2], 2)
@example([6, 1, 2, 1, 2], 3)
@example([9, 9], 8)
@checked
def test_the_continuation_repeats_what_followed_the_match(text, count):
    match = longest_match(array(text))
    if match.length:
        found = continuation(array(text), match, count)
        assert found.shape == (count,)
        assert found.tolist() == goes_on(text, match, count)


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_a_periodic_text_goes_on_with_its_period(period):
    text = [10 + i % period for i in range(4 * period)]
    match = longest_match(array(text))
    assert match.length == min(3 * period, LONGEST)
    expected = [10 + (4 * period + i) % period for i in range(8)]
    assert continuation(array(text), match, 8).tolist() == expected


def test_a_continuation_within_the_text_ends_where_it_is_asked_to():
    text = array([1, 2, 3, 4, 5, 6, 1, 2])
    match = longest_match(text)
    assert match == Match(2, 2)
    assert continuation(text, match, 3).tolist() == [3, 4, 5]
    assert continuation(text, match, 6).tolist() == [3, 4, 5, 6, 1, 2]
    assert continuation(text, match, 8).tolist() == [3, 4, 5, 6, 1, 2, 3, 4]


def test_nothing_is_written_to_the_text():
    text = array([1, 2, 3, 1, 2])
    before = text.copy()
    continuation(text, longest_match(text), 7)
    assert np.array_equal(text, before)
