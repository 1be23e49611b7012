"""impl="linear": specs with finite features, in time and memory linear in the length."""

from typing import Any

import torch
from torch import Tensor

from ..pairwise.diagnostics import Diagnostics
from ..pairwise.dispatch import Cost, Inputs, Problem, register_impl
from ..pairwise.layout import repeat_heads
from .chunks import CHUNK, chunked
from .feature_sums import Sums
from .linear import bias_of, estimate, finite_features, signed
from .packing import Documents, by_document


@register_impl("linear", priority=30)
class Linear:
    """Run the chunked form of `regard.linear_attention`; with few queries and many keys compute all pairs."""

    def available(self) -> str | None:
        return None

    def supports(self, problem: Problem) -> str | None:
        if not finite_features(problem.spec):  # of most specs
            return "needs finite features: the linear kernel with the fixed rule, at degree 0"
        hidden = problem.segments and (problem.device == "meta" or torch.compiler.is_compiling())
        unable = {
            "needs a head": not problem.heads,
            "has first derivatives in reverse mode only, without torch.func transforms": problem.transformed,
            "has no row statistics: a sum over keys does not count them": problem.diagnostics,
            "has no window: keys cannot be taken out of a sum": problem.window is not None,
            "takes segments only with a query at every key": problem.segments and problem.queries != problem.keys,
            "reads the segment ids on the host, which compiled graphs and meta tensors do not allow": hidden,
            "computes one sum for all queries, so the mask may depend only on the key": problem.mask == "pairs",
            "needs one query_offset for all sequences, an int": problem.causal and problem.offset is None,
        }
        return next((why for why, holds in unable.items() if holds), None)

    def cost(self, problem: Problem) -> Cost:
        features, values = problem.dim + 1, problem.value_dim + 1
        state = features * values
        rows, groups = problem.batch * problem.heads * problem.queries, problem.batch * problem.kv_heads
        both, pair = min(problem.queries, problem.keys), features + values
        ratio = problem.heads // max(1, problem.kv_heads)
        size = 4 * rows * values
        if ratio * problem.queries * pair <= state:
            return Cost(2 * rows * problem.keys * pair, size + 4 * rows * problem.keys)
        inside = pair * min(CHUNK, both) if problem.causal else 0
        flops = 2 * (rows * (state + inside) + groups * problem.keys * state)
        guard = 2 * (rows + groups * problem.keys) * features * features if signed(problem.spec) else 0
        return Cost(flops + guard, size + 16 * max(2**19, groups * (ratio * CHUNK * CHUNK + state)))

    def run(self, inputs: Inputs) -> tuple[Tensor, Diagnostics | None]:
        visible, spec = inputs.visible, inputs.spec
        k, v, mask = inputs.k, inputs.v, visible.mask
        if mask is not None:
            mask = mask[..., 0, :].expand(*mask.shape[:2], visible.keys)
            if mask.shape[1] != 1:  # heads of a group may see different keys
                k, v = repeat_heads(k, inputs.q.shape[1]), repeat_heads(v, inputs.q.shape[1])
        packed = None if visible.runs is None else Documents(visible.runs[0].expand(k.shape[0], -1))
        offset = 0 if isinstance(visible.offset, Tensor) else visible.offset - int(visible.strict)
        order = (visible.causal, offset, CHUNK)

        def sum_keys(q: Tensor, bias: float | Tensor) -> Sums:
            return by_document(packed, add, (q, k, v, bias), mask)[0]

        def add(x: tuple[Any, ...], mask: Tensor | None, _: None) -> tuple[Sums, None]:
            q, k, v, bias = x
            return chunked(q, k, v, bias, mask, None, None, *order, keep=False, guarded=signed(spec)), None

        bias = bias_of(spec, inputs.params)
        return estimate(inputs.q, bias, visible.counts(k.device), spec, sum_keys)[0], None
