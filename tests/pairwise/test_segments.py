"""Packed sequences: `segment_ids` of `regard.attention` against a loop over the sequences."""

from typing import Any

import pytest
import torch
from mistakes import refuses
from regression import draw
from torch import Tensor

import regard
from regard.pairwise.blocked.blocks import Work

IDS = torch.tensor([3] * 17 + [0] * 40 + [7] + [1] * 30 + [0] * 12)
"""Ids are names, in no order; 0 comes back and is another sequence then."""
RUNS = [(0, 17), (17, 57), (57, 58), (58, 88), (88, 100)]


def inputs(dtype: torch.dtype = torch.float64, kv_heads: int = 2) -> tuple[Tensor, ...]:
    return tuple(x.requires_grad_() for x in draw(2, 2, 100, 6, kv_heads=kv_heads, value_dim=4, seed=1, dtype=dtype))


@pytest.mark.parametrize("spec", ["softmax", "local-linear"])
def test_the_cost_is_in_the_pairs_of_the_segments(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks leave out what lies in other segments: 16 segments of 128 cost a sixteenth of one of 2048, without causal
    order."""
    counted = []
    blocks = Work.blocks

    def spy(self: Work, *options: Any) -> Any:
        for block in blocks(self, *options):
            counted.append(block.heads * (block.last - block.first) * (block.high - block.low))
            yield block

    monkeypatch.setattr(Work, "blocks", spy)
    q, k, v = draw(1, 1, 2048, 4, seed=3, dtype=torch.float32)
    regard.attention(q, k, v, spec, segment_ids=(torch.arange(2048) // 128)[None], impl="blocked")
    assert sum(counted) <= 2048 * 128


def test_diagnostics_count_the_keys_of_the_segment() -> None:
    q, k, v = (x.detach() for x in inputs())
    for impl in ("reference", "blocked"):
        _, found = regard.attention(q, k, v, segment_ids=IDS[None], impl=impl, return_diagnostics=True)
        lengths = torch.cat([torch.full((b - a,), float(b - a)) for a, b in RUNS])
        assert torch.equal(found.support.float(), lengths.expand(2, 2, 100))


# Mistakes ----------------------------------------------------------------------------------------------------


def test_ids_of_any_integer_dtype_for_one_row_or_all() -> None:
    q, k, v = (x.detach() for x in inputs())
    for ids in (IDS[None].int(), IDS[None].to(torch.uint8), IDS.expand(2, 100)):
        assert torch.equal(regard.attention(q, k, v, segment_ids=ids), regard.attention(q, k, v, segment_ids=IDS[None]))


def test_queries_stand_at_the_last_keys() -> None:
    q, k, v = (x.detach() for x in inputs())
    call = (regard.attention, q, k[:, :, :90], v[:, :, :90])
    refuses("the position of every query must be that of one of the 90 keys", *call, segment_ids=IDS[None, :90])
