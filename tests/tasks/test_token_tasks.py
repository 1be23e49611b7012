"""What every task of tokens promises, for each of its named settings."""

import dataclasses
import hashlib
import os
import sys
from typing import Any, get_type_hints

import pytest
import torch
from mistakes import refuses
from programs import python

from regard.tasks import IGNORED, SPLITS, TokenExample, TokenTask, collate, tasks

KINDS: dict[str, Any] = {n: kind for n, kind in tasks.items() if isinstance(kind, type) and issubclass(kind, TokenTask)}
SETTINGS = [(name, setting) for name, kind in KINDS.items() for setting in kind.settings]
QUICK = sorted(KINDS)
COUNT = 12


def digest(example: TokenExample) -> str:
    return hashlib.sha256(example.tokens.numpy().tobytes() + example.labels.numpy().tobytes()).hexdigest()


def digests() -> dict[str, str]:
    """One digest for every task and split."""
    return {f"{name} {s}": digest(KINDS[name].named("quick").example(3, 5, s)) for name in QUICK for s in SPLITS}


@pytest.mark.parametrize(("name", "setting"), SETTINGS)
def test_examples_fit_the_vocabulary_and_the_oracle_solves_them(name: str, setting: str) -> None:
    task = KINDS[name].named(setting)
    for split in SPLITS:
        for example in task.examples(0, range(2 if setting != "quick" else COUNT), split):
            assert example.tokens.dtype == example.labels.dtype == torch.int64
            assert 0 <= int(example.tokens.min()) <= int(example.tokens.max()) < task.vocabulary
            assert example.asked.any()
            assert not example.asked[0]
            if example.prompt is not None:
                assert example.asked[example.prompt :].all()
                assert not example.asked[: example.prompt].any()
                assert torch.equal(example.tokens[example.prompt :], example.answer)
            for metric, value in task.scores(task.oracle(example), example).items():
                assert value == pytest.approx(0.0 if metric in ("L1", "total variation") else 1.0, abs=1e-6), metric


@pytest.mark.parametrize("name", QUICK)
def test_an_example_depends_on_seed_index_and_split_alone(name: str) -> None:
    task = KINDS[name].named("quick")
    made = {split: task.examples(1, range(4), split) for split in SPLITS}
    assert digest(task.example(1, 3, "test")) == digest(made["test"][3])
    assert digest(task.example(1, 3)) == digest(made["train"][3])
    every = [digest(e) for examples in made.values() for e in examples] + [digest(task.example(2, 0))]
    assert len(set(every)) == len(every)


def test_examples_are_the_same_in_another_process() -> None:
    program = "from tasks.test_token_tasks import digests; print(digests())"
    where = os.pathsep.join(p for p in sys.path if p)
    for seed in ("1", "2"):
        assert python("-c", program, PYTHONHASHSEED=seed, PYTHONPATH=where).strip() == str(digests())


@pytest.mark.parametrize("name", QUICK)
def test_the_floor_is_below_the_oracle(name: str) -> None:
    floor = KINDS[name].named("quick").floor(count=32)
    metric, worse = ("total variation", -1) if "total variation" in floor else ("accuracy", 1)
    assert worse * floor[metric] < (0.9 if worse == 1 else -0.1)


@pytest.mark.parametrize("name", QUICK)
def test_a_batch_is_its_examples_padded(name: str) -> None:
    examples = KINDS[name].named("quick").examples(0, range(3))
    batch = collate(examples)
    for row, example in enumerate(examples):
        n = len(example.tokens)
        assert torch.equal(batch["input_ids"][row, :n], example.tokens)
        assert torch.equal(batch["labels"][row, :n], example.labels)
        assert (batch["labels"][row, n:] == IGNORED).all()
        if "attention_mask" in batch:
            assert batch["attention_mask"][row].sum() == n


@pytest.mark.parametrize("name", QUICK)
def test_bad_places_and_settings_are_refused(name: str) -> None:
    kind = KINDS[name]
    task = kind.named("quick")
    for bad in ({"seed": 0.5, "index": 0}, {"seed": 0, "index": -1}, {"seed": 0, "index": 0, "split": "tset"}):
        refuses("example", task.example, **bad)
    refuses("quick", kind.named, "quik")
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        bad: list[Any] = [-1, 1.5, True, "3"] if hint is int else []
        bad += [0, "x", None] if hint is float else []
        bad += [3, (1,), (2, 1), ("a", "b")] if "tuple[int, int]" in str(hint) else []
        for value in bad:
            refuses(field.name, kind.named, "quick", **{field.name: value})
