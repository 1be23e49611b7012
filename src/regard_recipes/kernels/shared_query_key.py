"""Queries that are the keys: what sharing one projection costs in loss and saves in memory.

The kernel-selection paper (section 7) reports that models still converge when query and key are identical, and that
this halves the memory for the two. Here models with and without sharing are trained on the same windows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from regard.training.fields import read_spec

from ..lib.claims import Claim, exact, paired
from ..lib.display import Show, dots, gap, pivot, spread, stat
from ..lib.recipe import Cell, Results, check_names, recipe, select
from ..lib.text_recipe import TextRecipe

if TYPE_CHECKING:
    from regard.models import HybridForCausalLM

CACHED = 512  # tokens in the cache whose bytes are counted
APART, SHARED = "apart", "shared"
PAPER = "Kernel selection"
PAPER_SIZE = {
    "layers": 6, "width": 384, "heads": 6, "context": 256, "batch": 64, "dtype": "bfloat16", "device": "auto",
    "steps": 5000, "rates": (1e-3,), "measured": 100_000,
}  # fmt: skip
"""The paper's model and text; steps, batch and learning rate are those of nanoGPT's characters."""
LITTLE = 0.05  # bits per character that a difference in loss must reach to matter


@recipe("shared-query-key")
class SharedQueryKey(TextRecipe):
    """Loss, parameters and memory of models whose queries are their keys, beside those that keep the two apart."""

    models: tuple[str, ...] = ()
    """Attention specs; by default softmax, shift-cosine, elu and relumax."""
    rates: tuple[float, ...] = (3e-3, 1e-2)
    batch: int = 8
    steps: int = 250
    measured: int = 16_384
    exclude_self: bool = False
    """Let attention see earlier characters only, in all models: with q = k a character is most similar to itself."""
    known: ClassVar = {name: {} for name in ("softmax", "shift-cosine", "elu", "relumax")}
    by_size: ClassVar = {"quick": {"seeds": 1, "steps": 60, "rates": (3e-3,)}, "paper": PAPER_SIZE}
    per: ClassVar = ("model", "q and k")

    @property
    def spec_names(self) -> list[str]:
        """Return the specs in full."""
        return [str(read_spec(name, "--models", self.call())) for name in self.trained]

    def check_models(self) -> None:
        check_names(self.call(), "--models", self.spec_names, self.spec_names)

    def cells(self) -> list[Cell]:
        return [{"model": spec, "q and k": kind, "rate": rate}
                for spec in self.spec_names for kind in (APART, SHARED) for rate in self.rates]  # fmt: skip

    def fields(self, cell: Cell) -> dict[str, Any]:
        shared = cell["q and k"] == SHARED
        return {"mixers": cell["model"], "share_query_key": shared, "exclude_self": self.exclude_self}

    def measure_model(self, model: Any) -> dict[str, Any]:
        found = super().measure_model(model)
        return {**found, "bits_per_char": found["test"] / math.log(2), **memory_bytes(model, self.batch, self.context)}

    def claims(self, results: Results) -> list[Claim]:
        runs = self.chosen(results)
        kinds = {spec: [select(runs, model=spec, **{"q and k": kind}) for kind in (APART, SHARED)]
                 for spec in dict.fromkeys(runs["model"])}  # fmt: skip
        ratio = {spec: exact(float(shared["query_key_bytes"].iloc[0] / apart["query_key_bytes"].iloc[0]))
                 for spec, (apart, shared) in kinds.items()}  # fmt: skip
        cost = {spec: paired(shared, apart, "bits_per_char") for spec, (apart, shared) in kinds.items()}
        return [
            Claim(PAPER, "section 7", "q = k halves the memory of queries and keys", ratio, "at most", 0.5,
                  note="Bytes of queries and keys in a training step, shared over apart."),
            Claim(PAPER, "section 7, check", "q = k costs little loss", cost, "at most", LITTLE, LITTLE,
                  note=f"Bits per character of the test text, shared less apart; above {LITTLE:g} is taken as a cost."),
        ]  # fmt: skip

    def tables(self, results: Results) -> dict[str, Any]:
        runs = self.chosen(results)
        apart = {spec: select(runs, model=spec, **{"q and k": APART}) for spec in dict.fromkeys(runs["model"])}
        values: dict[str, Show] = {
            "rate": "{rate:g}", "test bits/char": spread("bits_per_char", 4),
            "sharing costs": gap("bits_per_char", lambda rows: apart[rows["model"].iloc[0]], 4),
            "parameters": "{parameters:,.0f}", **memory_columns("{:.1f} KiB"),
        }  # fmt: skip
        note = (
            f"{self.seeds} seeds: mean ± standard deviation; costs are paired by seed, ± half the 95 % "
            f"interval. Cache: what decoding holds after {CACHED} tokens of one sequence; it never held queries."
        )
        return {"Shared queries and keys": pivot(runs, ["model", "q and k"], values, note=note)}

    def figures(self, results: Results) -> dict[str, bytes]:
        label = "bits per character of the test text"
        return {"loss": dots(self.chosen(results), "bits_per_char", "model", "q and k", x_label=label)}


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
