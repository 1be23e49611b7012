"""Parts of hybrid models: layouts of the fast-weight paper (gates, rotary shares, windows), and memories at depths."""

import pytest
import torch
from any_model import SIZES, in_chunks, make, text
from mistakes import refuses
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention, Qwen3NextRotaryEmbedding

from regard import models
from regard.models import HybridConfig, HybridForCausalLM
from regard.models.base.base import tell_step
from regard.nn import Attention, rotary_angles


def small(name, **fields):
    torch.manual_seed(0)
    gated = {"mixer_options": {"gated-deltanet": {"num_heads": 2, "head_dim": 8}}}
    return HybridForCausalLM(HybridConfig.layout(name, **{**SIZES, **gated, **fields}))


def test_gated_attention_with_partial_positions_is_qwen3_nexts():
    torch.manual_seed(0)
    c, h, kv, d = 24, 4, 2, 16
    config = Qwen3NextConfig(
        hidden_size=c, num_attention_heads=h, num_key_value_heads=kv, head_dim=d, num_hidden_layers=1,
        layer_types=["full_attention"], rope_parameters={"rope_type": "default", "rope_theta": 1e4,
        "partial_rotary_factor": 0.25}, attn_implementation="eager",
    )  # fmt: skip
    theirs = Qwen3NextAttention(config, 0).eval()
    for norm in (theirs.q_norm, theirs.k_norm):
        norm.weight.data.normal_(std=0.3)
    ours = Attention(c, h, num_kv_heads=kv, head_dim=d, qk_norm="rms", output_gate=True)
    both = theirs.q_proj.weight.view(h, 2, d, c)
    with torch.no_grad():
        ours.q_proj.weight.copy_(both[:, 0].flatten(0, 1))
        ours.gate_proj.weight.copy_(both[:, 1].flatten(0, 1))
        for part in ("k", "v", "o"):
            getattr(ours, f"{part}_proj").weight.copy_(getattr(theirs, f"{part}_proj").weight)
        for part in ("q", "k"):
            getattr(ours, f"{part}_norm").weight.copy_(1 + getattr(theirs, f"{part}_norm").weight)
    x, positions = torch.randn(2, 9, c), torch.arange(9)[None]
    hidden = torch.full((9, 9), float("-inf")).triu(1)[None, None]
    want, _ = theirs(x, Qwen3NextRotaryEmbedding(config)(x, positions), hidden)
    torch.testing.assert_close(ours(x, rotary_angles(positions, d // 4))[0], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "mixers", "windows"),
    [
        ("GDN", ["gated-deltanet"] * 4, [None] * 4),
        ("GDN+SWA", ["gated-deltanet"] * 3 + ["softmax"], [None, None, None, 8]),
        ("GDN+FA", ["gated-deltanet"] * 3 + ["softmax"], [None] * 4),
        ("FA", ["softmax"] * 4, [None] * 4),
    ],
)
def test_layouts_are_what_they_say(name, mixers, windows):
    model = small(name, **({"window": 8} if "SWA" in name else {}))
    assert model.config.mixers == mixers
    assert model.config.layer_windows() == windows
    assert HybridConfig.from_dict(model.config.to_dict()).to_dict() == model.config.to_dict()
    assert [type(layer.self_attn).__name__ for layer in model.model.layers] == [
        {"gated-deltanet": "GatedDeltaNet"}.get(mixer, "Attention") for mixer in mixers
    ]


def test_a_window_by_layer_is_seen_in_what_a_token_depends_on():
    config = HybridConfig(vocab_size=31, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, window=[3])
    model = HybridForCausalLM(config).eval().double()
    assert model.config.window == 3  # one for all is kept as a number
    two = HybridConfig(num_hidden_layers=2, window=[3, None])
    assert two.window == [3, None]
    assert two.sliding_window is None
    embedded = torch.randn(1, 9, 32, dtype=torch.float64, requires_grad=True)
    model.model(inputs_embeds=embedded).last_hidden_state[0, 6].sum().backward()
    assert embedded.grad[0].abs().sum(-1).gt(0).tolist() == [4 <= i <= 6 for i in range(9)]


def reach(model, embedded):
    leaf = embedded.clone().requires_grad_()
    model.model(inputs_embeds=leaf).last_hidden_state[0, -1].sum().backward()
    return int(leaf.grad[0].abs().sum(-1).gt(0).sum())


def test_training_restricts_attention_in_a_share_of_passes_alike_in_every_process():
    embedded = torch.randn(1, 12, SIZES["hidden_size"])
    fields = {"num_hidden_layers": 1, "mixers": ["softmax"], "window": 4}
    runs = []
    for _ in range(2):
        model = small("FA-pSWA", **fields, training_window_share=0.5).train()
        runs.append([reach(model, embedded) for _ in range(60)])
    assert runs[0] == runs[1]
    assert set(runs[0]) == {4, 12}
    assert 15 < runs[0].count(4) < 45
    assert reach(model.eval(), embedded) == 12
    model = small("FA-pSWA", **fields, training_window_share=1.0).train()
    assert {reach(model, embedded) for _ in range(10)} == {4}
    other = small("FA-pSWA", **fields, training_window_share=0.5, training_window_seed=1).train()
    assert [reach(other, embedded) for _ in range(60)] != runs[0]


def test_the_step_that_is_told_decides():
    embedded = torch.randn(1, 12, SIZES["hidden_size"])
    model = small("FA-pSWA", num_hidden_layers=1, mixers=["softmax"], window=4, training_window_share=0.5).train()
    counted = [reach(model, embedded) for _ in range(20)]
    told = []
    for step in range(20):
        tell_step(model, step)
        told.append({reach(model, embedded) for _ in range(2)})  # micro-batches of one step are alike
    assert told == [{one} for one in counted]


def test_recomputation_sees_the_window_of_its_pass():
    model, tokens = small("FA-pSWA", window=4, training_window_share=0.5).train(), text(2, 24)
    plain, recomputed = [], []
    for grads, checkpointing in ((plain, False), (recomputed, True)):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.model.passes = 0
        for _ in range(4):
            model.zero_grad()
            model(tokens, labels=tokens).loss.backward()
            grads.append(model.model.layers[0].self_attn.k_proj.weight.grad.clone())
    torch.testing.assert_close(plain, recomputed)


def test_training_with_a_window_hides_padding_too():
    model, tokens = small("FA-pSWA", window=4, training_window_share=1.0).train(), text(2, 24)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    before = model(tokens, attention_mask=mask).logits
    tokens[0, :5] = 7
    torch.testing.assert_close(model(tokens, attention_mask=mask).logits[mask != 0], before[mask != 0])


def test_windows_and_names_of_layouts():
    assert HybridConfig.layout("LaCT", window=64).mixer_options == {"lact": {"window": 64}}
    own = HybridConfig.layout("LaCT", window=64, mixer_options={"lact": {"window": 9, "chunk_size": 8}})
    assert own.mixer_options == {"lact": {"window": 9, "chunk_size": 8}}
    refuses("GDN has no window, got window=64; leave it out", HybridConfig.layout, "GDN", window=64)
    for name in ("GDN+", "gdn", "GDN-pSWA", "FA-swa"):
        refuses("expected one of GDN, GDN\\+SWA", HybridConfig.layout, name)


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
        counted = models.count_parameters(config) + models.count_fast_weights(config)
        assert round(counted / 1e6, 2) == wanted, (memories, counted)


def test_what_was_written_matters():
    """Of memories and of mixers: what is frozen reads on as the first chunk does, to which nothing was written."""
    for net, chunk in ((model(), 5), (make("mixer-lact"), 3)):
        tokens = text(2, 23)
        with models.frozen_memory(net):
            frozen = net(tokens).logits
        whole = net(tokens).logits
        torch.testing.assert_close(frozen[:, :chunk], whole[:, :chunk])
        assert (frozen[:, chunk:] - whole[:, chunk:]).abs().amax(-1).min() > 1e-5


@pytest.mark.parametrize("memories", ["fwpkm@0,2", "fwmlp@1"])
def test_memory_is_carried_without_the_rest(memories):
    net, tokens = model(memories), text(2, 23)
    out = net(tokens, use_cache=True)
    carried = models.keep_memory(net, out.past_key_values)
    assert carried.get_seq_length() == 0
    assert all(state is not None for state in models.memory_states(carried).values())
    again = net(tokens, past_key_values=carried).logits
    fresh = net(tokens).logits
    assert (again - fresh).abs().amax(-1).min() > 1e-6  # the memory knows more, from the first token on
    reset = models.keep_memory(net, out.past_key_values)
    models.reset_memory(reset)
    torch.testing.assert_close(net(tokens, past_key_values=reset).logits, fresh)
    torch.testing.assert_close(net(tokens, past_key_values=models.keep_memory(net, None)).logits, fresh)


def test_a_snapshot_is_put_back():
    net, tokens, more = model(), text(2, 23), text(2, 23, seed=3)
    _, cache = in_chunks(net, tokens, [23])
    shot = models.memory_states(cache)
    read = lambda tokens: net(tokens, past_key_values=models.with_memory(net, None, shot)).logits  # noqa: E731
    first = read(more)
    read(text(2, 23, seed=4))  # which leaves the snapshot as it was
    torch.testing.assert_close(read(more), first, rtol=1e-5, atol=1e-6)
    message = r"memories at layers \[0, 2\], this model has them at \[1\]"
    refuses(message, models.with_memory, model("fwpkm@1"), None, shot)


def test_flushing_writes_the_pairs_whose_target_is_there():
    """Nine tokens and a flush leave what ten do in a memory that is written every nine and binds no pair across."""
    net, tokens = model(options={"fwpkm": {"chunk_size": 16}}), text(2, 10)
    _, cache = in_chunks(net, tokens[:, :9], [9])
    assert all((state.values.written() == 0).all() for state in models.memory_states(cache).values())
    models.flush_memory(net, cache)
    _, other = in_chunks(model(options={"fwpkm": {"chunk_size": 9, "border": False}}), tokens, [10])
    for depth, state in models.memory_states(cache).items():
        wanted = models.memory_states(other)[depth]
        torch.testing.assert_close(state.values.dense(), wanted.values.dense(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(state.keys, wanted.keys, rtol=1e-5, atol=1e-6)
        assert (state.values.written() > 0).all()


def test_chunks_are_as_long_as_is_said_inside():
    net, tokens = model(), text(2, 9)
    with models.chunk_size(net, 8):
        _, cache = in_chunks(net, tokens, [9])
    _, wanted = in_chunks(model(options={"fwpkm": {"chunk_size": 8}}), tokens, [9])
    assert models.memory_modules(net)[0].chunk_size == 5
    for depth, state in models.memory_states(cache).items():
        torch.testing.assert_close(state.values.dense(), models.memory_states(wanted)[depth].values.dense())


def test_beams_cannot_share_a_memory():
    net, prompt = model(options={"fwpkm": {"shared": True}}), text(2, 8)
    settings = {"max_new_tokens": 9, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
    cached = net.generate(prompt, **settings, do_sample=False)
    assert torch.equal(cached, net.generate(prompt, **settings, do_sample=False, use_cache=False))
    refuses("beam search needs a memory for every beam", net.generate, prompt, **settings, num_beams=2)


def test_two_memories_cannot_stand_in_one_place():
    refuses("fwpkm and fwmlp beside the feed-forward layer of layer 1", model, "fwpkm@1+fwmlp@1")
    assert model({"1": ["pkm", "fwpkm"]}).config.memories == "fwpkm@1+pkm@1"


WRONG_OPTIONS = {
    "memory_options: pkm has no option 'subkeys'. Did you mean 'sub_keys'": {"memory_options": {"pkm": {"subkeys": 3}}},
    "memory_options: .*top_k is 9": {"memories": "pkm@0", "memory_options": {"pkm": {"sub_keys": 4, "top_k": 9}}},
    "memory_options: .*give shared=True": {"memories": "fwpkm@1", "memory_options": {"fwpkm": {"resident": True}}},
    "memory_options: .*target='own'": {"memories": "fwmlp@1", "memory_options": {"fwmlp": {"target": "own"}}},
    "mixer_options: .*conv_size is 0": {"mixers": "mamba2", "mixer_options": {"mamba2": {"conv_size": 0}}},
    "mixer_options: .*3 fast_heads": {"mixers": ["lact", "elu"], "mixer_options": {"lact": {"fast_heads": 3}}},
    "mixer_options: .*spec linear": {"mixers": "interpolated", "mixer_options": {"interpolated": {"spec": "linear"}}},
    ".*leave num_key_value_heads or share_query_key out": {"num_key_value_heads": 1, "share_query_key": True},
}


@pytest.mark.parametrize("message", WRONG_OPTIONS)
def test_a_configuration_refuses_options_that_a_layer_cannot_take(message):
    refuses(f"HybridConfig: {message}", HybridConfig, **{**SIZES, "num_hidden_layers": 2, **WRONG_OPTIONS[message]})
