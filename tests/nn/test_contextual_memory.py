"""The contextual memory against its definition, written out pair by pair in float64.

Causality, caches, padding and packed documents are tested in `tests/models` for every model that has these layers."""

from __future__ import annotations

import math

import pytest
import torch
from dense import weights as dense_weights
from mosaic_by_hand import C, D, H, beta2, split, tokens, unit_keys
from packed import runs

from regard import presets
from regard.checks import ArgumentError
from regard.inspect import capture
from regard.nn import ContextualMemory
from regard.nn.mosaic.contextual_memory import wide_threshold
from regard.nn.mosaic.features import unit

T = 11


def memory(spec="softmax", seed=0, **options):
    torch.manual_seed(seed)
    return ContextualMemory(C, H, spec=spec, **options).double()


def features(layer, x, look_ahead="sum"):
    """Unit keys and values [B, H, T, D]."""
    keys = unit_keys(layer, x)
    now = split(x @ layer.values.proj.weight.T)
    following = torch.cat([now[:, :, 1:], torch.zeros_like(now[:, :, :1])], 2)
    c = layer.values.mix[:, None, None]
    mixed = now + c * following if look_ahead == "sum" else c * now + (1 - c) * following
    length = (10 * layer.values.scale).exp()[:, None, None]
    return keys, mixed / mixed.norm(dim=-1, keepdim=True) * length


def expected(layer, x, weigh, look_ahead="sum"):
    """The output for `weigh(cosines [B, H, T, T], with -inf where hidden) -> weights`."""
    keys, values = features(layer, x, look_ahead)
    strict = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(-1)
    s = (keys @ keys.transpose(-1, -2)).masked_fill(~strict, -torch.inf)
    p = weigh(s)
    p = torch.where(strict.any(-1)[:, None], p, 0.0)
    return (p @ values).transpose(1, 2).flatten(2) @ layer.out_proj.weight.T


RULES = {
    "sparsemax": ("adaptive", "polynomial", 1.0, {}),
    "biweight": ("adaptive", "polynomial", 2.0, {}),
    "triweight": ("adaptive", "polynomial", 3.0, {}),
    "topk-softmax": ("nearest", "gaussian", 1.0, {"k": 32}),
    "gaussian*nearest(k=3)": ("nearest", "gaussian", 1.0, {"k": 3}),
    "uniform*nearest(k=3)": ("nearest", "uniform", 1.0, {"k": 3}),
}


def weights_of(spec, z):
    if spec == "softmax":
        return z.softmax(-1)
    rule, kernel, r, more = RULES[spec]
    return dense_weights(z, rule, kernel, r, **more)


@pytest.mark.parametrize("spec", ["softmax", *RULES])
def test_equals_its_definition(spec):
    layer, x = memory(spec), tokens()
    got, state, weights = layer(x)
    want = expected(layer, x, lambda s: weights_of(spec, beta2(layer) * s))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-9)
    assert state is None
    assert weights is None
    assert torch.equal(got[:, 0], torch.zeros(2, C, dtype=torch.float64))


def test_learned_numbers_of_the_spec():
    x = tokens()
    layer = memory("relumax")
    with torch.no_grad():
        layer.numbers.log_margin.copy_(torch.tensor([-0.5, 0.0, 0.7]))
    margin = layer.numbers.log_margin.exp()[:, None, None]
    want = expected(layer, x, lambda s: dense_weights(beta2(layer) * s, "anchored", number=margin))
    torch.testing.assert_close(layer(x)[0], want, rtol=0, atol=1e-9)

    layer = memory("normrelu")
    with torch.no_grad():
        layer.numbers.bias.copy_(torch.tensor([-3.0, 0.0, 2.0]))
    bias = layer.numbers.bias[:, None, None]
    want = expected(layer, x, lambda s: dense_weights(beta2(layer) * s, "fixed", number=bias))
    torch.testing.assert_close(layer(x)[0], want, rtol=0, atol=1e-9)

    for spec in ("epanechnikov*fixed(h=1)*cosine(eps=0)", "epanechnikov*fixed(h=1)*euclidean"):
        layer = memory(spec)
        with torch.no_grad():
            layer.numbers.log_h.copy_(torch.tensor([0.9, 1.3, 1.7]).log())
        h = layer.numbers.log_h.exp()[:, None, None]
        want = expected(layer, x, lambda s, h=h: dense_weights(s, "fixed", number=h * h / 2 - 1))
        torch.testing.assert_close(layer(x)[0], want, rtol=0, atol=1e-9)
        assert layer.sharpness is None


def test_a_learned_alpha():
    layer, x = memory("biweight", learned=["alpha"]), tokens()
    torch.testing.assert_close(layer.numbers.log_alpha, torch.full((H,), math.log(0.5)).double(), atol=1e-7, rtol=0)
    alphas = torch.tensor([1.3, 1.5, 2.0], dtype=torch.float64)
    with torch.no_grad():
        layer.numbers.log_alpha.copy_((alphas - 1).log())
    want = expected(layer, x, lambda s: dense_weights(beta2(layer) * s, "adaptive", r=1 / (alphas[:, None, None] - 1)))
    torch.testing.assert_close(layer(x)[0], want, rtol=0, atol=1e-7)


