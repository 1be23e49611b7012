"""Tables and verdicts of the ICLM mechanisms recipe."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from regard.inspect.mechanisms import EPSILON
from regard.inspect.tables import Table

from ..lib.language_output import DIVERGED, ONE_SEED, Gap, spread
from ..lib.language_runs import LanguageRun
from .iclm_mechanisms import ICLM, NO_MLP, TRANSFORMER

DOMINATES = 0.5
"""Share of a layer's weight above which the token to come is said to dominate."""
FORMED, CHANCE = 0.8, 0.1
"""Induction score that the best head of f has to reach, and that no head may have before training."""
COPIES = 1.5
"""Lift above which weights are said to go to the token to come: half as much again as equal weights would give."""
EVEN = 1.25
"""Times the evenness of the others from which f is said to be significantly more balanced; from 1 on it is open."""
LUCK = 0.05
"""Chance below which a difference between shares of heads is no accident."""
STREAMS = {ICLM: ("phi", "f"), TRANSFORMER: ("transformer",)}
NO_COMPARISON = f"no comparison: a run {DIVERGED}"
SLIGHT = 0.05
"""Share of perplexity up to which a rise is called slight."""
PAPER_MLP = {"iclm": 1.77 / 1.76, "transformer": 1.81 / 1.74}
"""Perplexity without over with feed-forward layers on TinyMath (table 3)."""
EXPLAINED = (ICLM, NO_MLP[ICLM])
"""The models whose logits are taken apart."""
Head = dict[str, Any]


def slight(more: float, gap: Gap) -> str:
    """What is said of a share of perplexity more, and of the gap in nats behind it."""
    said = "lower" if more < 0 else "slight" if more <= SLIGHT else "not slight"
    if len(gap.each) < 2:
        return f"{said}, {ONE_SEED}"
    limit = 0.0 if more < 0 else math.log1p(SLIGHT)
    return said + ("" if abs(gap.mean - limit) > gap.noise else ", undecided beyond the seeds' noise")


@dataclass(frozen=True)
class Seen:
    """What the runs found.

    Attributes:
        text: models of text; blocks: models of repeated blocks.
    """

    text: Sequence[LanguageRun]
    blocks: Sequence[LanguageRun]

    def of(self, name: str) -> list[LanguageRun]:
        """The runs of a model of text."""
        return [run for run in self.text if run.name == name]

    def on_blocks(self, name: str) -> list[LanguageRun]:
        """The runs of a model of repeated blocks."""
        return [run for run in self.blocks if run.name == f"{name} on blocks"]

    def heads(self, name: str, stream: str) -> list[Head]:
        """Every head of a stream, of every seed, with its numbers."""
        return [
            {
                "layer": layer["layer"],
                "head": head,
                **{key: layer[key][head] for key in ("first", "strongest", "place", "even")},
                **{key: layer[key]["weight"][head] for key in ("predicted", "following")},
                **{f"{key} lift": layer[key]["lift"][head] for key in ("predicted", "following")},
                "uniform": layer["uniform"],
                "uniform predicted": layer["predicted"]["uniform"],
            }
            for run in self.of(name)
            for layer in run.extra["layers"]
            if layer["stream"] == stream
            for head in range(len(layer["first"]))
        ]

    def block_scores(self, name: str, stream: str, when: str) -> list[float]:
        """Induction scores of every head of a stream on blocks, `when` "before" or "after" training."""
        return [
            score
            for run in self.on_blocks(name)
            for layer in run.extra[when]["layers"]
            if layer["stream"] == stream
            for score in layer["score"]
        ]

    def prompts(self, name: str) -> list[dict[str, Any]]:
        """The prompts as a model saw them: those of text, then the blocks."""
        shown = [prompt for run in self.of(name) for prompt in run.extra["prompts"]]
        return shown + [run.extra["prompt"] for run in self.on_blocks(name)[:1]]


def title(stream: str) -> str:
    """How people name a stream."""
    return "Transformer" if stream == "transformer" else stream


def mean(heads: Sequence[Head], key: str) -> float:
    """Over heads."""
    return statistics.fmean(head[key] for head in heads)


def by_layer(heads: Sequence[Head]) -> dict[int, list[Head]]:
    """Layer to its heads."""
    return {layer: [h for h in heads if h["layer"] == layer] for layer in sorted({h["layer"] for h in heads})}


# Tables ----------------------------------------------------------------------------------------------------------


