"""Product-key memory whose sub-keys and values are fast weights, written while it is read (section 3 of the fast-weight
product-key-memory paper).

Tokens read slots as in `product_key`. After each chunk, what a token read is moved towards the value of the token after
it (`fast_weight_rules`). When chunks are read and written is described in `stream`.

Legend: B batch, T tokens, H heads, n sub-keys of a half, N = n^2 slots, k slots a head, K = H k, Dk width of a query
(two halves), Dv of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..checks import ArgumentError, flags, floating, instance, refuse, require, shape, tensor, within
from ..grammar import Spec
from ..precision import full_precision
from .fast_weight_rules import WriteRule
from .fast_weight_state import FastWeightState, check_state
from .product_key import check_eps, require_top_k, slot_scores, weights_spec
from .slot_memory import Rounds, SlotMemory, WriteObserver
from .stores.slot_values import preferred, slot_values
from .stream import Streams, check_chunk, check_meta_grad, check_tokens, flushed, follow
from .tokens import finite_tokens

__all__ = ["FastWeightState", "WriteObserver", "WriteRule", "fast_weight_memory", "flush"]

CALL = "fast_weight_memory"


def fast_weight_memory(
    query: Tensor,
    value: Tensor,
    gate: Tensor | None,
    keys: Tensor,
    values: Tensor,
    *,
    rule: WriteRule | str = "normalized",
    top_k: int = 8,
    chunk_size: int = 512,
    spec: str | Spec = "softmax",
    score: str = "idw",
    eps: float = 1e-3,
    shared: bool = False,
    state: FastWeightState | None = None,
    mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    frozen: bool = False,
    mix: bool = False,
    meta_grad: bool | int = True,
    storage: torch.dtype | None = None,
    impl: str = "auto",
    observer: WriteObserver | None = None,
    sync: str | None = None,
) -> tuple[Tensor, FastWeightState]:
    """Read a product-key memory for every token, and write it chunk by chunk.

    The result does not depend on how a stream is cut into calls. Nothing is changed in place.

    Args:
        query: [B, T, H, Dk].
        value: [B, T, Dv]; that of a token is the target of the one before it.
        gate: [B, T], the weight of a token's error and, with `mix`, of what it reads; None for 1.
        keys: [H, 2, n, Dk/2], the first sub-keys of every memory that begins in this call.
        values: [N, Dv], the first values likewise; with a state, those that it began with (usually the same tensor).
        rule: how a chunk is written, or the name of its step: "normalized", "paper", "reference".
        top_k: k, from 1 to n.
        chunk_size: tokens between two writes, >= 2 (>= 1 if a token's target is its own value). It may change from
            call to call.
        spec: of the weights of a token's K selected slots, all heads together (`product_key.slot_weights`).
        score: of the halves, "idw" or "dot"; eps, > 0, is added to squared distances.
        shared: one memory for the whole batch; a chunk counts the columns in which any row has a token. Otherwise each
            sequence has its own.
        state: returned by the previous call; None at the beginning.
        mask: boolean [B, T], true where a token is real. Padding reads 0 and is otherwise as if removed.
        segment_ids: integers [B or 1, T]: a change between real tokens begins a new document with the first keys and
            values. The first document of a row continues from `state`, the last one leaves it.
        frozen: read only, and return the given state.
        mix: return g v^ + (1 - g) v (equation 24), or v^ + v without gates, instead of v^.
        meta_grad: gradients flow through all writes (True), none (False), or are cut after every m-th.
        storage: dtype of written values; None for that of `values`.
        impl: how a new stream stores values: "reference" (whole tables), "sparse" (only written rows), "triton" (CUDA
            devices: whole tables written in place, by kernels that also search, read and move keys), or "auto" (triton
            where its kernels can do what is asked, otherwise sparse).
        observer: an object that receives every read and write.
        sync: "all_gather": every process of torch.distributed writes the tokens of all processes into its shared
            memory, as one process with the whole batch would. All must give equal shapes; gradients stay within a
            process.

    Returns:
        (what was read, v^ [B, T, Dv] in the dtype of `value`, or its mix; the state after the call). A token with a
        non-finite query, value or gate keeps its place in the chunk, but its output is 0, and it is neither written,
        nor a target, nor counted.

    Raises:
        ArgumentError: shapes or dtypes that do not fit, numbers out of range, or a state of another memory.

    Precision: float32 at least, whatever the inputs and autocast. Differentiable in query, value, gate, keys and
    values; to any order with impl="reference".
    Cost per token: O(H n Dk) for the search and O(K Dv) for reading and writing. Without mask and segment_ids, only the
    sparse store waits for the device (it counts the rows that it touches).
    """
    flags(CALL, shared=shared, frozen=frozen, mix=mix)
    memory = replace(_memory(CALL, rule, top_k, spec, score, eps, observer, sync, shared), mix=mix)
    chunk = check_chunk(CALL, chunk_size, 2 if memory.rule.look_ahead else 1)
    detach_every = check_meta_grad(CALL, meta_grad)
    _check_tensors(query, value, gate, keys, values, top_k)
    check_tokens(CALL, query, mask, segment_ids, shared, exports=True)
    check_storage(CALL, storage)
    batch, tokens = query.shape[:2]
    if state is None:
        start = keys.to(torch.promote_types(query.dtype, keys.dtype))
        impl = _store(impl, values, storage, query, keys, top_k, memory.kind)
        state = FastWeightState.empty(start, values, batch, shared=shared, storage=storage, impl=impl)
    else:
        state = check_state(CALL, state, keys, values, batch, shared, top_k)
    streams = Streams.of(query, mask, segment_ids, shared)
    if streams.row:
        memory = replace(memory, row=torch.tensor(streams.row, device=query.device))
    with full_precision(query.device.type):
        new = _finite(query.to(state.keys.dtype), value, gate, state)
        new["position"] = _positions(state.seen, mask if streams.valid is not None else None, tokens, query.device)
        begun = streams.begin(state, {"initial_keys": keys.to(state.keys.dtype)})
        out, after = follow(memory, state, begun, new, streams, chunk, detach_every, frozen)
    if not frozen:
        seen = [tokens] * batch if mask is None else mask.sum(1).tolist()
        after = replace(after, seen=tuple(a + b for a, b in zip(state.seen, seen, strict=True)))
    return out.to(value.dtype), after


def check_storage(call: str, storage: Any) -> None:
    """Check that `storage` is None or a floating-point dtype of two bytes and more."""
    known = isinstance(storage, torch.dtype) and storage.is_floating_point and storage.itemsize > 1
    if storage is not None and not known:
        raise refuse(call, "storage", storage, "torch.float32, torch.bfloat16, torch.float64 or None")


def _store(impl: str, values: Tensor, *needs: Any) -> str:
    """Return the name of the store for `impl`, after checking that it can do what is needed."""
    if impl == "auto":
        return preferred(values, *needs)
    refuses = getattr(slot_values.given(CALL, "impl", impl), "refuses", None)
    reason = None if refuses is None else refuses(values, *needs)
    require(reason is None, CALL, f"impl={impl!r} {reason}. impl='reference' can.")
    return impl


def flush(
    state: FastWeightState,
    *,
    rule: WriteRule | str = "normalized",
    spec: str | Spec = "softmax",
    score: str = "idw",
    meta_grad: bool | int = True,
    observer: WriteObserver | None = None,
    sync: str | None = None,
    **others: Any,
) -> FastWeightState:
    """End the chunk here: write every waiting token whose target has arrived, and drop the last one of each row.

    Args:
        state: of `fast_weight_memory`.
        rule, spec, score, meta_grad, observer, sync: as given there.
        others: other arguments given there; not used.

    Raises:
        ArgumentError: an unknown name or number, or tokens that were read under another rule.
    """
    call = f"{CALL}.flush"
    instance(call, "state", state, FastWeightState, "a FastWeightState")
    memory = _memory(call, rule, 1, spec, score, 1e-3, observer, sync, state.shared)
    detach_every = check_meta_grad(call, meta_grad)
    with full_precision(state.keys.device.type):
        return flushed(memory, state, detach_every)


def _memory(
    call: str,
    rule: WriteRule | str,
    top_k: int,
    spec: str | Spec,
    score: str,
    eps: float,
    observer: WriteObserver | None,
    sync: str | None,
    shared: bool,
) -> SlotMemory:
    eps = check_eps(call, "eps", eps)
    check_sync(call, sync, shared)
    if observer is not None and not all(callable(getattr(observer, n, None)) for n in ("on_read", "on_write")):
        raise refuse(call, "observer", observer, "an object with on_read and on_write, or None")
    kind, known = slot_scores.given(call, "score", score)(), weights_spec(call, spec)
    return SlotMemory(within(call, "rule", WriteRule.of, rule), top_k, kind, eps, known, observer, sync)


def check_sync(call: str, sync: Any, shared: bool) -> None:
    """Check that `sync` is None, or "all_gather" for a shared memory."""
    if sync is not None and not (isinstance(sync, str) and sync == "all_gather"):
        raise refuse(call, "sync", sync, "None or 'all_gather'")
    require(sync is None or shared, call, "sync='all_gather' is for one memory of all processes; give shared=True.")


def _check_tensors(query: Tensor, value: Tensor, gate: Tensor | None, keys: Tensor, values: Tensor, top_k: int) -> None:
    floating(CALL, "query", query)
    for name, given in {"value": value, "gate": gate, "keys": keys, "values": values}.items():
        if given is not None or name != "gate":
            tensor(CALL, name, given, like=query)
    if query.dim() != 4 or query.shape[-1] == 0 or query.shape[-1] % 2:
        raise ArgumentError(f"{CALL}: query is {shape(query)}, expected [B, T, H, Dk] with an even Dk.")
    batch, tokens, heads, width = query.shape
    if keys.dim() != 4 or tuple(keys.shape[:2]) != (heads, 2) or keys.shape[-1] != width // 2:
        raise ArgumentError(
            f"{CALL}: keys is {shape(keys)}, but query {shape(query)} needs [{heads}, 2, n, {width // 2}]."
        )
    slots = keys.shape[2] ** 2
    if values.dim() != 2 or values.shape[0] != slots or tuple(value.shape) != (batch, tokens, values.shape[1]):
        raise ArgumentError(
            f"{CALL}: values is {shape(values)} and value {shape(value)}, expected [{slots}, Dv] and [{batch}, "
            f"{tokens}, Dv] for query {shape(query)} and keys {shape(keys)}."
        )
    if gate is not None and tuple(gate.shape) != (batch, tokens):
        raise ArgumentError(f"{CALL}: gate is {shape(gate)}, expected [{batch}, {tokens}], as query {shape(query)}.")
    require_top_k(CALL, top_k, keys.shape[2])


def _finite(query: Tensor, value: Tensor, gate: Tensor | None, state: FastWeightState) -> dict[str, Tensor]:
    """Return the fields of the tokens in float32 at least, as `finite_tokens` does, by the store's kernels if it has
    any."""
    fields = {"query": query, "value": value} if gate is None else {"query": query, "value": value, "gate": gate}
    wide = {name: x.to(torch.promote_types(x.dtype, torch.float32)) for name, x in fields.items()}
    if isinstance(state.values, Rounds) and not torch.compiler.is_compiling():
        return finite_tokens(wide, state.values.clean)
    return finite_tokens(wide)


def _positions(seen: Sequence[int], mask: Tensor | None, tokens: int, device: torch.device) -> Tensor:
    """Return for each token the number of real tokens before it in its row, [B, T]."""
    if mask is not None:
        return mask.cumsum(1) - 1 + torch.tensor(seen, device=device)[:, None]
    if len(set(seen)) == 1:
        return torch.arange(seen[0], seen[0] + tokens, device=device).expand(len(seen), tokens)
    before = torch.tensor(seen, device=device, dtype=torch.long)
    return before[:, None] + torch.arange(tokens, device=device)
