"""EAGLE heads against a model of one: every slot it reads holds the right token and states."""

import copy
import math
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

from faser_sglang.control.rounds import LOOKUP, MODEL
from faser_sglang.kernels.reference import ragged_accept
from faser_sglang.worker import chain as chain_module
from faser_sglang.worker import head_drafter, state_ring
from faser_sglang.worker.head_drafter import HeadDrafter
from faser_sglang.worker.packing import pack_rows
from tests.support.forward_batches import make_forward_batch
from tests.support.rounds import make_round

POOL_ROWS, CONTEXT, CAP = 4, 64, 4
TARGET_WIDTH, HEAD_WIDTH = 6, 2  # three layers of the target, one state of the head
WORDS = 89


def mix(*numbers):
    """A number below 2**20, exact in float32, that depends on all of ``numbers``."""
    total = 0
    for number in numbers:
        total = (total * 1_000_003 + number + 12_345) % (1 << 20)
    return total


def target_state(tokens):
    """What the target computes behind ``tokens``."""
    return mix(7, *tokens)


def chain(tokens, depth):
    """The drafts behind ``tokens``: the head over the whole text at once, then step by step.

    Its entry p is the token at p + 1 and the state at p: the target's, or behind the text the
    head's own.
    """
    entries = [(tokens[p + 1], target_state(tokens[: p + 1])) for p in range(len(tokens) - 1)]
    drafts = []
    for _ in range(depth):
        state = mix(*(number for entry in entries for number in entry))
        drafts.append(state % WORDS)
        entries.append((drafts[-1], state))
    return drafts


def chance(word):
    """The head's probability of its own guess, which differs by word: the other logits are 0."""
    weight = math.exp(1 + word / WORDS)
    return weight / (weight + WORDS - 1)


class Head:
    """A head that mixes up all entries of its KV cache up to a row's position."""

    def __init__(self, context_len=CONTEXT):
        config = SimpleNamespace(
            context_len=context_len, hidden_size=HEAD_WIDTH, dtype=torch.float32
        )
        self.draft_runner = SimpleNamespace(model_config=config, attn_backend=None)
        self.hot_token_id = None
        self.passes = []
        self.kv = {}  # by slot

    def forward(self, passed):
        self.passes.append(copy.copy(passed))  # a step may become the next
        hidden = passed.spec_info.hidden_states
        rows = len(passed.input_ids)
        assert rows == len(passed.positions) == len(passed.out_cache_loc) == len(hidden)
        assert torch.equal(passed.spec_info.positions, passed.positions)
        assert passed.input_ids.dtype == torch.int64
        assert passed.capture == CaptureHiddenMode.LAST
        lengths = passed.extend_lens or [1] * len(passed.rows)
        owners = np.repeat(np.arange(len(lengths)), lengths)
        ends = np.cumsum(lengths) - 1
        assert torch.equal(passed.seq_lens, passed.positions[ends] + 1)
        assert passed.seq_lens_cpu.tolist() == passed.seq_lens.tolist()
        states = [int(state) for state in hidden[:, 0]]
        entries = list(zip(passed.input_ids.tolist(), states, strict=True))
        self.kv.update(zip(passed.out_cache_loc.tolist(), entries, strict=True))
        out = torch.zeros(len(owners), HEAD_WIDTH)
        for i, owner in enumerate(owners):
            row, position = int(passed.rows[owner]), int(passed.positions[i])
            assert position < self.draft_runner.model_config.context_len
            slots = self.req_to_token[row, : position + 1].tolist()
            assert slots[-1] == int(passed.out_cache_loc[i])
            out[i, 0] = mix(*(number for slot in slots for number in self.kv[slot]))
        if passed.mode != ForwardMode.DECODE:
            out = out[passed.spec_info.select_index]
        logits = torch.zeros(len(out), WORDS)
        words = out[:, 0].long() % WORDS
        logits[torch.arange(len(out)), words] = 1 + words / WORDS
        return SimpleNamespace(next_token_logits=logits, hidden_states=out)


class Request:
    """``tokens`` end with the bonus token, which is not run yet."""

    def __init__(self, row, prompt):
        self.row = row
        self.tokens = list(prompt)

    @property
    def length(self):
        return len(self.tokens) - 1


