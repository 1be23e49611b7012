"""What each part of a fast-weight product-key memory is worth: appendix B of its paper at a size for two cores.

Every model is the same, gated delta nets with FwPKM layers, with one part of the memory left out or another number of
slots read. Beside them stand the three rules of writing, dot-product scores (which the paper leaves out since they
"often result in memory collapsing and loss divergence"), and a model without a memory. Each is trained on text and read
over held-out text in order, with the memory carried on; and trained on needles and asked after one to four readings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from regard.inspect.gates import layer_name

from ..lib.claims import Claim, Estimate, Says, mean_interval, one, paired, share_interval, unpaired
from ..lib.display import MISSING, Show, gap, lines, mean, median, pivot
from ..lib.recipe import Cell, Frame, Results, recipe, select
from ..long_text.needle_reading import read_and_answer
from ..long_text.streaming import streamed
from .memory_layouts import Row, check_chunk
from .memory_study import NEEDLES, PAPER, PAPER_SIZE, QUICK, TEXT, MemoryStudy, MemoryStudyConfig

NONE, WHOLE, LOOK_AHEAD = "no memory", "FwPKM", "without look-ahead"
PARTS: dict[str, dict[str, Any]] = {
    "without value norm": {"value_norm": False}, "without address loss": {"key_update": "mse"},
    "without gating": {"gating": False}, "without loss weight": {"gate_loss": False},
    LOOK_AHEAD: {"look_ahead": False},
}  # fmt: skip
WIDER, HEADS, DOT = "1 head, 4 k slots", "4 heads, k slots each", "dot-product scores"
OPTIONS: dict[str, dict[str, Any]] = {
    NONE: {}, WHOLE: {}, "rule: paper": {"step_rule": "paper"}, "rule: reference": {"step_rule": "reference"},
    WIDER: {}, HEADS: {"heads": 4}, **PARTS, DOT: {"score": "dot"},
}  # fmt: skip
"""What a variant's memory has that the whole memory (all parts, the normalised rule) has not; WIDER reads 4 k slots."""
STATISTICS = ("gate", "coverage", "collisions", "kl_uniform")
CLEAR = 0.01  # nats per token that a part must be worth to matter
COLLAPSED = 0.5  # share of the whole memory's coverage below which a memory counts as collapsed


@dataclass(frozen=True, kw_only=True)
class FwPKMAblationConfig(MemoryStudyConfig):
    """Leave out one part of a fast-weight product-key memory at a time."""

    variants: tuple[str, ...] = tuple(OPTIONS)  # Memories that are trained.
    segments: int = 32  # Windows of held-out text that are read in order.


