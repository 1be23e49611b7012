"""Rows of the part `correctness` of `gpu.py`: what calls promise on any input, where only a device can break it.

Repeated calls are equal bit by bit, which a race between warps would break. Offsets beyond 2^31, one token and 131,072
tokens, masked places that hold NaN, rows without keys, a stream of one's own, CUDA graphs and `torch.compile` change
nothing. Bars of 0 ask for equal bits.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gpu_dense
import torch
from gpu_compact import BARS, KINDS
from gpu_local_linear import RIDGE
from gpu_measure import Bench, Row, rms_ratio, small_tiles
from torch import Tensor

import regard

SPECS = ("biweight", "relumax", "softmax", "local-linear")
NAMES = ("out", "dq", "dk", "dv")
ROWS = 128
"""Rows of the long sequence that are compared with a dense form."""


def rows(bench: Bench) -> Iterator[Row]:
    checks = (repeated, one_token, masked, without_keys, far, own_stream, graphed, long, compiled)
    for check in checks:
        for spec in SPECS[:1] if bench.dry else SPECS:
            words = check.__name__.replace("_", " ")
            seconds = 30 if check is compiled else 10
            yield Row(f"correctness, {words}, {spec}", "correctness", 1, partial(judged, check, spec, bench), seconds)


def judged(check: Callable[..., tuple[list[float], list[float]]], spec: str, bench: Bench) -> dict[str, Any]:
    """Errors of one check and whether all are at most their bars."""
    with small_tiles(bench):
        errors, bars = check(spec, bench)
    if bench.compiling:
        return {}
    right = all(error <= bar for error, bar in zip(errors, bars, strict=True))
    found = dict(zip(NAMES, errors, strict=False))
    return {"errors": found, "bars": {"out": bars[0], "gradients": bars[-1]}, "right": right}


# Calls -----------------------------------------------------------------------------------------------------------


def draw(bench: Bench, queries: int, keys: int, heads: int = 4, batch: int = 2) -> list[Tensor]:
    """Query, key, value and a cotangent of the output, bfloat16."""
    dim = 16 if bench.dry else 64
    make = bench.generator(queries + keys)
    shape = partial(torch.randn, batch, heads, device=bench.device, generator=make)
    return [x(dim).bfloat16() for x in (partial(shape, n) for n in (queries, keys, keys, queries))]


def attend(spec: str, q: Tensor, k: Tensor, v: Tensor, **call: Any) -> Tensor:
    if spec == "local-linear":
        return regard.local_linear_attention(q, k, v, ridge=RIDGE, impl="triton", **call)
    return regard.attention(q, k, v, spec, impl="triton", **call)


def both(spec: str, given: list[Tensor], **call: Any) -> list[Tensor]:
    """The output and the gradients of query, key and value."""
    leaves = [x.detach().requires_grad_() for x in given[:3]]
    out = attend(spec, *leaves, **{"is_causal": True, **call})
    return [out.detach(), *torch.autograd.grad(out, leaves, given[3])]


def apart(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference; equal NaN count as equal, others as infinite."""
    worst = 0.0
    for x, y in zip(found, wanted, strict=True):
        gap = torch.where((x == y) | (x.isnan() & y.isnan()), 0.0, (x.float() - y.float()).abs())
        worst = max(worst, float(gap.nan_to_num(nan=torch.inf).max()))
    return worst


# Checks ----------------------------------------------------------------------------------------------------------


def repeated(spec: str, bench: Bench) -> tuple[list[float], list[float]]:
    """Ten calls of forward and backward, and of one query, of the same inputs."""
    given = draw(bench, *(2 * [20 if bench.dry else 4000]))
    first = both(spec, given)
    one = attend(spec, given[0][:, :, -1:], *given[1:3], is_causal=True)
    errors = [0.0, 0.0]
    for _ in range(1 if bench.dry or bench.compiling else 10):
        errors[1] = max(errors[1], apart(both(spec, given), first))
        errors[0] = max(errors[0], apart([attend(spec, given[0][:, :, -1:], *given[1:3], is_causal=True)], [one]))
    return errors, [0.0, 0.0]


def one_token(spec: str, bench: Bench) -> tuple[list[float], list[float]]:
    """A token that sees itself alone gets its value, and only its value has a gradient."""
    given = draw(bench, 1, 1)
    wanted = [given[2], torch.zeros_like(given[0]), torch.zeros_like(given[1]), given[3]]
    return [apart([x], [y]) for x, y in zip(both(spec, given), wanted, strict=True)], 4 * [1e-6]


def masked(spec: str, bench: Bench) -> tuple[list[float], list[float]]:
    """Keys and values that a mask hides are NaN, instead of 0."""
    tokens = 20 if bench.dry else 1000
    given = draw(bench, tokens, tokens)
    keep = torch.rand(2, 1, 1, tokens, device=bench.device, generator=bench.generator(5)) > 0.4
    hidden = ~keep[:, :, 0, :, None]
    with_zeros, with_nan = (
        both(spec, [given[0], *(x.masked_fill(hidden, fill) for x in given[1:3]), given[3]], attn_mask=keep)
        for fill in (0.0, torch.nan)
    )
    return [apart([x], [y]) for x, y in zip(with_nan, with_zeros, strict=True)], 4 * [0.0]


