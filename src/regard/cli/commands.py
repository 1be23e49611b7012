"""The commands. Each takes its arguments as a list and returns the exit code. Slow imports are inside."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ..errors import ArgumentError, require
from ..training.config import LARGEST, TrainConfig
from ..training.validation import validate
from .options import parse
from .show import print_pairs

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..training.data.text import Source

Run = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]


def train(argv: list[str]) -> int:
    """Run `regard train`; with --resume, options that are not given are those of the run."""
    config = parse(TrainConfig, argv, command="train", epilogue=_TRAIN)
    if config.resume:
        from ..training.storage.folder import saved_config

        config = parse(TrainConfig, argv, command="train", base=saved_config(config.out, call="train"))
    validate(config)  # before the slow imports
    if config.task is not None:
        return _train_task(config)
    from ..training.device import main_process
    from ..training.run import train as run

    summary = run(config)
    if not main_process():
        return 0
    lines = [
        ("held-out loss", f"{summary.loss:.4f} nats/token"),
        ("", f"{summary.bits_per_char:.4f} bits/character, {summary.bits_per_byte:.4f} bits/byte"),
        ("speed", f"{summary.tokens_per_second:,.0f} tokens/s"),
        ("support", f"{summary.support:.1f} keys per query" if summary.support is not None else ""),
        ("parameters", f"{summary.parameters:,}"),
        ("run folder", summary.out),
    ]
    print_pairs([(name, text) for name, text in lines if text])
    hint = f" --prompt {shlex.quote(summary.prompt)}" if summary.prompt else ""
    print(f"\nTry: regard generate {shlex.quote(summary.out)}{hint}")
    return 0


def _train_task(config: TrainConfig) -> int:
    """Train on a task, and print the test scores with the scores of a trivial answer."""
    from ..training.task.run import train_task

    summary = train_task(config)
    lines = [
        (name, f"{mean:.4f} ± {error:.4f}" + (f" (floor {summary.floor[name]:.4f})" if name in summary.floor else ""))
        for name, (mean, error) in summary.scores.items()
    ]
    print_pairs([*lines, ("steps", f"{summary.step:,}"), ("parameters", f"{summary.parameters:,}")])
    print_pairs([("run folder", summary.out)])
    return 0


@dataclass(frozen=True)
class EvalOptions:
    """Measure a trained model on held-out text."""

    run: Run = tyro.MISSING
    """Folder of a training run (its --out), or of a saved model."""
    data: Path | None = None
    """UTF-8 file or folder to measure on, or 'datasets:NAME' as in `regard train`. By default the held-out text."""
    split: str | None = None
    """Split of a data set. By default 'train'."""
    subset: str | None = None
    """Subset of a data set on the Hub, such as 'wikitext-2-raw-v1'."""
    text_column: str | None = None
    """Column of a data set that holds the text. By default 'text'."""
    context: int | None = None
    """Tokens per window. By default the context length of the training."""
    stride: int | None = None
    """Tokens by which windows advance; a smaller stride gives more context. By default half the context."""
    batch: int = 16
    """Windows, or examples of a task, per forward pass."""
    lm_eval: tuple[str, ...] = ()
    """Score on these tasks of the package lm-eval instead, such as hellaswag piqa. Most of them download their data."""
    limit: int | None = None
    """Examples per task of --lm-eval, the first ones. By default all."""
    tasks: Path | None = None
    """Folder of YAML files with further tasks for --lm-eval."""
    device: str = "auto"
    """'cpu', 'cuda', 'mps', or 'auto' for the fastest available."""


def evaluate(argv: list[str]) -> int:
    """Run `regard eval`."""
    options = parse(EvalOptions, argv, command="eval", epilogue=_EVAL)
    for name, least in (("context", 2), ("stride", 1), ("batch", 1), ("limit", 1)):
        value = getattr(options, name)
        require(value is None or value >= least, "eval", f"--{name} is {value}, expected at least {least}.")
    alone = "--limit and --tasks are for the tasks of --lm-eval; give it, or omit them."
    require(bool(options.lm_eval) or options.limit is options.tasks is None, "eval", alone)
    from ..checks import within
    from ..training.data.corpus import encode_part
    from ..training.device import resolve_device
    from ..training.evaluation import evaluate as measure
    from ..training.storage.folder import load_model, task_run

    device = resolve_device(options.device, call="eval")
    if options.run.is_dir() and (saved_task := task_run(options.run, call="eval")) is not None:
        return _eval_task(saved_task, options, device)
    model, tokenizer = load_model(options.run, call="eval")
    if options.lm_eval:
        return _eval_harness(model.to(device), tokenizer, options)
    text, chunks, saved = _eval_text(options)
    usual = saved.context if saved else getattr(model.config, "max_position_embeddings", None)
    context: Any = options.context or usual
    require(bool(context), "eval", "the model has no longest context; set one with --context.")
    fits = options.stride is None or options.stride < context
    require(fits, "eval", f"--stride is {options.stride}, expected 1 to {context - 1} (context - 1).")
    part = encode_part(tokenizer, chunks, text, Path(gettempdir()))
    tokens = part.tokens
    few = f"the text has {len(tokens)} tokens, less than one context of {context}"
    require(len(tokens) >= context, "eval", f"{few}; give more text or a smaller --context.")
    windows = {"context": context, "stride": options.stride, "batch": options.batch}
    sizes = f"with --batch {options.batch} and --context {context}"
    result = within("eval", sizes, measure, model.to(device), tokens, part.units, **windows)
    lines = [
        ("loss", f"{result.loss:.6f} nats/token over {result.tokens:,} tokens"),
        ("perplexity", f"{math.exp(result.loss):.4f} per token; the first token is not predicted (no prefix token)"),
        ("bits per character", f"{result.bits_per_char:.6f}"),
        ("bits per byte", f"{result.bits_per_byte:.6f}"),
        ("speed", f"{result.tokens_per_second:,.0f} tokens/s"),
    ]
    if result.support is not None:
        lines.append(("support", f"{result.support:.2f} keys per query"))
    unknown = (tokens == tokenizer.unk_token_id).sum().item() if tokenizer.unk_token is not None else 0
    if unknown:
        lines.append(("unknown characters", f"{unknown:,} (each counted as one token <unk>)"))
    print_pairs(lines)
    return 0


def _eval_harness(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: EvalOptions) -> int:
    """Print the scores of a model on tasks of the package lm-eval, each with its standard error if it has one."""
    from ..training.errors import one_error

    require(not _of_a_text(options), "eval", "--lm-eval scores tasks; omit --data, --context and --stride.")
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        needs = f"--lm-eval needs the package lm-eval ({error}); install it with pip install 'regard[eval]'"
        raise ArgumentError(f"eval: {needs}.") from None
    tasks, folder = list(options.lm_eval), options.tasks
    manager = TaskManager(include_path=None if folder is None else str(folder))
    for name in tasks:
        unknown = f"--lm-eval: unknown task {name!r}; `lm-eval ls tasks` lists them."
        require(name in manager.all_tasks, "eval", unknown)
    judge: Any = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=options.batch)
    limit = options.limit
    with one_error(f"eval: --lm-eval {' '.join(tasks)}"):
        results = simple_evaluate(model=judge, tasks=tasks, limit=limit, task_manager=manager, log_samples=False)
    rows = []
    for task, metrics in results["results"].items():
        for key, value in metrics.items():
            metric, comma, choice = key.partition(",")
            if comma and not metric.endswith("_stderr"):
                deviation = metrics.get(f"{metric}_stderr,{choice}")
                spread = f" ± {deviation:.4f}" if isinstance(deviation, float) else ""
                rows.append((f"{task} {metric}", f"{value:.4f}{spread}"))
    print_pairs([*rows, ("prefix token", repr(tokenizer.decode(judge.prefix_token_id)))])
    return 0


def _of_a_text(options: EvalOptions) -> bool:
    """Return whether an option for the measurement on a text is given."""
    names = ("data", "split", "subset", "text_column", "context", "stride")
    return any(getattr(options, name) is not None for name in names)


def _eval_task(config: TrainConfig, options: EvalOptions, device: str) -> int:
    from ..checks import within
    from ..training.storage.folder import check_source, load_task_model, task_source
    from ..training.task.run import scored
    from ..training.validation import check_task

    text = f"the run in {options.run} is on a task; omit --data, --context, --stride and --lm-eval."
    require(not (_of_a_text(options) or options.lm_eval), "eval", text)
    task = check_task(config, "eval")
    check_source(options.run, task_source(config.task or "", repr(task)), call="eval")
    model = load_task_model(options.run, call="eval").to(device)
    scores = within("eval", f"with --batch {options.batch}", scored, config, task, model, batch=options.batch)
    print_pairs([(name, str(score)) for name, score in scores.items()])
    return 0


def _eval_text(options: EvalOptions) -> tuple[Source, Iterator[str], TrainConfig | None]:
    """Return the source and the chunks of the text to measure on, and the run's config if the folder is a run."""
    from ..training.data.corpus import open_source
    from ..training.storage.folder import check_source, saved_config, text_source
    from ..training.validation import check_data

    is_run = (options.run / "run.json").is_file()
    saved = saved_config(options.run, call="eval") if is_run else None
    asked = TrainConfig(**{name: getattr(options, name) for name in ("data", "split", "subset", "text_column")})
    check_data(asked, "eval")
    if options.data is not None:
        text = open_source(asked, call="eval")
        return text, text.chunks(), saved
    if saved is None or saved.data is None:
        raise ArgumentError(f"eval: {options.run} is a model without a run; give the text with --data FILE.")
    text = open_source(saved, call="eval")
    check_source(options.run, text_source(text), call="eval")
    return text, text.split(saved.validation)[1], saved


