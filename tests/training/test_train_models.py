"""Every model of the catalogue, chosen by name: its flags and options, whole runs, several processes, and what is
refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from regard.checks import ArgumentError
from regard.models import HybridConfig, HybridForCausalLM, HybridModel, LanguageModel, language_models
from regard.training import TrainConfig, char_tokenizer, generate_text, language_model, load_model, model_config, train
from regard.training.fields import from_mapping, from_text, to_mapping
from regard.training.models import check_model
from regard.training.storage.folder import saved_config
from regard.training.validation import validate

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


# Flags and options -------------------------------------------------------------------------------------------


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
    with pytest.raises(ArgumentError, match=rf"--spec has {places + 1} specs for {places} .*give 1 or {places}"):
        made(name, layers=4, spec=("softmax",) * (places + 1))


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
def test_flags_of_the_transformer_reach_it_and_are_refused_where_they_have_no_meaning(
    changes: dict, field: str, value: object
) -> None:
    found = getattr(made("transformer", **changes), field)
    assert found == value or [rule.partition("(")[0] for rule in found] == value
    flag = "--" + next(reversed(changes)).replace("_", "-")
    for name in MODELS:
        if not hasattr(made(name), field):
            with pytest.raises(ArgumentError, match=rf"train: {flag} is not for --model {name}, which has no {field}"):
                made(name, **changes)
    if field == "window":  # at least one model must have been asked
        assert any(not hasattr(made(name), field) for name in MODELS)


@every_model
@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "initializer_rang=1",
            r"--option initializer_rang: --model {} has no such field\. Did you mean 'initializer_ra",
        ),
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
    with pytest.raises(ArgumentError, match="^train: " + message.format(name)) as caught:
        made(name, option=(option,))
    assert "\n" not in str(caught.value)


def test_layers_may_be_token_mixers_and_have_memories(tiny: Callable, silent: Console) -> None:
    options = (
        "memories=FwPKM@1",
        'memory_options={"fwpkm": {"sub_keys": 8, "key_dim": 8, "value_dim": 8, "top_k": 2, "chunk_size": 4}}',
        'mixer_options={"gdn": {"num_heads": 2, "head_dim": 8}}',
        "training_window=4",
        "training_window_share=0.5",
    )
    config = tiny(spec=("gdn", "biweight"), layers=2, steps=4, save_every=2, option=options)
    straight = train(config, console=silent)
    model, _ = load_model(config.out, call="test")
    assert model.config.mixers == ["gated-deltanet", "biweight"]
    assert model.config.memories == "fwpkm@1"
    shutil.rmtree(config.out / "checkpoint-4")
    (config.out / "summary.json").unlink()
    assert train(replace(config, resume=True), console=silent).loss == straight.loss  # windows are drawn by the step
    with pytest.raises(ArgumentError, match="--model iclm: ICLMConfig: mixers: unknown spec 'gdn'"):
        check_model(small("iclm", spec=("gdn",)), "train")


def test_an_option_given_twice_and_a_model_that_is_not_there() -> None:
    with pytest.raises(ArgumentError, match="--option norm is given twice"):
        made("transformer", option=("norm=rms", "norm=layer"))
    with pytest.raises(ArgumentError, match=r"unknown model 'transfomer'\. Did you mean 'transformer'"):
        validate(small("transfomer"))
    with pytest.raises(
        ArgumentError, match=r"train: --model iclm: ICLMConfig: num_hidden_layers is 3, expected an even"
    ):
        validate(small("iclm", layers=3))


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
    with pytest.raises(ArgumentError, match=r"^where is .*, expected"):
        from_text(text, hint, "where")


def test_a_run_of_before_there_were_models_goes_on(tiny: Callable, silent: Console) -> None:
    config = tiny(steps=2)
    train(config, console=silent)
    file = config.out / "config.json"
    old = {key: value for key, value in json.loads(file.read_text()).items() if key not in ("model", "option")}
    file.write_text(json.dumps(old))
    run = config.out / "run.json"  # and no digests
    run.write_text(json.dumps({key: value for key, value in json.loads(run.read_text()).items() if key != "files"}))
    again = saved_config(config.out, call="test")
    assert (again.model, again.option) == ("transformer", ())
    assert train(tiny(steps=3, resume=True), console=silent).step == 3
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


def test_a_new_model_needs_no_edit(tiny: Callable, silent: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = LanguageModel(ToyConfig, ToyForCausalLM, "A toy.")
    monkeypatch.setitem(language_models._objects, "toy", entry)
    config = tiny(model="toy", steps=1, option=("colour=green", "norm=layer"), window=4)
    train(config, console=silent)
    model, _ = load_model(config.out, call="test")
    assert type(model) is ToyForCausalLM
    assert (model.config.colour, model.config.norm, model.config.window) == ("green", "layer", 4)


# Whole runs --------------------------------------------------------------------------------------------------


@every_model
def test_a_whole_run_and_its_last_half_once_more(name: str, tiny: Callable, silent: Console) -> None:
    config = tiny(model=name, layers=2, steps=4, save_every=2, log_every=2)
    straight = train(config, console=silent)
    before = load_file(config.out / "model" / "model.safetensors")
    shutil.rmtree(config.out / "checkpoint-4")
    (config.out / "summary.json").unlink()
    other = next(other for other in MODELS if other != name)
    with pytest.raises(ArgumentError, match=f"--model is '{other}' but the run in .* began with '{name}'"):
        train(replace(config, model=other, resume=True), console=silent)
    again = train(replace(config, resume=True), console=silent)
    assert again.loss == straight.loss
    after = load_file(config.out / "model" / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in after)


@every_model
def test_what_was_trained_is_loaded_and_continues_a_prompt(name: str, tiny: Callable, silent: Console) -> None:
    config = tiny(model=name, layers=2, steps=2)
    summary = train(config, console=silent)
    model, tokenizer = load_model(config.out, call="test")
    assert type(model) is language_models.get(name).model
    assert sum(p.numel() for p in model.parameters()) == summary.parameters
    text = generate_text(model, tokenizer, "the", max_new_tokens=20, temperature=0.0)
    ids = tokenizer("the")["input_ids"]
    with torch.no_grad():  # as a loop without a cache says
        for _ in range(20):
            scores = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            ids.append(3 + int(scores[3:].argmax()))  # 0 to 2 are special
    assert text == tokenizer.decode(ids)


PROGRAM = """
import sys, torch
from torch.distributed import destroy_process_group, get_rank, init_process_group
from torch.nn.parallel import DistributedDataParallel
from regard.models import language_models

