"""Every model of the catalogue by name: its flags and options, whole runs, and what is refused."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import continued
from hostile import change_json
from mistakes import refuses
from safetensors.torch import load_file, save_file
from steps import weights

from regard.models import HybridConfig, HybridForCausalLM, HybridModel, LanguageModel, language_models
from regard.training import TrainConfig, char_tokenizer, generate_text, language_model, load_model, model_config
from regard.training.fields import from_mapping, from_text, to_mapping
from regard.training.models import check_model
from regard.training.storage.folder import saved_config

MODELS = language_models.names()
TOKENIZER = char_tokenizer("abcdefgh ")
every_model = pytest.mark.parametrize("name", MODELS)


def small(name: str, **changes: object) -> TrainConfig:
    base = TrainConfig(data=Path("text"), model=name, context=16, spec=("biweight",), layers=2, width=16, heads=2)
    return replace(base, **changes)


def made(name: str, **changes: object):
    return model_config(small(name, **changes), call="train", vocab_size=30)


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of each kind and its tokenizer."""
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    language_model(small(request.param), TOKENIZER).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@every_model
def test_sizes_and_specs_reach_every_model(name: str) -> None:
    config = made(name, layers=4, width=24, heads=2, context=20, spec=("triweight",))
    assert type(config) is language_models.get(name).config
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (24, 4, 2)
    assert (config.vocab_size, config.max_position_embeddings) == (30, 20)
    assert set(config.mixers) == {"triweight"}
    places = len(config.mixers)
    each = tuple(["softmax", "biweight"] * places)[:places]
    assert made(name, layers=4, spec=each).mixers == list(each)
    message = rf"--spec has {places + 1} specs for {places} .*give 1 or {places}"
    refuses(message, made, name, layers=4, spec=("softmax",) * (places + 1))


@every_model
def test_special_tokens_are_the_tokenizers(name: str) -> None:
    config = language_model(small(name), TOKENIZER).config
    ids = (config.vocab_size, config.pad_token_id, config.eos_token_id, config.bos_token_id)
    assert ids == (len("abcdefgh ") + 3, 0, 1, None)


@pytest.mark.parametrize(
    ("name", "words", "field", "value"),
    [
        ("transformer", "feed_forward=gelu", "feed_forward", "gelu"),
        ("transformer", "norm=layer", "norm", "layer"),
        ("transformer", "rope-theta=500", "rope_theta", 500.0),
        ("transformer", "tie_word_embeddings=False", "tie_word_embeddings", False),
        ("transformer", "head_dim = 6", "head_dim", 6),
        ("memory-mosaic", "wiring=parallel", "wiring", "parallel"),
        ("memory-mosaic", "persistent_slots=7", "persistent_slots", 7),
        ("iclm", "variant=wv", "variant", "wv"),
        ("iclm", "f_mlp=none", "f_mlp", "none"),
        ("iclm", "f_rope=false", "f_rope", False),
    ],
)
def test_options_reach_the_config_by_type(name: str, words: str, field: str, value: object) -> None:
    found = getattr(made(name, option=(words,)), field)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"kv_heads": 1}, "num_key_value_heads", 1),
        ({"mlp_width": 40}, "intermediate_size", 40),
        ({"window": 5}, "window", 5),
        ({"temperature": "log"}, "temperatures", ["log", "log"]),
        ({"spec": ("local-linear",), "ridge": "learned"}, "ridges", ["learned", "learned"]),
        ({"qk_norm": "l2"}, "qk_norm", "l2"),
        ({"share_query_key": True}, "share_query_key", True),
        ({"exclude_self": True}, "exclude_self", True),
    ],
)
def test_flags_of_the_transformer_reach_it_and_are_refused_where_they_have_no_meaning(changes, field, value):
    found = getattr(made("transformer", **changes), field)
    assert found == value or [rule.partition("(")[0] for rule in found] == value
    flag = "--" + next(reversed(changes)).replace("_", "-")
    for name in MODELS:
        if not hasattr(made(name), field):
            refuses(rf"train: {flag} is not for --model {name}, which has no {field}", made, name, **changes)
    if field == "window":  # at least one model must have been asked
        assert any(not hasattr(made(name), field) for name in MODELS)


