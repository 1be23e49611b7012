"""What the functions of fla share: checks, packed sequences and their states.

Functions of one kind differ in their signatures only. Each passes its arguments, by the names of fla, to the function
that computes all of them.

Legend: as in `regard.compat.fla`.
"""

from typing import Any

import torch
from torch import Tensor

from ...checks import ArgumentError, integers, on_device, require, tensor, within
from ...public import segment_ids
from ...recurrent.arguments import Form

REASONS = {
    "reverse": "flip the inputs along T",
    "gv": "regard has decays of keys alone: g or gk",
    "cp_context": "it computes on one device",
    "use_graph": "it captures no CUDA graph",
    "max_num_seqs": "it captures no CUDA graph",
    "return_intermediate_states": "call it once per chunk with initial_state",
    "g": "softmax attention of regard has no decay",
    "sink_bias": "softmax attention of regard has no sink",
}
"""Arguments of fla that are refused, each with the reason or the way around."""


def refuse(call: str, **given: Any) -> None:
    """Raise ArgumentError for one of these arguments of fla that is neither None nor False; others change nothing."""
    for name, value in given.items():
        if name in REASONS and value is not None and value is not False:
            raise ArgumentError(f"{call}: {name} is not supported; {REASONS[name]}.")


def check_shapes(
    call: str, q: Tensor, k: Tensor, v: Tensor, *, grouped: bool = False, channels: str = "", **numbers: Tensor | None
) -> None:
    """Check q, k, v and the `numbers` per token [B, T, HV]; the one named `channels` is [B, T, HV, K]. HV is a multiple
    of H if `grouped`, else H."""
    tensor(call, "q", q, "B", "T", "H", "K")
    batch, tokens, heads, dim = q.shape
    tensor(call, "k", k, batch, tokens, heads, dim, like=q, of="q")
    tensor(call, "v", v, batch, tokens, "HV" if grouped else heads, "V", like=q, of="q")
    fits = heads > 0 and v.shape[2] % heads == 0
    require(fits, call, f"v has {v.shape[2]} heads, expected a multiple of the {heads} heads of q and k.")
    for name, x in numbers.items():
        if x is not None:
            more = (dim,) if name == channels else ()
            tensor(call, name, x, batch, tokens, v.shape[2], *more, like=q, of="q")


class Sequences:
    """The sequences of a call: their `ids` [1, T], None without `cu_seqlens`, and their states."""

    def __init__(self, call: str, q: Tensor, heads: int, cu_seqlens: Tensor | None, v_first: bool = False) -> None:
        self.call, self.v_first, self.heads = call, v_first, heads
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.q, self.count, self.ids, self.some = q, q.shape[0], None, None
        if cu_seqlens is not None:
            integers(call, "cu_seqlens", cu_seqlens, "N + 1")
            on_device(call, "cu_seqlens", cu_seqlens, q.device, "q")
            require(q.shape[0] == 1, call, f"cu_seqlens packs sequences into one row, but q has {q.shape[0]} rows.")
            self.ids = within(call, None, segment_ids, cu_seqlens, q.shape[1])
            self.count, self.some = len(cu_seqlens) - 1, cu_seqlens.diff() > 0

    def start(self, name: str, state: Tensor | None, rows: int, columns: int) -> Tensor | None:
        """Return the initial state [n, H, rows, columns] of the n sequences that have tokens."""
        if state is None:
            return None
        sizes = (columns, rows) if self.v_first else (rows, columns)
        tensor(self.call, name, state, self.count, self.heads, *sizes, like=self.q, of="q")
        state = state.to(self.dtype)
        state = state.transpose(-1, -2) if self.v_first else state
        return state if self.some is None else state[self.some]

    def end(self, after: Tensor, lost: Tensor, initial: Tensor | None) -> Tensor:
        """Return the final state of all sequences. Heads that saw a non-finite token (`lost`) are NaN, and a sequence
        without tokens keeps its initial state."""
        after = torch.where(lost[..., None, None], torch.nan, after)
        after = after.transpose(-1, -2) if self.v_first else after
        if self.some is None:
            return after
        whole = after.new_zeros(self.count, *after.shape[1:]) if initial is None else initial.to(self.dtype)
        return whole.index_put((self.some,), after)


def fresh(state: Tensor) -> Tensor:
    """Return the flags [n, H] of states [n, H, ...] that saw no non-finite token."""
    return torch.zeros(state.shape[:2], dtype=torch.bool, device=state.device)


def form_of(call: str) -> Form:
    """Return the form of regard's function that `call` names."""
    return "recurrent" if call.startswith("fused_recurrent") else "chunked"
