"""The nearest keys of plain scores: exactly k, ties by index."""

import numpy as np
import oracles
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard

INF = float("inf")


@settings(deadline=None, derandomize=True, max_examples=150)
@given(z=st.lists(st.integers(-3, 3) | st.just(None), min_size=1, max_size=12), k=st.integers(1, 14))
def test_keeps_exactly_the_best_lowest_index_first(z: list, k: int) -> None:
    row = np.array([-INF if x is None else x / 2 for x in z])
    kept = oracles.order(row)[:k]
    scores = torch.from_numpy(row)
    soft, uniform = np.zeros(len(row)), np.zeros(len(row))
    if len(kept):
        soft[kept], uniform[kept] = oracles.softmax(row[kept]), 1 / len(kept)
    for gradient in ("hard", "straight-through"):
        p = regard.topk_softmax(scores, k, gradient=gradient).numpy()
        np.testing.assert_allclose(p, soft, rtol=0, atol=1e-15)
        assert np.count_nonzero(p) == min(k, len(oracles.order(row)))
        np.testing.assert_allclose(
            regard.topk_uniform(scores, k, gradient=gradient).numpy(), uniform, rtol=0, atol=1e-16
        )
