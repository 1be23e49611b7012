"""Tokenizer files that are damaged or contradict themselves: one clear error each."""

import json
import os
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile import answer, change_json, reseal
from mistakes import error_of, refuses
from transformers import AutoTokenizer

from regard.training import TOKENIZERS, encode
from regard.training.storage.saved_model import load_tokenizer

TEXT = "hello wörld, <pad> 1 .\n"
TEMPLATE = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "Q", "type_id": 0}}], "pair": []}


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
    assert type(theirs).__module__.startswith("transformers.")
    assert {path.suffix for path in (tmp_path / "one").iterdir()} == {".json"}
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
        assert "auto_map" not in one
    sizes = {"char": len(set(TEXT)) + 3, "byte": 258, "bpe": len(TOKENIZERS.get("bpe")(TEXT)), "gpt2": 50257}
    assert len(built) == sizes[name]
    assert (built.pad_token_id, built.eos_token_id) == {"gpt2": (50256, 50256)}.get(name, (0, 1))
    batch = built(["h", "h, h, h"], padding=True)
    more = sum(batch["attention_mask"][1]) - 1
    assert more > 1
    assert batch["attention_mask"] == [[0] * more + [1], [1] * (more + 1)]
    assert batch["input_ids"][0][:more] == [built.pad_token_id] * more


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


def split(found: str) -> dict:
    return {"type": "Split", "pattern": {"Regex": found}, "behavior": "Isolated", "invert": False}


def precompiled(table: str) -> dict:
    return {"type": "Precompiled", "precompiled_charsmap": table}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
EMPTY = {"type": "BPE", "vocab": {}, "merges": []}
TWICE = {"type": "Unigram", "unk_id": 2, "vocab": [[word, -1.0] for word in ("<pad>", "<eos>", "<unk>", "h", "h")]}
ENDS = {"type": "RobertaProcessing", "sep": ["a", 999], "cls": ["a", 777], "trim_offsets": True}
ENDS["add_prefix_space"] = True
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
    "broken expression": (at("pre_tokenizer", value=split("(")), "end pattern with unmatched parenthesis"),
    "a panic of a normaliser": (at("normalizer", value=precompiled("AAAA")), "Cannot parse precompiled_charsmap"),
    "a panic of a splitter": (at("pre_tokenizer", value={"type": "FixedLength", "length": 0}), "chunk size must be"),
    "a panic of a template": (at("post_processor", value={**TEMPLATE, "special_tokens": {}}), "no entry found for key"),
    "tokens that are none": (at("post_processor", value=ENDS), "produces tokens that it does not have: [777, 999]"),
    "another version": (at("version", value="9"), "Unknown tokenizer version"),
}
LONGER = {
    "replacements": ("2.4e+12", "normalizer", {"type": "Sequence", "normalizers": [replace("h", "h" * 300)] * 5}),
    "replacements of nothing": ("5e+03", "normalizer", replace("h?", "h" * 5000, kind="Regex")),
    "in what is decoded": ("1.1e+12", "decoder", {"type": "Sequence", "decoders": [replace("h", "hh")] * 40}),
    "bytes as letters": ("1.1e+12", "pre_tokenizer", {"type": "Sequence", "pretokenizers": [BYTES] * 40}),
    "a table": ("5e+03", "normalizer", precompiled(b64encode(bytes(4) + b"h" * 5000 + b"\0").decode())),
}
"""Steps that could fill any memory."""
for name, (times, part, step) in LONGER.items():
    CASES[name] = (at(part, value=step), f"its steps can lengthen a text {times} times")


@pytest.mark.parametrize("which", CASES)
def test_tokenizer_files(folder: Path, which: str) -> None:
    change, reason = CASES[which]
    change_json(folder / "tokenizer.json", change)
    said = error_of(load_tokenizer, folder, call="test")
    assert said.startswith("test: ")
    assert reason in said


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
    change_json(folder / "tokenizer_config.json", fields)
    refuses(reason, load_tokenizer, folder, call="test")


def test_texts_are_read_whole_whatever_the_file_says(folder: Path) -> None:
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 5}
    fill = {"strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    sound = encode(load_tokenizer(folder, call="test"), TEXT).tolist()
    changes = {"truncation": cut, "padding": {**fill, "pad_type_id": 0, "pad_token": "<pad>"}}
    change_json(folder / "tokenizer.json", changes)
    assert encode(load_tokenizer(folder, call="test"), TEXT).tolist() == sound


def test_an_expression_without_an_end(folder: Path) -> None:
    change_json(folder / "tokenizer.json", at("pre_tokenizer", value=split("(h+)+$")))
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
