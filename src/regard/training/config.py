"""Everything a training run can be told: each field is a flag of `regard train` and a key of its
TOML file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..errors import ArgumentError
from .sentences import split_sentences

if TYPE_CHECKING:
    pass

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


def check_seed(seed: int, call: str) -> None:
    """`--seed` is one that every generator takes.

    Raises:
        ArgumentError: it is not.
    """
    if not 0 <= seed < SEEDS:
        raise ArgumentError(f"{call}: --seed is {seed}, expected 0 to {SEEDS - 1}.")
