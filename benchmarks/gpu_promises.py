"""Rows of the part `correctness` of `gpu.py`: what calls promise on any input, where only a device can break it.

Repeated calls are equal bit by bit, which a race between warps would break. Offsets beyond 2^31, one token and 131,072
tokens, masked places that hold NaN, rows without keys, a stream of one's own, CUDA graphs and `torch.compile` change
nothing. A NaN that a row sees makes that row NaN, and no other. Targets of 0 ask for equal bits.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gpu_dense
import gpu_memory
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
    checks = (repeated, one_token, masked, visible_nan, without_keys, far, own_stream, graphed, long, compiled)
    for check in checks:
        for spec in SPECS[:1] if bench.dry else SPECS:
            words = check.__name__.replace("_", " ")
            seconds = 30 if check is compiled else 10
            yield Row(f"correctness, {words}, {spec}", "correctness", 1, partial(judged, check, spec, bench), seconds)
        if check in MEMORY:
            yield Row(f"correctness, {words}, memory", "correctness", 1, partial(judged, MEMORY[check], "", bench), 15)


def judged(check: Callable[..., tuple[list[float], list[float]]], spec: str, bench: Bench) -> dict[str, Any]:
    """Errors of one check and whether all are at most their targets."""
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


def visible_nan(spec: str, bench: Bench) -> tuple[list[float], list[float]]:
    """A NaN in a key, then in a value, of one head: the rows that see it are NaN, all others as without it."""
    tokens = 20 if bench.dry else 1000
    q, *pair = draw(bench, tokens, tokens, heads=2 if bench.dry else 4)[:3]
    worst = 0.0
    for last in (q, q[:, :, -1:]):
        clean = attend(spec, last, *pair, is_causal=True)
        wanted = clean.clone()
        wanted[1, 1, tokens // 2 if last is q else 0 :] = torch.nan
        for which in range(2):
            broken = [x.clone() for x in pair]
            broken[which][1, 1, tokens // 2, 3] = torch.nan
            worst = max(worst, apart([attend(spec, last, *broken, is_causal=True)], [wanted]))
    return [worst], [0.0]


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


def in_own_stream(bench: Bench, call: Callable[[Tensor], list[Tensor]]) -> list[Tensor]:
    """What a call of a zero gives in a stream of its own; the zero is the result of long work there."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = torch.randn(4096, 4096, device=bench.device)
        for _ in range(20):
            late = late @ late * 1e-2
        found = call(0 * late[0, 0].nan_to_num(0, 0, 0))
    torch.cuda.current_stream().wait_stream(stream)
    return found


def own_stream(spec: str, bench: Bench) -> tuple[list[float], list[float]]:
    """A call in a stream of one's own, behind the work that makes its inputs there."""
    tokens = 20 if bench.dry else 2000
    given = draw(bench, tokens, tokens)
    wanted = both(spec, given)
    if bench.dry or bench.compiling:
        return [0.0], [0.0]
    found = in_own_stream(bench, lambda zero: both(spec, [x + zero.to(x.dtype) for x in given]))
    return [apart([x], [y]) for x, y in zip(found, wanted, strict=True)], 4 * [0.0]


def graphed(spec: str, bench: Bench) -> tuple[list[float], list[float]]:
    """CUDA graphs of forward and backward, and of one query, replayed with other inputs than it was captured with."""
    tokens = 20 if bench.dry else 2000
    given, other = draw(bench, tokens, tokens), draw(bench, tokens, tokens, batch=2)[::-1]
    wanted = both(spec, other)
    if bench.dry or bench.compiling:
        return [0.0], [0.0]
    wanted.append(attend(spec, other[0][:, :, -1:], *other[1:3], is_causal=True))
    replay = bench.graphed(lambda: both(spec, given))
    one = bench.graphed(lambda: attend(spec, given[0][:, :, -1:], *given[1:3], is_causal=True))
    for x, y in zip(given, other, strict=True):
        x.copy_(y)
    errors = [apart([x], [y]) for x, y in zip([*replay(), one()], wanted, strict=True)]
    return [max(errors[0], errors.pop()), *errors[1:]], 4 * [0.0]


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


# The memory ------------------------------------------------------------------------------------------------------


def tokens_of(bench: Bench, tokens: int, batch: int = 1, sub_keys: int = 64, width: int = 64) -> list[Any]:
    """Query, value, gate, a cotangent of what is read, and the tables of a memory: float32."""
    size = (8, 16) if bench.dry else (sub_keys, width)
    given = gpu_memory.inputs(bench, batch * tokens, *size)
    split = [given[name].clone().unflatten(1, (batch, tokens))[0] for name in ("query", "value", "gate")]
    return [*split, torch.ones_like(split[1]), {name: given[name] for name in ("keys", "values")}]


