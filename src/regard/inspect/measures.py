"""Attention weights of all heads on one text, and measures of them.

Shapes: L layers, H heads, T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import instance, integers, require, shape, within
from .capture import capture, check_labels, eval_mode


@dataclass(frozen=True)
class AttentionMaps:
    """The weights of every head of a model on one text.

    Attributes:
        labels: the T tokens as text.
        weights: [L, H, T, T], float32 on the CPU; row i holds the weights of query i, which may be negative in a local
            linear layer. Weights that the kernel makes exactly zero are exactly zero.
        support: [L, H, T], float32: number of keys with nonzero weight.
        density: [L, H, T], float32: their share of the visible keys; None if it was not measured.
        solver: for each layer the statistics of its local linear systems by name, [H, T], float32; empty for other
            layers.
    """

    labels: tuple[str, ...]
    weights: Tensor
    support: Tensor
    density: Tensor | None = None
    solver: tuple[dict[str, Tensor], ...] = ()

    def negative_mass(self) -> Tensor:
        """Return the sum of the sizes of the negative weights of every query, [L, H, T]."""
        return self.weights.clamp(max=0).sum(-1).neg()

    def strong(self, threshold: float = 0.1) -> Tensor:
        """Return the mean number of keys per query with a weight larger in size than `threshold`, [L, H].

        This is the "attention density" of Local Linear Attention (arXiv 2510.01450), appendix F.3.
        """
        return (self.weights.abs() > threshold).sum(-1).float().mean(-1)

    def look_back(self) -> Tensor:
        """Return the mean distance between queries and the keys they attend to, [L, H].

        The average of i - j with the weights |w_ij|, normalised per query; queries without weight do not count.
        """
        size = self.weights.abs()
        position = torch.arange(len(self.labels), dtype=size.dtype)
        distance = (size * (position[:, None] - position)).sum(-1)
        total = size.sum(-1)
        rows = torch.where(total > 0, distance / total.where(total > 0, torch.ones(())), torch.nan)
        return rows.nanmean(-1).nan_to_num()

    def farthest(self) -> tuple[int, int]:
        """Return the first (layer, head) with the largest look-back."""
        layer, head = divmod(int(self.look_back().flatten().argmax()), self.weights.shape[1])
        return layer, head


@torch.no_grad()
def attention_maps(model: nn.Module, input_ids: Tensor, labels: Sequence[str]) -> AttentionMaps:
    """Run a causal language model over one text and return the weights of all heads.

    Args:
        model: called as `model(input_ids=[1, T], use_cache=False)`.
        input_ids, labels: the tokens, int [T], and the same as text.

    Raises:
        ArgumentError: the model has no layer that reports its weights, labels do not match the tokens, or the layers'
            weights differ in shape (other numbers of heads, or the two streams of an ICLM).
    """
    call = "attention_maps"
    instance(call, "model", model, nn.Module, "a torch.nn.Module")
    check_labels(call, labels, integers(call, "input_ids", input_ids, "T"))
    with eval_mode(model), capture(model, weights=True) as seen:
        within(call, None, model, input_ids=input_ids.long()[None], use_cache=False)
    layers: list[Any] = [layer for _, layer in sorted(seen.layers.items()) if layer.weights is not None]
    require(bool(layers), call, "no layer of the model reports its weights.")
    shapes = [shape(layer.weights[0]) for layer in layers]
    differ = f"the layers have weights of different shapes, {', '.join(dict.fromkeys(shapes))}, expected one"
    require(len(set(shapes)) == 1, call, f"{differ}; regard.inspect.run_with_cache returns those of each layer.")
    signed = [layer.weights if layer.effective_weights is None else layer.effective_weights for layer in layers]
    weights = torch.stack([each[0] for each in signed])
    support = torch.stack([layer.support[0] for layer in layers]).float().cpu()
    density = torch.stack([layer.density[0] for layer in layers]).float().cpu()
    solver = tuple({name: rows[0].float().cpu() for name, rows in (layer.solver or {}).items()} for layer in layers)
    return AttentionMaps(tuple(labels), weights.float().cpu(), support, density, solver)
