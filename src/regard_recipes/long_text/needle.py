"""Measure how models find a needle in a haystack that they read up to four times.

Fast-weight Product Key Memory paper, section 4.3: figure 4 and findings 4 to 6. All models learn on the same windows of
text with needles and questions, and are then asked for needles in haystacks as long as those windows and longer, by the
three protocols of `needle_reading`: that of the paper, which answers before it writes, and two that write first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from regard.checks import ArgumentError

from ..fwpkm.memory_layouts import MEMORIES, RESTRICTED, Row
from ..lib.claims import Claim, Estimate, exact, share_interval, unpaired
from ..lib.display import MISSING, Show, first, lines, median, only, panels, pivot
from ..lib.language_training import Corpus, run_rows, train_language_model
from ..lib.recipe import Cell, Frame, Results, check_names, recipe, select
from .layout_recipe import PAPER, PAPER_SIZE, QUICK, LayoutConfig, LayoutRecipe, named, rows_of_model
from .needle_reading import KEPT_PROTOCOLS, PROTOCOLS, answer_rows
from .needle_text import FINAL, learn_answers, needle_world

GOOD = 0.7  # share that the paper calls a boost (finding 4); reads are counted until it is reached
LONG = 4096  # tokens from which the paper needs more reads
COST = 0.25  # share of the answers that a memory without resets may lose
TRAINING_TOKENS = 400_000
PROTOCOL_NAMES = {
    "whole": "written after the question (the paper)",
    "chunked": "the chunk of the training",
    "flushed": "written before the question",
}


@dataclass(frozen=True, kw_only=True)
class NeedleConfig(LayoutConfig):
    """Train the fast-weight paper's layouts on text with needles, and let them read haystacks one to four times."""

    memories: tuple[str, ...] = ("none", "FwPKM")
    """none, PKM, FwPKM, PKM+FwPKM, FwMLP."""
    also: tuple[str, ...] = ("PKM+FwPKM", "FwMLP")  # Memories of the first layout, besides.
    data: Path | None = None
    """UTF-8 text that haystacks are made of, a file or a folder. None: the Python manual inside the interpreter."""
    words: int = 200  # How many of the commonest words are tokens of their own.
    needles: int = 5  # Needles in a haystack.
    digits: int = 2  # Of a needle's number; two of them are a token.
    lengths: tuple[int, ...] = (192, 768, 2048)  # Tokens of a haystack.
    reads: int = 4  # How often a haystack is read at most.
    samples: int = 24  # Haystacks of each length.
    kept: int = 3  # Haystacks that each of several streams reads without a reset in between; 0 for no such test.


