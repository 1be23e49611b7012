"""Calls of memories in one graph of `torch.compile` that serves every length."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from regard.memory.large_chunk import large_chunk_ttt
from regard.memory.product_key import product_key_read

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
KEYS, VALUES = torch.randn(1, 2, 4, 4), torch.randn(16, 3)
NETWORK = torch.randn(2, 6, 4), torch.randn(2, 6, 4), torch.randn(2, 4, 6)


def large_chunk(x: Tensor) -> Tensor:
    heads = x.unflatten(2, (2, 4))
    return large_chunk_ttt(heads, heads, heads, 0.1 * heads[..., :3].abs(), NETWORK, chunk_size=4, optimizer="sgd")[0]


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "product keys": lambda x: product_key_read(x[:, :, None], KEYS, VALUES, 2)[0],
    "large chunks": large_chunk,
}


@pytest.mark.parametrize("name", CALLS)
def test_one_graph_serves_every_length(name: str) -> None:
    compiled = torch.compile(CALLS[name], fullgraph=True, dynamic=True, backend="eager")
    for length in (5, 9, 12):
        x = torch.randn(2, length, 8)
        torch.testing.assert_close(compiled(x), CALLS[name](x), rtol=1e-5, atol=1e-5)
