"""Rules of a layer, temperatures and ridges: their texts, their numbers against formulas in float64, and in layers."""

import math
from dataclasses import dataclass
from typing import ClassVar

import layers_by_hand as by
import pytest
import torch
from contracts import oracle
from layers_by_hand import RIDGES, TEMPERATURES, B, C, D, H, angles_of, by_hand, draw, layer, visible
from mistakes import refuses
from transformers import DynamicCache

import regard
from regard.nn import Attention, Ridge, Temperature, as_ridge, as_temperature, ridges, rotary_angles, temperatures
from regard.pairwise.visibility import Visibility

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
        ("ridge", "learned(link=relu)", "link is 'relu', expected 'sigmoid' or 'softplus'"),
        ("ridge", "learned(floor=0)", "floor is 0, expected floor > 0"),
        ("ridge", "learned(start=0.001)", "start is 0.001, expected a number between floor 0.001 and 1.001"),
        ("ridge", "learned(start=2)", "start is 2, expected a number between floor 0.001 and 1.001, which a sigmoid"),
    ],
)
def test_bad_texts(kind, text, message):
    refuses(message, READ[kind][1], text)


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
    mask = torch.arange(T) >= torch.tensor([[2], [0]])
    whole = module(x, attention_mask=mask)[0]
    for i in range(3, T):
        part = slice(max(0, i - 3), i + 1)
        row = module(x[:, part], attention_mask=mask[:, part])[0][:, -1]
        torch.testing.assert_close(whole[:, i], row, atol=1e-7, rtol=0)


def test_a_ridge_of_a_third_party(monkeypatch):
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

    missing = r"ridge 'half': Half has no values\(x\); define it"
    refuses(missing, layer(spec="local-linear", ridge=Half()), draw(B, T, C))
    monkeypatch.setitem(ridges._objects, "exponential", Exponential)
    module, x = layer(spec="local-linear", ridge="exponential(start=0.4)"), draw(B, T, C)
    assert str(module.ridge) == "exponential(start=0.4)"
    ridge = (x @ module.ridge_proj.weight.T + math.log(0.4)).exp().mT
    expected = by_hand(module, x, visible(T), ridge=ridge)
    torch.testing.assert_close(module(x)[0], expected, atol=1e-6, rtol=0)  # the bias was made in float32


N = torch.tensor([[[1, 2, 7, 300]]])


@pytest.mark.parametrize("text", TEMPERATURES)
def test_scales_at_the_start(text):
    scale = torch.as_tensor(as_temperature(text).scale(N, default=0.25)).expand(1, 1, 4)
    expected = torch.tensor([0.25 * by.multiplier(text, n) for n in (1, 2, 7, 300)])
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


@pytest.mark.parametrize("text", TEMPERATURES[1:])
def test_gradients_of_the_learned_numbers(text):
    rule = as_temperature(text)
    names = list(rule.start())
    start = [torch.full((H,), rule.start()[name], dtype=torch.float64, requires_grad=True) for name in names]
    n = torch.tensor([[[0, 1, 5]]])  # an empty row too

    def scale(*numbers):
        return rule.scale(n, 0.3, dict(zip(names, numbers, strict=True)))

    assert torch.autograd.gradcheck(scale, start)


def test_bad_calls():
    refuses("temperature log: n is missing", as_temperature("log").scale)
    refuses("learned has none, expected log_temperature", as_temperature("learned").scale, learned={})
    expected = r"learned\['log_temperature'\] has shape \[1, 4\], expected \[H\]"
    refuses(expected, as_temperature("learned").scale, learned={"log_temperature": torch.zeros(1, 4)})


SPECS = {**regard.presets(), "h-gaussian": regard.Spec.parse("gaussian*fixed(h=0.6)*cosine"),
         "h-compact": regard.Spec.parse("epanechnikov*fixed(h=1.2)*euclidean")}  # fmt: skip


@pytest.mark.parametrize("name", SPECS)
def test_every_spec_with_a_scale_takes_every_temperature(name):
    """Each row has its own number as scale, or as 1/h^2."""
    spec, known = SPECS[name], oracle.read(SPECS[name])
    q, k, v = draw(B, H, T, 8, seed=1), draw(B, H, T, 8, seed=2), draw(B, H, T, 8, seed=3)
    for text in TEMPERATURES:
        rule = as_temperature(text)
        if not spec.takes_scale and known.h is None:
            expected = "has none; leave it out or choose one of: softmax, sparsemax"
            refuses(expected, rule.arguments, spec, 8, torch.ones(1, 1, T))
            continue
        how = rule.arguments(spec, 8, Visibility(T, T, causal=True).counts())
        found = regard.attention(q, k, v, spec, is_causal=True, **how)
        factor = torch.tensor([by.multiplier(text, i + 1) for i in range(T)]).double()
        scale = factor * (1.0 if known.similarity == "cosine" else 8**-0.5) if spec.takes_scale else None
        params = {} if spec.takes_scale else {"h": known.h / factor.sqrt()}
        expected, _ = oracle.attention(known, q, k, v, visible(T), scale, params)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def test_the_usual_scale_is_for_every_spec():
    x = draw(B, T, C)
    for name, spec in regard.presets().items():
        plain = layer(spec=spec)(x)[0]
        assert torch.equal(layer(spec=spec, temperature="fixed")(x)[0], plain), name
        if spec.takes_scale:  # learned starts at the usual scale, whatever the similarity
            torch.testing.assert_close(layer(spec=spec, temperature="learned")(x)[0], plain, atol=1e-6, rtol=0)


