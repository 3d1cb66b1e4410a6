"""Where a cost table comes from, and what it may be used for."""

import logging
import re

import pytest

from faser_sglang.worker import origin
from faser_sglang.worker.origin import check_origin, launch_origin, made, model_name
from tests.support.arguments import flags, refused

HERE = {
    "device": "an EPYC", "threads": 2, "model": "/m", "draft_model": None, "drafter": "ngram",
    "dtype": "torch.float32", "tp_size": 1, "sglang": "0.5.23", "torch": "2.9", "faser_sglang": "0",
}  # fmt: skip


def test_a_table_of_this_very_server_is_taken_without_a_word(caplog):
    check_origin({**HERE, "date": "2026-01-01", "git": "abc"}, HERE, "t.json")
    assert caplog.records == []


@pytest.mark.parametrize("name", origin.DECISIVE)
def test_a_table_of_something_else_is_refused_by_name(name):
    message = refused(check_origin, {**HERE, name: "other"}, HERE, "t.json")
    assert f"{name} other (here {HERE[name]})" in message and "t.json" in message
    assert "python -m faser_sglang.profile" in message


def test_a_table_that_does_not_say_where_it_comes_from_is_refused():
    assert "model None" in refused(check_origin, {}, HERE, "t.json")


@pytest.mark.parametrize("name", ["sglang", "torch", "faser_sglang"])
def test_a_table_of_another_version_is_taken_with_a_warning(name, caplog):
    caplog.set_level(logging.WARNING, logger=origin.logger.name)
    check_origin({**HERE, name: "older"}, HERE, "t.json")
    assert [f"{name} older" in record.getMessage() for record in caplog.records] == [True]


def test_a_folder_has_one_name(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to("model")
    monkeypatch.chdir(tmp_path)
    names = {model_name(name) for name in ("model", "./model/", "link", str(tmp_path / "model"))}
    assert names == {str((tmp_path / "model").resolve())}
    assert model_name("org/model") == "org/model"
    assert model_name("") is None and model_name(None) is None


def test_the_launcher_knows_models_and_ranks_and_the_processor():
    args = flags(model_path="org/m", speculative_draft_model_path="org/d", tp_size=2, device="cpu")
    known = launch_origin(args)
    assert {known[name] for name in ("model", "draft_model")} == {"org/m", "org/d"}
    assert known["tp_size"] == 2 and known["device"] == origin.cpu_name() != ""
    assert set(known) <= set(HERE)
    assert "device" not in launch_origin(flags(model_path="org/m", device="cuda"))


def test_a_measurement_says_when_it_was_made():
    said = made()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", said["date"])
    assert said["git"] is None or re.fullmatch(r"[0-9a-f]{6,}", said["git"])


def test_a_measurement_outside_of_a_checkout_has_no_revision(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert made()["git"] is None
