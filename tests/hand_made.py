"""A language model whose probabilities are chosen: each token is predicted from the one before it alone."""

import torch
from any_model import SIZES
from torch import Tensor

from regard.models import HybridConfig, HybridForCausalLM

WIDTH = 32


def table() -> Tensor:
    """Return the probability [V, V] of each token (column) after each (row)."""
    draw = torch.randn(SIZES["vocab_size"], SIZES["vocab_size"], generator=torch.Generator().manual_seed(5))
    return (3 * draw).softmax(-1)


@torch.no_grad()
def bigram_model() -> HybridForCausalLM:
    """Return the model of `table`: its layer adds zero, and the norm multiplies a one-hot embedding by sqrt(WIDTH)."""
    config = HybridConfig(
        vocab_size=SIZES["vocab_size"], hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=2,
        feed_forward="none", tie_word_embeddings=False, pad_token_id=0, eos_token_id=1, max_position_embeddings=16,
        rms_norm_eps=1e-12,
    )  # fmt: skip
    model = HybridForCausalLM(config).eval()
    model.model.layers[0].self_attn.o_proj.weight.zero_()
    model.model.embed_tokens.weight.copy_(torch.eye(SIZES["vocab_size"], WIDTH))
    model.lm_head.weight[:, : SIZES["vocab_size"]] = table().log().T / WIDTH**0.5
    return model
