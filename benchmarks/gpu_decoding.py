"""Part `decoding` of `gpu.py`: one query against a cache, as CUDA graphs, beside the bytes that must be read."""

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import gpu_dense
import gpu_peers
import torch
from cpu_measure import digits
from gpu_compact import BARS, KINDS
from gpu_local_linear import RIDGE
from gpu_measure import Bench, Row, ceilings, rms_ratio, small_tiles
from torch import Tensor

import regard

SPECS = ("softmax", "biweight", "relumax", "local-linear")
KV_HEADS, GROUP = 8, 4
"""Key heads, and query heads of each."""
LENGTHS = {16384: 1, 32768: 8, 131072: 1}
"""Keys to sequences."""


WHOLE = "whole call"
"""What a contestant's name ends with that is `regard.attention`; the others are its kernels alone."""


@lru_cache(maxsize=1)
def inputs(bench: Bench, length: int, batch: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a query [batch, 32, 1, dim], and keys and values [batch, 8, length, dim]: bfloat16, normal."""
    make = bench.generator(length)
    kv_heads = 2 if bench.dry else KV_HEADS
    shapes = [(batch, kv_heads * GROUP, 1, dim), (batch, kv_heads, length, dim), (batch, kv_heads, length, dim)]
    q, k, v = (torch.randn(shape, device=bench.device, generator=make) for shape in shapes)
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def decode(text: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Call the kernels alone."""
    from regard.pairwise.visibility import Visibility
    from regard.triton.compact.rules import rule_of
    from regard.triton.decode import compact, local_linear

    spec = regard.Spec.parse(text)
    scale, numbers = spec.resolve(q.shape[3], None, {})
    visible = Visibility(q.shape[2], k.shape[2], causal=True, offset=k.shape[2] - q.shape[2])
    if spec.degree:
        return local_linear.decode(q, k, v, scale, RIDGE, None, visible)
    return compact.decode(q, k, v, scale, rule_of(spec, numbers), None, visible)


def attend(spec: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The public call, whose kernels look for numbers that are not finite, too: compact ones in every value."""
    return regard.attention(q, k, v, spec, is_causal=True, enable_gqa=True, impl="triton")


def rows(bench: Bench) -> Iterator[Row]:
    dims = (16,) if bench.dry else (64, 128)
    for spec in SPECS if bench.dry else (*SPECS, "sparsemax", "triweight", "normrelu"):
        for dim in dims:
            name = f"correctness, one query, {spec}, D {dim}, bfloat16"
            yield Row(name, "correctness", 1 if spec in SPECS else 9, partial(correctness, spec, dim, bench), 12)
    for length, batch in {96: 1}.items() if bench.dry else LENGTHS.items():
        for dim in dims[::-1]:
            whole = [f"regard {spec}, {WHOLE}" for spec in SPECS]
            for name in ("flash", *(f"regard {spec}" for spec in SPECS), *whole):
                words = f"decoding, {length} keys, B {batch}, D {dim}, {name}"
                run = partial(timed, name, length, batch, dim, bench)
                yield Row(words, "decoding", 3 if dim == 128 else 11, run, 6)


def correctness(spec: str, dim: int, bench: Bench) -> dict[str, Any]:
    """One query's output against the dense form in float64."""
    wide_systems = spec == "local-linear"  # all products of two coordinates of every key, in float64
    length = 70 if bench.dry else (1500 if wide_systems else 5000)
    q, k, v = inputs(bench, length, 1 if wide_systems else 2, dim)
    with torch.no_grad(), small_tiles(bench):
        found = attend(spec, q, k, v)
    if bench.compiling:
        return {}
    seen = gpu_dense.causal(1, length, bench.device)
    wide = [x.double() for x in (q, k, v)]
    if wide_systems:
        wanted = gpu_dense.local_linear(*wide, seen, RIDGE)
    else:
        wanted = gpu_dense.attention(KINDS[spec], *wide, seen)
    error, bar = rms_ratio(found, wanted), BARS["bfloat16"][0]
    return {"errors": {"out": error}, "bars": {"out": bar}, "right": error <= bar}


def timed(name: str, length: int, batch: int, dim: int, bench: Bench) -> dict[str, Any]:
    """The device's time of a step, that of a call from Python, and the rate at which keys and values come in, counting
    each number once."""
    q, k, v = inputs(bench, length, batch, dim)
    call = contestant(name, q, k, v)
    with torch.inference_mode(), small_tiles(bench):
        eager = bench.milliseconds(call)
        ms = bench.milliseconds(bench.graphed(call))
    size = 2 * k.numel() * k.element_size()
    rate = size / ms / 1e6
    return {
        "config": {"length": length, "batch": batch, "dim": dim, "kv_heads": k.shape[1], "heads": q.shape[1]},
        "contestant": name,
        "ms": digits(ms),
        "eager_ms": digits(eager),
        "gbps": digits(rate),
        "of_ceiling": digits(rate / ceilings(bench)["gbps"], 3),
    }


def contestant(name: str, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    """Return a step of that name."""
    if name == "flash":
        return partial(gpu_peers.torch_attention, q, k, v, backend="flash", causal=False)
    spec = name.removeprefix("regard ").split(",")[0]
    return partial(attend if name.endswith(WHOLE) else decode, spec, q, k, v)
