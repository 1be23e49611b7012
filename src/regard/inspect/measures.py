"""Numbers drawn from what was captured.

Shapes: L layers, H heads, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..checks import ArgumentError, instance, integers, within
from .capture import capture, check_labels


@dataclass(frozen=True)
class AttentionMaps:
    """The weights of every head of a model on one text.

    Attributes:
        labels: the tokens as text, T of them.
        weights: [L, H, T, T], float32 on the CPU; row i holds the weights of the values for query i, which in a local
            linear layer may be negative. Weights that the kernel makes exactly zero are exactly zero here.
        support: [L, H, T], float32: how many keys have a non-zero weight.
        density: [L, H, T], float32: their share of the visible keys; None where it was not measured.
        solver: for each layer the statistics of its local linear systems by name, [H, T], float32; none for a layer
            that solves nothing.
    """

    labels: tuple[str, ...]
    weights: Tensor
    support: Tensor
    density: Tensor | None = None
    solver: tuple[dict[str, Tensor], ...] = ()

    def negative_mass(self) -> Tensor:
        """Sum of the sizes of the negative weights of every row, [L, H, T]."""
        return self.weights.clamp(max=0).sum(-1).neg()

    def strong(self, threshold: float = 0.1) -> Tensor:
        """Mean number of keys a row whose weight is larger in size than `threshold`, [L, H]: the "attention density"
        of Local Linear Attention (arXiv 2510.01450), appendix F.3."""
        return (self.weights.abs() > threshold).sum(-1).float().mean(-1)

    def look_back(self) -> Tensor:
        """Mean distance in tokens between a query and what it attends to, [L, H]: the average of i - j under
        the weights |w_ij|, each row scaled to sum to one; rows without weight do not count."""
        size = self.weights.abs()
        place = torch.arange(len(self.labels), dtype=size.dtype)
        distance = (size * (place[:, None] - place)).sum(-1)
        total = size.sum(-1)
        rows = torch.where(total > 0, distance / total.where(total > 0, torch.ones(())), torch.nan)
        return rows.nanmean(-1).nan_to_num()

    def farthest(self) -> tuple[int, int]:
        """(layer, head) with the longest look-back; the first among equals."""
        layer, head = divmod(int(self.look_back().flatten().argmax()), self.weights.shape[1])
        return layer, head


@torch.no_grad()
def attention_maps(model: nn.Module, input_ids: Tensor, labels: Sequence[str]) -> AttentionMaps:
    """Run a causal language model over one text and keep the weights of all heads.

    Args:
        model: called as `model(input_ids=[1, T], use_cache=False)`.
        input_ids: int [T].
        labels: the T tokens as text.

    Raises:
        ArgumentError: the model has no layer that reports its weights, labels do not match the tokens, or
            the layers differ in their number of heads.
    """
    call = "attention_maps"
    instance(call, "model", model, nn.Module, "a torch.nn.Module")
    check_labels(call, labels, integers(call, "input_ids", input_ids, "T"))
    training = model.training
    model.eval()
    try:
        with capture(model, weights=True) as seen:
            within(call, None, model, input_ids=input_ids.long()[None], use_cache=False)
    finally:
        model.train(training)
    found = [layer for _, layer in sorted(seen.layers.items()) if layer.weights is not None]
    if not found:
        raise ArgumentError("attention_maps: no layer of the model reports its weights.")
    if len({layer.weights.shape for layer in found if layer.weights is not None}) > 1:
        raise ArgumentError("attention_maps: the layers have different numbers of heads.")
    signed = [layer.weights if layer.effective_weights is None else layer.effective_weights for layer in found]
    weights = torch.stack([each[0] for each in signed if each is not None])
    support = torch.stack([layer.support[0] for layer in found]).float().cpu()
    density = torch.stack([layer.density[0] for layer in found]).float().cpu()
    solver = tuple({name: rows[0].float().cpu() for name, rows in (layer.solver or {}).items()} for layer in found)
    return AttentionMaps(tuple(labels), weights.float().cpu(), support, density, solver)
