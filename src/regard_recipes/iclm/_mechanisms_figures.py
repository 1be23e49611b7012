"""Draw a prompt: the maps of its heads and the sources of its logit; part of the recipe iclm-mechanisms.

In a map of f a column is a pair of a context and the token that followed it, and carries that token; in phi and in the
Transformer it is a position, and carries the token there (column 0 of phi: the start token).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from regard.inspect.figures import COLOURS, png
from regard.inspect.mechanisms import ROLES
from regard.inspect.tables import visible

START = "start"


def prompt_figure(prompts: Mapping[str, Mapping[str, Any]], explained: Sequence[str]) -> bytes:
    """Draw one prompt, by model its row of kind "prompt": above, the weights in the middle layer of each stream; below,
    what each context token adds to the logit of the predicted token, a panel for each model of `explained`."""
    iclm, transformer = prompts[explained[0]], prompts["transformer"]
    heights = (6.8, 2.8 * len(explained))
    figure = Figure(figsize=(17.0, sum(heights)), dpi=90, layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=heights)
    above, below = parts
    shown = {"phi": iclm, "f": iclm, "transformer": transformer}
    bar = {"location": "bottom", "shrink": 0.6, "aspect": 40, "pad": 0.01, "label": "weight, mean of heads"}
    for axes, (stream, prompt) in zip(above.subplots(1, 3), shown.items(), strict=True):
        above.colorbar(_map(axes, stream, prompt), ax=axes, **bar)
    words = [visible(each["predicted_word"]) for each in (iclm, transformer)]
    figure.suptitle(f"Middle layers. Next token: ICLM predicts {words[0]!r}, the Transformer {words[1]!r}", fontsize=11)
    for axes, name in zip(below.subplots(len(explained), 1, squeeze=False)[:, 0], explained, strict=True):
        _sources(axes, name, prompts[name])
    return png(figure)


def _map(axes: Axes, stream: str, prompt: Mapping[str, Any]) -> Any:
    """Draw the weights of a stream; return the image."""
    stored = prompt["maps"][stream]
    weights = np.array(stored["weights"])
    hidden = np.triu(np.ones_like(weights, dtype=bool), 1)
    norm = PowerNorm(0.5, 0, 1)
    image = axes.imshow(np.ma.masked_where(hidden, weights), cmap="Blues", norm=norm, interpolation="nearest")
    rows, columns = labels(stream, prompt["words"], prompt["predicted_word"])
    axes.set_yticks(range(len(rows)), rows, fontsize=6, family="monospace")
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.xaxis.set_label_position("top")
    _name_columns(axes, columns, 6)
    axes.set(xlabel="token that followed the context" if stream == "f" else "token of the position",
             ylabel="token that the row predicts (last: the model's)")  # fmt: skip
    axes.set_title(f"{stream}, layer {stored['layer']} of {stored['layers']}", fontsize=10, y=-0.05)
    return image


def _name_columns(axes: Axes, names: Sequence[str], size: int) -> None:
    rotation = 90 if max(map(len, names)) > 1 else 0
    axes.set_xticks(range(len(names)), names, rotation=rotation, fontsize=size, family="monospace")
    axes.tick_params(length=0)


def labels(stream: str, words: Sequence[str], predicted: str) -> tuple[list[str], list[str]]:
    """Return the token that each row of a map predicts (of the last one the model's prediction, marked "?") and the
    token that each column carries."""
    roles, shown = ROLES[stream], [visible(word) for word in words]
    return [*shown, f"{visible(predicted)} ?"][roles.predicts :], [START] * -roles.holds + shown


def _sources(axes: Axes, name: str, prompt: Mapping[str, Any]) -> None:
    """Draw what each context token adds, layer upon layer; the predicted token's earlier occurrences are grey."""
    parts = np.array(prompt["parts"])
    for sign in (1, -1):
        sizes = np.where(sign * parts > 0, parts, 0)
        for layer, (size, end) in enumerate(zip(sizes.T, sizes.T.cumsum(0), strict=True)):
            label = f"f block {layer + 1}" if sign > 0 else None
            axes.bar(range(len(parts)), size, bottom=end - size, color=COLOURS[layer % len(COLOURS)], label=label)
    for position, word in enumerate(prompt["words"]):
        if word == prompt["predicted_word"]:
            axes.axvspan(position - 0.5, position + 0.5, color="#eeeeee", zorder=0)
    _name_columns(axes, [visible(word) for word in prompt["words"]], 7)
    axes.axhline(0, color="#333333", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=4)
    sources = "logit {logit:.2f} = context {context:.2f} + feed-forward {feed_forward:.2f} + bias {bias:.2f}"
    says = f"{name} predicts {visible(prompt['predicted_word'])!r} with chance {prompt['chance']:.2f}"
    axes.set(xlabel="context token (grey: the predicted token)", ylabel="added to the logit",
             title=f"{says}: {sources.format(**prompt)}")  # fmt: skip
