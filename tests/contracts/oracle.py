"""The dense truth in float64: every formula written out a second time, on whole [B, H, Tq, Tk] tensors, with
thresholds by sorting or 200 bisections and the local linear model by its normal equations (`regression.fit`). Nothing
here calls regard; `Choices` are read off a Spec's fields, or written by hand.

Everything is differentiable by autograd, so that gradients are expected values too.

Legend: B batch, H heads, Tq queries, Tk keys, D features; z scores, w kernel values, p weights, all
[B, H, Tq, Tk]; row numbers (scale, params) are floats or [B, H, Tq].
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from regression import Ridge, fit, penalties
from torch import Tensor

Number = float | Tensor
Params = Mapping[str, float | Tensor]


@dataclass(frozen=True)
class Choices:
    """The choices of a spec in plain numbers; the defaults are those of the design."""

    kernel: str
    rule: str
    similarity: str = "dot"
    degree: int = 0
    normalise: bool = True
    r: float = 1.0
    limit: float = 300.0
    kernel_eps: float = 1e-4
    cosine_eps: float = 1e-3
    bias: float = 0.0
    h: float | None = None
    empty: str = "uniform"
    margin: float = 1.0
    k: int = 32
    gradient: str = "hard"
    temperature: float = 1.0
    ridge: float = 0.1
    solver: str = "auto"
    blocks: int = 0
    absolute: bool = False


RANKED = {"gaussian", "polynomial", "uniform"}
POINTWISE = {"linear", "geometric", "clipped-geometric"}
SIGNED = {"dot", "cosine", "euclidean"}  # similarities that may be negative
SCALELESS = {"geometric", "clipped-geometric"}  # Table 1 puts them on the bare similarity
RULES = {"fixed", "adaptive", "anchored", "nearest"}
SOLVERS = {None, "auto", "cholesky", "cg", "block-diagonal", "learned"}


def read(spec: Any) -> Choices:
    """The fields of a `regard.Spec`, by name."""
    kernel, rule, similarity = spec.kernel, spec.bandwidth, spec.similarity
    own = {name: getattr(rule, name) for name in ("margin", "k", "gradient", "temperature", "empty", "h")
           if hasattr(rule, name)}  # fmt: skip
    return Choices(
        kernel.name, rule.name, similarity.name, degree=spec.degree, normalise=spec.normalise,
        r=getattr(kernel, "r", 1.0), limit=getattr(kernel, "limit", 300.0), kernel_eps=getattr(kernel, "eps", 1e-4),
        cosine_eps=getattr(similarity, "eps", 1e-3), bias=getattr(rule, "bias", None) or 0.0,
        ridge=0.1 if spec.ridge is None else spec.ridge, absolute=spec.ridge_mode == "absolute",
        solver=getattr(spec.solver, "name", None), blocks=getattr(spec.solver, "blocks", 0), **own,
    )  # fmt: skip


def knows(choices: Choices) -> bool:
    """Whether every choice has its formula here; parts of third parties have not."""
    known = choices.kernel in RANKED | POINTWISE and choices.rule in RULES
    return known and choices.similarity in SIMILARITIES and choices.solver in SOLVERS


# Visibility -------------------------------------------------------------------------------------------------


def visible(
    batch: int, heads: int, queries: int, keys: int, *, attn_mask: Tensor | None = None, is_causal: bool = False,
    exclude_self: bool = False, window: int | None = None, query_offset: int | Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return which pairs are visible, boolean [B, H, Tq, Tk], one pair at a time."""
    offset = torch.as_tensor(keys - queries if query_offset is None else query_offset).expand(batch)
    rows = []
    for b, first in enumerate(offset.tolist()):
        line = lambda at: [_permitted(at, j, is_causal, exclude_self, window) for j in range(keys)]  # noqa: E731
        pairs = torch.tensor([line(i + first) for i in range(queries)], dtype=torch.bool)
        rows.append(pairs.reshape(1, queries, keys))
        if segment_ids is not None:
            ids = segment_ids[b % len(segment_ids)].tolist()
            rows[-1] &= torch.stack([_segment(ids, i + first) for i in range(queries)])
    seen = torch.stack(rows).expand(batch, heads, queries, keys) if rows else torch.ones(0, heads, queries, keys) > 0
    return seen if attn_mask is None else seen & attn_mask


def _segment(ids: list[int], at: int) -> Tensor:
    """Return which keys lie in the run of equal ids around position `at`: boolean [Tk]."""
    start = stop = at
    while start > 0 and ids[start - 1] == ids[at]:
        start -= 1
    while stop < len(ids) and ids[stop] == ids[at]:
        stop += 1
    key = torch.arange(len(ids))
    return (key >= start) & (key < stop)


