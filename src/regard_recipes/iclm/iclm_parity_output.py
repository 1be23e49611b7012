"""Tables, figures and verdicts of the ICLM parity recipe."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from regard.inspect.figures import COLOURS, png
from regard.inspect.tables import Table

from ..lib.language_output import DIVERGED, ONE_SEED, Gap, curve_figure, finals, finite_runs, seeds_note, spread
from .iclm_parity import EQUAL, KINDS, MAIN, TRANSFORMER, Outcome

Trials = Mapping[tuple[str, str], Mapping[float, float]]
Report = Mapping[str, Mapping[str, int | None]]
BAR = 0.05
"""Share of the Transformer's perplexity within which an ICLM has to be."""
NATS = 0.05
"""Nats by which the full ICLM may be above the Transformer on characters."""
SLIGHT = 0.05
"""Share of perplexity up to which a rise is called slight."""
SIMILAR = 0.25
"""Share up to which times and memory are called very similar."""
NO_COMPARISON = f"no comparison: a run {DIVERGED}"
PAPER_RATIOS = {
    "TinyStories, L = 8": 3.06 / 2.89,
    "GoodWiki, L = 12": 25.02 / 24.78,
    "SlimPajama, L = 24": 18.57 / 17.90,
}
"""Perplexity of the paper's ICLM over that of its Transformer (tables 1 and 2)."""
PAPER_MLP = {"iclm": 1.77 / 1.76, "transformer": 1.81 / 1.74}
"""Perplexity without over with feed-forward layers on TinyMath (table 3)."""


def perplexities(outcome: Outcome) -> list[float]:
    """On the held-out text at the end, one a seed; infinite after a loss that was not finite."""
    return [math.exp(loss) if math.isfinite(loss) else math.inf for loss in finals(outcome.runs)]


def mean_perplexity(outcome: Outcome) -> float:
    """Over the seeds."""
    return statistics.mean(perplexities(outcome))


def find(outcomes: Sequence[Outcome], shape: str, kind: str) -> Outcome | None:
    """That model, if it was trained."""
    return next((each for each in outcomes if (each.entry.shape, each.entry.kind) == (shape, kind)), None)


def rival(outcomes: Sequence[Outcome], outcome: Outcome) -> Outcome:
    """The Transformer that a model is compared to."""
    found = find(outcomes, outcome.entry.shape, KINDS[outcome.entry.kind].rival)
    assert found is not None  # the recipe has seen to it
    return found


def ratio(outcome: Outcome, other: Outcome) -> float:
    """Mean perplexity over that of another model."""
    return mean_perplexity(outcome) / mean_perplexity(other)


def percent(more: float) -> str:
    """A share with its sign."""
    return f"{more:+.1%}" if math.isfinite(more) else DIVERGED


def doubt(gap: Gap, bar: float) -> str:
    """What to add to a verdict on which side of a bar, in nats per token, a gap is: nothing beyond the seeds' noise."""
    if len(gap.each) < 2:
        return f", {ONE_SEED}"
    return "" if abs(gap.mean - bar) > gap.noise else ", undecided beyond the seeds' noise"


def slight(more: float, gap: Gap) -> str:
    """What is said of a share of perplexity more, and of the gap in nats behind it."""
    said = "lower" if more < 0 else "slight" if more <= SLIGHT else "not slight"
    return said + doubt(gap, 0.0 if more < 0 else math.log1p(SLIGHT))


def within(own: Outcome, base: Outcome) -> tuple[str, str]:
    """Whether a perplexity is within the bar of another's, and the doubt about it."""
    gap, more = Gap.between(own.runs, base.runs), ratio(own, base) - 1
    if not gap.finite:
        return NO_COMPARISON, ""
    if more < -BAR:
        return f"lower by more than {BAR:.0%}", doubt(gap, math.log1p(-BAR))
    return f"within {BAR:.0%}" if more <= BAR else f"not within {BAR:.0%}", doubt(gap, math.log1p(BAR))


def step_cpu(outcome: Outcome) -> float:
    """Seconds of the processor a step, the median over the seeds."""
    return statistics.median(run.step_cpu_seconds for run in outcome.runs)


def step_seconds(outcome: Outcome) -> float:
    """Seconds a step by the clock, the least over the seeds: what else the machine does only adds."""
    return min(run.step_seconds for run in outcome.runs)


def training_bytes(outcome: Outcome) -> float | None:
    """Bytes that training took beside what the process held before, the median over the seeds."""
    found = [
        run.peak_bytes - run.before_bytes
        for run in outcome.runs
        if run.peak_bytes is not None and run.before_bytes is not None
    ]
    return statistics.median(found) if found else None


