"""Token mixers beside the contracts of models: the recurrences of their papers, and what single mixers do."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from any_model import make, text
from mistakes import refuses
from torch import Tensor
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from regard.models import GatedDeltaNet, HybridConfig, flush_memory, keep_memory, token_mixers
from regard.models.base.cache_layers import StateCacheLayer
from regard.models.hybrid.token_mixers import Heads

HEADS, DIM, TOKENS, WIDTH = 2, 4, 7, 6


def retention(layer: Any, memory: Tensor, k: Tensor, v: Tensor, x: Tensor, h: int) -> Tensor:
    return (1 - 2.0 ** (-5 - h)) * memory + torch.outer(k, v)


def gla(layer: Any, memory: Tensor, k: Tensor, v: Tensor, x: Tensor, h: int) -> Tensor:
    keep = layer.decay(x).view(HEADS, DIM)[h].sigmoid() ** (1 / 16)
    return keep[:, None] * memory + torch.outer(k, v)


def mamba2(layer: Any, memory: Tensor, k: Tensor, v: Tensor, x: Tensor, h: int) -> Tensor:
    step = F.softplus(layer.step(x)[h] + layer.step_bias[h])
    return torch.exp(-layer.log_rate[h].exp() * step) * memory + step * torch.outer(k, v)


def delta(layer: Any, memory: Tensor, k: Tensor, v: Tensor, x: Tensor, h: int) -> Tensor:
    k = k / k.norm()
    return memory + layer.write(x)[h].sigmoid() * torch.outer(k, v - memory.T @ k)


STEPS = {"retention": retention, "gla": gla, "mamba2": mamba2, "deltanet": delta}


def drawn(name: str) -> tuple[Any, Heads]:
    torch.manual_seed(0)
    kind: Any = token_mixers.get(name)
    layer = kind(WIDTH, HEADS, DIM)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    query, key, value = torch.randn(3, 1, HEADS, TOKENS, DIM)
    how = {"attn_mask": None, "state": None, "segment_ids": None}
    return layer, Heads(query, key, value, torch.randn(1, TOKENS, WIDTH), how)


@pytest.mark.parametrize("name", STEPS)
def test_a_mixer_reads_its_recurrence(name: str) -> None:
    layer, heads = drawn(name)
    found, _ = layer.recall(heads)
    for h in range(HEADS):
        memory = torch.zeros(DIM, DIM)
        for t in range(TOKENS):
            memory = STEPS[name](layer, memory, heads.key[0, h, t], heads.value[0, h, t], heads.hidden[0, t], h)
            q = heads.query[0, h, t]
            q = q / q.norm() if name == "deltanet" else q / DIM**0.5
            torch.testing.assert_close(found[0, h, t], memory.T @ q, rtol=1e-4, atol=1e-5)


def test_mesa_net_solves_the_ridge_regression_of_the_past() -> None:
    layer, heads = drawn("mesa")
    found, _ = layer.recall(heads)
    hidden = heads.hidden[0]
    for h in range(HEADS):
        keep, write = layer.keep(hidden)[:, h].sigmoid(), layer.write(hidden)[:, h].sigmoid()
        keys = F.normalize(heads.key[0, h], dim=-1)
        ridge = torch.diag(F.softplus(layer.ridge[h]) + 1e-2)
        for t in range(TOKENS):
            weight = torch.stack([write[j] * keep[j + 1 : t + 1].prod() for j in range(t + 1)])
            gram = ridge + (keys[: t + 1].T * weight) @ keys[: t + 1]
            right = (keys[: t + 1].T * weight) @ heads.value[0, h, : t + 1]
            expected = torch.linalg.solve(gram, right).T @ F.normalize(heads.query[0, h, t], dim=0)
            torch.testing.assert_close(found[0, h, t], expected, rtol=1e-3, atol=1e-4)


def test_mamba2_starts_with_its_steps_and_rates() -> None:
    layer: Any = token_mixers.get("mamba2")(WIDTH, 64, DIM)
    layer.init_weights()
    steps, rates = F.softplus(layer.step_bias.detach()), layer.log_rate.detach().exp()
    assert 1e-3 <= float(steps.min()) < 5e-3
    assert 2e-2 < float(steps.max()) <= 0.1001
    assert 1 <= float(rates.min()) < 3
    assert 13 < float(rates.max()) <= 16


def test_h3_reads_its_diagonal_state_space_model() -> None:
    layer, heads = drawn("h3")
    found, _ = layer.recall(heads)
    sums = torch.zeros(HEADS, DIM, layer.log_rate.shape[-1])
    for t in range(TOKENS):
        u = (heads.key * heads.value)[0, :, t]
        sums = torch.exp(-layer.log_rate.exp()) * sums + u[..., None]
        y = (layer.weight * sums).sum(-1) + layer.skip * u
        torch.testing.assert_close(found[0, :, t], heads.query[0, :, t] * y, rtol=1e-4, atol=1e-5)


def test_hyena_convolves_with_its_filter() -> None:
    layer, heads = drawn("hyena")
    found, _ = layer.recall(heads)
    u, filters = (heads.key * heads.value)[0], layer.filters(TOKENS)
    for t in range(TOKENS):
        y = sum(filters[..., t - j] * u[:, j] for j in range(t + 1)) + layer.skip * u[:, t]
        torch.testing.assert_close(found[0, :, t], heads.query[0, :, t] * y, rtol=1e-4, atol=1e-5)


def gated_delta_net() -> GatedDeltaNet:
    torch.manual_seed(0)
    made = GatedDeltaNet(24, 3, 8, 4, layer_idx=0)
    made.init_weights()
    return made.eval()


def test_gated_delta_net_is_transformers_layer() -> None:
    ours, x = gated_delta_net(), torch.randn(2, 70, 24)
    config = Qwen3NextConfig(
        hidden_size=24, num_hidden_layers=1, layer_types=["linear_attention"], linear_num_key_heads=3,
        linear_num_value_heads=3, linear_key_head_dim=8, linear_value_head_dim=8, linear_conv_kernel_dim=4,
    )  # fmt: skip
    theirs = Qwen3NextGatedDeltaNet(config, 0).eval()
    theirs.load_state_dict(ours.net.state_dict())
    torch.testing.assert_close(ours(x)[0], theirs(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("split", [70, 33, 5, 1])
def test_padding_in_more_tokens_than_a_chunk_of_the_delta_rule(split: int) -> None:
    """Also at the end of a piece, before the next one comes."""
    layer, hidden, mask = gated_delta_net(), torch.randn(4, 70, 24), torch.ones(4, 70, dtype=torch.bool)
    mask[1, :17], mask[2, 46:], mask[3, [0, 2, 3, 7, 69]] = False, False, False
    hidden = hidden.masked_fill(~mask[..., None], float("nan"))
    states, parts = (None,), []
    for piece, real in zip(hidden.split(split, 1), mask.split(split, 1), strict=True):
        out, states = layer.mix(piece, real, states)
        parts.append(out)
    found = torch.cat(parts, 1)
    for row in range(4):
        alone, end = layer.mix(hidden[row : row + 1, mask[row]], None, (None,))
        torch.testing.assert_close(found[row, mask[row]], alone[0], rtol=1e-4, atol=1e-5)
        assert not found[row, ~mask[row]].any()
        torch.testing.assert_close(states[0].memory[row], end[0].memory[0], rtol=1e-5, atol=1e-6)


mixers = pytest.mark.parametrize("name", token_mixers.names())
RECURRENT = [name for name, mixer in token_mixers.items() if issubclass(mixer.cache_layer, StateCacheLayer)]
"""Mixers that keep a state and no pairs."""


def model(name):
    return make(f"mixer-{name}", dtype=torch.float32)


@mixers
def test_tokens_are_taken_back_from_pairs_alone(name):
    net, prompt = model(name), text(1, 9)
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    if name in RECURRENT:
        refuses("tokens cannot be removed", net.generate, prompt, **settings, prompt_lookup_num_tokens=2)
    else:
        found = net.generate(prompt, **settings, prompt_lookup_num_tokens=2)
        assert torch.equal(found, net.generate(prompt, **settings))


@pytest.mark.parametrize("name", RECURRENT)
def test_what_is_recurrent_can_go_on_in_a_new_text(name):
    net, tokens = model(name), text(2, 29)
    cache = net(tokens, use_cache=True).past_key_values
    fresh = net(tokens).logits
    carried = keep_memory(net, cache, recurrent=True)
    assert carried.get_seq_length() == 0
    assert (net(tokens, past_key_values=carried).logits - fresh).abs().amax(-1).min() > 1e-6
    torch.testing.assert_close(net(tokens, past_key_values=keep_memory(net, cache)).logits, fresh)


def test_fast_weights_of_mixers_are_flushed_too():
    """A chunk of three tokens and a flush give the weights of four tokens, of which the last one only waits."""
    net, tokens = model("lact"), text(2, 4)
    cache = net(tokens[:, :3], use_cache=True).past_key_values
    before = cache.layers[0].fast_state
    flush_memory(net, cache)
    flushed, wanted = cache.layers[0].fast_state, net(tokens, use_cache=True).past_key_values.layers[0].fast_state
    for name in ("gate", "up", "down", "gate_step", "up_step", "down_step"):
        torch.testing.assert_close(getattr(flushed, name), getattr(wanted, name), rtol=1e-5, atol=1e-6)
    assert not torch.equal(flushed.up, before.up)


@torch.no_grad()
@mixers
def test_the_default_dtype_of_torch_changes_no_bit(name, default_dtype):
    net, tokens = model(name), text(2, 9)
    before = net(tokens).logits
    default_dtype(torch.bfloat16)
    assert torch.equal(net(tokens).logits, before)


@mixers
def test_options_are_checked(name):
    refuses(f"{name} has no option 'nothing'", HybridConfig, mixers=name, mixer_options={name: {"nothing": 1}})


def test_options_and_names_of_gated_delta_net():
    config = HybridConfig(num_hidden_layers=2, mixers=["gdn", "biweight"], temperatures="learned")
    assert config.mixers == ["gated-deltanet", "biweight"]
    assert config.temperatures == ["fixed", "learned"]
    same = HybridConfig(num_hidden_layers=2, mixers="gdn", mixer_options='{"gdn": {"num_heads": 2}}')
    assert same.mixer_options == {"gated-deltanet": {"num_heads": 2}}
    for fields, message in [
        ({"mixer_options": {"gdn": {"heads": 2}}}, "gated-deltanet has no option 'heads'.*num_heads"),
        ({"mixer_options": {"nothing": {}}}, "unknown token mixer 'nothing'"),
        ({"mixer_options": "{"}, "which is not JSON"),
        ({"mixers": "gdn", "temperatures": "learned"}, "takes neither a temperature nor a ridge"),
    ]:
        refuses(message, HybridConfig, **{"num_hidden_layers": 2, **fields})
