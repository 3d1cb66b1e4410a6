"""The measurement of a cost table: what it runs, and the table that it makes of the times."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_sglang.config import FaserConfig
from faser_sglang.control.cost import CostTable, CostTableError, RoundShape
from faser_sglang.control.rounds import MODEL, offer_of
from faser_sglang.worker import start_profile
from faser_sglang.worker.start_profile import Effort, Profile, cost_table, make_table

CAP, WIDTH = 8, 4 * 9 + 1


class FakeBatch:
    def __init__(self, lengths):
        self.seq_lens_cpu = torch.tensor(lengths)

    def batch_size(self):
        return len(self.seq_lens_cpu)


class World:
    """A worker whose rounds take made-up times on a clock of its own, and whose pool is counted.

    A round emits all its drafts, the most that a request can grow by.
    """

    def __init__(self, *, rows=48, pool=100_000, context=2048, draft_context=2048, pace=0.1):
        self.now, self.pace, self.free = 0.0, pace, pool
        self.cap, self.context_len, self.config = CAP, context, FaserConfig(model_kind="lm")
        self.drafter = SimpleNamespace(context_len=draft_context)
        self.req_to_token_pool = SimpleNamespace(available_size=lambda: rows)
        self.token_to_kv_pool_allocator = SimpleNamespace(
            available_size=lambda: self.free, page_size=1
        )
        self.agreement = SimpleNamespace(value=lambda value: value, is_first=True)
        self.planner = SimpleNamespace(
            policy="usual", timer=SimpleNamespace(interrupt=self.interrupt)
        )
        self.ledger = self.cleared = None
        self.open = None  # the round that is timed when the next one begins
        self.most = min(context, draft_context)
        self.ran = []  # requests and depth of each round
        self.lost = 0

    def clear_cache_pool(self):
        self.cleared = True

    def interrupt(self):
        self.lost += self.open is not None
        self.open = None

    # -- as MadeUpRequests

    def begin(self, size, tokens):
        self.interrupt()
        assert tokens > 0 and size > 0
        batch = FakeBatch([tokens] * size)
        batch.behind, batch.held = 0, 0
        self.hold(batch)
        return batch

    def hold(self, batch):
        """Slots for what the requests have, and for a round's window behind it."""
        held = int(batch.seq_lens_cpu.sum()) + WIDTH * batch.batch_size()
        self.free -= held - batch.held
        batch.held = held
        assert self.free >= 0

    def release(self, batch):
        self.free += batch.held

    def run(self, batch):
        policy = self.planner.policy
        lengths = batch.seq_lens_cpu.numpy()
        size = len(lengths)
        plan = policy.plan(np.arange(size), lengths, offer_of(MODEL, np.full(size, CAP)))
        depth = int(plan.depths[0])
        if self.open is not None:
            policy.observe(*self.open)
        assert int(lengths.max()) + depth < self.most
        rows = (batch.behind + 1) * size if depth else 0
        shape = RoundShape(size, float(lengths.mean()), size * depth, (size,) * depth, rows)
        draft = (2.0 + 0.5 * (depth - 1) + 0.25 * (rows - size)) if depth else 0.0
        times = draft, 10.0 + size * (1 + depth) + 0.01 * size * shape.context, 0.5
        self.open = shape, times
        self.now += self.pace * sum(times) / 1e3
        self.ran.append((size, depth))
        batch.seq_lens_cpu = batch.seq_lens_cpu + depth + 1
        batch.behind = 0 if depth else batch.behind + 1
        self.hold(batch)


@pytest.fixture
def world(monkeypatch):
    def make(**values):
        world = World(**values)
        monkeypatch.setattr(start_profile, "MadeUpRequests", lambda _worker: world)
        monkeypatch.setattr(start_profile, "time", SimpleNamespace(perf_counter=lambda: world.now))
        monkeypatch.setattr(start_profile, "origin_of", lambda _worker: {"model": "m"})
        return world

    return make


