"""Figures of the ICLM mechanisms recipe: sinks, induction scores, maps of prompts, and the sources of a logit.

Rows and columns of a map are labelled by their role: what a row predicts, and what a column stands for. In f a column
is a pair of a context and the token that followed it, and carries that token; in phi and in the Transformer it is a
position, and carries the token there (column 0 of phi: the start token).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from regard.inspect.figures import COLOURS, png, visible
from regard.inspect.mechanisms import EPSILON, ROLES

from .iclm_mechanisms import BLOCKS, ICLM, TRANSFORMER
from .iclm_mechanisms_output import EXPLAINED, STREAMS, Seen, title

START = "start"
COLUMN = {
    "phi": "token of the position",
    "f": "token that followed the context",
    "transformer": "token of the position",
}
"""What the columns of a stream's maps carry."""


def figures(seen: Seen, words: Mapping[int, str]) -> dict[str, bytes]:
    """File name to PNG.

    Args:
        words: the text of every token of the prompts; tokens of blocks are numbers.
    """
    found = {"iclm-mechanisms-sinks.png": sinks(seen), "iclm-mechanisms-induction.png": induction(seen)}
    own, other = seen.prompts(ICLM), seen.prompts(TRANSFORMER)
    explained = [seen.prompts(name) for name in EXPLAINED]
    for place, (prompt, beside) in enumerate(zip(own, other, strict=True)):
        blocks = place == len(own) - 1
        name = "blocks" if blocks else f"prompt-{place + 1}"
        known = {token: str(token) for token in range(BLOCKS["vocabulary"])} if blocks else words
        found[f"iclm-mechanisms-{name}.png"] = maps(prompt, beside, known)
        apart = {model: prompts[place] for model, prompts in zip(EXPLAINED, explained, strict=True)}
        found[f"iclm-mechanisms-{name}-logit.png"] = sources(apart, known)
    return found


def sinks(seen: Seen) -> bytes:
    """The mean weight of column 0 and of the strongest column, a dot for every head and seed."""
    figure = Figure(figsize=(8.5, 3.6), dpi=120, layout="constrained")
    panels: Any = figure.subplots(1, 3, sharey=True)
    streams = [(name, stream) for name, own in STREAMS.items() for stream in own]
    for axes, (name, stream) in zip(panels, streams, strict=True):
        heads = seen.heads(name, stream)
        layers = np.array([head["layer"] + 1 for head in heads])
        for key, colour, shift, label in (
            ("first", COLOURS[0], -0.12, "column 0"),
            ("strongest", COLOURS[1], 0.12, "any"),
        ):
            axes.scatter(layers + shift, [head[key] for head in heads], s=16, color=colour, alpha=0.7, label=label)
        axes.axhline(EPSILON, color="#999999", linestyle="--", linewidth=1)
        axes.axhline(heads[0]["uniform"], color="#999999", linestyle=":", linewidth=1)
        axes.set(xlabel="layer", title=title(stream), ylim=(0, 1), xticks=sorted(set(layers.tolist())))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("mean weight")
    panels[0].legend(frameon=False, fontsize=8)
    figure.suptitle("Sinks: a dot for each head; dashed the bar, dotted equal weights", fontsize=10)
    return png(figure)


def induction(seen: Seen) -> bytes:
    """Induction scores on repeated blocks before and after training, and the loss on the way."""
    figure = Figure(figsize=(8.5, 3.4), dpi=120, layout="constrained")
    left, right = figure.subplots(1, 2)
    streams = [(name, stream) for name, own in STREAMS.items() for stream in own]
    for when, colour, shift in (("before", COLOURS[0], -0.12), ("after", COLOURS[1], 0.12)):
        for place, (name, stream) in enumerate(streams):
            scores = seen.block_scores(name, stream, when)
            left.scatter([place + shift] * len(scores), scores, s=18, color=colour, alpha=0.8)
        left.scatter([], [], s=18, color=colour, label=f"{when} training")
    left.set_xticks(range(len(streams)), [title(stream) for _, stream in streams])
    left.set(ylabel="induction score, each head", ylim=(-0.03, 1.03))
    for colour, name in zip(COLOURS, STREAMS, strict=False):
        for run in seen.on_blocks(name):
            right.plot(run.steps, run.held_out, color=colour, marker=".")
        right.plot([], [], color=colour, label=name)
    right.set(xlabel="optimiser step", ylabel="held-out nats per token", title="repeated blocks")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    return png(figure)


