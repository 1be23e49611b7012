"""What the contracts run over, drawn from the registries at collection, and the inputs they run on."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.checks import ArgumentError

from . import oracle
from .oracle import close as close

REGISTRIES = regard.registries()
KERNELS = REGISTRIES["kernel"].names()
RULES = REGISTRIES["bandwidth"].names()
SIMILARITIES = REGISTRIES["similarity"].names()
SOLVERS = REGISTRIES["solver"].names()
IMPLS = REGISTRIES["impl"].names()
PRESETS = list(regard.presets())

# Numbers that make a rule do something on rows of ten keys; a rule that is not named runs at its defaults.
SMALL = {"nearest": "nearest(k=3)"}
VARIANTS: dict[str, list[str]] = {
    "fixed": ["fixed", "fixed(bias=0.4)", "fixed(h=1.1)"],
    "nearest": [f"nearest(k=3,gradient={how})" for how in ("hard", "straight-through", "soft")],
}
FAMILIES = ("gaussian", "epanechnikov", "uniform", "linear")
"""Kernels that run under every variant; their kin run under the first."""

ODD = (
    "polynomial(r=0.5)*adaptive",
    "polynomial(r=1.5)*anchored(margin=0.6)",
    "epanechnikov*fixed(bias=-0.5,empty=zero)",
    "epanechnikov*fixed(bias=-0.5,empty=nearest)",
    "biweight*fixed*unnormalised",
    "linear*fixed*normalised",  # signed weights over a signed, guarded sum
    "gaussian*fixed*linear(ridge=0.3,solver=cg(precondition=True))",
    "gaussian*anchored(margin=1.5)*euclidean*linear(ridge=0.4,ridge_mode=absolute)",
)


def text(kernel: str, rule: str, similarity: str = "dot", degree: int = 0, normalise: bool | None = None) -> str:
    """A spec as text."""
    parts = [kernel, rule, similarity]
    parts += [] if normalise is None else ["normalised" if normalise else "unnormalised"]
    return "*".join([*parts, "linear(ridge=0.1)"] if degree else parts)


def built(spec: str, reasons: Iterable[str] = ("",)) -> regard.Spec | None:
    """The Spec, or None where the grammar refuses it for one of these reasons."""
    try:
        return regard.Spec.parse(spec)
    except ArgumentError as error:
        if not any(reason in str(error) for reason in reasons):
            raise
        return None


def _every() -> Iterator[regard.Spec]:
    """Presets and their local linear models; each kernel under each rule, in variants and in both degrees."""
    yield from regard.presets().values()
    yield from filter(None, (built(f"local-linear[{name}]") for name in PRESETS))
    for kernel, rule in product(KERNELS, RULES):
        variants = VARIANTS.get(rule, [rule])
        variants = variants if kernel in FAMILIES else variants[:1]
        for variant, degree in [(variant, 0) for variant in variants] + [(variants[0], 1)]:
            found = [built(text(kernel, variant, s, degree)) for s in ("dot", "cosine")]
            yield from [s for s in found if s is not None][:1]
    for solver in SOLVERS:
        yield from filter(None, [built(f"gaussian*fixed*linear(ridge=0.3,solver={solver})")])
    yield from map(regard.Spec.parse, ODD)


SPECS: dict[str, regard.Spec] = {str(spec): spec for spec in _every()}
"""Label to Spec: everything registered, once."""


def _runs(spec: regard.Spec, impl: str) -> bool:
    return any(name == impl and reason is None for name, reason, _ in regard.explain(spec, (2, 2, 8, 3)).rows)


PAIRS = [(label, impl) for label, spec in SPECS.items() for impl in IMPLS if _runs(spec, impl)]
"""(label, implementation) for all that an implementation computes without mask or order."""

FAST = [(label, impl) for label, impl in PAIRS if impl != "reference"]

REPRESENTATIVES = [
    label for label in ("softmax", "biweight", "relumax", "normrelu", "topk-softmax", "shift-cosine", "rbf", "cosine",
                        "geometric", "local-linear", "local-linear[biweight]", "uniform*nearest(k=3,gradient=soft)")
    if label in SPECS
]  # fmt: skip
"""One of each kind, for contracts too long to run over everything."""


def few_first(found: Iterable[tuple[str, str]]) -> list[Any]:
    """Put representatives of (label, implementation) in the first tier of the tests, and the others in the second.

    Derivatives, hidden content, and the contracts against the oracle and the reference run over everything in the
    first tier."""
    return [pair if pair[0] in REPRESENTATIVES else pytest.param(*pair, marks=pytest.mark.slow) for pair in found]


every_pair = pytest.mark.parametrize(("label", "impl"), PAIRS)
few_pairs_first = pytest.mark.parametrize(("label", "impl"), few_first(PAIRS))


@dataclass(frozen=True)
class Data:
    """One call's tensors: q [B, H, Tq, D], k [B, Hkv, Tk, D], v [B, Hkv, Tk, Dv]."""

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(B, H, Tq, Tk)."""
        return (*self.q.shape[:3], self.k.shape[2])

    def map(self, fn: Any) -> "Data":
        return Data(fn(self.q), fn(self.k), fn(self.v))

    def leaves(self) -> "Data":
        return self.map(lambda x: x.detach().clone().requires_grad_())

    def with_(self, **changes: Tensor) -> "Data":
        return replace(self, **changes)


def draw(
    queries: int = 7, keys: int | None = None, *, batch: int = 2, heads: int = 2, kv_heads: int | None = None,
    dim: int = 3, value_dim: int = 2, dtype: torch.dtype = torch.float64, seed: int = 0,
) -> Data:  # fmt: skip
    """Normal inputs from a seed, drawn in float64, so that a dtype changes nothing but the rounding."""
    make = torch.Generator().manual_seed(1000 + seed)
    keys = queries if keys is None else keys
    kv = (batch, kv_heads or heads, keys)
    shapes = ((batch, heads, queries, dim), (*kv, dim), (*kv, value_dim))
    return Data(*(torch.randn(s, generator=make, dtype=torch.float64).to(dtype) for s in shapes))


def like(x: Tensor) -> Tensor:
    """Fixed random numbers of the shape of x: the weights of a loss."""
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(2000), dtype=torch.float64).to(x.dtype)


def learned(spec: regard.Spec, data: Data, seed: int = 0) -> tuple[dict[str, Tensor], Tensor | None]:
    """A tensor [B, H, Tq] for every number the spec can learn, near its default and in its range (the probe of a local
    linear model [B, H, Tq, D]), and one for the scale where it takes one; all collect gradients."""
    make = torch.Generator().manual_seed(3000 + seed)
    shape = data.q.shape[:3]

    def around(centre: float, low: float | None, *axes: int) -> Tensor:
        wobble = torch.rand(*shape, *axes, generator=make, dtype=torch.float64) * 0.2
        base = centre + (0.05 if low is not None and centre <= low else 0.0)
        room = 1.0 if low is None else min(1.0, base - low)
        return (base + room * wobble).to(data.q.dtype).requires_grad_()

    axes = {"probe": data.q.shape[3:]}
    params = {n: around(float(info.default), info.low, *axes.get(n, ())) for n, info in spec.params.items()}
    scale = around(data.q.shape[-1] ** -0.5, 0.0) if spec.takes_scale else None
    return params, scale


def masks(batch: int, heads: int, queries: int, keys: int) -> dict[str, dict[str, Any]]:
    """Name to the arguments of a call that limits who sees what; every kind of argument, alone and together.
    The pair mask leaves one row of one head without keys, the key mask one batch element short."""
    pairs = torch.rand(batch, heads, queries, keys, generator=torch.Generator().manual_seed(77)) < 0.6
    pairs[0, -1, queries // 2] = False
    padding = torch.ones(batch, 1, 1, keys, dtype=torch.bool)
    padding[0, ..., : keys // 3] = False
    offsets = torch.arange(batch) * 2 + keys // 3
    found: dict[str, dict[str, Any]] = {
        "all": {},
        "causal": {"is_causal": True},
        "strict": {"exclude_self": True},
        "padding": {"attn_mask": padding},
        "padding, causal": {"attn_mask": padding, "is_causal": True},
        "pairs": {"attn_mask": pairs},
        "pairs, strict": {"attn_mask": pairs, "exclude_self": True},
        "one mask for all": {"attn_mask": pairs[0, 0]},
        "keys by head, causal": {"attn_mask": pairs[:, :, -1:], "is_causal": True},
        "queries": {"attn_mask": pairs[..., :1]},
        "window": {"window": 2},
        "wide window": {"window": 2**62, "is_causal": True},
        "window, causal": {"window": 3, "is_causal": True},
        "window, strict": {"window": 2, "exclude_self": True},
        "window, padding": {"window": 4, "is_causal": True, "attn_mask": padding},
        "ahead": {"is_causal": True, "query_offset": 2},
        "behind": {"is_causal": True, "query_offset": -2},
        "beyond": {"exclude_self": True, "query_offset": keys},
        "far ahead": {"is_causal": True, "query_offset": 2**62},
        "far behind": {"exclude_self": True, "query_offset": -(2**62)},
        "offsets": {"is_causal": True, "query_offset": offsets},
        "offsets, strict": {"exclude_self": True, "query_offset": offsets},
        "offsets, window": {"window": 2, "query_offset": offsets},
        "offsets, window, causal": {"window": 2, "is_causal": True, "query_offset": offsets.int()},
    }
    if queries > keys:  # segments need a key at the position of every query
        return found
    own = torch.stack([torch.arange(keys) // (3 + b) % 2 for b in range(batch)])
    middle = (keys - queries) // 2
    return found | {
        "segments": {"segment_ids": own},
        "segments, causal, padding": {"segment_ids": own, "is_causal": True, "attn_mask": padding},
        "segments, window": {"segment_ids": own[:1], "window": 2},
        "segments, strict, offset": {"segment_ids": own, "exclude_self": True, "query_offset": middle},
    }


def probe(spec: regard.Spec, q: Tensor) -> dict[str, Tensor]:
    """What the spec cannot do without: the probe of the solver `learned`, made of each query alone."""
    if getattr(spec.solver, "name", "") != "learned":
        return {}
    return {"probe": oracle.usual_probe(q)}


def run(spec: regard.Spec, impl: str, data: Data, **call: Any) -> Any:
    """`regard.attention`, with a probe where one is needed and none is given."""
    params = {**probe(spec, data.q), **(call.pop("params", None) or {})}
    return regard.attention(*data.tensors, spec, impl=impl, params=params, **call)


def attend(spec: regard.Spec, impl: str, data: Data, **call: Any) -> Tensor | None:
    """The output, or None where the implementation says that it cannot do this call."""
    try:
        return run(spec, impl, data, **call)
    except ArgumentError as error:
        if "Those that can:" not in str(error):
            raise
        return None


def outputs(
    label: str, impl: str, data: Data, calls: Mapping[str, dict[str, Any]] | Iterable[str], **more: Any
) -> Iterator[tuple[str, dict[str, Any], Tensor]]:
    """(name, arguments, output) of each call that the implementation can compute; `calls` may be names of `masks`."""
    chosen = calls if isinstance(calls, Mapping) else {how: masks(*data.sizes)[how] for how in calls}
    for how, limits in chosen.items():
        call = {**limits, **more}
        out = attend(SPECS[label], impl, data, **call)
        if out is not None:
            yield how, call, out


def impls_of(label: str) -> list[str]:
    return [impl for name, impl in PAIRS if name == label]


def gradients(
    out: Tensor, inputs: Mapping[str, Tensor], *, weight: Tensor | None = None, retain_graph: bool = False
) -> dict[str, Tensor]:
    """Gradients of sum(out * weight), by default of `like(out)`; zero where an input has no part in it."""
    weight = like(out) if weight is None else weight
    found = torch.autograd.grad(out, list(inputs.values()), weight, retain_graph=retain_graph, allow_unused=True)
    return {n: torch.zeros_like(x) if g is None else g for (n, x), g in zip(inputs.items(), found, strict=True)}


def named(data: Data, params: Mapping[str, Tensor] | None = None, scale: Tensor | None = None) -> dict[str, Tensor]:
    found = {"query": data.q, "key": data.k, "value": data.v, **(params or {})}
    return found if scale is None else {**found, "scale": scale}


def same(actual: Any, expected: Any, what: Any = "") -> None:
    """Equal to the last bit, whatever `matched` takes."""
    for one, other, name in oracle.matched(actual, expected, what):
        assert torch.equal(one, other), f"{name}: differs by {(one - other).abs().max().item():.3g}"
