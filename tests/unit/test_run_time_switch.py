"""The switch while serving: all values of a request together, or a 400 and nothing."""

import asyncio
import math
from types import SimpleNamespace

import pytest
from fastapi import HTTPException
from sglang.srt.managers.io_struct import SetInternalStateReq, SetInternalStateReqOutput

from faser_sglang.config import FaserConfig, FaserConfigError
from faser_sglang.hooks import run_time_switch
from faser_sglang.hooks.run_time_switch import _answer, _switch, changes
from faser_sglang.worker.planner import Planner

CAP = 8


def ask(**values):
    return SetInternalStateReq(server_args=values)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({}, {}),
        ({"pp_max_micro_batch_size": 3}, {}),
        ({"faser_depth": -1}, {"depth": "auto"}),
        ({"faser_depth": 0}, {"depth": "0"}),
        ({"faser_depth": 3.0, "other": 7}, {"depth": "3"}),
        ({"faser_stop": -1, "faser_trim": 1.0}, {"stop": "auto", "trim": "on"}),
        ({"faser_stop": 0}, {"stop": "off"}),
    ],
)
def test_numbers_are_read_as_the_flags_values(asked, found):
    assert changes(asked) == found


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"faser_depth": value}, "-1 (auto) or a depth")
        for value in (-2, 0.5, -0.5, math.inf, -math.inf, math.nan)
    ]
    + [({"faser_stop": value}, "0 (off) or 1 (on)") for value in (2, -2, 0.5, math.nan, math.inf)]
    + [({"faser_dept": 3}, "faser_dept cannot be set; faser_depth")],
    ids=str,
)
def test_other_numbers_and_names_are_refused_in_a_sentence(asked, sentence):
    with pytest.raises(FaserConfigError) as error:
        changes(asked)
    assert sentence in str(error.value)


@pytest.fixture
def planner(monkeypatch):
    """A planner of a server at random depths, which has measured nothing."""
    monkeypatch.setattr(Planner, "_policy", lambda _self: None)
    planner = object.__new__(Planner)
    planner.config, planner.cap, planner.controller = FaserConfig(depth="random"), CAP, None
    return planner


def switch(planner, **values):
    """What the scheduler answers, and what SGLang's own function was asked."""
    asked = []

    def original(_controller, request):
        asked.append(dict(request.server_args))
        return SetInternalStateReqOutput(updated="wrong" not in request.server_args)

    controller = SimpleNamespace(
        scheduler=SimpleNamespace(draft_worker=SimpleNamespace(planner=planner))
    )
    return _switch(original, controller, ask(**values)).updated, asked


def test_values_are_set_together(planner):
    assert switch(planner, faser_depth=2, faser_stop=0, other=1) == (True, [{"other": 1}])
    assert (planner.config.depth, planner.config.stop) == ("2", "off")


@pytest.mark.parametrize(
    "values",
    [
        {"faser_depth": CAP + 1},
        {"faser_depth": math.inf},
        {"faser_stop": 0, "faser_depth": -1},  # nothing is measured
        {"faser_depth": 3, "faser_trim": 1},  # each of them would be possible
        {"faser_depth": 3, "faser_dept": 3},
    ],
    ids=str,
)
def test_values_that_cannot_be_set_together_change_nothing(values, planner):
    before = planner.config
    assert switch(planner, **values) == (False, [])
    assert planner.config == before


def test_where_sglang_refuses_its_own_value_ours_are_not_set(planner):
    assert switch(planner, faser_depth=2, wrong=1) == (False, [{"wrong": 1}])
    assert planner.config.depth == "random"


def test_a_server_that_never_drafts_switches_nothing(planner):
    planner.config = FaserConfig(mode="off")
    assert switch(planner, faser_depth=2) == (False, [])


def test_a_scheduler_of_another_algorithm_is_left_alone():
    values = {"faser_depth": 1}
    assert switch(None, **values) == (True, [values])  # what SGLang says of names it does not know


@pytest.fixture
def faser_process(monkeypatch):
    monkeypatch.setattr(run_time_switch, "is_faser_process", lambda: True)
    monkeypatch.setattr(
        "sglang.srt.runtime_context.get_spec", lambda: SimpleNamespace(speculative_num_steps=CAP)
    )


def answer(updated, **values):
    async def original(_manager, _request):
        return updated

    return asyncio.run(_answer(original, None, ask(**values)))


def test_what_the_schedulers_did_is_passed_on(faser_process):
    assert answer([True, True], faser_depth=2) == [True, True]
    assert answer([False], other=2) == [False]


@pytest.mark.parametrize(
    ("updated", "values", "sentence"),
    [
        ([True], {"faser_depth": CAP + 1}, "exceeds --speculative-num-steps 8"),
        ([True], {"faser_trim": 3}, "faser_trim is 3; it takes"),
        ([True], {"faser_dept": 3}, "cannot be set"),
        ([True, False], {"faser_depth": 3}, "the server cannot switch to that"),
    ],
)
def test_what_is_refused_gets_a_400(updated, values, sentence, faser_process):
    with pytest.raises(HTTPException) as error:
        answer(updated, **values)
    assert error.value.status_code == 400 and sentence in error.value.detail


def test_without_faser_nothing_is_looked_at(monkeypatch):
    monkeypatch.setattr(run_time_switch, "is_faser_process", lambda: False)
    assert answer([False], faser_depth=99) == [False]
