"""Illegal accesses, which neither the interpreter nor a GPU need tell of: every address that a kernel reads or writes
where its mask says so must lie in one of the tensors of the launch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves
from triton.runtime import interpreter


class OutOfBounds(BaseException):
    """No `Exception`, so that nothing on the way takes it for an ordinary failure."""


class _Extents:
    """Bytes [start, stop) of tensors, in order."""

    def __init__(self, tensors: list[Tensor]) -> None:
        found = sorted(_extent(x) for x in tensors if x.numel())
        self.start = np.array([a for a, _ in found], dtype=np.int64)
        self.stop = np.maximum.accumulate(np.array([b for _, b in found], dtype=np.int64)) if found else self.start

    def check(self, what: str, pointers: Any, mask: Any) -> None:
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        addresses, mask = np.broadcast_arrays(pointers.data, mask.data)
        at = addresses[mask.astype(bool)].astype(np.int64)
        if at.size == 0:
            return
        place = np.searchsorted(self.start, at, side="right") - 1
        good = (place >= 0) & (at + size <= self.stop[place]) if self.start.size else np.zeros(at.shape, dtype=bool)
        if not good.all():
            away = int(at[~good][0] - self.start[max(int(place[~good][0]), 0)]) if self.start.size else "no tensor"
            raise OutOfBounds(f"{what} of {int((~good).sum())} elements outside, {away} bytes from a start")


def _extent(x: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


@contextmanager
def watched() -> Iterator[None]:
    """Within it an access outside raises `OutOfBounds`; kernels use tensors where they lie, not copies of them."""
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store = builder.create_masked_load, builder.create_masked_store
    begin = executor._init_args_hst
    current: list[_Extents] = []

    def begun(self: Any, args: Any, kwargs: Any) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(x.device.type != "cpu" for x in tensors):
            return begin(self, args, kwargs)
        current[:] = [_Extents(tensors)]
        return list(args), dict(kwargs)

    def loaded(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        current[0].check("a load", ptrs, mask)
        return load(self, ptrs, mask, *rest)

    def stored(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        current[0].check("a store", ptrs, mask)
        return store(self, ptrs, value, mask, *rest)

    with (
        patch.multiple(builder, create_masked_load=loaded, create_masked_store=stored),
        patch.multiple(executor, _init_args_hst=begun, _restore_args_dev=lambda *_: None),
    ):
        yield
