"""The record of draft KV against a model that knows what every slot really holds."""

from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from faser_sglang.control.record import RoundRecord
from faser_sglang.control.rounds import LOOKUP, MODEL
from faser_sglang.kernels.reference import Verdict
from faser_sglang.worker.draft_kv import DraftKv
from faser_sglang.worker.packing import pack_rows
from tests.support.forward_batches import make_forward_batch
from tests.support.rounds import make_round

POOL_ROWS, SLOTS, CONTEXT, CAP = 4, 200, 60, 4


@dataclass
class Request:
    """``tokens`` of positions 0 .. length, the last one (the bonus token) not run yet.

    Tokens are unique, so a slot whose draft KV is that of the right token has the right KV.
    """

    tokens: list[int]
    slots: list[int]
    valid: int  # draft KV is known to be there below this position
    last: tuple[int, int] = (0, 0)  # verified and accepted drafts of the last round
    is_fresh: bool = True

    @property
    def length(self):
        return len(self.tokens) - 1


@dataclass
class Tree:
    """Prefixes that a radix tree would hand to new requests."""

    entries: list[tuple[list[int], list[int]]] = field(default_factory=list)


class World(RuleBasedStateMachine):
    """Requests come, run rounds of any depths, leave prefixes behind, and slots are used again."""

    @initialize(draft_context=st.sampled_from([20, CONTEXT]))
    def start(self, draft_context):
        self.draft_context = draft_context
        self.kv = DraftKv(POOL_ROWS, SLOTS, "cpu")
        self.record = RoundRecord(POOL_ROWS)  # the worker's own
        self.req_to_token = torch.zeros(POOL_ROWS, CONTEXT, dtype=torch.int32)
        self.new_token = count(1)
        self.draft = [0] * SLOTS  # the token whose draft KV a slot really holds
        self.promised = [0] * SLOTS  # the same, as far as the record has to know
        self.running: dict[int, Request] = {}
        self.tree = Tree()

    # -- the pool -------------------------------------------------------------------------------

    def fresh(self, size):
        return [next(self.new_token) for _ in range(size)]

    def grow(self, row, request, positions):
        """Slots for the first ``positions`` positions; freed ones are used again at once."""
        held = [slots for _, slots in self.tree.entries]
        held += [other.slots for other in self.running.values()] + [request.slots]
        taken = set().union(*held)
        free = iter(slot for slot in range(SLOTS) if slot not in taken)
        request.slots += [next(free) for _ in range(positions - len(request.slots))]
        self.req_to_token[row, : len(request.slots)] = torch.tensor(request.slots)

    def write(self, request, start, end, tokens, is_promised):
        """The draft runs ``tokens`` at positions ``start`` .. ``end``."""
        for position, token in zip(range(start, end), tokens, strict=True):
            self.draft[request.slots[position]] = token
            if is_promised:
                self.promised[request.slots[position]] = token

    def forget(self, request, start, end):
        """The target alone wrote ``start`` .. ``end``."""
        for slot in request.slots[start:end]:
            self.draft[slot] = self.promised[slot] = 0

    @staticmethod
    def first_other(held, request, end):
        """First position below ``end`` whose slot does not hold its token."""
        return next((p for p in range(end) if held[request.slots[p]] != request.tokens[p]), end)

    # -- what happens to requests ------------------------------------------------------------------

    @precondition(lambda self: len(self.running) < POOL_ROWS)
    @rule(data=st.data(), is_off=st.booleans())
    def prefill(self, data, is_off):
        free_rows = [row for row in range(POOL_ROWS) if row not in self.running]
        rows = free_rows[: data.draw(st.integers(1, len(free_rows)), "requests")]
        prefixes = []
        for row in rows:
            request, prefix = Request([], [], 0), 0
            if self.tree.entries and data.draw(st.booleans(), "is cached"):
                tokens, slots = data.draw(st.sampled_from(self.tree.entries), "prefix of")
                prefix = data.draw(st.integers(0, len(tokens)), "prefix")
                request.tokens, request.slots = tokens[:prefix], slots[:prefix]
            self.running[row] = request
            prefixes.append(prefix)
        self._run_prefill(rows, prefixes, data, is_off)

    @precondition(lambda self: any(request.is_fresh for request in self.running.values()))
    @rule(data=st.data(), is_off=st.booleans())
    def prefill_the_next_chunk(self, data, is_off):
        row = data.draw(st.sampled_from([r for r, q in self.running.items() if q.is_fresh]), "row")
        request = self.running[row]
        request.tokens.pop()  # what a chunk in between samples is dropped
        if len(request.tokens) > CONTEXT // 2:
            del self.running[row]
            return
        self._run_prefill([row], [len(request.tokens)], data, is_off)

    def _run_prefill(self, rows, prefixes, data, is_off):
        """As the drafter does it."""
        for row in rows:
            request = self.running[row]
            request.tokens += self.fresh(data.draw(st.integers(1, 7), "new tokens") + 1)
            self.grow(row, request, request.length)
        requests = [self.running[row] for row in rows]
        prefix_lens = np.array(prefixes, np.int64)
        ends = np.array([request.length for request in requests], np.int64)
        starts = self.kv.first_missing(self.req_to_token, torch.tensor(rows), prefix_lens)
        for request, prefix, start in zip(requests, prefixes, starts, strict=True):
            really = self.first_other(self.draft, request, prefix)
            known = self.first_other(self.promised, request, prefix)
            assert known <= start <= really, "the draft's pass begins behind a hole, or too early"
        held, begins = np.minimum(ends, self.draft_context), starts
        if is_off:
            held, begins = starts, prefix_lens
        written = pack_rows(
            self.req_to_token, torch.tensor(rows), torch.from_numpy(begins), ends - begins
        )
        self.kv.mark(written, torch.from_numpy(held))
        self.kv.begin(np.array(rows), ends, held)
        self.record.begin(np.array(rows), ends)
        for request, prefix, begin, end in zip(requests, prefixes, starts, held, strict=True):
            self.forget(request, prefix, request.length)
            if not is_off:
                self.write(request, begin, end, request.tokens[begin:end], is_promised=True)
            request.valid, request.last = end, (0, 0)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def run_a_round(self, data):
        for row in [r for r, q in self.running.items() if q.length > CONTEXT - CAP - 2]:
            del self.running[row]
        rows = np.array(data.draw(st.permutations(sorted(self.running)), "batch"), np.int64)
        requests = [self.running[row] for row in rows.tolist()]
        lengths = np.array([request.length for request in requests], np.int64)
        self.kv.settle(rows, lengths)
        depths, accepted = self.record.settle(rows, lengths)
        assert list(zip(depths, accepted, strict=True)) == [r.last for r in requests]
        assert self.kv.valid_len[rows].tolist() == [r.valid for r in requests]
        drafted = [
            data.draw(st.integers(0, max(min(CAP, self.draft_context - r.length), 0)), "drafted")
            for r in requests
        ]
        # Some drafts are withheld from verification; the draft has run them all the same.
        depths = [data.draw(st.integers(0, made), "verified") for made in drafted]
        accepts = [data.draw(st.integers(0, depth), "accepted") for depth in depths]
        for row, request, made in zip(rows.tolist(), requests, drafted, strict=True):
            self.grow(row, request, request.length + made + 1)
        bonus = [request.tokens[-1] for request in requests]
        this_round = make_round(rows, lengths, bonus, depths, drafted=drafted)
        window = pack_rows(
            self.req_to_token, this_round.rows, this_round.lengths, this_round.depths_cpu + 1
        )
        self.kv.plan(this_round)
        self.record.plan(rows, lengths, this_round.depths_cpu)
        self.kv.commit(this_round, window, torch.tensor(accepts, dtype=torch.int32) + 1)
        for request, *counts in zip(requests, drafted, depths, accepts, strict=True):
            self._verify(request, *counts)

    def _verify(self, request, drafted, depth, right):
        """What the draft and the target do to the slots of one request.

        The slots of the window are the target's by then. The draft has run ``drafted`` positions,
        those behind the window too: whoever gets them next overwrites what they hold.
        """
        length, bonus = request.length, request.tokens[-1]
        drafts = self.fresh(drafted)
        self.forget(request, length, length + depth + 1)
        if drafted:
            assert self.first_other(self.draft, request, request.valid) == request.valid
            self.write(
                request,
                request.valid,
                length,
                request.tokens[request.valid : length],
                is_promised=False,
            )
            chain = [bonus, *drafts[:-1]]
            self.write(request, length, length + drafted, chain, is_promised=False)
            is_whole = min(depth + 1, drafted)  # of the window, the draft has run so much
            self.write(request, length, length + is_whole, chain[:is_whole], is_promised=True)
            request.valid = length + min(right + 1, drafted)
        request.tokens += drafts[:right] + self.fresh(1)
        request.last, request.is_fresh = (depth, right), False

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave(self, data):
        """Finish: the committed tokens, or those up to a stop, stay in the tree."""
        row = data.draw(st.sampled_from(sorted(self.running)), "row")
        request = self.running.pop(row)
        kept = data.draw(st.integers(max(request.length - CAP, 0), request.length), "kept")
        self.tree.entries.append((request.tokens[:kept], request.slots[:kept]))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data):
        self.running.pop(data.draw(st.sampled_from(sorted(self.running)), "row"))

    @precondition(lambda self: self.tree.entries)
    @rule(data=st.data())
    def evict(self, data):
        self.tree.entries.pop(data.draw(st.integers(0, len(self.tree.entries) - 1), "entry"))

    @precondition(lambda self: len(self.tree.entries) > 3)
    @rule()
    def evict_the_oldest(self):
        del self.tree.entries[:2]

    @invariant()
    def a_slot_that_counts_as_written_holds_its_token(self):
        if not hasattr(self, "running"):
            return
        committed = [(q.tokens[: q.length], q.slots) for q in self.running.values()]
        written = self.kv.written.tolist()
        for tokens, slots in [*self.tree.entries, *committed]:
            for token, slot in zip(tokens, slots, strict=False):
                assert not written[slot] or self.draft[slot] == token


