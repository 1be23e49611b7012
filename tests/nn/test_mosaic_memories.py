"""Layers of Memory Mosaics by themselves: kernels, initial bandwidths, weights, packed documents and errors. Their
equations, causality, caches and padding are tested in `tests/models`, in models that have them."""

import math

import pytest
import torch
from mistakes import refuses
from packed import runs

from regard import presets
from regard.nn import ContextualMemory, PersistentMemory
from regard.nn.mosaic.contextual_memory import wide_threshold
from regard.nn.mosaic.features import unit

C, H, T = 24, 3, 11
D = C // H


def tokens(batch=2):
    return torch.randn(batch, T, C, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def memory(spec="softmax", seed=0, **options):
    torch.manual_seed(seed)
    return ContextualMemory(C, H, spec=spec, **options).double()


@pytest.mark.parametrize("spec", [*presets(), "epanechnikov*fixed(h=1)*cosine", "biweight*anchored"])
def test_every_preset_trains_every_number(spec):
    """Also with the 0/1 weights of the nearest keys. Zeros give zeros."""
    layer, x = memory(spec).float(), tokens().float()
    layer(x)[0].square().sum().backward()
    assert not {name for name, p in layer.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0}
    layer.zero_grad()
    x = torch.zeros(1, 5, C, requires_grad=True)
    out, _, _ = layer(x)
    out.sum().backward()
    assert not out.any()
    assert all(p.grad.isfinite().all() for p in (x, *layer.parameters()) if p.grad is not None)


@pytest.mark.parametrize("spec", presets())
def test_every_preset_of_a_persistent_memory(spec):
    """Outputs and gradients are finite, also of zeros. Kernels that are not normalised are refused."""
    if spec in ("linear", "cosine"):
        refuses("normalised", PersistentMemory, C, H, 17, spec=spec)
        return
    torch.manual_seed(0)
    layer = PersistentMemory(C, H, 17, spec=spec)
    out, _ = layer(tokens().float())
    out.square().sum().backward()
    zeros, _ = layer(torch.zeros(1, 3, C))
    grads = (p.grad for p in layer.parameters() if p.grad is not None)
    assert all(torch.isfinite(x).all() for x in (out, zeros, *grads))


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
    alpha = memory("biweight", learned=["alpha"]).numbers.log_alpha.exp()
    torch.testing.assert_close(alpha, torch.full((H,), 0.5).double())
    started = memory("epanechnikov*fixed(h=0.7)*cosine", start="spec")
    torch.testing.assert_close(started.numbers.log_h.exp(), torch.full((H,), 0.7).double(), rtol=1e-6, atol=0)
    assert not list(memory("relumax", learned=[]).numbers.parameters())


@pytest.mark.parametrize("spec", ["biweight", "local-linear"])
def test_weights_add_up_to_the_output(spec):
    layer, x = memory(spec), tokens()
    out, _, weights = layer(x, output_attentions=True)
    assert weights.shape == (2, H, T, T)
    assert torch.equal(weights.triu(), torch.zeros_like(weights))
    torch.testing.assert_close(weights.sum(-1)[:, :, 1:], torch.ones(2, H, T - 1).double())
    now = layer.values(x)
    values = layer.values(now, torch.cat([now[:, :, 1:], torch.zeros_like(now[:, :, :1])], 2))
    again = (weights @ values).transpose(1, 2).flatten(2) @ layer.out_proj.weight.T
    torch.testing.assert_close(out, again, rtol=0, atol=1e-7)
    torch.testing.assert_close(layer(x)[0], out, rtol=0, atol=1e-7)


def test_a_temperature_multiplies_the_scale():
    """Token t sees t pairs. Padding, packed documents and steps count the pairs that are visible."""
    layer, x = memory(temperature="log"), tokens()
    keys = layer.keys(x)[0]
    n = torch.arange(T).clamp_min(2).double()
    scale = layer.sharpness()[:, None] * layer.log_slope.exp()[:, None] * n.log()
    scores = (scale[..., None] * (keys @ keys.mT)).masked_fill(torch.ones(T, T).triu().bool(), -torch.inf)
    weights = layer(x, output_attentions=True)[2]
    torch.testing.assert_close(weights[:, :, 1:], scores.softmax(-1)[:, :, 1:], rtol=0, atol=1e-12)
    out = layer(x)[0]
    out.square().sum().backward()
    assert all(layer.log_slope.grad != 0)
    padded = torch.cat([torch.full((2, 3, C), torch.nan).double(), x], 1)
    real = (torch.arange(T + 3) >= 3).expand(2, -1)
    torch.testing.assert_close(layer(padded, real)[0][:, 3:], out, rtol=0, atol=1e-12)
    packed = layer(x.reshape(1, 2 * T, C), segment_ids=torch.arange(2).repeat_interleave(T)[None])[0]
    torch.testing.assert_close(packed.view(2, T, C), out, rtol=0, atol=1e-12)
    state, steps = None, []
    for part in x.split([4, 1, 1, T - 6], 1):
        step, state, _ = layer(part, state=state, remember=True)
        steps.append(step)
    torch.testing.assert_close(torch.cat(steps, 1), out, rtol=0, atol=1e-12)


def test_a_temperature_divides_the_square_of_a_bandwidth():
    spec, x = "epanechnikov*fixed(h=0.8)*cosine", tokens()
    for learned in ("h",), ():
        sharp = memory(spec, start="spec", learned=learned, temperature="fixed(value=0.25)")
        narrow = memory("epanechnikov*fixed(h=0.4)*cosine", start="spec", learned=learned)
        torch.testing.assert_close(sharp(x)[0], narrow(x)[0], rtol=1e-6, atol=1e-9)
    refuses("needs scores that have a scale", memory, "relu", temperature="log")


def test_zero_vectors_have_no_direction():
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0]], requires_grad=True)
    got = unit(x)
    assert torch.equal(got, torch.tensor([[0.0, 0.0], [0.6, 0.8]]))
    got.sum().backward()
    assert torch.equal(x.grad[0], torch.zeros(2))
    torch.testing.assert_close(x.grad[1], torch.tensor([0.2 - 0.6 * 1.4 / 5, 0.2 - 0.8 * 1.4 / 5]))


