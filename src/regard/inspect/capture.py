"""Capture of the diagnostics of attention layers while a model runs, without changing its outputs."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..checks import ArgumentError, flag, instance, refuse
from ..nn.hooks import temporarily
from ..pairwise.diagnostics import Diagnostics


@dataclass
class Capture:
    """Diagnostics of the latest forward pass of a model by `layer_idx`, in the order in which the layers ran, detached.
    A layer without `layer_idx` is numbered by its position among `observable_layers`."""

    layers: dict[int, Diagnostics] = field(default_factory=dict)


def observable_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers with attributes `observer` and `observe_weights`, as `regard.nn.Attention` has them."""
    return [m for m in model.modules() if hasattr(m, "observer") and hasattr(m, "observe_weights")]


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode inside the block."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def capture(model: nn.Module, weights: bool = False) -> Iterator[Capture]:
    """Collect the diagnostics of all `observable_layers` for the forward passes in this block.

    Observers that were set before are not called inside the block, and are restored on leaving.

    Args:
        weights: also collect the full weights [B, H, Tq, Tk], computed by the dense reference implementation; the
            outputs then differ from the fast implementation's by rounding.

    Yields:
        A `Capture` that each forward pass fills again.
    """
    instance("capture", "model", model, nn.Module, "a torch.nn.Module")
    flag("capture", "weights", weights)
    seen = Capture()

    def record(position: int, layer_idx: int | None, diagnostics: Diagnostics) -> None:
        seen.layers[position if layer_idx is None else layer_idx] = diagnostics.detached()

    with ExitStack() as changes:
        for position, layer in enumerate(observable_layers(model)):
            changes.enter_context(temporarily(layer, observer=partial(record, position), observe_weights=weights))
        yield seen


def check_labels(call: str, labels: Any, input_ids: Tensor | None = None) -> None:
    """Check that `labels` are texts, one for each of `input_ids` [T] if given."""
    if not isinstance(labels, (list, tuple)) or not all(isinstance(label, str) for label in labels):
        raise refuse(call, "labels", labels, "a list of texts, one for each token")
    if input_ids is not None and len(labels) != len(input_ids):
        raise ArgumentError(f"{call}: {len(labels)} labels for {len(input_ids)} tokens (input_ids), expected one each.")
