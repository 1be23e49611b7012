"""Attention maps of a model, and what is measured on them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from regard.checks import ArgumentError
from regard.inspect.measures import AttentionMaps, attention_maps
from regard.models import HybridConfig, HybridForCausalLM

ALL_BACK = torch.tensor([[1.0, 0, 0], [1.0, 0, 0], [1.0, 0, 0]])
ONE_BACK = torch.tensor([[1.0, 0, 0], [1.0, 0, 0], [0, 1.0, 0]])
HERE = torch.eye(3)


def maps(*heads: torch.Tensor) -> AttentionMaps:
    weights = torch.stack(heads)[None]
    return AttentionMaps(("a", "b", "c"), weights, (weights != 0).sum(-1).float())


def small(mixers: list[str]) -> HybridForCausalLM:
    torch.manual_seed(0)
    config = HybridConfig(
        vocab_size=11, hidden_size=16, num_hidden_layers=len(mixers), num_attention_heads=2, mixers=mixers
    )
    return HybridForCausalLM(config)


def test_look_back_by_hand() -> None:
    # distances per row: 0 0 0; 0 1 1; 0 1 2; the last head looks nowhere
    found = maps(HERE, ONE_BACK, ALL_BACK, torch.zeros(3, 3)).look_back()
    assert found.tolist()[0] == pytest.approx([0, 2 / 3, 1, 0])


def test_look_back_counts_size_and_not_scale_or_sign() -> None:
    mixed = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [0.25, 0.25, 0.5]])
    expected = (0 + 0.5 + 0.75) / 3
    found = maps(mixed, 7 * mixed, -mixed, mixed * torch.tensor([1, -1, 1])).look_back()
    assert found.tolist()[0] == pytest.approx([expected] * 4)


def test_a_row_without_weight_does_not_count() -> None:
    rows = ALL_BACK.clone()
    rows[0] = 0
    assert maps(rows).look_back().item() == pytest.approx(1.5)


def test_the_farthest_head_and_the_first_among_equals() -> None:
    assert maps(HERE, ALL_BACK, ONE_BACK).farthest() == (0, 1)
    assert maps(ALL_BACK, ALL_BACK).farthest() == (0, 0)


def test_maps_of_a_model() -> None:
    model = small(["softmax", "biweight", "topk-uniform"]).train()
    tokens = torch.tensor([3, 1, 4, 1, 5, 9, 2], dtype=torch.int32)
    found = attention_maps(model, tokens, list("abcdefg"))
    assert model.training
    assert found.weights.shape == (3, 2, 7, 7)
    assert not found.weights.requires_grad
    assert found.weights.sum(-1) == pytest.approx(1, abs=1e-5)
    assert (found.weights.triu(1) == 0).all()
    assert torch.equal(found.support, (found.weights != 0).sum(-1).float())
    visible = torch.arange(1.0, 8.0)
    assert torch.equal(found.support[0], visible.expand(2, 7))  # softmax leaves no key out
    assert torch.equal(found.weights[2], (torch.ones(7, 7).tril() / visible[:, None]).expand(2, 7, 7))


def test_labels_must_match() -> None:
    with pytest.raises(ArgumentError, match="2 labels for 3 tokens"):
        attention_maps(small(["softmax"]), torch.tensor([1, 2, 3]), ["a", "b"])


def test_a_model_without_weights() -> None:
    class Plain(nn.Module):
        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
            return input_ids

    with pytest.raises(ArgumentError, match="no layer"):
        attention_maps(Plain(), torch.tensor([1]), ["a"])
