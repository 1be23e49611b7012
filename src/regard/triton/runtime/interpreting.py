"""Fixes for bfloat16 in Triton's interpreter.

The interpreter keeps bfloat16 numbers as bits in uint16. Up to Triton 3.9 `tl.dot` multiplies these bits, float32 is
rounded toward zero, and integers and truth values become bits. Here operands are widened to float32 first, exactly, and
numbers are rounded to the nearest, ties to even, as on a GPU. Kernels convert to float32 for other arithmetic.
"""

import os
from functools import cache
from typing import Any


def interpreted() -> bool:
    """Return whether Triton runs kernels on the CPU. Triton reads the variable when it is imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def patch_interpreter() -> None:
    """Fix the interpreter, once in a process. Do nothing where kernels are compiled."""
    if not interpreted():
        return
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16 or x.data.dtype != np.uint16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def rounded(convert: Any, builder: Any, x: Any, to: Any, *more: Any) -> Any:
        if to.scalar != tl.bfloat16 or x.dtype.scalar == tl.bfloat16 or x.dtype.scalar.is_fp8():
            return convert(builder, x, to, *more)
        numbers = np.asarray(x.data).astype(np.float32)
        bits = numbers.view(np.uint32)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # wraps around for some NaN alone
        return TensorHandle(np.where(np.isnan(numbers), 0x7FC0, nearest).astype(np.uint16), tl.bfloat16)

    dot = InterpreterBuilder.create_dot
    InterpreterBuilder.create_dot = lambda builder, a, b, *more: dot(builder, widened(a), widened(b), *more)
    for name in ("cast_impl", "create_fp_to_fp"):
        convert = getattr(InterpreterBuilder, name)
        setattr(InterpreterBuilder, name, lambda *given, convert=convert: rounded(convert, *given))
