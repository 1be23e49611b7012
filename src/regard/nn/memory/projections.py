"""Projections from the residual stream into a fast-weight memory and back, and layers made of both.

Shapes: B batch, T tokens, C model width, Dq width of the queries (all heads), Dv width of a value.

Of token t with the hidden state h_t (Fast-weight Product Key Memory, arXiv:2601.00671, section 3; the gate as in the
released program, a sigmoid of the mean of eight numbers):

    q = W_q rms(h),   v = z(W_v rms(h)),   g = sigmoid(mean(W_g rms(h))),
    out = W_o rms(g read + (1 - g) v)      without a gate: W_o rms(read + v)

z(x) = (x - mean x) / (std x + 1e-6) over the Dv features, with the unbiased standard deviation.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ...checks import ArgumentError, finite, flags, floating, number, require, shape, token_mask, within
from ...memory.fast_weights import mixed
from ...memory.stream import check_held
from ...precision import clean
from ..arguments import as_input, positive_ints
from ..attention.norm import HeadRMSNorm
from ..hooks import HookPoint
from ..memories import MemoryLayer

GATES = 8  # features whose mean, after a sigmoid, is the gate


class Tokens(NamedTuple):
    """Finite hidden states."""

    hidden: Tensor  # [B, T, C], float32 at least; 0 where not `counted`
    counted: Tensor  # boolean [B, T], tokens that read and may be written
    non_finite: Tensor  # boolean [B, T], tokens that are real but not finite
    where: dict[str, Tensor | None]  # mask and segment_ids, as given

    def shown(self, out: Tensor) -> Tensor:
        """Return `out` [B, T, ...] with NaN for tokens that are not finite and 0 for padding."""
        more = (...,) + (None,) * (out.dim() - 2)
        return torch.where(self.counted[more], out, torch.where(self.non_finite[more], torch.nan, 0.0).to(out.dtype))


def clean_tokens(
    call: str, hidden: Tensor, mask: Tensor | None, hidden_size: int, segment_ids: Tensor | None = None
) -> Tokens:
    """Set masked and non-finite tokens of `hidden` [B, T, C] to 0 (NaN, infinite, or beyond 2^56 in float32), after
    checking hidden states and mask; under `regard.checks.debug` a token that is not finite is an ArgumentError."""
    floating(call, "hidden", hidden)
    if hidden.dim() != 3 or hidden.shape[1] == 0 or hidden.shape[2] != hidden_size:
        raise ArgumentError(f"{call}: hidden has shape {shape(hidden)}, expected [B, T, {hidden_size}] with T >= 1.")
    where = {"mask": mask, "segment_ids": segment_ids}
    if mask is None:
        mask = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
    else:
        token_mask(call, "mask", mask, *hidden.shape[:2], like=hidden, of="hidden")
        hidden = torch.where(mask[..., None], hidden, 0)
    finite(call, "hidden", hidden)
    wide, bad = clean(hidden.to(torch.promote_types(hidden.dtype, torch.float32)))
    good, bad = (mask, torch.zeros_like(mask)) if bad is None else (mask & ~bad, mask & bad)
    return Tokens(wide, good, bad, where)


class Projected(NamedTuple):
    """Projections of tokens, float32 at least: query [B, T, Dq], value [B, T, Dv] (z-scored), gate [B, T] or None."""

    query: Tensor
    value: Tensor
    gate: Tensor | None


class MemoryProjections(nn.Module):
    """Queries, values and gates of tokens, and the output projection.

    `value_norm` z-scores the values; `gating` mixes what was read and the token's own value by a gate, otherwise they
    are added. With C = 768 and Dq = Dv = 512 these are 1,190,408 parameters (paper, Table 2, beside the fast weights).
    Matrices start N(0, 0.02^2), biases at 0.
    """

    def __init__(
        self, hidden_size: int, query_dim: int, value_dim: int, *, value_norm: bool, gating: bool, norm_eps: float
    ) -> None:
        super().__init__()
        call = "nn.MemoryProjections"
        positive_ints(call, hidden_size=hidden_size, query_dim=query_dim, value_dim=value_dim)
        require(value_dim >= 2 or not value_norm, call, "value_norm needs value_dim >= 2; change one of them.")
        number(call, "norm_eps", norm_eps, low=0.0, strict=True)
        flags(call, value_norm=value_norm, gating=gating)
        self.value_norm, self.gating = value_norm, gating
        self.q_norm = HeadRMSNorm(hidden_size, norm_eps)
        self.q_proj = nn.Linear(hidden_size, query_dim)
        self.v_norm = HeadRMSNorm(hidden_size, norm_eps)
        self.v_proj = nn.Linear(hidden_size, value_dim)
        if gating:
            self.gate_norm = HeadRMSNorm(hidden_size, norm_eps)
            self.gate_proj = nn.Linear(hidden_size, GATES)
        self.out_norm = HeadRMSNorm(value_dim, norm_eps)
        self.out_proj = nn.Linear(value_dim, hidden_size)
        for module in self.children():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, hidden: Tensor) -> Projected:
        """Project hidden states [B, T, C], float32 at least."""
        wide = hidden.dtype
        query = self.q_proj(as_input(self.q_norm(hidden), self.q_proj)).to(wide)
        value = self.v_proj(as_input(self.v_norm(hidden), self.v_proj)).to(wide)
        gate = None
        if self.gating:
            gate = self.gate_proj(as_input(self.gate_norm(hidden), self.gate_proj)).to(wide).mean(-1).sigmoid()
        return Projected(query, z_score(value) if self.value_norm else value, gate)

    def back(self, mixed: Tensor) -> Tensor:
        """Project mixes [B, T, Dv] to [B, T, C]."""
        return self.out_proj(as_input(self.out_norm(mixed), self.out_proj))


def z_score(x: Tensor) -> Tensor:
    """Return (x - mean) / (std + 1e-6) over the last axis, with the unbiased standard deviation."""
    if x.shape[0] == 0:  # torch would warn about a standard deviation of no numbers
        return x
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)


class FastWeightLayer(MemoryLayer, ABC):
    """The base of memory layers with `MemoryProjections` around fast weights.

    Chunks are counted from the start of a row's stream, however it is cut into calls. A full chunk waits until the next
    token arrives and is written before that token reads; `flush` writes what waits. Padding is removed. A token whose
    hidden state is not finite gets the output NaN, and is neither written nor a target; `regard.checks.debug` raises.

    Attributes:
        chunk_size: tokens between two writes. May be set at any time.
        frozen: read and do not write; the state comes back as it was given. May be set at any time.
        hook_gate, hook_read: see the gates [B, T] and what was read [B, T, Dv], before the mix.
    """

    honours_segments: ClassVar[bool] = True
    call: ClassVar[str]
    hidden_size: int

    def _make(
        self, hidden_size: int, query_dim: int, value_dim: int, first: Mapping[str, Any], learned: bool, **mix: Any
    ) -> None:
        """Make projections, hook points, and first weights of the sizes `first`, as parameters if `learned`."""
        self.hidden_size, self.fast_names, self.frozen = hidden_size, (*first,), False
        self.projections = within(self.call, None, MemoryProjections, hidden_size, query_dim, value_dim, **mix)
        for name, size in first.items():
            if learned:
                self.register_parameter(name, nn.Parameter(torch.empty(size)))
            else:
                self.register_buffer(name, torch.empty(size))
        self.hook_gate, self.hook_read = HookPoint(), HookPoint()

    def fast_numbers(self) -> int:
        return sum(x.numel() for name, x in self.named_buffers(recurse=False) if name in self.fast_names)

    def forward(
        self, hidden: Tensor, mask: Tensor | None = None, state: Any = None, segment_ids: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Read for every token, and write complete chunks.

        Args:
            hidden: [B, T, C], the residual stream, not normalised.
            mask: boolean [B, T], true where a token is real; None: all.
            state: returned by the previous call; None at the start of a stream.
            segment_ids: integers [B or 1, T]: a change begins a new document, with the first weights.

        Returns:
            (output [B, T, C] in the dtype of `hidden`, 0 for padding; the state after the call).

        Raises:
            ArgumentError: shapes or dtypes that do not fit, or a state of another layer.
        """
        tokens = clean_tokens(self.call, hidden, mask, self.hidden_size, segment_ids)
        check_held(self.call, "hidden", hidden)
        inputs: Projected = self.projections(tokens.hidden)
        if inputs.gate is not None:
            inputs = inputs._replace(gate=self.hook_gate(inputs.gate))
        apart = self.hook_read.active  # a hook wants what was read before the mix
        read, state = self._remember(tokens, inputs, state, mix=not apart)
        read = mixed(self.hook_read(read), inputs.value, inputs.gate) if apart else read
        return tokens.shown(self.projections.back(read)).to(hidden.dtype), state

    @abstractmethod
    def _remember(self, tokens: Tokens, inputs: Projected, state: Any, mix: bool) -> tuple[Tensor, Any]:
        """Return what was read [B, T, Dv], or its mix with the values, and the state after the call."""
