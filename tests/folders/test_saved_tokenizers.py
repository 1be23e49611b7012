"""Tokenizer files that are damaged or contradict themselves: one clear error each."""

import json
import os
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile import answer, change_json, reseal
from mistakes import refuses
from transformers import AutoTokenizer

from regard.checks import ArgumentError
from regard.training import TOKENIZERS, encode
from regard.training.storage.saved_tokenizer import load_tokenizer

TEXT = "hello wörld, <pad> 1 .\n"
TEMPLATE = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "Q", "type_id": 0}}], "pair": []}

SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    TOKENIZERS.get("char")(TEXT).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", TOKENIZERS.names())
def test_our_tokenizers_are_what_transformers_loads(name: str, tmp_path: Path) -> None:
    built = TOKENIZERS.get(name)(TEXT)
    built.save_pretrained(tmp_path / "one")
    ours = load_tokenizer(tmp_path / "one", call="test")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "one", trust_remote_code=False)
    ours.save_pretrained(tmp_path / "two")  # as in the checkpoints of a run that goes on
    for loaded in (ours, theirs):
        assert loaded.get_vocab() == built.get_vocab()
        assert loaded(["h", TEXT], padding=True) == built(["h", TEXT], padding=True)
        assert encode(loaded, TEXT).tolist() == encode(built, TEXT).tolist()
        assert loaded.decode(built(TEXT)["input_ids"]) == TEXT
        assert loaded.special_tokens_map == built.special_tokens_map
        assert loaded.all_special_ids == built.all_special_ids
    for file in ("tokenizer.json", "tokenizer_config.json"):
        one, two = (json.loads((tmp_path / where / file).read_text()) for where in ("one", "two"))
        assert one == two


def at(*path: str | int, value: object) -> Callable[[dict], None]:
    """A change of one value deep in a table."""

    def change(table: dict) -> None:
        for step in path[:-1]:
            table = table[step]
        table[path[-1]] = value

    return change


def replace(found: str, written: str, kind: str = "String") -> dict:
    """A step of a tokenizer that writes something else."""
    return {"type": "Replace", "pattern": {kind: found}, "content": written}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
EMPTY = {"type": "BPE", "vocab": {}, "merges": []}
TWICE = {"type": "Unigram", "unk_id": 2, "vocab": [[word, -1.0] for word in ("<pad>", "<eos>", "<unk>", "h", "h")]}
LONG = b64encode(bytes(4) + b"h" * 5000 + b"\0").decode()
CASES = {
    "id beyond 32 bits": (at("model", "vocab", "h", value=2**40), "expected u32"),
    "id of 32 bits": (at("model", "vocab", "h", value=2**32 - 1), "has a token of id 4294967295"),
    "id negative": (at("model", "vocab", "h", value=-1), "expected u32"),
    "id a text": (at("model", "vocab", "h", value="7"), "is not a valid tokenizer"),
    "id beyond 64 bits": (at("model", "vocab", "h", value=10**25), "is not a valid tokenizer"),
    "one id for two": (at("model", "vocab", "h", value=4), "gives one id to several tokens"),
    "no vocabulary": (at("model", "vocab", value={}), "is not a valid tokenizer"),
    "no tokens": (lambda table: table.update(model=EMPTY, added_tokens=[]), "has no tokens"),
    "a token twice": (at("model", value=TWICE), "holds a token twice"),
    "unknown type": (at("model", "type", value="Foo"), "is not a valid tokenizer"),
    "a model that is none": (at("model", value=7), "is not a valid tokenizer"),
    "unknown word not known": (at("model", "unk_token", value="<zzz>"), "Unk token `<zzz>` not found"),
    "dropout": (at("model", "dropout", value=0.5), "drops merges at random"),
    "merge of unknown": (at("model", "merges", value=[["h", "Q"]]), "Token `Q` out of vocabulary"),
    "merge of one": (at("model", "merges", value=["h"]), "Merges text file invalid"),
    "added id beyond 32 bits": (at("added_tokens", 0, "id", value=2**40), "expected u32"),
    "added id of another": (at("added_tokens", 0, "id", value=1), "gives '<pad>' two ids"),
    "added without a text": (at("added_tokens", 0, value={"id": 0}), "missing field"),
    "broken expression": (
        at(
            "pre_tokenizer", value={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
        ),
        "end pattern with unmatched parenthesis",
    ),
    "a panic of a normaliser": (
        at("normalizer", value={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        "Cannot parse precompiled_charsmap",
    ),
    "a panic of a splitter": (at("pre_tokenizer", value={"type": "FixedLength", "length": 0}), "chunk size must be"),
    "a panic of a template": (at("post_processor", value={**TEMPLATE, "special_tokens": {}}), "no entry found for key"),
    "tokens that are none": (
        at(
            "post_processor",
            value={"type": "RobertaProcessing", "sep": ["a", 999], "cls": ["a", 777], "trim_offsets": True}
            | {"add_prefix_space": True},
        ),
        "produces tokens that it does not have: [777, 999]",
    ),
    "replacements that fill any memory": (
        at("normalizer", value={"type": "Sequence", "normalizers": [replace("h", "h" * 300)] * 5}),
        "its steps can lengthen a text 2.4e+12 times",
    ),
    "replacements of nothing": (
        at("normalizer", value=replace("h?", "h" * 5000, kind="Regex")),
        "its steps can lengthen a text 5e+03 times",
    ),
    "replacements in what is decoded": (
        at("decoder", value={"type": "Sequence", "decoders": [replace("h", "hh")] * 40}),
        "its steps can lengthen a text 1.1e+12 times",
    ),
    "bytes as letters, again and again": (
        at("pre_tokenizer", value={"type": "Sequence", "pretokenizers": [BYTES] * 40}),
        "its steps can lengthen a text 1.1e+12 times",
    ),
    "a table that fills any memory": (
        at("normalizer", value={"type": "Precompiled", "precompiled_charsmap": LONG}),
        "its steps can lengthen a text 5e+03 times",
    ),
    "another version": (at("version", value="9"), "Unknown tokenizer version"),
}


@pytest.mark.parametrize("which", CASES)
def test_tokenizer_files(folder: Path, which: str) -> None:
    change, reason = CASES[which]
    change_json(folder / "tokenizer.json", change)
    with pytest.raises(ArgumentError) as caught:
        load_tokenizer(folder, call="test")
    assert str(caught.value).startswith("test: ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: text[:-9], "is not valid JSON"),
        (lambda text: "", "is not valid JSON"),
        (lambda text: "\0" * 99, "is not valid JSON"),
        (lambda text: "[" * 10**5, "is not valid JSON"),
        (lambda text: "7", "holds a int"),
        (lambda text: text.replace('"h":', '"e":'), "duplicate key 'e'"),
    ],
)
def test_files_that_are_no_tables(folder: Path, change: Callable, reason: str) -> None:
    path = folder / "tokenizer.json"
    path.write_text(change(json.dumps(json.loads(path.read_text()), separators=(",", ":"))))
    refuses(reason, load_tokenizer, folder, call="test")


def test_a_file_that_is_too_large(folder: Path) -> None:
    with open(folder / "tokenizer.json", "ab") as file:
        file.truncate((1 << 28) + 1)
    refuses("has 268435457 bytes, at most 268435456 are read", load_tokenizer, folder, call="test")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_pipes_devices_and_folders(folder: Path, name: str) -> None:
    for make in (os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)):
        (folder / name).unlink() if not (folder / name).is_dir() else (folder / name).rmdir()
        make(folder / name)
        refuses("is not a regular file", load_tokenizer, folder, call="test")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"pad_token": 7}, "pad_token in .* is 7, expected a token"),
        ({"pad_token": "<nobody>"}, "pad_token in .* is '<nobody>', which is not in the vocabulary"),
        ({"eos_token": {"content": ["x"]}}, "eos_token in .* expected a token"),
        ({"padding_side": "up"}, "padding_side in .* is 'up', expected 'left' or 'right'"),
        ({"split_special_tokens": "no"}, "split_special_tokens in .* is 'no', expected a flag"),
        ({"extra_special_tokens": 3}, "extra_special_tokens in .* is 3, expected a list"),
        ({"extra_special_tokens": ["Q"]}, "extra_special_tokens in .* is 'Q', which is not in the vocabulary"),
    ],
)
def test_settings(folder: Path, fields: dict, reason: str) -> None:
    change_json(folder / "tokenizer_config.json", lambda table: {**table, **fields})
    refuses(reason, load_tokenizer, folder, call="test")