def test_no_round_and_no_reuse_makes_a_hole_look_written():
    run_state_machine_as_test(
        World,
        settings=settings(deadline=None, derandomize=True, max_examples=40, stateful_step_count=25),
    )


# -- single steps -------------------------------------------------------------------------------


def packed_pool():
    """Request i of row i has slots 100 * i onwards."""
    return torch.arange(POOL_ROWS * 100, dtype=torch.int32).view(POOL_ROWS, 100)


def play(kv, row, length, depth, accepted, drafted=None):
    """One round of one request; the committed length afterwards."""
    kv.settle(np.array([row]), np.array([length]))
    drafted = depth if drafted is None else drafted
    this_round = make_round([row], [length], [0], [depth], drafted=[drafted])
    window = pack_rows(packed_pool(), this_round.rows, this_round.lengths, np.array([depth + 1]))
    kv.plan(this_round)
    kv.commit(this_round, window, torch.tensor([accepted + 1], dtype=torch.int32))
    return length + accepted + 1


def after_prefill(length, row=0):
    kv = DraftKv(POOL_ROWS, POOL_ROWS * 100, "cpu")
    ends = np.array([length])
    kv.mark(
        pack_rows(packed_pool(), torch.tensor([row]), torch.tensor([0]), ends),
        torch.from_numpy(ends),
    )
    kv.begin(np.array([row]), ends, ends)
    return kv


