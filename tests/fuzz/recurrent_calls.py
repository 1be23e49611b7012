"""Valid calls of the linear attentions, against the same recurrences one token at a time in float64."""

from typing import Any

import torch
from recurrent.recurrences import recurrence
from torch import Tensor

import regard

from .attention_calls import parameters
from .draw import Arguments, Call, Draw, arguments, called, public
from .kinds import ONLY_NONE, Floats, Kind, Mask, Real, SpecValue, Whole, Word

FORMS = ("chunked", "parallel", "recurrent")


def _tensors(draw: Draw) -> Arguments:
    batch, kv_heads, group = draw.whole(1, 2), draw.whole(1, 2), draw.one(1, 1, 2)
    tokens, dim = draw.whole(1, 8), draw.whole(1, 4)
    dtype = draw.one(torch.float64, torch.float64, torch.float32)
    pairs, rows = (batch, kv_heads, tokens), (batch, kv_heads * group, tokens)
    return arguments(
        query=(draw.normal(*rows, dim, dtype=dtype), Floats(fixed=(3,))),
        key=(draw.normal(*pairs, dim, dtype=dtype, scale=0.5), Floats(fixed=(2, 3))),
        value=(draw.normal(*pairs, draw.whole(1, 3), dtype=dtype), Floats(fixed=(2,))),
        log_decay=(
            draw.one(None, -0.2, -draw.uniform(0.0, 1.0, *pairs, dtype=dtype)),
            # [H, T] is refused, though it broadcasts
            Real(high=0.0, none=True, rows=(pairs,), skip=lambda value, _: getattr(value, "shape", ()) == pairs[1:]),
        ),
        state=(None, Kind(none=True, also=(regard.FastWeightState,))),
        form=draw.word(*FORMS),
        chunk_size=(draw.one(None, 2, 3), Whole(low=1, none=True)),
        attn_mask=(draw.often(draw.mask(batch, tokens)), Mask(none=True, fixed=(), broadcast=True)),  # also [T]
        is_causal=draw.one(True, True, False),
        exclude_self=draw.often(True, False),
        scale=(draw.often(0.7), Real(low=0.0, strict=True, none=True, rows=(rows,))),
    )


def _by_definition(rule: str, given: dict[str, Any], wide: dict[str, Any]) -> Tensor:
    """The outputs [B, H, T, Dv] of a recurrence, one token after the other; scale as it is but for linear attention."""
    names = {"q": "query", "k": "key", "v": "value", "g": "log_decay", "beta": "beta", "ridge": "ridge"}
    x = {name: wide[of] for name, of in names.items() if wide.get(of) is not None}
    scale = wide["scale"]
    if rule not in ("delta", "mesa") and scale is not None:
        x["scale"], scale = torch.full(x["q"].shape[:3], scale), None
    x = {name: torch.as_tensor(value, dtype=torch.float64) for name, value in x.items()}
    order = "strict" if given["exclude_self"] else "causal" if given["is_causal"] else "all"
    return recurrence(rule)(x, order, given["attn_mask"])[0] * (1.0 if scale is None else scale)


def _call(name: str, rule: str, **found: Any) -> Call:
    """The call of a linear attention, whose expected result is that of a recurrence."""
    call = called(name, getattr(regard, name), **found)
    call.truth = lambda **wide: _by_definition(rule, call.given, wide)
    call.tolerance = 1e-7 if call.given["query"].dtype == torch.float64 else 2e-3
    call.gradients = ("query", "key", "value")
    return call


@public("linear_attention")
def linear(draw: Draw) -> Call:
    found = _tensors(draw)
    spec = draw.one("elu", "linear", "relu", "relu2", "cosine")
    if not regard.Spec.parse(spec).takes_scale:
        found["scale"] = (None, ONLY_NONE)
    return _call("linear_attention", spec, **found, spec=(spec, SpecValue(also=("softmax", "biweight"))))


TRENDS = ("mesaa", "mesa(ridge=-1)", "mesa(rige=1)", "mesa(ridge=", lambda *x, **how: 3, lambda *x, **how: x[0][:, :1])


@public("interpolated_attention", regard.interpolated_attention)
def interpolated(draw: Draw) -> Arguments:
    sizes = {"query": (2, 4, 5, 3), "key": (2, 2, 5, 3), "value": (2, 2, 5, 3)}
    q, k, v = (draw.normal(*size, dtype=torch.float32) for size in sizes.values())
    return arguments(
        query=(q, Floats(fixed=(0, 3))),
        key=(k, Floats(fixed=(0, 2, 3))),
        value=(v, Floats(fixed=(0, 2))),
        attn_mask=(torch.ones(2, 1, 1, 5) > 0, Mask(none=True, fixed=(-1,), broadcast=True)),
        query_offset=(None, Whole(none=True, also=(torch.zeros(2), torch.tensor(2)))),
        enable_gqa=(True, Kind(test=lambda value: value is True)),
        scale=(None, Real(low=0.0, strict=True, none=True, rows=((2, 4, 5),))),
        spec=("softmax", SpecValue(also=("linear", "elu*linear", "local-linear"))),
        params=(None, parameters()),
        trend=("mesa", Kind(also=TRENDS, skip=lambda v, given: v in (object, len))),  # whose own errors pass
    )


def _steps(draw: Draw, key: Tensor, *others: float | None) -> tuple[Any, Kind]:
    """beta: one of `others`, or a number for every key."""
    pairs = tuple(key.shape[:3])
    beta = draw.one(*others, draw.uniform(0.1, 0.9, *pairs, dtype=key.dtype))
    return beta, Real(low=0.0, none=None in others, rows=(pairs,))


@public("delta_rule")
def delta(draw: Draw) -> Call:
    found = _tensors(draw)
    return _call("delta_rule", "delta", **found, beta=_steps(draw, found["key"][0], 0.5))


@public("mesa_attention")
def mesa(draw: Draw) -> Call:
    found = _tensors(draw)
    rows = tuple(found["query"][0].shape)
    return _call(
        "mesa_attention",
        "mesa",
        **found,
        ridge=(draw.one(0.5, 1.5), Real(low=0.0, strict=True, rows=(rows, rows[1:2], rows[1::2]))),
        beta=_steps(draw, found["key"][0], None),
        solver=(draw.one("auto", "cholesky"), Word(words=("auto", "cholesky", "cg"))),
        return_diagnostics=draw.often(True, False),
    )