def _permitted(at: int, j: int, causal: bool, strict: bool, window: int | None) -> bool:
    if strict:
        return j < at and (window is None or j >= at - window)
    if causal:
        return j <= at and (window is None or j > at - window)
    return window is None or abs(at - j) < window


# Similarities -----------------------------------------------------------------------------------------------


def _pairs(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT


def _cosine(q: Tensor, k: Tensor, eps: float) -> Tensor:
    size = (eps + q.square().sum(-1))[..., :, None] * (eps + k.square().sum(-1))[..., None, :]
    return _pairs(q, k) / size.sqrt()


def _elu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, torch.exp(torch.where(x > 0, 0, x)))


SIMILARITIES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "dot": lambda q, k, eps: _pairs(q, k),
    "cosine": _cosine,
    "euclidean": lambda q, k, eps: -(q[..., :, None, :] - k[..., None, :, :]).square().sum(-1) / 2,
    "relu": lambda q, k, eps: _pairs(q.relu(), k.relu()),
    "relu2": lambda q, k, eps: _pairs(q.relu() ** 2, k.relu() ** 2),
    "elu": lambda q, k, eps: _pairs(_elu(q), _elu(k)),
}


def _scores(s: Choices, q: Tensor, k: Tensor, scale: Number | None, params: Params) -> tuple[Tensor, Number]:
    """(z, the bias that goes with it)."""
    z = SIMILARITIES[s.similarity](q, k, s.cosine_eps)
    bias = _column(params.get("bias", s.bias))
    if s.h is not None:
        h = _column(params.get("h", s.h))
        if s.kernel == "gaussian":
            return z / (h * h), 0.0
        return z, h * h / 2 - (1 if s.similarity == "cosine" else 0)
    if scale is None:
        scale = q.shape[-1] ** -0.5 if s.similarity in ("dot", "euclidean") else 1.0
        scale = 1.0 if s.kernel in SCALELESS else scale
    return z * _column(scale), bias


def _column(x: Number) -> Number:
    return x[..., None] if isinstance(x, Tensor) else x


# Weights ----------------------------------------------------------------------------------------------------


def weights(s: Choices, z: Tensor, seen: Tensor, bias: Number = 0.0, params: Params | None = None) -> Tensor:
    """p, zero where not `seen`."""
    params = params or {}
    if s.rule == "fixed" and (s.kernel in POINTWISE or not s.normalise):
        return _plain(s, z, seen, bias, params)
    z = torch.where(seen, z, -torch.inf)
    empty = ~seen.any(-1, keepdim=True)
    z = torch.where(empty, 0, z)  # any value: the row is put to zero below
    rule = {"fixed": _fixed, "adaptive": _adaptive, "anchored": _anchored, "nearest": _nearest}[s.rule]
    return torch.where(empty, 0, rule(s, z, bias, params))


def of_scores(z: Tensor, rule: str, kernel: str = "polynomial", **numbers: Any) -> Tensor:
    """p of scores z, -inf where hidden, by a kernel under a rule; `numbers` are fields of `Choices`."""
    s = Choices(kernel, rule, **numbers)
    return weights(s, z, z > -torch.inf, s.bias)


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {}
"""K(a) of kernels that tests register."""


def _kernel(s: Choices, a: Tensor, params: Params) -> Tensor:
    if s.kernel in OTHERS:
        return OTHERS[s.kernel](a)
    if s.kernel == "gaussian":
        return a.exp()
    if s.kernel == "uniform":
        return (a > 0).to(a.dtype)
    if s.kernel == "polynomial":
        return torch.where(a > 0, torch.where(a > 0, a, 1) ** _column(params.get("r", s.r)), 0)
    if s.kernel == "linear":
        return a
    if s.kernel == "geometric":
        return 1 / (1 - a)
    return 1 / (1 + s.kernel_eps - torch.where(a < s.limit, a, s.limit) / s.limit)


def _plain(s: Choices, z: Tensor, seen: Tensor, bias: Number, params: Params) -> Tensor:
    w = torch.where(seen, _kernel(s, torch.where(seen, z, 0) + bias, params), 0)
    if not s.normalise:
        return w
    total = w.sum(-1, keepdim=True)
    if s.kernel != "linear" or s.similarity not in SIGNED or (s.similarity == "cosine" and s.bias >= 1):
        return w / torch.where(total == 0, 1, total)
    square = (w * w).sum(-1, keepdim=True)
    lost = square == 0
    size = torch.where(lost, 0, (seen.sum(-1, keepdim=True) * torch.where(lost, 1, square)) ** 0.5)
    held = torch.where(total < 0, -size, size) * 1e-3  # the documented guard of a signed sum
    total = torch.where(total.abs() < 1e-3 * size, held, total)
    return w / torch.where(lost, 1, total)