@recipe("fwpkm-ablation")
class FwPKMAblation(MemoryStudy):
    """A fast-weight product-key memory with one part left out at a time: perplexity, gates, slots in use, needles."""

    Config = FwPKMAblationConfig
    sizes: ClassVar = {
        "quick": {**QUICK, "batch": 2, "steps": 12, "segments": 4},
        "paper": {**PAPER_SIZE, "segments": 256, "questions": 500},
    }
    limits: ClassVar = {**MemoryStudy.limits, "segments": (1, math.inf)}
    choices: ClassVar = {"variants": tuple(OPTIONS)}
    flag, held_out_windows = "--segments", 16

    def check(self) -> None:
        own, call = self.config, self.call()
        super().check()
        check_chunk(call, own)
        for name in own.variants:
            self.model_config(name, 258)

    def text_length(self) -> int:
        return int(self.config.context * self.config.segments) + 1

    def cells(self) -> list[Cell]:
        return [{"memory": name, "task": task} for name in self.config.variants for task in (TEXT, NEEDLES)]

    def model_config(self, variant: str, vocabulary: int) -> Any:
        """Return the configuration of a variant."""
        own = self.config
        depths = (2, 6, 10) if own.layers >= 12 else (own.layers - 1,)
        memory = {"top_k": 4 * own.top_k} if variant == WIDER else OPTIONS[variant]
        return self.model(Row("GDN", "none" if variant == NONE else "FwPKM"), vocabulary, depths, depths, **memory)

    def measure(self, cell: Cell, seed: int) -> Iterator[Any]:
        text, own = self.corpora[TEXT].held_out_tokens, self.config
        read = partial(read_text, text=text, segment=own.context)
        ask = partial(answer, asked=self.asked, reads=own.reads)
        config = self.model_config(cell["memory"], len(self.words))
        return self.train(cell, seed, config, read if cell["task"] == TEXT else ask)

    def claims(self, results: Results) -> list[Claim]:
        variants = self.config.variants
        if WHOLE not in variants:
            return []
        seen = by_seed(results, self.config.reads)
        of = lambda name: select(seen, memory=name)  # noqa: E731
        compared = lambda how, name, others: {  # noqa: E731
            other * (len(others) > 1): how(of(name), of(other)) for other in others if {name, other} <= set(variants)
        }
        gaps = partial(compared, lambda a, b: paired(a, b, "loss"))
        more = partial(compared, lambda a, b: unpaired(answered(a), answered(b)))
        whole, parts = of(WHOLE), [name for name in PARTS if name != LOOK_AHEAD]
        harm = "Removing look-ahead values yields the most significant harm"
        told: list[tuple[str, str, str, dict[str, Estimate], Says, str]] = [
            (TEXT, "section 4", "Writing lowers the loss on text",
             one(mean_interval(whole["loss"] - whole["frozen"])), "below", "the same memory never written"),
            (TEXT, "section 4", "A memory lowers the loss on text", gaps(WHOLE, [NONE]), "below", NONE),
            (NEEDLES, "section 4.3", "The memory answers needles", more(WHOLE, [NONE]), "above", NONE),
            (TEXT, "appendix B", f"{harm}, to perplexity", gaps(LOOK_AHEAD, parts), "above", "without another part"),
            (NEEDLES, "appendix B", f"{harm}, to needles", more(LOOK_AHEAD, parts), "below", "without another part"),
        ]  # fmt: skip
        how: dict[str, tuple[dict[str, Any], str]] = {
            TEXT: ({"effect": CLEAR, "digits": 4}, "Nats per token on held-out text, less {}."),
            NEEDLES: ({}, f"Share of needles answered after {self.config.reads} readings, less {{}}; the interval is "
                          f"over questions."),
        }  # fmt: skip
        made = [Claim(PAPER, where, wording, found, says, 0, note=how[task][1].format(less), **how[task][0])
                for task, where, wording, found, says, less in told if found]  # fmt: skip
        if DOT in variants:
            few = of(DOT)["coverage"].to_numpy() < COLLAPSED * whole["coverage"].to_numpy()
            note = f"Share of trainings that diverge or use less than {COLLAPSED:g} times the whole memory's slots."
            wording = "Dot-product scores often result in memory collapsing and loss divergence"
            poor = one(mean_interval(few | of(DOT)["diverged"]))
            made.append(Claim(PAPER, "appendix B", wording, poor, "above", note=note))
        return made

    def tables(self, results: Results) -> dict[str, Any]:
        seen, reads = by_seed(results, self.config.reads), self.config.reads
        right: Show = lambda rows: f"{answered(rows).mean:.0%}"  # noqa: E731
        values: dict[str, Show] = {
            "perplexity": perplexity("loss"), f"nats above {WHOLE}": gap("loss", select(seen, memory=WHOLE), 4),
            "never written": perplexity("frozen"), "mean gate": mean("gate"), "coverage": mean("coverage", "{:.3f}"),
            "collisions": mean("collisions"), "KL to even use": mean("kl_uniform"),
            f"needles, {reads} readings": right,
            "CPU, a step": median("step_cpu_seconds", "{:.0f} ms", 1e3),
        }  # fmt: skip
        note = (
            f"Perplexity on held-out text read in order, the memory carried on; never written: the memory stays as it "
            f"is made. Coverage: share of the slots that were read; collisions: share of the reads of slots that were "
            f"read more than once. Means; seeds: {self.config.seeds}."
        )
        chance = f"{self.config.questions} questions a seed. Chance: {10.0**-self.config.digits:.2g}."
        answers = results.select(kind="answers")
        return {
            "What a part is worth": pivot(seen, ["memory"], values, note=note),
            "Needles by readings": pivot(answers, ["memory"], {"": right}, "readings", note=chance),
        }

    def figures(self, results: Results) -> dict[str, bytes]:
        import torch

        from regard.inspect.memory_figures import gate_histograms

        looks, answers = results.select(kind="look", task=TEXT), results.select(kind="answers")
        loss = {"train": "training loss, nats/token", "held_out": "held-out loss, nats/token"}
        made = {
            "curves": lines({"text": looks.dropna(subset=list(loss))}, "step", loss, "memory"),
            "needles": lines({"needles": answers.assign(share=answers["exact"] / answers["asked"])}, "readings",
                             {"share": "share of right answers"}, "memory"),
        }  # fmt: skip
        gates: dict[str, dict[str, Any]] = {}
        layers = results.select(kind="layer", seed=self.config.seed)
        for memory, layer, counts in layers[["memory", "layer", "histogram"]].itertuples(index=False):
            if isinstance(counts, (list, tuple)):
                own = torch.tensor(counts, dtype=torch.float64)
                gates.setdefault(memory, {})[layer] = own / own.sum().clamp(min=1)
        if gates:
            made["gates"] = gate_histograms(gates, title="Gates on held-out text")
        return made


