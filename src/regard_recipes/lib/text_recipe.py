"""Recipes that train language models on a text and compare what they do. The learning rate is chosen by the loss on a
validation text; what is shown is measured on a text after it."""

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.checks import within

from .display import interval, lines, pivot, stat
from .language_text import Corpus, LanguageText, read_text
from .recipe import Cell, Frame, Limits, Results
from .trained import LanguageOptions, Sizes, TrainedRecipe, language_config

VOCABULARIES = {"char": 100, "byte": 258, "bpe": 32_000, "gpt2": 50_257}
"""Tokens of a tokenizer, at most or about (char), where the text has not been read."""


class TextOptions(LanguageOptions, Sizes):
    """Options of recipes that train on one text, and the models that follow from them."""

    tokenizer: str = "char"  # char, byte, bpe or gpt2.
    measured: int = 8192  # Held-out tokens that the results are measured on.
    data: Path | None = None
    """UTF-8 text to learn from, a file or a folder. None: the Python manual inside the interpreter."""
    limits: ClassVar[Limits] = {"measured": ("context", math.inf)}

    @abstractmethod
    def fields(self, cell: Cell) -> Mapping[str, Any]:
        """Return the fields of a model's configuration beside the sizes, and "model", its kind."""

    def model_config(self, cell: Cell, vocabulary: int) -> Any:
        """Return the configuration of the model of a cell."""
        fields = {
            "vocab_size": vocabulary, "hidden_size": self.width, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "max_position_embeddings": self.context, **self.fields(cell),
        }  # fmt: skip
        return language_config(fields, initial_range(fields["hidden_size"]))

    def check(self) -> None:
        from regard.training import TOKENIZERS

        super().check()
        TOKENIZERS.get(self.tokenizer)
        configs = lambda: [self.model_config(cell, 256) for cell in self.cells()]  # noqa: E731
        within(self.call(), "--width, --layers or --heads", configs)


def initial_range(width: int) -> float:
    """Return the standard deviation of a model's first weights: 0.05 up to a width of 256, above it the usual 0.02."""
    return 0.05 if width <= 256 else 0.02


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

        return train_language_model(
            self.model_config(cell, self.vocabulary), self.corpus, self, cell["rate"], seed,
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
        """Return why models cannot be compared: none beats the frequencies of tokens on validation text; else ""."""
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
