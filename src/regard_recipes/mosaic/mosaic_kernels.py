"""The weightings of the sparse-attention paper in the contextual memories of Memory Mosaics: its figures 2 and 3.

The paper's released programs differ from its definitions (see `released_weightings`); here both are trained on the same
budget. Uniform nearest keys have a straight-through gradient, and with k = 32 also, as released, none to the keys.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.inspect.capture import capture, eval_mode
from regard.nn import ContextualMemory

from ..lib.claims import Claim, Estimate, claims_of, paired
from ..lib.display import Show, dots, gap, lines, pivot, spread, stat
from ..lib.language_text import LanguageText, windows
from ..lib.recipe import Cell, Frame, Results, check_names, recipe, select
from ..lib.text_recipe import TextRecipe
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
RIVALS = {"normrelu": "softmax", "relumax": "sparsemax", "topk-uniform": "softmax"}  # the paper's comparisons
DEFINED, HARD = "defined", "no gradient to keys"
SHOWN_K = 32  # the k of the paper's language models: the only one at every depth but the first
LOOKED_AT = 8  # windows that empty rows are counted on
MATTERS = 0.02  # nats per token that count as a difference
KIND = ("layers", "model", "k", "form")  # columns that name a model


@recipe("mosaic-kernels")
class MosaicKernels(TextRecipe):
    """Memory Mosaics with every weighting of the sparse-attention paper, as defined and as its programs computed it."""

    models: tuple[str, ...] = tuple(WEIGHTINGS)
    """Weightings to train, of the eight."""
    released: tuple[str, ...] = FORMS
    """Forms of normalised ReLU and ReLUmax in released programs that are trained too, at the first depth: 'fast' (of
    the paper's language models), 'mended' (fast with the right mask) and 'regular'."""
    rates: tuple[float, ...] = (5e-3,)
    """Learning rates, of which each model takes the one with the least mean loss on the validation text; the paper has
    0.005 at one and eight blocks."""
    layers: tuple[int, ...] = (1, 4)  # type: ignore[assignment]  # several numbers for one
    """Numbers of blocks. At the first, everything is trained; at the others the eight weightings as they are defined,
    nearest keys with k = 32 only."""
    ks: tuple[int, ...] = (SHOWN_K,)  # Numbers of nearest keys.
    context: int = 128
    batch: int = 8
    steps: int = 1000
    looks: int = 5
    seeds: int = 5
    """Models of each kind; they differ in first weights and windows."""
    limits: ClassVar = {"ks": (1, math.inf)}
    known: ClassVar = {name: {"mixers": spec} for name, spec in WEIGHTINGS.items()}
    per: ClassVar = KIND
    base = "softmax"
    by_size: ClassVar = {
        "quick": {"seeds": 1, "width": 32, "heads": 2, "context": 96, "batch": 4, "steps": 80, "rates": (2e-2,),
                  "measured": 2048, "looks": 4},
        # Tables 3 and 5 of the paper. It drops 5 % of contextual weights, which no loop here does.
        "paper": {
            "tokenizer": "gpt2", "layers": (1, 8, 12), "ks": (16, 32, 64), "rates": (5e-3, 1e-3), "parts": 16,
            "width": 768, "heads": 12, "context": 512, "batch": 512, "steps": 80_000, "measured": 2_621_440,
            "looks": 40, "seeds": 3, "dtype": "bfloat16", "device": "auto",
        },
    }  # fmt: skip

    def check(self) -> None:
        if self.released:
            check_names(self.call(), "--released", self.released, FORMS)
        super().check()

    def load(self, text: LanguageText) -> dict[str, Any]:
        self.windows = windows(text.held_out_tokens, self.context)[:LOOKED_AT].clone()
        return super().load(text)

    def cells(self) -> list[Cell]:
        kinds: list[tuple[int, str, int | None, str]] = []
        for place, layers in enumerate(self.layers):
            for model in self.trained:
                near = self.ks if place == 0 else (self.shown_k,)
                kinds += [(layers, model, k, DEFINED) for k in (near if "{k}" in WEIGHTINGS[model] else (None,))]
                if model == "topk-uniform" and place == 0:
                    kinds.append((layers, model, self.shown_k, HARD))
                if model in RULES and place == 0:
                    kinds += [(layers, model, None, form) for form in self.released]
        return [{**dict(zip(KIND, kind, strict=True)), "rate": rate} for kind in kinds for rate in self.rates]

    def measure(self, cell: Cell, seed: int) -> list[dict[str, Any]]:
        from ..lib.language_training import train_language_model

        start: dict[str, float] = {}

        def prepare(model: Any) -> None:
            if cell["form"] in FORMS:
                use_released(model, Released(cell["model"], cell["form"]))
            start["empty_at_start"] = inside(model, self.windows)["empty"]

        return train_language_model(
            self.model_config(cell, self.vocabulary), self.corpus, self.budget(cell["rate"]), seed, name=str(cell),
            prepare=prepare, measure=lambda model: self.measure_model(model) | start,
        )  # fmt: skip

    def measure_model(self, model: Any) -> dict[str, Any]:
        return super().measure_model(model) | inside(model, self.windows)

    @property
    def shown_k(self) -> int:
        """Return the k of comparisons: the paper's if it is among those trained."""
        return SHOWN_K if SHOWN_K in self.ks else self.ks[0]

    def fields(self, cell: Cell) -> dict[str, Any]:
        # released forms replace the weights of softmax, whose sharpness they need
        spec = "softmax" if cell["form"] in FORMS else WEIGHTINGS[cell["model"]].format(k=cell["k"])
        gradient = "hard" if cell["form"] == HARD else "straight-through"
        return {"model": "memory-mosaic", "num_hidden_layers": cell["layers"], "mixers": spec,
                "uniform_gradient": gradient}  # fmt: skip

    def compared(self, results: Results, kind: str = "run", **where: Any) -> Frame:
        """Return the rows of a kind at the chosen rates; of nearest keys only those with the k of comparisons."""
        rows = self.chosen(results, kind, **where)
        return rows[rows["k"].isna() | (rows["k"] == self.shown_k)]

    def claims(self, results: Results) -> list[Claim]:
        rows: list[Any] = []
        for layers in self.layers:
            gaps = partial(gaps_of, self.compared(results, layers=layers, form=DEFINED))
            where = f"figure 3, {blocks(layers)}"
            rows += [
                (where, "Biweight is no worse than softmax", gaps(("biweight",), ("softmax",)), "at most", MATTERS),
                (where, "Compact kernels are below softmax and nearest keys", gaps(COMPACT, BASELINES), "below", 0),
                (where, "Uniform nearest keys and normalised ReLU are worse than softmax",
                 gaps(("topk-uniform", "normrelu"), ("softmax",)), "above", 0),
            ]  # fmt: skip
        runs = self.compared(results, layers=self.layers[0])
        of = lambda model, form: select(runs, model=model, form=form)  # noqa: E731
        released = {
            f"{model}, {form}": paired(of(model, form), of(model, DEFINED), "test")
            for model, form in (*((rule, "fast") for rule in RULES), ("topk-uniform", HARD))
        }  # fmt: skip
        learn = "The released programs learn as well as what is defined"
        rows.append(("released programs", learn, released, "within", MATTERS))
        note = f"Test nats per token, the first less the second; {MATTERS:g} is taken to matter."
        return claims_of(PAPER, [(*row, note) for row in rows], effect=MATTERS, untestable=self.unlearned(results))

    def tables(self, results: Results) -> dict[str, Any]:
        every, named, made = self.chosen(results), {"model": "weighting", "k": "k", "form": "form"}, {}
        for layers in self.layers:
            base = select(every, layers=layers, model="softmax")
            losses: dict[str, Show] = {
                "rate": "{rate:g}", "test nats/token": spread("test"), "above softmax": gap("test", base),
                "training": spread("train"), "pairs with weight": "{support:.1f}", "empty rows": "{empty:.2%}",
                "CPU, a step": stat("step_cpu_seconds", "median", "{:.1f} ms", 1e3),
                "in softmax's": gap("step_cpu_seconds", base, 2, ratio=True),
                "parameters": "{parameters:,.0f}",
            }  # fmt: skip
            made[blocks(layers)] = pivot(select(every, layers=layers), named, losses, note=(
                f"Seeds: {self.seeds}; mean ± standard deviation. Gaps are paired by seed, ± half the 95 % "
                f"interval. Empty: rows after the first token's in which no pair had weight by itself."))  # fmt: skip
        first_depth = self.compared(results, layers=self.layers[0])
        forms = select(first_depth, model=[*RULES, "topk-uniform"])

        def above(rival: Mapping[str, str], form: str) -> Show:
            named = lambda rows: rival.get(rows["model"].iloc[0], rows["model"].iloc[0])  # noqa: E731
            return gap("test", lambda rows: select(first_depth, model=named(rows), form=form))

        if len(forms):
            made["As released and as defined"] = pivot(
                forms, {"model": "weighting", "form": "form"},
                {"test nats/token": spread("test"), "above defined": above({}, DEFINED),
                 "above mended": above({}, "mended"),
                 "above sparsemax (relumax), softmax (others)": above(RIVALS, DEFINED), "empty rows": "{empty:.2%}"},
                note="fast: the paper's language models (no bandwidth, or a margin that is not learned; one pair too "
                     "many masked); mended: fast with the right mask; regular: the temperature applied twice.",
            )  # fmt: skip
        return made

    def figures(self, results: Results) -> dict[str, bytes]:
        runs, looks = self.chosen(results), self.compared(results, "look")
        runs, looks = (rows.assign(label=list(map(kind_of, rows["model"], rows["k"], rows["form"])))
                       for rows in (runs, looks))  # fmt: skip
        depths = self.layers
        y = {"train": "training loss, nats/token", "held_out": "validation loss, nats/token"}
        along = partial(lines, x="step", y=y, hue="label", x_label="optimiser step")
        made = {
            "curves": along({blocks(layers): select(looks, layers=layers, form=DEFINED) for layers in depths}),
            "final": dots(runs, "test", "label", "layers", x_label="test nats per token"),
        }
        if len(released := select(looks, layers=depths[0], model=RULES)):
            made["released"] = along({"as defined and as released": released})
        return made

    def notes(self, results: Results) -> list[str]:
        made = []
        for layers in self.layers:
            where: dict[str, Any] = {"layers": layers, "model": "normrelu", "form": DEFINED}
            rows, heads = self.chosen(results, **where), self.chosen(results, "head", **where)
            if len(rows):
                made.append(
                    f"Normalised ReLU, {blocks(layers)}: {rows['empty_at_start'].mean():.2%} of the rows are empty at "
                    f"the start and {rows['empty'].mean():.2%} after training; h is then {heads['h'].min():.2f} to "
                    f"{heads['h'].max():.2f}."
                )
        return made


def blocks(layers: int) -> str:
    """Return a number of blocks as text."""
    return f"{layers} block{'s' * (layers > 1)}"


def kind_of(model: str, k: float | None, form: str) -> str:
    """Return the name of a kind for a legend."""
    near = [] if k is None or k != k else [f"k = {k:g}"]
    return ", ".join([model, *near, *([] if form == DEFINED else [form])])


def gaps_of(runs: Frame, names: Sequence[str], others: Sequence[str]) -> dict[str, Estimate]:
    """Return the difference of test losses of each pair of weightings."""
    return {f"{name} to {other}": paired(select(runs, model=name), select(runs, model=other), "test")
            for name in names for other in others}  # fmt: skip


def inside(model: Any, windows: Tensor) -> dict[str, Any]:
    """Return of the contextual memories on windows [B, T] of tokens "empty", the share of rows after the first token's
    in which no pair has weight by itself; "support", the mean number of pairs with weight, None for released forms; and
    "rows", one for each head with its learned numbers: "sharpness" (beta^2), "h", "margin"."""
    memories = [module for module in model.modules() if isinstance(module, ContextualMemory)]
    with torch.no_grad(), eval_mode(model), capture(model) as seen:
        model(input_ids=windows.to(next(model.parameters()).device).long(), use_cache=False)
    empty, support, rows = list[float](), list[float](), list[dict[str, Any]]()
    for block, memory in enumerate(memories):
        learned = {} if memory.sharpness is None else {"sharpness": memory.sharpness()}
        if isinstance(memory, ReleasedMemory):
            empty.append(_later_rows(memory.fallen))
        else:
            found = seen.layers[block]
            empty.append(_later_rows(found.empty | found.fallback))
            support.append(_later_rows(found.support))
            learned |= memory.numbers()
        values = zip(*(number.detach().flatten().tolist() for number in learned.values()), strict=True)
        rows += [{"kind": "head", "block": block, "head": head,
                  **{name: round(x, 4) for name, x in zip(learned, own, strict=True)}}
                 for head, own in enumerate(values)]  # fmt: skip
    mean = lambda parts: sum(parts) / len(parts) if parts else None  # noqa: E731
    return {"empty": mean(empty), "support": mean(support), "rows": rows}


def _later_rows(rows: Tensor) -> float:
    """Return the mean of [B, H, T] without the first token, which sees no pair."""
    return rows[..., 1:].double().mean().item()
