"""Valid calls of the layers of `regard.nn`: constructors and forward passes."""

import inspect
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import regard
from regard import nn
from regard.models import GatedDeltaNet
from regard.nn.attention.norm import QK_NORMS
from regard.nn.functional_gradient import VARIANTS
from regard.nn.mosaic.contextual_memory import LEARNED

from .draw import Arguments, Call, Draw, alike, arguments, called, derived, public
from .kinds import (
    NEVER,
    POSITIVE,
    RATE,
    SIZE,
    STEPS,
    Anything,
    Flag,
    Floats,
    Integers,
    Kind,
    Mask,
    Real,
    SpecValue,
    Whole,
)
from .memory_calls import IMPLS, SCORES, SIGNED

HEAD = Whole(none=True, low=1, most=10**6)
HALVES = Whole(low=2, even=True, most=10**6)
SUB_KEYS = Whole(low=2, high=1000)
DIVIDES = Kind(fine=(1, 2), also=(3, 16))
LOCAL_RULES = Kind(also=("learnt", "learned(x=1)", "fixed(value=0)", "log(slope=nan)"))


@public("nn.Attention", nn.Attention)
def attention(draw: Draw) -> Arguments:
    heads, share, rule = draw.one(1, 2), draw.flag(), draw.one("fixed", "log")
    return arguments(
        hidden_size=(8, SIZE),
        num_heads=(heads, SIZE),
        num_kv_heads=(None, Kind(none=True, fine=(heads,) if share else tuple(range(1, heads + 1)))),
        head_dim=(4, HEAD),
        spec=(draw.one("softmax", "biweight"), SpecValue(also=("elu",) if rule == "log" else ())),
        window=(draw.one(None, 3), Whole(none=True, low=1)),
        temperature=(rule, LOCAL_RULES),
        share_query_key=share,
        qk_norm=draw.word(*QK_NORMS[1:], none=True),
        ridge=("fixed", Kind(also=("learned",))),
    )


@public("nn.ContextualMemory", nn.ContextualMemory)
def contextual(draw: Draw) -> Arguments:
    empty = lambda v: isinstance(v, (tuple, list)) and not v  # noqa: E731
    return arguments(
        hidden_size=(8, SIZE),
        num_heads=(draw.one(1, 2), SIZE),
        head_dim=(4, HEAD),
        spec=(draw.one("softmax", "biweight"), SpecValue()),
        look_ahead=draw.word("sum", "convex"),
        learned=(LEARNED, Kind(test=empty, also=("h", ["alhpa"], [3]))),
        start=draw.word("wide", "spec"),
        uniform_gradient=draw.word("straight-through", "hard"),
    )


@public("nn.PersistentMemory", nn.PersistentMemory)
def persistent(draw: Draw) -> Arguments:
    return arguments(
        num_heads=(draw.one(1, 2), SIZE),
        head_dim=(4, HEAD),
        spec=(draw.one("softmax", "biweight"), SpecValue(also=("linear",))),
        **alike(SIZE, hidden_size=8, slots=3, copies=1),
    )


@public("nn.FunctionalGradient", nn.FunctionalGradient)
def gradient(draw: Draw) -> Arguments:
    heads, variant = draw.one(1, 2), draw.word(*VARIANTS)
    return arguments(
        covariate_size=(8, SIZE if heads == 1 else Anything()),
        value_size=(6, SIZE if variant[0] == "full" or heads == 1 else Kind(fine=(2,))),
        num_heads=(heads, DIVIDES),
        spec=(draw.one("softmax", "linear"), SpecValue(also=("gaussian*fixed*linear(ridge=0.3,solver=learned)",))),
        variant=variant,
    )


@public("nn.FastWeightMLP", nn.FastWeightMLP)
def fast_mlp(draw: Draw) -> Arguments:
    norm = draw.flag()
    return arguments(
        value_dim=(3, Whole(low=2 if norm else 1, most=10**6)),
        chunk_size=(4, Whole(low=2)),
        learning_rate=(0.1, RATE),
        target=draw.word("mean", "look-ahead"),
        value_norm=norm,
        meta_grad=(draw.one(True, 2), STEPS),
        shared=draw.flag(),
        **alike(SIZE, hidden_size=6, in_dim=3, hidden_dim=4),
    )


