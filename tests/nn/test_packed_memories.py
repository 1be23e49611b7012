"""Packed documents in the memories of Memory Mosaics: each as if it were alone, in values and gradients."""

from __future__ import annotations

import pytest
import torch
from packed import runs

from regard import presets
from regard.checks import ArgumentError
from regard.inspect import capture
from regard.nn import ContextualMemory, PersistentMemory

C, H, T = 24, 3, 19
IDS = torch.tensor([[3] * 6 + [1] * 1 + [3] * 8 + [0] * 4, [0] * 1 + [1] * 2 + [2] * 16])
"""An id that comes back begins another document; documents of one token; edges that differ between rows."""
MASK = torch.ones(2, T, dtype=torch.bool)
MASK[0, [0, 1, 4, 6, 7, 8, 14, 18]] = False  # at the start of documents, inside, at their end, and a whole document
MASK[1, [0, 3, 10]] = False
EVERY = [
    *presets(),
    "local-linear",
    "epanechnikov*fixed(h=1)*cosine",
    "biweight*anchored",
    "gaussian*linear(solver=cg)",
]


def contextual(spec="softmax", seed=0, **options):
    torch.manual_seed(seed)
    return ContextualMemory(C, H, spec=spec, **options).double()


def tokens(seed=1):
    return torch.randn(2, T, C, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def compare(layer, run, mask, atol=1e-9):
    """`run(x, mask, ids)` of packed rows against every document by itself: values and all gradients."""
    x = tokens().requires_grad_()
    weigh = tokens(seed=2)
    real = torch.ones(2, T, dtype=torch.bool) if mask is None else mask
    packed = run(x, mask, IDS)[real]
    alone = torch.zeros(2, T, C, dtype=torch.float64)
    for row, span in runs(IDS):
        alone[row, span] = run(x[row, span][None], None if mask is None else mask[row, span][None], None)[0]
    torch.testing.assert_close(packed, alone[real], rtol=0, atol=atol)
    wanted = [x, *layer.parameters()]
    grads = [
        torch.autograd.grad((out * weigh[real]).sum(), wanted, allow_unused=True, materialize_grads=True)
        for out in (packed, alone[real])
    ]
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-7, atol=100 * atol)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("spec", EVERY)
def test_contextual_documents_are_alone(spec, masked):
    layer = contextual(spec)
    compare(layer, lambda x, mask, ids: layer(x, mask, segment_ids=ids)[0], MASK if masked else None)


@pytest.mark.parametrize("options", [{"look_ahead": "convex", "average": True, "key_eps": 1e-6, "bias": True}])
def test_contextual_options(options):
    layer = contextual("biweight", **options)
    compare(layer, lambda x, mask, ids: layer(x, mask, segment_ids=ids)[0], MASK)


@pytest.mark.parametrize("spec", ["softmax", "biweight"])
@pytest.mark.parametrize("copies", [1, 2])
def test_persistent_documents_are_alone(spec, copies):
    torch.manual_seed(0)
    layer = PersistentMemory(C, H, 7, spec=spec, copies=copies).double()
    for mask in (None, MASK):
        compare(layer, lambda x, mask, ids: layer(x, mask, segment_ids=ids)[0], mask)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("spec", ["softmax", "biweight", "linear", "local-linear"])
def test_the_dense_weights(spec, masked):
    """Nothing of another document has weight, weights times values are the output, and the hook may change them."""
    layer, x, mask = contextual(spec), tokens(), MASK if masked else None
    out, _, _ = layer(x, mask, segment_ids=IDS)
    with capture(layer) as seen:
        shown, _, weights = layer(x, mask, output_attentions=True, segment_ids=IDS)
    real = MASK if masked else torch.ones_like(MASK)
    assert weights.shape == (2, H, T, T)
    torch.testing.assert_close(shown[real], out[real])
    together = (IDS[:, :, None] == IDS[:, None]).double()
    for row, span in runs(IDS):
        together[row, span] *= torch.zeros(T).index_fill(0, torch.arange(T)[span], 1)
        _, _, alone = layer(x[row, span][None], None if mask is None else mask[row, span][None], output_attentions=True)
        assert alone.shape[2:] == (span.stop - span.start,) * 2
        rows = real[row, span]
        torch.testing.assert_close(weights[row, :, span, span][:, rows], alone[0][:, rows], rtol=0, atol=1e-9)
    assert torch.equal(weights, weights * together[:, None])
    assert seen
    layer.hook_pattern.register_forward_hook(lambda _module, _args, found: found * 0.5)
    half, _, _ = layer(x, mask, segment_ids=IDS)
    torch.testing.assert_close(half[real], 0.5 * out[real])


@pytest.mark.parametrize("spec", ["softmax", "biweight", "normrelu", "topk-uniform", "local-linear"])
def test_no_bit_and_no_nan_crosses_an_edge(spec):
    """Other numbers, NaN too, in one document: no bit of the others changes, and no gradient of theirs."""
    layer = contextual(spec).float()
    x = tokens().float()
    spans = list(runs(IDS))
    keep = torch.ones(2, T, dtype=torch.bool)
    row, span = spans[2]
    keep[row, span] = False
    results = []
    for junk in (0.0, 7.0, torch.nan):
        changed = torch.where(keep[..., None], x, x + junk).requires_grad_()
        out = layer(changed, segment_ids=IDS)[0][keep]
        (grad,) = torch.autograd.grad(out.square().sum(), changed)
        if junk == junk:  # what is NaN itself has no gradient to speak of
            assert torch.equal(grad[~keep], torch.zeros_like(grad[~keep]))
        results.append((out, grad[keep]))
    for out, grad in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(grad, results[0][1])


def test_a_row_of_ids_serves_the_batch():
    layer, x = contextual("biweight"), tokens()
    both = layer(x, segment_ids=IDS[:1].expand(2, -1))[0]
    torch.testing.assert_close(layer(x, segment_ids=IDS[:1])[0], both)
    torch.testing.assert_close(
        layer(x, MASK, segment_ids=IDS[:1])[0], layer(x, MASK, segment_ids=IDS[:1].expand(2, -1))[0]
    )


def test_bad_arguments():
    layer, x = contextual(), tokens()
    _, state, _ = layer(x, remember=True)
    for change in ({"state": state}, {"remember": True}):
        with pytest.raises(ArgumentError, match="segment_ids were given with a state"):
            layer(x, segment_ids=IDS, **change)
    with pytest.raises(ArgumentError, match="segment_ids has shape"):
        layer(x, segment_ids=IDS[:, 1:])
    with pytest.raises(ArgumentError, match="expected integers"):
        layer(x, segment_ids=IDS.double())
