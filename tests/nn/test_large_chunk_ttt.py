"""LaCT against its definition (lact_oracle.py), its cache, dtypes and errors. What every memory keeps is tested in
`tests/memory`, and what every mixer keeps (caches, padding, packed documents) in `tests/models`."""

import math
from itertools import accumulate, pairwise
from types import SimpleNamespace

import lact_oracle
import pytest
import torch
from dense_fast_weights import close, numbers
from lact_oracle import HF, WINDOW, B, C, D, H, T, angles, cache, inputs, layer, tokens, weights
from mistakes import error_of, refuses
from torch.autograd import grad

from regard.checks import debug
from regard.memory.large_chunk import OPTIMIZERS, large_chunk_ttt, orthogonal
from regard.nn import LargeChunkTTT
from regard.nn.memory.large_chunk_ttt import PRESETS, WindowState

everyone = pytest.mark.parametrize("optimizer", list(OPTIMIZERS))


@everyone
@pytest.mark.parametrize("chunk", [1, 4, 5, 30])
def test_reads_and_writes_by_autograd(optimizer, chunk):
    given, w = inputs(rows=2), weights()
    out, state = large_chunk_ttt(**given, weights=w, chunk_size=chunk, optimizer=optimizer)
    expected, learners = lact_oracle.expected_reads(given, w, optimizer, chunk)
    close(out, expected, 1e-9)
    for b in range(2):
        for h in range(HF):
            for name, x in zip(("gate", "up", "down"), learners[b][h].w, strict=True):
                close(getattr(state, name)[b, h], x, 1e-9)
    heads = zip(given["query"].unbind(2), *w, strict=True)
    still = torch.stack([lact_oracle.network(query, own) for query, *own in heads], 2)
    assert chunk > T or (out - still).abs().max() > 1e-2


@everyone
def test_gradients_reach_everything_through_the_writes(optimizer):
    given = {name: x.requires_grad_() for name, x in inputs(length=10, rows=1).items()}
    w = [x.requires_grad_() for x in weights()]
    probe = numbers(1, 10, HF, D, seed=30)
    leaves = [*(x for name, x in given.items() if name != "share" or "momentum" in optimizer), *w]
    out, _ = large_chunk_ttt(**given, weights=(w[0], w[1], w[2]), chunk_size=3, optimizer=optimizer)
    expected, _ = lact_oracle.expected_reads(given, (w[0], w[1], w[2]), optimizer, 3)
    for a, b in zip(grad((out * probe).sum(), leaves), grad((expected * probe).sum(), leaves), strict=True):
        close(a, b, 1e-7 * (1 + float(b.abs().max())))


