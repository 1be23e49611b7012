"""Everything a training run can be told: each field is a flag of `regard train` and a key of its
TOML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..errors import ArgumentError
from .sentences import read_sentence, split_sentences

if TYPE_CHECKING:
    from .. import Spec
    from ..models import RegardConfig

LARGEST = 2**31 - 1
"""The largest number of anything that is counted."""
MOST_LAYERS = 1024
SEEDS = 2**32
"""Seeds are 0 .. SEEDS - 1: what numpy's generator, which transformers seeds too, can take."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train a language model on your text.

    Every option is also a key of a TOML file given with --config; a flag on the command line wins.
    """

    data: Path | None = None
    """Text to learn from: a UTF-8 file, or a folder whose text files are read in sorted order."""
    tokenizer: str = "char"
    """What a token is: 'char' (one character), 'byte' (one UTF-8 byte; any text can be written) or 'gpt2' (GPT-2's
    50257 pieces of words; any text can be written)."""
    validation: float = 0.1
    """Share of the text, at its end, that is held out and never trained on."""
    context: int = 256
    """Tokens the model sees at once."""

    model: str = "transformer"
    """What is trained, such as 'transformer', 'memory-mosaic' or 'iclm'. `regard list models` shows all."""
    spec: tuple[str, ...] = ("softmax",)
    """The attention of the layers, in the grammar: one sentence for all layers or one per layer (with blanks
    or commas between them), such as 'biweight' or 'triweight*anchored(margin=1)'. `regard list presets` shows
    the named ones, `regard list token-mixers` what a layer of a transformer may be besides."""
    option: tuple[str, ...] = field(default=(), metadata={"repeatable": True})
    """Further fields of the model's configuration as key=value, several after one --option or each after its own,
    such as wiring=parallel or feed_forward=gelu. `regard list models` shows them."""
    layers: int = 4
    """Number of layers."""
    width: int = 128
    """Size of the hidden state."""
    heads: int = 4
    """Attention heads per layer; must divide the width."""
    kv_heads: int | None = None
    """Heads that keep keys and values (grouped queries); must divide the heads. By default as many."""
    mlp_width: int | None = None
    """Size inside the feed-forward part. By default what is usual for its kind, about 8/3 of the width."""
    window: int | None = None
    """Let attention look at the last so many tokens only. By default at all of them."""
    temperature: str = "fixed"
    """How sharp attention is: 'fixed', 'learned' (one number per head), or growing with the number of tokens a
    row sees, 'log' or 'power'. `regard list temperatures` shows them."""
    ridge: str = "fixed"
    """What penalises the slope in local linear layers: 'fixed' (the number of the sentence), or learned from every
    token, 'learned' (a number per head) or 'learned-per-dimension'. `regard list ridges` shows them."""
    qk_norm: Literal["none", "rms", "l2"] = "none"
    """Normalise queries and keys of every head: 'rms' with a learned gain, 'l2' to length one."""
    share_query_key: bool = False
    """Make the queries of the keys: one projection less. Consider --exclude-self with it."""
    exclude_self: bool = False
    """Let attention look at earlier tokens only."""

    steps: int = 1000
    """Optimiser steps."""
    batch: int = 16
    """Windows of text per device and forward pass."""
    accumulate: int = 1
    """Forward passes per optimiser step: batches of batch x accumulate windows in the memory of one."""
    learning_rate: float = 1e-3
    """Highest learning rate, reached after the warm-up; it then falls along a cosine."""
    warmup: float = 0.05
    """Share of the steps over which the learning rate rises from zero."""
    final_learning_rate: float = 0.1
    """The learning rate of the last step, as a share of the highest."""
    weight_decay: float = 0.1
    """AdamW weight decay (of matrices; norms and biases are left alone)."""
    clip: float = 1.0
    """Largest norm of the gradient; a longer one is scaled down to it."""
    seed: int = 0
    """Decides the first weights and which windows each step sees."""
    device: str = "auto"
    """'cpu', 'cuda', 'mps', or 'auto' for the fastest that is there."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the products in the forward pass. Weights and their updates are float32 either way."""

    out: Path = Path("runs/train")
    """Folder to write: config, tokenizer, metrics.jsonl, checkpoints, and the trained model in model/."""
    resume: bool = False
    """Continue the run in the output folder from its last complete checkpoint."""
    overwrite: bool = False
    """Delete the run that is in the output folder and start anew."""
    log_every: int = 10
    """Steps between two lines of metrics."""
    eval_every: int = 200
    """Steps between two looks at the held-out text."""
    eval_tokens: int = 16384
    """Held-out tokens, from the start of the held-out text, used for each look; all are used at the end."""
    save_every: int = 200
    """Steps between two checkpoints."""
    keep: int = 2
    """Checkpoints to keep; older ones are deleted once a newer one is complete."""

    def __post_init__(self) -> None:
        last = len(self.spec) - 1
        # a comma at the end of a word stands before the next: --spec softmax, biweight
        words = (word if i == last else word.removesuffix(",") for i, word in enumerate(self.spec))
        sentences = tuple(sentence for word in words for sentence in split_sentences(word))
        object.__setattr__(self, "spec", sentences)

    @property
    def per_step(self) -> int:
        """Windows of one optimiser step on one device."""
        return self.batch * self.accumulate

    def validate(self, call: str = "train", *, here: bool = True) -> None:
        """Check all that can be checked without reading the text.

        Args:
            here: also check what a new run needs here: a text, the device, and a model that can be computed.

        Raises:
            ArgumentError: a number out of its range, heads that do not divide, an unknown spec, tokenizer
                or device, or a spec that cannot be computed at these sizes.
        """
        model = ("layers", "width", "heads", "kv_heads", "mlp_width", "window")
        rhythm = ("log_every", "eval_every", "save_every", "keep")
        for name in (*model, "steps", "batch", "accumulate", *rhythm):
            _at_least(self, name, 1, call)
        if self.layers > MOST_LAYERS:
            raise ArgumentError(f"{call}: --layers is {self.layers}, expected at most {MOST_LAYERS}.")
        _at_least(self, "context", 2, call)  # one token to see and one to predict
        _at_least(self, "eval_tokens", 2, call)
        for name in ("learning_rate", "clip"):
            _above_zero(self, name, call)
        _at_least(self, "weight_decay", 0, call)
        if self.steps * self.per_step >= 2**63:
            raise ArgumentError(
                f"{call}: --steps {self.steps}, --batch {self.batch} and --accumulate {self.accumulate} make "
                f"{self.steps * self.per_step:.1e} windows of text; give smaller ones."
            )
        check_seed(self.seed, call)
        for name in ("warmup", "final_learning_rate"):
            _share(self, name, call, ends=True)
        _share(self, "validation", call, ends=False)
        if here and self.data is None:
            raise ArgumentError(f"{call}: no text to learn from; give --data FILE or --data FOLDER.")
        if self.resume and self.overwrite:
            raise ArgumentError(f"{call}: --resume continues the run, --overwrite deletes it; give one of them.")
        if not self.spec:
            raise ArgumentError(f"{call}: --spec names nothing; give a sentence such as softmax.")
        specs = _specs(self.spec, call)
        _check_names(self, call, here=here)
        _check_rules(self, specs, call)
        from .models import check_model, has_field  # transformers, which takes seconds to import: last

        _check_heads(self, call, rotary=has_field(self.model, "rope_theta"))
        if here:
            _check_sizes(self, specs, check_model(self, call), call)