@pytest.mark.parametrize(
    ("drafted", "depth", "accepted", "drafted_from"),
    [
        (0, 0, 0, 0),  # nothing was drafted: the bonus token's slot has the target's KV only
        (1, 1, 0, 1),
        (1, 1, 1, 1),  # the last draft was never drafted from
        (4, 4, 0, 1),
        (4, 4, 2, 3),
        (4, 4, 4, 4),
        (4, 3, 3, 4),  # the last draft was withheld: the one before was drafted from
        (4, 1, 1, 2),
        (4, 2, 1, 2),
        (1, 0, 0, 1),  # all were withheld: the bonus token was drafted from
        (4, 0, 0, 1),
    ],
)
def test_a_round_leaves_draft_kv_for_what_was_drafted_from(drafted, depth, accepted, drafted_from):
    kv = after_prefill(10)
    length = play(kv, 0, 10, depth, accepted, drafted)
    expected = [True] * (10 + drafted_from) + [False] * (depth + 1 - drafted_from)
    assert kv.written[: len(expected)].tolist() == expected
    kv.settle(np.array([0]), np.array([length]))
    assert kv.valid_len[0] == 10 + drafted_from


def test_a_request_fresh_from_prefill_keeps_what_its_prefill_left():
    kv = after_prefill(10)
    play(kv, 0, 10, 3, 1)
    kv.begin(np.array([0]), np.array([7]), np.array([5]))
    kv.settle(np.array([0]), np.array([7]))
    assert kv.valid_len[0] == 5


