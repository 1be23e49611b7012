"""Decoding with a cache of keys and values: few queries, many keys, no gradient; and balls around blocks of keys, by
which whole blocks are left unread.

Legend: B batch, H query heads, Hkv key heads, Tq queries, Tk keys, D and Dv features of keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...checks import ArgumentError, flags, floating, in_range, mapping, require, shape
from ...grammar import Spec, as_spec
from ...pairwise.attention import _check_mask, _check_offset, _check_tensors, _check_window
from ...pairwise.visibility import Visibility
from ...precision import full_precision, row_number
from ..compact.rules import SOFTMAX, Rule, rule_of
from ..runtime import support
from ..runtime.launch import launch
from ..runtime.tiles import Tiles, TileTable
from . import compact as compact_decode
from .plan import ROWS, group_of, ranges_of

CALL = "decode_attention"
BLOCKS = (16, 32, 64, 128, 256)
"""How many keys a block of `KeyBounds` may have."""
TABLE = TileTable("key_bounds", {(128, 4): Tiles(keys=64, stages=2), (256, 4): Tiles(keys=32, stages=2)})


class Visited(NamedTuple):
    """What a call has read, in tiles of `size` keys, int64 [B, Hkv] each.

    Attributes:
        keys: tiles of keys that were read.
        values: tiles of which values were read: those of keys with weight.
        total: tiles in sight.
        size: keys of a tile.
    """

    keys: Tensor
    values: Tensor
    total: Tensor
    size: int


@dataclass
class _Room:
    """Balls of a cache, with room for more blocks than it has. `filled`: of how many keys, whoever wrote them last."""

    centre: Tensor
    radius: Tensor
    filled: int


class KeyBounds:
    """A ball around every block of keys: |k - centre| <= radius for each key k of it.

    No score of a block is above scale (q . centre + |q| radius), so that a compact weighting need not read a block
    where this is below the threshold of its row: `decode_attention(..., key_bounds=bounds)`. How much is skipped hangs
    on how near to each other the keys of a block are: nothing where they are independent of each other.

        bounds = KeyBounds.of(key)              # [B, Hkv, Tk, D]
        bounds = bounds.extended(key)           # after the cache has grown

    Attributes:
        length: keys that are bounded, Tk.
        block: keys of a block; the last may be partly filled.
        centre: [B, Hkv, ceil(Tk / block), D], means of the blocks, in the dtype of the keys.
        radius: [B, Hkv, ceil(Tk / block)] float32; NaN where a key is not finite: that block is always read.

    Memory: 1 / block of that of the keys, and 4 bytes a block and head. Source: the bound q . k <= q . c + |q| r of
    maximum inner product search (Ram and Gray, 2012).
    """

    def __init__(self, room: _Room, length: int, block: int) -> None:
        self._room, self.length, self.block = room, length, block

    @property
    def blocks(self) -> int:
        return -(-self.length // self.block)

    @property
    def centre(self) -> Tensor:
        return self._room.centre[:, :, : self.blocks]

    @property
    def radius(self) -> Tensor:
        return self._room.radius[:, :, : self.blocks]

    @classmethod
    def of(cls, key: Tensor, block: int = 64) -> KeyBounds:
        """The balls of `key` [B, Hkv, Tk, D], float32 or bfloat16.

        Args:
            block: keys of a block: 16, 32, 64, 128 or 256. Small blocks have small balls, and more of them.

        Raises:
            ArgumentError: a key of another form, a device without kernels, or another size of blocks.

        Cost: reads the keys once or twice.
        """
        _check_key("KeyBounds.of", key)
        if block not in BLOCKS:
            raise ArgumentError(f"KeyBounds.of: block is {block!r}, expected one of {', '.join(map(str, BLOCKS))}.")
        empty = _Room(key.new_empty(*key.shape[:2], 0, key.shape[3]), key.new_empty(0), 0)
        return cls(empty, 0, block).extended(key)

    @torch.no_grad()
    def extended(self, key: Tensor) -> KeyBounds:
        """The balls of a cache that has grown: `key` [B, Hkv, Tk, D] begins with the keys that are bounded here (a
        shorter one is a cropped cache).

        Only the last, partly filled block and those after it are computed, into memory that both objects share where
        nobody else has extended this one; its balls then hold later keys too, which leaves them right.

        Raises:
            ArgumentError: keys of another batch, head count, width, dtype or device.

        Cost: reads the keys from that block on; the balls are copied when their memory has to grow, by half each time.
        """
        _check_key("KeyBounds.extended", key)
        room, length = self._room, key.shape[2]
        old, new = (*room.centre.shape[:2], room.centre.shape[3]), (*key.shape[:2], key.shape[3])
        same = old == new and room.centre.dtype == key.dtype and room.centre.device == key.device
        require(same, "KeyBounds.extended", f"key is {key.dtype} {shape(key)}, unlike the keys bounded so far.")
        first, count = min(self.length, length) // self.block, -(-length // self.block)
        if room.filled != self.length or length < self.length or count > room.centre.shape[2]:
            room = _moved(room, first, count)
        if count > first:
            _bound(key if key.stride(-1) == 1 else key.contiguous(), room.centre, room.radius, first, self.block)
        room.filled = length
        return KeyBounds(room, length, self.block)

    def __repr__(self) -> str:
        return f"KeyBounds({self.blocks} blocks of {self.block} keys, {shape(self.centre)} {self.centre.dtype})"


def _moved(room: _Room, kept: int, needed: int) -> _Room:
    """The first balls in memory of their own, with room for more than are needed."""
    batch, heads, _, dim = room.centre.shape
    capacity = needed + needed // 2 + 8
    centre = room.centre.new_empty(batch, heads, capacity, dim)
    radius = room.centre.new_empty(batch, heads, capacity, dtype=torch.float32)
    if kept:
        centre[:, :, :kept], radius[:, :, :kept] = room.centre[:, :, :kept], room.radius[:, :, :kept]
    return _Room(centre, radius, 0)


@torch.library.custom_op("regard::triton_key_bounds", mutates_args=("centre", "radius"))
def _bound(key: Tensor, centre: Tensor, radius: Tensor, first: int, block: int) -> None:
    """The balls of the blocks from number `first` on."""
    from .key_bounds_kernels import ball_kernel

    batch, heads, keys, dim = key.shape
    tiles, blocks = TABLE.pick(dim, key.dtype), -(-keys // block) - first
    launch(
        ball_kernel, (blocks * batch * heads,), key, centre, radius, heads, keys, centre.shape[2],
        first, blocks, key.stride(0), key.stride(1), key.stride(2),
        tiles=tiles, D=dim, WIDTH=compact_decode.width_of(key), BLOCK=block, KEYS=min(tiles.keys, block),
    )  # fmt: skip


@_bound.register_fake
def _(key, centre, radius, first, block):
    return None


def _check_key(call: str, key: object) -> None:
    floating(call, "key", key)
    assert isinstance(key, Tensor)
    form = key.dim() == 4 and key.dtype in support.DTYPES and 1 <= key.shape[-1] <= support.WIDEST
    require(form, call, f"key is {key.dtype} {shape(key)}, expected float32 or bfloat16 [B, Hkv, Tk, D], D <= 256.")
    reason = support.MISSING or support.unsupported_device(key.device.type)
    require(reason is None, call, f"{reason}.")


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: Spec | str = "softmax",
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    exclude_self: bool = False,
    window: int | None = None,
    query_offset: int | Tensor | None = None,
    scale: float | Tensor | None = None,
    params: Mapping[str, float | Tensor] | None = None,
    key_bounds: KeyBounds | None = None,
    return_visited: bool = False,
) -> Any:
    """`regard.attention` of few queries with a long cache, with nothing between the caller and the kernels: keys and
    values are not looked through for numbers that are not finite, and with `key_bounds` not all of them are read.

    Args:
        query: [B, H, Tq, D], float32 or bfloat16; Tq H / Hkv at most 64.
        key: [B, Hkv, Tk, D]; Hkv divides H. value: [B, Hkv, Tk, Dv]. D, Dv <= 256. Any strides whose last is 1.
        spec: softmax, or a polynomial kernel (r = 1, 2, 3) with the rule adaptive, anchored or fixed; dot product.
        attn_mask: boolean, broadcastable to [B, H, 1, Tk]; True where a key may be attended.
        is_causal, exclude_self, window, query_offset, scale, params: as in `regard.attention`.
        key_bounds: balls around the blocks of `key`. No weight changes by it; with softmax, under which
            every key has weight, they are not looked at.
        return_visited: also return a `Visited`.

    Returns:
        [B, H, Tq, Dv] in the dtype of `query`, or (output, Visited). A query that sees no key gets 0. What no query of
        the call sees never matters, NaN included; what one sees has to be finite. No gradient.

    Raises:
        ArgumentError: shapes, dtypes or names that do not fit; a sentence or a device without kernels; tensors that
            need a gradient; bounds of other keys.

    Precision: scores, thresholds and sums in float32. Cost: reads keys once, of values those with weight (softmax:
    all); compact rules write and read their scores too, 8 bytes a query and key. Source: the rules are those of the
    sparse-attention paper, section 2; split keys as in Flash-Decoding (Dao et al., 2023).
    """
    spec = as_spec(spec, CALL)
    _check_tensors(query, key, value, True)
    flags(CALL, is_causal=is_causal, exclude_self=exclude_self, return_visited=return_visited)
    rows, keys = query.shape[:3], key.shape[2]
    reason = _unsupported(spec, query, value, group_of(query, key) * query.shape[2])
    require(reason is None, CALL, f"{reason}. regard.attention does it.")
    visible = Visibility(
        queries=rows[2],
        keys=keys,
        causal=is_causal or exclude_self,
        strict=exclude_self,
        window=_check_window(CALL, window),
        offset=_check_offset(query_offset, rows[0], keys - rows[2], query.device),
        mask=_check_mask(attn_mask, (rows[0], rows[1], 1, keys), query.device),
    )
    params = mapping(CALL, "params", params)
    tensors = (query, key, value, scale, *params.values())
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors):
        raise ArgumentError(
            f"{CALL}: forward only, and a tensor requires a gradient; use torch.no_grad() or attention."
        )
    given = {n: row_number(CALL, n, p, rows, torch.float32, query.device) for n, p in params.items()}
    if scale is not None:
        in_range(CALL, "scale", scale, low=0.0, strict=True)
        scale = row_number(CALL, "scale", scale, rows, torch.float32, query.device)
    scale, numbers = spec.resolve(query.shape[3], scale, given)
    rule = rule_of(spec, numbers)
    if isinstance(rule, str):
        raise ArgumentError(f"{CALL}: {rule}. regard.attention does it.")
    bounds = _check_bounds(key_bounds, key, rule)
    number = numbers.get(rule.row)
    number = number if isinstance(number, Tensor) else None
    size = compact_decode.tiles_of(query, value, bounds[2] if bounds else 0).keys
    with full_precision(query.device.type):
        found = compact_decode.decode(query, key, value, scale, rule, number, visible, bounds, return_visited)
    return (found[0], _visited(found, rule, visible, size)) if return_visited else found[0]


def _unsupported(spec: Spec, query: Tensor, value: Tensor, rows: int) -> str | None:
    if support.MISSING is not None:
        return support.MISSING
    if query.dtype not in support.DTYPES:
        return f"computes in float32 and bfloat16; the inputs are {query.dtype}"
    if max(query.shape[-1], value.shape[-1]) > support.WIDEST:
        return f"holds at most {support.WIDEST} features; these are {query.shape[-1]} and {value.shape[-1]}"
    if spec.degree or spec.trend is not None or spec.similarity.name != "dot":
        return f"takes averages (degree 0, no trend) by the dot product; this is {spec}"
    if rows > ROWS:
        return f"takes at most {ROWS} rows (queries x query heads of a key head); these are {rows}"
    return support.unsupported_device(query.device.type)


def _check_bounds(bounds: KeyBounds | None, key: Tensor, rule: Rule) -> tuple[Tensor, Tensor, int] | None:
    if bounds is None:
        return None
    if not isinstance(bounds, KeyBounds):
        raise ArgumentError(f"{CALL}: key_bounds is a {type(bounds).__name__}, expected KeyBounds.of(key) or None.")
    room = bounds._room
    fits = bounds.length == key.shape[2] and room.centre.dtype == key.dtype and room.centre.device == key.device
    if not fits or (*room.centre.shape[:2], room.centre.shape[3]) != (*key.shape[:2], key.shape[3]):
        raise ArgumentError(
            f"{CALL}: key_bounds are of {bounds.length} keys, {shape(room.centre)} {room.centre.dtype}; key is "
            f"{shape(key)} {key.dtype}. Make them with KeyBounds.of(key), or .extended(key) as a cache grows."
        )
    return None if rule.code == SOFTMAX else (room.centre, room.radius, bounds.block)


def _visited(found: tuple[Tensor, ...], rule: Rule, visible: Visibility, size: int) -> Visited:
    ranges, rows = ranges_of(visible, found[0].device), found[1].shape[:2]
    some = ranges.high > ranges.low
    stop = torch.where(some, ranges.high, 0).amax(1)
    start = torch.minimum(torch.where(some, ranges.low, visible.keys).amin(1), stop)
    total = ((stop + size - 1) // size - start // size).long()[:, None].expand(rows)
    if rule.code == SOFTMAX:
        return Visited(total, total, total, size)
    read = [x.amax(2).long().sum(-1) if x.numel() else total * 0 for x in found[1:]]
    return Visited(read[0], read[1], total, size)
