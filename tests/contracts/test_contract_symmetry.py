"""What a call may not depend on: batching, the order of keys, how a sequence is cut, strides, shared heads."""

from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

import regard

from .cases import (
    REPRESENTATIVES,
    SPECS,
    Data,
    attend,
    close,
    draw,
    few_first,
    few_pairs_first,
    gradients,
    learned,
    like,
    masks,
    named,
    outputs,
    same,
)


def _slice(call: dict[str, Any], b: int, h: int) -> dict[str, Any]:
    """The arguments of one batch element and head."""
    out = dict(call)
    mask = call.get("attn_mask")
    if mask is not None and mask.dim() == 4:
        out["attn_mask"] = mask[b : b + 1, h : h + 1] if mask.shape[1] > 1 else mask[b : b + 1]
    if isinstance(call.get("query_offset"), Tensor):
        out["query_offset"] = call["query_offset"][b : b + 1]
    return out


@few_pairs_first
def test_a_batch_is_a_loop(label: str, impl: str) -> None:
    """Each (batch element, head) alone gives the same rows."""
    data = draw(6, 9, batch=3)
    for how, call, whole in outputs(label, impl, data, ("causal", "pairs, strict", "offsets, window", "padding")):
        for b, h in product(range(3), range(2)):
            one = data.map(lambda x: x[b : b + 1, h : h + 1])  # noqa: B023
            close(attend(SPECS[label], impl, one, **_slice(call, b, h)), whole[b : b + 1, h : h + 1], 1e-11, how)


@few_pairs_first
def test_order_of_keys_does_not_matter(label: str, impl: str) -> None:
    """Keys, values and mask permuted together: the same output and permuted gradients. Queries permuted:
    permuted rows. Sparse rules without ties, as normal numbers have none."""
    if SPECS[label].similarity.name in ("relu", "relu2"):  # zeros tie: the lowest index is meant to win
        assert SPECS[label].bandwidth.name != "nearest"
    data = draw(6, 9).leaves()
    mask = masks(*data.sizes)["pairs"]["attn_mask"]
    out = attend(SPECS[label], impl, data, attn_mask=mask)
    if out is None:  # takes a mask over keys alone
        mask = masks(*data.sizes)["padding"]["attn_mask"].expand(-1, -1, 6, -1)
        out = attend(SPECS[label], impl, data, attn_mask=mask[:, :, :1])
    order = torch.randperm(9, generator=torch.Generator().manual_seed(5))
    rows = torch.randperm(6, generator=torch.Generator().manual_seed(6))
    other = Data(data.q[:, :, rows], data.k[:, :, order], data.v[:, :, order]).leaves()
    moved = mask[:, :, rows][..., order]
    again = attend(SPECS[label], impl, other, attn_mask=moved)
    again = attend(SPECS[label], impl, other, attn_mask=moved[:, :, :1]) if again is None else again
    close(again, out[:, :, rows], 1e-11)
    before = gradients(out, named(data))
    after = gradients(again, named(other), weight=like(out)[:, :, rows])
    for name, index in (("query", rows), ("key", order), ("value", order)):
        close(after[name], before[name][:, :, index], 1e-9, name)


ENDS = {"steps": list(range(1, 17)), "chunks": [5, 6, 13, 16]}


@pytest.mark.parametrize(
    ("label", "impl"),
    few_first([*((label, "auto") for label in SPECS), *((label, "reference") for label in REPRESENTATIVES)]),
)
@pytest.mark.parametrize("order", ["is_causal", "exclude_self", "window"])
def test_prefill_is_chunks_is_steps(label: str, impl: str, order: str) -> None:
    """Queries that come in pieces, each with the keys so far and no offset given: float32, 1e-5."""
    call: dict[str, Any] = {"is_causal": True, "window": 5} if order == "window" else {order: True}
    spec, data = SPECS[label], draw(16, dtype=torch.float32, batch=1)
    # Signed weights over their sum multiply rounding by up to 1/GUARD, the documented limit.
    tolerance = 1e-2 if spec.normalise and not spec.weighting.nonnegative else 1e-5
    whole = attend(spec, impl, data, **call)
    for cut, ends in ENDS.items():
        parts = [
            attend(spec, impl, Data(data.q[:, :, start:end], data.k[:, :, :end], data.v[:, :, :end]), **call)
            for start, end in pairwise([0, *ends])
        ]
        close(torch.cat(parts, 2), whole, tolerance, cut)


