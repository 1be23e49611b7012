"""Queries that are the keys: what sharing one projection costs in loss and saves in memory.

The kernel-selection paper (section 7) reports that models still converge when query and key are constrained to be
identical, and that this halves the memory for the two. Here, for each kernel, models with and without sharing are
trained from the same seeds on the same windows of text for equally many steps; beside the held-out loss stand the
parameters, the activations of queries and keys in a training step, all that the backward pass keeps, and the cache of
decoding, which never held queries and so does not shrink.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from regard.checks import ArgumentError
from regard.recipes import Findings, Progress, recipes
from regard.training.config import SEEDS
from regard.training.specs import read_spec, split_specs

if TYPE_CHECKING:
    from regard.models import HybridForCausalLM

    from ..demo.demo_text import Material

CALL = "reproduce shared-query-key"
CONTEXT = 64
"""Characters that a model sees at once."""
BATCH = 8
MEASURED = 16_384
"""Held-out characters that the loss is measured on."""
CACHED = 512
"""Tokens in the cache whose bytes are counted."""
LEARNING_RATE = 3e-3
INITIAL = 0.05
"""Standard deviation of the first weights, as in the demo."""


@dataclass(frozen=True, kw_only=True)
class SharedQueryKeyConfig:
    """Train small language models with queries and keys apart and shared, and compare them."""

    out: Path = Path("shared-query-key-out")
    """Folder to write. An earlier result in it is replaced; any other folder must be empty."""
    specs: str = "softmax,shift-cosine,elu,relumax"
    """The kernels: sentences of the grammar with commas between them."""
    steps: int = 250
    """Optimiser steps of each model."""
    seeds: int = 3
    """Models of each kind; they differ in first weights and windows."""
    seed: int = 0
    """The first of the seeds."""
    exclude_self: bool = False
    """Let attention look at earlier characters only, in all models: with q = k a character is most alike to itself."""
    data: Path | None = None
    """UTF-8 text to learn from, a file or a folder. None: the Python manual inside the interpreter."""


@dataclass(frozen=True)
class Trained:
    """One model at the end of its training.

    Attributes:
        bits_per_char: on the held-out text.
        parameters: how many numbers were learned.
        query_key_bytes: queries and keys of one training step before rotation, over the layers.
        kept_bytes: all tensors that the backward pass of that step keeps, parameters apart.
        cache_bytes: the cache of decoding after `CACHED` tokens of one sequence.
    """

    spec: str
    shared: bool
    seed: int
    bits_per_char: float
    parameters: int
    query_key_bytes: int
    kept_bytes: int
    cache_bytes: int


@recipes.register("shared-query-key")
class SharedQueryKey:
    """Loss, parameters and memory of models whose queries are their keys, beside those that keep the two apart."""

    Config: ClassVar[type[Any]] = SharedQueryKeyConfig

    @staticmethod
    def run(config: SharedQueryKeyConfig, progress: Progress) -> Findings:
        """See `regard.recipes.Recipe`."""
        specs = check(config)
        progress("reading the text")
        from ..demo import demo_text

        material = demo_text.prepare(config.data, context=CONTEXT + 1, excerpt=CONTEXT, call=CALL)
        runs = []
        for spec in specs:
            for seed in range(config.seed, config.seed + config.seeds):
                for shared in (False, True):
                    progress(f"{spec}, seed {seed}, queries and keys {'shared' if shared else 'apart'}")
                    runs.append(train_one(config, material, spec, shared, seed))
        progress("drawing")
        tables = {"Shared queries and keys": table(runs), "Difference by sharing": differences(runs)}
        data = {"text": material.described(), "sizes": sizes(), "runs": [asdict(run) for run in runs]}
        return Findings(data, tables, {"shared-query-key.png": figure(runs)}, notes(runs))


def check(config: SharedQueryKeyConfig) -> list[str]:
    """The sentences, after every number was found to be in range.

    Raises:
        ArgumentError: a number, or a sentence that is unknown or named twice.
    """
    for name in ("steps", "seeds"):
        if getattr(config, name) < 1:
            raise ArgumentError(f"{CALL}: --{name} is {getattr(config, name)}, expected at least 1.")
    if not 0 <= config.seed <= SEEDS - config.seeds:
        raise ArgumentError(f"{CALL}: --seed is {config.seed}, expected 0 to {SEEDS - config.seeds}.")
    specs = [str(read_spec(text, "--specs", CALL)) for text in split_specs(config.specs)]
    for spec in specs:
        if specs.count(spec) > 1:
            raise ArgumentError(f"{CALL}: --specs names {spec!r} twice; name every sentence once.")
    return specs


def sizes() -> dict[str, int]:
    """What all models have in common."""
    return {"layers": 2, "width": 64, "heads": 4, "context": CONTEXT, "batch": BATCH, "cached tokens": CACHED}


def build(config: SharedQueryKeyConfig, spec: str, shared: bool, vocabulary: int) -> HybridForCausalLM:
    """An untrained model."""
    from regard.models import HybridConfig, HybridForCausalLM

    common = sizes()
    return HybridForCausalLM(
        HybridConfig(
            vocab_size=vocabulary,
            hidden_size=common["width"],
            num_hidden_layers=common["layers"],
            num_attention_heads=common["heads"],
            mixers=spec,
            share_query_key=shared,
            exclude_self=config.exclude_self,
            initializer_range=INITIAL,
        )
    )


def train_one(config: SharedQueryKeyConfig, material: Material, spec: str, shared: bool, seed: int) -> Trained:
    """Train a model on the windows that `seed` draws, and measure it."""
    from regard.training.data.windows import window_starts
    from regard.training.evaluation import Units, evaluate

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(config, spec, shared, len(material.tokenizer)).train()
    tokens, places = material.train_tokens, torch.arange(CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    warm = max(1, config.steps // 20)
    ramp = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warm, total_iters=warm)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, config.steps - warm), LEARNING_RATE / 50)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [ramp, fall], [warm])
    for step in range(config.steps):
        starts = window_starts(seed, step, BATCH, len(tokens) - CONTEXT + 1)
        window = tokens[starts[:, None] + places].long()
        optimizer.zero_grad()
        model(input_ids=window, labels=window).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    held_out = material.held_out_tokens[:MEASURED]
    found = evaluate(model, held_out, Units.of(material.held_out[:MEASURED], len(held_out)), context=CONTEXT)
    query_key, kept = activations(model, window)
    return Trained(
        spec=spec,
        shared=shared,
        seed=seed,
        bits_per_char=found.bits_per_char,
        parameters=sum(weight.numel() for weight in model.parameters()),
        query_key_bytes=query_key,
        kept_bytes=kept,
        cache_bytes=cache_bytes(model, tokens[:CACHED].long()[None]),
    )


def activations(model: HybridForCausalLM, window: Tensor) -> tuple[int, int]:
    """Bytes of queries and keys, and of all that is kept for the backward pass, in one training step."""
    projected, kept = 0, {}
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}

    def count(module: nn.Module, inputs: Any, output: Tensor) -> None:
        nonlocal projected
        projected += output.nbytes

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    named = [m for name, m in model.named_modules() if name.endswith(("q_proj", "k_proj"))]
    handles = [module.register_forward_hook(count) for module in named]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model.train()(input_ids=window, labels=window).loss
    finally:
        for handle in handles:
            handle.remove()
    del loss  # alive until here, so that no storage was counted twice
    return projected, sum(kept.values())


@torch.no_grad()
def cache_bytes(model: HybridForCausalLM, tokens: Tensor) -> int:
    """Bytes of the model's own cache after `tokens` [1, T]."""
    cache = model.eval()(input_ids=tokens, use_cache=True).past_key_values
    return sum(getattr(layer, "bytes", 0) or layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def by_kind(runs: Sequence[Trained]) -> Mapping[tuple[str, bool], list[Trained]]:
    """(spec, shared) to its models, in the order of the runs' kernels, apart before shared."""
    specs = list(dict.fromkeys(run.spec for run in runs))
    return {(s, q): [run for run in runs if (run.spec, run.shared) == (s, q)] for s in specs for q in (False, True)}


def spread(values: Sequence[float], signed: bool = False) -> str:
    """Mean and standard deviation over the seeds, as text."""
    mean = f"{statistics.mean(values):{'+' if signed else ''}.4f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.4f}"


def table(runs: Sequence[Trained]) -> Any:
    """A row for each kernel, with queries and keys apart and shared."""
    from regard.inspect.tables import Table

    rows = [
        (
            spec,
            "shared" if shared else "apart",
            spread([run.bits_per_char for run in kind]),
            f"{kind[0].parameters:,}",
            f"{kind[0].query_key_bytes / 1024:.0f} KiB",
            f"{kind[0].kept_bytes / 1024:,.0f} KiB",
            f"{kind[0].cache_bytes / 1024:.1f} KiB",
        )
        for (spec, shared), kind in by_kind(runs).items()
    ]
    header = ("kernel", "q and k", "held-out bits/char", "parameters", "q + k, a step", "kept for backward", "cache")
    return Table(header, tuple(rows), f"Cache: what decoding holds after {CACHED} tokens of one sequence.")


def differences(runs: Sequence[Trained]) -> Any:
    """Shared less apart, seed by seed."""
    from regard.inspect.tables import Table

    rows = []
    for spec, gaps in paired(runs).items():
        rows.append((spec, spread(gaps, signed=True), ", ".join(f"{gap:+.4f}" for gap in gaps)))
    return Table(("kernel", "bits/char by sharing", "each seed"), tuple(rows), "Above 0: sharing costs.")


def paired(runs: Sequence[Trained]) -> dict[str, list[float]]:
    """Kernel to bits per character, shared less apart, for each seed."""
    kinds = by_kind(runs)
    return {
        spec: [b.bits_per_char - a.bits_per_char for a, b in zip(kinds[spec, False], kinds[spec, True], strict=True)]
        for spec in dict.fromkeys(run.spec for run in runs)
    }


def notes(runs: Sequence[Trained]) -> tuple[str, ...]:
    """What was measured beside what the paper says."""
    kinds = by_kind(runs)
    spec = runs[0].spec
    apart, shared = kinds[spec, False][0], kinds[spec, True][0]
    saved = 1 - shared.query_key_bytes / apart.query_key_bytes
    whole = 1 - shared.kept_bytes / apart.kept_bytes
    same = all(kinds[s, False][0].cache_bytes == kinds[s, True][0].cache_bytes for s, _ in kinds)
    return (
        "The paper: with q = k, half of the memory for queries and keys. "
        f"Measured for {spec}: {saved:.0%} of their activations and {whole:.0%} of all that a backward pass keeps, and "
        f"{apart.parameters - shared.parameters:,} parameters, one projection a layer.",
        f"The cache of decoding never held queries: sharing leaves its bytes {'as they are' if same else 'changed'}.",
    )


def figure(runs: Sequence[Trained]) -> bytes:
    """Held-out loss of every model: a line joins the two of a seed."""
    from matplotlib.figure import Figure

    from regard.inspect.figures import COLOURS, png

    drawn = Figure(figsize=(7.0, 4.0), dpi=120, layout="constrained")
    axes = drawn.subplots()
    kinds, specs = by_kind(runs), list(dict.fromkeys(run.spec for run in runs))
    for place, spec in enumerate(specs):
        for a, b in zip(kinds[spec, False], kinds[spec, True], strict=True):
            x, y = (place - 0.15, place + 0.15), (a.bits_per_char, b.bits_per_char)
            axes.plot(x, y, color="#999999", linewidth=1.0, zorder=1)
            for at, bits, colour, marker in zip(x, y, COLOURS, "os", strict=False):
                axes.scatter(at, bits, color=colour, marker=marker, zorder=2)
    for colour, marker, label in zip(COLOURS, "os", ("queries and keys apart", "shared, q = k"), strict=False):
        axes.scatter([], [], color=colour, marker=marker, label=label)
    axes.set_xticks(range(len(specs)), specs)
    axes.set(ylabel="held-out bits per character", title="Each line joins two models of one seed")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return png(drawn)
