"""Measure what the heads of an ICLM and of a Transformer do: attention sinks, induction, the sources of a logit.

The ICLM paper (section 7) shows heatmaps of a few prompts. Here each of its claims is a number over held-out text and
all heads, beside what equal weights give. Models of text, ICLM and Transformer of equal size with and without
feed-forward layers, are trained beside pairs of layers on repeated random blocks, where induction can be seen forming.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from regard.inspect.mechanisms import EPSILON

from ..lib.claims import Claim, claims_of, exact, mean_interval, unpaired
from ..lib.display import Show, dots, lines, only, pivot, spread, stat
from ..lib.language_text import Corpus, read_text, windows
from ..lib.recipe import Cell, Frame, Results, select
from ..lib.text_recipe import TextOptions
from ._mechanisms_measures import BLOCKS, block_stream, choose_prompts, measure_blocks, measure_text
from .iclm_parity import GPT2

ICLM, TRANSFORMER, ICLM_NO_MLP = "iclm", "transformer", "iclm-no-f-mlp"
EXPLAINED = (ICLM, ICLM_NO_MLP)  # models whose logits are taken apart
OTHERS = {"phi": "phi", "the Transformer": TRANSFORMER}  # streams beside f
DOMINATES = 0.5  # share of a layer's weight above which the next token dominates
FORMED, CHANCE = 0.8, 0.1  # induction score of the best head after training, and of any head before
COPIES = 1.5  # lift over equal weights above which a head copies
EVEN = 1.25  # ratio of evenness above which f is significantly more balanced
RARE = 0.05  # share of phi's heads with a sink up to which nothing is said of sinks
MODELS: dict[str, dict[str, Any]] = {
    ICLM: {"model": "iclm"}, ICLM_NO_MLP: {"model": "iclm", "f_mlp": "none"},
    TRANSFORMER: GPT2, "transformer-no-mlp": {**GPT2, "feed_forward": "none"},
}  # fmt: skip


class Mechanisms(TextOptions, name="iclm-mechanisms"):
    """Attention sinks, induction heads and the sources of a logit in ICLM and Transformer, claim by claim."""

    seeds: int = 3  # Models of each kind; they differ in first weights and data.
    layers: int = 4  # Layers of the models of text, an even number: half as many of phi and of f.
    width = 128
    variant: Literal["wv", "full"] = "wv"
    """What f's heads average: wv, of the Transformer's size, as in the paper's heatmaps; or full."""
    steps: int = 1000  # Optimiser steps of each model of text.
    learning_rate: float = 2e-3
    """The highest of the models of text. `iclm-parity` tries several, and compares the perplexities of these models."""
    block_steps: int = 2000  # Optimiser steps of each model of repeated blocks.
    measured: int = 16_384  # Held-out tokens that perplexity is measured on.
    texts: int = 64  # Held-out windows on which heads are measured.
    prompts: int = 3  # Prompts that are drawn.
    prompt: int = 48  # Tokens of a prompt.
    limits: ClassVar = {"learning_rate": (1e-8, 1.0), "prompts": (0, math.inf), "prompt": (4, "context")}
    by_size: ClassVar = {
        "quick": {"seeds": 2, "width": 32, "heads": 2, "context": 48, "batch": 8, "steps": 120, "learning_rate": 4e-3,
                  "block_steps": 150, "measured": 2048, "looks": 3, "texts": 16, "prompts": 1, "prompt": 32},
        "paper": {"layers": 24, "width": 1024, "heads": 16, "tokenizer": "gpt2", "context": 512, "batch": 32,
                  "parts": 2, "steps": 20_000, "learning_rate": 3e-4, "block_steps": 4000, "measured": 262_144,
                  "looks": 10, "texts": 8, "prompts": 4, "prompt": 64, "dtype": "bfloat16", "compile": True,
                  "device": "auto"},
    }  # fmt: skip

    def prepare(self) -> Mapping[str, Any]:
        text = read_text(self.data, self.tokenizer, context=self.context, measured=self.measured, call=self.call())
        whole = windows(text.held_out_tokens, self.context)
        self.windows = whole[:: max(1, len(whole) // self.texts)][: self.texts].clone()
        self.drawn = choose_prompts(text.held_out_tokens, self.prompt, self.prompts)
        self.vocabulary, self.words = text.vocabulary, text.words(torch.arange(len(text.tokenizer)))
        self.words += [""] * (self.vocabulary - len(self.words))
        blocks = Corpus(block_stream(BLOCKS["tokens"], self.seed), block_stream(BLOCKS["measured"], self.seed + 1))
        self.corpora = {"text": Corpus(text.train_tokens, text.held_out_tokens[: self.measured]), "blocks": blocks}
        return {"text": text.described, "blocks": BLOCKS}

    def cells(self) -> list[Cell]:
        models = {"text": MODELS, "blocks": (*EXPLAINED, TRANSFORMER)}
        return [{"task": task, "model": name} for task, names in models.items() for name in names]

    def measure(self, cell: Cell, seed: int) -> list[dict[str, Any]]:
        from ..lib.language_training import train_language_model

        made, vocabulary, look = self.of_blocks(), BLOCKS["vocabulary"], partial(measure_blocks, seed=seed)
        if cell["task"] == "text":
            made, vocabulary, shown = self, self.vocabulary, self.drawn if seed == self.seed else []
            look = partial(measure_text, windows=self.windows, prompts=shown, words=self.words,
                           from_row=self.context // 4)  # fmt: skip
        config, corpus = made.model_config(cell, vocabulary), self.corpora[cell["task"]]
        return train_language_model(config, corpus, made, made.learning_rate, seed, measure=look)

    def of_blocks(self) -> Any:
        """Return the recipe with the options of the models of repeated blocks."""
        options: Any = self
        sizes = {name: BLOCKS[name] for name in ("context", "batch", "width", "heads")}
        return replace(options, **sizes, layers=2, steps=self.block_steps, learning_rate=3e-3, looks=8, parts=1,
                       dtype="float32", compile=False)  # fmt: skip

    def fields(self, cell: Cell) -> Mapping[str, Any]:
        variant = {"variant": self.variant} if cell["model"] in EXPLAINED else {}
        return {**variant, **MODELS[cell["model"]]}

    def claims(self, results: Results) -> list[Claim]:
        runs = results.select(kind="run")
        lost = runs[~np.isfinite(runs["held_out"].astype(float))]
        reason = f"the training of {', '.join(lost['model'] + ' on ' + lost['task'])} diverged" if len(lost) else ""
        heads = heads_of_text(results)
        claim_rows = (*sink_claims(heads), *copy_claims(heads), *block_claims(results))
        made = claims_of("ICLM", [("section 7", *each) for each in claim_rows])
        return [replace(claim, untestable=claim.untestable or reason) for claim in made]

    def tables(self, results: Results) -> dict[str, Any]:
        heads, layers = heads_of_text(results), ["stream", "layer"]
        prompts = results.select(kind="prompt", model=list(EXPLAINED))
        sinks: Callable[[str], Show] = lambda column: lambda rows: f"{(rows[column] > EPSILON).sum()} of {len(rows)}"  # noqa: E731
        return {
            "Sinks": pivot(heads, layers, {
                "column 0": "{first:.3f}", "most": stat("first", "max", "{:.3f}"), "equal weights": "{uniform:.3f}",
                "sinks there": sinks("first"),
                "strongest column": largest("strongest", "{strongest:.3f} in {place:.0f}"),
                "sinks": sinks("strongest"), "evenness": "{even:.2f}",
            }, note=f"Mean weights over rows and texts, over heads and seeds. Column 0: in phi the start token, in f "
                    f"the pair of the first token, in the Transformer the first token. A sink has a mean weight above "
                    f"{EPSILON}. Evenness is 1 for equal weights."),
            "Weight on the next token": pivot(heads, layers, {
                "on the predicted": "{predicted:.3f}", "equal weights": "{predicted_uniform:.3f}",
                "lift": "{predicted_lift:.2f}", "best head": stat("predicted_lift", "max", "{:.2f}"),
                "lift on the following": "{following_lift:.2f}",
                "best head, following": stat("following_lift", "max", "{:.2f}"),
            }, note="Mean weight on earlier occurrences of the token that the model predicts, where there are any, and "
                    "the lift: that weight over the one that equal weights give. Then the lift for the token that "
                    "follows."),
            "Induction on repeated blocks": block_table(results),
            "Cost of ablations": ablation_table(results),
            "Heads of f as maps between tokens": pivot(results.select(kind="eigenvalues"), ["model", "layer"], {
                "positive eigenvalues": "{share:.2f}", "balance": "{balance:+.2f}",
                "heads": lambda rows: f"{rows['balance'].min():+.2f} to {rows['balance'].max():+.2f}",
            }, note="Of P_h W_e W_e^T: the share of eigenvalues with a positive real part, and their sum over the sum "
                    "of their sizes; 1 is a head that raises every token it reads."),
            "Sources of a logit": pivot(prompts.drop_duplicates(["model", "prompt"]), ["model", "prompt"], {
                "chance": "{chance:.2f}", "logit": "{logit:.3f}", "context": "{context:.3f}",
                "of it the same token": "{same:.3f}", "feed-forward": "{feed_forward:.3f}", "bias": "{bias:.3f}",
                "parts miss by": "{missed:.0e}",
            }, note="Prompts are the first windows of held-out text, without overlap, whose end has occurred in them "
                    "before, where there are such; the last one is of repeated blocks, with the model of blocks."),
        }  # fmt: skip

    def figures(self, results: Results) -> dict[str, bytes]:
        from ._mechanisms_figures import prompt_figure

        blocks = results.select(task="blocks", model=[ICLM, TRANSFORMER])
        made = {
            "sinks": dots(
                heads_of_text(results), {"first": "column 0", "strongest": "strongest column"},
                "{stream}, layer {layer:.0f}", x_label=f"mean weight of a head; a sink: > {EPSILON}"),
            "induction": dots(select(blocks, kind="head"), "score", "stream", "when", x_label="induction score"),
            "curves": lines({"repeated blocks": select(blocks, kind="look")}, "step",
                            {"held_out": "held-out nats per token"}, "model"),
        }  # fmt: skip
        for prompt, rows in results.select(kind="prompt", seed=self.seed).groupby("prompt", sort=False):
            name = prompt if prompt == "blocks" else f"prompt-{prompt}"
            made[name] = prompt_figure({row["model"]: row for row in rows.to_dict("records")}, EXPLAINED)
        return made


def heads_of_text(results: Results) -> Frame:
    """Return the rows of the heads of the two whole models of text."""
    return results.select(kind="head", task="text", model=[ICLM, TRANSFORMER])


def largest(column: str, form: str) -> Show:
    """Return a function that shows the row with the largest number in a column."""
    return lambda rows: form.format(**rows.loc[rows[column].astype(float).fillna(-1).idxmax()])


def block_table(results: Results) -> Any:
    """Return a table with a row for each stream on repeated blocks."""
    rows = results.select(task="blocks", model=[ICLM, TRANSFORMER])
    right = ["accuracy_before", "accuracy_after"]
    heads = rows.assign(**rows.groupby(["model", "seed"])[right].transform("max")).dropna(subset="score")
    return pivot(heads, ["model", "stream"], {
        "best before": only(stat("score", "max", "{:.3f}"), when="before"),
        "heads after": only(lambda rows: ", ".join(f"{score:.3f}" for score in rows["score"]), when="after"),
        "best after": only(stat("score", "max", "{:.3f}"), when="after"), "equal weights": "{uniform:.3f}",
        "right before": "{accuracy_before:.1%}", "right after": "{accuracy_after:.1%}",
    }, note="Mean weight on the token one period before the next one, for every head, layer by layer, seed by seed; "
            "and how often the model then predicts the next token. The Transformer has two layers, ICLM one of phi and "
            "one of f.")  # fmt: skip


def ablation_table(results: Results) -> Any:
    """Return a table with a row for each model of text."""
    frame = results.select(task="text")
    frame = frame.assign(perplexity=np.exp(frame["held_out"].astype(float)))
    lens = frame["layer"][frame["kind"] == "lens"].unique()
    return pivot(frame, ["model"], {
        "parameters": only("{parameters:,.0f}", kind="run"),
        "perplexity": only(spread("perplexity"), kind="run"),
        **{f"equal weights in {stream}": only("{cost:+.3f}", kind="equal weights", stream=stream)
           for stream in ("phi", "f", TRANSFORMER)},
        "dearest head": only(largest("cost", "{stream} {layer:.0f}.{head:.0f} {cost:+.3f}"), kind="head"),
        **{f"lens after f block {layer:.0f}": only("{loss:.3f}", kind="lens", layer=layer) for layer in lens},
    }, note="Nats per token more than the whole model has on the windows on which heads are measured. Lens: nats per "
            "token if the model ended there.")  # fmt: skip


def sink_claims(heads: Frame) -> Iterator[tuple[Any, ...]]:
    """Yield the claims about sinks and evenness."""
    phi, f, other = (select(heads, stream=stream) for stream in ("phi", "f", TRANSFORMER))
    share = lambda rows, column: mean_interval((rows[column] > EPSILON).groupby(rows["seed"]).mean())  # noqa: E731
    sunk, sunk_f, sunk_other = (rows[rows["strongest"] > EPSILON] for rows in (phi, f, other))
    start, start_other = (share(rows, "first") if len(rows) else exact(math.nan) for rows in (sunk, sunk_other))
    none = "" if len(sunk) > RARE * len(phi) else f"sinks are too rare: {len(sunk)} of phi's {len(phi)} heads"
    no_other = "" if len(sunk_other) else f"none of the Transformer's {len(other)} heads has a sink"
    yield ("Sinks of phi always manifest within (at least) the start token", start, "at least", 1,
           f"Share of the heads with a sink ({len(sunk)} of {len(phi)}) that have one at the start, strongest or not.",
           {"untestable": none})  # fmt: skip
    yield ("f has no sinks", share(f, "strongest"), "at most", 0,
           f"Share of f's heads with a sink; the strongest column has mean weight {f['strongest'].max():.2f}.",
           {"untestable": "" if len(sunk_f) else none})  # fmt: skip
    yield ("The place of the Transformer's sinks is less consistent", unpaired(start_other, start), "below", 0,
           "Share of the sinks at the start, Transformer less phi.", {"untestable": none or no_other})  # fmt: skip
    even, strong = by_stream(heads, "even"), by_stream(heads, "strongest")
    for what, column, more, unit in (
        ("row by row", "even", even["f"] / even["phi"], "evenness of rows"),
        ("column by column", "strongest", strong["phi"] / strong["f"],
         "mean weight of the strongest column, less is more balanced"),
    ):  # fmt: skip
        means = ", ".join(f"{name} {x:.2f}" for name, x in heads.groupby("stream", sort=False)[column].mean().items())
        yield (f"f's scores are significantly more balanced than phi's, {what}", more, "above", EVEN,
               f"How many times as balanced as phi. {unit}: {means}.")  # fmt: skip


def copy_claims(heads: Frame) -> Iterator[tuple[Any, ...]]:
    """Yield the claims about weight on earlier occurrences of a token."""
    f, lift = select(heads, stream="f"), by_stream(heads, "predicted_lift")
    unit = "Weight on earlier occurrences of the predicted token, times that of equal weights"
    best = f"best head {f['predicted_lift'].max():.2f}, Transformer {lift[TRANSFORMER].mean():.2f}"
    yield "Heads of f copy", lift["f"], "above", COPIES, f"{unit}; {best}."
    more = {f"than {name}": lift["f"] - lift[stream] for name, stream in OTHERS.items()}
    yield "Heads of f copy more than others", more, "above", 0, f"{unit}, f less others."
    layers = ", ".join(f"{x:.2f}" for x in f.groupby("layer")["predicted"].mean())
    strong = (f.groupby(["seed", "layer"])["predicted"].mean() > DOMINATES).groupby("seed").mean()
    yield ("f's weight on the next token dominates at most layers", strong, "above", 0.5,
           f"Share of layers with a mean weight above {DOMINATES}; it is {layers}.")  # fmt: skip
    yield "phi shows nothing of the next token", lift["phi"], "at most", COPIES, f"{unit}."


def block_claims(results: Results) -> Iterator[tuple[Any, ...]]:
    """Yield the claims about induction and the sources of a logit."""
    blocks = results.select(kind="head", task="blocks")
    for when, says, bound in (("after", "at least", FORMED), ("before", "at most", CHANCE)):
        best = select(blocks, model=ICLM, stream="f", when=when).groupby("seed")["score"].max()
        rival = select(blocks, model=TRANSFORMER, when=when)["score"].max()
        yield (f"Induction heads form in f: the best head {when} training", best, says, bound,
               f"Induction score on repeated blocks; the Transformer's best: {rival:.2f}.")  # fmt: skip
    prompts = results.select(kind="prompt", model=list(EXPLAINED))
    yield ("A logit is the sum of what context tokens, feed-forward layers and bias add",
           exact(prompts["missed"].max()), "at most", 1e-4, "Largest miss of a prompt's parts.",
           {"digits": 7})  # fmt: skip
    for name in EXPLAINED:
        of_model = select(prompts, model=name).dropna(subset=["same"])
        yield (f"Weight on a token's embedding in f is directly a high probability of it: {name}",
               exact((of_model["same"] > of_model["feed_forward"]).mean()), "above", 0.5,
               f"Share of {len(of_model)} prompts in which the predicted token's earlier occurrences add more to its "
               f"logit than the feed-forward layers.",
               {"untestable": "" if len(of_model) else "no predicted token stands in its prompt"})  # fmt: skip


def by_stream(heads: Frame, column: str) -> Frame:
    """Return the means over the heads of each seed (rows) and stream (columns)."""
    return heads.groupby(["seed", "stream"])[column].mean().unstack().reindex(columns=["f", *OTHERS.values()])
