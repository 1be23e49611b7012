"""Prepare the write of a chunk: compute the use of sub-keys (`keys`), the order of entries by slot (`write`), and the
errors and shares (`targets`). One launch does these three independent jobs: each alone leaves most of a device idle.

Legend: R streams of L tokens, M memories (R, or 1 for all) of P tokens, H heads, n sub-keys of a half, K = H k slots.
"""

from typing import Any, NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...memory.fast_weight_rules import WriteRule
from ..runtime.blocks import LENGTHS
from ..runtime.launch import launch
from ..runtime.operators import rows_together
from ..runtime.tiles import Tiles, power_of_two
from .keys import MARGINAL, find_use
from .search import bytes_of
from .targets import ERRORS, STEP_CODES, find_errors
from .write import ORDER, find_order

COUNTED = 8192
"""Maximum number of entries of a table that a kernel sorts, by ranking each against the rest. torch sorts more
entries, and slots of tables of at least 2^30 rows, since the kernel doubles slots in 32 bits."""
Some: TypeAlias = Tensor | None


@triton.jit(do_not_specialize=(*LENGTHS, "uses", "orders", "streams"))
def _prepare(
    use, order, errors, good, good_next, following, gate, uses, orders, tokens, n, total, rows, length, streams, rate,
    stride_r, stride_t, stride_n, stride_g, stride_gt,
    H: tl.constexpr = 1, TOP: tl.constexpr = 1, TP: tl.constexpr = 1, RAW: tl.constexpr = False, RU: tl.constexpr = 1,
    KT: tl.constexpr = 1, E: tl.constexpr = 1, RO: tl.constexpr = 1, OT: tl.constexpr = 1, D: tl.constexpr = 1,
    KP: tl.constexpr = 1, RULE: tl.constexpr = 0, AHEAD: tl.constexpr = False, RE: tl.constexpr = 1,
    NT: tl.constexpr = 1, DT: tl.constexpr = 1, K: tl.constexpr = 1,
):  # fmt: skip
    """Find the use of sub-keys in the first `uses` programs, the order of entries in the next `orders`, and errors in
    the rest. Arguments that may be None are not in a tuple, where Triton 3.6 does not accept None."""
    program = tl.program_id(0)
    if use is not None and program < uses:
        find_use(program, good, *use, tokens, n, 2 * H, TOP, TP, RAW, RU, KT, E)
    if order is not None and (program >= uses) & (program < uses + orders):
        find_order(program - uses, good, *order, total, rows, K, RO, OT)
    if errors is not None and program >= uses + orders:
        find_errors(
            program - uses - orders, good, good_next, following, gate, *errors, length, streams, rate,
            stride_r, stride_t, stride_n, stride_g, stride_gt, D, H, K, KP, RULE, AHEAD, RE, NT, DT,
        )  # fmt: skip


class Job(NamedTuple):
    """Arguments of the kernel for one of its three jobs."""

    numbers: tuple[float, ...]
    programs: int
    tensors: tuple[Tensor, ...] | None  # None: the job is skipped
    sizes: dict[str, Any]
    results: Any


_SKIPPED = Job((0, 0), 0, None, {}, None)  # for `use` and `order`
_SKIPPED_ERRORS = _SKIPPED._replace(numbers=(0,) * 8)
TILES = Tiles(warps=4, stages=1)  # only block sizes are taken from the tile tables of the jobs


class Chunk(NamedTuple):
    """What a chunk read and writes: `read` and `value` float32 [R, L, Dv], weights and slots [R, L, H, k], gates [R, L]
    (None: 1), `good` bool [R, L] (None: all are). `following` [R, 1, Dv] is the value of the token after the chunk,
    None if nothing is bound to it."""

    read: Tensor
    value: Tensor
    following: Some
    weights: Tensor
    gate: Some
    slots: Tensor
    good: Some


Use = tuple[Tensor, Tensor, tuple[Tensor, Tensor]]
"""p- and the slope of the entropy's loss, float32 [M H 2, n], and groups: the entries of counted tokens, int32 [M H 2,
P k], by blocks of sub-keys in the order of tokens, and where each block begins and ends, int32 [M H 2, blocks, 2]."""
Errors = tuple[Tensor, Tensor, Tensor, Tensor]
"""The errors of tokens, float32 [R, L, Dv], 0 where nothing is written; their shares, rate g_t w_tj step_t, float32
[R, L, H, k]; which are written, bool [R, L]; the places of their targets, int64 [R, L], L for the token after."""


