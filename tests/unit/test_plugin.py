"""Registration in fresh processes: FASER is there, or says why not; without it nothing changes.

Each scenario is a fork of a server process that has imported SGLang once and nothing of FASER.
"""

import argparse
import importlib.abc
import inspect
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import pytest
import torch

SPELLINGS = ("FASER", "faser", "Faser")
PRELOADED = (
    "sglang.srt.plugins",
    "sglang.srt.server_args",
    "sglang.srt.speculative.spec_info",
    "sglang.srt.speculative.spec_registry",
)


@pytest.fixture(scope="module")
def fresh():
    """Runs a function of this module in a process of its own and returns its result."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        yield lambda function, *args: pool.submit(function, *args).result(timeout=300)


def load():
    """What every process of SGLang does."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.speculative.spec_registry import get_spec

    assert get_spec("FASER") is None and "faser_sglang.algorithm" not in sys.modules
    load_plugins()
    load_plugins()


def find(name="FASER"):
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    return SpeculativeAlgorithm.from_string(name)


def failure(call, *args):
    """What a user would see: type, message, type and message of the cause."""
    try:
        call(*args)
    except Exception as error:
        cause = error.__cause__
        return type(error).__name__, str(error), type(cause).__name__, str(cause)
    return None


# -- registration -----------------------------------------------------------------------------


def loaded_twice():
    load()
    return [(type(find(name)).__name__, find(name).name) for name in SPELLINGS]


def test_loading_the_plugins_twice_registers_faser_in_any_spelling(fresh):
    assert fresh(loaded_twice) == [("FaserAlgorithm", "FASER")] * 3


def hooks_of_faser():
    from sglang.srt.plugins.hook_registry import HookRegistry

    functions = [hook for hooks in HookRegistry._hooks.values() for _, hook, _ in hooks]
    return [f for f in functions if f.__module__.startswith("faser_sglang")]


def registered_again():
    load()
    from faser_sglang import plugin
    from faser_sglang.algorithm import register_algorithm

    before, hooks = find(), hooks_of_faser()
    plugin.register()
    plugin._registered = False
    plugin.register()  # as if the module had been imported twice
    register_algorithm()
    return find() is before, hooks_of_faser() == hooks, len(hooks) == len(set(hooks)) > 0


def test_registering_again_changes_nothing(fresh):
    assert fresh(registered_again) == (True, True, True)


def flags_of_the_command_line():
    from sglang.srt.server_args import ServerArgs

    load()
    from faser_sglang import config

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    depths = []
    for more in (["--faser-depth", "3"], []):
        ServerArgs.from_cli_args(parser.parse_args(["--model-path", "m", *more]))
        depths.append(config.load().depth)
    return depths, "--faser-mode" in parser.format_help()


def test_sglangs_command_line_takes_the_flags(fresh):
    assert fresh(flags_of_the_command_line) == (["3", "auto"], True)


def missing_or_other_methods():
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    load()
    methods = {
        name: method
        for name, method in vars(SpeculativeAlgorithm).items()
        if callable(method) and not name.startswith("_") and not isinstance(method, classmethod)
    }
    assert len(methods) > 20
    missing = [name for name in methods if not callable(getattr(find(), name, None))]
    other = [
        name
        for name, method in methods.items()
        if name not in missing
        and list(inspect.signature(method).parameters)[1:]
        != list(inspect.signature(getattr(find(), name)).parameters)
    ]
    return missing, other


def test_every_method_of_sglangs_own_algorithms_exists_with_the_same_arguments(fresh):
    """SGLang calls them without asking; its own check covers is_* and supports_* only."""
    missing, other = fresh(missing_or_other_methods)
    assert missing == []
    assert other == []


# -- failures ---------------------------------------------------------------------------------


def with_another_sglang(found):
    from faser_sglang import plugin

    plugin.installed_sglang = lambda: found
    load()
    algorithm = find("faser")
    return failure(algorithm.validate_server_args, None), failure(algorithm.factory, None)


@pytest.mark.parametrize("found", ["0.5.22", "0.5.23.post1", "none"])
def test_with_another_sglang_using_faser_names_the_needed_one_and_the_way_out(found, fresh):
    for kind, message, *_ in fresh(with_another_sglang, found):
        assert kind == "FaserLoadError"
        assert f"needs sglang 0.5.23, found {found}" in message
        assert "pip install sglang==0.5.23" in message


class Broken(importlib.abc.MetaPathFinder):
    """Importing one module raises."""

    def __init__(self, module):
        self.module = module

    def find_spec(self, name, path=None, target=None):
        if name == self.module:
            raise ZeroDivisionError("boom")


