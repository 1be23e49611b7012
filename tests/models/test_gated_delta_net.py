"""Gated DeltaNet as a mixer, against transformers' own layer and against texts without padding."""

from __future__ import annotations

import pytest
import torch
from any_model import make, text
from transformers import DynamicCache, Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from regard.checks import ArgumentError
from regard.models import GatedDeltaNet, HybridConfig

C, H, D, W = 24, 3, 8, 4


def layer(seed=0):
    torch.manual_seed(seed)
    made = GatedDeltaNet(C, H, D, W, layer_idx=0)
    made.init_weights()
    return made.eval()


def hidden(rows=2, tokens=70, seed=1):
    return torch.randn(rows, tokens, C, generator=torch.Generator().manual_seed(seed))


def test_it_is_transformers_layer():
    ours, x = layer(), hidden()
    config = Qwen3NextConfig(
        hidden_size=C, num_hidden_layers=1, layer_types=["linear_attention"], linear_num_key_heads=H,
        linear_num_value_heads=H, linear_key_head_dim=D, linear_value_head_dim=D, linear_conv_kernel_dim=W,
    )  # fmt: skip
    theirs = Qwen3NextGatedDeltaNet(config, 0).eval()
    theirs.load_state_dict(ours.net.state_dict())
    torch.testing.assert_close(ours(x)[0], theirs(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("split", [70, 33, 1])
def test_padding_is_as_if_it_were_not_there_in_any_partition(split):
    """Over more tokens than the chunks of the delta rule have."""
    net, x = layer(), hidden(rows=4)
    mask = torch.ones(4, 70, dtype=torch.bool)
    mask[1, :9], mask[2, 50:], mask[3, [0, 20, 21, 22, 40, 69]] = False, False, False
    x = x.masked_fill(~mask[..., None], float("nan"))
    states, parts = (None,), []
    for piece, real in zip(x.split(split, 1), mask.split(split, 1), strict=True):
        out, states = net.mix(piece, real, states)
        parts.append(out)
    got = torch.cat(parts, 1)
    for row in range(4):
        alone, (end,) = net.mix(x[row : row + 1, mask[row]], None, (None,))
        torch.testing.assert_close(got[row, mask[row]], alone[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(states[0].memory[row], end.memory[0], rtol=1e-5, atol=1e-6)
        assert not got[row, ~mask[row]].any()


def test_a_plain_cache_is_refused():
    with pytest.raises(ArgumentError, match=r"GatedDeltaCacheLayer at layer 0; leave it out, or take model.model.new"):
        make("mixer-gated-deltanet")(text(), past_key_values=DynamicCache())


def test_options_and_names():
    config = HybridConfig(num_hidden_layers=2, mixers=["gdn", "biweight"], temperatures="learned")
    assert config.mixers == ["gated-deltanet", "biweight"]
    assert config.temperatures == ["fixed", "learned"]
    same = HybridConfig(num_hidden_layers=2, mixers="gdn", mixer_options='{"gdn": {"num_heads": 2}}')
    assert same.mixer_options == {"gated-deltanet": {"num_heads": 2}}
    for fields, message in [
        ({"mixer_options": {"gdn": {"heads": 2}}}, "gated-deltanet has no option 'heads'.*num_heads"),
        ({"mixer_options": {"nothing": {}}}, "unknown token mixer 'nothing'"),
        ({"mixer_options": "{"}, "which is no JSON"),
        ({"mixers": "gdn", "temperatures": "learned"}, "takes neither a temperature nor a ridge"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            HybridConfig(**{"num_hidden_layers": 2, **fields})
