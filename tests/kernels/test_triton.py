"""Triton kernels without a GPU: interpreted against their twins, and compiled for three of them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton

HERE = Path(__file__).parent
CHECKS = sorted((HERE / "interpreted").glob("check_*.py"))


@pytest.mark.parametrize("path", CHECKS, ids=lambda path: path.stem)
def test_interpreted(path):
    """In a process of its own: the interpreter is chosen when a kernel is defined."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"\d+ passed", done.stdout), "nothing ran"


def resources(kernel, signature, constants, capability, tmp_path):
    """What the assembler gave the kernel, by the cuobjdump that Triton ships."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    shown = subprocess.run(
        [tool, "-res-usage", str(cubin)], capture_output=True, text=True, check=True
    ).stdout
    found = dict(re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", shown))
    return {name: int(number) for name, number in found.items()}


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_top1_compiles_without_spills(dtype, capability, tmp_path):
    from faser_sglang.kernels.top1 import BLOCK, top1_kernel

    signature = {
        "logits": f"*{dtype}", "ids": "*i64", "chances": "*fp32",
        "rows": "i32", "columns": "i32", "stride": "i32", "BLOCK": "constexpr",
    }  # fmt: skip
    used = resources(top1_kernel, signature, {"BLOCK": BLOCK}, capability, tmp_path)
    assert 0 < used["REG"] <= 128
    assert used["STACK"] == used["LOCAL"] == 0
    assert used["SHARED"] <= 4096
