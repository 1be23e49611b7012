"""Reading tokenizers from folders that may come from elsewhere.

Only `tokenizer.json` (the tokenizer itself) and a few settings in `tokenizer_config.json` are read. Every tokenizer
becomes transformers' plain fast one: classes, code and chat templates that a folder names are not looked at.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...checks import ArgumentError, require
from ..fields import read_mapping

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("split_special_tokens", "clean_up_tokenization_spaces")
_MOST_TOKENS = 2**31
_MOST_GROWTH = 1 << 12
"""By how much the steps of a tokenizer may lengthen a text: a few of them in a row could fill any memory."""
_PROBES = ("", "a", "The quick brown fox, 1 + 2 = 3.\n")


def load_tokenizer(folder: Path, *, call: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a folder, as transformers' `PreTrainedTokenizerFast`.

    Raises:
        ArgumentError: a file is missing, damaged or contradicts itself.
    """
    from transformers import PreTrainedTokenizerFast

    backend = _backend(folder / "tokenizer.json", call)
    settings = _settings(folder / "tokenizer_config.json", backend, call)
    with one_error(f"{call}: cannot load the tokenizer in {folder}"):
        return PreTrainedTokenizerFast(
            tokenizer_object=backend, model_input_names=["input_ids", "attention_mask"], **settings
        )


@contextmanager
def one_error(where: str) -> Iterator[None]:
    """Turn what the tokenizers library raises, a panic of its Rust code included, into one ArgumentError.

    Args:
        where: how the message begins.
    """
    try:
        yield
    except ArgumentError:
        raise
    except BaseException as error:
        # pyo3's PanicException cannot be imported, and is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split()).rstrip(".")
        raise ArgumentError(f"{where}: {reason or type(error).__name__}.") from None


def _backend(path: Path, call: str) -> Tokenizer:
    """Return the tokenizer of a `tokenizer.json`.

    Raises:
        ArgumentError: it is none, it draws at random, or its tokens and ids do not belong to each other one to one.
    """
    from tokenizers import Tokenizer

    table = read_mapping(path, call=call)
    table["truncation"] = table["padding"] = None  # a text is encoded as it is, whatever the file says
    with one_error(f"{call}: {path} holds no tokenizer that can be used"):
        growth = _growth([table.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")])
        if growth > _MOST_GROWTH:
            raise ValueError(f"its steps can make a text {growth:.2g} times as long, expected at most {_MOST_GROWTH}")
        backend = Tokenizer.from_str(json.dumps(table))
        vocabulary = backend.get_vocab(with_added_tokens=True)
        produced = {token for text in _PROBES for token in backend.encode(text).ids}
    where = f"{call}: the tokenizer in {path.parent}"
    require(bool(vocabulary), where, "has no tokens.")
    require(getattr(backend.model, "dropout", None) in (None, 0.0), where, "drops merges at random (dropout).")
    most = max(vocabulary.values())
    require(most < _MOST_TOKENS, where, f"has a token of id {most}, expected less than {_MOST_TOKENS}.")
    require(len(set(vocabulary.values())) == len(vocabulary), where, "gives one id to several tokens.")
    words = table["model"].get("vocab", {})
    require(len(words) == backend.get_vocab_size(with_added_tokens=False), where, "holds a token twice.")
    for token in table.get("added_tokens", []):
        same = vocabulary.get(token["content"]) == token["id"]
        require(same, where, f"gives {token['content']!r} two ids, or its id {token['id']} to another token, too.")
    outside = produced - set(vocabulary.values())
    require(not outside, where, f"makes tokens that it does not have: {sorted(outside)[:3]}.")
    return backend


def _growth(step: Any) -> float:
    """Return by how much the steps of a tokenizer, tables in tables, can lengthen a text, in bytes and at most."""
    inner = step.values() if isinstance(step, dict) else step if isinstance(step, list) else ()
    growth = 1.0
    for one in inner:
        growth = min(growth * _growth(one), 1e300)
    kind = step.get("type") if isinstance(step, dict) else None
    if kind == "ByteLevel":  # a byte becomes a letter of one or two
        return 2 * growth
    if kind == "Replace":
        written, found = len(step["content"].encode()), step["pattern"].get("String", "")
        return growth * max(
            1.0, written / len(found.encode()) if found else 1.0 + written
        )  # an expression can be empty
    if kind == "Precompiled":
        table = b64decode(step["precompiled_charsmap"])
        texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
        return growth * max(1, *map(len, texts))
    return growth


def _settings(path: Path, backend: Tokenizer, call: str) -> dict[str, Any]:
    """Return what is taken from a `tokenizer_config.json`: special tokens, the side of padding, and two flags.

    Raises:
        ArgumentError: the file cannot be read, a value is of another type, or a special token is not in the
            vocabulary.
    """
    if not path.exists() and not path.is_symlink():
        return {}
    table = read_mapping(path, call=call)
    special = {name: _token(table[name], name, path, backend, call) for name in _SPECIAL if table.get(name) is not None}
    found: dict[str, Any] = dict(special)
    extra = table.get("extra_special_tokens") or table.get("additional_special_tokens") or []
    extra = list(extra.values()) if isinstance(extra, dict) else extra
    require(isinstance(extra, list), call, f"extra_special_tokens in {path} is {extra!r}, expected a list.")
    if extra:
        found["extra_special_tokens"] = [_token(one, "extra_special_tokens", path, backend, call) for one in extra]
    for name in _FLAGS:
        if table.get(name) is not None:
            require(isinstance(table[name], bool), call, f"{name} in {path} is {table[name]!r}, expected a flag.")
            found[name] = table[name]
    side = table.get("padding_side", "right")
    require(side in ("left", "right"), call, f"padding_side in {path} is {side!r}, expected 'left' or 'right'.")
    return {**found, "padding_side": side}


def _token(given: Any, name: str, path: Path, backend: Tokenizer, call: str) -> str:
    """Return a special token as text."""
    word = given.get("content") if isinstance(given, dict) else given
    if not isinstance(word, str):
        raise ArgumentError(f"{call}: {name} in {path} is {given!r}, expected a token.")
    known = backend.token_to_id(word) is not None
    require(known, call, f"{name} in {path} is {word!r}, which is not in the vocabulary.")
    return word
