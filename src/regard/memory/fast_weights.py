"""Product-key memory whose sub-keys and values are fast weights, written while it is read (section 3 of the fast-weight
product-key-memory paper).

Tokens read slots as in `product_key`. After each chunk, what a token read is moved towards the value of the token after
it (`fast_weight_rules`). `stream` describes when chunks are read and written.

Legend: B batch, R streams (rows of the batch, or documents packed into rows), M memories (R, or 1 if the batch shares
one), T tokens of a call, w of a read, P of a write in one memory, H heads, n sub-keys of a half, N = n^2 slots, k slots
a head, K = H k, Dk width of a query (two halves), Dv of a value.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..checks import ArgumentError, choice, flag, flags, instance, refuse, require, shape, tensor, within
from ..grammar import Spec
from ..precision import full_precision
from .fast_weight_rules import WriteRule, Written
from .fast_weight_state import FastWeightState, check_state
from .product_key import SOFTMAX, SlotScore, check_eps, require_top_k, search, slot_scores, weigh, weights_spec
from .stores.slot_values import SlotValues, preferred, slot_values
from .stream import ChunkMemory, Streams, check_chunk, check_meta_grad, check_tokens, flushed, follow
from .token_fields import Tensors, finite_tokens, hidden_where, joined, marked

__all__ = ["FastWeightState", "SlotMemory", "WriteObserver", "WriteRule", "fast_weight_memory", "flush"]

CALL = "fast_weight_memory"
BLOCK = 8192  # tokens of the batch that are read at once, however large the chunk


class WriteObserver(Protocol):
    """An object that receives all reads and writes; its tensors carry no gradient."""

    def on_read(self, slots: Tensor, weights: Tensor, position: Tensor, valid: Tensor, row: Tensor) -> None:
        """Take the slots and weights [M, P, K] of tokens, their `position` [M, P] in the stream of batch row `row`
        [M, P], and `valid` [M, P], which of them exist."""
        return

    def on_write(
        self, slots: Tensor, shares: Tensor, position: Tensor, target: Tensor, written: Tensor, row: Tensor
    ) -> None:
        """Take the slots and shares [M, P, K] of the tokens at `position` [M, P]: where `written`, each slot moves by
        that share of the token's error towards the value of the token at position `target` [M, P]."""
        return


def rounds_of(values: SlotValues) -> Any:
    """Return a store that has kernels for whole reads and writes (`triton.memory.values.TableValues`), else None."""
    return values if hasattr(values, "looked") else None


def mixed(read: Tensor, value: Tensor, gate: Tensor | None) -> Tensor:
    """Return g read + (1 - g) v for tokens [..., Dv] and their gates [...], or read + v without gates (equation 24)."""
    value = value.to(read.dtype)
    return read + value if gate is None else torch.lerp(value, read, gate[..., None].to(read.dtype))


