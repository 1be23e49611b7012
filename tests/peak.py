"""Measure the peak memory of a call in a fresh process, in which glibc returns freed blocks at once; otherwise results
vary between runs."""

import sys

import pytest
from programs import python

PROGRAM = """
import sys
import torch
import regard
from regard.recurrent.leaky import leaky_average

torch.set_num_threads(1)
call, shape = eval(sys.argv[1]), tuple(map(int, sys.argv[2:]))


def status(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def step(*shape):
    make = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=make).requires_grad_() for _ in range(call.__code__.co_argcount)]
    upstream = torch.randn(shape, generator=make)
    before = status("VmRSS")
    out = call(*inputs)
    found = torch.autograd.grad(out, inputs, upstream, allow_unused=True)
    peak, gradients = status("VmHWM"), sum(x.numel() * x.element_size() for x in found if x is not None)
    return peak - before, gradients / 2**20


step(*shape[:-2], 256, shape[-1])
print(*step(*shape))
"""

on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def peak(call: str, *shape: int) -> tuple[float, float]:
    """Return (MiB, MiB of the gradients among them) that a forward and a backward pass takes beyond its inputs and the
    upstream gradient, after a warm-up with 256 positions.

    `call` is the text of a lambda whose arguments are normal float32 tensors of that shape, as is its result.
    """
    words = ("-W", "ignore", "-c", PROGRAM, call, *shape)
    whole, gradients = map(float, python(*words, timeout=880, MALLOC_MMAP_THRESHOLD_="131072").split())
    return whole, gradients
