"""A model with Gated DeltaNet runs on a CPU where flash-linear-attention, whose kernels are for GPUs, is installed."""

import pytest
import torch
from any_model import in_chunks, make, padded, text

pytest.importorskip("fla", reason="the extra `peers` brings it")
pytestmark = pytest.mark.peers


def test_gated_delta_net_runs_without_its_kernels():
    model, (tokens, mask) = make("transformer", "gated-deltanet", torch.float32, num_hidden_layers=2), padded()
    model(tokens, attention_mask=mask, labels=tokens).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    with torch.no_grad():
        whole, parts = model(text(2)).logits, in_chunks(model, text(2), [4, 1, 1, 7])[0]
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=0)
