"""The Memory Mosaic as a language model: sizes, starting values, padding, training, saving, generation."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from regard import presets
from regard.checks import ArgumentError
from regard.inspect import capture
from regard.models import (
    HybridConfig,
    MemoryMosaicConfig,
    MemoryMosaicForCausalLM,
    MemoryMosaicModel,
    count_parameters,
    match_parameters,
)

V = 29
FIXED = "epanechnikov*fixed(h=1)*cosine"
OPTIONS = [
    {},
    {"wiring": "parallel"},
    {"wiring": "parallel", "persistent_keys": "shared"},
    {"bias": True, "leaky": "average", "look_ahead": "convex", "key_eps": 1e-6},
    {"persistent_copies": 2, "persistent": "biweight", "scale_logits": False, "initializer": "gpt2"},
    {"tie_word_embeddings": False},
]


def make(seed=0, **fields):
    torch.manual_seed(seed)
    sizes = {"vocab_size": V, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "pad_token_id": 0}
    return MemoryMosaicForCausalLM(MemoryMosaicConfig(**{**sizes, **fields})).eval()


def stir(model, seed=3):
    """Away from the start, where logits are so small that differences would hide."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.05 * torch.randn(p.shape, generator=noise)
    return model


def text(*shape, seed=0):
    return torch.randint(1, V, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width", [128, 384, 768])
def test_a_block_has_twelve_c_squared_parameters(width):
    """Of the released size 12 C^2 (9 of memories, 3 of projections) within 1 %."""
    sizes = {"vocab_size": 5, "hidden_size": width, "num_attention_heads": 4}
    two, three = (count_parameters(MemoryMosaicConfig(num_hidden_layers=n, **sizes)) for n in (2, 3))
    assert abs((three - two) / (12 * width**2) - 1) < 0.01
    assert MemoryMosaicConfig(**sizes).persistent_slots == {128: 448, 384: 1344, 768: 2688}[width]


def test_sizes_are_matched():
    other = HybridConfig(vocab_size=V, hidden_size=48, num_hidden_layers=3, num_attention_heads=2)
    config = MemoryMosaicConfig(vocab_size=V, hidden_size=48, num_hidden_layers=2, num_attention_heads=2)
    matched = match_parameters(config, other)
    assert abs(matched.gap) < 0.003
    assert matched.config.persistent_slots != config.persistent_slots


def test_starting_values():
    model = make(hidden_size=96, vocab_size=400, num_hidden_layers=3)
    found = dict(model.named_parameters())
    for name, want in {
        "model.embed_tokens.weight": 96**-0.5,
        "model.layers.1.contextual.keys.proj.weight": 96**-0.5,
        "model.layers.1.contextual.out_proj.weight": (96 * 3) ** -0.5,
        "model.layers.1.persistent.out_proj.weight": (96 * 3) ** -0.5,
        "model.layers.1.persistent.slot_values": 32**-0.5,
    }.items():
        assert abs(found[name].std().item() / want - 1) < 0.05, name
    torch.testing.assert_close(found["model.layers.2.persistent.keys.rate"] * 10, torch.tensor([0.5, 2.75, 5.0]))
    mixes = torch.cat([layer.contextual.values.mix for layer in model.model.layers])
    assert mixes.std() > 0.05
    flat = {name for name, p in found.items() if p.dim() < 2}
    assert {n.rsplit(".", 1)[-1] for n in flat if "norm" not in n} == {"rate", "scale", "mix"}
    gpt2 = make(hidden_size=96, vocab_size=400, num_hidden_layers=3, initializer="gpt2")
    assert abs(gpt2.model.layers[0].contextual.keys.proj.weight.std().item() / 0.02 - 1) < 0.05
    assert abs(gpt2.model.layers[0].contextual.out_proj.weight.std().item() / (0.02 / 6**0.5) - 1) < 0.05


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("spec", ["biweight", "softmax"])
def test_padding_changes_nothing(spec, options):
    """Left padding with NaN in its embeddings: values, loss and gradients."""
    model, ids = stir(make(mixers=spec, **options)), text(1, 12)
    model(ids, labels=ids).loss.backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    plain = model(ids).logits
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], 1)
    mask = (padded > 0).long()
    embedded = torch.where(mask[..., None] > 0, model.model.embed_tokens(padded), torch.nan)
    out = model(inputs_embeds=embedded, attention_mask=mask, labels=padded)
    torch.testing.assert_close(out.logits[:, 4:], plain, rtol=1e-5, atol=1e-5)
    assert torch.isfinite(out.logits).all()
    out.loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, want[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("spec", [*presets(), FIXED, "biweight*anchored"])
def test_every_sentence_runs(spec):
    model, ids = make(mixers=spec).train(), text(2, 10)
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert abs(loss.item() - math.log(V)) < 0.3
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_nothing_but_zeros():
    for spec in ("softmax", "biweight", "normrelu", "cosine"):
        model = make(mixers=spec).train()
        zeros = torch.zeros(1, 6, 24, requires_grad=True)
        out = model(inputs_embeds=zeros, labels=text(1, 6))
        out.loss.backward()
        assert torch.isfinite(out.logits).all()
        assert torch.isfinite(zeros.grad).all()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("options", OPTIONS)
def test_checkpointing_gives_the_same_gradients(options):
    model, ids = make(mixers="biweight", **options).train(), text(2, 10)
    model(ids, labels=ids).loss.backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(ids, labels=ids).loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, want[name], rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "masked"), [("softmax", False), ("biweight", True), (FIXED, False)])