@pytest.mark.parametrize("size", [1e-12, 1e-16, 1e-18, 1e-20, 1e-22, 1e-30])
def test_short_vectors_have_finite_gradients(size):
    """Those that are too short to be squared in float32 count as zero."""
    x = torch.tensor([3 * size, 4 * size], requires_grad=True)
    got = unit(x)
    (grad,) = torch.autograd.grad(got.sum(), x)
    some = float(size > 1e-19)
    torch.testing.assert_close(got, some * torch.tensor([0.6, 0.8]))
    torch.testing.assert_close(grad * size, some * torch.tensor([0.2 - 0.6 * 1.4 / 5, 0.2 - 0.8 * 1.4 / 5]))


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


@pytest.mark.parametrize("masked", [False, True])
def test_a_reset_state_is_that_before_the_first_token(masked):
    layer, x = memory(), tokens()
    mask = torch.ones(len(x), T, dtype=torch.bool) if masked else None
    first, state, _ = layer(x, mask, remember=True)
    again, after, _ = layer(x, mask, state.reset(), remember=True)
    assert torch.equal(first, again)
    assert torch.equal(layer(x, state=state)[0], layer(x, state=after)[0])


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
    refuses(words, ContextualMemory, **{"hidden_size": C, "num_heads": H, **options})


def test_states():
    layer, x = memory(), tokens()
    _, state, _ = layer(x, remember=True)
    for change in ({"state": state}, {"remember": True}):
        refuses("segment_ids were given with a state", layer, x, segment_ids=IDS, **change)
    refuses("cannot go back", state.crop, 3)
    assert state.reset().keys.shape == (2, H, 0, D)
    refuses("own_keys", PersistentMemory(C, H, 17, own_keys=False), x.float())