def tables(seen: Seen) -> dict[str, Table]:
    """Title to table."""
    found = {
        "Sinks": sink_table(seen),
        "Weight on the token to come": copy_table(seen),
        "Induction on repeated blocks": block_table(seen),
        "What is lost": loss_table(seen),
        "Heads of f as maps between tokens": eigen_table(seen),
    }
    return {**found, "Where a logit comes from": logit_table(seen)}


def _layers(seen: Seen) -> Iterator[tuple[str, list[Head]]]:
    for name, streams in STREAMS.items():
        for stream in streams:
            for layer, heads in by_layer(seen.heads(name, stream)).items():
                yield f"{title(stream)} {layer + 1}", heads


def sink_table(seen: Seen) -> Table:
    """A row for every layer of ICLM and Transformer."""
    rows = []
    for name, heads in _layers(seen):
        top = max(heads, key=lambda head: head["strongest"])
        rows.append(
            (
                name,
                f"{mean(heads, 'first'):.3f}",
                f"{max(head['first'] for head in heads):.3f}",
                f"{heads[0]['uniform']:.3f}",
                f"{sum(head['first'] > EPSILON for head in heads)} of {len(heads)}",
                f"{top['strongest']:.3f} in {top['place']}",
                f"{sum(head['strongest'] > EPSILON for head in heads)} of {len(heads)}",
                f"{mean(heads, 'even'):.2f}",
            )
        )
    header = ("layer", "column 0", "most", "equal weights", "sinks there", "strongest column", "sinks", "evenness")
    note = (
        f"Mean weights over rows and texts, over heads and seeds. Column 0: of phi the start token, of f the pair of "
        f"the first token, of the Transformer the first token. A sink has a mean weight above {EPSILON}. Evenness is 1 "
        f"for equal weights."
    )
    return Table(header, tuple(rows), note)


def copy_table(seen: Seen) -> Table:
    """A row for every layer of ICLM and Transformer."""
    rows = [
        (
            name,
            f"{mean(heads, 'predicted'):.3f}",
            f"{mean(heads, 'uniform predicted'):.3f}",
            f"{mean(heads, 'predicted lift'):.2f}",
            f"{max(head['predicted lift'] for head in heads):.2f}",
            f"{mean(heads, 'following lift'):.2f}",
            f"{max(head['following lift'] for head in heads):.2f}",
        )
        for name, heads in _layers(seen)
    ]
    header = ("layer", "on the predicted", "equal weights", "lift", "best head", "lift on the following", "best head")
    note = (
        "Mean weight on earlier occurrences of the token that the model predicts, where there are any, and that weight "
        "over the one that equal weights would give (lift); then the lift for the token that does follow."
    )
    return Table(header, tuple(rows), note)


def block_table(seen: Seen) -> Table:
    """A row for every stream."""
    rows = []
    for name, streams in STREAMS.items():
        runs = seen.on_blocks(name)
        right = [[run.extra[when]["accuracy"] for run in runs] for when in ("before", "after")]
        for stream in streams:
            before, after = (seen.block_scores(name, stream, when) for when in ("before", "after"))
            even = [x["uniform"] for run in runs for x in run.extra["after"]["layers"] if x["stream"] == stream]
            rows.append(
                (
                    f"{name}, {title(stream)}" if name == ICLM else name,
                    f"{max(before):.3f}",
                    ", ".join(f"{score:.3f}" for score in after),
                    f"{max(after):.3f}",
                    f"{even[0]:.3f}",
                    f"{statistics.fmean(right[0]):.1%}",
                    f"{statistics.fmean(right[1]):.1%}",
                )
            )
    header = ("stream", "best before", "heads after", "best after", "equal weights", "right before", "right after")
    note = (
        "Mean weight on the token one period before the one to come, for every head, layer by layer, seed by seed; "
        "and how often the model then predicts it. The Transformer has two layers, ICLM one of phi and one of f."
    )
    return Table(header, tuple(rows), note)


def loss_table(seen: Seen) -> Table:
    """A row for every model of text."""
    rows = []
    for name in dict.fromkeys(run.name for run in seen.text):
        runs = seen.of(name)
        costs = [_costs(run) for run in runs]
        even = "; ".join(
            f"{title(stream)} {statistics.fmean(cost['uniform'][stream] for cost in costs):+.3f}"
            for stream in costs[0]["uniform"]
        )
        worst = costs[0]["worst"]
        lens = [run.extra["lens"] for run in runs if "lens" in run.extra]
        ends = " ".join(f"{statistics.fmean(column):.3f}" for column in zip(*lens, strict=True))
        rows.append(
            (
                name,
                f"{runs[0].parameters:,}",
                spread([run.perplexity for run in runs], 3),
                even,
                f"{title(worst['stream'])} {worst['layer'] + 1}.{worst['head'] + 1} {worst['cost']:+.3f}",
                ends,
            )
        )
    header = ("model", "parameters", "perplexity", "equal weights in", "dearest head", "lens after each f block")
    note = "Nats per token more, on the windows looked at; the dearest head is the first seed's. Lens: nats per token."
    return Table(header, tuple(rows), note)


