"""Documents that are read several times: their law, metric, and the memory without faults; against plain loops."""

from __future__ import annotations

import itertools

import pytest
import torch

from regard.checks import ArgumentError
from regard.tasks import CrossDocumentRecall, RecallExamples, Task, tasks


def test_an_example_is_a_function_of_seed_and_index() -> None:
    task = CrossDocumentRecall(keys=12, values=9, pairs=5, documents=2, reads=3)
    alone, batch = task.example(3, 7).tokens, task.examples(3, [5, 7]).tokens
    assert alone.shape == (2, 3, 10)
    assert torch.equal(alone, batch[1])
    assert not torch.equal(batch[0], batch[1])
    assert not torch.equal(alone, task.example(7, 3).tokens)


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
    tokens = task.examples(1, range(1500)).tokens
    counts = torch.bincount(tokens.flatten(), minlength=15).double()
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


def test_it_is_registered_and_keeps_the_protocol() -> None:
    assert tasks.get("cross-document-recall") is CrossDocumentRecall
    assert isinstance(CrossDocumentRecall(), Task)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"reads": 0}, "reads is 0, expected a whole number >= 1"),
        ({"pairs": 2.0}, "pairs is 2.0, expected a whole number >= 1"),
        ({"documents": True}, "documents is True, expected a whole number >= 1"),
        ({"keys": 8, "pairs": 9}, "pairs is 9, expected at most the 8 keys"),
    ],
)
def test_mistakes(settings: dict, said: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        CrossDocumentRecall(**settings)
    assert said in str(caught.value)
