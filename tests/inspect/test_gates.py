"""Gates over a text: what is heard, how rare words are, and rank correlations; against scipy and plain counting."""

from __future__ import annotations

import math
from typing import Any

import pytest
import scipy.stats
import torch
from torch import Tensor, nn

from regard.checks import ArgumentError
from regard.inspect.gates import (
    bin_counts,
    gate_trace,
    histogram,
    layer_name,
    rank_correlation,
    token_surprisal,
    word_counts,
    word_surprisal,
)
from regard.nn import HookPoint


class Memory(nn.Module):
    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.tensor(share))
        self.hook_gate = HookPoint()

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.hook_gate((input_ids * self.share).sigmoid())


class Toy(nn.Module):
    """Two layers with gates, one of which says nothing."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        assert not self.training
        for layer in self.layers:
            layer(input_ids)


def test_gates_are_heard_layer_by_layer() -> None:
    model = Toy(Memory(1.0), nn.Identity(), Memory(-0.5)).train()
    trace = gate_trace(model, torch.tensor([0, 1, 3]), ["a", "b", "c"])
    assert trace.layers == ("layer 1", "layer 3")
    assert layer_name("memory.hook_gate") == "memory"
    wanted = [[1 / (1 + math.exp(-share * token)) for token in (0, 1, 3)] for share in (1.0, -0.5)]
    assert torch.allclose(trace.gates, torch.tensor(wanted))
    assert model.training


def test_a_model_without_gates_is_refused() -> None:
    with pytest.raises(ArgumentError, match="no memory layer of Toy has a gate"):
        gate_trace(Toy(nn.Identity()), torch.tensor([0]), ["a"])
    with pytest.raises(ArgumentError, match="2 labels for 1 tokens"):
        gate_trace(Toy(Memory(1.0)), torch.tensor([0]), ["a", "b"])


def test_a_histogram_counts() -> None:
    gates = torch.tensor([[0.0, 0.05, 0.1, 0.999, 1.0], [0.5, 0.5, 0.5, 0.5, 0.55]])
    found = histogram(gates)
    assert found.tolist() == [[0.4, 0.2, 0, 0, 0, 0, 0, 0, 0, 0.4], [0, 0, 0, 0, 0, 1.0, 0, 0, 0, 0]]
    assert histogram(torch.empty(2, 0)).sum() == 0
    assert bin_counts(torch.tensor([0.0, math.nan, math.inf, 0.95])).tolist() == [1, 0, 0, 0, 0, 0, 0, 0, 0, 1]
    assert torch.allclose(histogram(gates, 2), torch.tensor([[0.6, 0.4], [0.0, 1.0]], dtype=torch.float64))


def test_rare_tokens_have_many_bits() -> None:
    found = token_surprisal(torch.tensor([0, 2, 1]), torch.tensor([0, 0, 0, 1]), 3)
    assert found.tolist() == pytest.approx([-math.log2(4 / 7), -math.log2(1 / 7), -math.log2(2 / 7)])


LABELS = ["The", " fi", "sh", " and", " ", "Sak", "ana", ".", " Sakana", " fish", "!3"]


def test_tokens_have_the_rarity_of_their_word() -> None:
    counts = word_counts("the fish and The fish_1 x")
    assert counts == {"the": 1, "fish": 2, "and": 1, "The": 1, "x": 1}
    bits = {
        "The": -math.log2(2 / 12),
        "fish": -math.log2(3 / 12),
        "and": -math.log2(2 / 12),
        "Sakana": -math.log2(1 / 12),
    }
    words = ["The", "fish", "fish", "and", None, "Sakana", "Sakana", None, "Sakana", "fish", None]
    found = word_surprisal(LABELS, counts).tolist()
    assert len(found) == len(LABELS)
    for word, value in zip(words, found, strict=True):
        assert math.isnan(value) if word is None else value == pytest.approx(bits[word])
    assert word_surprisal([], {}).shape == (0,)
    rarer = word_surprisal(["a b", "c"], {"a": 7})  # a token in two words has the rarer
    assert rarer.tolist() == pytest.approx([-math.log2(1 / 9), -math.log2(1 / 9)])


def test_rank_correlation_is_spearmans() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(6, (40,), generator=draw).double()
    y = x + 3 * torch.randn(40, generator=draw, dtype=torch.float64)
    assert rank_correlation(x, y) == pytest.approx(scipy.stats.spearmanr(x.numpy(), y.numpy()).statistic, abs=1e-12)
    holes = y.clone()
    holes[::5] = math.nan
    known = [i for i in range(40) if i % 5]
    wanted = scipy.stats.spearmanr(x[known].numpy(), y[known].numpy()).statistic
    assert rank_correlation(x, holes) == pytest.approx(wanted, abs=1e-12)
    assert rank_correlation(x, torch.ones(40)) == 0.0
    assert rank_correlation(x[:1], y[:1]) == 0.0
