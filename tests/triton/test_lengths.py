"""What Triton compiles a kernel for: not for a length, or each new one would stall a training step or a decoded token
for seconds. The backward kernels of compact attention may know whether a length is a multiple of 16."""

import os
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing is compiled in this process", allow_module_level=True)

from gpu_compiled import pretended, zeros

import regard
from regard.triton.runtime.launch import watched

LENGTHS = (512, 1000, 777, 2048, 513)
MULTIPLES, OTHERS = (512, 2048, 1040), (777, 1000, 513)
CACHED = (4096, 601, 1024, 1999, 2050)


def kind(x: Any, free: bool = False) -> Any:
    """What Triton knows of an argument when it compiles: of a whole number its bits and, unless it is left `free`,
    whether it is 1 or divisible by 16; what stands in tuples is never free."""
    if isinstance(x, tuple):
        return tuple(map(kind, x))
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if isinstance(x, int) and not isinstance(x, bool):
        bits = 64 if abs(x) >= 2**31 else 32
        return bits if free else (bits, x == 1, x % 16 == 0)
    return type(x)


def variants(call: Callable[[int], Any], length: int) -> dict[str, set[Any]]:
    """The kernels that `call` launches, each with all that it is compiled for."""
    found: dict[str, set[Any]] = defaultdict(set)

    def see(kernel: Any, grid: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        for x, p in zip(args, kernel.params, strict=False):
            assert not (isinstance(x, Tensor) and p.do_not_specialize), f"{kernel.__name__}: of {p.name} it knows less"
        kinds = tuple(kind(x, p.do_not_specialize) for x, p in zip(args, kernel.params, strict=False))
        found[kernel.__name__].add((kinds, tuple(sorted((name, str(x)) for name, x in options.items()))))

    with pretended(90), zeros(), watched(see):
        call(length)
    return found


def trained(call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[int], None]:
    def run(length: int) -> None:
        q, k, v = (torch.zeros(1, 4, length, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        call(q, k, v).sum().backward()

    return run


def decoded(call: Callable[[Tensor, Tensor, Tensor], Any]) -> Callable[[int], None]:
    def run(length: int) -> None:
        cache = torch.zeros(2, 2, 5000, 64, dtype=torch.bfloat16)[:, :, :length]
        call(torch.zeros(2, 8, 1, 64, dtype=torch.bfloat16), cache, cache)

    return run


def attention(spec: str, **options: Any) -> Callable[..., Any]:
    return lambda q, k, v: regard.attention(
        q, k, v, spec, is_causal=True, enable_gqa=q.shape[1] != k.shape[1], impl="triton", **options
    )


def hidden(q: Tensor, k: Tensor, v: Tensor) -> Any:
    mask = torch.ones(len(q), 1, 1, k.shape[2], dtype=torch.bool)
    return attention("biweight", attn_mask=mask)(q, k, v)


def local_linear(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return regard.local_linear_attention(
        q, k, v, ridge=0.1, is_causal=True, enable_gqa=q.shape[1] != k.shape[1], impl="triton"
    )


def memory(length: int, chunk: int = 4096) -> None:
    """One chunk of a memory of fast weights."""
    query, value = torch.randn(2, length, 2, 32), torch.randn(2, length, 32)
    keys, values = torch.randn(2, 2, 16, 16), torch.zeros(256, 32)
    how: dict[str, Any] = {"chunk_size": chunk, "top_k": 4, "impl": "triton", "mix": True}
    regard.fast_weight_memory(query, value, torch.rand(2, length), keys=keys, values=values, **how)


def written(chunk: int) -> None:
    """Two chunks, the first of which is written."""
    memory(2 * chunk, chunk)


COMPACT = {**{spec: attention(spec) for spec in ("softmax", "biweight", "relumax")}, "hidden": hidden}
CALLS: dict[str, tuple[Callable[[int], Any], tuple[int, ...]]] = {
    **{f"train {name}, multiples of 16": (trained(call), MULTIPLES) for name, call in COMPACT.items()},
    **{f"train {name}, others": (trained(call), OTHERS) for name, call in COMPACT.items()},
    "train local linear": (trained(local_linear), LENGTHS),
    **{f"decode {spec}": (decoded(attention(spec)), CACHED) for spec in ("softmax", "biweight", "normrelu")},
    "decode hidden": (decoded(hidden), CACHED),
    "decode local linear": (decoded(local_linear), CACHED),
    "memory": (memory, (64, 1, 33, 100)),
    "memory, written": (written, (33, 2, 65, 101)),  # alike in where the second chunk of gates lies
}


@pytest.mark.parametrize("name", CALLS)
def test_no_kernel_is_compiled_for_a_length(name: str) -> None:
    call, (first, *others) = CALLS[name]
    known = variants(call, first)
    assert known
    for length in others:
        for kernel, found in variants(call, length).items():
            assert found <= known[kernel], f"{kernel} is compiled anew at length {length}"
