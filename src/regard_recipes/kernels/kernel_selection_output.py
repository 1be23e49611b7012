"""Tables, figures and verdicts of the recipe `kernel-selection`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..lib.language_output import (
    DIVERGED,
    GAP_NOTE,
    Gap,
    curve_figure,
    dot_figure,
    finals,
    finite_runs,
    rate_note,
    seeds_note,
    spread,
)
from ..lib.language_runs import LanguageRun
from .kernel_selection import CACHED, MEAN, Kind, own_form

Groups = Mapping[Kind, Sequence[LanguageRun]]
NORMALISED, PLAIN = "normalised", "not normalised"
SHARED, EARLIER = "q = k", "q = k, earlier tokens only"
RISE = 0.05
"""Nats per token by which a training loss may rise from one look to the next and still count as falling steadily: two
looks read different windows, of which some are harder for all."""
STEADY = f"Falls steadily: lower at the end than at the first look, and at no look over {RISE:g} above the one before"
TITLE = "Kernels of Table 1 in equal models, same windows and seeds"


def select(groups: Groups, **wanted: bool) -> dict[str, Sequence[LanguageRun]]:
    """Kernel to its runs of one kind; `MEAN` left out."""
    plain = {"shared": False, "earlier": False} | wanted
    return {
        kind.kernel: runs
        for kind, runs in groups.items()
        if kind.kernel != MEAN and all(getattr(kind, name) == value for name, value in plain.items())
    }


def converges(runs: Sequence[LanguageRun]) -> bool:
    """A steady reduction of the training loss, as the paper puts it, in every seed: finite, lower at the end than at
    the first look, and never up by more than `RISE`."""
    return all(
        not run.diverged
        and run.train[-1] <= run.train[0]
        and all(b <= a + RISE for a, b in zip(run.train, run.train[1:], strict=False))
        for run in runs
    )


# Tables ----------------------------------------------------------------------------------------------------------


def tables(groups: Groups) -> dict[str, Any]:
    """Losses, then what q = k changes."""
    return {"Kernels": losses(groups), "One vector for query and key": sharing(groups)}


def losses(groups: Groups) -> Any:
    """A row for each kernel, normalised and not."""
    from regard.inspect.tables import Table

    base = exponential(groups)
    rows = []
    for kind, runs in groups.items():
        if kind.shared:
            continue
        rows.append(
            (
                kind.kernel,
                "-" if kind.kernel == MEAN else NORMALISED if kind.normalised else PLAIN,
                spread(finals(runs)),
                "" if runs is base else str(Gap.between(runs, base)),
                spread([run.train[-1] for run in runs]),
                "yes" if converges(runs) else "no",
                f"{1e3 * statistics.median(run.step_cpu_seconds for run in runs):.1f} ms",
            )
        )
    header = (
        "kernel",
        "weights",
        "held-out nats/char",
        "above exponential",
        "training",
        "falls steadily",
        "CPU, a step",
    )
    return Table(header, tuple(rows), f"{seeds_note(len(base))} {GAP_NOTE} {STEADY}.")


def exponential(groups: Groups) -> Sequence[LanguageRun]:
    """The runs that all are compared to."""
    return groups[Kind("exponential", True)]


def sharing(groups: Groups) -> Any:
    """A row for each kernel: q = k less q and k apart, and the memory of both."""
    from regard.inspect.tables import Table

    strict = select(groups, shared=True, earlier=True)
    rows = []
    for kernel, runs in select(groups, shared=True).items():
        apart = groups[Kind(kernel, own_form(kernel))]
        one, two = runs[0].extra, apart[0].extra
        rows.append(
            (
                kernel,
                NORMALISED if own_form(kernel) else PLAIN,
                str(Gap.between(runs, apart)),
                str(Gap.between(strict[kernel], apart)) if kernel in strict else "",
                f"{_kib(two['query_key_bytes'])} to {_kib(one['query_key_bytes'])}",
                f"{_kib(two['kept_bytes'])} to {_kib(one['kept_bytes'])}",
                f"{_kib(two['cache_bytes'])} to {_kib(one['cache_bytes'])}",
            )
        )
    header = (
        "kernel",
        "weights",
        "cost of q = k",
        "on earlier tokens only",
        "q + k, a step",
        "kept for backward",
        "cache",
    )
    return Table(header, tuple(rows), f"Nats/char. Cache: after {CACHED} tokens of one sequence. {GAP_NOTE}")


def _kib(count: int) -> str:
    return f"{count / 1024:,.0f} KiB"


# Figures ---------------------------------------------------------------------------------------------------------


def figures(groups: Groups) -> dict[str, bytes]:
    """Curves, and the losses at the end."""
    bar = {MEAN: groups[Kind(MEAN, True)]}
    columns = {
        "weights normalised": {**select(groups, normalised=True), **bar},
        "not normalised": {**select(groups, normalised=False), **bar},
        "q = k": {**select(groups, shared=True), **bar},
    }
    rows: dict[str, dict[str, Sequence[LanguageRun]]] = {MEAN: {NORMALISED: bar[MEAN]}}
    for kind, runs in groups.items():
        if kind.kernel != MEAN:
            label = EARLIER if kind.earlier else SHARED if kind.shared else NORMALISED if kind.normalised else PLAIN
            rows.setdefault(kind.kernel, {})[label] = runs
    shown = {
        kernel: {label: row[label] for label in (NORMALISED, PLAIN, SHARED, EARLIER) if label in row}
        for kernel, row in rows.items()
    }
    return {
        "kernel-selection-curves.png": curve_figure({name: finite_runs(g) for name, g in columns.items()}, TITLE),
        "kernel-selection-final.png": dot_figure(shown, TITLE),
    }


# Verdicts --------------------------------------------------------------------------------------------------------


def notes(groups: Groups, bigram: float, refused: Mapping[str, str], rate: float) -> tuple[str, ...]:
    """The paper's claims beside what was measured."""
    found = [all_converge(groups), what_it_is_worth(groups, bigram), linear_suffices(groups, bigram)]
    found += [rbf_beats_exponential(groups), clipped_converges(groups), *shared_costs(groups)]
    count = sum(not kind.shared and kind.kernel != MEAN for kind in groups)
    said = f"The grammar has {count} of these {count + len(refused)} as sentences"
    found.append(said + ("." if not refused else f"; refused: {'; '.join(f'{n} ({w})' for n, w in refused.items())}."))
    found.append(rate_note(rate))
    return tuple(note for note in found if note)