@pytest.mark.parametrize("text", [*RIDGES, "learned(start=0.9)", "learned(start=30,link=softplus)"])
def test_every_ridge_starts_where_it_is_told(text):
    torch.manual_seed(1)
    found = Attention(C, H, spec="local-linear", ridge=text).ridge_proj(draw(B, T, C, dtype=torch.float32))
    assert found.shape == (B, H, T, D if "dimension" in text else 1)
    start = {"learned(start=0.9)": 0.9, RIDGES[1]: 0.5}.get(text, 30.0 if "30" in text else 0.1)
    torch.testing.assert_close(found, torch.full_like(found, start), atol=0, rtol=1e-5)


@pytest.mark.parametrize("text", RIDGES)
def test_values_are_the_formula_and_never_below_the_floor(text):
    x = torch.tensor([-1e4, -200.0, -3.0, 0.0, 2.0, 50.0], dtype=torch.float64)
    found = as_ridge(text).values(x)
    torch.testing.assert_close(found, by.ridge_values(text, x), atol=0, rtol=1e-12)
    assert bool((found >= (0.01 if "softplus" in text else 0.001)).all())
    assert as_ridge(text).values(x.bfloat16()).dtype == torch.float32
    y = torch.tensor([-3.0, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(as_ridge(text).values, [y])


@pytest.mark.parametrize("norm", [None, "rms", "l2"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_pieces_that_other_solvers_do_equal_the_whole(dtype, tolerance, norm):
    """32 channels: the whole is solved by conjugate gradients, single steps by a factor; root mean squares."""
    length, sizes = 150, [110] + [1] * 20 + [13] + [1] * 7
    torch.manual_seed(0)
    module = Attention(C, 2, head_dim=32, spec="local-linear", ridge="learned", qk_norm=norm, layer_idx=0).to(dtype)
    x, mask = draw(B, length, C, dtype=dtype), torch.ones(B, length, dtype=torch.bool)
    mask[0, :5] = False
    positions = rotary_angles(torch.arange(length)[None], 32, dtype=dtype)
    whole, cache, pieces, at = module(x, positions, mask)[0], DynamicCache(), [], 0
    for size in sizes:
        part = slice(at, at + size)
        at += size
        turned = tuple(angles[:, part] for angles in positions)
        pieces.append(module(x[:, part], turned, mask[:, :at], cache)[0])
    gap = (torch.cat(pieces, 1) - whole)[mask]
    assert gap.double().norm() < tolerance * whole[mask].double().norm()
    if dtype == torch.float32:
        assert gap.abs().max() < 1e-5


def test_the_weights_are_those_of_the_values():
    module, x = layer(spec="local-linear", ridge="learned"), draw(B, T, C)
    out, weights = module(x, output_attentions=True)
    v = module.v_proj(x).view(B, T, H, D).transpose(1, 2)
    torch.testing.assert_close(module.o_proj((weights @ v).transpose(1, 2).flatten(2)), out, atol=1e-10, rtol=0)
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, H, T, dtype=torch.float64), atol=1e-10, rtol=0)
    assert weights.min() < -0.01


@pytest.mark.parametrize("norm", [None, "rms"])
def test_a_probe_of_the_layer_in_the_place_of_a_solution(norm):
    """The probe is normalised without a gain, and turned like a query."""
    module, x = layer(spec="gaussian*linear(solver=learned)", qk_norm=norm), draw(B, T, C)
    angles, probe = angles_of(torch.arange(T)), module.r_proj(x).view(B, T, H, D).transpose(1, 2)
    probe = by.turn(by.normalised(probe, "rms") if norm else probe, angles)
    found, _ = module(x, rotary_angles(torch.arange(T)[None], D, dtype=torch.float64))
    expected = by_hand(module, x, visible(T), None, angles, norm, probe=probe)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)
    found.square().sum().backward()
    assert module.r_proj.weight.grad.abs().max() > 1e-3


def test_a_temperature_of_a_third_party(monkeypatch):
    @dataclass(frozen=True)
    class Root(Temperature):
        """scale = default * c sqrt(n)."""

        start_at: float = 2.0
        name: ClassVar[str] = "root"

        def start(self):
            return {"factor": self.start_at}

        def multiplier(self, n, learned):
            return learned["factor"] * n.sqrt()

    monkeypatch.setitem(temperatures._objects, "root", Root)
    module, x = layer(temperature="root(start_at=3)"), draw(B, T, C)
    assert str(module.temperature) == "root(start_at=3.0)"
    assert torch.equal(module.factor, torch.full((H,), 3.0, dtype=torch.float64))
    scale = 3 * (torch.arange(1, T + 1).double() / D).sqrt()
    torch.testing.assert_close(module(x)[0], by_hand(module, x, visible(T), scale=scale), atol=1e-6, rtol=0)
