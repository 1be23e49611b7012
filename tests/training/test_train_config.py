"""Configs: ranges, files, and one-line errors that say what is possible."""

import json
from collections.abc import Callable
from dataclasses import fields, make_dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from mistakes import error_of, refuses, says

import regard
from regard.tasks import tasks
from regard.training import TrainConfig
from regard.training.fields import from_mapping, read_mapping, to_mapping
from regard.training.validation import validate


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "--steps is 0, expected at least 1"),
        ({"batch": 0}, "--batch is 0"),
        ({"context": 1}, "--context is 1, expected at least 2"),
        ({"save_every": 0}, "--save-every is 0"),
        ({"keep": 0}, "--keep is 0"),
        ({"window": 0}, "--window is 0"),
        ({"learning_rate": 0.0}, "--learning-rate is 0.0, expected a finite number above 0"),
        ({"learning_rate": float("nan")}, "--learning-rate is nan"),
        ({"clip": float("inf")}, "--clip is inf"),
        ({"weight_decay": -0.1}, "--weight-decay is -0.1"),
        ({"weight_decay": float("nan")}, "--weight-decay is nan"),
        ({"warmup": 1.5}, "--warmup is 1.5, expected a fraction from 0 to 1"),
        ({"validation": 0.0}, "--validation is 0.0, expected a fraction between 0 and 1"),
        ({"validation": 1.0}, "--validation is 1.0"),
        ({"seed": -1}, "--seed is -1"),
        ({"seed": 2**32}, "--seed is 4294967296, expected 0 to 4294967295"),
        ({"width": 15}, "--width is 15, expected an even number"),
        ({"heads": 3}, "--heads is 3, which does not divide --width 16; choose from 1, 2, 4, 8, or a --width"),
        ({"heads": 16}, "--heads is 16, which gives heads of 1 channels at --width 16"),
        ({"heads": 4, "width": 36}, "choose from 1, 2, 3, 6, 9, 18, or a --width that is a multiple of 8"),
        ({"heads": 4, "kv_heads": 3}, "--kv-heads is 3"),
        ({"spec": ("softmax", "biweight")}, "--spec has 2 specs for 1 layers"),
        ({"spec": ("softmax,",)}, "--spec has an empty part"),
        ({"spec": ()}, "--spec is empty; give a spec"),
        ({"model": "transfomer"}, "unknown model 'transfomer'. Did you mean 'transformer'"),
        ({"model": "iclm", "layers": 3}, "--model iclm: ICLMConfig: num_hidden_layers is 3, expected an even"),
        ({"option": ("norm",)}, "--option is 'norm', expected key=value"),
        ({"option": ("norm=rms", "norm=layer")}, "--option norm is given twice"),
        ({"spec": ("cosine",), "temperature": "learned"}, "--temperature: temperature learned needs scores"),
        ({"temperature": "lgo"}, "--temperature: unknown temperature 'lgo'. Did you mean 'log'?"),
        ({"heads": 2, "kv_heads": 1, "share_query_key": True}, "--kv-heads 1 must equal --heads 2; omit --kv-heads"),
        ({"spec": ("biwait",)}, "Did you mean 'biweight'"),
        ({"tokenizer": "chars"}, "Did you mean 'char'"),
        ({"device": "gpu"}, "unknown device 'gpu'"),
        ({"data": None}, "no training text; give --data FILE, --data FOLDER or --data datasets:NAME, or a task"),
        ({"resume": True, "overwrite": True}, "give one of them"),
        ({"spec": ("softmax",), "ridge": "learned"}, "train: --ridge: ridge learned needs a local linear model"),
        ({"spec": ("local-linear",), "ridge": "learnt"}, "--ridge: unknown ridge 'learnt'. Did you mean 'learned'"),
    ],
)
def test_what_is_out_of_range_is_named(tiny: Callable, changes: dict, message: str) -> None:
    assert message in error_of(validate, tiny(**changes))


@pytest.mark.parametrize(
    ("words", "specs"),
    [
        (["a,b(c=1,d=2)", "e"], ["a", "b(c=1,d=2)", "e"]),
        ([" a , b(c=1,d=2) ,e"], ["a", "b(c=1,d=2)", "e"]),
        (["a,", "b(c=1,d=2),", "e"], ["a", "b(c=1,d=2)", "e"]),
        (["f[g(h,i),j],k"], ["f[g(h,i),j]", "k"]),
        (["a,,b"], ["a", "", "b"]),
        ([""], [""]),
        (["a),b"], ["a)", "b"]),
    ],
)
def test_spaces_and_commas_between_specs(words: list[str], specs: list[str]) -> None:
    assert TrainConfig(spec=tuple(words)).spec == tuple(specs)


