"""ICLM against the equations of its paper, written out slot by slot in float64, and the ways in which it is used.

`slots` is a whole model in plain torch: weights of pairs are loops over the pairs, positions and norms are formulas.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from regard.checks import ArgumentError
from regard.inspect import capture
from regard.models import ICLMConfig, ICLMForCausalLM

VARIANTS = ("full", "wv", "slice")
KINDS = [
    {},
    {"variant": "wv", "start": "bos"},
    {"variant": "slice", "f_mlp": "side"},
    {"f_reads": "pre", "phi_mlp": "none", "f_rope": False, "f_attention_heads": 16},
    {"f_mlp": "none", "start": "bos", "mixers": "linear"},
    {"expectation": "mean", "f_attention_heads": 1},
    {"expectation": "exact", "gd_steps": 2},
    {"expectation": "exact", "gd_steps": 2, "variant": "wv", "f_mlp": "side", "start": "bos"},
    {"d_phi": 8, "variant": "wv"},
    {"d_phi": 20, "tie_phi": False, "phi_mixers": "linear"},
    {"norm_values": True, "mixers": ["softmax", "gaussian*fixed*euclidean*unnormalised"], "f_average": False},
]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


# The equations ------------------------------------------------------------------------------------------------


def norm(layer, x):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + layer.eps).sqrt() * layer.weight + layer.bias


def mlp(part, x):
    inner = norm(part.norm, x) @ part.feed_forward.up_proj.weight.T + part.feed_forward.up_proj.bias
    inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
    return inner @ part.feed_forward.down_proj.weight.T + part.feed_forward.down_proj.bias


def turned(x, on=True):
    """Rotary positions of [S, D], in the float32 in which the model forms its angles."""
    if not on:
        return x
    dim = x.shape[-1]
    pair = torch.arange(0, dim, 2, dtype=torch.float32)
    angle = torch.arange(x.shape[0])[:, None].float() * 10000.0 ** (-pair / dim)
    cos, sin = angle.cos().double(), angle.sin().double()
    a, b = x[:, : dim // 2], x[:, dim // 2 :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def weigh(spec, q, k, average=True):
    """Weights of the keys [n, D] for one query."""
    if spec == "softmax":
        w = torch.exp(k @ q / math.sqrt(len(q)))
        return w / w.sum()
    if spec == "linear":
        w = k @ q / math.sqrt(len(q))
    else:
        w = torch.exp(-0.5 * (k - q).square().sum(-1) / math.sqrt(len(q)))
    return w / len(k) if average else w


def attend(spec, q, k, strict, average=True):
    """Weights [S, S] of all slots; strict: of those before."""
    size = q.shape[0]
    out = torch.zeros(size, size, dtype=torch.float64)
    for i in range(size):
        stop = i if strict else i + 1
        if stop:
            out[i, :stop] = weigh(spec, q[i], k[:stop], average)
    return out


@torch.no_grad()
def slots(model, ids):
    """f of every slot after every block, [L/2 + 1, S, E], and logits [T, V], for one row of tokens."""
    c, m = model.config, model.model
    words = m.embed_tokens.weight[ids]
    source = words if m.embed_covariates is None else m.embed_covariates.weight[ids]
    phi = source[:, : c.d_phi]
    if c.start == "param":
        phi, values = torch.cat((m.start.weight[None], phi)), words
    else:
        values = words[1:]
    table = m.embed_tokens.weight
    values = norm(m.norm_values, values) if c.norm_values else values
    size, f, side, stages = phi.shape[0], 0.0, 0.0, []
    f = torch.zeros(size, c.d_f, dtype=torch.float64)
    residual = values - table.mean(0) if c.expectation != "none" else values
    for layer, block in enumerate(m.f):
        before = phi
        if layer < len(m.phi):
            cov = m.phi[layer]
            x, heads, dim = norm(cov.norm, phi), c.num_attention_heads, c.d_phi // c.num_attention_heads
            mixed = []
            for h in range(heads):
                part = slice(h * dim, h * dim + dim)
                q, k = (turned(x @ p.weight[part].T) for p in (cov.attn.q_proj, cov.attn.k_proj))
                # a linear sum of the covariate attention is not divided by the number of its terms
                w = attend(c.phi_mixers[layer], q, k, strict=False, average=False)
                mixed.append(w @ (x @ cov.attn.v_proj.weight[part].T))
            phi = phi + torch.cat(mixed, -1) @ cov.attn.o_proj.weight.T
            phi = phi + mlp(cov.mlp, phi) if cov.mlp is not None else phi
        x = norm(block.norm, before if c.f_reads == "pre" else phi)
        if layer and c.expectation == "exact" and layer % (c.pairs // c.gd_steps) == 0:
            p = torch.softmax(f @ table.T, -1)
            residual = values - (p @ table)[: len(values)]
        heads, dim, share = c.f_attention_heads, c.d_phi // c.f_attention_heads, c.d_f // c.f_attention_heads
        for h in range(heads):
            part = slice(h * dim, h * dim + dim)
            q, k = (turned(x @ p.weight[part].T, c.f_rope) for p in (block.attn.q_proj, block.attn.k_proj))
            w = attend(c.mixers[layer], q, k, strict=True, average=c.f_average)[:, : len(residual)]
            mine, out = slice(h * share, h * share + share), block.attn.o_proj.weight
            if c.variant == "full":
                f = f + (w @ residual) @ out[:, h * c.d_f : (h + 1) * c.d_f].T
            elif c.variant == "wv":
                f = f + (w @ residual @ block.attn.v_proj.weight[mine].T) @ out[:, mine].T
            else:
                f = f + (w @ residual[:, mine]) @ out[:, mine].T
        if c.f_mlp == "inline":
            f = f + mlp(block.mlp, f)
        elif c.f_mlp == "side":
            side = side + mlp(block.mlp, f)
        stages.append(f)
    first = size - len(ids)
    return stages, norm(m.ln_final, f + side)[first:] @ model.lm_head.weight.T


@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_it_is_the_equations(changes):
    model, ids = make(**changes), text()
    with torch.no_grad():
        logits = model(ids).logits
        states = model(ids, output_hidden_states=True).hidden_states[2:]  # those of the covariates stand in front
    for row in range(2):
        stages, wanted = slots(model, ids[row])
        torch.testing.assert_close(logits[row], wanted, atol=1e-10, rtol=0)
        assert not states[0].any(), "f begins at zero"
        torch.testing.assert_close(states[1][row], stages[0][-9:], atol=1e-10, rtol=0)


@pytest.mark.parametrize("start", ["param", "bos"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mixers", ["softmax", "biweight", "linear"])
def test_no_logit_sees_a_later_token(variant, start, mixers):
    model, ids = make(variant=variant, start=start, mixers=mixers).float(), text(1, 40)
    model_exact = make(variant=variant, start=start, mixers=mixers, expectation="exact", gd_steps=2).float()
    for chosen in (model, model_exact):
        with torch.no_grad():
            logits = chosen(ids).logits
            for t in (1, 17, 39):
                other = ids.clone()
                other[0, t] = other[0, t] % 12 + 1
                moved = chosen(other).logits
                assert (moved[:, :t] - logits[:, :t]).abs().max() == 0.0
                assert (moved[:, t] - logits[:, t]).abs().max() > 1e-3


def test_f_is_made_of_embeddings_of_the_context_alone():
    model, ids = make(f_mlp="none"), text(1)
    seen = []
    handles = [b.hook_out.register_forward_hook(lambda _m, _a, out: seen.append(out)) for b in model.model.f]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    words, blocks = model.model.embed_tokens.weight[ids[0]].detach(), model.model.f
    for t in range(1, 6):  # slot t has the values x_0..x_{t-1}
        span = [
            b.attn.o_proj.weight[:, 16 * h : 16 * h + 16].detach() @ words[j]
            for b in blocks
            for h in range(2)
            for j in range(t)
        ]
        basis = torch.stack(span[: t * 4], 1).numpy()
        f = seen[-1][0, t].numpy()
        left = basis @ np.linalg.lstsq(basis, f, rcond=None)[0] - f
        assert np.abs(left).max() < 1e-6
        if t == 1:  # four vectors in sixteen dimensions: a span that a vector is not in by chance
            assert np.linalg.matrix_rank(basis) == 4


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_expectation_of_one_step_is_a_constant(variant):
    """sum_j A = 1, so that subtracting the mean embedding adds -sum_h P_h mean(W_e) to every row (section 1.6)."""
    ids, shifts = text(), []
    models = [make(variant=variant, f_mlp="none", expectation=kind) for kind in ("none", "mean", "exact")]
    found = []
    for model in models:
        seen = []
        handles = [
            b.attn.register_forward_hook(lambda _m, _a, out, seen=seen: seen.append(out[0])) for b in model.model.f
        ]
        with torch.no_grad():
            model(ids)
        [handle.remove() for handle in handles]
        found.append(seen)
    for layer, block in enumerate(models[0].model.f):
        mean, out = models[0].model.embed_tokens.weight.mean(0).detach(), block.attn.o_proj.weight.detach()
        if variant == "full":
            shift = out[:, :16] @ mean + out[:, 16:] @ mean
        else:
            shift = out @ (block.attn.v_proj.weight.detach() @ mean if variant == "wv" else mean)
        assert shift.abs().max() > 0.05
        for other in found[1:]:
            moved = other[layer] - found[0][layer]
            torch.testing.assert_close(moved[:, 1:], -shift.expand(2, 9, 16), atol=1e-12, rtol=0)
            assert not moved[:, 0].any(), "the start slot has no pair"
        shifts.append(shift)


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
        x = norm(block.norm, phi[0]).detach().numpy()
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


# Padding ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_padding_anywhere_changes_nothing(changes):
    model, ids = make(**changes), text(4, 10)
    mask = torch.tensor([[1] * 10, [0] * 4 + [1] * 6, [1] * 7 + [0] * 3, [0, 1, 1, 0, 0, 1, 1, 1, 0, 1]])
    with torch.no_grad():
        padded = model(ids, attention_mask=mask).logits
        for row in range(4):
            real = mask[row].bool()
            alone = model(ids[row : row + 1, real]).logits[0]
            torch.testing.assert_close(padded[row, real], alone, atol=1e-10, rtol=0)
        other = torch.where(mask.bool(), ids, 0)
        assert torch.equal(model(other, attention_mask=mask).logits[mask.bool()], padded[mask.bool()])


@pytest.mark.parametrize("start", ["param", "bos"])
def test_hidden_embeddings_may_be_anything(start):
    """Not even NaN matters, in values and in gradients; nor what positions padding is given."""
    model, ids = make(start=start).train(), text(2, 8)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 1, 1, 1]])
    labels = ids.masked_fill(mask == 0, -100)
    grads = []
    for junk in (0.0, torch.nan):
        words = model.model.embed_tokens(ids).detach()
        words[mask == 0] = junk
        words.requires_grad_()
        model.zero_grad()
        model(inputs_embeds=words, attention_mask=mask, labels=labels).loss.backward()
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        assert not words.grad[mask == 0].any()
        grads.append({**found, "words": words.grad})
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])
    places = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)  # as older generation loops number padding
    with torch.no_grad():
        given = model(ids, attention_mask=mask, position_ids=places).logits
        torch.testing.assert_close(given[mask > 0], model(ids, attention_mask=mask).logits[mask > 0])


def test_a_row_of_padding_is_finite():
    model, ids = make(), text(2, 5)
    mask = torch.tensor([[1] * 5, [0] * 5])
    assert model(ids, attention_mask=mask).logits.isfinite().all()


# Training and saving --------------------------------------------------------------------------------------------


def gradients(model, ids):
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("changes", KINDS[:8], ids=str)
def test_every_parameter_learns_and_recomputation_changes_nothing(changes):
    model, ids = make(**changes).train(), text()
    loss, grads = gradients(model, ids)
    assert all(grad.any() for grad in grads.values())
    model.gradient_checkpointing_enable()
    again, others = gradients(model, ids)
    assert again == loss
    assert all(torch.equal(grads[name], others[name]) for name in grads)
    with pytest.raises(ArgumentError, match="use_cache=True cannot be used with gradient checkpointing"):
        model(ids, use_cache=True)


@pytest.mark.parametrize(
    "changes",
    [{"num_hidden_layers": 2}, {"variant": "wv", "start": "bos", "expectation": "exact", "gd_steps": 2}],
    ids=str,
)
def test_a_step_of_training_compiles_without_a_break(changes):
    model, ids = make(**changes).float().train(), text()
    loss, grads = gradients(model, ids)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.zero_grad()
    found = compiled(ids, labels=ids).loss
    found.backward()
    assert found.item() == pytest.approx(loss, abs=1e-6)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, grads[name], atol=1e-6, rtol=1e-5)


def test_bfloat16_and_autocast_stay_near_float32():
    model, ids = make(noise=0.1, expectation="exact", gd_steps=2).float(), text(2, 30)
    with torch.no_grad():
        wanted = model(ids).logits
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = model(ids).logits
        half = model.bfloat16()(ids).logits
    spread = wanted.std()
    for found in (mixed, half):
        assert found.dtype == torch.bfloat16
        assert (found.float() - wanted).abs().max() < 0.15 * spread


@pytest.mark.parametrize("changes", [{}, KINDS[7], KINDS[9]], ids=str)
def test_saved_models_come_back_the_same(changes, tmp_path):
    model, ids = make(**changes).float(), text()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(again) is ICLMForCausalLM
    assert again.config.to_dict() == {
        **model.config.to_dict(),
        "_name_or_path": again.config.to_dict()["_name_or_path"],
    }
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_initial_weights():
    model = ICLMForCausalLM(ICLMConfig(vocab_size=400, hidden_size=256, initializer_range=0.05))
    for weight in (model.model.start.weight, model.model.embed_tokens.weight, model.model.f[0].attn.o_proj.weight):
        assert weight.std().item() == pytest.approx(0.05, rel=0.15)
    fresh = ICLMForCausalLM(ICLMConfig(vocab_size=400))
    ids = torch.randint(400, (4, 32), generator=torch.Generator().manual_seed(0))
    assert fresh(ids, labels=ids).loss.item() == pytest.approx(math.log(400), rel=0.02)


# Looking inside ---------------------------------------------------------------------------------------------------


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
