"""Documents packed into the rows of a batch: where each one begins, from what callers and their collators say.

transformers and TRL pack documents one after the other into a row, and say where they begin in several ways: positions
that begin again, cumulative lengths (`cu_seq_lens_q`), or a number for each token's document (`segment_ids`,
`seq_idx`). All of them end here, as one tensor of segments.

Shapes: B batch, T tokens given now.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...checks import ArgumentError, require, shape

ARGUMENTS = ("segment_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""The keywords that say where documents begin, beside `position_ids`. Of the lengths (max_length_*) nothing is made."""
_MEND = (
    "a cache holds one document a row: call with use_cache=False (training keeps no cache by itself), or give each "
    "document a row of its own"
)


def take(packed: dict[str, Any], keywords: dict[str, Any]) -> dict[str, Any]:
    """`packed` with the keywords `ARGUMENTS`, which are removed from `keywords`, but for those that are None."""
    found = {**packed, **{name: keywords.pop(name) for name in ARGUMENTS if name in keywords}}
    return {name: given for name, given in found.items() if given is not None}


@dataclass(frozen=True)
class Documents:
    """Where documents begin.

    Attributes:
        source: the argument that says so.
        begins: boolean [B or 1, T], true at the first real token of each document but the first one of its row.
        faults: what may be wrong with the arguments, each with a boolean scalar that says whether it is.
    """

    source: str
    begins: Tensor
    faults: Mapping[str, Tensor]

    @classmethod
    def of(
        cls,
        call: str,
        tokens: tuple[int, int],
        real: Tensor | None,
        position_ids: Tensor | None,
        packing: Mapping[str, Any],
    ) -> Documents | None:
        """Read the arguments. No device is waited for.

        Args:
            call: how messages begin.
            tokens: (B, T).
            real: boolean [B, T], true where a token is not padding; None where all are real.
            position_ids: integers [B or 1, T], or None.
            packing: keywords of `ARGUMENTS`; what is None counts as not given.

        Returns:
            None where nothing is said of documents, or where there is one token, which begins none.

        Raises:
            ArgumentError: an unknown keyword, or a wrong type or shape.
        """
        faults: dict[str, Tensor] = {}
        sources = _sources(call, tokens, packing, faults)
        if tokens[1] == 1:
            return None
        begins, source = None, "position_ids"
        for name, numbers in sources.items():
            now, before, follows = _with_last(numbers, real)
            found = follows & (now != before)
            if begins is None:
                begins, source = found, name
            else:
                apart = f"{source} and {name} do not begin documents at the same tokens; give one of them"
                faults[apart] = (begins != found).any()
        if position_ids is not None:
            now, before, follows = _with_last(position_ids, real)
            again = follows & (now <= before)
            if begins is None:
                begins = again
            else:
                inside = f"position_ids do not grow inside a document of {source}; leave one of them out"
                faults[inside] = (again & ~begins).any()
        return None if begins is None else cls(source, begins, faults)

    def segments(self, call: str, *, cache_kept: bool, cache_asked: bool) -> Tensor | None:
        """Number the documents of each row.

        Looks at the tensors once, which waits for a device. A graph that is being compiled cannot look: there the
        faults are assertions inside the graph, and all calls count as packed that keep no cache.

        Args:
            call: how messages begin.
            cache_kept: whether a cache will be filled unless documents are packed.
            cache_asked: whether the caller asked for it.

        Returns:
            Integers [B or 1, T], from 0 on and growing by one at the first real token of each document, so that padding
            belongs to the document before it; None where every row is one document.

        Raises:
            ArgumentError: arguments that contradict each other, or packed documents with a cache that was asked for.
        """
        faults = dict(self.faults)
        if cache_asked:
            faults[f"{self.packed}, and a cache was asked for; {_MEND}"] = self.begins.any()
        if torch.compiler.is_compiling() and (cache_asked or not cache_kept):
            for message, flag in faults.items():
                torch._assert_async(~flag, f"{call}: {message}.")
            return None if cache_asked else self.begins.long().cumsum(1)
        packed, *found = torch.stack([self.begins.any(), *faults.values()]).tolist()
        for message, flag in zip(faults, found, strict=True):
            require(not flag, call, f"{message}.")
        return self.begins.long().cumsum(1) if packed else None

    def positions(self, places: Tensor) -> Tensor:
        """Count `places`, integers [B or 1, T] that never fall, anew from 0 in every document."""
        places, begins = torch.broadcast_tensors(places, self.begins)
        return places - torch.where(begins, places, places[:, :1]).cummax(1).values

    @property
    def packed(self) -> str:
        """What messages say."""
        return f"the rows hold several documents, as {self.source} has it"


