"""The text of the demo, the n-gram model of it, and each of the language models: settings, a trial step, training,
sample, attention maps, and the weights that several kernels give to the keys of one trained head."""

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from regard import Spec, attention
from regard.checks import ArgumentError
from regard.inspect.capture import capture
from regard.inspect.hooks import run_with_cache
from regard.inspect.measures import attention_maps
from regard.models import HybridForCausalLM
from regard.training import (
    RunSummary,
    TrainConfig,
    TrainingInterrupted,
    TrainingStopped,
    Units,
    generate_text,
    language_model,
    load_model,
    train,
)  # fmt: skip
from regard.training.callbacks import Clock
from regard.training.config import SEEDS
from regard.training.validation import validate

from ..lib.language_text import LanguageText
from .demo_output import RUNS, TEXT, folder_name
from .ngram import NGram

CONTEXT = 128  # characters that a model sees at once
LONGEST = 4_000_000  # characters of the text that are used at most, so that n-grams are counted in seconds
EXCERPT = 64  # characters in the attention maps: as many as can be read in a figure
INITIAL = 0.05  # standard deviation of the first weights
SAMPLE, TEMPERATURE = 400, 0.8  # characters of generated text
KERNELS = ("softmax", "sparsemax", "biweight", "relumax")  # specs that weigh the same scores
NOT_SHARED = ("data", "spec", "out", "resume", "overwrite")  # settings that are not shown as shared


def first_paragraph(text: str, length: int = EXCERPT) -> slice:
    """Return the place of `length` characters from the first whole paragraph on, or from the start if there is none."""
    gap = text.find("\n\n")
    start = gap + len(text[gap:]) - len(text[gap:].lstrip()) if gap >= 0 else 0
    return slice(start, start + length) if start + length <= len(text) else slice(length)


