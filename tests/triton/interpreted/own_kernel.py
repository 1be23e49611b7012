"""A compact kernel with a device function of its own, as somebody else would write it, and its formula for oracles."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from contracts import oracle
from dense_oracles import RULES
from torch import Tensor

from regard.grammar.kernels.base import RankedKernel, kernels

if TYPE_CHECKING:
    import triton.language as tl


def bump(a: Tensor) -> Tensor:
    """Return 1 - cos(a), 0 below 0 and 2 from pi on; without cancellation."""
    return 2 * (a.clamp(0, math.pi) / 2).sin().square()


@kernels.register("test-bump")
@dataclass(frozen=True)
class Bump(RankedKernel):
    """K(a) = 1 - cos(a) for 0 < a < pi, 2 above: the slope is 0 at both ends, and the kernel is no power."""

    name: ClassVar[str] = "test-bump"
    compact: ClassVar[bool] = True
    vanishes: ClassVar[bool] = True
    bandwidth: ClassVar[str] = "anchored"

    def relative(self, d: Tensor, reach: Any, params: Any) -> Tensor:
        return bump(reach - d) / bump(torch.as_tensor(reach))

    def relative_slope(self, d: Tensor, reach: Any, params: Any) -> Tensor:
        return (reach - d).clamp(0, math.pi).sin() / bump(torch.as_tensor(reach))

    @staticmethod
    def triton_relative(d, reach):  # type: ignore[no-untyped-def]
        half = 0.5 * tl.minimum(reach - d, 3.141592653589793)
        whole = tl.sin(0.5 * tl.minimum(reach, 3.141592653589793))
        rising = tl.sin(half)
        slope = tl.where(reach - d < 3.141592653589793, rising * tl.cos(half), 0.0)
        return (rising / whole) * (rising / whole), slope / (whole * whole)

    def value(self, a: Tensor, params: Any) -> Tensor:
        return bump(a)

    def slope(self, a: Tensor, params: Any) -> Tensor:
        return a.clamp(0, math.pi).sin()


oracle.OTHERS["test-bump"] = lambda a: 1 - a.clamp(0, math.pi).cos()
OWN = {
    "own anchored": "test-bump*anchored(margin=2)",
    **{f"own fixed, {empty}": f"test-bump*fixed(bias=0.5,empty={empty})" for empty in ("uniform", "zero", "nearest")},
}
"""Short name to spec."""
EVERY = {**RULES, **OWN}
