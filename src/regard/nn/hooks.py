"""Named places in a model where a hook can read a tensor or replace it, and attributes that are set for a block.

Shapes: B batch, Tq queries, Tk keys, H query heads, Hkv key/value heads, Dv channels of a value.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.functional import pad

from ..pairwise.attention import attention, diagnosed_attention
from ..pairwise.visibility import Visibility, runs_of


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


@contextmanager
def temporarily(*things: Any, **values: Any) -> Iterator[None]:
    """Set attributes of `things` inside a block, and restore them afterwards."""
    before = [(thing, name, getattr(thing, name)) for thing in things for name in values]
    try:
        for thing, name, _ in before:
            setattr(thing, name, values[name])
        yield
    finally:
        for thing, name, value in before:
            setattr(thing, name, value)


class Seen(NamedTuple):
    """Which keys a query sees: arguments of `regard.attention`."""

    is_causal: bool = False
    exclude_self: bool = False
    window: int | None = None
    attn_mask: Tensor | None = None
    segment_ids: Tensor | None = None

    def counts(self, query: Tensor, key: Tensor) -> Tensor:
        """Return how many keys each query sees, int64 [B or 1, H or 1, Tq]."""
        tokens, keys = query.shape[2], key.shape[2]
        runs = None if self.segment_ids is None else runs_of(self.segment_ids)
        visible = Visibility(tokens, keys, *self[:3], keys - tokens, self.attn_mask, runs)
        return visible.counts(query.device)


def observed_attention(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, output_attentions: bool, *, columns: int | None = None,
    share: Tensor | None = None, **arguments: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Call `regard.attention` with the spec of a layer, call its observer, and let hooks at its `hook_pattern` replace
    the weights. Return the output, and the weights or None.

    Weights have one column per key, or `columns` of them, filled with zeros. `share`, broadcastable to
    [B, H, Tq, 1], is a factor of output and weights, which the diagnostics do not include.
    """
    observed = layer.observer is not None and layer.observe_weights
    dense = output_attentions or layer.hook_pattern.active or observed
    arguments["impl"] = "reference" if dense else "auto"
    if not dense and layer.observer is None:
        out = attention(query, key, value, layer.spec, **arguments)
        return out if share is None else out * share, None
    out, diagnostics = diagnosed_attention(query, key, value, layer.spec, **arguments)
    if columns is not None:  # otherwise the weights stay the tensor that the output is computed from, for `retain_grad`
        parts = {"weights": diagnostics.weights, "effective_weights": diagnostics.effective_weights}
        padded = {name: pad(w, (0, columns - key.shape[2])) for name, w in parts.items() if w is not None}
        diagnostics = replace(diagnostics, **padded)
    if layer.observer is not None:
        layer.observer(layer.layer_idx, diagnostics.detached())
    weights = diagnostics.weights if diagnostics.effective_weights is None else diagnostics.effective_weights
    if share is not None:
        out, weights = out * share, None if weights is None else weights * share
    if layer.hook_pattern.active:
        replaced = layer.hook_pattern(weights)
        if replaced is not weights:
            out, weights = _mix(replaced, value, arguments.get("attn_mask")), replaced
    return out, weights if output_attentions else None


def _mix(weights: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Return weights of a hook [B, H, Tq, columns] times values [B, Hkv, Tk, Dv], masked keys left out."""
    weights = weights[..., : value.shape[2]]
    if mask is not None:
        value = value.masked_fill(~mask.any(dim=(1, 2))[:, None, :, None], 0)
        weights = weights.masked_fill(~mask, 0)
    return weights.to(value.dtype) @ value.repeat_interleave(weights.shape[1] // value.shape[1], dim=1)
