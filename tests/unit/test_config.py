"""The ``--faser-*`` values: checked at construction, carried to child processes, replaced whole."""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from faser_sglang import config
from faser_sglang.config import FaserConfig, FaserConfigError, configure

ROOT = Path(__file__).parents[2]
NO_FLAGS = ("model_kind", "profile")
FLAG_FIELDS = [field for field in dataclasses.fields(FaserConfig) if field.name not in NO_FLAGS]
FLAGS = [f"--faser-{field.name.replace('_', '-')}" for field in FLAG_FIELDS]


@pytest.fixture(autouse=True)
def carrier(monkeypatch):
    """Restored afterwards; nothing is set at first."""
    monkeypatch.setenv(config.CARRIER, "")


def cli(*argv):
    """Parse ``argv`` as SGLang does: add the flags, parse, keep what was given."""
    parser = argparse.ArgumentParser()
    config.add_cli_args(parser)
    config.take_cli_args(parser.parse_args(argv))
    return config.load()


@pytest.mark.parametrize(
    ("values", "flag", "allowed"),
    [
        ({"mode": "fast"}, "--faser-mode", config.MODES),
        ({"mode": None}, "--faser-mode", config.MODES),
        ({"drafter": "eagle9"}, "--faser-drafter", config.DRAFTERS),
        ({"drafter": "eagle3"}, "--faser-drafter", config.DRAFTERS),
        ({"depth": "deep"}, "--faser-depth", ("auto", "random", "a number")),
        ({"depth": -1}, "--faser-depth", ("auto", "random", "a number")),
        ({"depth": 2.5}, "--faser-depth", ("auto", "random", "a number")),
        ({"depth": None}, "--faser-depth", ("auto", "random", "a number")),
        ({"stop": "yes"}, "--faser-stop", config.SWITCHES),
        ({"trim": True}, "--faser-trim", config.SWITCHES),
        ({"token_limit": 0}, "--faser-token-limit", ("milliseconds above 0",)),
        ({"token_limit": -2.5}, "--faser-token-limit", ("milliseconds above 0",)),
        ({"token_limit": "nan"}, "--faser-token-limit", ("milliseconds above 0",)),
        ({"token_limit": "inf"}, "--faser-token-limit", ("milliseconds above 0",)),
        ({"token_limit": "soon"}, "--faser-token-limit", ("milliseconds above 0",)),
        ({"token_limit": [3]}, "--faser-token-limit", ("milliseconds above 0",)),
    ],
)
def test_a_value_that_cannot_be_served_is_named_with_the_allowed_ones(values, flag, allowed):
    for construct in (FaserConfig, configure):
        with pytest.raises(FaserConfigError) as error:
            construct(**values)
        message = str(error.value)
        assert flag in message and str(*values.values()) in message
        assert all(value in message for value in allowed)
        assert message.endswith(".") and ". " not in message and "\n" not in message


@given(st.one_of(st.text(max_size=4), st.integers(-3, 400).map(str)))
@example("٣")  # a digit, but not one of ours
@example("²")
@example("1_0")
@example(" 3")
@example("")
@settings(deadline=None, derandomize=True)
def test_depth_is_auto_random_or_plain_digits(text):
    digits = bool(text) and set(text) <= set("0123456789")
    try:
        accepted = FaserConfig(depth=text)
    except FaserConfigError:
        assert not digits and text not in ("auto", "random")
    else:
        assert accepted.fixed_depth == (int(text) if digits else None)
        assert digits or text in ("auto", "random")


def test_a_number_and_its_text_are_the_same_depth():
    assert FaserConfig(depth=3) == FaserConfig(depth="3")
    assert FaserConfig(depth=0).fixed_depth == 0


@pytest.mark.parametrize("switch", ["stop", "trim"])
@pytest.mark.parametrize(
    ("depth", "value", "is_on"),
    [
        ("auto", "auto", True),
        ("random", "auto", False),
        (3, "auto", False),
        ("random", "on", True),
        (3, "on", True),
        ("auto", "off", False),
    ],
)
def test_stop_and_trim_go_with_depth_auto_where_nothing_else_is_said(switch, depth, value, is_on):
    settled = FaserConfig(depth=depth, **{switch: value})
    other = "trim" if switch == "stop" else "stop"
    assert getattr(settled, f"{switch}s") is is_on
    assert getattr(settled, f"{other}s") is (depth == "auto")


@pytest.mark.parametrize("value", [25, 25.0, "25", "2.5e1"])
def test_a_token_limit_is_milliseconds_however_it_is_written(value):
    assert FaserConfig(token_limit=value).token_limit_ms == 25.0
    assert FaserConfig(token_limit=value) == FaserConfig(token_limit=25)


