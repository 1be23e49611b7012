"""Part 6 of `cpu.py`: reading and writing a memory of fast weights, beside the dense form of the same mathematics and
the package fast-weight-product-key-memory; and what three such memories add to a training step of a hybrid model.

Chunks are measured on one thread. The package is a contestant where it is installed:
`pip install fast-weight-product-key-memory==0.2.2`.
"""

import importlib.metadata
import importlib.util
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from cpu_measure import Function, child_peaks, digits, interleaved, runner, say, summary
from torch import Tensor

from regard.memory.fast_weights import WriteRule, fast_weight_memory, flush
from regard.models import HybridConfig, count_parameters
from regard.models.base.catalogue import model_of
from regard.nn import optimizer_groups

OURS, DENSE, PACKAGE = "regard", "dense autograd", "fast-weight-product-key-memory"
MODULE = "fast_weight_product_key_memory"
EPS, ADDRESS = 1e-3, 10.0
RULE = WriteRule("reference", address_weight=ADDRESS, border=False)
"""What the released program does, so that the dense form gives the same numbers."""
BARS = {"ms": 40.0, "dense": 50.0, "step": 1.35}
"""Reading and writing a chunk at most, how many times as fast as the dense form at least, and a step at most."""


def installed() -> str:
    """The version of the package, or nothing."""
    return importlib.metadata.version(PACKAGE) if importlib.util.find_spec(MODULE) else ""


# Contestants -------------------------------------------------------------------------------------------------