def test_unnormalised_and_mapped_specs():
    """Scores with a scale take beta^2; maps without one take keys of length beta."""
    x = tokens()
    layer = memory("linear")
    want = expected(layer, x, lambda s: torch.where(s == -torch.inf, 0.0, beta2(layer) * s))
    torch.testing.assert_close(layer(x)[0], want, rtol=0, atol=1e-9)
    layer = memory("relu")
    keys = features(layer, x)[0] * beta2(layer).sqrt()
    w = (keys.clamp(min=0) @ keys.clamp(min=0).transpose(-1, -2) + 1e-4).tril(-1)
    total = w.sum(-1, keepdim=True)
    want = expected(layer, x, lambda s: w / torch.where(total > 0, total, 1.0))
    torch.testing.assert_close(layer(x)[0], want, rtol=0, atol=1e-9)


def test_local_linear():
    """Weighted ridge regression of values on keys with an intercept, solved row by row."""
    layer, x = memory("gaussian*fixed*linear(ridge=0.3,solver=cholesky)", learned=[]), tokens(batch=1, length=6)
    keys, values = features(layer, x)
    got, _, _ = layer(x)
    heads = torch.zeros(H, 6, D, dtype=torch.float64)
    for h in range(H):
        for t in range(1, 6):
            q, k, v = keys[0, h, t], keys[0, h, :t], values[0, h, :t]
            w = torch.softmax(beta2(layer)[h, 0, 0] * (k @ q), 0)
            phi = torch.cat([torch.ones(t, 1, dtype=torch.float64), k - q], 1)
            penalty = 0.3 * torch.eye(D + 1, dtype=torch.float64)
            penalty[0, 0] = 0
            heads[h, t] = torch.linalg.solve(phi.T @ (w[:, None] * phi) + penalty, phi.T @ (w[:, None] * v))[0]
    want = heads.transpose(0, 1).flatten(1) @ layer.out_proj.weight.T
    torch.testing.assert_close(got[0], want, rtol=0, atol=1e-7)


@pytest.mark.parametrize("spec", [*presets(), "epanechnikov*fixed(h=1)*cosine", "biweight*anchored"])
def test_every_preset_trains_every_number(spec):
    """The 0/1 weights of the nearest keys too, which as released leave keys as they were drawn; zeros give zeros."""
    layer, x = memory(spec).float(), tokens().float()
    layer(x)[0].square().sum().backward()
    silent = {name for name, p in layer.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0}
    assert not silent
    layer.zero_grad()
    x = torch.zeros(1, 5, C, requires_grad=True)
    out, _, _ = layer(x)
    out.sum().backward()
    assert not out.any()
    assert all(p.grad.isfinite().all() for p in (x, *layer.parameters()) if p.grad is not None)


def test_uniform_weights_as_released_leave_keys_alone():
    layer, x = memory("topk-uniform", uniform_gradient="hard"), tokens()
    layer(x)[0].square().sum().backward()
    assert layer.keys.proj.weight.grad.abs().sum() == 0
    assert layer.values.proj.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("dim", [2, 8, 64])
def test_fixed_bandwidths_start_wide(dim):
    draws = torch.Generator().manual_seed(0)
    vectors = torch.nn.functional.normalize(torch.randn(200_000, dim, dtype=torch.float64, generator=draws), dim=-1)
    share = (vectors[:, 0] < wide_threshold(dim)).double().mean()
    assert abs(share - 0.075) < 0.003
    layer = ContextualMemory(dim, 1, spec="epanechnikov*fixed(h=1)*cosine")
    threshold = 1 - layer.numbers.log_h.exp() ** 2 / 2
    assert abs((vectors[:, 0] < threshold.item()).double().mean() - 0.075) < 0.003
    layer = ContextualMemory(dim, 1, spec="normrelu")
    assert abs((vectors[:, 0] < -layer.numbers.bias.item() / math.e**2).double().mean() - 0.075) < 0.003


def test_bandwidths_that_begin_at_the_spec():
    assert memory("normrelu", start="spec").numbers.bias.tolist() == [0.0] * H
    assert memory("epanechnikov*fixed(bias=0.5)").numbers.bias.tolist() == [0.5] * H
    started = memory("epanechnikov*fixed(h=0.7)*cosine", start="spec")
    torch.testing.assert_close(started.numbers.log_h.exp(), torch.full((H,), 0.7).double(), rtol=1e-6, atol=0)
    assert not list(memory("relumax", learned=[]).numbers.parameters())


