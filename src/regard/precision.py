"""What a call does to its arguments before any mathematics: full precision, numbers for every row, and nothing in the
tensors that is not finite."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .checks import broadcastable, floating, in_range, on_device


def full_precision(device: str) -> Any:
    """Autocast off: it would round products inside, and differently in the backward pass."""
    return torch.autocast(device, enabled=False) if autocast(device) else nullcontext()


def autocast(device: str) -> bool:
    """Whether autocast is on; there are devices without it (meta)."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def transformed() -> bool:
    """Whether forward mode or a torch.func transform is on: operators with a backward of their own do not see
    either, and would answer with zero tangents."""
    if torch.compiler.is_compiling():
        return False
    return forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None


def clean(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Zero the non-finite vectors of x and return their mask; return (x, None) where a check on the CPU finds none.

    The check does not wait for a device and is no part of a graph. Entries so large that a product of two of them
    could overflow count as non-finite: zero times infinity would turn hidden content into NaN.
    """
    if all_clean(x):
        return x.contiguous(), None  # laid out as the copy below, so that not a bit depends on which it was
    bad = ~(x.detach().abs().amax(-1) <= _limit(x.dtype))
    return torch.where(bad[..., None], 0, x), bad


def all_clean(*tensors: Tensor) -> bool:
    """Return whether `clean` finds nothing in any of them; False as well where their numbers cannot be read here."""
    return _at_hand(*tensors) and all(map(_within, tensors))


def _largest(dtype: torch.dtype) -> tuple[int, int]:
    """As powers of two: the largest entry of a vector, and the largest score, half of what the dtype can hold."""
    return (500, 1022) if dtype == torch.float64 else (56, 126)


def _limit(dtype: torch.dtype) -> float:
    """The largest entry of a vector, as a number of that dtype: in float16 a larger one would be infinite itself."""
    return min(2.0 ** _largest(dtype)[0], torch.finfo(dtype).max)


SQUARES = {dtype: 4.0 ** _largest(dtype)[0] for dtype in (torch.float32, torch.float64)}
"""A sum of squares below this has no entry larger than `_largest`."""


def overflowing(query: Tensor, scale: float | Tensor) -> Tensor | None:
    """Which queries [..., Tq] are so large, times the scale, that the score of a key that `clean` lets pass could
    overflow; None where none can. A usual scale costs no look at the queries."""
    entry, score = _largest(query.dtype)
    if isinstance(scale, float) and query.shape[-1] * scale <= 2.0 ** (score - 2 * entry):
        return None
    size = query.detach().to(torch.promote_types(query.dtype, torch.float32)).abs().sum(-1)
    bad = ~(size * scale <= 2.0 ** (score - entry))
    return None if _at_hand(bad) and not bool(bad.any()) else bad


def _within(x: Tensor) -> bool:
    """Return whether no entry of x is too large or not a number. A sum of squares mostly tells, at one reading."""
    most = SQUARES.get(x.dtype)
    x = x.detach() if x.requires_grad else x
    if most is not None and x.is_contiguous():
        flat = x.view(-1)
        if torch.dot(flat, flat).item() < most:  # not so for NaN
            return True
    if x.numel() == 0:
        return True
    limit = _limit(x.dtype)
    least, most = torch.aminmax(x)
    return bool((least >= -limit) & (most <= limit))  # false for NaN, which aminmax hands on


def _at_hand(*tensors: Tensor) -> bool:
    """Whether the numbers in these tensors can be looked at here and now."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or transformed():
        return False
    return all(x.is_cpu and type(x) in PLAIN for x in tensors)


PLAIN = (Tensor, torch.nn.Parameter)
"""Tensors that hold numbers; their subclasses may stand for some."""


def either(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """a | b, None being false everywhere."""
    if a is None or b is None:
        return b if a is None else a
    return a | b


def row_number(
    call: str, name: str, value: Any, rows: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> float | Tensor:
    """A number, or a tensor broadcast to `rows` = [B, H, Tq] in the computing dtype; errors name `call`."""
    if not isinstance(value, Tensor):
        in_range(call, name, value, high=torch.finfo(dtype).max, strict=False)
        return float(value)
    floating(call, name, value)
    broadcastable(call, name, value, rows)
    on_device(call, name, value, device)
    return value.to(dtype).expand(rows)
