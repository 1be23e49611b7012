"""`regard reproduce needle`: the text with needles, how answers are counted, and verdicts that follow the numbers."""

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mistakes import refuses
from tiny_runs import checked

from regard.models import HybridConfig, HybridForCausalLM
from regard_recipes.long_text.needle_reading import answer_rows
from regard_recipes.long_text.needle_text import NeedleText, needle_text

TEXT = "a river of many words , that runs on ( and on ) and never ends ; "
made = partial(checked, "needle")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("needles") / "text.txt"
    path.write_text(TEXT * 200)
    return path


def text(data: Path, **changes: int) -> NeedleText:
    return needle_text(data, **{"common": 9, "digits": 2, "key_digits": 2, "length": 64, "most": 8, **changes})


def test_words_are_tokens(data: Path) -> None:
    made = text(data, digits=4, most=6)
    assert made.decode(made.encode("number K3f 0742 . and")) == "number K3f 0742 . and"
    assert len(made.encode("0742")) == 2
    assert {word for word, _ in Counter(TEXT.split()).most_common(3)} <= set(made.words.words)
    assert len(made.words) == len(set(made.words.words)) == made.vocabulary
    assert len(made.text) == 200 * len(TEXT.split())
    for length in (40, 200):
        task = made.haystacks(length, 3)
        example = task.example(0, 3)
        assert len(example.haystack) == length
        assert task.oracle(example) == example.answer
        assert len(made.encode(example.answer)) == 2


def test_splits_are_of_other_parts_of_the_text(data: Path) -> None:
    made = text(data)
    parts = [made.haystacks(40, 3, split).text for split in ("train", "validation", "test")]
    assert parts[0] + parts[1] + parts[2] == made.text
    assert len(parts[0]) == pytest.approx(0.8 * len(made.text), abs=1)


@pytest.mark.parametrize("digits", [2, 4])
def test_examples_ask_for_needles_of_the_haystack(data: Path, digits: int) -> None:
    made, counts, again = text(data, digits=digits, most=5), set(), 0
    for index in range(40):
        example = made.example(0, index)
        assert len(example.tokens) == 64
        words = made.decode(example.tokens.tolist()).split()
        needles = [tuple(words[i : i + 2]) for i, word in enumerate(words) if word.startswith("K")]
        hidden, asked = needles[: len(needles) // 2], needles[len(needles) // 2 :]
        assert len({*hidden}) == len({key for key, _ in hidden}) == len(hidden)
        assert {*asked} <= {*hidden}
        again += len({*asked}) < len(asked)
        counts.add(len(hidden))
        assert torch.equal(made.oracle(example)[example.asked], example.labels[example.asked])
        seen, wanted = set(), []
        for place, token in enumerate(example.tokens.tolist()):
            if made.words.words[token].startswith("K") and token in seen:
                wanted += list(range(place + 1, place + 1 + digits // 2))
            seen.add(token)
        assert example.asked.nonzero()[:, 0].tolist() == wanted
    assert counts == {1, 2, 3, 4, 5}
    assert again > 10  # what was asked before may be asked again
    assert made.scores(made.trivial(example), example)["accuracy"] <= 0.5


@pytest.mark.parametrize("digits", [2, 4])
def test_a_share_of_the_training_examples_are_pairs(data: Path, digits: int) -> None:
    made = replace(text(data, digits=digits, most=5), pairs=0.5)
    short = 0
    for index in range(60):
        example = made.example(0, index)
        assert torch.equal(made.oracle(example)[example.asked], example.labels[example.asked])
        if len(example.tokens) < 64:
            short += 1
            words = made.decode(example.tokens.tolist()).split()
            assert len(example.tokens) == 2 * 5 * (1 + digits // 2)
            assert [word[0] == "K" for word in words] == [True, False] * 10
            assert int(example.asked.sum()) == 5 * digits // 2
        assert len(made.example(0, index, "test").tokens) == 64
    assert 15 < short < 45


def test_bad_texts_are_refused(data: Path, tmp_path: Path) -> None:
    refuses("--digits is 3, expected an even number", text, data, digits=3)
    (tmp_path / "short.txt").write_text(TEXT)
    refuses("the text has 17 words, expected at least 1,000", text, tmp_path / "short.txt")


def test_answers_are_counted(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four questions the first is answered rightly, the second with another needle's number, the others wrongly."""
    made = text(data)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = HybridForCausalLM(HybridConfig(vocab_size=made.vocabulary, **sizes))
    examples = made.haystacks(40, 3).examples(0, range(4))
    others = [next(n for n in e.numbers.values() if n != e.answer) for e in examples]
    free = next(f"{n:02d}" for n in range(100) if all(f"{n:02d}" not in e.numbers.values() for e in examples[2:]))
    told = torch.tensor([[made.encode(each)] for each in (examples[0].answer, others[1], free, free)])
    asked: list[torch.Tensor] = []

    def answer(model: Any, haystacks: torch.Tensor, questions: torch.Tensor, length: int, **how: Any) -> torch.Tensor:
        asked.append(haystacks)
        assert (length, how["reads"]) == (1, 2)
        return told.view(1, *questions.shape[:-1], 1).expand(2, *questions.shape[:-1], 1)

    monkeypatch.setattr("regard_recipes.long_text.needle_reading.read_and_answer", answer)
    rows = list(answer_rows(model, made, 40, 3, 4, 0, reads=2))
    assert [row["read"] for row in rows] == [1, 2]
    assert (rows[0]["share"], rows[0]["candidate"], rows[0]["trials"], rows[0]["state"]) == (0.25, 0.5, 4, "new")
    assert asked[0].tolist() == [[list(example.haystack) for example in examples]]
    kept = list(answer_rows(model, made, 40, 3, 5, 0, reads=2, kept=2))
    assert asked[1].shape == (2, 2, 40)
    assert (kept[0]["share"], kept[0]["trials"], kept[0]["state"]) == (0.25, 4, "kept")
