"""A memory that holds the state of a global linear model: Mesa's best one, the delta rule's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from regard import AssociativeMemory
from regard.checks import ArgumentError


def draw(n: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 3, n, d, generator=make, dtype=torch.float64) for d in (5, 4))
    return keys, values, torch.randn(2, 3, 7, 5, generator=make, dtype=torch.float64)


def best(keys: Tensor, values: Tensor, ridge: float) -> Tensor:
    """Ridge regression of the values on the keys, [..., D, Dv]."""
    eye = torch.eye(keys.shape[-1], dtype=keys.dtype)
    return torch.linalg.inv(keys.mT @ keys + ridge * eye) @ keys.mT @ values


def corrected(keys: Tensor, values: Tensor) -> Tensor:
    """The delta rule with full steps."""
    w = torch.zeros(*keys.shape[:2], keys.shape[3], values.shape[3], dtype=keys.dtype)
    for t in range(keys.shape[2]):
        key = keys[:, :, t, None]
        w = w + key.mT @ (values[:, :, t, None] - key @ w) / (key @ key.mT)
    return w


@pytest.mark.parametrize("store", ["mesa(ridge=0.3)", "delta"])
def test_it_reads_the_model(store: str) -> None:
    keys, values, queries = draw()
    w = best(keys, values, 0.3) if store != "delta" else corrected(keys, values)
    memory = AssociativeMemory("linear", store=store)
    memory.write(keys[:, :, :4], values[:, :, :4])
    memory.write(keys[:, :, 4:], values[:, :, 4:])
    torch.testing.assert_close(memory.read(queries), queries @ w, rtol=1e-10, atol=1e-10)
    assert len(memory) == 6
    assert memory.forget(everything=True) == 6
    assert not memory.read(queries).any()


def test_masked_places_hold_nothing_and_damage_is_done() -> None:
    keys, values, queries = draw()
    memory = AssociativeMemory("linear", store="mesa(ridge=0.3)")
    spoilt = keys.clone()
    spoilt[:, :, 2] = torch.nan
    memory.write(spoilt, values, mask=(torch.arange(6) != 2).expand(2, 6))
    kept = [0, 1, 3, 4, 5]
    expected = queries @ best(keys[:, :, kept], values[:, :, kept], 0.3)
    torch.testing.assert_close(memory.read(queries), expected, rtol=1e-10, atol=1e-10)
    memory.transform(lambda t: 0 * t)
    assert not memory.read(queries).any()
    before = memory.bytes
    memory.write(keys, values)
    assert memory.bytes == before == 8 * 6 * (25 + 20) + 6


def test_mesa_recalls_what_sums_confuse() -> None:
    """Eight correlated unit keys in eight dimensions: sums return mixtures, the least squares what was stored."""
    make = torch.Generator().manual_seed(1)
    keys = normalize(torch.randn(1, 1, 8, 8, generator=make, dtype=torch.float64) + 1, dim=-1)
    values = torch.randn(1, 1, 8, 3, generator=make, dtype=torch.float64)
    errors = []
    for store in ("sums", "mesa(ridge=1e-6)"):
        memory = AssociativeMemory("linear", store=store, scale=1.0 if store == "sums" else None)
        memory.write(keys, values)
        errors.append((memory.read(keys) - values).square().mean().item())
    assert errors[1] < 1e-3 < 1 < errors[0]


def test_gradients_pass_through() -> None:
    keys, values, queries = (x.requires_grad_() for x in draw())

    def run(k: Tensor, v: Tensor, q: Tensor) -> Tensor:
        memory = AssociativeMemory("linear", store="mesa(ridge=0.3)")
        memory.write(k, v)
        return memory.read(q)

    found = torch.autograd.grad(run(keys, values, queries).sin().sum(), (keys, values, queries))
    wanted = torch.autograd.grad((queries @ best(keys, values, 0.3)).sin().sum(), (keys, values, queries))
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"store": "mesa"}, "a global linear model (mesa) is read as one; give spec='linear' with it"),
        ({"store": "mesa(ridge=0)", "spec": "linear"}, "mesa: ridge is 0, expected ridge > 0"),
        ({"store": "delta", "spec": "linear", "capacity": 3}, "sums do not know which pair is the oldest"),
        ({"store": "messa", "spec": "linear"}, "unknown store='messa'"),
    ],
)
def test_mistakes_are_named(call: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        AssociativeMemory(**call)
    assert message in str(caught.value)


def test_what_a_model_cannot_do() -> None:
    keys, values, queries = draw()
    memory = AssociativeMemory("linear", store="delta")
    memory.write(keys, values)
    with pytest.raises(ArgumentError, match="takes no scale"):
        memory.read(queries, scale=2.0)
    with pytest.raises(ArgumentError, match="pairs does not apply"):
        memory.forget(pairs=(keys, values))
