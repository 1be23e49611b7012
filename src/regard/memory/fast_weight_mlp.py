"""A SwiGLU network whose weights are written while it reads: its gradients in closed form, and the memory FwMLP.

Shapes: B batch, T tokens, M memories (B, or 1 when the batch shares one), P tokens of one chunk in one memory, Din, F,
Dv widths of input, inner layer and output, with one more column where there are biases: gate and up [M, F, Din (+1)],
down [M, Dv, F (+1)].

    f(x) = W_down (silu(a) * u),    a = W_gate x,  u = W_up x,    with biases: x, and the inner layer, have a last 1

For an error e = dL/df, with s = sigmoid(a) and d = (W_down^T e) without the bias,

    dL/dW_down = e (silu(a) * u)^T,   dL/dW_up = (d * silu(a)) x^T,   dL/dW_gate = (d * u * (s + silu(a) (1 - s))) x^T

FwMLP (Fast-weight Product Key Memory, arXiv:2601.00671, appendix A; where it is silent, the released program): after a
chunk every matrix goes one step, of size eta = 0.1, down the mean over the chunk's pairs and the Dv features of
(f(q_t) - y_t)^2, y_t = (v_t + v_{t+1}) / 2. There is neither a factor 1/2 nor a gate in the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from ..checks import (
    ArgumentError,
    choice,
    flags,
    floating,
    instance,
    number,
    refuse,
    require,
    shape,
    tensor,
    token_mask,
)
from ..precision import full_precision
from .chunk_stream import (
    ChunkState,
    Streams,
    Tensors,
    check_chunk,
    check_held,
    check_meta_grad,
    check_segments,
    finite_tokens,
    first_in_rows,
    flushed,
    hidden_where,
    run,
    with_next,
)

CALL = "fast_weight_mlp"
NAMES = ("gate", "up", "down")
TARGETS = {
    "mean": lambda own, following: (own + following) / 2,
    "look-ahead": lambda own, following: following,
}
"""Name to what f(q_t) is to be, of the token's own value and the next one's."""


class SwiGLU(NamedTuple):
    """The matrices of M networks [M, ...] (or [M, H, ...], of heads), biases as last columns where there are any."""

    gate: Tensor
    up: Tensor
    down: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """[..., P, Din] to [..., P, Dv]."""
        x = widened(x, self.gate)
        inner = silu(x @ self.gate.mT) * (x @ self.up.mT)
        return widened(inner, self.down) @ self.down.mT

    def gradients(self, x: Tensor, error: Tensor | Callable[[Tensor], Tensor], rates: SwiGLU | None = None) -> SwiGLU:
        """Of a loss whose derivative by f(x_t) is `error` [M, P, Dv], or that of f(x); of a matrix, token t counts
        rates_t [M, P, 1] times."""
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
    """x [..., D], with a last 1 where the matrix has a column for a bias."""
    return x if matrix.shape[-1] == x.shape[-1] else torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1)


@dataclass(frozen=True, kw_only=True)
class FastMLPState(ChunkState):
    """The weights of M networks, and the tokens that they were not yet taught.

    Attributes:
        gate, up, down: [M, F, Din + 1], [M, F, Din + 1], [M, Dv, F + 1], float32 at least.
        gate_first, up_first, down_first: what they were at first, without M.
        query, value, finite: [B, P, Din], [B, P, Dv], boolean [B, P], of the tokens that wait.
    """

    MEMORY: ClassVar = {name: f"{name}_first" for name in NAMES}
    WAITING: ClassVar = ("query", "value", "finite")

    gate: Tensor
    up: Tensor
    down: Tensor
    gate_first: Tensor
    up_first: Tensor
    down_first: Tensor
    query: Tensor
    value: Tensor
    finite: Tensor

    @property
    def network(self) -> SwiGLU:
        """The M networks."""
        return SwiGLU(self.gate, self.up, self.down)

    @classmethod
    def start(cls, weights: SwiGLU, batch: int, value_dim: int, shared: bool) -> FastMLPState:
        """`batch` rows before their first token; `weights` are without M."""
        memories = 1 if shared else batch
        like = weights.gate
        return cls(
            **{name: w.expand(memories, -1, -1) for name, w in zip(NAMES, weights, strict=True)},
            **first_fields(weights),
            query=like.new_zeros(batch, 0, like.shape[-1] - 1),
            value=like.new_zeros(batch, 0, value_dim),
            finite=torch.zeros(batch, 0, dtype=torch.bool, device=like.device),
            valid=torch.zeros(batch, 0, dtype=torch.bool, device=like.device),
            waits=(0,) * memories,
            writes=(0,) * memories,
            shared=shared,
        )


def first_fields(weights: SwiGLU) -> Tensors:
    """The fields of a state that hold the first weights."""
    return {f"{name}_first": w for name, w in zip(NAMES, weights, strict=True)}


class FastMLPRule(NamedTuple):
    """How the networks learn: the size of the step, and the target, a name in `TARGETS`."""

    learning_rate: float = 0.1
    target: str = "mean"

    def check(self, call: str) -> FastMLPRule:
        """The rule itself.

        Raises:
            ArgumentError: a negative rate, or an unknown target.
        """
        number(call, "learning_rate", self.learning_rate, low=0.0)
        choice(call, "target", self.target, TARGETS)
        return self

    def write(self, state: FastMLPState, following: Tensors, valid: Tensor) -> Tensors:
        """One step on what waits. A token is taught with the next one of its row that is there and finite, in its
        chunk or just after; the last one, where there is none, teaches nothing."""
        tokens, there = with_next(state, following, valid)
        tokens, there = first_in_rows(tokens, there & tokens["finite"])
        pairs = (there[:, :-1] & there[:, 1:])[..., None]
        query, own, after = tokens["query"][:, :-1], tokens["value"][:, :-1], tokens["value"][:, 1:]
        memories = len(state.writes)
        query, wanted, pairs = (folded(x, memories) for x in (query, TARGETS[self.target](own, after), pairs))
        share = 2 / (pairs.sum(1, keepdim=True).clamp_min(1) * wanted.shape[-1]).to(wanted.dtype)
        steps = state.network.gradients(query, lambda found: torch.where(pairs, share * (found - wanted), 0))
        return {n: w - self.learning_rate * g for n, w, g in zip(NAMES, state.network, steps, strict=True)}


def folded(x: Tensor, memories: int) -> Tensor:
    """[B, P, ...] to [M, B P / M, ...]: the rows that share a memory side by side."""
    return x.reshape(memories, len(x) // max(memories, 1) * x.shape[1], *x.shape[2:])


def read(state: FastMLPState, piece: Mapping[str, Tensor]) -> Tensor:
    """f(q) of the tokens of a round, [B, w, Dv]."""
    query = piece["query"]
    found = state.network(folded(query, len(state.writes)))
    return found.reshape(*query.shape[:2], found.shape[-1])


def fast_weight_mlp(
    query: Tensor,
    value: Tensor,
    weights: SwiGLU | tuple[Tensor, Tensor, Tensor],
    *,
    chunk_size: int = 512,
    learning_rate: float = 0.1,
    target: str = "mean",
    shared: bool = False,
    state: FastMLPState | None = None,
    mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    frozen: bool = False,
    meta_grad: bool | int = True,
) -> tuple[Tensor, FastMLPState]:
    """Read a SwiGLU network at every query, and teach it the values of the tokens, chunk by chunk.

    All tokens of a chunk read the network as it was at the chunk's start. A full chunk is taught when the next token
    arrives, before that token reads, since it is the target of the chunk's last pair: so the answer does not depend on
    how a stream is cut into calls, and no token is learned before it is there.

    Args:
        query: [B, T, Din].
        value: [B, T, Dv].
        weights: gate [F, Din + 1], up [F, Din + 1], down [Dv, F + 1], biases last, with which every sequence or
            document begins that begins in this call.
        chunk_size: tokens between two writes, >= 2; it may change from call to call.
        learning_rate: eta >= 0.
        target: "mean", (v_t + v_{t+1}) / 2, or "look-ahead", v_{t+1}.
        shared: one network for the whole batch, whose clock counts columns in which any row has a token. Otherwise a
            network per sequence.
        state: what an earlier call left; None at the beginning.
        mask: boolean [B, T], true where a token is real. Others read 0, teach nothing and do not count: the answer is
            as if they were not there. A token that is not finite reads 0 and teaches nothing either, but keeps its
            place in its chunk; the one before it is taught with the one after it.
        segment_ids: integers [B or 1, T]: a change begins a new document, with a network as at first. The first
            document of a row goes on from `state`, the last one leaves it.
        frozen: read only; the state given comes back.
        meta_grad: True: gradients flow through all writes; False: through none, so that a chunk's outputs depend on no
            earlier chunk; m: through at most m - 1 writes, being cut after every m-th.

    Returns:
        (what was read [B, T, Dv] in the dtype of `query`, the state after).

    Raises:
        ArgumentError: shapes, dtypes or numbers that do not fit; a state of another shape.

    Precision: float32 (float64 for float64). Cost: 6 F (Din + Dv) or so multiplications a token to read, twice that to
    write; with gradients a copy of the three matrices for each memory and chunk is kept.
    """
    flags(CALL, shared=shared, frozen=frozen)
    rule = FastMLPRule(learning_rate, target).check(CALL)
    mask, start = _check(query, value, weights, mask, segment_ids, shared)
    detach_every = check_meta_grad(CALL, meta_grad)
    chunk_size = check_chunk(CALL, chunk_size, 2)
    (batch, tokens), dtype = query.shape[:2], start.gate.dtype
    sizes = {name: tuple(w.shape) for name, w in zip(NAMES, start, strict=True)}
    if state is not None:
        _check_state(state, sizes, query, value, dtype, shared)
    streams = Streams.of(mask, segment_ids, shared)
    with full_precision(query.device.type):
        new, finite = finite_tokens({"query": query.to(dtype), "value": value.to(dtype)})
        new = {name: streams.cut(x) for name, x in {**new, "finite": finite}.items()}
        now = FastMLPState.start(start, len(streams.valid), value.shape[2], shared) if state is None else state
        now = now if state is None else streams.begin(state, first_fields(start))
        if frozen:
            after, out = state, read(now, new)
            after = FastMLPState.start(start, batch, value.shape[2], shared) if after is None else after
        else:
            out, now = run(now, new, streams, chunk_size, read=read, write=rule.write, detach_every=detach_every)
            after = replace(streams.end(now), tokens=(0 if state is None else state.tokens) + tokens)
    return hidden_where(~finite, streams.join(out, batch, tokens)).to(query.dtype), after


def flush(state: FastMLPState, *, learning_rate: float = 0.1, target: str = "mean") -> FastMLPState:
    """The state after what waits was taught, as far as its targets are there; then nothing waits."""
    call = f"{CALL}.flush"
    instance(call, "state", state, FastMLPState, "a FastMLPState")
    return flushed(state, FastMLPRule(learning_rate, target).check(call).write)


def _check(query: Any, value: Any, weights: Any, mask: Any, segment_ids: Any, shared: bool) -> tuple[Tensor, SwiGLU]:
    """Which tokens are real, boolean [B, T], and the first weights in the computing dtype."""
    for name, x in (("query", query), ("value", value)):
        floating(CALL, name, x)
        tensor(CALL, name, x, like=query)
        if x.dim() != 3 or 0 in x.shape[1:] or x.shape[:2] != query.shape[:2]:
            raise ArgumentError(
                f"{CALL}: {name} has shape {shape(x)}, expected query [B, T, Din] and value [B, T, Dv] with T >= 1."
            )
    check_held(CALL, "query", query)
    batch, tokens, _ = query.shape
    token_mask(CALL, "mask", mask, batch, tokens, like=query)
    if mask is None:
        mask = torch.ones(batch, tokens, dtype=torch.bool, device=query.device)
    check_segments(CALL, segment_ids, batch, tokens, shared, query.device)
    gate, up, down = three_matrices(CALL, weights, query)
    wide = gate.shape[0]
    for name, w, size in (
        ("gate", gate, (wide, query.shape[2] + 1)),
        ("up", up, (wide, query.shape[2] + 1)),
        ("down", down, (value.shape[2], wide + 1)),
    ):
        if w.shape != size:
            given = f"for query {shape(query)} and value {shape(value)}, biases last"
            raise ArgumentError(f"{CALL}: weights {name} are {shape(w)}, expected {list(size)} {given}.")
    dtype = torch.promote_types(query.dtype, torch.float32)
    return mask, SwiGLU(gate.to(dtype), up.to(dtype), down.to(dtype))


def three_matrices(call: str, weights: Any, query: Tensor) -> SwiGLU:
    """Return `weights` as a network, after checking that they are three floating-point tensors beside `query`."""
    if not isinstance(weights, (tuple, list)) or len(weights) != 3:
        raise refuse(call, "weights", weights, f"three tensors: {', '.join(NAMES)}")
    for name, w in zip(NAMES, weights, strict=True):
        tensor(call, f"weights {name}", w, like=query)
        require(w.dim() >= 2, call, f"weights {name} have shape {shape(w)}, expected a matrix.")
    return SwiGLU(*weights)


def _check_state(
    state: Any, sizes: dict[str, tuple[int, ...]], query: Tensor, value: Tensor, dtype: torch.dtype, shared: bool
) -> None:
    """`state` is one for these tensors."""
    if not isinstance(state, FastMLPState):
        raise ArgumentError(f"{CALL}: state is a {type(state).__name__}, expected a FastMLPState or None.")
    require(state.shared == shared, CALL, f"state has shared={state.shared}, but this call shared={shared}.")
    like = query.new_empty(query.shape[0], 0, dtype=dtype)
    state.fit(CALL, FastMLPState, {**sizes, "query": query.shape[2:], "value": value.shape[2:]}, like)