def test_empty_rows_are_reported():
    layer, x = memory("epanechnikov*fixed(h=0.01)*cosine", start="spec"), tokens()
    with capture(layer) as seen:
        layer(x)
    rows = seen.layers[0]
    assert rows.empty.tolist() == [[[True] + [False] * (T - 1)] * H] * 2
    assert rows.fallback[:, :, 1:].all()
    wide = memory("epanechnikov*fixed(h=2)*cosine", start="spec")
    with capture(wide) as seen:
        wide(x)
    assert not seen.layers[0].fallback.any()


@pytest.mark.parametrize("spec", ["biweight", "local-linear"])
def test_weights_add_up_to_the_output(spec):
    layer, x = memory(spec), tokens()
    out, _, weights = layer(x, output_attentions=True)
    assert weights.shape == (2, H, T, T)
    assert torch.equal(weights.triu(), torch.zeros_like(weights))
    torch.testing.assert_close(weights.sum(-1)[:, :, 1:], torch.ones(2, H, T - 1).double())
    _, values = features(layer, x)
    again = (weights @ values).transpose(1, 2).flatten(2) @ layer.out_proj.weight.T
    torch.testing.assert_close(out, again, rtol=0, atol=1e-7)
    torch.testing.assert_close(layer(x)[0], out, rtol=0, atol=1e-7)


def test_starting_values():
    layer = ContextualMemory(24, 6)
    torch.testing.assert_close((10 * layer.keys.rate).abs(), torch.linspace(0.5, 5, 6))
    torch.testing.assert_close(layer.sharpness(), torch.full((6,), math.e**2))
    assert ((layer.values.mix >= 0) & (layer.values.mix <= 1)).all()
    torch.testing.assert_close((10 * layer.values.scale).exp(), torch.full((6,), math.exp(-0.5)))
    assert {p.dim() for name, p in layer.named_parameters() if "proj" not in name} == {1}
    torch.nn.init.constant_(layer.sharpness.scale, 3.0)  # which is limited
    torch.testing.assert_close(layer.sharpness(), torch.full((6,), math.exp(10)))


def test_zero_vectors_have_no_direction():
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0]], requires_grad=True)
    got = unit(x)
    assert torch.equal(got, torch.tensor([[0.0, 0.0], [0.6, 0.8]]))
    got.sum().backward()
    assert torch.equal(x.grad[0], torch.zeros(2))
    torch.testing.assert_close(x.grad[1], torch.tensor([0.2 - 0.6 * 1.4 / 5, 0.2 - 0.8 * 1.4 / 5]))


IDS = torch.tensor([[3] * 5 + [1] + [3] * 5, [0] * 2 + [1] * 9])


@pytest.mark.parametrize("spec", ["softmax", "linear", "local-linear"])
def test_weights_of_packed_documents_are_those_of_the_documents(spec):
    layer, x = memory(spec), tokens()
    mask = torch.ones(2, T, dtype=torch.bool)
    mask[0, [0, 3, 5]] = mask[1, [1, 2, 10]] = False
    out, _, weights = layer(x, mask, output_attentions=True, segment_ids=IDS)
    torch.testing.assert_close(layer(x, mask, segment_ids=IDS)[0][mask], out[mask])
    within = torch.zeros_like(weights, dtype=torch.bool)
    for row, span in runs(IDS):
        _, _, alone = layer(x[row, span][None], mask[row, span][None], output_attentions=True)
        rows = mask[row, span]
        torch.testing.assert_close(weights[row, :, span, span][:, rows], alone[0][:, rows], rtol=0, atol=1e-9)
        within[row, :, span, span] = True
    assert not weights[~within].any()
    layer.hook_pattern.register_forward_hook(lambda _module, _args, found: found * 0.5)
    torch.testing.assert_close(layer(x, mask, segment_ids=IDS)[0][mask], 0.5 * out[mask])


def test_one_row_of_segment_ids_serves_the_batch():
    layer, x = memory("biweight"), tokens()
    for mask in (None, torch.arange(T).expand(2, T) > 2):
        both = layer(x, mask, segment_ids=IDS[:1].expand(2, -1))[0]
        torch.testing.assert_close(layer(x, mask, segment_ids=IDS[:1])[0], both)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"learned": ["height"]}, "height"),
        ({"num_heads": 5}, "multiple"),
        ({"spec": "gaussian*fixed*linear(ridge=0.1,solver=learned)"}, "probe"),
        (
            {"spec": "biweight*linear(ridge=0.0)", "learned": ["ridge"]},
            r"ridge is 0\.0 in .* start it above 0\.0, or leave it out of learned",
        ),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(ArgumentError, match=words):
        ContextualMemory(**{"hidden_size": C, "num_heads": H, **options})


def test_states():
    layer, x = memory(), tokens()
    _, state, _ = layer(x, remember=True)
    for change in ({"state": state}, {"remember": True}):
        with pytest.raises(ArgumentError, match="segment_ids were given with a state"):
            layer(x, segment_ids=IDS, **change)
    with pytest.raises(ArgumentError, match="cannot go back"):
        state.crop(3)
    assert state.reset().keys.shape == (2, H, 0, D)
