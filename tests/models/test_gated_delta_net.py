"""Gated DeltaNet as a mixer, against transformers' own layer and against texts without padding."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from regard.checks import ArgumentError
from regard.models import GatedDeltaNet, HybridConfig, HybridForCausalLM

C, H, D, W = 24, 3, 8, 4


def layer(seed=0):
    torch.manual_seed(seed)
    made = GatedDeltaNet(C, H, D, W, layer_idx=0)
    made.init_weights()
    return made.eval()


def hidden(rows=2, tokens=70, seed=1):
    return torch.randn(rows, tokens, C, generator=torch.Generator().manual_seed(seed))


def model(mixers=("gated-deltanet", "softmax"), **fields):
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "pad_token_id": 0}
    options = {"gated-deltanet": {"num_heads": 2, "head_dim": 8}}
    return HybridForCausalLM(HybridConfig(**sizes, mixers=list(mixers), mixer_options=options, **fields)).eval()


def tokens(rows=2, length=90, seed=0):
    return torch.randint(1, 31, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_it_is_transformers_layer():
    ours, x = layer(), hidden()
    config = Qwen3NextConfig(
        hidden_size=C, num_hidden_layers=1, layer_types=["linear_attention"], linear_num_key_heads=H,
        linear_num_value_heads=H, linear_key_head_dim=D, linear_value_head_dim=D, linear_conv_kernel_dim=W,
    )  # fmt: skip
    theirs = Qwen3NextGatedDeltaNet(config, 0).eval()
    theirs.load_state_dict(ours.net.state_dict())
    torch.testing.assert_close(ours(x)[0], theirs(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cuts", [[1] * 70, [69, 1], [1, 3, 66], [64, 2, 4]])
def test_any_partition_gives_the_same(cuts):
    net, x = layer(), hidden()
    whole, end = net.mix(x, None, None)
    state, parts = None, []
    for piece in x.split(cuts, dim=1):
        out, state = net.mix(piece, None, state)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state.memory, end.memory, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state.conv, end.conv)
    assert state.tokens == end.tokens == 70


@pytest.mark.parametrize("split", [70, 33, 1])
def test_padding_is_as_if_it_were_not_there(split):
    net, x = layer(), hidden(rows=4)
    mask = torch.ones(4, 70, dtype=torch.bool)
    mask[1, :9], mask[2, 50:], mask[3, [0, 20, 21, 22, 40, 69]] = False, False, False
    x = x.masked_fill(~mask[..., None], float("nan"))
    state, parts = None, []
    for piece, real in zip(x.split(split, 1), mask.split(split, 1), strict=True):
        out, state = net.mix(piece, real, state)
        parts.append(out)
    got = torch.cat(parts, 1)
    for row in range(4):
        alone, end = net.mix(x[row : row + 1, mask[row]], None, None)
        torch.testing.assert_close(got[row, mask[row]], alone[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(state.memory[row], end.memory[0], rtol=1e-5, atol=1e-6)
        assert not got[row, ~mask[row]].any()


def test_hidden_places_get_no_gradient_and_give_none():
    net, x = layer(), hidden(tokens=12)
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, :4] = mask[1, 5] = False
    x = x.masked_fill(~mask[..., None], float("nan")).requires_grad_()
    net.mix(x, mask, None)[0].square().sum().backward()
    assert not x.grad[~mask].any()
    assert x.grad[mask].isfinite().all()
    assert all(p.grad.isfinite().all() for p in net.parameters())


def test_a_model_of_both_kinds_reads_padded_texts_in_chunks():
    net, text = model(), tokens()
    mask = torch.ones_like(text)
    mask[0, :17] = 0
    whole = net(text, attention_mask=mask).logits
    cache, parts, seen = None, [], 0
    for piece in text.split([40, 1, 1, 48], dim=1):
        seen += piece.shape[1]
        out = net(piece, attention_mask=mask[:, :seen], past_key_values=cache, use_cache=True)
        cache, parts = out.past_key_values, [*parts, out.logits]
    torch.testing.assert_close(torch.cat(parts, 1)[mask != 0], whole[mask != 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whole[0, 17:], net(text[:1, 17:]).logits[0], rtol=1e-4, atol=1e-5)


def test_generation_with_the_cache_is_that_without():
    net, prompt = model(), tokens(length=9)
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
    cached = net.generate(prompt, **settings)
    assert torch.equal(cached, net.generate(prompt, **settings, use_cache=False))
    beams = net.generate(prompt, **settings, num_beams=3)
    assert torch.equal(beams, net.generate(prompt, **settings, num_beams=3, use_cache=False))


def test_a_plain_cache_is_refused():
    from transformers import DynamicCache

    with pytest.raises(ArgumentError, match=r"GatedDeltaCacheLayer at layer 0; leave it out, or take model.model.new"):
        model()(tokens(), past_key_values=DynamicCache())


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
