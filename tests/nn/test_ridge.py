"""Ridges of a layer, against the formula of equation 27 and against regressions fitted row by row in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch.nn.functional import softplus
from transformers import DynamicCache

import regard
from regard.checks import ArgumentError
from regard.nn import Attention, Ridge, as_ridge, ridges, rotary_angles

B, T, C, H = 2, 11, 32, 4
D = C // H
LEARNED = ("learned", "learned(start=0.5,floor=0.01,link=softplus)", "learned-per-dimension")


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def layer(**options):
    """A layer whose ridge depends on the token."""
    torch.manual_seed(1)
    module = Attention(C, H, **options).double()
    if module.ridge_proj is not None:
        with torch.no_grad():
            module.ridge_proj.weight.copy_(0.5 * draw(*module.ridge_proj.weight.shape, seed=9))
    return module


def formula(text, x):
    """Equation 27 with its floor."""
    if "softplus" in text:
        return 0.01 + softplus(x)
    return 0.001 + 1 / (1 + torch.exp(-x))


def relumax(z):
    w = (z - z.max() + 1).clamp_min(0)
    return w / w.sum()


WEIGHTS = {"local-linear": lambda z: z.softmax(-1), "local-linear[relumax]": relumax}


def turn(x, angles):
    """Rotation as multiplication of complex numbers, [.., D]."""
    first, second = x[..., : D // 2], x[..., D // 2 :]
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), -1)


def intercept(p, k, v, q, ridge):
    """The intercept b of min sum_j p_j |v_j - b - W (k_j - q)|^2 + sum_d ridge_d |W_d|^2 (p sums to one), as ordinary
    least squares on augmented rows."""
    ones, root = torch.ones(len(p), 1, dtype=p.dtype), p.sqrt()[:, None]
    slopes = torch.cat((torch.zeros(D, 1, dtype=p.dtype), ridge.expand(D).sqrt().diag()), 1)
    left = torch.cat((root * torch.cat((ones, k - q), 1), slopes))
    right = torch.cat((root * v, torch.zeros(D, v.shape[1], dtype=p.dtype)))
    return torch.linalg.lstsq(left, right, driver="gelsd").solution[0]


def by_hand(module, x, weigh, ridge, allowed, angles=None, norm=None):
    """The layer: every head, every row; ridge [B, T, H, 1 or D]."""
    groups, scale = H // module.num_kv_heads, D**-0.5
    heads = []
    for head in range(H):
        split = lambda projection, at: projection(x)[..., at * D : (at + 1) * D]  # noqa: E731
        q, k = split(module.q_proj, head), split(module.k_proj, head // groups)
        v = split(module.v_proj, head // groups)
        if norm is not None:
            q, k = norm(q), norm(k)
        if angles is not None:
            q, k = turn(q, angles), turn(k, angles)
        rows = torch.zeros(B, T, D, dtype=x.dtype)
        for b in range(B):
            for i in range(T):
                keys = allowed[b, i].nonzero()[:, 0]
                if len(keys):
                    p = weigh(k[b, keys] @ q[b, i] * scale)
                    rows[b, i] = intercept(p, k[b, keys], v[b, keys], q[b, i], ridge[b, i, head])
        heads.append(rows)
    return module.o_proj(torch.cat(heads, -1))


def causal(mask=None, window=T):
    allowed = torch.tensor([[i - window < j <= i for j in range(T)] for i in range(T)]).expand(B, T, T)
    return allowed if mask is None else allowed & mask[:, None, :]


def test_text_forms():
    texts = ("fixed", *LEARNED, "learned(start=0.5)")
    assert [str(as_ridge(text)) for text in texts] == list(texts)
    assert as_ridge(" learned( start = 5e-1 , link = sigmoid ) ") == as_ridge("learned(start=0.5)")
    assert ridges.names()[:3] == ["fixed", "learned", "learned-per-dimension"]
    assert regard.registries()["ridge"] is ridges


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learnt", "unknown ridge 'learnt'. Did you mean 'learned'"),
        ("learned(", r"ridge is 'learned\(', expected the text of one, such as 'learned\(start=0.5\)'"),
        (0.1, "ridge is 0.1, expected the text of one"),
        ("fixed(value=1)", "ridge fixed: unknown argument 'value'; it takes none"),
        ("learned(begin=1)", "unknown argument 'begin'; it takes start, floor, link"),
        ("learned(link=relu)", "link is 'relu', expected one of sigmoid, softplus"),
        ("learned(start=x)", "start is 'x', expected a number"),
        ("learned(floor=0)", "floor is 0, expected floor > 0"),
        ("learned(start=0.001)", "start is 0.001, expected a number between floor 0.001 and 1.001"),
        ("learned(start=2)", "start is 2, expected a number between floor 0.001 and 1.001, which a sigmoid"),
    ],
)
def test_bad_texts(text, message):
    with pytest.raises(ArgumentError, match=message):
        as_ridge(text)


def test_only_a_model_that_is_solved_for_has_a_ridge():
    for spec in ("softmax", "biweight", "gaussian*linear(solver=learned)"):
        with pytest.raises(ArgumentError, match=r"nn\.Attention: ridge learned needs a local linear model"):
            layer(spec=spec, ridge="learned")
    assert layer(spec="softmax").ridge_proj is None


@pytest.mark.parametrize("text", [*LEARNED, "learned(start=0.9)", "learned(start=30,link=softplus)"])
def test_every_ridge_starts_where_it_is_told(text):
    torch.manual_seed(1)
    module = Attention(C, H, spec="local-linear", ridge=text)
    found = module.ridge_proj(draw(B, T, C, dtype=torch.float32))
    assert found.shape == (B, H, T, D if "dimension" in text else 1)
    start = {"learned(start=0.9)": 0.9, LEARNED[1]: 0.5}.get(text, 30.0 if "30" in text else 0.1)
    torch.testing.assert_close(found, torch.full_like(found, start), atol=0, rtol=1e-5)


@pytest.mark.parametrize("text", LEARNED)
def test_values_are_the_formula_and_never_below_the_floor(text):
    x = torch.tensor([-1e4, -200.0, -3.0, 0.0, 2.0, 50.0], dtype=torch.float64)
    found = as_ridge(text).values(x)
    torch.testing.assert_close(found, formula(text, x), atol=0, rtol=1e-12)
    assert bool((found >= (0.01 if "softplus" in text else 0.001)).all())
    assert as_ridge(text).values(x.bfloat16()).dtype == torch.float32
    y = torch.tensor([-3.0, 0.0, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(as_ridge(text).values, [y])


@pytest.mark.parametrize("text", ["fixed", *LEARNED])
@pytest.mark.parametrize("spec", WEIGHTS)
def test_layer_equals_regressions_by_hand(text, spec):
    """Grouped heads, rotary positions, left padding; the ridge of every token from its own hidden state."""
    module, x = layer(spec=spec, ridge=text, num_kv_heads=2), draw(B, T, C)
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[1, :3] = False
    angles = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    ridge = torch.full((B, T, H, 1), 0.1, dtype=torch.float64)
    if text != "fixed":
        linear = x @ module.ridge_proj.weight.T + module.ridge_proj.bias
        ridge = formula(text, linear).view(B, T, H, -1)
        assert ridge.std() > 0.01
    expected = by_hand(module, x, WEIGHTS[spec], ridge, causal(mask), angles)
    positions = rotary_angles(torch.arange(T)[None], D, dtype=torch.float64)
    found, _ = module(x, positions, mask)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)  # rotary angles are made in float32


@pytest.mark.parametrize("window", [1, 4, T])
def test_windows(window):
    module, x = layer(spec="local-linear", ridge="learned", window=window), draw(B, T, C)
    ridge = formula("learned", x @ module.ridge_proj.weight.T + module.ridge_proj.bias)[..., None]
    expected = by_hand(module, x, WEIGHTS["local-linear"], ridge, causal(window=window))
    torch.testing.assert_close(module(x)[0], expected, atol=1e-9, rtol=0)


def test_fixed_is_the_number_of_the_spec():
    x = draw(B, T, C)
    module = layer(spec="gaussian*linear(ridge=0.7)")
    ridge = torch.full((B, T, H, 1), 0.7, dtype=torch.float64)
    expected = by_hand(module, x, WEIGHTS["local-linear"], ridge, causal())
    torch.testing.assert_close(module(x)[0], expected, atol=1e-9, rtol=0)
    assert "ridge=" not in repr(module).replace("ridge=0.7", "")
    assert "ridge='learned'" in repr(layer(spec="local-linear", ridge="learned"))


@pytest.mark.parametrize("text", LEARNED)
@pytest.mark.parametrize("solver", ["auto", "cg"])
def test_gradients_of_the_projection(text, solver):
    """Finite differences of the whole layer with respect to what makes the ridge."""
    module, x = layer(spec=f"epanechnikov*anchored*linear(solver={solver})", ridge=text), draw(B, T, C)
    weight = draw(B, T, C, seed=3)
    loss = lambda: (module(x)[0] * weight).sum()  # noqa: E731
    loss().backward()
    for parameter in (module.ridge_proj.weight, module.ridge_proj.bias):
        flat, grad = parameter.detach().view(-1), parameter.grad.view(-1)
        assert grad.abs().max() > 1e-4
        for i in (0, len(flat) // 2, len(flat) - 1):
            before, ends = float(flat[i]), []
            for step in (-1e-4, 1e-4):
                flat[i] = before + step
                with torch.no_grad():
                    ends.append(float(loss()))
            flat[i] = before
            assert (ends[1] - ends[0]) / 2e-4 == pytest.approx(float(grad[i]), rel=1e-5, abs=1e-7)


def steps(module, x, sizes, mask, positions):
    """The layer piece by piece with a cache."""
    cache, outs, at = DynamicCache(), [], 0
    for size in sizes:
        part = slice(at, at + size)
        at += size
        turned = tuple(angles[:, part] for angles in positions)
        outs.append(module(x[:, part], turned, mask[:, :at], cache)[0])
    return torch.cat(outs, 1)


@pytest.mark.parametrize("norm", [None, "rms", "l2"])
@pytest.mark.parametrize("text", ["fixed", *LEARNED])
@pytest.mark.parametrize("spec", ["local-linear", "local-linear[biweight]", "local-linear[relumax]"])
def test_pieces_with_a_cache_equal_the_whole(spec, text, norm):
    """Left padding, grouped heads; exactly in float64, to 1e-5 in float32. (The ridge starts near 0.1 or above it: a
    smaller one magnifies rounding as much as it is smaller than the keys' squares.)"""
    length, sizes = 40, [1] * 10 + [13, 1, 1, 7, 1, 1, 6]
    module = layer(spec=spec, ridge=text, qk_norm=norm, num_kv_heads=2, layer_idx=0)
    if module.ridge_proj is not None:
        torch.nn.init.constant_(module.ridge_proj.weight, 0.01)
    mask = torch.ones(B, length, dtype=torch.bool)
    mask[0, :5] = False
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 1e-5)):
        module, x = module.to(dtype), draw(B, length, C, dtype=dtype)
        positions = rotary_angles(torch.arange(length)[None], D, dtype=dtype)
        whole = module(x, positions, mask)[0]
        gap = (steps(module, x, sizes, mask, positions) - whole)[mask].abs().max()
        assert gap < tolerance, (dtype, float(gap))


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
    whole = module(x, positions, mask)[0]
    gap = (steps(module, x, sizes, mask, positions) - whole)[mask]
    assert gap.double().norm() < tolerance * whole[mask].double().norm()
    if dtype == torch.float32:
        assert gap.abs().max() < 1e-5