class Driver:
    """Runs a HeadDrafter as the worker does, with a target that says what it is told."""

    def __init__(self, context_len=CONTEXT):
        self.head = Head(context_len)
        self.drafter = HeadDrafter(self.head, "eagle3", CAP)
        self.req_to_token = torch.randperm(
            POOL_ROWS * CONTEXT, generator=torch.Generator().manual_seed(5)
        )
        self.req_to_token = self.req_to_token.view(POOL_ROWS, CONTEXT).to(torch.int32)
        self.head.req_to_token = self.req_to_token
        pool = SimpleNamespace(req_to_token=self.req_to_token)
        self.drafter.attach_pools(pool, slots=self.req_to_token.numel())

    def prefill(self, requests, prefixes=None, sampled=None, chunked=None, is_off=False):
        """The target runs ``requests`` from ``prefixes`` on.

        ``sampled``: the bonus tokens. ``chunked``: (request, its next token), if one is cut.
        """
        prefixes = prefixes or [0] * len(requests)
        sampled = sampled or [mix(request.row, len(request.tokens)) % WORDS for request in requests]
        inputs, states = [], []
        for request, prefix in zip(requests, prefixes, strict=True):
            inputs += request.tokens[prefix:]
            ends = range(prefix + 1, len(request.tokens) + 1)
            states += [target_state(request.tokens[:end]) for end in ends]
        cut, following = chunked or (None, None)
        reqs = [SimpleNamespace(of=request) for request in requests]
        batch = SimpleNamespace(
            reqs=reqs,
            req_pool_indices=torch.tensor([request.row for request in requests]),
            req_pool_indices_cpu=torch.tensor([request.row for request in requests]),
            prefix_lens=prefixes,
            extend_lens=[len(q.tokens) - p for q, p in zip(requests, prefixes, strict=True)],
            input_ids=torch.tensor(inputs),
            chunked_req=next((req for req in reqs if req.of is cut), None),
            chunked_req_next_prompt_token=following,
        )
        kept = batch.input_ids.clone()
        bonus = torch.tensor(sampled, dtype=torch.int32)
        self.drafter.prefill(batch, bonus, self.wide(states), is_off=is_off)
        assert torch.equal(batch.input_ids, kept)
        for request, token in zip(requests, sampled, strict=True):
            if request is not cut:
                request.tokens.append(token)

    @staticmethod
    def wide(states):
        """[rows, target's width] hidden states."""
        hidden = torch.zeros(len(states), TARGET_WIDTH)
        hidden[:, 0] = torch.tensor(states)
        return hidden

    def make_round(self, requests, depths):
        rows = np.array([request.row for request in requests], np.int64)
        lengths = np.array([request.length for request in requests], np.int64)
        offered = self.drafter.offer(rows, lengths)
        context_len = self.head.draft_runner.model_config.context_len
        assert offered.limits[MODEL].tolist() == (context_len - lengths).tolist()
        assert not offered.limits[LOOKUP].any()
        limits = np.clip(offered.limits[MODEL], 0, CAP)
        self.behind = offered.behind
        return make_round(
            rows,
            lengths,
            [request.tokens[-1] for request in requests],
            np.minimum(depths, limits),
            batch="batch",
        )

    def play(self, requests, depths, accepts, verify=None):
        """One round; the drafts of each request. Of them the first ``accepts`` are right.

        ``verify``: at most so many drafts of each are verified; all, where it is not given.
        """
        this_round = self.make_round(requests, depths)
        size, width = len(requests), CAP + 1
        padded = torch.zeros(size, CAP, dtype=torch.int64)
        drafted = this_round.depths_cpu
        if this_round.max_depth:
            before = len(self.head.passes)
            drafts, chances, counts = self.drafter.draft(this_round)
            assert chances.shape == drafts.shape == (size, this_round.max_depth)
            assert counts.tolist() == drafted.tolist() and counts is not drafted
            first = sum((self.behind + 1)[drafted > 0])  # rows, as the policy was told
            assert len(self.head.passes[before].input_ids) == first
            padded[:, : this_round.max_depth] = drafts
            rows = zip(drafted, drafts.tolist(), chances.tolist(), strict=True)
            for depth, row, sure in rows:
                assert sure[:depth] == pytest.approx([chance(token) for token in row[:depth]])
        verified = drafted if verify is None else np.minimum(drafted, verify)
        this_round = this_round.with_depths(verified, drafted)
        self._verify(this_round, requests, padded, accepts, width)
        return [row[:depth] for row, depth in zip(padded.tolist(), drafted, strict=True)]

    def _verify(self, this_round, requests, padded, accepts, width):
        window = pack_rows(
            self.req_to_token, this_round.rows, this_round.lengths, this_round.depths_cpu + 1
        )
        depths, sampled, states = this_round.depths_cpu.tolist(), [], []
        for request, depth, right, row in zip(requests, depths, accepts, padded, strict=True):
            drafted = row[:depth].tolist()
            right = min(right, depth)
            for place in range(depth + 1):
                said = drafted[place] if place < depth else mix(depth, request.length) % WORDS
                sampled.append(said if place < right else (said + 1 + place) % WORDS)
                states.append(target_state(request.tokens + drafted[:place]))
        offsets = window.positions - this_round.lengths[window.owners]
        verdict = ragged_accept(
            torch.tensor(sampled), padded, this_round.depths, window.owners, offsets, width
        )
        self.drafter.commit(this_round, window, verdict, self.wide(states))
        for i, request in enumerate(requests):
            count = int(verdict.accept_lens[i])
            assert count == min(accepts[i], depths[i]) + 1
            request.tokens += verdict.tokens[i, :count].tolist()


