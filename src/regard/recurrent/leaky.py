"""Leaky averages: sums in which a token counts less by the same factor for every later token,

    h_t = sum_{i <= t} e^{-rate (n_t - n_i)} x_i = x_t + e^{-rate} h_{t-1},        n_t the unmasked tokens up to t,

the key features of Memory Mosaics (sparse-attention paper, equation 10, with lambda = e^{-rate}). Masked tokens neither
add nor fade anything. Documents packed into one row (`segment_ids`) are independent.

Sequences are cut into chunks: a triangular matrix of c x c decays inside each, and the last sum carried from one to the
next. Every exponent is -rate times a count >= 0.

Legend: B batch, H heads, T positions, D channels; n chunks of c positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import checks
from ..checks import ArgumentError, shape
from ..one_node import one_node
from ..pairwise.visibility import runs_of
from ..precision import clean, full_precision
from .scan import scan
from .states import State, require_state, zeros

CALL = "leaky_average"
CHUNK = 32
"""Positions of a chunk: products inside cost T c D, with T / c steps between chunks."""


@dataclass(frozen=True)
class LeakyState(State):
    """The state of a leaky average: its last sum.

    Attributes:
        sums: h after the last token [B, H, D], float32 or float64.
        non_finite: boolean [B, H], whether a non-finite token was seen; every later row is then NaN.
        tokens: how many positions were seen, masked ones included.
    """

    sums: Tensor
    non_finite: Tensor

    @classmethod
    def empty(
        cls, batch: int, heads: int, dim: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> "LeakyState":
        """Return the state before the first token."""
        return cls(**zeros(batch, heads, torch.promote_types(dtype, torch.float32), device, sums=(dim,)))


def leaky_average(
    x: Tensor,
    rate: float | Tensor,
    *,
    mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    state: LeakyState | None = None,
    average: bool = False,
    chunk_size: int | None = None,
) -> tuple[Tensor, LeakyState]:
    """Return the leaky average at every position, and the state after the last one.

    Args:
        x: [B, H, T, D].
        rate: >= 0, decay per token in nats: a number or a tensor [H]. 0 is a plain sum.
        mask: boolean [B, T], False for padding, which changes nothing, NaN included.
        segment_ids: integers [B or 1, T] of packed documents; a new one begins where the id changes.
        state: of earlier tokens, which belong to the first document; None for none.
        average: multiply by 1 - e^-rate, so that the average of a constant tends to it; else the sum of the paper.
        chunk_size: positions of a chunk; changes only rounding and speed.

    Returns:
        (h [B, H, T, D] in the dtype of x, `LeakyState` of the last document). At a masked position h is that of the
        token before. A non-finite token makes its row and all later ones of its document NaN, without gradient.

    Raises:
        ArgumentError: shapes or dtypes that do not fit; a negative rate (tensors only under `regard.checks.debug`).

    Prefill, chunks and single steps agree. In float32 at least; differentiable to any order in x, rate and state.
    Cost: O(T c D) time and O(T D) memory a head, with a mask or documents O(T c) more.
    """
    checks.flag(CALL, "average", average)
    _check(x, rate, mask, chunk_size)
    checks.segments(CALL, segment_ids, x.shape[0], x.shape[2], x.device)
    batch, heads, tokens, dim = x.shape
    dtype = torch.promote_types(x.dtype, torch.float32)
    given = rate if isinstance(rate, Tensor) else torch.full((), min(float(rate), 1e30), dtype=dtype, device=x.device)
    rates = given.to(dtype).expand(heads)
    checks.finite(CALL, "x", x)
    wide = x.to(dtype)
    state = LeakyState.empty(batch, heads, dim, dtype=dtype, device=x.device) if state is None else state
    require_state(CALL, state, LeakyState, {"sums": (batch, heads, dim)}, wide)
    # the first position of every token's document [B or 1, T]
    begins = runs_of(segment_ids)[0] if segment_ids is not None and tokens > 1 else None
    with full_precision(x.device.type):
        wide, bad = clean(wide)
        if mask is not None:
            wide = torch.where(mask[:, None, :, None], wide, 0)
            bad = None if bad is None else bad & mask[:, None]
        if tokens > 1:
            sums = _chunks(wide, rates, mask, begins, state.sums, chunk_size or CHUNK)
        else:
            sums = _step(wide, rates, mask, state.sums)
        lost = _non_finite(bad if tokens else None, state.non_finite, begins)
        after = sums[:, :, -1].clone() if tokens else state.sums  # a view would keep all of them alive
        non_finite = lost.expand(batch, heads, max(tokens, 1))[..., -1]
        if average:
            sums = sums * -torch.expm1(-rates)[:, None, None]
        out = torch.where(lost[..., None], torch.nan, sums).to(x.dtype)
    return out, LeakyState(after, non_finite, tokens=state.tokens + tokens)


def _step(x: Tensor, rates: Tensor, mask: Tensor | None, start: Tensor) -> Tensor:
    """Return h of x [B, H, 0 or 1, D] after `start` [B, H, D]."""
    start = start[:, :, None]
    faded = start * (-rates).exp()[:, None, None]
    return x + (faded if mask is None else torch.where(mask[:, None, :, None], faded, start))


def _non_finite(bad: Tensor | None, before: Tensor, begins: Tensor | None) -> Tensor:
    """Return the rows [B, H, T or 1] at or after a non-finite token `bad` [B, H, T] of their document; `before` [B, H]:
    whether there was one in an earlier call; `begins` as in `leaky_average`."""
    earlier = before[..., None]
    if begins is None:
        return earlier if bad is None else earlier | (bad.cumsum(-1) > 0)
    earlier = earlier & (begins == 0)[:, None]
    if bad is None:
        return earlier
    position = torch.arange(bad.shape[-1], device=bad.device)
    return earlier | (torch.where(bad, position, -1).cummax(-1).values >= begins[:, None])


@one_node("leaky_chunks", lambda x, *_: x.new_empty(x.shape))
def _chunks(x: Tensor, rates: Tensor, mask: Tensor | None, begins: Tensor | None, start: Tensor, chunk: int) -> Tensor:
    """Return h of x [B, H, T, D] after `start` [B, H, D]; `begins` as in `leaky_average`."""
    tokens = x.shape[2]
    size = min(chunk, tokens)
    count = -(-tokens // size)
    spare = count * size - tokens
    x = pad(x, (0, 0, 0, spare)).unflatten(2, (count, size))
    if mask is None and begins is None:  # one matrix per head serves every chunk
        real = torch.arange(1, size + 1, device=x.device, dtype=x.dtype)[None]
        decays = _decays(rates[:, None, None], real)
        inside = torch.einsum("hij,bhnjd->bhnid", decays, x)
        upto = torch.exp(-rates[:, None, None] * real)[None, ..., None]  # [1, H, 1, c, 1]
    else:
        position = torch.arange(count * size, device=x.device).view(count, size)
        real = pad(x.new_ones(1, tokens) if mask is None else mask, (0, spare))
        real = real.unflatten(1, (count, size)).cumsum(-1)[:, None].to(x.dtype)
        decays = _decays(rates[:, None, None, None], real)
        upto = torch.exp(-rates[:, None, None] * real)[..., None]  # [B or 1, H, n, c, 1]
        if begins is not None:  # other documents are multiplied by zero
            begins = pad(begins, (0, spare)).unflatten(1, (count, size))[:, None, ..., None]
            decays = decays * (position[:, None] >= begins)
            upto = upto * (begins < position[:, :1, None].clamp(min=1))
        inside = decays @ x
    fades = upto[..., -1, :].expand(x.shape[0], -1, count, 1)
    before, _ = scan(fades, inside[..., -1:, :], start[:, :, None])
    return (inside + upto * before).flatten(2, 3)[:, :, :tokens]


def _decays(rates: Tensor, real: Tensor) -> Tensor:
    """Return e^{-rate (n_i - n_j)} for j <= i, else 0, of counts [..., c]: [..., c, c]."""
    return torch.exp(-rates * (real[..., :, None] - real[..., None, :]).clamp(min=0)).tril()


def _check(x: Tensor, rate: float | Tensor, mask: Tensor | None, chunk: int | None) -> None:
    checks.tensor(CALL, "x", x, "batch", "heads", "length", "dim")
    checks.in_range(CALL, "rate", rate, low=0.0, strict=False)
    if isinstance(rate, Tensor):
        checks.floating(CALL, "rate", rate)
        checks.on_device(CALL, "rate", rate, x.device, "x")
        if tuple(rate.shape) not in ((), (1,), (x.shape[1],)):
            raise ArgumentError(f"{CALL}: rate has shape {shape(rate)}, expected [{x.shape[1]}], one a head.")
    checks.token_mask(CALL, "mask", mask, x.shape[0], x.shape[2], like=x, of="x")
    checks.optional_whole(CALL, "chunk_size", chunk, 1)
