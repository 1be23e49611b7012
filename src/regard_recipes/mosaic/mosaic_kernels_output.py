"""Tables, figures and verdicts of the recipe `mosaic-kernels`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..lib.language_output import (
    GAP_NOTE,
    Gap,
    curve_figure,
    dot_figure,
    finals,
    finite_runs,
    order,
    rate_note,
    seeds_note,
    spread,
    verdict,
)
from ..lib.language_runs import LanguageRun
from .mosaic_kernels import DEFINED, HARD, Kind
from .mosaic_kernels import shown_k as shown_of
from .released_weightings import FORMS, RULES

Groups = Mapping[Kind, Sequence[LanguageRun]]
COMPACT = ("sparsemax", "biweight", "triweight")
BASELINES = ("softmax", "topk-softmax", "topk-uniform")
WEAK = ("topk-uniform", "normrelu")
"""What the paper finds worse at every depth."""
PRETTY = {"normrelu": "normalised ReLU", "relumax": "ReLUmax"}
TITLE = "Weightings in Memory Mosaics, same windows and seeds"


def depths(groups: Groups) -> list[int]:
    """The depths, in the order of the recipe."""
    return list(dict.fromkeys(kind.depth for kind in groups))


def at_depth(groups: Groups, depth: int) -> dict[str, Sequence[LanguageRun]]:
    """Label to runs."""
    return {kind.label: runs for kind, runs in groups.items() if kind.depth == depth}


def base(groups: Groups, depth: int) -> Sequence[LanguageRun]:
    """Softmax at a depth, to which all are compared."""
    return groups[Kind("softmax", depth)]


def shown_k(groups: Groups) -> int | None:
    """The k of comparisons: the paper's if it was trained."""
    ks = [kind.k for kind in groups if kind.k is not None]
    return shown_of(ks) if ks else None


def weighting(groups: Groups, name: str, depth: int) -> Sequence[LanguageRun]:
    """The runs of a weighting as it is defined, with the shown k; empty where it was not trained."""
    with_k = any(kind.weighting == name and kind.k is not None for kind in groups)
    return groups.get(Kind(name, depth, shown_k(groups) if with_k else None), ())


# Tables ----------------------------------------------------------------------------------------------------------


def tables(groups: Groups) -> dict[str, Any]:
    """Losses at every depth; released beside defined."""
    found = {f"Depth {depth}": losses(groups, depth) for depth in depths(groups)}
    if any(kind.form in FORMS for kind in groups):
        found["As released and as defined"] = released_table(groups)
    return found


def losses(groups: Groups, depth: int) -> Any:
    """A row for each weighting."""
    from regard.inspect.tables import Table

    rows = []
    softmax = base(groups, depth)
    for label, runs in at_depth(groups, depth).items():
        gap = "" if runs is softmax else str(Gap.between(runs, softmax))
        supports = [run.extra["support"] for run in runs if run.extra["support"] is not None]
        rows.append(
            (
                label,
                spread(finals(runs)),
                gap,
                spread([run.train[-1] for run in runs]),
                f"{statistics.fmean(supports):.1f}" if supports else "-",
                f"{statistics.fmean(run.extra['empty'] for run in runs):.2%}",
                f"{1e3 * statistics.median(run.step_cpu_seconds for run in runs):.1f} ms",
                f"{runs[0].parameters:,}",
            )
        )
    header = ("weighting", "held-out nats/token", "above softmax", "training", "support", "empty rows", "CPU, a step",
              "parameters")  # fmt: skip
    note = (
        f"{seeds_note(len(softmax))} {GAP_NOTE} Empty: rows in which no pair had weight by itself, the first "
        f"token's left out; support: pairs with weight."
    )
    return Table(header, tuple(rows), note)