def plan(text: LanguageText, spec: Spec, number: int, *, steps: int, seed: int, out: Path) -> TrainConfig:
    """Return the training of the model at `number`. Models differ in `spec` and run folder only. Three evaluations come
    before the last one, which always covers the whole held-out text."""
    return TrainConfig(
        data=out / TEXT, validation=text.share, spec=(str(spec),), layers=3, width=96, heads=4, context=CONTEXT,
        batch=8, steps=steps, learning_rate=1e-2, final_learning_rate=0.02, optimizer="muon", seed=seed, device="cpu",
        out=out / RUNS / folder_name(number, str(spec)), log_every=max(1, steps // 50), eval_every=steps // 4 + 1,
        eval_tokens=len(text.held_out_tokens), save_every=steps, keep=1,
    )  # fmt: skip


def build_model(settings: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return the usual model with larger first weights: the usual 0.02 suits widths of a thousand; at a tenth of that
    it costs a few hundredths of a bit in a short run."""
    config = language_model(settings, tokenizer).config
    config.initializer_range = INITIAL
    return HybridForCausalLM(config)


def shared_settings(settings: TrainConfig) -> dict[str, str]:
    """Return the settings that all models share, name to value."""
    named = {"steps": settings.steps, "seed": settings.seed, "initializer_range": INITIAL, **vars(settings)}
    return {name: str(value) for name, value in named.items() if name not in NOT_SHARED}


def rehearse(plans: Sequence[TrainConfig], text: LanguageText, call: str) -> None:
    """Run every model forward and backward on one window, so that a spec that cannot be trained is found first."""
    window = text.train_tokens[:CONTEXT].long()[None]
    for settings in plans:
        validate(settings, call)
        try:
            with torch.random.fork_rng(devices=[]):
                model = build_model(settings, text.tokenizer)
            model(input_ids=window, labels=window).loss.backward()
            with capture(model), torch.no_grad():
                model(input_ids=window)
        except ArgumentError as error:
            raise ArgumentError(f"{call}: --specs: {settings.spec[0]} cannot be trained: {error}") from None


def count(text: LanguageText, order: int) -> dict[str, Any]:
    """Return the n-gram model of the training text, measured on the held-out text; times are those of counting."""
    start = time.perf_counter()
    model = NGram(text.train_tokens.tolist(), len(text.tokenizer), order)
    seconds = time.perf_counter() - start
    held_out = text.held_out_tokens.tolist()
    bits = Units.of(text.held_out, len(held_out)).bits_per_char(model.loss(held_out))
    return {"name": f"{order}-gram", "bits_per_char": bits, "train_seconds": seconds,
            "tokens_per_second": len(text.train_tokens) / seconds}  # fmt: skip


def train_one(settings: TrainConfig, text: LanguageText, call: str) -> dict[str, Any]:
    """Train a model and return its results, or why it stopped as "failure": `train_seconds` is the elapsed time of
    steps, `cpu_seconds` the CPU time of the call; "maps" and "kernels" are None where there are no weights to show."""
    name, clock, cpu = settings.spec[0], Clock(), time.process_time()
    names = {"spec": name, "run": f"{RUNS}/{settings.out.name}"}
    try:
        summary = train(settings, build_model=build_model, callbacks=[clock], console=Console(quiet=True))
    except TrainingInterrupted:
        raise
    except TrainingStopped as error:
        return {**names, "failure": str(error)}
    cpu = time.process_time() - cpu
    model, tokenizer = load_model(settings.out, call=call)
    excerpt_at = first_paragraph(text.held_out)
    excerpt, tokens = text.held_out[excerpt_at], text.held_out_tokens[excerpt_at]
    prompt = without_last_word(excerpt)
    maps = kernels = None
    with suppress(ArgumentError):  # the model has no weights to show
        maps = attention_maps(model, tokens, list(excerpt))
        kernels = {"model": name, "labels": list(excerpt), **kernel_weights(model, tokens)}
    half = CONTEXT // 2
    sampled = (
        f"Temperature {TEMPERATURE}, seed {settings.seed}; the coloured part is the prompt, from the held-out text. "
        f"Every {half} characters continue from the {half} before."
    )
    return {
        **names, "bits_per_char": summary.bits_per_char, "parameters": summary.parameters, "support": summary.support,
        "train_seconds": clock.seconds, "cpu_seconds": cpu,
        "tokens_per_second": clock.steps * settings.per_step * CONTEXT / clock.seconds, "prompt": prompt,
        "sample": write_on(model, tokenizer, prompt, settings.seed), "sampled": sampled,
        "curve": curve(settings.out, summary), "maps": maps, "kernels": kernels,
    }  # fmt: skip


def kernel_weights(model: PreTrainedModel, tokens: Tensor) -> dict[str, Any]:
    """Return the weights [T] that each of `KERNELS` gives to the keys of one head, for the query of the last token, and
    `layer` and `head`, from 0. The head is the one in which most keys have weight under biweight: where one key has all
    weight, kernels do not differ. Raises ArgumentError if the model has no queries and keys."""
    layers = range(model.config.num_hidden_layers)
    names = [f"layers.{layer}.self_attn.hook_{part}" for layer in layers for part in "qk"]
    _, kept = run_with_cache(model, tokens.long()[None], names)
    q, k = (torch.cat([kept[point] for point in names[first::2]]) for first in (0, 1))  # [layers, H, T, D]
    weights = {}
    with torch.no_grad():
        for spec in KERNELS:
            _, seen = attention(q, k, k, spec, is_causal=True, impl="reference", return_diagnostics=True)
            weights[spec] = seen.weights[:, :, -1]
    layer, head = divmod(int((weights["biweight"] > 0).sum(-1).argmax()), q.shape[1])
    return {"layer": layer, "head": head, "weights": {spec: each[layer, head] for spec, each in weights.items()}}


def without_last_word(text: str) -> str:
    """Return a text without its last word, or all of it where that word is more than half."""
    words, _, rest = text.rpartition(" ")
    return words if len(words) > len(rest) else text


def curve(run: Path, summary: RunSummary) -> dict[str, tuple[float, ...]]:
    """Return the fields of a `Curve` from the metrics of a run; it ends with the final result."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    learned = {r["step"]: r["bits_per_char"] for r in records if "bits_per_char" in r}
    held_out = {r["step"]: r["eval_bits_per_char"] for r in records if "eval_bits_per_char" in r}
    held_out[summary.step] = summary.bits_per_char
    return {"steps": tuple(learned), "bits": tuple(learned.values()), "held_out_steps": tuple(held_out),
            "held_out_bits": tuple(held_out.values())}  # fmt: skip


def write_on(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, seed: int, length: int = SAMPLE
) -> str:
    """Generate `length` characters after the prompt, in pieces of half a context that continue from the half before,
    since no model was trained on more than one context."""
    half = CONTEXT // 2
    text = prompt
    for piece in range(-(-length // half)):
        tail = text[-half:]
        how: dict[str, Any] = {"temperature": TEMPERATURE, "seed": (seed + piece) % SEEDS}
        text += generate_text(model, tokenizer, tail, max_new_tokens=half, **how)[len(tail) :]
    return text[len(prompt) : len(prompt) + length]
