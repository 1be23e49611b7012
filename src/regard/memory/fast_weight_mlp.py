"""SwiGLU networks as fast weights: gradients in closed form, their state, and the memory FwMLP.

Shapes: B batch, T tokens, M memories (B, or 1 when the batch shares one), P tokens of one chunk in one memory, Din, F,
Dv widths of input, inner layer and output. gate and up are [M, F, Din (+1)], down [M, Dv, F (+1)], with one more
column if there are biases.

    f(x) = W_down (silu(a) * u),    a = W_gate x,  u = W_up x,    with biases: x, and the inner layer, have a last 1

For an error e = dL/df, with s = sigmoid(a) and d = (W_down^T e) without the bias,

    dL/dW_down = e (silu(a) * u)^T,   dL/dW_up = (d * silu(a)) x^T,   dL/dW_gate = (d * u * (s + silu(a) (1 - s))) x^T

FwMLP (Fast-weight Product Key Memory, arXiv:2601.00671, appendix A, completed from the released program): after a
chunk, every matrix takes one gradient step of size eta = 0.1 on the mean of (f(q_t) - y_t)^2 over the chunk's pairs and
the Dv features, y_t = (v_t + v_{t+1}) / 2. The loss has neither a factor 1/2 nor a gate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import silu

from ..checks import ArgumentError, choice, flag, instance, number, refuse, require, shape, tensor
from ..precision import full_precision, transformed
from ..recurrent.states import require_state
from .stream import ChunkMemory, Streams, StreamState, check_chunk, check_meta_grad, check_tokens, flushed, follow
from .token_fields import Tensors, Waiting, finite_tokens, hidden_where, joined, marked, taken

CALL = "fast_weight_mlp"
NAMES = ("gate", "up", "down")
TARGETS = {"mean": lambda value, following: (value + following) / 2, "look-ahead": lambda _, following: following}
"""The target of f(q_t) by name, as a function of the token's own value and the next one's."""


class SwiGLU(NamedTuple):
    """The matrices of M networks, [M, ...] or, for heads, [M, H, ...]; biases are last columns."""

    gate: Tensor
    up: Tensor
    down: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Return f(x) [..., P, Dv] for x [..., P, Din]."""
        x = widened(x, self.gate)
        inner = silu(x @ self.gate.mT) * (x @ self.up.mT)
        return widened(inner, self.down) @ self.down.mT

    def gradients(self, x: Tensor, error: Tensor | Callable[[Tensor], Tensor], rates: SwiGLU | None = None) -> SwiGLU:
        """Return the gradients of the matrices, given dL/df(x_t) as `error` [M, P, Dv] or as a function of f(x). Each
        matrix weights token t by its rates_t [M, P, 1]."""
        x = widened(x, self.gate)
        a, u = x @ self.gate.mT, x @ self.up.mT
        s = a.sigmoid()
        act = a * s
        inner = widened(act * u, self.down)
        if not isinstance(error, Tensor):
            error = error(inner @ self.down.mT)
        back = error @ self.down[..., : a.shape[-1]]
        by_up, by_gate = back * act, back * u * (s + act * (1 - s))
        if rates is not None:
            by_gate, by_up, error = by_gate * rates.gate, by_up * rates.up, error * rates.down
        return SwiGLU(by_gate.mT @ x, by_up.mT @ x, error.mT @ inner)


def widened(x: Tensor, matrix: Tensor) -> Tensor:
    """Append a 1 to x [..., D] if the matrix has a column for a bias."""
    return x if matrix.shape[-1] == x.shape[-1] else torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1)


N = TypeVar("N", bound="NetworkState")


