"""Memory Mosaics against their equations, written out once more: a dense decay matrix per head, and dense attention.

The weights of a model are taken by name; the formulas of specs are those of `contracts.oracle`. Equations:
sparse-attention paper, 5, 6, 9 and 10.

Legend: T tokens of one row, C model width, D channels of a head, S slots; k, v [T, D] of one head; p weights [n].
"""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from any_model import in_chunks, same_gradients, text
from any_model import make as any_make
from contracts import oracle
from torch import Tensor

from regard import Spec
from regard.models import MemoryMosaicConfig, MemoryMosaicForCausalLM

C, H, D = 12, 2, 6
Weights = dict[str, Tensor]
FIXED = "epanechnikov*fixed(h=1.2)*cosine"
RELEASED = f"epanechnikov*fixed(h={math.sqrt(2)!r})*cosine(eps=0.0)"
EUCLIDEAN = "epanechnikov*fixed(h=1.0)*euclidean"
FEATURE_MAPS = ("relu", "relu2")


def length(x: Tensor) -> Tensor:
    return (x * x).sum(-1, keepdim=True).sqrt()


def read(spec: str, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, beta2: Tensor | None, numbers: Any) -> Tensor:
    """What unit queries [T, D] read of unit keys [n, D]."""
    parsed = Spec.parse(spec)
    if beta2 is not None and spec in FEATURE_MAPS:  # which have no scale, so that keys have length beta
        q, k, beta2 = beta2.sqrt() * q, beta2.sqrt() * k, None
    return oracle.of_one_head(parsed, q, k, v, seen, scale=beta2, **numbers)


def norm(w: Weights, name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w.get(f"{name}.bias"), 1e-5)


def project(w: Weights, name: str, x: Tensor, h: int) -> Tensor:
    out = x @ w[f"{name}.weight"].T
    out = out + w[f"{name}.bias"] if f"{name}.bias" in w else out
    return out[:, h * D : (h + 1) * D]


def keys(w: Weights, name: str, x: Tensor, h: int, config: MemoryMosaicConfig) -> Tensor:
    """Unit leaky averages [T, D] by a dense T x T matrix."""
    rate, n = (10 * w[f"{name}.rate"][h]).abs(), len(x)
    age = torch.arange(n)[:, None] - torch.arange(n)
    decay = torch.where(age >= 0, torch.exp(-rate * age.clamp(min=0)), 0.0)
    bar = decay @ project(w, f"{name}.proj", x, h)
    bar = bar * (1 - torch.exp(-rate)) if config.leaky == "average" else bar
    return bar / (length(bar) + config.key_eps)


def contextual(w: Weights, name: str, x: Tensor, spec: str, config: MemoryMosaicConfig) -> Tensor:
    heads = []
    for h in range(H):
        k, vt = keys(w, f"{name}.keys", x, h, config), project(w, f"{name}.values.proj", x, h)
        c = w[f"{name}.values.mix"][h]
        sharp = w.get(f"{name}.sharpness.scale")
        beta2 = None if sharp is None else (20 * sharp[h]).clamp(max=config.scale_limit).exp()
        own = {n.removeprefix(f"{name}.numbers."): number[h] for n, number in w.items() if f"{name}.numbers." in n}
        numbers = {n.removeprefix("log_"): number if n == "bias" else number.exp() for n, number in own.items()}
        if "alpha" in numbers:
            numbers["alpha"] = 1 + numbers["alpha"]
        ahead = vt[:-1] + c * vt[1:] if config.look_ahead == "sum" else c * vt[:-1] + (1 - c) * vt[1:]
        v = ahead / length(ahead) * torch.exp(10 * w[f"{name}.values.scale"][h])
        v = torch.cat([v, 0 * vt[-1:]])  # nobody sees the last pair
        heads.append(read(spec, k, k, v, torch.ones(len(x), len(x)).tril(-1) > 0, beta2, numbers))
    return torch.cat(heads, 1) @ w[f"{name}.out_proj.weight"].T + w.get(f"{name}.out_proj.bias", 0)


def persistent(w: Weights, name: str, x: Tensor, context: str, config: MemoryMosaicConfig) -> Tensor:
    heads = []
    for h in range(H):
        k = keys(w, f"{name}.keys" if config.persistent_keys == "own" else context, x, h, config)
        beta2 = (20 * w[f"{name}.sharpness.scale"][h]).clamp(max=config.persistent_scale_limit).exp()
        copies = []
        for slot_keys, slot_values in zip(w[f"{name}.slot_keys"][:, h], w[f"{name}.slot_values"][:, h], strict=True):
            everything = torch.ones(len(k), len(slot_keys)) > 0
            copies.append(read(str(config.persistent), k, slot_keys, slot_values, everything, beta2, {}))
        heads.append(sum(copies) / len(copies) * torch.exp(10 * w[f"{name}.scale"][h]))
    return torch.cat(heads, 1) @ w[f"{name}.out_proj.weight"].T + w.get(f"{name}.out_proj.bias", 0)