def _costs(run: LanguageRun) -> dict[str, Any]:
    """Of a run's ablations, what each costs in nats."""
    found = run.extra["ablations"]
    worst = max(found["heads"], key=lambda head: head["loss"])
    return {
        "uniform": {stream: loss - found["whole"] for stream, loss in found["uniform"].items()},
        "worst": {**worst, "cost": worst["loss"] - found["whole"]},
    }


def eigen_table(seen: Seen) -> Table:
    """A row for every f block."""
    rows = []
    for name in (ICLM, NO_MLP[ICLM]):
        runs = [run.extra["eigenvalues"] for run in seen.of(name)]
        for blocks in zip(*runs, strict=True):
            share = [x for block in blocks for x in block["share"]]
            balance = [x for block in blocks for x in block["balance"]]
            rows.append(
                (
                    f"{name}, f {blocks[0]['layer'] + 1}",
                    f"{statistics.fmean(share):.2f}",
                    f"{statistics.fmean(balance):+.2f}",
                    f"{min(balance):+.2f} to {max(balance):+.2f}",
                )
            )
    header = ("block", "positive eigenvalues", "balance", "heads")
    note = (
        "Of P_h W_e W_e^T: the share of eigenvalues with a positive real part, and their sum over the sum of their "
        "sizes; 1 is a head that raises every token it reads, 0 one that does not care."
    )
    return Table(header, tuple(rows), note)


def logit_table(seen: Seen) -> Table:
    """A row for every model and prompt."""
    rows = []
    for name in EXPLAINED:
        for place, prompt in enumerate(seen.prompts(name)):
            found = prompt["contributions"]
            attended, same = attention_parts(prompt)
            rows.append(
                (
                    f"{name}, {place + 1}",
                    f"{prompt['chance']:.2f}",
                    f"{found['logit']:.3f}",
                    f"{attended:.3f}",
                    f"{same:.3f}" if prompt["predicted"] in prompt["tokens"] else "not there",
                    f"{math.fsum(found['feed_forward']):.3f}",
                    f"{found['bias']:.3f}",
                    f"{found['missed']:.0e}",
                )
            )
    header = ("prompt", "chance", "logit", "context", "of it the same token", "feed-forward", "bias", "parts miss by")
    note = (
        "Prompts are windows of held-out text whose end has occurred in them before, where there are such, the first "
        "that do not overlap; the last of each model is one of repeated blocks, seen by the model of blocks."
    )
    return Table(header, tuple(rows), note)


def attention_parts(prompt: dict[str, Any]) -> tuple[float, float]:
    """What all context tokens add to the predicted token's logit, and what those of them add that are that token."""
    each = [math.fsum(layers) for layers in prompt["contributions"]["tokens"]]
    same = [part for token, part in zip(prompt["tokens"], each, strict=True) if token == prompt["predicted"]]
    return math.fsum(each), math.fsum(same)


# Verdicts --------------------------------------------------------------------------------------------------------


def notes(seen: Seen) -> tuple[str, ...]:
    """What the numbers say about each claim; of heads nothing after a training that diverged."""
    lost = [f"{run.name} (seed {run.seed})" for run in (*seen.text, *seen.blocks) if run.diverged]
    if lost:
        said = f"Nothing is said of heads, since the training of {', '.join(lost)} diverged: lower --learning-rate."
        return (said, *mlp_notes(seen))
    return (
        basis_note(seen),
        phi_note(seen),
        f_note(seen),
        place_note(seen),
        even_note(seen),
        *copy_notes(seen),
        induction_note(seen),
        *mlp_notes(seen),
        exact_note(seen),
        direct_note(seen),
    )


def basis_note(seen: Seen) -> str:
    """How many seeds and heads there are to judge by."""
    seeds = len(seen.of(ICLM))
    pairs = [(name, stream) for name, streams in STREAMS.items() for stream in streams]
    text = ", ".join(f"{title(stream)} {len(seen.heads(name, stream))}" for name, stream in pairs)
    blocks = ", ".join(f"{title(stream)} {len(seen.block_scores(name, stream, 'after'))}" for name, stream in pairs)
    few = " (no spread over seeds is known)" if seeds == 1 else ""
    return (
        f"What follows rests on {seeds} seed{'s' * (seeds > 1)}{few}. Heads that it is judged by: on text {text}; on "
        f"repeated blocks {blocks}."
    )


