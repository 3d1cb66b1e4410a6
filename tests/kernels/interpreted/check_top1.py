"""The Triton kernel against its twin. Run under TRITON_INTERPRET=1 (test_triton.py does)."""

import pytest
import torch

from faser_sglang.kernels import reference
from faser_sglang.kernels.top1 import BLOCK, top1

SHAPES = [(1, 1), (1, BLOCK), (3, BLOCK - 1), (4, BLOCK + 1), (5, 5000), (0, 100)]


def logits(rows, columns, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (4 * torch.randn(rows, columns, generator=generator)).to(dtype)


def assert_same(given, programs=None):
    ids, chances = top1(given, programs)
    expected_ids, expected = reference.top1(given)
    assert ids.tolist() == expected_ids.tolist()
    torch.testing.assert_close(chances, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_every_shape(rows, columns, dtype):
    assert_same(logits(rows, columns, dtype))


@pytest.mark.parametrize("programs", [1, 2, 100])
def test_few_programs_do_all_rows(programs):
    assert_same(logits(5, 1500, torch.float32), programs)


def test_rows_of_a_wider_tensor():
    assert_same(logits(4, 3000, torch.float32)[:, 100:1700])


def test_the_lowest_of_equals_wins_in_and_across_lanes():
    given = torch.zeros(3, 3 * BLOCK)
    given[0, [7, BLOCK + 7]] = 5.0
    given[1, [9, BLOCK + 3]] = 5.0
    given[2, [2 * BLOCK + 1, BLOCK + 3]] = 5.0
    assert top1(given)[0].tolist() == [7, 9, BLOCK + 3]


def test_masked_and_large_logits():
    given = logits(2, 2 * BLOCK, torch.float32)
    given[0, : BLOCK + 5] = -torch.inf
    given[1] += 300.0
    assert_same(given)


def test_columns_must_be_contiguous():
    with pytest.raises(ValueError, match="contiguous"):
        top1(logits(4, 8, torch.float32).T)