@dataclass(frozen=True, kw_only=True)
class NetworkState(StreamState):
    """The state of a memory whose fast weights are SwiGLU networks [M, ...].

    Attributes:
        gate, up, down: the weights of the M networks, in float32 or float64.
        gate_first, up_first, down_first: their first values, without M.
    """

    MEMORY: ClassVar = {name: f"{name}_first" for name in NAMES}
    WAITING: ClassVar[tuple[str, ...]] = ()  # fields of the waiting tokens

    gate: Tensor
    up: Tensor
    down: Tensor
    gate_first: Tensor
    up_first: Tensor
    down_first: Tensor

    @property
    def network(self) -> SwiGLU:
        return SwiGLU(self.gate, self.up, self.down)

    def to_tensors(self) -> Tensors:
        none = self.gate.new_zeros(len(self.writes), 0)
        held = dict.fromkeys(self.WAITING, none) | {"good": none.bool()}
        held |= marked(self.waiting.tokens()) if self.waiting.pieces else {}
        held["valid"] = held["finite"] = held.pop("good")
        plain = {name: torch.tensor(getattr(self, name)) for name in ("waits", "writes", "shared")}
        return {**super().to_tensors(), **{name: x.contiguous() for name, x in held.items()}, **plain}

    @classmethod
    def from_tensors(cls: type[N], tensors: Mapping[str, Tensor]) -> N:
        """Return the state that `to_tensors` wrote. Raise ArgumentError for a missing or unknown tensor."""
        fast = {f.name for f in fields(cls)} - {"waiting"}
        known = fast | {*cls.WAITING, "valid", "finite", "waits"}
        text = f"got {', '.join(sorted(tensors)) or 'nothing'}, expected {', '.join(sorted(known))}."
        require(set(tensors) == known, f"{cls.__name__}.from_tensors", text)
        counts, writes = (tuple(int(n) for n in tensors[name]) for name in ("waits", "writes"))
        good = tensors["valid"].bool() & tensors["finite"].bool()
        piece = {**{name: tensors[name] for name in cls.WAITING}, "good": good}
        values: dict[str, Any] = {name: tensors[name] for name in fast}
        values |= {"writes": writes, "shared": bool(tensors["shared"]), "tokens": int(tensors["tokens"])}
        return cls(**values, waiting=Waiting((piece,) if any(counts) else (), counts))


@dataclass(frozen=True, kw_only=True)
class FastMLPState(NetworkState):
    """The weights of M networks, and the tokens that they have not yet learned from.

    Attributes:
        gate, up, down: [M, F, Din + 1], [M, F, Din + 1], [M, Dv, F + 1].
        waiting: tokens with fields query [B, P, Din] and value [B, P, Dv].
    """

    WAITING: ClassVar = ("query", "value")


def fit(call: str, state: Any, empty: NetworkState, rows: int, sizes: dict[str, tuple[int, ...]]) -> None:
    """Check that `state` has the kind and sizes of `empty`, `rows` rows, and waiting tokens of `sizes`."""
    kind = type(empty)
    instance(call, "state", state, kind, f"None or the {kind.__name__} of an earlier call")
    require(state.shared == empty.shared, call, f"state has shared={state.shared}, but this call {empty.shared}.")
    waiting = state.waiting.tokens()
    held = next((len(x) for x in waiting.values()), rows if state.shared else len(state.writes))
    fits = held == rows and len(state.waits) == len(state.writes) == len(empty.writes)
    problem = f"state has {held} rows{' that share a memory' * state.shared}, but the input has {rows}"
    require(fits, call, f"{problem}; select or repeat its rows, or begin with state=None.")
    require_state(call, state, kind, {name: tuple(x.shape) for name, x in empty.memory.items()}, empty.gate)
    for name, size in sizes.items() if waiting else ():
        if waiting[name].shape[2:] != size:
            why = f"these tensors need [..., {', '.join(map(str, size))}]; give each layer its own state"
            raise ArgumentError(f"{call}: state holds {name} {shape(waiting[name])}, but {why}.")


class NetworkMemory(ChunkMemory):
    """The base of memories whose fast weights are SwiGLU networks."""

    shared: bool
    start: Callable[[SwiGLU, int], Any]

    def run(
        self, call: str, new: Tensors, weights: SwiGLU, state: N | None, where: tuple[Any, Any], frozen: bool
    ) -> tuple[Tensor, N]:
        """Return what the tokens `new` read, in the dtype of their queries, and the state after them, after checking
        `frozen` and `where`, the mask and the segment ids."""
        query = new["query"]
        flag(call, "frozen", frozen)
        check_tokens(call, query, *where, self.shared)
        empty = self.start(weights, len(query))
        if state is not None:
            fit(call, state, empty, len(query), {name: new[name].shape[2:] for name in empty.WAITING})
        streams = Streams.of(query, *where, self.shared)
        with full_precision(query.device.type):
            new = finite_tokens({name: x.to(weights.gate.dtype) for name, x in new.items()})
            if state is None:
                state, begun = empty, self.start(weights, len(streams.counts))
            else:
                begun = streams.begin(state, first_fields(weights))
            out, after = follow(self, state, begun, new, streams, frozen)
        return (hidden_where(~new["good"], out) if "good" in new else out).to(query.dtype), after