def test_orthogonal_factor():
    for size in ((4, 7), (7, 4), (5, 5)):
        x = numbers(3, *size)
        close(orthogonal(x), torch.stack([lact_oracle.polar(part) for part in x]), 1e-9)
        large = torch.linalg.svdvals(x) > 0.005 * x.square().sum((-2, -1), keepdim=True)[..., 0].sqrt()
        assert ((torch.linalg.svdvals(orthogonal(x)) - 1).abs() < 0.12).sum() >= large.sum()
    x = torch.zeros(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert (orthogonal(x) == 0).all()
    assert grad(orthogonal(x).sum(), x)[0].isfinite().all()
    s = torch.logspace(math.log10(0.005), 0, 5001, dtype=torch.float64)
    for a, b, c in lact_oracle.STEPS:
        s = a * s + b * s**3 + c * s**5
    assert 0.97 < s.min() < s.max() < 1.12


def test_vmap_and_its_slopes():
    """Also beside padding and documents that are the same for all; a mask that vmap runs over is refused."""
    made, x = layer(), tokens(rows=3)[:, None]
    mask, ids = torch.arange(T)[None] >= 2, torch.arange(T)[None] // 7
    for how in ({}, {"attention_mask": mask}, {"segment_ids": ids}, {"attention_mask": mask, "segment_ids": ids}):
        read = lambda x: made(x, **how)[0]  # noqa: B023, E731
        close(torch.func.vmap(read)(x), torch.stack([read(row) for row in x]))
        loss = lambda x: read(x).square().sum()  # noqa: B023, E731
        leaf = x.clone().requires_grad_()
        close(torch.func.vmap(torch.func.grad(loss))(x), grad(sum(loss(row) for row in leaf), leaf)[0])
    run = torch.func.vmap(lambda x, mask: made(x, attention_mask=mask)[0])
    assert "nn.LargeChunkTTT: torch.vmap runs over mask" in error_of(run, x, mask.expand(3, 1, T))


VARIANTS = {
    "default": {},
    "sgd": {"optimizer": "sgd"},
    "muon": {"optimizer": "muon"},
    "plain turned": {"fast_rotary": False},
    "norms and biases": {"qk_norm": True, "bias": True},
    "wide": {"window": 100, "chunk_size": 7},
    "itself": {"window": 1},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_layer_by_hand(options):
    made, hidden = layer(**options), tokens(rows=2)
    close(made(hidden, angles())[0], lact_oracle.layer_by_hand(made, hidden, angles()), 1e-9)
    close(made(hidden)[0], lact_oracle.layer_by_hand(made, hidden, None), 1e-9)


def test_sizes_and_presets():
    made = LargeChunkTTT(768, 12)
    size = 4 * 768**2 + 3 * 768 * 192 + 4 * 768 + 5 * 4 * 769 + 192
    assert sum(x.numel() for x in made.parameters()) == size == 2_820_308
    assert (made.chunk_size, made.window, made.settings.optimizer) == (512, 2048, "momentum")
    sizes = [(preset["chunk_size"], preset["window"]) for preset in PRESETS.values()]
    assert sizes == [(512, 512), (512, 2048), (512, 4096), (2048, 2048)]
    assert LargeChunkTTT.from_preset("2048C+2048W", C, H, fast_heads=2).chunk_size == 2048
    rate = torch.nn.functional.softplus(torch.tensor(math.log(math.expm1(1e-3)), dtype=torch.float64))
    assert abs(float(rate) - 1e-3) < 1e-12


def test_long_stream_in_float32():
    made, hidden = layer(chunk_size=64, window=32).float(), tokens(600, rows=1).float()
    with torch.no_grad():
        made.rate_proj.bias.fill_(0.0)
        whole, kept, out = made(hidden)[0], cache(), []
        for first, last in pairwise(accumulate([1] * 70 + [63, 64, 65, 1, 200, 137], initial=0)):
            out.append(made(hidden[:, first:last], past_key_values=kept)[0])
    assert (torch.cat(out, 1) - whole).abs().max() < 1e-5


def test_window_holds_no_more_than_it_reaches():
    made, kept = layer(), cache()
    for _ in range(3):
        made(tokens(4), past_key_values=kept)
    window = kept.layers[0].window_state
    assert isinstance(window, WindowState)
    assert window.key.shape == (B, H, WINDOW - 1, C // H)
    assert window.tokens == kept.layers[0].fast_state.tokens == 12


def test_weights_of_the_attention():
    made, hidden = layer(), tokens()
    out, found = made(hidden, angles(), output_attentions=True)
    assert found.shape == (B, H, T, T)
    close(found.sum(-1), torch.ones(B, H, T, dtype=torch.float64))
    assert (found.tril(-WINDOW) == 0).all()
    close(out, made(hidden, angles())[0])


def test_a_token_that_is_not_finite_is_neither_seen_nor_learned():
    made, hidden = layer(), tokens()
    corrupted = hidden.clone()
    corrupted[1, 6, 3] = torch.nan
    leaf = corrupted.requires_grad_()
    kept = cache()
    out, _ = made(leaf, angles(), past_key_values=kept)
    assert out[1, 6].isnan().all()
    assert out.isnan().any(-1).sum() == 1
    assert kept.layers[0].fast_state.gate.isfinite().all()
    close(out[[0, 2]], made(hidden, angles())[0][[0, 2]])
    others = out.masked_fill(out.isnan(), 0)
    assert grad(others.sum(), leaf)[0].nan_to_num(7.0, 7.0, 7.0)[0].abs().max() < 1e3
    with debug():
        refuses("NaN", made, leaf)


def test_a_mask_has_a_column_for_every_token_so_far():
    made, hidden, kept = layer(), tokens(), cache()
    batch, length, _ = hidden.shape
    made(hidden, past_key_values=kept)
    for seen, held in ((length, None), (2 * length, kept)):
        wrong = torch.ones(batch, seen + 1, dtype=torch.bool)
        words = rf"attention_mask .* expected \[{batch}, {seen}\]"
        refuses(words, made, hidden, attention_mask=wrong, past_key_values=held)
        made(hidden, attention_mask=wrong[:, 1:], past_key_values=held)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fast_weights_are_wide_whatever_the_layer_is(dtype):
    made, hidden, kept = layer().to(dtype), tokens().to(dtype), cache()
    out = made(hidden)[0]
    assert out.dtype == dtype
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.float32):
        assert all(made(hidden, past_key_values=kept)[0].isfinite().all() for _ in range(2))
    assert kept.layers[0].fast_state.gate.dtype == torch.float32
    expected = made.double()(hidden.double())[0]
    assert (out.double() - expected).abs().max() < 0.1 * expected.abs().max()


def test_hooks_see_and_may_replace():
    made, hidden, seen = layer(), tokens(), {}
    for name in ("q", "k", "v", "read", "out"):
        listen = lambda module, given, out, name=name: seen.setdefault(name, out.shape) and None  # noqa: E731
        made.get_submodule(f"hook_{name}").register_forward_hook(listen)
    out, _ = made(hidden)
    assert seen["q"] == seen["k"] == seen["v"] == (B, H, T, C // H)
    assert seen["read"] == (B, T, HF, D)
    assert seen["out"] == (B, T, C)
    made.hook_read.register_forward_hook(lambda module, given, out: out * 0)
    assert (made(hidden)[0] - out).abs().max() > 1e-3


def called(rows: int = B, **options) -> SimpleNamespace:
    """The fast weights that a layer has left, in a cache without its window."""
    kept = cache()
    layer(**options)(tokens(rows=rows), past_key_values=kept)
    kept.layers[0].window_state = None
    return kept


MISTAKES = {
    "unknown optimizer='moun'": lambda: layer(optimizer="moun"),
    "hidden_size 12 is not a multiple of 5 fast_heads": lambda: layer(fast_heads=5),
    "hidden_size 12 is not a multiple of 5 heads (num_heads); change one.": lambda: LargeChunkTTT(12, 5, fast_heads=2),
    "unknown preset='512C'": lambda: LargeChunkTTT.from_preset("512C", C, H),
    "give segment_ids for packed documents": lambda: layer()(tokens(), None, torch.ones(B, 1, T, T, dtype=torch.bool)),
    "a layer without layer_idx": lambda: layer(layer_idx=None)(tokens(), past_key_values=cache()),
    "no place for window and fast weights": lambda: layer()(tokens(), None, None, SimpleNamespace(layers=[object()])),
    "past_key_values holds a NoneType": lambda: layer()(tokens(), None, None, SimpleNamespace(layers=[])),
    "state has 2 rows": lambda: layer()(tokens(), past_key_values=called(2)),
    "state holds gate [3, 2, 12, 6]": lambda: layer()(tokens(), past_key_values=called(inner=2.0)),
    "state holds gate_step [3, 2, 0, 0]": lambda: layer()(tokens(), past_key_values=called(optimizer="sgd")),
    "momentum, which needs share": lambda: large_chunk_ttt(**{**inputs(), "share": None}, weights=weights()),
    "weights down are [2, 9, 6]": lambda: large_chunk_ttt(**inputs(), weights=(*weights()[:2], weights()[0])),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_named(message):
    assert message in error_of(MISTAKES[message])
