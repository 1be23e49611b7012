"""Fast weights that are written by large chunks of tokens: the learning half of LaCT (Test-Time Training Done Right,
Zhang et al. 2025, arXiv:2505.23884; what the paper leaves open as in its released program).

Shapes: B batch, T tokens, H fast-weight heads, D channels of a head, F width of the inner layer, R streams, P tokens
of a chunk. Weights of a head: gate, up [F, D], down [D, F], without biases; f as in `fast_weight_mlp`.

After a chunk, with eta_t three rates of token t (one a matrix) and the loss -v_t^T f(k_t) of every token,

    g = sum_t eta_t d/dW v_t^T f(k_t),      s <- g + m s  (momentum, m the chunk's mean of m_t; else s = g)
    W <- W + s  (or the orthogonal factor of s, Muon),      then every row of W gets the norm it had at first

All tokens of a chunk read the weights as they were at its start. Each head learns alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..checks import ArgumentError, choice, flag, floating, instance, require, shape, tensor, token_mask
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
    flushed,
    hidden_where,
    run,
)
from .fast_weight_mlp import NAMES, SwiGLU, first_fields, three_matrices

CALL = "large_chunk_ttt"
STEPS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""Coefficients (a, b, c) of the five odd polynomials a x + b x^3 + c x^5 that `orthogonal` applies to singular values
(those of the released program): all that begin above 0.005 end between 0.97 and 1.12."""


class Optimizer(NamedTuple):
    """How a chunk's gradient becomes a step."""

    momentum: bool = False
    orthogonal: bool = False


OPTIMIZERS = {
    "sgd": Optimizer(),
    "momentum": Optimizer(momentum=True),
    "muon": Optimizer(orthogonal=True),
    "momentum-muon": Optimizer(momentum=True, orthogonal=True),
}
"""Name to optimiser: plain gradient, data-dependent momentum, Newton-Schulz of the gradient, and of the momentum."""


def as_optimizer(call: str, name: object) -> Optimizer:
    """The optimiser of that name.

    Raises:
        ArgumentError: there is none.
    """
    return OPTIMIZERS[choice(call, "optimizer", name, OPTIMIZERS)]


def orthogonal(x: Tensor) -> Tensor:
    """About U V^T of x = U S V^T [..., F, D], by five Newton-Schulz steps; 0 for 0."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in STEPS:
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


def row_norms(x: Tensor) -> Tensor:
    """Norms of the rows, [..., F, D] to [..., F, 1]."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def all_norms(weights: SwiGLU) -> Tensor:
    """Those of all three, one after another: [..., 2 F + D, 1]."""
    return torch.cat([row_norms(w) for w in weights], -2)


@dataclass(frozen=True, kw_only=True)
class LargeChunkState(ChunkState):
    """The fast weights of R sequences, their momentum, and the tokens that they were not yet taught.

    Attributes:
        gate, up, down: [R, H, F, D], [R, H, F, D], [R, H, D, F], float32 at least.
        gate_step, up_step, down_step: the last steps s, of those shapes; [R, H, 0, 0] without momentum.
        norms: of their rows at first, [R, H, 2 F + D, 1], those of gate, up and down after one another.
        gate_first, up_first, down_first: the weights at first, without R.
        key, value, rates, share, finite: of the tokens that wait, [R, P, H, D] twice, eta [R, P, H, 3] of gate, up and
            down, m [R, P, H], boolean [R, P].
    """

    MEMORY: ClassVar = {
        **{n: f"{n}_first" for n in NAMES},
        **{f"{n}_step": None for n in NAMES},
        "norms": "norms_first",
    }
    WAITING: ClassVar = ("key", "value", "rates", "share", "finite")

    gate: Tensor
    up: Tensor
    down: Tensor
    gate_step: Tensor
    up_step: Tensor
    down_step: Tensor
    norms: Tensor
    gate_first: Tensor
    up_first: Tensor
    down_first: Tensor
    key: Tensor
    value: Tensor
    rates: Tensor
    share: Tensor
    finite: Tensor

    @classmethod
    def start(cls, weights: SwiGLU, batch: int, momentum: bool) -> LargeChunkState:
        """`batch` rows before their first token; `weights` are [H, ...]."""
        like, (heads, _, dim) = weights.gate, weights.gate.shape
        named = dict(zip(NAMES, weights, strict=True))
        return cls(
            **{name: w.expand(batch, -1, -1, -1) for name, w in named.items()},
            **{
                f"{n}_step": like.new_zeros(batch, heads, *(w.shape[1:] if momentum else (0, 0)))
                for n, w in named.items()
            },
            norms=all_norms(weights).expand(batch, -1, -1, -1),
            **first_fields(weights),
            key=like.new_zeros(batch, 0, heads, dim),
            value=like.new_zeros(batch, 0, heads, dim),
            rates=like.new_zeros(batch, 0, heads, 3),
            share=like.new_zeros(batch, 0, heads),
            finite=torch.zeros(batch, 0, dtype=torch.bool, device=like.device),
            valid=torch.zeros(batch, 0, dtype=torch.bool, device=like.device),
            waits=(0,) * batch,
            writes=(0,) * batch,
            shared=False,
        )

    @property
    def network(self) -> SwiGLU:
        """The R H networks."""
        return SwiGLU(self.gate, self.up, self.down)

    @property
    def norms_first(self) -> Tensor:
        """`norms` of a sequence that begins."""
        return all_norms(SwiGLU(self.gate_first, self.up_first, self.down_first))