def remember(given: list[Any], chunk: int, **more: Any) -> tuple[Tensor, Any]:
    """What chunks of tokens read, mixed with their values, and the written memory."""
    how: dict[str, Any] = {"chunk_size": chunk, "top_k": 4, "mix": True, **more}
    out, state = regard.fast_weight_memory(*given[:3], **given[4], **how, **({} if more else {"impl": "triton"}))
    return out, state


def both_of_memory(given: list[Any], chunk: int) -> list[Tensor]:
    """What is read, and the gradients of query, value and gate."""
    leaves = [x.detach().requires_grad_() for x in given[:3]]
    out = remember([*leaves, *given[3:]], chunk)[0]
    return [out.detach(), *torch.autograd.grad(out, leaves, given[3])]


def size_of(bench: Bench) -> tuple[int, int]:
    """Tokens and tokens of a chunk."""
    return (8, 4) if bench.dry else (512, 128)


def memory_repeated(_: str, bench: Bench) -> tuple[list[float], list[float]]:
    """Ten calls of forward and backward."""
    tokens, chunk = size_of(bench)
    given = tokens_of(bench, tokens)
    first = both_of_memory(given, chunk)
    times = range(1 if bench.dry or bench.compiling else 10)
    found = [[apart([x], [y]) for x, y in zip(both_of_memory(given, chunk), first, strict=True)] for _ in times]
    return [max(errors) for errors in zip(*found, strict=True)], 4 * [0.0]


def memory_one_token(_: str, bench: Bench) -> tuple[list[float], list[float]]:
    """A token reads the memory as it was given."""
    query, value, gate, _g, tables = given = tokens_of(bench, 1)
    found = remember(given, 8)[0]
    wide = {name: x.double() for name, x in tables.items()}
    read = gpu_memory.dense_read(query[0, :, 0].double(), wide["keys"][0], wide["values"], 4)[0]
    mixed = gate[..., None] * read + (1 - gate[..., None]) * value
    return [rms_ratio(found, mixed)], [gpu_memory.BARS["read"]]


def memory_far(_: str, bench: Bench) -> tuple[list[float], list[float]]:
    """The tables of six sequences hold more than 2^31 numbers: each as if it were alone."""
    tokens, chunk = size_of(bench)
    if bench.compiling:  # tables are too large for many processes
        return [0.0], [0.0]
    batch = 2 if bench.dry else 6
    given = tokens_of(bench, tokens, batch, 1024, 512)
    with torch.no_grad():
        whole = remember(given, chunk)[0]
        alone = [remember([*(x[i : i + 1] for x in given[:4]), given[4]], chunk)[0] for i in range(batch)]
    gpu_memory.inputs.cache_clear()
    return [max(rms_ratio(whole[i], x[0]) for i, x in enumerate(alone))], [1e-5]


def memory_own_stream(_: str, bench: Bench) -> tuple[list[float], list[float]]:
    """A call in a stream of one's own, behind the work that makes its inputs there."""
    if bench.dry or bench.compiling:  # `repeated` makes the same call
        return [0.0], [0.0]
    tokens, chunk = size_of(bench)
    given = tokens_of(bench, tokens)
    wanted = both_of_memory(given, chunk)
    found = in_own_stream(bench, lambda zero: both_of_memory([*(x + zero for x in given[:4]), given[4]], chunk))
    return [apart([x], [y]) for x, y in zip(found, wanted, strict=True)], 4 * [0.0]


def memory_graphed(_: str, bench: Bench) -> tuple[list[float], list[float]]:
    """A CUDA graph of forward and backward, replayed with other inputs than it was captured with."""
    if bench.dry or bench.compiling:  # `repeated` makes the same call
        return [0.0], [0.0]
    tokens, chunk = size_of(bench)
    given = tokens_of(bench, tokens)
    other = [*(x.flip(1) for x in given[:4]), given[4]]
    wanted = both_of_memory(other, chunk)
    replay = bench.graphed(lambda: both_of_memory(given, chunk))
    for x, y in zip(given[:4], other[:4], strict=True):
        x.copy_(y)
    return [apart([x], [y]) for x, y in zip(replay(), wanted, strict=True)], 4 * [0.0]


def memory_long(_: str, bench: Bench) -> tuple[list[float], list[float]]:
    """131,072 tokens in one call, against eight calls that go on with the memory."""
    tokens, chunk = (8, 4) if bench.dry else (4096 if bench.compiling else 131072, 512)
    given = tokens_of(bench, tokens)
    with torch.no_grad():
        whole, parts, state = remember(given, chunk)[0], [], None
        for part in zip(*(x.chunk(2 if bench.dry else 8, 1) for x in given[:4]), strict=True):
            out, state = remember([*part, given[4]], chunk, **({} if state is None else {"state": state}))
            parts.append(out)
    return [rms_ratio(torch.cat(parts, 1), whole)], [1e-5]


MEMORY = {
    repeated: memory_repeated, one_token: memory_one_token, far: memory_far, own_stream: memory_own_stream,
    graphed: memory_graphed, long: memory_long,
}  # fmt: skip
"""The same checks of a memory of fast weights."""
