"""Temperatures: their numbers against the formulas in float64, what n counts, and what they do to every spec."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import regard
from regard.checks import ArgumentError
from regard.nn import Attention, Temperature, as_temperature, temperatures
from regard.pairwise.visibility import Visibility

B, H, T, C = 2, 4, 9, 32
TEXTS = ("fixed(value=2)", "learned", "log", "power", "power(exponent=0.5)")
N = torch.tensor([[[1, 2, 7, 300]]])


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer(**options):
    torch.manual_seed(1)
    return Attention(C, H, **options).double()


def formula(text, n):
    """The multiplier at its start, for an integer n."""
    return {
        "fixed(value=2)": 0.5,
        "learned": 1.0,
        "log": 0.43 * math.log(max(n, 2)),
        "power": 0.5 + 0.5 * n**0.25,
        "power(exponent=0.5)": 0.5 + 0.5 * n**0.5,
    }[text]


@pytest.mark.parametrize("text", TEXTS)
def test_scales_at_the_start(text):
    scale = torch.as_tensor(as_temperature(text).scale(N, default=0.25)).expand(1, 1, 4)
    expected = torch.tensor([0.25 * formula(text, n) for n in (1, 2, 7, 300)])
    torch.testing.assert_close(scale[0, 0], expected, atol=0, rtol=1e-6)


def test_learned_numbers_have_their_meaning():
    """Each head its own: temperature 3; s = 0.7; 0.2 + 0.1 n^0.9."""
    n = N.expand(1, H, 4).double()[0, 0]
    one = lambda value: torch.full((H,), math.log(value), dtype=torch.float64)  # noqa: E731
    odds = torch.full((H,), math.log(0.9 / 0.1), dtype=torch.float64)
    cases = {
        "learned": ({"log_temperature": one(3.0)}, torch.full((4,), 1 / 3, dtype=torch.float64)),
        "log": ({"log_slope": one(0.7)}, 0.7 * n.clamp(min=2).log()),
        "power": ({"log_base": one(0.2), "log_gain": one(0.1), "logit_exponent": odds}, 0.2 + 0.1 * n**0.9),
    }
    for text, (learned, expected) in cases.items():
        scale = as_temperature(text).scale(N, 1.0, learned).expand(1, H, 4)
        assert scale.dtype == torch.float64
        torch.testing.assert_close(scale, expected.expand(1, H, 4), atol=0, rtol=1e-12)


@pytest.mark.parametrize("text", TEXTS[1:])
def test_gradients_of_the_learned_numbers(text):
    rule = as_temperature(text)
    names = list(rule.start())
    start = [torch.full((H,), rule.start()[name], dtype=torch.float64, requires_grad=True) for name in names]
    n = torch.tensor([[[0, 1, 5]]])  # an empty row too

    def scale(*numbers):
        return rule.scale(n, 0.3, dict(zip(names, numbers, strict=True)))

    assert torch.autograd.gradcheck(scale, start)


def test_text_forms():
    texts = ("fixed", "learned", "log", "power(exponent=0.5)", "log(slope=1.5)", "fixed(value=2.0)")
    assert [str(as_temperature(text)) for text in texts] == list(texts)
    assert as_temperature(" power( base = 1e-1 , gain=2 ) ") == as_temperature("power(base=0.1,gain=2.0)")
    assert as_temperature("log()") == as_temperature("log")
    assert temperatures.names()[:4] == ["fixed", "learned", "log", "power"]
    assert regard.registries()["temperature"] is temperatures


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lgo", "unknown temperature 'lgo'. Did you mean 'log'"),
        ("log(", r"temperature is 'log\(', expected the text of one"),
        (2.0, "temperature is 2.0, expected the text of one"),
        ("log(s=1)", "temperature log: unknown argument 's'; it takes slope"),
        ("log(slope)", "cannot read 'slope', expected name=number"),
        ("log(slope=1,slope=2)", "each once"),
        ("log(slope=one)", "slope is 'one', expected a number"),
        ("log(slope=-1)", "slope is -1, expected slope > 0"),
        ("power(exponent=1)", "exponent is 1, expected exponent < 1"),
        ("fixed(value=inf)", "value is inf, expected a finite number"),
    ],
)
def test_bad_texts(text, message):
    with pytest.raises(ArgumentError, match=message):
        as_temperature(text)


def test_bad_calls():
    with pytest.raises(ArgumentError, match="temperature log: n is missing"):
        as_temperature("log").scale()
    with pytest.raises(ArgumentError, match="learned has none, expected log_temperature"):
        as_temperature("learned").scale(learned={})
    with pytest.raises(ArgumentError, match=r"learned\['log_temperature'\] has shape \[1, 4\], expected \[H\]"):
        as_temperature("learned").scale(learned={"log_temperature": torch.zeros(1, 4)})


def visible(queries, keys, mask, window, strict):
    """[B, Tq, Tk]: the causal rule, the window and the mask, pair by pair."""
    allowed = torch.zeros(B, queries, keys, dtype=torch.bool)
    for i in range(queries):
        at = i + keys - queries
        last = at - 1 if strict else at
        for j in range(keys):
            allowed[:, i, j] = (j <= last and j > last - (window or keys + 1)) & mask[:, j]
    return allowed


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("text", TEXTS)
def test_layer_equals_the_formula(text, window, strict):
    """Softmax with the scale of its row, n counted by hand; left padding in the second sequence."""
    module, x = layer(temperature=text, window=window, exclude_self=strict), draw(B, T, C)
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[1, :3] = False
    allowed = visible(T, T, mask, window, strict)
    q, k, v = (p(x).view(B, T, H, 8).transpose(1, 2) for p in (module.q_proj, module.k_proj, module.v_proj))
    scale = torch.tensor([[formula(text, int(n)) for n in row] for row in allowed.sum(-1)]) / math.sqrt(8)
    z = (q @ k.transpose(-1, -2)) * scale[:, None, :, None]
    weights = z.masked_fill(~allowed[:, None], -math.inf).softmax(-1).nan_to_num(0)
    expected = module.o_proj((weights @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x, attention_mask=mask)[0], expected, atol=1e-6, rtol=0)


SPECS = {**regard.presets(), "h-gaussian": regard.Spec.parse("gaussian*fixed(h=0.6)*cosine"),
         "h-compact": regard.Spec.parse("epanechnikov*fixed(h=1.2)*euclidean")}  # fmt: skip


@pytest.mark.parametrize("name", SPECS)
def test_every_spec_with_a_scale_takes_every_temperature(name):
    """Row by row, the layer is `regard.attention` with that row's number as scale (or 1/h^2)."""
    spec = SPECS[name]
    q, k, v = draw(B, H, T, 8, seed=1), draw(B, H, T, 8, seed=2), draw(B, H, T, 8, seed=3)
    has = spec.takes_scale or (spec.bandwidth.name == "fixed" and spec.bandwidth.h is not None)
    for text in TEXTS:
        rule = as_temperature(text)
        if not has:
            with pytest.raises(ArgumentError, match=r"has none; leave it out or choose one of: softmax, sparsemax"):
                rule.arguments(spec, 8, torch.ones(1, 1, T))
            continue
        counts = Visibility(T, T, causal=True).counts()
        whole = regard.attention(q, k, v, spec, is_causal=True, **rule.arguments(spec, 8, counts))
        for i in (0, 4, T - 1):
            multiplier = formula(text, i + 1)
            if spec.takes_scale:
                usual = {"cosine": 1.0}.get(spec.similarity.name, 8**-0.5)
                given = {"scale": usual * multiplier}
            else:
                given = {"params": {"h": spec.bandwidth.h / math.sqrt(multiplier)}}
            row = regard.attention(q[:, :, i : i + 1], k[:, :, : i + 1], v[:, :, : i + 1], spec, **given)
            torch.testing.assert_close(whole[:, :, i : i + 1], row, atol=2e-5, rtol=0)


