"""The f update against sums written out pair by pair in float64, and functional gradient descent in numpy.

Kernels here are functions of one query and one key, as the papers write them; nothing of the package makes an expected
value. Caches and padding of whole models are tested in `tests/models`, and wrong arguments in `tests/fuzz`.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from regard.checks import ArgumentError
from regard.inspect import capture
from regard.nn import FunctionalGradient, expected_embedding, rotary_angles
from regard.nn.functional_gradient import Pairs

KERNELS = {
    "softmax": lambda q, k: math.exp(float(q @ k) / math.sqrt(len(q))),
    "gaussian*fixed*euclidean*unnormalised": lambda q, k: math.exp(-0.5 * float((q - k) @ (q - k)) / math.sqrt(len(q))),
    "linear": lambda q, k: float(q @ k) / math.sqrt(len(q)),
}
VARIANTS = ("full", "wv", "slice")


def make(spec="softmax", variant="full", heads=2, seed=0, **options):
    """Covariates 8 wide, values 12 wide; weights far from their small initial values."""
    torch.manual_seed(seed)
    layer = FunctionalGradient(8, 12, heads, spec=spec, variant=variant, **options).double()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(0, 0.6)
    return layer


def data(rows=7, batch=2, seed=1):
    noise = torch.Generator().manual_seed(seed)
    phi = torch.randn(batch, rows, 8, generator=noise, dtype=torch.float64)
    return phi, torch.randn(batch, rows - 1, 12, generator=noise, dtype=torch.float64)


def turn(x, position):
    """Rotary positions of one head's vector: channel i and i + D/2 turn together."""
    half = len(x) // 2
    angle = position * 10000.0 ** (-torch.arange(half, dtype=torch.float64) * 2 / len(x))
    a, b = x[:half], x[half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()))


@torch.no_grad()
def double_loop(layer, phi, values, kernel, *, divide, positions=None, real=None):
    """sum_h P_h sum_{j < i} value_j kappa_h(phi_i, phi_j), pair by pair; and the weights [B, H, R, n].

    With `real`, the pair of value j has the covariate of the last real row up to j, and needs row j + 1 to be real.
    """
    batch, rows, _ = phi.shape
    heads, dim, wide = layer.num_heads, layer.head_dim, values.shape[2]
    out = torch.zeros(batch, rows, wide, dtype=torch.float64)
    weights = torch.zeros(batch, heads, rows, rows - 1, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            part = slice(h * dim, (h + 1) * dim)
            q = phi[b] @ layer.q_proj.weight[part].T
            k = phi[b] @ layer.k_proj.weight[part].T
            if positions is not None:
                q = torch.stack([turn(x, p) for x, p in zip(q, positions, strict=True)])
                k = torch.stack([turn(x, p) for x, p in zip(k, positions, strict=True)])
            share = wide // heads
            for i in range(rows):
                pairs = []
                for j in range(i):
                    held = j if real is None else max((s for s in range(j + 1) if real[b, s]), default=None)
                    if held is not None and (real is None or real[b, j + 1]):
                        pairs.append((j, kernel(q[i], k[held])))
                if not pairs:
                    continue
                total = {"sum": sum(w for _, w in pairs), "pairs": len(pairs), "none": 1.0}[divide]
                for j, w in pairs:
                    weights[b, h, i, j] = w / total
                    v = values[b, j]
                    if layer.variant == "full":
                        p = layer.o_proj.weight[:, h * wide : (h + 1) * wide]
                    else:
                        mine = slice(h * share, (h + 1) * share)
                        p = layer.o_proj.weight[:, mine]
                        v = layer.v_proj.weight[mine] @ v if layer.variant == "wv" else v[mine]
                    out[b, i] += p @ v * (w / total)
    return out, weights


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("spec", "average", "divide"),
    [
        ("softmax", True, "sum"),
        ("gaussian*fixed*euclidean*unnormalised", True, "pairs"),
        ("gaussian*fixed*euclidean*unnormalised", False, "none"),
        ("linear", True, "pairs"),
    ],
)
def test_it_is_the_double_loop(spec, average, divide, variant):
    layer = make(spec, variant, average=average)
    phi, values = data()
    with torch.no_grad():
        out, _ = layer(phi, values)
        again, weights = layer(phi, values, output_attentions=True)
        wanted, pattern = double_loop(layer, phi, values, KERNELS[spec], divide=divide)
    torch.testing.assert_close(out, wanted, atol=1e-10, rtol=0)
    torch.testing.assert_close(again, wanted, atol=1e-10, rtol=0)
    torch.testing.assert_close(weights, pattern[:, :, 1:], atol=1e-10, rtol=0)
    assert not out[:, 0].any(), "the first row has no pair"
    assert not layer(phi[:, :1], values[:, :0])[0].any()
    if divide == "sum":
        assert (weights >= 0).all()
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 6, dtype=torch.float64), atol=1e-12, rtol=0)


