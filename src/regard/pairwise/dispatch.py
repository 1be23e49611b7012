"""Which implementation runs, and why the others do not.

An implementation says of every problem whether it supports it (None) or why not (a reason). `impl="auto"` takes
the supported one of highest priority; any other `impl` runs as named or raises the reason. `explain` prints it all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..checks import ArgumentError, shown, suggestion
from ..grammar import Spec
from ..registry import Registry
from .diagnostics import Diagnostics
from .visibility import Visibility


@dataclass(unsafe_hash=True)  # not frozen, which would take longer to make
class Problem:
    """What an implementation needs to know before it can say yes; no tensors.

    Attributes:
        spec: the sentence.
        batch, heads, kv_heads, queries, keys, dim, value_dim: sizes.
        dtype, device: of the inputs ("cpu", "cuda").
        causal, strict, window: as in `Visibility`.
        offset: the int offset, or None where it is a tensor.
        mask: None, "keys" (the same keys for every query) or "pairs".
        params: names of numbers given as tensors.
        numbers: (name, value) of those given as numbers.
        scale: "number" or "tensor".
        gradient: whether a backward pass may follow.
        diagnostics: whether row statistics are asked for.
        segments: whether keys are in segments (`Visibility.runs`).
        transformed: whether forward-mode derivatives or a torch.func transform look on.
    """

    spec: Spec
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    dim: int
    value_dim: int
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    causal: bool = False
    strict: bool = False
    window: int | None = None
    offset: int | None = 0
    mask: str | None = None
    params: tuple[str, ...] = ()
    numbers: tuple[tuple[str, float], ...] = ()
    scale: str = "number"
    gradient: bool = False
    diagnostics: bool = False
    transformed: bool = False
    segments: bool = False

    @property
    def positional(self) -> bool:
        """Whether position decides what a query sees."""
        return self.causal or self.window is not None or self.segments


@dataclass
class Inputs:
    """Checked inputs of one call, which an implementation must not change.

    q [B, H, Tq, F] and k [B, Hkv, Tk, F] are features with factor * q . k = z; x and y the raw queries and keys, for
    degree 1 alone; v [B, Hkv, Tk, Dv]. All are finite and in float32 or float64, with the scale in q and `factor` 1.
    An implementation that says `native` of a problem gets the queries and keys themselves instead, in the dtype that
    they came in, and the scale, a number or [B, H, Tq], as `factor`; one that says `raw`, too, gets them, and values,
    with numbers that are not finite in them.
    `params` hold the weighting's numbers, or tensors [B, H, Tq]; `ridge`, for degree 1, is a number or [B, H, Tq, 1 or
    D], and `probe` None or [B, H, Tq, D].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    x: Tensor | None
    y: Tensor | None
    visible: Visibility
    problem: Problem
    scale: float | Tensor
    params: dict[str, float | Tensor]
    ridge: float | Tensor = 0.0
    probe: Tensor | None = None
    factor: float | Tensor = 1.0
    raw: bool = False

    @property
    def spec(self) -> Spec:
        return self.problem.spec

    @property
    def diagnostics(self) -> bool:
        return self.problem.diagnostics

    def row_params(self) -> dict[str, float | Tensor]:
        """`params` of the weighting, with tensors as [B, H, Tq, 1]."""
        return {n: p[..., None] if isinstance(p, Tensor) else p for n, p in self.params.items()}


class Cost(NamedTuple):
    """Floating-point operations of the forward pass and bytes of extra memory it needs."""

    flops: int
    bytes: int