def first_fields(weights: SwiGLU) -> Tensors:
    return {f"{name}_first": w for name, w in zip(NAMES, weights, strict=True)}


@dataclass(frozen=True)
class FastMLPMemory(NetworkMemory):
    """How a SwiGLU network is read and written: the settings of `fast_weight_mlp`.

    Args:
        chunk_size: tokens between two writes, >= 2; it may change from call to call.
        learning_rate: eta >= 0.
        target: "mean", (v_t + v_{t+1}) / 2, or "look-ahead", v_{t+1}.
        shared: one network for the whole batch; a chunk counts the columns in which any row has a token. Otherwise each
            sequence has its own.
        meta_grad: gradients flow through all writes (True), none (False), or are cut after every m-th.

    Raises:
        ArgumentError: numbers out of range, or an unknown target.
    """

    chunk_size: int = 512
    learning_rate: float = 0.1
    target: str = "mean"
    shared: bool = False
    meta_grad: bool | int = True

    def __post_init__(self) -> None:
        call = "FastMLPMemory"
        flag(call, "shared", self.shared)
        number(call, "learning_rate", self.learning_rate, low=0.0)
        choice(call, "target", self.target, TARGETS)
        check_meta_grad(call, self.meta_grad)
        object.__setattr__(self, "chunk_size", check_chunk(call, self.chunk_size, 2))

    def start(self, weights: SwiGLU, batch: int) -> FastMLPState:
        """Return the state of `batch` rows before their first token; `weights` are without M."""
        memories = 1 if self.shared else batch
        fast = {name: w.expand(memories, -1, -1) for name, w in zip(NAMES, weights, strict=True)}
        none = (0,) * memories
        return FastMLPState(**fast, **first_fields(weights), waiting=Waiting((), none), writes=none, shared=self.shared)

    def read(self, state: FastMLPState, tokens: Tensors, keep: bool) -> tuple[Tensor, Tensors]:
        """Return f(q) of the tokens, [B, w, Dv], and the tokens."""
        query = tokens["query"]
        out = state.network(folded(query, len(state.writes)))
        return out.reshape(*query.shape[:2], out.shape[-1]), tokens

    def write(self, state: FastMLPState, tokens: Tensors, following: Tensors | None) -> Tensors:
        """Take one step. Targets come from the next good token of a row; a token without one is not learned from."""
        tokens = marked(tokens)
        following = {n: torch.zeros_like(x[:, :1]) for n, x in tokens.items()} if following is None else following
        tokens = joined((tokens, following))
        if transformed() or not tokens["good"].all():  # move the good tokens of every row to its left, in their order
            tokens = taken(tokens, torch.argsort(~tokens["good"], dim=1, stable=True))
        there = tokens["good"]
        pairs = (there[:, :-1] & there[:, 1:])[..., None]
        query, before, after = tokens["query"][:, :-1], tokens["value"][:, :-1], tokens["value"][:, 1:]
        memories = len(state.writes)
        query, wanted, pairs = (folded(x, memories) for x in (query, TARGETS[self.target](before, after), pairs))
        share = 2 / (pairs.sum(1, keepdim=True).clamp_min(1) * wanted.shape[-1]).to(wanted.dtype)
        steps = state.network.gradients(query, lambda output: torch.where(pairs, share * (output - wanted), 0))
        return {n: w - self.learning_rate * g for n, w, g in zip(NAMES, state.network, steps, strict=True)}