def _share(w: Tensor) -> Tensor:
    return w / w.sum(-1, keepdim=True)


def _softmax(z: Tensor) -> Tensor:
    return _share(torch.where(z > -torch.inf, (z - z.detach().amax(-1, keepdim=True)).exp(), 0))


def _fixed(s: Choices, z: Tensor, bias: Number, params: Params) -> Tensor:
    if s.kernel == "gaussian":
        return _softmax(z)
    finite = z > -torch.inf
    w = torch.where(finite, _kernel(s, torch.where(finite, z, 0) + bias, params), 0)
    total = w.sum(-1, keepdim=True)
    lost = total == 0
    if s.empty == "uniform":
        instead = finite.to(z.dtype) / finite.sum(-1, keepdim=True)
    elif s.empty == "nearest":
        first = (z == z.amax(-1, keepdim=True)).int().argmax(-1)  # the lowest index
        instead = torch.nn.functional.one_hot(first, z.shape[-1]).to(z.dtype)
    else:
        instead = torch.zeros_like(z)
    return torch.where(lost, instead, w / torch.where(lost, 1, total))


def _adaptive(s: Choices, z: Tensor, bias: Number, params: Params) -> Tensor:
    r = _column(1 / (params["alpha"] - 1)) if "alpha" in params else s.r
    finite = z > -torch.inf
    safe = torch.where(finite, z, 0)

    def powers(theta: Tensor, exponent: Number) -> Tensor:
        inside = finite & (safe > theta)
        return torch.where(inside, torch.where(inside, (safe - theta) / r, 1) ** exponent, 0)

    with torch.no_grad():
        high = z.amax(-1, keepdim=True)
        low = high - r
        for _ in range(200):
            middle = (low + high) / 2
            enough = powers(middle, r).sum(-1, keepdim=True) >= 1
            low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
            if bool((torch.nextafter(low, high) >= high).all()):
                break  # adjacent numbers: further halving changes nothing
    # One Newton step whose value is taken off again: the implicit function theorem. Where r < 1 the derivative of its
    # denominator is huge, and would multiply what rounding leaves of the numerator.
    step = (powers(low, r).sum(-1, keepdim=True) - 1) / powers(low, r - 1).sum(-1, keepdim=True).detach()
    return powers(low + step - step.detach(), r)


def _anchored(s: Choices, z: Tensor, bias: Number, params: Params) -> Tensor:
    theta = z.amax(-1, keepdim=True) - _column(params.get("margin", s.margin))
    inside = z > theta
    if s.kernel == "gaussian":
        return _softmax(torch.where(inside, z, -torch.inf))
    return _share(torch.where(inside, _kernel(s, torch.where(inside, z - theta, 1), params), 0))


def _nearest(s: Choices, z: Tensor, bias: Number, params: Params) -> Tensor:
    count = (z > -torch.inf).sum(-1, keepdim=True)
    order = z.detach().sort(dim=-1, descending=True, stable=True).indices
    rank = order.argsort(-1)
    kept = (rank < s.k) & (rank < count)
    if s.gradient == "soft":
        return _soft(s, z, order, count)
    p = _kept(s, z, kept, order, count, params)
    if s.gradient == "hard":
        return p
    smooth = _softmax(z)
    return p.detach() + smooth - smooth.detach()


def _kept(s: Choices, z: Tensor, kept: Tensor, order: Tensor, count: Tensor, params: Params) -> Tensor:
    if s.kernel == "gaussian":
        return _softmax(torch.where(kept, z, -torch.inf))
    if s.kernel == "uniform":
        return _share(kept.to(z.dtype))
    more = count > s.k
    lowest = torch.where(z > -torch.inf, z, torch.inf).argmin(-1, keepdim=True)  # the first among equals
    at = torch.where(more, order.gather(-1, torch.where(more, s.k, 0)), lowest)
    theta = z.gather(-1, at) - torch.where(more, 0.0, 1.0)
    inside = kept & (z > theta)
    w = torch.where(inside, _kernel(s, torch.where(inside, z - theta, 1), params), 0)
    tied = ~inside.any(-1, keepdim=True)
    w = torch.where(tied, kept.to(z.dtype), w)
    return _share(w)


