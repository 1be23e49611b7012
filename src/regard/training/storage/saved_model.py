"""Reading models from folders that may come from elsewhere.

`config.json` and safetensors are read, nothing else. transformers gets a configuration and tensors, never the folder:
it can find no code, adapter, pickle or generation setting in it. Sizes in the configuration are held against those
in the headers of the weights before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...checks import ArgumentError
from ..config import MOST_LAYERS
from ..fields import read_mapping
from .files import is_plain_name, regular_size

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("float64", "float32", "float16", "bfloat16")
_FLOATS = ("F64", "F32", "F16", "BF16")
"""The same in the headers of safetensors."""
_IGNORED = {  # what a causal language model has no use for, and what names code
    *("auto_map", "num_labels", "id2label", "label2id", "transformers_weights", "fusion_config"),
    *("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"),
}
_SLACK = 1 << 24
"""Numbers that a model may hold beside those in its file: masks and tables that are computed."""


def load_weights(folder: Path, *, call: str) -> dict[str, Tensor]:
    """Return the tensors in a folder's safetensors, by name.

    Raises:
        ArgumentError: there are none, or a file is damaged or lies elsewhere.
    """
    with _errors(folder, call), weights(folder) as found:
        return {name: each.file.get_tensor(name) for name, each in found.items()}


def read_model(folder: Path, *, call: str) -> PreTrainedModel:
    """Return the causal language model in a folder.

    Raises:
        ArgumentError: no model in it, one of a type that is not known or no language model, or a damaged one: tensors
            that are missing, too many, of another shape or not finite, or a config of a model that is far larger.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    from ...models.base.loading import misfits

    table = _config_table(folder, call)
    with _errors(folder, call):
        with weights(folder) as found:
            config = _config(table, len(found))
            kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            _check_tensors(kind, config, found)
        model, loading = kind.from_pretrained(
            None,
            config=config,
            state_dict=load_weights(folder, call=call),
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported below, in one line
        )
        model.config.name_or_path = str(folder)
        wrong = misfits(model, loading)
    if wrong:
        raise ArgumentError(f"{call}: the weights in {folder} do not fit their config ({'; '.join(wrong)}).")
    return model.eval()


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in a file, of which only the header was read."""

    file: Any
    shape: list[int]
    dtype: str

    @property
    def numel(self) -> int:
        """How many numbers it has."""
        return int(torch.Size(self.shape).numel())


@contextmanager
def weights(folder: Path) -> Iterator[dict[str, SavedTensor]]:
    """Open the safetensors of a folder, and give the tensors' names, shapes and dtypes.

    Raises:
        ValueError, OSError, SafetensorError: they cannot be read.
    """
    index = None if (folder / SINGLE).exists() or not (folder / INDEX).exists() else _index(folder)
    found = {}
    with ExitStack() as files:
        for shard in [SINGLE] if index is None else sorted(set(index.values())):
            regular_size(folder / shard)
            file = files.enter_context(safe_open(folder / shard, framework="pt"))
            for name in file.keys():  # noqa: SIM118  (it is no mapping)
                if index is None or index.get(name) == shard:
                    piece = file.get_slice(name)
                    found[name] = SavedTensor(file, piece.get_shape(), piece.get_dtype())
        absent = sorted(set(index or ()) - set(found))
        if absent:
            raise ValueError(f"{absent[0]} is not in the file that {INDEX} names")
        yield found


def _index(folder: Path) -> dict[str, str]:
    """Return which file holds each tensor; every one a safetensors file in the folder."""
    places = read_mapping(folder / INDEX, call="index").get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{INDEX} has no weight_map")
    for place in places.values():
        if not is_plain_name(place) or not place.endswith(".safetensors"):
            raise ValueError(f"{INDEX} names {place!r}, expected a .safetensors file in the same folder")
    return places


@contextmanager
def _errors(folder: Path, call: str) -> Iterator[None]:
    """Turn whatever reading raises into one ArgumentError: a changed file can make any line of a library fail."""
    try:
        yield
    except (Exception, SafetensorError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        prefix = f"{call}: cannot load the model in {folder}: "
        raise ArgumentError(reason if reason.startswith(prefix) else prefix + reason) from None


def _config_table(folder: Path, call: str) -> dict[str, Any]:
    """Return the fields in a folder's `config.json`, of a causal language model.

    Raises:
        ArgumentError: it cannot be read, or is of another type.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    from ...models import language_models

    table = read_mapping(folder / "config.json", call=call)
    kind = table.get("model_type")
    known = isinstance(kind, str) and kind in CONFIG_MAPPING
    if known and CONFIG_MAPPING[kind] in MODEL_FOR_CAUSAL_LM_MAPPING:
        return table
    ours = ", ".join(entry.config.model_type for _, entry in language_models.items())
    fault = "which is no causal language model" if known else "which is not known here"
    raise ArgumentError(
        f"{call}: the model in {folder} is of type {kind!r}, {fault}; expected one of transformers' or of ours: {ours}."
    )


def _config(table: dict[str, Any], tensors: int) -> PreTrainedConfig:
    """Return the configuration of these fields, of a model with so many tensors.

    Raises:
        ValueError: a field would make transformers allocate, import or overwrite something.
    """
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[table["model_type"]]
    table = {name: value for name, value in table.items() if name not in _IGNORED}
    if table.get("quantization_config") is not None:
        raise ValueError("its weights are quantised, which is not supported here")
    for name in ("dtype", "torch_dtype"):
        if table.get(name) not in (None, *_DTYPES):
            raise ValueError(f"{name} is {table[name]!r}, expected one of {', '.join(_DTYPES)}")
    _check_fields(table, kind, max(MOST_LAYERS, tensors))
    return kind.from_dict(table)


def _check_fields(table: dict[str, Any], kind: type | None, most_layers: int) -> None:
    """Refuse numbers of layers beyond what a file can hold, and names of the configuration's own methods.

    Raises:
        ValueError: there is one; in tables inside the table, too.
    """
    for name, value in table.items():
        if kind is not None and callable(getattr(kind, name, None)):
            raise ValueError(f"{name!r} is no field of a configuration")
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError(f"{name} is a number of {value.bit_length()} bits")
        if "layer" in name and isinstance(value, int) and value > most_layers:
            raise ValueError(f"{name} is {value}, more layers than its weights hold")
        if isinstance(value, dict):
            _check_fields(value, None, most_layers)


def _check_tensors(kind: type[PreTrainedModel], config: PreTrainedConfig, found: dict[str, SavedTensor]) -> None:
    """Refuse a configuration of a model far larger than the weights beside it, without allocating it, and weights
    that are no floating-point numbers: transformers would cast them.

    Raises:
        ValueError: they are.
    """
    held = sum(each.numel for each in found.values())
    with torch.device("meta"):
        model = kind(config)
    asked = sum(t.numel() for t in (*model.parameters(), *model.buffers()))
    if asked > 2 * held + _SLACK:
        raise ValueError(f"its config describes a model of {asked:,} numbers, its weights are {held:,}")
    ours = model.state_dict()
    for name, each in found.items():
        tensor = ours.get(name, ours.get(f"{kind.base_model_prefix}.{name}"))
        if tensor is not None and tensor.is_floating_point() and each.dtype not in _FLOATS:
            raise ValueError(f"{name} is saved as {each.dtype}, expected one of {', '.join(_FLOATS)}")
