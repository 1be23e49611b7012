"""Compile the numba loops into their cache, so that test processes do not each compile them. `make test` runs it beside
the type checks. Without numba it does nothing."""

import sys
from importlib.util import find_spec

import torch

import regard

if find_spec("numba") is None:
    sys.exit()
for dtype in (torch.float32, torch.float64):
    x = torch.randn(1, 1, 8, 4, dtype=dtype, requires_grad=True)
    regard.attention(x, x, x, "sparsemax", is_causal=True, impl="cpu").sum().backward()