class LargeChunkRule(NamedTuple):
    """How the networks learn."""

    optimizer: Optimizer

    def write(self, state: LargeChunkState, following: Tensors, valid: Tensor) -> Tensors:
        """One step on what waits; a next token, `following`, has no part in it."""
        there = state.valid & state.finite
        key, value, rates, share = (
            hidden_where(~there, x).transpose(1, 2) for x in (state.key, state.value, state.rates, state.share)
        )
        found = dict(zip(NAMES, state.network.gradients(key, value, SwiGLU(*rates.split(1, -1))), strict=True))
        memory = {}
        if self.optimizer.momentum:
            mean = share.sum(2) / there.sum(1, keepdim=True).clamp_min(1)
            found = {n: g + mean[..., None, None] * getattr(state, f"{n}_step") for n, g in found.items()}
            memory = {f"{n}_step": step for n, step in found.items()}
        norms = state.norms.split([x.shape[-2] for x in state.network], -2)
        for (name, step), norm in zip(found.items(), norms, strict=True):
            new = getattr(state, name) + (orthogonal(step) if self.optimizer.orthogonal else step)
            memory[name] = new / (row_norms(new) + 1e-5) * norm
        return memory


def read(state: LargeChunkState, piece: Tensors) -> Tensor:
    """f(q) of the tokens of a round, [R, w, H D]."""
    return state.network(piece["query"].transpose(1, 2)).transpose(1, 2).flatten(2)


def large_chunk_ttt(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rates: Tensor,
    weights: SwiGLU | tuple[Tensor, Tensor, Tensor],
    *,
    share: Tensor | None = None,
    chunk_size: int = 512,
    optimizer: str = "momentum",
    state: LargeChunkState | None = None,
    mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    frozen: bool = False,
    meta_grad: bool | int = True,
) -> tuple[Tensor, LargeChunkState]:
    """Read a SwiGLU network of every sequence and head, and teach it keys and values, chunk by chunk.

    A chunk is read with the weights of its start. It is taught when the next token arrives, every complete chunk is,
    the last one too, and a partial chunk waits in the state: so the answer does not depend on how a stream is cut into
    calls. (The released program never teaches the last chunk of a call, and leaves no state.)

    Args:
        query, key, value: [B, T, H, D].
        rates: eta >= 0, [B, T, H, 3] of gate, up and down.
        weights: gate [H, F, D], up [H, F, D], down [H, D, F], with which every sequence or document begins that begins
            in this call.
        share: m_t of the momentum, [B, T, H]; needed by optimisers with momentum alone.
        chunk_size: tokens between two writes, >= 1; it may change from call to call.
        optimizer: a name in `OPTIMIZERS`.
        state: what an earlier call left; None at the beginning.
        mask: boolean [B, T], true where a token is real. Others read 0, teach nothing and do not count: the answer is
            as if they were not there. A token that is not finite reads 0 and teaches nothing either, but keeps its
            place in its chunk.
        segment_ids: integers [B or 1, T]: a change begins a new document, with the first weights. The first document
            of a row goes on from `state`, the last one leaves it.
        frozen: read only; the state given comes back.
        meta_grad: gradients flow through all writes (True), none (False), or are cut after every m-th.

    Returns:
        (what was read [B, T, H, D] in the dtype of `query`, the state after).

    Raises:
        ArgumentError: shapes, dtypes or numbers that do not fit; a state of another shape.

    Precision: float32 (float64 for float64). Cost: 18 H D F multiplications a token, and for Muon some 30 H F D^2 a
    chunk; in training the weights of every chunk are kept.
    """
    rule = LargeChunkRule(as_optimizer(CALL, optimizer))
    flag(CALL, "frozen", frozen)
    floating(CALL, "query", query)
    new = {"query": query, "key": key, "value": value, "rates": rates}
    new["share"] = query[..., :0].sum(-1) if share is None else share
    mask, start = _check(new, weights, mask, segment_ids, rule.optimizer.momentum and share is None)
    detach_every = check_meta_grad(CALL, meta_grad)
    chunk_size = check_chunk(CALL, chunk_size, 1)
    (batch, tokens, heads, dim), dtype = query.shape, start.gate.dtype
    empty = LargeChunkState.start(start, batch, rule.optimizer.momentum)
    if state is not None:
        _check_state(state, empty)
    streams = Streams.of(mask, segment_ids, False)
    with full_precision(query.device.type):
        new, finite = finite_tokens({name: x.to(dtype) for name, x in new.items()})
        new = {name: streams.cut(x) for name, x in {**new, "finite": finite}.items()}
        if state is None:
            now = LargeChunkState.start(start, len(streams.valid), rule.optimizer.momentum)
        else:
            now = streams.begin(state, first_fields(start))
        if frozen:
            out, after = read(now, new), empty if state is None else state
        else:
            out, now = run(now, new, streams, chunk_size, read=read, write=rule.write, detach_every=detach_every)
            after = replace(streams.end(now), tokens=(0 if state is None else state.tokens) + tokens)
    out = hidden_where(~finite, streams.join(out, batch, tokens))
    return out.unflatten(-1, (heads, dim)).to(query.dtype), after