def test_a_training_step_compiles_without_a_break(spec, masked):
    model, ids = make(mixers=spec, num_hidden_layers=1).train(), text(2, 10)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    arguments = {"attention_mask": mask} if masked else {}
    model(ids, labels=ids, **arguments).loss.backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    torch.compile(model, fullgraph=True, backend="aot_eager")(ids, labels=ids, **arguments).loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, want[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("options", OPTIONS)
def test_save_and_load(tmp_path, options):
    model, ids = stir(make(mixers=["relumax", FIXED], **options)), text(2, 9)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert isinstance(again, MemoryMosaicForCausalLM)
    assert again.config.to_dict() == AutoConfig.from_pretrained(tmp_path).to_dict()
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert isinstance(AutoModel.from_pretrained(tmp_path), MemoryMosaicModel)


def test_the_cache_is_not_needed_to_generate():
    model, ids = stir(make(mixers="biweight")), text(3, 7)
    mask = torch.ones_like(ids)
    mask[0, :3], mask[1, :6] = 0, 0
    for how in ({}, {"do_sample": True, "top_k": 5}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}):
        answers = []
        for use_cache in (True, False):
            torch.manual_seed(0)
            tokens = model.generate(ids, attention_mask=mask, max_new_tokens=12, use_cache=use_cache, **how)
            answers.append(tokens)
        assert torch.equal(*answers), how


def test_padded_prompts_go_on_as_alone():
    model, ids = stir(make(mixers="sparsemax")), text(1, 6)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], 1)
    alone = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)
    other = model.generate(padded, attention_mask=(padded > 0).long(), max_new_tokens=10, do_sample=False)
    assert torch.equal(alone[:, 6:], other[:, 11:])


def test_a_mosaic_learns_what_follows_what():
    """Pairs of letters that are drawn anew in every text: after `a b ... a` comes b. One block is enough, since values
    look ahead; nothing but the text at hand tells which."""
    torch.manual_seed(0)
    draws = torch.Generator().manual_seed(1)

    def batch(rows):
        keys = torch.stack([torch.randperm(8, generator=draws)[:4] for _ in range(rows)])
        values = torch.randint(8, 16, (rows, 4), generator=draws)
        line = torch.stack([keys, values], -1).flatten(1)
        asked = torch.randint(4, (rows, 1), generator=draws)
        return torch.cat([line, keys.gather(1, asked), values.gather(1, asked)], 1)

    for spec in ("softmax", "biweight"):
        model = make(vocab_size=16, hidden_size=32, num_attention_heads=2, num_hidden_layers=1, mixers=spec).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        for _ in range(150):
            ids = batch(32)
            logits = model(ids[:, :-1]).logits[:, -1]
            loss = torch.nn.functional.cross_entropy(logits, ids[:, -1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ids = batch(256)
        right = (model(ids[:, :-1]).logits[:, -1].argmax(-1) == ids[:, -1]).float().mean().item()
        assert right > 0.9, f"{spec}: {right:.2f} right"


def test_diagnostics_of_every_block():
    model, ids = make(mixers=["biweight", FIXED]), text(2, 8)
    with capture(model, weights=True) as seen:
        model(ids)
    assert list(seen.layers) == [0, 1]
    for rows in seen.layers.values():
        assert rows.support.shape == (2, 3, 8)
        assert rows.empty[:, :, 0].all()
        assert rows.weights.shape == (2, 3, 8, 8)
    out = model(ids, output_attentions=True, output_hidden_states=True)
    assert [w.shape for w in out.attentions] == [(2, 3, 8, 8)] * 2
    assert len(out.hidden_states) == 3


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mixers": "soft"}, "Did you mean"),
        ({"mixers": ["softmax"]}, "mixers names 1"),
        ({"mixers": "local-linear*"}, "Spec.parse"),
        ({"persistent": "linear"}, "normalised spec"),
        ({"persistent_slots": 0}, "persistent_slots"),
        ({"wiring": "ring"}, "'sequential', 'parallel'"),
        ({"persistent_keys": "shared"}, "wiring='parallel'"),
        ({"num_attention_heads": 5}, "multiple"),
        ({"dropout": 0.1}, "weight decay"),
        ({"attention_dropout": 0.1}, "weight decay"),
        ({"learned": ["width"]}, "width"),
        ({"leaky": "mean"}, "'sum', 'average'"),
        ({"presistent": "softmax"}, "Did you mean 'persistent'"),
        ({"key_eps": -1}, "key_eps"),
        ({"gaussian": 1}, "unknown field"),
    ],
)
def test_bad_configurations(fields, words):
    with pytest.raises(ArgumentError, match=words):
        MemoryMosaicConfig(**{"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, **fields})


def test_bad_input():
    model = make(max_position_embeddings=8)
    for tokens, words in (
        (torch.zeros(1, 0, dtype=torch.long), "nothing to continue"),
        (text(1, 9), "context of 8"),
        (torch.tensor([[1, V]]), "vocabulary"),
    ):
        with pytest.raises(ArgumentError, match=words):
            model.generate(tokens)
    with pytest.raises(ArgumentError, match="all padding"):
        model.generate(text(2, 4), attention_mask=torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]]))
    with pytest.raises(ArgumentError, match="vocabulary"):
        model(torch.tensor([[V]]))