# Tables ----------------------------------------------------------------------------------------------------------


def tables(outcomes: Sequence[Outcome], trials: Trials, parity: Report) -> dict[str, Table]:
    """Title to table, the results first."""
    found = {"ICLM and Transformer": results(outcomes, trials)}
    if trials:
        found["Learning rates tried"] = tried(outcomes, trials)
    return {**found, "Parameters at the paper's sizes": parity_table(parity)}


def results(outcomes: Sequence[Outcome], trials: Trials) -> Table:
    """A row for each model."""
    rows = []
    for each in outcomes:
        other = rival(outcomes, each)
        held = training_bytes(each)
        rows.append(
            (
                each.entry.kind if len(shapes(outcomes)) == 1 else each.entry.name,
                f"{each.entry.parameters:,}",
                "" if each is other else f"{each.entry.gap:+.2%}",
                f"{each.rate:g}",
                spread(perplexities(each), 3),
                spread(finals(each.runs), 3),
                "" if each is other else percent(ratio(each, other) - 1),
                f"{1000 * step_seconds(each):.0f}",
                f"{1000 * step_cpu(each):.0f}",
                "" if held is None else f"{held / 2**20:.0f}",
            )
        )
    header = (
        *("model", "parameters", "to rival", "rate", "perplexity", "nats/token", "perplexity to rival"),
        *("step ms", "CPU ms", "training MiB"),
    )
    origin = f"chosen for each family with {_first(outcomes)}" if trials else "given, not chosen for any"
    note = (
        f"{seeds_note(len(outcomes[0].runs))} Rival: the Transformer; of models without any feed-forward layer, the "
        f"one without. Rate: {origin}. Training MiB: the peak, less what was held before the model."
    )
    return Table(header, tuple(rows), note)


def _first(outcomes: Sequence[Outcome]) -> str:
    """The models that learning rates are chosen with: the first of each family."""
    first: dict[str, str] = {}
    for each in outcomes:
        first.setdefault(KINDS[each.entry.kind].family, each.entry.kind)
    return " and ".join(first.values())


def tried(outcomes: Sequence[Outcome], trials: Trials) -> Table:
    """A row for each family, a column for each rate."""
    taken = {(each.entry.shape, KINDS[each.entry.kind].family): each.rate for each in outcomes}
    rates = list(next(iter(trials.values())))
    rows = [
        (f"{key[0]} {key[1]}", *(f"{loss:.3f}" + " *" * (rate == taken[key]) for rate, loss in found.items()))
        for key, found in trials.items()
    ]
    edge = [f"{key[0]} {key[1]}" for key in trials if taken[key] in (min(rates), max(rates))]
    note = (
        f"Nats per token of {_first(outcomes)} on the start of the held-out text, which the results leave out; * is "
        f"the rate that all models of the family took, those without feed-forward layers as well. At the edge of the "
        f"grid, so that one beyond it may be better: {', '.join(edge) or 'none'}."
    )
    return Table(("family", *(f"{rate:g}" for rate in rates)), tuple(rows), note)


def parity_table(parity: Report) -> Table:
    """A row for each of the paper's sizes."""
    kinds = list(next(iter(parity.values())))
    rows = []
    for shape, found in parity.items():
        base = found[TRANSFORMER] or 1
        cells = []
        for kind in kinds:
            number = found[kind]
            gap = "" if kind == TRANSFORMER or number is None else f" ({number / base - 1:+.2%})"
            cells.append("cannot" if number is None else f"{number / 1e6:.2f}M{gap}")
        rows.append((shape, *cells))
    note = "Layers x width x heads, GPT-2's vocabulary, tied, counted; in brackets the difference to the Transformer."
    return Table(("size", *kinds), tuple(rows), note)


# Figures ---------------------------------------------------------------------------------------------------------


def figures(outcomes: Sequence[Outcome]) -> dict[str, bytes]:
    """File name to PNG."""
    return {"iclm-parity.png": dots(outcomes), "iclm-parity-curves.png": curves(outcomes)}


def shapes(outcomes: Sequence[Outcome]) -> list[str]:
    """In the order in which they were given."""
    return list(dict.fromkeys(each.entry.shape for each in outcomes))