@every_model
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("initializer_rang=1", r"--option initializer_rang: --model {} has no such field\. Did you mean 'initializer"),
        ("size_field=1", r"--option size_field: --model {} has no such field"),
        ("initializer_range", r"--option is 'initializer_range', expected key=value"),
        ("=3", r"--option is '=3', expected key=value"),
        ("initializer_range=x", r"--option initializer_range is 'x', expected a number"),
        ("initializer_range=-1", r"--model {}: \w+: initializer_range is -1"),
        ("tie_word_embeddings=yes", r"--option tie_word_embeddings is 'yes', expected true or false"),
        ("hidden_size=8", r"--option hidden_size: use the flag of this field, --width"),
        ("mixers=softmax", r"--option mixers: use the flag of this field, --spec"),
        ("vocab_size=8", r"--option vocab_size: set by the tokenizer"),
    ],
)
def test_options_that_cannot_be(name: str, option: str, message: str) -> None:
    refuses("^train: " + message.format(name), made, name, option=(option,))


def test_layers_may_be_token_mixers_and_have_memories(run: Callable, out: Path) -> None:
    options = (
        "memories=FwPKM@1",
        'memory_options={"fwpkm": {"sub_keys": 8, "key_dim": 8, "value_dim": 8, "top_k": 2, "chunk_size": 4}}',
        'mixer_options={"gdn": {"num_heads": 2, "head_dim": 8}}',
        "training_window=4",
        "training_window_share=0.5",
    )
    sizes = {"spec": ("gdn", "biweight"), "layers": 2, "steps": 4, "save_every": 2, "option": options}
    straight = run(**sizes)
    model, _ = load_model(out, call="test")
    assert model.config.mixers == ["gated-deltanet", "biweight"]
    assert model.config.memories == "fwpkm@1"
    shutil.rmtree(out / "checkpoint-4")
    (out / "summary.json").unlink()
    assert run(resume=True, **sizes).loss == straight.loss  # windows are drawn by the step
    refuses("--model iclm: ICLMConfig: mixers: unknown spec 'gdn'", check_model, small("iclm", spec=("gdn",)), "train")


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [
        ("3", int, 3),
        ("3", float, 3.0),
        ("3", str, "3"),
        ("3", int | None, 3),
        ("none", int | None, None),
        ("none", str, "none"),
        ("None", str | None, None),
        ("2.5", int | float, 2.5),
        ("2", int | float, 2),
        ("x", int | str, "x"),
        ("TRUE", bool, True),
        ("a(b,c),d", list[str], ["a(b,c)", "d"]),
        ("1,2", tuple[int, ...], (1, 2)),
        ("1", int | list[int], 1),
        ("1,2", int | list[int], [1, 2]),
    ],
)
def test_values_are_read_by_type(text: str, hint: object, value: object) -> None:
    found = from_text(text, hint, "x")
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "hint"), [("1.5", int), ("x", int | float), ("1", bool), ("1,x", list[int]), ("", float)]
)
def test_values_of_another_type(text: str, hint: object) -> None:
    refuses(r"^where is .*, expected", from_text, text, hint, "where")


def test_a_run_of_before_there_were_models_goes_on(run: Callable, out: Path) -> None:
    run(steps=2)
    for name, missing in (("config.json", ("model", "option")), ("run.json", ("files",))):  # and no digests
        table = json.loads((out / name).read_text())
        (out / name).write_text(json.dumps({key: value for key, value in table.items() if key not in missing}))
    again = saved_config(out, call="test")
    assert (again.model, again.option) == ("transformer", ())
    assert run(steps=3, resume=True).step == 3
    table = to_mapping(small("iclm", option=("variant=wv", "f_mlp=none")))
    assert from_mapping(TrainConfig(), table, call="t", source="f").option == ("variant=wv", "f_mlp=none")


