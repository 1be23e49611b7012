"""Memories at chosen depths of a model: counted, carried, generated with, frozen, taken out and put in."""

import pytest
import torch
from any_model import SIZES, in_chunks
from any_model import text as tokens

from regard.checks import ArgumentError
from regard.models import (
    HybridConfig,
    HybridForCausalLM,
    chunk_size,
    count_fast_weights,
    count_parameters,
    flush_memory,
    frozen_memory,
    keep_memory,
    memory_modules,
    memory_states,
    reset_memory,
    with_memory,
)

OPTIONS = {
    "fwpkm": {"sub_keys": 8, "key_dim": 16, "value_dim": 12, "top_k": 3, "chunk_size": 5},
    "fwmlp": {"in_dim": 12, "hidden_dim": 16, "value_dim": 12, "chunk_size": 5},
    "pkm": {"sub_keys": 6, "key_dim": 8, "value_dim": 10, "heads": 2, "top_k": 4},
}


def model(memories="fwpkm@0,2", mixers="softmax", place="before-mixer", options=None, **fields):
    torch.manual_seed(0)
    fields = {"mixers": mixers, "memories": memories, "memory_place": place, "num_hidden_layers": 3, **fields}
    given = {name: {**OPTIONS[name], **(options or {}).get(name, {})} for name in OPTIONS}
    return HybridForCausalLM(HybridConfig(**{**SIZES, **fields}, memory_options=given)).eval()


TABLE_2 = {  # the paper's, in millions
    "GDN": (112.11, 509.08, 519.12, 515.77),
    "GDN+SWA": (112.65, 509.61, 519.66, 516.31),
    "GDN+FA": (112.65, 509.61, 519.66, 516.31),
    "FA": (114.25, 511.22, 521.26, 517.91),
}


@pytest.mark.parametrize("layout", list(TABLE_2))
def test_sizes_are_those_of_the_papers_table_2(layout):
    for memories, wanted in zip((None, "PKM@2,6,10", "FwPKM@2,6,10", "PKM@6+FwPKM@2,10"), TABLE_2[layout], strict=True):
        config = HybridConfig.layout(layout, memories)
        counted = count_parameters(config) + count_fast_weights(config)
        assert round(counted / 1e6, 2) == wanted, (memories, counted)


def test_what_was_written_matters():
    net, text = model(), tokens(2, 23)
    with frozen_memory(net):
        frozen = net(text).logits
    whole = net(text).logits
    torch.testing.assert_close(frozen[:, :5], whole[:, :5])  # the first chunk reads what nothing was written to
    assert (frozen[:, 5:] - whole[:, 5:]).abs().amax(-1).min() > 1e-5


@pytest.mark.parametrize("memories", ["fwpkm@0,2", "fwmlp@1"])
def test_memory_is_carried_without_the_rest(memories):
    net, text = model(memories), tokens(2, 23)
    out = net(text, use_cache=True)
    carried = keep_memory(net, out.past_key_values)
    assert carried.get_seq_length() == 0
    assert all(state is not None for state in memory_states(carried).values())
    again = net(text, past_key_values=carried).logits
    fresh = net(text).logits
    assert (again - fresh).abs().amax(-1).min() > 1e-6  # the memory knows more, from the first token on
    reset = keep_memory(net, out.past_key_values)
    reset_memory(reset)
    torch.testing.assert_close(net(text, past_key_values=reset).logits, fresh)


def test_a_snapshot_is_put_back():
    net, text, more = model(), tokens(2, 23), tokens(2, 23, seed=3)
    _, cache = in_chunks(net, text, [23])
    shot = memory_states(cache)
    first = net(more, past_key_values=with_memory(net, None, shot)).logits
    net(tokens(2, 23, seed=4), past_key_values=with_memory(net, None, shot))  # reading on leaves the snapshot as it was
    second = net(more, past_key_values=with_memory(net, None, shot)).logits
    torch.testing.assert_close(second, first, rtol=1e-5, atol=1e-6)
    with pytest.raises(ArgumentError, match=r"memories at layers \[0, 2\], this model has them at \[1\]"):
        with_memory(model("fwpkm@1"), None, shot)


def test_frozen_memory_stays_to_the_bit():
    net, text = model(), tokens(2, 23)
    _, cache = in_chunks(net, text, [23])
    before = {d: {k: v.clone() for k, v in s.to_tensors().items()} for d, s in memory_states(cache).items()}
    with frozen_memory(net):
        net(text, past_key_values=cache)
    after = {depth: state.to_tensors() for depth, state in memory_states(cache).items()}
    for depth, tensors in before.items():
        assert tensors.keys() == after[depth].keys()
        assert all(torch.equal(tensors[name], after[depth][name]) for name in tensors)
    assert not any(module.frozen for module in memory_modules(net).values())


def test_flushing_writes_the_pairs_whose_target_is_there():
    """Nine tokens and a flush leave what ten do in a memory that is written every nine and binds no pair across."""
    net, text = model(options={"fwpkm": {"chunk_size": 16}}), tokens(2, 10)
    _, cache = in_chunks(net, text[:, :9], [9])
    assert all((state.values.written() == 0).all() for state in memory_states(cache).values())
    flush_memory(net, cache)
    lost = model(options={"fwpkm": {"chunk_size": 9, "border": False}})
    _, other = in_chunks(lost, text, [10])
    for depth, state in memory_states(cache).items():
        wanted = memory_states(other)[depth]
        torch.testing.assert_close(state.values.dense(), wanted.values.dense(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(state.keys, wanted.keys, rtol=1e-5, atol=1e-6)
        assert (state.values.written() > 0).all()


def test_chunks_are_as_long_as_is_said_inside():
    net, text = model(), tokens(2, 9)
    with chunk_size(net, 8):
        _, cache = in_chunks(net, text, [9])
    _, wanted = in_chunks(model(options={"fwpkm": {"chunk_size": 8}}), text, [9])
    assert memory_modules(net)[0].chunk_size == 5
    for depth, state in memory_states(cache).items():
        torch.testing.assert_close(state.values.dense(), memory_states(wanted)[depth].values.dense())


def test_every_slow_weight_of_a_memory_learns():
    net, text = model("pkm@1+fwpkm@1", options={"fwpkm": {"top_k": 2}}).train(), tokens(4, 23)
    net(text, labels=text).loss.backward()
    for name, p in net.model.layers[1].named_parameters():
        assert p.grad is not None, name
        assert p.grad.abs().sum() > 0, name


def test_beams_cannot_share_a_memory():
    net, prompt = model(options={"fwpkm": {"shared": True}}), tokens(2, 8)
    settings = {"max_new_tokens": 9, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
    cached = net.generate(prompt, **settings, do_sample=False)
    assert torch.equal(cached, net.generate(prompt, **settings, do_sample=False, use_cache=False))
    with pytest.raises(ArgumentError, match="beam search needs a memory for every beam"):
        net.generate(prompt, **settings, num_beams=2)


def test_two_memories_cannot_stand_in_one_place():
    with pytest.raises(ArgumentError, match="fwpkm and fwmlp beside the feed-forward layer of layer 1"):
        model("fwpkm@1+fwmlp@1")
    assert model({"1": ["pkm", "fwpkm"]}).config.memories == "fwpkm@1+pkm@1"
    with pytest.raises(ArgumentError, match=r"pkm has no option .subkeys.\. Did you mean .sub_keys."):
        HybridConfig(**SIZES, memories="pkm@1", memory_options={"pkm": {"subkeys": 3}})
