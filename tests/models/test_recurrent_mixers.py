"""Each recurrent mixer reads the memory that its paper writes: the recurrence, written out token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.models.hybrid.mixers.delta import DeltaNet
from regard.models.hybrid.mixers.gated_linear import GatedLinearAttention
from regard.models.hybrid.mixers.h3 import H3
from regard.models.hybrid.mixers.hyena import Hyena
from regard.models.hybrid.mixers.mamba2 import Mamba2
from regard.models.hybrid.mixers.mesa import MesaNet
from regard.models.hybrid.mixers.retention import Retention
from regard.models.hybrid.recurrent_mixer import Heads

HEADS, DIM, TOKENS, WIDTH = 2, 4, 7, 6


def retention(layer: Any, memory: Tensor, k: Tensor, v: Tensor, x: Tensor, h: int) -> Tensor:
    return (1 - 2.0 ** (-5 - h)) * memory + torch.outer(k, v)


def gla(layer: Any, memory: Tensor, k: Tensor, v: Tensor, x: Tensor, h: int) -> Tensor:
    keep = layer.decay(x).view(HEADS, DIM)[h].sigmoid() ** (1 / 16)
    return keep[:, None] * memory + torch.outer(k, v)


def mamba2(layer: Any, memory: Tensor, k: Tensor, v: Tensor, x: Tensor, h: int) -> Tensor:
    step = F.softplus(layer.step(x)[h] + layer.step_bias[h])
    return torch.exp(-layer.log_rate[h].exp() * step) * memory + step * torch.outer(k, v)


def delta(layer: Any, memory: Tensor, k: Tensor, v: Tensor, x: Tensor, h: int) -> Tensor:
    k = k / k.norm()
    return memory + layer.write(x)[h].sigmoid() * torch.outer(k, v - memory.T @ k)


STEPS = {Retention: retention, GatedLinearAttention: gla, Mamba2: mamba2, DeltaNet: delta}


def drawn(kind: Any) -> tuple[Any, Heads]:
    torch.manual_seed(0)
    layer = kind(WIDTH, HEADS, DIM)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    query, key, value = torch.randn(3, 1, HEADS, TOKENS, DIM)
    return layer, Heads(query, key, value, torch.randn(1, TOKENS, WIDTH), {})


@pytest.mark.parametrize("kind", STEPS, ids=lambda k: k.__name__)
def test_a_mixer_reads_its_recurrence(kind: Any) -> None:
    layer, heads = drawn(kind)
    found, _ = layer.recall(heads)
    for h in range(HEADS):
        memory = torch.zeros(DIM, DIM)
        for t in range(TOKENS):
            memory = STEPS[kind](layer, memory, heads.key[0, h, t], heads.value[0, h, t], heads.hidden[0, t], h)
            q = heads.query[0, h, t]
            q = q / q.norm() if kind is DeltaNet else q / DIM**0.5
            torch.testing.assert_close(found[0, h, t], memory.T @ q, rtol=1e-4, atol=1e-5)


def test_mesa_net_solves_the_ridge_regression_of_the_past() -> None:
    layer, heads = drawn(MesaNet)
    found, _ = layer.recall(heads)
    hidden = heads.hidden[0]
    for h in range(HEADS):
        keep, write = layer.keep(hidden)[:, h].sigmoid(), layer.write(hidden)[:, h].sigmoid()
        keys = F.normalize(heads.key[0, h], dim=-1)
        ridge = torch.diag(F.softplus(layer.ridge[h]) + 1e-2)
        for t in range(TOKENS):
            weight = torch.stack([write[j] * keep[j + 1 : t + 1].prod() for j in range(t + 1)])
            gram = ridge + (keys[: t + 1].T * weight) @ keys[: t + 1]
            right = (keys[: t + 1].T * weight) @ heads.value[0, h, : t + 1]
            expected = torch.linalg.solve(gram, right).T @ F.normalize(heads.query[0, h, t], dim=0)
            torch.testing.assert_close(found[0, h, t], expected, rtol=1e-3, atol=1e-4)


def test_mamba2_starts_with_its_steps_and_rates() -> None:
    layer = Mamba2(WIDTH, 64, DIM)
    layer.init_weights()
    steps, rates = F.softplus(layer.step_bias.detach()), layer.log_rate.detach().exp()
    assert 1e-3 <= float(steps.min()) < 5e-3
    assert 2e-2 < float(steps.max()) <= 0.1001
    assert 1 <= float(rates.min()) < 3
    assert 13 < float(rates.max()) <= 16


def test_h3_reads_its_diagonal_state_space_model() -> None:
    """Sums of keys times values that fade, token by token, weighed and multiplied by the query."""
    layer, heads = drawn(H3)
    heads = heads._replace(how={"attn_mask": None, "state": None, "segment_ids": None})
    found, _ = layer.recall(heads)
    sums = torch.zeros(HEADS, DIM, layer.log_rate.shape[-1])
    for t in range(TOKENS):
        u = (heads.key * heads.value)[0, :, t]
        sums = torch.exp(-layer.log_rate.exp()) * sums + u[..., None]
        y = (layer.weight * sums).sum(-1) + layer.skip * u
        torch.testing.assert_close(found[0, :, t], heads.query[0, :, t] * y, rtol=1e-4, atol=1e-5)


def test_hyena_convolves_with_its_filter() -> None:
    layer, heads = drawn(Hyena)
    heads = heads._replace(how={"attn_mask": None, "state": None, "segment_ids": None})
    found, _ = layer.recall(heads)
    u, filters = (heads.key * heads.value)[0], layer.filters(TOKENS)
    for t in range(TOKENS):
        y = sum(filters[..., t - j] * u[:, j] for j in range(t + 1)) + layer.skip * u[:, t]
        torch.testing.assert_close(found[0, :, t], heads.query[0, :, t] * y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [H3, Hyena])
def test_what_is_not_finite_later_reaches_no_earlier_token(kind: Any) -> None:
    layer = drawn(kind)[0]
    hidden = torch.randn(1, TOKENS, WIDTH)
    expected = layer(hidden)[0]
    hidden[0, 5] = torch.nan
    assert torch.equal(layer(hidden)[0][:, :5], expected[:, :5])


@pytest.mark.parametrize("kind", [*STEPS, MesaNet, H3, Hyena], ids=lambda k: k.__name__)
@pytest.mark.parametrize("split", [12, 5, 1])
def test_padding_anywhere_is_as_if_it_were_not_there(kind: Any, split: int) -> None:
    """Also at the end of a piece, before the next one comes."""
    layer = drawn(kind)[0]
    hidden, mask = torch.randn(4, 12, WIDTH), torch.ones(4, 12, dtype=torch.bool)
    mask[1, :3], mask[2, 8:], mask[3, [0, 2, 3, 7, 11]] = False, False, False
    hidden = hidden.masked_fill(~mask[..., None], float("nan"))
    states: tuple[Any, ...] = (None, None)
    parts = []
    for piece, real in zip(hidden.split(split, 1), mask.split(split, 1), strict=True):
        out, states = layer.mix(piece, real, states)
        parts.append(out)
    found = torch.cat(parts, 1)
    for row in range(4):
        alone, _ = layer.mix(hidden[row : row + 1, mask[row]], None, (None, None))
        torch.testing.assert_close(found[row, mask[row]], alone[0], rtol=1e-4, atol=1e-5)
        assert not found[row, ~mask[row]].any()
