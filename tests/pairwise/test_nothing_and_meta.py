"""Trends and memories where there is nothing, and where tensors hold no numbers (the meta device)."""

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import nn
from regard.memory.fast_weight_mlp import fast_weight_mlp
from regard.memory.large_chunk import large_chunk_ttt

SIZES = {
    "empty batch": (0, 5, 5, "cpu"),
    "no positions": (2, 0, 0, "cpu"),
    "no keys": (2, 5, 0, "cpu"),
    "no queries": (2, 0, 5, "cpu"),
    "meta": (2, 9, 9, "meta"),
    "empty batch on meta": (0, 5, 5, "meta"),
    "no keys on meta": (2, 5, 0, "meta"),
}
"""B, Tq, Tk and the device."""

Inputs = dict[str, Tensor]
MEMORIES = {
    "fast_weight_memory": lambda x, **how: regard.fast_weight_memory(
        x[..., None, :2], x, None, torch.ones(1, 2, 3, 1), torch.ones(9, 4), top_k=2, chunk_size=2, **how
    ),
    "fast_weight_mlp": lambda x, **how: fast_weight_mlp(
        x, x, (torch.ones(3, 5), torch.ones(3, 5), torch.ones(4, 4)), chunk_size=2, **how
    ),
    "large_chunk_ttt": lambda x, **how: large_chunk_ttt(
        *(x[:, :, None] for _ in range(3)), x[:, :, None, :3], (torch.ones(1, 4, 4),) * 3, optimizer="muon", **how
    ),
    "nn.FastWeightMLP": lambda x: nn.FastWeightMLP(4, in_dim=3, hidden_dim=4, value_dim=3, chunk_size=2)(x),
    "nn.FastWeightProductKeyMemory": lambda x: nn.FastWeightProductKeyMemory(
        4, sub_keys=3, key_dim=4, value_dim=3, top_k=2, chunk_size=2
    )(x),
    "nn.LargeChunkTTT": lambda x: nn.LargeChunkTTT(4, 1, window=3, chunk_size=2)(x),
}
ORDERS: list[dict[str, bool]] = [{}, {"exclude_self": True}, {"is_causal": False}]


def draw(batch: int, queries: int, keys: int, device: str) -> Inputs:
    sizes = {"q": (batch, 4, queries, 3), "k": (batch, 2, keys, 3), "v": (batch, 2, keys, 2)}
    return {name: torch.rand(size, device=device, requires_grad=True) for name, size in sizes.items()}


def check(out: Tensor, x: Inputs, device: str) -> None:
    """The right shape, zero where there is no key, and gradients without NaN."""
    (batch, _, queries, _), keys = x["q"].shape, x["k"].shape[2]
    assert out.shape == (batch, 4, queries, 2)
    assert out.device.type == device
    if device == "cpu" and keys == 0:
        assert not out.any()
    if not out.requires_grad:  # nothing was read
        assert out.numel() == 0
        return
    for leaf, grad in zip(x.values(), torch.autograd.grad(out.sum(), list(x.values()), allow_unused=True), strict=True):
        assert grad is None or (grad.shape == leaf.shape and (device == "meta" or bool(grad.isfinite().all())))


@pytest.mark.parametrize("spec", ["softmax", "biweight", "local-linear[softmax]"])
def test_weights_of_no_keys_have_no_columns(spec: str) -> None:
    x = draw(2, 5, 0, "cpu")
    out, found = regard.attention(
        x["q"], x["k"], x["v"], spec, enable_gqa=True, impl="reference", return_diagnostics=True
    )
    check(out, x, "cpu")
    assert found.weights.shape == (2, 4, 5, 0)
    if found.effective_weights is not None:
        assert found.effective_weights.shape == (2, 4, 5, 0)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("trend", ["linear-attention", "mesa", "delta", "gated-delta"])
def test_under_a_trend(trend: str, sizes: str) -> None:
    batch, queries, keys, device = SIZES[sizes]
    x = draw(batch, queries, keys, device)
    mask = torch.ones(batch, keys, dtype=torch.bool, device=device)
    ids = torch.zeros(batch, keys, dtype=torch.int64, device=device)
    for order in ORDERS:
        how: dict[str, Any] = {"enable_gqa": True, **order}
        check(regard.interpolated_attention(x["q"], x["k"], x["v"], trend, **how), x, device)
        check(regard.interpolated_attention(x["q"], x["k"], x["v"], trend, attn_mask=mask, **how), x, device)
        if queries == keys and device == "cpu":
            check(regard.interpolated_attention(x["q"], x["k"], x["v"], trend, segment_ids=ids, **how), x, device)


@pytest.mark.parametrize("name", MEMORIES)
def test_memories_that_are_written(name: str) -> None:
    """An empty batch reads nothing; tokens on the meta device, of which nobody knows whether they are there, are
    refused, also beside weights that are elsewhere."""
    assert MEMORIES[name](torch.ones(0, 5, 4))[0].shape[:2] == (0, 5)
    for device in ("meta", "cpu"):
        with torch.device(device), pytest.raises(regard.checks.ArgumentError, match=r"on (the )?meta") as error:
            MEMORIES[name](torch.ones(2, 5, 4, device="meta"))
        assert str(error.value).startswith(f"{name}: ")


@pytest.mark.parametrize("name", ["fast_weight_memory", "fast_weight_mlp", "large_chunk_ttt"])
def test_an_empty_batch_with_a_mask_segments_and_a_state(name: str) -> None:
    x, call = torch.ones(0, 5, 4), MEMORIES[name]
    mask, ids = torch.ones(0, 5, dtype=torch.bool), torch.zeros(1, 5, dtype=torch.int64)
    state = call(x)[1]
    for how in ({"mask": mask}, {"segment_ids": ids}, {"mask": mask, "segment_ids": ids}, {"state": state}):
        assert call(x, **how)[0].shape[:2] == (0, 5)


@pytest.mark.parametrize("spec", ["softmax", "biweight", "elu", "shift-cosine", "local-linear"])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_without_heads_is_empty(spec: str, causal: bool) -> None:
    q = torch.ones(2, 0, 3, 4, requires_grad=True)
    out = regard.attention(q, q, q, spec, is_causal=causal)
    assert out.shape == (2, 0, 3, 4)
    out.sum().backward()
