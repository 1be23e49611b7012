"""Compiling for a GPU that is not there: what is reported of kernels written here for it, spilling ones among them."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiles, and Triton interprets in this process", allow_module_level=True)
import triton.language as tl  # noqa: E402
from gpu_compiled import SHARED, resources_of  # noqa: E402
from mistakes import refuses  # noqa: E402

import regard  # noqa: E402
from regard.triton.runtime import support  # noqa: E402
from regard.triton.runtime.launch import launch  # noqa: E402
from regard.triton.runtime.tiles import Tiles  # noqa: E402

ROWS = 64


@triton.jit
def squares(x, out, n, D: tl.constexpr, ROWS: tl.constexpr):
    """Products of a block with itself, summed over blocks: an accumulator of ROWS x D float32 numbers."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, D)
    whole = tl.zeros((ROWS, D), tl.float32)
    for start in range(0, n, ROWS):
        block = tl.load(x + (start + rows[:, None]) * D + columns[None, :])
        scores = tl.dot(block, tl.trans(block))
        whole += tl.dot(scores.to(block.dtype), block)
    tl.store(out + rows[:, None] * D + columns[None, :], whole)


@triton.jit
def doubled(x, out, ROWS: tl.constexpr):
    at = tl.arange(0, ROWS)
    tl.store(out + at, 2 * tl.load(x + at))


def run_squares(dim: int, warps: int) -> torch.Tensor:
    x = torch.zeros(256, dim, dtype=torch.bfloat16)
    out = torch.empty(ROWS, dim)
    launch(squares, (1,), x, out, 256, tiles=Tiles(warps=warps), D=dim, ROWS=ROWS)
    return out


@pytest.mark.parametrize("arch", [80, 90])
def test_what_fits_does_not_spill(arch: int) -> None:
    (found,) = resources_of(lambda: run_squares(64, 4), arch)
    assert (found.kernel, found.arch, found.warps, found.launches) == ("squares", arch, 4, 1)
    # 64 x 64 float32 numbers and as many scores, among 128 threads
    assert 64 <= found.registers <= 255
    assert found.local == 0
    assert 64 * 64 * 2 <= found.shared <= SHARED[arch]  # a block of bfloat16 numbers, which both products read


def test_registers_that_are_spilt_are_seen() -> None:
    """64 x 128 float32 numbers among 32 threads are 256 each, more than the 255 registers that there are."""
    (found,) = resources_of(lambda: run_squares(128, 1))
    assert found.local > 0


def test_variants_of_a_kernel_are_one_with_the_largest_numbers() -> None:
    def both() -> None:
        run_squares(16, 4)
        launch(doubled, (1,), torch.empty(64), torch.empty(64), tiles=Tiles(), ROWS=64)
        run_squares(64, 4)

    small, large = (resources_of(lambda dim=dim: run_squares(dim, 4))[0] for dim in (16, 64))
    assert small.shared < large.shared
    found = resources_of(both)
    assert [(x.kernel, x.launches) for x in found] == [("squares", 2), ("doubled", 1)]
    assert found[0].shared == large.shared
    assert found[0].registers == max(small.registers, large.registers)


def test_what_is_allocated_is_zero_meanwhile_and_no_longer() -> None:
    seen: list[Any] = []

    def call() -> None:
        made = (torch.empty(5), torch.empty_like(torch.ones(5)), torch.ones(2).new_empty(5, dtype=torch.int64))
        seen.extend(bool((x == 0).all()) for x in made)
        seen.append(support.unsupported_device("cpu"))

    before = (torch.empty, torch.Tensor.new_empty)
    assert resources_of(call) == []
    assert seen == [True, True, True, None]
    assert before == (torch.empty, torch.Tensor.new_empty)
    assert "CUDA" in str(support.unsupported_device("cpu"))


def test_after_a_failure_all_is_as_before() -> None:
    before = torch.empty
    with pytest.raises(ZeroDivisionError):
        resources_of(lambda: 1 // 0)
    assert torch.empty is before
    assert support.unsupported_device("cpu") is not None


def test_an_unknown_capability_and_an_interpreting_process_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuses("arch is 70, expected one of 80, 90", resources_of, lambda: None, 70)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    refuses("TRITON_INTERPRET=1 is set", resources_of, lambda: None)


def test_calls_that_kernels_refuse_are_refused_here_too() -> None:
    x = torch.zeros(1, 1, 16, 16, dtype=torch.float64)
    refuses("float64", resources_of, lambda: regard.attention(x, x, x, impl="triton"))


@pytest.mark.parametrize("text", ["test-bump*anchored(margin=2)", "test-bump*fixed(bias=0.5,empty=uniform)"])
def test_a_kernel_with_a_device_function_of_its_own_compiles(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, backward and decoding."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "interpreted"))
    import own_kernel  # noqa: F401

    def call() -> None:
        q, k, v = (torch.zeros(1, 2, 128, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        regard.attention(q, k, v, text, is_causal=True, impl="triton").sum().backward()
        with torch.no_grad():
            regard.attention(q[:, :, :1], k, v, text, impl="triton")

    found = {x.kernel for x in resources_of(call)}
    first = "compact_search_kernel" if "anchored" in text else "compact_stream_kernel"
    assert {first, "compact_dq_kernel", "compact_dkv_kernel", "threshold_kernel", "output_kernel"} <= found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_given_slope_decodes(dtype: torch.dtype) -> None:
    """The compiler refuses names that change their type in a loop, which the interpreter allows."""

    def call() -> None:
        q, k, v = (torch.zeros(1, 4, n, 64, dtype=dtype) for n in (1, 128, 128))
        params = {"probe": torch.zeros(1, 4, 1, 64)}
        regard.attention(q, k, v, "gaussian*fixed*linear(solver=learned)", params=params, impl="triton")

    assert {x.kernel for x in resources_of(call)} == {"spans_kernel", "online_kernel", "merge_kernel"}
