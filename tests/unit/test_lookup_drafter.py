"""Lookup and hybrid drafting: each request's own text, read in time, and nobody else's."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_sglang.control.ngram import continuation, longest_match
from faser_sglang.control.rounds import LOOKUP, MODEL, first_arm, offer_of
from faser_sglang.kernels.reference import Verdict
from faser_sglang.worker.drafter import Drafter, Drafts
from faser_sglang.worker.lookup_drafter import (
    HYBRID_MATCH,
    NO_LIMIT,
    HybridDrafter,
    LookupDrafter,
)
from tests.support import rounds

POOL_ROWS, CONTEXT, CAP = 5, 80, 4
GARBAGE = 999  # what a verdict holds behind the accepted tokens


def ints(*values):
    return np.array(values, np.int64)


def attached(drafter):
    pool = SimpleNamespace(req_to_token=torch.zeros(POOL_ROWS, CONTEXT, dtype=torch.int32))
    drafter.attach_pools(pool, slots=1)
    return drafter


def make_lookup(min_match=1, cap=CAP):
    return attached(LookupDrafter(cap, CONTEXT, min_match))


class Request:
    """``tokens`` end with the bonus token, which is not run yet."""

    def __init__(self, row, prompt, bonus):
        self.row = row
        self.tokens = [*prompt, bonus]
        self.prompt = len(prompt)

    @property
    def length(self):
        return len(self.tokens) - 1


def prefill(drafter, requests, prefixes=None, hidden=None, **more):
    """The target has run the prompts and sampled each request's last token."""
    prefixes = prefixes or [0] * len(requests)
    batch = SimpleNamespace(
        req_pool_indices_cpu=torch.tensor([request.row for request in requests]),
        prefix_lens=prefixes,
        extend_lens=[q.length - prefix for q, prefix in zip(requests, prefixes, strict=True)],
        reqs=[
            SimpleNamespace(
                origin_input_ids=request.tokens[: request.prompt],
                output_ids=request.tokens[request.prompt : -1],
            )
            for request in requests
        ],
    )
    bonus = torch.tensor([request.tokens[-1] for request in requests], dtype=torch.int32)
    drafter.prefill(batch, bonus, hidden, is_off=more.get("is_off", False))
    return batch


def offer(drafter, requests):
    rows = np.array([request.row for request in requests], np.int64)
    lengths = np.array([request.length for request in requests], np.int64)
    return drafter.offer(rows, lengths)


def make_round(requests, depths, arms):
    return rounds.make_round(
        [request.row for request in requests],
        [request.length for request in requests],
        [request.tokens[-1] for request in requests],
        depths,
        arms=arms,
    )


def drafted(drafter, this_round):
    """The drafts, and the round as it goes on."""
    drafts = drafter.draft(this_round)
    assert drafts.counts is not this_round.depths_cpu
    assert drafts.counts.tolist() == this_round.depths_cpu.tolist()
    return drafts, this_round.with_depths(drafts.counts, drafts.counts)


def commit(drafter, this_round, requests, emitted, hidden=None):
    """The target emits these tokens; its verdict has anything behind them."""
    tokens = torch.full((len(requests), CAP + 1), GARBAGE)
    for i, (request, new) in enumerate(zip(requests, emitted, strict=True)):
        tokens[i, : len(new)] = torch.tensor(new)
        request.tokens += new
    accept_lens = torch.tensor([len(new) for new in emitted], dtype=torch.int32)
    bonus = torch.tensor([new[-1] for new in emitted])
    verdict = Verdict(tokens, accept_lens, bonus)
    drafter.commit(this_round, None, verdict, hidden)
    return verdict