def _specs(words: Sequence[str], call: str) -> list[Spec]:
    """The sentences among `words`, each once; the others name token mixers."""
    found: dict[Spec, None] = {}
    for word in words:
        try:
            found[read_sentence(word, "--spec", call)] = None
        except ArgumentError:
            from ..models import token_mixers  # transformers, which takes seconds to import: only where it is needed

            if word not in token_mixers:
                raise
    return list(found)


def check_seed(seed: int, call: str) -> None:
    """`--seed` is one that every generator takes.

    Raises:
        ArgumentError: it is not.
    """
    if not 0 <= seed < SEEDS:
        raise ArgumentError(f"{call}: --seed is {seed}, expected 0 to {SEEDS - 1}.")


def _at_least(config: TrainConfig, name: str, least: int, call: str) -> None:
    value = getattr(config, name)
    if value is not None and not value >= least:  # `not >=` so that NaN is caught too
        raise ArgumentError(f"{call}: {_flag(name)} is {value}, expected at least {least}.")
    if value is not None and value > LARGEST:
        raise ArgumentError(f"{call}: {_flag(name)} is {value:.3g}, expected at most {LARGEST}.")


def _above_zero(config: TrainConfig, name: str, call: str) -> None:
    value = getattr(config, name)
    if not 0 < value < float("inf"):
        raise ArgumentError(f"{call}: {_flag(name)} is {value}, expected a number above 0.")


