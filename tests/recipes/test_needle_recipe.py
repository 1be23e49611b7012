"""`regard reproduce needle`: the world of needles, how answers are counted, and verdicts that follow the numbers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from regard.models import HybridConfig, HybridForCausalLM
from regard_recipes.fwpkm.memory_layouts import Row
from regard_recipes.lib.recipe import Results, frame_of
from regard_recipes.long_text import needle as recipe
from regard_recipes.long_text.needle_reading import PROTOCOLS
from regard_recipes.long_text.needle_text import NeedleWorld, answers, learn_answers, needle_world

TEXT = "a river of many words , that runs on ( and on ) and never ends ; "


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("needles") / "text.txt"
    path.write_text(TEXT * 200)
    return path


def world(data: Path, **changes: int) -> NeedleWorld:
    return needle_world(data, **{"common": 9, "needles": 3, "digits": 2, **changes}, call="test")


def test_words_are_tokens(data: Path) -> None:
    made = world(data, digits=4)
    assert made.decode(made.encode("number K3f 0742 . and")) == "number K3f 0742 . and"
    assert len(made.encode("0742")) == 2
    known = {word for word, _ in Counter(TEXT.split()).most_common(3)}
    assert known <= set(made.words)
    assert len(made.words) == len(set(made.words))
    assert len(made.learn) + len(made.held_out) == 200 * len(TEXT.split())
    for length in (40, 200):
        example = made.task(length).example(0, 3)
        assert len(example.haystack) == length
        assert made.task(length).oracle(example) == example.answer
        assert len(made.encode(example.answer)) == 2


def test_training_documents_ask_for_every_needle(data: Path) -> None:
    made = world(data)
    tokens = made.training_tokens(640, 64, 5).view(-1, 64)
    assert torch.equal(tokens, made.training_tokens(640, 64, 5).view(-1, 64))
    counts = set()
    for row in tokens:
        words = made.decode(row.tolist()).split()
        needles = [tuple(words[i : i + 2]) for i, word in enumerate(words) if word.startswith("K")]
        many = Counter(needles)
        assert set(many.values()) == {2}
        assert [key for key, _ in needles[: len(many)]] != [key for key, _ in needles[len(many) :]] or len(many) < 3
        counts.add(len(many))
    assert min(counts) >= 4
    assert max(counts) <= 8


def test_what_is_an_answer(data: Path) -> None:
    made = world(data, digits=4)
    text = "number K01 1234 . K02 5678 . 9999 number K01 1234 K03 1111 K01 5678 and 4321"
    tokens = torch.tensor([made.encode(text)])
    found = answers(tokens, made.values, made.keys)
    assert made.decode(tokens[found].tolist()) == "12345678"
    assert found.nonzero()[:, 1].tolist() == [13, 14, 19, 20]


def test_training_counts_answers_alone(data: Path) -> None:
    made = world(data)
    torch.manual_seed(0)
    model = HybridForCausalLM(
        HybridConfig(vocab_size=len(made.words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    tokens = made.training_tokens(128, 64, 0).view(-1, 64).long()
    plain = model.eval()(input_ids=tokens, labels=tokens).loss
    learn_answers(model, made.values, made.keys)
    assert torch.equal(model(input_ids=tokens, labels=tokens).loss, plain)  # evaluation stays what it was
    loss = model.train()(input_ids=tokens, labels=tokens).loss
    logp = model(input_ids=tokens).logits.double().log_softmax(-1)
    expected = []
    for row, each in zip(logp, tokens.tolist(), strict=True):
        words = [made.words[token] for token in each]
        for t in range(1, 64):
            if words[t].isdigit() and words[t - 1].startswith("K") and words[t - 1] in words[: t - 1]:
                expected.append(-row[t - 1, each[t]].item())
    assert len(expected) >= 8
    assert loss.item() == pytest.approx(sum(expected) / len(expected), rel=1e-5)


NAMES = [Row("GDN"), Row("GDN", "FwPKM"), Row("FA"), Row("FA", "FwPKM"), Row("FA-pSWA", "FwPKM")]


def claims(hits: dict[str, int], lengths: tuple[int, ...] = (64, 4096), trials: int = 50) -> dict[str, str]:
    """Verdicts; `hits` gives how many of 50 a model answers in each way: "GDN whole 1" at both lengths."""
    rows = []
    for row in NAMES:
        for length in lengths:
            for protocol in PROTOCOLS if row.remembers else PROTOCOLS[:1]:
                for read in (1, 2) if row.remembers else (1,):
                    key = f"{row.layout} {protocol} {read}"
                    found = hits.get(f"{key} {length}", hits.get(key, 0)) if row.remembers else 0
                    common = {"layout": row.layout, "memory": row.memory, "seed": 0, "kind": "answers", "read": read,
                              "length": length, "protocol": protocol, "trials": trials}  # fmt: skip
                    rows += [{**common, "state": "new", "exact": found}]
                    rows += [{**common, "state": "kept", "exact": hits.get(f"{key} kept", found)}] * row.remembers
    own = recipe.Needle.configure(
        layouts=("GDN", "FA", "FA-pSWA"), also=(), lact=False, lengths=lengths, reads=2, samples=50
    )
    return {c.wording: c.verdict for c in recipe.Needle(own).claims(Results(frame_of(rows), {}, {}))}


FIRST, SECOND, LONGER, MORE, WINDOWS, KEPT = (
    "One read is enough if it is written before the question", "A second read boosts retrieval",
    "Memories generalise to longer texts", "Longer texts need more reads",
    "Windows in training make attention's models use the memory",
    "A memory kept from sample to sample costs less than a quarter of the answers",
)  # fmt: skip
LEARNED = {"GDN whole 2": 48, "GDN flushed 1": 48, "GDN flushed 2": 50}
NEVER = "not testable at this size"


@pytest.mark.parametrize(
    ("hits", "expected"),
    [
        (LEARNED, {FIRST: "holds", SECOND: "holds", LONGER: "holds", MORE: "fails", KEPT: "holds", WINDOWS: NEVER}),
        ({}, dict.fromkeys((FIRST, SECOND, LONGER, KEPT, WINDOWS), NEVER)),
        ({**LEARNED, "GDN whole 1": 48}, {FIRST: "undecided", SECOND: "undecided"}),
        ({**LEARNED, "GDN whole 1": 50, "GDN whole 2": 20, "GDN flushed 1": 20}, {FIRST: "fails", SECOND: "fails"}),
        ({**LEARNED, "GDN flushed 2 4096": 0, "GDN whole 2 4096": 3}, {LONGER: "undecided", MORE: "holds"}),
        ({**LEARNED, "GDN flushed 1 kept": 10}, {KEPT: "fails"}),
        ({"FA-pSWA flushed 2": 48}, {WINDOWS: "holds"}),
        ({"FA-pSWA flushed 2": 48, "FA flushed 2": 48}, {WINDOWS: "undecided"}),
    ],
)
def test_verdicts_follow_the_numbers(hits: dict, expected: dict) -> None:
    found = claims(hits)
    assert {claim: found[claim] for claim in expected} == expected


def test_short_haystacks_decide_nothing_about_long_ones() -> None:
    assert claims(LEARNED, (64, 2048))[MORE] == NEVER
    assert claims(LEARNED, (64, 128))[LONGER] == NEVER  # within a window of training
