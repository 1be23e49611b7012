"""Packed documents in every variant of Memory Mosaics and ICLM, and in the parts of ICLM's logits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from any_model import make
from packed import alone, documents, packed_rows

from regard import presets
from regard.checks import ArgumentError
from regard.nn import FunctionalGradient
from regard.nn.functional_gradient import Pairs

MOSAIC = {
    **{f"preset-{name}": {"mixers": name} for name in presets()},
    "local-linear": {"mixers": "local-linear"},
    "distance": {"mixers": "epanechnikov*fixed(h=1)*cosine"},
    "persistent": {"persistent": "biweight", "persistent_copies": 2},
    "average": {"leaky": "average", "key_eps": 1e-6},
    "convex": {"look_ahead": "convex", "bias": True},
    "parallel": {"wiring": "parallel"},
    "shared": {"wiring": "parallel", "persistent_keys": "shared", "mixers": ["biweight", "softmax"] * 2},
    "nano": {"look_ahead": "convex", "key_eps": 1e-10, "scale_logits": False, "initializer": "gpt2"},
    "library": {"look_ahead": "convex", "leaky": "average", "persistent_copies": 2},
}
ICLM = {
    "f-none": {"f_mlp": "none"},
    "side-wv": {"f_mlp": "side", "variant": "wv"},
    "slice-bos": {"f_mlp": "none", "variant": "slice", "start": "bos"},
    "steps-bos": {"variant": "wv", "start": "bos", "expectation": "exact", "gd_steps": 2},
    "steps": {"expectation": "exact", "gd_steps": 2, "phi_mixers": "relumax"},
    "linear-pre": {"f_mlp": "none", "mixers": "linear", "expectation": "mean", "f_reads": "pre"},
    "sum": {"mixers": "elu", "f_average": False, "f_rope": False},
    "local-linear": {"f_mlp": "none", "mixers": "local-linear", "norm_values": True, "tie_word_embeddings": False},
    "two-tables": {"mixers": "biweight", "tie_phi": False, "d_phi": 32, "f_attention_heads": 4},
}
CASES = {
    **{f"mosaic-{name}": ("memory-mosaic", fields) for name, fields in MOSAIC.items()},
    **{f"iclm-{name}": ("iclm", fields) for name, fields in ICLM.items()},
}
HOLES = torch.ones(2, 19, dtype=torch.bool)
HOLES[:, [0, 1, 7, 12, 13, 18]] = False
"""Padding before, between, inside and after the documents of rows of 13 tokens."""


def gradients(model, logits):
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5), dtype=logits.dtype)
    return torch.autograd.grad((logits * weights).sum(), list(model.parameters()), allow_unused=True)


def spread(x, filler):
    """x [2, 13] in the places that `HOLES` leaves."""
    return x.new_full(HOLES.shape, filler).masked_scatter(HOLES, x)


@pytest.mark.parametrize("case", CASES)
def test_each_document_gives_what_it_gives_alone(case):
    name, fields = CASES[case]
    model, rows = make(name, **fields), documents()
    tokens, ids = packed_rows(rows)
    expected = alone(lambda text: model(text).logits, rows)
    packed = model(tokens, segment_ids=ids).logits
    padded = model(spread(tokens, 3), attention_mask=HOLES, segment_ids=spread(ids, 9)).logits[HOLES].view_as(packed)
    wanted = gradients(model, expected)
    for found in (packed, padded):
        torch.testing.assert_close(found, expected, atol=1e-8, rtol=1e-8)
        for got, want in zip(gradients(model, found), wanted, strict=True):
            assert (got is None) == (want is None)
            if want is not None:
                torch.testing.assert_close(got, want, atol=1e-6 * float(want.abs().max().clamp_min(1)), rtol=1e-6)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("iclm")])
def test_contributions_of_packed_rows(case):
    """Tokens of other documents add nothing, and those of one's own what they add where it is alone."""
    name, fields = CASES[case]
    model, rows = make(name, **fields), documents()
    tokens, ids = packed_rows(rows)
    some = torch.tensor([3, 11, 20])
    bound = {"atol": 1e-8, "rtol": 1e-8}
    found = model.contributions(tokens, segment_ids=ids)
    logits = model(tokens, segment_ids=ids).logits
    torch.testing.assert_close(found.logits(), logits, **bound)
    rest = found.mlp(some).sum(2) + found.bias(some)
    torch.testing.assert_close(found.per_token(some).sum(2) + rest, logits[..., some], **bound)
    torch.testing.assert_close(found.parts(some).sum((2, 3, 4)) + rest, logits[..., some], **bound)
    apart = ids[:, :, None] != ids[:, None]
    assert torch.equal(found.per_token(some)[apart], torch.zeros(int(apart.sum()), 3, dtype=torch.float64))
    for row, texts in enumerate(rows):
        at = 0
        for text in texts:
            span = slice(at, at + len(text))
            own = model.contributions(text[None])
            torch.testing.assert_close(found.parts(some)[row, span, span], own.parts(some)[0], **bound)
            torch.testing.assert_close(found.mlp(some)[row, span], own.mlp(some)[0], **bound)
            at += len(text)
    few = model.contributions(tokens, positions=[-1, 6], segment_ids=ids)
    torch.testing.assert_close(few.per_token(some), found.per_token(some)[:, [12, 6]], **bound)
    hidden = model.contributions(spread(tokens, 3), HOLES, segment_ids=spread(ids, 9))
    torch.testing.assert_close(hidden.logits()[HOLES].view_as(logits), logits, **bound)
    inner = hidden.per_token(some)[HOLES].view(2, 13, 19, 3)
    torch.testing.assert_close(
        torch.stack([inner[row][:, HOLES[row]] for row in range(2)]), found.per_token(some), **bound
    )


@pytest.mark.parametrize("spec", ["softmax", "biweight", "linear", "local-linear"])
def test_the_layer_of_functional_gradients(spec):
    """The weights of packed rows are those of each document alone; with a cache documents are refused."""
    torch.manual_seed(0)
    layer = FunctionalGradient(16, 8, 2, spec=spec).double()
    ids = torch.tensor([[0] * 5 + [1] + [2] * 6])
    pairs = Pairs.of(torch.ones_like(ids, dtype=torch.bool), 12, ids)
    covariates, values = torch.randn(1, 12, 16).double(), torch.randn(1, 11, 8).double()
    out, _ = layer(covariates, values, pairs=pairs)
    shown, weights = layer(covariates, values, pairs=pairs, output_attentions=True)
    torch.testing.assert_close(shown, out)
    whole = torch.zeros_like(weights)
    for begin, end in ((0, 5), (5, 6), (6, 12)):
        alone_, own = layer(covariates[:, begin:end], values[:, begin : end - 1], output_attentions=True)
        torch.testing.assert_close(out[:, begin:end], alone_)
        whole[:, :, begin : end - 1, begin : end - 1] = own
    torch.testing.assert_close(weights, whole)
    with pytest.raises(ArgumentError, match="a cache was given"):
        layer(covariates, values, pairs=pairs, cache=SimpleNamespace(pending=print, extend=print))
    with pytest.raises(ArgumentError, match="a cache holds one document"):
        Pairs.of(torch.ones(1, 14, dtype=torch.bool), 12, ids)
