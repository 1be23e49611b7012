"""A memory layer that is a SwiGLU network, written while it is read: FwMLP, the dense counterpart of FwPKM
(arXiv:2601.00671, appendix A).

Shapes: B batch, T tokens, C model width, Din width of a query, F of the inner layer, Dv of a value.
"""

import inspect
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ...checks import flag, within
from ...memory.fast_weight_mlp import NAMES, FastMLPMemory, FastMLPState, fast_weight_mlp, flush
from ...memory.fast_weights import mixed
from ..arguments import described, positive_ints
from ..memories import memory_layers
from .projections import FastWeightLayer, Projected, Tokens


@memory_layers.register("fwmlp")
class FastWeightMLP(FastWeightLayer):
    """SwiGLU network whose weights are trained at test time (FwMLP).

        q, v, g = projections of the token (`MemoryProjections`)        read = W_down (silu(W_gate q) * (W_up q))
        out = W_o rms(g read + (1 - g) v)                               to be added to the residual stream
        loss of a chunk = mean over pairs and features of (read_t - y_t)^2,     y_t = (v_t + v_{t+1}) / 2

    Chunks, padding, non-finite tokens and further attributes are those of `FastWeightLayer`.

    Args:
        hidden_size, in_dim, hidden_dim, value_dim: C, Din, F, Dv.
        value_norm: z-score the values. gating: mix by a gate, else read + v.
        learn_initial: the first weights are parameters, learned from the gradient through reads and writes.
        norm_eps: of the RMS norms.
        options: how the network is written, by the names of `regard.memory.fast_weight_mlp.FastMLPMemory`. Nothing
            bounds the step: a rate of 0.1 is small at the default sizes, where the loss is a mean over 512 features;
            with few features or short chunks the weights may diverge.

    Attributes:
        gate, up, down: [F, Din + 1], [F, Din + 1], [Dv, F + 1], the first weights, biases last; parameters with
            `learn_initial`, otherwise buffers that never change. Initialised as `torch.nn.Linear`.

    Memory: 2 F (Din + 1) + Dv (F + 1) float32 numbers for each sequence (14 MB at the sizes of the paper), and in
    training as many again for every chunk.

    Raises:
        ArgumentError: sizes or numbers out of range, or an unknown target.
    """

    call = "nn.FastWeightMLP"
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
        value_norm: bool = True,
        gating: bool = True,
        learn_initial: bool = False,
        norm_eps: float = 1e-5,
        **options: Any,
    ) -> None:
        super().__init__()
        positive_ints(self.call, hidden_size=hidden_size, in_dim=in_dim, hidden_dim=hidden_dim, value_dim=value_dim)
        flag(self.call, "learn_initial", learn_initial)
        self.settings = FastMLPMemory.of(self.call, None, options)
        self.chunk_size = self.settings.chunk_size
        into = (hidden_dim, in_dim + 1)
        first = {"gate": into, "up": into, "down": (value_dim, hidden_dim + 1)}
        mix = {"value_norm": value_norm, "gating": gating, "norm_eps": norm_eps}
        self._make(hidden_size, in_dim, value_dim, first, learn_initial, **mix)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new first weights, uniform in +-1/sqrt(inputs), as `torch.nn.Linear` does."""
        for name in NAMES:
            weight = getattr(self, name)
            bound = (weight.shape[1] - 1) ** -0.5
            torch.nn.init.uniform_(weight, -bound, bound)

    def extra_repr(self) -> str:
        (inner, wide), (out, _), how = self.gate.shape, self.down.shape, self.settings
        return described(
            in_dim=wide - 1, hidden_dim=inner, value_dim=out, chunk_size=self.chunk_size,
            learning_rate=how.learning_rate, target=how.target, shared=how.shared, frozen=self.frozen,
        )  # fmt: skip

    def _remember(self, tokens: Tokens, inputs: Projected, state: Any, mix: bool) -> tuple[Tensor, FastMLPState]:
        query = inputs.query.masked_fill(tokens.non_finite[..., None], torch.nan)
        weights = (self.gate, self.up, self.down)
        how = {"state": state, "frozen": self.frozen, "chunk_size": self.chunk_size, **tokens.where}
        read, state = within(self.call, None, fast_weight_mlp, query, inputs.value, weights, self.settings, **how)
        return mixed(read, inputs.value, inputs.gate) if mix else read, state

    def flush(self, state: FastMLPState) -> FastMLPState:
        return flush(state, self.settings)


_own = {name: p.default for name, p in inspect.signature(FastWeightMLP).parameters.items() if p.kind is p.KEYWORD_ONLY}
FastWeightMLP.defaults = {**_own, **asdict(FastMLPMemory())}
