"""The first part of the demo: one text, one trained model, the weights of four kernels side by side.

Queries and keys are those of a head of the trained model. Only the spec that turns their scores into weights changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

import regard
from regard.inspect.figures import weights_on_text
from regard.inspect.hooks import run_with_cache

SPECS = ("softmax", "sparsemax", "biweight", "relumax")


@dataclass(frozen=True, kw_only=True)
class KernelWeights:
    """Weights [T] of the last of T tokens by spec, from queries and keys of one layer and head (from 0) of a model."""

    model: str
    layer: int
    head: int
    labels: tuple[str, ...]
    weights: dict[str, Tensor]

    def picture(self) -> bytes:
        """Return a PNG with a row for each spec."""
        title = f"Weights of the last character's query, layer {self.layer + 1} head {self.head + 1} of {self.model}"
        return weights_on_text(self.weights, self.labels, title=title)


def kernel_weights(model: PreTrainedModel, name: str, tokens: Tensor, labels: Sequence[str]) -> KernelWeights | None:
    """Weigh the keys of one head by each of `SPECS`, for the last of the tokens [T]: the head in which most keys have
    weight under biweight. Where one key has all weight, no kernel differs from another. None if the model, trained with
    the spec `name`, has no queries and keys to read."""
    layers = range(model.config.num_hidden_layers)
    names = [f"layers.{layer}.self_attn.hook_{part}" for layer in layers for part in "qk"]
    try:
        _, kept = run_with_cache(model, tokens.long()[None], names)
    except regard.checks.ArgumentError:
        return None
    q, k = (torch.cat([kept[point] for point in names[first::2]]) for first in (0, 1))  # [layers, H, T, D]
    weights = {}
    with torch.no_grad():
        for spec in SPECS:
            _, seen = regard.attention(q, k, k, spec, is_causal=True, impl="reference", return_diagnostics=True)
            weights[spec] = seen.weights[:, :, -1]
    layer, head = divmod(int((weights["biweight"] > 0).sum(-1).argmax()), q.shape[1])
    chosen = {spec: each[layer, head] for spec, each in weights.items()}
    return KernelWeights(model=name, layer=layer, head=head, labels=tuple(labels), weights=chosen)