def _share(config: TrainConfig, name: str, call: str, *, ends: bool) -> None:
    value = getattr(config, name)
    if not (0 <= value <= 1 if ends else 0 < value < 1):
        raise ArgumentError(
            f"{call}: {_flag(name)} is {value}, expected a share "
            f"{'from 0 to 1' if ends else 'between 0 and 1, both excluded'}."
        )


def _check_heads(config: TrainConfig, call: str, *, rotary: bool) -> None:
    """Heads share the width in equal parts, which rotary positions need to be even; keys and values share the heads."""
    width, heads, kv_heads = config.width, config.heads, config.kv_heads
    part = 2 if rotary else 1
    if width % part:
        raise ArgumentError(f"{call}: --width is {width}, expected an even number.")
    if width % (part * heads):
        fault = (
            f"which does not divide --width {width}"
            if width % heads
            else f"which gives heads of {width // heads} channels at --width {width}, expected an even number"
        )
        raise ArgumentError(
            f"{call}: --heads is {heads}, {fault}; choose from {_divisors(width // part)}, "
            f"or a --width that is a multiple of {part * heads}."
        )
    if config.share_query_key and kv_heads not in (None, heads):
        raise ArgumentError(
            f"{call}: --share-query-key makes queries of the keys, so that --kv-heads {kv_heads} must be --heads "
            f"{heads}; leave --kv-heads out."
        )
    if kv_heads is not None and heads % kv_heads:
        raise ArgumentError(
            f"{call}: --kv-heads is {kv_heads}, which does not divide --heads {heads}; choose from {_divisors(heads)}."
        )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, min(number, 1024) + 1) if number % n == 0)


def _check_rules(config: TrainConfig, specs: list[Spec], call: str) -> None:
    """The rules of temperature and ridge exist and fit the sentences."""
    from ..nn import as_ridge, as_temperature

    rule = as_temperature(config.temperature, call, "--temperature")
    for spec in specs:
        rule.require(f"{call}: --temperature", spec)
    ridge = as_ridge(config.ridge, call, "--ridge")
    for spec in [spec for spec in specs if spec.degree] or specs:  # the others have none to learn
        ridge.require(f"{call}: --ridge", spec)


def _check_names(config: TrainConfig, call: str, *, here: bool) -> None:
    from .data.tokenizers import TOKENIZERS
    from .device import resolve_device

    TOKENIZERS.get(config.tokenizer)
    if here:
        resolve_device(config.device, call=call)


def _check_sizes(config: TrainConfig, specs: list[Spec], model: RegardConfig, call: str) -> None:
    """Some implementation computes every sentence at the run's sizes, so that none fails once the folder is
    written."""
    for spec in specs:
        reason = _obstacle(config, spec, model, config.batch)
        if reason is None:
            continue
        batch = config.batch // 2
        while batch and _obstacle(config, spec, model, batch) is not None:
            batch //= 2
        mend = (
            f"a smaller --batch (such as {batch}) with a larger --accumulate, or a smaller --context" if batch else ""
        )
        raise ArgumentError(
            f"{call}: --spec {spec} cannot be computed with --batch {config.batch}, --heads {config.heads} and "
            f"--context {config.context}: {reason}. Give {mend or 'a smaller --context, at any --batch'}."
        )


def _obstacle(config: TrainConfig, spec: Spec, model: RegardConfig, batch: int) -> str | None:
    """Why nothing can train and measure `batch` windows at once, or None."""
    import torch

    from .. import explain
    from .device import resolve_device

    dim = getattr(model, "head_dim", None) or config.width // config.heads
    for diagnostics in (False, True):  # training, and measuring the support
        found = explain(
            spec,
            (batch, config.heads, config.context, dim),
            (batch, config.kv_heads or config.heads, config.context, dim),
            dtype=getattr(torch, config.dtype),
            device=resolve_device(config.device, call="train"),
            is_causal=True,
            exclude_self=config.exclude_self,
            window=config.window,
            return_diagnostics=diagnostics,
        )
        if all(reason is not None for _, reason, _ in found.rows):
            name, reason, _ = found.rows[-1]  # the plainest, which only size can stop
            return f"{name} {reason}"
    return None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