def test_without_a_token_limit_a_round_may_take_any_time():
    assert FaserConfig().token_limit_ms == float("inf")


@pytest.mark.parametrize("depth", ["auto", "random", 0, 1, 8])
def test_only_a_fixed_depth_can_exceed_the_cap(depth):
    for cap in (0, 1, 7, 8):
        settled = FaserConfig(depth=depth)
        if isinstance(depth, int) and depth > cap:
            with pytest.raises(
                FaserConfigError, match=f"{depth} exceeds --speculative-num-steps {cap}"
            ):
                settled.check_cap(cap)
        else:
            settled.check_cap(cap)


def test_a_configuration_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        FaserConfig().mode = "off"


def test_without_a_carrier_the_defaults_hold(monkeypatch):
    assert config.load() == FaserConfig()
    monkeypatch.delenv(config.CARRIER)
    assert config.load() == FaserConfig()


def test_configure_keeps_what_it_was_given_and_forgets_what_it_was_given_before():
    assert configure(depth=3, mode="serial") == config.load()
    assert config.load() == FaserConfig(depth="3", mode="serial")
    configure(drafter="lm")
    assert config.load() == FaserConfig(drafter="lm")
    assert configure() == config.load() == FaserConfig()


def test_configure_refuses_an_unknown_name_with_the_known_ones():
    with pytest.raises(FaserConfigError) as error:
        configure(depht=3, modes="off", mode="off")
    message = str(error.value)
    assert "depht, modes" in message
    assert all(field.name in message for field in FLAG_FIELDS)
    assert "model_kind" not in message


def test_a_refused_value_leaves_the_earlier_ones_in_place():
    configure(depth=2)
    for wrong in ({"depth": "deep"}, {"depht": 1}):
        with pytest.raises(FaserConfigError):
            configure(**wrong)
        assert config.load() == FaserConfig(depth="2")


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"mode": "off"},
        {"depth": 0},
        {"depth": "random", "mode": "serial", "drafter": "lm"},
        {"token_limit": 20.5, "stop": "off", "trim": "on", "cost_table": "t.json", "trace": "t"},
    ],
)
def test_a_child_process_reads_what_its_parent_set(values):
    configure(**values)
    code = (
        "import dataclasses, json; from faser_sglang import config; "
        "print(json.dumps(dataclasses.asdict(config.load())))"
    )
    child = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert FaserConfig(**json.loads(child.stdout)) == FaserConfig(**values)


def test_the_command_line_gives_the_values():
    assert cli() == FaserConfig()
    assert cli("--faser-depth", "4") == FaserConfig(depth="4")
    assert cli("--faser-mode", "off", "--faser-drafter", "lm", "--faser-depth", "0") == FaserConfig(
        mode="off", drafter="lm", depth="0"
    )


def test_flags_of_two_words_are_written_with_a_dash():
    given = cli("--faser-token-limit", "12.5", "--faser-cost-table", "a/b.json")
    assert given == FaserConfig(token_limit=12.5, cost_table="a/b.json")
    with pytest.raises(SystemExit):
        cli("--faser-token_limit", "12.5")


def test_every_flag_can_be_given_at_once():
    given = cli("--faser-stop", "off", "--faser-trim", "on", "--faser-trace", "t.jsonl")
    assert given == FaserConfig(stop="off", trim="on", trace="t.jsonl")


def test_a_token_limit_that_is_no_time_is_refused_on_the_command_line():
    with pytest.raises(FaserConfigError, match="--faser-token-limit is 'soon'; it takes"):
        cli("--faser-token-limit", "soon")


def test_a_second_parse_replaces_the_values_of_the_first():
    cli("--faser-mode", "off", "--faser-depth", "2")
    assert cli("--faser-depth", "5") == FaserConfig(depth="5")
    assert cli() == FaserConfig()


def test_adding_the_flags_twice_is_harmless():
    parser = argparse.ArgumentParser()
    config.add_cli_args(parser)
    once = parser.format_help()
    config.add_cli_args(parser)
    assert parser.format_help() == once
    assert parser.parse_args(["--faser-depth", "3"]).faser_depth == "3"


def test_help_tells_every_flag_its_default_and_its_values():
    parser = argparse.ArgumentParser()
    config.add_cli_args(parser)
    words = " ".join(parser.format_help().split())
    for flag, field in zip(FLAGS, FLAG_FIELDS, strict=True):
        assert flag in words and f"Default: {field.default}." in words
        assert all(value in words for value in config.CHOICES.get(field.name, ()))
    assert "model-kind" not in words and "model_kind" not in words