def folded(x: Tensor, memories: int) -> Tensor:
    """Reshape [B, P, ...] to [M, B P / M, ...], so that rows that share a memory are adjacent."""
    return x.reshape(memories, len(x) // max(memories, 1) * x.shape[1], *x.shape[2:])


def fast_weight_mlp(
    query: Tensor,
    value: Tensor,
    weights: SwiGLU | tuple[Tensor, Tensor, Tensor],
    memory: FastMLPMemory | None = None,
    *,
    state: FastMLPState | None = None,
    mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    frozen: bool = False,
    **options: Any,
) -> tuple[Tensor, FastMLPState]:
    """Read a SwiGLU network at every query, and train it on the values of the tokens, chunk by chunk.

    `memory.stream` describes when chunks are read and written.

    Args:
        query, value: [B, T, Din] and [B, T, Dv].
        weights: gate [F, Din + 1], up [F, Din + 1], down [Dv, F + 1], biases last: the first weights of
            every sequence or document that begins in this call.
        memory: how the network is read and written; None for the defaults.
        state, mask, segment_ids, frozen: as in `fast_weight_memory`. A token that is not finite reads 0 and is not
            learned from, but keeps its place in its chunk; the token before it is paired with the one after it.
        options: changes to `memory`, by the names of `FastMLPMemory`, such as chunk_size=64 or target="look-ahead".

    Returns:
        (what was read [B, T, Dv] in the dtype of `query`, the state after the call).

    Raises:
        ArgumentError: shapes, dtypes or numbers that do not fit; a state of another shape.

    Precision: float32 (float64 for float64). Cost: about 6 F (Din + Dv) multiplications per token to read, twice that
    to write; with gradients, a copy of the three matrices is kept for each memory and chunk.
    """
    memory = FastMLPMemory.of(CALL, memory, options)
    tensor(CALL, "query", query, "B", "T", "Din")
    tensor(CALL, "value", value, *query.shape[:2], "Dv", like=query, why=", with the B and T of query")
    if 0 in query.shape[1:] or 0 in value.shape[1:]:  # torch.compile cannot trace the text of a symbolic length
        given = f"query {shape(query)} and value {shape(value)}"
        raise ArgumentError(f"{CALL}: got {given}, expected [B, T, Din] and [B, T, Dv] with T >= 1.")
    first = first_network(CALL, weights, query, (query.shape[2], value.shape[2]), 1)
    return memory.run(CALL, {"query": query, "value": value}, first, state, (mask, segment_ids), frozen)


def flush(state: FastMLPState, memory: FastMLPMemory | None = None, **options: Any) -> FastMLPState:
    """Write all waiting tokens whose targets have arrived, and return the new state, which has no waiting tokens.

    `memory` and `options` are those of `fast_weight_mlp`; learning_rate and target are used.
    """
    call = f"{CALL}.flush"
    instance(call, "state", state, FastMLPState, "a FastMLPState")
    return flushed(FastMLPMemory.of(call, memory, options), state)


def first_network(call: str, weights: Any, query: Tensor, sizes: tuple[int, ...], biases: int) -> SwiGLU:
    """Return the first weights in the dtype of the computation, checked to fit the heads (if any), Din and Dv."""
    if not isinstance(weights, (tuple, list)) or len(weights) != 3:
        raise refuse(call, "weights", weights, f"three tensors: {', '.join(NAMES)}")
    for name, w in zip(NAMES, weights, strict=True):
        tensor(call, f"weights {name}", w, like=query)
        if w.dim() < 2:  # torch.compile cannot trace the text of a symbolic length
            raise ArgumentError(f"{call}: weights {name} have shape {shape(w)}, expected a matrix.")
    *heads, inputs, outputs = sizes
    wide = weights[0].shape[-2]
    into, back = [*heads, wide, inputs + biases], [*heads, outputs, wide + biases]
    for name, w, size in zip(NAMES, weights, (into, into, back), strict=True):
        if list(w.shape) != size:
            given = f"for query {shape(query)} and value of width {outputs}{', biases last' if biases else ''}"
            raise ArgumentError(f"{call}: weights {name} are {shape(w)}, expected {size} {given}.")
    return SwiGLU(*(w.to(torch.promote_types(query.dtype, torch.float32)) for w in weights))
