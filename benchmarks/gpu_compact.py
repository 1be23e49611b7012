"""Part `compact` of `gpu.py`: compact attention against flash and cuDNN attention, AdaSplash and the plain forms."""

import math
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import gpu_dense
import gpu_peers
import torch
from cpu_measure import digits
from gpu_measure import Bench, Function, Row, passed, passes, rms_ratio, small_tiles
from torch import Tensor

import regard

KINDS = {
    "softmax": "softmax",
    "sparsemax": "adaptive 1",
    "biweight": "adaptive 2",
    "triweight": "adaptive 3",
    "relumax": "anchored",
    "normrelu": "fixed",
}
"""Presets, as `gpu_dense` names their weights; biweight is entmax-1.5."""
TOKENS = 32768
WIDTH = 1024
"""Tokens of a batch, and features of all heads together."""
TOPICS, LEVEL = 10, 8.0
BARS = {"bfloat16": (1e-2, 1e-2), "float32": (1e-5, 1e-4)}
"""Errors at most, |found - wanted| / |wanted|, of outputs and of gradients."""
ROW_SUMS = 1e-5
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
JUDGED = (8192, 16384, 32768, 65536)
PLAIN_LIMIT = 4096
"""Longest sequence of the form that makes all pairs; `impl="blocked"` goes to twice as many."""


