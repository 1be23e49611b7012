"""What the tests of impl="cpu" share: numbers of rows, and derivatives by name."""

import torch
from torch import Tensor

from regard.grammar import Spec

OWN = ("margin", "bias")
"""Numbers of rules, which are given in every case; alpha and r only where they are learned."""


def numbers(spec: Spec, wobble: Tensor, learned: bool) -> dict[str, Tensor]:
    """Return a number for every row, at most `wobble` above that of the spec."""
    centre = {name: float(info.default) for name, info in spec.params.items() if learned or name in OWN}
    return {name: x + (0.3 if name == "alpha" else 1) * wobble for name, x in centre.items()}


def leaves(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return copies that collect gradients."""
    return {name: x.detach().to(dtype).clone().requires_grad_() for name, x in inputs.items()}


def derivatives(out: Tensor, inputs: dict[str, Tensor], g: Tensor) -> dict[str, Tensor]:
    """Return dL/dinput by name; zero for an input that has no part in `out`."""
    if not out.requires_grad:
        return {name: torch.zeros_like(x) for name, x in inputs.items()}
    found = torch.autograd.grad(
        out, list(inputs.values()), g.to(out.dtype), allow_unused=True, materialize_grads=True, retain_graph=True
    )
    return dict(zip(inputs, found, strict=True))
