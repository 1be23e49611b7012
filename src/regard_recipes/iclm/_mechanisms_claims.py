"""The claims about the heads of an ICLM and of a Transformer, for iclm-mechanisms; tinymath uses its bounds and means.

The functions yield rows for `claims_of` without their first entry, the place in the paper.
"""

import math
from collections.abc import Iterator
from typing import Any

from regard.inspect.mechanisms import EPSILON

from ..lib.claims import exact, mean_interval, unpaired
from ..lib.recipe import Frame, Results, select

ICLM, TRANSFORMER, ICLM_NO_MLP = "iclm", "transformer", "iclm-no-f-mlp"
EXPLAINED = (ICLM, ICLM_NO_MLP)  # models whose logits are taken apart
OTHERS = {"phi": "phi", "the Transformer": TRANSFORMER}  # streams beside f
DOMINATES = 0.5  # share of a layer's weight above which the next token dominates
FORMED, CHANCE = 0.8, 0.1  # induction score of the best head after training, and of any head before
COPIES = 1.5  # lift over equal weights above which a head copies
EVEN = 1.25  # ratio of evenness above which f is significantly more balanced
RARE = 0.05  # share of phi's heads with a sink up to which nothing is said of sinks


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