def test_a_mask_of_pairs_is_the_mask_of_keys():
    module, x = layer(spec="local-linear[biweight]", ridge="learned"), draw(B, T, C)
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[0, 2:5] = False
    pairs = mask[:, None, None, :].expand(B, 1, T, T)
    torch.testing.assert_close(
        module(x, attention_mask=pairs)[0], module(x, attention_mask=mask)[0], atol=1e-12, rtol=0
    )


@pytest.mark.parametrize("exclude_self", [False, True])
def test_pieces_with_a_window_equal_the_whole(exclude_self):
    length, sizes = 30, [1] * 12 + [9, 1, 1, 7]
    options = {"spec": "local-linear[relumax]", "window": 6, "exclude_self": exclude_self, "layer_idx": 0}
    module, x = layer(**options, ridge="learned"), draw(B, length, C)
    mask = torch.ones(B, length, dtype=torch.bool)
    positions = rotary_angles(torch.arange(length)[None], D, dtype=torch.float64)
    whole = module(x, positions, mask)[0]
    torch.testing.assert_close(steps(module, x, sizes, mask, positions), whole, atol=1e-10, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """Keys of half precision, solved for in float32: as good as the inputs, with finite gradients."""
    module = layer(spec="local-linear[biweight]", ridge="learned", qk_norm="rms")
    torch.nn.init.constant_(module.ridge_proj.weight, 0.01)
    x = draw(B, T, C)
    expected = module(x)[0]
    half = module.to(dtype)
    out, _ = half(x.to(dtype))
    assert out.dtype == dtype
    assert (out.double() - expected).norm() < (0.05 if dtype == torch.bfloat16 else 0.01) * expected.norm()
    out.float().square().sum().backward()
    for name, parameter in half.named_parameters():
        assert bool(parameter.grad.isfinite().all()), name
        assert parameter.grad.abs().max() > 0, name


def test_hidden_tokens_never_matter():
    """Padding that is not even finite changes no real token's output or gradient; rows without a key are 0."""
    module = layer(spec="local-linear", ridge="learned", qk_norm="l2")
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[0, :4] = False
    clean, dirty = draw(B, T, C), draw(B, T, C)
    dirty[0, :4] = math.nan
    one, two = clean.requires_grad_(), dirty.requires_grad_()
    first, second = (module(x, attention_mask=mask)[0] for x in (one, two))
    torch.testing.assert_close(first[mask], second[mask], atol=1e-12, rtol=0)
    assert bool((first[0, :4] == 0).all())
    first[mask].square().sum().backward()
    second[mask].square().sum().backward()
    torch.testing.assert_close(one.grad[mask], two.grad[mask], atol=1e-12, rtol=0)


def test_the_weights_are_those_of_the_values():
    module, x = layer(spec="local-linear", ridge="learned"), draw(B, T, C)
    out, weights = module(x, output_attentions=True)
    v = module.v_proj(x).view(B, T, H, D).transpose(1, 2)
    torch.testing.assert_close(module.o_proj((weights @ v).transpose(1, 2).flatten(2)), out, atol=1e-10, rtol=0)
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, H, T, dtype=torch.float64), atol=1e-10, rtol=0)
    assert weights.min() < -0.01


