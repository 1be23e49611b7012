"""Compute linear attention over a sequence that is split between processes, which send only a state of fixed size.

    torchrun --nproc-per-node 2 examples/context_parallel.py

Process r has the r-th part of every sequence. It waits for the state after the parts before it, reads its own part with
that state, and passes the state on. The backward pass sends the state's gradient the other way. The processes work one
after the other, so this saves memory, not time; with several batches in turn they work at the same time, as a pipeline.
The same code serves `regard.delta_rule` and `regard.mesa_attention`, whose states are dataclasses of tensors too. The
flag `non_finite` of a state is not sent: a NaN makes the rest of its own part NaN, but not later parts.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, distributed

import regard


class Receive(torch.autograd.Function):
    """Receive tensors from another process; their gradients go back to it."""

    @staticmethod
    def forward(ctx: Any, source: int, start: Tensor, *like: Tensor) -> tuple[Tensor, ...]:
        # `start` requires a gradient, so that the backward pass comes here
        ctx.source = source
        found = tuple(torch.empty_like(x) for x in like)
        for x in found:
            distributed.recv(x, source)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        for x in gradients:
            distributed.send(x.contiguous(), ctx.source)
        return (None,) * (2 + len(gradients))


class Send(torch.autograd.Function):
    """Send tensors to another process; their gradients come from it. Returns `out` unchanged."""

    @staticmethod
    def forward(ctx: Any, target: int, out: Tensor, *sent: Tensor) -> Tensor:
        ctx.target = target
        ctx.save_for_backward(*sent)
        for x in sent:
            distributed.send(x.contiguous(), target)
        return out.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found = [torch.empty_like(x) for x in ctx.saved_tensors]
        for x in found:
            distributed.recv(x, ctx.target)
        return (None, gradient, *found)


def numbers(state: Any) -> dict[str, Tensor]:
    """Return the floating-point tensors of a state by name."""
    found = {field.name: getattr(state, field.name) for field in fields(state)}
    return {name: x for name, x in found.items() if isinstance(x, Tensor) and x.is_floating_point()}


def context_parallel(query: Tensor, key: Tensor, value: Tensor, spec: str = "elu") -> Tensor:
    """Return linear attention of this process's part of the sequence, [B, H, T / processes, Dv].

    Every process calls it with its own part, and calls backward on a loss of its own; the loss of the whole sequence is
    the sum of these.
    """
    rank, last = distributed.get_rank(), distributed.get_world_size() - 1
    state = regard.LinearState.empty(spec, key.shape[0], key.shape[1], key.shape[3], value.shape[3], dtype=key.dtype)
    if rank:
        start = torch.zeros((), requires_grad=True)
        found = Receive.apply(rank - 1, start, *numbers(state).values())
        state = replace(state, **dict(zip(numbers(state), found, strict=True)))
    out, state = regard.linear_attention(query, key, value, spec, state=state)
    return out if rank == last else Send.apply(rank + 1, out, *numbers(state).values())


def main() -> None:
    """Compare two processes with one that has the whole sequence."""
    distributed.init_process_group("gloo")
    rank, count = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    whole = [torch.randn(2, 4, 64, 16, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    expected = regard.linear_attention(*whole, "elu")[0]
    expected.square().sum().backward()
    part = slice(rank * 64 // count, (rank + 1) * 64 // count)
    own = [x.detach()[:, :, part].clone().requires_grad_() for x in whole]
    out = context_parallel(*own)
    out.square().sum().backward()
    torch.testing.assert_close(out, expected[:, :, part])
    for x, y in zip(own, whole, strict=True):
        torch.testing.assert_close(x.grad, y.grad[:, :, part])
    print(f"process {rank}: output and gradients equal those of one process")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
