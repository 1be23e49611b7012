"""Train language models with local linear attention and with softmax: losses by ridge, and how the weights look.

Local Linear Attention paper, appendix F.3 and figure 8, which name neither data nor sizes. The paper's softmax has a
fixed scale, with which normalised queries cannot become sharper. So it is also trained with a scale that it learns.
"""

from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.inspect.capture import capture

from ..lib.claims import Claim, claims_of, mean_interval
from ..lib.display import dots, interval, pivot
from ..lib.language_text import windows
from ..lib.recipe import Results, select
from ..lib.text_recipe import TextRecipe

PAPER, WHERE = "Local Linear Attention", "appendix F.3"
SOFTMAX, LEARNED = "softmax, normalised", "softmax, normalised, learned scale"
PLAIN, LLA_PLAIN = "softmax", "local linear, learned ridge"
RIDGES = (1.0, 0.1, 0.01)
LLA = {ridge: f"local linear, ridge {ridge:g}, normalised" for ridge in RIDGES}
DENSE = 0.1  # absolute weight from which a position counts as attended (the paper's threshold)
WINDOWS = 8  # windows that weights are looked at in


class Pretraining(TextRecipe, name="lla-pretraining"):
    """Loss of language models with local linear attention by ridge, beside softmax, and the weights of both."""

    batch = 8
    steps = 1500
    known: ClassVar = {
        SOFTMAX: {"mixers": "softmax", "qk_norm": "l2"},
        LEARNED: {"mixers": "softmax", "qk_norm": "l2", "temperatures": "learned"},
        **{LLA[ridge]: {"mixers": f"gaussian*fixed*linear(ridge={ridge:g})", "qk_norm": "l2"} for ridge in RIDGES},
        PLAIN: {"mixers": "softmax"},
        LLA_PLAIN: {"mixers": "local-linear", "ridges": "learned"},
    }
    """The first five have queries and keys of length one, with scores of -sqrt(D) to sqrt(D)."""
    by_size: ClassVar = {
        "quick": {"seeds": 2, "models": (SOFTMAX, LLA[0.1], PLAIN, LLA_PLAIN), "width": 32, "context": 32, "steps": 40,
                  "batch": 8, "rates": (3e-3,), "measured": 1024, "looks": 2},
        "paper": {"tokenizer": "gpt2", "width": 768, "layers": 12, "heads": 12, "context": 1024, "batch": 256,
                  "parts": 16, "steps": 20_000, "rates": (3e-4, 1e-3), "measured": 262_144, "looks": 20,
                  "dtype": "bfloat16", "device": "auto"},
    }  # fmt: skip

    def measure_model(self, model: Any) -> dict[str, Any]:
        return super().measure_model(model) | weights_seen(model, windows(self.test_tokens, self.context)[:WINDOWS])

    def claims(self, results: Results) -> list[Claim]:
        lla = [LLA[ridge] for ridge in RIDGES if LLA[ridge] in self.trained]
        less = lambda base: {name: self.gap(results, name, base) for name in lla}  # noqa: E731
        smaller = {f"{one} less {other}": self.gap(results, one, other) for other, one in pairwise(lla)}
        more = {LLA_PLAIN: self.gap(results, LLA_PLAIN, PLAIN, "density")}
        seen = lambda value, name: {name: mean_interval(select(self.chosen(results), model=name)[value])}  # noqa: E731
        loss, counted = "Nats per token of the test text.", f"Positions with an absolute weight above {DENSE:g}."
        small = {"effect": 0.1}
        return claims_of(PAPER, [
            (f"{WHERE}, figure 8a", "With normalised queries and keys local linear attention has a lower loss than "
             "softmax", less(SOFTMAX), "below", 0.0, f"{loss} Less softmax with a fixed scale, also normalised.",
             small),
            (f"{WHERE}, figure 8a", "A smaller ridge has a lower loss", smaller, "below", 0.0, loss, small),
            (f"{WHERE}, check", "The loss is also lower than that of softmax that learns its scale", less(LEARNED),
             "below", 0.0, f"{loss} Less softmax with a learned scale, also normalised.", small),
            (f"{WHERE}, figure 8b", "Softmax concentrates on one or two tokens", seen("density", PLAIN), "at most",
             2.0, counted),
            (f"{WHERE}, figure 8b", "Local linear attention attends to more tokens", more, "above", 0.0,
             f"{counted} Less softmax's."),
            (f"{WHERE}, figure 8c", "Weights of local linear attention fall below zero", seen("lowest", LLA_PLAIN),
             "below", -DENSE, "The lowest weight; the paper has -0.5."),
            (f"{WHERE}, figure 8c", "Weights of local linear attention rise above one", seen("highest", LLA_PLAIN),
             "above", 1.0, "The highest weight; the paper has 1.8."),
        ], effect=0.5, untestable=self.unlearned(results))  # fmt: skip

    def tables(self, results: Results) -> dict[str, Any]:
        shows = {"positions above 0.1": interval("density"), "lowest weight": interval("lowest"),
                 "highest weight": interval("highest"), "negative mass": interval("negative")}  # fmt: skip
        note = ("± half the 95 % interval over seeds. Means over tokens of the second half of a window, heads and "
                "layers; lowest and highest: of all.")  # fmt: skip
        runs = self.chosen(results)
        return {"Losses": self.losses_table(results), "Weights": pivot(runs, ["model"], shows, note=note)}

    def figures(self, results: Results) -> dict[str, bytes]:
        label = f"positions with an absolute weight above {DENSE:g}"
        density = dots(self.chosen(results), "density", "model", x_label=label)
        return {"curves": self.curves(results), "density": density}


@torch.no_grad()
def weights_seen(model: Any, tokens: Tensor) -> dict[str, float]:
    """Return how the weights of a model look on windows [W, T]: positions with an absolute weight above `DENSE`, the
    sum of negative weights, and the lowest and the highest weight. Queries are those of the second half."""
    with capture(model, weights=True) as seen:
        model(input_ids=tokens.to(model.device).long(), use_cache=False)
    by_layer = []
    for layer in seen.layers.values():
        whole = layer.weights if layer.effective_weights is None else layer.effective_weights
        assert whole is not None
        s = whole[:, :, tokens.shape[1] // 2 :].double()
        dense, below = (s.abs() > DENSE).sum(-1).double().mean(), -s.clamp(max=0).sum(-1).mean()
        by_layer.append(torch.stack([dense, below, s.min(), s.max()]))
    mean, low, high = (how(torch.stack(by_layer), 0).tolist() for how in (torch.mean, torch.amin, torch.amax))
    return {"density": mean[0], "negative": mean[1], "lowest": low[2], "highest": high[3]}
