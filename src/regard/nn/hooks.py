"""Named places in a model where a hook can read a tensor or replace it."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class HookPoint(nn.Module):
    """An identity module with a name that tools find.

    A forward hook that returns a tensor replaces the one that passes. If a tensor is computed only for hooks (attention
    weights, which the fast implementations do not form), the layer checks `active` first.

    Args:
        label: the documented name; None for the path of the module in its model.
    """

    def __init__(self, label: str | None = None) -> None:
        super().__init__()
        self.label = label

    @property
    def active(self) -> bool:
        """Return whether a forward hook is registered; other kinds of hooks do not count."""
        return bool(self._forward_hooks)

    def forward(self, x: Tensor) -> Tensor:
        return x


def report_weights(layer: Any, diagnostics: Any, out: Tensor, mix: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Call the observer of `layer` and the hooks at its `hook_pattern`; return the output and the weights. The
    diagnostics hold the weights if `hook_pattern` is active; `mix` computes the output from weights that a hook
    replaced."""
    if layer.observer is not None:
        layer.observer(layer.layer_idx, diagnostics.detached())
    weights = diagnostics.weights if diagnostics.effective_weights is None else diagnostics.effective_weights
    if not layer.hook_pattern.active:
        return out, weights
    replaced = layer.hook_pattern(weights)
    return out if replaced is weights else mix(replaced), replaced