def test_the_usual_scale_is_for_every_spec():
    x = draw(B, T, C)
    for name, spec in regard.presets().items():
        plain = layer(spec=spec)(x)[0]
        assert torch.equal(layer(spec=spec, temperature="fixed")(x)[0], plain), name
        if spec.takes_scale:  # learned starts at the usual scale, whatever the similarity
            torch.testing.assert_close(layer(spec=spec, temperature="learned")(x)[0], plain, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", temperatures.names())
def test_whatever_is_registered(name):
    """Positive and finite for every n, one number a head, the same text again, and the views agree."""
    rule = temperatures.get(name)()
    assert str(rule) == name == rule.name
    assert as_temperature(name) == rule
    assert temperatures.get(name).__doc__.strip().startswith("scale = default")
    scale = torch.as_tensor(rule.scale(torch.tensor([[[0, 1, 2, 10**6]]]), 0.5))
    assert bool((scale > 0).all() and torch.isfinite(scale).all())
    module, x = layer(temperature=name, spec="biweight", window=4), draw(B, T, C)
    for number in rule.start():
        assert getattr(module, number).shape == (H,)
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[0, :2] = False
    whole = module(x, attention_mask=mask)[0]
    for i in range(3, T):  # a row needs its window alone
        part = slice(max(0, i - 3), i + 1)
        row = module(x[:, part], attention_mask=mask[:, part])[0][:, -1]
        torch.testing.assert_close(whole[:, i], row, atol=1e-7, rtol=0)


def test_a_single_key_is_never_lost():
    """log 1 = 0: the first row of an unnormalised sum is what n = 2 makes of it."""
    module, x = layer(spec="linear", temperature="log"), draw(B, T, C)
    q, k, v = (p(x[:, 0]).view(B, H, 8) for p in (module.q_proj, module.k_proj, module.v_proj))
    weight = (q * k).sum(-1, keepdim=True) * 0.43 * math.log(2) / math.sqrt(8)
    expected = module.o_proj((weight * v).flatten(1))
    torch.testing.assert_close(module(x)[0][:, 0], expected, atol=1e-6, rtol=0)
    assert expected.abs().max() > 1e-3


def test_a_rule_of_a_third_party():
    """One dataclass, one registration."""

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
        module = layer(temperature="root(start_at=3)")
        assert str(module.temperature) == "root(start_at=3.0)"
        assert torch.equal(module.factor, torch.full((H,), 3.0, dtype=torch.float64))
        x = draw(B, T, C)
        other = layer(temperature="fixed")
        q, k, v = (p(x).view(B, T, H, 8).transpose(1, 2) for p in (other.q_proj, other.k_proj, other.v_proj))
        z = (q @ k.transpose(-1, -2)) * 3 * (torch.arange(1, T + 1).double() / 8).sqrt()[:, None]
        weights = z.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).softmax(-1)
        expected = other.o_proj((weights @ v).transpose(1, 2).flatten(2))
        torch.testing.assert_close(module(x)[0], expected, atol=1e-6, rtol=0)
    finally:
        del temperatures._objects["root"]


@pytest.mark.parametrize("text", ["log", "power"])
def test_learned_numbers_are_float32_in_a_bfloat16_layer(text):
    module = layer(temperature=text).bfloat16()
    numbers = {name: getattr(module, name) for name in module.temperature.start()}
    assert {value.dtype for value in numbers.values()} == {torch.bfloat16}
    assert module.temperature.scale(N, 1.0, numbers).dtype == torch.float32
    out, _ = module(draw(B, T, C).bfloat16())
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert all(torch.count_nonzero(value.grad) == H for value in numbers.values())
