"""Temperatures and ridges as rules: their texts, wrong texts, every registered one, and one of a third party."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from layers_by_hand import B, C, D, H, by_hand, draw, layer, visible

import regard
from regard.checks import ArgumentError
from regard.nn import Ridge, Temperature, as_ridge, as_temperature, ridges, temperatures

T = 9
READ = {"temperature": (temperatures, as_temperature), "ridge": (ridges, as_ridge)}


@pytest.mark.parametrize(
    ("kind", "names", "texts", "same"),
    [
        (
            "temperature",
            ["fixed", "learned", "log", "power"],
            ["fixed", "learned", "log", "power(exponent=0.5)", "log(slope=1.5)", "fixed(value=2.0)"],
            {" power( base = 1e-1 , gain=2 ) ": "power(base=0.1,gain=2.0)", "log()": "log"},
        ),
        (
            "ridge",
            ["fixed", "learned", "learned-per-dimension"],
            ["learned(start=0.5,floor=0.01,link=softplus)", "fixed", "learned", "learned(start=0.5)"],
            {" learned( start = 5e-1 , link = sigmoid ) ": "learned(start=0.5)"},
        ),
    ],
)
def test_text_forms(kind, names, texts, same):
    registry, read = READ[kind]
    assert [str(read(text)) for text in texts] == texts
    assert all(read(text) == read(plain) for text, plain in same.items())
    assert registry.names()[: len(names)] == names
    assert regard.registries()[kind] is registry


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("temperature", "lgo", "unknown temperature 'lgo'. Did you mean 'log'"),
        ("temperature", "log(", r"temperature is 'log\(', expected the text of one"),
        ("temperature", 2.0, "temperature is 2.0, expected the text of one"),
        ("temperature", "log(s=1)", "temperature log: unknown argument 's'; it takes slope"),
        ("temperature", "log(slope)", "cannot read 'slope', expected name=number"),
        ("temperature", "log(slope=1,slope=2)", "each once"),
        ("temperature", "log(slope=one)", "slope is 'one', expected a number"),
        ("temperature", "log(slope=-1)", "slope is -1, expected slope > 0"),
        ("temperature", "power(exponent=1)", "exponent is 1, expected exponent < 1"),
        ("temperature", "fixed(value=inf)", "value is inf, expected a finite number"),
        ("ridge", "learnt", "unknown ridge 'learnt'. Did you mean 'learned'"),
        ("ridge", "learned(", r"ridge is 'learned\(', expected the text of one, such as 'learned\(start=0.5\)'"),
        ("ridge", "fixed(value=1)", "ridge fixed: unknown argument 'value'; it takes none"),
        ("ridge", "learned(begin=1)", "unknown argument 'begin'; it takes start, floor, link"),
        ("ridge", "learned(link=relu)", "link is 'relu', expected one of sigmoid, softplus"),
        ("ridge", "learned(floor=0)", "floor is 0, expected floor > 0"),
        ("ridge", "learned(start=0.001)", "start is 0.001, expected a number between floor 0.001 and 1.001"),
        ("ridge", "learned(start=2)", "start is 2, expected a number between floor 0.001 and 1.001, which a sigmoid"),
    ],
)
def test_bad_texts(kind, text, message):
    with pytest.raises(ArgumentError, match=message):
        READ[kind][1](text)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in READ for name in READ[kind][0].names()])
def test_every_registered_rule(kind, name):
    """The same text again, positive and finite numbers; a row depends on the tokens in its window alone."""
    registry, read = READ[kind]
    rule = registry.get(name)()
    assert str(rule) == name == rule.name
    assert read(name) == rule
    spec = "biweight" if kind == "temperature" else "local-linear[triweight]"
    module, x = layer(**{kind: name}, spec=spec, window=4), draw(B, T, C)
    if kind == "temperature":
        assert registry.get(name).__doc__.strip().startswith("scale = default")
        found = torch.as_tensor(rule.scale(torch.tensor([[[0, 1, 2, 10**6]]]), 0.5))
        assert all(getattr(module, number).shape == (H,) for number in rule.start())
    else:
        found = torch.ones(())
        assert (module.ridge_proj is None) == (rule.numbers(D) == 0)
        if rule.numbers(D):
            assert module.ridge_proj.weight.shape == (H * rule.numbers(D), C)
            found = rule.values(torch.linspace(-30, 30, 61, dtype=torch.float64))
    assert bool((found > 0).all() and found.isfinite().all())
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[0, :2] = False
    whole = module(x, attention_mask=mask)[0]
    for i in range(3, T):
        part = slice(max(0, i - 3), i + 1)
        row = module(x[:, part], attention_mask=mask[:, part])[0][:, -1]
        torch.testing.assert_close(whole[:, i], row, atol=1e-7, rtol=0)


def test_a_temperature_of_a_third_party():
    @dataclass(frozen=True)
    class Root(Temperature):
        """scale = default * c sqrt(n)."""

        start_at: float = 2.0
        name: ClassVar[str] = "root"

        def start(self):
            return {"factor": self.start_at}

        def multiplier(self, n, learned):
            return learned["factor"] * n.sqrt()

    temperatures.register("root")(Root)
    try:
        module, x = layer(temperature="root(start_at=3)"), draw(B, T, C)
        assert str(module.temperature) == "root(start_at=3.0)"
        assert torch.equal(module.factor, torch.full((H,), 3.0, dtype=torch.float64))
        scale = 3 * (torch.arange(1, T + 1).double() / D).sqrt()[:, None]
        torch.testing.assert_close(module(x)[0], by_hand(module, x, visible(T), scale=scale), atol=1e-6, rtol=0)
    finally:
        del temperatures._objects["root"]


def test_a_ridge_of_a_third_party():
    @dataclass(frozen=True)
    class Half(Ridge):
        """Has no values."""

        name: ClassVar[str] = "half"

        def numbers(self, dim):
            return 1

    @dataclass(frozen=True)
    class Exponential(Half):
        """exp of the projection."""

        start: float = 0.2
        name: ClassVar[str] = "exponential"

        def bias(self):
            return math.log(self.start)

        def values(self, x):
            return x.exp()

    with pytest.raises(ArgumentError, match=r"ridge 'half': Half has no values\(x\); define it"):
        layer(spec="local-linear", ridge=Half())(draw(B, T, C))
    ridges.register("exponential")(Exponential)
    try:
        module, x = layer(spec="local-linear", ridge="exponential(start=0.4)"), draw(B, T, C)
        assert str(module.ridge) == "exponential(start=0.4)"
        ridge = (x @ module.ridge_proj.weight.T + math.log(0.4)).exp().mT[..., None]
        expected = by_hand(module, x, visible(T), ridge=ridge)
        torch.testing.assert_close(module(x)[0], expected, atol=1e-6, rtol=0)  # the bias was made in float32
    finally:
        del ridges._objects["exponential"]
