"""The weightings of the sparse-attention paper in the contextual memories of Memory Mosaics: its figures 2 and 3.

The paper's released programs differ from its definitions (see `released_weightings`); here both are trained on the same
budget. Uniform nearest keys have a straight-through gradient, and with k = 32 also, as released, none to the keys.
"""

from functools import partial
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.inspect.capture import capture, eval_mode
from regard.nn import ContextualMemory

from ..lib.claims import Claim, claims_of, paired
from ..lib.display import dots, gap, lines, panels, pivot, spread, stat
from ..lib.language_text import windows
from ..lib.recipe import Cell, Frame, Results, check_names, select, stacked
from ..lib.text_recipe import TextRecipe
from .released_weightings import FORMS, RULES, ReleasedMemory, use_released

PAPER = "Sparse attention"
# Spec of each weighting. The bandwidth h of normalised ReLU (equation 11: distances between unit keys) and the margin
# of ReLUmax are learned for each head; h starts where 7.5 % of random pairs have no weight.
WEIGHTINGS = {
    "softmax": "softmax", "topk-softmax": "gaussian*nearest(k={k})", "topk-uniform": "uniform*nearest(k={k})",
    "normrelu": "epanechnikov*fixed(h=1.4)*euclidean",
    **{name: name for name in ("relumax", "sparsemax", "biweight", "triweight")},
}  # fmt: skip
RIVALS = {"normrelu": "softmax", "relumax": "sparsemax", "topk-uniform": "softmax"}  # the paper's comparisons
DEFINED, HARD = "defined", "no gradient to keys"
SHOWN_K = 32  # the k of the paper's language models: the only one at every depth but the first
LOOKED_AT = 8  # windows that empty rows are counted on
MATTERS = 0.02  # nats per token that count as a difference
COMPARED = (
    ("Biweight is no worse than softmax", ("biweight",), ("softmax",), "at most", MATTERS),
    ("Compact kernels are below softmax and nearest keys", ("sparsemax", "biweight", "triweight"),
     ("softmax", "topk-softmax", "topk-uniform"), "below", 0),
    ("Uniform nearest keys and normalised ReLU are worse than softmax", ("topk-uniform", "normrelu"), ("softmax",),
     "above", 0),
)  # fmt: skip
"""Claims about the test loss of each depth: wording, weightings, those they are compared with, and the side and bound
of the difference (first less second)."""
KIND = ("layers", "model", "k", "form")  # columns that name a model


