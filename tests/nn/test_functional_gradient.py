"""The f update against sums written out pair by pair in float64, and functional gradient descent in numpy. Kernels here
are functions of one query and one key, as the papers write them; nothing of the package makes an expected value. Rotary
positions, padding, caches, hooks and gradients are tested in `tests/models`, wrong arguments in `tests/fuzz`."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from mistakes import refuses

from regard.nn import FunctionalGradient, expected_embedding

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


@torch.no_grad()
def double_loop(layer, phi, values, kernel, *, divide):
    """sum_h P_h sum_{j < i} value_j kappa_h(phi_i, phi_j), pair by pair; and the weights [B, H, R, n]."""
    batch, rows, _ = phi.shape
    heads, dim, wide = layer.num_heads, layer.head_dim, values.shape[2]
    out = torch.zeros(batch, rows, wide, dtype=torch.float64)
    weights = torch.zeros(batch, heads, rows, rows - 1, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            part = slice(h * dim, (h + 1) * dim)
            q = phi[b] @ layer.q_proj.weight[part].T
            k = phi[b] @ layer.k_proj.weight[part].T
            share = wide // heads
            for i in range(rows):
                pairs = [(j, kernel(q[i], k[j])) for j in range(i)]
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
    assert layer(phi, values[:, :0], output_attentions=True, is_causal=False)[1].shape == (2, 2, 7, 0)
    if divide == "sum":
        assert (weights >= 0).all()
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 6, dtype=torch.float64), atol=1e-12, rtol=0)


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


def test_autocast_does_not_round_an_expected_embedding():
    torch.manual_seed(0)
    given = f, table = torch.randn(5, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            found.append(torch.autograd.grad(expected_embedding(f, table, chunk=4).square().sum(), given))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"heads": 3}, "covariate_size 8 is not a multiple of 3 heads"),
        ({"heads": 8, "variant": "wv"}, "value_size 12 is not a multiple of 8 heads"),
        ({"spec": "gaussian*fixed*linear(ridge=0.1,solver=learned)"}, "a probe, which the f update does not have"),
    ],
)
def test_what_cannot_be_built(arguments, message):
    refuses(message, make, **arguments)


def test_numbers_of_values_that_do_not_fit():
    layer, (phi, values) = make(), data()
    refuses("3 values for 7 covariates, expected one less", layer, phi, values[:, :3])
    longer = torch.zeros(2, 9, 12).double()
    refuses(r"at most as many values \(9\) as covariates \(7\)", layer, phi, longer, is_causal=False)


def test_a_second_derivative_of_the_expectation_is_refused():
    f, table = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    (first,) = torch.autograd.grad(expected_embedding(f, table).square().sum(), f, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
