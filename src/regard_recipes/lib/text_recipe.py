"""Recipes that train language models on a text and compare what they do. The learning rate is chosen by the loss on a
validation text; what is shown is measured on a text after it."""

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .budget import Corpus, TextOptions
from .display import interval, lines, pivot, stat
from .language_text import LanguageText, read_text
from .recipe import Cell, Frame, Results
from .trained import TrainedRecipe

VOCABULARIES = {"char": 100, "byte": 258, "bpe": 32_000, "gpt2": 50_257}
"""Tokens of a tokenizer, at most or about (char), where the text has not been read."""


class TextRecipe(TrainedRecipe, TextOptions):
    """A recipe of language models trained on one text."""

    def fields(self, cell: Cell) -> Mapping[str, Any]:
        return self.known[cell["model"]]

    def prepare(self) -> Mapping[str, Any]:
        sizes = {"context": self.context, "measured": self.measured, "choice": max(self.context, self.measured // 2)}
        return self.load(read_text(self.data, self.tokenizer, **sizes, call=self.call()))

    def load(self, text: LanguageText) -> dict[str, Any]:
        """Keep what training and measuring need of a text, and return facts about it."""
        self.corpus, self.vocabulary = Corpus(text.train_tokens, text.choice_tokens), text.vocabulary
        self.test_tokens = text.held_out_tokens[: self.measured]
        return {"text": text.described, "floor": self.floor(text.choice_tokens)}

    def floor(self, tokens: Tensor) -> float:
        """Return the nats per token of an answer without context: the frequencies of the training text."""
        counts = torch.bincount(self.corpus.train_tokens.long(), minlength=self.vocabulary).double() + 1
        return float(-(counts / counts.sum()).log()[tokens.long()].mean())

    def measure(self, cell: Cell, seed: int) -> Iterable[dict[str, Any]]:
        from .language_training import train_language_model

        call = ", ".join(f"{name} {value}" for name, value in cell.items())
        return train_language_model(
            self.model_config(cell, self.vocabulary), self.corpus, self, cell["rate"], seed, name=call,
            prepare=partial(self.change_model, cell), measure=self.measure_model,
        )  # fmt: skip

    def change_model(self, cell: Cell, model: Any) -> None:
        """Change the model of a cell before its training."""

    def untrained(self, cell: Cell) -> tuple[Any, int]:
        from regard.models.base.catalogue import model_of

        config = self.model_config(cell, VOCABULARIES[self.tokenizer])
        return model_of(config)(config), self.steps * self.batch * self.context

    def measure_model(self, model: Any) -> dict[str, Any]:
        """Return columns of the row "run" of a trained model, and further rows as "rows"."""
        from .language_training import held_out_loss

        return {"test": held_out_loss(model, self.test_tokens, self)}

    def merit(self, runs: Frame) -> Frame:
        return -runs["held_out"].astype(float).fillna(math.inf)

    def unlearned(self, results: Results) -> str:
        """Return why models cannot be compared: none predicts the validation text better than the frequencies of its
        tokens do; else an empty text."""
        least, floor = float(self.chosen(results)["held_out"].astype(float).min()), results.facts["floor"]
        reason = f"no model learned the text: {least:.2f} nats per token, {floor:.2f} without context"
        return "" if least < floor else reason

    def losses_table(self, results: Results) -> Any:
        """Return a table of the chosen rates and the losses."""
        return pivot(self.chosen(results), list(self.per), {
            "rate": "{rate:g}", "parameters": "{parameters:,.0f}", "validation": interval("held_out"),
            "test": interval("test"), "CPU, a step": stat("step_cpu_seconds", "median", "{:.0f} ms", 1e3),
        }, note=f"Nats per token, ± half the 95 % interval over seeds. Without context, by the frequencies of the "
                f"training text: {results.facts['floor']:.2f}.")  # fmt: skip

    def curves(self, results: Results) -> bytes:
        """Return a figure of the validation loss against steps."""
        rows = self.chosen(results, "look").dropna(subset=["held_out"])
        return lines({"": rows}, "step", {"held_out": "nats per token"}, "model")
