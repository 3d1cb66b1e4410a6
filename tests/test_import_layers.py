"""What each layer may import, read off the sources: types alone do not count."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "faser_sglang"
FORBIDDEN = {"control": {"torch", "sglang"}, "kernels": {"sglang"}}
BEFORE_SGLANG = ("__init__.py", "config.py", "plugin.py", "cpu/__init__.py")


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imported(tree: ast.AST, *, into_functions: bool = True) -> Iterator[str]:
    """Dotted names that the code imports, those under TYPE_CHECKING left out."""
    children = list(ast.iter_child_nodes(tree))
    if is_type_checking(tree):
        children = tree.orelse
    if not into_functions and isinstance(tree, ast.FunctionDef):
        children = []
    if isinstance(tree, ast.Import):
        yield from (alias.name for alias in tree.names)
    if isinstance(tree, ast.ImportFrom):
        assert tree.level == 0, "relative imports are not used here"
        yield tree.module
        yield from (f"{tree.module}.{alias.name}" for alias in tree.names)
    for child in children:
        yield from imported(child, into_functions=into_functions)


def file_of(module: str) -> Path | None:
    """The file of a module of this package, None for anything else."""
    path = ROOT / module.replace(".", "/")
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if module.split(".")[0] == PACKAGE.name and file.is_file():
            return file
    return None


def roots_behind(file: Path, seen: set[Path]) -> set[str]:
    """Top-level packages that importing ``file`` may bring in, through this package's modules."""
    seen.add(file)
    roots = set()
    for name in imported(ast.parse(file.read_text(encoding="utf-8"))):
        own = file_of(name)
        if own is None:
            roots.add(name.split(".")[0])
        elif own not in seen:
            roots |= roots_behind(own, seen)
    return roots


def sources(layer: str) -> list[Path]:
    return sorted((PACKAGE / layer).rglob("*.py"))


@pytest.mark.parametrize(
    ("layer", "file"),
    [(layer, file) for layer in FORBIDDEN for file in sources(layer)],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_a_layer_brings_in_nothing_that_it_must_not_know(layer, file):
    assert roots_behind(file, set()) & FORBIDDEN[layer] == set()


def test_the_layers_have_sources():
    """Else the test above checks nothing."""
    assert all(len(sources(layer)) > 1 for layer in FORBIDDEN)


@pytest.mark.parametrize("name", BEFORE_SGLANG)
def test_what_loads_before_sglang_imports_only_the_standard_library(name):
    """SGLang swallows what a plugin raises, so nothing may raise before FASER is registered."""
    tree = ast.parse((PACKAGE / name).read_text(encoding="utf-8"))
    roots = {module.split(".")[0] for module in imported(tree, into_functions=False)}
    assert roots - {PACKAGE.name} <= sys.stdlib_module_names


def test_control_runs_without_torch_and_sglang():
    """The sources may hide an import (importlib); an interpreter that lacks both finds it."""
    modules = [f"faser_sglang.control.{file.stem}" for file in sources("control")]
    names = ", ".join(name.removesuffix(".__init__") for name in modules)
    code = f"import sys; sys.modules['torch'] = sys.modules['sglang'] = None; import {names}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("code", "roots"),
    [
        ("import torch.nn", {"torch"}),
        ("from sglang.srt import server_args", {"sglang"}),
        ("def late():\n    import torch", {"torch"}),
        ("try:\n    import torch\nexcept ImportError:\n    pass", {"torch"}),
        ("if TYPE_CHECKING:\n    import torch", set()),
        ("if typing.TYPE_CHECKING:\n    import torch\nelse:\n    import numpy", {"numpy"}),
    ],
)
def test_an_import_is_found_wherever_it_stands(code, roots):
    assert {name.split(".")[0] for name in imported(ast.parse(code))} == roots