# Inputs ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=2)
def inputs(bench: Bench, length: int, dim: int, share: float, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Queries, keys, values and a cotangent [B, H, length, dim] of which causal blocks of 64 x 64 pairs have weight in
    about this share; at 1, plain normal numbers.

    Keys of a block are on one topic of ten, queries of a block are after some of the topics: their scores are LEVEL
    higher on these. Scores beside that are normal with a deviation of about one.
    """
    batch, heads = (1, 2) if bench.dry else (max(1, TOKENS // length), WIDTH // dim)
    make = bench.generator(length + dim)
    normal = partial(torch.randn, batch, heads, length, dim, device=bench.device, generator=make, dtype=torch.float32)
    q, k = normal(), normal()
    if share < 1:
        size = math.sqrt(LEVEL * math.sqrt(dim))
        block = 16 if bench.dry else 64
        blocks = -(-length // block)
        order = torch.rand(batch, heads, blocks, TOPICS, device=bench.device, generator=make).argsort(-1)
        after = (order < round(share * TOPICS)).float()
        topic = torch.randint(TOPICS, (batch, heads, blocks), device=bench.device, generator=make)
        on = torch.nn.functional.one_hot(topic, TOPICS).float()
        for x, marks in ((q, after), (k, on)):
            x[..., :TOPICS] = size * marks.repeat_interleave(block, 2)[:, :, :length]
    return [x.to(dtype) for x in (q, k, normal(), normal())]


def contestant(name: str, bench: Bench) -> Function:
    """(q, k, v) -> output, causal."""
    if name in gpu_peers.TORCH:
        return partial(gpu_peers.torch_attention, backend=name)
    if name in gpu_peers.ADASPLASH:
        return gpu_peers.adasplash(name, tuned_once=not bench.tune_peers)
    spec, _, impl = name.removeprefix("regard ").partition(", impl=")
    return partial(regard.attention, spec=spec, is_causal=True, impl=impl or "triton")


# Rows ------------------------------------------------------------------------------------------------------------


def rows(bench: Bench) -> Iterator[Row]:
    yield from correctness_rows(bench)
    for name in ("regard biweight", "regard relumax", *gpu_peers.ADASPLASH):
        priority, seconds = (1, 10) if name.startswith("regard") else (6, 40)
        tunes = int("adasplash 2" in name)
        yield Row(f"row sums, {name}", "compact", priority, partial(row_sums, name, bench), seconds, tunes)
    if bench.dry:
        yield from dry_rows(bench)
        return
    for length in LENGTHS:
        yield from length_rows(bench, length)


def correctness_rows(bench: Bench) -> Iterator[Row]:
    for spec in KINDS:
        for dtype in BARS:
            for dim in (16,) if bench.dry else (64, 128):
                main = spec in ("biweight", "relumax") and dtype == "bfloat16"
                priority = 1 if main and dim in (16, 64) else 9 if dtype == "bfloat16" else 14
                name = f"correctness, {spec}, D {dim}, {dtype}"
                yield Row(name, "correctness", priority, partial(correctness, spec, dim, dtype, bench), 15)
    name = "correctness, biweight, strict order and window, 777 tokens"
    yield Row(
        name, "correctness", 9, partial(correctness, "biweight", 16 if bench.dry else 64, "bfloat16", bench, True)
    )


def length_rows(bench: Bench, length: int) -> Iterator[Row]:
    """In the order in which they matter: the criteria's first."""
    judged = length in JUDGED
    for dim in (64, 128):
        for share in (0.4, 0.3, 1.0, 0.6):
            first = {0.4: 2, 0.3: 4, 1.0: 8, 0.6: 15}[share] + (0 if judged else 5) + (5 if dim == 128 else 0)
            near = 0 if length in (8192, 16384) else 1
            if share in (0.4, 0.3) and not judged:
                continue
            names = {"flash": 0, "regard biweight": 0, "regard relumax": 0, "adasplash 2": 1, "cudnn": 3}
            if share in (0.4, 1.0):
                names["adasplash 2, 2 steps"] = 4
            if share == 1.0 and dim == 64:
                names |= {"regard sparsemax": 4, "regard triweight": 4, "regard normrelu": 4, "regard softmax": 4}
                names["adasplash 1"] = 8
                if length <= PLAIN_LIMIT:
                    names["regard biweight, impl=reference"] = 5
                if length <= 2 * PLAIN_LIMIT:
                    names["regard biweight, impl=blocked"] = 5
            for name, later in names.items():
                priority = first + near + later
                if name == "adasplash 2":  # it tunes itself at the first length; kernels of others are compiled then
                    priority = {0.4: 2, 0.3: 4, 1.0: 8, 0.6: 15}[share] + (1 if length == 8192 else 4 + near)
                yield timing_row(bench, name, length, dim, share, priority, guess(name, length, dim))


def dry_rows(bench: Bench) -> Iterator[Row]:
    names = ["flash", "cudnn", *(f"regard {spec}" for spec in KINDS), *gpu_peers.ADASPLASH]
    names += ["regard biweight, impl=reference", "regard biweight, impl=blocked"]
    for share in (0.4, 1.0):
        for name in names if share == 1.0 else names[:5]:
            yield timing_row(bench, name, 64, 16, share, 2, 1)


def timing_row(bench: Bench, name: str, length: int, dim: int, share: float, priority: int, seconds: float) -> Row:
    words = f"attention, T {length}, D {dim}, live {share:g}, {name}"
    tunes = (1 if length != 8192 or "steps" in name else 2) if "adasplash 2" in name else 0
    return Row(words, "compact", priority, partial(timed, name, length, dim, share, bench), seconds, tunes)


def guess(name: str, length: int, dim: int) -> float:
    """Seconds of a row: what is compiled or tuned, and some twenty runs at 100 TFLOP/s."""
    compiling = 25 if name.startswith("adasplash") else 4
    return compiling + 20 * flops(length, dim)["both"] / 1e14


# Measures --------------------------------------------------------------------------------------------------------


def flops(length: int, dim: int, batch: int | None = None, heads: int | None = None) -> dict[str, float]:
    """Of causal softmax attention, by pass: two products of all visible pairs forward, five more backward."""
    batch = max(1, TOKENS // length) if batch is None else batch
    heads = WIDTH // dim if heads is None else heads
    pairs = batch * heads * length * (length + 1) / 2
    return {"forward": 4 * pairs * dim, "both": 14 * pairs * dim}


def timed(name: str, length: int, dim: int, share: float, bench: Bench) -> dict[str, Any]:
    """Times and peaks of both passes, and the rates they amount to if all visible pairs are counted."""
    q, k, v, g = inputs(bench, length, dim, share)
    function = contestant(name, bench)
    config = {"length": length, "dim": dim, "batch": q.shape[0], "heads": q.shape[1], "share": share}
    work = flops(length, dim, q.shape[0], q.shape[1])
    with small_tiles(bench):
        found = passed(bench, passes(function, (q, k, v), g), work, "dense_tflops")
    live = {spec: digits(live_share(bench, length, dim, share, spec), 3) for spec in ("biweight", "relumax")}
    return {"config": config, "contestant": name, "live": live, **found}


@lru_cache(maxsize=8)
def live_share(bench: Bench, length: int, dim: int, share: float, spec: str) -> float:
    if bench.compiling:
        return 1.0
    q, k = inputs(bench, length, dim, share)[:2]
    return gpu_dense.live_share(q, k, KINDS[spec], 16 if bench.dry else 64)


def correctness(spec: str, dim: int, dtype: str, bench: Bench, odd: bool = False) -> dict[str, Any]:
    """Outputs and gradients against the dense form in float64, of the same inputs: two query heads a key head."""
    length = (37 if odd else 48) if bench.dry else (777 if odd else 1008)
    options: dict[str, Any] = {"exclude_self": True, "window": length // 3} if odd else {"is_causal": True}
    make = bench.generator(dim)
    heads = (1, 2, 1) if bench.dry else (2, 4, 2)
    shapes = [(*heads[:2], length, dim), *[(heads[0], heads[2], length, dim)] * 2, (*heads[:2], length, dim)]
    q, k, v, g = (torch.randn(shape, device=bench.device, generator=make).to(getattr(torch, dtype)) for shape in shapes)
    seen = gpu_dense.causal(length, length, bench.device, options.get("window"), odd)
    leaves, wide = ([x.detach().to(to).requires_grad_() for x in (q, k, v)] for to in (q.dtype, torch.float64))
    with small_tiles(bench):
        out = regard.attention(*leaves, spec, enable_gqa=True, impl="triton", **options)
        grads = torch.autograd.grad(out, leaves, g)
    if bench.compiling:
        return {}
    wanted = gpu_dense.attention(KINDS[spec], *wide, seen)
    wanted_grads = torch.autograd.grad(wanted, wide, g.double())
    return judged(out, wanted, dict(zip(("dq", "dk", "dv"), zip(grads, wanted_grads, strict=True), strict=True)), dtype)


def judged(out: Tensor, wanted: Tensor, grads: dict[str, tuple[Tensor, Tensor]], dtype: str) -> dict[str, Any]:
    """Errors beside their targets, and whether they are all below them."""
    errors = {"out": rms_ratio(out, wanted), **{name: rms_ratio(*pair) for name, pair in grads.items()}}
    bars = BARS[dtype]
    right = all(error <= bars[name != "out"] for name, error in errors.items())
    return {"errors": errors, "bars": {"out": bars[0], "gradients": bars[1]}, "right": right}


def row_sums(name: str, bench: Bench) -> dict[str, Any]:
    """How far a row's weights are from a sum of one, at most: outputs for values of one, by the float32 kernels, since
    bfloat16 outputs would round it away; of normal queries and keys, and of nearly equal scores (deviation 0.3)."""
    length, dim = (48, 16) if bench.dry else (8192, 64)
    function, found = contestant(name, bench), {}
    if bench.dry and name in gpu_peers.ADASPLASH:
        raise gpu_peers.Missing("adasplash needs a GPU")
    for words, spread in {"normal": 1.0, "flat": 0.3}.items():
        make = bench.generator(1)
        q, k = (torch.randn(1, 2, length, dim, device=bench.device, generator=make) for _ in range(2))
        with torch.no_grad(), small_tiles(bench):
            sums = function(q * spread, k, torch.ones_like(k))
        found[words] = digits(float((sums.double() - 1).abs().max()), 3)
    return {"contestant": name, "config": {"length": length, "dim": dim}, "from_one": found, "bar": ROW_SUMS}