def trained(name, batches, parallel):
    torch.manual_seed(0)
    entry = language_models.get(name)
    sizes = dict(vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, mixers="biweight")
    model = entry.model(entry.config(**sizes)).double()
    running = DistributedDataParallel(model) if parallel else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in batches:
        optimizer.zero_grad()
        running(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    return model.state_dict()

if __name__ == "__main__":
    folder, names = sys.argv[1], sys.argv[2:]
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(20, (4, 12), generator=generator) for _ in range(3)]
    init_process_group("gloo")
    rank = get_rank()
    for name in names:
        half = [batch[2 * rank : 2 * rank + 2] for batch in batches]
        torch.save(trained(name, half, True), f"{folder}/{name}.{rank}")
        if rank == 0:
            torch.save(trained(name, batches, False), f"{folder}/{name}.alone")
    destroy_process_group()
"""


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every model learned in two processes, and in one with twice the batch."""
    folder = tmp_path_factory.mktemp("processes")
    (folder / "program.py").write_text(PROGRAM)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, str(folder / "program.py"), str(folder), *MODELS],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return folder


@every_model
def test_two_processes_learn_what_one_does_with_both_batches(name: str, processes: Path) -> None:
    first, second, alone = (torch.load(processes / f"{name}.{which}") for which in ("0", "1", "alone"))
    assert first.keys() == second.keys() == alone.keys()
    for key, value in alone.items():
        assert torch.equal(first[key], second[key]), key
        torch.testing.assert_close(first[key], value, rtol=1e-9, atol=1e-9)


# What is refused ---------------------------------------------------------------------------------------------


def damaged(tensors: dict[str, torch.Tensor]) -> list[tuple[dict[str, torch.Tensor], str]]:
    """Tensors that do not fit, and what the message says."""
    name = next(key for key in tensors if tensors[key].dim() == 2 and "embed" not in key)
    holed = tensors[name].clone()
    holed.flatten()[-1] = torch.nan
    return [
        ({key: value for key, value in tensors.items() if key != name}, f"missing keys: {name}"),
        ({**tensors, "stowaway": torch.zeros(1)}, "unexpected keys: stowaway"),
        ({**tensors, name: torch.cat([tensors[name], tensors[name]])}, f"mismatched keys: {name}"),
        ({**tensors, name: holed}, f"not finite: {name}"),
        ({f"other.{key}": value for key, value in tensors.items()}, "the tensors are those of another model"),
    ]