def test_rounds_without_drafts_keep_the_place_where_drafting_goes_on():
    kv, length = after_prefill(10), 10
    for _ in range(3):
        length = play(kv, 0, length, 0, 0)
    kv.settle(np.array([0]), np.array([length]))
    assert kv.valid_len[0] == 10 and not kv.written[10:13].any()


@given(
    holes=st.sets(st.integers(0, POOL_ROWS * 20 - 1)),
    prefixes=st.lists(st.integers(0, 20), min_size=1, max_size=POOL_ROWS),
)
@example(holes={0}, prefixes=[1])
@example(holes=set(), prefixes=[0, 20, 0])
@example(holes={5, 7, 25}, prefixes=[5, 0, 6])  # a hole just behind a prefix does not count
@settings(deadline=None, derandomize=True, max_examples=60)
def test_the_first_hole_of_each_prefix_is_found(holes, prefixes):
    kv = DraftKv(POOL_ROWS, POOL_ROWS * 20, "cpu")
    req_to_token = torch.randperm(POOL_ROWS * 20, generator=torch.Generator().manual_seed(0))
    req_to_token = req_to_token.view(POOL_ROWS, 20).to(torch.int32)
    kv.written[:] = True
    kv.written[list(holes)] = False
    rows = list(range(POOL_ROWS))[::-1][: len(prefixes)]
    found = kv.first_missing(req_to_token, torch.tensor(rows), np.array(prefixes, np.int64))
    for row, prefix, first in zip(rows, prefixes, found.tolist(), strict=True):
        missing = [p for p in range(prefix) if int(req_to_token[row, p]) in holes]
        assert first == min(missing, default=prefix)


PAGE = 4


@pytest.fixture
def drafter(monkeypatch):
    """A language-model drafter whose passes run nothing and draft token 0."""
    from faser_sglang.worker import chain, lm_drafter

    def forward(passed):
        rows = passed.input_ids if passed.spec_info is None else passed.spec_info.select_index
        return SimpleNamespace(next_token_logits=torch.zeros(len(rows), 10))

    for module in (chain, lm_drafter):
        monkeypatch.setattr(module, "make_forward_batch", make_forward_batch)
    model = SimpleNamespace(context_len=100, vocab_size=10)
    worker = SimpleNamespace(
        draft_runner=SimpleNamespace(model_config=model, attn_backend=None, page_size=PAGE),
        forward=forward,
    )
    drafter = lm_drafter.LmDrafter(worker, width=CAP + 1, vocab_size=10)
    drafter.attach_pools(SimpleNamespace(req_to_token=packed_pool()), POOL_ROWS * 100)
    return drafter