@pytest.fixture(autouse=True)
def stub_sglang(monkeypatch):
    """A forward batch is what it was made of."""
    for module in (chain_module, head_drafter):
        monkeypatch.setattr(module, "make_forward_batch", make_forward_batch)


def ids(passed):
    return passed.input_ids.tolist()


def state_of(passed):
    return [int(state) for state in passed.spec_info.hidden_states[:, 0]]


# -- prefill ------------------------------------------------------------------------------------


def test_a_prefill_runs_each_rows_next_token_with_the_targets_states():
    driver = Driver()
    requests = [Request(2, [11, 12, 13]), Request(0, [21]), Request(3, [31, 32])]
    driver.prefill(requests, sampled=[14, 22, 33])
    (passed,) = driver.head.passes
    assert passed.mode == ForwardMode.DRAFT_EXTEND_V2
    assert ids(passed) == [12, 13, 14, 22, 32, 33]
    assert passed.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert (
        passed.out_cache_loc.tolist()
        == driver.req_to_token[[2, 2, 2, 0, 3, 3], [0, 1, 2, 0, 0, 1]].tolist()
    )
    assert state_of(passed) == [
        target_state(request.tokens[:end])
        for request in requests
        for end in range(1, len(request.tokens))
    ]
    assert passed.spec_info.hidden_states.shape == (6, TARGET_WIDTH)
    assert passed.spec_info.select_index.tolist() == [2, 3, 5]


def test_a_chunk_ends_with_the_prompts_next_token_not_with_the_sampled_one():
    driver = Driver()
    whole, cut = Request(1, [11, 12]), Request(2, [21, 22, 23])
    driver.prefill([whole, cut], sampled=[13, 77], chunked=(cut, 24))
    assert ids(driver.head.passes[-1]) == [12, 13, 22, 23, 24]
    cut.tokens += [24, 25]
    driver.prefill([cut], prefixes=[3], sampled=[26])
    passed = driver.head.passes[-1]
    assert ids(passed) == [25, 26] and passed.positions.tolist() == [3, 4]
    expected = [chain(request.tokens, 3) for request in (whole, cut)]
    assert driver.play([whole, cut], [3, 3], [0, 0]) == expected


def test_a_cached_prefix_is_not_run_again():
    """SGLang's radix keys are pairs: the slot before the prefix's end knows the next token."""
    driver = Driver()
    first = Request(1, [11, 12, 13, 14, 15])
    driver.prefill([first])
    driver.req_to_token[3, :3] = driver.req_to_token[1, :3]
    second = Request(3, [11, 12, 13, 14, 25])
    driver.prefill([second], prefixes=[3])
    assert driver.head.passes[-1].positions.tolist() == [3, 4]
    requests = [second, first]
    assert driver.play(requests, [3, 2], [0, 0]) == [
        chain(second.tokens[:6], 3),
        chain(first.tokens[:6], 2),
    ]


def test_without_drafting_a_prefill_runs_nothing():
    driver = Driver()
    driver.prefill([Request(0, [1, 2])], is_off=True)
    assert driver.head.passes == []


# -- rounds -------------------------------------------------------------------------------------


