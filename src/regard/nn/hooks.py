"""Named places in a model where a hook can read a tensor or replace it."""

from __future__ import annotations

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
        """Return x."""
        return x