def drafter_prefills(drafter, length, prefix=0):
    batch = SimpleNamespace(
        req_pool_indices=torch.tensor([0]),
        req_pool_indices_cpu=torch.tensor([0]),
        prefix_lens=[prefix],
        extend_lens=[length - prefix],
        input_ids=torch.zeros(length - prefix, dtype=torch.int64),
        reqs=[SimpleNamespace(origin_input_ids=[0] * length, output_ids=[])],
    )
    drafter.prefill(batch, torch.tensor([0]), None, is_off=False)
    return length


def drafter_plays(drafter, length, depth, accepted, is_offered=False):
    """One round of the request in row 0, as the worker runs it; the committed length after."""
    if not is_offered:
        offer = drafter.offer(np.array([0]), np.array([length]))
        assert offer.limits[MODEL].tolist() == [100 - length] and not offer.limits[LOOKUP].any()
        assert offer.behind.tolist() == [length - drafter.kv.valid_len[0]]
    req = SimpleNamespace(origin_input_ids=[0] * 100, output_ids=[])
    this_round = make_round([0], [length], [0], [depth], batch=SimpleNamespace(reqs=[req]))
    if depth:
        counts = drafter.draft(this_round).counts
        this_round = this_round.with_depths(counts, counts)
    window = pack_rows(packed_pool(), this_round.rows, this_round.lengths, np.array([depth + 1]))
    accept_lens = torch.tensor([accepted + 1], dtype=torch.int32)
    tokens = torch.zeros(1, CAP + 1, dtype=torch.int64)
    drafter.commit(this_round, window, Verdict(tokens, accept_lens, torch.tensor([0])), None)
    return length + accepted + 1


@pytest.mark.parametrize(
    ("before", "missing"),
    [
        ([(2, 2)], 12),  # all accepted: the last draft has no draft KV
        ([(3, 1), (2, 2)], 14),
        ([(2, 0), (0, 0), (0, 0)], 11),  # rounds without drafts
    ],
)
def test_tokens_that_a_later_round_caught_up_with_are_shared_like_any_other(
    before, missing, drafter
):
    """Else the draft runs again over a cached conversation from its first whole acceptance on."""
    length = drafter_prefills(drafter, 10)
    for depth, accepted in before:
        length = drafter_plays(drafter, length, depth, accepted)

    def first_missing():
        row, prefix = torch.tensor([0]), np.array([length])
        return drafter.kv.first_missing(drafter.req_to_token, row, prefix).tolist()

    assert first_missing() == [missing]
    length = drafter_plays(drafter, length, 2, 0)  # drafting begins at the hole
    assert first_missing() == [length]


@pytest.mark.parametrize(
    ("length", "prefix", "held"),
    [
        (10, 8, 8),  # the whole of what SGLang may match: the tree may hold more
        (12, 8, 8),  # here it may hold the last page
        (12, 4, 12),
        (13, 12, 12),
        (4, 0, 4),  # nothing was matched
    ],
)
def test_rows_whose_slots_the_radix_tree_may_exchange_are_drafted_from_anew(
    length, prefix, held, drafter
):
    """Behind a prefix that is cached whole lie rows that the tree may hold as well."""
    drafter.kv.mark(
        pack_rows(packed_pool(), torch.tensor([0]), torch.tensor([0]), np.array([prefix])),
        torch.tensor([prefix]),
    )
    drafter_prefills(drafter, length, prefix)
    starts, second = [], held if held < length else length + 1
    for _ in range(3):  # the exchange happens before the first round, or before the second
        drafter.offer(np.array([0]), np.array([length]))
        starts.append(int(drafter.kv.valid_len[0]))
        length = drafter_plays(drafter, length, 2, 0, is_offered=True)
    assert starts == [held, second, length - 1]