def all_converge(groups: Groups) -> str:
    """The claim about the training loss, kernel by kernel."""
    plain = {kind: runs for kind, runs in groups.items() if not kind.shared and kind.kernel != MEAN}
    failed = [kind.name for kind, runs in plain.items() if not converges(runs)]
    verdict = "holds" if not failed else "does not hold here"
    why = f"; not for {'; '.join(failed)}" if failed else ""
    return (
        f'"All tested kernels converge" (a steady reduction of the training loss, in which a look may be '
        f"up to {RISE:g} above the one before): {verdict}, "
        f"{len(plain) - len(failed)} of {len(plain)} forms do{why}."
    )


def what_it_is_worth(groups: Groups, bigram: float) -> str:
    """How many kernels use more than the last character, and more than the mean of the past."""
    bar = statistics.fmean(finals(groups[Kind(MEAN, True)]))
    plain = {kind.name: finals(runs) for kind, runs in groups.items() if not kind.shared and kind.kernel != MEAN}
    mean = {name: statistics.fmean(losses) for name, losses in plain.items() if all(map(math.isfinite, losses))}
    over = {limit: [name for name in plain if not mean.get(name, math.inf) < limit] for limit in (bigram, bar)}
    above = f"; not below it: {'; '.join(over[bar])}" if over[bar] else ""
    return (
        f"What converging is worth: a bigram model has {bigram:.4f} nats/char on the held-out text, equal weights on "
        f"the whole past {bar:.4f}. {len(plain) - len(over[bigram])} of {len(plain)} forms are below the bigram model, "
        f"{len(plain) - len(over[bar])} below equal weights{above}."
    )


