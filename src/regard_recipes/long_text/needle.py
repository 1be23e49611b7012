"""Measure how models find a needle in a haystack that they read up to four times.

Fast-weight Product Key Memory paper, section 4.3: figure 4 and findings 4 to 6. Models are asked for needles in
haystacks as long as in training and longer, by the three protocols of `needle_reading`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from ..fwpkm.memory_recipe import NEEDLES, PAPER, PAPER_SIZE, QUICK, RESTRICTED, NeedleRecipe, known_rows
from ..lib.claims import Claim, Estimate, exact, paired
from ..lib.display import MISSING, Show, interval, lines, panels, pivot
from ..lib.recipe import Frame, Results, select
from .needle_reading import PROTOCOLS, answer_rows

GOOD = 0.7  # share that the paper calls a boost (finding 4); reads are counted until it is reached
LONG = 4096  # tokens from which the paper needs more reads
COST = 0.25  # share of the answers that a memory without resets may lose
KEPT = ("whole", "flushed")  # protocols that are also measured without a reset between samples
ROWS = known_rows("GDN+FA-pSWA")
SMALL = ("GDN", "GDN | FwPKM", "FA", "FA | FwPKM", "FA-pSWA | FwPKM")  # models that are trained by default


class Needle(NeedleRecipe, name="needle"):
    """Needles in a haystack after one to four reads, in the FwPKM layouts, by the paper's protocol and fairer ones."""

    batch = 64
    steps = 1500
    stop_at = 0.98
    qk_norm: str = "none"
    """Norm of attention's queries and keys: none or rms. Small models with rms stay for thousands of steps at choosing
    among the numbers that they have seen."""
    pairs: float = 0.5  # Share of the training examples that are keys and numbers alone, without a haystack.
    examples: int = 16  # Haystacks of each length.
    rates = (3e-3, 1e-2)
    lengths: tuple[int, ...] = (48, 192, 768)  # Tokens of a haystack.
    kept: int = 4  # Haystacks that each of several streams reads without a reset in between; 0 for no such test.
    limits: ClassVar = {"kept": (0, "examples"), "pairs": (0.0, 1.0)}
    choices: ClassVar = {"qk_norm": ("none", "rms")}
    known = ROWS
    slow: ClassVar = [name for name in ROWS if name not in SMALL]
    scorings = 60  # models with a memory learn in tens of steps, those without in many hundreds
    by_size: ClassVar = {
        "quick": {**QUICK, "seeds": 2, "rates": (3e-3,), "lengths": (40, 80), "reads": 2, "kept": 2},
        "paper": {**PAPER_SIZE, "models": tuple(ROWS), "qk_norm": "rms", "pairs": 0.0, "digits": 6,
                  "key_digits": 2, "words": 30_000, "most": 16, "lengths": (4096, 8192, 32_768, 131_072),
                  "examples": 500, "kept": 20},
    }  # fmt: skip

    def shared(self) -> Mapping[str, Any]:
        return {**super().shared(), "qk_norm": None if self.qk_norm == "none" else self.qk_norm}

    def training_tasks(self) -> Mapping[str, Any]:
        return {NEEDLES: replace(self.needle_task(), pairs=self.pairs)}

    def scored(self, model: Any, name: str, test: Any) -> Iterator[dict[str, Any]]:
        """Yield the scores by length, protocol and number of reads, memories new for each haystack and kept. A model
        without fast weights reads once: it would answer the same after any number of reads."""
        fast = any(hasattr(module, "frozen") for module in model.modules())
        cases = [(length, protocol, 0) for length in self.lengths for protocol in (PROTOCOLS if fast else ["whole"])]
        cases += [(self.lengths[0], protocol, self.kept) for protocol in KEPT if fast and self.kept]
        for length, protocol, kept in cases:
            yield from answer_rows(
                model, test, length, self.needles, self.examples, self.seed, protocol=protocol, kept=kept,
                reads=self.reads if fast else 1, recurrent="lact" in model.config.mixers,
            )  # fmt: skip

    def claims(self, results: Results) -> list[Claim]:
        answers, context, short, long = self.chosen(results, "answers"), self.context, self.lengths[0], self.lengths[-1]
        ways_of = ["model", "protocol", "read"]
        shares = select(answers, length=short, state="new").groupby(ways_of)["share"].mean().groupby("model").max()
        able = [name for name in self.trained if shares.get(name, 0.0) >= GOOD]
        models = [name for name in self.trained if self.row(name).rereads]
        learned = [name for name in models if name in able]
        rest = [name for name in models if name not in learned]
        left_out = f" Left out, since they never answer {GOOD:.0%}: {', '.join(rest)}." if rest else ""
        never = "" if learned else f"no model answers {GOOD:.0%} at {short} tokens"
        asked = lambda model, how: select(answers, **{"state": "new", "model": model, **how})  # noqa: E731
        ways = lambda how, how_else: {name: less(name, how, name, how_else) for name in learned}  # noqa: E731

        def less(one: str, how: Mapping[str, Any], other: str, how_else: Mapping[str, Any]) -> Estimate:
            """Return the share of one model and way of reading less that of another."""
            return paired(asked(one, how), asked(other, how_else), "share")

        def reads_needed(name: str, length: int) -> int:
            """Return after how many reads by the paper's protocol `GOOD` is reached; if never, one more than tried."""
            rows = asked(name, {"length": length, "protocol": "whole"})
            return int(min(first_good(rows), rows["read"].nunique() + 1))

        whole, flushed = ({"length": short, "protocol": protocol, "read": 1} for protocol in ("whole", "flushed"))
        last = {"length": long, "protocol": "flushed", "read": self.reads}
        without = {name: less(name, last, self.row(name).layout, {**whole, "length": long}) for name in learned
                   if self.row(name).remembers and self.row(name).layout in able}  # fmt: skip
        pairs = {one: other for one, other in RESTRICTED.items() if {f"{one} | FwPKM", f"{other} | FwPKM"} & {*learned}}
        windows = {f"{one} less {other}": less(f"{one} | FwPKM", last, f"{other} | FwPKM", last)
                   for one, other in pairs.items()}  # fmt: skip
        reads = {name: exact(reads_needed(name, long) - reads_needed(name, short)) for name in learned}
        at_short, at_long = (f"Share of exact answers at {length} tokens" for length in (short, long))
        cases: list[tuple[Any, ...]] = [
            ("check", "One read is enough if it is written before the question", ways(flushed, whole), 0, GOOD, never,
             f"{at_short}, written before the question less after it (the paper's protocol)."),
            ("finding 4", "A second read boosts retrieval", ways({**whole, "read": 2}, whole), 0, GOOD, never,
             f"{at_short} by the paper's protocol, second read less first."),
            ("finding 5", "Memories generalise to longer texts", without, 0, GOOD,
             "no haystack is longer than a training window" if long <= context else "" if without else
             f"no layout without a memory answers {GOOD:.0%} at {short} tokens",
             f"{at_long} after windows of {context}, last read, written before the question, less the same layout "
             f"without a memory."),
            ("finding 6", "Longer texts need more reads", reads, 0, None,
             f"the paper sees it from {LONG} tokens on" if long < LONG else never,
             f"Reads until {GOOD:.0%} of the answers are exact, at {long} tokens less at {short}: "
             f"{', '.join(f'{name} {count.mean:+.0f}' for name, count in reads.items())}."),
            ("finding 3", "Windows in training make attention's models use the memory", windows, 0, GOOD,
             "" if windows else f"no pair of them answers {GOOD:.0%} at {short} tokens",
             f"{at_long}, last read, FwPKM with windows less without."),
            ("check", "A memory kept from sample to sample costs less than a quarter of the answers",
             ways({**flushed, "state": "kept"}, flushed), -COST, GOOD, never,
             f"{at_short}, one read, written before the question, kept less new."),
        ]  # fmt: skip
        return [Claim(PAPER, where, wording, {name: e for name, e in estimates.items() if e.finite}, "above", margin,
                      effect, untestable, note + left_out)
                for where, wording, estimates, margin, effect, untestable, note
                in cases[: None if self.kept else -1]]  # fmt: skip

    def tables(self, results: Results) -> dict[str, Any]:
        answers = self.chosen(results, "answers")
        fast = [name for name in self.trained if self.row(name).rereads]
        new = select(answers, state="new").assign(at=lambda rows: [
            f"{n:.0f}, read {i:.0f}" for n, i in zip(rows["length"], rows["read"], strict=True)])  # fmt: skip
        kept = select(answers, length=self.lengths[0], protocol=KEPT, model=fast if self.kept else [])
        note = (f"Share of exact answers, ± half the 95 % interval over seeds; they learned {self.context} tokens. "
                f"Without fast weights a model answers the same after all reads and by all protocols.")  # fmt: skip
        needed: Show = lambda rows: MISSING if math.isinf(first_good(rows)) else f"{first_good(rows):.0f}"  # noqa: E731
        both: Show = lambda rows: " / ".join(  # noqa: E731
            f"{select(rows, state=state)['share'].mean():.0%}" for state in ("new", "kept"))  # fmt: skip
        return {
            **{f"Exact answers, {meaning}": pivot(
                new[(new["protocol"] == protocol) | ~new["model"].isin(fast)], ["model"], {"": interval("share", 2)},
                "at", note=note) for protocol, meaning in PROTOCOLS.items()},
            "Reads needed": pivot(
                select(new, model=fast), ["model", "protocol"], {"reads": needed}, "length",
                note=f"Reads until {GOOD:.0%} of the answers are exact; never among those tried: {MISSING}."),
            "Memory kept from sample to sample": pivot(
                kept, ["model", "protocol"], {"read": both}, "read",
                note="By read: memory new for every haystack / kept from one to the next."),
            "Training": self.training_table(results),
        }  # fmt: skip

    def notes(self, results: Results) -> list[str]:
        runs = self.chosen(results, "run").groupby("model", sort=False)["validation"].mean()
        few = [f"{name} ({share:.0%})" for name, share in runs.items() if share < GOOD]
        steps, length = f"{self.steps:,} steps", f"{self.context} tokens"
        return [f"Did not learn to find needles in {length} within {steps}: {', '.join(few)} right."] if few else []

    def figures(self, results: Results) -> dict[str, bytes]:
        rows = select(self.chosen(results, "answers"), state="new")
        wide = rows.pivot_table("share", ["model", "length", "read", "seed"], "protocol", sort=False).reset_index()
        y: dict[str, str] = {name: f"exact answers, {name}" for name in PROTOCOLS if name in wide}
        best = wide.assign(best=wide[list(y)].max(axis=1)).groupby(["model", "length", "seed"], sort=False)
        over = panels(wide, "{length:.0f} tokens")
        return {
            "reads": lines(over, "read", y, "model", title="Exact answers after 1, 2, ... reads"),
            "lengths": lines({"after any read, by any protocol": best["best"].max().reset_index()}, "length",
                             {"best": "exact answers"}, "model", x_label="tokens of a haystack", log_x=True),
            "curves": self.curves(results),
        }  # fmt: skip


def first_good(rows: Frame) -> float:
    """Return after how many reads the mean share is first `GOOD` or more; infinite if never."""
    return min((read for read, of_read in rows.groupby("read") if of_read["share"].mean() >= GOOD), default=math.inf)
