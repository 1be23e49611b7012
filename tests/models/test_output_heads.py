"""The output matrix alone reads what the base model gives: fused losses compute no more than
`lm_head(base_model(...).last_hidden_state)` and have no place for a factor between the two.
"""

from __future__ import annotations

import pytest
import torch
from any_model import make, padded

from regard.models import language_models

CASES = [
    *[(name, {}) for name in language_models.names()],
    *[(name, {"tie_word_embeddings": False}) for name in language_models.names()],
    ("memory-mosaic", {"scale_logits": False}),
    ("memory-mosaic", {"wiring": "parallel", "persistent_keys": "shared", "bias": True}),
    ("transformer", {"norm": "layer", "feed_forward": "gelu"}),
    ("transformer", {"mixers": ["gated-deltanet", "lact", "local-linear[biweight]", "elu"]}),
    ("iclm", {"f_mlp": "side"}),
    ("iclm", {"start": "bos", "variant": "wv", "tie_phi": False}),
]
cases = pytest.mark.parametrize(("name", "fields"), CASES, ids=str)


@torch.no_grad()
@cases
def test_the_output_matrix_reads_the_base_model(name, fields):
    model, (tokens, mask) = make(name, **fields), padded()
    logits = model(tokens, attention_mask=mask).logits
    base = model.base_model(tokens, attention_mask=mask, output_hidden_states=True)
    assert torch.equal(model.get_output_embeddings()(base.last_hidden_state), logits)
    assert torch.equal(base.hidden_states[-1], base.last_hidden_state)


@torch.no_grad()
@cases
def test_a_saved_model_has_the_same_head(name, fields, tmp_path):
    model, (tokens, mask) = make(name, dtype=torch.float32, **fields), padded()
    expected = model(tokens, attention_mask=mask).logits
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    base = again.base_model(tokens, attention_mask=mask).last_hidden_state
    # weights read from a file lie elsewhere in memory, and torch may sum in another order
    torch.testing.assert_close(again(tokens, attention_mask=mask).logits, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(again.lm_head(base), expected, atol=1e-5, rtol=0)