def test_the_head_runs_what_was_accepted_when_it_drafts_next():
    driver = Driver()
    requests = [Request(0, [11, 12]), Request(2, [21]), Request(1, [31, 32, 33])]
    driver.prefill(requests)
    a, b, c = (request.length for request in requests)
    before = len(driver.head.passes)
    driver.play(requests, [3, 0, 2], [1, 0, 2])
    first = driver.head.passes[before]
    assert first.rows.tolist() == [0, 1] and first.positions.tolist() == [a - 1, c - 1]
    after = [list(request.tokens) for request in requests]
    before = len(driver.head.passes)
    driver.play(requests, [1, 1, 1], [0, 0, 0])
    (passed,) = driver.head.passes[before:]
    assert passed.mode == ForwardMode.DRAFT_EXTEND_V2 and passed.extend_lens == [2, 2, 3]
    assert passed.positions.tolist() == [a, a + 1, b - 1, b, c, c + 1, c + 2]
    assert passed.spec_info.select_index.tolist() == [1, 3, 6]
    assert ids(passed) == [*after[0][-2:], *after[1][-2:], *after[2][-3:]]
    assert state_of(passed) == [
        target_state(after[owner][: position + 1])
        for owner, position in zip([0, 0, 1, 1, 2, 2, 2], passed.positions.tolist(), strict=True)
    ]


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_depth_d_takes_d_passes(depth):
    driver = Driver()
    requests = [Request(0, [11, 12]), Request(2, [21])]
    driver.prefill(requests)
    before = len(driver.head.passes)
    driver.drafter.draft(driver.make_round(requests, [depth, 1]))
    modes = [passed.mode for passed in driver.head.passes[before:]]
    assert modes == [ForwardMode.DRAFT_EXTEND_V2] + [ForwardMode.DECODE] * (depth - 1)


def test_a_step_runs_the_last_draft_with_the_heads_own_state_for_those_that_go_on():
    driver = Driver()
    requests = [Request(0, [11, 12]), Request(1, [21]), Request(2, [31, 32, 33]), Request(3, [41])]
    driver.prefill(requests)
    chains = [chain(request.tokens, 4) for request in requests]
    before = len(driver.head.passes)
    drafts = driver.drafter.draft(driver.make_round(requests, [2, 0, 4, 3])).tokens
    steps = driver.head.passes[before + 1 :]
    assert [step.members.tolist() for step in steps] == [[2, 3, 0], [2, 3], [2]]
    assert [ids(step) for step in steps] == [
        [chains[2][0], chains[3][0], chains[0][0]],
        [chains[2][1], chains[3][1]],
        [chains[2][2]],
    ]
    assert [step.positions.tolist() for step in steps] == [[3, 1, 2], [4, 2], [5]]
    assert [step.rows.tolist() for step in steps] == [[2, 3, 0], [2, 3], [2]]
    for step in steps:  # each draft is its state modulo WORDS
        assert step.spec_info.hidden_states.shape[1] == HEAD_WIDTH
        assert [state % WORDS for state in state_of(step)] == ids(step)
    for row, own, depth in zip(drafts.tolist(), chains, [2, 0, 4, 3], strict=True):
        assert row[:depth] == own[:depth]


def test_a_reduced_vocabulary_is_mapped_to_the_targets():
    driver = Driver()
    driver.head.hot_token_id = 1000 + torch.arange(WORDS).flip(0)
    request = Request(0, [11, 12])
    driver.prefill([request])
    before = len(driver.head.passes)
    drafts = driver.drafter.draft(driver.make_round([request], [3])).tokens.tolist()[0]
    steps = driver.head.passes[before + 1 :]
    assert all(1000 <= token < 1000 + WORDS for token in drafts)
    assert [ids(step) for step in steps] == [[drafts[0]], [drafts[1]]]
    assert [1000 + WORDS - 1 - state_of(step)[0] % WORDS for step in steps] == drafts[:2]


def test_rounds_without_drafts_cost_no_pass_and_leave_no_gap():
    driver = Driver()
    request = Request(3, [11, 12, 13])
    driver.prefill([request])
    before = len(driver.head.passes)
    for _ in range(3):
        assert driver.play([request], [0], [0]) == [[]]
    assert len(driver.head.passes) == before
    assert driver.play([request], [4], [4]) == [chain(request.tokens[:7], 4)]
    assert driver.head.passes[before].positions.tolist() == [2, 3, 4, 5]
    assert driver.play([request], [4], [0]) == [chain(request.tokens[:12], 4)]