class ToyConfig(HybridConfig):
    model_type = "regard_toy_of_the_tests"
    colour: str = "red"


class ToyModel(HybridModel):
    config_class = ToyConfig


class ToyForCausalLM(HybridForCausalLM):
    config_class = ToyConfig
    model_class = ToyModel


def test_a_new_model_needs_no_edit(run: Callable, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(language_models._objects, "toy", LanguageModel(ToyConfig, ToyForCausalLM, "A toy."))
    run(model="toy", steps=1, option=("colour=green", "norm=layer"), window=4)
    model, _ = load_model(out, call="test")
    assert type(model) is ToyForCausalLM
    assert (model.config.colour, model.config.norm, model.config.window) == ("green", "layer", 4)


@every_model
def test_a_whole_run_and_its_last_half_once_more(name: str, run: Callable, refused: Callable, out: Path) -> None:
    """The same weights; and what was trained is loaded and continues a prompt."""
    sizes = {"layers": 2, "steps": 4, "save_every": 2, "log_every": 2}
    straight = run(model=name, **sizes)
    before = weights(out / "model")
    shutil.rmtree(out / "checkpoint-4")
    (out / "summary.json").unlink()
    other = next(other for other in MODELS if other != name)
    refused(f"--model is '{other}' but the run in .* began with '{name}'", model=other, resume=True, **sizes)
    assert run(model=name, resume=True, **sizes).loss == straight.loss
    torch.testing.assert_close(weights(out / "model"), before, rtol=0, atol=0)
    model, tokenizer = load_model(out, call="test")
    assert type(model) is language_models.get(name).model
    assert sum(p.numel() for p in model.parameters()) == straight.parameters
    text = generate_text(model, tokenizer, "the", max_new_tokens=20, temperature=0.0)
    assert text == continued(model, tokenizer, "the", 20)


TENSORS = {
    "missing keys: {}": lambda tensors, name: tensors.pop(name),
    "unexpected keys: stowaway": lambda tensors, name: tensors.update(stowaway=torch.zeros(1)),
    "mismatched keys: {}": lambda tensors, name: tensors.update({name: torch.cat([tensors[name]] * 2)}),
    "not finite: {}": lambda tensors, name: tensors[name].flatten()[-1:].fill_(torch.nan),
    "the tensors are those of another model": lambda tensors, name: [
        tensors.update({f"other.{key}": tensors.pop(key)}) for key in [*tensors]
    ],
}


@pytest.mark.parametrize("message", TENSORS)
def test_tensors_that_do_not_fit(saved: Path, tmp_path: Path, message: str) -> None:
    folder = shutil.copytree(saved, tmp_path / "model")
    load_model(folder, call="eval")
    tensors = load_file(folder / "model.safetensors")
    name = next(key for key in tensors if tensors[key].dim() == 2 and "embed" not in key)
    TENSORS[message](tensors, name)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    words = rf"^eval: the weights in {folder} do not fit their config \(.*{re.escape(message.format(name))}"
    refuses(words, load_model, folder, call="eval")


def test_a_config_of_another_model(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "model")
    kinds = [entry.config.model_type for _, entry in language_models.items()]
    other = next(kind for kind in kinds if kind != json.loads((folder / "config.json").read_text())["model_type"])
    change_json(folder / "config.json", {"model_type": other})
    refuses(f"eval: (cannot load the model|the weights) in {folder}", load_model, folder, call="eval")


def test_a_tokenizer_of_another_model(saved: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "model")
    char_tokenizer("abcdefgh ijk").save_pretrained(folder)
    refuses("has token ids up to 14, but its model has 0 to 11; they do not belong", load_model, folder, call="eval")
