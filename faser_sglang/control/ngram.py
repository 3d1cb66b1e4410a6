"""Lookup of a text's end in the text itself: what followed the last time is the draft."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from faser_sglang.control.types import IntArray

LONGEST = 16  # tokens; a longer match is no better a hint


class Match(NamedTuple):
    """The text's last ``length`` tokens stand before position ``follows`` too (0: no match)."""

    length: int
    follows: int


NO_MATCH = Match(0, 0)


def longest_match(tokens: IntArray, longest: int = LONGEST) -> Match:
    """The longest earlier occurrence of the end of ``tokens`` [n]; of several, the latest.

    One comparison over the text finds the places of its last token, and each further token of
    the match only looks at what is left of them.
    """
    n = len(tokens)
    if n < 2:
        return NO_MATCH
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # last positions of the candidates
    if ends.size == 0:
        return NO_MATCH
    length = 1
    while length < longest:
        longer = ends[ends >= length]
        longer = longer[tokens[longer - length] == tokens[n - 1 - length]]
        if longer.size == 0:
            break
        ends = longer
        length += 1
    return Match(length, int(ends[-1]) + 1)


def continuation(tokens: IntArray, match: Match, count: int) -> IntArray:
    """``count`` tokens behind the match; where the text ends, the repetition goes on."""
    known = tokens[match.follows : match.follows + count]
    return known if len(known) == count else np.resize(tokens[match.follows :], count)
