"""Queries that are the keys: what sharing one projection costs in loss and saves in memory.

The kernel-selection paper (section 7) reports that models still converge when query and key are identical, and that
this halves the memory for the two. Here models with and without sharing are trained on the same windows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ..demo.demo import parse_specs
from ..lib.claims import Claim, exact, paired
from ..lib.display import Show, dots, gap, pivot, spread, stat
from ..lib.language_text import read_text
from ..lib.language_training import Budget, train_language_model
from ..lib.recipe import Cell, Recipe, Results, recipe, select

if TYPE_CHECKING:
    from regard.models import HybridForCausalLM

CONTEXT, BATCH = 64, 8
MEASURED = 16_384  # held-out characters that the loss is measured on
CACHED = 512  # tokens in the cache whose bytes are counted
APART, SHARED = "apart", "shared"
PAPER = "Kernel selection"
LITTLE = 0.05  # bits per character that a difference in loss must reach to matter


@recipe("shared-query-key")
class SharedQueryKey(Recipe):
    """Loss, parameters and memory of models whose queries are their keys, beside those that keep the two apart."""

    seeds: int = 3
    """Models of each kind; they differ in first weights and windows."""
    specs: str = "softmax,shift-cosine,elu,relumax"  # Attention specs with commas between them.
    steps: int = 250  # Optimiser steps of each model.
    exclude_self: bool = False
    """Let attention see earlier characters only, in all models: with q = k a character is most similar to itself."""
    data: Path | None = None
    """UTF-8 text to learn from, a file or a folder. None: the Python manual inside the interpreter."""
    by_size: ClassVar = {"quick": {"seeds": 1, "steps": 60}}

    @property
    def spec_names(self) -> list[str]:
        """Return the specs in full."""
        return [str(spec) for spec in parse_specs(self.specs, self.call())]

    def check(self) -> None:
        parse_specs(self.specs, self.call())
        self.budget().check(self.call())

    def prepare(self) -> Mapping[str, Any]:
        text = read_text(self.data, "char", context=CONTEXT + 1, call=self.call())
        self.corpus, self.vocabulary = text.corpus, len(text.tokenizer)
        return {"text": text.described}

    def cells(self) -> list[Cell]:
        return [{"spec": spec, "q and k": kind} for spec in self.spec_names for kind in (APART, SHARED)]

    def measure(self, cell: Cell, seed: int) -> Iterator[dict[str, Any]]:
        config = self.model_config(cell["spec"], cell["q and k"] == SHARED)
        memory = partial(memory_bytes, batch=BATCH, context=CONTEXT)
        run, *_ = train_language_model(config, self.corpus, self.budget(), seed, name=str(cell), measure=memory)
        yield {**run, "bits_per_char": run["held_out"] / math.log(2)}

    def budget(self) -> Budget:
        """Return what every model is given."""
        return Budget(context=CONTEXT, batch=BATCH, steps=self.steps, learning_rate=3e-3, final_share=0.02,
                      measured=MEASURED, looks=1, device=self.device)  # fmt: skip

    def model_config(self, spec: str, shared: bool) -> Any:
        """Return two layers of width 64 with this attention."""
        from regard.models import HybridConfig

        return HybridConfig(
            vocab_size=self.vocabulary, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, mixers=spec,
            share_query_key=shared, exclude_self=self.exclude_self, initializer_range=0.05,
        )  # fmt: skip

    def claims(self, results: Results) -> list[Claim]:
        kinds = {spec: [select(results.frame, spec=spec, **{"q and k": kind}) for kind in (APART, SHARED)]
                 for spec in dict.fromkeys(results.frame["spec"])}  # fmt: skip
        ratio = {spec: exact(float(shared["query_key_bytes"].iloc[0] / apart["query_key_bytes"].iloc[0]))
                 for spec, (apart, shared) in kinds.items()}  # fmt: skip
        cost = {spec: paired(shared, apart, "bits_per_char") for spec, (apart, shared) in kinds.items()}
        return [
            Claim(PAPER, "section 7", "q = k halves the memory of queries and keys", ratio, "at most", 0.5,
                  note="Bytes of queries and keys in a training step, shared over apart."),
            Claim(PAPER, "section 7, check", "q = k costs little loss", cost, "at most", LITTLE, LITTLE,
                  note=f"Held-out bits per character, shared less apart; more than {LITTLE:g} is taken as a cost."),
        ]  # fmt: skip

    def tables(self, results: Results) -> dict[str, Any]:
        frame = results.frame
        apart = {spec: select(frame, spec=spec, **{"q and k": APART}) for spec in dict.fromkeys(frame["spec"])}
        values: dict[str, Show] = {
            "held-out bits/char": spread("bits_per_char", 4),
            "sharing costs": gap("bits_per_char", lambda rows: apart[rows["spec"].iloc[0]], 4),
            "parameters": "{parameters:,.0f}", **memory_columns("{:.1f} KiB"),
        }  # fmt: skip
        note = (
            f"{self.seeds} seeds: mean ± standard deviation; costs are paired by seed, ± half the 95 % "
            f"interval. Cache: what decoding holds after {CACHED} tokens of one sequence; it never held queries."
        )
        return {"Shared queries and keys": pivot(frame, ["spec", "q and k"], values, note=note)}

    def figures(self, results: Results) -> dict[str, bytes]:
        return {"loss": dots(results.frame, "bits_per_char", "spec", "q and k", x_label="held-out bits per character")}


def memory_bytes(model: HybridForCausalLM, batch: int, context: int, cached: int = CACHED) -> dict[str, int]:
    """Return bytes of queries and keys and of all that the backward pass keeps in a training step on `batch` windows of
    `context` tokens, and of the cache after `cached` tokens."""
    device = next(model.parameters()).device
    query_key, kept = activations(model, torch.zeros(batch, context, dtype=torch.long, device=device))
    with torch.no_grad():
        tokens = torch.zeros(1, cached, dtype=torch.long, device=device)
        cache = model.model.new_cache()
        model.eval()(input_ids=tokens, cache=cache)
    held = sum(getattr(layer, "bytes", 0) or layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return {"query_key_bytes": query_key, "kept_bytes": kept, "cache_bytes": held}


def memory_columns(cache: str) -> dict[str, Show]:
    """Return columns of a table for `memory_bytes`, the cache in the form given."""
    kib = lambda column, form: stat(column, "mean", form, 1 / 1024)  # noqa: E731
    step = {"q + k, a step": "query_key_bytes", "kept for backward": "kept_bytes"}
    return {**{name: kib(column, "{:,.0f} KiB") for name, column in step.items()}, "cache": kib("cache_bytes", cache)}


def activations(model: HybridForCausalLM, window: Tensor) -> tuple[int, int]:
    """Return bytes of queries and keys, and of all that is kept for the backward pass, in one training step."""
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