class Implementation(Protocol):
    """One way to compute `regard.attention`."""

    def available(self) -> str | None:
        """None where it can run on this machine, else why not."""

    def supports(self, problem: Problem) -> str | None:
        """None where it can do the problem, else why not."""

    def cost(self, problem: Problem) -> Cost:
        """What it takes."""

    def run(self, inputs: Inputs) -> tuple[Tensor, Diagnostics | None]:
        """The output [B, H, Tq, Dv] in the dtype of `inputs.v`."""

    # Where they matter, also
    #   native(problem) -> bool, whether it takes queries and keys as they came (`Inputs`);
    #   raw(problem) -> bool, whether it also takes them, and values, with whatever is not finite in them, and itself
    #       answers NaN in the rows that see such numbers, and in no other;
    #   clean(x), in place of `precision.clean`;
    #   hesitates(problem) -> str | None, why "auto" is not to choose it though it could.


@dataclass(frozen=True)
class _Entry:
    name: str
    priority: int
    impl: Any = field(compare=False)


implementations_registry: Registry[_Entry] = Registry(
    "implementation", "regard.implementations", home="regard.implementations"
)


def register_impl(name: str, priority: int) -> Callable[[type], type]:
    """Class decorator: file an implementation. `impl="auto"` prefers the highest priority."""

    def add(cls: type) -> type:
        implementations_registry.register(name)(_Entry(name, priority, cls()))
        return cls

    return add


def implementations() -> list[tuple[str, str | None]]:
    """(name, None or why it cannot run on this machine), best first."""
    return [(e.name, e.impl.available()) for e in _ranked()]


def _ranked() -> list[_Entry]:
    return sorted([e for _, e in implementations_registry.items()], key=attrgetter("priority"), reverse=True)


def _reason(entry: _Entry, problem: Problem) -> str | None:
    return entry.impl.available() or entry.impl.supports(problem)


def _hesitation(entry: _Entry, problem: Problem) -> str | None:
    hesitates = getattr(entry.impl, "hesitates", None)
    return None if hesitates is None else hesitates(problem)


def choose(problem: Problem, impl: str) -> Any:
    """The implementation that runs the problem.

    Raises:
        ArgumentError: an unknown name, or one that does not support the problem; the message names those
            that do.
    """
    if impl == "auto":
        for entry in _ranked():
            if _reason(entry, problem) is None and _hesitation(entry, problem) is None:
                return entry.impl
        reasons = "; ".join(f"{e.name}: {_reason(e, problem)}" for e in _ranked())
        raise ArgumentError(f"attention: no implementation supports this ({reasons}).")
    if impl not in implementations_registry:
        names = ["auto", *implementations_registry.names()]
        raise ArgumentError(f"attention: unknown impl {shown(impl)}.{suggestion(shown(impl), names)}")
    entry = implementations_registry.get(impl)
    reason = _reason(entry, problem)
    if reason is not None:
        able = [e.name for e in _ranked() if _reason(e, problem) is None]
        raise ArgumentError(f"attention: impl={impl!r} {reason}. Those that can: {', '.join(able) or 'none'}.")
    return entry.impl


@dataclass(frozen=True)
class Explanation:
    """What `impl="auto"` does with a problem; `str` gives a table."""

    chosen: str
    rows: tuple[tuple[str, str | None, Cost | None], ...]

    def __str__(self) -> str:
        lines = [f"impl='auto' runs {self.chosen!r}"]
        for name, reason, cost in self.rows:
            if cost is None:
                note = f"cannot: {reason}"
            else:
                able = "can" if reason is None else f"can where named, {reason}"
                note = f"{able}: {cost.flops:.3g} flops forward, {cost.bytes / 2**20:.3g} MiB extra"
            lines.append(f"  {name:<10} {note}")
        return "\n".join(lines)


def explain_problem(problem: Problem) -> Explanation:
    """Every implementation with its cost or the reason why it does not run."""
    rows = []
    for entry in _ranked():
        reason = _reason(entry, problem)
        cost = None if reason else entry.impl.cost(problem)
        rows.append((entry.name, reason or _hesitation(entry, problem), cost))
    chosen = next((name for name, reason, _ in rows if reason is None), "nothing")
    return Explanation(chosen, tuple(rows))