def test_texts_are_read_whole_whatever_the_file_says(folder: Path) -> None:
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 5}
    fill = {"strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    sound = encode(load_tokenizer(folder, call="test"), TEXT).tolist()
    change_json(
        folder / "tokenizer.json",
        lambda table: {**table, "truncation": cut, "padding": {**fill, "pad_type_id": 0, "pad_token": "<pad>"}},
    )
    assert encode(load_tokenizer(folder, call="test"), TEXT).tolist() == sound


def test_an_expression_without_an_end(folder: Path) -> None:
    split = {**SPLIT, "pattern": {"Regex": "(h+)+$"}}
    change_json(folder / "tokenizer.json", lambda table: {**table, "pre_tokenizer": split})
    tokenizer = load_tokenizer(folder, call="test")
    refuses(r"the tokenizer cannot read this text: .*retry-limit", encode, tokenizer, "h" * 40 + "!")


def test_the_commands_say_it_in_one_line(run_folder: Path, command: Callable, regard: Callable) -> None:
    for folder in (run_folder / "model", run_folder / "tokenizer"):
        change_json(folder / "tokenizer.json", at("model", "type", value="Foo"))
    reseal(run_folder)
    assert "tokenizer.json is not a valid tokenizer" in regard(*command(run_folder)).error


def test_a_run_needs_the_settings_of_its_tokenizer(run_folder: Path, regard: Callable) -> None:
    (run_folder / "tokenizer" / "tokenizer_config.json").unlink()
    words = ("train", "--resume", "--out", run_folder, "--steps", 6)
    assert "tokenizer_config.json: No such file or directory" in regard(*words).error
    reseal(run_folder)
    assert "has no pad_token, which training needs" in regard(*words).error


def test_a_tokenizer_with_a_chat_template_is_read_without_it(
    run_folder: Path, command: Callable, regard: Callable, right_answer: Callable
) -> None:
    for folder in (run_folder / "model", run_folder / "tokenizer"):
        change_json(folder / "tokenizer_config.json", lambda table: {**table, "chat_template": "{% for"})
    reseal(run_folder)
    assert answer(regard(*command(run_folder))) == right_answer(command)
