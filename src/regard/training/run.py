"""A training run, from the text to the run folder."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainingArguments
from transformers.integrations import TensorBoardCallback

from ..checks import ArgumentError, require
from .callbacks import MetricsFile, RichProgress, Schedule, StopGently
from .config import TrainConfig
from .data.corpus import Corpus, encode_part, open_source
from .data.documents import StreamedWindows
from .data.text import Source
from .data.tokenizers import build_tokenizer
from .data.windows import SampledWindows
from .device import check_agreement, check_sharding, float32_by_default, main_process, resolve_device, whole_weights
from .errors import TrainingStopped, one_line
from .generate import opening
from .models import language_model
from .quiet import quiet_transformers, unconverged_once
from .storage import folder
from .storage.card import write_card
from .storage.checkpoints import go_back, last_good, step_of, write_summary, writing
from .storage.files import only_run
from .storage.resuming import check_checkpoint
from .trainer import RegardTrainer, quiet_arguments
from .validation import validate

ModelBuilder = Callable[[TrainConfig, PreTrainedTokenizerBase], PreTrainedModel]


@dataclass(frozen=True)
class RunSummary:
    """Result of a run, as in `summary.json`.

    Attributes:
        out: the run folder.
        step: number of optimiser steps.
        parameters: number of parameters of the model.
        loss, bits_per_char, bits_per_byte, support: on the whole held-out text, see `Evaluation`.
        tokens_per_second: training speed of this call, without evaluation and saving.
        prompt: words of the held-out text to try the model with; may be empty.
    """

    out: str
    step: int
    parameters: int
    loss: float
    bits_per_char: float
    bits_per_byte: float
    support: float | None
    tokens_per_second: float
    prompt: str


@quiet_transformers()
@float32_by_default()
def train(
    config: TrainConfig,
    *,
    build_model: ModelBuilder | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    console: Console | None = None,
    label: str = "training",
) -> RunSummary:
    """Train a language model. Seeds the global generators of torch, numpy and Python, as transformers' Trainer does.

    Args:
        config: the options of the run.
        build_model: function that builds the model, called under the config's seed; default `language_model`.
        callbacks: additional callbacks.
        console: where progress is shown, default standard error; `Console(quiet=True)` shows none.
        label: name of the progress bar.

    Raises:
        ArgumentError: a mistake in the config or the text, or a folder in use; nothing has been written.
        TrainingStopped: the run cannot continue (non-finite loss, full disk).
        TrainingInterrupted: Ctrl-C or SIGTERM; a checkpoint was saved.
    """
    validate(config)
    if main_process():  # only this one, which may fill the folder before the others check it
        folder.check_out(config, call="train")
    with ExitStack() as stack:
        if main_process() and config.resume and (config.out / "run.json").is_file():
            stack.enter_context(only_run(config.out, call="train"))
        text = open_source(config, call="train")
        source = folder.text_source(text)
        checkpoint, skipped = folder.check_resume(config, source, call="train") if config.resume else (None, [])
        corpus = _prepare_text(config, text)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            model = (build_model or language_model)(config, corpus.tokenizer)
        arguments = _arguments(config)
        check_agreement(config, source, call="train")
        if main_process() and checkpoint is None:
            stack.enter_context(only_run(config.out, call="train"))
            folder.check_out(config, call="train")  # again, since another run may have begun there
            folder.begin(replace(config, data=text.path), source, corpus.tokenizer, call="train")
        trainer = _trainer(config, arguments, model, corpus)
        if checkpoint is not None:
            check_checkpoint(checkpoint, trainer, call="train")
            if isinstance(trainer.train_dataset, StreamedWindows):
                trainer.train_dataset.load(checkpoint)
            if main_process():
                go_back(checkpoint)
        progress = RichProgress(console, label)
        for line in skipped:
            progress.console.print(line, highlight=False, markup=False)
        for callback in (*_callbacks(config, progress, step_of(checkpoint)), *callbacks):
            trainer.add_callback(callback)
        with unconverged_once(partial(progress.console.print, highlight=False, markup=False)):
            _run(trainer, config, checkpoint, progress)
            return _finish(trainer, config, corpus)


def _prepare_text(config: TrainConfig, text: Source) -> Corpus:
    """Split the text, build or load the tokenizer, and encode both parts, which have at least one context each."""
    if config.resume:
        tokenizer = folder.saved_tokenizer(config.out, call="train")
    else:
        tokenizer = build_tokenizer(config.tokenizer, text.split(config.validation)[0])
    scratch = next(path for path in (config.out.absolute(), *config.out.absolute().parents) if path.is_dir())
    try:
        learn, held_out = (encode_part(tokenizer, part, text, scratch) for part in text.split(config.validation))
    except OSError as error:
        raise ArgumentError(f"train: cannot write the tokens to {scratch}: {error.strerror or error}.") from None
    streams, less = text.stream is not None, f"less than one --context {config.context}; give more text"
    count = len(learn.tokens)
    few = f"the text in {text.path} has {count} tokens to train on, {less} or a smaller --context."
    require(streams or count >= config.context, "train", few)
    count = len(held_out.tokens)
    few = f"the held-out part of {text.path} has {count} tokens, {less}, a larger --validation or a smaller --context."
    require(count >= config.context, "train", few)
    return Corpus(text, tokenizer, None if streams else learn, held_out)


def _trainer(config: TrainConfig, args: TrainingArguments, model: PreTrainedModel, corpus: Corpus) -> RegardTrainer:
    sizes = {"context": config.context, "steps": config.steps, "per_step": config.per_step * args.world_size}
    windows: SampledWindows | StreamedWindows
    if corpus.text.stream is not None:
        windows = StreamedWindows(corpus.text.stream, corpus.tokenizer, **sizes)
    else:
        windows = SampledWindows((corpus.train or corpus.held_out).tokens, seed=config.seed, **sizes)
    trainer = RegardTrainer(
        model=model,
        args=args,
        train_dataset=windows,
        processing_class=corpus.tokenizer,
        held_out=corpus.held_out.tokens[: config.eval_tokens],
        train_units=(corpus.train or corpus.held_out).units,
        held_out_units=corpus.held_out.units,
        context=config.context,
        eval_batch=config.batch,
        muon=config.optimizer == "muon",
        shard=config.shard,
        keep=config.keep,
    )
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TensorBoardCallback):
            callback.logging_dir = str(config.out / "tensorboard")
    return trainer


def _callbacks(config: TrainConfig, progress: RichProgress, step: int) -> Iterator[TrainerCallback]:
    yield Schedule(config.eval_every)
    yield progress
    if main_process():
        metrics = MetricsFile(config.out / "metrics.jsonl", step=step)
        if metrics.damaged:
            progress.console.print(f"metrics.jsonl: removed {metrics.damaged} damaged lines", highlight=False)
        yield metrics


def _arguments(config: TrainConfig) -> TrainingArguments:
    """Return the arguments of Trainer; raise `ArgumentError` if the device does not support the dtype."""
    device = resolve_device(config.device, call="train")
    check_sharding(config, call="train")
    try:
        return quiet_arguments(
            config.out,
            torch.device(device),
            max_steps=config.steps,
            per_device_train_batch_size=config.batch,
            gradient_accumulation_steps=config.accumulate,
            learning_rate=config.learning_rate,
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": config.final_learning_rate},
            warmup_steps=round(config.warmup * config.steps),
            weight_decay=config.weight_decay,
            max_grad_norm=config.clip,
            adam_beta2=0.95,
            seed=config.seed,
            bf16=config.dtype == "bfloat16",
            dataloader_pin_memory=device == "cuda",
            ddp_find_unused_parameters=False,
            ddp_broadcast_buffers=False,  # fast weights are buffers of up to half a gigabyte per layer
            logging_strategy="steps",
            logging_steps=config.log_every,
            logging_first_step=True,
            logging_nan_inf_filter=False,  # a non-finite loss is an error
            save_strategy="steps",
            save_steps=config.save_every,
            report_to=list(config.report_to),
            run_name=config.out.name,
            project="regard",
        )
    except ValueError as error:
        raise ArgumentError(f"train: {one_line(error)}.") from None


def _run(trainer: RegardTrainer, config: TrainConfig, checkpoint: Path | None, progress: RichProgress) -> None:
    """Train, or raise TrainingInterrupted after a signal, with a checkpoint saved."""
    with StopGently(config.out) as stop:
        trainer.add_callback(stop)
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        except ArgumentError as error:
            if trainer.state.global_step == step_of(checkpoint):
                raise
            # a stream that broke off
            raise TrainingStopped(f"{str(error).rstrip('.')}; {last_good(config.out)}") from None
        finally:
            progress.close()
    stop.check(trainer.state.global_step, config.steps)


def _finish(trainer: RegardTrainer, config: TrainConfig, corpus: Corpus) -> RunSummary:
    model, weights = trainer.model, whole_weights(trainer.model)
    if main_process():
        folder.save_model(config.out, model, corpus.tokenizer, weights)
    result, clock = trainer.measure(corpus.held_out.tokens), trainer.clock
    measured = {name: getattr(result, name) for name in ("loss", "bits_per_char", "bits_per_byte", "support")}
    summary = RunSummary(
        out=str(config.out),
        step=trainer.state.global_step,
        parameters=sum(p.numel() for p in model.parameters()),
        tokens_per_second=clock.steps * trainer.tokens_per_step / max(clock.seconds, 1e-9),
        prompt=opening(corpus.tokenizer, corpus.held_out.beginning),
        **measured,
    )
    if main_process():
        write_summary(config.out, asdict(summary))
        with writing(config.out / "model", config.out):
            write_card(config.out / "model", config, model, corpus.text, asdict(summary))
    return summary