def dots(outcomes: Sequence[Outcome]) -> bytes:
    """Perplexity of every seed, in the Transformer's band within which an ICLM has to be; a panel for each shape."""
    names = shapes(outcomes)
    figure = Figure(figsize=(7.5, 1.0 + 2.9 * len(names)), dpi=120, layout="constrained")
    for axes, shape in zip(figure.subplots(len(names), 1, squeeze=False)[:, 0], names, strict=True):
        own = [each for each in outcomes if each.entry.shape == shape]
        for place, each in enumerate(own):
            colour = COLOURS[0] if KINDS[each.entry.kind].family == "iclm" else COLOURS[1]
            values = [value for value in perplexities(each) if math.isfinite(value)]
            axes.scatter(values, [place] * len(values), color=colour, s=24, zorder=2)
            if len(values) == len(each.runs):
                axes.plot([mean_perplexity(each)] * 2, [place - 0.3, place + 0.3], color=colour, linewidth=1.5)
        base = find(outcomes, shape, TRANSFORMER)
        assert base is not None
        least = mean_perplexity(base)
        if math.isfinite(least):
            axes.axvspan(least * (1 - BAR), least * (1 + BAR), color="#eeeeee", zorder=0)
        labels = [f"{each.entry.kind}  {each.entry.parameters:,}" for each in own]
        axes.set_yticks(range(len(own)), labels)
        axes.invert_yaxis()
        axes.set(xlabel="held-out perplexity", title=f"{shape}: a dot for each seed, grey: Transformer ± {BAR:.0%}")
        axes.spines[["top", "right"]].set_visible(False)
    return png(figure)


def curves(outcomes: Sequence[Outcome]) -> bytes:
    """Losses on the way, a column for each shape."""
    columns = {
        shape: finite_runs({each.entry.kind: each.runs for each in outcomes if each.entry.shape == shape})
        for shape in shapes(outcomes)
    }
    return curve_figure(columns, "ICLM and Transformer on the same windows: the mean over the seeds, and their range")


# Verdicts --------------------------------------------------------------------------------------------------------


def notes(outcomes: Sequence[Outcome], parity: Report) -> tuple[str, ...]:
    """What the numbers say about each claim."""
    found = [within_note(outcomes, shape) for shape in shapes(outcomes)]
    found += [sentence for shape in shapes(outcomes) for sentence in shape_notes(outcomes, shape)]
    return (*found, *parity_notes(parity))


def shape_notes(outcomes: Sequence[Outcome], shape: str) -> Iterator[str]:
    """The verdicts at one shape."""
    base = find(outcomes, shape, TRANSFORMER)
    assert base is not None
    for kind in MAIN[1:]:
        own = find(outcomes, shape, kind)
        if own is not None:
            yield parity_note(own, base)
    full = find(outcomes, shape, "iclm-full")
    if full is not None:
        yield nats_note(full, base)
    yield from mlp_notes(outcomes, shape, base)
    wv = find(outcomes, shape, "iclm-wv")
    if wv is not None:
        yield cost_note(wv, base)


def parity_note(own: Outcome, base: Outcome) -> str:
    """Competitive with a Transformer of equal size (section 7, tables 1 and 2)?"""
    gap = Gap.between(own.runs, base.runs)
    size = "of equal size" if own.entry.equal else f"with {own.entry.gap:+.1%} parameters"
    if not gap.finite:
        return f"{own.entry.name} ({size}): {NO_COMPARISON}."
    lowest, highest = min(PAPER_RATIOS.values()) - 1, max(PAPER_RATIOS.values()) - 1
    return (
        f"{own.entry.name} ({size}): perplexity {spread(perplexities(own), 3)}, the Transformer's "
        f"{spread(perplexities(base), 3)}: {ratio(own, base) - 1:+.1%} ({gap} nats per token), "
        f"{''.join(within(own, base))}. The paper's ICLM is {lowest:.1%} to {highest:.1%} above."
    )


def within_note(outcomes: Sequence[Outcome], shape: str) -> str:
    """Which ICLM is within the bar of a Transformer's perplexity, and which is not; of those that are made to be of
    its size, or as the paper has them."""
    said: dict[str, list[str]] = {}
    for each in outcomes:
        if each.entry.shape == shape and each.entry.kind in (*MAIN[1:], "iclm-wv-no-mlp"):
            other = rival(outcomes, each)
            verdict, open_ = within(each, other)
            size = "equal size" if each.entry.equal else f"{each.entry.gap:+.1%} parameters"
            against = "" if other.entry.kind == TRANSFORMER else f", to {other.entry.kind}"
            more = percent(ratio(each, other) - 1)
            said.setdefault(verdict, []).append(f"{each.entry.kind} ({more}, {size}{against}{open_})")
    parts = "; ".join(f"{verdict}: {', '.join(found)}" for verdict, found in said.items())
    return f"{shape}, perplexity beside the Transformer's: {parts or 'no ICLM was trained'}."


