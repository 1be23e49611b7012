"""Part `memory` of `gpu.py`: a memory of fast weights, read and written chunk by chunk (FwPKM)."""

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from cpu_measure import digits
from gpu_measure import Bench, Row, ceilings, rms_ratio
from torch import Tensor

import regard

TOKENS, CHUNK, SUB_KEYS, WIDTH, TOP_K = 4096, 512, 512, 512, 8
EPS = 1e-3
RULE = regard.WriteRule("reference", address_weight=10.0, border=False)
"""Of the correctness row: the released program's, which whole tables show best."""
BARS = {"read": 1e-4}


@lru_cache(maxsize=2)
def inputs(bench: Bench, tokens: int, sub_keys: int, width: int) -> dict[str, Tensor]:
    """Queries [1, tokens, 1, width], values [1, tokens, width], gates, and the tables a memory begins with; float32."""
    make = bench.generator(3)
    normal = partial(torch.randn, device=bench.device, generator=make)
    uniform = torch.rand(1, 2, sub_keys, width // 2, device=bench.device, generator=make)
    return {
        "query": normal(1, tokens, 1, width),
        "value": normal(1, tokens, width),
        "gate": torch.rand(1, tokens, device=bench.device, generator=make),
        "keys": (2 * uniform - 1) * width**-0.5,
        "values": normal(sub_keys**2, width) * width**-0.5,
    }


def rows(bench: Bench) -> Iterator[Row]:
    yield Row("correctness, memory, float32", "correctness", 1, partial(correctness, bench), 15)
    for impl, priority in {"triton": 2, "sparse": 13, "reference": 14}.items():
        yield Row(f"memory, forward, impl={impl}", "memory", priority, partial(forward, impl, bench), 15)
        if impl != "reference":
            yield Row(f"memory, both, impl={impl}", "memory", priority + 4, partial(both, impl, bench), 20)


def correctness(bench: Bench) -> dict[str, Any]:
    """What three chunks read, the first of which read the table as it was, and its mix with the tokens' values, against
    the dense form in float64."""
    sizes = (24, 8, 16) if bench.dry else (384, 64, 64)
    given = inputs(bench, *sizes)
    chunk, k = sizes[0] // 3, 4
    how: dict[str, Any] = {"rule": RULE, "chunk_size": chunk, "top_k": k, "impl": "triton"}
    read, mixed = (regard.fast_weight_memory(**given, **how, mix=mix)[0] for mix in (False, True))
    if bench.compiling:
        return {}
    wide = {name: x.double() for name, x in given.items()}
    exact, own = dense(wide, chunk, k), (1 - wide["gate"][..., None]) * wide["value"]
    error = max(rms_ratio(read, exact), rms_ratio(mixed - own, wide["gate"][..., None] * exact))
    return {"errors": {"out": error}, "bars": {"out": BARS["read"]}, "right": error <= BARS["read"]}


def dense(given: dict[str, Tensor], chunk: int, top_k: int) -> Tensor:
    """The released program's way: the gradients of a chunk's error and of its marginal entropy, by whole tables."""
    keys, values = (given[name].clone().requires_grad_() for name in ("keys", "values"))
    out = []
    parts = (given[name][0].split(chunk) for name in ("query", "value", "gate"))
    for q, v, g in zip(*parts, strict=True):
        read, slots, shares = dense_read(q[:, 0], keys[0], values, top_k)
        error = (g[:-1] * (read[:-1] - v[1:]).square().mean(-1)).mean() / 2
        use = shares.mean(1)
        by_values = torch.autograd.grad(error, values, retain_graph=True)[0]
        by_keys = torch.autograd.grad((use * torch.log(use + 1e-8)).sum(), keys)[0]
        number = torch.bincount(slots.flatten(), minlength=len(values)).clamp(min=1)
        step = by_values * (len(q) * v.shape[1] * top_k) / number[:, None]
        values = (values - step).detach().requires_grad_()
        keys = (keys - RULE.address_weight * by_keys).detach().requires_grad_()
        out.append(read.detach())
    return torch.cat(out)[None]


def dense_read(query: Tensor, keys: Tensor, values: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """(read [T, Dv], slots [T, k], shares of the sub-keys [2, T, n]) of queries [T, Dk], every sub-key scored."""
    half = torch.stack(query.chunk(2, -1))
    scores = -torch.log(EPS + (half[:, :, None] - keys[:, None]).square().sum(-1))
    best, at = scores.topk(k, -1)
    shares = torch.full_like(scores, -torch.inf).scatter(-1, at, best).softmax(-1)
    found, place = (best[0][:, :, None] + best[1][:, None]).flatten(1).topk(k, -1)
    slots = at[0].gather(1, place // k) * keys.shape[1] + at[1].gather(1, place % k)
    return (found.softmax(-1)[:, None] @ values[slots])[:, 0], slots, shares


def sizes_of(bench: Bench) -> tuple[int, int, int, int]:
    """Tokens, tokens of a chunk, sub-keys and width."""
    return (32, 8, 8, 16) if bench.dry else (TOKENS, CHUNK, SUB_KEYS, WIDTH)


def moved(tokens: int, top_k: int, width: int) -> int:
    """Bytes of the rows of a float32 table: read once, and read and written again, each row at most once a token."""
    return 3 * tokens * top_k * width * 4


def forward(impl: str, bench: Bench) -> dict[str, Any]:
    """Reading 4096 tokens, mixed with their values, and writing them, eight chunks in turn, along a stream: every call
    goes on where the last one ended. The device's own time as a CUDA graph, where one can be captured (whose replays go
    on with the values, but search among the sub-keys of the capture first), and that of a call from Python."""
    tokens, chunk, sub_keys, width = sizes_of(bench)
    given = inputs(bench, tokens, sub_keys, width)
    how: dict[str, Any] = {"chunk_size": chunk, "top_k": min(TOP_K, sub_keys), "eps": EPS, "mix": True}
    found: dict[str, Any] = {"config": {"tokens": tokens, "chunk": chunk, "sub_keys": sub_keys, "width": width}}
    with torch.no_grad():
        _, state = regard.fast_weight_memory(**given, impl=impl, **how)

        def step() -> Tensor:
            nonlocal state
            out, state = regard.fast_weight_memory(**given, state=state, **how)
            return out

        found |= {"impl": impl, "eager_ms": digits(bench.milliseconds(step)), "mib": bench.peak(step)}
        try:
            ms = bench.milliseconds(bench.graphed(step))
            found |= {"ms": digits(ms)}
        except RuntimeError as error:  # something in it waits for the device
            found |= {"ms": None, "graph": f"{type(error).__name__}: {str(error)[:300]}"}
    found["bytes"] = moved(tokens, how["top_k"], width)
    if found["ms"]:
        found["gbps"] = digits(found["bytes"] / found["ms"] / 1e6)
        found["of_ceiling"] = digits(found["gbps"] / ceilings(bench)["gbps"], 3)
    return found


def both(impl: str, bench: Bench) -> dict[str, Any]:
    """The same forward and backward, through the writes, from a fresh memory, as in training: a call from Python, and
    the device's own time as a CUDA graph."""
    tokens, chunk, sub_keys, width = sizes_of(bench)
    given = inputs(bench, tokens, sub_keys, width)
    how: dict[str, Any] = {"chunk_size": chunk, "top_k": min(TOP_K, sub_keys), "eps": EPS, "mix": True, "impl": impl}
    names = ("query", "value", "gate")

    def step() -> tuple[Tensor, ...]:
        leaves = {name: given[name].detach().requires_grad_() for name in names}
        out, _ = regard.fast_weight_memory(**{**given, **leaves}, **how)
        return torch.autograd.grad(out.square().sum(), list(leaves.values()))

    config = {"tokens": tokens, "chunk": chunk, "sub_keys": sub_keys, "width": width}
    found = {"config": config, "impl": impl, "ms": digits(bench.milliseconds(step)), "mib": bench.peak(step)}
    try:
        found["graph_ms"] = digits(bench.milliseconds(bench.graphed(step)))
    except RuntimeError as error:  # something in it waits for the device
        found["graph"] = f"{type(error).__name__}: {str(error)[:300]}"
    return found
