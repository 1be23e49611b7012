"""Recall values by keys: accuracy against the number of pairs, for models with a cache and with a state of fixed size.

MQAR of Zoology, as in the Local Linear Attention paper (section 4, figure 4). Two layers without feed-forward layers;
models with states have states of one size, width² / heads numbers per layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from regard.tasks import TokenTask
from regard.tasks.mqar import MQAR

from ..lib.claims import Claim, one
from ..lib.display import interval, pivot
from ..lib.recipe import Results, recipe
from ..lib.task_recipe import TaskRecipe, TaskRecipeConfig, mamba

PAPER, LLA, SOFTMAX = "Local Linear Attention", "local linear, learned ridge", "softmax"
MAMBA, ICLM = "Mamba", "ICLM"
BARE = {"feed_forward": "none"}
MODELS: dict[str, dict[str, Any]] = {
    SOFTMAX: {"mixers": "softmax", **BARE},
    "biweight": {"mixers": "biweight", **BARE},
    LLA: {"mixers": "local-linear", "ridges": "learned", "qk_norm": "rms", **BARE},
    "linear": {"mixers": "elu", **BARE},
    "delta rule": {"mixers": "deltanet", **BARE},
    "gated delta rule": {"mixers": "gated-deltanet", "mixer_options": {"gated-deltanet": {"num_heads": 1}}, **BARE},
    "Mesa": {"mixers": "mesa", **BARE},
    ICLM: {"model": "iclm", "variant": "full"},
    MAMBA: {},
    "linear, FwPKM at layer 1": {
        "mixers": "elu", "memories": "FwPKM@1", "memory_options": {"fwpkm": {"sub_keys": 16, "chunk_size": 8}},
        **BARE,
    },
}  # fmt: skip
"""Attention has rotary positions; the delta rules, Mesa and Mamba have short convolutions. Mamba is that of
transformers, which is slow without a GPU."""
STATES = ("linear", "delta rule", "gated delta rule", "Mesa", MAMBA)


@dataclass(frozen=True, kw_only=True)
class RecallConfig(TaskRecipeConfig):
    """Train models on MQAR with several numbers of pairs, and score them."""

    pairs: tuple[int, ...] = (4, 8, 16)  # Numbers of pairs; a sequence is eight times as long.
    vocabulary: int = 256  # Tokens; the paper has 8192.
    width: int = 64  # Channels, of one head.
    rates: tuple[float, ...] = (1e-3, 3e-3)
    """Learning rates, of which each model takes the one with the best mean score on the validation split."""


@recipe("associative-recall")
class AssociativeRecall(TaskRecipe):
    """Accuracy of recall against the number of pairs: attention kernels, linear states, delta rules, Mesa, FwPKM."""

    Config = RecallConfig
    known = MODELS
    slow = (MAMBA,)
    limits: ClassVar = {**TaskRecipe.limits, "pairs": (1, 2**16), "vocabulary": (4, 2**24), "width": (8, 8192)}
    sizes: ClassVar = {
        "quick": {"seeds": 2, "pairs": (4,), "vocabulary": 64, "steps": 60, "rates": (3e-3,), "examples": 64,
                  "models": (SOFTMAX, "linear", LLA), "width": 32},
        "paper": {"pairs": (4, 8, 16, 32, 64), "vocabulary": 8192, "width": 128, "batch": 256, "steps": 20_000,
                  "rates": (1e-4, 5e-4, 1e-3), "models": tuple(MODELS)},
    }  # fmt: skip

    def training_tasks(self) -> Mapping[str, TokenTask]:
        own = self.config
        return {str(n): MQAR(tokens=own.vocabulary, length=8 * n, pairs=n) for n in own.pairs}

    def make_model(self, name: str, task: TokenTask) -> Any:
        width = self.config.width
        return mamba(task.vocabulary, width, 2, width**2) if name == MAMBA else super().make_model(name, task)

    def shared(self) -> Mapping[str, Any]:
        return {"num_hidden_layers": 2, "num_attention_heads": 1}

    def claims(self, results: Results) -> list[Claim]:
        if not {LLA, SOFTMAX} <= set(self.models):
            return []
        most = str(max(self.config.pairs))
        local = one(self.gap(results, LLA, SOFTMAX, task=most))
        states = {name: self.gap(results, name, SOFTMAX, task=most) for name in STATES if name in self.models}
        note = f"Accuracy at {most} pairs, less softmax's."
        missing = self.unlearned(results, most, self.models)
        return [
            Claim(PAPER, "figure 4", "Local linear attention recalls at least as well as softmax", local, "at least",
                  -0.02, effect=0.05, untestable=missing, note=f"{note} 0.02 counts as equal."),
            Claim(PAPER, "figure 4", "States of fixed size recall less than softmax", states, "below", 0.0, effect=0.1,
                  untestable=missing, note=note),
        ]  # fmt: skip

    def tables(self, results: Results) -> dict[str, Any]:
        floors = [f"{n} pairs {values['accuracy']:.2f}" for n, values in results.facts["floors"].items()]
        note = f"± half the 95 % interval over seeds. Guessing one of the sequence's values: {'; '.join(floors)}."
        scores = pivot(self.scores(results), ["model"], {"": interval("score")}, "task", note=note)
        return {"Accuracy by number of pairs": scores, "Training": self.training_table(results)}

    def figures(self, results: Results) -> dict[str, bytes]:
        return {"curves": self.curves(results)}
