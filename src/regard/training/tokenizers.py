"""Character- and byte-level tokenizers, built with `tokenizers`, used and saved as transformers tokenizers.

Both are byte-pair encoders without merges: one token per character, or per UTF-8 byte. The saved folder
loads with `AutoTokenizer.from_pretrained` and no code of ours. Padding is on the left, so that the last
column of a batch is the last token of every row. Special tokens are never made from text: the characters
"<pad>" in a text stay five characters.

Encoding and decoding give back exactly: any text for the byte level, any text made of known characters for
the character level. There an unknown character becomes `<unk>`, one each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerBase

TOKENIZERS: Registry[Callable[[str], PreTrainedTokenizerBase]] = Registry("tokenizer", "regard.tokenizers")
"""Name to builder: `builder(training_text)` returns a transformers tokenizer."""

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
_PIECE = 8192  # characters encoded at once; cutting is exact, as no token spans two characters


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


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    """All tokens of a text, int32 [n], without special tokens. Long texts are encoded in pieces."""
    backend = tokenizer.backend_tokenizer
    pieces = [text[i : i + _PIECE] for i in range(0, len(text), _PIECE)]
    tokens: list[Tensor] = []
    for i in range(0, len(pieces), 512):  # encodings are bulky; keep few of them at a time
        batch = backend.encode_batch_fast(pieces[i : i + 512], add_special_tokens=False)
        tokens.extend(torch.tensor(encoding.ids, dtype=torch.int32) for encoding in batch)
    return torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.int32)


def _byte_letters() -> list[str]:
    """The character by which the `ByteLevel` pre-tokenizer writes each byte: printable Latin-1 characters
    stand for themselves, the other bytes for the characters from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _wrap(backend: object, **special: str) -> PreTrainedTokenizerBase:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        split_special_tokens=True,  # "<pad>" in a text is text
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **special,
    )
