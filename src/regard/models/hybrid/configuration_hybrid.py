"""Configuration of the hybrid language model."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import nn

from ... import Spec
from ...checks import ArgumentError, choice, number, refuse, require, shown, suggestion, whole, within
from ...nn import Attention, Ridge, Temperature, as_ridge, as_temperature
from ...nn.arguments import check_heads, check_shared, check_window
from ...nn.attention.norm import NORMS, QK_NORMS
from ...nn.feed_forward import feed_forwards
from ...nn.memories import memory_layers
from ...registry import Registry
from ..base.base_config import RegardConfig
from .token_mixers import read_mixer, token_mixers

Places = dict[int, list[str]]
"""Layer -> names of its memories: one beside the feed-forward layer, one instead of it, or both."""
_PART = re.compile(r"\s*([A-Za-z][\w-]*)\s*@\s*(\d+(?:\s*,\s*\d+)*)\s*")


class HybridConfig(RegardConfig):
    """Configuration of `HybridForCausalLM`.

    Args:
        num_key_value_heads: key/value heads, a divisor of the query heads; default: as many as query heads.
        head_dim: channels of a head, even; default `hidden_size // num_attention_heads`.
        intermediate_size: width of the feed-forward layer; default for swiglu 8/3 of `hidden_size`, rounded up to a
            multiple of 8, and for gelu 4 times `hidden_size`.
        feed_forward: one of `regard.nn.feed_forwards`: "swiglu", "gelu" (GPT-2's) or "none".
        norm: "rms" (RMSNorm) or "layer" (LayerNorm with biases), which with `feed_forward="gelu"` makes the model GPT-2
            with rotary positions.
        mixers: one for all layers, or one for each: an attention spec (text, preset or `Spec`) or the name of a token
            mixer (`regard.models.token_mixers`: "gated-deltanet", ...). Stored as a list of canonical texts.
        mixer_options: options of token mixers, such as {"gated-deltanet": {"num_heads": 8}}, or their JSON text.
        window: attention sees the last `window` tokens, and the cache keeps only these; None for all tokens; one value
            for all layers or a list with one per layer.
        training_window: window, in training, of the attention layers without one, in a share `training_window_share` of
            the steps (pSWA, section 4.2 of the fast-weight paper, Finding 3). `training_window_seed` and the number of
            the step decide which steps, so that all processes and resumed runs agree. The trainer sets that number;
            without it forward passes are counted.
        output_gate: gated attention (see `regard.nn.Attention`).
        output_norm: an RMS norm of every head's output (see `regard.nn.Attention`).
        rotary_share: share of a head's channels with rotary positions, above 0 and at most 1.
        memories: memories at chosen layers, such as "FwPKM@2,6,10" or "PKM@6+FwPKM@2,10", or a mapping of layers to
            names of `regard.nn.memory_layers`; layers count from 0. A trained memory (PKM) replaces the feed-forward
            layer; one written at test time adds to the residual stream at `memory_place`. Stored as text.
        memory_place: "before-mixer" (authors' program) or "after-mixer", before the feed-forward layer (paper).
        memory_options: options of memories, such as {"fwpkm": {"chunk_size": 512}}, or their JSON text.
        temperatures: one rule (text or `regard.nn.Temperature`: "fixed", "learned", "log", "power(exponent=0.5)", ...)
            for all layers, or one for each. Stored like `mixers`. The field `learn_temperature` of older files is read
            as "learned" or "fixed".
        ridges: ridge of local linear layers: one rule (text or `regard.nn.Ridge`: "fixed", "learned",
            "learned-per-dimension", ...) for all layers with a ridge, or one for each. Stored like `mixers`, with
            "fixed" for layers without a ridge. One per dimension makes predictions depend on absolute positions.
        qk_norm: normalise queries and keys in every layer: None, "rms" or "l2" (see `regard.nn.Attention`).
        share_query_key: one projection for queries and keys (see `regard.nn.Attention`).
        exclude_self: attend to earlier tokens only.
        rope_theta: base of the wavelengths of the rotary positions.
        rms_norm_eps: added to the mean square in the norms.

    The other fields are those of `RegardConfig`.

    Raises:
        ArgumentError: as in `RegardConfig`, or for sizes that do not fit, an unknown rule, or a rule no layer uses.
    """

    model_type = "regard_hybrid"
    size_field: ClassVar[str] = "intermediate_size"
    unused: ClassVar[dict[str, str]] = {
        **RegardConfig.unused,
        # transformers would take it for the temperature of sampling
        "temperature": "temperatures says how sharp the attention of a layer is, generate(temperature=) the sampling",
        "rope_parameters": "rotary positions have rope_theta only",
        "rope_scaling": "rotary positions have rope_theta only",
        "sliding_window": "window says how far back a token looks",
    }
    choices: ClassVar[dict[str, Sequence[str]]] = {"norm": NORMS, "memory_place": ("before-mixer", "after-mixer")}

    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    feed_forward: str = "swiglu"
    norm: str = "rms"
    mixer_options: str | dict[str, Any] | None = None
    window: Any = None
    training_window: int | None = None
    training_window_share: float = 0.9
    training_window_seed: int = 0
    output_gate: bool = False
    output_norm: bool = False
    rotary_share: float = 1.0
    memories: str | dict[Any, Any] | None = None
    memory_place: str = "before-mixer"
    memory_options: str | dict[str, Any] | None = None
    temperatures: Any = "fixed"
    ridges: Any = "fixed"
    qk_norm: str | None = None
    share_query_key: bool = False
    exclude_self: bool = False
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    def __post_init__(self, **kwargs: Any) -> None:
        if kwargs.pop("learn_temperature", False) and self.temperatures == "fixed":
            self.temperatures = "learned"  # a file from before there were other rules
        super().__post_init__(**kwargs)

    @classmethod
    def layout(cls, name: str, memories: str | None = None, **fields: Any) -> HybridConfig:
        """Return a model of the fast-weight paper (section 4.1, Table 3), by default in the paper's size.

        Args:
            name: "GDN", "GDN+SWA", "GDN+FA", "FA", one of the last two with "-pSWA", or "LaCT". In the mixed ones every
                fourth layer is attention.
            memories: as the field.
            fields: of this class, instead of the paper's. `window` is that of SWA, pSWA and LaCT.

        Raises:
            ArgumentError: an unknown layout, or as in the class.
        """
        base, _, restricted = name.partition("-")
        if base not in LAYOUTS or restricted not in ("", "pSWA") or (restricted and not base.endswith("FA")):
            known = ", ".join([*LAYOUTS, "GDN+FA-pSWA", "FA-pSWA"])
            raise ArgumentError(f"{cls.__name__}.layout: unknown layout {name!r}, expected one of {known}.")
        layers, window = fields.pop("num_hidden_layers", 12), fields.pop("window", None)
        pattern = [LAYOUTS[base][i % 4] for i in range(layers)]
        if window is not None and not (restricted or {"swa", "lact"} & set(LAYOUTS[base])):
            raise ArgumentError(f"{cls.__name__}.layout: {name} has no window, got window={window!r}; leave it out.")
        if base == "LaCT" and window is not None:
            options = read_options(cls.__name__, "mixer_options", fields.get("mixer_options"), token_mixers)
            fields["mixer_options"] = {**options, "lact": {"window": window, **options.get("lact", {})}}
        window = 512 if window is None else window
        defaults: dict[str, Any] = {
            **PAPER_SIZE,
            "num_hidden_layers": layers,
            "mixers": ["softmax" if mixer == "swa" else mixer for mixer in pattern],
            "window": [window if mixer == "swa" else None for mixer in pattern] if "swa" in pattern else None,
            "training_window": window if restricted else None,
            "memories": memories,
        }
        if "num_attention_heads" in fields or "hidden_size" in fields:  # the paper's values belong to its width
            defaults = {name: x for name, x in defaults.items() if name not in ("head_dim", "num_key_value_heads")}
        return cls(**{**defaults, **fields})

    @property
    def sliding_window(self) -> int | None:
        """Return the window in transformers' sense, the tokens its caches keep, the current one included."""
        windows = set(self.layer_windows())
        window = windows.pop() if len(windows) == 1 else None
        return None if window is None else window + int(self.exclude_self)

    def layer_windows(self) -> list[int | None]:
        """Return the window of each layer's attention, None for all tokens; raise `ArgumentError` if it is invalid."""
        windows = self.one_per_layer("window", (int, type(None)), "a positive integer, None")
        return [check_window(self.call, None if window == "none" else window) for window in windows]

    def read_mixer(self, mixer: str | Spec) -> Any:
        return read_mixer(mixer, self.call, "mixers")

    def layer_memories(self) -> Places:
        """Return the memories of each layer that has any; raise `ArgumentError` for an unreadable field, an unknown
        memory or layer, or two memories in the same place."""
        places: Places = {}
        for name, depth in self._memory_depths():
            name = within(self.call, "memories", memory_layers.canonical, name.lower())
            last = self.num_hidden_layers - 1
            there = f"there are layers 0 to {last} (num_hidden_layers={last + 1})"
            require(0 <= depth <= last, self.call, f"memories puts {name} at layer {depth}, but {there}.")
            replaces = memory_layers.get(name).replaces_feed_forward
            for other in places.get(depth, []):
                if memory_layers.get(other).replaces_feed_forward == replaces:
                    where = f"{'in place of' if replaces else 'beside'} the feed-forward layer of layer {depth}"
                    raise ArgumentError(f"{self.call}: memories puts {other} and {name} {where}; choose one.")
            places.setdefault(depth, []).append(name)
        return dict(sorted(places.items()))

    def _memory_depths(self) -> list[tuple[str, int]]:
        """Return the names in the field `memories` with their layers, in the given order."""
        given, text = self.memories, "a text such as 'FwPKM@2,6,10' or 'PKM@6+FwPKM@2,10'"
        if given is None:
            return []
        if isinstance(given, Mapping):
            try:
                named = [(int(depth), [each] if isinstance(each, str) else [*each]) for depth, each in given.items()]
            except (TypeError, ValueError):
                raise refuse(self.call, "memories", given, f"{text}, or depths mapped to names") from None
            return [(name, depth) for depth, names in named for name in names]
        if not isinstance(given, str):
            raise refuse(self.call, "memories", given, text)
        pairs: list[tuple[str, int]] = []
        for part in given.split("+") if given.strip() else []:
            match = _PART.fullmatch(part)
            if match is None:
                raise refuse(self.call, "memories", given, f"{text}; cannot read {part.strip()!r}")
            pairs += [(match[1], int(depth)) for depth in match[2].split(",")]
        return pairs

    def attention_options(self, layer_idx: int) -> dict[str, Any]:
        """Return the arguments of `regard.nn.Attention` that do not depend on the kind of the layer."""
        return {
            "num_kv_heads": self.num_key_value_heads, "head_dim": self.head_dim, "layer_idx": layer_idx,
            "share_query_key": self.share_query_key, "exclude_self": self.exclude_self, "qk_norm": self.qk_norm,
            "norm_eps": self.rms_norm_eps, "output_gate": self.output_gate, "output_norm": self.output_norm,
        }  # fmt: skip

    def normalise(self) -> None:
        super().normalise()
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        sizes = (self.hidden_size, self.num_attention_heads, self.num_key_value_heads, self.head_dim)
        self.head_dim = check_heads(self.call, *sizes, names=HEADS)
        even = f"head_dim is {self.head_dim}, expected an even number, since rotary embeddings rotate channel pairs."
        require(self.head_dim % 2 == 0, self.call, even)
        self.feed_forward = within(self.call, "feed_forward", feed_forwards.canonical, self.feed_forward)
        self.fill("intermediate_size", feed_forwards.get(self.feed_forward).width(self.hidden_size))
        windows = self.layer_windows()
        self.window = windows[0] if len(set(windows)) == 1 else windows
        check_window(self.call, self.training_window, "training_window")
        number(self.call, "training_window_share", self.training_window_share, low=0.0, high=1.0)
        whole(self.call, "training_window_seed", self.training_window_seed)
        for name in ("rope_theta", "rms_norm_eps"):
            number(self.call, name, getattr(self, name), low=0.0, strict=True)
        number(self.call, "rotary_share", self.rotary_share, low=0.0, strict=True)
        number(self.call, "rotary_share", self.rotary_share, high=1.0)
        choice(self.call, "qk_norm", self.qk_norm, QK_NORMS)
        check_shared(self.call, self.share_query_key, self.num_attention_heads, self.num_key_value_heads, HEADS[2])
        mixers, temperatures, ridges = self.layer_mixers(), self.layer_temperatures(), self.layer_ridges()
        for mixer, temperature, ridge in zip(mixers, temperatures, ridges, strict=True):
            if isinstance(mixer, Spec):
                within(self.call, "temperatures", temperature.require, self.call, mixer)
                within(self.call, "ridges", ridge.require, self.call, mixer)
            elif not temperature.neutral or str(ridge) != "fixed":
                raise ArgumentError(f"{self.call}: {mixer} takes neither a temperature nor a ridge; give 'fixed'.")
        self.temperatures = [str(rule) for rule in temperatures]
        self.ridges = [str(rule) for rule in ridges]
        places = self.layer_memories()
        names = sorted({name for memories in places.values() for name in memories})
        depths = {name: ",".join(str(depth) for depth in places if name in places[depth]) for name in names}
        self.memories = "+".join(f"{name}@{depths[name]}" for name in names) or None
        self.memory_options = read_options(self.call, "memory_options", self.memory_options, memory_layers)
        self.mixer_options = read_options(self.call, "mixer_options", self.mixer_options, token_mixers)
        with torch.device("meta"):  # options that do not fit are refused here; nothing is allocated
            for name in names:
                options = self.memory_options.get(name, {})
                within(self.call, "memory_options", memory_layers.get(name), self.hidden_size, **options)
            for name in {mixer for mixer in mixers if isinstance(mixer, str)}:
                within(self.call, "mixer_options", self.build_mixer, mixers.index(name))

    def build_mixer(self, layer_idx: int) -> nn.Module:
        """Return the attention of a layer, or its token mixer with the options of `mixer_options`."""
        mixer = self.layer_mixers()[layer_idx]
        if isinstance(mixer, str):
            kind, options = token_mixers.get(mixer), cast(dict[str, Any], self.mixer_options)  # read by normalise
            return kind.build(self, layer_idx, {**kind.defaults, **options.get(mixer, {})})
        how = self.attention_options(layer_idx) | {"window": self.layer_windows()[layer_idx], "spec": mixer}
        how |= {"temperature": self.layer_temperatures()[layer_idx], "ridge": self.layer_ridges()[layer_idx]}
        return Attention(self.hidden_size, self.num_attention_heads, **how)

    @property
    def rotary_dim(self) -> int:
        """Return the number of channels of a head with rotary positions: even, near `rotary_share` of them."""
        assert self.head_dim is not None  # filled in by normalise
        return max(2, 2 * round(self.head_dim * self.rotary_share / 2))

    def layer_temperatures(self) -> list[Temperature]:
        """Return the temperature of each layer, first layer first; a single rule applies to the layers with a spec."""
        return self._rules("temperatures", Temperature, as_temperature, "log", lambda spec: True)

    def layer_ridges(self) -> list[Ridge]:
        """Return the ridge of each layer, first layer first; a single rule applies to the layers with a ridge."""
        return self._rules("ridges", Ridge, as_ridge, "learned", lambda spec: spec.degree == 1)

    def _rules(self, name: str, kind: type, read: Any, example: str, takes: Callable[[Spec], bool]) -> list[Any]:
        given = self.one_per_layer(name, (str, kind), f"a rule such as {example!r}")
        rules = [read(rule, self.call, name) for rule in given]
        fits = [isinstance(mixer, Spec) and takes(mixer) for mixer in self.layer_mixers()]
        if not isinstance(getattr(self, name), (str, kind)) or not any(fits):
            return rules
        return [rule if fit else read("fixed") for rule, fit in zip(rules, fits, strict=True)]


def read_options(
    call: str, field: str, given: str | Mapping[str, Any] | None, registry: Registry[Any]
) -> dict[str, dict[str, Any]]:
    """Return options by name, from a mapping or its JSON text; raise `ArgumentError` for anything else, or an unknown
    name or option. An entry of the registry with `defaults` has those options, another the keywords of its class."""
    if isinstance(given, str):
        try:
            given = json.loads(given) if given.strip() else {}
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"{call}: {field} is {shown(given)}, which is not JSON: {error}.") from None
    given = {} if given is None else given
    example = next(iter(registry.names()), "name")
    items = given.items() if isinstance(given, Mapping) else [(None, given)]
    if not all(isinstance(name, str) and isinstance(each, Mapping) for name, each in items):
        raise refuse(call, field, given, f"a mapping such as {{{example!r}: {{...}}}}")
    by_name: dict[str, dict[str, Any]] = {}
    for name, options in given.items():
        name = within(call, field, registry.canonical, name.lower())
        entry = registry.get(name)
        known = [*entry.defaults] if hasattr(entry, "defaults") else [*inspect.signature(entry).parameters][1:]
        for option in options:
            if option not in known:
                raise ArgumentError(f"{call}: {field}: {name} has no option {option!r}.{suggestion(option, known)}")
        by_name[name] = dict(options)
    return by_name


HEADS = ("hidden_size", "num_attention_heads", "num_key_value_heads")
"""Names of the sizes of attention, for error messages."""
LAYOUTS = {
    "GDN": ["gated-deltanet"] * 4,
    "GDN+SWA": ["gated-deltanet"] * 3 + ["swa"],
    "GDN+FA": ["gated-deltanet"] * 3 + ["softmax"],
    "FA": ["softmax"] * 4,
    "LaCT": ["lact"] * 4,
}
"""Mixers of each group of four layers."""
PAPER_SIZE: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2304,
    "max_position_embeddings": 4096,
    "qk_norm": "rms",
    "output_gate": True,
    "rotary_share": 0.25,
    "rms_norm_eps": 1e-5,
}
"""Table 3 of the fast-weight paper, and fields of its program."""
