"""Configuration of ICLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from ... import Spec
from ...checks import ArgumentError, number, refuse, require, within
from ...grammar import as_spec
from ...nn.arguments import positive_int
from ...nn.feed_forward import feed_forwards
from ...nn.functional_gradient import VARIANTS, check_kernel
from ..base.base_config import RegardConfig

PRESETS: dict[str, dict[str, Any]] = {
    "small": {"num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8, "variant": "full"},
    "medium": {"num_hidden_layers": 12, "hidden_size": 512, "num_attention_heads": 8, "variant": "full"},
    "large": {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "variant": "wv"},
}
"""Sizes of the ICLM paper: TinyStories and TinyMath (L = 8), GoodWiki (L = 12), SlimPajama (L = 24, table 2)."""


class ICLMConfig(RegardConfig):
    """Configuration of `ICLMForCausalLM` (ICLM paper, equations 9, 11 and 12): the fields of `RegardConfig` and these.

    The model has two streams: covariates phi, and the function f whose kernels compare them.

    Args:
        num_hidden_layers: L, even: L/2 pairs of a covariate block (attention and feed-forward layer on phi) and an f
            block (attention and feed-forward layer on f).
        num_attention_heads: heads of the covariate attention and, unless `f_attention_heads` is given, of f.
        mixers: kernels kappa of the f attention: one spec for all, or a list with one per pair.
        phi_mixers: the same for the covariate attention.
        variant: values that a head of f averages: "full" the unmodified embeddings, "wv" a learned projection of them,
            "slice" the head's share of their channels (see `regard.nn.FunctionalGradient`).
        f_attention_heads: heads of the f attention. With two, "full" is as large as a Transformer of L layers.
        start: the token y_0 before the first. "param": a learned vector. "bos": the first token of every row, which
            is then never a value and never predicted.
        f_reads: covariates that an f block reads: "post", after the covariate block of its pair; or "pre", before it
            (exactly equation 11: the first f block reads embeddings, and the last pair has no covariate block).
        phi_mlp: the feed-forward layer on phi, one of `regard.nn.feed_forwards` ("gelu", "swiglu", "none", ...).
        f_mlp: where the output of the feed-forward layer on f goes: "inline" to f, so that later ones read it; "side"
            to a separate sum, added to f before the last norm; "none": no such layer.
        f_feed_forward: the kind of the feed-forward layer on f.
        intermediate_size, f_intermediate_size: inner widths of the two; default: usual for the kind (gelu: 4 times).
        f_rope: rotary positions in the f attention; the covariate attention always has them.
        f_average: for weights that do not sum to one, divide by the number of pairs, 1/(i-1) (appendix B).
        expectation: subtracted from the embeddings that f averages (equation 7). "none"; "mean": the mean embedding,
            E(w|f) at f = 0; "exact": E(w|f_{j,k}) of step k.
        gd_steps: K, a divisor of L/2: functional gradient steps of L/2/K consecutive pairs each (equation 10). More
            than one requires `expectation="exact"`: E is then computed K - 1 times, at O(T V d_f) each.
        d_phi, d_f: widths of the streams; default `hidden_size`. `d_f`, the width of embeddings and output, becomes the
            `hidden_size`.
        tie_phi: initialise the covariates with the first d_phi channels of the embeddings; False: a second table.
        norm_values: apply LayerNorm to the embeddings that f averages.
        rope_theta: base of the wavelengths of the rotary positions.
        layer_norm_eps: added to the variance in LayerNorm.

    Raises:
        ArgumentError: as in `RegardConfig`, or for contradictory fields.
    """

    model_type = "regard_iclm"
    size_field: ClassVar[str] = "f_intermediate_size"
    unused: ClassVar[dict[str, str]] = {
        **RegardConfig.unused,
        "rope_parameters": "rotary positions have only rope_theta",
        "rope_scaling": "rotary positions have only rope_theta",
        "sliding_window": "every covariate attends to all earlier tokens",
    }
    choices: ClassVar[dict[str, Sequence[str]]] = {
        "variant": VARIANTS,
        "start": ("param", "bos"),
        "f_reads": ("post", "pre"),
        "f_mlp": ("inline", "side", "none"),
        "expectation": ("none", "mean", "exact"),
    }

    phi_mixers: Any = "softmax"
    variant: str = "full"
    f_attention_heads: int | None = None
    start: str = "param"
    f_reads: str = "post"
    phi_mlp: str = "gelu"
    f_mlp: str = "inline"
    f_feed_forward: str = "gelu"
    intermediate_size: int | None = None
    f_intermediate_size: int | None = None
    f_rope: bool = True
    f_average: bool = True
    expectation: str = "none"
    gd_steps: int = 1
    d_phi: int | None = None
    d_f: int | None = None
    tie_phi: bool = True
    norm_values: bool = False
    rope_theta: float = 10000.0
    layer_norm_eps: float = 1e-5

    @classmethod
    def preset(cls, name: str, *, variant: str | None = None, **changes: Any) -> ICLMConfig:
        """Return a size of the paper, with the GPT-2 vocabulary: "small" (8 layers, width 512), "medium" (12, 512) or
        "large" (24, 1024). The default variant is the paper's: "full", but "wv" for large. `changes` are further
        fields."""
        known = ", ".join(map(repr, PRESETS))
        require(name in PRESETS, "ICLMConfig.preset", f"unknown size {name!r}, expected one of {known}.")
        fields = {"vocab_size": 50257, **PRESETS[name], **({} if variant is None else {"variant": variant}), **changes}
        return cls(**fields)

    @property
    def pairs(self) -> int:
        return self.num_hidden_layers // 2

    @property
    def covariate_blocks(self) -> int:
        """Return the number of covariate blocks: one per pair, one less where f reads before the update."""
        return self.pairs - (self.f_reads == "pre")

    mixed_layers = pairs

    def normalise(self) -> None:
        positive_int(self.call, "num_hidden_layers", self.num_hidden_layers)
        if self.num_hidden_layers % 2:
            expected = "an even number: pairs of a covariate block and an f block"
            raise refuse(self.call, "num_hidden_layers", self.num_hidden_layers, expected)
        super().normalise()
        for name in ("rope_theta", "layer_norm_eps"):
            number(self.call, name, getattr(self, name), low=0.0, strict=True)
        self._normalise_widths()
        self._normalise_steps()
        for spec in self.layer_specs():
            within(self.call, "mixers", check_kernel, self.call, spec)
        self.phi_mixers = [str(spec) for spec in self.covariate_specs()]

    def covariate_specs(self) -> list[Spec]:
        """Return the spec of each covariate attention, one per pair."""
        mixers = self.one_per_layer("phi_mixers", (str, Spec), "a spec such as 'softmax'")
        return [as_spec(mixer, self.call, "phi_mixers") for mixer in mixers]

    def _normalise_widths(self) -> None:
        self.d_f = self.hidden_size if self.d_f is None else self.d_f
        fits = self.d_phi is None or self.hidden_size in (self.d_f, RegardConfig.hidden_size)  # None: hidden_size
        width = f"hidden_size is {self.hidden_size} and d_f {self.d_f}, expected equal numbers; change both."
        require(fits, self.call, width)
        d_phi, heads = self.fill("d_phi", self.hidden_size), self.fill("f_attention_heads", self.num_attention_heads)
        positive_int(self.call, "d_f", self.d_f)
        self.hidden_size = self.d_f
        for name, rotary in {"num_attention_heads": True, "f_attention_heads": self.f_rope}.items():
            count, even = getattr(self, name), ", with an even quotient, since rotary positions rotate pairs" * rotary
            text = f"d_phi (hidden_size) is {d_phi}, expected a multiple of {name} = {count}{even}."
            require(d_phi % (count * (1 + rotary)) == 0, self.call, text)
        text = f"d_f is {self.d_f}, expected a multiple of {heads} heads for variant={self.variant!r}."
        require(self.variant == "full" or self.d_f % heads == 0, self.call, text)
        few = "the embeddings have too few channels to initialise the covariates; set tie_phi=False"
        fits = not self.tie_phi or d_phi <= self.d_f
        require(fits, self.call, f"d_phi is {d_phi} and d_f {self.d_f}: {few}.")
        for name in ("phi_mlp", "f_feed_forward"):
            setattr(self, name, within(self.call, name, feed_forwards.canonical, getattr(self, name)))
        self.fill("intermediate_size", feed_forwards.get(self.phi_mlp).width(d_phi))
        self.fill("f_intermediate_size", feed_forwards.get(self.f_feed_forward).width(self.d_f))
        if self.f_mlp != "none" and self.f_feed_forward == "none":
            raise ArgumentError(f"{self.call}: f_feed_forward is 'none' and f_mlp {self.f_mlp!r}; set f_mlp='none'.")

    def _normalise_steps(self) -> None:
        positive_int(self.call, "gd_steps", self.gd_steps)
        divisor = f"gd_steps is {self.gd_steps}, expected a divisor of the {self.pairs} pairs of layers."
        require(self.pairs % self.gd_steps == 0, self.call, divisor)
        steps, given = f"gd_steps is {self.gd_steps} with", f"expectation={self.expectation!r}"
        why = "steps differ only in the expectation at the f of the step before; set expectation='exact'"
        require(self.gd_steps == 1 or self.expectation == "exact", self.call, f"{steps} {given}: {why}.")
        values = f"norm_values averages normalised embeddings, from which {given} of the embeddings themselves"
        fits = not self.norm_values or self.expectation == "none"
        require(fits, self.call, f"{values} cannot be subtracted; leave one of them out.")
