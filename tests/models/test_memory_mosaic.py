"""The Memory Mosaic as a language model: sizes, starting values, learning, what its cache holds; and released programs.

The latter have state dicts with names and shapes of their own. What those programs compute is written out densely in
float64, with every token's pairs in a T x T matrix.

Shapes: V vocabulary, C model width, H heads, D = C / H, S slots, P copies of the slots.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from any_model import in_chunks, text
from any_model import make as any_make
from mistakes import refuses
from transformers import DynamicCache

from regard.inspect import capture
from regard.models import MemoryMosaicConfig, count_parameters, from_released


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


def test_diagnostics_of_every_block():
    model, ids = make(["biweight", FIXED]), text(2, 8)
    with capture(model, weights=True) as seen:
        model(ids)
    assert list(seen.layers) == [0, 1]
    for rows in seen.layers.values():
        assert rows.support.shape == (2, 3, 8)
        assert rows.empty[:, :, 0].all()
        assert rows.weights.shape == (2, 3, 8, 8)


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


def test_what_a_cache_cannot_do():
    model, ids = make(), text(1, 6)
    refuses("cannot be removed", in_chunks(model, ids, [6])[1].crop, 3)
    refuses("without MemoryMosaicCacheLayer at layer 0", model, ids, past_key_values=DynamicCache())
    refuses("which the model updates itself", model.model.new_cache().update, *torch.zeros(2, 1, 3, 1, 8), 0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mixers": "local-linear*"}, "Config: mixers: expected a name but found the end"),
        ({"persistent": "linear"}, "normalised spec"),
        ({"persistent_slots": 0}, "persistent_slots"),
        ({"wiring": "ring"}, "'sequential', 'parallel'"),
        ({"num_attention_heads": 5}, r"multiple of 5 heads \(num_attention_heads\); change one\.$"),
        ({"learned": ["width"]}, "width"),
        ({"leaky": "mean"}, "'sum', 'average'"),
        ({"presistent": "softmax"}, "Did you mean 'persistent'"),
        ({"key_eps": -1}, "key_eps"),
    ],
)
def test_bad_configurations(fields, words):
    refuses(words, MemoryMosaicConfig, **{"hidden_size": 24, "num_attention_heads": 3, **fields})


V, C, H, S, BLOCKS = 19, 12, 3, 10, 2
D = C // H
MATRICES = {
    "nano": ["attn.k_featurizer.W_k", "attn.v_featurizer.W_v", "attn.c_proj", "mlp.k_featurizer.W_k", "mlp.c_proj"],
    "library": ["attn.k_featurizer.conv", "attn.v_featurizer.linear", "attn.c_proj", "pmem.k_featurizer.conv",
                "pmem.c_proj"],
}  # fmt: skip
NUMBERS = {
    "nano": ["attn.k_featurizer.leaky_avg.leaky_key_beta", "attn.k_featurizer.key_scale", "attn.v_featurizer.coef",
             "attn.v_featurizer.val_scale", "mlp.k_featurizer.leaky_avg.leaky_key_beta", "mlp.k_featurizer.key_scale",
             "mlp.out_scale"],
    "library": ["attn.leaky_key_beta", "attn.kernel_beta", "attn.v_featurizer.coef", "attn.value_beta",
                "pmem.leaky_key_beta", "pmem.kernel_beta", "pmem.value_beta"],
}  # fmt: skip


def released(program, copies=1, bias=False, seed=0):
    draws = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=draws, dtype=torch.float64)  # noqa: E731
    nano = program == "nano"
    embedding = normal(V, C) / C**0.5
    names = ("mosaic.wte.weight", "lm_head.weight", "mosaic.ln_f") if nano else ("emb.weight", "head.weight", "ln_out")
    found = {names[0]: embedding, names[1]: embedding}
    norms, matrices = [names[2]], []
    for i in range(BLOCKS):
        at = f"mosaic.h.{i}." if nano else f"blocks.{i}."
        norms += [at + ("ln_1" if nano else "ln1"), at + ("ln_2" if nano else "ln2")]
        matrices += [at + name for name in MATRICES[program]]
        for j, name in enumerate(NUMBERS[program]):
            start = (0.3, 0.1, 0.5, -0.05, 0.3, 0.1, -0.05)[j]
            found[at + name] = (start + 0.03 * normal(H)).view((1, H, 1, 1) if nano else (H,))
        if nano:
            found |= {at + f"mlp.P_{x}": normal(copies, 1, H, S, D) / D**0.5 for x in "kv"}
            found[at + "attn.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.bool)
            found[at + "attn.k_featurizer.leaky_avg.coef"] = torch.zeros(8, 8)
            found[at + "mlp.k_featurizer.leaky_avg.coef"] = torch.zeros(8, 8)
        else:
            parts = [(x, c) for x in "kv" for c in range(copies)]
            found |= {at + f"pmem.pmem.M_{x}{c}": normal(1, H, S, D) / D**0.5 for x, c in parts}
    for name in matrices:
        found[name + ".weight"] = normal(C, C, *([1] if "conv" in name else [])) / C**0.5
    for name in norms:
        found[name + ".weight"] = 1 + 0.1 * normal(C)
    if bias:
        found |= {name + ".bias": 0.1 * normal(C) for name in [*norms, *matrices]}
    return found


def computed(w, program, ids):
    nano, tokens = program == "nano", len(ids)
    strict = torch.ones(tokens, tokens, dtype=torch.bool).tril(-1)
    heads = lambda x: x.view(tokens, H, D).transpose(0, 1)  # noqa: E731
    head = lambda name: w[name].reshape(H, 1, 1)  # noqa: E731

    def project(x, name):
        return x @ w[name + ".weight"].reshape(C, C).T + w.get(name + ".bias", 0)

    def norm(x, name):
        return F.layer_norm(x, (C,), w[name + ".weight"], w.get(name + ".bias"), 1e-5)

    def keys(x, matrix, rate):
        at = torch.arange(tokens, dtype=torch.float64)
        decay = torch.exp(-(10 * head(rate)).abs() * (at[:, None] - at).clamp(min=0)).tril()
        if not nano:
            decay = decay * (1 - torch.exp(-(10 * head(rate)).abs()))
        bar = decay @ heads(project(x, matrix))
        return bar / (bar.norm(dim=-1, keepdim=True) + (1e-10 if nano else 0))

    def contextual(x, at):
        matrix, values, last = (at + name for name in MATRICES[program][:3])
        rate, scale, coef, length = (at + name for name in NUMBERS[program][:4])
        k = keys(x, matrix, rate) * (10 * head(scale)).clamp(max=math.log(65535) if nano else 5).exp()
        v = heads(project(x, values))
        v = head(coef) * v + (1 - head(coef)) * F.pad(v, (0, 0, -1, 1))
        v = v / v.norm(dim=-1, keepdim=True) * (10 * head(length)).exp()
        p = (k @ k.transpose(-1, -2)).masked_fill(~strict, -torch.inf).softmax(-1).nan_to_num()
        return project((p @ v).transpose(0, 1).reshape(tokens, C), last)

    def persistent(x, at):
        matrix, last = (at + name for name in MATRICES[program][3:])
        rate, scale, length = (at + name for name in NUMBERS[program][4:])
        # nano clamps log beta^2, the Library log beta at 5, so that log beta^2 ends at 10
        q = keys(x, matrix, rate) * (20 * head(scale)).clamp(max=math.log(65535) if nano else 10).exp()
        if nano:
            slots = list(zip(w[at + "mlp.P_k"][:, 0], w[at + "mlp.P_v"][:, 0], strict=True))
        else:
            count = sum(name.startswith(at + "pmem.pmem.M_k") for name in w)
            slots = [(w[at + f"pmem.pmem.M_k{c}"][0], w[at + f"pmem.pmem.M_v{c}"][0]) for c in range(count)]
        read = sum((q @ k.transpose(-1, -2)).softmax(-1) @ v for k, v in slots) / len(slots)
        return project((read * (10 * head(length)).exp()).transpose(0, 1).reshape(tokens, C), last)

    embedding = w["mosaic.wte.weight" if nano else "emb.weight"]
    x = embedding[ids]
    for i in range(BLOCKS):
        at = f"mosaic.h.{i}." if nano else f"blocks.{i}."
        x = x + contextual(norm(x, at + ("ln_1" if nano else "ln1")), at)
        x = x + persistent(norm(x, at + ("ln_2" if nano else "ln2")), at)
    logits = norm(x, "mosaic.ln_f" if nano else "ln_out") @ embedding.T
    return logits if nano else logits / math.sqrt(C)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("program", ["nano", "library"])
def test_computes_what_the_program_computes(program, copies, bias):
    weights = released(program, copies, bias)
    model = from_released({name: x.clone() for name, x in weights.items()}).double()
    for row in torch.randint(V, (2, 11), generator=torch.Generator().manual_seed(1)):
        # the model holds float32 roundings of these weights
        rounded = {name: x.float().double() for name, x in weights.items()}
        torch.testing.assert_close(model(row[None]).logits[0], computed(rounded, program, row), rtol=0, atol=1e-9)


@pytest.mark.parametrize("contextual", [0.4, 0.6, 1.2])
@pytest.mark.parametrize("persistent", [0.2, 0.3, 0.4, 0.6, 1.2])
@pytest.mark.parametrize("program", ["nano", "library"])
def test_large_scales_end_where_they_end_there(program, contextual, persistent):
    """nano: log beta of the contextual and log beta^2 of the persistent memory at log 65535, where its keys would
    overflow in float16; the Library: log beta of both at 5."""
    weights = released(program)
    for i in range(BLOCKS):
        at = f"mosaic.h.{i}." if program == "nano" else f"blocks.{i}."
        for number, scale in ((1, contextual), (5, persistent)):
            name = at + NUMBERS[program][number]
            weights[name] = torch.full_like(weights[name], scale)
    # runs of one token have keys so close to one another that even these scales do not single one out; times 4e9 the
    # rounding of a cosine is 1e-6 in float64, too
    row = torch.tensor([1, 2, 2, 2, 3, 2, 2, 2, 2, 4, 2, 2, 2, 5, 2, 2, 2, 2])
    got = from_released(weights).double()(row[None]).logits[0]
    rounded = {name: x.float().double() for name, x in weights.items()}
    torch.testing.assert_close(got, computed(rounded, program, row), rtol=0, atol=1e-6)


@torch.no_grad()
def test_scales_beyond_float16_are_finite_in_a_model_of_float16():
    weights = released("nano")
    for i in range(BLOCKS):
        weights[f"mosaic.h.{i}.attn.k_featurizer.key_scale"] = torch.full((1, H, 1, 1), 0.7)  # beta^2 = e^14
    row = torch.arange(9)[None]
    expected = from_released(weights)(row).logits
    assert from_released(weights, mixers="biweight").config.mixers == ["biweight"] * BLOCKS
    torch.testing.assert_close(from_released(weights).half()(row).logits.float(), expected, rtol=0, atol=0.3)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("mosaic.h.1.mlp.c_proj.weight", None, "mlp.c_proj.weight is missing"),
        ("mosaic.h.0.ln_1.weight", torch.ones(C + 1), r"would be \[13\], expected \[12\]"),
        ("mosaic.h.0.ln_1.weight", torch.full((C,), torch.nan), "NaN or infinite"),
        ("mosaic.h.7.ln_1.weight", torch.ones(C), "unknown names mosaic.h.7"),
        ("lm_head.weight", torch.ones(V, C), "tie_word_embeddings=False"),
        ("mosaic.wte.weight", None, "expected names as"),
    ],
)
def test_bad_state_dicts(name, tensor, message):
    weights = {**released("nano"), name: tensor}
    refuses(message, from_released, {name: tensor for name, tensor in weights.items() if tensor is not None})