def test_sizes_that_nothing_computes_are_named_by_their_flags(tiny: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    one = 2 * 16 * 16 * 8  # numbers per window of the local linear model
    sizes = {"layers": 2, "spec": ("softmax", "local-linear")}
    validate(tiny(**sizes, batch=2**20))  # in blocks it has no limit
    for name in ("blocked", "cpu"):  # what is left is the plain form, which has one
        impl = type(regard.registries()["impl"].get(name).impl)
        monkeypatch.setattr(impl, "supports", lambda self, problem: "is away" if problem.spec.degree else None)
    monkeypatch.setattr("regard.pairwise.reference.LIMIT", 6 * one)
    validate(tiny(**sizes, batch=6))
    validate(tiny(batch=24))  # the others have no such limit
    sizes_of_run = "train: --spec local-linear cannot be computed with --batch 24, --heads 2 and --context 16"
    mend = "a smaller --batch (such as 6) with a larger --accumulate"
    says(f"{sizes_of_run} ... {mend}", validate, tiny(**sizes, batch=24))
    monkeypatch.setattr("regard.pairwise.reference.LIMIT", one - 1)
    refuses("Give a smaller --context, at any --batch", validate, tiny(**sizes))


def test_ridges_are_for_the_specs_that_have_one(tiny: Callable) -> None:
    validate(tiny(layers=2, spec=("softmax", "local-linear[biweight]"), ridge="learned(start=0.5)", qk_norm="rms"))
    validate(tiny(device="auto"))


def test_plain_data_and_back(tiny: Callable, tmp_path: Path) -> None:
    numbers = {"context": np.int64(12), "weight_decay": np.float32(0.25), "clip": torch.tensor(0.5)}
    path = tmp_path / "config.json"
    for given in ({}, numbers):
        config = tiny(kv_heads=1, spec=("softmax",), window=None, resume=True, **given)
        assert {type(getattr(config, name)) for name in given} <= {int, float}
        path.write_text(json.dumps(to_mapping(config)))
        assert from_mapping(TrainConfig(), read_mapping(path, call="t"), call="t", source="f") == config
    assert set(to_mapping(config)) == {field.name for field in fields(TrainConfig)}
    rates = make_dataclass("Recipe", ["rates"])((np.float32(0.25), torch.tensor(3), np.arange(2)))
    assert repr(to_mapping(rates)) == "{'rates': [0.25, 3, [0, 1]]}"
    path = tmp_path / "run.toml"
    path.write_text('spec = "biweight"\nsteps = 5\nlearning-rate = 1\nout = "x/y"\nresume = true\n')
    config = from_mapping(TrainConfig(width=8), read_mapping(path, call="t"), call="t", source="f")
    assert config == TrainConfig(width=8, spec=("biweight",), steps=5, learning_rate=1.0, out=Path("x/y"), resume=True)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.toml", "stepz = 3", "unknown key 'stepz' in bad. Did you mean 'steps'"),
        ("a.toml", "steps = 'many'", "steps in bad is 'many' (str), expected an integer"),
        ("a.toml", "steps = 3.0", "steps in bad is 3.0 (float), expected an integer"),
        ("a.toml", "steps = true", "steps in bad is True (bool), expected an integer"),
        ("a.toml", "resume = 1", "resume in bad is 1 (int), expected true or false"),
        ("a.toml", "dtype = 'float3'", "dtype in bad is 'float3'. Did you mean 'float32'"),
        ("a.toml", "spec = [1]", "spec in bad is 1 (int), expected text"),
        ("a.toml", "data = 3", "data in bad is 3 (int), expected a path"),
        ("a.toml", "steps = = 3", "is not valid TOML"),
        ("a.json", "{", "is not valid JSON"),
        ("a.json", "[1]", "holds a list, expected a table"),
        ("a.toml", "\xff", "cannot read config file"),
        ("a.yaml", "", "neither a .toml nor a .json"),
        ("b/none.toml", None, "does not exist"),
    ],
)
def test_files_that_are_no_config(name: str, content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content.encode("latin-1"))
    read = lambda: read_mapping(tmp_path / name, call="train")  # noqa: E731
    assert message in error_of(lambda: from_mapping(TrainConfig(), read(), call="train", source="bad"))


def test_values_of_other_types_are_taken_as_the_field_has_them_or_named() -> None:
    config = TrainConfig(data="a", out="b", spec="biweight", report_to="wandb", clip=1)  # type: ignore[arg-type]
    assert (config.data, config.out, config.spec, config.report_to) == (Path("a"), Path("b"), ("biweight",), ("wandb",))
    assert type(config.clip) is float
    says("TrainConfig: steps is '3' ... expected an integer", TrainConfig, steps="3")
    says("TrainConfig: dtype is 'float16'. Did you mean 'bfloat16' or 'float32'", TrainConfig, dtype="float16")
    says("TrainConfig: optimizer is 'sgd'", TrainConfig, optimizer="sgd")


def test_class_variables_have_a_type() -> None:
    """Python 3.10 reads no hints of a class with a plain `ClassVar`, so that no run folder or task could be read."""
    kinds = [each for _, each in tasks.items() if isinstance(each, type)]
    for kind in (base for each in (TrainConfig, *kinds) for base in each.__mro__):
        assert "ClassVar" not in vars(kind).get("__annotations__", {}).values()
