"""Small stock models of transformers with random weights, from their configurations alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging

logging.set_verbosity_error()

VOCAB, PAD, END = 61, 0, 60
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": PAD,
    "eos_token_id": END,
    "pad_token_id": PAD,
    "initializer_range": 0.3,  # scores far from uniform, so that kernels differ
}
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}

CONFIGS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {"num_key_value_heads": 2}),
    "gpt2": (GPT2Config, {}),
    "qwen3": (Qwen3Config, {"num_key_value_heads": 2, "head_dim": 8}),
    "qwen3-sliding": (Qwen3Config, {"num_key_value_heads": 2, "head_dim": 8, **SLIDING}),
    "bert": (BertConfig, {}),
}
CLASSES: dict[str, type[PreTrainedModel]] = {
    "llama": LlamaForCausalLM,
    "gpt2": GPT2LMHeadModel,
    "qwen3": Qwen3ForCausalLM,
    "qwen3-sliding": Qwen3ForCausalLM,
    "bert": BertForMaskedLM,
}
CAUSAL = ["llama", "gpt2", "qwen3", "qwen3-sliding"]
ALL = [*CAUSAL, "bert"]


def tiny(family: str, impl: str, **more: Any) -> PreTrainedModel:
    """A model of the family whose weights depend on the family alone, in evaluation mode."""
    torch.manual_seed(7)
    kind, own = CONFIGS[family]
    return CLASSES[family]._from_config(kind(**{**SIZES, **own, **more}), attn_implementation=impl).eval()


def tokens(batch: int = 2, length: int = 12, seed: int = 0) -> Tensor:
    """[B, T], without padding or end tokens."""
    return torch.randint(1, END, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_padding(length: int = 12) -> Tensor:
    """[2, T]: the first sequence lacks its first four tokens."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, :4] = 0
    return mask


def right_padding(length: int = 12) -> Tensor:
    """[2, T]: the second sequence lacks its last three tokens."""
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, -3:] = 0
    return mask


def positions(mask: Tensor) -> Tensor:
    """The number of real tokens before each, as `generate` counts them."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def step_logits(model: PreTrainedModel, ids: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    """Greedy continuation [B, T + 6] and the logits of each step [B, 6, V]."""
    made = model.generate(
        ids,
        do_sample=False,
        min_new_tokens=6,
        max_new_tokens=6,
        output_logits=True,
        return_dict_in_generate=True,
        **more,
    )
    return made.sequences, torch.stack(made.logits, 1)
