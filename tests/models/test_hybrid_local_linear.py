"""Local linear layers in the language model: configuration, files, training, decoding."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, Trainer, TrainingArguments

from regard.checks import ArgumentError
from regard.models import HybridConfig, HybridForCausalLM

MIXERS = ["local-linear[biweight]", "softmax", "local-linear"]
SIZES = {
    "vocab_size": 37,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}


def build(**options: Any) -> HybridForCausalLM:
    torch.manual_seed(3)
    given = {"mixers": MIXERS, "ridges": "learned(start=0.3)", "qk_norm": "rms", **options}
    model = HybridForCausalLM(HybridConfig(**SIZES, **given)).eval()
    for name, parameter in model.named_parameters():
        if "ridge_proj.weight" in name:  # ridges that differ from token to token
            torch.nn.init.normal_(parameter, std=0.05)
    return model


def tokens(batch: int = 3, length: int = 14) -> Tensor:
    return torch.randint(1, 37, (batch, length), generator=torch.Generator().manual_seed(0))


def padded() -> Tensor:
    mask = torch.ones(3, 14, dtype=torch.long)
    mask[0, :5] = 0
    mask[2, :1] = 0
    return mask


def test_one_rule_is_for_the_layers_that_have_a_ridge() -> None:
    config = HybridConfig(**SIZES, mixers=MIXERS, ridges="learned(start=0.3)")
    assert config.ridges == ["learned(start=0.3)", "fixed", "learned(start=0.3)"]
    again = HybridConfig(**SIZES, mixers=MIXERS, ridges=config.ridges)
    assert again.to_dict() == config.to_dict()
    config = HybridConfig(**SIZES, mixers=MIXERS, ridges=["fixed", "fixed", "learned-per-dimension"])
    model = HybridForCausalLM(config)
    shapes = [None if a.ridge_proj is None else tuple(a.ridge_proj.weight.shape) for a in attentions(model)]
    assert shapes == [None, None, (32, 32)]


def attentions(model: HybridForCausalLM) -> list[Any]:
    return [layer.self_attn for layer in model.model.layers]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ridges": "learnt"}, "unknown ridge 'learnt'"),
        (
            {"ridges": ["learned", "learned", "learned"]},
            "HybridConfig: ridges: ridge learned needs a local linear model",
        ),
        ({"ridges": ["learned"]}, "ridges is .*expected a rule such as 'learned', or a list with one for each of 3"),
        ({"ridges": "learned", "mixers": "softmax"}, "HybridConfig: ridges: ridge learned needs a local linear model"),
        ({"qk_norm": "layer"}, "HybridConfig: qk_norm is 'layer', expected None, 'rms' or 'l2'"),
    ],
)
def test_bad_configurations(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        HybridConfig(**{**SIZES, "mixers": MIXERS, **options})


def test_ridges_and_gains_start_where_they_should() -> None:
    torch.manual_seed(0)
    model = HybridForCausalLM(HybridConfig(**SIZES, mixers=MIXERS, ridges="learned(start=0.3)", qk_norm="rms"))
    for at in (0, 2):
        attention = attentions(model)[at]
        hidden = torch.randn(2, 5, 32)
        ridge = 0.001 + torch.sigmoid(hidden @ attention.ridge_proj.weight.T + attention.ridge_proj.bias)
        torch.testing.assert_close(ridge, torch.full_like(ridge, 0.3))
        assert bool((attention.q_norm.weight == 1).all())


def test_they_start_there_whatever_else_is_learned() -> None:
    """transformers passes over modules without parameters of their own; temperatures are such parameters."""
    for temperature in ("fixed", "learned"):
        torch.manual_seed(0)
        model = HybridForCausalLM(HybridConfig(**SIZES, mixers=MIXERS, ridges="learned", temperatures=temperature))
        assert [a.ridge_proj.weight.abs().max().item() for a in attentions(model)[::2]] == [0.0, 0.0]
        assert attentions(model)[0].q_proj.weight.std().item() == pytest.approx(0.2, rel=0.1)


@pytest.mark.parametrize("norm", ["rms", "l2"])
def test_saved_and_loaded(tmp_path: Path, norm: str) -> None:
    model = build(qk_norm=norm)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert again.config.qk_norm == norm
    assert again.config.ridges == model.config.ridges
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)


def test_old_files_have_neither(tmp_path: Path) -> None:
    config = HybridConfig(**SIZES, mixers=MIXERS).to_dict()
    for name in ("ridges", "qk_norm"):
        del config[name]
    again = HybridConfig(**config)
    assert (again.ridges, again.qk_norm) == (["fixed"] * 3, None)


@pytest.mark.parametrize("cache", ["own", "pairs"])
def test_single_steps_equal_the_whole(cache: str) -> None:
    model, ids, mask = build(), tokens(), padded()
    real = mask.bool()
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        model = model.to(dtype)
        whole = model(ids, attention_mask=mask).logits
        past = DynamicCache() if cache == "pairs" else None
        out = model(ids[:, :6], attention_mask=mask[:, :6], past_key_values=past, use_cache=True)
        logits = [out.logits]
        for i in range(6, 14):
            out = model(ids[:, i : i + 1], attention_mask=mask[:, : i + 1], past_key_values=out.past_key_values)
            logits.append(out.logits)
        gap = (torch.cat(logits, 1) - whole)[real].abs().max() / whole.abs().max()
        assert gap < tolerance, (dtype, float(gap))


@pytest.mark.parametrize(
    "how", [{}, {"num_beams": 3}, {"do_sample": True}, {"num_beams": 2, "num_return_sequences": 2}]
)
@pytest.mark.parametrize("window", [None, 5])
def test_generation_with_and_without_a_cache(how: dict[str, Any], window: int | None) -> None:
    model = build(window=window).double()
    made = []
    for use_cache in (True, False):
        torch.manual_seed(5)
        made.append(
            model.generate(
                tokens(), attention_mask=padded(), max_new_tokens=8, min_new_tokens=8, use_cache=use_cache, **how
            )
        )
    assert torch.equal(made[0], made[1])
    assert made[0].shape[1] == 22


def test_padding_on_the_left_changes_nothing() -> None:
    model, ids = build().double(), tokens(1, 9)
    alone = model(ids).logits
    filled = torch.cat((torch.full((1, 4), 7), ids), 1)
    mask = torch.cat((torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 9, dtype=torch.long)), 1)
    torch.testing.assert_close(model(filled, attention_mask=mask).logits[:, 4:], alone, atol=1e-10, rtol=0)


def test_the_weights_given_out_are_signed_and_sum_to_one() -> None:
    found = build()(tokens(), output_attentions=True).attentions
    for at in (0, 2):
        torch.testing.assert_close(found[at].sum(-1), torch.ones(3, 4, 14), atol=1e-4, rtol=0)
        assert found[at].min() < -1e-3
    assert found[1].min() >= 0


def test_trainer_moves_ridges_and_gains(tmp_path: Path) -> None:
    model = build().train()
    before = copy.deepcopy(model.state_dict())
    rows = [{"input_ids": row, "labels": row} for row in tokens(8, 14)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=5,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    result = Trainer(model=model, args=arguments, train_dataset=rows).train()
    assert result.training_loss == result.training_loss
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    for at in (0, 2):
        assert {f"model.layers.{at}.self_attn.ridge_proj.{part}" for part in ("weight", "bias")} <= moved
        assert {f"model.layers.{at}.self_attn.{part}_norm.weight" for part in "qk"} <= moved


def test_gradient_checkpointing_changes_nothing() -> None:
    ids = tokens()
    one, two = build().train(), build().train()
    two.gradient_checkpointing_enable()
    for model in (one, two):
        model(ids, labels=ids).loss.backward()
    for (name, a), b in zip(one.named_parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-4, msg=name)