@few_pairs_first
def test_strides_do_not_matter(label: str, impl: str) -> None:
    """Views with transposed axes, strided features, broadcast (stride 0) batches, and gradients arriving as
    expanded or transposed tensors."""
    plain = draw(6, 9, batch=2)
    plain = plain.with_(v=plain.v[:1].expand_as(plain.v))
    padded = draw(6, 9, batch=2, dim=6, value_dim=4)
    padded.q[..., ::2], padded.k[..., ::2], padded.v[..., ::2] = plain.tensors
    views = {
        "transposed": plain.map(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
        "features first": plain.map(lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)),
        "strided": padded.map(lambda x: x[..., ::2]),
        "broadcast": plain.with_(v=plain.v[:1].clone().expand_as(plain.v)),
    }
    call = masks(*plain.sizes)["padding, causal"]
    mask = call["attn_mask"].transpose(0, 3).contiguous().transpose(0, 3)
    leaves = plain.map(lambda x: x.contiguous()).leaves()
    out = attend(SPECS[label], impl, leaves, **call)
    expected = gradients(out, named(leaves))
    for what, view in views.items():
        assert not (view.q.is_contiguous() and view.v.is_contiguous()), what
        view = view.map(lambda x: x.detach().requires_grad_())
        again = attend(SPECS[label], impl, view, **{**call, "attn_mask": mask})
        close(again, out, 1e-12, what)
        turned = like(out).transpose(1, 3).contiguous().transpose(1, 3)
        for name, grad in gradients(again, named(view), weight=turned).items():
            close(grad, expected[name], 1e-11, f"{what}: {name}")
    out = attend(SPECS[label], impl, leaves, **call)
    dense = gradients(out, named(leaves), weight=torch.ones_like(out), retain_graph=True)
    expanded = gradients(out, named(leaves), weight=torch.ones(1, dtype=out.dtype).expand_as(out))
    for name in dense:
        same(expanded[name], dense[name], name)


@few_pairs_first
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads_are_repeated_heads(label: str, impl: str, kv_heads: int) -> None:
    """Output, and gradients summed over the heads of a group."""
    data = draw(6, 9, heads=4, kv_heads=kv_heads).leaves()
    params, scale = learned(SPECS[label], data)
    ways = ("pairs, strict", "padding, causal")  # an implementation may have no masks of pairs
    _, call, out = next(outputs(label, impl, data, ways, scale=scale, params=params, enable_gqa=True))
    grouped = gradients(out, named(data, params, scale))
    k, v = (x.repeat_interleave(4 // kv_heads, 1) for x in (data.k, data.v))
    repeated = attend(SPECS[label], impl, Data(data.q, k, v), **{**call, "enable_gqa": False})
    close(out, repeated, 1e-12)
    expected = gradients(repeated, named(data, params, scale))
    for name, grad in grouped.items():
        close(grad, expected[name], 1e-11, name)


@pytest.mark.parametrize("label", REPRESENTATIVES)
def test_numbers_per_head_are_numbers_per_row(label: str) -> None:
    """A parameter as a number, as [H, 1] and as [B, H, Tq] is one parameter; so is a scale."""
    spec, data = SPECS[label], draw(5, 7)
    values = {name: float(info.default) + 0.05 for name, info in spec.params.items()}
    for name, value in (values | ({"scale": 0.3} if spec.takes_scale else {})).items():
        forms = (value, *(torch.full(size, value, dtype=torch.float64) for size in ((2, 1), (2, 2, 5))))
        calls = [{"scale": x} if name == "scale" else {"params": {name: x}} for x in forms]
        outs = [regard.attention(*data.tensors, spec, is_causal=True, **call) for call in calls]
        for out in outs[1:]:
            close(out, outs[0], 1e-12, name)
