"""Recall values by keys: accuracy against the number of pairs, for models with a cache and with a state of fixed size.

MQAR of Zoology, as in the Local Linear Attention paper (section 4, figure 4). A model is trained once, on sequences
with few and with many pairs: without short ones, which are learned first, long ones take many times as many steps.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.tasks import TokenExample, TokenTask
from regard.tasks.mqar import MQAR
from regard.tasks.tokens import IGNORED

from ..lib.claims import Claim, claims_of
from ..lib.display import interval, lines, pivot
from ..lib.recipe import Results
from ..lib.task_recipe import TaskRecipe, mamba

PAPER, LLA, SOFTMAX = "Local Linear Attention", "local linear, learned ridge", "softmax"
MAMBA, ICLM, GATED = "Mamba", "ICLM", "gated delta rule"
STATES = ("linear", "delta rule", GATED, "Mesa", MAMBA)
DECAYS = (0.001, 0.1)  # least and largest share that the gated delta rule first forgets with each token


def models(head: int, state: int) -> dict[str, dict[str, Any]]:
    """Return names of models to fields of their configuration. Their single head has `head` channels; of models with a
    state so many that it has about `state`^2 numbers, so that the two matrices of Mesa have fewer. Attention has rotary
    positions that suit short sequences. Mamba is that of transformers, which is slow without a GPU."""
    bare = {"feed_forward": "none", "head_dim": head, "rope_theta": 100.0}
    fixed, half = {**bare, "head_dim": state}, {**bare, "head_dim": max(2, 2 * round(state / 8**0.5))}
    gated = {"mixer_options": {"gated-deltanet": {"num_heads": 1, "head_dim": state}}}
    keys = max(2, round(state**0.5))
    slots = {"sub_keys": keys, "key_dim": state, "value_dim": state, "top_k": min(4, keys), "chunk_size": 8}
    return {
        SOFTMAX: {"mixers": "softmax", **bare},
        "biweight": {"mixers": "biweight", **bare},
        LLA: {"mixers": "local-linear", "ridges": "learned", "qk_norm": "rms", **bare},
        "linear": {"mixers": "elu", **fixed},
        "delta rule": {"mixers": "deltanet", **fixed},
        GATED: {"mixers": "gated-deltanet", **gated, **fixed},
        "Mesa": {"mixers": "mesa", **half},
        "linear, FwPKM at layer 1": {
            "mixers": "elu", "memories": "FwPKM@1", "memory_options": {"fwpkm": slots}, **fixed,
        },
        ICLM: {"model": "iclm", "variant": "full"},
        MAMBA: {},
    }  # fmt: skip


@dataclass(frozen=True)
class MixedRecall(MQAR):
    """MQAR with a number of pairs out of `numbers`, in `length` tokens: as long a sequence as in `only`, then zeros."""

    numbers: tuple[int, ...] = (4,)

    def only(self, pairs: int) -> MQAR:
        """Return the task with so many pairs alone, in a sequence as much shorter as there are fewer pairs."""
        return MQAR(tokens=self.tokens, length=self.length * pairs // self.pairs, pairs=pairs)

    def draw(self, random: Random, split: str) -> TokenExample:
        short = self.only(random.choice(self.numbers)).draw(random, split)
        rest = (0, self.length - len(short.tokens))
        return TokenExample(pad(short.tokens, rest), pad(short.labels, rest, value=IGNORED))

    def oracle(self, example: TokenExample) -> Tensor:
        return self.only(int(example.asked.sum())).oracle(example)


class AssociativeRecall(TaskRecipe, name="associative-recall"):
    """Accuracy of recall against the number of pairs: attention kernels, linear states, delta rules, Mesa, FwPKM."""

    pairs: tuple[int, ...] = (2, 4, 8, 16)  # Numbers of pairs, each in an equal share of the training examples.
    length: int = 4  # Tokens of a sequence for each of its pairs, at least 4.
    vocabulary: int = 64  # Tokens; the paper has 8192.
    width: int = 64  # Channels.
    head: int = 32  # Channels of the one head of attention.
    state: int = 8  # Channels of the head of models with a state of fixed size, which has about state^2 numbers.
    steps = 1000
    rates = (3e-3, 6e-3)
    examples = 256
    limits: ClassVar = {"pairs": (1, 2**16), "vocabulary": (4, 2**24), "width": (8, 8192),
                        "length": (4, 2**16), "head": (2, 8192), "state": (2, 8192)}  # fmt: skip
    known = models(32, 8)
    slow = (MAMBA,)
    by_size: ClassVar = {
        "quick": {"seeds": 2, "pairs": (2, 4), "steps": 60, "rates": (3e-3,), "examples": 64,
                  "models": (SOFTMAX, "linear", LLA), "width": 32},
        "paper": {"pairs": (4, 8, 16, 32, 64), "length": 8, "vocabulary": 8192, "width": 128, "head": 128, "state": 128,
                  "batch": 256, "steps": 20_000, "rates": (1e-4, 5e-4, 1e-3), "models": tuple(known)},
    }  # fmt: skip

    def __post_init__(self) -> None:
        self.known = models(self.head, self.state)  # type: ignore[misc]

    def training_tasks(self) -> Mapping[str, MixedRecall]:
        most = max(self.pairs)
        task = MixedRecall(tokens=self.vocabulary, length=self.length * most, pairs=most, numbers=self.pairs)
        return {str(most): task}

    def test_tasks(self, name: str) -> Mapping[str, TokenTask]:
        return {str(n): self.training_tasks()[name].only(n) for n in self.pairs}

    def prepare(self) -> Mapping[str, Any]:
        (name,) = self.training_tasks()
        return {"floors": {n: task.floor(count=64) for n, task in self.test_tasks(name).items()}}

    def make_model(self, name: str, task: TokenTask) -> Any:
        if name == MAMBA:
            return mamba(task.vocabulary, self.width, 2, self.state**2)
        model = super().make_model(name, task)
        return begin_slowly(model) if name == GATED else model

    def shared(self) -> Mapping[str, Any]:
        return {"num_hidden_layers": 2, "num_attention_heads": 1}

    def scored(self, model: Any, name: str, test: TokenTask) -> Iterator[dict[str, Any]]:
        yield from super().scored(model, name, test)
        yield {"kind": "state", "test": name, "numbers": state_numbers(model, test)}

    def claims(self, results: Results) -> list[Claim]:
        most = str(max(self.pairs))
        states = {name: self.gap(results, name, SOFTMAX, test=most) for name in STATES}
        note = f"Accuracy at {most} pairs, less softmax's."
        return claims_of(PAPER, [
            ("figure 4", "Local linear attention recalls at least as well as softmax",
             self.gap(results, LLA, SOFTMAX, test=most), "at least", -0.02, f"{note} 0.02 counts as equal.",
             {"effect": 0.05}),
            ("figure 4", "States of fixed size recall less than softmax", states, "below", 0.0, note, {"effect": 0.1}),
        ], untestable=self.unlearned(results, most))  # fmt: skip

    def tables(self, results: Results) -> dict[str, Any]:
        floors = [f"{n} pairs {values['accuracy']:.2f}" for n, values in results.facts["floors"].items()]
        note = f"± half the 95 % interval over seeds. Guessing one of the sequence's values: {'; '.join(floors)}."
        scores, states = self.scores(results), self.chosen(results, "state")
        return {
            "Accuracy by number of pairs": pivot(scores, ["model"], {"": interval("score")}, "test", note=note),
            "State by number of pairs": pivot(states, ["model"], {"": "{numbers:,.0f}"}, "test", note=(
                "Numbers kept for a sequence at its end, mean over layers: keys and values of all tokens, or a state "
                "with the last inputs of its short convolution.")),
            "Training": self.training_table(results),
        }  # fmt: skip

    def figures(self, results: Results) -> dict[str, bytes]:
        scores = self.scores(results).assign(pairs=lambda rows: rows["test"].astype(int))
        by_pairs = lines({"": scores}, "pairs", {"score": "accuracy"}, "model", log_x=True)
        return {"pairs": by_pairs, "curves": self.curves(results)}


def begin_slowly(model: Any) -> Any:
    """Let the gated delta rule first forget a share of its state out of `DECAYS` with each token, log-uniform. With the
    first values of transformers, which is made to load trained weights, it forgets nearly all, so that no value is
    still there when its key is read again, and training does not begin."""
    for module in model.modules():
        if hasattr(module, "dt_bias"):
            low, high = torch.tensor(DECAYS).log()
            share = (low + (high - low) * torch.rand(module.dt_bias.shape)).exp()
            with torch.no_grad():
                module.A_log.zero_()
                module.dt_bias.copy_(share.expm1().log())  # of which softplus gives the share
    return model


@torch.no_grad()
def state_numbers(model: Any, task: TokenTask) -> float | None:
    """Return how many numbers of float32 a model keeps for a sequence of the task, mean over layers; None for Mamba."""
    tokens = task.example(0, 0, "test").tokens[None].to(model.device)
    cache = getattr(model(input_ids=tokens, use_cache=True), "past_key_values", None)
    if cache is None:
        return None
    sizes = [layer.bytes if hasattr(layer, "bytes") else layer.keys.nbytes + layer.values.nbytes
             for layer in cache.layers]  # fmt: skip
    return float(sum(sizes) / 4 / model.config.num_hidden_layers)
