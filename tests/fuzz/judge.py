"""Judges a call: a valid one by its expected result, one with a bad argument by its error."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from regard.checks import ArgumentError

from .draw import Call
from .kinds import finite, label


def replacements(call: Call) -> list[tuple[str, Any]]:
    """Every argument with every value that may take its place."""
    taken = ((name, kind, call.given.get(name)) for name, kind in call.kinds.items())
    return [(name, x) for name, kind, given in taken for x in kind.values(given) if not kind.skip(x, given)]


def judged(call: Call, name: str, value: Any) -> tuple[str, str]:
    """(what became of the call with `value` for the argument `name`, why).

    "refused" and "valid" are as they should be; "foreign" is an error that is no ArgumentError, "nameless" one that
    lacks the name of the call or of the argument, "accepted" a call that should have been refused, "refused valid" the
    opposite, and "not finite" a valid one with a result that is not finite.
    """
    fine = call.kinds[name].accepts(value)
    where = f"{call.name}({name}={label(value)})"
    try:
        with quiet():
            result = call.run(**{**call.given, name: value})
    except ArgumentError as error:
        text = str(error)
        if fine:
            return "refused valid", f"{where}: {text[:200]}"
        named = _holds(text, call.name) and _holds(text, name)
        return ("refused", "") if named else ("nameless", f"{where}: {text[:200]}")
    except (Exception, RecursionError) as error:  # a fault, whatever it is
        return "foreign", f"{where}: {type(error).__name__}: {str(error)[:160]}"
    if not fine:
        return "accepted", where
    wild = isinstance(value, Tensor)  # contents are not looked at, so that they may be out of range
    return ("not finite", where) if any(finite(result)) and not wild else ("valid", "")


def _holds(text: str, name: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is not None


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def compared(call: Call, gradients: bool) -> str | None:
    """How a valid call differs from the expected result, or None."""
    leaves = {n: x.clone().requires_grad_() if gradients and n in call.gradients else x for n, x in call.given.items()}
    with quiet():
        found = first(call.run(**leaves))
    if call.truth is None:
        return next((f"{call.name}: {text} is not finite" for text in finite(found)), None)
    wide = {n: widened(x) for n, x in call.given.items()}
    if gradients:
        wide |= {n: wide[n].clone().requires_grad_() for n in call.gradients}
    expected = call.truth(**wide)
    fault = _apart(found, expected, call.tolerance, "the result")
    if fault is None and gradients and found.requires_grad and expected.requires_grad:
        weigh = torch.linspace(-1, 1, max(expected.numel(), 1), dtype=torch.float64).view(expected.shape)
        (found.double() * weigh).sum().backward()
        (expected * weigh).sum().backward()
        for name in call.gradients:
            zero = torch.zeros_like(wide[name])
            own, other = (zero if x[name].grad is None else x[name].grad for x in (leaves, wide))
            fault = fault or _apart(own, other, 20 * call.tolerance, f"the gradient of {name}")
    if fault is None:
        return None
    return f"{call.name}: {fault} with " + ", ".join(f"{n}={label(x)}" for n, x in call.given.items())


def _apart(found: Tensor, expected: Tensor, tolerance: float, what: str) -> str | None:
    if found.shape != expected.shape:
        return f"{what} has shape {list(found.shape)}, expected {list(expected.shape)}"
    if not expected.numel():
        return None
    gap = (found.detach().double() - expected.detach()).abs() / (1 + expected.detach().abs())
    worst = gap.nan_to_num(torch.inf).max().item()
    return f"{what} is {worst:.2g} off" if worst > tolerance else None


def widened(x: Any) -> Any:
    """Tensors in float64, wherever they stand."""
    if isinstance(x, Tensor):
        return x.detach().double() if x.is_floating_point() else x
    if isinstance(x, dict):
        return {n: widened(v) for n, v in x.items()}
    if type(x) in (tuple, list):
        return type(x)(widened(v) for v in x)
    return x


def first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result