@public("nn.FastWeightProductKeyMemory", nn.FastWeightProductKeyMemory)
def fwpkm(draw: Draw) -> Arguments:
    norm, shared, learn, ahead = draw.flag(), draw.flag(), draw.flag(), draw.flag()
    dtypes = ("float33", "int8", "Tensor", torch.int8, torch.float8_e4m3fn)
    return arguments(
        sub_keys=(4, SUB_KEYS),
        key_dim=(4, HALVES),
        value_dim=(3, Whole(low=2 if norm else 1, most=10**6)),
        top_k=(2, Whole(low=1, high=4)),
        chunk_size=(4, Whole(low=2 if ahead else 1, high=2**48)),
        step_rule=draw.word("normalized", "paper", "reference", "program"),
        key_update=draw.word("entropy", "mse", "none"),
        score=draw.word(*SCORES),
        spec=("softmax", SIGNED),
        look_ahead=ahead,
        border=draw.flag(),
        value_norm=norm,
        **draw.flags("gating", "gate_loss"),
        meta_grad=(draw.one(True, 2), STEPS),
        shared=shared,
        learn_initial=learn,
        storage=(None, Kind(none=True, also=dtypes)),
        norm_eps=(1e-5, POSITIVE),
        idw_eps=(1e-3, Real(low=0.0, high=1e30, strict=True)),
        impl=draw.word(*IMPLS, "triton"),
        sync=(None, Kind(none=True, also=("gather",))),
        resident=(False, Flag() if shared and not learn else NEVER),
        **alike(SIZE, hidden_size=6, heads=1),
        **alike(RATE, learning_rate=1.0, address_weight=10.0),
    )


@public("nn.ProductKeyMemory", nn.ProductKeyMemory)
def pkm(draw: Draw) -> Arguments:
    return arguments(
        sub_keys=(4, SUB_KEYS),
        key_dim=(4, HALVES),
        top_k=(2, Whole(low=1, high=4)),
        query_norm=draw.word("rms", "batch", "none"),
        score=draw.word(*SCORES),
        spec=("softmax", SIGNED),
        **alike(SIZE, hidden_size=6, value_dim=3, heads=2),
    )


@public("nn.LargeChunkTTT", nn.LargeChunkTTT)
def lact(draw: Draw) -> Arguments:
    return arguments(
        hidden_size=8,
        num_heads=(draw.one(1, 2), DIVIDES),
        fast_heads=(draw.one(1, 2), DIVIDES),
        inner=(1.0, Real(low=0.1, strict=True, most=1e6)),
        window=(4, Whole(low=1, high=2**48)),
        chunk_size=(4, Whole(low=1)),
        optimizer=draw.word("sgd", "momentum", "muon", "momentum-muon"),
        meta_grad=(draw.one(True, 2), STEPS),
    )


public("GatedDeltaNet", GatedDeltaNet)(lambda draw: alike(SIZE, hidden_size=8, num_heads=2, head_dim=4, conv_size=3))

STATE = Kind(none=True, also=(regard.LinearState.empty("elu", 1, 1, 2, 2),))
NOTHING = (None, Kind(none=True))
UNUSED = lambda *_: (None, Anything())  # noqa: E731


def _positions(draw: Draw, batch: int, tokens: int) -> tuple[Any, Kind]:
    """None or cosines and sines, and what else may come for them."""
    cos, sin = nn.rotary_angles(torch.arange(tokens)[None], 4, dtype=torch.float64)
    wrong = (
        (cos,), (cos, sin, sin), cos, (cos, None), (cos.long(), sin), (cos[..., :1], sin), (cos.expand(3, -1, -1), sin),
        (cos[0], sin[0]), (cos.repeat(1, 3, 1), sin.repeat(1, 3, 1)), (cos.repeat(1, 1, 9), sin.repeat(1, 1, 9)),
        (cos.to("meta"), sin), "ab", {"cos": cos},
    )  # fmt: skip
    return draw.one(None, (cos, sin)), Kind(none=True, also=wrong)


def _mask(draw: Draw, batch: int, tokens: int) -> tuple[Any, Kind]:
    return draw.one(None, draw.mask(batch, tokens)), Mask(none=True, fixed=(0, 1))


def _segments(draw: Draw, batch: int, tokens: int) -> tuple[Any, Kind]:
    return draw.one(None, draw.integers(2, batch, tokens).sort(1).values), Integers(none=True, fixed=(1,))


FORWARD = {
    "position_embeddings": _positions,
    **dict.fromkeys(("attention_mask", "mask"), _mask),
    "segment_ids": _segments,
    "state": lambda draw, *size: (None, STATE),
    **dict.fromkeys(("past_key_values", "pairs", "cache"), lambda draw, *size: NOTHING),
}
"""What arguments of these names may be in a forward pass, by the sizes of the batch."""


def forward(draw: Draw, layer: torch.nn.Module, size: int, *, dtype: bool = True, **own: Any) -> Call:
    """The forward pass of a layer; the arguments in `own` are as they stand or, as functions, drawn by their sizes."""
    sizes = draw.one(1, 2), draw.whole(1, 6)
    first, *rest = inspect.signature(layer.forward).parameters
    given = {name: (FORWARD | own)[name](draw, *sizes) for name in rest if name in FORWARD | own}
    given[first] = draw.normal(*sizes, size), Floats(fixed=(2,), dtype=dtype)
    return called(f"nn.{type(layer).__name__}", layer, **derived(draw, layer.forward, given))


@public("nn.Attention.forward")
def attention_forward(draw: Draw) -> Call:
    layer = nn.Attention(8, 2, spec=draw.one("softmax", "biweight", "local-linear"), qk_norm=draw.one(None, "rms"))

    def mask(draw: Draw, batch: int, tokens: int) -> tuple[Any, Kind]:
        pairs = draw.mask(batch, 1, tokens, tokens)
        return draw.one(None, draw.mask(batch, tokens), pairs), Mask(none=True, fixed=())

    return forward(draw, layer.double(), 8, attention_mask=mask)