def play(drafter, requests, emitted):
    """One round of a batch at the deepest drafts; the offer and the drafts of each request.

    Lookup drafts where it can.
    """
    offered = offer(drafter, requests)
    arms = first_arm(offered)
    depths = np.clip(offered.limits[arms, range(len(arms))], 0, CAP).tolist()
    this_round = make_round(requests, depths, arms)
    drafts = [[] for _ in requests]
    if this_round.max_depth:
        made, this_round = drafted(drafter, this_round)
        assert made.tokens.shape == (len(requests), this_round.max_depth)
        drafts = [row[:depth] for row, depth in zip(made.tokens.tolist(), depths, strict=True)]
    commit(drafter, this_round, requests, emitted)
    return offered, drafts


def expected_drafts(request, min_match=1, cap=CAP):
    text = np.array(request.tokens)
    match = longest_match(text)
    return continuation(text, match, cap).tolist() if match.length >= min_match else []


# -- lookup alone -------------------------------------------------------------------------------


def test_what_followed_the_texts_end_is_the_draft():
    drafter = make_lookup()
    request = Request(2, [1, 2, 3, 4, 5, 6, 1], 2)
    prefill(drafter, [request])
    offered, drafts = play(drafter, [request], [[3]])
    assert offered.limits.tolist() == [[0], [CAP]]
    assert drafts == [[3, 4, 5, 6]]


def test_a_text_without_a_repetition_is_offered_nothing():
    drafter = make_lookup()
    request = Request(0, [1, 2, 3], 4)
    prefill(drafter, [request])
    offered = offer(drafter, [request])
    assert not offered.limits.any() and not offered.chances.any()


@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_the_longer_the_match_the_better_the_guess(length):
    drafter = make_lookup()
    words = list(range(20, 20 + length))
    request = Request(0, [*words, 9, *words[:-1]], words[-1])
    prefill(drafter, [request])
    offered = offer(drafter, [request])
    assert offered.chances.tolist() == [[0.0], [length / (length + 1)]]
    assert offered.behind.tolist() == [0]


