"""With an EAGLE head a request keeps its whole context; other algorithms keep SGLang's reserve."""

import inspect

import pytest
from sglang.srt.managers import tokenizer_manager, utils

from faser_sglang import hooks
from faser_sglang.compat import HookType
from faser_sglang.hooks import reserved_tokens


@pytest.mark.parametrize(("is_faser", "expected"), [(True, 0), (False, 9)])
def test_only_faser_reserves_nothing(is_faser, expected, monkeypatch):
    monkeypatch.setattr(reserved_tokens, "is_faser_process", lambda: is_faser)
    asked = []
    assert reserved_tokens._reserved(lambda: asked.append(1) or 9) == expected
    assert len(asked) == (not is_faser)


def test_the_hook_stands_where_the_tokenizer_manager_looks_the_function_up():
    """It imports the function by name: a hook on the defining module would change nothing."""
    hook = reserved_tokens.HOOK
    module, _, name = hook.target.rpartition(".")
    assert module == hook.module == tokenizer_manager.__name__
    assert name in inspect.getsource(tokenizer_manager.TokenizerManager)
    assert getattr(tokenizer_manager, name) is not None
    assert hook.kind == HookType.AROUND and hook.function is reserved_tokens._reserved


def test_the_hook_takes_what_sglang_passes():
    """SGLang's function has no arguments; the hook has the original alone."""
    assert inspect.signature(utils.compute_num_reserved_tokens).parameters == {}
    assert list(inspect.signature(reserved_tokens._reserved).parameters) == ["original"]


def test_the_process_of_the_tokenizer_installs_the_hook():
    assert reserved_tokens.HOOK in hooks._runtime_hooks()
    assert reserved_tokens.HOOK.processes == ("launcher",)
