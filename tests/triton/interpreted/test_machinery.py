"""What the tests of kernels stand on: that kernels run here at all, and that an unwritten element is seen."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from regard.ops.triton.launch import launch
from regard.ops.triton.tiles import Tiles

ROWS = 16


@triton.jit
def doubled(x, out, n, ROWS: tl.constexpr):
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(out + at, 2 * tl.load(x + at, mask=at < n, other=0), mask=at < n)


def run(x: torch.Tensor, programs: int) -> torch.Tensor:
    out = torch.empty_like(x)
    launch(doubled, (programs,), x, out, len(x), tiles=Tiles(rows=ROWS), ROWS=ROWS)
    return out


def test_a_kernel_runs_on_the_cpu() -> None:
    x = torch.randn(40, generator=torch.Generator().manual_seed(0))
    assert torch.equal(run(x, 3), x + x)


def test_an_element_that_no_program_writes_is_nan(poisoned: None) -> None:
    out = run(torch.ones(40), 2)
    assert torch.equal(out[: 2 * ROWS], torch.full((2 * ROWS,), 2.0))
    assert out[2 * ROWS :].isnan().all()


def test_no_program_at_all(poisoned: None) -> None:
    assert run(torch.ones(40), 0).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.uint8, torch.bool])
def test_what_is_allocated_is_poisoned(poisoned: None, dtype: torch.dtype) -> None:
    like = torch.zeros(3, dtype=dtype)
    made = (torch.empty(3, dtype=dtype), torch.empty_like(like), like.new_empty(3), torch.empty_strided((3,), (1,)))
    assert all((x != 0).all() for x in made[:3])
    assert made[3].isnan().all()