def _soft(s: Choices, z: Tensor, order: Tensor, count: Tensor) -> Tensor:
    width = z.shape[-1]
    kth = z.gather(-1, order[..., min(s.k, width) - 1 : min(s.k, width)])
    following = z.gather(-1, order[..., min(s.k + 1, width) - 1 : min(s.k + 1, width)])
    gated = count > s.k
    centre = torch.where(gated, (torch.where(gated, kth, 0) + torch.where(gated, following, 0)) / 2, 0)
    finite = z > -torch.inf
    safe = torch.where(finite, z, 0)
    gate = torch.where(gated, torch.sigmoid((safe - centre) / s.temperature), 1)
    base = (safe - z.detach().amax(-1, keepdim=True)).exp() if s.kernel == "gaussian" else torch.ones_like(z)
    return _share(torch.where(finite, base * gate, 0))


# Output -----------------------------------------------------------------------------------------------------


def attention(
    s: Choices, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: Number | None = None, params: Params | None = None
) -> tuple[Tensor, Tensor]:
    """(output [B, H, Tq, Dv], weights p). Keys and values may have fewer heads than queries."""
    params = params or {}
    heads = q.shape[1]
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    z, bias = _scores(s, q, k, scale, params)
    p = weights(s, z, seen, bias, params)
    if s.degree == 0:
        return torch.einsum("bhij,bhjd->bhid", p, v), p
    if s.solver == "learned":
        return _parallax(k, v, p, params.get("probe", usual_probe(q))), p
    ridge = params.get("ridge", s.ridge)
    if isinstance(ridge, float) and ridge == 0:
        return _least_norm(q, k, v, p), p
    amount = penalties(ridge, q)
    if s.absolute:
        amount = amount / _mass(s, z, seen, bias, params)[..., None]
    if s.solver == "block-diagonal":
        return _block_diagonal(q, k, v, p, amount, s.blocks or q.shape[-1]), p
    return fit(p, q, k, v, amount), p


def dense(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, ridge: Ridge, name: str = "softmax", scale: Number | None = None
) -> Tensor:
    """Local linear attention of q, k, v in float64, the weights those of a preset; ridge a number, [B, H, Tq] or
    [B, H, Tq, D], relative to the total weight."""
    q, k, v = (x.double() for x in (q, k, v))
    ridge = ridge.double() if isinstance(ridge, Tensor) else ridge
    choices = replace(PRESETS[name], degree=1)
    return attention(choices, q, k, v, seen.expand(*q.shape[:3], k.shape[2]), scale, {"ridge": ridge})[0]


def of_one_head(spec: Any, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, **numbers: Any) -> Tensor:
    """What the queries [Tq, D] of one head read of keys [Tk, D] and values [Tk, Dv]; seen [Tq, Tk]."""
    scale = numbers.pop("scale", None)
    return attention(read(spec), *(x[None, None] for x in (q, k, v)), seen[None, None], scale, numbers)[0][0, 0]


def usual_probe(q: Tensor) -> Tensor:
    """A probe made of each query alone, where a test gives none; no coarser than float32."""
    probe = q.detach().double().nan_to_num().clamp(-3, 3).mul(0.4).sin()
    return probe.to(torch.promote_types(q.dtype, torch.float32))


def _mass(s: Choices, z: Tensor, seen: Tensor, bias: Number, params: Params) -> Tensor:
    """sum_j K of every row [B, H, Tq], 1 in rows that see no key."""
    empty = ~seen.any(-1)
    z = torch.where(seen, z, -torch.inf)
    if s.kernel == "gaussian":
        assert s.rule in ("fixed", "anchored")
        top = torch.where(empty, 0, z.amax(-1))[..., None]
        least = top - _column(params.get("margin", s.margin)) if s.rule == "anchored" else -torch.inf
        w = torch.where(z > least, z, -torch.inf).exp()
    else:
        top = torch.where(empty, 0, z.amax(-1))[..., None]
        theta = top - _column(params.get("margin", s.margin)) if s.rule == "anchored" else -bias
        w = _kernel(s, torch.where(seen, z - theta, 0), params)
    return torch.where(empty, 1, w.sum(-1).clamp(min=1e-15))  # a row without weight has no slope


def _parallax(k: Tensor, v: Tensor, p: Tensor, probe: Tensor) -> Tensor:
    """sum p (1 - (k - kbar) . r) v."""
    away = k[..., None, :, :] - torch.einsum("bhij,bhja->bhia", p, k)[..., None, :]
    return (p * (1 - torch.einsum("bhija,bhia->bhij", away, probe))) @ v