def test_a_request_that_would_outgrow_the_ring_is_caught_up_alone(monkeypatch):
    monkeypatch.setattr(state_ring, "MOST_POSITIONS", 8)
    driver = Driver()
    plain, busy = Request(1, [11, 12, 13]), Request(2, [21, 22])
    driver.prefill([plain, busy])
    before = len(driver.head.passes)
    for _ in range(9):
        driver.play([plain, busy], [0, 2], [0, 0])
    alone = [passed for passed in driver.head.passes[before:] if passed.rows.tolist() == [1]]
    assert [passed.positions.tolist() for passed in alone] == [list(range(2, 10))]
    expected = chain(plain.tokens, 4)
    assert driver.play([plain], [4], [0]) == [expected]


def test_the_ring_holds_a_window_however_little_memory_is_granted(monkeypatch):
    monkeypatch.setattr(state_ring, "MOST_BYTES", 1)
    driver = Driver()
    request = Request(0, [11, 12])
    driver.prefill([request])
    assert driver.drafter.ring.span == CAP + 2
    for depth, right in [(4, 4), (0, 0), (0, 0), (4, 3), (2, 2), (0, 0), (4, 0)]:
        assert driver.play([request], [depth], [right]) == [chain(request.tokens, depth)] or depth


def test_a_request_that_ends_leaves_nothing_that_the_head_has_not_run():
    """Its slots go to the radix tree, and another request goes on from them."""
    driver = Driver()
    ended = Request(1, [11, 12, 13, 14])
    driver.prefill([ended])
    driver.play([ended], [2], [1])
    driver.play([ended], [0], [0])
    shared = ended.tokens[: ended.length]
    before = len(driver.head.passes)
    view = SimpleNamespace(reqs=["ended"])
    driver.drafter.finish(view, 1, ended.length)
    driver.drafter.finish(view, 1, ended.length)  # nothing is left to do
    (passed,) = driver.head.passes[before:]
    assert passed.batch is view and passed.members.tolist() == [0]
    assert passed.positions.tolist() == [4, 5, 6]
    second = Request(3, [*shared, 61])
    # The radix keys of heads are pairs: the last slot is not shared.
    driver.req_to_token[3, : len(shared) - 1] = driver.req_to_token[1, : len(shared) - 1]
    driver.prefill([second], prefixes=[len(shared) - 1])
    assert driver.play([second], [4], [0]) == [chain(second.tokens[:9], 4)]


def test_a_request_that_ended_beyond_the_heads_context_is_caught_up_to_it():
    driver = Driver(context_len=6)
    request = Request(0, [11, 12, 13])
    driver.prefill([request])
    for _ in range(6):
        driver.play([request], [0], [0])
    driver.drafter.finish(SimpleNamespace(reqs=["ended"]), 0, request.length)
    assert driver.head.passes[-1].positions.tolist() == [2, 3, 4, 5]


def test_a_new_request_on_a_row_has_nothing_of_the_one_before():
    driver = Driver()
    old = Request(1, [11, 12, 13])
    driver.prefill([old])
    driver.play([old], [4], [2])
    new = Request(1, [51])
    driver.prefill([new])
    assert driver.play([new], [4], [0]) == [chain(new.tokens[:2], 4)]


@pytest.mark.parametrize("verify", [0, 1, 2, 3])
def test_drafts_that_were_withheld_leave_no_trace(verify):
    """The head has run them: its next pass overwrites their slots."""
    driver = Driver()
    requests = [Request(0, [11, 12]), Request(2, [21, 22, 23])]
    driver.prefill(requests)
    for _ in range(3):
        expected = [chain(request.tokens, 4) for request in requests]
        assert driver.play(requests, [4, 4], [CAP, 0], verify=verify) == expected


# -- a head whose context is shorter than the target's ------------------------------------------


