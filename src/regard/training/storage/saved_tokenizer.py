"""Reading tokenizers from untrusted folders.

Only `tokenizer.json` and a few settings in `tokenizer_config.json` are read. Every tokenizer becomes transformers'
`PreTrainedTokenizerFast`; classes, code and chat templates in a folder are ignored.
"""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...checks import require
from ..errors import expect, one_error
from ..fields import read_mapping

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("split_special_tokens", "clean_up_tokenization_spaces")
_MOST_TOKENS = 2**31
_MOST_GROWTH = 1 << 12
"""The largest factor by which the steps of a tokenizer may lengthen a text; several in a row could fill the memory."""
_PROBES = ("", "a", "The quick brown fox, 1 + 2 = 3.\n")


def load_tokenizer(folder: Path, *, call: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a folder; raise `ArgumentError` if a file is missing, damaged or inconsistent."""
    from transformers import PreTrainedTokenizerFast

    backend = _backend(folder / "tokenizer.json", call)
    settings = _settings(folder / "tokenizer_config.json", backend, call)
    settings |= {"model_input_names": ["input_ids", "attention_mask"]}
    with one_error(f"{call}: cannot load the tokenizer in {folder}"):
        return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)


def _backend(path: Path, call: str) -> Tokenizer:
    """Return the tokenizer of a `tokenizer.json` after checking that it is deterministic and its ids are unique."""
    from tokenizers import Tokenizer

    table = read_mapping(path, call=call)
    table["truncation"] = table["padding"] = None  # the whole text is encoded, whatever the file says
    with one_error(f"{call}: {path} is not a valid tokenizer"):
        growth = _growth([table.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")])
        longer = f"its steps can lengthen a text {growth:.2g} times, expected at most {_MOST_GROWTH}"
        expect(growth <= _MOST_GROWTH, longer)
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
    require(len(words) == len(backend.get_vocab(with_added_tokens=False)), where, "holds a token twice.")
    for token in table.get("added_tokens", []):
        same = vocabulary.get(token["content"]) == token["id"]
        require(same, where, f"gives {token['content']!r} two ids, or its id {token['id']} to another token, too.")
    outside = produced - set(vocabulary.values())
    require(not outside, where, f"produces tokens that it does not have: {sorted(outside)[:3]}.")
    return backend


def _growth(step: Any) -> float:
    """Return the largest factor by which the (nested) steps of a tokenizer can lengthen a text, in bytes."""
    growth = 1.0
    for inner in step.values() if isinstance(step, dict) else step if isinstance(step, list) else ():
        growth = min(growth * _growth(inner), 1e300)
    kind = step.get("type") if isinstance(step, dict) else None
    if kind == "ByteLevel":  # writes a byte as one or two
        return 2 * growth
    if kind == "Replace":  # a regular expression can match the empty text
        written, replaced = len(step["content"].encode()), step["pattern"].get("String", "").encode()
        return growth * max(1.0, written / len(replaced) if replaced else 1.0 + written)
    if kind == "Precompiled":
        table = b64decode(step["precompiled_charsmap"])
        texts = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
        return growth * max(1, *map(len, texts))
    return growth


def _settings(path: Path, backend: Tokenizer, call: str) -> dict[str, Any]:
    """Return the special tokens, the padding side and two flags of a `tokenizer_config.json`, checked."""
    if not path.exists() and not path.is_symlink():
        return {}
    table = read_mapping(path, call=call)
    names = (name for name in _SPECIAL if table.get(name) is not None)
    settings: dict[str, Any] = {name: _token(table[name], name, path, backend, call) for name in names}
    extra = table.get("extra_special_tokens") or table.get("additional_special_tokens") or []
    extra = list(extra.values()) if isinstance(extra, dict) else extra
    require(isinstance(extra, list), call, f"extra_special_tokens in {path} is {extra!r}, expected a list.")
    if extra:
        settings["extra_special_tokens"] = [_token(one, "extra_special_tokens", path, backend, call) for one in extra]
    for name in _FLAGS:
        if table.get(name) is not None:
            require(isinstance(table[name], bool), call, f"{name} in {path} is {table[name]!r}, expected a flag.")
            settings[name] = table[name]
    side = table.get("padding_side", "right")
    require(side in ("left", "right"), call, f"padding_side in {path} is {side!r}, expected 'left' or 'right'.")
    return {**settings, "padding_side": side}


def _token(given: Any, name: str, path: Path, backend: Tokenizer, call: str) -> str:
    word: Any = given.get("content") if isinstance(given, dict) else given
    require(isinstance(word, str), call, f"{name} in {path} is {given!r}, expected a token.")
    known = backend.token_to_id(word) is not None
    require(known, call, f"{name} in {path} is {word!r}, which is not in the vocabulary.")
    return word
