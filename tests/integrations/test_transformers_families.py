"""More stock families, once each: regard's softmax against torch's attention, with and without padding, and biweight
through training and, for the causal ones, generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tiny_models import END, PAD, VOCAB, left_padding, right_padding, step_logits, tokens
from transformers import PreTrainedModel

from regard.integrations.transformers import register

register()

BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": PAD,
    "eos_token_id": END,
    "pad_token_id": PAD,
    "initializer_range": 0.2,
}
OLD = {k: v for k, v in BASE.items() if k != "num_key_value_heads"}
MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}

DECODERS: dict[str, dict[str, Any]] = {
    "Mistral": {**BASE, "sliding_window": 5},
    "Mixtral": {**BASE, "num_local_experts": 2, "num_experts_per_tok": 1},
    "Phi3": BASE,
    "Gemma": {**BASE, "head_dim": 8},
    "Granite": {**BASE, "attention_multiplier": 0.5},
    "Olmo2": BASE,
    "GPTNeoX": OLD,
    "Qwen2": BASE,
    "DeepseekV3": {**BASE, "num_key_value_heads": 4, "first_k_dense_replace": 1, **MLA, **EXPERTS},
}
ENCODERS: dict[str, dict[str, Any]] = {
    "Roberta": {**OLD, "pad_token_id": 1},
    "Electra": {**OLD, "embedding_size": 32},
    "ModernBert": {**OLD, "local_attention": 6, "global_attn_every_n_layers": 2},
}


def made(family: str, impl: str) -> PreTrainedModel:
    torch.manual_seed(7)
    sizes = DECODERS.get(family) or ENCODERS[family]
    task = "ForCausalLM" if family in DECODERS else "ForMaskedLM"
    config = getattr(transformers, family + "Config")(**sizes)
    return getattr(transformers, family + task)._from_config(config, attn_implementation=impl).eval()


@pytest.mark.parametrize("family", [*DECODERS, *ENCODERS])
def test_softmax_gives_the_logits_of_sdpa(family: str) -> None:
    ours, theirs = made(family, "regard_softmax"), made(family, "sdpa")
    for mask in (None, left_padding(), right_padding()):
        real = torch.ones(2, 12, dtype=torch.bool) if mask is None else mask.bool()
        got, want = (m(tokens(), attention_mask=mask).logits[real] for m in (ours, theirs))
        assert (got - want).abs().max() < 1e-5 * max(1.0, want.abs().max().item())


@pytest.mark.parametrize("family", [*DECODERS, *ENCODERS])
def test_biweight_trains(family: str) -> None:
    model = made(family, "regard_biweight").train()
    soft = made(family, "regard_softmax")
    assert (model.eval()(tokens()).logits - soft(tokens()).logits).abs().max() > 1e-4
    model.train()(tokens(), attention_mask=left_padding(), labels=tokens()).loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert len(grads) > 10
    assert all(g.isfinite().all() for g in grads.values())


@pytest.mark.parametrize("family", list(DECODERS))
def test_biweight_generates(family: str) -> None:
    model = made(family, "regard_biweight")
    sequences, logits = step_logits(model, tokens(), attention_mask=left_padding())
    again, want = step_logits(model, tokens(), attention_mask=left_padding(), use_cache=False)
    assert torch.equal(sequences, again)
    assert (logits - want).abs().max() < 1e-5 * max(1.0, want.abs().max().item())


def test_an_encoder_with_a_decoder() -> None:
    config = transformers.BartConfig(
        vocab_size=VOCAB, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64, init_std=0.2,
        bos_token_id=1, pad_token_id=PAD, eos_token_id=END, decoder_start_token_id=1, forced_eos_token_id=None,
    )  # fmt: skip
    models = []
    for impl in ("regard_softmax", "sdpa"):
        torch.manual_seed(7)
        kind = transformers.BartForConditionalGeneration
        models.append(kind._from_config(config.__class__(**config.to_dict()), attn_implementation=impl).eval())
    for mask in (None, right_padding()):
        got, want = (m(tokens(), attention_mask=mask, decoder_input_ids=tokens(length=7)).logits for m in models)
        assert (got - want).abs().max() < 1e-5 * max(1.0, want.abs().max().item())
        made = [m.generate(tokens(), attention_mask=mask, max_new_tokens=6, num_beams=2) for m in models]
        assert torch.equal(*made)


def test_a_causal_text_encoder_beside_a_bidirectional_one() -> None:
    """CLIP's layers say that they are not causal, and those of the text are told otherwise at every call."""
    sizes = {k: BASE[k] for k in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    models = []
    for impl in ("regard_softmax", "sdpa"):
        torch.manual_seed(7)
        config = transformers.CLIPTextConfig(**sizes, num_attention_heads=4, max_position_embeddings=64)
        models.append(transformers.CLIPTextModel._from_config(config, attn_implementation=impl).eval())
    for mask in (None, left_padding(), right_padding()):
        real = torch.ones(2, 12, dtype=torch.bool) if mask is None else mask.bool()
        got, want = (m(tokens(), attention_mask=mask).last_hidden_state[real] for m in models)
        assert (got - want).abs().max() < 1e-5


def test_pictures() -> None:
    config = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    found = []
    for impl in ("regard_softmax", "sdpa"):
        torch.manual_seed(7)
        sizes = transformers.ViTConfig(**config, image_size=16, patch_size=4, initializer_range=0.2)
        model = transformers.ViTModel._from_config(sizes, attn_implementation=impl).eval()
        found.append(model(torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))).last_hidden_state)
    assert (found[0] - found[1]).abs().max() < 1e-5