def test_rows_beyond_the_heads_context_are_left_out_of_a_prefill():
    driver = Driver(context_len=4)
    requests = [
        Request(0, range(10, 16)),  # runs into the end
        Request(1, [21, 22]),
        Request(2, range(30, 40)),  # its prefix lies behind the end already
        Request(3, range(50, 53)),
    ]
    for row, prefix in ((0, 2), (2, 5)):
        part = Request(row, requests[row].tokens[:prefix])
        driver.prefill([part], chunked=(part, requests[row].tokens[prefix]))
    driver.prefill(requests, prefixes=[2, 0, 5, 0], sampled=[16, 23, 40, 53])
    passed = driver.head.passes[-1]
    assert passed.rows.tolist() == [0, 1, 3]
    assert ids(passed) == [13, 14, 22, 23, 51, 52, 53]
    assert passed.positions.tolist() == [2, 3, 0, 1, 0, 1, 2]
    assert state_of(passed) == [
        target_state(requests[row].tokens[: position + 1])
        for row, position in zip([0, 0, 1, 1, 3, 3, 3], passed.positions.tolist(), strict=True)
    ]


@pytest.mark.parametrize("tokens", [[4], [9], [4, 4]])
def test_a_prefill_wholly_beyond_the_heads_context_runs_nothing(tokens):
    driver = Driver(context_len=4)
    requests = [Request(row, range(count + 2)) for row, count in enumerate(tokens)]
    driver.prefill(requests, prefixes=tokens)
    assert driver.head.passes == []


def test_a_window_is_cut_at_the_end_of_the_heads_context():
    driver = Driver(context_len=6)
    requests = [Request(0, [11, 12, 13, 14]), Request(1, range(20, 30)), Request(2, [31])]
    driver.prefill(requests)
    drafts = driver.play(requests, [2, 2, 2], [2, 0, 1])
    assert [len(row) for row in drafts] == [2, 0, 2]
    before = len(driver.head.passes)
    assert driver.play(requests, [4, 4, 4], [0, 0, 0])[2] == chain(requests[2].tokens[:4], 3)
    for passed in driver.head.passes[before:]:
        assert passed.rows.tolist() == [2]
    for _ in range(driver.drafter.ring.span + 4):  # they outgrow the ring, and nobody asks
        driver.play(requests[:2], [0, 0], [0, 0])
    assert driver.head.passes[-1].rows.tolist() == [2]


# -- everything at once -------------------------------------------------------------------------


@st.composite
def sessions(draw):
    prompts = draw(st.lists(st.integers(1, 9), min_size=1, max_size=POOL_ROWS))
    cuts = [draw(st.integers(0, size - 1)) for size in prompts]
    row = st.integers(0, len(prompts) - 1)
    number = st.integers(0, CAP)
    rounds = st.lists(
        st.dictionaries(row, st.tuples(number, number, number, st.booleans()), min_size=1),
        max_size=8,
    )
    context_len, ring = draw(st.sampled_from([8, 13, CONTEXT])), draw(st.sampled_from([1, 32]))
    return context_len, ring, prompts, cuts, draw(rounds)


@given(sessions())
@settings(deadline=None, derandomize=True, max_examples=80)
def test_drafts_are_those_of_a_head_that_ran_over_the_whole_text(session):
    """Chunks, new requests on used rows, depths, trims, acceptances and contexts of any kind."""
    context_len, ring, prompts, cuts, rounds = session
    with mock.patch.object(state_ring, "MOST_POSITIONS", ring):
        play_session(context_len, ring, prompts, cuts, rounds)


def play_session(context_len, ring, prompts, cuts, rounds):
    driver = Driver(context_len)
    requests = {}

    def start(row, generation=0):
        prompt = [mix(row, i, generation) % WORDS for i in range(prompts[row])]
        requests[row] = Request(row, prompt[: cuts[row]])
        if cuts[row]:
            driver.prefill([requests[row]], chunked=(requests[row], prompt[cuts[row]]))
        requests[row].tokens += prompt[cuts[row] :]
        driver.prefill([requests[row]], prefixes=[cuts[row]])

    for row in range(len(prompts)):
        start(row)
    for number, asked in enumerate(rounds):
        for row, (*_, is_new) in asked.items():
            if is_new:
                start(row, number + 1)
        batch = [requests[row] for row in asked]
        depths, rights, verify, _ = zip(*asked.values(), strict=True)
        before = [list(request.tokens) for request in batch]
        steps = len(driver.head.passes)
        drafts = driver.play(batch, depths, rights, verify)
        granted = [
            min(depth, max(context_len - len(tokens) + 1, 0))
            for depth, tokens in zip(depths, before, strict=True)
        ]
        assert drafts == [chain(*pair) for pair in zip(before, granted, strict=True)]
        if ring == 32:  # a small one is outgrown by requests that draft nothing
            assert len(driver.head.passes) - steps == max(granted)
