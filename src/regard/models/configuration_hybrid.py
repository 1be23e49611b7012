"""The configuration of the hybrid language model: sizes, and one sentence of the grammar per layer."""

from __future__ import annotations

from typing import Any, ClassVar

from ..checks import in_range, require
from ..nn import Ridge, Temperature, as_ridge, as_temperature
from ..nn.attention import check_heads, check_shared, check_window, positive_int
from ..nn.feed_forward import feed_forwards
from ..nn.norm import NORMS, check_qk_norm
from .base_config import RegardConfig


class HybridConfig(RegardConfig):
    """Configuration of `HybridForCausalLM`, a pre-norm decoder in which every layer names its own estimator.

    Args:
        vocab_size: number of tokens.
        hidden_size: model width C.
        num_hidden_layers: decoder layers.
        num_attention_heads: query heads.
        num_key_value_heads: key/value heads, a divisor of the query heads; default as many.
        head_dim: channels of a head, even; default `hidden_size // num_attention_heads`.
        intermediate_size: width of the feed-forward layer; default for swiglu 8/3 of `hidden_size`, rounded up to a
            multiple of 8, for gelu 4 times as wide.
        feed_forward: what stands between two attentions, one of `regard.nn.feed_forwards`: "swiglu", "gelu" (GPT-2's)
            or "none".
        norm: "rms" (RMSNorm) or "layer" (LayerNorm with biases). With `feed_forward="gelu"` and `norm="layer"` the
            model is GPT-2 with rotary positions.
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
        max_position_embeddings: longest sequence meant in training. Longer ones are computed; `generate` refuses a
            longer prompt.
        rms_norm_eps: added to the mean square in the norms.
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
    size_field: ClassVar[str] = "intermediate_size"
    unused: ClassVar[dict[str, str]] = {
        **RegardConfig.unused,
        # transformers would take it for the temperature of sampling
        "temperature": "temperatures says how sharp the attention of a layer is, generate(temperature=) the sampling",
        "rope_parameters": "rotary positions have rope_theta only",
        "rope_scaling": "rotary positions have rope_theta only",
        "sliding_window": "window says how far back a token looks",
    }
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    feed_forward: str = "swiglu"
    norm: str = "rms"
    window: int | None = None
    temperatures: Any = "fixed"
    ridges: Any = "fixed"
    qk_norm: str | None = None
    share_query_key: bool = False
    exclude_self: bool = False
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    def __post_init__(self, **kwargs: Any) -> None:
        if kwargs.pop("learn_temperature", False) and self.temperatures == "fixed":
            self.temperatures = "learned"  # as files written before there were other rules mean it
        super().__post_init__(**kwargs)

    @property
    def sliding_window(self) -> int | None:
        """The window in transformers' sense, from which its caches decide how much to keep: the tokens that a
        layer must see, the present one included."""
        return None if self.window is None else self.window + int(self.exclude_self)

    def normalise(self) -> None:
        """Check every field and fill in the defaults, in place; see `RegardConfig.normalise`.

        Raises:
            ArgumentError: as the class.
        """
        super().normalise()
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        self.head_dim = check_heads(
            self.call, self.hidden_size, self.num_attention_heads, self.num_key_value_heads, self.head_dim
        )
        require(
            self.head_dim % 2 == 0,
            self.call,
            f"head_dim is {self.head_dim}, expected an even number, since rotary positions turn pairs.",
        )
        self.feed_forward = feed_forwards.canonical(self.feed_forward)
        if self.intermediate_size is None:
            self.intermediate_size = feed_forwards.get(self.feed_forward).width(self.hidden_size)
        positive_int(self.call, "intermediate_size", self.intermediate_size)
        self.check_choice("norm", NORMS)
        check_window(self.call, self.window)
        for name in ("rope_theta", "rms_norm_eps"):
            in_range(self.call, name, getattr(self, name), low=0.0, strict=True)
        self.check_flags("share_query_key", "exclude_self")
        check_qk_norm(self.call, self.qk_norm)
        check_shared(self.call, self.share_query_key, self.num_attention_heads, self.num_key_value_heads)
        specs, temperatures, ridges = self.layer_specs(), self.layer_temperatures(), self.layer_ridges()
        for spec, temperature, ridge in zip(specs, temperatures, ridges, strict=True):
            temperature.require(self.call, spec)
            ridge.require(self.call, spec)
        self.temperatures = [str(rule) for rule in temperatures]
        self.ridges = [str(rule) for rule in ridges]

    def layer_temperatures(self) -> list[Temperature]:
        """The temperature of each layer, from the first to the last.

        Raises:
            ArgumentError: an unknown rule, or not one per layer.
        """
        return [as_temperature(rule) for rule in self.one_per_layer("temperatures", Temperature, "log")]

    def layer_ridges(self) -> list[Ridge]:
        """The ridge of each layer, from the first to the last: one rule for all is meant for the layers that have a
        ridge.

        Raises:
            ArgumentError: an unknown rule, not one per layer, or one for all that no layer takes.
        """
        rules = [as_ridge(rule) for rule in self.one_per_layer("ridges", Ridge, "learned")]
        if isinstance(self.ridges, (str, Ridge)):
            fixed, specs = as_ridge("fixed"), self.layer_specs()
            fits = [spec.degree == 1 for spec in specs]
            if any(fits):
                return [rule if fit else fixed for rule, fit in zip(rules, fits, strict=True)]
        return rules
