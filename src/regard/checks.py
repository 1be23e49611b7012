"""Argument errors, in one place, so that every message names the call, what came, what was expected and
how to mend it.

Shapes, dtypes and Python numbers are always checked. The *contents* of tensors are not looked at on the hot
path (that would wait for the device and break compiled graphs) unless `debug()` is on.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_DEBUG: ContextVar[bool] = ContextVar("regard_debug", default=False)


class ArgumentError(ValueError):
    """A mistake in what the caller gave. The command line prints its message as one line and exits with 2."""


@contextmanager
def debug(enabled: bool = True) -> Iterator[None]:
    """Also check the contents of tensors inside this block: NaN or infinite inputs and parameters out of
    their range raise `ArgumentError`. Costs a device synchronisation per call."""
    token = _DEBUG.set(enabled)
    try:
        yield
    finally:
        _DEBUG.reset(token)


def debugging() -> bool:
    """Whether `debug()` is on. Never on while a graph is being compiled."""
    return not torch.compiler.is_compiling() and _DEBUG.get()


def closest(name: str, choices: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Return those of `choices` for which `name` may be a misspelling, two at most; with a higher cutoff, fewer."""
    return difflib.get_close_matches(name, sorted(set(choices)), n=2, cutoff=cutoff)


def suggestion(name: str, choices: Iterable[str]) -> str:
    """' Did you mean ...?' for the closest of `choices`, or the list of all of them."""
    known = sorted(set(choices))
    close = closest(name, known)
    if close:
        return f" Did you mean {' or '.join(repr(c) for c in close)}?"
    return f" Choose from: {', '.join(known)}."


def require(condition: bool, call: str, message: str) -> None:
    """Raise `ArgumentError("call: message")` unless `condition` holds."""
    if not condition:
        raise ArgumentError(f"{call}: {message}")


def shape(tensor: Tensor) -> str:
    """A shape as text, for error messages."""
    return "[" + ", ".join(str(n) for n in tensor.shape) + "]"


def floating(call: str, name: str, tensor: object) -> None:
    """`tensor` is a floating-point tensor."""
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"{call}: {name} is a {type(tensor).__name__}, expected a torch.Tensor.")
    if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
        raise ArgumentError(
            f"{call}: {name} has dtype {tensor.dtype}, expected a floating-point dtype; convert it with {name}.float()."
        )


def boolean_mask(call: str, name: str, mask: object) -> None:
    """`mask` is a boolean tensor (True may be attended)."""
    if not isinstance(mask, Tensor):
        raise ArgumentError(f"{call}: {name} is a {type(mask).__name__}, expected a boolean torch.Tensor.")
    if mask.dtype != torch.bool:
        raise ArgumentError(
            f"{call}: {name} has dtype {mask.dtype}, expected torch.bool with True where a key may be "
            f"attended; an additive mask converts with {name} == 0."
        )


def broadcastable(call: str, name: str, tensor: Tensor, target: tuple[int, ...]) -> None:
    """`tensor` broadcasts to `target` without enlarging it."""
    ok = tensor.dim() <= len(target) and all(
        a in (1, b) for a, b in zip(reversed(tensor.shape), reversed(target), strict=False)
    )
    if not ok:
        raise ArgumentError(
            f"{call}: {name} has shape {shape(tensor)}, which does not broadcast to "
            f"[{', '.join(str(n) for n in target)}]."
        )


def on_device(call: str, name: str, tensor: Tensor, device: torch.device) -> None:
    """`tensor` is where the others are."""
    if tensor.device != device:
        raise ArgumentError(f"{call}: {name} is on {tensor.device}, but the rest is on {device}; move it with .to().")


def in_range(
    call: str, name: str, value: object, low: float | None = None, high: float | None = None, *, strict: bool
) -> None:
    """A Python number (tensors only under `debug()`) above `low` and below `high`; bounds excluded where
    `strict`."""
    if isinstance(value, Tensor):
        if not debugging():
            return
        values = value.detach().double().flatten()
        if not bool(torch.isfinite(values).all()):
            raise ArgumentError(f"{call}: {name} holds NaN or infinite values.")
        least, most = (float(values.min()), float(values.max())) if values.numel() else (None, None)
    elif isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise ArgumentError(f"{call}: {name} is {value!r} ({type(value).__name__}), expected a number or tensor.")
    else:
        least = most = float(value)
        if least - least != 0:  # infinite or NaN, in a form that can be traced
            raise ArgumentError(f"{call}: {name} is {least}, expected a finite number.")
    sign = ">" if strict else ">="
    if low is not None and least is not None and (least <= low if strict else least < low):
        raise ArgumentError(f"{call}: {name} is {least:g}, expected {name} {sign} {low:g}.")
    sign = "<" if strict else "<="
    if high is not None and most is not None and (most >= high if strict else most > high):
        raise ArgumentError(f"{call}: {name} is {most:g}, expected {name} {sign} {high:g}.")


def finite(call: str, name: str, tensor: Tensor) -> None:
    """Under `debug()`: no NaN and no infinity in `tensor`."""
    if debugging() and not bool(torch.isfinite(tensor).all()):
        raise ArgumentError(f"{call}: {name} holds NaN or infinite values.")