def maps(prompt: Mapping[str, Any], beside: Mapping[str, Any], words: Mapping[int, str]) -> bytes:
    """The weights halfway through phi, f and the Transformer on one prompt, the mean over the heads."""
    figure = Figure(figsize=(19.0, 7.6), dpi=110, layout="constrained")
    panels: Any = figure.subplots(1, 3)
    shown = [("phi", prompt), ("f", prompt), ("transformer", beside)]
    for axes, (stream, found) in zip(panels, shown, strict=True):
        image = _map(axes, stream, found, words)
        figure.colorbar(
            image, ax=axes, location="bottom", shrink=0.6, aspect=40, pad=0.01, label="weight, mean of heads"
        )
    said = f"ICLM predicts {visible(words[prompt['predicted']])!r}"
    said += f", the Transformer {visible(words[beside['predicted']])!r}"
    figure.suptitle(f"Halfway through each stream. Next token: {said}", fontsize=11)
    return png(figure)


def _map(axes: Axes, stream: str, found: Mapping[str, Any], words: Mapping[int, str]) -> Any:
    """One heatmap with the tokens that rows predict and columns carry; it is returned."""
    own = found["maps"][stream]
    weights = np.array(own["weights"])
    hidden = np.triu(np.ones_like(weights, dtype=bool), 1)
    image = axes.imshow(
        np.ma.masked_where(hidden, weights), cmap="Blues", norm=PowerNorm(0.5, 0, 1), interpolation="nearest"
    )
    rows, columns = labels(stream, found["tokens"], found["predicted"], weights.shape, words)
    style: Any = {"fontsize": 6, "family": "monospace"}
    axes.set_xticks(range(len(columns)), columns, rotation=90 if max(map(len, columns)) > 1 else 0, **style)
    axes.set_yticks(range(len(rows)), rows, **style)
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.set_xlabel(COLUMN[stream])
    axes.xaxis.set_label_position("top")
    axes.set_ylabel("token that the row predicts (last: the model's)")
    axes.set_title(f"{title(stream)}, layer {own['layer'] + 1} of {own['layers']}", fontsize=10, y=-0.05)
    return image


def labels(
    stream: str, tokens: Sequence[int], predicted: int, shape: tuple[int, ...], words: Mapping[int, str]
) -> tuple[list[str], list[str]]:
    """What the rows and columns of a map stand for: the token each row predicts (of the last one the model's own
    prediction, marked) and the token each column carries."""
    roles = ROLES[stream]
    said = [visible(words[token]) for token in tokens]
    after = [*said, f"{visible(words[predicted])} ?"]
    rows = [after[roles.predicts + row] for row in range(shape[0])]
    columns = [said[place] if (place := roles.holds + column) >= 0 else START for column in range(shape[1])]
    return rows, columns


def sources(prompts: Mapping[str, Mapping[str, Any]], words: Mapping[int, str]) -> bytes:
    """What each context token adds to the logit of the predicted token, layer upon layer, a panel for each model; the
    predicted token's earlier occurrences are marked."""
    figure = Figure(figsize=(11.0, 3.3 * len(prompts)), dpi=110, layout="constrained")
    panels: Any = figure.subplots(len(prompts), 1, squeeze=False)
    for axes, (name, prompt) in zip(panels[:, 0], prompts.items(), strict=True):
        _bars(axes, np.array(prompt["contributions"]["tokens"]))
        for place, token in enumerate(prompt["tokens"]):
            if token == prompt["predicted"]:
                axes.axvspan(place - 0.5, place + 0.5, color="#eeeeee", zorder=0)
        said = [visible(words[token]) for token in prompt["tokens"]]
        style: Any = {"fontsize": 7, "family": "monospace"}
        axes.set_xticks(range(len(said)), said, rotation=90 if max(map(len, said)) > 1 else 0, **style)
        found = prompt["contributions"]
        context, opaque = sum(map(sum, found["tokens"])), sum(found["feed_forward"])
        axes.set(
            xlabel="context token (grey: the predicted token)",
            ylabel="added to the logit",
            title=f"{name} predicts {visible(words[prompt['predicted']])!r} with chance {prompt['chance']:.2f}: logit "
            f"{found['logit']:.2f} = context {context:.2f} + feed-forward {opaque:.2f} + bias {found['bias']:.2f}",
        )
    return png(figure)


def _bars(axes: Axes, parts: np.ndarray) -> None:
    """Parts [T, L]: what is added upwards, what is taken away downwards, a colour for each layer."""
    places = np.arange(len(parts))
    ends = {1: np.zeros(len(parts)), -1: np.zeros(len(parts))}
    for layer, own in enumerate(parts.T):
        colour = COLOURS[layer % len(COLOURS)]
        for sign, end in ends.items():
            size = np.where(sign * own > 0, own, 0)
            axes.bar(places, size, bottom=end, color=colour, label=f"f block {layer + 1}" if sign > 0 else None)
            end += size
    axes.axhline(0, color="#333333", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=4)
