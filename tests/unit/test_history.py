"""The token rings: whatever the gap, the tokens are those that the request really has."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from faser_sglang.worker.history import TokenHistory, request_tokens
from faser_sglang.worker.packing import pack_rows
from tests.support.rounds import make_round

checked = settings(deadline=None, derandomize=True, max_examples=60)

POOL_ROWS = 5
WRONG = -7  # what the target says behind a wrong draft


class Running:
    """One request: all of its tokens, and how many of them the host has been told."""

    def __init__(self, row, prompt, first):
        self.row = row
        self.tokens = [*first, *range(1000 * row + 100, 1000 * row + 100 + prompt)]
        self.prompt = len(self.tokens)
        self.emit(1)
        self.known = len(self.tokens)

    @property
    def length(self):
        return len(self.tokens) - 1  # the bonus token is not run yet

    def emit(self, count):
        start = 1000 * self.row + 500 + len(self.tokens)
        new = list(range(start, start + count))
        self.tokens += new
        return new

    def as_request(self):
        return SimpleNamespace(
            origin_input_ids=self.tokens[: self.prompt],
            output_ids=self.tokens[self.prompt : self.known],
        )


class Batch:
    """A history fed with rounds as the worker does it."""

    def __init__(self, width, prompts):
        self.width = width
        self.history = TokenHistory(POOL_ROWS, width, "cpu")
        self.running = []
        # Each row has had another request before, whose tokens must not be seen.
        for row in range(POOL_ROWS):
            old = Running(row, 3, [WRONG] * 40)
            self.running.append(old)
        self.prefill(self.running)
        for _ in range(6):
            self.round([width] * POOL_ROWS)
        self.running = [Running(POOL_ROWS - 1 - i, prompt, []) for i, prompt in enumerate(prompts)]
        self.prefill(self.running)

    def prefill(self, requests):
        rows = np.array([request.row for request in requests], np.int64)
        lengths = np.array([request.length for request in requests], np.int64)
        bonus = torch.tensor([request.tokens[-1] for request in requests], dtype=torch.int32)
        self.history.begin(torch.from_numpy(rows), rows, torch.from_numpy(lengths), lengths, bonus)

    def make_round(self):
        running = self.running
        return make_round(
            [request.row for request in running],
            [request.length for request in running],
            [request.tokens[-1] for request in running],
            [0] * len(running),
            batch=SimpleNamespace(reqs=[request.as_request() for request in running]),
        )

    def round(self, emitted):
        """Every request emits so many tokens; the host hears of the round before this one."""
        this_round = self.make_round()
        tokens = torch.full((len(self.running), self.width), WRONG)
        for i, (request, count) in enumerate(zip(self.running, emitted, strict=True)):
            request.known = len(request.tokens)
            tokens[i, :count] = torch.tensor(request.emit(count))
        self.history.commit(this_round, tokens)

    def gather(self, members, gaps):
        """Tokens of the last ``gaps`` positions of ``members``, and what they really are."""
        this_round = self.make_round()
        members = np.array(members, np.int64)
        gaps = np.minimum(gaps, this_round.lengths_cpu[members]) + 1
        starts = this_round.lengths_cpu[members] + 1 - gaps
        slots = torch.arange(POOL_ROWS * 1000).view(POOL_ROWS, 1000)
        packed = pack_rows(
            slots, this_round.rows[torch.from_numpy(members)], torch.from_numpy(starts), gaps
        )
        expected = [
            token
            for i, start in zip(members, starts, strict=True)
            for token in self.running[i].tokens[start:]
        ]
        return self.history.gather(this_round, members, packed).tolist(), expected


@st.composite
def histories(draw, max_gap):
    """A width, prompts, rounds of emitted tokens, and the gaps to fill afterwards."""
    width = draw(st.integers(1, 9))
    prompts = draw(st.lists(st.integers(1, 12), min_size=1, max_size=POOL_ROWS))
    count = st.integers(1, width)
    one_round = st.lists(count, min_size=len(prompts), max_size=len(prompts))
    rounds = draw(st.lists(one_round, max_size=40))
    members = draw(st.permutations(range(len(prompts))))
    members = members[: draw(st.integers(1, len(prompts)))]
    gaps = draw(st.lists(st.integers(0, max_gap), min_size=len(members), max_size=len(members)))
    return width, prompts, rounds, members, gaps


def assert_gathers(width, prompts, rounds, members, gaps):
    batch = Batch(width, prompts)
    for emitted in rounds:
        batch.round(emitted)
    actual, expected = batch.gather(members, gaps)
    assert actual == expected


@given(histories(max_gap=3))
@example((1, [1], [], [0], [0]))  # fresh from prefill: the bonus token alone
@example((5, [1, 7], [[1, 5]], [1, 0], [1, 0]))
@checked
def test_the_newest_tokens_come_out_of_the_ring(case):
    assert_gathers(*case)


@given(histories(max_gap=400))
@example((5, [3], [[1]] * 30, [0], [4 * 5 - 1]))  # as far back as the ring could hold
@example((2, [3], [[1]] * 30, [0], [7]))
@example((2, [3], [[1]] * 30, [0], [16]))
@example((9, [12, 1], [[1, 9]] * 12, [1, 0], [200, 200]))  # down to the prompt
@checked
def test_any_gap_is_filled_with_the_tokens_of_the_request(case):
    assert_gathers(*case)


@pytest.mark.parametrize("width", [1, 2, 5, 9])
@pytest.mark.parametrize("emitted", [1, "all"])
def test_every_gap_up_to_the_whole_request_is_filled(width, emitted):
    """Rounds at depth 0 write the rest of their window as padding: it must not be read."""
    batch = Batch(width, [6])
    for _ in range(50):
        batch.round([width if emitted == "all" else 1])
    wrong = []
    for gap in range(batch.running[0].length + 1):
        actual, expected = batch.gather([0], [gap])
        if actual != expected:
            wrong.append(gap)
    assert wrong == []


def test_a_request_out_of_prefill_has_its_prompt_from_the_host():
    batch = Batch(3, [12, 1])
    actual, expected = batch.gather([1, 0], [1, 12])
    assert actual == expected


@pytest.mark.parametrize("split", range(6))
def test_tokens_are_counted_through_prompt_and_output(split):
    tokens = [5, 6, 7, 8, 9]
    request = SimpleNamespace(origin_input_ids=tokens[:split], output_ids=tokens[split:])
    for start in range(6):
        for end in range(start, 6):
            assert request_tokens(request, start, end).tolist() == tokens[start:end]


def test_tokens_that_the_host_has_not_heard_of_are_an_error():
    request = SimpleNamespace(origin_input_ids=[1, 2], output_ids=[3])
    with pytest.raises(RuntimeError, match="tokens 1 to 4 .* which holds 3"):
        request_tokens(request, 1, 4)
