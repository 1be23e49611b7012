"""Documents of a data set, and windows of a stream of them, in the order of the documents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ...checks import ArgumentError, require
from ..errors import one_error
from ..storage.files import read_text
from .tokenizers import encode_chunks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLACE = "stream.json"
"""File of a checkpoint: the place in the stream from which the run continues."""


class Documents:
    """The documents of a data set, in order.

    Args:
        rows: a `Dataset` or an `IterableDataset` with one column.
        column: its name.
        where: the beginning of error messages.
    """

    def __init__(self, rows: Any, column: str, where: str) -> None:
        self.rows, self.column, self.where = rows, column, where
        self.begin: Any = None

    def __iter__(self) -> Iterator[str]:
        with one_error(self.where):
            for number, row in enumerate(self.rows):
                text = row[self.column]
                if text is not None and not isinstance(text, str):
                    what = f"column {self.column!r} of row {number} holds {type(text).__name__}, expected text"
                    raise ArgumentError(f"{self.where}: {what}; choose another with --text-column.")
                if text and not text.isspace():
                    yield text

    def after(self, state: Any = None) -> Iterator[tuple[str, Any]]:
        """Yield, without end, each document of a stream and the state before it (JSON data); continue after a state,
        default that after the held-out documents."""
        state = self.begin if state is None else state
        while True:
            self.rows.load_state_dict(state)
            found = False
            for text in self:
                yield text, state
                found, state = True, self.rows.state_dict()
            few = "all documents are held out; give more, or smaller --eval-tokens and --context"
            require(found or state != self.begin, self.where, f"{few}.")
            state = self.begin


class StreamedWindows(Dataset):
    """Map-style dataset whose example i is window i of the documents, each followed by an end-of-text token, one after
    the other and again from the start at their end; to be read in order.

    Items are dicts with `input_ids` and `labels`, both int64 [C]; the model shifts the labels. A place is (state before
    a document, tokens of that document before the window), or None for the first window.

    Args:
        documents: of an `IterableDataset`.
        tokenizer: for the documents.
        context: C.
        steps: number of optimiser steps.
        per_step: examples per step, over all devices and accumulated micro-batches.
    """

    def __init__(
        self, documents: Documents, tokenizer: PreTrainedTokenizerBase, *, context: int, steps: int, per_step: int
    ) -> None:
        self.documents, self.tokenizer, self.context = documents, tokenizer, context
        self.steps, self.per_step = steps, per_step
        self._places: dict[int, Any] = {}  # the latest windows with which a step begins
        self._seek(0, None)

    def __len__(self) -> int:
        return self.steps * self.per_step

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index < self._next:
            self._seek(0, None)
        while self._next < index:
            self._advance()
        window = self._advance().long()
        return {"input_ids": window, "labels": window}

    def save(self, folder: Path, step: int) -> None:
        """Write the place at which a step begins to a checkpoint."""
        window = step * self.per_step
        while self._next < window:  # other processes read the rest of the step before
            self._advance()
        (folder / PLACE).write_text(json.dumps({"window": window, "place": self._places[window]}))

    def load(self, folder: Path) -> None:
        """Continue at the place in a checkpoint; raise `ArgumentError` if it cannot be read."""
        with one_error(f"train: cannot continue from {folder}: {PLACE}"):
            saved = json.loads(read_text(folder / PLACE))
            state, offset = saved["place"]
            self._seek(int(saved["window"]), (state, int(offset)))

    def _seek(self, window: int, place: Any) -> None:
        self._next, self._windows = window, self._read(place)
        self._places[window] = place

    def _advance(self) -> Tensor:
        window, place = next(self._windows)
        self._next += 1
        if self._next % self.per_step == 0:
            self._places[self._next] = place
            self._places.pop(self._next - 4 * self.per_step, None)  # batches are read one or two ahead
        return window

    def _read(self, place: Any) -> Iterator[tuple[Tensor, Any]]:
        """Yield windows from a place on, int32 [C], each with the place after it."""
        state, skip = place or (None, 0)
        left = torch.empty(0, dtype=torch.int32)
        for text, before in self.documents.after(state):
            tokens = torch.cat(list(encode_chunks(self.tokenizer, [text], documents=True)))
            left, skip = torch.cat([left, tokens[skip:]]), 0
            while len(left) >= self.context:
                window, left = left[: self.context], left[self.context :]
                yield window, (before, len(tokens) - len(left))
