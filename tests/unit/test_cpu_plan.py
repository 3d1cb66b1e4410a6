"""Plans of a packed pass: every row once, masks by the definition, padding only where it pays."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from faser_sglang.cpu.plan import (
    CALL,
    MAX_SEGMENT_ROWS,
    READ,
    Window,
    make_groups,
    partition,
    split,
)

checked = settings(deadline=None, derandomize=True, max_examples=60)

POOL_ROWS = 12
MAX_KV = 1300

prefixes = st.one_of(st.integers(0, 9), st.sampled_from([0, 63, 700, 900]))
rows_of_a_prompt = st.sampled_from([0, 1, 7, 20, 255, 256, 257, 300])
windows = st.lists(st.tuples(st.integers(0, 6), prefixes), min_size=1, max_size=8)
prompts = st.lists(st.tuples(rows_of_a_prompt, prefixes), min_size=1, max_size=4)
requests = st.one_of(windows, prompts)  # (query rows, cached tokens before them) of each request


def table(seed=0):
    """Slots scattered over a pool, none used twice: [POOL_ROWS, MAX_KV]."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(POOL_ROWS * MAX_KV, generator=generator)
    return slots.view(POOL_ROWS, MAX_KV).to(torch.int32)


SCATTERED = table()


def plan(pairs, req_to_token=SCATTERED):
    q_lens = [rows for rows, _ in pairs]
    kv_lens = [rows + prefix for rows, prefix in pairs]
    pool_rows = torch.arange(len(pairs)).flip(0) + 2  # not the requests' own numbers
    return make_groups(q_lens, kv_lens, req_to_token, pool_rows), pool_rows


def packed(pairs):
    """Request and position of every packed row."""
    return [(i, prefix + r) for i, (rows, prefix) in enumerate(pairs) for r in range(rows)]


def padded_rows(group, total):
    """Packed row behind each padded query row of a group; None for padding."""
    if group.q_rows is None:
        return list(range(total))
    rows = [None] * (group.size * group.q_len)
    for row, place in zip(group.out_rows.tolist(), group.out_from.tolist(), strict=True):
        assert group.q_rows[place] == row
        rows[place] = row
    return rows


def slots_of(group):
    """[size, kv_len] pool slots that a group reads."""
    if group.kv_slots is None:
        return torch.arange(group.kv_start, group.kv_start + group.kv_len).view(1, -1)
    return group.kv_slots.view(group.size, group.kv_len)


def seen_by(group, heads, window, dtype=torch.float32):
    """[size, q_len, kv_len] what each padded row sees; the same for every head."""
    mask = group.mask(heads, window, dtype)
    if mask is None:
        return torch.ones(group.size, group.q_len, group.kv_len, dtype=torch.bool)
    assert mask.shape == (group.size, 1, heads * group.q_len, group.kv_len) and mask.dtype == dtype
    by_head = mask.view(group.size, heads, group.q_len, group.kv_len)
    assert torch.equal(by_head, by_head[:, :1].expand_as(by_head))
    seen = by_head[:, 0] == 0
    assert torch.equal(by_head[:, 0] == -math.inf, ~seen)
    return seen


@given(requests)
@example([(300, 0)])
@example([(0, 5), (256, 0), (0, 0), (257, 3)])
@checked
def test_segments_cover_every_row_once_and_end_at_its_own_position(pairs):
    segments = split([rows for rows, _ in pairs], [rows + prefix for rows, prefix in pairs])
    rows = packed(pairs)
    assert [segment.row + r for segment in segments for r in range(segment.q_len)] == list(
        range(len(rows))
    )
    for segment in segments:
        assert 1 <= segment.q_len <= MAX_SEGMENT_ROWS
        assert {rows[segment.row + r][0] for r in range(segment.q_len)} == {segment.request}
        assert segment.kv_len == rows[segment.row + segment.q_len - 1][1] + 1


@given(requests)
@checked
def test_groups_pad_no_more_than_it_pays_and_keep_the_packed_order(pairs):
    segments = split([rows for rows, _ in pairs], [rows + prefix for rows, prefix in pairs])
    groups = partition(segments)
    assert sorted(segment for group in groups for segment in group) == sorted(segments)
    for group in groups:
        assert [segment.row for segment in group] == sorted(segment.row for segment in group)
        kv_len, q_len = max(s.kv_len for s in group), max(s.q_len for s in group)
        padded = len(group) * kv_len * (READ + q_len)
        assert padded - sum(s.kv_len * (READ + s.q_len) for s in group) <= CALL


def test_equal_windows_are_one_call_and_far_lengths_are_not():
    assert len(plan([(1, 50)] * 8)[0]) == 1
    assert len(plan([(4, 50), (1, 60), (3, 40)])[0]) == 1
    assert len(plan([(1, 10), (1, 1200)])[0]) == 2
    assert len(plan([(9, 200)] * 2 + [(1, 200)] * 6)[0]) == 2  # padded windows are work, too


@given(requests)
@example([(2, 998), (2, 8), (1, 9), (1, 9)])  # a part, padded to as many rows as the whole has
@example([(3, 0)])
@example([(0, 4), (1, 0)])
@checked
def test_every_packed_row_is_in_exactly_one_group(pairs):
    groups, _ = plan(pairs)
    total = len(packed(pairs))
    rows = [row for group in groups for row in padded_rows(group, total) if row is not None]
    assert sorted(rows) == list(range(total))
    for group in groups:
        assert len(padded_rows(group, total)) == group.size * group.q_len


