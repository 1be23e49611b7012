"""Local linear attention in stock models: against regressions fitted densely in another attention function, and
against itself by another way (cache, padding, beams, weights)."""

from __future__ import annotations

from typing import Any

import entmax
import pytest
import torch
from tiny_models import ALL, CAUSAL, left_padding, positions, right_padding, step_logits, tiny, tokens
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import sdpa_mask

from regard.grammar import as_spec
from regard.integrations.transformers import attend, register

register("gaussian*linear(ridge=0.5,solver=cholesky)")
WEIGHTS = {"local-linear": lambda z: z.softmax(-1), "local-linear[biweight]": lambda z: entmax.entmax15(z, dim=-1)}
RIDGE = 0.1


def fitted(
    weigh: Any,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Weighted ridge regression of values on keys with a free intercept, at each query: a linear system of D + 1
    unknowns, sum p [1, k - q]^T [1, k - q] + diag(0, ridge)."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    z = query @ key.mT * scaling
    queries, keys = z.shape[-2:]
    if attention_mask is None:
        causal = getattr(module, "is_causal", True)
        seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries) if causal else torch.ones_like(z) > 0
    else:
        seen = attention_mask
    seen = seen.expand(z.shape)
    empty = ~seen.any(-1, keepdim=True)
    p = weigh(z.masked_fill(~(seen | empty), -1e9)) * (seen & ~empty)
    away = key[:, :, None] - query[:, :, :, None]
    design = torch.cat((torch.ones_like(away[..., :1]), away), -1)  # [B, H, Tq, Tk, 1 + D]
    weighted = design * p[..., None]
    ridge = torch.full((design.shape[-1],), RIDGE, dtype=z.dtype)
    ridge[0] = 0
    left = weighted.mT @ design + ridge.diag()
    left = torch.where(empty[..., None], torch.eye(len(ridge), dtype=z.dtype), left)
    solution = torch.linalg.solve(left, weighted.mT @ value[:, :, None])
    return solution[..., 0, :].transpose(1, 2).contiguous(), None


for name, weigh in WEIGHTS.items():

    def function(*arguments: Any, weigh: Any = weigh, **more: Any) -> tuple[Tensor, None]:
        return fitted(weigh, *arguments, **more)

    AttentionInterface.register(f"fitted_{name}", function)
    AttentionMaskInterface.register(f"fitted_{name}", sdpa_mask)


def without_dropout(family: str) -> dict[str, float]:
    return {
        "gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
        "bert": {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0},
    }.get(family, {})


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_logits_and_gradients_are_those_of_fitted_regressions(family: str, name: str, padding: str) -> None:
    mask = {"none": None, "left": left_padding(), "right": right_padding()}[padding]
    real = torch.ones(2, 12, dtype=torch.bool) if mask is None else mask.bool()
    ours, theirs = (tiny(family, f"{impl}_{name}", **without_dropout(family)).double() for impl in ("regard", "fitted"))
    found = []
    for model in (ours, theirs):
        logits = model(tokens(), attention_mask=mask).logits
        (logits * real[..., None]).square().mean().backward()
        found.append(logits[real])
    assert (found[0] - found[1]).abs().max() < 1e-7 * found[1].abs().max()  # rotary angles are float32 in either
    for (at, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if b.grad is not None:
            assert torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-8), at


@pytest.mark.parametrize("family", CAUSAL)
@pytest.mark.parametrize("name", ["local-linear[biweight]", "gaussian*linear(ridge=0.5,solver=cholesky)"])
def test_generation_with_a_cache_equals_without(family: str, name: str) -> None:
    model = tiny(family, f"regard_{name}").double()
    for more in ({}, {"attention_mask": left_padding()}, {"num_beams": 2}):
        if "num_beams" in more:
            made = [
                model.generate(tokens(), max_new_tokens=6, min_new_tokens=6, use_cache=use, **more)
                for use in (True, False)
            ]
            assert torch.equal(*made)
            continue
        with_cache, without = (step_logits(model, tokens(), use_cache=use, **more) for use in (True, False))
        assert torch.equal(with_cache[0], without[0])
        assert (with_cache[1] - without[1]).abs().max() < 1e-6 * without[1].abs().max()


