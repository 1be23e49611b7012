"""Kernels in stock models against dense attention functions: weights of the entmax package, and regressions fitted
with them."""

from functools import partial
from typing import Any

import entmax
import pytest
import torch
from tiny_models import ALL, PADDING, real_tokens, same_gradients, tiny, tokens, without_dropout
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from regard.integrations.transformers import register

register("gaussian*linear(ridge=0.5,solver=cholesky)")


def relumax(z: Tensor) -> Tensor:
    w = (z - z.amax(-1, keepdim=True) + 1).clamp(min=0)
    return w / w.sum(-1, keepdim=True)


WEIGHTS = {
    "biweight": lambda z: entmax.entmax15(z, dim=-1),
    "local-linear": lambda z: z.softmax(-1),
    "local-linear[biweight]": lambda z: entmax.entmax15(z, dim=-1),
    "sparsemax": lambda z: entmax.sparsemax(z, dim=-1),
    "triweight": lambda z: entmax.entmax_bisect(z, alpha=4 / 3, dim=-1, n_iter=60),
    "relumax": relumax,
}
RIDGE = 0.1


def dense(
    weigh: Any,
    local: bool,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Weighted means of the values; `local`, weighted ridge regressions of values on keys with a free intercept at each
    query: linear systems of D + 1 unknowns, sum p [1, k - q]^T [1, k - q] + diag(0, ridge)."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    z = query @ key.mT * scaling
    queries, keys = z.shape[-2:]
    if attention_mask is None:
        causal = getattr(module, "is_causal", True)
        seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries) if causal else torch.ones_like(z) > 0
    else:
        seen = attention_mask
    seen = seen.expand(z.shape)
    empty = ~seen.any(-1, keepdim=True)
    top = z.masked_fill(~seen, -torch.inf).amax(-1, keepdim=True)
    hidden = torch.where(empty, 0, top) - 50  # far enough for every kernel, and near enough for a bisection
    p = weigh(torch.where(seen, z, hidden)) * (seen & ~empty)
    if not local:
        return (p @ value).transpose(1, 2).contiguous(), None
    away = key[:, :, None] - query[:, :, :, None]
    design = torch.cat((torch.ones_like(away[..., :1]), away), -1)  # [B, H, Tq, Tk, 1 + D]
    weighted = design * p[..., None]
    ridge = torch.full((design.shape[-1],), RIDGE, dtype=z.dtype)
    ridge[0] = 0
    left = weighted.mT @ design + ridge.diag()
    left = torch.where(empty[..., None], torch.eye(len(ridge), dtype=z.dtype), left)
    solution = torch.linalg.solve(left, weighted.mT @ value[:, :, None])
    return solution[..., 0, :].transpose(1, 2).contiguous(), None


for name, weigh in WEIGHTS.items():
    AttentionInterface.register(f"dense_{name}", partial(dense, weigh, name.startswith("local-linear")))
    AttentionMaskInterface.register(f"dense_{name}", sdpa_mask)
EVERYWHERE = list(WEIGHTS)[:3]


@pytest.mark.parametrize(
    ("padding", "name", "family"),
    [
        *((padding, name, family) for padding in PADDING for name in EVERYWHERE for family in ALL),
        *(("left", name, "llama") for name in WEIGHTS if name not in EVERYWHERE),
    ],
)
def test_logits_and_gradients_are_those_of_dense_attention(family: str, name: str, padding: str) -> None:
    mask = PADDING[padding]
    real = real_tokens(mask)
    ours, theirs = (tiny(family, f"{impl}_{name}", **without_dropout(family)).double() for impl in ("regard", "dense"))
    found = []
    for model in (ours, theirs):
        logits = model(tokens(), attention_mask=mask).logits
        (logits * real[..., None]).square().mean().backward()
        found.append(logits[real])
    assert (found[0] - found[1]).abs().max() < 1e-7 * found[1].abs().max()  # rotary angles are float32 in either
    same_gradients(ours, theirs)
    if not name.startswith("local-linear"):  # the weights do differ from softmax's
        usual = tiny(family, "sdpa").double()(tokens(), attention_mask=mask).logits
        assert (usual[real] - found[0]).abs().max() > 1e-3