def released_table(groups: Groups) -> Any:
    """What the programs computed less what the paper defines, and the two faults of the fast one apart."""
    from regard.inspect.tables import Table

    depth = depths(groups)[0]
    rows = []
    for rule in RULES:
        defined = groups.get(Kind(rule, depth))
        for form in FORMS:
            runs = groups.get(Kind(rule, depth, form=form))
            if runs is None or defined is None:
                continue
            gap = Gap.between(runs, defined)
            empty = statistics.fmean(run.extra["empty"] for run in runs)
            rows.append((PRETTY[rule], form, spread(finals(runs)), str(gap), gap.side, f"{empty:.2%}"))
    header = ("weighting", "form", "held-out nats/token", "above the defined form", "beyond noise", "empty rows")
    note = (
        f"Depth {depth}. fast: the paper's language models (no bandwidth, or an unlearned margin; one pair too many "
        f"hidden); mended: fast with the right mask; regular: the temperature taken twice. {GAP_NOTE}"
    )
    return Table(header, tuple(rows), note)


# Figures ---------------------------------------------------------------------------------------------------------


def figures(groups: Groups) -> dict[str, bytes]:
    """Curves by depth as in the paper's figure 3, and the losses at the end."""
    columns: dict[str, dict[str, Sequence[LanguageRun]]] = {}
    k = shown_k(groups)
    for depth in depths(groups):
        shown = {
            kind.label: runs
            for kind, runs in groups.items()
            if kind.depth == depth and kind.form == DEFINED and kind.k in (None, k)
        }
        columns[f"depth {depth}"] = finite_runs(shown)
    first = depths(groups)[0]
    faulty = {kind.label: runs for kind, runs in groups.items() if kind.weighting in RULES and kind.depth == first}
    rows: dict[str, dict[str, Sequence[LanguageRun]]] = {}
    for kind, runs in groups.items():
        rows.setdefault(kind.label, {})[f"depth {kind.depth}"] = runs
    found = {
        "mosaic-kernels-curves.png": curve_figure(columns, TITLE),
        "mosaic-kernels-final.png": dot_figure(rows, TITLE),
    }
    if any(kind.form in FORMS for kind in groups):
        found["mosaic-kernels-released.png"] = curve_figure(
            {f"as defined and as released, depth {first}": finite_runs(faulty)}, TITLE
        )
    return found


# Verdicts --------------------------------------------------------------------------------------------------------


def notes(groups: Groups, begun: Mapping[str, float], rates: Mapping[int, float]) -> tuple[str, ...]:
    """The paper's claims beside what was measured."""
    all_depths = depths(groups)
    found = [
        note for depth in all_depths for note in (biweight_and_softmax(groups, depth), compact_wins(groups, depth))
    ]
    found += [weak_ones(groups, depth) for depth in all_depths]
    found += [released_forms(groups), released_ranking(groups), straight_through(groups)]
    found += [empty_rows(groups, begun), step_times(groups), rate_note(rates)]
    return tuple(note for note in found if note)


def biweight_and_softmax(groups: Groups, depth: int) -> str:
    """Biweight no worse than softmax beyond the noise of the seeds."""
    runs = weighting(groups, "biweight", depth)
    if not runs:
        return ""
    gap = Gap.between(runs, base(groups, depth))
    verdicts = {"lower": "holds, it is better", "level": "holds, they are level", "higher": "does not hold here"}
    found = verdicts.get(gap.side, f"not decided ({gap.side})")
    return f"Depth {depth}, biweight no worse than softmax beyond seed noise: {found}; {gap} nats/token."


def compact_wins(groups: Groups, depth: int) -> str:
    """The paper: sparsemax, biweight and triweight below the Gaussian and the nearest-key baselines."""
    gaps = {
        (name, other): Gap.between(runs, against)
        for name in COMPACT
        if (runs := weighting(groups, name, depth))
        for other in BASELINES
        if (against := weighting(groups, other, depth))
    }
    if not gaps:
        return ""
    sides = [gap.side for gap in gaps.values()]
    counts = ", ".join(f"{sides.count(side)} {side}" for side in dict.fromkeys(sides))
    told = "; ".join(f"{name} to {other} {gap}" for (name, other), gap in gaps.items())
    found = verdict([*gaps.values()], "lower")
    return (
        f'Depth {depth}, "compact kernels below softmax and nearest keys": {found} (of {len(gaps)} gaps {counts}): '
        f"{told}."
    )