@cache
def tables(sub_keys: int, width: int) -> tuple[Tensor, Tensor]:
    """Keys [1, 2, n, width / 2] and values [n^2, width] with which a memory begins."""
    generator = torch.Generator().manual_seed(0)
    keys = (2 * torch.rand(1, 2, sub_keys, width // 2, generator=generator) - 1) * width**-0.5
    return keys, torch.randn(sub_keys**2, width, generator=generator) * width**-0.5


def ours(query: Tensor, value: Tensor, gate: Tensor, config: dict[str, Any]) -> Tensor:
    """What all chunks read; every one is written, the last by flushing."""
    keys, values = tables(config["sub_keys"], config["width"])
    how: dict[str, Any] = {"rule": RULE, "chunk_size": config["chunk"], "top_k": config["top_k"]}
    out, state = fast_weight_memory(query[:, :, None], value, gate, keys, values, impl="sparse", **how)
    flush(state, **how)
    return out


def dense(query: Tensor, value: Tensor, gate: Tensor, config: dict[str, Any]) -> Tensor:
    """The released program's way in plain PyTorch: the gradient of a chunk's error by the whole table, rescaled row by
    row, and that of the marginal entropy by the keys."""
    grow = torch.is_grad_enabled()
    keys, values = (x.detach().requires_grad_() for x in tables(config["sub_keys"], config["width"]))
    out = []
    for q, v, g in zip(*(x[0].split(config["chunk"]) for x in (query, value, gate)), strict=True):
        with torch.enable_grad():
            read, slots, shares = dense_read(q, keys[0], values, config["top_k"])
            error = (g[:-1] * (read[:-1] - v[1:]).square().mean(-1)).mean() / 2
            use = shares.mean(1)  # [2, n]
            by_values = torch.autograd.grad(error, values, create_graph=grow, retain_graph=True)[0]
            by_keys = torch.autograd.grad((use * torch.log(use + 1e-8)).sum(), keys, create_graph=grow)[0]
            number = torch.bincount(slots.flatten(), minlength=len(values)).clamp(min=1)
            step = by_values * (len(q) * v.shape[1] * config["top_k"]) / number[:, None]
            values, keys = values - step, keys - ADDRESS * by_keys
        if not grow:
            values, keys = values.detach().requires_grad_(), keys.detach().requires_grad_()
        out.append(read)
    return torch.cat(out)[None]


def dense_read(query: Tensor, keys: Tensor, values: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """(read [T, Dv], slots [T, k], shares of the sub-keys [2, T, n]) of queries [T, Dk]."""
    half = torch.stack(query.chunk(2, -1))
    square = (half.square().sum(-1)[..., None] + keys.square().sum(-1)[:, None] - 2 * half @ keys.mT).clamp(min=0)
    scores = -torch.log(EPS + square)
    best, at = scores.topk(k, -1)
    shares = torch.full_like(scores, -torch.inf).scatter(-1, at, best).softmax(-1)
    pairs = (best[0][:, :, None] + best[1][:, None]).flatten(1)
    found, place = pairs.topk(k, -1)
    slots = at[0].gather(1, place // k) * keys.shape[1] + at[1].gather(1, place % k)
    return (found.softmax(-1)[:, None] @ F.embedding(slots, values))[:, 0], slots, shares


@cache
def package_layer(sub_keys: int, width: int, chunk: int, top_k: int) -> Any:
    sizes = {"dim_queries_keys": width // 2, "dim_values": width, "num_memories": sub_keys**2}
    layer = importlib.import_module(MODULE).fwPKM(width, heads=1, chunk_size=chunk, topk=top_k, **sizes)
    return layer.requires_grad_(False)


def package(query: Tensor, value: Tensor, gate: Tensor, config: dict[str, Any]) -> Tensor:
    """The package's layer, its projections included; a token more, since it writes a chunk when the next one begins."""
    layer = package_layer(*(config[name] for name in ("sub_keys", "width", "chunk", "top_k")))
    tokens = query + gate[..., None] * value
    return layer(torch.cat((tokens, tokens[:, :1]), 1))[:, :-1]


def functions(config: dict[str, Any]) -> dict[str, Function]:
    """By name; chunk after chunk is read and written."""
    found: dict[str, Function] = {DENSE: partial(dense, config=config), OURS: partial(ours, config=config)}
    if installed():
        found[PACKAGE] = partial(package, config=config)
    return found


def inputs(config: dict[str, Any]) -> tuple[list[Tensor], Tensor]:
    """Normal queries and values [1, chunks * chunk, width], gates [1, .], and a cotangent."""
    generator = torch.Generator().manual_seed(0)
    tokens = config["chunk"] * (min(2, config["chunks"]) if config.get("warm") else config["chunks"])
    query, value, g = (torch.randn(1, tokens, config["width"], generator=generator) for _ in range(3))
    return [query, value, torch.rand(1, tokens, generator=generator)], g


# Measures ----------------------------------------------------------------------------------------------------


def configs(quick: bool) -> list[tuple[dict[str, Any], str]]:
    """One chunk forward; two, of which the second reads what the first wrote, forward and backward."""
    size = {"sub_keys": 16, "chunk": 32, "width": 16} if quick else {"sub_keys": 512, "chunk": 512, "width": 512}
    return [({**size, "top_k": 8, "chunks": chunks}, which) for chunks, which in ((1, "forward"), (2, "both"))]


def run(quick: bool, threads: int) -> dict[str, Any]:
    """times of chunks, memory, and steps of a hybrid model."""
    most, budget = (2, 1.0) if quick else (9, 12.0)
    torch.set_num_threads(1)
    times = []
    for config, which in configs(quick):
        say(f"  fast weights: {config['chunks']} chunks, {which}")
        given, g = inputs(config)
        calls = {name: runner(f, given, g, which) for name, f in functions(config).items()}
        samples = interleaved(calls, most=most, budget=budget)
        times.append({"config": config, "pass": which, "contestants": summary(samples, DENSE)})
    tables.cache_clear()
    package_layer.cache_clear()
    torch.set_num_threads(threads)
    return {
        "baseline": DENSE,
        "bars": BARS,
        "chunk_threads": 1,
        "package": installed() or "not installed",
        "times": times,
        "memory": memory(quick),
        "steps": steps(quick),
    }


def memory(quick: bool) -> list[dict[str, Any]]:
    """Peaks in MiB: every contestant at two chunks, ours at eight, beside the rows that were written."""
    two = configs(quick)[1][0]
    asked = [(name, two) for name in functions(two)] + [(OURS, {**two, "chunks": 8})]
    found = []
    for name, config in asked:
        say(f"  fast weights: memory of {name}, {config['chunks']} chunks")
        entry = {"name": name, "config": config, "mib": child_peaks("fast_weights", name, config, 1)}
        found.append({**entry, "written_mib": digits(written(config) / 2**20)} if name == OURS else entry)
    return found


def written(config: dict[str, Any]) -> int:
    """Bytes of the rows that all chunks write."""
    keys, values = tables(config["sub_keys"], config["width"])
    (query, value, gate), _ = inputs(config)
    rows: list[Tensor] = []

    class Watch:
        def on_read(self, *_: Any) -> None: ...

        def on_write(self, slots: Tensor, shares: Tensor, *_: Any) -> None:
            rows.append(slots[shares != 0].unique())

    how: dict[str, Any] = {"rule": RULE, "chunk_size": config["chunk"], "top_k": config["top_k"], "observer": Watch()}
    with torch.no_grad():
        _, state = fast_weight_memory(query[:, :, None], value, gate, keys, values, **how)
        flush(state, **how)
    return sum(map(len, rows)) * config["width"] * 4


def steps(quick: bool) -> list[dict[str, Any]]:
    """A training step of the paper's GDN model, without memories and with three."""
    size: dict[str, Any] = {}
    if quick:
        size = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
        size |= {"vocab_size": 64, "mixer_options": {"gated-deltanet": {"num_heads": 2, "head_dim": 8}}}
    options = {"sub_keys": 8, "key_dim": 8, "value_dim": 8, "chunk_size": 16} if quick else {}
    tokens = 32 if quick else 1024
    calls: dict[str, Callable[[], None]] = {}
    parameters: dict[str, int] = {}
    for places in (None, "FwPKM@1,2,3" if quick else "FwPKM@2,6,10"):
        name = f"GDN + {places}" if places else "GDN"
        own = {"memory_options": {"fwpkm": options}} if options and places else {}
        config = HybridConfig.layout("GDN", places, **size, **own)
        calls[name], parameters[name] = stepper(config, tokens), count_parameters(config)
    say(f"  fast weights: step of {' and '.join(calls)}, {tokens} tokens")
    samples = interleaved(calls, most=2 if quick else 5, budget=1.0 if quick else 40.0)
    entry = {"config": {"tokens": tokens, "batch": 1}, "baseline": "GDN", "parameters": parameters}
    return [{**entry, "contestants": summary(samples, "GDN")}]


def stepper(config: HybridConfig, tokens: int) -> Callable[[], None]:
    """A training step: forward, backward, clipping, AdamW."""
    torch.manual_seed(0)
    model = model_of(config)(config).train()
    optimizer = torch.optim.AdamW(optimizer_groups(model).dense, lr=1e-4)
    text = torch.randint(config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(input_ids=text, labels=text, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step
