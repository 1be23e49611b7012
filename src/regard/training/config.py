"""The options of a training run: each field is a flag of `regard train` and a key of its TOML file."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, get_type_hints

from ..errors import require
from .fields import coerce, split_specs

LARGEST = 2**31 - 1
"""The largest count that an option takes."""
MOST_LAYERS = 1024
SEEDS = 2**32
"""Seeds are 0 .. SEEDS - 1, the range of numpy's generator, which transformers seeds too."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The text and its tokens."""

    data: Path | None = None
    """Training text: a UTF-8 file, a folder whose text files are read in sorted order, or 'datasets:NAME': documents
    that the package datasets reads from JSON, Parquet, CSV or text files, or by a name on the Hugging Face Hub."""
    split: str | None = None
    """Split of a data set. By default 'train'."""
    subset: str | None = None
    """Subset of a data set on the Hub, such as 'wikitext-2-raw-v1'."""
    text_column: str | None = None
    """Column of a data set that holds the text. By default 'text'."""
    stream: bool = False
    """Read a data set as it is needed, in order, without a copy on this machine."""
    tokenizer: str = "char"
    """Tokens: 'char' (one per known character), 'byte' (one per UTF-8 byte), 'bpe' (at most 32,000, learned from the
    text), 'gpt2' (GPT-2's 50257 tokens), or another model's: a folder, or a name with a slash on the Hub."""
    validation: float = 0.1
    """Fraction of the text, at its end, that is held out for evaluation."""
    context: int = 256
    """Context length in tokens."""
    task: str | None = None
    """Task to train on instead of a text, such as 'mqar'. `regard list tasks` shows all."""
    setting: str = "quick"
    """Named setting of the task, such as 'quick' or 'paper'."""
    task_option: tuple[str, ...] = field(default=(), metadata={"repeatable": True})
    """Fields of the task as key=value, such as pairs=8."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model and its sizes. Some options are for some models only."""

    model: str = "transformer"
    """Model, such as 'transformer', 'memory-mosaic' or 'iclm'. `regard list models` shows all."""
    spec: tuple[str, ...] = ("softmax",)
    """Attention specs, one for all layers or one each: see `regard list presets` and `regard list token-mixers`. Also
    --mixers."""
    option: tuple[str, ...] = field(default=(), metadata={"repeatable": True})
    """Other fields of the model as key=value, such as norm=layer feed_forward=gelu: see `regard list models`."""
    layers: int = 4
    """Number of layers."""
    width: int = 128
    """Size of the hidden state."""
    heads: int = 4
    """Attention heads per layer. Must divide the width."""
    kv_heads: int | None = None
    """Key and value heads (grouped-query attention). Must divide the heads. By default the same number."""
    mlp_width: int | None = None
    """Hidden size of the feed-forward layers. By default the usual size of their kind, about 8/3 of the width."""
    window: int | None = None
    """Sliding window of attention in tokens. By default none."""
    temperature: str = "fixed"
    """Temperature: 'fixed', 'learned' (one per head), 'log' or 'power' (growing with the number of visible tokens)."""
    ridge: str = "fixed"
    """Ridge of local linear layers: 'fixed' (in the spec), or computed from each token: 'learned' (one per head) or
    'learned-per-dimension' (one per channel)."""
    qk_norm: Literal["none", "rms", "l2"] = "none"
    """Normalisation of queries and keys per head: 'rms' with a learned gain, 'l2' to length one."""
    share_query_key: bool = False
    """Use the keys as queries, with one projection less. Consider --exclude-self with it."""
    exclude_self: bool = False
    """Exclude the query's own position from attention."""


@dataclass(frozen=True, kw_only=True)
class OptimiserOptions:
    """The optimiser and the hardware."""

    steps: int = 1000
    """Optimiser steps."""
    batch: int = 16
    """Sequences per device and forward pass."""
    accumulate: int = 1
    """Gradient accumulation: forward passes per optimiser step."""
    learning_rate: float = 1e-3
    """Peak learning rate, reached after the warm-up, followed by cosine decay."""
    warmup: float = 0.05
    """Fraction of the steps over which the learning rate rises from zero."""
    final_learning_rate: float = 0.1
    """Learning rate of the last step, as a fraction of the peak."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """'adamw', or 'muon' for the matrices of hidden layers, with AdamW for everything else."""
    weight_decay: float = 0.1
    """Weight decay of matrices. Norms and biases have none."""
    clip: float = 1.0
    """Largest norm of the gradient (gradient clipping)."""
    seed: int = 0
    """Random seed of the initial weights and of the sampled sequences."""
    device: str = "auto"
    """'cpu', 'cuda', 'mps', or 'auto' for the fastest available."""
    shard: bool = False
    """Split weights, gradients and optimiser states over the processes that torchrun started (FSDP2)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the forward pass. Weights and their updates are float32 either way."""


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """The run folder, and how often something is logged, evaluated or saved."""

    out: Path = Path("runs/train")
    """Output folder: config, tokenizer, metrics.jsonl, checkpoints, and the trained model in model/."""
    resume: bool = False
    """Continue the run in the output folder from its last complete checkpoint."""
    overwrite: bool = False
    """Delete the run in the output folder and start again."""
    log_every: int = 10
    """Steps between log lines."""
    eval_every: int = 200
    """Steps between evaluations on held-out text."""
    eval_tokens: int = 16384
    """Held-out tokens per evaluation, from the start of the held-out text. The final one uses all."""
    metric: str = "accuracy"
    """Metric of a task that --stop-at refers to."""
    stop_at: float | None = None
    """Stop once the metric of a task is at least this on its validation examples. By default never."""
    eval_examples: int = 256
    """Examples of a task per evaluation."""
    save_every: int = 200
    """Steps between checkpoints."""
    report_to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Trackers that also get what is logged: 'tensorboard' (in the run folder), 'wandb' or 'trackio'."""
    keep: int = 2
    """Checkpoints to keep. Older ones are deleted once a newer one is complete."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(OutputOptions, OptimiserOptions, ModelOptions, DataOptions):
    """Train a language model on your text.

    Every option is also a key of a TOML file given with --config; a flag on the command line wins.
    """

    groups: ClassVar[dict[str, type]] = {
        "data": DataOptions,
        "model": ModelOptions,
        "optimiser": OptimiserOptions,
        "run": OutputOptions,
    }
    """The groups in which `regard train --help` shows the options."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for name, value in list(vars(self).items()):
            plain = value.item() if getattr(value, "ndim", None) == 0 else value  # a number of numpy or torch
            object.__setattr__(self, name, coerce(plain, hints[name], f"TrainConfig: {name}"))
        # a comma may end every word but the last: --spec softmax, biweight
        words = (*(word.removesuffix(",") for word in self.spec[:-1]), *self.spec[-1:])
        object.__setattr__(self, "spec", tuple(spec for word in words for spec in split_specs(word)))

    @property
    def per_step(self) -> int:
        """Return the sequences per optimiser step on one device."""
        return self.batch * self.accumulate


def check_seed(seed: int, call: str) -> None:
    """Check that every random generator accepts `--seed`."""
    require(0 <= seed < SEEDS, call, f"--seed is {seed}, expected 0 to {SEEDS - 1}.")
