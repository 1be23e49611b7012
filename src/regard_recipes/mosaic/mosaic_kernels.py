"""The weightings of the sparse-attention paper in the contextual memories of Memory Mosaics: its figures 2 and 3.

The paper trains Memory Mosaics of 1, 8 and 12 blocks with eight weightings: at one and eight blocks the compact kernels
(sparsemax, biweight, triweight) have a lower loss than the Gaussian and the nearest-key baselines; at twelve only
uniform nearest keys and normalised ReLU differ, and are worse. Its released programs differ from its definitions (see
`released_weightings`); here both are trained on the same budget. Uniform nearest keys have a straight-through gradient,
and with k = 32 also, as released, none to the keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.checks import ArgumentError

from ..lib.claims import Claim, Estimate, claims_of, paired
from ..lib.display import MISSING, Show, dots, first, gap, lines, mean, median, pivot, spread
from ..lib.language_training import Budget, TextConfig, run_rows, train_language_model
from ..lib.recipe import Cell, Frame, Recipe, Results, check_names, recipe, select
from .released_weightings import FORMS, RULES, Released, ReleasedMemory, use_released

PAPER = "Sparse attention"
# Spec of each weighting. The bandwidth h of normalised ReLU (equation 11: distances between unit keys) and the margin
# of ReLUmax are learned for each head; h starts where 7.5 % of random pairs have no weight.
WEIGHTINGS = {
    "softmax": "softmax", "topk-softmax": "gaussian*nearest(k={k})", "topk-uniform": "uniform*nearest(k={k})",
    "normrelu": "epanechnikov*fixed(h=1.4)*euclidean",
    **{name: name for name in ("relumax", "sparsemax", "biweight", "triweight")},
}  # fmt: skip
COMPACT = ("sparsemax", "biweight", "triweight")
BASELINES = ("softmax", "topk-softmax", "topk-uniform")
RIVALS = {"normrelu": "softmax", "relumax": "sparsemax"}  # the paper's comparisons of the released weightings
DEFINED, HARD = "defined", "no gradient to keys"
SHOWN_K = 32  # the k of the paper's language models: the only one at every depth but the first
LOOKED_AT = 8  # windows that empty rows are counted on
MATTERS = 0.02  # nats per token that count as a difference


@dataclass(frozen=True, kw_only=True)
class MosaicKernelsConfig(TextConfig):
    """Train Memory Mosaics with every weighting of the sparse-attention paper, as defined and as released."""

    seeds: int = 3
    """Models of each kind at the first depth; they differ in first weights and windows."""
    k_seeds: int = 1  # The same for nearest keys with another k than 32.
    deep_seeds: int = 1  # The same for the other depths.
    weightings: tuple[str, ...] = tuple(WEIGHTINGS)  # Weightings to train, of the eight.
    released: tuple[str, ...] = FORMS
    """Forms of normalised ReLU and ReLUmax in released programs that are trained too, at the first depth: 'fast' (of
    the paper's language models), 'mended' (fast with the right mask) and 'regular'."""
    context: int = 128
    batch: int = 8
    steps: int = 700
    looks: int = 6
    depths: tuple[int, ...] = (1, 4)
    """Numbers of blocks. At the first, everything is trained; at the others the eight weightings as they are defined,
    nearest keys with k = 32 only."""
    ks: tuple[int, ...] = (16, 32, 64)  # Numbers of nearest keys.
    width: int = 64  # Width of every model.
    heads: int = 4  # Heads of every memory.
    deep_steps: int = 400  # Optimiser steps of the models at the other depths.
    learning_rates: tuple[float, ...] = (2e-2,)  # The highest: one for all depths, or one for each.
    final_shares: tuple[float, ...] = (0.1,)
    """Share of it to which the learning rate falls along a cosine: one for all depths, or one for each."""
    warmup: float = 0.05  # Share of the steps over which the learning rate rises from zero.


@recipe("mosaic-kernels")
class MosaicKernels(Recipe):
    """Memory Mosaics with every weighting of the sparse-attention paper, as defined and as its programs computed it."""

    Config = MosaicKernelsConfig
    sizes: ClassVar = {
        "quick": {"seeds": 1, "width": 32, "heads": 2, "context": 96, "batch": 4, "steps": 80, "deep_steps": 80,
                  "measured": 2048, "looks": 4},
        # Tables 3 and 5 of the paper. It drops 5 % of contextual weights, which no loop here does.
        "paper": {
            "tokenizer": "gpt2", "depths": (1, 8, 12), "parts": 16, "warmup": 0.025,
            "learning_rates": (5e-3, 5e-3, 1e-3), "final_shares": (0.02, 0.02, 0.05), "k_seeds": 3, "width": 768,
            "heads": 12, "context": 512, "batch": 512, "steps": 80_000, "deep_steps": 80_000, "measured": 2_621_440,
            "looks": 40, "dtype": "bfloat16", "device": "auto",
        },
    }  # fmt: skip

    choices: ClassVar = {"weightings": tuple(WEIGHTINGS)}
    limits: ClassVar = dict.fromkeys(("depths", "ks", "deep_steps"), (1, math.inf))

    def check(self) -> None:
        own, call = self.config, self.call()
        if own.released:
            check_names(call, "--released", own.released, FORMS)
        if "softmax" not in own.weightings:
            raise ArgumentError(f"{call}: --weightings lacks softmax, to which all others are compared; add it.")
        for name in ("learning_rates", "final_shares"):
            given = getattr(own, name)
            if len(given) not in (1, len(own.depths)):
                raise ArgumentError(f"{call}: --{name.replace('_', '-')} has {len(given)} numbers for "
                                    f"{len(own.depths)} depths; give one, or one for each.")  # fmt: skip
        for flag, count in (("--k-seeds", own.k_seeds), ("--deep-seeds", own.deep_seeds)):
            if not 1 <= count <= own.seeds:
                raise ArgumentError(f"{call}: {flag} is {count}, expected 1 to --seeds, {own.seeds}.")
        for depth in own.depths:
            self.budget(depth).check(call)
        for cell in self.cells():
            self.model_config(cell, 256)

    def prepare(self) -> Mapping[str, Any]:
        from ..lib.language_text import read_text

        own = self.config
        text = read_text(own.data, own.tokenizer, context=own.context, measured=own.measured, call=self.call())
        self.corpus, self.vocabulary = text.corpus, text.vocabulary
        self.windows = text.windows(LOOKED_AT, own.context)
        return {"text": text.described}

    def cells(self) -> list[Cell]:
        own = self.config
        made: list[Cell] = []
        for place, depth in enumerate(own.depths):
            ks = own.ks if place == 0 or SHOWN_K not in own.ks else (SHOWN_K,)
            for weighting in own.weightings:
                near = ks if "{k}" in WEIGHTINGS[weighting] else (None,)
                kinds: list[tuple[int | None, str]] = [(k, DEFINED) for k in near]
                if weighting == "topk-uniform" and place == 0:
                    kinds.append((self.shown_k, HARD))
                if weighting in RULES and place == 0:
                    kinds += [(None, form) for form in own.released]
                made += [{"depth": depth, "weighting": weighting, "k": k, "form": form} for k, form in kinds]
        return made

    def measure(self, cell: Cell, seed: int) -> Iterator[dict[str, Any]]:
        if seed >= self.config.seed + self.seed_count(cell):
            return
        start: dict[str, float] = {}

        def prepare(model: Any) -> None:
            if cell["form"] in FORMS:
                use_released(model, Released(cell["weighting"], cell["form"]))
            start["empty_at_start"] = inside(model, self.windows)["empty"]

        run = train_language_model(
            self.model_config(cell, self.vocabulary), self.corpus, self.budget(cell["depth"]), seed, name=str(cell),
            prepare=prepare, measure=partial(inside, windows=self.windows),
        )  # fmt: skip
        run.extra.update(start)
        heads = run.extra.pop("heads")
        yield from run_rows(run)
        yield from heads

    @property
    def shown_k(self) -> int:
        """Return the k of comparisons: the paper's if it is among those trained."""
        return SHOWN_K if SHOWN_K in self.config.ks else self.config.ks[0]

    def seed_count(self, cell: Cell) -> int:
        """Return how many seeds a cell has; `measure` returns no rows for the others."""
        own = self.config
        if cell["depth"] != own.depths[0]:
            return int(own.deep_seeds)
        return int(own.seeds if cell["k"] in (None, self.shown_k) else own.k_seeds)

    def budget(self, depth: int) -> Budget:
        """Return what every model of this depth is given."""
        own, place = self.config, self.config.depths.index(depth)
        at = lambda given: given[place] if len(given) > 1 else given[0]  # noqa: E731
        return Budget.of(own, learning_rate=at(own.learning_rates), final_share=at(own.final_shares),
                         steps=own.deep_steps if place else own.steps)  # fmt: skip

    def model_config(self, cell: Cell, vocabulary: int) -> Any:
        """Return the Memory Mosaic of a cell. Released forms replace the weights of softmax, whose sharpness they
        need."""
        from regard.models import MemoryMosaicConfig

        spec = "softmax" if cell["form"] in FORMS else WEIGHTINGS[cell["weighting"]].format(k=cell["k"])
        return MemoryMosaicConfig(
            vocab_size=vocabulary, hidden_size=self.config.width, num_hidden_layers=cell["depth"],
            num_attention_heads=self.config.heads, mixers=spec, max_position_embeddings=self.config.context,
            uniform_gradient="hard" if cell["form"] == HARD else "straight-through",
        )  # fmt: skip

    def runs_of(self, results: Results, depth: int) -> Callable[..., Frame]:
        """Return a function from a weighting and a form to the runs of a depth that are compared."""
        runs = results.select(kind="run", depth=depth)
        runs = runs[runs["k"].isna() | (runs["k"] == self.shown_k)]
        return lambda weighting, form=DEFINED: select(runs, weighting=weighting, form=form)

    def claims(self, results: Results) -> list[Claim]:
        told: list[Any] = []
        for depth in self.config.depths:
            runs = self.runs_of(results, depth)
            gaps = partial(gaps_of, runs)
            blocks = f"{depth} block{'s' * (depth > 1)}"
            where = f"figure 3, {blocks}"
            told += [
                (where, "Biweight is no worse than softmax", gaps(("biweight",), ("softmax",)), "at most", MATTERS,
                 HELD_OUT),
                (where, "Compact kernels are below softmax and nearest keys", gaps(COMPACT, BASELINES), "below", 0,
                 HELD_OUT),
                (where, "Uniform nearest keys and normalised ReLU are worse than softmax",
                 gaps(("topk-uniform", "normrelu"), ("softmax",)), "above", 0, HELD_OUT),
            ]  # fmt: skip
        runs = self.runs_of(results, self.config.depths[0])
        pairs = [*((rule, "fast") for rule in RULES), ("topk-uniform", HARD)]
        released = {f"{rule}, {form}": paired(runs(rule, form), runs(rule), "held_out")
                    for rule, form in pairs if len(runs(rule, form))}  # fmt: skip
        told.append(("released programs", "The released programs learn as well as what is defined", released, "within",
                     MATTERS, HELD_OUT))  # fmt: skip
        return claims_of(PAPER, told, effect=MATTERS)

    def tables(self, results: Results) -> dict[str, Any]:
        every = results.select(kind="run")
        empty: dict[str, Show] = {"empty rows": lambda rows: f"{rows['empty'].mean():.2%}"}
        made = {}
        for depth in self.config.depths:
            base = self.runs_of(results, depth)("softmax")
            losses = {
                "held-out nats/token": spread("held_out"), "above softmax": gap("held_out", base),
                "training": spread("train"), "pairs with weight": mean("support", "{:.1f}"), **empty,
                "CPU, a step": median("step_cpu_seconds", "{:.1f} ms", 1e3),
                "in softmax's": gap("step_cpu_seconds", base, 2, ratio=True),
                "parameters": first("parameters", "{:,.0f}"),
            }  # fmt: skip
            made[f"{depth} block{'s' * (depth > 1)}"] = pivot(
                select(every, depth=depth), ["weighting", "k", "form"], losses,
                note=f"{len(base)} seed{'s' * (len(base) > 1)}, of other k {self.config.k_seeds}: mean ± standard "
                     f"deviation; gaps are paired by seed, ± half the 95 % interval. Empty: rows after the first "
                     f"token's in which no pair had weight by itself.",
            )  # fmt: skip
        runs = self.runs_of(results, self.config.depths[0])
        forms = select(every, depth=self.config.depths[0], weighting=[*RULES, "topk-uniform"])
        forms = forms[forms["k"].isna() | (forms["k"] == self.shown_k)]
        rival: Show = lambda rows: above(rows, runs(RIVALS.get(rows["weighting"].iloc[0], "softmax")))  # noqa: E731
        if len(forms):
            made["As released and as defined"] = pivot(
                forms, ["weighting", "form"],
                {"held-out nats/token": spread("held_out"),
                 "above defined": lambda rows: above(rows, runs(rows["weighting"].iloc[0])),
                 "above mended": lambda rows: above(rows, runs(rows["weighting"].iloc[0], "mended")),
                 "above sparsemax (relumax), softmax (others)": rival, **empty},
                note="fast: the paper's language models (no bandwidth, or a margin that is not learned; one pair too "
                     "many masked); mended: fast with the right mask; regular: the temperature applied twice.",
            )  # fmt: skip
        return made

    def figures(self, results: Results) -> dict[str, bytes]:
        frame = results.frame
        frame = frame.assign(label=list(map(kind_of, frame["weighting"], frame["k"], frame["form"])))
        looks = select(frame[frame["k"].isna() | (frame["k"] == self.shown_k)], kind="look")
        curves = {f"depth {depth}": select(looks, depth=depth, form=DEFINED) for depth in self.config.depths}
        released = {"as defined and as released": select(looks, depth=self.config.depths[0], weighting=RULES)}
        y = {"train": "training loss, nats/token", "held_out": "held-out loss, nats/token"}
        runs = select(frame, kind="run")
        made = {
            "curves": lines(curves, "step", y, "label", x_label="optimiser step"),
            "final": dots(runs, "held_out", "label", "depth", x_label="held-out nats per token"),
        }
        if len(released["as defined and as released"]):
            made["released"] = lines(released, "step", y, "label", x_label="optimiser step")
        return made

    def notes(self, results: Results) -> list[str]:
        rates = [f"{self.budget(depth).learning_rate:g} at depth {depth}" for depth in self.config.depths]
        made = [f"Highest learning rates: {', '.join(rates)}; tuned for no weighting."]
        for (depth,), rows in results.select(weighting="normrelu", form=DEFINED).groupby(["depth"]):
            start, end, h = (rows[column].dropna() for column in ("empty_at_start", "empty", "h"))
            made.append(
                f"Normalised ReLU at depth {depth}: {start.mean():.2%} of the rows are empty at the start and "
                f"{end.mean():.2%} after training; h is then {h.min():.2f} to {h.max():.2f}."
            )
        return made


HELD_OUT = f"Held-out nats per token, the first less the second; {MATTERS:g} is taken to matter."


def kind_of(weighting: str, k: float | None, form: str) -> str:
    """Return the name of a kind for a legend."""
    near = [] if k is None or k != k else [f"k = {k:g}"]
    return ", ".join([weighting, *near, *([] if form == DEFINED else [form])])


def gaps_of(runs: Callable[..., Frame], names: Sequence[str], others: Sequence[str]) -> dict[str, Estimate]:
    """Return the difference of held-out losses of each pair of weightings that were trained."""
    return {f"{name} to {other}": paired(runs(name), runs(other), "held_out")
            for name in names for other in others if len(runs(name)) and len(runs(other))}  # fmt: skip


def above(rows: Frame, base: Frame) -> str:
    """Return the difference of held-out losses; nothing where there is no base."""
    return gap("held_out", base)(rows) if len(base) else MISSING


def inside(model: Any, windows: list[list[int]]) -> dict[str, Any]:
    """Return of the contextual memories on windows [B, T] of tokens "empty", the share of rows after the first token's
    in which no pair has weight by itself; "support", the mean number of pairs with weight, None for released forms; and
    "heads", rows with learned numbers: "sharpness" (beta^2), "h", "margin"."""
    from regard.inspect import capture
    from regard.nn import ContextualMemory

    memories = [module for module in model.modules() if isinstance(module, ContextualMemory)]
    tokens = torch.tensor(windows, device=next(model.parameters()).device)
    training = model.training
    with torch.no_grad(), capture(model.eval()) as seen:
        model(input_ids=tokens, use_cache=False)
    model.train(training)
    empty, support = [], []
    rows: list[dict[str, Any]] = []
    for block, memory in enumerate(memories):
        learned = {} if memory.sharpness is None else {"sharpness": memory.sharpness()}
        if isinstance(memory, ReleasedMemory):
            empty.append(_later_rows(memory.fallen))
        else:
            found = seen.layers[block]
            empty.append(_later_rows(found.empty | found.fallback))
            support.append(_later_rows(found.support))
            learned |= memory.numbers()
        values = {name: number.detach().flatten().tolist() for name, number in learned.items()}
        rows += [
            {"kind": "head", "block": block, "head": head, **{name: round(x[head], 4) for name, x in values.items()}}
            for head in range(len(next(iter(values.values()), ())))
        ]
    means = (sum(parts) / len(parts) if parts else None for parts in (empty, support))
    return {**dict(zip(("empty", "support"), means, strict=True)), "heads": rows}


def _later_rows(rows: Tensor) -> float:
    """Return the mean of [B, H, T] without the first token, which sees no pair."""
    return rows[..., 1:].double().mean().item()