@recipe("needle")
class Needle(LayoutRecipe):
    """Needles in a haystack after one to four reads, in the FwPKM layouts, by the paper's protocol and fairer ones."""

    Config = NeedleConfig
    limits: ClassVar = {**dict.fromkeys(("lengths", "reads", "samples", "needles", "words"), (1, math.inf)),
                        "kept": (0, math.inf)}  # fmt: skip
    sizes: ClassVar = {
        "quick": {**QUICK, "words": 50, "context": 128, "chunk": 32, "steps": 10, "lengths": (64, 128), "reads": 2,
                  "samples": 8, "kept": 2},
        "paper": {**PAPER_SIZE, "digits": 6, "words": 30_000, "lengths": (4096, 8192, 32_768, 131_072),
                  "samples": 500, "kept": 20},
    }  # fmt: skip

    def check(self) -> None:
        own, call = self.config, self.call()
        if own.also:
            check_names(call, "--also", own.also, MEMORIES)
        if own.kept > own.samples:
            raise ArgumentError(f"{call}: --kept is {own.kept}, expected at most the {own.samples} --samples.")
        super().check()

    def extra_rows(self) -> list[Row]:
        return [*(Row(self.config.layouts[0], memory) for memory in self.config.also), *super().extra_rows()]

    def prepare(self) -> Mapping[str, Any]:
        own = self.config
        self.world = needle_world(own.data, common=own.words, needles=own.needles, digits=own.digits, call=self.call())
        half = own.context // 2
        count = max(TRAINING_TOKENS, 4 * own.context)
        seeds = ((count, own.seed), (4096, FINAL + own.seed))
        self.corpus = Corpus(*(self.world.training_tokens(many, half, seed) for many, seed in seeds))
        return {"vocabulary": len(self.world.words)}

    def measure(self, cell: Cell, seed: int) -> Iterator[dict[str, Any]]:
        row, world, own = Row(cell["layout"], cell["memory"]), self.world, self.config
        numbers = {name: getattr(own, name) for name in ("lengths", "reads", "samples", "kept", "seed")}
        return run_rows(train_language_model(
            self.model(row, len(world.words)), self.corpus, self.budget(), seed, name=row.name,
            measure=partial(answer_rows, row=row, world=world, **numbers),
            prepare=partial(learn_answers, values=world.values, keys=world.keys),
        ))  # fmt: skip

    def claims(self, results: Results) -> list[Claim]:
        seen, lengths, context = Seen(results), self.config.lengths, self.config.context
        short, long = lengths[0], lengths[-1]
        learned = {row.name: row for row in seen.learned(short)}
        rest = [row.name for row in self.rows() if row.rereads and row.name not in learned]
        left_out = f" Left out, since they never answer {GOOD:.0%}: {', '.join(rest)}." if rest else ""
        never = "" if learned else f"no model answers {GOOD:.0%} at {short} tokens"
        whole, flushed = ({"length": short, "protocol": protocol, "read": 1} for protocol in ("whole", "flushed"))
        last = {"length": long, "protocol": "flushed", "read": self.config.reads}

        gaps = lambda one, other: seen.gaps(  # noqa: E731
            {name: ((row, one), (row, other)) for name, row in learned.items()}
        )
        without = seen.gaps({name: ((row, last), (Row(row.layout), {**whole, "length": long}))
                             for name, row in learned.items() if row.remembers})  # fmt: skip
        pairs = [(Row(layout, "FwPKM"), Row(full, "FwPKM")) for layout, full in RESTRICTED.items()]
        pairs = [pair for pair in pairs if set(pair) <= set(self.rows()) and set(pair) & set(learned.values())]
        windows = seen.gaps({f"{one.layout} less {other.layout}": ((one, last), (other, last)) for one, other in pairs})
        reads = {name: exact(seen.needed(row, long) - seen.needed(row, short)) for name, row in learned.items()}
        counts = ", ".join(f"{name} {count.mean:+.0f}" for name, count in reads.items())
        at_short, at_long = (f"Share of exact answers at {length} tokens" for length in (short, long))
        cases = [
            ("check", "One read is enough if it is written before the question", gaps(flushed, whole), 0, GOOD, never,
             f"{at_short}, written before the question less after it (the paper's protocol).{left_out}"),
            ("finding 4", "A second read boosts retrieval", gaps({**whole, "read": 2}, whole), 0, GOOD, never,
             f"{at_short} by the paper's protocol, second read less first.{left_out}"),
            ("finding 5", "Memories generalise to longer texts", without, 0, GOOD,
             never if long > context else "no haystack is longer than a training window",
             f"{at_long} after windows of {context}, last read, written before the question, less the same layout "
             f"without a memory.{left_out}"),
            ("finding 6", "Longer texts need more reads", reads, 0, None,
             f"the paper sees it from {LONG} tokens on" if long < LONG else never,
             f"Reads until {GOOD:.0%} of the answers are exact, at {long} tokens less at {short}: {counts}.{left_out}"),
            ("finding 3", "Windows in training make attention's models use the memory", windows, 0, GOOD,
             "" if windows else f"no pair of them answers {GOOD:.0%} at {short} tokens",
             f"{at_long}, last read, FwPKM with windows less without."),
            ("check", "A memory kept from sample to sample costs less than a quarter of the answers",
             gaps({**flushed, "state": "kept"}, flushed), -COST, GOOD, never,
             f"{at_short}, one read, written before the question, kept less new.{left_out}"),
        ]  # fmt: skip
        return [Claim(PAPER, where, wording, estimates, "above", margin, effect, untestable, note)
                for where, wording, estimates, margin, effect, untestable, note
                in cases[: None if self.config.kept else -1]]  # fmt: skip

    def tables(self, results: Results) -> dict[str, Any]:
        import pandas as pd

        seen, models = Seen(results), ["layout", "memory"]
        several = " and for the seeds of each, so that it is somewhat too narrow" if self.config.seeds > 1 else ""
        note = (f"Share of exact answers with its 95 % interval (Wilson, over haystacks, which are the same for all "
                f"models{several}); training windows had {self.config.context} tokens. A model without fast weights "
                f"answers the same after all reads and by all protocols.")  # fmt: skip
        made = {}
        heads = [f"{n}, read {i + 1}" for n in self.config.lengths for i in range(self.config.reads)]
        for protocol in PROTOCOLS:
            rows = seen.by_protocol(protocol)
            asked = [f"{n:.0f}, read {i:.0f}" for n, i in zip(rows["length"], rows["read"], strict=True)]
            rows = rows.assign(at=pd.Categorical(asked, heads))
            exact_of: Show = lambda own: "{0.mean:.0%} ({0.low:.0%} to {0.high:.0%})".format(share(own))  # noqa: E731
            title = f"Exact answers, {PROTOCOL_NAMES[protocol]}"
            made[title] = pivot(rows, models, {"exact": exact_of}, "at", note=note)
        fast = select(seen.answers, fast=True)
        if len(fast):
            note = f"Reads until {GOOD:.0%} of the answers are exact; never among those tried: {MISSING}."
            reads: Show = lambda own: MISSING if math.isinf(first_good(own)) else f"{first_good(own):.0f}"  # noqa: E731
            made["Reads needed"] = pivot(fast, [*models, "protocol"], {"reads": reads}, "length", note=note)
        short = self.config.lengths[0]
        last = select(seen.by_protocol("flushed"), length=short)
        made["Training"] = pivot(results.frame, models, {
            "learned": only(first("parameters", "{:,.0f}"), kind="run"),
            "training loss on answers": only(lambda rows: " to ".join(
                f"{rows.groupby('step')['train'].mean().iloc[place]:.2f}" for place in (0, -1)), kind="look"),
            "digits": other_score(last, "digits"), "any candidate": other_score(last, "candidate"),
            "CPU, a step": only(median("step_cpu_seconds", "{:.0f} ms", 1e3), kind="run"),
        }, note=f"Nats per answer; chance 4.6. Digits at their place and answers that are the number of any needle: "
                f"{short} tokens, last read, {PROTOCOL_NAMES['flushed']}.")  # fmt: skip
        kept = select(seen.all, length=short, protocol=list(KEPT_PROTOCOLS), fast=True)
        if self.config.kept and len(kept):
            note = f"{short} tokens, by read: memory new for every haystack / kept from one to the next."
            both: Show = lambda own: " / ".join(  # noqa: E731
                f"{share(select(own, state=state)).mean:.0%}" for state in ("new", "kept"))  # fmt: skip
            made["Memory kept from sample to sample"] = pivot(kept, [*models, "protocol"], {"read": both}, "read",
                                                              note=note)  # fmt: skip
        return made

    def figures(self, results: Results) -> dict[str, bytes]:
        rows = named(Seen(results).answers)
        rows = rows.assign(share=rows["exact"] / rows["trials"])
        wide = rows.pivot_table("share", ["model", "length", "read"], "protocol", sort=False).reset_index()
        last = wide.groupby(["model", "length"], sort=False).last().reset_index()
        last = last.assign(flushed=last["flushed"].fillna(last["whole"])) if "flushed" in last else last
        y: dict[str, str] = {name: f"exact answers, {name}" for name in PROTOCOLS if name in wide}
        over = panels(wide, "{length:.0f} tokens")
        made = {"reads": lines(over, "read", y, "model", title="Exact answers after 1, 2, ... reads")}
        column = "flushed" if "flushed" in last else "whole"
        made["lengths"] = lines({PROTOCOL_NAMES[column]: last}, "length", {column: "exact answers, last read"}, "model",
                                x_label="tokens of a haystack", log_x=True)  # fmt: skip
        return made

    def notes(self, results: Results) -> list[str]:
        once = ["One training of each: intervals are over haystacks."] if self.config.seeds == 1 else []
        return [*super().notes(results), *once, "The loss of training counts answers alone. A model at chance did not "
                "learn this in that time; it may with more."]  # fmt: skip


