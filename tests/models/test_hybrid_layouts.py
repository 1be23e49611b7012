"""What the fast-weight paper's layouts are made of: gates, partial rotary positions, windows by layer and by pass."""

import pytest
import torch
from any_model import SIZES, text
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention, Qwen3NextRotaryEmbedding

from regard.checks import ArgumentError
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
    always = small("FA-pSWA", **fields, training_window_share=1.0).train()
    assert {reach(always, embedded) for _ in range(10)} == {4}
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
    for one, other in zip(plain, recomputed, strict=True):
        torch.testing.assert_close(one, other)


def test_training_with_a_window_hides_padding_too():
    model, tokens = small("FA-pSWA", window=4, training_window_share=1.0).train(), text(2, 24)
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    before = model(tokens, attention_mask=mask).logits
    tokens[0, :5] = 7
    torch.testing.assert_close(model(tokens, attention_mask=mask).logits[mask != 0], before[mask != 0])


def test_windows_go_where_there_is_one():
    assert HybridConfig.layout("LaCT", window=64).mixer_options == {"lact": {"window": 64}}
    own = HybridConfig.layout("LaCT", window=64, mixer_options={"lact": {"window": 9, "chunk_size": 8}})
    assert own.mixer_options == {"lact": {"window": 9, "chunk_size": 8}}
    with pytest.raises(ArgumentError, match="GDN has no window, got window=64; leave it out"):
        HybridConfig.layout("GDN", window=64)


def test_unknown_layouts_are_refused():
    for name in ("GDN+", "gdn", "GDN-pSWA", "FA-swa"):
        with pytest.raises(ArgumentError, match="expected one of GDN, GDN\\+SWA"):
            HybridConfig.layout(name)
