"""Valid calls of the layers of `regard.nn`: constructors and forward passes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import regard
from regard import nn
from regard.nn.contextual_memory import LEARNED
from regard.nn.functional_gradient import VARIANTS
from regard.nn.norm import QK_NORMS

from .draw import Call, Draw
from .kinds import Among, Anything, Flag, Floats, Integers, Kind, Mask, Other, Real, Sentence, Whole, Word
from .memory_calls import SIGNED, _NeverTrue, _Small

SIZE = _Small(low=1)
EPS = Real(low=0.0, strict=True)
LAYER = Whole(none=True, low=0)
LOCAL_RULES = Other(also=("learnt", "learned(x=1)", "fixed(value=0)", "log(slope=nan)"))


def _made(name: str, make: Callable[..., Any], given: dict[str, Any], kinds: dict[str, Kind]) -> Call:
    """The call of a constructor, whose result is not looked into."""

    def run(**arguments: Any) -> None:
        make(**arguments)

    return Call(name, run, given, kinds)


def attention(draw: Draw) -> Call:
    heads = draw.one(1, 2)
    given = {
        "hidden_size": 8,
        "num_heads": heads,
        "num_kv_heads": None,
        "head_dim": 4,
        "spec": draw.one("softmax", "biweight"),
        "layer_idx": draw.one(None, 0),
        "window": draw.one(None, 3),
        "bias": draw.flag(),
        "temperature": draw.one("fixed", "log"),
        "share_query_key": draw.flag(),
        "exclude_self": draw.flag(),
        "qk_norm": draw.one(None, *QK_NORMS),
        "ridge": "fixed",
        "norm_eps": 1e-6,
        "output_gate": draw.flag(),
    }
    kinds: dict[str, Kind] = {
        "hidden_size": SIZE,
        "num_heads": SIZE,
        "num_kv_heads": Whole(none=True, low=heads, high=heads),
        "head_dim": _Small(low=1, none=True),
        "spec": Sentence(also=("elu",) if given["temperature"] == "log" else ()),
        "layer_idx": LAYER,
        "window": Whole(none=True, low=1),
        "bias": Flag(),
        "temperature": LOCAL_RULES,
        "share_query_key": Flag(),
        "exclude_self": Flag(),
        "qk_norm": Word(words=QK_NORMS, none=True),
        "ridge": Other(also=("learned",)),
        "norm_eps": EPS,
        "output_gate": Flag(),
    }
    if given["share_query_key"] or heads > 1:
        kinds["num_kv_heads"] = Anything() if not given["share_query_key"] else kinds["num_kv_heads"]
    return _made("nn.Attention", nn.Attention, given, kinds)


def contextual(draw: Draw) -> Call:
    given = {
        "hidden_size": 8,
        "num_heads": draw.one(1, 2),
        "head_dim": 4,
        "spec": draw.one("softmax", "biweight"),
        "layer_idx": None,
        "bias": draw.flag(),
        "average": draw.flag(),
        "key_eps": 0.0,
        "scale_limit": 10.0,
        "look_ahead": draw.one("sum", "convex"),
        "learned": LEARNED,
        "start": draw.one("wide", "spec"),
        "uniform_gradient": draw.one("straight-through", "hard"),
    }
    kinds: dict[str, Kind] = {
        "hidden_size": SIZE,
        "num_heads": SIZE,
        "head_dim": _Small(low=1, none=True),
        "spec": Sentence(),
        "layer_idx": LAYER,
        "bias": Flag(),
        "average": Flag(),
        "key_eps": Real(low=0.0),
        "scale_limit": Real(),
        "look_ahead": Word(words=("sum", "convex")),
        "learned": Other(test=lambda v: isinstance(v, (tuple, list)) and not v, also=("h", ["alhpa"], [3])),
        "start": Word(words=("wide", "spec")),
        "uniform_gradient": Word(words=("straight-through", "hard")),
    }
    return _made("nn.ContextualMemory", nn.ContextualMemory, given, kinds)


def persistent(draw: Draw) -> Call:
    given = {
        "hidden_size": 8,
        "num_heads": draw.one(1, 2),
        "slots": 3,
        "head_dim": 4,
        "spec": draw.one("softmax", "biweight"),
        "copies": 1,
        "own_keys": draw.flag(),
        "bias": draw.flag(),
        "average": draw.flag(),
        "key_eps": 0.0,
        "scale_limit": 10.0,
    }
    kinds: dict[str, Kind] = {
        "hidden_size": SIZE,
        "num_heads": SIZE,
        "slots": SIZE,
        "head_dim": _Small(low=1, none=True),
        "spec": Sentence(also=("linear",)),
        "copies": SIZE,
        "own_keys": Flag(),
        "bias": Flag(),
        "average": Flag(),
        "key_eps": Real(low=0.0),
        "scale_limit": Real(),
    }
    return _made("nn.PersistentMemory", nn.PersistentMemory, given, kinds)


def gradient(draw: Draw) -> Call:
    given = {
        "covariate_size": 8,
        "value_size": 6,
        "num_heads": draw.one(1, 2),
        "spec": draw.one("softmax", "linear"),
        "variant": draw.one(*VARIANTS),
        "average": draw.flag(),
        "layer_idx": None,
    }
    few = Whole(low=1, high=2)
    kinds: dict[str, Kind] = {
        "covariate_size": Other(),
        "value_size": SIZE if given["variant"] == "full" or given["num_heads"] == 1 else Among(these=(2,)),
        "num_heads": few,
        "spec": Sentence(also=("gaussian*fixed*linear(ridge=0.3,solver=learned)",)),
        "variant": Word(words=tuple(VARIANTS)),
        "average": Flag(),
        "layer_idx": LAYER,
    }
    kinds["covariate_size"] = Anything() if given["num_heads"] > 1 else SIZE
    kinds["num_heads"] = Among(these=(1, 2), also=(3, 16))
    return _made("nn.FunctionalGradient", nn.FunctionalGradient, given, kinds)


def fast_mlp(draw: Draw) -> Call:
    given = {
        "hidden_size": 6,
        "in_dim": 3,
        "hidden_dim": 4,
        "value_dim": 3,
        "chunk_size": 4,
        "learning_rate": 0.1,
        "target": draw.one("mean", "look-ahead"),
        "value_norm": draw.flag(),
        "gating": draw.flag(),
        "meta_grad": draw.one(True, 2),
        "shared": draw.flag(),
        "learn_initial": draw.flag(),
        "norm_eps": 1e-5,
    }
    kinds: dict[str, Kind] = {
        "hidden_size": SIZE,
        "in_dim": SIZE,
        "hidden_dim": SIZE,
        "value_dim": _Small(low=2 if given["value_norm"] else 1),
        "chunk_size": Whole(low=2),
        "learning_rate": Real(low=0.0),
        "target": Word(words=("mean", "look-ahead")),
        "value_norm": Flag(),
        "gating": Flag(),
        "meta_grad": Other(test=lambda v: (isinstance(v, int) and v >= 1) or v is False),
        "shared": Flag(),
        "learn_initial": Flag(),
        "norm_eps": EPS,
    }
    return _made("nn.FastWeightMLP", nn.FastWeightMLP, given, kinds)


def fwpkm(draw: Draw) -> Call:
    given = {
        "hidden_size": 6,
        "sub_keys": 4,
        "key_dim": 4,
        "value_dim": 3,
        "heads": 1,
        "top_k": 2,
        "chunk_size": 4,
        "step_rule": draw.one("normalized", "paper"),
        "learning_rate": 1.0,
        "address_weight": 10.0,
        "key_update": "entropy",
        "score": draw.one("idw", "dot"),
        "spec": "softmax",
        "look_ahead": True,
        "border": draw.flag(),
        "value_norm": draw.flag(),
        "gating": draw.flag(),
        "gate_loss": draw.flag(),
        "meta_grad": draw.one(True, 2),
        "shared": draw.flag(),
        "learn_initial": draw.flag(),
        "storage": None,
        "norm_eps": 1e-5,
        "idw_eps": 1e-3,
        "impl": draw.one("auto", "reference"),
        "sync": None,
        "resident": False,
    }
    rates = Real(low=0.0)
    kinds: dict[str, Kind] = {
        "hidden_size": SIZE,
        "sub_keys": _Small(low=2, high=1000),
        "key_dim": _Small(low=2, even=True),
        "value_dim": _Small(low=2 if given["value_norm"] else 1),
        "heads": SIZE,
        "top_k": Whole(low=1, high=4),
        "chunk_size": Whole(low=2, high=2**48),
        "step_rule": Word(words=("normalized", "paper", "reference", "program")),
        "learning_rate": rates,
        "address_weight": rates,
        "key_update": Word(words=("entropy", "mse", "none")),
        "score": Word(words=("idw", "dot", "inverse-distance")),
        "spec": SIGNED,
        "look_ahead": Flag(),
        "border": Flag(),
        "value_norm": Flag(),
        "gating": Flag(),
        "gate_loss": Flag(),
        "shared": Flag(),
        "learn_initial": Flag(),
        "meta_grad": Other(test=lambda v: (isinstance(v, int) and v >= 1) or v is False),
        "storage": Other(none=True, also=("float33", "int8", "Tensor", torch.int8, torch.float8_e4m3fn)),
        "norm_eps": EPS,
        "idw_eps": Real(low=0.0, high=1e30, strict=True),
        "impl": Word(words=("auto", "reference", "dense", "sparse", "triton")),
        "sync": Other(none=True, also=("gather",)),
        "resident": Flag() if given["shared"] and not given["learn_initial"] else _NeverTrue(),
    }
    return _made("nn.FastWeightProductKeyMemory", nn.FastWeightProductKeyMemory, given, kinds)


def pkm(draw: Draw) -> Call:
    given = {
        "hidden_size": 6,
        "sub_keys": 4,
        "key_dim": 4,
        "value_dim": 3,
        "heads": 2,
        "top_k": 2,
        "query_norm": draw.one("rms", "batch", "none"),
        "swilu": draw.flag(),
        "score": draw.one("idw", "dot"),
        "spec": "softmax",
        "bias": draw.flag(),
        "sparse_grad": draw.flag(),
        "eps": 1e-5,
    }
    kinds: dict[str, Kind] = {
        "hidden_size": SIZE,
        "sub_keys": _Small(low=2, high=1000),
        "key_dim": _Small(low=2, even=True),
        "value_dim": SIZE,
        "heads": SIZE,
        "top_k": Whole(low=1, high=4),
        "query_norm": Word(words=("rms", "batch", "none")),
        "swilu": Flag(),
        "score": Word(words=("idw", "dot", "inverse-distance")),
        "spec": SIGNED,
        "bias": Flag(),
        "sparse_grad": Flag(),
        "eps": EPS,
    }
    return _made("nn.ProductKeyMemory", nn.ProductKeyMemory, given, kinds)


def lact(draw: Draw) -> Call:
    given = {
        "hidden_size": 8,
        "num_heads": draw.one(1, 2),
        "fast_heads": draw.one(1, 2),
        "inner": 1.0,
        "window": 4,
        "chunk_size": 4,
        "optimizer": draw.one("sgd", "momentum"),
        "layer_idx": draw.one(None, 0),
        "bias": draw.flag(),
        "qk_norm": draw.flag(),
        "fast_rotary": draw.flag(),
        "meta_grad": draw.one(True, 2),
        "norm_eps": 1e-6,
    }
    divides = Among(these=(1, 2), also=(3, 16))
    kinds: dict[str, Kind] = {
        "num_heads": divides,
        "fast_heads": divides,
        "inner": _Width(low=0.1, strict=True),
        "window": Whole(low=1, high=2**48),
        "chunk_size": Whole(low=1),
        "optimizer": Word(words=("sgd", "momentum", "muon", "momentum-muon")),
        "layer_idx": LAYER,
        "bias": Flag(),
        "qk_norm": Flag(),
        "fast_rotary": Flag(),
        "norm_eps": EPS,
        "meta_grad": Other(test=lambda v: (isinstance(v, int) and v >= 1) or v is False),
    }
    return _made("nn.LargeChunkTTT", nn.LargeChunkTTT, given, kinds)


class _Width(Real):
    def values(self, given: Any) -> list[Any]:
        return [v for v in super().values(given) if not (isinstance(v, (int, float)) and v > 1e6 and v < float("inf"))]


def gated_delta(draw: Draw) -> Call:
    from regard.models import GatedDeltaNet

    given = {
        "hidden_size": 8,
        "num_heads": 2,
        "head_dim": 4,
        "conv_size": 3,
        "norm_eps": 1e-6,
        "layer_idx": draw.one(None, 0),
    }
    kinds: dict[str, Kind] = {
        "hidden_size": SIZE,
        "num_heads": SIZE,
        "head_dim": SIZE,
        "conv_size": SIZE,
        "norm_eps": EPS,
        "layer_idx": LAYER,
    }
    return _made("GatedDeltaNet", GatedDeltaNet, given, kinds)


# Forward passes ----------------------------------------------------------------------------------------------------


def _tokens(draw: Draw, size: int) -> tuple[Tensor, int, int]:
    batch, tokens = draw.one(1, 2), draw.whole(1, 6)
    return draw.normal(batch, tokens, size), batch, tokens


def _stranger() -> Any:
    return regard.LinearState.empty("elu", 1, 1, 2, 2)


def attention_forward(draw: Draw) -> Call:
    layer = nn.Attention(
        8, 2, spec=draw.one("softmax", "biweight", "local-linear"), qk_norm=draw.one(None, "rms")
    ).double()
    hidden, batch, tokens = _tokens(draw, 8)
    angles = nn.rotary_angles(torch.arange(tokens)[None], 4, dtype=torch.float64)
    given = {
        "hidden_states": hidden,
        "position_embeddings": draw.one(None, angles),
        "past_key_values": None,
        "attention_mask": draw.one(None, draw.mask(batch, tokens), draw.mask(batch, 1, tokens, tokens)),
        "output_attentions": draw.flag(),
    }
    return Call("nn.Attention", layer, given, _forward_kinds(angles, batch, tokens, cache=Other(none=True)))


def _forward_kinds(angles: Any, batch: int, tokens: int, cache: Kind) -> dict[str, Kind]:
    cos, sin = angles
    positions = (
        (cos,),
        (cos, sin, sin),
        cos,
        (cos, None),
        (cos.long(), sin),
        (cos[..., :1], sin),
        (cos.expand(3, -1, -1), sin),
        (cos[0], sin[0]),
        (cos.repeat(1, 3, 1), sin.repeat(1, 3, 1)),
        (cos.repeat(1, 1, 9), sin.repeat(1, 1, 9)),
        (cos.to("meta"), sin),
        "ab",
        {"cos": cos},
    )
    return {
        "hidden_states": Floats(fixed=(2,), dtype=True),
        "position_embeddings": Other(none=True, also=positions),
        "attention_mask": Mask(none=True, fixed=()),
        "past_key_values": cache,
        "output_attentions": Flag(),
    }


def lact_forward(draw: Draw) -> Call:
    layer = nn.LargeChunkTTT(8, 2, fast_heads=2, window=3, chunk_size=2, layer_idx=0).double()
    hidden, batch, tokens = _tokens(draw, 8)
    angles = nn.rotary_angles(torch.arange(tokens)[None], 4, dtype=torch.float64)
    given = {
        "hidden_states": hidden,
        "position_embeddings": draw.one(None, angles),
        "past_key_values": None,
        "attention_mask": draw.one(None, draw.mask(batch, tokens)),
        "output_attentions": draw.flag(),
        "segment_ids": draw.one(None, draw.integers(2, batch, tokens).sort(1).values),
    }
    kinds = _forward_kinds(
        angles, batch, tokens, Other(none=True, also=(SimpleNamespace(layers=[]), SimpleNamespace(layers=[3])))
    )
    kinds["segment_ids"] = Integers(none=True, fixed=(1,))
    return Call("nn.LargeChunkTTT", layer, given, kinds)


def memory_forward(draw: Draw) -> Call:
    make, name = draw.one(
        (lambda: nn.FastWeightMLP(6, in_dim=3, hidden_dim=4, value_dim=3, chunk_size=2), "nn.FastWeightMLP"),
        (
            lambda: nn.FastWeightProductKeyMemory(6, sub_keys=3, key_dim=4, value_dim=3, top_k=2, chunk_size=2),
            "nn.FastWeightProductKeyMemory",
        ),
        (lambda: nn.ProductKeyMemory(6, sub_keys=3, key_dim=4, value_dim=3, top_k=2), "nn.ProductKeyMemory"),
    )
    layer = make().double()
    hidden, batch, tokens = _tokens(draw, 6)
    given = {"hidden": hidden, "mask": draw.one(None, draw.mask(batch, tokens)), "state": None, "segment_ids": None}
    kinds: dict[str, Kind] = {
        "hidden": Floats(fixed=(2,), dtype=name == "nn.ProductKeyMemory"),
        "mask": Mask(none=True, fixed=(0, 1)),
        "state": Other(none=True, also=(_stranger(),)),
    }
    if name == "nn.ProductKeyMemory":
        kinds["state"] = Anything()
    else:
        given["segment_ids"] = draw.one(None, draw.integers(2, batch, tokens).sort(1).values)
        kinds["segment_ids"] = Integers(none=True, fixed=(1,))
    return Call(name, layer, given, kinds)


def contextual_forward(draw: Draw) -> Call:
    layer = nn.ContextualMemory(8, 2, spec=draw.one("softmax", "biweight")).double()
    hidden, batch, tokens = _tokens(draw, 8)
    given = {
        "hidden_states": hidden,
        "attention_mask": draw.one(None, draw.mask(batch, tokens)),
        "state": None,
        "remember": draw.flag(),
        "output_attentions": draw.flag(),
    }
    kinds: dict[str, Kind] = {
        "hidden_states": Floats(fixed=(2,)),
        "attention_mask": Mask(none=True, fixed=(0, 1)),
        "state": Other(none=True, also=(_stranger(),)),
        "remember": Flag(),
        "output_attentions": Flag(),
    }
    return Call("nn.ContextualMemory", layer, given, kinds)


def persistent_forward(draw: Draw) -> Call:
    layer = nn.PersistentMemory(8, 2, 3).double()
    hidden, batch, tokens = _tokens(draw, 8)
    given = {"hidden_states": hidden, "attention_mask": draw.one(None, draw.mask(batch, tokens)), "state": None}
    kinds: dict[str, Kind] = {
        "hidden_states": Floats(fixed=(2,)),
        "attention_mask": Mask(none=True, fixed=(0, 1)),
        "state": Other(none=True, also=(_stranger(),)),
    }
    return Call("nn.PersistentMemory", layer, given, kinds)


def gradient_forward(draw: Draw) -> Call:
    layer = nn.FunctionalGradient(8, 6, 2, variant=draw.one(*VARIANTS)).double()
    covariates, batch, rows = _tokens(draw, 8)
    angles = nn.rotary_angles(torch.arange(rows)[None], 4, dtype=torch.float64)
    given = {
        "covariates": covariates,
        "values": draw.normal(batch, rows - 1, 6),
        "position_embeddings": draw.one(None, angles),
        "pairs": None,
        "cache": None,
        "output_attentions": draw.flag(),
        "is_causal": draw.flag(),
    }
    kinds = {
        "covariates": Floats(fixed=(0, 2) if batch > 1 else (2,)),
        "values": Floats(fixed=(0, 2) if batch > 1 else (2,)),
        "position_embeddings": _forward_kinds(angles, batch, rows, Other())["position_embeddings"],
        "pairs": Other(none=True),
        "cache": Other(none=True),
        "output_attentions": Flag(),
        "is_causal": Flag(),
    }
    return Call("nn.FunctionalGradient", layer, given, kinds)


# Functions ---------------------------------------------------------------------------------------------------------


def expected_embedding(draw: Draw) -> Call:
    given = {"f": draw.normal(2, 3, 4), "table": draw.normal(5, 4), "chunk": draw.whole(1, 6)}

    def truth(**w: Any) -> Tensor:
        return (w["f"] @ w["table"].T).softmax(-1) @ w["table"]

    kinds: dict[str, Kind] = {
        "f": _Rank(fixed=(2,), dtype=False, broadcast=True),
        "table": Floats(fixed=(1,), dtype=False),
        "chunk": SIZE,
    }
    return Call("expected_embedding", nn.expected_embedding, given, kinds, truth, 1e-9, ("f", "table"))


class _Rank(Floats):
    """A tensor of any rank."""

    def values(self, given: Any) -> list[Any]:
        return [
            v
            for v in super().values(given)
            if not (
                isinstance(v, Tensor)
                and v.dtype == given.dtype
                and v.shape[-1:] == given.shape[-1:]
                and v.device == given.device
            )
        ]


def rotary_angles(draw: Draw) -> Call:
    given = {"position_ids": draw.integers(9, 1, 3), "head_dim": 4, "theta": 1e4, "dtype": torch.float64}
    kinds: dict[str, Kind] = {
        "position_ids": Anything(),
        "head_dim": _Small(low=2, even=True),
        "theta": _Theta(low=0.0, strict=True),
        "dtype": Other(also=("float32", torch.int64, torch.bool)),
    }
    kinds["position_ids"] = _Ids(fixed=(), kind="integer")
    return Call("rotary_angles", nn.rotary_angles, given, kinds)


class _Theta(Real):
    def values(self, given: Any) -> list[Any]:
        return [v for v in super().values(given) if not (isinstance(v, float) and v > 1e30)]


class _Ids(Floats):
    def values(self, given: Any) -> list[Any]:
        fine = lambda v: isinstance(v, Tensor) and (v.is_meta or v.dtype == torch.int64)  # noqa: E731
        return [v for v in super().values(given) if not fine(v)]


def rotate(draw: Draw) -> Call:
    cos, sin = nn.rotary_angles(draw.integers(9, 1, 3), 4, dtype=torch.float64)
    given = {"x": draw.normal(2, 2, 3, draw.one(4, 6)), "cos": cos, "sin": sin}
    angle = Floats(fixed=(1, 2), dtype=False)
    return Call("rotate", nn.rotate, given, {"x": Floats(fixed=(2,), dtype=False), "cos": angle, "sin": angle})


def optimizer_groups(draw: Draw) -> Call:
    given = {"model": nn.Attention(8, 2), "weight_decay": 0.1, "memory_rate": 1e-3, "memory_keys": draw.flag()}
    kinds: dict[str, Kind] = {
        "model": Other(),
        "weight_decay": Real(low=0.0),
        "memory_rate": Real(low=0.0),
        "memory_keys": Flag(),
    }
    return Call("optimizer_groups", nn.optimizer_groups, given, kinds)


def temperature(draw: Draw) -> Call:
    broken = (
        "",
        "log(",
        "log(slope=)",
        "log(slope=1,slope=2)",
        "log(slope=-1)",
        "log(slope=nan)",
        "lg",
        "fixed(value=1e999)",
    )
    return Call("as_temperature", nn.as_temperature, {"given": "log(slope=0.5)"}, {"given": Other(also=broken)})


def ridge(draw: Draw) -> Call:
    broken = ("", "learned(", "lerned", "fixed(x=3)", "learned(start=-1)", "learned(start=1e999)")
    return Call("as_ridge", nn.as_ridge, {"given": "learned"}, {"given": Other(also=broken)})
