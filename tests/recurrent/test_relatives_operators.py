"""The operators behind decay, Mesa and the delta rule are what torch asks of operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import regard


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "regard":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def draw(length: int = 9) -> list[Tensor]:
    make = torch.Generator().manual_seed(0)
    return [torch.randn(2, h, length, 4, generator=make).requires_grad_() for h in (4, 2, 2)]


CALLS: dict[str, Any] = {
    "decay": lambda x: regard.linear_attention(*x, "linear", log_decay=-0.1, chunk_size=4),
    "delta": lambda x: regard.delta_rule(*x, 0.2, chunk_size=4),
    "mesa": lambda x: regard.mesa_attention(*x, ridge=1.0, chunk_size=4),
    "fading": lambda x: regard.mesa_attention(*x, ridge=1.0, chunk_size=4, log_decay=-0.1, beta=0.5),
    "cg": lambda x: regard.mesa_attention(*x, ridge=1.0, chunk_size=4, log_decay=-0.1, solver="cg"),
}
OPERATORS = {"decayed_scan"}, {"decayed_scan", "mesa_solve", "mesa_attach"}


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    """Every operator that a forward and a backward pass calls."""
    with Recorder() as seen:
        out, state = CALLS[name](draw())
        (out.sum() + state.values.sum()).backward()
    found = {func.name().split("::")[1]: (func, args) for func, args in seen.calls}
    assert set(found) == OPERATORS[name in ("mesa", "fading", "cg")]
    for operator, (func, args) in found.items():
        gradient = operator == "decayed_scan"  # of the others one argument alone has a derivative, and one none
        fresh = [
            x.detach().clone().requires_grad_(gradient and x.is_floating_point()) if isinstance(x, Tensor) else x
            for x in args
        ]
        torch.library.opcheck(func, tuple(fresh))


@pytest.mark.parametrize("name", ["decay", "delta", "mesa", "fading"])
def test_transforms_see_a_loop(name: str) -> None:
    """vmap over sequences is what a call with all of them gives."""
    inputs = [x.detach() for x in draw()]
    each = torch.func.vmap(lambda *x: CALLS[name]([y[None] for y in x])[0][0])
    torch.testing.assert_close(each(*inputs), CALLS[name](inputs)[0], rtol=1e-5, atol=1e-5)
