"""The implementation "triton" of `regard.attention`: which kernels run a call."""

from typing import Any, ClassVar

from torch import Tensor

from ..pairwise.diagnostics import Diagnostics
from ..pairwise.dispatch import Cost, Inputs, Problem, register_impl
from ..pairwise.visibility import Visibility
from .compact import implementation as compact
from .decode import compact as compact_decode
from .decode import local_linear as local_linear_decode
from .local_linear import implementation as local_linear
from .runtime import support
from .runtime.finite import clean
from .runtime.span import seen_rows


@register_impl("triton", priority=35)
class Triton:
    """Run fused kernels on a GPU: sparse and local linear attention in Theta(n d) memory, forward and backward. With
    one query, the keys are split between programs."""

    name: ClassVar[str] = "triton"

    def available(self) -> str | None:
        return support.MISSING

    def supports(self, problem: Problem) -> str | None:
        return support.unsupported(problem) or _kernels(problem.spec.degree).supports(problem)

    def hesitates(self, problem: Problem) -> str | None:
        return "for tests: on this device Triton only interprets" if problem.device == "cpu" else None

    def native(self, problem: Problem) -> bool:
        return bool(problem.spec.similarity.name == "dot")

    def raw(self, problem: Problem) -> bool:
        """Return whether the call decodes one query: a cleaned copy of the cache doubles the bytes that are read."""
        return self.native(problem) and _decodes(problem)

    clean = staticmethod(clean)  # `precision.clean_each` as one launch

    def seen_rows(self, visible: Visibility, heads: int, *bad: Tensor) -> Tensor:
        """Return which rows see non-finite numbers, by two launches."""
        return seen_rows(visible, *bad)

    def cost(self, problem: Problem) -> Cost:
        return _kernels(problem.spec.degree, _decodes(problem)).cost(problem)

    def run(self, inputs: Inputs) -> tuple[Tensor, Diagnostics | None]:
        return _kernels(inputs.spec.degree, _decodes(inputs.problem)).run(inputs)


def _kernels(degree: int, decoding: bool = False) -> Any:
    """Return the module with the kernels."""
    general, decode = (compact, compact_decode) if degree == 0 else (local_linear, local_linear_decode)
    return decode if decoding else general


def _decodes(problem: Problem) -> bool:
    """Return whether the call has one query and needs only its output, so that the keys are split between programs."""
    one = problem.queries == 1 and problem.heads <= compact_decode.ROWS * problem.kv_heads
    more = problem.gradient or problem.diagnostics
    return one and not more and (problem.spec.degree == 0 or local_linear_decode.fits(problem))
