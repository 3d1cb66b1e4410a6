"""Predicted times: between what was measured, rising with the rows, and as rounds ran."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faser_sglang.control.cost import CostModel, CostTable, CostTableError, RoundShape
from tests.support.made_up_rounds import roofline

CAP = 8
TABLE = CostTable(
    requests=[1, 4],
    windows=[1, 3],
    verify=[[10.0, 12.0], [16.0, 32.0]],
    first=[1.0, 2.0],
    step=[0.5, 1.0],
    catch_up=0.1,
    host=[2.0, 2.6],
    context=100.0,
    context_slope=0.01,
)
checked = settings(deadline=None, derandomize=True, max_examples=100)


def rounds_of(n, drafts, context=100.0):
    return RoundShape(n, context, drafts, (n, n), n)


def test_what_was_measured_is_predicted():
    model = CostModel(TABLE, CAP)
    assert model.verify_ms(1, 100.0)[[0, 2]].tolist() == [10.0, 12.0]
    assert model.verify_ms(4, 100.0)[[0, 8]].tolist() == [16.0, 32.0]
    assert model.draft_ms(4, 4)[:3].tolist() == [0.0, 2.0, 3.0]
    assert model.host_ms(1) == 2.0


def test_between_and_beyond_it_is_linear():
    model = CostModel(TABLE, CAP)
    assert model.verify_ms(1, 100.0)[1] == pytest.approx(11.0)
    assert model.verify_ms(1, 100.0)[6] == pytest.approx(16.0)  # on along the last stretch
    assert model.verify_ms(2, 100.0)[0] == pytest.approx(12.0)
    assert model.verify_ms(7, 100.0)[0] == pytest.approx(22.0)
    assert model.draft_ms(1, 11)[1] == pytest.approx(1.0 + 10 * 0.1)  # ten rows to catch up on
    assert model.draft_ms(0, 0).tolist() == [0.0] * (CAP + 1)


def test_each_token_of_context_is_paid_by_each_request():
    model = CostModel(TABLE, CAP)
    more = model.verify_ms(4, 100.0 + 640.0)[0] - model.verify_ms(4, 100.0)[0]
    assert more == pytest.approx(640 * 0.01 * 4)


shapes = st.tuples(st.integers(1, 40), st.floats(0.0, 1.0), st.floats(1.0, 4000.0))
measured = st.tuples(*[st.floats(0.0, 1e4)] * 3)


@given(st.lists(st.tuples(shapes, measured), max_size=12), shapes)
@checked
def test_predictions_rise_with_the_rows_and_are_times_whatever_ran(ran, asked):
    model = CostModel(TABLE, CAP)

    def shape_of(shape):
        n, share, context = shape
        return rounds_of(n, int(share * n * CAP), context)

    for shape, took in ran:
        model.observe(shape_of(shape), took)
    shape = shape_of(asked)
    curve = model.verify_ms(shape.requests, shape.context)
    assert len(curve) == shape.requests * CAP + 1
    assert np.isfinite(curve).all() and (curve > 0).all() and (np.diff(curve) >= 0).all()
    draft, verify, host = model.predict(shape)
    assert verify == pytest.approx(curve[shape.drafts])
    assert draft >= 0 and host >= 0 and np.isfinite(model.error)


def test_a_machine_that_slows_down_is_followed_within_tens_of_rounds_and_changes_no_choice():
    model = CostModel(roofline(), CAP)
    what = rounds_of(8, 16)
    before = model.verify_ms(8, 100.0)
    for _ in range(30):
        model.observe(what, tuple(1.5 * t for t in CostModel(roofline(), CAP).predict(what)))
    after = model.verify_ms(8, 100.0)
    assert after[16] / before[16] == pytest.approx(1.5, rel=0.05)
    ratios = after / before
    assert ratios.max() / ratios.min() < 1.2  # shapes that did not run have slowed down too


def test_one_phase_that_differs_from_the_table_is_learned_for_itself():
    model = CostModel(roofline(), CAP)
    what = rounds_of(8, 16)
    draft, verify, host = model.predict(what)
    for _ in range(200):
        model.observe(what, (2 * draft, verify, host))
    now = model.predict(what)
    assert now[0] == pytest.approx(2 * draft, rel=0.05)
    assert now[1] == pytest.approx(verify, rel=0.05)
    assert model.error < 0.05


def test_the_error_is_that_of_the_last_rounds():
    model = CostModel(roofline(), CAP)
    what = rounds_of(4, 4)
    for _ in range(50):
        model.observe(what, tuple(1.3 * t for t in model.predict(what)))
    assert 0.15 < model.error < 0.3


@pytest.mark.parametrize(
    "change",
    [
        {"requests": [4, 1]},
        {"windows": [2, 3]},
        {"verify": [[10.0, 12.0]]},
        {"verify": [[10.0], [16.0]]},
        {"first": [1.0]},
        {"host": [2.0, float("nan")]},
        {"catch_up": -0.1},
        {"verify": [[0.0, 12.0], [16.0, 32.0]]},
        {"requests": []},
    ],
)
def test_a_table_that_is_none_is_refused(change):
    with pytest.raises(CostTableError, match="measure it again"):
        CostTable(**(dataclasses.asdict(TABLE) | change))


def test_a_table_comes_back_from_its_file(tmp_path):
    TABLE.save(tmp_path / "table.json")
    assert CostTable.load(tmp_path / "table.json") == TABLE


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"requests": [1]})])
def test_a_file_that_is_no_table_is_refused_with_the_flag_and_the_way_out(tmp_path, text):
    (tmp_path / "table.json").write_text(text)
    with pytest.raises(CostTableError, match=r"--faser-cost-table .*faser_sglang\.profile"):
        CostTable.load(tmp_path / "table.json")
    with pytest.raises(CostTableError, match="No such file"):
        CostTable.load(tmp_path / "none.json")


def test_a_table_without_a_record_of_its_origin_is_refused(tmp_path):
    (tmp_path / "table.json").write_text(json.dumps(dataclasses.asdict(TABLE) | {"origin": 3}))
    with pytest.raises(CostTableError, match="origin"):
        CostTable.load(tmp_path / "table.json")


def test_curves_that_are_kept_do_not_pile_up():
    model = CostModel(TABLE, 1)
    for context in range(0, 64 * 600, 64):
        model.verify_ms(1, float(context))
    assert len(model._curves) <= 256