class Seen:
    """The answers of a run."""

    def __init__(self, results: Results) -> None:
        rows = results.select(kind="answers")
        models = zip(rows["layout"], rows["memory"], strict=True)
        self.all = rows.assign(fast=[Row(*each).rereads for each in models])
        self.answers = select(self.all, state="new")

    def by_protocol(self, protocol: str) -> Frame:
        """Return the answers by a protocol; those of models without fast weights are the same by each."""
        return self.answers[(self.answers["protocol"] == protocol) | ~self.answers["fast"]]

    def gaps(self, cases: Mapping[str, Sequence[tuple[Row, dict[str, Any]]]]) -> dict[str, Estimate]:
        """Return by name the share of exact answers of one model and way of reading less that of another, where both
        were asked."""
        of = lambda row, where: select(rows_of_model(self.all, row), **{"state": "new", **where})  # noqa: E731
        parts = {name: [of(*case) for case in pair] for name, pair in cases.items()}
        return {name: unpaired(*map(share, pair)) for name, pair in parts.items() if all(map(len, pair))}

    def needed(self, row: Row, length: int) -> int:
        """Return after how many reads by the paper's protocol the share is first `GOOD` or more; if never, one more
        than were tried."""
        found = select(rows_of_model(self.answers, row), length=length, protocol="whole")
        return int(min(first_good(found), found["read"].nunique() + 1))

    def learned(self, length: int) -> list[Row]:
        """Return the models with fast weights that reach `GOOD` by any protocol after any number of reads."""
        found = select(self.answers, length=length).groupby(["layout", "memory", "protocol", "read"], sort=False)
        good = [key for key, rows in found if share(rows).mean >= GOOD]
        return [row for row in dict.fromkeys(Row(*key[:2]) for key in good) if row.rereads]


def share(rows: Frame) -> Estimate:
    """Return the share of exact answers over all seeds."""
    return share_interval(int(rows["exact"].sum()), int(rows["trials"].sum()))


def first_good(rows: Frame) -> float:
    """Return after how many reads the share is first `GOOD` or more; infinite if never."""
    return min((read for read, own in rows.groupby("read") if share(own).mean >= GOOD), default=math.inf)


def other_score(frame: Frame, column: str) -> Show:
    """Return a function that shows a score of a model after the last read."""

    def show(rows: Frame) -> str:
        own = rows_of_model(frame, Row(rows["layout"].iloc[0], rows["memory"].iloc[0]))
        own = select(own, read=own["read"].max())
        return f"{own[column].sum() / max(1, own['trials'].sum()):.0%}"

    return show
