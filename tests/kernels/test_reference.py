"""The ragged operations against the same thing written out with Python lists."""

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from faser_sglang.kernels.reference import ragged_accept, ragged_positions

checked = settings(deadline=None, derandomize=True, max_examples=100)

VOCABULARY = 3  # few tokens, so that drafts are right often; 0 is what padding holds


@st.composite
def windows(draw):
    """A width, and for each request its depth, its padded drafts and the target's tokens."""
    width = draw(st.integers(1, 6))
    token = st.integers(0, VOCABULARY - 1)
    requests = []
    for _ in range(draw(st.integers(1, 7))):
        depth = draw(st.integers(0, width - 1))
        drafts = draw(st.lists(token, min_size=width - 1, max_size=width - 1))
        sampled = draw(st.lists(token, min_size=depth + 1, max_size=depth + 1))
        requests.append((depth, drafts, sampled))
    return width, requests


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), min_size=1, max_size=8))
@example([(5, 0)])
@example([(5, 1)])
@example([(0, 0), (7, 3), (2, 0), (7, 1), (0, 0)])
@checked
def test_rows_count_up_from_each_start_behind_each_other(requests):
    starts, lengths = (torch.tensor(column) for column in zip(*requests, strict=True))
    expected = [(i, start + k) for i, (start, n) in enumerate(requests) for k in range(n)]
    for total in (None, len(expected)):
        owners, positions = ragged_positions(starts, lengths, total=total)
        assert list(zip(owners.tolist(), positions.tolist(), strict=True)) == expected
        assert owners.dtype == positions.dtype == torch.int64


def accept_in_python(width, requests):
    """Tokens [n][width], accept lengths [n] and bonus [n] by the definition."""
    tokens, lens, bonus = [], [], []
    for depth, drafts, sampled in requests:
        accepted = 0
        while accepted < depth and drafts[accepted] == sampled[accepted]:
            accepted += 1
        tokens.append(sampled + [0] * (width - depth - 1))
        lens.append(accepted + 1)
        bonus.append(sampled[accepted])
    return tokens, lens, bonus


@given(windows(), st.sampled_from([torch.int32, torch.int64]))
@example((1, [(0, [], [2])]), torch.int64)  # nothing can be drafted at all
@example((4, [(0, [0, 0, 0], [2])]), torch.int64)  # depth 0, and padding equals the drafts
@example((4, [(3, [1, 2, 1], [1, 2, 1, 0])]), torch.int64)  # all accepted
@example((4, [(3, [1, 2, 1], [2, 2, 1, 0])]), torch.int64)  # nothing accepted, later ones match
@example((6, [(2, [1, 2, 0, 0, 0], [1, 2, 1]), (0, [1] * 5, [1])]), torch.int32)
@checked
def test_the_leading_drafts_that_the_target_said_itself_are_accepted(case, dtype):
    width, requests = case
    depths = torch.tensor([depth for depth, _, _ in requests])
    drafts = torch.tensor([drafts for _, drafts, _ in requests]).view(len(requests), width - 1)
    sampled = torch.tensor([token for _, _, row in requests for token in row], dtype=dtype)
    owners, offsets = ragged_positions(torch.zeros_like(depths), depths + 1)
    verdict = ragged_accept(sampled, drafts, depths, owners, offsets, width)
    tokens, lens, bonus = accept_in_python(width, requests)
    assert torch.equal(verdict.tokens, torch.tensor(tokens, dtype=dtype))
    assert torch.equal(verdict.accept_lens, torch.tensor(lens, dtype=torch.int32))
    assert torch.equal(verdict.bonus, torch.tensor(bonus, dtype=dtype))
    assert verdict.accept_lens.dtype == torch.int32


def test_packed_rows_may_come_in_any_order():
    depths, drafts = torch.tensor([2, 0, 1]), torch.tensor([[7, 8], [1, 1], [5, 0]])
    owners, offsets = ragged_positions(torch.zeros_like(depths), depths + 1)
    sampled = torch.tensor([7, 9, 4, 3, 5, 6])
    whole = ragged_accept(sampled, drafts, depths, owners, offsets, 3)
    order = torch.tensor([3, 5, 0, 2, 4, 1])
    shuffled = ragged_accept(sampled[order], drafts, depths, owners[order], offsets[order], 3)
    for one, other in zip(whole, shuffled, strict=True):
        assert torch.equal(one, other)
    assert whole.accept_lens.tolist() == [2, 1, 2] and whole.bonus.tolist() == [9, 3, 6]