@dataclass(frozen=True)
class GenerateOptions:
    """Continue a prompt with a trained model. The same seed gives the same text."""

    run: Run = tyro.MISSING
    """Folder of a training run (its --out), or of a saved model."""
    prompt: str | None = None
    """Text to continue. By default a newline, or another character if the model does not know it."""
    max_new_tokens: int = 200
    """Tokens to generate."""
    temperature: float = 0.8
    """Sampling temperature; 0 always takes the most likely token."""
    top_k: int | None = None
    """Sample from this many most likely tokens. By default from all."""
    seed: int = 0
    """Random seed."""
    device: str = "auto"
    """'cpu', 'cuda', 'mps', or 'auto' for the fastest available."""


def generate(argv: list[str]) -> int:
    """Run `regard generate`."""
    options = parse(GenerateOptions, argv, command="generate")
    from ..training.device import resolve_device
    from ..training.generate import check_sampling, default_prompt, generate_text, unknown_characters
    from ..training.storage.folder import load_model

    device = resolve_device(options.device, call="generate")
    names = ("max_new_tokens", "temperature", "top_k", "seed")
    numbers: dict[str, Any] = {name: getattr(options, name) for name in names}
    check_sampling(**numbers)
    if options.max_new_tokens > LARGEST:
        raise ArgumentError(f"generate: --max-new-tokens is {options.max_new_tokens:.3g}, expected at most {LARGEST}.")
    model, tokenizer = load_model(options.run, call="generate")
    prompt = default_prompt(tokenizer) if options.prompt is None else options.prompt
    unknown = unknown_characters(tokenizer, prompt)
    if unknown:
        print(f"regard generate: note: the model does not know {unknown!r}; read as <unk>", file=sys.stderr)
    print(generate_text(model.to(device), tokenizer, prompt, **numbers))
    return 0


_TRAIN = (
    "Example: regard train --data notes.txt --spec biweight --steps 500 --out runs/notes. The folder then holds "
    "config, tokenizer, metrics.jsonl, checkpoints and the model. Ctrl-C stops the run after the current step with a "
    "checkpoint, and --resume continues it. A task instead of a text: regard train --task mqar --spec softmax."
)
_EVAL = (
    "The text is read in windows of one context that advance by --stride; every token but the first is predicted "
    "exactly once. The result does not depend on random numbers."
)
