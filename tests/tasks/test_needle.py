"""Needles in a haystack: where they stand, that they can be made again, and how answers are counted."""

import math
import re

import pytest
from mistakes import refuses

from regard.tasks import NeedleInHaystack, NeedleResult, NeedleScore, Share, Task, tasks
from regard.tasks.needle import unique_id

WORDS = [f"w{i}" for i in range(997)]
TEXT = "a river of words that runs on and never comes to an end; " * 60
NEEDLE = re.compile(r"The secret number for (ID-[0-9a-f]{4}) is (\d{6})\.")


def bytes_task(length: int = 700, **changes: object) -> NeedleInHaystack:
    return NeedleInHaystack(
        list(TEXT.encode()), length, encode=lambda s: list(s.encode()), decode=lambda t: bytes(t).decode(),
        breaks=frozenset(b" "), **changes,
    )  # fmt: skip


def test_it_is_a_registered_task() -> None:
    assert tasks.get("needle") is NeedleInHaystack
    assert isinstance(NeedleInHaystack(WORDS, 60), Task)


@pytest.mark.parametrize("length", [60, 4000, 128_000])
def test_words(length: int) -> None:
    task = NeedleInHaystack(WORDS, length)
    example = task.example(3, 5)
    assert len(example.haystack) == length
    found = dict(NEEDLE.findall(" ".join(example.haystack)))
    assert found == example.numbers
    assert len(found) == len(set(found.values())) == 5
    assert found[example.key] == example.answer
    assert " ".join(example.question) + " " == f"The secret number for {example.key} is "
    for place, key in zip(example.places, found, strict=True):
        assert example.haystack[place : place + 5] == ("The", "secret", "number", "for", key)
    filler = [word for word in example.haystack if word in set(WORDS)]
    assert len(filler) == length - 5 * 7
    start = int(filler[0][1:])
    assert filler == [f"w{(start + i) % 997}" for i in range(len(filler))]
    assert task.oracle(example) == example.answer
    assert task.error(f" {example.answer}\n", example) == 0.0


def test_tokens_stand_between_words_and_have_the_length() -> None:
    example = bytes_task().example(0, 0)
    assert len(example.haystack) == 700
    text = bytes(example.haystack).decode()
    assert dict(NEEDLE.findall(text)) == example.numbers
    for place in example.places:
        assert place == 0 or text[place - 1] == " "
        assert text[place:].startswith("The secret number for ID-")
        assert text[place + 40] == " "
    assert bytes(example.question).decode() == f"The secret number for {example.key} is "
    assert bytes_task().oracle(example) == example.answer
    assert example.prompt == example.haystack + example.question
    rest = NEEDLE.sub("", text).replace("  ", " ")
    assert all(word in TEXT.split() for word in rest.split()[1:-1])


def test_an_example_depends_on_seed_and_index_alone() -> None:
    task = bytes_task()
    alone = task.example(7, 4)
    assert task.examples(7, range(6))[4] == alone
    assert bytes_task().example(7, 4) == alone
    others = [task.example(7, 5), task.example(8, 4)]
    assert all(set(other.numbers).isdisjoint(alone.numbers) for other in others[:1])
    assert all(other.haystack != alone.haystack for other in others)


def test_keys_are_unique_over_a_whole_set() -> None:
    task = NeedleInHaystack(WORDS, 80)
    keys = [key for index in range(500) for key in task.example(1, index).numbers]
    assert len(keys) == len(set(keys)) == 2500
    mixed = [
        NeedleInHaystack(WORDS, 80, needles=n, reserved=8).example(1, i).numbers for i, n in enumerate((4, 5, 8, 5))
    ]
    assert len({key for numbers in mixed for key in numbers}) == 4 + 5 + 8 + 5
    assert sorted(int(unique_id(9, i), 16) for i in range(65536)) == list(range(65536))
    assert sorted(unique_id(9, i, 1) for i in range(5, 21)) == [f"{i:x}" for i in range(16)]


def test_places_and_questions_are_spread() -> None:
    task = NeedleInHaystack(WORDS, 400, needles=4)
    examples = task.examples(0, range(300))
    places = [place for example in examples for place in example.places]
    by_quarter = [sum(100 * q <= place < 100 * (q + 1) for place in places) for q in range(4)]
    assert min(by_quarter) > 0.18 * len(places)
    asked = [list(example.numbers).index(example.key) for example in examples]
    assert min(asked.count(i) for i in range(4)) > 45


def test_scores() -> None:
    task = bytes_task()
    example = task.example(0, 1)
    other = next(number for number in example.numbers.values() if number != example.answer)
    wrong = ("1" if example.answer[0] != "1" else "2") + example.answer[1:]
    assert task.score(example.answer + " ", example) == NeedleScore(True, 1.0, True)
    assert task.score(wrong, example).digits == pytest.approx(5 / 6)
    assert not task.score(wrong, example).exact
    same = sum(a == b for a, b in zip(other, example.answer, strict=True)) / 6
    assert task.score(other, example) == NeedleScore(False, same, True)
    assert task.score("", example) == NeedleScore(False, 0.0, False)
    assert task.score(example.answer + "7", example).exact is False
    found = NeedleResult.of([task.score(example.answer, example), task.score(wrong, example)])
    assert (found.exact.hits, found.exact.trials) == (1, 2)
    assert found.digits == pytest.approx(11 / 12)
    assert found.candidate.mean == 0.5


def test_a_share_without_trials_is_zero() -> None:
    assert str(Share(3, 4)) == "75% of 4"
    assert Share(0, 0).mean == 0.0
    assert not math.isnan(NeedleResult.of([]).exact.mean)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 0}, "length is 0"),
        ({"needles": 0}, "needles is 0"),
        ({"text": []}, "text is [], expected words or tokens"),
        ({"digits": 1, "needles": 11}, "give them more digits"),
        ({"template": "The number is {value}."}, "expected a text with {key}, {value} alone"),
        ({"template": "{value} is the number of {key}."}, "{key} before {value}"),
        ({"key": "ID"}, "expected a text with {id} alone"),
        ({"reserved": 4}, "reserved is 4, expected a whole number >= 5"),
        ({"breaks": frozenset({"-"})}, "no piece of the text is among breaks"),
    ],
)
def test_mistakes(changes: dict, message: str) -> None:
    refuses(re.escape(message), NeedleInHaystack, **{"text": WORDS, "length": 100, **changes})


def test_needles_that_do_not_fit() -> None:
    refuses("5 needles have 35 pieces, more than a haystack of length 30", NeedleInHaystack(WORDS, 30).example, 0, 0)
