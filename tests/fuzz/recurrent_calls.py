"""Valid calls of the linear attentions, against the same recurrences one token at a time in float64."""

from typing import Any

import torch
from recurrent.recurrences import recurrence
from torch import Tensor

import regard

from .attention_calls import Params
from .draw import Arguments, Call, Draw, arguments, public
from .kinds import Flag, Floats, Kind, Mask, Other, Real, Refused, SpecValue, Whole, Word

FORMS = ("chunked", "parallel", "recurrent")


def _tensors(draw: Draw) -> tuple[dict[str, Any], dict[str, Kind]]:
    batch, kv_heads, group = draw.whole(1, 2), draw.whole(1, 2), draw.one(1, 1, 2)
    tokens, dim = draw.whole(1, 8), draw.whole(1, 4)
    dtype = draw.one(torch.float64, torch.float64, torch.float32)
    pairs = (batch, kv_heads, tokens)
    given: dict[str, Any] = {
        "query": draw.normal(batch, kv_heads * group, tokens, dim, dtype=dtype),
        "key": draw.normal(*pairs, dim, dtype=dtype, scale=0.5),
        "value": draw.normal(*pairs, draw.whole(1, 3), dtype=dtype),
        "log_decay": draw.one(None, -0.2, -draw.uniform(0.0, 1.0, *pairs, dtype=dtype)),
        "state": None,
        "form": draw.one(*FORMS),
        "chunk_size": draw.one(None, 2, 3),
        "attn_mask": draw.often(draw.mask(batch, tokens)),
        "is_causal": draw.one(True, True, False),
        "exclude_self": draw.often(True, False),
        "scale": draw.often(0.7),
    }
    rows = (tuple(given["query"].shape[:3]),)
    kinds: dict[str, Kind] = {
        "query": Floats(fixed=(3,)),
        "key": Floats(fixed=(2, 3)),
        "value": Floats(fixed=(2,)),
        "log_decay": Real(high=0.0, none=True, rows=(pairs,)),
        "state": Other(none=True, also=(regard.FastWeightState,)),
        "form": Word(words=FORMS),
        "chunk_size": Whole(low=1, none=True),
        "attn_mask": Mask(none=True, fixed=(), broadcast=True),  # also [T], for all sequences
        "is_causal": Flag(),
        "exclude_self": Flag(),
        "scale": Real(low=0.0, strict=True, none=True, rows=rows),
    }
    return given, kinds


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


def _finish(call: Call) -> Call:
    call.tolerance = 1e-7 if call.given["query"].dtype == torch.float64 else 2e-3
    call.gradients = ("query", "key", "value")
    return call


@public("linear_attention")
def linear(draw: Draw) -> Call:
    given, kinds = _tensors(draw)
    spec = draw.one("elu", "linear", "relu", "relu2", "cosine")
    given |= {"spec": spec, "params": None}
    kinds |= {"spec": SpecValue(also=("softmax", "biweight"))}
    if not regard.Spec.parse(spec).takes_scale:
        given["scale"], kinds["scale"] = None, Refused(none=True)

    def truth(**wide: Any) -> Tensor:
        return _by_definition(spec, given, wide)

    return _finish(Call("linear_attention", regard.linear_attention, given, kinds, truth))


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
        enable_gqa=(True, Other(test=lambda value: value is True)),
        scale=(None, Real(low=0.0, strict=True, none=True, rows=((2, 4, 5),))),
        spec=("softmax", SpecValue(also=("linear", "elu*linear", "local-linear"))),
        params=(None, Params(none=True)),
        trend=("mesa", Other(also=TRENDS, skip=lambda v, given: v in (object, len))),  # whose own errors pass
    )


@public("delta_rule")
def delta(draw: Draw) -> Call:
    given, kinds = _tensors(draw)
    pairs, dtype = tuple(given["key"].shape[:3]), given["key"].dtype
    given |= {"beta": draw.one(0.5, draw.uniform(0.1, 0.9, *pairs, dtype=dtype))}
    kinds |= {"beta": Real(low=0.0, rows=(pairs,))}

    def truth(**wide: Any) -> Tensor:
        return _by_definition("delta", given, wide)

    return _finish(Call("delta_rule", regard.delta_rule, given, kinds, truth))


@public("mesa_attention")
def mesa(draw: Draw) -> Call:
    given, kinds = _tensors(draw)
    pairs, dtype = tuple(given["key"].shape[:3]), given["key"].dtype
    given |= {
        "ridge": draw.one(0.5, 1.5),
        "beta": draw.one(None, draw.uniform(0.1, 0.9, *pairs, dtype=dtype)),
        "solver": draw.one("auto", "cholesky"),
        "return_diagnostics": draw.often(True, False),
    }
    kinds |= {
        "ridge": Real(low=0.0, strict=True, rows=(tuple(given["query"].shape),)),
        "beta": Real(low=0.0, none=True, rows=(pairs,)),
        "solver": Word(words=("auto", "cholesky", "cg")),
        "return_diagnostics": Flag(),
    }

    def truth(**wide: Any) -> Tensor:
        return _by_definition("mesa", given, wide)

    return _finish(Call("mesa_attention", regard.mesa_attention, given, kinds, truth))
