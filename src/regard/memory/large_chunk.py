"""Fast weights that are written by large chunks of tokens: the recurrent half of LaCT (Test-Time Training Done Right,
Zhang et al. 2025, arXiv:2505.23884, completed from its released program).

Shapes: B batch, T tokens, H fast-weight heads, D channels of a head, F width of the inner layer, R streams, P tokens
of a chunk. Weights of a head: gate, up [F, D], down [D, F], without biases; f as in `fast_weight_mlp`.

After a chunk, with three rates eta_t for token t (one per matrix) and the loss -v_t^T f(k_t) of every token,

    g = sum_t eta_t d/dW v_t^T f(k_t),      s <- g + m s  (momentum, m the chunk's mean of m_t; else s = g)
    W <- W + s  (or the orthogonal factor of s, Muon),      then every row of W is scaled to its first norm

A chunk without a finite token changes neither W nor s. Each head learns alone. `memory.stream` describes when chunks
are read and written."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..checks import ArgumentError, choice, instance, require, shape, tensor
from .fast_weight_mlp import NAMES, NetworkMemory, NetworkState, SwiGLU, first_fields, first_network
from .stream import check_chunk, check_meta_grad, flushed
from .token_fields import Tensors, Waiting, blend, hidden_where, marked

CALL = "large_chunk_ttt"
STEPS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""Coefficients (a, b, c) of the five odd polynomials a x + b x^3 + c x^5 that `orthogonal` applies to singular values
(those of the released program). Values above 0.005 end between 0.97 and 1.12."""


OPTIMIZERS = ("sgd", "momentum", "muon", "momentum-muon")
"""Plain gradient, data-dependent momentum, Newton-Schulz of the gradient, and of the momentum."""


def orthogonal(x: Tensor) -> Tensor:
    """Return approximately U V^T for x = U S V^T [..., F, D], by five Newton-Schulz steps; 0 for 0."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    none = (x.detach() == 0).all((-2, -1), keepdim=True)  # the norm of zeros has no second derivative
    size = torch.linalg.vector_norm(x.masked_fill(none, 1), dim=(-2, -1), keepdim=True)
    x = x / (size.masked_fill(none, 0) + 1e-7)
    for a, b, c in STEPS:
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


def row_norms(x: Tensor) -> Tensor:
    """Return the norms of the rows of x [..., F, D], [..., F, 1]."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def all_norms(weights: SwiGLU) -> Tensor:
    """Return the row norms of all three matrices, one after another: [..., 2 F + D, 1]."""
    return torch.cat([row_norms(w) for w in weights], -2)


@dataclass(frozen=True, kw_only=True)
class LargeChunkState(NetworkState):
    """The fast weights of R sequences, their momentum, and the tokens that they have not yet learned from.

    Attributes:
        gate, up, down: [R, H, F, D], [R, H, F, D], [R, H, D, F].
        gate_step, up_step, down_step: the last steps s, of those shapes; [R, H, 0, 0] without momentum.
        norms: the first norms of the rows of gate, up and down, one after another, [R, H, 2 F + D, 1].
        waiting: tokens with fields key and value [R, P, H, D], rates [R, P, H, 3], share [R, P, H].
    """

    MEMORY: ClassVar = {**NetworkState.MEMORY, **{f"{n}_step": None for n in NAMES}, "norms": "norms_first"}
    WAITING: ClassVar = ("key", "value", "rates", "share")

    gate_step: Tensor
    up_step: Tensor
    down_step: Tensor
    norms: Tensor

    @property
    def norms_first(self) -> Tensor:
        return all_norms(SwiGLU(self.gate_first, self.up_first, self.down_first))


