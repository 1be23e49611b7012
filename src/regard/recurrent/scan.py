"""A linear recurrence over chunks, as one operator:

    h_{t+1} = a_t h_t + x_t

a_t is a diagonal (decay) or a matrix (the delta rule). A compiled graph has one node for it, whatever the length. The
derivative is the same recurrence run backwards, so it can be differentiated to any order.

Legend: G groups, n chunks, F rows and E columns of a state; a is [G, n, F], [G, n, 1] or [G, n, F, F].
"""

from typing import Any

import torch
from torch import Tensor

from ..precision import transformed


def scan(a: Tensor, x: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the state before each chunk [..., n, F, E], the state after all [..., F, E]), for a [..., n, F or 1] or
    [..., n, F, F]; Theta(n F E) memory."""
    leading = x.shape[:-3]
    flat = (a.reshape(-1, *a.shape[len(leading) :]), x.reshape(-1, *x.shape[-3:]), start.reshape(-1, *x.shape[-2:]))
    before, after = _loop(*flat) if transformed() else _scan(*flat)
    return before.unflatten(0, leading), after.unflatten(0, leading)


def _times(a: Tensor, h: Tensor) -> Tensor:
    """Return the product of a [G, F or 1] or [G, F, F] and h [G, F, E]."""
    return a @ h if a.dim() == 3 else a[..., None] * h


def _loop(a: Tensor, x: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    states = [start]
    for t in range(x.shape[1]):
        states.append(_times(a[:, t], states[-1]) + x[:, t])
    return torch.stack(states[:-1], 1), states[-1]


@torch.library.custom_op("regard::decayed_scan", mutates_args=())
def _scan(a: Tensor, x: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    before, state = torch.empty_like(x, memory_format=torch.contiguous_format), start.clone()
    for t in range(x.shape[1]):
        before[:, t] = state
        state = _times(a[:, t], state).add_(x[:, t])
    return before, state


@_scan.register_fake
def _(a, x, start):  # type: ignore[no-untyped-def]
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(start)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[0], output[0])


def _differentiate(ctx: Any, g_before: Tensor, g_after: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    a, before = ctx.saved_tensors
    transposed = a.transpose(-1, -2) if a.dim() == 4 else a
    later, g_start = _scan(transposed.flip(1), g_before.flip(1), g_after.contiguous())
    later = later.flip(1)
    if a.dim() == 4:
        return later @ before.transpose(-1, -2), later, g_start
    g_a = (later * before).sum(-1)
    return (g_a.sum(-1, keepdim=True) if a.shape[-1] == 1 else g_a), later, g_start


_scan.register_autograd(_differentiate, setup_context=_save)
