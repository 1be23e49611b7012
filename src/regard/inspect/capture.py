"""Reading the diagnostics of attention layers while a model runs, without touching what it computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..checks import ArgumentError, flag, instance, refuse
from ..pairwise.diagnostics import Diagnostics


@dataclass
class Capture:
    """What was seen.

    Attributes:
        layers: the diagnostics of the latest forward pass by layer, in the order in which the layers ran; a
            layer without `layer_idx` goes by its place among the model's attention layers. No gradients.
    """

    layers: dict[int, Diagnostics] = field(default_factory=dict)


@contextmanager
def capture(model: nn.Module, weights: bool = False) -> Iterator[Capture]:
    """Collect the diagnostics of every attention layer of `model` for the forward passes in this block.

    A layer takes part if it has an `observer` and an `observe_weights` attribute, as `regard.nn.Attention`
    has. Both are put back on leaving, also after an exception; an observer that was there before is not
    called inside the block.

    Args:
        model: any module, with or without such layers.
        weights: also the full matrices of weights [B, H, Tq, Tk], by the dense reference implementation; the
            outputs then differ from the fast one's by rounding.

    Yields:
        A `Capture` that each forward pass fills anew.
    """
    instance("capture", "model", model, nn.Module, "a torch.nn.Module")
    flag("capture", "weights", weights)
    layers = [m for m in model.modules() if hasattr(m, "observer") and hasattr(m, "observe_weights")]
    before = [(layer.observer, layer.observe_weights) for layer in layers]
    seen = Capture()
    try:
        for place, layer in enumerate(layers):
            layer.observer = _Recorder(seen, place)
            layer.observe_weights = weights
        yield seen
    finally:
        for layer, (observer, observe_weights) in zip(layers, before, strict=True):
            layer.observer, layer.observe_weights = observer, observe_weights


@dataclass(frozen=True)
class _Recorder:
    """The observer of one layer."""

    seen: Capture
    place: int

    def __call__(self, layer_idx: int | None, diagnostics: Diagnostics) -> None:
        key = self.place if layer_idx is None else layer_idx
        self.seen.layers[key] = _detached(diagnostics)


def _detached(diagnostics: Any) -> Any:
    """The same diagnostics without the graph, which would otherwise stay in memory as long as they do."""
    tensors = {
        f.name: value.detach()
        for f in dataclasses.fields(diagnostics)
        if isinstance(value := getattr(diagnostics, f.name), Tensor)
    }
    return dataclasses.replace(diagnostics, **tensors)


def check_labels(call: str, labels: Any, input_ids: Tensor) -> None:
    """Check that `labels` are texts, one for each of `input_ids` [T]."""
    if not isinstance(labels, (list, tuple)) or not all(isinstance(label, str) for label in labels):
        raise refuse(call, "labels", labels, "a list of texts, one for each token")
    if len(labels) != len(input_ids):
        raise ArgumentError(f"{call}: {len(labels)} labels for {len(input_ids)} tokens (input_ids), expected one each.")