def test_tensors_that_do_not_fit(saved: Path) -> None:
    path = saved / "model.safetensors"
    sound = load_file(path)
    load_model(saved, call="eval")
    try:
        for tensors, message in damaged(sound):
            save_file(tensors, path, metadata={"format": "pt"})
            with pytest.raises(ArgumentError) as caught:
                load_model(saved, call="eval")
            assert str(caught.value).startswith(f"eval: the weights in {saved} do not fit their config (")
            assert message in str(caught.value)
            assert "\n" not in str(caught.value)
        path.write_bytes(path.read_bytes()[:100])
        with pytest.raises(ArgumentError, match="eval: cannot load the model in"):
            load_model(saved, call="eval")
    finally:
        save_file(sound, path, metadata={"format": "pt"})


def test_configs_that_do_not_fit(saved: Path) -> None:
    path = saved / "config.json"
    sound = path.read_text()
    kind = json.loads(sound)["model_type"]
    other = next(entry.config.model_type for _, entry in language_models.items() if entry.config.model_type != kind)
    cases = [
        ({"model_type": "frobnicator"}, "has type 'frobnicator', which is unknown; expected a type of"),
        ({"model_type": "t5"}, "has type 't5', which is not a causal language model"),
        ({"model_type": None}, "has type None"),
        ({"model_type": other}, f"eval: (cannot load the model in {saved}|the weights in {saved} do not fit)"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide', expected a positive integer"),
        ({"mixers": "biwait"}, "unknown spec 'biwait'"),
        ({"vocab_size": 5}, "mismatched keys"),
    ]
    try:
        for changes, message in cases:
            path.write_text(json.dumps({**json.loads(sound), **changes}))
            with pytest.raises(ArgumentError, match=message) as caught:
                load_model(saved, call="eval")
            assert "\n" not in str(caught.value)
        path.write_text(sound[:-9])
        with pytest.raises(ArgumentError, match="is not valid JSON"):
            load_model(saved, call="eval")
        path.unlink()
        with pytest.raises(ArgumentError, match="does not exist"):
            load_model(saved, call="eval")
    finally:
        path.write_text(sound)


def test_a_tokenizer_of_another_model(saved: Path) -> None:
    try:
        char_tokenizer("abcdefgh ijk").save_pretrained(saved)
        with pytest.raises(
            ArgumentError, match=r"has token ids up to 14, but its model has 0 to 11; they do not belong"
        ):
            load_model(saved, call="generate")
    finally:
        TOKENIZER.save_pretrained(saved)


def test_prompts_that_cannot_be_continued(saved: Path) -> None:
    model, tokenizer = load_model(saved, call="generate")
    assert len(generate_text(model, tokenizer, "a" * 16, max_new_tokens=4)) == 20  # as long as the context
    for prompt, message in (
        ("", "the prompt is empty"),
        ("a" * 17, "has 17 tokens, more than the model's context of 16"),
    ):
        with pytest.raises(ArgumentError, match=f"^generate: .*{message}"):
            generate_text(model, tokenizer, prompt)
    ids = torch.tensor([[3, 4, 5], [3, 4, 5]])
    padded = torch.tensor([[1, 1, 1], [0, 0, 0]])
    long = torch.full((1, 17), 3)
    for tokens, mask, message in (
        (ids[:, :0], None, "nothing to continue"),
        (ids[:0], None, "nothing to continue"),
        (long, None, "has 17 tokens, more than the model's context of 16"),
        (ids + 7, None, "holds 10 to 12, expected integers from 0 to 11"),
        (ids - 4, None, "holds -1 to 1, expected integers from 0 to 11"),
        (ids, padded, "row 1 of the prompt is all padding"),
    ):
        with pytest.raises(ArgumentError, match=message) as caught:
            model.generate(tokens, attention_mask=mask, max_new_tokens=2)
        assert "\n" not in str(caught.value)
    with pytest.raises(ArgumentError, match="holds 10 to 12, expected integers from 0 to 11"):
        model(ids + 7)