def _with_last(x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """x [B or 1, T], what x is at the real token before each token, and whether token and predecessor are real."""
    if real is None:
        before = torch.cat([x[:, :1], x[:, :-1]], 1)
        follows = torch.arange(x.shape[1], device=x.device)[None] > 0
        return x, before, follows
    x = x.expand(real.shape)
    at = torch.arange(x.shape[1], device=x.device).expand(real.shape)
    last = torch.where(real, at, -1).cummax(1).values
    last = torch.nn.functional.pad(last[:, :-1], (1, 0), value=-1)
    return x, x.gather(1, last.clamp_min(0)), real & (last >= 0)


def _sources(
    call: str, tokens: tuple[int, int], packing: Mapping[str, Any], faults: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Numbers of documents, integers [B or 1, T], by the argument they come from; what may be wrong with these is added
    to `faults`."""
    for name in packing:
        require(name in ARGUMENTS, call, f"unknown argument {name!r}.")
    given = {name: packing[name] for name in ("segment_ids", "seq_idx") if packing.get(name) is not None}
    sources = {name: _numbers(call, name, numbers, tokens) for name, numbers in given.items()}
    lengths = _lengths(call, packing, tokens, faults)
    return sources if lengths is None else {**sources, "cu_seq_lens_q": lengths}


def _numbers(call: str, name: str, given: Any, tokens: tuple[int, int]) -> Tensor:
    """Numbers of documents, integers [B or 1, T]."""
    batch, length = tokens
    _integers(call, name, given, "[B or 1, T]")
    if tuple(given.shape) not in ((batch, length), (1, length)):
        raise ArgumentError(
            f"{call}: {name} has shape {shape(given)}, expected [B or 1, {length}]: the number of each token's "
            f"document."
        )
    return given


def _lengths(
    call: str, packing: Mapping[str, Any], tokens: tuple[int, int], faults: dict[str, Tensor]
) -> Tensor | None:
    """Numbers of documents [1, T] from cumulative lengths [documents + 1]; what may be wrong with them is added to
    `faults`."""
    given = {name: packing[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k") if packing.get(name) is not None}
    batch, length = tokens
    for name, ends in given.items():
        _integers(call, name, ends, "[documents + 1]")
        if ends.dim() != 1 or ends.shape[0] < 2:
            raise ArgumentError(
                f"{call}: {name} has shape {shape(ends)}, expected [documents + 1]: 0, and where each document ends."
            )
        if batch != 1:
            raise ArgumentError(
                f"{call}: {name} says how one row is packed, but {batch} rows are given; give segment_ids [B, T]."
            )
        wrong = (ends[0] != 0) | (ends[-1] != length) | (ends[1:] < ends[:-1]).any()
        faults[f"{name} must begin with 0, end with the number of tokens and never fall"] = wrong
    if not given:
        return None
    ends = next(iter(given.values()))
    for other in list(given.values())[1:]:
        if other.shape != ends.shape:
            raise ArgumentError(
                f"{call}: cu_seq_lens_q has shape {shape(ends)} and cu_seq_lens_k {shape(other)}; queries and keys are "
                f"the same tokens here, so give the same lengths."
            )
        faults["cu_seq_lens_q and cu_seq_lens_k differ; queries and keys are the same tokens here"] = (
            ends != other
        ).any()
    at = torch.arange(length, device=ends.device, dtype=ends.dtype)
    return torch.searchsorted(ends.contiguous(), at, right=True)[None]


def _integers(call: str, name: str, given: Any, axes: str) -> None:
    if not isinstance(given, Tensor):
        raise ArgumentError(f"{call}: {name} is a {type(given).__name__}, expected an integer tensor {axes}.")
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise ArgumentError(f"{call}: {name} has dtype {given.dtype}, expected integers {axes}.")
