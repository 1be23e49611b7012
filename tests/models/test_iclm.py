"""ICLM as functional gradient descent, its initial weights, and what can be seen inside it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from regard.checks import ArgumentError
from regard.inspect import capture
from regard.models import ICLMConfig, ICLMForCausalLM
from regard.nn import FunctionalGradient
from regard.nn.functional_gradient import Pairs


def make(seed=0, noise=0.3, **changes):
    """Two pairs of blocks, two heads; weights far from their initial values, so that every part counts."""
    fields = {"vocab_size": 13, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "pad_token_id": 0}
    torch.manual_seed(seed)
    model = ICLMForCausalLM(ICLMConfig(**{**fields, **changes})).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += noise * torch.randn_like(weight)
    return model


def text(batch=2, tokens=9, seed=3):
    return torch.randint(1, 13, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def test_steps_are_functional_gradient_descent_in_causal_order():
    """Equation 7 in numpy: two heads, a symmetric kernel, plain sums, a step a block; the loss (equation 5) falls."""
    kernel = "gaussian*fixed*euclidean*unnormalised"
    options = {"mixers": kernel, "f_average": False, "f_mlp": "none", "expectation": "exact", "gd_steps": 3}
    model = make(**options, num_hidden_layers=6, f_rope=False, noise=0.5)
    ids = torch.tensor([[1, 5, 2, 1, 5, 2, 1, 5, 2, 1, 5, 2]])
    with torch.no_grad():
        for block in model.model.f:
            block.attn.k_proj.weight.copy_(block.attn.q_proj.weight)
            block.attn.o_proj.weight.copy_(torch.cat((0.02 * torch.eye(16), 0.03 * torch.eye(16)), 1))
    covariates, stages = [], []
    handles = [
        *(
            b.register_forward_hook(lambda _m, args, out: covariates.append(args[0]))
            for b in (x.norm for x in model.model.f)
        ),
        *(b.hook_out.register_forward_hook(lambda _m, _a, out: stages.append(out)) for b in model.model.f),
    ]
    with torch.no_grad():
        model(ids)
    [handle.remove() for handle in handles]
    table, tokens = model.model.embed_tokens.weight.detach().numpy(), ids[0].numpy()
    n, f = len(tokens), np.zeros((13, 16))
    losses = []

    def loss(f):
        z = f[:n] @ table.T
        return float((np.log(np.exp(z).sum(-1)) - z[np.arange(n), tokens]).sum())

    losses.append(loss(f))
    for block, phi, mine in zip(model.model.f, covariates, stages, strict=True):
        x = F.layer_norm(phi[0], (16,), block.norm.weight, block.norm.bias, block.norm.eps).detach().numpy()
        z = f @ table.T
        residual = table[tokens] - (np.exp(z) / np.exp(z).sum(-1, keepdims=True) @ table)[:n]
        after = f.copy()
        for h, rate in enumerate((0.02, 0.03)):
            u = x @ block.attn.q_proj.weight[8 * h : 8 * h + 8].detach().numpy().T
            gram = np.exp(-0.5 * ((u[:, None] - u[None]) ** 2).sum(-1) / math.sqrt(8))
            for i in range(n + 1):
                for j in range(i):
                    after[i] += rate * gram[i, j] * residual[j]
        f = after
        np.testing.assert_allclose(mine[0].numpy(), f, atol=1e-8)
        losses.append(loss(f))
    assert losses[0] > losses[1] > losses[2] > losses[3]


def test_initial_weights():
    model = ICLMForCausalLM(ICLMConfig(vocab_size=400, hidden_size=256, initializer_range=0.05))
    for weight in (model.model.start.weight, model.model.embed_tokens.weight, model.model.f[0].attn.o_proj.weight):
        assert weight.std().item() == pytest.approx(0.05, rel=0.15)
    fresh = ICLMForCausalLM(ICLMConfig(vocab_size=400))
    ids = torch.randint(400, (4, 32), generator=torch.Generator().manual_seed(0))
    assert fresh(ids, labels=ids).loss.item() == pytest.approx(math.log(400), rel=0.02)


def shapes(model, ids):
    """What passes every hook point, by its documented name."""
    found, handles = {}, []
    for path, module in model.named_modules():
        if type(module).__name__ == "HookPoint":
            name = module.label or path.removeprefix("model.")
            handles.append(module.register_forward_hook(lambda _m, _a, out, name=name: found.update({name: out})))
    with torch.no_grad():
        model(ids)
    [handle.remove() for handle in handles]
    return found


def test_hook_points_have_the_documented_names_and_shapes():
    model, ids = make(f_attention_heads=4), text()
    plain = model(ids).logits
    found = shapes(model, ids)
    wanted = {"embed.hook_out": (2, 9, 16), "ln_final.hook_scale": (2, 9, 1), "unembed.hook_out": (2, 9, 13)}
    for layer in range(2):
        wanted |= {f"phi.{layer}.attn.hook_{part}": (2, 2, 10, 8) for part in "qkv"}
        wanted |= {f"phi.{layer}.attn.hook_pattern": (2, 2, 10, 10), f"f.{layer}.attn.hook_pattern": (2, 4, 9, 9)}
        streams = ("phi.{}.attn", "phi.{}.mlp", "f.{}.attn", "f.{}.mlp", "f.{}")
        wanted |= {name.format(layer) + ".hook_out": (2, 10, 16) for name in streams}
    assert {name: tuple(x.shape) for name, x in found.items()} == wanted
    for layer in range(2):
        for stream in ("phi", "f"):
            rows = found[f"{stream}.{layer}.attn.hook_pattern"].sum(-1)
            torch.testing.assert_close(rows, torch.ones_like(rows), atol=1e-12, rtol=0)
    torch.testing.assert_close(found["unembed.hook_out"], plain, atol=1e-12, rtol=0)
    assert torch.equal(found["embed.hook_out"], model.model.embed_tokens.weight[ids])


def test_what_hooks_return_is_used():
    model, ids = make(f_mlp="none"), text()
    with torch.no_grad():
        handles = [b.attn.hook_pattern.register_forward_hook(lambda _m, _a, w: w * 0) for b in model.model.f]
        silent = model(ids).logits
        [handle.remove() for handle in handles]
        bias = model.model.ln_final.bias @ model.lm_head.weight.T
        torch.testing.assert_close(silent, bias.expand(2, 9, 13), atol=1e-12, rtol=0)
        handle = model.model.ln_final.hook_scale.register_forward_hook(lambda _m, _a, s: s * 2)
        halved = model(ids).logits
        handle.remove()
        torch.testing.assert_close(halved - bias, (model(ids).logits - bias) / 2, atol=1e-12, rtol=0)


def test_capture_sees_covariate_layers_then_f_layers():
    model, ids = make(), text()
    weights = model(ids, output_attentions=True).attentions
    assert [tuple(w.shape[1:]) for w in weights] == [(2, 9, 9)] * 4
    with capture(model, weights=True) as seen, torch.no_grad():
        model(ids)
    assert sorted(seen.layers) == [0, 1, 2, 3]
    assert [tuple(seen.layers[layer].weights.shape[1:]) for layer in range(4)] == [(2, 10, 10)] * 2 + [(2, 9, 9)] * 2
    for layer, w in enumerate(weights):  # the start slot is no token
        torch.testing.assert_close(seen.layers[layer].weights[..., -9:, -9:], w.detach(), atol=1e-12, rtol=0)


@pytest.mark.parametrize("spec", ["softmax", "biweight", "linear", "local-linear"])
def test_the_layer_of_functional_gradients(spec):
    """The weights of packed rows are those of each document alone; with a cache documents are refused."""
    torch.manual_seed(0)
    layer = FunctionalGradient(16, 8, 2, spec=spec).double()
    ids = torch.tensor([[0] * 5 + [1] + [2] * 6])
    pairs = Pairs.of(torch.ones_like(ids, dtype=torch.bool), 12, ids)
    covariates, values = torch.randn(1, 12, 16).double(), torch.randn(1, 11, 8).double()
    out, _ = layer(covariates, values, pairs=pairs)
    shown, weights = layer(covariates, values, pairs=pairs, output_attentions=True)
    torch.testing.assert_close(shown, out)
    whole = torch.zeros_like(weights)
    for begin, end in ((0, 5), (5, 6), (6, 12)):
        alone, own = layer(covariates[:, begin:end], values[:, begin : end - 1], output_attentions=True)
        torch.testing.assert_close(out[:, begin:end], alone)
        whole[:, :, begin : end - 1, begin : end - 1] = own
    torch.testing.assert_close(weights, whole)
    with pytest.raises(ArgumentError, match="a cache was given"):
        layer(covariates, values, pairs=pairs, cache=SimpleNamespace(pending=print, extend=print))
    with pytest.raises(ArgumentError, match="a cache holds one document"):
        Pairs.of(torch.ones(1, 14, dtype=torch.bool), 12, ids)