def test_positions_turn_queries_and_keys():
    layer = make()
    phi, values = data()
    places = torch.tensor([3, 5, 6, 9, 10, 20, 21])
    angles = [x.double() for x in rotary_angles(places[None], 4)]
    out, _ = layer(phi, values, tuple(angles))
    wanted, _ = double_loop(layer, phi, values, KERNELS["softmax"], divide="sum", positions=places.tolist())
    torch.testing.assert_close(out, wanted, atol=1e-6, rtol=0)  # angles are formed in float32
    apart, _ = layer(phi, values)
    assert (out - apart).abs().max() > 1e-2


@pytest.mark.parametrize("spec", ["softmax", "linear"])
def test_hidden_rows_make_no_pairs(spec):
    layer = make(spec)
    phi, values = data(batch=4)
    real = (
        torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 1, 1], [1, 0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0, 1]]) > 0
    )
    out, _ = layer(phi, values, pairs=Pairs.of(real, 7))
    _, weights = layer(phi, values, pairs=Pairs.of(real, 7), output_attentions=True)
    divide = "sum" if spec == "softmax" else "pairs"
    wanted, pattern = double_loop(layer, phi, values, KERNELS[spec], divide=divide, real=real)
    torch.testing.assert_close(out[real], wanted[real], atol=1e-10, rtol=0)
    seen = real[:, None, 1:, None]  # what a hidden row weighs is nobody's business
    torch.testing.assert_close(weights * seen, pattern[:, :, 1:] * seen, atol=1e-10, rtol=0)


def test_what_a_hook_returns_is_used_and_differentiated():
    layer = make(layer_idx=5)
    phi, values = data()
    plain, _ = layer(phi, values)
    with capture(layer, weights=True) as seen, torch.no_grad():
        layer(phi, values)

    def first_head_off(_module, _args, weights):
        keep = torch.ones_like(weights)
        keep[:, 0] = 0
        return weights * keep

    handle = layer.hook_pattern.register_forward_hook(first_head_off)
    knocked, _ = layer(phi, values)
    knocked.square().sum().backward()
    handle.remove()
    with torch.no_grad():
        _, pattern = double_loop(layer, phi, values, KERNELS["softmax"], divide="sum")
        torch.testing.assert_close(seen.layers[5].weights, pattern[:, :, 1:], atol=1e-10, rtol=0)
        assert seen.layers[5].support[0, 0].tolist() == [1, 2, 3, 4, 5, 6]
        wanted = torch.einsum("bij,bje,fe->bif", pattern[:, 1], values, layer.o_proj.weight[:, 12:])
    torch.testing.assert_close(knocked.detach(), wanted, atol=1e-10, rtol=0)
    assert not layer.q_proj.weight.grad[:4].any(), "a head that is off learns nothing"
    assert layer.q_proj.weight.grad[4:].any()
    assert torch.equal(layer(phi, values)[0], plain)


@pytest.mark.parametrize("spec", ["softmax", "linear", "biweight", "local-linear"])
def test_gradients_are_those_of_finite_differences(spec):
    layer = make(spec, heads=1)
    phi, values = data(rows=5, batch=1)
    phi.requires_grad_()
    values.requires_grad_()
    hidden = Pairs.of(torch.tensor([[1, 1, 0, 1, 1]]) > 0, 5)
    for pairs in (None, hidden):
        for shown in (False, True):
            assert torch.autograd.gradcheck(
                lambda p, v, pairs=pairs, shown=shown: layer(p, v, None, pairs, None, shown)[0],
                (phi, values),
                fast_mode=True,
            )


