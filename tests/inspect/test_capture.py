"""capture(): what is seen, what is put back, and that looking changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from regard.inspect import capture
from regard.nn import Attention

SPECS = ["softmax", "biweight", "relumax", "shift-cosine", "topk-uniform"]


class Two(nn.Module):
    """Two attention layers in a row."""

    def __init__(self, spec: str, layer_idx: tuple[int | None, int | None] = (0, 1)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = Attention(16, 2, spec=spec, layer_idx=layer_idx[0])
        self.second = Attention(16, 2, spec=spec, layer_idx=layer_idx[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)[0])[0]


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 9, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("spec", [*SPECS, "local-linear[relumax]"])
def test_looking_does_not_change_the_output(spec: str, weights: bool, x: torch.Tensor) -> None:
    model = Two(spec)
    before = model(x)
    with capture(model, weights=weights):
        during = model(x)
    assert (during - before).abs().max() <= 1e-5
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("spec", SPECS)
def test_support_is_the_number_of_weights_that_are_not_zero(spec: str, x: torch.Tensor) -> None:
    model = Two(spec)
    with capture(model) as fast:
        model(x)
    with capture(model, weights=True) as dense:
        model(x)
    assert list(fast.layers) == list(dense.layers) == [0, 1]
    for layer in (0, 1):
        weights = dense.layers[layer].weights
        assert weights is not None
        assert weights.shape == (3, 2, 9, 9)
        assert fast.layers[layer].weights is None
        counted = (weights != 0).sum(-1)
        assert torch.equal(dense.layers[layer].support.long(), counted)
        assert torch.equal(fast.layers[layer].support.long(), counted)
    assert (weights.triu(1) == 0).all()


def test_a_compact_kernel_is_seen_to_leave_keys_out(x: torch.Tensor) -> None:
    model = Two("relumax")
    with capture(model) as seen:
        model(40 * x)  # large scores: few keys are within the margin of the best
    assert (seen.layers[0].support < torch.arange(1, 10)).any()


def test_nothing_keeps_the_graph_alive(x: torch.Tensor) -> None:
    for spec in ("biweight", "local-linear[biweight]"):
        model = Two(spec)
        with capture(model, weights=True) as seen:
            model(x.requires_grad_()).sum().backward()
        assert x.grad is not None
        values = [v for layer in seen.layers.values() for v in (*vars(layer).values(), *(layer.solver or {}).values())]
        assert not any(value.requires_grad for value in values if isinstance(value, torch.Tensor))


def test_the_latest_pass_is_kept_and_layers_without_a_number_go_by_their_place(x: torch.Tensor) -> None:
    model = Two("softmax", layer_idx=(None, None))
    with capture(model) as seen:
        model(x)
        model(x[:, :4])
    assert list(seen.layers) == [0, 1]
    assert seen.layers[1].support.shape == (3, 2, 4)


@pytest.mark.parametrize("fails", [False, True])
def test_observers_are_put_back(x: torch.Tensor, fails: bool) -> None:
    calls: list[int | None] = []
    model = Two("softmax")
    mine = lambda layer, diagnostics: calls.append(layer)  # noqa: E731
    model.first.observer, model.first.observe_weights = mine, True
    try:
        with capture(model):
            model(x)
            if fails:
                raise RuntimeError("in the block")
    except RuntimeError:
        assert fails
    assert calls == []
    assert model.first.observer is mine
    assert model.first.observe_weights is True
    assert model.second.observer is None
    assert model.second.observe_weights is False
    model(x)
    assert calls == [0]


def test_one_capture_inside_another(x: torch.Tensor) -> None:
    model = Two("softmax")
    with capture(model) as outer:
        with capture(model, weights=True) as inner:
            model(x)
        assert not outer.layers
        model(x)
    assert inner.layers[0].weights is not None
    assert outer.layers[0].weights is None
    assert model.first.observer is None


def test_a_model_without_attention_shows_nothing(x: torch.Tensor) -> None:
    model = nn.Linear(16, 4)
    with capture(model) as seen:
        model(x)
    assert seen.layers == {}