class MosaicKernels(TextRecipe, name="mosaic-kernels"):
    """Memory Mosaics with every weighting of the sparse-attention paper, as defined and as its programs computed it."""

    models: tuple[str, ...] = tuple(WEIGHTINGS)  # Weightings to train, of the eight.
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
    context = 128
    batch = 8
    steps = 1000
    looks = 5
    seeds = 5
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

    def cells(self) -> list[Cell]:
        kinds: list[tuple[int, str, int | None, str]] = []
        for number, layers in enumerate(self.layers):
            for model in self.trained:
                near = self.ks if number == 0 else (self.shown_k,)
                kinds += [(layers, model, k, DEFINED) for k in (near if "{k}" in WEIGHTINGS[model] else (None,))]
                if model == "topk-uniform" and number == 0:
                    kinds.append((layers, model, self.shown_k, HARD))
                if model in RULES and number == 0:
                    kinds += [(layers, model, None, form) for form in self.released]
        return [{**dict(zip(KIND, kind, strict=True)), "rate": rate} for kind in kinds for rate in self.rates]

    def change_model(self, cell: Cell, model: Any) -> None:
        if cell["form"] in FORMS:
            use_released(model, cell["model"], cell["form"])
        self.empty_at_start = self.inside(model)["empty"]

    def measure_model(self, model: Any) -> dict[str, Any]:
        return super().measure_model(model) | self.inside(model) | {"empty_at_start": self.empty_at_start}

    def inside(self, model: Any) -> dict[str, Any]:
        """Look into a model as it reads the first windows of the test text."""
        return inside(model, windows(self.test_tokens, self.context)[:LOOKED_AT])

    @property
    def shown_k(self) -> int:
        """Return the k of comparisons: the paper's if it is among those trained."""
        return SHOWN_K if SHOWN_K in self.ks else self.ks[0]

    def fields(self, cell: Cell) -> dict[str, Any]:
        # released forms replace the weights of softmax, whose sharpness they need
        spec = "softmax" if cell["form"] in FORMS else WEIGHTINGS[cell["model"]].format(k=cell["k"])
        return {"model": "memory-mosaic", "num_hidden_layers": cell["layers"], "mixers": spec,
                "uniform_gradient": "hard" if cell["form"] == HARD else "straight-through"}  # fmt: skip

    def chosen(self, results: Results, kind: str = "", **where: Any) -> Frame:
        """Add columns: "blocks", the depth as text; "label", the name of a model in a legend; and "compared", not true
        of nearest keys with another k than that of comparisons."""
        rows = super().chosen(results, kind)
        near = rows["k"].map(", k = {:g}".format, na_action="ignore").fillna("")
        form = (", " + rows["form"]).where(rows["form"] != DEFINED, "")
        depth = rows["layers"].map(lambda layers: f"{layers} block{'s' * (layers > 1)}")
        compared = rows["k"].isna() | (rows["k"] == self.shown_k)
        return select(rows.assign(blocks=depth, label=rows["model"] + near + form, compared=compared), **where)

    def claims(self, results: Results) -> list[Claim]:
        rows: list[Any] = []
        for blocks in self.chosen(results)["blocks"].unique():
            less = partial(self.gap, results, blocks=blocks, compared=True, form=DEFINED)
            for wording, names, others, *says in COMPARED:
                gaps = {f"{name} to {other}": less(name, other) for name, other in product(names, others)}
                rows.append((f"figure 3, {blocks}", wording, gaps, *says))
        runs = self.chosen(results, compared=True, layers=self.layers[0])
        of = lambda model, form: select(runs, model=model, form=form)  # noqa: E731
        released = {f"{model}, {form}": paired(of(model, form), of(model, DEFINED), "test")
                    for model, form in (*product(RULES, ["fast"]), ("topk-uniform", HARD))}  # fmt: skip
        learn = "The released programs learn as well as what is defined"
        rows.append(("released programs", learn, released, "within", MATTERS))
        note = f"Test nats per token, the first less the second; {MATTERS:g} is taken to matter."
        return claims_of(PAPER, [(*row, note) for row in rows], effect=MATTERS, untestable=self.unlearned(results))

    def tables(self, results: Results) -> dict[str, Any]:
        named, made = {"model": "weighting", "k": "k", "form": "form"}, {}
        for blocks, rows in self.chosen(results).groupby("blocks", sort=False):
            base = select(rows, model="softmax")
            made[blocks] = pivot(rows, named, {
                "rate": "{rate:g}", "test nats/token": spread("test"), "above softmax": gap("test", base),
                "training": spread("train"), "pairs with weight": "{support:.1f}", "empty rows": "{empty:.2%}",
                "CPU, a step": stat("step_cpu_seconds", "median", "{:.1f} ms", 1e3),
                "in softmax's": gap("step_cpu_seconds", base, 2, ratio=True),
                "parameters": "{parameters:,.0f}",
            }, note=(
                f"Seeds: {self.seeds}; mean ± standard deviation. Gaps are paired by seed, ± half the 95 % "
                f"interval. Empty: rows after the first token's in which no pair had weight by itself."))  # fmt: skip
        runs = self.chosen(results, compared=True, layers=self.layers[0])
        defined, mended = (select(runs, form=form) for form in (DEFINED, "mended"))
        rivals = stacked(select(defined, model=rival).assign(model=model) for model, rival in RIVALS.items())
        above = partial(gap, "test", same=["model"])
        return {**made, "As released and as defined": pivot(
            select(runs, model=list(RIVALS)), {"model": "weighting", "form": "form"},
            {"test nats/token": spread("test"), "above defined": above(defined), "above mended": above(mended),
             "above sparsemax (relumax), softmax (others)": above(rivals), "empty rows": "{empty:.2%}"},
            note="fast: the paper's language models (no bandwidth, or a margin that is not learned; one pair too many "
                 "masked); mended: fast with the right mask; regular: the temperature applied twice.",
        )}  # fmt: skip

    def figures(self, results: Results) -> dict[str, bytes]:
        runs, looks = self.chosen(results), self.chosen(results, "look", compared=True)
        y = {"train": "training loss, nats/token", "held_out": "validation loss, nats/token"}
        along = partial(lines, x="step", y=y, hue="label", x_label="optimiser step")
        made = {
            "curves": along(panels(select(looks, form=DEFINED), "{blocks}")),
            "final": dots(runs, "test", "label", "layers", x_label="test nats per token"),
        }
        if len(released := select(looks, layers=self.layers[0], model=RULES)):
            made["released"] = along({"as defined and as released": released})
        return made

    def notes(self, results: Results) -> list[str]:
        runs, heads = (self.chosen(results, kind, model="normrelu", form=DEFINED) for kind in ("run", "head"))
        return [f"Normalised ReLU, {blocks}: {rows['empty_at_start'].mean():.2%} of the rows are empty at the start "
                f"and {rows['empty'].mean():.2%} after training; h is then {h.min():.2f} to {h.max():.2f}."
                for blocks, rows in runs.groupby("blocks", sort=False)
                for h in [select(heads, blocks=blocks)["h"]]]  # fmt: skip


def inside(model: Any, windows: Tensor) -> dict[str, Any]:
    """Return of the contextual memories on windows [B, T] of tokens "empty", the share of rows after the first token's
    in which no pair has weight by itself; "support", the mean number of pairs with weight, None for released forms; and
    "rows", one for each head with its learned numbers: "sharpness" (beta^2), "h", "margin"."""
    memories = [module for module in model.modules() if isinstance(module, ContextualMemory)]
    with torch.no_grad(), eval_mode(model), capture(model) as seen:
        model(input_ids=windows.to(model.device).long(), use_cache=False)
    later = lambda rows: rows[..., 1:].double().mean().item()  # noqa: E731  # the first token sees no pair
    empty, support, rows = list[float](), list[float](), list[dict[str, Any]]()
    for block, memory in enumerate(memories):
        if isinstance(memory, ReleasedMemory):
            empty.append(later(memory.fallen))
        else:
            captured = seen.layers[block]
            empty.append(later(captured.empty | captured.fallback))
            support.append(later(captured.support))
        learned = {} if memory.sharpness is None else {"sharpness": memory.sharpness()}
        heads = {name: number.flatten().tolist() for name, number in (learned | memory.numbers()).items()}
        rows += [{"kind": "head", "block": block, "head": head,
                  **{name: round(numbers[head], 4) for name, numbers in heads.items()}}
                 for head in range(memory.num_heads)]  # fmt: skip
    mean = lambda parts: sum(parts) / len(parts) if parts else None  # noqa: E731
    return {"empty": mean(empty), "support": mean(support), "rows": rows}