# The expectation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 4096])
def test_expected_embedding_is_the_mean_under_softmax(chunk):
    torch.manual_seed(0)
    f, table = torch.randn(3, 5, 6).double(), torch.randn(23, 6).double()
    wanted = torch.softmax(f @ table.T, -1) @ table
    torch.testing.assert_close(expected_embedding(f, table, chunk), wanted, atol=1e-13, rtol=0)
    f.requires_grad_()
    table.requires_grad_()
    assert torch.autograd.gradcheck(lambda f, t: expected_embedding(f, t, chunk), (f, table), fast_mode=True)


def test_expected_embedding_neither_overflows_nor_rounds():
    table = torch.tensor([[300.0, 0.0], [299.0, 0.0], [-300.0, 1.0]])
    f = torch.tensor([[40.0, 0.0], [-40.0, 0.0]])  # logits of 12000, whose exponential is no number
    near = math.exp(-40.0)
    wanted = torch.tensor([[(300 + 299 * near) / (1 + near), 0.0], [-300.0, 1.0]])
    torch.testing.assert_close(expected_embedding(f, table, 1), wanted)
    torch.manual_seed(0)
    f, table = torch.randn(50, 8).bfloat16(), torch.randn(500, 8).bfloat16()
    wanted = torch.softmax(f.double() @ table.double().T, -1) @ table.double()
    found = expected_embedding(f, table, 64)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), wanted, atol=0.01, rtol=0.005)  # half a unit in the last place


def test_steps_are_functional_gradient_descent():
    """Equation 17 on a fixed set of pairs: one symmetric kernel a head, plain sums, a matrix of learning rates."""
    rng = np.random.default_rng(0)
    n, width, vocabulary, steps = 11, 12, 6, 5
    tokens = rng.integers(vocabulary, size=n)
    table = rng.normal(size=(vocabulary, width)) * 0.5
    phi = rng.normal(size=(n + 1, 8))
    layer = make("gaussian*fixed*euclidean*unnormalised", heads=2, average=False)
    rates = [0.02 * np.eye(width), 0.03 * np.eye(width)]
    with torch.no_grad():
        layer.k_proj.weight.copy_(layer.q_proj.weight)  # the same map makes the kernel symmetric
        layer.o_proj.weight.copy_(torch.tensor(np.concatenate(rates, 1)))
    maps = layer.q_proj.weight.detach().numpy()
    grams = []
    for h in range(2):
        x = phi @ maps[4 * h : 4 * h + 4].T
        grams.append(np.exp(-0.5 * ((x[:, None] - x[None]) ** 2).sum(-1) / 2))

    def loss(f):
        z = f[:n] @ table.T
        return float((np.log(np.exp(z).sum(-1)) - z[np.arange(n), tokens]).sum())

    f = np.zeros((n + 1, width))
    mine = torch.zeros(1, n + 1, width, dtype=torch.float64)
    losses = [loss(f)]
    for _ in range(steps):
        z = f[:n] @ table.T
        p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
        residual = table[tokens] - p @ table
        f = f + sum((gram[:, :n] @ residual) @ rate.T for gram, rate in zip(grams, rates, strict=True))
        with torch.no_grad():
            known = torch.tensor(table)
            values = known[torch.tensor(tokens)][None] - expected_embedding(mine[:, :n], known)
            mine = mine + layer(torch.tensor(phi)[None], values, is_causal=False)[0]
        np.testing.assert_allclose(mine[0].numpy(), f, atol=1e-10)
        losses.append(loss(mine[0].numpy()))
    assert all(later < earlier for earlier, later in pairwise(losses)), losses
    assert losses[0] == pytest.approx(n * math.log(vocabulary))


# Bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": 3}, "covariate_size 8 is not a multiple of 3 heads"),
        ({"heads": 8, "variant": "wv"}, "value_size 12 is not a multiple of 8 heads"),
        (
            {"spec": "gaussian*fixed*linear(ridge=0.1,solver=learned)"},
            "needs a probe, which the f update does not have",
        ),
    ],
)
def test_what_cannot_be_built(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        make(**arguments)


def test_numbers_of_values_that_do_not_fit():
    layer, (phi, values) = make(), data()
    with pytest.raises(ArgumentError, match="3 values for 7 covariates, expected one less"):
        layer(phi, values[:, :3])
    with pytest.raises(ArgumentError, match=r"at most as many values \(9\) as covariates \(7\)"):
        layer(phi, torch.zeros(2, 9, 12).double(), is_causal=False)


def test_a_second_derivative_of_the_expectation_is_refused():
    f, table = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    (first,) = torch.autograd.grad(expected_embedding(f, table).square().sum(), f, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
