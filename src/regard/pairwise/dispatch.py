"""The choice of an implementation.

Each implementation returns for a problem None if it supports it, or a reason why not. `impl="auto"` runs the one with
the highest priority that supports the problem; any other `impl` runs that implementation or raises its reason.
`explain` prints all of this.
"""

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
    """Shapes, dtypes and options of a call; implementations use it to decide whether they support the call."""

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
    causal: bool = False  # this and the next two as in `Visibility`
    strict: bool = False
    window: int | None = None
    offset: int | None = 0  # of the queries; None if it is a tensor
    mask: str | None = None  # "keys" (one mask over keys for all queries) or "pairs"
    params: tuple[str, ...] = ()  # names of the parameters that are tensors
    numbers: tuple[tuple[str, float], ...] = ()  # (name, value) of those that are numbers
    scale: str = "number"  # or "tensor"
    gradient: bool = False  # whether a backward pass may follow
    diagnostics: bool = False  # whether to return row statistics
    transformed: bool = False  # whether forward-mode derivatives or a torch.func transform are active
    segments: bool = False  # whether keys are in segments (`Visibility.runs`)

    @property
    def positional(self) -> bool:
        """Whether position decides what a query sees."""
        return self.causal or self.window is not None or self.segments


@dataclass
class Inputs:
    """Checked inputs of one call. An implementation must not change them.

    Attributes:
        q, k: features [B, H, Tq, F] and [B, Hkv, Tk, F] with factor * q . k = z. They are finite, in float32 or
            float64, with the scale in q and `factor` 1. An implementation that is `native` for the problem gets the
            queries and keys themselves, in their own dtype, and the scale, a number or [B, H, Tq], as `factor`. One
            that is also `raw` gets queries, keys and values that may hold non-finite numbers.
        v: values [B, Hkv, Tk, Dv].
        x, y: the raw queries and keys of a local linear model, else None.
        visible: which pairs are visible.
        params: parameters of the weighting: numbers or tensors [B, H, Tq].
        ridge: of a local linear model: a number or [B, H, Tq, 1 or D].
        probe: None or [B, H, Tq, D].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    x: Any
    y: Any
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
        """Return `params` with tensors as [B, H, Tq, 1]."""
        return {n: p[..., None] if isinstance(p, Tensor) else p for n, p in self.params.items()}


class Cost(NamedTuple):
    """Estimated floating-point operations and extra bytes of the forward pass."""

    flops: int
    bytes: int


class Implementation(Protocol):
    """One way to compute `regard.attention`.

    impl="auto" keeps the answers of all methods but `cost` and `run` for later calls with the same arguments, so they
    must depend on the problem alone, and on what does not change in a process.
    """

    def available(self) -> str | None:
        """Return None if it can run on this machine (the default), else why not."""
        return None

    def supports(self, problem: Problem) -> str | None:
        """Return None if it supports the problem, else why not."""

    def cost(self, problem: Problem) -> Cost:
        """Estimate the cost of the forward pass."""

    def run(self, inputs: Inputs) -> tuple[Tensor, Diagnostics | None]:
        """Return the output [B, H, Tq, Dv] in the dtype of `inputs.v`."""

    # Optional methods are native, raw, clean, seen_rows and hesitates: see docs/protocols/implementation.md.


@dataclass(frozen=True)
class _Entry:
    name: str
    priority: int
    impl: Any = field(compare=False)

    def reason(self, problem: Problem) -> str | None:
        """Return why it cannot run the problem, or None."""
        return self.impl.available() or self.impl.supports(problem)

    def hesitation(self, problem: Problem) -> str | None:
        """Return why `impl="auto"` does not run it, or None."""
        hesitates = getattr(self.impl, "hesitates", None)
        return None if hesitates is None else hesitates(problem)


implementations_registry: Registry[_Entry] = Registry(
    "implementation", "regard.implementations", home="regard.implementations"
)
_ranking: list[_Entry] = []
"""Entries of the registry, highest priority first."""
plans: dict[Any, Any] = {}
"""`plan.plan_of` keeps its results here, by the arguments of calls."""


def register_impl(name: str, priority: int) -> Callable[[type], type]:
    """Register a class as an implementation (decorator). `impl="auto"` prefers the highest priority."""

    def add(cls: type) -> type:
        global plans
        _ranking.append(implementations_registry.register(name)(_Entry(name, priority, cls())))
        _ranking.sort(key=attrgetter("priority"), reverse=True)
        plans = {}  # a new one: calls that are being planned now keep their plans in the old one
        return cls

    return add


def implementations() -> list[tuple[str, str | None]]:
    """Return (name, None or why it cannot run on this machine), highest priority first."""
    return [(e.name, e.impl.available()) for e in _ranked()]


def _ranked() -> list[_Entry]:
    implementations_registry.load()
    return _ranking


def choose(problem: Problem, impl: str) -> Any:
    """Return the implementation that runs the problem.

    Raises:
        ArgumentError: an unknown name, or an implementation that does not support the problem; the message names
            those that do.
    """
    if impl == "auto":
        for entry in _ranked():
            if entry.reason(problem) is None and entry.hesitation(problem) is None:
                return entry.impl
        reasons = "; ".join(f"{e.name}: {e.reason(problem)}" for e in _ranked())
        raise ArgumentError(f"attention: no implementation supports this ({reasons}).")
    if impl not in implementations_registry:
        names = ["auto", *implementations_registry.names()]
        raise ArgumentError(f"attention: unknown impl {shown(impl)}.{suggestion(shown(impl), names)}")
    entry = implementations_registry.get(impl)
    reason = entry.reason(problem)
    if reason is not None:
        able = [e.name for e in _ranked() if e.reason(problem) is None]
        raise ArgumentError(f"attention: impl={impl!r} {reason}. Those that can: {', '.join(able) or 'none'}.")
    return entry.impl


@dataclass(frozen=True)
class Explanation:
    """The choice of `impl="auto"` for a problem. `print` shows a table."""

    chosen: str
    rows: tuple[tuple[str, str | None, Cost | None], ...]

    def __str__(self) -> str:
        lines = [f"impl='auto' runs {self.chosen!r}"]
        for name, reason, cost in self.rows:
            if cost is None:
                note = f"cannot: {reason}"
            else:
                able = "can" if reason is None else f"can if named, {reason}"
                note = f"{able}: {cost.flops:.3g} flops forward, {cost.bytes / 2**20:.3g} MiB extra"
            lines.append(f"  {name:<10} {note}")
        return "\n".join(lines)


def explain_problem(problem: Problem) -> Explanation:
    """List every implementation with its cost, or the reason why it does not run."""
    rows = []
    for entry in _ranked():
        reason = entry.reason(problem)
        cost = None if reason else entry.impl.cost(problem)
        rows.append((entry.name, reason or entry.hesitation(problem), cost))
    chosen = next((name for name, reason, _ in rows if reason is None), "nothing")
    return Explanation(chosen, tuple(rows))