@dataclass(frozen=True, eq=False)
class SlotMemory(ChunkMemory):
    """How a fast-weight product-key memory is read and written: the settings of `fast_weight_memory`.

    Args:
        rule: how a chunk is written, or the name of its step: "normalized", "paper", "reference".
        top_k: k, from 1 to n.
        chunk_size: tokens between two writes, >= 2 (>= 1 if a token's target is its own value). It may change from
            call to call.
        spec: of the weights of a token's K selected slots, all heads together (`product_key.slot_weights`).
        score: of the halves, "idw" or "dot"; eps, > 0, is added to squared distances.
        shared: one memory for the whole batch; a chunk counts the columns in which any row has a token. Otherwise each
            sequence has its own.
        mix: return g v^ + (1 - g) v (equation 24), or v^ + v without gates, instead of v^.
        meta_grad: gradients flow through all writes (True), none (False), or are cut after every m-th.
        storage: dtype of written values; None for that of `values`.
        impl: how a new stream stores values: "reference" (whole tables), "sparse" (only written rows), "triton" (CUDA
            devices: whole tables written in place, by kernels that also search, read and move keys), or "auto" (triton
            where its kernels can do what is asked, otherwise sparse; reference under forward mode or a torch.func
            transform).
        observer: an object that receives every read and write.
        sync: "all_gather": every process of torch.distributed writes the tokens of all processes into its shared
            memory, as one process with the whole batch would. All must give equal shapes; gradients stay within a
            process.
        row: int64 [R], the batch row of each stream; None: the streams are the rows. `fast_weight_memory` sets it.

    Raises:
        ArgumentError: an unknown name, or a number out of range.
    """

    rule: WriteRule = field(default_factory=WriteRule)
    top_k: int = 8
    chunk_size: int = 512
    spec: Spec = SOFTMAX
    score: str = "idw"
    eps: float = 1e-3
    shared: bool = False
    mix: bool = False
    meta_grad: bool | int = True
    storage: torch.dtype | None = None
    impl: str = "auto"
    observer: WriteObserver | None = None
    sync: str | None = None
    row: Tensor | None = None

    def __post_init__(self) -> None:
        call, observer, rule = "SlotMemory", self.observer, self.rule
        flags(call, shared=self.shared, mix=self.mix)
        if not isinstance(rule, WriteRule):
            rule = within(call, "rule", WriteRule, instance(call, "rule", rule, str, "a WriteRule or its name"))
        known = {"rule": rule, "spec": weights_spec(call, self.spec), "eps": check_eps(call, "eps", self.eps)}
        known["chunk_size"] = check_chunk(call, self.chunk_size, 2 if rule.look_ahead else 1)
        for name, value in known.items():
            object.__setattr__(self, name, value)
        slot_scores.given(call, "score", self.score)
        check_meta_grad(call, self.meta_grad)
        check_storage(call, self.storage)
        check_sync(call, self.sync, self.shared)
        if observer is not None and not all(callable(getattr(observer, n, None)) for n in ("on_read", "on_write")):
            raise refuse(call, "observer", observer, "an object with on_read and on_write, or None")

    @property
    def kind(self) -> SlotScore:
        return slot_scores.get(self.score)()

    def store(self, values: Tensor, query: Tensor, keys: Tensor) -> str:
        """Return the name of the store of a new stream, after checking that it can do what is needed."""
        needs = (values, self.storage, query, keys, self.top_k, self.kind)
        if self.impl == "auto":
            return preferred(*needs)
        refuses = getattr(slot_values.given("SlotMemory", "impl", self.impl), "refuses", None)
        reason = None if refuses is None else refuses(*needs)
        require(reason is None, "SlotMemory", f"impl={self.impl!r} {reason}. impl='reference' can.")
        return self.impl

    def read(self, state: FastWeightState, tokens: Tensors, keep: bool) -> tuple[Tensor, Tensors]:
        """Return what the tokens read, or its mix, [R, w, Dv], and (if `keep`) the fields that a write needs."""
        streams, width = tokens["value"].shape[:2]
        size = max(1, BLOCK // max(1, streams))
        if width <= size:
            return self._read(state, tokens)
        starts = range(0, width, size)
        parts = [self._read(state, {n: x[:, i : i + size] for n, x in tokens.items()}) for i in starts]
        outs, kept = zip(*parts, strict=True)
        return torch.cat(outs, 1), joined(kept) if keep else {}

    def _read(self, state: FastWeightState, tokens: Tensors) -> tuple[Tensor, Tensors]:
        out, result = self._looked(state, tokens)
        if self.observer is not None:
            slots, weights, position = result["slots"], result["weights"].detach(), tokens["position"]
            valid = tokens.get("good", torch.ones_like(position, dtype=torch.bool))
            seen = (slots.flatten(-2), weights.flatten(-2), position, valid, self._rows(valid))
            self.observer.on_read(*(by_memory(x, state) for x in seen))
        fields = {**tokens, **result}
        return out, {name: fields[name] for name in self.rule.fields if name in fields}

    def _looked(self, state: FastWeightState, tokens: Tensors) -> tuple[Tensor, Tensors]:
        """Return what the tokens read, or its mix, and the resulting fields."""
        query, good, keys = tokens["query"], tokens.get("good"), state.keys
        rounds = None if torch.compiler.is_compiling() else rounds_of(state.values)
        looked = None if rounds is None else rounds.looked(self, keys, tokens)
        if looked is not None:
            return looked
        best = search(query, keys[0] if len(keys) == 1 else keys, self.top_k, self.kind, self.eps)
        weights = weigh(best.scores.flatten(-2), self.spec)
        slots = by_memory(best.slots.flatten(-2), state)
        read = state.values.read(by_memory(weights, state), slots).view(*query.shape[:2], state.values.width)
        read = read if good is None else hidden_where(~good, read)
        out = mixed(read, tokens["value"], tokens.get("gate")) if self.mix else read
        out = out if good is None or not self.mix else hidden_where(~good, out)
        halves = {"halves": best.halves, "half_scores": best.half_scores, "scores": best.scores}
        return out, {"slots": best.slots, "weights": weights.view_as(best.slots), "read": read, **halves}

    def write(self, state: FastWeightState, tokens: Tensors, following: Tensors | None) -> dict[str, Any]:
        new, rounds = None, rounds_of(state.values)
        if rounds is not None and self.observer is None and self.sync is None:
            new = rounds.rewritten(self, state.keys, tokens, following)
        if new is None:
            written = self._paired(state, tokens, following)
            if self.sync is not None:
                written = written.map(_of_all_processes)
            shares = (self.rule.steps(written)[..., None, None] * written.weights).flatten(-2)
            keys = self.rule.moved_keys(state.keys, state.values, written, self.kind, self.spec)
            new = keys, state.values.write(written.slots.flatten(-2), shares, written.errors, written.counted)
        return {"keys": new[0], "values": new[1]}

    def _paired(self, state: FastWeightState, tokens: Tensors, following: Tensors | None) -> Written:
        """Return the tokens of a write, with their errors."""
        tokens = marked(tokens)
        good, value, position = tokens["good"], tokens["value"], tokens["position"]
        target, at, written = value, position, good
        if self.rule.look_ahead:
            target, at, there = _next(tokens, following if self.rule.border else None)
            written = good & there
        read = tokens["read"]
        parts = {
            "slots": torch.where(good[..., None, None], tokens["slots"], 0),
            "errors": torch.where(written[..., None], read - target.to(read.dtype), 0),
            "counted": good,
            "written": written,
            **{n: tokens.get(n) for n in ("weights", "gate", "query", "halves", "half_scores", "scores")},
        }
        pairs = Written(**{n: None if x is None else by_memory(x, state) for n, x in parts.items()})
        if self.observer is not None:
            with torch.no_grad():
                shares = (self.rule.steps(pairs)[..., None, None] * pairs.weights).flatten(-2)
            source, to, row = (by_memory(x, state) for x in (position, at, self._rows(position)))
            self.observer.on_write(pairs.slots.flatten(-2), shares, source, to, pairs.written, row)
        return pairs

    def _rows(self, like: Tensor) -> Tensor:
        """Return the batch row of tokens [R, w]."""
        rows = torch.arange(len(like), device=like.device) if self.row is None else self.row
        return rows[:, None].expand_as(like)


def by_memory(x: Tensor, state: FastWeightState) -> Tensor:
    """Reshape [R, w, ...] to [M, P, ...]."""
    return x.reshape(1, -1, *x.shape[2:]) if state.shared else x


def _next(tokens: Tensors, following: Tensors | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each token the next good one of its stream: value, position, and whether there is one."""
    value, position, good = tokens["value"], tokens["position"], tokens["good"]
    if following is None:
        following = {"value": value[:, :1], "position": position[:, :1], "good": torch.zeros_like(good[:, :1])}
    last = following.get("good", torch.ones_like(good[:, :1]))
    end = good.shape[1]
    at = torch.where(torch.cat([good, last], 1), torch.arange(end + 1, device=good.device), end + 1)
    at = at.flip(1).cummin(1).values.flip(1)[:, 1:]
    there, at = at <= end, at.clamp(max=end)
    value = torch.cat([value, following["value"]], 1).gather(1, at[..., None].expand(*at.shape, value.shape[-1]))
    return value, torch.cat([position, following["position"]], 1).gather(1, at), there


def _of_all_processes(x: Tensor) -> Tensor:
    """Gather [1, P, ...] of W processes as [1, W P, ...], in their order; only this process's part has a gradient."""
    from torch import distributed

    needs = "sync='all_gather' needs torch.distributed; call init_process_group() first."
    require(distributed.is_initialized(), CALL, needs)
    local = x.to(torch.uint8) if x.dtype == torch.bool else x
    parts = [torch.empty_like(local) for _ in range(distributed.get_world_size())]
    distributed.all_gather(parts, local.detach().contiguous())
    parts[distributed.get_rank()] = local
    return torch.cat(parts, 1).to(x.dtype)


def check_storage(call: str, storage: Any) -> None:
    """Check that `storage` is None or a floating-point dtype of two bytes and more."""
    known = isinstance(storage, torch.dtype) and storage.is_floating_point and storage.itemsize > 1
    if storage is not None and not known:
        raise refuse(call, "storage", storage, "torch.float32, torch.bfloat16, torch.float64 or None")


def check_sync(call: str, sync: Any, shared: bool) -> None:
    """Check that `sync` is None, or "all_gather" for a shared memory."""
    choice(call, "sync", sync, (None, "all_gather"))
    require(sync is None or shared, call, "sync='all_gather' is for one memory of all processes; give shared=True.")


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
        non-finite query, value or gate keeps its place, but reads 0 and is neither written, nor a target, nor counted.

    Raises:
        ArgumentError: shapes or dtypes that do not fit, numbers out of range, or a state of another memory.

    Precision: float32 at least, also under autocast. Differentiable in all tensors; to any order with impl="reference".
    Cost per token: O(H n Dk) for the search and O(K Dv) for reading and writing. Without mask and segment_ids, only the
    sparse store waits for the device (it counts the rows that it touches).
    """
    flag(CALL, "frozen", frozen)
    memory = SlotMemory.of(CALL, memory, options)
    _check_tensors(query, value, gate, keys, values, memory.top_k)
    check_tokens(CALL, query, mask, segment_ids, memory.shared, exports=True)
    state = _start(memory, state, query, keys, values)
    streams = Streams.of(query, mask, segment_ids, memory.shared)
    if streams.row:
        memory = replace(memory, row=torch.tensor(streams.row, device=query.device))
    with full_precision(query.device.type):
        new = _fields(query, value, gate, state, mask if streams.valid is not None else None)
        begun = streams.begin(state, {"initial_keys": keys.to(state.keys.dtype)})
        out, after = follow(memory, state, begun, new, streams, frozen)
    if not frozen:
        counts = [query.shape[1]] * len(query) if mask is None else mask.sum(1).tolist()
        after = replace(after, seen=tuple(a + b for a, b in zip(state.seen, counts, strict=True)))
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
    axes = ", with the heads of query and half its width"
    tensor(CALL, "keys", keys, heads, 2, "n", width // 2, like=query, why=axes)
    tensor(CALL, "values", values, keys.shape[2] ** 2, "Dv", like=query, why=", with the square of n in keys")
    axes = ", with the B and T of query and the width of values"
    tensor(CALL, "value", value, batch, tokens, values.shape[1], like=query, why=axes)
    if gate is not None:
        tensor(CALL, "gate", gate, batch, tokens, like=query)
    require_top_k(CALL, top_k, keys.shape[2])


def _start(
    memory: SlotMemory, state: FastWeightState | None, query: Tensor, keys: Tensor, values: Tensor
) -> FastWeightState:
    """Return the state that a call begins with."""
    if state is not None:
        return check_state(CALL, state, keys, values, len(query), memory.shared, memory.top_k)
    first = keys.to(torch.promote_types(query.dtype, keys.dtype))
    impl = within(CALL, None, memory.store, values, query, keys)
    return FastWeightState.empty(first, values, len(query), shared=memory.shared, storage=memory.storage, impl=impl)


def _fields(query: Tensor, value: Tensor, gate: Tensor | None, state: FastWeightState, mask: Tensor | None) -> Tensors:
    """Return positions and `finite_tokens` of the inputs, in float32 at least, by the store's kernels if it has any."""
    fields = {"query": query.to(state.keys.dtype), "value": value} | ({} if gate is None else {"gate": gate})
    wide = {name: x.to(torch.promote_types(x.dtype, torch.float32)) for name, x in fields.items()}
    rounds = None if torch.compiler.is_compiling() else rounds_of(state.values)
    fields = finite_tokens(wide) if rounds is None else finite_tokens(wide, rounds.clean)
    return {**fields, "position": _positions(state.seen, mask, query.shape[1], query.device)}


def _positions(seen: Sequence[int], mask: Tensor | None, tokens: int, device: torch.device) -> Tensor:
    """Return for each token the number of real tokens before it in its row, [B, T]."""
    if mask is None and len(set(seen)) == 1:
        return torch.arange(seen[0], seen[0] + tokens, device=device).expand(len(seen), tokens)
    places = torch.arange(tokens, device=device) if mask is None else mask.cumsum(1) - 1
    return torch.tensor(seen, device=device, dtype=torch.long)[:, None] + places
