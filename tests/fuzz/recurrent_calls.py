"""Valid calls of the linear attentions, against the same recurrences one token at a time in float64."""

from typing import Any

import torch
from contracts import oracle
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


def _walk(wide: dict[str, Any], given: dict[str, Any], step: Any, read: Any, start: Any) -> Tensor:
    """The outputs [B, H, T, Dv] of a recurrence: `step` puts a pair into a state, `read` asks it."""
    query, key, value = wide["query"], wide["key"], wide["value"]
    (batch, heads, tokens, _), kv_heads = query.shape, key.shape[1]
    mask = torch.ones(batch, tokens, dtype=torch.bool) if given["attn_mask"] is None else given["attn_mask"]
    decay = 0.0 if wide["log_decay"] is None else wide["log_decay"]
    decay = decay if isinstance(decay, Tensor) else torch.full(key.shape[:3], decay, dtype=torch.float64)
    rows = []
    for b in range(batch):
        for h in range(heads):
            of = h // (heads // kv_heads)
            state, seen, out = start, [], []
            for t in range(tokens):
                before = state
                if mask[b, t]:
                    state = step(state, b, of, t, key[b, of, t], value[b, of, t], decay[b, of, t].exp())
                seen.append(before if given["exclude_self"] else state)
            last = given["is_causal"] or given["exclude_self"]
            out = [read(seen[t] if last else state, b, h, t, query[b, h, t]) for t in range(tokens)]
            rows.append(torch.stack(out))
    return torch.stack(rows).view(batch, heads, tokens, -1)


def _factor(wide: dict[str, Any]) -> float:
    return 1.0 if wide["scale"] is None else wide["scale"]


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
    choices = oracle.read(regard.Spec.parse(spec))
    if not regard.Spec.parse(spec).takes_scale:
        given["scale"], kinds["scale"] = None, Refused(none=True)

    def truth(**wide: Any) -> Tensor:
        scale = wide["query"].shape[-1] ** -0.5 if spec == "linear" and wide["scale"] is None else _factor(wide)

        def step(state: Any, b: int, h: int, t: int, k: Tensor, v: Tensor, fade: Tensor) -> Any:
            return [(w * fade, own, value) for w, own, value in state] + [(1.0, k, v)]

        def read(state: Any, b: int, h: int, t: int, q: Tensor) -> Tensor:
            zero = torch.zeros(wide["value"].shape[-1], dtype=torch.float64) + 0 * q.sum()
            if not state:
                return zero
            z = oracle.SIMILARITIES[spec if spec in oracle.SIMILARITIES else "dot"](
                q[None], torch.stack([k for _, k, _ in state]), choices.cosine_eps
            )[0]
            w = (z * scale + choices.bias) * torch.stack([torch.as_tensor(w) for w, _, _ in state])
            total = w.sum() if choices.normalise else torch.ones(())
            values = torch.stack([v for _, _, v in state])
            return zero if total == 0 else w @ values / total

        return _walk(wide, given, step, read, [])

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
        beta = wide["beta"]
        beta = beta if isinstance(beta, Tensor) else torch.full(pairs, beta, dtype=torch.float64)

        def step(w: Tensor, b: int, h: int, t: int, k: Tensor, v: Tensor, fade: Tensor) -> Tensor:
            w = w * fade
            return w + beta[b, h, t] * torch.outer(v - w @ k, k)

        start = torch.zeros(wide["value"].shape[-1], wide["key"].shape[-1], dtype=torch.float64)
        return _walk(wide, given, step, lambda w, b, h, t, q: w @ q * _factor(wide), start)

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
        dim, ridge, beta = wide["key"].shape[-1], wide["ridge"], wide["beta"]

        def step(state: Any, b: int, h: int, t: int, k: Tensor, v: Tensor, fade: Tensor) -> Any:
            n = 1.0 if beta is None else beta[b, h, t]
            return fade * state[0] + n * torch.outer(v, k), fade * state[1] + n * torch.outer(k, k)

        def read(state: Any, b: int, h: int, t: int, q: Tensor) -> Tensor:
            return (
                state[0] @ torch.linalg.solve(state[1] + ridge * torch.eye(dim, dtype=torch.float64), q) * _factor(wide)
            )

        start = (
            torch.zeros(wide["value"].shape[-1], dim, dtype=torch.float64),
            torch.zeros(dim, dim, dtype=torch.float64),
        )
        return _walk(wide, given, step, read, start)

    return _finish(Call("mesa_attention", regard.mesa_attention, given, kinds, truth))
