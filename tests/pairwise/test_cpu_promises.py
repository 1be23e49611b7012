"""What impl="cpu" promises where it leaves keys out: not a bit of a row depends on another row; and what is strange or
missing shows."""

from __future__ import annotations

import builtins
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.pairwise.blocked.blocks import Block
from regard.pairwise.cpu import implementation as cpu

pytest.importorskip("numba")

SPECS = ("biweight", "relumax", "gaussian*nearest(k=5)")


def clustered(batch: int, heads: int, length: int, kv_heads: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys of the same cluster for 128 positions at a time, so that most blocks of keys have no weight."""
    make = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=make)  # noqa: E731
    kv = heads if kv_heads is None else kv_heads
    centre = 2 * draw(batch, kv, -(-length // 128), 64).repeat_interleave(128, 2)[:, :, :length]
    key = centre + 0.3 * draw(*centre.shape)
    query = centre.repeat_interleave(heads // kv, 1)
    return query + 0.3 * draw(*query.shape), key, draw(*key.shape)


@pytest.mark.parametrize("spec", SPECS)
def test_no_row_changes_another_by_a_bit(spec: str) -> None:
    query, key, value = clustered(2, 2, 1000)
    before = regard.attention(query, key, value, spec, is_causal=True, impl="cpu")
    last = query.clone()
    last[:, :, -1] = 0  # looks everywhere
    after = regard.attention(last, key, value, spec, is_causal=True, impl="cpu")
    assert torch.equal(before[:, :, :-1], after[:, :, :-1])
    other = query.clone()
    other[1, 1] = torch.nan
    assert torch.equal(before[0], regard.attention(other, key, value, spec, is_causal=True, impl="cpu")[0])


def test_blocks_of_several_heads_leave_keys_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, bool]] = []
    narrowed = Block.narrowed

    def watch(self: Block, marks: Tensor) -> Block:
        found = narrowed(self, marks)
        seen.append((self.heads, found.kept is not None))
        return found

    monkeypatch.setattr(Block, "narrowed", watch)
    tensors = [x.double().requires_grad_() for x in clustered(1, 4, 1000, kv_heads=2)]
    out = regard.attention(*tensors, "biweight", impl="cpu", enable_gqa=True)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
    found = torch.autograd.grad((out * weight).sum(), tensors)
    assert any(heads > 1 and left_out for heads, left_out in seen)
    dense = regard.attention(*tensors, "biweight", impl="reference", enable_gqa=True)
    right = torch.autograd.grad((dense * weight).sum(), tensors)
    for one, other in zip((out, *found), (dense, *right), strict=True):
        assert (one - other).abs().max() < 1e-11


def test_numbers_out_of_range_show_in_every_row() -> None:
    query, key, value = clustered(1, 1, 300)
    out = regard.attention(query, key, value, "relumax", impl="cpu", params={"margin": torch.tensor(-1.0)})
    assert out.isnan().all()


def test_a_numba_that_does_not_import_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        fromlist = args[2] if len(args) > 2 else ()
        if fromlist and "rows" in fromlist:
            raise ImportError("numba needs another numpy")
        return real(name, *args, **kwargs)

    cpu._rows.cache_clear()
    cpu._broken.cache_clear()
    monkeypatch.setattr(builtins, "__import__", refuse)
    try:
        with pytest.raises(regard.checks.ArgumentError, match=r"cannot be imported .numba needs another numpy"):
            regard.entmax(torch.randn(2, 3), impl="cpu")
        assert regard.explain("biweight", (1, 1, 8, 4)).chosen == "blocked"
        assert regard.entmax(torch.zeros(1, 4)).tolist() == [[0.25] * 4]
    finally:
        monkeypatch.undo()
        cpu._rows.cache_clear()
        cpu._broken.cache_clear()


def test_a_mask_of_three_axes_is_refused() -> None:
    x = torch.randn(1, 1, 4, 3)
    with pytest.raises(regard.checks.ArgumentError, match=r"attn_mask has shape \[1, 1, 4\], expected \[B, Tk\]"):
        regard.linear_attention(x, x, x, attn_mask=torch.ones(1, 1, 4, dtype=torch.bool))