def sums_of(numbers: Tensor, halves: Tensor, memories: int, n: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the sums by sub-key of numbers float32 at halves int64 [B, T, H, 2, k], and the groups of `Use`."""
    sums, _, groups = _run(_use(numbers, halves, memories, n, raw=True))[0]
    return sums, groups


def order_of(slots: Tensor, counted: Some, n: int) -> tuple[Tensor, Tensor]:
    """Sort entries of slots int64 [M, P, K], tokens that are not `counted` (bool [M, P]; None: all are) last. Return
    the sorted slots, N for tokens that are not counted, and the entry at each place, both int32 [M, P K]."""
    return _run(order=_order(slots, counted, n), good=counted)[1]


@torch.no_grad()
def prepared(
    use: tuple[Any, ...] | None, order: tuple[Any, ...], chunk: Chunk, good_next: Some, memories: int, rule: WriteRule
) -> tuple[Use | None, tuple[Tensor, Tensor], Errors]:
    """Return the use of sub-keys, given scores float32 and halves int64 [B, T, H, 2, k], M and n; `order_of` of its
    arguments; and errors and shares. `good_next` is bool [R, 1] for the token after the chunk (None: all are good)."""
    read, value, following, weights, gate, slots, good = chunk
    (streams, length, width), (heads, k) = read.shape, weights.shape[2:]
    read, value, weights, slots = read.contiguous(), rows_together(value), weights.contiguous(), slots.contiguous()
    after = None if following is None else rows_together(following)
    errors, shares = torch.empty_like(read), torch.empty_like(weights)
    written = torch.empty(streams, length, dtype=torch.bool, device=read.device)
    target_at = torch.empty(streams, length, dtype=torch.int64, device=read.device)
    steps = 0 if after is None else after.stride(0), *((0, 0) if gate is None else gate.stride())
    tiles = ERRORS.pick(width, read.dtype)
    sizes = {"D": width, "H": heads, "K": heads * k, "KP": power_of_two(heads * k), "RULE": STEP_CODES[rule.name]}
    sizes |= {"AHEAD": rule.look_ahead, "RE": tiles.rows, "NT": tiles.keys, "DT": min(512, power_of_two(width))}
    job = Job(
        (length, streams // max(1, memories), rule.learning_rate, *value.stride()[:2], *steps),
        -(-length // tiles.rows) * streams, (read, value, weights, slots, errors, bytes_of(written), target_at, shares),
        sizes, (errors, shares, written, target_at),
    )  # fmt: skip
    return _run(_SKIPPED if use is None else _use(*use), _order(*order), job, good, good_next, after, gate)


def _use(scores: Tensor, halves: Tensor, memories: int, n: int, raw: bool = False) -> Job:
    batch, length, heads, _, k = halves.shape
    tokens, sets = batch * length // max(1, memories), heads * 2
    tiles, kp = MARGINAL.pick(n, torch.float32), power_of_two(k)
    blocks = -(-n // tiles.keys)
    mean = torch.empty(memories * sets, n, dtype=torch.float32, device=halves.device)
    slope = torch.empty((0,) if raw else mean.shape, dtype=torch.float32, device=halves.device)
    entries = torch.empty(memories * sets, tokens * k, dtype=torch.int32, device=halves.device)
    bounds = torch.empty(memories * sets, blocks, 2, dtype=torch.int32, device=halves.device)
    tensors = scores.contiguous(), halves.contiguous(), mean, slope, entries, bounds
    sizes = {"H": heads, "TOP": k, "TP": kp, "RAW": raw, "RU": tiles.rows, "KT": tiles.keys}
    sizes["E"] = max(1, min(tiles.rows, 1024 // kp))
    return Job((tokens, n), blocks * memories * sets, tensors, sizes, (mean, slope, (entries, bounds)))


def _order(slots: Tensor, counted: Some, n: int) -> Job:
    memories, tokens, k = slots.shape
    total = tokens * k
    if total > COUNTED or n >= 1 << 30:
        slots = slots.to(torch.int32)
        keys = (slots if counted is None else torch.where(counted[..., None], slots, n)).flatten(1)
        ordered, entries = keys.sort(dim=-1, stable=True)
        return _SKIPPED._replace(results=(ordered, entries.int()))
    tiles = ORDER.pick(k, slots.dtype)
    results = tuple(torch.empty(memories, total, dtype=torch.int32, device=slots.device) for _ in range(2))
    tensors, sizes = (slots.contiguous(), *results), {"K": k, "RO": tiles.rows, "OT": tiles.keys}
    return Job((total, n), -(-total // tiles.rows) * memories, tensors, sizes, results)


@torch.compiler.disable
def _run(
    use: Job = _SKIPPED, order: Job = _SKIPPED, errors: Job = _SKIPPED_ERRORS, good: Some = None,
    good_next: Some = None, following: Some = None, gate: Some = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Do these jobs in one launch and return the results of each."""
    jobs = use, order, errors
    launch(
        _prepare, (sum(job.programs for job in jobs),), *(job.tensors for job in jobs), bytes_of(good),
        bytes_of(good_next), following, gate, use.programs, order.programs, *(x for job in jobs for x in job.numbers),
        tiles=TILES, **{name: size for job in jobs for name, size in job.sizes.items()},
    )  # fmt: skip
    return tuple(job.results for job in jobs)
