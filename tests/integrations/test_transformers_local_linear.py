"""Local linear attention in stock models: against regressions fitted densely in another attention function, and
against itself by another way (cache, padding, beams, weights)."""

from __future__ import annotations

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
WEIGHTS = {"local-linear": lambda z: z.softmax(-1), "local-linear[biweight]": lambda z: entmax.entmax15(z, dim=-1)}
RIDGE = 0.1


def fitted(
    weigh: Any,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Weighted ridge regression of values on keys with a free intercept, at each query: a linear system of D + 1
    unknowns, sum p [1, k - q]^T [1, k - q] + diag(0, ridge)."""
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
    p = weigh(z.masked_fill(~(seen | empty), -1e9)) * (seen & ~empty)
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

    def function(*arguments: Any, weigh: Any = weigh, **more: Any) -> tuple[Tensor, None]:
        return fitted(weigh, *arguments, **more)

    AttentionInterface.register(f"fitted_{name}", function)
    AttentionMaskInterface.register(f"fitted_{name}", sdpa_mask)


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("padding", PADDING)
def test_logits_and_gradients_are_those_of_fitted_regressions(family: str, name: str, padding: str) -> None:
    mask = PADDING[padding]
    real = real_tokens(mask)
    ours, theirs = (tiny(family, f"{impl}_{name}", **without_dropout(family)).double() for impl in ("regard", "fitted"))
    found = []
    for model in (ours, theirs):
        logits = model(tokens(), attention_mask=mask).logits
        (logits * real[..., None]).square().mean().backward()
        found.append(logits[real])
    assert (found[0] - found[1]).abs().max() < 1e-7 * found[1].abs().max()  # rotary angles are float32 in either
    same_gradients(ours, theirs)


@pytest.mark.parametrize("family", ALL)
def test_training_in_blocks(family: str) -> None:
    """Attention dropout needs all pairs; without it the plain form, whose size is limited, is not asked."""
    model = tiny(family, "regard_local-linear", **without_dropout(family)).train()
    length = 40
    ids = torch.randint(1, 60, (2, length), generator=torch.Generator().manual_seed(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("regard.pairwise.reference.LIMIT", 0)
        loss = model(ids, labels=ids).loss
        loss.backward()
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert sum(p.grad is not None and float(p.grad.abs().max()) > 0 for p in model.parameters()) > 15
