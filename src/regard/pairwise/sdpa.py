"""impl="sdpa": Gaussian weights by torch.nn.functional.scaled_dot_product_attention.

torch aligns is_causal to the first key, and masked NaN reaches its output. So the caller removes non-finite numbers,
and `is_causal` is used only if both alignments agree.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from .diagnostics import Diagnostics
from .dispatch import Cost, Implementation, Inputs, Problem, register_impl

LIMIT = 2**22
"""Most pairs of a mask that is built here, from a mask over keys and causal order."""


@register_impl("sdpa", priority=40)
class SDPA(Implementation):
    """Call torch's fused attention for Gaussian weights, in Theta(n d) memory without a mask.

    Not twice differentiable: torch raises an error. A hook that replaces it would slow every call with gradients.
    """

    def supports(self, problem: Problem) -> str | None:
        spec = problem.spec
        if spec.degree or spec.kernel.name != "gaussian" or spec.bandwidth.name != "fixed" or not spec.normalise:
            return "computes only normalised Gaussian weights of degree 0 (softmax, rbf)"
        if problem.diagnostics:
            return "has no row statistics"
        if problem.transformed:
            return "has no forward-mode derivatives"
        if problem.segments:
            return "has no segments"
        if problem.mask == "pairs" or (problem.mask == "keys" and not problem.positional):
            return None  # the caller already holds Tq x Tk, or all queries see the same keys
        if problem.mask == "keys":
            size = problem.batch * problem.queries * problem.keys
            if isinstance(size, torch.SymInt) and torch.compiler.is_exporting():
                return "would build a mask of pairs, whose size an exported graph does not limit"
            return None if size <= LIMIT else f"would build a mask of {size:,} pairs (limit {LIMIT:,})"
        if problem.window is not None or problem.strict:
            return "has no window and no strictly causal order without a mask of Tq x Tk"
        if not problem.causal or (problem.queries == problem.keys and problem.offset == 0):
            return None
        if problem.queries == 1 and problem.offset is not None and problem.offset >= problem.keys - 1:
            return None
        return "aligns causal order to the first key, so that Tq must equal Tk (or be 1)"

    def native(self, problem: Problem) -> bool:
        """Return whether torch can scale the scores. With 16 bits, only a GPU accumulates in float32."""
        wide = problem.device == "cuda" or problem.dtype in (torch.float32, torch.float64)
        return wide and problem.spec.similarity.name == "dot" and problem.scale == "number"

    def cost(self, problem: Problem) -> Cost:
        pairs = problem.batch * problem.heads * problem.queries * problem.keys
        shared = problem.queries * problem.keys * problem.batch if problem.mask else 0
        rows = problem.batch * problem.heads * problem.queries
        return Cost(2 * pairs * (problem.dim + problem.value_dim), 4 * rows * problem.value_dim + shared)

    def run(self, inputs: Inputs) -> tuple[Tensor, Diagnostics | None]:
        q, k, v, visible, scale = inputs.q, inputs.k, inputs.v, inputs.visible, inputs.factor
        assert not isinstance(scale, Tensor)  # ensured by `native`
        if math.frexp(scale)[0] != 0.5 and q.is_cpu:
            # Torch's two passes on a CPU round a score times a scale that is no power of two differently. Beyond 2^27
            # the difference, of a few ulp, overflows in the exponential of the backward pass.
            if q is k:  # keep one tensor for the backward pass
                q = k = k * scale**0.5
            else:
                q = q * scale
            scale = 1.0
        dim, width = q.shape[3], v.shape[3]
        if dim != width:  # torch's linear-memory kernel needs equal widths; zeros change no score and no output
            q, k, v = (pad(x, (0, max(dim, width) - x.shape[3])) for x in (q, k, v))
        grouped = False
        if k.shape[1] != q.shape[1]:  # a plain bool; comparing traced lengths would not give one
            grouped = True
        if visible.mask is None:
            causal = False if visible.queries == 1 else visible.causal  # one query sees every key here
            out = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
        else:
            mask = visible.block(0, visible.queries, 0, visible.keys, q.device)
            mask = mask.expand(*mask.shape[:-2], visible.queries, visible.keys)
            empty = ~mask.any(-1, keepdim=True)
            # A row without keys attends to all keys and is then zeroed, so that the result does not depend on how
            # torch's kernels treat an empty row, forward or backward.
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask | empty, scale=scale, enable_gqa=grouped)
            out = torch.where(empty, 0, out)
        return (out if dim == width else out[..., :width]), None
