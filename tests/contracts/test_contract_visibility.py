"""Who may influence whom: exactly what causal order, window, offset and mask say."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

import regard

from . import oracle
from .cases import (
    PAIRS,
    REPRESENTATIVES,
    SPECS,
    Data,
    attend,
    close,
    draw,
    gradients,
    masks,
    named,
    same,
)

ORDERS = ("causal", "strict", "pairs, strict", "window, strict", "offsets, window, causal", "window", "behind")
POISON = (None, 1e4, float("nan"), float("inf"))
LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize(("label", "impl"), PAIRS)
def test_values_influence_exactly_the_rows_that_weigh_them(label: str, impl: str) -> None:
    """With one-hot values the output is the Jacobian by the values: zero to the last bit outside what the
    arguments permit, and not zero wherever the oracle's kernel has weight."""
    spec = SPECS[label]
    data = draw(6, 8)
    data = data.with_(v=torch.eye(8, dtype=torch.float64).expand(2, 2, 8, 8))
    for how in ORDERS:
        call = masks(*data.sizes)[how]
        seen = oracle.visible(*data.sizes, **call)
        found = attend(spec, impl, data, **call)
        if found is None:
            continue
        assert (found[~seen] == 0).all(), how
        if oracle.knows(oracle.read(spec)):
            _, p = oracle.attention(oracle.read(spec), *data.tensors, seen)
            same(found != 0, p != 0, how)


@pytest.mark.parametrize(("label", "impl"), PAIRS)
def test_jacobian_by_keys_and_queries_stays_inside(label: str, impl: str) -> None:
    """d out_i / d k_j is zero to the last bit for hidden pairs, d out_i / d q_j for i != j."""
    data = draw(6, 8, batch=1, heads=1).leaves()
    for how in ("strict", "offsets, window, causal", "pairs"):
        call = masks(*data.sizes)[how]
        seen = oracle.visible(*data.sizes, **call)[0, 0]
        out = attend(SPECS[label], impl, data, **call)
        if out is None:
            continue
        for i in range(6):
            dq, dk, dv = gradients(out[0, 0, i], named(data), retain_graph=True).values()
            others = torch.arange(6) != i
            assert (dq[0, 0, others] == 0).all(), how
            assert (dk[0, 0, ~seen[i]] == 0).all(), how
            assert (dv[0, 0, ~seen[i]] == 0).all(), how


@pytest.mark.parametrize(("label", "impl"), PAIRS)
def test_the_previous_token_counts_and_the_first_row_is_empty(label: str, impl: str) -> None:
    """exclude_self: row 0 is exactly 0, and row t depends on token t - 1 and not on token t."""
    data = draw(5)
    out = attend(SPECS[label], impl, data, exclude_self=True)
    if out is None:
        return
    assert (out[:, :, 0] == 0).all()
    t = 1  # sees one key alone, so that its weight is not zero under any normalised rule
    for at, moves in ((t - 1, True), (t, False)):
        v = data.v.clone()
        v[:, :, at] += 1
        other = attend(SPECS[label], impl, data.with_(v=v), exclude_self=True)
        changed = not torch.equal(out[:, :, t], other[:, :, t])
        expected = moves and bool(_weights(label, data)[:, :, t, at].any())
        assert changed == expected


def _weights(label: str, data: Data) -> Tensor:
    seen = oracle.visible(*data.sizes, exclude_self=True)
    sentence = oracle.read(SPECS[label])
    if not oracle.knows(sentence):
        return seen
    return oracle.attention(sentence, *data.tensors, seen)[1]


@pytest.mark.parametrize(("label", "impl"), PAIRS)
@pytest.mark.parametrize("order", ["is_causal", "exclude_self"])
def test_later_tokens_leave_earlier_rows_alone(label: str, impl: str, order: str) -> None:
    """To the last bit, in the output and in every gradient, whatever the later tokens become."""
    length, t = 24, 17
    data = draw(length, dtype=torch.float32).leaves()
    out = attend(SPECS[label], impl, data, **{order: True})
    if out is None:
        return
    before = gradients(out[:, :, :t], named(data))
    for poison in POISON:
        later = data.map(lambda x: _changed(x, t, poison))  # noqa: B023
        again = attend(SPECS[label], impl, later, **{order: True})
        same(again[:, :, :t], out[:, :, :t], f"{poison}")
        after = gradients(again[:, :, :t], named(later))
        for name in before:
            same(after[name][:, :, :t], before[name][:, :, :t], f"gradient of {name}, {poison}")
            assert (after[name][:, :, t:] == 0).all(), f"gradient of later {name}, {poison}"


@pytest.mark.parametrize(("label", "impl"), PAIRS)
def test_later_tokens_however_large_leave_earlier_rows_alone(label: str, impl: str) -> None:
    """The largest finite numbers: the later rows may overflow, the earlier ones must not notice."""
    length, t = 12, 7
    data = draw(length, dtype=torch.float32).leaves()
    out = attend(SPECS[label], impl, data, is_causal=True)
    before = gradients(out[:, :, :t], named(data))
    later = data.map(lambda x: _changed(x, t, LARGEST))
    again = attend(SPECS[label], impl, later, is_causal=True)
    same(again[:, :, :t], out[:, :, :t])
    later = data.leaves().with_(v=_changed(data.v, t, LARGEST))
    again = attend(SPECS[label], impl, later, is_causal=True)
    after = gradients(again[:, :, :t], named(later))
    for name in before:
        same(after[name], before[name], f"gradient of {name}")


def _changed(x: Tensor, t: int, poison: float | None) -> Tensor:
    """Other tokens from position t on."""
    x = x.detach().clone()
    x[:, :, t:] = -3 * x[:, :, t:] if poison is None else poison
    return x.requires_grad_()


@pytest.mark.usefixtures("tiny_blocks")
@pytest.mark.parametrize("label", REPRESENTATIVES)
def test_every_way_to_limit_a_row_equals_the_oracle(label: str) -> None:
    """Offsets as an int and as a tensor, windows, masks, order, alone and together, over block borders; also
    with more queries than keys, whose leading rows see nothing."""
    spec = SPECS[label]
    for queries, keys in ((7, 11), (37, 40), (9, 4)):
        data = draw(queries, keys, dim=4)
        for how, call in masks(*data.sizes).items():
            expected, _ = oracle.attention(oracle.read(spec), *data.tensors, _seen(queries, keys, how))
            for impl in ("auto", *(i for name, i in PAIRS if name == label)):
                out = attend(spec, impl, data, **call)
                if out is not None:
                    close(out, expected, 1e-9, f"{impl} {queries}x{keys} {how}")


@cache
def _seen(queries: int, keys: int, how: str) -> Tensor:
    sizes = (2, 2, queries, keys)
    return oracle.visible(*sizes, **masks(*sizes)[how])


def test_offset_tensor_equals_the_int() -> None:
    data = draw(5, 9)
    for offset in (-7, -1, 0, 4, 9, 30):
        for order in ({"is_causal": True}, {"exclude_self": True}, {"window": 2}):
            as_int = regard.attention(*data.tensors, query_offset=offset, impl="blocked", **order)
            as_tensor = regard.attention(*data.tensors, query_offset=torch.full((2,), offset), impl="blocked", **order)
            same(as_int, as_tensor, f"{offset} {order}")
