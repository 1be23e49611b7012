"""The configuration of ICLM: a covariate stream, a function stream, and how the one steers the other."""

from __future__ import annotations

from typing import Any, ClassVar

from ... import Spec
from ...checks import ArgumentError, number, require, within
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
"""The sizes of the ICLM paper: TinyStories and TinyMath (L = 8), GoodWiki (L = 12), SlimPajama (L = 24, table 2)."""


class ICLMConfig(RegardConfig):
    """Configuration of `ICLMForCausalLM` (ICLM paper, equations 9, 11 and 12), with the fields of `RegardConfig` and:

    Args:
        num_hidden_layers: L, even: L/2 pairs of a covariate block (attention and feed-forward layer on phi) and an f
            block (attention and feed-forward layer on f).
        num_attention_heads: heads of the covariate attention and, unless `f_attention_heads` is given, of f's.
        mixers: the kernels kappa of the f attention: one spec for all, or a list with one per pair.
        phi_mixers: those of the covariate attention, alike.
        variant: what a head of f averages: "full" the unmodified embeddings, "wv" a learned projection of them,
            "slice" a head's share of their channels (see `regard.nn.FunctionalGradient`).
        f_attention_heads: heads of the f attention. Two of them make "full" as large as a Transformer of L layers.
        start: what stands before the first token, y_0. "param": a learned vector, so that tokens need no preparation.
            "bos": the first token of every row, which is then never a value nor predicted.
        f_reads: the covariates that an f block reads: "post", updated by the covariate block of its pair; or "pre",
            those that the block is about to update (equation 11 by the letter: the first f block sees embeddings, and
            the last pair has no covariate block, since nothing would read it).
        phi_mlp: the feed-forward layer on phi, one of `regard.nn.feed_forwards` ("gelu", "swiglu", "none", ...).
        f_mlp: the feed-forward layer on f: "inline" adds to f, and later feed-forward layers see what it added;
            "side" adds to a sum of its own that joins f before the last norm; "none".
        f_feed_forward: which one that is.
        intermediate_size, f_intermediate_size: inner widths of the two; defaults as usual for the kind (gelu: 4 times).
        f_rope: rotary positions in the f attention; the covariate attention always has them.
        f_average: for kernels whose weights do not sum to one, divide by the number of pairs, 1/(i-1) (appendix B).
        expectation: what is subtracted from the embeddings that f averages (equation 7). "none"; "mean": the mean
            embedding, E(w|f) at f = 0; "exact": E(w|f_{j,k}) of step k.
        gd_steps: K, a divisor of L/2: functional-gradient steps, each made of L/2/K consecutive pairs, whose layers add
            up to one step with all their kernels (equation 10). More than one needs `expectation="exact"`: E is then
            computed K - 1 times, at O(T V d_f) each.
        d_phi, d_f: widths of the streams; default `hidden_size`. `d_f`, the width of embeddings and output, becomes the
            `hidden_size`.
        tie_phi: the covariates start from the (first d_phi channels of the) embeddings; False for a table of their own.
        norm_values: LayerNorm on the embeddings that f averages. They are then no longer unmodified.
        rope_theta: base of the wavelengths of the rotary positions.
        layer_norm_eps: added to the variance in LayerNorm.

    Raises:
        ArgumentError: as `RegardConfig`, and for combinations without a meaning.
    """

    model_type = "regard_iclm"
    size_field: ClassVar[str] = "f_intermediate_size"
    unused: ClassVar[dict[str, str]] = {
        **RegardConfig.unused,
        "rope_parameters": "rotary positions have rope_theta only",
        "rope_scaling": "rotary positions have rope_theta only",
        "sliding_window": "every covariate sees all tokens before it",
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
        """A size of the paper: "small" (8 layers, 512 wide), "medium" (12, 512) or "large" (24, 1024), with the GPT-2
        vocabulary.

        Args:
            name: of the size.
            variant: default the paper's: "full" for small and medium, "wv" for large.
            changes: further fields.

        Raises:
            ArgumentError: an unknown name.
        """
        known = ", ".join(map(repr, PRESETS))
        require(name in PRESETS, "ICLMConfig.preset", f"unknown size {name!r}, expected one of {known}.")
        fields = {"vocab_size": 50257, **PRESETS[name], **({} if variant is None else {"variant": variant}), **changes}
        return cls(**fields)

    @property
    def pairs(self) -> int:
        """L/2, the number of f blocks."""
        return self.num_hidden_layers // 2

    @property
    def covariate_blocks(self) -> int:
        """Covariate blocks that something reads: one a pair, one less where f reads before the update."""
        return self.pairs - (self.f_reads == "pre")

    @property
    def mixed_layers(self) -> int:
        """`mixers` names the f blocks."""
        return self.pairs

    def normalise(self) -> None:
        """Check every field and fill in the defaults, in place; see `RegardConfig.normalise`.

        Raises:
            ArgumentError: as the class.
        """
        positive_int(self.call, "num_hidden_layers", self.num_hidden_layers)
        require(
            self.num_hidden_layers % 2 == 0,
            self.call,
            f"num_hidden_layers is {self.num_hidden_layers}, expected an even number: pairs of a covariate block "
            f"and an f block.",
        )
        super().normalise()
        for name, choices in _CHOICES.items():
            self.check_choice(name, choices)
        self.check_flags("f_rope", "f_average", "tie_phi", "norm_values")
        for name in ("rope_theta", "layer_norm_eps"):
            number(self.call, name, getattr(self, name), low=0.0, strict=True)
        self._normalise_widths()
        self._normalise_steps()
        for spec in self.layer_specs():
            within(self.call, "mixers", check_kernel, self.call, spec)
        self.phi_mixers = [str(spec) for spec in self.covariate_specs()]

    def covariate_specs(self) -> list[Spec]:
        """The spec of each covariate block's attention, one per pair.

        Raises:
            ArgumentError: an unknown spec, or not one per pair.
        """
        found = self.one_per_layer("phi_mixers", Spec, "softmax")
        return [as_spec(mixer, self.call, "phi_mixers") for mixer in found]

    def _normalise_widths(self) -> None:
        """Widths, heads and inner widths."""
        self.d_f = self.hidden_size if self.d_f is None else self.d_f
        require(  # where d_phi is still open, hidden_size is what it will be
            self.d_phi is None or self.hidden_size in (self.d_f, RegardConfig.hidden_size),
            self.call,
            f"hidden_size is {self.hidden_size} and d_f {self.d_f}, which are one width; change both.",
        )
        self.d_phi = self.hidden_size if self.d_phi is None else self.d_phi
        if self.f_attention_heads is None:
            self.f_attention_heads = self.num_attention_heads
        for name in ("d_phi", "d_f", "f_attention_heads"):
            positive_int(self.call, name, getattr(self, name))
        self.hidden_size = self.d_f
        heads = {"num_attention_heads": True, "f_attention_heads": self.f_rope}
        for name, turned in heads.items():
            width, count = self.d_phi, getattr(self, name)
            require(
                width % (count * (1 + turned)) == 0,
                self.call,
                f"d_phi (hidden_size) is {width}, expected a multiple of {name} = {count}"
                f"{', with an even quotient, since rotary positions turn pairs' if turned else ''}.",
            )
        require(
            self.variant == "full" or self.d_f % self.f_attention_heads == 0,
            self.call,
            f"d_f is {self.d_f}, expected a multiple of {self.f_attention_heads} heads for variant={self.variant!r}.",
        )
        require(
            not self.tie_phi or self.d_phi <= self.d_f,
            self.call,
            f"d_phi is {self.d_phi} and d_f {self.d_f}: the embeddings have too few channels for the covariates to "
            f"start from; set tie_phi=False.",
        )
        for name in ("phi_mlp", "f_feed_forward"):
            setattr(self, name, within(self.call, name, feed_forwards.canonical, getattr(self, name)))
        if self.intermediate_size is None:
            self.intermediate_size = feed_forwards.get(self.phi_mlp).width(self.d_phi)
        if self.f_intermediate_size is None:
            self.f_intermediate_size = feed_forwards.get(self.f_feed_forward).width(self.d_f)
        positive_int(self.call, "intermediate_size", self.intermediate_size)
        positive_int(self.call, "f_intermediate_size", self.f_intermediate_size)
        if self.f_mlp != "none" and self.f_feed_forward == "none":
            raise ArgumentError(f"{self.call}: f_feed_forward is 'none' and f_mlp {self.f_mlp!r}; set f_mlp='none'.")

    def _normalise_steps(self) -> None:
        """Gradient steps and the expectation."""
        positive_int(self.call, "gd_steps", self.gd_steps)
        require(
            self.pairs % self.gd_steps == 0,
            self.call,
            f"gd_steps is {self.gd_steps}, expected a divisor of the {self.pairs} pairs of layers.",
        )
        require(
            self.gd_steps == 1 or self.expectation == "exact",
            self.call,
            f"gd_steps is {self.gd_steps} with expectation={self.expectation!r}: steps differ only by the expectation "
            f"at the f of the step before; set expectation='exact'.",
        )
        require(
            not self.norm_values or self.expectation == "none",
            self.call,
            f"norm_values averages normalised embeddings, from which expectation={self.expectation!r} of the "
            f"embeddings themselves cannot be subtracted; leave one of them out.",
        )


_CHOICES: dict[str, tuple[str, ...]] = {
    "variant": VARIANTS,
    "start": ("param", "bos"),
    "f_reads": ("post", "pre"),
    "f_mlp": ("inline", "side", "none"),
    "expectation": ("none", "mean", "exact"),
}