@pytest.mark.parametrize(
    ("flag", "allowed"),
    [
        ("--faser-mode", config.MODES),
        ("--faser-drafter", config.DRAFTERS),
        ("--faser-stop", config.SWITCHES),
        ("--faser-trim", config.SWITCHES),
    ],
)
def test_an_unknown_value_on_the_command_line_is_refused_with_the_allowed_ones(
    flag, allowed, capsys
):
    with pytest.raises(SystemExit):
        cli(flag, "warp")
    said = capsys.readouterr().err
    assert flag in said and "warp" in said and all(value in said for value in allowed)


def test_an_unknown_depth_on_the_command_line_is_refused_with_the_allowed_ones():
    with pytest.raises(FaserConfigError, match="--faser-depth is 'deep'; it takes auto, random"):
        cli("--faser-depth", "deep")


def test_flags_of_others_do_not_matter():
    config.take_cli_args(argparse.Namespace(model_path="m", faser_mode="off"))
    assert config.load() == FaserConfig(mode="off")


# -- what the draft checkpoint turned out to be ---------------------------------------------------


@pytest.mark.parametrize("drafter", config.DRAFTERS)
def test_every_drafter_can_be_asked_for(drafter):
    assert configure(drafter=drafter).drafter == drafter
    assert cli("--faser-drafter", drafter) == FaserConfig(drafter=drafter)


@pytest.mark.parametrize("kind", ["llama", "EAGLE", None, "hybrid"])
def test_an_unknown_kind_of_model_is_refused_and_the_earlier_one_stays(kind):
    config.resolve_model_kind("eagle")
    for construct in (
        lambda: FaserConfig(model_kind=kind),
        lambda: config.resolve_model_kind(kind),
    ):
        with pytest.raises(FaserConfigError, match="model_kind is .* it takes .*lm, eagle, eagle3"):
            construct()
    assert config.load().model_kind == "eagle"


@pytest.mark.parametrize("kind", config.MODEL_KINDS)
def test_the_kind_of_the_model_joins_the_flags_in_the_carrier(kind):
    configure(depth=3, mode="serial", drafter="hybrid")
    resolved = config.resolve_model_kind(kind)
    assert resolved == config.load()
    assert resolved == FaserConfig(depth="3", mode="serial", drafter="hybrid", model_kind=kind)


def test_the_kind_is_resolved_without_flags_and_again():
    for kind in ("eagle3", "none", "lm"):
        assert config.resolve_model_kind(kind) == config.load() == FaserConfig(model_kind=kind)


def test_the_kind_of_the_model_is_no_flag():
    with pytest.raises(FaserConfigError, match="does not know model_kind"):
        configure(model_kind="lm")
    with pytest.raises(SystemExit):
        cli("--faser-model_kind", "lm")
    config.take_cli_args(argparse.Namespace(faser_model_kind="lm"))
    assert config.load() == FaserConfig()


@pytest.mark.parametrize("start", [configure, cli], ids=["Engine", "command line"])
def test_new_values_forget_the_kind_of_an_earlier_model(start):
    config.resolve_model_kind("eagle3")
    start()
    assert config.load().model_kind == ""


def test_a_child_process_reads_the_kind_of_the_model():
    configure(drafter="eagle")
    config.resolve_model_kind("eagle3")
    code = "from faser_sglang import config; print(config.load().drafter, config.load().is_head)"
    child = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert child.stdout.split() == ["eagle", "True"]


@pytest.mark.parametrize(
    ("drafter", "kind", "looks_up", "has_model", "is_head"),
    [
        ("auto", "", False, True, False),  # before start-up has looked
        ("auto", "lm", False, True, False),
        ("auto", "eagle", False, True, True),
        ("auto", "eagle3", False, True, True),
        ("lm", "lm", False, True, False),
        ("eagle", "eagle", False, True, True),
        ("eagle", "eagle3", False, True, True),
        ("ngram", "", True, False, False),
        ("ngram", "none", True, False, False),
        ("hybrid", "", True, True, False),
        ("hybrid", "lm", True, True, False),
        ("hybrid", "eagle", True, True, True),
        ("hybrid", "eagle3", True, True, True),
        ("auto", "none", False, False, False),
    ],
)
def test_the_drafter_and_the_kind_say_what_drafts(drafter, kind, looks_up, has_model, is_head):
    settled = FaserConfig(drafter=drafter, model_kind=kind)
    found = (settled.looks_up, settled.has_model, settled.is_head)
    assert found == (looks_up, has_model, is_head)


def test_a_profile_that_is_asked_for_travels_beside_the_flags():
    configure(drafter="hybrid")
    config.resolve_model_kind("lm")
    asked = config.ask_profile(output="cost.json", repeats=9)
    assert config.load() == asked
    assert asked.profile == {"output": "cost.json", "repeats": 9}
    assert (asked.drafter, asked.model_kind) == ("hybrid", "lm")
    configure()
    assert config.load().profile is None
