"""What the tests of kernels stand on: that an unwritten element is seen, and what the interpreter computes."""

import pytest
import torch
import triton
import triton.language as tl

from regard.triton.runtime.launch import launch
from regard.triton.runtime.tiles import Tiles

ROWS = 16


@triton.jit
def product(a, b, out, ROWS: tl.constexpr):
    at = tl.arange(0, ROWS)
    place = at[:, None] * ROWS + at[None, :]
    tl.store(out + place, tl.dot(tl.load(a + place), tl.trans(tl.load(b + place))))


@triton.jit
def signs(x, out, n, ROWS: tl.constexpr):
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    above = tl.load(x + at, mask=at < n, other=0) > 0
    tl.store(out + at, above.to(tl.bfloat16), mask=at < n)


@triton.jit
def narrowed(x, out, n, ROWS: tl.constexpr):
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(out + at, tl.load(x + at, mask=at < n, other=0).to(tl.bfloat16), mask=at < n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.uint8, torch.bool])
def test_what_is_allocated_is_poisoned(poisoned: None, dtype: torch.dtype) -> None:
    like = torch.zeros(3, dtype=dtype)
    made = (torch.empty(3, dtype=dtype), torch.empty_like(like), like.new_empty(3), torch.empty_strided((3,), (1,)))
    assert all((x != 0).all() for x in made[:3])
    assert made[3].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_product_is_that_of_the_numbers_and_not_of_their_bits(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(ROWS, ROWS, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty(ROWS, ROWS)
    launch(product, (1,), a, b, out, tiles=Tiles(), ROWS=ROWS)
    torch.testing.assert_close(out.double(), a.double() @ b.double().T, atol=1e-5, rtol=1e-6)


def test_numbers_are_rounded_to_the_nearest_bfloat16_and_ties_to_even() -> None:
    """Eight bits of a number are kept: of 256 + n / 2, those with an even whole number are."""
    ties = {257.0: 256.0, 259.0: 260.0, -257.0: -256.0, 257.5: 258.0, 256.5: 256.0, 3.4e38: torch.inf, 0.0: 0.0}
    x = torch.tensor([*ties, torch.inf, -torch.inf, torch.nan])
    out = torch.empty(len(x), dtype=torch.bfloat16)
    launch(narrowed, (1,), x, out, len(x), tiles=Tiles(), ROWS=ROWS)
    wanted = torch.tensor([*ties.values(), torch.inf, -torch.inf, torch.nan])
    assert torch.equal(out.float().nan_to_num(7, 8, 9), wanted.nan_to_num(7, 8, 9))


def test_a_truth_value_is_one_in_bfloat16_too() -> None:
    x = torch.tensor([-1.0, 2.0, 0.0, 3.0])
    out = torch.empty(4, dtype=torch.bfloat16)
    launch(signs, (1,), x, out, 4, tiles=Tiles(), ROWS=ROWS)
    assert torch.equal(out, torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.bfloat16))


@triton.jit
def raised(x, step):
    return x + step


@triton.jit
def at_a_step(out, step, ROWS: tl.constexpr):
    at = tl.arange(0, ROWS)
    tl.store(out + at, raised(at * step, step))


def test_whole_numbers_that_overflow_are_told_and_no_others() -> None:
    """Of 32 bits: what offsets of tensors with 2^31 elements may not be computed in."""
    out = torch.empty(ROWS, dtype=torch.int64)
    for step in (2**27 - 1, -(2**27)):
        launch(at_a_step, (1,), out, step, tiles=Tiles(), ROWS=ROWS)
        assert out.tolist() == [step * (n + 1) for n in range(ROWS)]
    for step in (2**27, -(2**27) - 1, 2**28):
        with pytest.raises(Exception, match="int32 overflow"):
            launch(at_a_step, (1,), out, step, tiles=Tiles(), ROWS=ROWS)
    launch(at_a_step, (1,), out, 2**40, tiles=Tiles(), ROWS=ROWS)
    assert out.tolist() == [2**40 * (n + 1) for n in range(ROWS)]


def test_after_a_launch_the_language_is_as_before() -> None:
    before = (tl.load, tl.tensor.__add__, tl.range, tl.dtype.to_ir)
    for _ in range(2):
        launch(at_a_step, (1,), torch.empty(ROWS, dtype=torch.int64), 2, tiles=Tiles(), ROWS=ROWS)
        assert (tl.load, tl.tensor.__add__, tl.range, tl.dtype.to_ir) == before
