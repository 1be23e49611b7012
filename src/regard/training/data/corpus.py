"""What a run reads: where its text comes from, and its tokens."""

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..config import TrainConfig
from ..evaluation import Units
from .documents import is_dataset, open_documents
from .text import Source, open_text
from .tokenizers import encode_chunks

_BEGINNING = 4096


@dataclass(frozen=True)
class Part:
    """Tokens of a part of a text, int32 [n], the sizes of the part, and its first few thousand characters."""

    tokens: Tensor
    units: Units
    beginning: str


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on (None for a stream) and held-out tokens."""

    text: Source
    tokenizer: PreTrainedTokenizerBase
    train: Part | None
    held_out: Part


def open_source(config: TrainConfig, *, call: str) -> Source:
    """Return the text of a config; raise `ArgumentError` if there is none, or it cannot be read."""
    if is_dataset(config.data):
        return open_documents(config, call=call)
    return open_text(config.data or "", call=call)


def encode_part(tokenizer: PreTrainedTokenizerBase, chunks: Iterator[str], text: Source, folder: Path) -> Part:
    """Encode a part of a text. The tokens are in a nameless file in `folder`, which the system reads on access and
    deletes with the tensor. Raises OSError if it cannot be written."""
    characters = size = 0
    beginning = ""

    def counted() -> Iterator[str]:
        nonlocal characters, size, beginning
        for chunk in chunks:
            if len(beginning) < _BEGINNING:
                beginning += chunk[:_BEGINNING]
            characters, size = characters + len(chunk), size + len(chunk.encode())
            yield chunk

    tokens = torch.empty(0, dtype=torch.int32)
    with TemporaryFile(dir=folder) as file:
        for encoded in encode_chunks(tokenizer, counted(), documents=text.documents):
            file.write(encoded.numpy().tobytes())
        if file.tell():
            file.flush()
            tokens = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.int32)
    return Part(tokens, Units(len(tokens), characters, size), beginning)
