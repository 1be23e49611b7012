"""Every call with a state of fixed size, with its definition written out in float64.

Legend: B = 2 rows, H = 4 query heads, Hkv = 2 key heads, T positions, D = 4 channels of a key, Dv = 3 of a value.
Inputs are dictionaries: q [B, H, T, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv], g (log decay), beta, ridge, scale, bias.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from contracts import oracle
from contracts.oracle import close as close
from torch import Tensor
from torch.nn.functional import normalize

import regard
from regard.recurrent.leaky import leaky_average

Inputs = dict[str, Tensor]
FORMS = ("chunked", "parallel", "recurrent")
WAYS: tuple[dict[str, Any], ...] = (
    {"form": "parallel"}, {"form": "recurrent"}, *({"chunk_size": size} for size in (1, 4, 5, None)),
)  # fmt: skip
SOLVERS = (*WAYS, {"chunk_size": 4, "solver": "cholesky"}, {"chunk_size": 4, "solver": "cg"})
ORDERS: dict[str, dict[str, bool]] = {"causal": {}, "strict": {"exclude_self": True}, "all": {"is_causal": False}}


class Case(NamedTuple):
    """One call."""

    sizes: Callable[[int], dict[str, tuple[int, ...] | None]]  # of its inputs for T positions; None: it has no q or k
    run: Callable[..., Any]  # (inputs, **how) -> (output, state)
    define: Callable[..., tuple[Tensor, Inputs]]  # (inputs, order, mask) -> (output, the tensors of the state)
    ways: tuple[dict[str, Any], ...] = WAYS  # the forms, chunk sizes and solvers that it has
    orders: tuple[str, ...] = tuple(ORDERS)  # those that it has
    loose: float = 1.0  # by how much rounding is amplified
    once: bool = False  # whether the chunked form is differentiable only once

    def draw(self, length: int = 9, seed: int = 0, dtype: torch.dtype = torch.float64, grad: bool = True) -> Inputs:
        """Random inputs; keys of the delta rule are no longer than 1.2."""
        make = torch.Generator().manual_seed(seed)
        sizes = {"q": (2, 4, length, 4), "k": (2, 2, length, 4), "v": (2, 2, length, 3), **self.sizes(length)}
        found = {}
        for name, size in sizes.items():
            if size is None:
                continue
            x = (torch.randn if name in "qkv" else torch.rand)(size, generator=make, dtype=torch.float64)
            x = normalize(x, dim=-1) * 1.2 if name == "k" and self.define is DELTA else x
            x = {"g": -x, "ridge": x + 0.3, "scale": x + 0.5, "beta": x + 0.1, "bias": x + 0.3}.get(name, x)
            found[name] = x.to(dtype).requires_grad_(grad)
        return found

    @property
    def few(self) -> tuple[dict[str, Any], ...]:
        """Every form once, and conjugate gradients where there are any."""
        cg = [{"chunk_size": 4, "solver": "cg"}] if "solver" in self.ways[-1] else []
        return ({"chunk_size": 4}, *(way for way in self.ways if "form" in way), *cg)


def cut(x: Inputs, begin: int, end: int) -> Inputs:
    """The inputs of some positions."""
    return {name: t if t.dim() < 3 else t[:, :, begin:end] for name, t in x.items()}


def key_mask(length: int = 9) -> Tensor:
    mask = torch.rand(2, length, generator=torch.Generator().manual_seed(9)) < 0.7
    mask[0, :3] = False  # left padding
    return mask


def fields(state: Any, like: Inputs | None = None) -> list[Tensor]:
    """What a state holds that has derivatives, or the part of it that `like` names and has room for."""
    if like is None:
        return [t for t in state._tensors().values() if t.is_floating_point()]
    return [getattr(state, name)[:, :, : t.shape[2]] for name, t in like.items()]


def loss(out: Tensor, more: Any = ()) -> Tensor:
    """A number that depends on every entry in a way of its own."""
    weigh = lambda t: (t * torch.arange(1.0, t.numel() + 1, dtype=t.dtype).view(t.shape).cos()).sum()  # noqa: E731
    return weigh(out) + sum(0.1 * weigh(t) for t in more)


def grads(out: Tensor, more: Any, x: Inputs) -> list[Tensor]:
    return list(torch.autograd.grad(loss(out, more), list(x.values())))


def plain(x: Tensor) -> Tensor:
    return x


def unit(x: Tensor) -> Tensor:
    return x / (1e-3 + (x * x).sum(-1, keepdim=True)).sqrt()


def elu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, torch.exp(torch.where(x > 0, 0, x)))


def with_square(k: Tensor) -> Tensor:
    return torch.cat([k, torch.ones_like(k[..., :1]), -k.square().sum(-1, keepdim=True) / 2], -1)


# Spec: (features, or for half the squared distance None; whether scaled by D^-1/2, bias, whether divided by the sum).
SPECS: dict[str, tuple[Callable[[Tensor], Tensor] | None, bool, float, bool]] = {
    "linear": (plain, True, 0.0, False),
    "linear*fixed(bias=0.4)": (plain, True, 0.4, False),
    "linear*fixed*normalised": (plain, True, 0.0, True),
    "cosine": (unit, False, 0.0, False),
    "linear*fixed*cosine*normalised": (unit, False, 0.0, True),
    "shift-cosine": (unit, False, 1.0, True),
    "linear*fixed(bias=1)*cosine*unnormalised": (unit, False, 1.0, False),
    "relu": (torch.relu, False, 1e-4, True),
    "relu2": (lambda x: x.relu() ** 2, False, 1e-4, True),
    "elu": (elu, False, 0.0, True),
    "linear*fixed*elu*unnormalised": (elu, False, 0.0, False),
    "linear*fixed*euclidean": (None, True, 0.0, False),
    "linear*fixed*euclidean*normalised": (None, True, 0.0, True),
}
GUARDED = ("linear*fixed*normalised", "linear*fixed*cosine*normalised", "linear*fixed*euclidean*normalised")
GIVEN = ("linear", "shift-cosine", "relu2", "linear*fixed*normalised")
"""Specs that are also called with scale (where they take one) and bias as tensors."""


def attend(text: str, x: Inputs, seen: Tensor) -> Tensor:
    """All pairs, by the dense oracle."""
    bias = {"bias": x["bias"]} if "bias" in x else {}
    return oracle.attention(oracle.read(regard.Spec.parse(text)), *(x[n] for n in "qkv"), seen, x.get("scale"), bias)[0]


def weighed(text: str) -> Callable[..., tuple[Tensor, Inputs]]:
    """Equations 13 and 14 for the state: sum psi v^T and sum psi with psi = [features; 1]."""

    def define(x: Inputs, order: str = "causal", mask: Tensor | None = None) -> tuple[Tensor, Inputs]:
        length = x["k"].shape[2]
        mask = torch.ones(2, length, dtype=torch.bool) if mask is None else mask
        seen = torch.ones(length, length, dtype=torch.bool).tril({"causal": 0, "strict": -1, "all": length}[order])
        psi = (SPECS[text][0] or with_square)(x["k"])
        psi = torch.where(mask[:, None, :, None], torch.cat([psi, torch.ones_like(psi[..., :1])], -1), 0)
        state = {"values": psi.mT @ x["v"], "keys": psi.sum(2)}
        return attend(text, x, seen & mask[:, None, None]), state | (
            {"squares": psi.mT @ psi} if text in GUARDED else {}
        )

    return define


def linear(text: str, **more: int) -> Case:
    def run(x: Inputs, **how: Any) -> Any:
        params = {"bias": x["bias"]} if "bias" in x else None
        fade = {"log_decay": x["g"]} if "g" in x else {}
        return regard.linear_attention(x["q"], x["k"], x["v"], text, scale=x.get("scale"), params=params, **fade, **how)

    scaled = SPECS[text][1]
    sizes = lambda t: dict.fromkeys(("scale", "bias")[0 if scaled else 1 :], (2, 4, t)) if more else {}  # noqa: E731
    return Case(sizes, run, weighed(text), loose=100 if text in GUARDED else 1, once=True)


def spread(x: Inputs, name: str, like: Tensor, default: float) -> Tensor:
    """A number for every position and channel: the input `name`, whatever its shape, as `like` [B, heads, T, D]."""
    if name not in x:
        return torch.full_like(like, default)
    t = x[name]
    places = {0: (None,) * 4, 1: (None, slice(None), None, None), 2: (None, slice(None), None), 3: (..., None), 4: ...}
    return t[places[t.dim()]].expand_as(like)


def mapped(text: str, x: Inputs) -> tuple[Tensor, Tensor]:
    """Features of queries and keys, whose products are the weights of a spec."""
    features, scaled, bias, _ = SPECS[text]
    assert features is not None
    q, k = features(x["q"]), features(x["k"])
    q = q * (x["scale"][..., None] if "scale" in x else x["q"].shape[-1] ** -0.5 if scaled else 1.0)
    return tuple(torch.cat([y, torch.full_like(y[..., :1], bias**0.5)], -1) for y in (q, k)) if bias else (q, k)


def recurrence(rule: str) -> Callable[..., tuple[Tensor, Inputs]]:
    """The definition of "delta", "mesa", or the linear attention of a spec or without features ("sum"), one token after
    the other. Sizes are those of the inputs; query i stands at key i + `offset`; `start` holds "values" and "gram"."""
    divided = rule in SPECS and SPECS[rule][3]

    def define(
        x: Inputs, order: str = "causal", mask: Tensor | None = None, offset: int = 0, start: Inputs | None = None
    ) -> tuple[Tensor, Inputs]:
        q, k = mapped(rule, x) if rule in SPECS else (x["q"], x["k"])
        v, (batch, kv_heads, length, dim), ratio = x["v"], k.shape, q.shape[1] // k.shape[1]
        g, beta = spread(x, "g", k, 0.0), spread(x, "beta", k, 1.0)[..., :1]
        ridge = spread(x, "ridge", q, 0.0)
        sizes = {"values": v.shape[3], "keys": 1, "gram": dim}  # of W^T, the sum of the keys, and H
        state = tuple((start or {}).get(n, k.new_zeros(batch, kv_heads, dim, size)) for n, size in sizes.items())
        states = [state]
        for t in range(length):
            at, value, step = k[:, :, t, :, None], v[:, :, t, None], beta[:, :, t, None]
            w, keys, gram = (g[:, :, t, :, None].exp() * y for y in state)
            if rule == "delta":
                w = w - step * at @ (at.mT @ w)
            new = (w + step * at @ value, keys + step * at, gram + step * at @ at.mT)
            real = torch.ones(1, 1, 1, 1, dtype=torch.bool) if mask is None else mask[:, t, None, None, None]
            state = tuple(torch.where(real, y, old) for y, old in zip(new, state, strict=True))
            states.append(state)
        rows = [q.new_zeros(*q.shape[:2], 0, v.shape[3])]
        for t in range(q.shape[2]):
            place = {"causal": t + 1 + offset, "strict": t + offset, "all": length}[order]
            w, keys, gram = (y.repeat_interleave(ratio, 1) for y in states[min(max(place, 0), length)])
            query = q[:, :, t, :, None]
            if rule == "mesa":
                query = torch.linalg.solve(gram + torch.diag_embed(ridge[:, :, t]), query)
            mass = query.mT @ keys if divided else torch.ones_like(query[..., :1, :])
            rows.append(query.mT @ w / torch.where(mass == 0, 1, mass))
        w, keys, gram = state
        more = {"keys": keys[..., 0]} if rule in SPECS else {"gram": gram} if rule == "mesa" else {}
        return torch.cat(rows, 2), {"values": w, **more}

    return define


DELTA, MESA = recurrence("delta"), recurrence("mesa")
DECAYS = {"head": lambda t: (2,), "token": lambda t: (2, 2, t), "feature": lambda t: (2, 2, t, 4)}
RIDGES = {
    "number": lambda t: (), "head": lambda t: (4,), "dimension": lambda t: (4, 4), "token": lambda t: (2, 4, t),
    "all": lambda t: (2, 4, t, 4),
}  # fmt: skip


def delta(x: Inputs, **how: Any) -> Any:
    return regard.delta_rule(x["q"], x["k"], x["v"], x["beta"], log_decay=x.get("g"), **how)


def mesa(x: Inputs, **how: Any) -> Any:
    more = {"log_decay": x.get("g"), "beta": x.get("beta"), **how}
    return regard.mesa_attention(x["q"], x["k"], x["v"], ridge=x["ridge"], **more)


def leaky(average: bool) -> Case:
    """The leaky average of v, given to both query heads: linear attention with q = k = 1 and a decay by head, -rate."""

    def run(x: Inputs, attn_mask: Tensor | None = None, **how: Any) -> Any:
        mask = None if attn_mask is None else attn_mask.flatten(1)
        out, state = leaky_average(x["v"], -x["g"], mask=mask, average=average, **how)
        return out.repeat_interleave(2, 1), state

    def define(x: Inputs, order: str = "causal", mask: Tensor | None = None) -> tuple[Tensor, Inputs]:
        one = torch.ones_like(x["v"][..., :1])
        out, state = recurrence("sum")({"q": one, "k": one, "v": x["v"], "g": x["g"]}, order, mask)
        size = (1 - x["g"].exp())[:, None, None] if average else 1.0
        return (size * out).repeat_interleave(2, 1), {"sums": state["values"][:, :, 0]}

    return Case(lambda t: {"q": None, "k": None, "g": (2,)}, run, define, WAYS[2:], ("causal",))


def cases() -> dict[str, Case]:
    found = {text: linear(text) for text in SPECS} | {"leaky": leaky(False), "leaky, average": leaky(True)}
    found |= {f"{text}, given": linear(text, given=1) for text in GIVEN}
    beta = lambda t: {"beta": (2, 2, t)}  # noqa: E731
    found["delta"] = Case(beta, delta, DELTA)
    for kind, size in DECAYS.items():
        fade = lambda t, size=size: {"g": size(t)}  # noqa: E731
        for text in ("linear", "elu"):
            found[f"{text}, decay by {kind}"] = Case(fade, linear(text).run, recurrence(text))
        found[f"delta, decay by {kind}"] = Case(lambda t, fade=fade: beta(t) | fade(t), delta, DELTA)
    for kind, size in RIDGES.items():
        ridge = lambda t, size=size: {"ridge": size(t)}  # noqa: E731
        both = lambda t, ridge=ridge: {**ridge(t), **beta(t), "g": (2, 2, t)}  # noqa: E731
        found[f"mesa, ridge by {kind}"] = Case(ridge, mesa, MESA, SOLVERS, once=True)
        found[f"mesa, ridge by {kind}, decay"] = Case(both, mesa, MESA, SOLVERS, once=True)
    return found


CASES = cases()
FADING = [name for name in CASES if "decay" in name]
FEW = [
    "linear, given", "relu2", "linear*fixed*normalised", "elu, decay by token", "linear, decay by feature", "delta",
    "delta, decay by head", "delta, decay by feature", "mesa, ridge by head", "mesa, ridge by all, decay",
    "leaky, average",
]  # fmt: skip
"""One of every path through the code."""
