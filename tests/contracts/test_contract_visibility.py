"""Who may influence whom: exactly what causal order, window, offset and mask say."""

from functools import cache

import pytest
import torch
from torch import Tensor

from . import oracle
from .cases import (
    REPRESENTATIVES,
    SPECS,
    attend,
    close,
    draw,
    every_pair,
    few_pairs_first,
    gradients,
    impls_of,
    masks,
    named,
    outputs,
    same,
)

ORDERS = ("causal", "strict", "pairs, strict", "window, strict", "offsets, window, causal", "window", "behind")
POISON = (None, 1e4, torch.finfo(torch.float32).max, float("nan"), float("inf"))


@every_pair
def test_values_influence_exactly_the_rows_that_weigh_them(label: str, impl: str) -> None:
    """With one-hot values the output is the Jacobian by the values: zero to the last bit outside what the
    arguments permit, and not zero wherever the oracle's kernel has weight."""
    data = draw(6, 8)
    data = data.with_(v=torch.eye(8, dtype=torch.float64).expand(2, 2, 8, 8))
    for how, call, found in outputs(label, impl, data, ORDERS):
        seen = oracle.visible(*data.sizes, **call)
        assert (found[~seen] == 0).all(), how
        if oracle.knows(oracle.read(SPECS[label])):
            _, p = oracle.attention(oracle.read(SPECS[label]), *data.tensors, seen)
            same(found != 0, p != 0, how)


@few_pairs_first
def test_jacobian_by_keys_and_queries_stays_inside(label: str, impl: str) -> None:
    """d out_i / d k_j is zero to the last bit for hidden pairs, d out_i / d q_j for i != j."""
    data = draw(6, 8, batch=1, heads=1).leaves()
    for how, call, out in outputs(label, impl, data, ("strict", "offsets, window, causal", "pairs")):
        seen = oracle.visible(*data.sizes, **call)[0, 0]
        for i in range(6):
            dq, dk, dv = gradients(out[0, 0, i], named(data), retain_graph=True).values()
            assert (dq[0, 0, torch.arange(6) != i] == 0).all(), how
            assert (dk[0, 0, ~seen[i]] == 0).all(), how
            assert (dv[0, 0, ~seen[i]] == 0).all(), how


@few_pairs_first
@pytest.mark.parametrize("order", ["is_causal", "exclude_self"])
def test_later_tokens_leave_earlier_rows_alone(label: str, impl: str, order: str) -> None:
    """To the last bit, in the output and in every gradient, whatever the later tokens become."""
    length, t = 24, 17
    data = draw(length, dtype=torch.float32).leaves()
    for how, _, out in outputs(label, impl, data, {order: {order: True}}):
        before = gradients(out[:, :, :t], named(data))
        for poison in POISON:
            later = data.map(lambda x: _changed(x, t, poison))  # noqa: B023
            again = attend(SPECS[label], impl, later, **{how: True})
            same(again[:, :, :t], out[:, :, :t], f"{poison}")
            if poison == POISON[2]:  # the scores of later rows overflow: gradients are asked of large values alone
                later = data.leaves().with_(v=_changed(data.v, t, poison))
                again = attend(SPECS[label], impl, later, **{how: True})
            after = gradients(again[:, :, :t], named(later))
            for name in before:
                same(after[name][:, :, :t], before[name][:, :, :t], f"gradient of {name}, {poison}")
                assert (after[name][:, :, t:] == 0).all(), f"gradient of later {name}, {poison}"


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
    for queries, keys in ((7, 11), (37, 40), (9, 4), (1, 23)):
        data = draw(queries, keys, dim=4)
        for impl in ("auto", *impls_of(label)):
            for how, _, out in outputs(label, impl, data, masks(*data.sizes)):
                seen = _seen(queries, keys, how)
                expected, _ = oracle.attention(oracle.read(SPECS[label]), *data.tensors, seen)
                close(out, expected, 1e-9, f"{impl} {queries}x{keys} {how}")


@cache
def _seen(queries: int, keys: int, how: str) -> Tensor:
    sizes = (2, 2, queries, keys)
    return oracle.visible(*sizes, **masks(*sizes)[how])
