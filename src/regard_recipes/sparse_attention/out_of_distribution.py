"""Read another text than the one trained on: the loss of Memory Mosaics along the text, by kernel.

Sparse-attention paper, section C.1 and figure 5: models of BabiStories read Simple English Wikipedia. Without files,
models here learn the Python manual and read `regard.tasks.Stories`. Losses are means over sixteenths of a window.
"""

from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.checks import require
from regard.tasks import Stories
from regard.tasks.tokens import stream

from ..lib.claims import Claim, claims_of, paired
from ..lib.display import interval, lines, panels, pivot
from ..lib.language_text import LanguageText, source_text, windows
from ..lib.recipe import Results, select
from ..lib.text_recipe import TextRecipe
from ..mosaic.mosaic_kernels import WEIGHTINGS

PAPER, SOFTMAX, RELUMAX, OTHER, OWN = "Sparse attention", "softmax", "relumax", "other text", "own text"
COMPACT = ("normrelu", "biweight", "triweight")  # those of figure 5, beside ReLUmax
PARTS = 16  # parts of a window whose mean losses are stored


class OutOfDistribution(TextRecipe, name="out-of-distribution"):
    """Loss of Memory Mosaics along a text of another kind than the one trained on, by kernel."""

    other: Path | None = None  # UTF-8 text to read, a file or a folder. None: stories of a grammar.
    tokenizer: str = "byte"  # byte or gpt2, which do not depend on the text that is learned.
    context = 128
    batch = 8
    steps = 2000
    measured: int = 16_384  # Held-out tokens, and tokens of the other text, that the results are measured on.
    rates = (2e-3, 5e-3)
    limits: ClassVar = {"context": (2 * PARTS, 2**20)}
    choices: ClassVar = {"tokenizer": ("byte", "gpt2")}
    known: ClassVar = {
        name: {"model": "memory-mosaic", "mixers": WEIGHTINGS[name]}
        for name in (SOFTMAX, *COMPACT, "sparsemax", RELUMAX)
    }
    by_size: ClassVar = {
        "quick": {"seeds": 2, "models": (SOFTMAX, "biweight", RELUMAX), "width": 32, "context": 64, "steps": 60,
                  "rates": (5e-3,), "measured": 2048, "looks": 2},
        "paper": {"tokenizer": "gpt2", "width": 768, "layers": 8, "heads": 12, "context": 512, "batch": 512,
                  "parts": 16, "steps": 80_000, "rates": (5e-3,), "measured": 262_144, "looks": 20,
                  "dtype": "bfloat16", "device": "auto"},
    }  # fmt: skip

    def load(self, text: LanguageText) -> dict[str, Any]:
        from regard.training import encode

        facts = super().load(text)
        source, content = "stories of a grammar", stories(8 * self.measured)
        if self.other is not None:
            source, content = source_text(self.other, self.call())
        tokens = encode(text.tokenizer, content)[: self.measured]
        few = f"{source} has {len(tokens):,} tokens, expected at least two windows of {self.context}"
        require(len(tokens) >= 2 * self.context, self.call(), f"--other: {few}.")
        self.windows = {OWN: windows(self.test_tokens, self.context), OTHER: windows(tokens, self.context)}
        return {**facts, "other": source, "other floor": self.floor(tokens)}

    def measure_model(self, model: Any) -> dict[str, Any]:
        rows = []
        for name, drawn in self.windows.items():
            losses = losses_along(model, drawn, max(1, self.batch // self.parts))
            positions = torch.arange(1, self.context)  # the first token is not predicted
            for at, part in zip(positions.tensor_split(PARTS), losses.tensor_split(PARTS), strict=True):
                rows.append({"kind": "part", "text": name, "start": int(at[0]), "loss": float(part.mean())})
        return {**super().measure_model(model), "rows": rows}

    def claims(self, results: Results) -> list[Claim]:
        names, parts = self.trained, self.chosen(results, "part", text=OTHER)
        starts = sorted(set(parts["start"]))
        early, late = starts[:1], starts[PARTS // 2 :]
        gap = lambda name, base, at: self.gap(results, name, base, "loss", "part", text=OTHER, start=at)  # noqa: E731
        of = lambda name, at: select(parts, model=name, start=at)  # noqa: E731
        fall = {name: paired(of(name, late), of(name, early), "loss") for name in names}
        rest = [name for name in names if name != RELUMAX]
        comparisons: list[Any] = [
            ("The loss falls as context is read", fall, "below", 0.0, "Second half of the window less its first part."),
            ("Compact kernels have a loss comparable with Gaussian attention",
             {name: gap(name, SOFTMAX, late) for name in (*COMPACT, RELUMAX)}, "at most", 0.02,
             "Second half of the window, less softmax's; 0.02 counts as comparable."),
            ("ReLUmax performs best overall", {f"less {name}": gap(RELUMAX, name, starts) for name in rest}, "below",
             0.0, "Whole window, ReLUmax less another kernel."),
            ("Biweight and triweight start from lower losses",
             {name: gap(name, SOFTMAX, early) for name in ("biweight", "triweight")}, "below", 0.0,
             "First part of the window, less softmax's."),
        ]  # fmt: skip
        rows = [("figure 5", wording, estimate, says, margin, f"Nats per token of the other text. {note}")
                for wording, estimate, says, margin, note in comparisons]  # fmt: skip
        return claims_of(PAPER, rows, effect=0.05, untestable=self.unlearned(results))

    def unlearned(self, results: Results) -> str:
        rows, floor = self.chosen(results, "part", text=OTHER), results.facts["other floor"]
        least = float(rows.groupby("model")["loss"].mean().min())
        reason = f"no model predicts the other text: {least:.2f} nats per token, {floor:.2f} without context"
        return super().unlearned(results) or ("" if least < floor else reason)

    def tables(self, results: Results) -> dict[str, Any]:
        rows = self.chosen(results, "part")
        some = select(rows, text=OTHER, start=sorted(set(rows["start"]))[::5])
        note = (f"Nats per token by the first position of the part, ± half the 95 % interval over seeds. By the "
                f"frequencies of the training text: {results.facts['other floor']:.2f}.")  # fmt: skip
        return {
            "Loss along the other text": pivot(some, ["model"], {"": interval("loss")}, "start", note=note),
            "Loss of whole windows": pivot(rows, ["model"], {"": interval("loss")}, "text"),
            "Training": self.losses_table(results),
        }

    def figures(self, results: Results) -> dict[str, bytes]:
        over = panels(self.chosen(results, "part"), "{text}")
        return {"positions": lines(over, "start", {"loss": "nats per token"}, "model", x_label="position"),
                "curves": self.curves(results)}  # fmt: skip

    def notes(self, results: Results) -> list[str]:
        return [f"Models learned {results.facts['text']['source']} and read {results.facts['other']}."]


def stories(characters: int) -> str:
    """Return so many characters of stories, or a few more."""
    task, text, count = Stories.named("long"), "", 0
    while len(text) < characters:
        story = " ".join(task.story(stream("out-of-distribution", count)))
        text += story.replace(" .", ".").replace(" ,", ",") + "\n"
        count += 1
    return text.removesuffix("\n")


@torch.no_grad()
def losses_along(model: Any, tokens: Tensor, batch: int) -> Tensor:
    """Return the nats per token at every position but the first, means over windows [W, T]: [T - 1]."""
    total = torch.zeros(tokens.shape[1] - 1, dtype=torch.float64)
    for part in tokens.split(batch):
        part = part.to(model.device).long()
        logits = model(input_ids=part, use_cache=False).logits[:, :-1].float()
        total += F.cross_entropy(logits.mT, part[:, 1:], reduction="none").sum(0).double().cpu()
    return total / len(tokens)
