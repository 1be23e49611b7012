"""A memory layer that is a SwiGLU network, written while it is read: FwMLP, the dense counterpart of FwPKM
(arXiv:2601.00671, appendix A).

Shapes: B batch, T tokens, C model width, Din width of a query, F of the inner layer, Dv of a value.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from ...checks import flags, within
from ...memory.fast_weight_mlp import NAMES, FastMLPRule, FastMLPState, fast_weight_mlp, flush
from ...memory.stream import check_chunk, check_held, check_meta_grad
from ..arguments import positive_int
from ..hooks import HookPoint
from ..memories import MemoryLayer, memory_layers
from .projections import MemoryProjections, clean_tokens

CALL = "nn.FastWeightMLP"


@memory_layers.register("fwmlp")
class FastWeightMLP(MemoryLayer):
    """Read a SwiGLU network with biases at every token's query; after every chunk of tokens, its three matrices take
    one gradient step towards the tokens' values.

        q, v, g = projections of the token (`MemoryProjections`)        read = W_down (silu(W_gate q) * (W_up q))
        out = W_o rms(g read + (1 - g) v)                               to be added to the residual stream
        loss of a chunk = mean over pairs and features of (read_t - y_t)^2,     y_t = (v_t + v_{t+1}) / 2

    Chunks are counted from the start of a row's stream, however it is cut into calls; a full chunk is written when the
    next token arrives, before that token reads. Padding is removed. A token whose hidden state is not finite gets the
    output NaN, and is neither a target nor learned from; `regard.checks.debug` raises.

    Args:
        hidden_size: C.
        in_dim, hidden_dim, value_dim: Din, F, Dv.
        chunk_size: tokens between two writes, >= 2. May be set at any time.
        learning_rate: of the step, >= 0. Nothing bounds the step: 0.1 is small at the default sizes, where the loss is
            a mean over 512 features; with few features or short chunks the weights may diverge.
        target: "mean", as above, or "look-ahead": y_t = v_{t+1}.
        value_norm: z-score the values. gating: mix by a gate, else read + v.
        meta_grad: gradients flow through the writes: always, never, or cut after every so many.
        shared: one network for the batch (as in the paper's program); otherwise one for each row.
        learn_initial: the first weights are parameters, learned from the gradient through reads and writes.
        norm_eps: of the RMS norms.

    Attributes:
        gate, up, down: [F, Din + 1], [F, Din + 1], [Dv, F + 1], the first weights, biases last; parameters with
            `learn_initial`, otherwise buffers that never change. Initialised as `torch.nn.Linear`.
        frozen: read and do not write; the state comes back as it was given. May be set at any time.
        hook_gate, hook_read: see the gates [B, T] and what was read [B, T, Dv], before the mix.

    Memory: 2 F (Din + 1) + Dv (F + 1) float32 numbers for each sequence (14 MB at the sizes of the paper), and in
    training as many again for every chunk.

    Raises:
        ArgumentError: sizes or numbers out of range, or an unknown target.
    """

    replaces_feed_forward: ClassVar[bool] = False
    remembers: ClassVar[bool] = True
    honours_segments: ClassVar[bool] = True
    gate: Tensor
    up: Tensor
    down: Tensor

    def __init__(
        self,
        hidden_size: int,
        *,
        in_dim: int = 512,
        hidden_dim: int = 2304,
        value_dim: int = 512,
        chunk_size: int = 512,
        learning_rate: float = 0.1,
        target: str = "mean",
        value_norm: bool = True,
        gating: bool = True,
        meta_grad: bool | int = True,
        shared: bool = False,
        learn_initial: bool = False,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        sizes = {"hidden_size": hidden_size, "in_dim": in_dim, "hidden_dim": hidden_dim, "value_dim": value_dim}
        for name, size in sizes.items():
            positive_int(CALL, name, size)
        flags(CALL, shared=shared, learn_initial=learn_initial)
        self.hidden_size, self.value_dim, self.shared = hidden_size, value_dim, shared
        self.chunk_size = check_chunk(CALL, chunk_size, 2)
        self.rule = FastMLPRule(learning_rate, target).check(CALL)
        check_meta_grad(CALL, meta_grad)
        self.meta_grad, self.frozen = meta_grad, False
        options = {"value_norm": value_norm, "gating": gating, "norm_eps": norm_eps}
        self.projections = within(CALL, None, MemoryProjections, hidden_size, in_dim, value_dim, **options)
        shapes = ((hidden_dim, in_dim + 1), (hidden_dim, in_dim + 1), (value_dim, hidden_dim + 1))
        for name, shape in zip(NAMES, shapes, strict=True):
            weight = torch.empty(shape)
            if learn_initial:
                self.register_parameter(name, nn.Parameter(weight))
            else:
                self.register_buffer(name, weight)
        self.reset_parameters()
        self.hook_gate, self.hook_read = HookPoint(), HookPoint()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new first weights, uniform in +-1/sqrt(inputs), as `torch.nn.Linear` does."""
        for name in NAMES:
            weight = getattr(self, name)
            bound = (weight.shape[1] - 1) ** -0.5
            weight.uniform_(-bound, bound)

    def extra_repr(self) -> str:
        """Return sizes and rule, for `print(model)`."""
        (inner, wide), (out, _) = self.gate.shape, self.down.shape
        rest = "".join(f", {name}=True" for name in ("shared", "frozen") if getattr(self, name))
        sizes = f"in_dim={wide - 1}, hidden_dim={inner}, value_dim={out}, chunk_size={self.chunk_size}"
        return f"{sizes}, learning_rate={self.rule.learning_rate}, target={self.rule.target!r}{rest}"

    def fast_numbers(self) -> int:
        """Return 2 F (Din + 1) + Dv (F + 1), or 0 if these are parameters."""
        weights = [getattr(self, name) for name in NAMES]
        return sum(w.numel() for w in weights if not isinstance(w, nn.Parameter))

    def forward(
        self,
        hidden: Tensor,
        mask: Tensor | None = None,
        state: FastMLPState | None = None,
        segment_ids: Tensor | None = None,
    ) -> tuple[Tensor, FastMLPState]:
        """Read for every token, and write complete chunks.

        Args:
            hidden: [B, T, C], the residual stream, not normalised.
            mask: boolean [B, T], true where a token is real.
            state: returned by the previous call; None at the beginning of a sequence.
            segment_ids: integers [B or 1, T]: a change begins a new document, with the first weights.

        Returns:
            (output [B, T, C] to be added to the residual stream, 0 at padding; the state after the call).

        Raises:
            ArgumentError: shapes or dtypes that do not fit, or a state of another shape.
        """
        tokens = clean_tokens(CALL, hidden, mask, self.hidden_size)
        check_held(CALL, "hidden", hidden)
        own = self.projections(tokens.hidden)
        if own.gate is not None:
            own = own._replace(gate=self.hook_gate(own.gate))
        read, state = within(
            CALL,
            None,
            fast_weight_mlp,
            own.query.masked_fill(tokens.non_finite[..., None], torch.nan),
            own.value,
            (self.gate, self.up, self.down),
            chunk_size=self.chunk_size,
            learning_rate=self.rule.learning_rate,
            target=self.rule.target,
            shared=self.shared,
            state=state,
            mask=mask,
            segment_ids=segment_ids,
            frozen=self.frozen,
            meta_grad=self.meta_grad,
        )
        return tokens.shown(self.projections.output(self.hook_read(read), own)).to(hidden.dtype), state

    def flush(self, state: FastMLPState) -> FastMLPState:
        """Return the state after all waiting tokens were written whose targets have arrived."""
        return flush(state, learning_rate=self.rule.learning_rate, target=self.rule.target)