def with_a_broken_module(module):
    sys.meta_path.insert(0, Broken(module))
    load()
    return [failure(find(name).validate_server_args, None) for name in SPELLINGS]


@pytest.mark.parametrize(
    "module", ["faser_sglang.algorithm", "faser_sglang.hooks", "faser_sglang.compat"]
)
def test_any_failure_while_loading_is_raised_where_faser_is_used(module, fresh):
    for kind, message, cause, said in fresh(with_a_broken_module, module):
        assert (kind, cause, said) == ("FaserLoadError", "ZeroDivisionError", "boom")
        assert "FASER could not load: boom" in message


def flags_with_a_broken_algorithm():
    from sglang.srt.server_args import ServerArgs

    sys.meta_path.insert(0, Broken("faser_sglang.algorithm"))
    load()
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(["--model-path", "m", "--faser-depth", "3"]).faser_depth


def test_the_flags_are_known_even_then(fresh):
    """Else argparse would complain about them, and hide why FASER is not there."""
    assert fresh(flags_with_a_broken_algorithm) == "3"


def others_beside_a_broken_one():
    sys.meta_path.insert(0, Broken("faser_sglang.algorithm"))
    load()
    return find("EAGLE").name, find(None).name, failure(find, "no such algorithm")[0]


def test_other_algorithms_do_not_notice(fresh):
    assert fresh(others_beside_a_broken_one) == ("EAGLE", "NONE", "ValueError")


def hooked_nowhere():
    from faser_sglang import hooks
    from faser_sglang.compat import HookType

    target = "sglang.srt.server_args.ServerArgs.no_such_method"
    hook = hooks.Hook(target, "sglang.srt.server_args", print, HookType.AFTER, ("scheduler",))
    hooks._runtime_hooks = lambda: [hook]
    hooks.install("launcher")  # not this hook's process
    return failure(hooks.install, "scheduler")[:2]


def test_a_hook_that_sglang_could_not_apply_is_an_error_and_named(fresh):
    kind, message = fresh(hooked_nowhere)
    assert kind == "RuntimeError"
    assert "ServerArgs.no_such_method" in message and "0.5.23" in message


# -- processes without FASER ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [("FASER", True), ("faser", True), ("EAGLE", False), ("FASER2", False), (None, False)],
)
def test_a_process_is_fasers_by_its_published_algorithm(algorithm, expected, monkeypatch):
    from sglang.srt import runtime_context

    from faser_sglang.compat import is_faser_process

    spec = SimpleNamespace(speculative_algorithm=algorithm)
    monkeypatch.setattr(runtime_context, "get_spec", lambda: spec)
    assert is_faser_process() is expected


def test_a_process_that_published_nothing_is_not_fasers(monkeypatch):
    from sglang.srt import runtime_context

    from faser_sglang.compat import is_faser_process

    def unpublished():
        raise RuntimeError("not published")

    monkeypatch.setattr(runtime_context, "get_spec", unpublished)
    assert is_faser_process() is False


@pytest.fixture(params=[False, True], ids=["without", "with"])
def faser(request, monkeypatch):
    """Whether this process asks for FASER."""
    from faser_sglang.hooks import draft_context, draft_weights, req_to_token_rows, request_checks

    for module in (draft_context, draft_weights, req_to_token_rows, request_checks):
        monkeypatch.setattr(module, "is_faser_process", lambda: request.param)
    return request.param


@pytest.mark.parametrize("is_draft", [False, True])
@pytest.mark.parametrize("length", [None, 16, 64])
def test_only_fasers_draft_keeps_its_own_shorter_context(length, is_draft, faser):
    from faser_sglang.hooks import draft_context

    model = SimpleNamespace(
        is_draft_model=is_draft, hf_text_config=SimpleNamespace(max_position_embeddings=32)
    )
    calls = []
    result = draft_context._derive(lambda *args: calls.append(args) or "result", model, length)
    shortened = faser and is_draft and length == 64
    assert result == "result" and calls == [(model, 32 if shortened else length)]


def test_only_fasers_rows_hold_the_double_reserve(faser, monkeypatch):
    from sglang.srt.mem_cache import allocation_sizing

    from faser_sglang.hooks import req_to_token_rows

    monkeypatch.setattr(allocation_sizing, "get_alloc_reserve_per_decode", lambda: 18)
    monkeypatch.setattr(allocation_sizing, "get_alloc_page_size", lambda: 4)
    assert req_to_token_rows._extra(13) == (4 + 18 + 3 if faser else 13)
    assert req_to_token_rows._extra(99) == 99


