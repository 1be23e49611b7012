"""Queries that are the keys: what sharing one projection costs in loss and saves in memory.

The kernel-selection paper (section 7) reports that models still converge when query and key are identical, and that
this halves the memory for the two. Here models with and without sharing are trained on the same windows.
"""

import math
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from regard.training.fields import read_spec

from ..lib.claims import Claim, Estimate, claims_of, exact, paired
from ..lib.display import Show, dots, gap, pivot, spread, stat
from ..lib.recipe import Cell, Frame, Results, check_once, select
from ..lib.text_recipe import TextRecipe

CACHED = 512  # tokens in the cache whose bytes are counted
APART, SHARED = "apart", "shared"
PAPER = "Kernel selection"
PAPER_SIZE = {
    "layers": 6, "width": 384, "heads": 6, "context": 256, "batch": 64, "dtype": "bfloat16", "device": "auto",
    "steps": 5000, "rates": (1e-3,), "measured": 100_000,
}  # fmt: skip
"""The paper's model and text; steps, batch and learning rate are those of nanoGPT's characters."""
LITTLE = 0.05  # bits per character that a difference in loss must reach to matter


class SharedQueryKey(TextRecipe, name="shared-query-key"):
    """Loss, parameters and memory of models whose queries are their keys, beside those that keep the two apart."""

    models: tuple[str, ...] = ()  # Attention specs; by default softmax, shift-cosine, elu and relumax.
    rates = (3e-3, 1e-2)
    batch = 8
    steps = 250
    measured = 16_384
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
        check_once(self.call(), "--models", self.spec_names)

    def cells(self) -> list[Cell]:
        return [{"model": spec, "q and k": kind, "rate": rate}
                for spec in self.spec_names for kind in (APART, SHARED) for rate in self.rates]  # fmt: skip

    def fields(self, cell: Cell) -> dict[str, Any]:
        shared = cell["q and k"] == SHARED
        return {"mixers": cell["model"], "share_query_key": shared, "exclude_self": self.exclude_self}

    def measure_model(self, model: Any) -> dict[str, Any]:
        loss = super().measure_model(model)
        return {**loss, "bits_per_char": loss["test"] / math.log(2), **memory_bytes(model, self.batch, self.context)}

    def claims(self, results: Results) -> list[Claim]:
        ratio, cost = {}, {}
        for spec, runs in self.chosen(results).groupby("model", sort=False):
            shared, apart = (select(runs, **{"q and k": kind}) for kind in (SHARED, APART))
            ratio[spec], cost[spec] = query_key_ratio(shared, apart), paired(shared, apart, "bits_per_char")
        return claims_of(PAPER, [
            ("section 7", "q = k halves the memory of queries and keys", ratio, "at most", 0.5,
             "Bytes of queries and keys in a training step, shared over apart."),
            ("section 7, check", "q = k costs little loss", cost, "at most", LITTLE,
             f"Bits per character of the test text, shared less apart; above {LITTLE:g} is taken as a cost.",
             {"effect": LITTLE}),
        ])  # fmt: skip

    def tables(self, results: Results) -> dict[str, Any]:
        runs = self.chosen(results)
        both = f"{self.seeds} seeds: mean ± standard deviation; costs are paired by seed, ± half the 95 % interval."
        cache = f"Cache: what decoding holds after {CACHED} tokens of one sequence; it never held queries."
        return {"Shared queries and keys": pivot(runs, ["model", "q and k"], {
            "rate": "{rate:g}", "test bits/char": spread("bits_per_char", 4),
            "sharing costs": gap("bits_per_char", select(runs, **{"q and k": APART}), 4, same=["model"]),
            "parameters": "{parameters:,.0f}", **memory_columns("{:.1f} KiB"),
        }, note=f"{both} {cache}")}  # fmt: skip

    def figures(self, results: Results) -> dict[str, bytes]:
        label = "bits per character of the test text"
        return {"loss": dots(self.chosen(results), "bits_per_char", "model", "q and k", x_label=label)}


def query_key_ratio(shared: Frame, apart: Frame) -> Estimate:
    """Return the bytes of queries and keys in runs that share them, over those in runs that keep the two apart."""
    return exact(float(shared["query_key_bytes"].iloc[0] / apart["query_key_bytes"].iloc[0]))


def memory_bytes(model: Any, batch: int, context: int) -> dict[str, int]:
    """Return bytes of queries and keys and of all that is saved for the backward pass in a training step on `batch`
    windows of `context` tokens, and of the cache after `CACHED` tokens of one sequence."""
    window = torch.zeros(batch, context, dtype=torch.long, device=model.device)
    projections = [module for name, module in model.named_modules() if name.endswith(("q_proj", "k_proj"))]
    projected: list[int] = []
    saved: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with ExitStack() as hooks:
        for module in projections:
            hooks.enter_context(module.register_forward_hook(lambda *seen: projected.append(seen[-1].nbytes)))
        hooks.enter_context(saved_tensors_hooks(pack, lambda tensor: tensor))
        model.train()(input_ids=window, labels=window)
    for weight in model.parameters():
        saved.pop(weight.untyped_storage().data_ptr(), None)
    kept = sum(storage.nbytes() for storage in saved.values())
    with torch.no_grad():
        cache = model.model.new_cache()
        model.eval()(input_ids=window.new_zeros(1, CACHED), cache=cache)
    held = sum(getattr(layer, "bytes", 0) or layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return {"query_key_bytes": sum(projected), "kept_bytes": kept, "cache_bytes": held}


def memory_columns(cache: str) -> dict[str, Show]:
    """Return columns of a table for `memory_bytes`, the cache in the form given."""
    kib = lambda column, form: stat(column, "mean", form, 1 / 1024)  # noqa: E731
    step = {"q + k, a step": "query_key_bytes", "kept for backward": "kept_bytes"}
    return {**{name: kib(column, "{:,.0f} KiB") for name, column in step.items()}, "cache": kib("cache_bytes", cache)}
