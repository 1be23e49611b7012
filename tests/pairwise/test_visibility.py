"""Which keys a query sees, against a loop over pairs that says it in words."""

import itertools

import numpy as np
import torch
from contracts import oracle

from regard.pairwise.visibility import Visibility

ORDERS = [
    {"causal": causal, "strict": strict, "window": window}
    for (causal, strict), window in itertools.product(
        [(False, False), (True, False), (True, True)], [None, 1, 2, 3, 50]
    )
]


def pairs_of(queries: int, keys: int, offset: int, order: dict) -> np.ndarray:
    how = {"is_causal": order["causal"], "exclude_self": order["strict"], "window": order["window"]}
    return oracle.visible(1, 1, queries, keys, query_offset=offset, **how)[0, 0].numpy()


def test_who_sees_a_marked_key() -> None:
    g = torch.Generator().manual_seed(2)
    marked = torch.rand(2, 3, 7, generator=g) < 0.2
    for mask_shape, order in itertools.product((None, (2, 1, 5, 7), (1, 3, 5, 7), (2, 3, 1, 7)), ORDERS):
        mask = None if mask_shape is None else torch.rand(mask_shape, generator=g) < 0.5
        visible = Visibility(5, 7, offset=2, mask=mask, **order)
        pairs = pairs_of(5, 7, 2, order)
        full = np.broadcast_to(pairs if mask is None else pairs & mask.numpy(), (2, 3, 5, 7))
        expected = (full & marked.numpy()[:, :, None, :]).any(-1)
        np.testing.assert_array_equal(visible.any_seen(marked).numpy(), expected)


def test_how_many_keys_a_query_sees() -> None:
    g = torch.Generator().manual_seed(3)
    masks = (None, (2, 1, 5, 7), (1, 3, 5, 7), (2, 3, 1, 7), (1, 1, 1, 7), (2, 1, 5, 1), (2, 1, 1, 1))
    offsets = (0, 2, -3, 9, torch.tensor([0, 4]))
    for shape, order, offset in itertools.product(masks, ORDERS, offsets):
        mask = None if shape is None else torch.rand(shape, generator=g) < 0.6
        found = Visibility(5, 7, offset=offset, mask=mask, **order).counts()
        assert found.dtype == torch.int64
        assert found.shape[-1] == 5
        for b in range(2):
            at = int(offset[b]) if isinstance(offset, torch.Tensor) else offset
            pairs = pairs_of(5, 7, at, order)
            full = np.broadcast_to(pairs if mask is None else pairs & mask.numpy(), (2, 3, 5, 7))
            np.testing.assert_array_equal(found.expand(2, 3, 5)[b].numpy(), full[b].sum(-1))


def test_counts_without_keys() -> None:
    assert not Visibility(3, 0, causal=True, offset=-3, mask=torch.ones(2, 1, 1, 0, dtype=torch.bool)).counts().any()
    assert Visibility(3, 0).counts().tolist() == [[[0, 0, 0]]]
