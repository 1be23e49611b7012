"""Reading models and tokenizers from untrusted folders.

Only JSON and safetensors are read. transformers gets a configuration and tensors, never the folder, so that it finds no
code, adapter, pickle or generation settings there. Sizes in the configuration are compared with those in the headers of
the weights before anything is allocated. A tokenizer becomes a `PreTrainedTokenizerFast`; chat templates are ignored.
"""

import json
from base64 import b64decode
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from ...checks import ArgumentError, require
from ...models import language_models
from ...models.base.loading import misfits
from ..config import MOST_LAYERS
from ..errors import expect, one_error
from ..fields import read_mapping
from ..quiet import quiet_transformers
from .files import is_plain_name, regular_size

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("float64", "float32", "float16", "bfloat16")
_FLOATS = ("F64", "F32", "F16", "BF16")
"""The same dtypes in the headers of safetensors."""
_IGNORED = {  # fields that a causal language model does not use, and fields that name code
    *("auto_map", "num_labels", "id2label", "label2id", "transformers_weights", "fusion_config"),
    *("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"),
}
_SLACK = 1 << 24
"""How many computed numbers, such as masks and tables, a model may have in addition to its weights."""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("split_special_tokens", "clean_up_tokenization_spaces")
_MOST_TOKENS = 2**31
_MOST_GROWTH = 1 << 12
"""The largest factor by which the steps of a tokenizer may lengthen a text; several in a row could fill the memory."""
_PROBES = ("", "a", "The quick brown fox, 1 + 2 = 3.\n")


def load_weights(folder: Path, *, call: str) -> dict[str, Tensor]:
    """Return the tensors in a folder's safetensors, by name; raise `ArgumentError` for a damaged or foreign file."""
    with one_error(f"{call}: cannot load the model in {folder}"), _weights(folder) as saved:
        return {name: file.get_tensor(name) for name, (file, _) in saved.items()}


@quiet_transformers()
def read_model(folder: Path, *, call: str) -> PreTrainedModel:
    """Return the causal language model in a folder; raise `ArgumentError` if there is none, its config is too large or
    does not fit its tensors, or a tensor is not finite."""
    table = _config_table(folder, call)
    with one_error(f"{call}: cannot load the model in {folder}"):
        with _weights(folder) as saved:
            config = _config(table, len(saved))
            kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            _check_tensors(kind, config, saved)
        model, loading = kind.from_pretrained(
            None, config=config, state_dict=load_weights(folder, call=call), trust_remote_code=False,
            output_loading_info=True, ignore_mismatched_sizes=True,  # reported below in one line
        )  # fmt: skip
        model.config.name_or_path = str(folder)
        mismatches = misfits(model, loading)
    require(not mismatches, call, f"the weights in {folder} do not fit their config ({'; '.join(mismatches)}).")
    return model.eval()


@contextmanager
def _weights(folder: Path) -> Iterator[dict[str, tuple[Any, Any]]]:
    """Yield by name the file of each tensor and its slice, which reads shape and dtype from the header alone."""
    index: Any = None
    if not (folder / SINGLE).exists() and (folder / INDEX).exists():
        index = read_mapping(folder / INDEX, call="index").get("weight_map")
        expect(isinstance(index, dict) and bool(index), f"{INDEX} has no weight_map")
        for file in index.values():
            inside = is_plain_name(file) and file.endswith(".safetensors")
            expect(inside, f"{INDEX} names {file!r}, expected a .safetensors file in the same folder")
    saved: dict[str, tuple[Any, Any]] = {}
    with ExitStack() as files:
        for shard in [SINGLE] if index is None else sorted(set(index.values())):
            regular_size(folder / shard)
            file = files.enter_context(safe_open(folder / shard, framework="pt"))
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                if index is None or index.get(name) == shard:
                    saved[name] = file, file.get_slice(name)
        missing = min(set(index or ()) - set(saved), default=None)
        expect(missing is None, f"{missing} is not in the file that {INDEX} names")
        yield saved


def _config_table(folder: Path, call: str) -> dict[str, Any]:
    """Return the fields of a folder's `config.json` after checking that the model is a causal language model."""
    table = read_mapping(folder / "config.json", call=call)
    kind = table.get("model_type")
    known = isinstance(kind, str) and kind in CONFIG_MAPPING
    if known and CONFIG_MAPPING[kind] in MODEL_FOR_CAUSAL_LM_MAPPING:
        return table
    ours = ", ".join(entry.config.model_type for _, entry in language_models.items())
    problem = "which is not a causal language model" if known else "which is unknown"
    expected = f"{problem}; expected a type of transformers or one of {ours}"
    raise ArgumentError(f"{call}: the model in {folder} has type {kind!r}, {expected}.")