def _sunk(heads: Sequence[Head]) -> list[Head]:
    return [head for head in heads if head["strongest"] > EPSILON]


def _at_start(heads: Sequence[Head]) -> int:
    """How many have a sink in column 0, whether or not a stronger one elsewhere."""
    return sum(head["first"] > EPSILON for head in heads)


def phi_note(seen: Seen) -> str:
    """Sinks of phi: always at the start token, too?"""
    heads = seen.heads(ICLM, "phi")
    sunk = _sunk(heads)
    claim = 'The paper: sinks of phi "always manifest within (at least) the start token".'
    if not sunk:
        most = max(head["strongest"] for head in heads)
        return f"{claim} No head of phi has a sink here (the strongest mean weight is {most:.2f}): nothing to judge."
    verdict = "holds" if _at_start(sunk) == len(sunk) else "does not hold"
    return f"{claim} {len(sunk)} of {len(heads)} heads of phi have one, {_at_start(sunk)} of them there: {verdict}."


def f_note(seen: Seen) -> str:
    """Sinks of f: none?"""
    heads, phi = seen.heads(ICLM, "f"), _sunk(seen.heads(ICLM, "phi"))
    sunk = _sunk(heads)
    most = max(heads, key=lambda head: head["strongest"])
    verdict = "does not hold" if sunk else "holds" if phi else "not decided, since phi has none either"
    return (
        f"The paper: f has no sinks. {len(sunk)} of {len(heads)} heads of f have one (the strongest mean weight is "
        f"{most['strongest']:.2f}, on column {most['place']}): {verdict}."
    )


def place_note(seen: Seen) -> str:
    """Is the Transformer less consistent with the place of its sinks?"""
    phi, other = (_sunk(seen.heads(*which)) for which in ((ICLM, "phi"), (TRANSFORMER, "transformer")))
    claim = "The paper: the Transformer is less consistent with the place of its sinks."
    count = len(seen.heads(TRANSFORMER, "transformer"))
    if not phi or not other:
        return f"{claim} {len(other)} of its {count} heads have one, and {len(phi)} of phi's: nothing to compare."
    there = _at_start(other), _at_start(phi)
    shares = there[0] / len(other), there[1] / len(phi)
    luck = luck_of(there[0], len(other), there[1], len(phi))
    verdict = "does not hold" if shares[0] >= shares[1] else "holds" if luck < LUCK else "not decided"
    return (
        f"{claim} {len(other)} of its {count} heads have one, {shares[0]:.0%} of them at least at the first token; of "
        f"the {len(phi)} of phi {shares[1]:.0%} at the start token: {verdict} (as few by accident: {luck:.2f}, below "
        f"{LUCK} expected)."
    )


def luck_of(marked: int, count: int, others_marked: int, others: int) -> float:
    """Chance that of all marked heads as few or fewer are among `count`, if marks are dealt by lot (Fisher's exact
    test, one-sided)."""
    total = marked + others_marked
    ways = sum(math.comb(count, few) * math.comb(others, total - few) for few in range(marked + 1))
    return ways / math.comb(count + others, total)


def even_note(seen: Seen) -> str:
    """Is f more balanced, row by row and column by column?"""
    streams = [(name, stream) for name, own in STREAMS.items() for stream in own]
    said = []
    for what, key, power in (
        ("row by row (the effective share of what a row sees)", "even", 1),
        ("column by column (the mean weight of the strongest column, smaller is more balanced)", "strongest", -1),
    ):
        phi, f, other = (mean(seen.heads(*stream), key) for stream in streams)
        more = (f / phi) ** power
        verdict = "holds" if more > EVEN else "not decided" if more > 1 else "does not hold"
        said.append(f"{what} {f:.2f} in f, {phi:.2f} in phi and {other:.2f} in the Transformer: {verdict}")
    return (
        f'The paper: f, unlike phi, shows "significantly more balanced attention scores" ({EVEN} times expected): '
        f"{'; '.join(said)}."
    )


