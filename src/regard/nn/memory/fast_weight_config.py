"""The settings of `nn.FastWeightProductKeyMemory`, in groups; many are those of `memory.fast_weights.SlotMemory`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from ...checks import ArgumentError, choice, flags, require, shown, suggestion, within
from ...grammar import Spec
from ...memory.fast_weight_rules import WriteRule
from ...memory.fast_weights import check_storage, check_sync
from ...memory.product_key import check_eps, require_top_k, slot_scores, weights_spec
from ...memory.stores.slot_values import slot_values
from ...memory.stream import check_meta_grad
from ..arguments import positive_int


@dataclass(frozen=True)
class SlotTable:
    """Size of the slot table, and how a query selects slots: top_k, score, spec and idw_eps (eps) of `SlotMemory`."""

    sub_keys: int = 512  # n; the table has n^2 slots
    key_dim: int = 512  # Dk, the width of a query and a key; even
    value_dim: int = 512  # Dv
    heads: int = 1  # H, which all read one table of values
    top_k: int = 8
    score: str = "idw"
    spec: str | Spec = "softmax"
    idw_eps: float = 1e-3

    def __post_init__(self) -> None:
        call = "SlotTable"
        for name in ("sub_keys", "key_dim", "value_dim", "heads"):
            positive_int(call, name, getattr(self, name))
        halves = f"key_dim is {shown(self.key_dim)}, expected an even number: a key has two halves."
        require(self.key_dim % 2 == 0, call, halves)
        within(call, f"sub_keys is {shown(self.sub_keys)}", require_top_k, call, self.top_k, self.sub_keys)
        slot_scores.given(call, "score", self.score)
        weights_spec(call, self.spec)
        object.__setattr__(self, "idw_eps", check_eps(call, "idw_eps", self.idw_eps))


@dataclass(frozen=True)
class ValueMix:
    """The values that are written, and the mix of a token's value with what it read."""

    value_norm: bool = True  # z-score the values
    gating: bool = True  # mix by a learned gate; otherwise add
    norm_eps: float = 1e-5  # of the RMS norms


@dataclass(frozen=True)
class MemoryStore:
    """Whether the memory is shared by the batch, and how it is stored.

    Args:
        shared: one memory for the whole batch, whose tokens form one chunk; otherwise one for each row.
        learn_initial: the first keys and values are parameters, which learn by the gradient through reads and writes.
        resident: (needs `shared`) keep the memory in the module, in training and evaluation, as the released program
            does: a call without a state continues from what the last call left.
        storage, impl, sync: as in `SlotMemory`; the dtype may be given by its name.
    """

    shared: bool = False
    learn_initial: bool = False
    resident: bool = False
    storage: torch.dtype | str | None = None
    impl: str = "auto"
    sync: str | None = None

    def __post_init__(self) -> None:
        call, shared, resident = "MemoryStore", self.shared, self.resident
        flags(call, shared=shared, learn_initial=self.learn_initial, resident=resident)
        check_sync(call, self.sync, True)
        alone = f"{'resident' if resident else 'sync'} needs one memory for the batch; give shared=True."
        require(shared or not (resident or self.sync), call, alone)
        both = "learn_initial trains the first keys and values, but a resident memory starts from what it wrote"
        require(not (resident and self.learn_initial), call, f"{both}; choose one.")
        choice(call, "impl", self.impl, ("auto", *slot_values.names(aliases=True)))
        object.__setattr__(self, "storage", as_dtype(self.storage))


def as_dtype(storage: torch.dtype | str | None) -> torch.dtype | None:
    """Return a dtype, given it or its name."""
    dtype = getattr(torch, storage, storage) if isinstance(storage, str) else storage
    check_storage("MemoryStore", dtype)
    return dtype


@dataclass(frozen=True)
class FastWeightConfig:
    """The settings of `nn.FastWeightProductKeyMemory`.

    Every field of a group is also an option of the layer under its own name (the rule's name is `step_rule`):
    `FastWeightConfig().with_options(sub_keys=64, shared=True)`. `HybridConfig.memory_options` takes these options.

    Args:
        table: size of the slot table, and how a query selects slots.
        rule: how a chunk is written.
        mix: what is done with values and with what was read.
        store: whether the memory is shared by the batch, and how it is stored.
        chunk_size, meta_grad: as in `SlotMemory`.

    Raises:
        ArgumentError: a group of another kind, or numbers out of range.
    """

    table: SlotTable = field(default_factory=SlotTable)
    rule: WriteRule = field(default_factory=WriteRule)
    mix: ValueMix = field(default_factory=ValueMix)
    store: MemoryStore = field(default_factory=MemoryStore)
    chunk_size: int = 512
    meta_grad: bool | int = True

    def __post_init__(self) -> None:
        call = "FastWeightConfig"
        for name, kind in GROUPS.items():
            given = getattr(self, name)
            require(isinstance(given, kind), call, f"{name} is {shown(given)}, expected a {kind.__name__}.")
        positive_int(call, "chunk_size", self.chunk_size)
        short = "chunk_size is 1, expected at least 2: a token's target is the value of the next one"
        fits = self.chunk_size >= 2 or not self.rule.look_ahead
        require(fits, call, f"{short}; with look_ahead=False the target is the token's own value.")
        check_meta_grad(call, self.meta_grad)

    def with_options(self, **options: Any) -> "FastWeightConfig":
        """Return the settings with these options changed. Raise ArgumentError for one that is unknown."""
        changed: dict[str, dict[str, Any]] = {}
        for name, value in options.items():
            if name not in PLACES:
                raise ArgumentError(f"FastWeightConfig: unknown option {name!r}.{suggestion(name, PLACES)}")
            group, field = PLACES[name]
            changed.setdefault(group, {})[field] = value
        if "step_rule" in options:  # an error names the option, not the field
            within("FastWeightConfig", "step_rule", WriteRule, options["step_rule"])
        plain = changed.pop("", {})
        groups = {name: replace(getattr(self, name), **fields) for name, fields in changed.items()}
        return replace(self, **plain, **groups)

    @classmethod
    def defaults(cls) -> Mapping[str, Any]:
        """Return all options with their defaults."""
        config = cls()
        held = {"": config, **{group: getattr(config, group) for group in GROUPS}}
        return {name: getattr(held[group], field) for name, (group, field) in PLACES.items()}


GROUPS: dict[str, type] = {"table": SlotTable, "rule": WriteRule, "mix": ValueMix, "store": MemoryStore}
PLACES = {
    "step_rule" if (name, f.name) == ("rule", "name") else f.name: (name, f.name)
    for name, kind in GROUPS.items()
    for f in fields(kind)
} | {name: ("", name) for name in ("chunk_size", "meta_grad")}
"""Option to (group, field); the group is "" for fields of the config itself."""