def without_keys(spec: str, bench: Bench) -> tuple[list[float], list[float]]:
    """The first 17 rows see no key: their output and gradient are 0, and they change no other row."""
    tokens = 20 if bench.dry else 1000
    given = draw(bench, tokens, tokens)
    found = both(spec, given, query_offset=-17)
    rest = both(spec, [x[:, :, 17:] if i in (0, 3) else x for i, x in enumerate(given)], query_offset=0)
    wanted = [torch.nn.functional.pad(x, (0, 0, 17, 0)) if i < 2 else x for i, x in enumerate(rest)]
    empty = apart([x[:, :, :17] for x in found[:2]], [x[:, :, :17] for x in wanted[:2]])
    close = [rms_ratio(x, y) for x, y in zip(found, wanted, strict=True)]
    return [close[0] if empty == 0 else torch.inf, *close[1:]], 4 * [1e-2]


def far(spec: str, bench: Bench) -> tuple[list[float], list[float]]:
    """Heads of query, key, value and cotangent lie 2^31 numbers apart, prefilled and with one query."""
    tokens = 20 if bench.dry else 300
    given = draw(bench, tokens, tokens, heads=2, batch=1)
    if bench.dry or bench.compiling:
        moved = given
    else:
        moved = []
        for x in given:
            steps = (2 * (2**31 + 16), 2**31 + 16, x.shape[-1], 1)
            moved.append(torch.empty_strided(x.shape, steps, dtype=x.dtype, device=x.device).copy_(x))
    errors = [apart([x], [y]) for x, y in zip(both(spec, moved), both(spec, given), strict=True)]
    one, same = (attend(spec, x[0][:, :, -1:], *x[1:3], is_causal=True) for x in (moved, given))
    errors[0] = max(errors[0], apart([one], [same]))
    return errors, 4 * [0.0]


def own_stream(spec: str, bench: Bench) -> tuple[list[float], list[float]]:
    """A call in a stream of one's own, behind the work that makes its inputs there."""
    tokens = 20 if bench.dry else 2000
    given = draw(bench, tokens, tokens)
    wanted = both(spec, given)
    if bench.dry or bench.compiling:
        return [0.0], [0.0]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = torch.randn(4096, 4096, device=bench.device)
        for _ in range(20):
            late = late @ late * 1e-2
        found = both(spec, [x + 0 * late[0, 0].nan_to_num(0, 0, 0).to(x.dtype) for x in given])
    torch.cuda.current_stream().wait_stream(stream)
    return [apart([x], [y]) for x, y in zip(found, wanted, strict=True)], 4 * [0.0]


def graphed(spec: str, bench: Bench) -> tuple[list[float], list[float]]:
    """A CUDA graph of forward and backward, replayed with other inputs than it was captured with."""
    tokens = 20 if bench.dry else 2000
    given, other = draw(bench, tokens, tokens), draw(bench, tokens, tokens, batch=2)[::-1]
    wanted = both(spec, other)
    if bench.dry or bench.compiling:
        return [0.0], [0.0]
    replay = bench.graphed(lambda: both(spec, given))
    for x, y in zip(given, other, strict=True):
        x.copy_(y)
    return [apart([x], [y]) for x, y in zip(replay(), wanted, strict=True)], 4 * [0.0]


def compiled(spec: str, bench: Bench) -> tuple[list[float], list[float]]:
    """`torch.compile` of the call, as one graph."""
    tokens = 20 if bench.dry else 1000
    given = draw(bench, tokens, tokens)
    wanted = both(spec, given)
    if bench.dry or bench.compiling:
        return [0.0], [0.0]
    whole = torch.compile(partial(attend, spec, is_causal=True), fullgraph=True)
    leaves = [x.detach().requires_grad_() for x in given[:3]]
    out = whole(*leaves)
    found = [out.detach(), *torch.autograd.grad(out, leaves, given[3])]
    return [rms_ratio(x, y) for x, y in zip(found, wanted, strict=True)], 4 * [1e-3]


def long(spec: str, bench: Bench) -> tuple[list[float], list[float]]:
    """131,072 tokens: some rows of the output, and the gradients that their cotangents give, against dense rows."""
    tokens = 24 if bench.dry else 131072
    given = draw(bench, tokens, tokens, heads=1, batch=1)
    make = bench.generator(7)
    some = torch.randperm(tokens, device=bench.device, generator=make)[: min(ROWS, tokens // 2)].sort().values
    some[-1] = tokens - 1
    chosen = torch.zeros(tokens, 1, device=bench.device).index_fill_(0, some, 1.0).bool()
    given[3] = given[3].masked_fill(~chosen, 0.0)
    found = both(spec, given)
    if bench.compiling:
        return [0.0], [0.0]
    q, k, v, cotangent = (x.double() for x in given)
    leaves = [q[:, :, some].requires_grad_(), k.requires_grad_(), v.requires_grad_()]
    seen = torch.arange(tokens, device=bench.device) <= some[:, None]
    if spec == "local-linear":
        out = gpu_dense.local_linear(leaves[0], leaves[1], leaves[2], seen, RIDGE)
    else:
        out = gpu_dense.attention(KINDS[spec], leaves[0], leaves[1], leaves[2], seen)
    wanted = [out.detach(), *torch.autograd.grad(out, leaves, cotangent[:, :, some])]
    own = [x[:, :, some] if i < 2 else x for i, x in enumerate(found)]
    bar, steep = BARS["bfloat16"]
    return [rms_ratio(x, y) for x, y in zip(own, wanted, strict=True)], [bar, steep, steep, steep]
