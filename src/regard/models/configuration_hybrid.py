"""The configuration of the hybrid language model: sizes, and one sentence of the grammar per layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from .. import Spec
from ..checks import ArgumentError, in_range, require, suggestion
from ..nn import Ridge, Temperature, as_ridge, as_temperature
from ..nn.attention import check_heads, check_shared, check_window, positive_int
from ..nn.norm import check_qk_norm

CALL = "HybridConfig"

# What transformers itself passes beside the fields, when it loads a config or converts one.
_TRANSFORMERS_KEYS = {
    "attn_implementation",
    "auto_map",
    "experts_implementation",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "quantization_config",
    "torch_dtype",
}
# What transformers knows and this model does not use: kept in silence, it would promise what is not computed.
_UNUSED = {
    "layer_types": "mixers says what each layer is",
    "per_layer_config": "mixers says what each layer is",
    "rope_parameters": "rotary positions have rope_theta only",
    "rope_scaling": "rotary positions have rope_theta only",
    # transformers would take it for the temperature of sampling
    "temperature": "temperatures says how sharp the attention of each layer is, generate(temperature=) the sampling",
    "sliding_window": "window says how far back a token looks",
}


class HybridConfig(PreTrainedConfig):
    """Configuration of `HybridForCausalLM`, a pre-norm decoder in which every layer names its own estimator.

    Args:
        vocab_size: number of tokens.
        hidden_size: model width C.
        num_hidden_layers: decoder layers.
        num_attention_heads: query heads.
        num_key_value_heads: key/value heads, a divisor of the query heads; default as many.
        head_dim: channels of a head, even; default `hidden_size // num_attention_heads`.
        intermediate_size: width of the feed-forward layer; default 8/3 of `hidden_size`, rounded up to a
            multiple of 8.
        mixers: one spec (text, preset or `Spec`) for all layers, or a sequence with one per layer. Kept as a
            list with the normal text of each layer's spec.
        window: attend to the last `window` tokens only; None for all. The cache then keeps no more than that.
        temperatures: how sharp weights are: one rule (text or `regard.nn.Temperature`: "fixed", "learned", "log",
            "power(exponent=0.5)", ...) for all layers, or a sequence with one per layer. Kept like `mixers`. Files
            written when there was only `learn_temperature` are read as "learned" or "fixed".
        ridges: what penalises the slope in local linear layers: one rule (text or `regard.nn.Ridge`: "fixed",
            "learned", "learned-per-dimension", ...) for all layers that have a ridge, or a sequence with one per
            layer. Kept like `mixers`, "fixed" for the layers that have none.
        qk_norm: normalise queries and keys in every layer: None, "rms" or "l2" (see `regard.nn.Attention`).
        share_query_key: one projection for queries and keys (see `regard.nn.Attention`).
        exclude_self: attend to earlier tokens only.
        rope_theta: base of the wavelengths of the rotary positions.
        max_position_embeddings: longest sequence meant in training; informative, longer ones are computed.
        rms_norm_eps: added to the mean square in RMSNorm.
        initializer_range: standard deviation of the initial weights.
        tie_word_embeddings: use the embedding matrix as the output matrix.
        use_cache: keep keys and values when the model is called outside training.
        pad_token_id, bos_token_id, eos_token_id: special tokens, for `generate`.

    Raises:
        ArgumentError: a number out of range, sizes that do not fit, an unknown spec or rule, a list of the wrong
            length, a rule that no layer takes, or an unknown keyword (transformers alone would keep a misspelt field
            as an attribute, and another model than the one asked for would be trained).
    """

    model_type = "regard_hybrid"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  (transformers reads a class attribute)
    vocab_size: int = 256
    hidden_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    mixers: Any = "softmax"
    window: int | None = None
    temperatures: Any = "fixed"
    ridges: Any = "fixed"
    qk_norm: str | None = None
    share_query_key: bool = False
    exclude_self: bool = False
    rope_theta: float = 10000.0
    max_position_embeddings: int = 1024
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if kwargs.pop("learn_temperature", False) and self.temperatures == "fixed":
            self.temperatures = "learned"  # as files written before there were other rules mean it
        refuse_unknown(kwargs)
        super().__post_init__(**kwargs)
        self.normalise()

    @property
    def sliding_window(self) -> int | None:
        """The window in transformers' sense, from which its caches decide how much to keep: the tokens that a
        layer must see, the present one included."""
        return None if self.window is None else self.window + int(self.exclude_self)

    def normalise(self) -> None:
        """Check every field and fill in the defaults, in place.

        Runs at creation, and once more when a model is built, since `from_pretrained(path, field=value)` sets
        fields after creation.

        Raises:
            ArgumentError: as the class.
        """
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
            positive_int(CALL, name, getattr(self, name))
        positive_int(CALL, "max_position_embeddings", self.max_position_embeddings)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        self.head_dim = check_heads(
            CALL, self.hidden_size, self.num_attention_heads, self.num_key_value_heads, self.head_dim
        )
        require(
            self.head_dim % 2 == 0,
            CALL,
            f"head_dim is {self.head_dim}, expected an even number, since rotary positions turn pairs.",
        )
        if self.intermediate_size is None:
            self.intermediate_size = -(-self.hidden_size // 3) * 8
        positive_int(CALL, "intermediate_size", self.intermediate_size)
        check_window(CALL, self.window)
        for name in ("rope_theta", "rms_norm_eps", "initializer_range"):
            in_range(CALL, name, getattr(self, name), low=0.0, strict=True)
        for name in ("share_query_key", "exclude_self", "tie_word_embeddings", "use_cache"):
            flag = getattr(self, name)
            require(isinstance(flag, bool), CALL, f"{name} is {flag!r}, expected True or False.")
        check_qk_norm(CALL, self.qk_norm)
        check_token_ids(self)
        check_shared(CALL, self.share_query_key, self.num_attention_heads, self.num_key_value_heads)
        specs, temperatures, ridges = self.layer_specs(), self.layer_temperatures(), self.layer_ridges()
        for spec, temperature, ridge in zip(specs, temperatures, ridges, strict=True):
            temperature.require(CALL, spec)
            ridge.require(CALL, spec)
        self.mixers = [str(spec) for spec in specs]
        self.temperatures = [str(rule) for rule in temperatures]
        self.ridges = [str(rule) for rule in ridges]

    def layer_specs(self) -> list[Spec]:
        """The spec of each layer, from the first to the last.

        Raises:
            ArgumentError: an unknown spec, or not one per layer.
        """
        mixers = self.mixers
        if isinstance(mixers, (str, Spec)):
            mixers = [mixers] * self.num_hidden_layers
        if not isinstance(mixers, Sequence) or not all(isinstance(m, (str, Spec)) for m in mixers):
            raise ArgumentError(
                f"{CALL}: mixers is {mixers!r}, expected a spec such as 'biweight', or a list with one per layer."
            )
        require(
            len(mixers) == self.num_hidden_layers,
            CALL,
            f"mixers names {len(mixers)} layers and num_hidden_layers is {self.num_hidden_layers}; "
            f"give one spec per layer, or a single one for all.",
        )
        return [Spec.parse(mixer) if isinstance(mixer, str) else mixer for mixer in mixers]

    def layer_temperatures(self) -> list[Temperature]:
        """The temperature of each layer, from the first to the last.

        Raises:
            ArgumentError: an unknown rule, or not one per layer.
        """
        return [as_temperature(rule) for rule in self._one_per_layer("temperatures", Temperature, "log")]

    def layer_ridges(self) -> list[Ridge]:
        """The ridge of each layer, from the first to the last: one rule for all is meant for the layers that have a
        ridge.

        Raises:
            ArgumentError: an unknown rule, not one per layer, or one for all that no layer takes.
        """
        rules = [as_ridge(rule) for rule in self._one_per_layer("ridges", Ridge, "learned")]
        if isinstance(self.ridges, (str, Ridge)):
            fixed, specs = as_ridge("fixed"), self.layer_specs()
            fits = [spec.degree == 1 for spec in specs]
            if any(fits):
                return [rule if fit else fixed for rule, fit in zip(rules, fits, strict=True)]
        return rules

    def _one_per_layer(self, name: str, kind: type, example: str) -> Sequence[Any]:
        """The field `name`, rules or their texts, repeated where it is one for all."""
        given = getattr(self, name)
        if isinstance(given, (str, kind)):
            return [given] * self.num_hidden_layers
        if not isinstance(given, Sequence) or len(given) != self.num_hidden_layers:
            raise ArgumentError(
                f"{CALL}: {name} is {given!r}, expected a rule such as {example!r}, or a list with one for each of "
                f"{self.num_hidden_layers} layers."
            )
        return given


def refuse_unknown(extra: dict[str, Any]) -> None:
    """Refuse keywords that are neither fields nor transformers' own.

    Raises:
        ArgumentError: naming the keyword, and a field that resembles it or all of them.
    """
    generation = GenerationConfig().to_dict()
    for name in extra:
        if name in _UNUSED:
            raise ArgumentError(f"{CALL}: {name!r} is not used; {_UNUSED[name]}.")
        if name.startswith("_") or name in _TRANSFORMERS_KEYS:
            continue
        if name not in generation:  # those left over from earlier versions are dropped by transformers
            known = suggestion(name, HybridConfig.__annotations__)
            raise ArgumentError(f"{CALL}: unknown field {name!r}.{known}")


def check_token_ids(config: HybridConfig) -> None:
    """Special tokens are None or inside the vocabulary.

    Raises:
        ArgumentError: naming the token that is not.
    """
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        given = getattr(config, name)
        for token in given if isinstance(given, list) else [given]:
            inside = isinstance(token, int) and not isinstance(token, bool) and 0 <= token < config.vocab_size
            require(
                token is None or inside,
                CALL,
                f"{name} is {given!r}, expected None or a token from 0 to {config.vocab_size - 1}.",
            )