def test_the_table_holds_the_times_of_the_rounds(world):
    table = Profile(world()).measure()
    assert table.requests == [1, 2, 4, 8, 16, 32, 48] and table.windows == [1, 2, 3, 4, 6, 9]
    rounds_context = table.context
    for size, row in zip(table.requests, table.verify, strict=True):
        for window, ms in zip(table.windows, row, strict=True):
            near = 10.0 + size * window + 0.01 * size * rounds_context
            assert ms == pytest.approx(near, abs=0.6 * size)
    assert table.first == [2.0] * 7 and table.host == [0.5] * 7
    assert table.step == pytest.approx([0.5] * 7)
    assert table.catch_up == pytest.approx(0.25)
    assert table.context_slope == pytest.approx(0.01)


def test_the_server_is_as_before(world):
    here = world()
    free = here.free
    Profile(here).measure()
    assert here.planner.policy == "usual" and here.free == free and here.cleared
    assert here.ledger.counters.rounds == 0 and here.open is None


def test_slots_that_do_not_come_back_are_a_defect(world):
    here = world()
    here.release = lambda _batch: None
    with pytest.raises(RuntimeError, match="slots of the KV pool"):
        Profile(here).measure()
    assert here.planner.policy == "usual"


def test_no_round_of_the_sweep_is_lost_where_requests_are_replaced(world):
    """A prefill interrupts the timer; only a last round without drafts may go untimed."""
    here = world(context=64)
    profile = Profile(here)
    profile.measure()
    timed = [(shape.requests, shape.drafts // shape.requests) for shape, _ in profile.policy.rounds]
    for depth in profile.depths[1:]:
        assert [shape for shape in here.ran if shape[1] == depth and shape in timed] == [
            shape for shape in here.ran if shape[1] == depth
        ]
        assert timed.count((1, depth)) == here.ran.count((1, depth)) > 0


def test_a_slow_machine_measures_fewer_sizes_and_keeps_its_time(world):
    here = world(pace=20.0)
    table = Profile(here, Effort(budget_s=10.0)).measure()
    assert table.requests[0] == 1 and len(table.requests) < 7
    assert here.now < 20.0


def test_a_machine_that_is_too_slow_measures_one_request_once(world):
    here = world(pace=1000.0)
    assert Profile(here, Effort(budget_s=1.0)).measure().requests == [1]
    assert [depth for _, depth in here.ran[:6]] == [0, 1, 2, 3, 5, 8]


def test_every_rank_stops_when_the_first_one_does(world):
    here = world()
    here.agreement.value = lambda value: False if isinstance(value, bool) else value
    assert Profile(here).measure().requests == [1]


def test_at_leisure_every_depth_and_repeat_is_run(world, tmp_path):
    here = world(pace=1e3)
    effort = Effort(repeats=5, max_batch=3, budget_s=1e9, output=str(tmp_path / "cost.json"))
    table = Profile(here, effort).measure()
    assert table.requests == [1, 2, 3] and table.windows == list(range(1, CAP + 2))
    assert here.ran.count((3, CAP)) == 5


@pytest.mark.parametrize(
    ("limits", "sizes"),
    [
        ({"rows": 1}, [1]),
        ({"rows": 3}, [1, 2, 3]),
        ({"pool": 100}, [1]),
        ({"pool": 1000}, [1, 2, 4, 5]),
        ({"context": 40}, [1, 2, 4, 8, 16, 32, 48]),
        ({"draft_context": 64}, [1, 2, 4, 8, 16, 32, 48]),
    ],
    ids=str,
)
def test_small_servers_are_measured_within_their_limits(limits, sizes, world):
    """The world checks that no request outgrows context and draft context."""
    assert Profile(world(**limits)).measure().requests == sizes


@pytest.mark.parametrize("limits", [{"context": 29}, {"pool": 50}, {"draft_context": 20}], ids=str)
def test_a_server_too_small_to_be_measured_says_what_to_do(limits, world):
    with pytest.raises(ValueError, match="too short to measure") as error:
        Profile(world(**limits))
    assert "--faser-depth" in str(error.value)


@given(st.integers(31, 400), st.integers(31, 400), st.integers(60, 3000), st.integers(1, 9))
@settings(deadline=None, derandomize=True, max_examples=40)
def test_no_server_is_run_beyond_its_limits(context, draft_context, pool, rows):
    """Of any size that can be measured: the world asserts that lengths stay within."""
    here = World(rows=rows, pool=pool, context=context, draft_context=draft_context)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start_profile, "MadeUpRequests", lambda _worker: here)
        table = Profile(here).measure()
    assert table.requests[0] == 1 and table.windows == [1, 2, 3, 4, 6, 9]


# -- the table ----------------------------------------------------------------------------------


def timed(size, depth, draft, verify=10.0, host=1.0, behind=0):
    rows = size * (behind + 1) if depth else 0
    return RoundShape(size, 50.0, size * depth, (size,) * depth, rows), (draft, verify, host)


def test_medians_are_taken():
    rounds = [timed(1, 0, 0.0, ms) for ms in (10.0, 11.0, 500.0)]
    assert make_table(rounds, [0], 0.0).verify == [[11.0]]


def test_catching_up_is_no_usual_first_pass():
    rounds = [timed(2, 0, 0.0), timed(2, 1, 3.0), timed(2, 1, 11.0, behind=8)]
    table = make_table(rounds, [0, 1], 0.0)
    assert table.first == [3.0] and table.catch_up == pytest.approx(0.5)


def test_noise_makes_no_negative_times():
    rounds = [timed(1, 0, 0.0), timed(1, 1, 5.0), timed(1, 2, 4.0), timed(1, 1, 3.0, behind=8)]
    table = make_table(rounds, [0, 1, 2], 0.0)
    assert table.step == [0.0] and table.catch_up == 0.0


def test_depths_that_a_batch_did_not_reach_are_left_out():
    """A drafter may fail, or end before the depth that was asked for."""
    rounds = [timed(size, depth, 1.0) for size in (1, 2) for depth in (0, 1, 2)] + [
        timed(1, 3, 1.0)
    ]
    assert make_table(rounds, [0, 1, 2, 3], 0.0).windows == [1, 2, 3]


def test_a_drafter_that_costs_nothing_has_no_steps():
    rounds = [timed(1, depth, 0.0) for depth in (0, 1, 2)]
    table = make_table(rounds, [0, 1, 2], 0.0)
    assert (table.first, table.step, table.catch_up) == ([0.0], [0.0], 0.0)


# -- where it comes from --------------------------------------------------------------------------


def test_a_named_table_is_loaded_and_nothing_is_run(world, tmp_path):
    here = world()
    path = tmp_path / "cost.json"
    Profile(here).measure()
    saved = CostTable(
        **{**vars(make_table([timed(1, 0, 0.0)], [0], 0.0)), "origin": {"model": "m"}}
    )
    saved.save(path)
    here.config, here.ran = FaserConfig(cost_table=str(path)), []
    assert cost_table(here) == saved and here.ran == []
    path.write_text(json.dumps(json.loads(path.read_text()) | {"origin": {"model": "other"}}))
    with pytest.raises(CostTableError, match="model other"):
        cost_table(here)


def test_a_measured_table_says_where_and_when(world):
    assert set(cost_table(world()).origin) == {"model", "date", "git"}


@pytest.mark.parametrize("is_first", [True, False])
def test_a_profile_that_was_asked_for_is_written_once(is_first, world, tmp_path):
    here = world()
    here.agreement.is_first = is_first
    path = tmp_path / "cost.json"
    here.config = FaserConfig(
        model_kind="lm", profile={"output": str(path), "repeats": 1, "max_batch": 2}
    )
    table = cost_table(here)
    assert table.requests == [1, 2]
    assert path.is_file() == is_first
    assert not is_first or CostTable.load(path) == table
