"""Named places in a model at which something can listen, or put another tensor in the place of the one that passes."""

from __future__ import annotations

from torch import Tensor, nn


class HookPoint(nn.Module):
    """The identity, with a name that tools find.

    A forward hook that returns a tensor replaces what passes. Where a tensor is only made for those who listen (the
    weights of attention, for which the fast forms have no place), the layer asks `active` first.

    Args:
        label: the documented name; None for the path of the module in its model.
    """

    def __init__(self, label: str | None = None) -> None:
        super().__init__()
        self.label = label

    @property
    def active(self) -> bool:
        """Whether a forward hook listens (hooks of other kinds do not count)."""
        return bool(self._forward_hooks)

    def forward(self, x: Tensor) -> Tensor:
        """The tensor itself, of any shape."""
        return x
