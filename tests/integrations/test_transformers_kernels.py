"""Kernels in stock models against the oracle's dense attention."""

from functools import partial
from typing import Any

import pytest
import torch
from contracts import oracle
from tiny_models import ALL, PADDING, real_tokens, same_gradients, tiny, tokens, without_dropout
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

import regard
from regard.integrations.transformers import register

register("gaussian*linear(ridge=0.5,solver=cholesky)")
NAMES = ("biweight", "local-linear", "local-linear[biweight]", "sparsemax", "triweight", "relumax")
EVERYWHERE = NAMES[:3]


def dense(
    spec: regard.Spec,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    queries, keys = query.shape[2], key.shape[2]
    if attention_mask is None:
        causal = getattr(module, "is_causal", True)
        attention_mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries if causal else keys)
    seen = attention_mask.expand(*query.shape[:3], keys)
    return oracle.attention(oracle.read(spec), query, key, value, seen, scaling)[0].transpose(1, 2).contiguous(), None


for name in NAMES:
    AttentionInterface.register(f"dense_{name}", partial(dense, regard.Spec.parse(name)))
    AttentionMaskInterface.register(f"dense_{name}", sdpa_mask)


@pytest.mark.parametrize(
    ("padding", "name", "family"),
    [
        *((padding, name, family) for padding in PADDING for name in EVERYWHERE for family in ALL),
        *(("left", name, "llama") for name in NAMES if name not in EVERYWHERE),
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
