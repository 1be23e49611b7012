"""Where documents begin that are packed into the rows of a batch.

transformers and TRL mark packed documents by positions that restart, by cumulative lengths (`cu_seq_lens_q`) or by a
document number per token (`segment_ids`, `seq_idx`). All are converted to one tensor of segments here.

Shapes: B batch, T tokens in this call.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...checks import ArgumentError, integers, require, shape, token_numbers

ARGUMENTS = ("segment_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Keywords that say where documents begin, besides `position_ids`; max_length_* are accepted and ignored."""


def take(packed: dict[str, Any], keywords: dict[str, Any]) -> dict[str, Any]:
    """Move the keywords `ARGUMENTS` from `keywords` to `packed`; return it without those that are None."""
    merged = {**packed, **{name: keywords.pop(name) for name in ARGUMENTS if name in keywords}}
    return {name: given for name, given in merged.items() if given is not None}


@dataclass(frozen=True)
class Documents:
    """Where documents begin."""

    source: str  # the argument that says so
    begins: Tensor  # boolean [B or 1, T], True at the first real token of each document but the first one of its row
    faults: Mapping[str, Tensor]  # messages of possible mistakes, each with a boolean scalar, True if it was made

    @classmethod
    def of(
        cls, call: str, tokens: tuple[int, int], real: Tensor | None, position_ids: Tensor | None,
        packing: Mapping[str, Any],
    ) -> "Documents | None":  # fmt: skip
        """Read the arguments without waiting for the device; return None if none mentions documents, or if T = 1, where
        no document can begin. `real` [B, T] is False at padding, and `packing` has keywords of `ARGUMENTS`."""
        for name in packing:
            require(name in ARGUMENTS, call, f"unknown argument {name!r}.")
        given: dict[str, Any] = {name: value for name, value in packing.items() if value is not None}
        numbers: dict[str, Any] = {name: given[name] for name in ("segment_ids", "seq_idx") if name in given}
        for name, ids in numbers.items():
            token_numbers(call, name, ids, *tokens)
        faults: dict[str, Tensor] = {}
        ends: dict[str, Any] = {name: given[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k") if name in given}
        if ends:
            numbers["cu_seq_lens_q"] = _from_lengths(call, ends, tokens, faults)
        if position_ids is not None:
            numbers["position_ids"] = position_ids
        if tokens[1] == 1:
            return None
        begins, source = None, ""
        for name, ids in numbers.items():
            now, before, follows = _with_last(ids, real)
            starts = follows & (now <= before if name == "position_ids" else now != before)
            if begins is None:
                begins, source = starts, name
            elif name == "position_ids":
                message = f"position_ids do not grow inside a document of {source}; leave one of them out"
                faults[message] = (starts & ~begins).any()
            else:
                message = f"{source} and {name} do not begin documents at the same tokens; give one of them"
                faults[message] = (begins != starts).any()
        return None if begins is None else cls(source, begins, faults)

    def segments(self, call: str, *, cache_kept: bool, cache_asked: bool) -> Tensor | None:
        """Return the document numbers [B or 1, T] of each row, integers from 0 (padding belongs to the document before
        it), or None if every row is one document; refuse contradictions, and packed documents with a cache.

        The tensors are read once, which waits for the device. A graph that is being compiled cannot read them: the
        faults become assertions in the graph, and every call without a cache counts as packed. A cache is filled if
        rows are not packed (`cache_kept`), or the caller asked for one (`cache_asked`).
        """
        faults = dict(self.faults)
        if cache_asked:
            hint = "call with use_cache=False (the default in training), or give each document its own row"
            faults[f"{self.packed}, and a cache, which holds one per row, was asked for; {hint}"] = self.begins.any()
        if torch.compiler.is_compiling() and (cache_asked or not cache_kept):
            for message, flag in faults.items():
                torch._assert_async(~flag, f"{call}: {message}.")
            return None if cache_asked else self.begins.long().cumsum(1)
        packed, *made = torch.stack([self.begins.any(), *faults.values()]).tolist()
        for message, flag in zip(faults, made, strict=True):
            require(not flag, call, f"{message}.")
        return self.begins.long().cumsum(1) if packed else None

    def positions(self, increasing: Tensor) -> Tensor:
        """Return positions [B or 1, T] that never fall, restarted from 0 in every document."""
        increasing, begins = torch.broadcast_tensors(increasing, self.begins)
        return increasing - torch.where(begins, increasing, increasing[:, :1]).cummax(1).values

    @property
    def packed(self) -> str:
        """Return the statement, for messages, that rows are packed."""
        return f"the rows hold several documents according to {self.source}"


def _with_last(x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [B or 1, T], x at the real token before each token, and whether both of them are real."""
    if real is None:
        before = torch.cat([x[:, :1], x[:, :-1]], 1)
        return x, before, torch.arange(x.shape[1], device=x.device)[None] > 0
    x = x.expand(real.shape)
    index = torch.arange(x.shape[1], device=x.device).expand(real.shape)
    last = torch.where(real, index, -1).cummax(1).values
    last = torch.nn.functional.pad(last[:, :-1], (1, 0), value=-1)
    return x, x.gather(1, last.clamp_min(0)), real & (last >= 0)


def _from_lengths(call: str, given: dict[str, Any], tokens: tuple[int, int], faults: dict[str, Tensor]) -> Tensor:
    """Return document numbers [1, T] of cumulative lengths [documents + 1]; add possible mistakes to `faults`."""
    batch, length = tokens
    for name, ends in given.items():
        integers(call, name, ends, "documents + 1")
        if ends.shape[0] < 2:
            raise ArgumentError(f"{call}: {name} has shape {shape(ends)}, expected 0 and the end of each document.")
        if batch != 1:
            one = f"{name} says how one row is packed, but {batch} rows are given; give segment_ids [B, T]."
            raise ArgumentError(f"{call}: {one}")
        invalid = (ends[0] != 0) | (ends[-1] != length) | (ends[1:] < ends[:-1]).any()
        faults[f"{name} must begin with 0, end with the number of tokens and never fall"] = invalid
    ends, *others = given.values()
    for other in others:
        if other.shape != ends.shape:
            differ = f"cu_seq_lens_q has shape {shape(ends)} and cu_seq_lens_k {shape(other)}"
            raise ArgumentError(f"{call}: {differ}; queries and keys are the same tokens, so give the same lengths.")
        differ = (ends != other).any()
        faults["cu_seq_lens_q and cu_seq_lens_k differ; queries and keys are the same tokens here"] = differ
    index = torch.arange(length, device=ends.device, dtype=ends.dtype)
    return torch.searchsorted(ends.contiguous(), index, right=True)[None]