def _config(table: dict[str, Any], tensors: int) -> PreTrainedConfig:
    """Return the configuration; raise ValueError for a field by which transformers would allocate or import."""
    kind = CONFIG_MAPPING[table["model_type"]]
    table = {name: value for name, value in table.items() if name not in _IGNORED}
    expect(table.get("quantization_config") is None, "quantised weights are not supported")
    for name in ("dtype", "torch_dtype"):
        given = table.get(name)
        expect(given in (None, *_DTYPES), f"{name} is {given!r}, expected one of {', '.join(_DTYPES)}")
    _check_fields(table, kind, max(MOST_LAYERS, tensors))
    return kind.from_dict(table)


def _check_fields(table: dict[str, Any], kind: type | None, most_layers: int) -> None:
    """Raise ValueError, in nested tables too, for too many layers and for names of the configuration's methods."""
    for name, value in table.items():
        expect(kind is None or not callable(getattr(kind, name, None)), f"{name!r} is not a field of a configuration")
        if isinstance(value, int):
            expect(abs(value) < 2**63, f"{name} is a number of {value.bit_length()} bits")
            fits = "layer" not in name or value <= most_layers
            expect(fits, f"{name} is {value}, more layers than its weights hold")
        if isinstance(value, dict):
            _check_fields(value, None, most_layers)


def _check_tensors(kind: type[PreTrainedModel], config: PreTrainedConfig, saved: dict[str, tuple[Any, Any]]) -> None:
    """Raise ValueError for a model much larger than its weights, without allocating it, and for integer weights."""
    size = sum(torch.Size(piece.get_shape()).numel() for _, piece in saved.values())
    with torch.device("meta"):
        model = kind(config)
    needed = sum(t.numel() for t in (*model.parameters(), *model.buffers()))
    expect(needed <= 2 * size + _SLACK, f"its config describes a model of {needed:,} numbers, its weights are {size:,}")
    expected = model.state_dict()
    for name, (_, piece) in saved.items():
        tensor = expected.get(name, expected.get(f"{kind.base_model_prefix}.{name}"))
        if tensor is not None and tensor.is_floating_point() and piece.get_dtype() not in _FLOATS:
            raise ValueError(f"{name} is saved as {piece.get_dtype()}, expected one of {', '.join(_FLOATS)}")


@quiet_transformers()
def load_tokenizer(folder: Path, *, call: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a folder; raise `ArgumentError` if a file is missing, damaged or inconsistent."""
    backend = _backend(folder / "tokenizer.json", call)
    settings = _settings(folder / "tokenizer_config.json", backend, call)
    inputs = ["input_ids", "attention_mask"]
    with one_error(f"{call}: cannot load the tokenizer in {folder}"):
        return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=inputs, **settings)


def _backend(path: Path, call: str) -> Tokenizer:
    """Return the tokenizer of a `tokenizer.json` after checking that it is deterministic and its ids are unique."""
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

    def token(name: str, given: Any) -> str:
        word: Any = given.get("content") if isinstance(given, dict) else given
        require(isinstance(word, str), call, f"{name} in {path} is {given!r}, expected a token.")
        known = backend.token_to_id(word) is not None
        require(known, call, f"{name} in {path} is {word!r}, which is not in the vocabulary.")
        return word

    settings: dict[str, Any] = {name: token(name, table[name]) for name in _SPECIAL if table.get(name) is not None}
    extra = table.get("extra_special_tokens") or table.get("additional_special_tokens") or []
    extra = list(extra.values()) if isinstance(extra, dict) else extra
    require(isinstance(extra, list), call, f"extra_special_tokens in {path} is {extra!r}, expected a list.")
    if extra:
        settings["extra_special_tokens"] = [token("extra_special_tokens", one) for one in extra]
    for name in _FLAGS:
        if table.get(name) is not None:
            require(isinstance(table[name], bool), call, f"{name} in {path} is {table[name]!r}, expected a flag.")
            settings[name] = table[name]
    side = table.get("padding_side", "right")
    require(side in ("left", "right"), call, f"padding_side in {path} is {side!r}, expected 'left' or 'right'.")
    return {**settings, "padding_side": side}