def read_text(model: Any, text: Tensor, segment: int) -> dict[str, Any]:
    """Read a text [T] as a stream of segments, the memory carried on; return the loss, the loss with a memory that is
    never written, and a row with statistics of each memory layer."""
    read = streamed(model, [text], segment, statistics=True)
    frozen = streamed(model, [text], segment, frozen=True)
    gates = {layer_name(point): list(counts) for point, counts in read.gates.items()}  # in ten parts of [0, 1]
    rows = [{"kind": "layer", "layer": layer_name(name), **{key: found.get(key) for key in (*STATISTICS, "reads")},
             "histogram": gates.get(layer_name(name))} for name, found in read.slots.items()]  # fmt: skip
    return {"loss": read.loss, "frozen": frozen.loss, "rows": rows}


def answer(model: Any, asked: tuple[Tensor, Tensor, Tensor], reads: int) -> dict[str, Any]:
    """Return a row for each number of readings: how many answers are exact, of how many."""
    haystacks, questions, answers = asked
    found = read_and_answer(model, haystacks, questions, answers.shape[1], reads=reads)
    exact = enumerate((found == answers).all(-1).sum(1).tolist(), 1)
    return {"rows": [{"kind": "answers", "readings": i, "exact": n, "asked": len(answers)} for i, n in exact]}


def by_seed(results: Results, reads: int) -> Frame:
    """Return a row for each memory and seed: losses on text (NaN if diverged), means of the layers' statistics, and
    the answers after all readings."""
    key = ["memory", "seed"]
    of = lambda columns, **where: results.select(**where).set_index(key)[columns]  # noqa: E731
    runs = of(["held_out", "loss", "frozen", "step_cpu_seconds"], kind="run", task=TEXT).astype(float)
    layers = of(list(STATISTICS), kind="layer").astype(float).groupby(level=key, sort=False).mean()
    runs["loss"] = runs["loss"].where(runs["held_out"].notna())
    runs["diverged"] = of("held_out", kind="run").isna().groupby(level=key).any()
    return runs.join(layers).join(of(["exact", "asked"], kind="answers", readings=reads)).reset_index()


def answered(rows: Frame) -> Estimate:
    """Return the share of right answers of all seeds together."""
    return share_interval(int(rows["exact"].sum()), int(rows["asked"].sum()))


def perplexity(column: str) -> Show:
    """Return a function that shows the perplexity of a mean loss."""

    def show(rows: Frame) -> str:
        if column == "frozen" and (rows["memory"] == NONE).all():
            return MISSING
        loss = rows[column].mean(skipna=False)
        return f"{math.exp(loss):.2f}" if loss < 700 else "diverged"

    return show
