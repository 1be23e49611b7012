"""Any registered language model, small, and texts for it: what the contracts of models share."""

from __future__ import annotations

import torch

from regard.models import language_models

SIZES = {"vocab_size": 29, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "pad_token_id": 0}
T = 13


def moved(model, seed=3, size=0.2):
    """Numbers of heads are moved less: models may take exponentials of them."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            step = size if weight.dim() > 1 else size / 10
            weight += step * torch.randn(weight.shape, generator=noise, dtype=weight.dtype)
    return model


def make(name, mixers="softmax", dtype=torch.float64, **fields):
    entry = language_models.get(name)
    torch.manual_seed(0)
    return moved(entry.model(entry.config(**{**SIZES, "mixers": mixers, **fields})).to(dtype).eval())


def text(rows=1, length=T, seed=0):
    return torch.randint(1, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))


def padded(seed=1):
    """(tokens, mask) [5, T]: full, padded on the left, on the right, in the middle, and down to one token."""
    tokens, mask = text(5, seed=seed), torch.ones(5, T, dtype=torch.long)
    mask[1, :4], mask[2, 8:], mask[3, [2, 5, 6]] = 0, 0, 0
    mask[4] = 0
    mask[4, 7] = 1
    return tokens, mask


def in_chunks(model, tokens, sizes, mask=None, cache=None):
    parts, seen = [], 0
    for chunk in tokens.split(sizes, dim=1):
        seen += chunk.shape[1]
        whole = None if mask is None else mask[:, :seen]
        out = model(chunk, attention_mask=whole, past_key_values=cache, use_cache=True)
        cache, parts = out.past_key_values, [*parts, out.logits]
    return torch.cat(parts, 1), cache


def refused(error, word=""):
    """One line that names the thing refused."""
    assert word in str(error)
    assert "\n" not in str(error)