def _block_diagonal(q: Tensor, k: Tensor, v: Tensor, p: Tensor, ridge: Tensor, blocks: int) -> Tensor:
    """The covariance of the keys about their mean, with zeros outside its diagonal blocks; ridge [B, H, Tq, D]."""
    mean = torch.einsum("bhij,bhja->bhia", p, k)
    away = k[..., None, :, :] - mean[..., None, :]
    spread = torch.einsum("bhij,bhija,bhijc->bhiac", p, away, away)
    at = torch.arange(q.shape[-1]) * blocks // q.shape[-1]
    spread = torch.where(at[:, None] == at, spread, 0)
    t = torch.linalg.solve(spread + torch.diag_embed(ridge), (q - mean)[..., None])[..., 0]
    return (p * (1 + torch.einsum("bhija,bhia->bhij", away, t))) @ v


def _least_norm(q: Tensor, k: Tensor, v: Tensor, p: Tensor) -> Tensor:
    """Intercept at the query of the regression of v on k - q with weights p, of the solutions that of least norm."""
    x = k[..., None, :, :] - q[..., :, None, :]  # [B, H, Tq, Tk, D]
    mean_x = torch.einsum("bhij,bhija->bhia", p, x)
    mean_v = torch.einsum("bhij,bhjd->bhid", p, v)
    root = p.sqrt()[..., None]
    left = root * (x - mean_x[..., None, :])
    right = root * (v[..., None, :, :] - mean_v[..., None, :])
    slope = torch.linalg.pinv(left, rtol=1e-9) @ right  # [B, H, Tq, D, Dv]
    return torch.where(p.sum(-1, keepdim=True) == 0, 0, mean_v - (mean_x[..., None, :] @ slope)[..., 0, :])


def matched(actual: Any, expected: Any, what: Any = "") -> Iterator[tuple[Tensor, Tensor, str]]:
    """Two tensors, or those of two mappings by name or of two sequences in order, and what an error calls them."""
    if isinstance(actual, Tensor):
        yield actual, expected, str(what)
    elif isinstance(actual, Mapping):
        yield from ((x, expected[name], f"{what}, {name}") for name, x in actual.items())
    else:
        yield from ((x, y, str(what)) for x, y in zip(actual, expected, strict=True))


def close(actual: Any, expected: Any, tolerance: float, what: Any = "") -> None:
    """|actual - expected| <= tolerance * max(1, max |expected|), NaN nowhere; of whatever `matched` takes."""
    for one, other, name in matched(actual, expected, what):
        assert one.shape == other.shape, f"{name}: {tuple(one.shape)} != {tuple(other.shape)}"
        if one.numel():
            gap = float((one.detach().double() - other.detach().double()).abs().max())
            size = max(1.0, float(other.detach().double().abs().max()))
            assert gap <= tolerance * size, f"{name}: differs by {gap:.3g} (size {size:.3g})"  # false for NaN


PRESETS: dict[str, Choices] = {
    "softmax": Choices("gaussian", "fixed"),
    "sparsemax": Choices("polynomial", "adaptive", r=1.0),
    "biweight": Choices("polynomial", "adaptive", r=2.0),
    "triweight": Choices("polynomial", "adaptive", r=3.0),
    "relumax": Choices("polynomial", "anchored", r=1.0, margin=1.0),
    "normrelu": Choices("polynomial", "fixed", r=1.0),
    "topk-softmax": Choices("gaussian", "nearest", k=32),
    "topk-uniform": Choices("uniform", "nearest", k=32),
    "exponential": Choices("gaussian", "fixed"),
    "linear": Choices("linear", "fixed", normalise=False),
    "cosine": Choices("linear", "fixed", "cosine", normalise=False),
    "shift-cosine": Choices("linear", "fixed", "cosine", bias=1.0),
    "geometric": Choices("geometric", "fixed", "cosine"),
    "clipped-geometric": Choices("clipped-geometric", "fixed"),
    "rbf": Choices("gaussian", "fixed", "euclidean"),
    "relu": Choices("linear", "fixed", "relu", bias=1e-4),
    "relu2": Choices("linear", "fixed", "relu2", bias=1e-4),
    "elu": Choices("linear", "fixed", "elu"),
    "local-linear": Choices("gaussian", "fixed", degree=1, ridge=0.1),
}
"""The presets, from the design's table and the kernel-selection paper's Table 1, not from the package."""