def weak_ones(groups: Groups, depth: int) -> str:
    """The paper: uniform nearest keys and normalised ReLU are worse."""
    gaps = {name: Gap.between(runs, base(groups, depth)) for name in WEAK if (runs := weighting(groups, name, depth))}
    hard = groups.get(Kind("topk-uniform", depth, shown_k(groups), HARD))
    if hard:
        gaps[f"topk-uniform, {HARD}"] = Gap.between(hard, base(groups, depth))
    if not gaps:
        return ""
    told = "; ".join(f"{name} {gap} ({gap.side})" for name, gap in gaps.items())
    found = verdict([*gaps.values()], "higher")
    return f'Depth {depth}, "uniform nearest keys and normalised ReLU are worse than softmax": {found}: {told}.'


def released_forms(groups: Groups) -> str:
    """What the faults of the released programs cost, one by one."""
    depth = depths(groups)[0]
    parts = []
    for rule in RULES:
        forms = {form: groups.get(Kind(rule, depth, form=form)) for form in (DEFINED, *FORMS)}
        defined, fast, mended = forms[DEFINED], forms["fast"], forms["mended"]
        told = []
        if fast and defined:
            gap = Gap.between(fast, defined)
            told.append(f"fast {gap} ({gap.side})")
        if fast and mended and defined:
            scale, mask = Gap.between(mended, defined), Gap.between(fast, mended)
            told.append(f"of which the scale {scale} ({scale.side}) and the mask {mask} ({mask.side})")
        if forms["regular"] and defined:
            gap = Gap.between(forms["regular"], defined)
            told.append(f"regular {gap} ({gap.side})")
        if told:
            parts.append(f"{PRETTY[rule]}: {', '.join(told)}")
    return f"Released less defined, depth {depth}, in nats/token: {'; '.join(parts)}." if parts else ""


def released_ranking(groups: Groups) -> str:
    """Whether the faults change who wins: ReLUmax against sparsemax, normalised ReLU against softmax."""
    depth = depths(groups)[0]
    parts = []
    for rule, other in (("relumax", "sparsemax"), ("normrelu", "softmax")):
        against = weighting(groups, other, depth)
        pair = [(form, groups.get(Kind(rule, depth, form=form))) for form in ("fast", DEFINED)]
        gaps = {form: Gap.between(runs, against) for form, runs in pair if runs and against}
        if len(gaps) == 2:
            told = ", ".join(f"{form} {gap} ({gap.side})" for form, gap in gaps.items())
            parts.append(f"{PRETTY[rule]} to {other}: {told}, {order(gaps['fast'], gaps[DEFINED])}")
    return f"Do the faults of the fast program change the paper's ranking? {'; '.join(parts)}." if parts else ""


def straight_through(groups: Groups) -> str:
    """Uniform nearest keys with a gradient and without."""
    depth = depths(groups)[0]
    gaps = {
        kind.k: Gap.between(groups[Kind("topk-uniform", depth, kind.k)], runs)
        for kind, runs in groups.items()
        if (kind.depth, kind.form) == (depth, HARD)
    }
    if not gaps:
        return ""
    told = "; ".join(f"k = {k} {gap} ({gap.side})" for k, gap in gaps.items())
    return f"Uniform nearest keys, a straight-through gradient to keys less none, as released: {told}."


def empty_rows(groups: Groups, begun: Mapping[str, float]) -> str:
    """How often the fixed bandwidth finds nothing."""
    parts = []
    for kind, runs in groups.items():
        if kind.weighting == "normrelu" and kind.form == DEFINED:
            share = statistics.fmean(run.extra["empty"] for run in runs)
            widths = [h for run in runs for block in run.extra["h"] for h in block]
            parts.append(
                f"depth {kind.depth} {begun[kind.name]:.2%} at the start and {share:.2%} after training (h from "
                f"{min(widths):.2f} to {max(widths):.2f})"
            )
    return f"Empty rows of the fixed bandwidth: {'; '.join(parts)}." if parts else ""


def step_times(groups: Groups) -> str:
    """A training step of every weighting in units of softmax's."""
    depth = depths(groups)[0]
    seconds = {
        kind.label: statistics.median(run.step_cpu_seconds for run in runs)
        for kind, runs in groups.items()
        if kind.depth == depth and kind.form == DEFINED
    }
    told = ", ".join(f"{label} {own / seconds['softmax']:.2f}" for label, own in seconds.items() if label != "softmax")
    return f"A training step in units of softmax's (processor time, depth {depth}): {told}." if told else ""
