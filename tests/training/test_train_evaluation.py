"""Held-out loss against a hand-made model and plain Python sums."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mistakes import refuses
from torch import nn

from regard import Spec
from regard.grammar import SolveStatus
from regard.pairwise.diagnostics import Diagnostics
from regard.training import Units, evaluate, mean_support, row_means


class Echo(nn.Module):
    """Predicts token t + 1 from the token and its place in the window, so that a wrong window shows in the loss."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.sin(torch.arange(vocab * vocab).double()).reshape(vocab, vocab))

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        before = torch.arange(input_ids.shape[1]).double()
        return SimpleNamespace(logits=self.table[input_ids] * (1 + 0.1 * before)[None, :, None])


def expected_loss(model: Echo, tokens: list[int], context: int, stride: int) -> float:
    """Each token from the window in which it first appears, by loops."""
    total, start, scored = 0.0, 0, 1
    while scored < len(tokens):
        while scored >= start + context:
            start = min(start + stride, len(tokens) - context)
        scores = (model.table[tokens[scored - 1]] * (1 + 0.1 * (scored - 1 - start))).tolist()
        total -= scores[tokens[scored]] - math.log(sum(math.exp(s) for s in scores))
        scored += 1
    return total / (len(tokens) - 1)


LENGTHS = (2, 3, 4, 5, 8, 10, 11, 15, 16, 17, 40, 50, 53, 63, 64, 65, 200)
WINDOWS = [(16, 8), (16, 1), (16, 15), (8, 4), (8, 3), (8, 1), (7, 3), (4, 2), (2, 1)]


@pytest.mark.parametrize(("context", "stride"), WINDOWS)
def test_loss_equals_a_sum_by_hand(context: int, stride: int) -> None:
    model = Echo(5)
    for n in LENGTHS:
        tokens = [(i * i + i // 3) % 5 for i in range(n)]
        result = evaluate(model, torch.tensor(tokens), Units(n, n, n), context=context, stride=stride, batch=3)
        assert result.loss == pytest.approx(expected_loss(model, tokens, context, stride), rel=1e-6)
        assert result.tokens == n - 1
        assert result.support is None


def test_bits_are_per_character_and_per_byte() -> None:
    units = Units.of("aé漢", tokens=6)  # one, two and three bytes, say from the byte tokenizer
    assert (units.characters, units.bytes) == (3, 6)
    one_bit = math.log(2)
    assert units.bits_per_byte(one_bit) == pytest.approx(1.0)
    assert units.bits_per_char(one_bit) == pytest.approx(2.0)
    by_character = Units.of("aé漢", tokens=3)
    assert by_character.bits_per_char(one_bit) == pytest.approx(1.0)
    assert by_character.bits_per_byte(one_bit) == pytest.approx(0.5)


def test_evaluation_is_deterministic_and_restores_the_mode() -> None:
    model = Echo(5).train()
    tokens = torch.arange(60) % 5
    results = [evaluate(model, tokens, Units(60, 60, 60), context=8, batch=b).loss for b in (1, 4, 4)]
    assert results[1] == results[2]
    assert results[0] == pytest.approx(results[1], abs=1e-12)
    assert model.training


def test_support_of_softmax_counts_every_visible_key() -> None:
    from regard.models import HybridConfig, HybridForCausalLM

    sizes = {"vocab_size": 11, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = torch.arange(33).reshape(3, 11) % 11
    everything = HybridForCausalLM(HybridConfig(**sizes, mixers="softmax"))
    assert mean_support(everything, ids) == pytest.approx(6.0)  # 1 .. 11 keys
    five = HybridForCausalLM(HybridConfig(**sizes, mixers="softmax", window=5))
    assert mean_support(five, ids) == pytest.approx((1 + 2 + 3 + 4 + 5 * 7) / 11)


def rows(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers)[None, None]


class Told(nn.Module):
    """A layer that reports what it was given: how many keys have weight, and rows of diagnostics."""

    def __init__(self, spec: str, support: list[int], **given: Any) -> None:
        super().__init__()
        self.spec, self.observer, self.observe_weights, self.layer_idx = Spec.parse(spec), None, False, None
        keys = rows(*support)
        others = dict.fromkeys(("tau", "bandwidth", "effective_sample_size", "status"), keys.double())
        others |= {"density": keys / 4, "empty": keys < 0, "fallback": keys < 0}
        self.told = Diagnostics(support=keys, **{**others, **given})

    def forward(self) -> None:
        if self.observer is not None:
            self.observer(None, self.told)


class Layers(nn.ModuleList):
    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> None:
        for layer in self:
            layer()


def test_row_means_by_hand() -> None:
    none = rows(0.0, 0.0)
    plain = Told("softmax", [1, 2], density=rows(1, 0.5), negative_mass=none)
    solver = {"status": rows(0, SolveStatus.INACCURATE), "iterations": rows(3, 8), "residual": rows(0.25, 1e-3)}
    local = {"negative_mass": rows(0.5, 0.25), "solver": {**solver, "jitter": none}}
    ids = torch.zeros(1, 2, dtype=torch.long)
    assert row_means(Layers([plain]), ids) == {"support": 1.5, "density": 0.75}
    expected = {"support": 2.0, "density": 0.875, "negative_mass": 0.375}
    expected |= {"solver_iterations": 5.5, "solver_residual": 0.25, "unconverged": 0.5}
    assert row_means(Layers([plain, Told("local-linear", [1, 4], density=rows(1, 1), **local)]), ids) == expected
    assert row_means(Layers([]), ids) == {}


def test_the_rate_of_empty_rows_is_of_the_layers_that_can_have_any() -> None:
    first, second = rows(True, False, False, False), rows(False, True, False, False)
    softmax, adaptive = Told("softmax", [4, 4, 4, 4]), Told("biweight", [1, 2, 2, 1])
    nearest = Told("biweight*nearest(k=2)", [2, 2, 2, 2], fallback=first | True)  # ties are no empty support
    fixed = Told("biweight*fixed(bias=1)", [0, 2, 1, 1], empty=first, fallback=second)  # one of three
    zero = Told("biweight*fixed(bias=1,empty=zero)", [0, 3, 0, 1])  # without weight: two of four
    ids = torch.zeros(1, 4, dtype=torch.long)
    assert "empty_rows" not in row_means(Layers([softmax, adaptive, nearest]), ids)
    assert row_means(Layers([softmax, fixed, nearest]), ids)["empty_rows"] == pytest.approx(1 / 3)
    assert row_means(Layers([softmax, fixed, zero]), ids)["empty_rows"] == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert row_means(Layers([Told("biweight*fixed(bias=1)", [0] * 4, empty=first | True)]), ids)["empty_rows"] == 0.0


def test_bad_arguments() -> None:
    units = Units(9, 9, 9)
    for stride in (0, 8):
        refuses("stride", evaluate, Echo(5), torch.zeros(9, dtype=torch.long), units, context=8, stride=stride)
    refuses("at least 2", evaluate, Echo(5), torch.zeros(1, dtype=torch.long), units, context=8)
