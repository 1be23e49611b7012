"""Part `local_linear` of `gpu.py`: local linear attention and Parallax against flash attention, the naive form (all
D x D systems at once) and flash-linear-attention's kernels."""

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import gpu_dense
import gpu_peers
import torch
from cpu_measure import digits
from gpu_compact import BARS, judged
from gpu_measure import Bench, Function, Row, passed, passes, rms_ratio, small_tiles
from torch import Tensor

import regard

RIDGE = 0.1
HEADS = 32
"""Sequences times heads of a timed call, as in the paper's Figure 7."""
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
NAIVE_LIMIT = 8192
FAMILIES = ("normal", "normalised", "anisotropic", "recall")
FLOOR_BARS = {0.1: 1.5, 0.01: 2.0}
"""Ridge to how many times the floor an error may be."""
SCHEMES = {"local-linear": {}, "local-linear, tol 0.001": {"solver": "cg", "tol": 1e-3}}
"""Contestants of regard's own, with their solvers."""
TILE = 64


# Inputs ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=2)
def inputs(bench: Bench, length: int, dim: int) -> list[Tensor]:
    """Normal queries, keys, values, a cotangent and a probe [1, 32, length, dim] in bfloat16 (from 32 K on fewer
    heads)."""
    heads = 2 if bench.dry else max(1, min(HEADS, HEADS * 16384 // length))
    make = bench.generator(length + dim)
    shape = (1, heads, length, dim)
    q, k, v, g, r = (torch.randn(shape, device=bench.device, generator=make) for _ in range(5))
    return [x.bfloat16() for x in (q, k, v, g, 0.1 * r)]


def family(name: str, bench: Bench, length: int, dim: int) -> list[Tensor]:
    """Queries, keys and values [1, heads, length, dim] of a kind of data, rounded to bfloat16: normal ones; the same of
    length one; keys whose deviations fall from 2 to 1/5, all moved by a vector of norm near 2 sqrt(D); queries that are
    keys they see, moved by N(0, 1/100)."""
    make, heads = bench.generator(7), 1 if bench.dry else 4
    q, k, v, one = (torch.randn(1, heads, length, dim, device=bench.device, generator=make) for _ in range(4))
    if name == "normalised":
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    elif name == "anisotropic":
        k = k * torch.logspace(0.3, -0.7, dim, device=bench.device) + 2 * one[:, :, :1]
    elif name == "recall":
        at = torch.rand(1, heads, length, 1, device=bench.device, generator=make)
        seen = (at * torch.arange(1, length + 1, device=bench.device)[:, None]).long()
        q = k.gather(2, seen.expand_as(k)) + 0.1 * q
    return [x.bfloat16() for x in (q, k, v)]


def contestant(name: str) -> Function:
    """(q, k, v) -> output, causal; of Parallax (q, k, v, probe)."""
    if name == "flash":
        return partial(gpu_peers.torch_attention, backend="flash")
    if name == "naive":
        return naive
    if name == "fla mesa":
        return gpu_peers.mesa
    if name == "fla parallax":
        return lambda q, k, v, r: gpu_peers.parallax(q, r, k, v)
    name = name.removeprefix("regard ")
    if name == "parallax":
        return lambda q, k, v, r: ours(q, k, v, solver="learned", probe=r.float())
    return partial(ours, **SCHEMES[name])  # type: ignore[arg-type]


def ours(q: Tensor, k: Tensor, v: Tensor, ridge: float = RIDGE, **more: Any) -> Tensor:
    return regard.local_linear_attention(q, k, v, ridge=ridge, is_causal=True, impl="triton", **more)


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In float32, every covariance formed and solved by Cholesky."""
    seen = gpu_dense.causal(q.shape[2], k.shape[2], q.device)
    return gpu_dense.local_linear(q.float(), k.float(), v.float(), seen, RIDGE).to(q.dtype)


# Rows ------------------------------------------------------------------------------------------------------------


def rows(bench: Bench) -> Iterator[Row]:
    for dtype in BARS:
        for dim in (16,) if bench.dry else (64, 128):
            for model in ("local-linear", "parallax"):
                name = f"correctness, {model}, D {dim}, {dtype}"
                priority = 1 if dtype == "bfloat16" and model == "local-linear" else 9
                yield Row(name, "correctness", priority, partial(correctness, model, dim, dtype, bench), 20)
    for data in FAMILIES:
        for ridge in FLOOR_BARS:
            words = f"floor, {data}, ridge {ridge:g}"
            yield Row(words, "local_linear", 3 if ridge == RIDGE else 9, partial(floor, data, ridge, bench), 10)
    for length in (32,) if bench.dry else LENGTHS:
        for dim in (16,) if bench.dry else (64, 128):
            yield from length_rows(bench, length, dim)


def length_rows(bench: Bench, length: int, dim: int) -> Iterator[Row]:
    judged_here = length in (32, 8192)
    base = 2 if judged_here else 12
    names = {"flash": 1, "regard local-linear": 0, "regard local-linear, tol 0.001": 0, "regard parallax": 6}
    names |= {"fla parallax": 9, "fla mesa": 10}
    if length <= NAIVE_LIMIT and (dim == 128 or judged_here):
        names["naive"] = 6 if judged_here else 1
    for name, later in names.items():
        words = f"local linear, T {length}, D {dim}, {name}"
        run = partial(timed, name, length, dim, bench)
        seconds = 15 + 4e-14 * 60 * HEADS * length**2 * dim * (4 if name == "naive" else 1)
        yield Row(words, "local_linear", base + later, run, seconds, int(name.startswith("fla")))
    if judged_here:
        yield Row(f"local linear, T {length}, D {dim}, steps", "local_linear", 2, partial(steps, length, dim, bench), 8)


# Measures --------------------------------------------------------------------------------------------------------


def correctness(model: str, dim: int, dtype: str, bench: Bench) -> dict[str, Any]:
    """Outputs and gradients against the dense form in float64. The ridge is 1, so that systems are conditioned as well
    as the targets of plain attention suppose; `floor` looks at smaller ones."""
    length = 36 if bench.dry else 496
    make = bench.generator(dim)
    heads, kv_heads = (2, 1) if bench.dry else (4, 2)
    shapes = [(1, heads, length, dim), *[(1, kv_heads, length, dim)] * 2, (1, heads, length, dim)]
    q, k, v, g = (torch.randn(shape, device=bench.device, generator=make).to(getattr(torch, dtype)) for shape in shapes)
    probe = 0.1 * torch.randn(shapes[0], device=bench.device, generator=make) if model == "parallax" else None
    given = [q, k, v] if probe is None else [q, k, v, probe]
    leaves, wide = [x.clone().requires_grad_() for x in given], [x.double().requires_grad_() for x in given]
    how = {"solver": "cg", "tol": 1e-6} if probe is None else {"solver": "learned", "probe": leaves[3]}
    with small_tiles(bench):
        out = ours(*leaves[:3], ridge=1.0, enable_gqa=True, **how)
        grads = torch.autograd.grad(out, leaves, g)
    if bench.compiling:
        return {}
    seen = gpu_dense.causal(length, length, bench.device)
    wanted = gpu_dense.local_linear(*wide[:3], seen, 1.0, None if probe is None else wide[3])
    wanted_grads = torch.autograd.grad(wanted, wide, g.double())
    pairs = zip(grads, wanted_grads, strict=True)
    return judged(out, wanted, dict(zip(("dq", "dk", "dv", "dprobe"), pairs, strict=False)), dtype)


def floor(data: str, ridge: float, bench: Bench) -> dict[str, Any]:
    """The error of bfloat16 inputs against float64, beside the floor: the exact slope, and only the weights
    p (1 + e), the values and the output rounded to bfloat16."""
    length, dim = (36, 16) if bench.dry else (1024, 64)
    q, k, v = family(data, bench, length, dim)
    with torch.no_grad(), small_tiles(bench):
        found = ours(q, k, v, ridge=ridge, solver="cg", tol=1e-4)
    if bench.compiling:
        return {}
    seen = gpu_dense.causal(length, length, bench.device)
    wide = [x.double() for x in (q, k, v)]
    p = gpu_dense.weights("softmax", gpu_dense.scores(*wide[:2]), seen)
    t, mean = gpu_dense.slopes(wide[0], wide[1], p, ridge)
    weights = gpu_dense.spread(t, mean, wide[1], p)
    wanted = weights @ wide[2]
    best = (weights.bfloat16().float() @ v.float()).bfloat16()
    error, least = rms_ratio(found, wanted), rms_ratio(best, wanted)
    return {
        "config": {"data": data, "ridge": ridge, "length": length, "dim": dim},
        "error": error,
        "floor": least,
        "bar": FLOOR_BARS[ridge],
        "right": error <= FLOOR_BARS[ridge] * least,
    }


@lru_cache(maxsize=4)
def executed(bench: Bench, length: int, dim: int) -> dict[str, float]:
    """Steps of conjugate gradients, by contestant: of a row and of a tile of 64 rows (its slowest row), the latter
    weighted by the keys that the tile sees, since all its rows go on until it is done."""
    q, k, v = inputs(bench, length, dim)[:3]
    found: dict[str, float] = {}
    for name, how in SCHEMES.items():
        with torch.no_grad(), small_tiles(bench):
            told = ours(q[:, :2], k[:, :2], v[:, :2], return_diagnostics=True, **how)[1].solver["iterations"]
        rows = torch.nn.functional.pad(told.reshape(2, length).float(), (0, -length % TILE))
        tiles = rows.unflatten(1, (-1, TILE)).amax(-1)
        keys = torch.arange(1, tiles.shape[1] + 1, device=tiles.device).float()
        found[name] = digits(float((tiles * keys).sum() / (2 * keys.sum())))
        found[f"{name}, a row"] = digits(float(told.float().mean()))
    return found


def steps(length: int, dim: int, bench: Bench) -> dict[str, Any]:
    return {"config": {"length": length, "dim": dim}, "steps": executed(bench, length, dim)}


def flops(name: str, bench: Bench, length: int, dim: int, heads: int) -> dict[str, float] | None:
    """By pass, of causal pairs: products of one query and one key, D multiply-adds each. Softmax attention has 2
    forward and 5 more backward; Parallax 4 (scores, k.r, p k, p v) and 11 more; local linear attention 5 and 3 a step
    forward (scores again, k.d, w k), and backward 8 and 3 a step by queries, 8 by keys."""
    pairs = heads * length * (length + 1) / 2
    if name == "flash":
        counts = (2.0, 7.0)
    elif "parallax" in name:
        counts = (4.0, 15.0)
    elif name.startswith("regard"):
        own = executed(bench, length, dim)[name.removeprefix("regard ")]
        counts = (5 + 3 * own, 21 + 6 * own)
    else:
        return None
    return {which: 2 * pairs * dim * n for which, n in zip(("forward", "both"), counts, strict=True)}


def timed(name: str, length: int, dim: int, bench: Bench) -> dict[str, Any]:
    """Times, peaks and rates of both passes."""
    q, k, v, g, probe = inputs(bench, length, dim)
    given = (q, k, v, probe) if "parallax" in name else (q, k, v)
    if bench.dry and name.startswith("fla "):
        raise gpu_peers.Missing("flash-linear-attention needs a GPU")
    work = flops(name, bench, length, dim, q.shape[1])
    with small_tiles(bench):
        found = passed(bench, passes(contestant(name), given, g), work, "tflops")
    return {"config": {"length": length, "dim": dim, "heads": q.shape[1]}, "contestant": name, **found}