def logits(w: Weights, ids: Tensor, config: MemoryMosaicConfig) -> Tensor:
    """[T, V] of tokens [T]."""
    x = w["model.embed_tokens.weight"][ids]
    for layer in range(config.num_hidden_layers):
        at, spec = f"model.layers.{layer}", config.mixers[layer]
        by_context = contextual(w, f"{at}.contextual", norm(w, f"{at}.contextual_norm", x), spec, config)
        read = x if config.wiring == "parallel" else x + by_context
        own = "persistent" if f"{at}.persistent_norm.weight" in w else "contextual"
        read = norm(w, f"{at}.{own}_norm", read)
        x = x + by_context + persistent(w, f"{at}.persistent", read, f"{at}.contextual.keys", config)
    out = norm(w, "model.norm", x) @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T
    return out / math.sqrt(C) if config.scale_logits else out


def make(mixers="softmax", **fields: object) -> MemoryMosaicForCausalLM:
    sizes = {"hidden_size": C, "num_hidden_layers": 2, "persistent_slots": 7}
    return any_make("memory-mosaic", mixers, **{**sizes, **fields})


def rows_of(model: MemoryMosaicForCausalLM, tokens: Tensor) -> Tensor:
    return torch.stack([logits(dict(model.named_parameters()), ids, model.config) for ids in tokens])


SPECS = (
    "softmax", "biweight", "sparsemax", "triweight", "relumax", "normrelu", FIXED, EUCLIDEAN, RELEASED,
    "uniform*nearest(k=3)", "gaussian*nearest(k=3)", "topk-softmax", "linear", "relu", "relu2", "local-linear",
    "local-linear[biweight]", "local-linear[relumax]",
)  # fmt: skip
OPTIONS: list[dict[str, object]] = [
    {},
    {"wiring": "parallel"},
    {"wiring": "parallel", "persistent_keys": "shared"},
    {"leaky": "average", "key_eps": 1e-2},
    {"look_ahead": "convex"},
    {"persistent": "biweight", "persistent_copies": 3},
    {"persistent_copies": 2},
    {"persistent": "gaussian*nearest(k=3)"},
    {"persistent": "relu"},
    {"bias": True},
    {"learned": []},
    {"scale_logits": False, "initializer": "gpt2", "tie_word_embeddings": False},
    {"scale_limit": 1.5, "persistent_scale_limit": 0.5},
]


@torch.no_grad()
@pytest.mark.parametrize("spec", SPECS)
def test_every_kernel_by_loops(spec):
    """`RELEASED` is relu(s) over its sum, with h = sqrt(2) for ever."""
    model = make(mixers=spec, **({"learned": [], "bandwidth_start": "spec"} if spec == RELEASED else {}))
    for rows in (1, 2, 3, 11):
        tokens = text(2, rows, seed=rows)
        oracle.close(model(tokens, use_cache=False).logits, rows_of(model, tokens), 1e-9, f"{spec}, T={rows}")


@torch.no_grad()
@pytest.mark.parametrize("spec", ["softmax", "relumax"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_by_loops(options, spec):
    model, tokens = make(mixers=spec, **options), text(2, 9)
    oracle.close(model(tokens, use_cache=False).logits, rows_of(model, tokens), 1e-9)


@pytest.mark.parametrize(
    ("mixers", "options"),
    [
        ("softmax", {}),
        (["biweight", "relumax"], {}),
        (["normrelu", FIXED], {}),
        ("biweight", {"learned": ["alpha"]}),
        ("linear", {"look_ahead": "convex", "leaky": "average", "key_eps": 0.1}),
        ("local-linear[biweight]", {}),
        ("triweight", {"wiring": "parallel", "persistent_keys": "shared", "persistent": "biweight", "bias": True}),
    ],
)
def test_every_gradient_by_loops(mixers, options):
    model, tokens = make(mixers=mixers, **options), text(2, 8, seed=1)
    same_gradients(model, tokens, rows_of(model, tokens))


@torch.no_grad()
def test_pairs_of_a_long_text_stay_exact():
    """A rate close to 0 keeps the first token in every key; a large one forgets at once."""
    model, tokens = make(mixers="biweight", num_hidden_layers=1), text(1, 120)
    model.model.layers[0].contextual.keys.rate.copy_(torch.tensor([1e-5, 2.5]))
    model.model.layers[0].persistent.keys.rate.copy_(torch.tensor([-3e-3, 0.0]))
    whole, pieces = model(tokens, use_cache=False).logits, in_chunks(model, tokens, [50, 1, 1, 40, 1, 27])[0]
    oracle.close([whole, pieces], [rows_of(model, tokens)] * 2, 1e-9)