def copy_notes(seen: Seen) -> Iterator[str]:
    """Does f's weight on the token to come dominate, at most layers, and phi show nothing of it?"""
    f, phi = seen.heads(ICLM, "f"), seen.heads(ICLM, "phi")
    other = seen.heads(TRANSFORMER, "transformer")
    lifts = {name: mean(heads, "predicted lift") for name, heads in (("f", f), ("phi", phi), ("other", other))}
    copies = "holds" if lifts["f"] > COPIES and lifts["f"] > max(lifts["phi"], lifts["other"]) else "does not hold"
    yield (
        f"Heads of f copy: weight on earlier occurrences of the predicted token is {lifts['f']:.2f} times that of "
        f"equal weights (best head {max(h['predicted lift'] for h in f):.2f}), in the Transformer "
        f"{lifts['other']:.2f}: {copies} (above {COPIES} and above the others)."
    )
    shares = [mean(heads, "predicted") for heads in by_layer(f).values()]
    strong = sum(share > DOMINATES for share in shares)
    verdict = "holds" if 2 * strong > len(shares) else "does not hold"
    yield (
        f"The paper: where the token to come stands in the context, f's weight on it dominates, at most layers. The "
        f"mean weight of a layer is {', '.join(f'{share:.2f}' for share in shares)}, above {DOMINATES} in {strong} of "
        f"{len(shares)}: {verdict} on this text."
    )
    absent = "holds" if lifts["phi"] <= COPIES else "does not hold"
    yield f"The paper: phi shows nothing of it. Its lift is {lifts['phi']:.2f}: {absent} (up to {COPIES})."


def induction_note(seen: Seen) -> str:
    """Do induction heads form in f?"""
    before = max(seen.block_scores(ICLM, "f", "before"))
    best = [max(run_scores(run, "f")) for run in seen.on_blocks(ICLM)]
    other = max(seen.block_scores(TRANSFORMER, "transformer", "after"))
    verdict = "holds" if min(best) > FORMED and before < CHANCE else "does not hold"
    return (
        f"Induction heads form in f: on repeated blocks the best head of f scores {min(best):.2f} after training and "
        f"{before:.2f} before (above {FORMED} and below {CHANCE} expected): {verdict}. The Transformer's best, after "
        f"as many steps: {other:.2f}."
    )


def run_scores(run: LanguageRun, stream: str) -> list[float]:
    """Induction scores of a stream's heads after training."""
    return [score for layer in run.extra["after"]["layers"] if layer["stream"] == stream for score in layer["score"]]


def mlp_notes(seen: Seen) -> Iterator[str]:
    """What perplexity costs without feed-forward layers."""
    for name, what in ((ICLM, "f's feed-forward layers"), (TRANSFORMER, "feed-forward layers")):
        runs = seen.of(NO_MLP[name]), seen.of(name)
        without, with_ = (statistics.fmean(run.perplexity for run in own) for own in runs)
        if not math.isfinite(without / with_):
            yield f"Without {what} the perplexity of {name}: {NO_COMPARISON}."
            continue
        more = without / with_ - 1
        yield (
            f"Without {what} the perplexity of {name} goes from {with_:.3f} to {without:.3f}, {more:+.1%}: "
            f"{slight(more, Gap.between(*runs))} (up to {SLIGHT:.0%}). The paper: {PAPER_MLP[name] - 1:+.1%} on "
            f"TinyMath, called slight."
        )


def exact_note(seen: Seen) -> str:
    """Do the parts of a logit add up?"""
    missed = max(prompt["contributions"]["missed"] for name in EXPLAINED for prompt in seen.prompts(name))
    return (
        f"The predicted token's logit is the sum of what context tokens, feed-forward layers and bias add, to "
        f"{missed:.0e} at most."
    )


def direct_note(seen: Seen) -> str:
    """Does weight on a token's embedding mean a high probability of that token, directly?"""
    said = []
    for name in EXPLAINED:
        shown = [prompt for prompt in seen.prompts(name) if prompt["predicted"] in prompt["tokens"]]
        same = [attention_parts(prompt)[1] for prompt in shown]
        opaque = [math.fsum(prompt["contributions"]["feed_forward"]) for prompt in shown]
        more = sum(own > other for own, other in zip(same, opaque, strict=True))
        verdict = "holds" if 2 * more > len(shown) else "does not hold"
        parts = ", ".join(f"{own:.2f} and {other:.2f}" for own, other in zip(same, opaque, strict=True)) or "none"
        said.append(f"{name}: {parts} ({verdict})")
    return (
        "The paper: weight on a token's embedding in f corresponds directly to a high probability of that token. What "
        "the predicted token's earlier occurrences add to its logit, and what f's feed-forward layers add, prompt by "
        f"prompt: {'; '.join(said)}. It holds where the first is larger in most prompts, whose end has occurred before."
    )
