"""Small stock models of transformers with random weights, from their configurations alone."""

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

logging.set_verbosity_error()

VOCAB, PAD, END = 61, 0, 60
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "bos_token_id": PAD, "eos_token_id": END, "pad_token_id": PAD,
    "initializer_range": 0.3,  # scores far from uniform, so that kernels differ
}  # fmt: skip
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}

NAMED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 2}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"num_key_value_heads": 2, "head_dim": 8}),
    "qwen3-sliding": ("Qwen3Config", "Qwen3ForCausalLM", {"num_key_value_heads": 2, "head_dim": 8, **SLIDING}),
    "bert": ("BertConfig", "BertForMaskedLM", {}),
}
"""Families that are tested most: (configuration, model, options)."""
GROUPED = {"num_key_value_heads": 2, "initializer_range": 0.2}
OLD = {"initializer_range": 0.2}
MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}

DECODERS: dict[str, dict[str, Any]] = {
    "Mistral": {**GROUPED, "sliding_window": 5},
    "Mixtral": {**GROUPED, "num_local_experts": 2, "num_experts_per_tok": 1},
    "Phi3": GROUPED,
    "Gemma": {**GROUPED, "head_dim": 8},
    "Granite": {**GROUPED, "attention_multiplier": 0.5},
    "Olmo2": GROUPED,
    "GPTNeoX": OLD,
    "Qwen2": GROUPED,
    "DeepseekV3": {**GROUPED, "num_key_value_heads": 4, "first_k_dense_replace": 1, **MLA, **EXPERTS},
}
ENCODERS: dict[str, dict[str, Any]] = {
    "Roberta": {**OLD, "pad_token_id": 1},
    "Electra": {**OLD, "embedding_size": 32},
    "ModernBert": {**OLD, "local_attention": 6, "global_attn_every_n_layers": 2},
}


CAUSAL = ["llama", "gpt2", "qwen3", "qwen3-sliding"]
ALL = [*CAUSAL, "bert"]
MORE = [*DECODERS, *ENCODERS]
"""Families that are tested once each."""


def tiny(family: str, impl: str, **more: Any) -> PreTrainedModel:
    """A model of the family whose weights depend on the family alone, in evaluation mode."""
    torch.manual_seed(7)
    kind = "ForCausalLM" if family in DECODERS else "ForMaskedLM"
    usual = (f"{family}Config", family + kind, DECODERS.get(family) or ENCODERS.get(family))
    config, model, own = NAMED.get(family, usual)
    made = getattr(transformers, config)(**{**SIZES, **own, **more})
    return getattr(transformers, model)._from_config(made, attn_implementation=impl).eval()


def tokens(batch: int = 2, length: int = 12, seed: int = 0) -> Tensor:
    """[B, T], without padding or end tokens."""
    return torch.randint(1, END, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_padding() -> Tensor:
    """[2, 12]: the first sequence lacks its first four tokens."""
    return (torch.arange(12) >= torch.tensor([[4], [0]])).long()


def right_padding() -> Tensor:
    """[2, 12]: the second sequence lacks its last three tokens."""
    return (torch.arange(12) < torch.tensor([[12], [9]])).long()


def positions(mask: Tensor) -> Tensor:
    """The number of real tokens before each, as `generate` counts them."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def step_logits(model: PreTrainedModel, ids: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    """Greedy continuation [B, T + 6] and the logits of each step [B, 6, V]."""
    how = {"do_sample": False, "min_new_tokens": 6, "max_new_tokens": 6, "output_logits": True, **more}
    made = model.generate(ids, return_dict_in_generate=True, **how)
    return made.sequences, torch.stack(made.logits, 1)


PADDING = {"none": None, "left": left_padding(), "right": right_padding()}
"""[2, T] or None, by name."""


def gap(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest entry of `other` if that is above 1."""
    return (one - other).abs().max().item() / max(1.0, other.abs().max().item())


def real_tokens(mask: Tensor | None) -> Tensor:
    """Boolean [2, 12]: the places that hold tokens."""
    return torch.ones(2, 12, dtype=torch.bool) if mask is None else mask.bool()


def without_dropout(family: str) -> dict[str, float]:
    """The options by which a family has none."""
    return {
        "gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
        "bert": {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0},
    }.get(family, {})


def same_gradients(ours: PreTrainedModel, theirs: PreTrainedModel) -> None:
    """Assert that the parameters' gradients agree, wherever `theirs` has one."""
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if b.grad is not None:
            assert torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-8), name
