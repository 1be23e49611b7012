"""The argument `layout`: heads before tokens, or tokens before heads as in flash-attention and flash-linear-attention;
shared heads.

Legend: B batch, H heads, T positions, D channels.
"""

import re
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Literal, TypeVar, cast, get_args

from torch import Tensor

from ..checks import ArgumentError, one_of

Layout = Literal["bhtd", "bthd"]
F = TypeVar("F", bound=Callable[..., Any])
TURNED = frozenset({"query", "key", "value", "scale", "params", "log_decay", "beta", "ridge"})
"""Keyword arguments with axes of heads and tokens. Tensors among the positional arguments all have them."""


def any_layout(function: F) -> F:
    """Give `function`, which computes in "bhtd", its argument `layout`.

    With "bthd" axes 1 and 2 of every tensor of three or four axes are exchanged: [B, T, H, D] for query, key, value and
    output, [B, T, H] or [B, T, H, D] for numbers per token. Masks, segment ids, states and diagnostics stay as they
    are.
    """

    @wraps(function)
    def call(*args: Any, layout: Any = "bhtd", **kwargs: Any) -> Any:
        if layout == "bhtd":
            return function(*args, **kwargs)
        one_of(function.__name__, "layout", layout, get_args(Layout))
        converted = {name: _turned(x) if name in TURNED else x for name, x in kwargs.items()}
        try:
            result = function(*[_turned(x) for x in args], **converted)
        except ArgumentError as error:
            text = str(error)
        else:
            return (_turned(result[0]), *result[1:]) if isinstance(result, tuple) else _turned(result)
        # regard.compat's functions call this one and have no argument of that name, so the note does not name it
        note = " Shapes are shown with heads before tokens." if re.search(r"\[[^\]]*, ", text) else ""
        raise ArgumentError(f"{text}{note}")

    return cast(F, call)


def _turned(x: Any) -> Any:
    """Return a tensor of three or four axes with axes 1 and 2 exchanged, a mapping with its values so, else `x`."""
    if isinstance(x, Mapping):
        return {name: _turned(value) for name, value in x.items()}
    return x.transpose(1, 2) if isinstance(x, Tensor) and x.dim() in (3, 4) else x


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat each key head for every query head of its group: [B, Hkv, ...] -> [B, H, ...]."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
