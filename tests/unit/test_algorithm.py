"""What FASER answers SGLang, for each kind of draft: memory, radix keys and captured layers."""

import logging

import pytest
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from faser_sglang import config
from faser_sglang.algorithm import FaserAlgorithm, keeps_warning

ANSWERS = ("is_standalone", "is_eagle", "is_eagle3", "has_draft_kv")


@pytest.fixture
def algorithm(monkeypatch):
    monkeypatch.setenv(config.CARRIER, "")
    return FaserAlgorithm("FASER", lambda _args: None, supports_overlap=True)


def answers(algorithm):
    """The names of those that are true."""
    return {name for name in ANSWERS if getattr(algorithm, name)()}


LM = {"is_standalone", "has_draft_kv"}
EAGLE = {"is_eagle", "has_draft_kv"}
EAGLE3 = EAGLE | {"is_eagle3"}


@pytest.mark.parametrize(
    ("drafter", "kind", "expected"),
    [
        ("auto", "", LM),  # until start-up knows better
        ("auto", "lm", LM),
        ("lm", "lm", LM),
        ("auto", "eagle", EAGLE),
        ("eagle", "eagle", EAGLE),
        ("auto", "eagle3", EAGLE3),
        ("eagle", "eagle3", EAGLE3),
        ("ngram", "", set()),
        ("ngram", "none", set()),
        ("hybrid", "lm", LM),
        ("hybrid", "eagle", EAGLE),
        ("hybrid", "eagle3", EAGLE3),
    ],
)
def test_the_kind_of_the_draft_decides_what_sglang_prepares(drafter, kind, expected, algorithm):
    config.configure(drafter=drafter)
    config.resolve_model_kind(kind)
    assert answers(algorithm) == expected


@pytest.mark.parametrize("kind", ["lm", "eagle", "eagle3"])
def test_a_head_is_no_language_model_and_the_reverse(kind, algorithm):
    """Both at once would size and key SGLang's caches twice over."""
    config.resolve_model_kind(kind)
    assert algorithm.is_standalone() != algorithm.is_eagle()


def test_the_answers_follow_the_carrier_that_a_child_process_inherits(algorithm, monkeypatch):
    config.resolve_model_kind("eagle3")
    carried = config.os.environ[config.CARRIER]
    monkeypatch.setenv(config.CARRIER, "")
    assert answers(algorithm) == LM
    monkeypatch.setenv(config.CARRIER, carried)
    assert answers(algorithm) == EAGLE3


@pytest.mark.parametrize("kind", ["", "none", "lm", "eagle", "eagle3"])
def test_nothing_but_the_bonus_token_is_relayed_whatever_drafts(kind, algorithm):
    config.resolve_model_kind(kind)
    assert not algorithm.need_topk() and not algorithm.carries_draft_hidden_states()


@pytest.mark.parametrize("kind", ["", "none", "lm", "eagle", "eagle3"])
def test_faser_passes_for_no_other_algorithm(kind, algorithm):
    """SGLang has code of its own behind each of these."""
    config.resolve_model_kind(kind)
    others = {
        name
        for name in vars(SpeculativeAlgorithm)
        if name.startswith("is_") and name not in (*ANSWERS, "is_some", "is_speculative")
    }
    assert others and {name for name in others if getattr(algorithm, name)()} == set()
    assert algorithm.is_some() and algorithm.is_speculative()


def test_sglang_does_not_say_that_a_window_has_no_effect_which_faser_honours():
    text = "--speculative-draft-window-size has no effect with speculative_algorithm=%s"

    def record(message, algorithm):
        return logging.LogRecord("sglang", logging.WARNING, "", 0, message, (algorithm,), None)

    assert not keeps_warning(record(text, "FASER"))
    assert keeps_warning(record(text, "NGRAM"))
    assert keeps_warning(record("another warning with speculative_algorithm=%s", "FASER"))