def test_only_fasers_requests_are_refused(faser, monkeypatch):
    from sglang.srt import runtime_context

    from faser_sglang.hooks import request_checks

    spec = SimpleNamespace(speculative_num_steps=8)
    monkeypatch.setattr(runtime_context, "get_spec", lambda: spec)

    parameters = SimpleNamespace(
        **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_new_tokens"), 1),
        repetition_penalty=2.0,
        custom_params=None,
        **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"), "x"),
    )
    names = ("custom_logit_processor", "return_hidden_states", "return_sampling_mask")
    names += (
        "return_routed_experts",
        "return_indexer_topk",
        "lora_id",
        "input_embeds",
        "positional_embed_overrides",
    )
    request = SimpleNamespace(
        sampling_params=parameters,
        mm_inputs="x",
        input_ids=[1],
        token_ids_logprob=None,
        top_logprobs_num=0,
        **dict.fromkeys(names, "x"),
    )
    manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=8))
    if faser:
        with pytest.raises(ValueError, match="FASER does not serve"):
            request_checks._check(request, manager)
    else:
        assert request_checks._check(request, manager) is None


@pytest.mark.parametrize("selector", ["all", "draft", "target"])
def test_a_weight_update_of_all_leaves_fasers_draft_alone(faser, selector):
    from faser_sglang.hooks import draft_weights

    every = [("target", 1), ("draft", 2)]
    chosen = [pair for pair in every if selector in ("all", pair[0])]
    is_kept_out = faser and selector == "all"
    kept = draft_weights._target_only(chosen, None, selector)
    assert kept == (every[:1] if is_kept_out else chosen)


@pytest.mark.parametrize("worker", [None, SimpleNamespace(), SimpleNamespace(describe_faser=None)])
def test_server_info_of_other_workers_stays_as_it_was(worker):
    from faser_sglang.hooks import server_info

    state = {"accept": 1}
    manager = SimpleNamespace(scheduler=SimpleNamespace(draft_worker=worker))
    assert server_info._add(None, manager, state) is None
    assert state == {"accept": 1}


def test_server_info_of_fasers_worker_has_its_description():
    from faser_sglang.hooks import server_info

    worker = SimpleNamespace(describe_faser=lambda: {"mode": "serial"})
    state = {"accept": 1}
    server_info._add(None, SimpleNamespace(scheduler=SimpleNamespace(draft_worker=worker)), state)
    assert state == {"accept": 1, "faser": {"mode": "serial"}}


@pytest.mark.parametrize(
    "ranges", [[(0, 1)], [(3, 3)], [(0, 4), (2, 2), (5, 9)], [(7, 8), (0, 0), (1, 3)]]
)
def test_the_writer_fills_each_requests_columns_in_order(ranges):
    """On CPU tensors the result is what SGLang's kernel writes, FASER or not."""
    from faser_sglang.hooks import req_to_token_writer

    table = torch.full((6, 10), -1, dtype=torch.int32)
    rows = torch.tensor([5, 0, 2][: len(ranges)], dtype=torch.int32)
    start, end = torch.tensor(ranges, dtype=torch.int32).T
    total = int((end - start).sum())
    slots = torch.arange(100, 100 + total + 2)  # SGLang's may be longer than needed
    expected, at = table.clone(), 100
    for row, (first, last) in zip(rows.tolist(), ranges, strict=True):
        for column in range(first, last):
            expected[row, column] = at
            at += 1
    req_to_token_writer._assign(None, rows, table, start, end, slots, len(ranges))
    assert torch.equal(table, expected)


def test_the_writer_leaves_other_devices_to_sglang():
    from faser_sglang.hooks import req_to_token_writer

    calls = []
    table = torch.zeros(2, 4, dtype=torch.int32, device="meta")
    args = (None, table, None, None, None, 1)
    req_to_token_writer._assign(lambda *given: calls.append(given), *args)
    assert calls == [args]


@pytest.mark.parametrize("prefixes", [[4], [0], [0, 1, 7], [3, 0, 10]])
def test_the_last_slot_is_the_one_before_the_prefix_ends(prefixes):
    """On CPU tensors the result is what SGLang's kernel gives, FASER or not."""
    from faser_sglang.hooks import last_loc

    table = torch.arange(60, dtype=torch.int32).view(6, 10)
    rows = torch.tensor([5, 0, 2][: len(prefixes)])
    found = last_loc._last_loc(None, table, rows, torch.tensor(prefixes))
    expected = [
        int(table[row, prefix - 1]) if prefix else -1
        for row, prefix in zip(rows, prefixes, strict=True)
    ]
    assert found.tolist() == expected


def test_the_last_slot_on_other_devices_is_left_to_sglang():
    from faser_sglang.hooks import last_loc

    table = torch.zeros(2, 4, dtype=torch.int32, device="meta")
    assert last_loc._last_loc(lambda *given: given, table, 1, 2) == (table, 1, 2)