def nats_note(full: Outcome, base: Outcome) -> str:
    """The full model within 0.05 nats, seed by seed."""
    gap = Gap.between(full.runs, base.runs)
    if not gap.finite:
        return f"{full.entry.name}, nats per token from the Transformer: {NO_COMPARISON}."
    verdict = "within" if gap.mean <= NATS else "not within"
    return (
        f"{full.entry.name} is {gap} nats per token from the Transformer: {verdict} +{NATS} nats{doubt(gap, NATS)}, "
        f"with {full.entry.gap:+.1%} parameters."
    )


def mlp_notes(outcomes: Sequence[Outcome], shape: str, base: Outcome) -> Iterator[str]:
    """ "Only a slight increase in perplexity" without feed-forward layers (section 7, table 3)?"""
    pairs = (
        ("iclm-wv", "iclm-wv-no-f-mlp", "f's feed-forward layers"),
        ("iclm-wv", "iclm-wv-no-phi-mlp", "phi's feed-forward layers"),
        ("iclm-wv", "iclm-wv-no-mlp", "all feed-forward layers"),
        (TRANSFORMER, "transformer-no-mlp", "all feed-forward layers"),
    )
    for with_, without, what in pairs:
        one, other = find(outcomes, shape, with_), find(outcomes, shape, without)
        if one is None or other is None:
            continue
        gap = Gap.between(other.runs, one.runs)
        if not gap.finite:
            yield f"{one.entry.name} without {what}: {NO_COMPARISON}."
            continue
        more, family = ratio(other, one) - 1, KINDS[with_].family
        paper = ""
        if without in ("iclm-wv-no-f-mlp", "transformer-no-mlp"):
            paper = f" The paper: {PAPER_MLP[family] - 1:+.1%} on TinyMath, called slight."
        yield (
            f"{one.entry.name} without {what}: perplexity {more:+.1%}, {slight(more, gap)} (up to {SLIGHT:.0%}), with "
            f"{other.entry.parameters / one.entry.parameters - 1:+.0%} parameters.{paper}"
        )


def cost_note(own: Outcome, base: Outcome) -> str:
    """ "Total size, memory footprint, and training time ... very similar" (section 7)?"""
    time = step_cpu(own) / step_cpu(base) - 1
    held = training_bytes(own), training_bytes(base)
    parts, gaps = [f"{time:+.0%} processor time a step"], [time]
    if held[0] is not None and held[1]:
        memory = held[0] / held[1] - 1
        parts.append(f"{memory:+.0%} memory in training")
        gaps.append(memory)
    similar = all(abs(gap) <= SIMILAR for gap in gaps)
    return (
        f"{own.entry.name} costs {' and '.join(parts)} beside the Transformer: {'' if similar else 'not '}very similar "
        f"(within {SIMILAR:.0%}), {'as' if similar else 'which'} the paper says of its own."
    )


def parity_notes(parity: Report) -> Iterator[str]:
    """Which of the models have the same number of parameters at the paper's sizes?"""
    gaps: dict[str, list[float]] = {}
    for found in parity.values():
        base = found[TRANSFORMER] or 1
        for kind, number in found.items():
            gaps.setdefault(kind, []).append(math.inf if number is None else number / base - 1)
    equal = [kind for kind, all_ in gaps.items() if kind != TRANSFORMER and all(abs(gap) <= EQUAL for gap in all_)]
    plain = gaps["iclm-full"]
    holds = "holds" if "iclm-full" in equal else "does not hold"
    yield (
        f"At the paper's sizes equal to the Transformer (within {EQUAL:.1%}): {', '.join(equal) or 'none'}. The full "
        f"model, without W_v and with a matrix P_h a head, has {min(plain):+.0%} to {max(plain):+.0%}: that the "
        f"removal of W_v leaves the same number of parameters {holds} for it."
    )


def data(outcomes: Sequence[Outcome], trials: Trials, parity: Report) -> dict[str, Any]:
    """Every number behind tables and figures, for JSON."""
    models = []
    for each in outcomes:
        names = ("shape", "kind", "parameters", "rival_parameters")
        numbers = {name: getattr(each.entry, name) for name in names}
        config = {name: getattr(each.entry.config, name) for name in KINDS[each.entry.kind].options}
        width = getattr(each.entry.config, each.entry.config.size_field)
        runs = [run.record() for run in each.runs]
        models.append(
            {**numbers, "options": config, each.entry.config.size_field: width, "rate": each.rate, "runs": runs}
        )
    losses_of = lambda found: {f"{rate:g}": loss if math.isfinite(loss) else None for rate, loss in found.items()}  # noqa: E731
    tried_ = [{"shape": s, "family": f, "held_out": losses_of(found)} for (s, f), found in trials.items()]
    return {"models": models, "trials": tried_, "paper_sizes": {shape: dict(found) for shape, found in parity.items()}}