def linear_suffices(groups: Groups, bigram: float) -> str:
    """The linear kernel without normalisation."""
    runs = groups.get(Kind("linear", False))
    if runs is None:
        return ""
    to_exponential, to_mean = Gap.between(runs, exponential(groups)), Gap.between(runs, groups[Kind(MEAN, True)])
    verdict = "does not hold here"
    if converges(runs) and all(loss < bigram for loss in finals(runs)) and to_mean.side != "higher":
        verdict = "holds" if to_mean.side == "lower" else f"not decided ({to_mean.side})"
    rest = ""
    if Kind("linear", True) in groups:
        other = groups[Kind("linear", True)]
        gap = Gap.between(other, runs)
        rest = f" Dividing by its signed sum: {gap if gap.finite else DIVERGED} ({gap.side})."
    return (
        f'"The linear kernel suffices without normalisation" (it converges, below the bigram model and equal weights): '
        f"{verdict}. Its loss is {spread(finals(runs))}, {to_mean} from equal weights ({to_mean.side}) and "
        f"{to_exponential} from the exponential kernel ({to_exponential.side}).{rest}"
    )


def rbf_beats_exponential(groups: Groups) -> str:
    """The claim of a marginal improvement."""
    runs = groups.get(Kind("rbf", True))
    if runs is None:
        return ""
    gap = Gap.between(runs, exponential(groups))
    verdicts = {
        "lower": "holds",
        "higher": "does not hold here: it is worse",
        "level": "not seen: level within the seeds",
    }
    verdict = verdicts.get(gap.side, f"not decided ({gap.side})")
    return f'"RBF is marginally better than the exponential kernel": {verdict}; its loss is {gap} nats/char from it.'


def clipped_converges(groups: Groups) -> str:
    """The claim about normalised weights."""
    runs = groups.get(Kind("clipped-geometric", True))
    if runs is None:
        return ""
    gap, to_mean = Gap.between(runs, exponential(groups)), Gap.between(runs, groups[Kind(MEAN, True)])
    return (
        f'"The clipped geometric series converges with normalised weights": '
        f"{'holds' if converges(runs) else 'does not hold here'}, {spread(finals(runs))} nats/char, {gap} from the "
        f"exponential kernel ({gap.side}) and {to_mean} from equal weights on the whole past ({to_mean.side})."
    )


def shared_costs(groups: Groups) -> list[str]:
    """The claims about q = k: it converges, it halves memory; what it costs, on earlier tokens only too."""
    shared = select(groups, shared=True)
    if not shared:
        return []
    apart = {kernel: groups[Kind(kernel, own_form(kernel))] for kernel in shared}
    failed = [kernel for kernel, runs in shared.items() if not converges(runs)]
    one, two = shared["exponential"][0].extra, apart["exponential"][0].extra
    saved, whole = (1 - one[name] / two[name] for name in ("query_key_bytes", "kept_bytes"))
    same = all(runs[0].extra["cache_bytes"] == apart[kernel][0].extra["cache_bytes"] for kernel, runs in shared.items())
    gaps = {kernel: Gap.between(runs, apart[kernel]) for kernel, runs in shared.items()}
    verdict = f"does not hold here for {', '.join(failed)}" if failed else "holds"
    sides = "; ".join(f"{kernel} {gap} ({gap.side})" for kernel, gap in gaps.items())
    found = [
        f'"Models converge with q = k": {verdict}. Cost in nats/char: {sides}.',
        f'"q = k halves the memory of the two": {saved:.0%} of the activations of queries and keys in a training step, '
        f"{whole:.0%} of all that its backward pass keeps; the cache of decoding, which never held queries, "
        f"{'stays as it is' if same else 'changes'}.",
    ]
    strict = select(groups, shared=True, earlier=True)
    if strict:
        gains = {kernel: Gap.between(runs, shared[kernel]) for kernel, runs in strict.items()}
        told = "; ".join(f"{kernel} {gap} ({gap.side})" for kernel, gap in gains.items())
        found.append(f"With q = k a token is most like itself. Seeing earlier tokens only changes: {told}.")
    return found