@dataclass(frozen=True)
class LargeChunkMemory(NetworkMemory):
    """How the networks are read and written: the settings of `large_chunk_ttt`.

    Args:
        chunk_size: tokens between two writes, >= 1; it may change from call to call.
        optimizer: "sgd", "momentum" (its factor is the mean of m_t over the chunk), "muon" (Newton-Schulz of the
            gradient) or "momentum-muon".
        meta_grad: gradients flow through all writes (True), none (False), or are cut after every m-th.

    Raises:
        ArgumentError: numbers out of range, or an unknown optimizer.
    """

    chunk_size: int = 512
    optimizer: str = "momentum"
    meta_grad: bool | int = True
    shared = False

    def __post_init__(self) -> None:
        call = "LargeChunkMemory"
        choice(call, "optimizer", self.optimizer, OPTIMIZERS)
        check_meta_grad(call, self.meta_grad)
        object.__setattr__(self, "chunk_size", check_chunk(call, self.chunk_size, 1))

    @property
    def momentum(self) -> bool:
        return "momentum" in self.optimizer

    def start(self, weights: SwiGLU, batch: int) -> LargeChunkState:
        """Return the state of `batch` rows before their first token; `weights` are [H, ...]."""
        fields, none = {}, (0,) * batch
        for name, w in zip(NAMES, weights, strict=True):
            fields[name] = w.expand(batch, -1, -1, -1)
            fields[f"{name}_step"] = w.new_zeros(batch, len(w), *(w.shape[1:] if self.momentum else (0, 0)))
        fields["norms"] = all_norms(weights).expand(batch, -1, -1, -1)
        return LargeChunkState(**fields, **first_fields(weights), waiting=Waiting((), none), writes=none)

    def read(self, state: LargeChunkState, tokens: Tensors, keep: bool) -> tuple[Tensor, Tensors]:
        """Return f(q) of the tokens, [R, w, H D], and the fields that wait."""
        out = state.network(tokens["query"].transpose(1, 2)).transpose(1, 2).flatten(2)
        return out, {name: x for name, x in tokens.items() if name != "query"}

    def write(self, state: LargeChunkState, tokens: Tensors, following: Tensors | None) -> Tensors:
        """Take one step, without using the next token. A chunk without a good token changes nothing."""
        there = marked(tokens)["good"]
        key, value, rates, share = (hidden_where(~there, tokens[name]).transpose(1, 2) for name in state.WAITING)
        steps = dict(zip(NAMES, state.network.gradients(key, value, SwiGLU(*rates.split(1, -1))), strict=True))
        memory = {}
        if self.momentum:
            mean = share.sum(2) / there.sum(1, keepdim=True).clamp_min(1)
            steps = {n: g + mean[..., None, None] * getattr(state, f"{n}_step") for n, g in steps.items()}
            memory = {f"{n}_step": step for n, step in steps.items()}
        norms = state.norms.split([x.shape[-2] for x in state.network], -2)
        for (name, step), norm in zip(steps.items(), norms, strict=True):
            new = getattr(state, name) + (orthogonal(step) if "muon" in self.optimizer else step)
            memory[name] = new / (row_norms(new) + 1e-5) * norm
        if "good" not in tokens:
            return memory
        return {name: blend(there.any(1), x, getattr(state, name)) for name, x in memory.items()}


def large_chunk_ttt(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rates: Tensor,
    weights: SwiGLU | tuple[Tensor, Tensor, Tensor],
    memory: LargeChunkMemory | None = None,
    *,
    share: Tensor | None = None,
    state: LargeChunkState | None = None,
    mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    frozen: bool = False,
    **options: Any,
) -> tuple[Tensor, LargeChunkState]:
    """Read a SwiGLU network for every sequence and head, and train it on keys and values, chunk by chunk.

    Unlike the released program, which drops the last chunk of a call and has no state, every complete chunk is written,
    and a partial one waits in the state.

    Args:
        query, key, value: [B, T, H, D].
        rates: eta >= 0, [B, T, H, 3] of gate, up and down.
        weights: gate [H, F, D], up [H, F, D], down [H, D, F]: the first weights of every sequence or document that
            begins in this call.
        memory: how the networks are read and written; None for the defaults.
        share: m_t of the momentum, [B, T, H]; needed only by optimisers with momentum.
        state, mask, segment_ids, frozen: as in `fast_weight_memory`. A token that is not finite reads 0 and is not
            learned from, but keeps its place in its chunk.
        options: changes to `memory`, by the names of `LargeChunkMemory`, such as chunk_size=64 or optimizer="muon".

    Returns:
        (what was read [B, T, H, D] in the dtype of `query`, the state after the call).

    Raises:
        ArgumentError: shapes, dtypes or numbers that do not fit; a state of another shape.

    Precision: float32 (float64 for float64). Cost: 18 H D F multiplications per token, and for Muon about 30 H F D^2
    per chunk; in training, the weights of every chunk are kept.
    """
    memory = LargeChunkMemory.of(CALL, memory, options)
    tensor(CALL, "query", query, "B", "T", "H", "D")
    lacking = memory.momentum and share is None
    require(not lacking, CALL, "this optimizer has momentum, which needs share [B, T, H]; give it, or optimizer='sgd'.")
    new = {"query": query, "key": key, "value": value, "rates": rates}
    new["share"] = query[..., :0].sum(-1) if share is None else share
    if 0 in query.shape[1:]:  # torch.compile cannot trace the text of a symbolic length
        raise ArgumentError(f"{CALL}: query has shape {shape(query)}, expected [B, T, H, D] with T >= 1.")
    sizes = {"key": query.shape, "value": query.shape, "rates": (*query.shape[:3], 3), "share": query.shape[:3]}
    for name, size in sizes.items():
        tensor(CALL, name, new[name], *size, like=query, why=", with the axes of query")
    first = first_network(CALL, weights, query, (*query.shape[2:], query.shape[3]), 0)
    out, after = memory.run(CALL, new, first, state, (mask, segment_ids), frozen)
    return out.unflatten(-1, query.shape[2:]), after


def flush(state: LargeChunkState, memory: LargeChunkMemory | None = None, **options: Any) -> LargeChunkState:
    """Write all waiting tokens, and return the new state, which has no waiting tokens.

    `memory` and `options` are those of `large_chunk_ttt`; the optimizer is used.
    """
    call = f"{CALL}.flush"
    instance(call, "state", state, LargeChunkState, "a LargeChunkState")
    return flushed(LargeChunkMemory.of(call, memory, options), state)