def test_the_guess_of_a_draft_is_that_of_this_rounds_match():
    drafter = make_lookup()
    requests = [Request(2, [1, 2, 3, 4, 2], 3), Request(0, [5, 6], 7)]
    prefill(drafter, requests)
    play(drafter, requests, [[9], [5]])
    play(drafter, requests, [[8], [6]])
    offered = offer(drafter, requests)
    this_round = make_round(requests, [0, 2], first_arm(offered))
    chances = drafted(drafter, this_round)[0].chances
    assert offered.limits[LOOKUP].tolist() == [0, CAP]
    assert chances[1].tolist() == pytest.approx([2 / 3, 2 / 3])
    assert chances[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("min_match", [1, 2, 3, 4])
def test_a_match_that_is_too_short_is_none(min_match):
    drafter = make_lookup(min_match)
    request = Request(0, [1, 2, 3, 9, 8, 2], 3)  # two tokens match
    prefill(drafter, [request])
    assert offer(drafter, [request]).limits[LOOKUP].tolist() == [CAP if min_match <= 2 else 0]


def test_a_round_takes_no_more_columns_than_its_deepest_request():
    drafter = make_lookup()
    requests = [Request(3, [5, 6, 7, 8, 5], 6), Request(1, [1, 2, 1, 2, 1], 2)]
    prefill(drafter, requests)
    offered = offer(drafter, requests)
    (drafts, chances, _), _ = drafted(drafter, make_round(requests, [1, 2], first_arm(offered)))
    assert chances.shape == (2, 2) and chances.dtype == torch.float32
    assert chances.T.tolist() == [pytest.approx(offered.chances[LOOKUP].tolist())] * 2
    assert drafts.dtype == torch.int64 and drafts.shape == (2, 2)
    assert (drafts[0, :1].tolist(), drafts[1].tolist()) == ([7], [1, 2])


def test_each_request_of_a_batch_looks_at_its_own_text():
    drafter = make_lookup()
    requests = [
        Request(4, [1, 2, 3, 4, 1], 2),
        Request(0, [1, 2, 3], 5),
        Request(2, [7, 1, 2, 9, 1], 2),
    ]
    prefill(drafter, requests)
    offered, drafts = play(drafter, requests, [[1], [2], [3]])
    assert offered.limits[LOOKUP].tolist() == [CAP, 0, CAP]
    assert drafts == [[3, 4, 1, 2], [], [9, 1, 2, 9]]


def test_the_tokens_of_a_round_are_part_of_the_text_in_the_next_one():
    drafter = make_lookup()
    request = Request(1, [1, 2, 3], 4)
    prefill(drafter, [request])
    play(drafter, [request], [[1, 2]])
    _, drafts = play(drafter, [request], [[9]])
    assert drafts == [[3, 4, 1, 2]]


def test_the_tokens_of_several_rounds_that_nobody_read_come_in_their_order():
    """Requests that sit out a round: their tokens wait for them."""
    drafter = make_lookup()
    requests = [Request(1, [1, 2, 3], 4), Request(3, [6, 7, 8], 9)]
    prefill(drafter, requests)
    arms = ints(LOOKUP, LOOKUP)
    commit(drafter, make_round(requests, [0, 0], arms), requests, [[1, 2], [6]])
    commit(drafter, make_round(requests[:1], [0], arms[:1]), requests[:1], [[3, 4, 1]])
    assert play(drafter, requests[1:], [[9]])[1] == [[7, 8, 9, 6]]
    assert requests[0].tokens == [1, 2, 3, 4, 1, 2, 3, 4, 1]
    assert play(drafter, requests[:1], [[9]])[1] == [[2, 3, 4, 1]]


def test_rejected_tokens_do_not_stay_in_the_text():
    drafter = make_lookup()
    request = Request(1, [1, 2, 3], 4)
    prefill(drafter, [request])
    play(drafter, [request], [[5]])  # four places of garbage behind the 5
    play(drafter, [request], [[6]])
    play(drafter, [request], [[GARBAGE]])  # the first time that the request says it
    assert offer(drafter, [request]).limits[LOOKUP].tolist() == [0]
    play(drafter, [request], [[3]])
    assert offer(drafter, [request]).limits[LOOKUP].tolist() == [CAP]
    assert drafter.draft(make_round([request], [CAP], ints(LOOKUP))).tokens.tolist() == [
        [4, 5, 6, GARBAGE]
    ]


def test_garbage_right_behind_the_bonus_token_is_not_seen():
    drafter = make_lookup()
    request = Request(0, [1, 2], 3)
    prefill(drafter, [request])
    play(drafter, [request], [[GARBAGE]])
    assert offer(drafter, [request]).limits[LOOKUP].tolist() == [0]


def test_a_chunk_of_a_prompt_is_overwritten_by_what_really_comes_next():
    drafter = make_lookup()
    prompt = [1, 2, 3, 4, 5, 6]
    prefill(drafter, [Request(0, prompt[:3], GARBAGE)])  # what a chunk in between samples
    request = Request(0, prompt, 2)
    prefill(drafter, [request], prefixes=[3])
    assert play(drafter, [request], [[3]])[1] == [[3, 4, 5, 6]]


def test_a_cached_prefix_is_part_of_the_text():
    drafter = make_lookup()
    request = Request(0, [1, 2, 3, 4, 5, 6], 2)
    prefill(drafter, [request], prefixes=[5])
    assert play(drafter, [request], [[3]])[1] == [[3, 4, 5, 6]]


def test_a_retracted_request_comes_back_with_its_output():
    drafter = make_lookup()
    request = Request(0, [1, 2, 3], 4)
    prefill(drafter, [request])
    play(drafter, [request], [[5, 6]])
    offer(drafter, [request])
    request.row = 3
    request.tokens.append(2)  # sampled by the second prefill
    prefill(drafter, [request])
    assert play(drafter, [request], [[9]])[1] == [[3, 4, 5, 6]]


def test_a_new_request_sees_nothing_of_the_one_before_on_its_row():
    drafter = make_lookup()
    old = Request(1, [1, 2, 3, 4, 5, 6, 7, 8], 9)
    prefill(drafter, [old])
    play(drafter, [old], [[10, 11]])
    offer(drafter, [old])
    new = Request(1, [1, 20], 3)
    prefill(drafter, [new])
    assert offer(drafter, [new]).limits[LOOKUP].tolist() == [0]
    play(drafter, [new], [[21]])
    assert offer(drafter, [new]).limits[LOOKUP].tolist() == [0]


@pytest.mark.parametrize("longer", range(1, CAP + 4))
def test_the_last_round_of_the_request_before_writes_nothing_into_a_new_ones_text(longer):
    """A request ends with a round, and a prefill on its row comes before the next round."""
    drafter = make_lookup()
    old = Request(1, [1, 2, 3], 4)
    prefill(drafter, [old])
    play(drafter, [old], [[5, 6]])
    new = Request(1, list(range(20, 23 + longer)), 20)  # says its first token again
    prefill(drafter, [new])
    expected = [[*new.tokens[1:], *new.tokens[1:]][:CAP]]
    assert play(drafter, [new], [[9]])[1] == expected


def test_a_request_may_fill_the_whole_context():
    drafter = make_lookup()
    request = Request(4, list(range(100, 100 + CONTEXT - 2)), 100)
    prefill(drafter, [request])
    _, drafts = play(drafter, [request], [[101, 102, 103, 104, 105]])
    assert drafts == [[101, 102, 103, 104]]
    offer(drafter, [request])  # reads a window that ends behind the context's end


def test_without_drafting_nothing_waits_for_a_prefill():
    drafter = make_lookup()

    class Sampled:
        def tolist(self):
            raise AssertionError("the host waited")

    drafter.prefill(SimpleNamespace(), Sampled(), None, is_off=True)


def test_lookup_has_no_model_and_no_limit_of_its_own():
    drafter = make_lookup()
    assert (drafter.kind, drafter.draft_worker, drafter.reads_hidden) == ("ngram", None, False)
    assert min(drafter.context_len, 10**9) == 10**9 and drafter.context_len == NO_LIMIT


@st.composite
def conversations(draw):
    """Prompts, and rounds: which requests take part and what they emit."""
    token = st.integers(0, 2)
    text = st.lists(token, min_size=1, max_size=12)
    prompts = draw(st.lists(text, min_size=1, max_size=POOL_ROWS))
    emitted = st.lists(token, min_size=1, max_size=CAP + 1)
    round_ = st.dictionaries(st.integers(0, len(prompts) - 1), emitted, min_size=1)
    return draw(st.integers(1, 4)), prompts, draw(st.lists(round_, max_size=12))


@given(conversations())
@settings(deadline=None, derandomize=True, max_examples=120)
def test_drafts_are_those_of_the_text_that_each_request_really_has(case):
    min_match, prompts, rounds = case
    drafter = make_lookup(min_match)
    requests = [Request(POOL_ROWS - 1 - i, p, p[0]) for i, p in enumerate(prompts)]
    prefill(drafter, requests)
    for emitted in rounds:
        batch = [requests[i] for i in emitted]
        expected = [expected_drafts(request, min_match) for request in batch]
        offered, drafts = play(drafter, batch, list(emitted.values()))
        assert drafts == expected
        assert offered.limits[LOOKUP].tolist() == [len(chain) for chain in expected]


# -- hybrid -------------------------------------------------------------------------------------


class FakeModel(Drafter):
    """A draft model that says 500, 501, ... and remembers what it was asked."""

    kind = "fake"
    context_len = 40
    reads_hidden = True
    stops_at = CAP

    def __init__(self):
        self.draft_worker = object()
        self.calls = []

    def attach_pools(self, req_to_token_pool, slots):
        self.calls.append(("attach_pools", req_to_token_pool, slots))

    def prefill(self, batch, bonus, hidden, *, is_off):
        self.calls.append(("prefill", batch, bonus, hidden, is_off))

    def offer(self, rows, lengths):
        self.calls.append(("offer", rows.tolist(), lengths.tolist()))
        limits = self.context_len - lengths
        return offer_of(MODEL, limits, np.full(len(rows), 0.25), behind=10 + rows)

    def draft(self, this_round):
        assert this_round.max_depth > 0
        self.calls.append(("draft", this_round))
        tokens = (500 + torch.arange(this_round.max_depth)).repeat(this_round.size, 1)
        return Drafts(tokens, tokens / 1000, np.minimum(this_round.depths_cpu, self.stops_at))

    def commit(self, this_round, window, verdict, hidden):
        self.calls.append(("commit", this_round, window, verdict, hidden))

    def last(self, name):
        return next(call for call in reversed(self.calls) if call[0] == name)


@pytest.fixture
def hybrid():
    return attached(HybridDrafter(FakeModel(), LookupDrafter(CAP, CONTEXT, HYBRID_MATCH)))


def repeating(row):
    """Its last three tokens stood before: 4, 5, 6, ... followed."""
    return Request(row, [1, 2, 3, 4, 5, 6, 7, 1, 2], 3)


def novel(row, last=(8, 2, 3)):
    """No three tokens at its end stood before; two did."""
    return Request(row, [1, 2, 3, 4, *last[:-1]], last[-1])


def test_a_hybrid_shows_what_its_model_needs(hybrid):
    model = hybrid.model
    assert hybrid.kind == "hybrid (fake and ngram)"
    assert (hybrid.context_len, hybrid.reads_hidden) == (40, True)
    assert hybrid.draft_worker is model.draft_worker
    assert model.calls[0][0] == "attach_pools"


def test_both_arms_are_offered_and_the_policy_chooses(hybrid):
    requests = [novel(0), repeating(3), novel(2)]
    prefill(hybrid, requests)
    offered = offer(hybrid, requests)
    assert offered.limits[MODEL].tolist() == [40 - 6, 40 - 9, 40 - 6]
    assert offered.limits[LOOKUP].tolist() == [0, CAP, 0]
    assert offered.chances[MODEL].tolist() == [0.25] * 3
    assert offered.chances[LOOKUP].tolist() == [0.0, 3 / 4, 0.0]
    assert offered.behind.tolist() == [10, 13, 12]
    assert hybrid.model.last("offer")[1:] == ([0, 3, 2], [6, 9, 6])  # all: it keeps its records


@pytest.mark.parametrize(("length", "limit"), [(1, 0), (2, 0), (3, CAP), (4, CAP)])
def test_lookup_offers_drafts_from_three_matching_tokens_on(length, limit, hybrid):
    words = [1, 2, 3, 4]
    request = Request(0, [*words, 9, *words[4 - length : -1]], words[-1])
    prefill(hybrid, [request])
    assert offer(hybrid, [request]).limits.tolist() == [[40 - request.length], [limit]]


def test_lookup_goes_on_beyond_the_context_of_the_model(hybrid):
    request = Request(0, [*range(100, 145), 100, 101], 102)
    prefill(hybrid, [request])
    offered = offer(hybrid, [request])
    assert offered.limits.tolist() == [[40 - 47], [CAP]]  # the worker makes 0 of the first
    other = Request(1, list(range(100, 145)), 145)
    prefill(hybrid, [other])
    assert offer(hybrid, [other]).limits.tolist() == [[40 - 45], [0]]


ARMS_TAKEN = [(MODEL, LOOKUP, MODEL), (MODEL, MODEL, MODEL)]


@pytest.mark.parametrize("arms", ARMS_TAKEN)
@pytest.mark.parametrize(
    "depths", [(2, 3, 1), (1, 4, 3), (0, 2, 3), (4, 1, 4), (0, 4, 1), (2, 0, 2)]
)
def test_drafts_are_put_together_from_both_as_the_plan_says(depths, arms, hybrid):
    requests = [novel(0), repeating(3), novel(2)]
    prefill(hybrid, requests)
    offer(hybrid, requests)
    (drafts, chances, _), _ = drafted(hybrid, make_round(requests, list(depths), arms))
    assert drafts.shape == chances.shape == (3, max(depths))
    chains = [[4, 5, 6, 7] if arm == LOOKUP else [500, 501, 502, 503] for arm in arms]
    for row, depth, chain in zip(drafts.tolist(), depths, chains, strict=True):
        assert row[:depth] == chain[:depth]
    for row, depth, chain in zip(chances, depths, chains, strict=True):
        known = [token / 1000 if token >= 500 else 3 / 4 for token in chain]
        assert row[:depth].tolist() == pytest.approx(known[:depth])


@pytest.mark.parametrize(
    ("depths", "counts"), [((4, 3, 1), [2, 3, 1]), ((0, 4, 3), [0, 4, 2]), ((1, 0, 4), [1, 0, 2])]
)
def test_a_chain_that_the_model_stopped_keeps_its_count_beside_lookups_whole_ones(
    depths, counts, hybrid
):
    hybrid.model.stops_at = 2
    requests = [novel(0), repeating(3), novel(2)]
    prefill(hybrid, requests)
    offer(hybrid, requests)
    drafts = hybrid.draft(make_round(requests, list(depths), ARMS_TAKEN[0]))
    assert drafts.counts.tolist() == counts


def test_a_lookup_round_is_to_the_model_a_round_at_depth_zero(hybrid):
    requests = [novel(0), repeating(3), novel(2)]
    prefill(hybrid, requests)
    this_round = make_round(requests, [2, 3, 0], first_arm(offer(hybrid, requests)))
    drafts = hybrid.draft(this_round)
    assert this_round.depths_cpu.tolist() == this_round.depths.tolist() == [2, 3, 0]
    this_round = this_round.with_depths(ints(1, 2, 0), drafts.counts)  # some are trimmed
    verdict = commit(hybrid, this_round, requests, [[1], [2], [3]], hidden="states")
    for name, depths, made in (("draft", [2, 0, 0], [0, 0, 0]), ("commit", [1, 0, 0], [2, 0, 0])):
        seen = hybrid.model.last(name)[1]
        assert seen.depths_cpu.tolist() == seen.depths.tolist() == depths
        assert seen.drafted_cpu.tolist() == made
        assert seen.rows is this_round.rows and seen.lengths_cpu is this_round.lengths_cpu
    assert hybrid.model.last("commit")[2:] == (None, verdict, "states")
    assert this_round.depths_cpu.tolist() == this_round.depths.tolist() == [1, 2, 0]


def test_a_round_of_lookups_alone_does_not_run_the_model(hybrid):
    requests = [repeating(1), repeating(4)]
    prefill(hybrid, requests)
    this_round = make_round(requests, [3, 1], first_arm(offer(hybrid, requests)))
    made, this_round = drafted(hybrid, this_round)
    assert made.tokens.tolist()[0] == [4, 5, 6] and made.tokens.tolist()[1][:1] == [4]
    assert not any(call[0] == "draft" for call in hybrid.model.calls)
    commit(hybrid, this_round, requests, [[9], [9]])
    seen = hybrid.model.last("commit")[1]
    assert seen.max_depth == 0 and not seen.drafted_cpu.any()


def test_tokens_that_the_model_drafted_are_looked_up_later(hybrid):
    request = novel(2)
    prefill(hybrid, [request])
    for emitted in ([500, 501, 502], [503, 7], [500, 501, 502]):
        play(hybrid, [request], [emitted])
    offered, drafts = play(hybrid, [request], [[1]])
    assert offered.limits[LOOKUP].tolist() == [CAP] and drafts == [[503, 7, 500, 501]]


@pytest.mark.parametrize("is_off", [False, True])
def test_a_prefill_reaches_both(is_off, hybrid):
    request = repeating(1)
    batch = prefill(hybrid, [request], hidden="states", is_off=is_off)
    name, seen, bonus, *rest = hybrid.model.last("prefill")
    assert seen is batch and bonus.tolist() == [3] and rest == ["states", is_off]
    found = hybrid.lookup.offer(ints(1), ints(request.length)).limits.tolist()
    assert is_off or found == [[0], [CAP]]
