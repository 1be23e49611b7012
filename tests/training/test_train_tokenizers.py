"""Tokenizers: exact round trips, nothing special hidden in text."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mistakes import refuses

from regard.training import TOKENIZERS, byte_tokenizer, char_tokenizer, encode
from regard.training.data import tokenizers
from regard.training.data.tokenizers import bpe_tokenizer, build_tokenizer

ALPHABET = "abc <pad>\n\t é漢🎉Ġ'.,"
CHAR, BYTE = char_tokenizer(ALPHABET), byte_tokenizer()


@settings(max_examples=60, deadline=None)
@given(st.text(ALPHABET, max_size=60))
def test_characters_come_back(text: str) -> None:
    ids = CHAR(text)["input_ids"]
    assert len(ids) == len(text)
    assert CHAR.decode(ids) == text
    assert CHAR.decode(ids, skip_special_tokens=True) == text


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60))
def test_any_text_comes_back_from_bytes(text: str) -> None:
    ids = BYTE(text)["input_ids"]
    assert ids == [byte + 2 for byte in text.encode()]
    assert BYTE.decode(ids) == text


def test_character_ids_are_the_sorted_characters_after_the_special_tokens() -> None:
    tokenizer = char_tokenizer("cab")
    assert tokenizer.get_vocab() == {"<pad>": 0, "<eos>": 1, "<unk>": 2, "a": 3, "b": 4, "c": 5}
    assert tokenizer("abxxc")["input_ids"] == [3, 4, 2, 2, 5]


@pytest.mark.parametrize("name", TOKENIZERS.names())
def test_special_tokens_in_a_text_stay_text(name: str) -> None:
    text = "a<pad>b<eos><unk><|endoftext|>"
    tokenizer = TOKENIZERS.get(name)(text)
    for ids in (tokenizer(text)["input_ids"], encode(tokenizer, text).tolist()):
        assert tokenizer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True) == text
        assert not set(ids) & set(tokenizer.all_special_ids)


@pytest.mark.parametrize("name", TOKENIZERS.names())
def test_long_texts_are_encoded_in_pieces_without_a_seam(name: str) -> None:
    text = "".join(chr(0x61 + i * i % 26) + ("é" if i % 7 == 0 else "") for i in range(12000))
    tokenizer = TOKENIZERS.get(name)(text)
    ids = encode(tokenizer, text)
    assert ids.tolist() == tokenizer(text)["input_ids"]
    assert encode(tokenizer, "").tolist() == []


def test_frequent_pairs_are_merged_up_to_a_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "the cat and the dog and the bird " * 20
    whole = bpe_tokenizer(text)
    assert whole(" the cat")["input_ids"] == [whole.get_vocab()[word] for word in ("Ġthe", "Ġcat")]
    assert whole.get_vocab() == bpe_tokenizer(text).get_vocab()
    monkeypatch.setattr(tokenizers, "BPE_TOKENS", 260)
    few = bpe_tokenizer(text)
    assert len(few) == 260
    assert few.decode(few("é the")["input_ids"]) == "é the"


def test_another_models_tokenizer_is_taken_by_its_folder(tmp_path: Path) -> None:
    learned = bpe_tokenizer("the cat and the dog and the bird " * 20)
    learned.pad_token = None
    learned.save_pretrained(tmp_path)
    found = build_tokenizer(str(tmp_path), "not used")
    assert (found.pad_token, found.eos_token, found.padding_side) == ("<eos>", "<eos>", "left")
    assert encode(found, "the dog, é").tolist() == encode(learned, "the dog, é").tolist()


def test_tokenizers_that_training_cannot_use(tmp_path: Path) -> None:
    refuses(r"cannot load the tokenizer .*/none", build_tokenizer, str(tmp_path / "none"), "")
    backend = json.loads(byte_tokenizer().backend_tokenizer.to_str()) | {"added_tokens": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps(backend))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    refuses("neither a pad_token nor an eos_token", build_tokenizer, str(tmp_path), "")
    code = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}, "eos_token": "<eos>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(code))
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    refuses("trust_remote_code", build_tokenizer, str(tmp_path), "")
    refuses(r"unknown tokenizer 'cahr'\. Did you mean 'char'", build_tokenizer, "cahr", "")