@given(requests, st.sampled_from([1, 3]), st.sampled_from([None, 0, 1, 64, 2000]))
@example([(2, 998), (2, 8), (1, 9), (1, 9)], 1, None)
@example([(4, 0), (1, 3), (2, 1)], 3, 1)
@checked
def test_a_row_sees_the_slots_up_to_its_own_and_back_to_its_window(pairs, heads, window):
    groups, pool_rows = plan(pairs)
    rows = packed(pairs)
    for group in groups:
        slots, seen = slots_of(group), seen_by(group, heads, window)
        assert seen.any(2).all(), "a row that sees nothing has a NaN for its softmax"
        for place, row in enumerate(padded_rows(group, len(rows))):
            if row is None:
                continue
            i, position = rows[row]
            first = 0 if window is None else max(position - window, 0)
            member, r = divmod(place, group.q_len)
            read = slots[member][seen[member, r]]
            assert torch.equal(read.int(), SCATTERED[pool_rows[i], first : position + 1])


def test_a_row_that_sees_everything_needs_no_mask():
    for pairs in ([(1, 5)], [(1, 5), (1, 5)], [(1, 0)]):
        (group,), _ = plan(pairs)
        assert group.mask(3, None, torch.float32) is None
    (group,), _ = plan([(1, 5), (1, 4)])
    assert group.mask(1, None, torch.float32) is not None


def test_masks_of_other_layers_do_not_mix():
    """Layers of one model may differ in heads, window and type; the plan is shared."""
    (group,), _ = plan([(3, 7), (2, 5)])
    for heads, window, dtype in [(1, None, torch.float32), (3, 2, torch.bfloat16), (1, 2, None)]:
        dtype = dtype or torch.float32
        fresh = plan([(3, 7), (2, 5)])[0][0].mask(heads, window, dtype)
        assert torch.equal(group.mask(heads, window, dtype), fresh)
        assert group.mask(heads, window, dtype) is group.mask(heads, window, dtype)


def dense_table(length, start=40):
    req_to_token = table(1)
    req_to_token[2, :length] = torch.arange(start, start + length, dtype=torch.int32)
    return req_to_token


@pytest.mark.parametrize("rows", [1, 5, 20])
@pytest.mark.parametrize("length", [20, 33])
def test_one_request_whose_slots_are_a_run_is_read_in_place(rows, length):
    (group,), _ = plan([(rows, length - rows)], dense_table(length))
    assert group.kv_slots is None and group.kv_start == 40 and group.kv_len == length


def test_a_single_token_is_a_run():
    (group,), pool_rows = plan([(1, 0)])
    assert group.kv_slots is None and group.kv_start == SCATTERED[pool_rows[0], 0]


@pytest.mark.parametrize("broken_at", [1, 7, 18, 19])
def test_one_slot_out_of_line_is_no_run(broken_at):
    req_to_token = dense_table(20)
    req_to_token[2, broken_at] += 1000
    (group,), _ = plan([(2, 18)], req_to_token)
    assert torch.equal(group.kv_slots.int(), req_to_token[2, :20])


def test_a_descending_run_is_no_run():
    req_to_token = dense_table(20)
    req_to_token[2, :20] = req_to_token[2, :20].flip(0)
    (group,), _ = plan([(2, 18)], req_to_token)
    assert group.kv_slots is not None


def test_two_requests_are_gathered_even_if_their_slots_are_one_run():
    req_to_token = table(1)
    req_to_token[3, :4] = torch.arange(10, 14, dtype=torch.int32)
    req_to_token[2, :4] = torch.arange(14, 18, dtype=torch.int32)
    (group,), _ = plan([(1, 3), (1, 3)], req_to_token)
    assert group.kv_slots.tolist() == list(range(10, 18))


def test_a_pass_without_rows_has_no_groups():
    assert plan([(0, 3), (0, 0)])[0] == []


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 200)), min_size=1, max_size=4),
    st.integers(1, 64),
    st.integers(0, 8),
)
def test_a_window_keeps_the_sink_the_recent_tokens_and_the_rows(pairs, recent, sink):
    q_lens = [rows for rows, _ in pairs]
    kv_lens = [rows + before for rows, before in pairs]
    table = torch.arange(len(pairs) * 256).view(len(pairs), 256)
    groups = make_groups(
        q_lens, kv_lens, table, torch.arange(len(pairs)), Window(recent=recent, sink=sink)
    )
    kept = {}
    for group in groups:
        slots = group.kv_slots
        if slots is None:
            slots = torch.arange(group.kv_start, group.kv_start + group.kv_len)
        for held, length in zip(slots.view(group.size, -1), group.kv_lens.tolist(), strict=True):
            row = held[:length].tolist()
            kept[row[0] // 256] = [slot % 256 for slot in row]
    for i, (rows, before) in enumerate(pairs):
        first = max(before - recent, 0)
        expected = sorted({*range(min(sink, before + rows)), *range(first, before + rows)})
        assert kept[i] == expected