@pytest.mark.parametrize("norm", [None, "rms"])
def test_a_probe_of_the_layer_in_the_place_of_a_solution(norm):
    """Parallax: weights p (1 - (k - kbar) . r), r normalised and turned like a query."""
    module, x = layer(spec="gaussian*linear(solver=learned)", qk_norm=norm), draw(B, T, C)
    angles = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    rms = lambda y: y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()  # noqa: E731
    split = lambda projection: projection(x).view(B, T, H, D).transpose(1, 2)  # noqa: E731
    q, k, r = (turn(rms(y) if norm else y, angles) for y in map(split, (module.q_proj, module.k_proj, module.r_proj)))
    p = (q @ k.mT / D**0.5).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).softmax(-1)
    slopes = r @ k.mT - ((p @ k) * r).sum(-1, keepdim=True)
    expected = module.o_proj(((p * (1 - slopes)) @ split(module.v_proj)).transpose(1, 2).flatten(2))
    positions = rotary_angles(torch.arange(T)[None], D, dtype=torch.float64)
    found, _ = module(x, positions)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)
    found.square().sum().backward()
    assert module.r_proj.weight.grad.abs().max() > 1e-3


@pytest.mark.parametrize("name", ridges.names())
def test_whatever_is_registered(name):
    rule = ridges.get(name)()
    assert str(rule) == name == rule.name
    assert as_ridge(name) == rule
    module = layer(spec="local-linear[triweight]", ridge=name)
    numbers = rule.numbers(D)
    assert (module.ridge_proj is None) == (numbers == 0)
    if numbers:
        assert module.ridge_proj.weight.shape == (H * numbers, C)
        found = rule.values(torch.linspace(-30, 30, 61, dtype=torch.float64))
        assert bool((found > 0).all() and found.isfinite().all())
    whole, x = module(draw(B, T, C))[0], draw(B, T, C)
    for i in (0, 5, T - 1):
        torch.testing.assert_close(module(x[:, : i + 1])[0][:, -1], whole[:, i], atol=1e-9, rtol=0)


