"""What Triton's interpreter does over and over, done once: numbers and checks are the same, and tests of many small
kernels take half the time or less."""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import semantic
from triton.runtime import interpreter


def take() -> None:
    """Once in a process. What another version of Triton has not is left alone."""
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    interpreter._patch_lang, interpreter.GridExecutor.__call__ = _once_a_launch(
        interpreter._patch_lang, interpreter.GridExecutor.__call__
    )
    owner = getattr(semantic, "TritonSemantic", None)
    if hasattr(owner, "binary_op_sanitize_overflow_impl"):
        owner.binary_op_sanitize_overflow_impl = _refuse_overflow


def _by_name(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The types of NumPy, whose table is otherwise made anew for every tensor."""
    known: dict[str, Any] = {}

    def found(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = find(kind)
        return known[name]

    return found


def _once_a_launch(patch: Callable[..., Any], begin: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
    """Before each call of one kernel function by another, all of `triton.language` is searched for what to replace,
    and has been replaced already."""
    done: set[frozenset[int]] = set()

    def patched(fn: Any) -> Any:
        modules = frozenset(id(x) for x in fn.__globals__.values() if x is tl or x is tl.core)
        if modules in done:
            return None
        done.add(modules)
        return patch(fn)

    def begun(self: Any, *args: Any, **options: Any) -> Any:
        done.clear()  # the end of a launch puts everything back
        return begin(self, *args, **options)

    return patched, begun


def _refuse_overflow(self: Any, one: Any, other: Any, operation: Any) -> None:
    """Of whole numbers of at most 32 bits, in three operations of NumPy: the interpreter's own takes a dozen."""
    kind = one.type.scalar
    if kind.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
        return
    a, b = (np.asarray(x.handle.data).astype(np.int64) for x in (one, other))
    exact = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[operation.__name__](a, b)
    inside = exact.min() >= kind.get_int_min_value() and exact.max() <= kind.get_int_max_value()
    assert inside, f"int{kind.int_bitwidth} overflow detected for operation {operation.__name__}"