@public("nn.LargeChunkTTT.forward")
def lact_forward(draw: Draw) -> Call:
    caches = Kind(none=True, also=(SimpleNamespace(layers=[]), SimpleNamespace(layers=[3])))
    layer = nn.LargeChunkTTT(8, 2, fast_heads=2, window=3, chunk_size=2, layer_idx=0).double()
    return forward(draw, layer, 8, past_key_values=lambda *_: (None, caches))


@public("memory layers.forward")
def memory_forward(draw: Draw) -> Call:
    small = {"sub_keys": 3, "key_dim": 4, "value_dim": 3, "top_k": 2}
    make = draw.one(
        lambda: nn.FastWeightMLP(6, in_dim=3, hidden_dim=4, value_dim=3, chunk_size=2),
        lambda: nn.FastWeightProductKeyMemory(6, **small, chunk_size=2),
        lambda: nn.ProductKeyMemory(6, **small),
    )
    layer = make().double()
    static = isinstance(layer, nn.ProductKeyMemory)
    own = dict.fromkeys(("state", "segment_ids"), UNUSED) if static else {}
    return forward(draw, layer, 6, dtype=static, **own)


@public("nn.ContextualMemory.forward")
def contextual_forward(draw: Draw) -> Call:
    layer = nn.ContextualMemory(8, 2, spec=draw.one("softmax", "biweight")).double()
    return forward(draw, layer, 8, segment_ids=UNUSED)  # which no state and no remember may accompany


@public("nn.PersistentMemory.forward")
def persistent_forward(draw: Draw) -> Call:
    return forward(draw, nn.PersistentMemory(8, 2, 3).double(), 8)


@public("nn.FunctionalGradient.forward")
def gradient_forward(draw: Draw) -> Call:
    call = forward(draw, nn.FunctionalGradient(8, 6, 2, variant=draw.one(*VARIANTS)).double(), 8)
    batch, rows, _ = call.given["covariates"].shape
    call.given["values"] = draw.normal(batch, rows - 1, 6)
    call.kinds |= dict.fromkeys(("covariates", "values"), Floats(fixed=(0, 2) if batch > 1 else (2,)))
    return call


@public("expected_embedding")
def expected_embedding(draw: Draw) -> Call:
    def truth(**w: Any) -> Tensor:
        return (w["f"] @ w["table"].T).softmax(-1) @ w["table"]

    def same(v: Any, given: Tensor) -> bool:  # of any rank
        alike = isinstance(v, Tensor) and (v.dtype, v.device) == (given.dtype, given.device)
        return alike and v.shape[-1:] == given.shape[-1:]

    call = called(
        "expected_embedding",
        nn.expected_embedding,
        f=(draw.normal(2, 3, 4), Floats(fixed=(2,), dtype=False, broadcast=True, skip=same)),
        table=(draw.normal(5, 4), Floats(fixed=(1,), dtype=False)),
        chunk=(draw.whole(1, 6), SIZE),
    )
    call.truth, call.gradients = truth, ("f", "table")
    return call


@public("rotary_angles", nn.rotary_angles)
def rotary_angles(draw: Draw) -> Arguments:
    fine = lambda v, given: isinstance(v, Tensor) and (v.is_meta or v.dtype == torch.int64)  # noqa: E731
    return arguments(
        position_ids=(draw.integers(9, 1, 3), Integers(fixed=(), skip=fine)),
        head_dim=(4, HALVES),
        theta=(1e4, Real(low=0.0, strict=True, most=1e30)),
        dtype=(torch.float64, Kind(also=("float32", torch.int64, torch.bool))),
    )


@public("rotate", nn.rotate)
def rotate(draw: Draw) -> Arguments:
    cos, sin = nn.rotary_angles(draw.integers(9, 1, 3), 4, dtype=torch.float64)
    x = (draw.normal(2, 2, 3, draw.one(4, 6)), Floats(fixed=(2,), dtype=False))
    angle = Floats(fixed=(1, 2), dtype=False)
    return arguments(x=x, cos=(cos, angle), sin=(sin, angle))


public("optimizer_groups", nn.optimizer_groups)(
    lambda draw: arguments(model=(nn.Attention(8, 2), Kind()), **alike(RATE, weight_decay=0.1, memory_rate=1e-3))
)
TEMPERATURES = ("", "log(", "log(slope=)", "log(slope=1,slope=2)", "log(slope=-1)", "log(slope=nan)", "lg")
public("as_temperature", nn.as_temperature)(
    lambda draw: arguments(given=("log(slope=0.5)", Kind(also=(*TEMPERATURES, "fixed(value=1e999)"))))
)
RIDGES = ("", "learned(", "lerned", "fixed(x=3)", "learned(start=-1)", "learned(start=1e999)")
public("as_ridge", nn.as_ridge)(lambda draw: arguments(given=("learned", Kind(also=RIDGES))))
