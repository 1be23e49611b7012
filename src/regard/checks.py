"""Checks of arguments. Every message names the call, the given value, what was expected and how to correct it.

Shapes, dtypes and Python numbers are always checked. The contents of tensors are checked only under `debug()`: reading
them synchronises the device and breaks compiled graphs.
"""

import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

from .errors import ArgumentError as ArgumentError
from .errors import closest as closest
from .errors import require as require
from .errors import suggestion as suggestion

R = TypeVar("R")
_CALL = re.compile(r"[\w.]+: ")
_DEBUG: ContextVar[bool] = ContextVar("regard_debug", default=False)


@contextmanager
def debug(enabled: bool = True) -> Iterator[None]:
    """Raise `ArgumentError` inside this block also for NaN or infinite inputs and for tensors of parameters out of
    range. Costs a device synchronisation per call."""
    token = _DEBUG.set(enabled)
    try:
        yield
    finally:
        _DEBUG.reset(token)


def debugging() -> bool:
    """Return whether `debug()` is on and no graph is being compiled."""
    return not torch.compiler.is_compiling() and _DEBUG.get()


def within(call: str, argument: str | None, make: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """Return make(*args, **kwargs). An `ArgumentError` that it raises names `call` and `argument`, or without
    `argument` `call` in place of the inner call, whose arguments have the same names."""
    try:
        return make(*args, **kwargs)
    except ArgumentError as error:
        text = str(error)
    if argument is not None:
        raise ArgumentError(f"{call}: {argument}: {text.removeprefix(f'{call}: ')}")
    inner = _CALL.match(text)
    raise ArgumentError(f"{call}: {text[inner.end() :] if inner else text}")


def refuse(call: str, name: str, value: object, expected: str) -> ArgumentError:
    """Return the error that names the given value of an argument and what was expected."""
    return ArgumentError(f"{call}: {name} is {shown(value)}, expected {expected}.")


def shown(value: object) -> str:
    """Return a value as text for error messages: a tensor by its dtype and shape, the rest by a short repr."""
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor {shape(value)}"
    try:
        text = repr(value) if isinstance(value, (str, float)) else reprlib.repr(value)
    except Exception:  # an int of more than 4,300 digits, or a faulty __repr__
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def shape(tensor: Tensor) -> str:
    """Return a shape as text, for error messages."""
    return sizes(tensor.shape)


def sizes(axes: Iterable[int | str]) -> str:
    """Return axes, by size or by name, as text: "[2, T, D]"."""
    return f"[{', '.join(map(str, axes))}]"


def flag(call: str, name: str, value: Any) -> bool:
    """Return `value` after checking that it is True or False."""
    if not isinstance(value, bool):
        raise refuse(call, name, value, "True or False")
    return value


def flags(call: str, **given: object) -> None:
    """Check that every argument is True or False."""
    for name, value in given.items():
        flag(call, name, value)


def whole(call: str, name: str, value: Any, low: int | None = None, high: int | None = None, *, why: str = "") -> Any:
    """Return `value` after checking that it is a whole number from `low` to `high`; `why` ends the message."""
    ok = isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
    if not ok or (low is not None and value < low) or (high is not None and value > high):
        bounded = high is not None and (high < 2**31 or (ok and value > high))  # large safety bounds are not named
        span = f" from {low} to {high}" if bounded else "" if low is None else f" >= {low}"
        raise refuse(call, name, value, f"a whole number{span}{why}")
    return value


def optional_whole(call: str, name: str, value: Any, low: int | None = None, high: int | None = None) -> Any:
    """Return `value` after checking that it is None or a whole number from `low` to `high`."""
    return value if value is None else whole(call, name, value, low, high, why=" or None")


def choice(call: str, name: str, value: Any, choices: Iterable[Any]) -> Any:
    """Return `value` after checking that it is one of `choices`: words, and possibly None."""
    known = list(choices)
    if not (value is None or isinstance(value, str)) or value not in known:
        hint = suggestion(value if isinstance(value, str) else "", [str(word) for word in known])
        raise ArgumentError(f"{call}: unknown {name}={shown(value)}.{hint}")
    return value


def one_of(call: str, name: str, value: Any, words: Iterable[str]) -> Any:
    """Return `value` after checking that it is one of two or three words, which the message lists."""
    if not isinstance(value, str) or value not in words:
        raise refuse(call, name, value, " or ".join(map(repr, words)))
    return value


def instance(call: str, name: str, value: Any, kinds: type | tuple[type, ...], expected: str) -> Any:
    """Return `value` after checking its type."""
    if not isinstance(value, kinds):
        raise ArgumentError(f"{call}: {name} is {shown(value)} ({type(value).__name__}), expected {expected}.")
    return value


def mapping(call: str, name: str, value: Any) -> dict[str, Any]:
    """Return a mapping with names as keys as a new dict; an empty one for None."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ArgumentError(f"{call}: {name} is a {type(value).__name__}, expected a mapping of names to numbers.")
    return dict(value)


def tensor(
    call: str, name: str, value: Any, *axes: int | str, like: Tensor | None = None, of: str = "query", why: str = ""
) -> Tensor:
    """Return `value` after checking that it is a floating-point tensor, on the device of `like`, which is called `of`.
    `axes` are sizes, or names where the size is free (none: any shape); `why` ends the message about a shape."""
    floating(call, name, value)
    _has_axes(call, name, value, axes, why)
    if like is not None:
        on_device(call, name, value, like.device, of)
    return value


def is_integer(value: Any) -> bool:
    """Return whether `value` is a tensor of whole numbers."""
    other = not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex()
    return not (other or value.dtype == torch.bool)


def integers(call: str, name: str, value: Any, *axes: int | str, why: str = "") -> Tensor:
    """Return `value` after checking that it is an integer tensor with these axes; `why` ends the message about them."""
    if not is_integer(value):
        raise refuse(call, name, value, f"integers {sizes(axes)}{why}")
    _has_axes(call, name, value, axes, why)
    return value


def token_numbers(call: str, name: str, value: Any, batch: int, tokens: int) -> None:
    """Check that `value` is an integer tensor [B or 1, T]."""
    integers(call, name, value, "B or 1", tokens)
    if value.shape[0] != 1 and value.shape[0] != batch:  # dynamo gets `in` wrong for symbols
        raise ArgumentError(f"{call}: {name} has shape {shape(value)}, expected [{batch} or 1, {tokens}].")


def token_mask(call: str, name: str, value: Any, *axes: int | str, like: Tensor, of: str = "query") -> None:
    """Check that `value` is None or a boolean tensor with these axes, on the device of `like`."""
    if value is not None:
        boolean_mask(call, name, value)
        _has_axes(call, name, value, axes, ", True for the tokens that are not padding")
        on_device(call, name, value, like.device, of)


def segments(call: str, ids: Any, batch: int, tokens: int, device: torch.device) -> None:
    """Check that `segment_ids` is None or an integer tensor [B or 1, T]."""
    if ids is not None:
        token_numbers(call, "segment_ids", ids, batch, tokens)
        on_device(call, "segment_ids", ids, device)


def _has_axes(call: str, name: str, x: Tensor, axes: tuple[int | str, ...], why: str) -> None:
    fits = len(axes) == x.dim() and all(a == n or isinstance(a, str) for a, n in zip(axes, x.shape, strict=True))
    if axes and not fits:
        raise ArgumentError(f"{call}: {name} has shape {shape(x)}, expected {sizes(axes)}{why}.")


def floating(call: str, name: str, tensor: object) -> None:
    """Check that `tensor` is a floating-point tensor."""
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"{call}: {name} is a {type(tensor).__name__}, expected a torch.Tensor.")
    if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
        expected = f"a floating-point dtype; convert it with {name}.float()"
        raise ArgumentError(f"{call}: {name} has dtype {tensor.dtype}, expected {expected}.")


def boolean_mask(call: str, name: str, mask: object) -> None:
    """Check that `mask` is a boolean tensor (True may be attended)."""
    if not isinstance(mask, Tensor):
        raise ArgumentError(f"{call}: {name} is a {type(mask).__name__}, expected a boolean torch.Tensor.")
    if mask.dtype != torch.bool:
        expected = f"torch.bool with True where a key may be attended; an additive mask converts with {name} == 0"
        raise ArgumentError(f"{call}: {name} has dtype {mask.dtype}, expected {expected}.")


def broadcastable(call: str, name: str, tensor: Tensor, target: tuple[int, ...]) -> None:
    """Check that `tensor` broadcasts to `target` without enlarging it."""
    last = zip(reversed(tensor.shape), reversed(target), strict=False)
    if tensor.dim() > len(target) or any(a not in (1, b) for a, b in last):
        raise ArgumentError(f"{call}: {name} has shape {shape(tensor)}, which does not broadcast to {sizes(target)}.")


def on_device(call: str, name: str, tensor: Tensor, device: torch.device, of: str = "the rest") -> None:
    """Check that `tensor` is on `device`, the device of the argument `of`."""
    if tensor.device != device:
        raise ArgumentError(f"{call}: {name} is on {tensor.device}, but {of} is on {device}; move it with .to().")


def in_range(
    call: str, name: str, value: object, low: float | None = None, high: float | None = None, *, strict: bool
) -> None:
    """Check that a number lies between `low` and `high` (excluded if `strict`); tensors only under `debug()`."""
    if isinstance(value, Tensor):
        if not debugging():
            return
        values = value.detach().double().flatten()
        if not bool(torch.isfinite(values).all()):
            raise ArgumentError(f"{call}: {name} holds NaN or infinite values.")
        least, most = (float(values.min()), float(values.max())) if values.numel() else (None, None)
    elif isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise ArgumentError(f"{call}: {name} is {shown(value)} ({type(value).__name__}), expected a number or tensor.")
    else:
        if isinstance(value, int) and abs(value) >= 2**1023:  # float() would raise
            raise refuse(call, name, value, "a number that a float can hold")
        least = most = float(value)
        if least - least != 0:  # infinite or NaN, in a form that can be traced
            raise ArgumentError(f"{call}: {name} is {least}, expected a finite number.")
    equal = "" if strict else "="
    if low is not None and least is not None and (least <= low if strict else least < low):
        raise ArgumentError(f"{call}: {name} is {least:g}, expected {name} >{equal} {low:g}.")
    if high is not None and most is not None and (most >= high if strict else most > high):
        raise ArgumentError(f"{call}: {name} is {most:g}, expected {name} <{equal} {high:g}.")


def number(
    call: str, name: str, value: Any, low: float | None = None, high: float | None = None, *, strict: bool = False
) -> float:
    """Return a Python number as a float after checking that it lies between `low` and `high`; tensors are refused."""
    if isinstance(value, Tensor):
        raise refuse(call, name, value, "a number")
    in_range(call, name, value, low, high, strict=strict)
    return float(value)


def finite(call: str, name: str, tensor: Tensor) -> None:
    """Check under `debug()` that `tensor` holds no NaN and no infinity."""
    if debugging() and not bool(torch.isfinite(tensor).all()):
        raise ArgumentError(f"{call}: {name} holds NaN or infinite values.")
