"""Product-key memory whose sub-keys and values are fast weights, written while it is read (section 3 of the fast-weight
product-key-memory paper).

Tokens read slots as in `product_key`. After each chunk, what a token read is moved towards the value of the token after
it (`fast_weight_rules`). When chunks are read and written is described in `stream`.

Legend: B batch, T tokens, H heads, n sub-keys of a half, N = n^2 slots, k slots a head, K = H k, Dk width of a query
(two halves), Dv of a value.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..checks import ArgumentError, flag, instance, shape, tensor, within
from ..precision import full_precision
from .fast_weight_rules import WriteRule
from .fast_weight_state import FastWeightState, check_state
from .product_key import require_top_k
from .slot_memory import SlotMemory, WriteObserver, rounds_of
from .stream import Streams, check_tokens, flushed, follow
from .token_fields import finite_tokens

__all__ = ["FastWeightState", "SlotMemory", "WriteObserver", "WriteRule", "fast_weight_memory", "flush"]

CALL = "fast_weight_memory"


def fast_weight_memory(
    query: Tensor,
    value: Tensor,
    gate: Tensor | None,
    keys: Tensor,
    values: Tensor,
    memory: SlotMemory | None = None,
    *,
    state: FastWeightState | None = None,
    mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    frozen: bool = False,
    **options: Any,
) -> tuple[Tensor, FastWeightState]:
    """Read a product-key memory for every token, and write it chunk by chunk.

    The result does not depend on how a stream is cut into calls. Nothing is changed in place.

    Args:
        query: [B, T, H, Dk].
        value: [B, T, Dv]; that of a token is the target of the one before it.
        gate: [B, T], the weight of a token's error and, with `mix`, of what it reads; None for 1.
        keys: [H, 2, n, Dk/2], the first sub-keys of every memory that begins in this call.
        values: [N, Dv], the first values likewise; with a state, those that it began with (usually the same tensor).
        memory: how slots are found and written; None for the defaults.
        state: returned by the previous call; None at the beginning.
        mask: boolean [B, T], true where a token is real. Padding reads 0 and is otherwise as if removed.
        segment_ids: integers [B or 1, T]: a change between real tokens begins a new document with the first keys and
            values. The first document of a row continues from `state`, the last one leaves it.
        frozen: read only, and return the given state.
        options: changes to `memory`, by the names of `SlotMemory`, such as rule="paper", top_k=4 or shared=True.

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
    flag(CALL, "frozen", frozen)
    memory = SlotMemory.of(CALL, memory, options)
    _check_tensors(query, value, gate, keys, values, memory.top_k)
    check_tokens(CALL, query, mask, segment_ids, memory.shared, exports=True)
    batch, tokens = query.shape[:2]
    if state is None:
        start = keys.to(torch.promote_types(query.dtype, keys.dtype))
        impl = within(CALL, None, memory.store, values, query, keys)
        state = FastWeightState.empty(start, values, batch, shared=memory.shared, storage=memory.storage, impl=impl)
    else:
        state = check_state(CALL, state, keys, values, batch, memory.shared, memory.top_k)
    streams = Streams.of(query, mask, segment_ids, memory.shared)
    if streams.row:
        memory = replace(memory, row=torch.tensor(streams.row, device=query.device))
    with full_precision(query.device.type):
        new = _finite(query.to(state.keys.dtype), value, gate, state)
        new["position"] = _positions(state.seen, mask if streams.valid is not None else None, tokens, query.device)
        begun = streams.begin(state, {"initial_keys": keys.to(state.keys.dtype)})
        out, after = follow(memory, state, begun, new, streams, frozen)
    if not frozen:
        seen = [tokens] * batch if mask is None else mask.sum(1).tolist()
        after = replace(after, seen=tuple(a + b for a, b in zip(state.seen, seen, strict=True)))
    return out.to(value.dtype), after


def flush(state: FastWeightState, memory: SlotMemory | None = None, **options: Any) -> FastWeightState:
    """End the chunk here: write every waiting token whose target has arrived, and drop the last one of each row.

    Args:
        state: of `fast_weight_memory`.
        memory, options: as given there. Only rule, spec, score, meta_grad, observer and sync are used.

    Raises:
        ArgumentError: an unknown name or number, or tokens that were read under another rule.
    """
    call = f"{CALL}.flush"
    instance(call, "state", state, FastWeightState, "a FastWeightState")
    memory = SlotMemory.of(call, memory, {**options, "shared": state.shared})
    with full_precision(state.keys.device.type):
        return flushed(memory, state, memory.detach_every)


def _check_tensors(query: Tensor, value: Tensor, gate: Tensor | None, keys: Tensor, values: Tensor, top_k: int) -> None:
    tensor(CALL, "query", query, "B", "T", "H", "Dk")
    batch, tokens, heads, width = query.shape
    if width == 0 or width % 2:
        raise ArgumentError(f"{CALL}: query has shape {shape(query)}, expected [B, T, H, Dk] with an even Dk.")
    tensor(CALL, "keys", keys, heads, 2, "n", width // 2, like=query)
    tensor(CALL, "values", values, keys.shape[2] ** 2, "Dv", like=query)
    tensor(CALL, "value", value, batch, tokens, values.shape[1], like=query)
    if gate is not None:
        tensor(CALL, "gate", gate, batch, tokens, like=query)
    require_top_k(CALL, top_k, keys.shape[2])


def _finite(query: Tensor, value: Tensor, gate: Tensor | None, state: FastWeightState) -> dict[str, Tensor]:
    """Return `finite_tokens` of the fields in float32 at least, by the store's kernels if it has any."""
    fields = {"query": query, "value": value} if gate is None else {"query": query, "value": value, "gate": gate}
    wide = {name: x.to(torch.promote_types(x.dtype, torch.float32)) for name, x in fields.items()}
    rounds = None if torch.compiler.is_compiling() else rounds_of(state.values)
    return finite_tokens(wide) if rounds is None else finite_tokens(wide, rounds.clean)


def _positions(seen: Sequence[int], mask: Tensor | None, tokens: int, device: torch.device) -> Tensor:
    """Return for each token the number of real tokens before it in its row, [B, T]."""
    if mask is not None:
        return mask.cumsum(1) - 1 + torch.tensor(seen, device=device)[:, None]
    if len(set(seen)) == 1:
        return torch.arange(seen[0], seen[0] + tokens, device=device).expand(len(seen), tokens)
    before = torch.tensor(seen, device=device, dtype=torch.long)
    return before[:, None] + torch.arange(tokens, device=device)