@pytest.mark.parametrize("family", CAUSAL)
def test_float32_steps(family: str) -> None:
    """Weights of the usual size, for which a ridge of 0.1 is not small beside the keys."""
    model = tiny(family, "regard_local-linear[biweight]", initializer_range=0.05)
    ids, mask = tokens(), left_padding()
    whole = model(ids, attention_mask=mask, position_ids=positions(mask)).logits
    cache, logits = DynamicCache(config=model.config), []
    for i in range(12):
        at = slice(i, i + 1)
        part = {"attention_mask": mask[:, : i + 1], "position_ids": positions(mask)[:, at], "past_key_values": cache}
        logits.append(model(ids[:, at], **part).logits)
    assert (torch.cat(logits, 1) - whole)[mask.bool()].abs().max() < 1e-5


@pytest.mark.parametrize("name", [name for name in register() if "local-linear[" in name])
def test_every_weighting_in_llama(name: str) -> None:
    """From the configuration: forward, backward, and single steps with the cache equal to the whole."""
    model = tiny("llama", name, initializer_range=0.1).double()
    ids = tokens()
    out = model(ids, labels=ids)
    out.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert model.model.layers[0].self_attn.k_proj.weight.grad.abs().max() > 0
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        steps = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(12)]
    assert (torch.cat(steps, 1) - out.logits).abs().max() < 1e-6
    assert (tiny("llama", "sdpa", initializer_range=0.1).double()(ids).logits - out.logits).abs().max() > 1e-4


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("gradient", [False, True])
def test_the_weights_are_signed_and_those_of_the_values(family: str, gradient: bool) -> None:
    model = tiny(family, "regard_local-linear[biweight]", **without_dropout(family)).double()
    with torch.set_grad_enabled(gradient):
        out = model(tokens(), attention_mask=left_padding(), output_attentions=True)
    weights = out.attentions[0]
    assert weights.requires_grad == gradient
    seen = left_padding()[:, None].bool().expand(2, 12, 12)
    rows = (seen if family == "bert" else seen & torch.ones(12, 12).tril().bool()).any(-1)
    total = weights.detach().sum(-1).transpose(1, 2)
    assert total[rows].sub(1).abs().max() < 1e-10
    assert (total[~rows] == 0).all()
    assert weights.detach().min() < -1e-3
    assert not (weights.detach()[0, :, :, :4] != 0).any()
    plain = model(tokens(), attention_mask=left_padding()).logits
    assert (plain - out.logits)[left_padding().bool()].abs().max() < 1e-9


@pytest.mark.parametrize("family", ALL)
def test_training_in_blocks(family: str) -> None:
    """Attention dropout needs all pairs; without it the plain form, whose size is limited, is not asked."""
    model = tiny(family, "regard_local-linear", **without_dropout(family)).train()
    length = 40
    ids = torch.randint(1, 60, (2, length), generator=torch.Generator().manual_seed(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("regard.pairwise.reference.LIMIT", 0)
        loss = model(ids, labels=ids).loss
        loss.backward()
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert sum(p.grad is not None and float(p.grad.abs().max()) > 0 for p in model.parameters()) > 15


def test_attention_dropout_keeps_the_mean() -> None:
    """Many draws average to the output without it."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 6, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    layer = nn.Module()
    spec = as_spec("local-linear")
    exact, _ = attend(spec, layer, q, k, v, None)
    torch.manual_seed(0)
    many = torch.stack([attend(spec, layer, q, k, v, None, dropout=0.2)[0] for _ in range(600)])
    assert (many.std(0) > 0.05).any()
    error = (many.mean(0) - exact).abs() / (many.std(0) / 600**0.5 + 1e-9)
    assert error.max() < 5