def flush(state: LargeChunkState, *, optimizer: str = "momentum") -> LargeChunkState:
    """The state after what waits was taught; then nothing waits."""
    call = f"{CALL}.flush"
    instance(call, "state", state, LargeChunkState, "a LargeChunkState")
    return flushed(state, LargeChunkRule(as_optimizer(call, optimizer)).write)


def _check(new: Tensors, weights: Any, mask: Any, segment_ids: Any, lacking: bool) -> tuple[Tensor, SwiGLU]:
    """Which tokens are real, boolean [B, T], and the first weights in the computing dtype."""
    query = new["query"]
    require(not lacking, CALL, "this optimizer has momentum, which needs share [B, T, H]; give it, or optimizer='sgd'.")
    fits = query.dim() == 4 and 0 not in query.shape[1:]
    require(fits, CALL, f"query has shape {shape(query)}, expected [B, T, H, D] with T >= 1.")
    check_held(CALL, "query", query)
    batch, tokens, heads, dim = query.shape
    sizes = {"key": query.shape, "value": query.shape, "rates": (*query.shape[:3], 3), "share": query.shape[:3]}
    for name, size in sizes.items():
        tensor(CALL, name, new[name], like=query)
        if new[name].shape != size:
            given = f"{list(size)} for query {shape(query)}"
            raise ArgumentError(f"{CALL}: {name} has shape {shape(new[name])}, expected {given}.")
    token_mask(CALL, "mask", mask, batch, tokens, like=query)
    if mask is None:
        mask = torch.ones(batch, tokens, dtype=torch.bool, device=query.device)
    check_segments(CALL, segment_ids, batch, tokens, False, query.device)
    dtype = torch.promote_types(query.dtype, torch.float32)
    network = three_matrices(CALL, weights, query)
    inner = network.gate.shape[-2]
    expected = ((heads, inner, dim), (heads, inner, dim), (heads, dim, inner))
    for name, w, wanted in zip(NAMES, network, expected, strict=True):
        if w.shape != wanted:
            given = f"{list(wanted)} for query {shape(query)}"
            raise ArgumentError(f"{CALL}: weights {name} are {shape(w)}, expected {given}.")
    return mask, SwiGLU(*(w.to(dtype) for w in network))


def _check_state(state: Any, empty: LargeChunkState) -> None:
    """`state` is one for these tensors, as `empty` is."""
    if not isinstance(state, LargeChunkState):
        raise ArgumentError(f"{CALL}: state is a {type(state).__name__}, expected a LargeChunkState or None.")
    sizes = {name: tuple(x.shape[1:]) for name, x in empty.memory.items()}
    sizes |= {name: tuple(x.shape[2:]) for name, x in empty.waiting.items() if name != "finite"}
    state.fit(CALL, LargeChunkState, sizes, empty.gate)
