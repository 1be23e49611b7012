"""Configuration of Memory Mosaics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from ... import Spec
from ...checks import ArgumentError, number, within
from ...nn.arguments import check_heads, positive_int
from ...nn.attention.temperature import Temperature, as_temperature
from ...nn.mosaic.contextual_memory import LEARNED, check_learned, contextual_spec
from ...nn.mosaic.features import LOOK_AHEAD, SCALE_LIMIT
from ...nn.mosaic.persistent_memory import persistent_spec
from ..base.base_config import RegardConfig

SLOTS = 3.5  # default slots of a persistent memory per channel of the model; a block then has 12 C^2 parameters
_NO_DROPOUT = "the fast implementations do not form the attention weights that it would drop; use weight decay"


class MemoryMosaicConfig(RegardConfig):
    """Configuration of `MemoryMosaicForCausalLM` (sparse-attention paper, sections 2.4 and B).

    docs/papers.md has the table of what differs between paper and released programs, field by field.

    Args:
        vocab_size, hidden_size, num_hidden_layers, num_attention_heads: sizes; heads divide the width.
        mixers: specs of the contextual memories, one for all layers or one per layer; degree 0 or 1.
        temperatures: one rule (text or `regard.nn.Temperature`: "fixed", "learned", "log", "power(exponent=0.5)", ...)
            for all layers, or one per layer: factors of beta^2, as in `regard.nn.ContextualMemory`.
        persistent: spec of the persistent memories; must be normalised.
        persistent_slots: learned pairs per head; default 3.5 `hidden_size`.
        persistent_copies: sets of slots whose outputs are averaged.
        persistent_keys: "own" projection, rate and keys, or "shared" with the contextual memory (parallel wiring).
        wiring: "sequential": x += contextual(norm(x)), x += persistent(norm(x)); "parallel": both read the same x.
        leaky: "sum" or "average", which multiplies the sum by 1 - e^-rate.
        look_ahead: of values: "sum", v + c v', or "convex", c v + (1 - c) v'.
        key_eps: added to the length that keys are divided by.
        scale_limit, persistent_scale_limit: upper limits of log beta^2 of the contextual and the persistent memories.
        learned: parameters of the specs that are learned per head, of h, bias, margin, alpha, r, ridge.
        bandwidth_start: initial value of fixed bandwidths: "wide" or "spec" (`start` of `regard.nn.ContextualMemory`).
        uniform_gradient: gradient of 0/1 weights: "straight-through" or "hard".
        bias: biases in projections and norms.
        norm_eps: of LayerNorm.
        scale_logits: divide the logits by sqrt(C).
        initializer: "fan-in" (N(0, 1/fan-in), output projections divided by sqrt(layers), embeddings N(0, 1/C)) or
            "gpt2" (N(0, initializer_range^2), output projections divided by sqrt(2 layers)).

    The other fields are those of `RegardConfig`.

    Raises:
        ArgumentError: as in `RegardConfig`, or for shared keys without parallel wiring.
    """

    model_type = "regard_memory_mosaic"
    size_field: ClassVar[str] = "persistent_slots"
    unused: ClassVar[dict[str, str]] = {
        **RegardConfig.unused,
        "attention_dropout": _NO_DROPOUT,
        "dropout": _NO_DROPOUT,
        "num_key_value_heads": "keys serve as queries, so there are equally many",
        "temperature": "temperatures says how sharp the memory of a layer is, generate(temperature=) the sampling",
        "intermediate_size": "persistent_slots sets the size of the persistent memories",
    }
    choices: ClassVar[dict[str, Sequence[str]]] = {
        "wiring": ("sequential", "parallel"),
        "persistent_keys": ("own", "shared"),
        "leaky": ("sum", "average"),
        "look_ahead": LOOK_AHEAD,
        "initializer": ("fan-in", "gpt2"),
    }

    temperatures: Any = "fixed"
    persistent: Any = "softmax"
    persistent_slots: int | None = None
    persistent_copies: int = 1
    persistent_keys: str = "own"
    wiring: str = "sequential"
    leaky: str = "sum"
    look_ahead: str = "sum"
    key_eps: float = 0.0
    scale_limit: float = SCALE_LIMIT
    persistent_scale_limit: float = SCALE_LIMIT
    learned: Any = LEARNED
    bandwidth_start: str = "wide"
    uniform_gradient: str = "straight-through"
    bias: bool = False
    norm_eps: float = 1e-5
    scale_logits: bool = True
    initializer: str = "fan-in"

    def normalise(self) -> None:
        super().normalise()
        heads = self.num_attention_heads
        names = ("hidden_size", "num_attention_heads", "num_attention_heads")
        check_heads(self.call, self.hidden_size, heads, heads, None, names, mend="change one")
        self.fill("persistent_slots", max(1, round(SLOTS * self.hidden_size)))
        positive_int(self.call, "persistent_copies", self.persistent_copies)
        number(self.call, "norm_eps", self.norm_eps, low=0.0, strict=True)
        number(self.call, "key_eps", self.key_eps, low=0.0)
        for name in ("scale_limit", "persistent_scale_limit"):
            number(self.call, name, getattr(self, name))
        if self.persistent_keys == "shared" and self.wiring != "parallel":
            why = "both memories have the same keys only if they read the same input: give wiring='parallel'"
            raise ArgumentError(f"{self.call}: persistent_keys is 'shared' and wiring {self.wiring!r}; {why}.")
        check_learned(self.call, self.learned, self.bandwidth_start, "bandwidth_start")
        self.learned = list(self.learned)
        for spec in self.layer_specs():
            within(self.call, "mixers", contextual_spec, self.call, spec, self.uniform_gradient)
        temperatures = self.layer_temperatures()
        for spec, temperature in zip(self.layer_specs(), temperatures, strict=True):
            within(self.call, "temperatures", temperature.require, self.call, spec)
        self.temperatures = [str(rule) for rule in temperatures]
        self.persistent = str(self.persistent_spec())

    def layer_temperatures(self) -> list[Temperature]:
        """Return the temperature of each layer, first layer first."""
        rules = self.one_per_layer("temperatures", (str, Temperature), "a rule such as 'log'")
        return [as_temperature(rule, self.call, "temperatures") for rule in rules]

    def persistent_spec(self) -> Spec:
        return within(self.call, "persistent", persistent_spec, self.call, self.persistent)
