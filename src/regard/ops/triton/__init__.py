"""Kernels in Triton. Nothing here imports triton before a kernel runs, so that regard does without it.

`support` says when the kernels run; `launch` runs one; `tiles` holds the block sizes that are shipped; `span` gives
kernels the keys that each query sees. What is registered from here: `impl="triton"` of `regard.attention`
(`attention`) and of `regard.fast_weight_memory`. Also public: `decode_attention` and `KeyBounds` (`decode`).
"""

from __future__ import annotations

from typing import Any

_DECODING = ("KeyBounds", "decode_attention")


def __getattr__(name: str) -> Any:
    """`decode` checks arguments as `regard.attention` does, which is not there yet when this package is imported."""
    if name in _DECODING:
        from . import decode

        return getattr(decode, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