def test_a_rule_of_a_third_party():
    """One dataclass, one registration."""

    @dataclass(frozen=True)
    class Exponential(Ridge):
        """exp of the projection."""

        start: float = 0.2
        name: ClassVar[str] = "exponential"

        def numbers(self, dim):
            return 1

        def bias(self):
            return math.log(self.start)

        def values(self, x):
            return x.exp()

    ridges.register("exponential")(Exponential)
    try:
        module, x = layer(spec="local-linear", ridge="exponential(start=0.4)"), draw(B, T, C)
        assert str(module.ridge) == "exponential(start=0.4)"
        ridge = (x @ module.ridge_proj.weight.T + math.log(0.4)).exp()[..., None]
        expected = by_hand(module, x, WEIGHTS["local-linear"], ridge, causal())
        torch.testing.assert_close(module(x)[0], expected, atol=1e-6, rtol=0)  # the bias was made in float32
    finally:
        del ridges._objects["exponential"]


def test_a_rule_that_learns_nothing_it_can_say():
    @dataclass(frozen=True)
    class Half(Ridge):
        """Forgot its values."""

        name: ClassVar[str] = "half"

        def numbers(self, dim):
            return 1

    with pytest.raises(ArgumentError, match=r"ridge 'half': Half has no values\(x\); define it"):
        layer(spec="local-linear", ridge=Half())(draw(B, T, C))
