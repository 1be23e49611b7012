"""Packed sequences given by their boundaries, as flash-attention gives them.

Legend: N sequences; `cu_seqlens` [N + 1] holds 0 and the end of each; T positions of all, H heads, D channels.
"""

from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..checks import ArgumentError, require, shape
from ..grammar import Spec
from .attention import attention

CALL = "varlen_attention"
LEFT_OUT = ("attn_mask", "query_offset", "segment_ids", "layout", "return_diagnostics")
"""Arguments of `regard.attention` that the boundaries replace, or that packed tensors do not have."""


def segment_ids(cu_seqlens: Tensor, length: int | None = None) -> Tensor:
    """Return the `segment_ids` of packed sequences whose boundaries are `cu_seqlens`.

    `regard.attention`, `linear_attention`, `delta_rule`, `mesa_attention` and their relatives take them.

    Args:
        cu_seqlens: integers [N + 1], 0 and the end of each sequence: [0, 5, 8] for lengths 5 and 3.
        length: T, the last entry of `cu_seqlens`; without it that entry is read, which synchronises a GPU.

    Returns:
        int64 [1, T], the number of the sequence of each position. A sequence without tokens has none.

    Raises:
        ArgumentError: not integers of one axis. On a CPU, and elsewhere under `regard.checks.debug`: entries that
            decrease, or that do not begin with 0 and end with `length`.
    """
    checks.optional_whole("segment_ids", "length", length, 0)
    return _ids("segment_ids", "cu_seqlens", cu_seqlens, length)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    spec: Spec | str = "softmax",
    **arguments: Any,
) -> Tensor:
    """Compute `regard.attention` separately for every packed sequence.

    Args:
        query, key, value: [Tq, H, D], [Tk, Hkv, D] and [Tk, Hkv, Dv], the sequences one after the other.
        cu_seqlens_q: integers [N + 1], the boundaries of the queries.
        cu_seqlens_k: the boundaries of the keys. None, or the same tensor as `cu_seqlens_q`: those of the queries, and
            only pairs inside a sequence are computed. With another tensor the sequences are computed as a batch padded
            to the longest, and the last query of each is aligned with its last key.
        max_seqlen_q, max_seqlen_k: lengths of the longest sequences, needed for the padded batch; without them they are
            read from the boundaries, which synchronises a GPU.
        spec, arguments: as in `regard.attention`: `is_causal`, `exclude_self`, `window`, `scale`, `params`,
            `enable_gqa`, `impl`. Tensors among them must not differ by position.

    Returns:
        The output [Tq, H, Dv] in the dtype of `query`. Queries of a sequence without keys are 0.

    Raises:
        ArgumentError: as `regard.attention` and `regard.segment_ids`; other arguments than those named; lengths below
            those of the sequences (on a CPU).

    Cost: that of `regard.attention`, with the padded batch for N sequences of the greatest lengths.
    """
    checks.tensor(CALL, "query", query, "Tq", "H", "D")
    checks.tensor(CALL, "key", key, "Tk", "Hkv", "D", like=query)
    checks.tensor(CALL, "value", value, "Tk", "Hkv", "Dv", like=query)
    same = len(key) == len(value)
    if not same:  # torch.compile cannot trace the text of a symbolic length
        raise ArgumentError(f"{CALL}: key has shape {shape(key)} and value {shape(value)}, expected the same length.")
    left = [name for name in LEFT_OUT if name in arguments]
    require(not left, CALL, f"does not take {', '.join(left)}; regard.attention does, with regard.segment_ids.")
    ids = _ids(CALL, "cu_seqlens_q", cu_seqlens_q, query)
    if cu_seqlens_k is None or cu_seqlens_k is cu_seqlens_q:
        require(len(key) == len(query), CALL, "cu_seqlens_k is missing: there are more or fewer keys than queries.")
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        out: Tensor = checks.within(CALL, None, attention, q, k, v, spec, segment_ids=ids, **arguments)
        return out[0].transpose(0, 1)
    _ids(CALL, "cu_seqlens_k", cu_seqlens_k, key)
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        raise ArgumentError(
            f"{CALL}: cu_seqlens_q has shape {shape(cu_seqlens_q)} and cu_seqlens_k {shape(cu_seqlens_k)}, expected as "
            f"many sequences of queries as of keys."
        )
    at_q, _ = _padded("max_seqlen_q", cu_seqlens_q, max_seqlen_q, len(query))
    at_k, real = _padded("max_seqlen_k", cu_seqlens_k, max_seqlen_k, len(key))
    q, k, v = (x[at].transpose(1, 2) for x, at in ((query, at_q), (key, at_k), (value, at_k)))
    offset = (cu_seqlens_k.diff() - cu_seqlens_q.diff()).long()
    how = {"attn_mask": real[:, None, None], "query_offset": offset, **arguments}
    rows = checks.within(CALL, None, attention, q, k, v, spec, **how).transpose(1, 2)
    return rows[ids[0], torch.arange(len(query), device=query.device) - cu_seqlens_q.long()[ids[0]]]


def _ids(call: str, name: str, ends: Tensor, of: Tensor | int | None) -> Tensor:
    """Return `segment_ids` after checking the boundaries, which are called `name`. They end at the length of `of`."""
    checks.integers(call, name, ends, "N + 1")
    require(len(ends) > 0, call, f"{name} is empty, expected 0 and the end of each sequence.")
    if isinstance(of, Tensor):
        checks.on_device(call, name, ends, of.device)
    known = ends.device.type != "meta"
    require(known or of is not None, call, f"{name} is on the meta device and cannot be read: length is needed.")
    length = len(of) if isinstance(of, Tensor) else int(ends[-1]) if of is None else of
    if known and (checks.debugging() or (ends.device.type == "cpu" and not torch.compiler.is_compiling())):
        rise = bool((ends.diff() >= 0).all()) and int(ends[0]) == 0
        require(rise, call, f"{name} is {checks.shown(ends.tolist())}, expected non-decreasing integers starting at 0.")
        what = {"cu_seqlens_q": "query has length", "cu_seqlens_k": "key has length"}.get(name, "length is")
        last = int(ends[-1])
        require(last == length, call, f"{what} {checks.shown(length)}, but {name} ends at {last}.")
    at = torch.arange(length, device=ends.device)
    return torch.searchsorted(ends.long()[1:], at, right=True)[None]


def _padded(name: str, ends: Tensor, longest: int | None, total: int) -> tuple[Tensor, Tensor]:
    """Return (the packed position of each place of a padded batch [N, L], which places are real); `name` is that of
    the argument `longest`."""
    lengths = ends.long().diff()
    if longest is None:
        longest = int(lengths.max()) if len(lengths) else 0
    longest = min(checks.whole(CALL, name, longest, 0), total)
    if ends.device.type == "cpu" and not torch.compiler.is_compiling() and len(lengths):
        require(longest >= int(lengths.max()), CALL, f"{name} is {longest}, but a sequence has {int(lengths.max())}.")
    position = torch.arange(longest, device=ends.device)
    real = position < lengths[:, None]
    return torch.where(real, ends.long()[:-1, None] + position, 0), real
