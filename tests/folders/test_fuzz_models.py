"""Folders of `save_pretrained`, one file mutated as hypothesis draws: `from_pretrained` and `load_model` give the saved
model, or one error that names the folder or the field of its configuration. These folders have no seal, so that changed
weights are another model, and changed values of a configuration the model that they describe."""

import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
import torch
from any_model import make, text
from hostile import change_json
from hypothesis import given
from hypothesis import strategies as st
from mistakes import refuses
from safetensors.torch import load_file
from small_words import tokenizer
from test_fuzz_folders import examples, mutations
from transformers import PreTrainedConfig, PreTrainedModel

from regard.checks import ArgumentError
from regard.models import language_models
from regard.models.base.base_config import own_fields
from regard.training import load_model

ENDLESS = {"pipe", "link to zeros"}
"""Mutations that transformers reads for ever; `load_model` refuses them."""
TOKENS = text(1, 5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, torch.Tensor]]:
    """A folder and the logits of each model."""
    made = {}
    for name in language_models.names():
        folder = tmp_path_factory.mktemp(name)
        model = make(name, "biweight", torch.float32, num_hidden_layers=2)
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        made[name] = (folder, model(TOKENS).logits.detach())
    return made


def read(load: Callable[[Path], PreTrainedModel], folder: Path) -> torch.Tensor | str:
    """Return the logits of the model in a folder, or the message of one error that says where the fault is."""
    try:
        return load(folder).eval()(TOKENS).logits.detach()
    except (ArgumentError, OSError, ValueError) as error:
        message = str(error).strip()
    assert str(folder) in message or re.match(r"\w+Config: ", message), message
    assert "\n" not in message, message
    return message


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
def test_drawn_mutations_of_saved_models(saved: dict, tmp_path: Path) -> None:
    """As many as REGARD_FUZZ_EXAMPLES says; 10,000 take a quarter of an hour."""
    files = {name: sorted(path.name for path in folder.iterdir()) for name, (folder, _) in saved.items()}

    @examples
    @given(name=st.sampled_from(sorted(saved)), seed=st.integers(0, 2**32 - 1), ours=st.booleans(), data=st.data())
    def each(name: str, seed: int, ours: bool, data: st.DataObject) -> None:
        file = data.draw(st.sampled_from(files[name]))
        how = data.draw(st.sampled_from(sorted({*mutations(Path(file))} - (set() if ours else ENDLESS))))
        source, expected = saved[name]
        folder = tmp_path / "model"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        mutations(Path(file))[how](folder / file, random.Random(seed))
        kind = language_models.get(name).model
        found = read((lambda path: load_model(path, call="test")[0]) if ours else kind.from_pretrained, folder)
        changed = file == "model.safetensors" and how in ("flip", "swap")
        right = isinstance(found, str) or changed or torch.equal(found, expected)
        assert right or (file == "config.json" and torch.equal(found, read(partial(written, name, source), folder)))

    each()


def written(name: str, source: Path, folder: Path) -> PreTrainedModel:
    """The model by the values that stand in a configuration, which a mutation may have changed to other valid ones."""
    kind = language_models.get(name)
    saved, table = (json.loads((path / "config.json").read_text()) for path in (source, folder))
    model = kind.model(kind.config(**{field: table[field] for field in own_fields(kind.config) if field in saved}))
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)  # without tied weights
    return model


def test_a_damaged_file_is_one_error(saved: dict, tmp_path: Path) -> None:
    empty = ("model.safetensors", "empty", "SafetensorError: .*header too small")
    for file, how, what in [empty, ("generation_config.json", "nested", "RecursionError: ")]:
        folder = tmp_path / how
        shutil.copytree(saved["transformer"][0], folder)
        mutations(Path(file))[how](folder / file, random.Random(0))
        words = rf"HybridForCausalLM.from_pretrained: cannot load {folder}: {what}"
        refuses(words, language_models.get("transformer").model.from_pretrained, folder)


@pytest.mark.parametrize("ours", [True, False], ids=["load_model", "from_pretrained"])
def test_a_field_that_a_saved_configuration_lost_is_not_its_default(saved: dict, tmp_path: Path, ours: bool) -> None:
    by_transformers = {each.name for each in fields(PreTrainedConfig)}
    for name, (source, _) in saved.items():
        kind = language_models.get(name)
        load = (lambda path: load_model(path, call="test")[0]) if ours else kind.model.from_pretrained
        folder = tmp_path / name
        shutil.copytree(source, folder)
        whole = (folder / "config.json").read_text()
        for field in own_fields(kind.config):
            if field in by_transformers:
                continue
            (folder / "config.json").write_text(whole)
            change_json(folder / "config.json", lambda table: {key: table[key] for key in table if key != field})  # noqa: B023
            assert f"the saved configuration has no '{field}'" in str(read(load, folder))
