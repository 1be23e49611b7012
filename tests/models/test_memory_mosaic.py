"""The Memory Mosaic as a language model: sizes, starting values, learning, what its cache holds."""

import pytest
import torch
from any_model import in_chunks, text
from any_model import make as any_make
from transformers import DynamicCache

from regard.checks import ArgumentError
from regard.inspect import capture
from regard.models import MemoryMosaicConfig, MemoryMosaicForCausalLM, count_parameters


def make(mixers="biweight", **fields):
    """Two blocks of three heads of 8 channels."""
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    return any_make("memory-mosaic", mixers, torch.float32, **{**sizes, **fields})


FIXED = "epanechnikov*fixed(h=1)*cosine"


@pytest.mark.parametrize("width", [128, 384, 768])
def test_a_block_has_twelve_c_squared_parameters(width):
    """Of the released size 12 C^2 (9 of memories, 3 of projections) within 1 %."""
    sizes = {"vocab_size": 5, "hidden_size": width, "num_attention_heads": 4}
    two, three = (count_parameters(MemoryMosaicConfig(num_hidden_layers=n, **sizes)) for n in (2, 3))
    assert abs((three - two) / (12 * width**2) - 1) < 0.01
    assert MemoryMosaicConfig(**sizes).persistent_slots == {128: 448, 384: 1344, 768: 2688}[width]


def test_starting_values():
    """Those of the other parameters are in `test_memory_mosaic_differences.py`."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 400, "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 3}
    found = dict(MemoryMosaicForCausalLM(MemoryMosaicConfig(**sizes)).named_parameters())
    for name, want in {
        "model.embed_tokens.weight": 96**-0.5,
        "model.layers.1.persistent.out_proj.weight": (96 * 3) ** -0.5,
        "model.layers.1.persistent.slot_values": 32**-0.5,
    }.items():
        assert abs(found[name].std().item() / want - 1) < 0.05, name
    torch.testing.assert_close(found["model.layers.2.persistent.keys.rate"] * 10, torch.tensor([0.5, 2.75, 5.0]))
    mixes = torch.cat([found[name] for name in found if name.endswith("mix")])
    assert mixes.std() > 0.05
    assert ((mixes >= 0) & (mixes <= 1)).all()
    flat = {name for name, p in found.items() if p.dim() < 2}
    assert {n.rsplit(".", 1)[-1] for n in flat if "norm" not in n} == {"rate", "scale", "mix"}


def test_a_mosaic_learns_what_follows_what():
    """After `a b ... a` comes b, with other pairs of letters in every text. One block is enough: values look ahead."""
    torch.manual_seed(0)
    draws = torch.Generator().manual_seed(1)

    def batch(rows):
        keys = torch.stack([torch.randperm(8, generator=draws)[:4] for _ in range(rows)])
        values = torch.randint(8, 16, (rows, 4), generator=draws)
        line = torch.stack([keys, values], -1).flatten(1)
        asked = torch.randint(4, (rows, 1), generator=draws)
        return torch.cat([line, keys.gather(1, asked), values.gather(1, asked)], 1)

    for spec in ("softmax", "biweight"):
        model = MemoryMosaicForCausalLM(
            MemoryMosaicConfig(vocab_size=16, hidden_size=32, num_attention_heads=2, num_hidden_layers=1, mixers=spec)
        ).train()
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
    model, ids = make(["biweight", FIXED]), text(2, 8)
    with capture(model, weights=True) as seen:
        model(ids)
    assert list(seen.layers) == [0, 1]
    for rows in seen.layers.values():
        assert rows.support.shape == (2, 3, 8)
        assert rows.empty[:, :, 0].all()
        assert rows.weights.shape == (2, 3, 8, 8)


def test_a_call_does_not_change_the_states_of_another_cache():
    """States are replaced, never written into: two continuations of one beginning."""
    model, ids = make(), text(1, 6)
    _, cache = in_chunks(model, ids, [6])
    held = [layer.contextual for layer in cache.layers]
    before = [state.keys.clone() for state in held]
    in_chunks(model, text(1, 3, seed=2), [1, 2], cache=cache)
    assert all(torch.equal(state.keys, kept) for state, kept in zip(held, before, strict=True))


def test_what_is_remembered():
    """Pairs of all tokens but the last, which waits; everything else does not grow."""
    model, ids = make(), text(2, 10)
    sizes = []
    for length in (3, 10):
        _, cache = in_chunks(model, ids[:, :length], [1] * length)
        layer = cache.layers[1]
        assert layer.contextual.keys.shape == layer.contextual.values.shape == (2, 3, length - 1, 8)
        pairs = 2 * layer.contextual.keys.numel() * 4
        sizes.append(layer.bytes - pairs)
    assert sizes[0] == sizes[1]


def test_tokens_are_not_taken_back():
    model, ids = make(), text(1, 6)
    with pytest.raises(ArgumentError, match="cannot be removed"):
        model.generate(ids, max_new_tokens=4, prompt_lookup_num_tokens=2)
    _, cache = in_chunks(model, ids, [6])
    with pytest.raises(ArgumentError, match="cannot be removed"):
        cache.crop(3)


def test_caches_of_other_models_are_refused():
    model = make()
    with pytest.raises(ArgumentError, match="without MemoryMosaicCacheLayer at layer 0"):
        model(text(1, 4), past_key_values=DynamicCache())
    with pytest.raises(ArgumentError, match="which the model updates itself"):
        model.model.new_cache().update(torch.zeros(1, 3, 1, 8), torch.zeros(1, 3, 1, 8), 0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mixers": "local-linear*"}, "Spec.parse"),
        ({"persistent": "linear"}, "normalised spec"),
        ({"persistent_slots": 0}, "persistent_slots"),
        ({"wiring": "ring"}, "'sequential', 'parallel'"),
        ({"num_attention_heads": 5}, "multiple"),
        ({"learned": ["width"]}, "width"),
        ({"leaky": "mean"}, "'sum', 'average'"),
        ({"presistent": "softmax"}, "Did you mean 'persistent'"),
        ({"key_eps": -1}, "key_eps"),
    ],
)
def test_bad_configurations(fields, words):
    with pytest.raises(ArgumentError, match=words):
        MemoryMosaicConfig(**{"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, **fields})
