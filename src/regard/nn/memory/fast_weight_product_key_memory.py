"""A memory layer of n^2 slots that is written while it is read: Fast-weight Product Key Memory (FwPKM;
arXiv:2601.00671, section 3).

Shapes: B batch, T tokens, C model width, H heads, n sub-keys of a half, N = n^2 slots, k slots read by a head, Dk width
of a query (two halves), Dv of a value.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...checks import ArgumentError, choice, require, shape, within
from ...memory.fast_weights import FastWeightState, SlotMemory, WriteRule, fast_weight_memory, flush
from ...memory.product_key import weights_spec
from ...one_node import one_node
from ...precision import transformed
from ..arguments import described, positive_int
from ..memories import memory_layers
from ..memory_trace import MemoryObserver
from .fast_weight_config import FastWeightConfig, as_dtype
from .projections import FastWeightLayer, Projected, Tokens

CALL = "nn.FastWeightProductKeyMemory"
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"step_rule": "paper", "learning_rate": 1.0, "address_weight": 10.0, "border": True},
    "program": {
        "step_rule": "reference",
        "learning_rate": 1.0,
        "address_weight": 1.0,
        "key_update": "pooled-entropy",
        "border": False,
    },
}
"""How the paper and the released program write. A shared or resident memory is a separate option."""


@memory_layers.register("fwpkm")
class FastWeightProductKeyMemory(FastWeightLayer):
    """Product-key memory that is written at test time (FwPKM).

    Every token reads the k slots nearest to its query. After every chunk of tokens, the slots that a token read move
    towards the value of the next token, so that the same query later reads this value.

        q, v, g = projections of the token (`nn.memory.projections`)    read = sum_j w_j V_j, j in the k slots of q
        out = W_o rms(g read + (1 - g) v)                               to be added to the residual stream

    Chunks, padding, non-finite tokens and further attributes are those of `FastWeightLayer`.

    Args:
        hidden_size: C.
        config: the settings, in groups; None for the defaults.
        options: changes to them, by the names of `FastWeightConfig.with_options`, such as `sub_keys=64`.

    Attributes:
        keys: [H, 2, n, Dk/2], uniform in +-1/sqrt(Dk) at the start.
        values: [N, Dv], N(0, 1/Dv) at the start. Keys and values are buffers, which no optimiser moves and only a
            resident memory changes, or parameters (`learn_initial`).
        observer: None, or a `MemoryObserver` that receives every read and write.
        slots: N.

    Under DistributedDataParallel every process has memories of its own (unless sync="all_gather"), and a checkpoint
    saves the resident memory of the process that writes it. Pass `broadcast_buffers=False`: sending `keys` and `values`
    at every step would cost 4 N Dv bytes and replace the other processes' resident memories.

    A resident memory changes once for every call, also where activations are computed again in the backward pass
    (`torch.utils.checkpoint`), if that happens before the next call.

    Raises:
        ArgumentError: sizes, numbers or names that do not fit, or options that exclude each other.

    Cost of a call: O(T (C Dk H + C Dv)) for the projections and O(T H (n Dk + k Dv)) for reading and writing; a
    resident memory is copied once per call, N Dv numbers. Under torch.compile, reading a frozen memory is part of the
    graph (without gradients to what a state has written), writing is not. Under torch.export the memory is one node,
    and the state is None.
    """

    call = CALL
    defaults: ClassVar[Mapping[str, Any]] = FastWeightConfig.defaults()
    keys: Tensor
    values: Tensor
    seed: Tensor

    def __init__(self, hidden_size: int, config: FastWeightConfig | None = None, **options: Any) -> None:
        super().__init__()
        positive_int(CALL, "hidden_size", hidden_size)
        config = FastWeightConfig() if config is None else config
        if not isinstance(config, FastWeightConfig):
            raise ArgumentError(f"{CALL}: config is a {type(config).__name__}, expected a FastWeightConfig or None.")
        config = within(CALL, None, config.with_options, **options)
        table, mix, store = config.table, config.mix, config.store
        self.heads, self.slots, self.chunk_size = table.heads, table.sub_keys**2, config.chunk_size
        self.resident, self.observer = store.resident, None
        self.settings = SlotMemory(
            config.rule, table.top_k, config.chunk_size, weights_spec(CALL, table.spec), table.score, table.idw_eps,
            store.shared, meta_grad=config.meta_grad, storage=store.storage, impl=store.impl, sync=store.sync,
        )  # fmt: skip
        first = {"keys": (table.heads, 2, table.sub_keys, table.key_dim // 2), "values": (self.slots, table.value_dim)}
        sizes = (hidden_size, table.heads * table.key_dim, table.value_dim)
        self._make(*sizes, first, store.learn_initial, **asdict(mix))
        if store.resident:
            self.register_buffer("seed", torch.zeros((), dtype=torch.long))
        self._held: FastWeightState | None = None
        self.reset_parameters()

    @classmethod
    def from_preset(cls, preset: str, hidden_size: int, **options: Any) -> "FastWeightProductKeyMemory":
        """Return the layer with the options of a preset, "paper" or "program", changed by those given."""
        choice(f"{CALL}.from_preset", "preset", preset, PRESETS)
        return cls(hidden_size, **{**PRESETS[preset], **options})

    def reset_parameters(self) -> None:
        """Draw new random keys and values."""
        if self.keys.is_meta:
            return
        seed = int(torch.randint(2**62, (), device="cpu"))
        if self.resident:
            self.seed.fill_(seed)
        self._held = None
        self._draw(seed)

    def reset(self) -> None:
        """Set a resident memory back to its first keys and values. Otherwise do nothing: the caller holds the state."""
        self._held = None
        if self.resident:
            self._draw(int(self.seed))

    @torch.no_grad()
    def _draw(self, seed: int) -> None:
        # always on the CPU in float32, so that a seed means the same numbers on every device and in every dtype
        draw, bound = torch.Generator().manual_seed(seed), (2 * self.keys.shape[-1]) ** -0.5
        keys, values = (torch.empty(x.shape, device="cpu", dtype=torch.float32) for x in (self.keys, self.values))
        drawn = {"keys": keys.uniform_(-bound, bound, generator=draw)}
        drawn["values"] = values.normal_(std=values.shape[-1] ** -0.5, generator=draw)
        for name, fresh in drawn.items():
            held = getattr(self, name)
            # a buffer gets a new tensor, since a graph may still need the old one
            setattr(self, name, held.copy_(fresh) if isinstance(held, nn.Parameter) else fresh.to(held))

    def extra_repr(self) -> str:
        how = self.settings
        return described(
            slots=self.slots, top_k=how.top_k, heads=self.heads, chunk_size=self.chunk_size, step_rule=how.rule.name,
            shared=how.shared, resident=self.resident, frozen=self.frozen,
        )  # fmt: skip

    def _remember(
        self, tokens: Tokens, inputs: Projected, state: Any, mix: bool
    ) -> tuple[Tensor, FastWeightState | None]:
        hint = "a resident memory keeps what it writes; give resident=False or frozen=True"
        require(not (self.resident and transformed()) or self.frozen, CALL, f"under a torch.func transform {hint}.")
        # a checkpointed layer runs again in the backward pass; observers and the memory took the first run
        again = (self.resident or self.observer is not None) and torch._C._current_graph_task_id() != -1
        observer = None if again else self.observer
        if self.resident and not again and state is None:
            self._settle()
        if observer is not None:
            self._tell(observer, tokens, inputs, state)
        absent, where = tokens.non_finite, tokens.where
        if self.frozen and observer is None and where["segment_ids"] is None:
            # nothing is written, so the place of padding does not matter; no device is waited for and no graph broken
            absent, where = ~tokens.counted, {**where, "mask": None}
        query = torch.where(absent[..., None], torch.nan, inputs.query).unflatten(-1, (self.heads, -1))
        given = (query, inputs.value, inputs.gate, self.keys, self.values)
        if torch.compiler.is_exporting():
            return self._exported(given, where, state, mix), None
        run = fast_weight_memory
        if torch.compiler.is_compiling() and not self.frozen:
            # the steps depend on how many tokens wait, so a compiler would recompile at every call
            run = torch.compiler.disable(fast_weight_memory)
        how = {"frozen": self.frozen, "mix": mix, "observer": observer, "chunk_size": self.chunk_size}
        read, after = within(CALL, None, run, *given, self.settings, state=state, **where, **how)
        if self.resident and not again and not self.frozen:
            self._held = after.detach()
            if self.settings.sync is not None:  # now, while all processes take part; later a single one may save
                with torch.no_grad():
                    self._held = flush(self._held, self.settings, observer=observer)
            if torch.is_inference_mode_enabled():  # its tensors are of no use in training
                with torch.inference_mode(False):
                    self._held = self._held.clone()
        return read, after

    def _exported(self, given: tuple[Any, ...], where: dict[str, Tensor | None], state: Any, mix: bool) -> Tensor:
        text = "an exported graph keeps nothing from call to call; export without a state, and not a resident memory."
        require(state is None and not self.resident, CALL, text)
        settings, plain = self.settings, ("top_k", "score", "eps", "shared", "impl", "sync")
        how: dict[str, Any] = {name: getattr(settings, name) for name in plain}
        how |= {"rule": asdict(settings.rule), "spec": str(settings.spec), "frozen": self.frozen, "mix": mix}
        how["storage"] = None if settings.storage is None else str(settings.storage).removeprefix("torch.")
        how["chunk_size"] = self.chunk_size
        given = (*given, where["mask"], where["segment_ids"], json.dumps(how))
        return _read(*given)

    def _tell(self, observer: MemoryObserver, tokens: Tokens, inputs: Projected, state: Any) -> None:
        if observer.by_memory and tokens.where["segment_ids"] is not None:
            why = "segment_ids pack several documents into a row; give each document a row of its own"
            raise ArgumentError(f"{CALL}: a {type(observer).__name__} follows every row's memory, but {why}.")
        if state is None:
            observer.on_start(self.resident)
        observer.on_tokens(inputs.gate, tokens.counted, tokens.non_finite)

    def flush(self, state: FastWeightState) -> FastWeightState:
        """Return the state with its waiting tokens written, at the end of a document or before a question about it. A
        frozen memory writes nothing."""
        return state if self.frozen else flush(state, self.settings, observer=self.observer)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _settled(self, observer: MemoryObserver | None = None) -> tuple[Tensor, Tensor]:
        """Return keys and values with everything written, as new tensors."""
        if self._held is None:
            return self.keys, self.values
        held = flush(self._held, self.settings, observer=observer)
        return held.keys[0], held.values.dense()[0].to(self.values.dtype)

    def _settle(self) -> None:
        # not in place: the backward pass of the previous call may still need the old tensors
        if self._held is not None:
            self.keys, self.values = self._settled(self.observer)
            self._held = None

    def snapshot(self) -> tuple[Tensor, Tensor, FastWeightState | None]:
        """Return what a resident memory holds now. Nothing is copied, since nothing changes in place."""
        return self.keys, self.values, self._held

    def restore(self, snapshot: tuple[Tensor, Tensor, FastWeightState | None]) -> None:
        """Set a resident memory back to what `snapshot` returned. Raise ArgumentError if that was taken from a
        memory of another shape, or if this one is not resident."""
        call = f"{CALL}.restore"
        require(self.resident, call, "only a resident memory keeps something; pass the state instead.")
        for name, tensor, held in zip(("keys", "values"), snapshot, (self.keys, self.values), strict=False):
            why = f"this memory {shape(held)}; take it from a memory of these sizes"
            require(tensor.shape == held.shape, call, f"the snapshot has {name} {shape(tensor)}, but {why}.")
        self.keys, self.values, self._held = snapshot

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "FastWeightProductKeyMemory":
        self._settle()  # so that the current memory is moved or converted
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._held is not None:
            destination[prefix + "keys"], destination[prefix + "values"] = self._settled()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._held = None
        super()._load_from_state_dict(*args, **kwargs)


@one_node("fast_weight_read", lambda query, value, *_: value.new_empty(value.shape))
def _read(
    query: Tensor,
    value: Tensor,
    gate: Tensor | None,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    segment_ids: Tensor | None,
    options: str,
) -> Tensor:
    """Return what `fast_weight_memory` reads in a new stream, [B, T, Dv]; `options` are JSON."""
    how = json.loads(options)
    how["rule"], how["storage"] = WriteRule(**how["rule"]), as_dtype(how["storage"])
    return fast_weight_memory(query, value, gate, keys, values, mask=mask, segment_ids=segment_ids, **how)[0]
