"""impl="sdpa": Gaussian weights by torch's own scaled_dot_product_attention.

torch aligns is_causal to the first key and lets hidden NaN through; the caller has removed what is not finite, and
here causal order is handed over only where both alignments agree.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from .diagnostics import Diagnostics
from .dispatch import Cost, Inputs, Problem, register_impl
from .visibility import Visibility

LIMIT = 2**22
"""Pairs of a mask that is made here, from a mask over keys and causal order."""


@register_impl("sdpa", priority=40)
class SDPA:
    """Theta(n d) memory without a mask. Not twice differentiable (torch says so when asked)."""

    def available(self) -> str | None:
        return None

    def supports(self, problem: Problem) -> str | None:
        spec = problem.spec
        if spec.degree or spec.kernel.name != "gaussian" or spec.bandwidth.name != "fixed" or not spec.normalise:
            return "computes normalised Gaussian weights of degree 0 alone (softmax, rbf)"
        if problem.diagnostics:
            return "has no row statistics to report"
        if problem.transformed:
            return "has no forward-mode derivatives"
        if problem.segments:
            return "knows no segments"
        if problem.mask == "pairs":
            return None  # the caller holds Tq x Tk already
        if problem.mask == "keys" and not problem.positional:
            return None
        if problem.mask == "keys":
            size = problem.batch * problem.queries * problem.keys
            if isinstance(size, torch.SymInt) and torch.compiler.is_exporting():
                return "would build a mask of pairs, of which an exported graph has no limit"
            return None if size <= LIMIT else f"would build a mask of {size:,} pairs (limit {LIMIT:,})"
        if problem.window is not None or problem.strict:
            return "has no window and no strictly causal order without a mask of Tq x Tk"
        if problem.causal and not _square(problem) and not _all_visible(problem):
            return "aligns causal order to the first key, so that Tq must equal Tk (or be 1)"
        return None

    def native(self, problem: Problem) -> bool:
        """Return whether torch scales the scores itself. In 16 bits it accumulates in float32 on a GPU alone."""
        wide = problem.device == "cuda" or problem.dtype in (torch.float32, torch.float64)
        return wide and problem.spec.similarity.name == "dot" and problem.scale == "number"

    def cost(self, problem: Problem) -> Cost:
        pairs = problem.batch * problem.heads * problem.queries * problem.keys
        shared = problem.queries * problem.keys * problem.batch if problem.mask else 0
        rows = problem.batch * problem.heads * problem.queries
        return Cost(2 * pairs * (problem.dim + problem.value_dim), 4 * rows * problem.value_dim + shared)

    def run(self, inputs: Inputs) -> tuple[Tensor, Diagnostics | None]:
        q, k, v, visible = inputs.q, inputs.k, inputs.v, inputs.visible
        dim, width = q.shape[3], v.shape[3]
        if dim == width:
            return self._attend(q, k, v, visible, inputs.factor), None
        # torch's linear-memory kernel needs equal widths; zeros change neither a score nor an output.
        q, k, v = (pad(x, (0, max(dim, width) - x.shape[3])) for x in (q, k, v))
        return self._attend(q, k, v, visible, inputs.factor)[..., :width], None

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Visibility, scale: float | Tensor) -> Tensor:
        assert not isinstance(scale, Tensor)  # `native` has seen to it
        grouped = False
        if k.shape[1] != q.shape[1]:  # a plain bool, which traced lengths would not give
            grouped = True
        if visible.mask is None:
            causal = False if visible.queries == 1 else visible.causal  # one query sees every key here
            return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
        mask = visible.block(0, visible.queries, 0, visible.keys, q.device)
        assert mask is not None
        mask = mask.expand(*mask.shape[:-2], visible.queries, visible.keys)
        empty = ~mask.any(-1, keepdim=True)
        # A row without keys attends to all of them and is then put to zero, so that no kernel of torch has
        # to define what a row without keys means, forward or backward.
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask | empty, scale=scale, enable_gqa=grouped)
        return torch.where(empty, 0, out)


def _square(problem: Problem) -> bool:
    return problem.queries == problem.keys and problem.offset == 0


def _all_visible(problem: Problem) -> bool:
    return problem.queries == 1 and problem.offset is not None and problem.offset >= problem.keys - 1
