"""Preparation of arguments: full precision, numbers per row, and the handling of non-finite entries."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .checks import broadcastable, floating, in_range, on_device

R = TypeVar("R")
_NO_CONTEXT = nullcontext()


def full_precision(device: str) -> Any:
    """Return a context without autocast, which would round products, and differently in the backward pass."""
    return torch.autocast(device, enabled=False) if autocast(device) else _NO_CONTEXT


def autocast(device: str) -> bool:
    """Return whether autocast is on; some devices (meta) have none."""
    return (device in ("cpu", "cuda") or torch.amp.is_autocast_available(device)) and torch.is_autocast_enabled(device)


def transformed() -> bool:
    """Return whether forward mode or a torch.func transform is active, for which operators have zero tangents."""
    if torch.compiler.is_compiling():
        return False
    return forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None


def mapped(x: Tensor) -> bool:
    """Return whether torch.vmap runs over x, so that its contents cannot be read."""
    functorch = torch._C._functorch
    while transformed() and functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


def outside_graphs(run: Callable[..., R]) -> Callable[..., R]:
    """Decorator: keep a function out of compiled graphs. `torch.compiler.disable` imports the compiler, which takes
    seconds, so it is called only where a graph is being compiled."""

    @wraps(run)
    def call(*args: Any, **options: Any) -> R:
        return (torch.compiler.disable(run) if torch.compiler.is_compiling() else run)(*args, **options)

    return call


def clean(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Zero the non-finite vectors of x and return their mask; return (x, None) if a check on the CPU, which is not part
    of a graph, finds none. Entries whose products could overflow count as non-finite: zero times infinity is NaN."""
    if all_clean(x):
        return x.contiguous(), None  # the layout of the copy below, for equal bits
    bad = ~(x.detach().abs().amax(-1) <= _limit(x.dtype))
    return torch.where(bad[..., None], 0, x), bad


def clean_each(*tensors: Tensor) -> list[tuple[Tensor, Tensor | None]]:
    """Call `clean` for each tensor."""
    if all_clean(*tensors):
        return [(x.contiguous(), None) for x in tensors]
    return [clean(x) for x in tensors]


def all_clean(*tensors: Tensor) -> bool:
    """Return whether `clean` would find nothing in the tensors; False if they cannot be read here."""
    return readable(*tensors) and all(map(_within, tensors))


def _largest(dtype: torch.dtype) -> tuple[int, int]:
    """Return the largest entry of a vector and the largest score (half of the dtype's maximum), as powers of two."""
    return (500, 1022) if dtype == torch.float64 else (56, 126)


def _limit(dtype: torch.dtype) -> float:
    """Return the largest entry of a vector, at most the maximum of the dtype."""
    return min(2.0 ** _largest(dtype)[0], torch.finfo(dtype).max)


SQUARES = {dtype: 4.0 ** _largest(dtype)[0] for dtype in (torch.float32, torch.float64)}
"""A sum of squares below this has no entry larger than `_largest`."""


def scale_in_range(dim: int, scale: float | Tensor, dtype: torch.dtype) -> bool:
    """Return whether no score of vectors that pass `clean` can overflow at this scale."""
    entry, score = _largest(dtype)
    return isinstance(scale, float) and dim * scale <= 2.0 ** (score - 2 * entry)


def overflowing(query: Tensor, scale: float | Tensor) -> Tensor | None:
    """Return the queries [..., Tq] whose score with a key that passes `clean` could overflow, or None if none can.
    With a usual scale the queries are not read."""
    entry, score = _largest(query.dtype)
    if scale_in_range(query.shape[-1], scale, query.dtype):
        return None
    size = query.detach().to(torch.promote_types(query.dtype, torch.float32)).abs().sum(-1)
    bad = ~(size * scale <= 2.0 ** (score - entry))
    return None if readable(bad) and not bool(bad.any()) else bad


def _within(x: Tensor) -> bool:
    """Return whether no entry of x is NaN or too large."""
    if clearly_clean(x) or x.numel() == 0:
        return True
    limit = _limit(x.dtype)
    least, most = torch.aminmax(x.detach())
    return bool((least >= -limit) & (most <= limit))  # false for NaN, which aminmax returns


def clearly_clean(x: Tensor) -> bool:
    """Return whether x is contiguous and its sum of squares shows, in one pass, that no entry is NaN or too large."""
    most = SQUARES.get(x.dtype)
    if most is None or not x.is_contiguous():
        return False
    flat = (x.detach() if x.requires_grad else x).ravel()
    return torch.dot(flat, flat).item() < most  # not so for NaN


def readable(*tensors: Tensor) -> bool:
    """Return whether the contents of these tensors can be read now, without synchronising."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or transformed():
        return False
    return all(x.is_cpu and type(x) in PLAIN for x in tensors)


PLAIN = (Tensor, torch.nn.Parameter)
"""Types whose tensors hold numbers; subclasses may be placeholders."""


def either(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return a | b, where None means false everywhere."""
    if a is None or b is None:
        return b if a is None else a
    return a | b


def row_number(
    call: str, name: str, value: Any, rows: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> float | Tensor:
    """Return a number, or a tensor broadcast to `rows` = [B, H, Tq] in the computing dtype."""
    if not isinstance(value, Tensor):
        in_range(call, name, value, high=torch.finfo(dtype).max, strict=False)
        return float(value)
    floating(call, name, value)
    broadcastable(call, name, value, rows)
    on_device(call, name, value, device)
    return value.to(dtype).expand(rows)
