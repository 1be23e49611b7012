"""Facts of single tasks: lengths, splits, floors and graders."""

from dataclasses import replace
from itertools import product
from statistics import mean
from typing import Any

import pytest
import torch
from mistakes import refuses

from regard.tasks import (
    MQAR,
    MQMTAR,
    InContextRegression,
    PermutationTracking,
    RecurringNames,
    RegBench,
    Reverse,
    Sort,
    Stories,
    TinyMath,
    judge,
)
from regard.tasks.regbench import AutomatonExample, canonical, minimised
from regard.tasks.tiny_math import Problem
from regard.tasks.tokens import split_of


def strings(edges: Any, length: int) -> set[tuple[int, ...]]:
    """All strings of up to that length that an automaton accepts from its first state."""
    found, rows = {()}, [((), 0)]
    for _ in range(length):
        rows = [((*text, symbol), after) for text, state in rows for symbol, after in edges[state].items()]
        found |= {text for text, _ in rows}
    return found


def test_a_minimised_automaton_accepts_the_same_strings_and_copies_are_one() -> None:
    """Two states with the same future are one; the names of states do not matter; what is out of reach is gone."""
    edges = ({0: 1, 1: 2}, {2: 3}, {2: 4}, {0: 0}, {0: 0}, {1: 5})
    least = minimised(edges)
    assert len(least) == 3
    assert strings(least, 6) == strings(edges, 6)
    renamed = ({1: 4, 0: 3}, {0: 0}, {0: 0}, {2: 1}, {2: 2})
    assert minimised(renamed) == least
    assert minimised(({0: 1}, {1: 0})) == ({0: 1}, {1: 0})


def test_every_drawn_automaton_is_minimal() -> None:
    """All pairs of its states differ in a string, found by a search that is not the minimiser's."""
    for example in RegBench.named("quick").examples(0, range(40)):
        assert isinstance(example, AutomatonExample)
        edges = example.automaton
        apart = {(i, j): set(edges[i]) != set(edges[j]) for i, j in product(range(len(edges)), repeat=2)}
        for _ in edges:
            for i, j in apart:
                apart[i, j] |= any(apart[edges[i][s], edges[j][s]] for s in set(edges[i]) & set(edges[j]))
        assert all(apart[i, j] for i, j in apart if i != j)


def test_no_automaton_is_in_two_splits() -> None:
    task = RegBench.named("quick")
    for split in ("train", "validation", "test"):
        for example in task.examples(0, range(30), split):
            assert isinstance(example, AutomatonExample)
            assert split_of(canonical(example.automaton)) == split


def test_regbench_has_the_published_statistics() -> None:
    examples = RegBench.named("paper-40k").examples(0, range(300))
    assert mean(len(e.tokens) for e in examples) == pytest.approx(374, abs=15)
    out = [len(state) for e in examples for state in e.automaton]  # type: ignore[attr-defined]
    assert mean(out) == pytest.approx(2.0, abs=0.05)


def test_regbench_trains_on_as_many_automata_as_it_says() -> None:
    examples = RegBench.named("quick", automata=5).examples(0, range(60))
    assert len({str(e.automaton) for e in examples}) == 5  # type: ignore[attr-defined]


def test_regbench_scores_of_a_uniform_prediction() -> None:
    """Over V symbols of which m are valid, the total variation of the uniform distribution is 1 - m / V."""
    task = RegBench.named("quick")
    example = task.example(0, 0, "test")
    assert example.probabilities is not None
    valid = (example.probabilities > 0).sum(-1)[example.asked].double()
    found = task.scores(task.trivial(example), example)
    assert found["total variation"] == pytest.approx(float((1 - valid / task.symbols).mean()), abs=1e-6)
    assert found["L1"] == pytest.approx(2 * found["total variation"])


def test_back_off_learns_from_the_example() -> None:
    task = RegBench.named("paper-1k")
    examples = task.examples(0, range(10), "test")
    found = [mean(task.scores(task.back_off(e, n), e)["total variation"] for e in examples) for n in (1, 2, 3)]
    assert found[0] > found[1] > found[2] > 0.05


@pytest.mark.parametrize("setting", ["quick", "terse"])
def test_what_a_person_has_stays_the_same_in_a_document(setting: str) -> None:
    """Read from the words: a statement is a name, with verbs the verb and "a", then the thing and a full stop."""
    task = RecurringNames.named(setting)
    words = {number: word for word, number in task.words.numbers.items()}
    for example in task.examples(0, range(10)):
        text, last = [words[int(token)] for token in example.tokens], dict[tuple[str, ...], tuple[int, str]]()
        for at in range(len(text)):
            places = {place for place, where in example.parts.items() if where[at]}
            if not places:
                continue
            assert text[at + 1] == "."
            fact = (text[at - 3], text[at - 2]) if task.verbs else (text[at - 1],)
            before, thing = last.get(fact, (None, text[at]))
            assert text[at] == thing
            assert places == {"new" if before is None else "near" if at - before <= task.window else "far"}
            last[fact] = at, text[at]


@pytest.mark.parametrize("verbs", [0, 2])
def test_documents_with_a_length_are_cut(verbs: int) -> None:
    whole = RecurringNames(40, 3, verbs=verbs, everything=True)
    for length in (1, 2, 17, 50):
        task = replace(whole, length=length)
        for index in range(10):
            long, cut = whole.example(0, index), task.example(0, index)
            assert torch.equal(cut.tokens, long.tokens[:length])
            assert torch.equal(cut.labels, cut.tokens)
            assert all(torch.equal(where, long.parts[part][:length]) for part, where in cut.parts.items())
            assert task.scores(task.oracle(cut), cut)["accuracy"] == 1.0
    refuses("length is 0", replace, whole, length=0)


def test_mqar_fillers_are_never_keys_of_the_sequence() -> None:
    for example in MQAR(tokens=32, length=32, pairs=4, fillers="random").examples(0, range(50)):
        tokens = example.tokens.tolist()
        keys = set(tokens[0:8:2])
        assert sum(x in keys for x in tokens[8:]) == 4
        assert len(set(tokens[8:]) - keys) > 5


def test_mqar_gaps_follow_the_power_law() -> None:
    """The first gap has probability 1 / sum of g^(a-1) for a single query."""
    task = MQAR(tokens=16, length=18, pairs=1)
    first = mean(int(e.asked.nonzero()[0, 0]) == 3 for e in task.examples(0, range(3000)))
    assert first == pytest.approx(1 / sum(g**-0.99 for g in range(1, 9)), abs=0.03)


@pytest.mark.parametrize(("length", "tokens"), [(64, 76), (128, 131), (512, 488)])
def test_mqmtar_sources_have_the_published_lengths(length: int, tokens: int) -> None:
    """As the notes on the reference program measured, give or take the blanks at the ends of slots."""
    task = MQMTAR(least=length, most=length)
    prompt = mean(e.prompt or 0 for e in task.examples(0, range(20)))
    assert task.pairs(length) == int(0.8 * length) // 6
    assert prompt == pytest.approx(length + 3 * 4 + 2, abs=8)
    assert prompt == pytest.approx(tokens, rel=0.1)


@pytest.mark.parametrize("kind", [MQMTAR, Reverse, Sort])
def test_the_solver_is_exact_at_every_test_length(kind: Any) -> None:
    for factor in (1, 2, 4, 8, 16, 32, 64):
        task = kind.named("paper", least=64 * factor, most=64 * factor)
        example = task.example(0, 0, "test")
        assert len(example.tokens) > 64 * factor
        assert task.scores(task.oracle(example), example) == {"accuracy": 1.0, "exact": 1.0}


def test_the_floor_of_permutations_is_the_share_of_untouched_places() -> None:
    floor = PermutationTracking(places=24, items=64, swaps=(5, 5), questions=24).floor(count=400)
    assert floor["accuracy"] == pytest.approx((1 - 2 / 24) ** 5, abs=0.02)
    assert floor["accuracy on moved places"] < 0.05
    assert floor["accuracy on other places"] == 1.0


def test_tiny_math_operands_are_in_one_split() -> None:
    task = TinyMath()
    seen = {}
    for split in ("train", "test"):
        texts = [task.words.decode(e.answer.tolist()) for e in task.examples(0, range(300), split)]
        seen[split] = {text.split("?")[0] for text in texts}
    assert not seen["train"] & seen["test"]
    assert Problem(3, "+", 5).split == Problem(5, "+", 3).split
    known = TinyMath(operands="seen")
    numbers = [known.words.decode(e.answer.tolist()).split() for e in known.examples(0, range(100), "test")]
    assert {Problem(int(a), operation, int(b)).split for _, a, operation, b, *_ in numbers} == {"train"}


def test_tiny_math_holds_phrasings_out() -> None:
    task = TinyMath(phrasings="held-out", operations=("+",))
    for split in ("train", "test"):
        stories = [task.words.decode(example.tokens.tolist()) for example in task.examples(0, range(60), split)]
        assert {"into a box that holds" in text for text in stories} == {split == "test"}


def test_tiny_math_judges_what_a_model_wrote() -> None:
    task = TinyMath(operations=("-",), distractors=(1, 1))
    example = task.example(0, 0)
    text = task.words.decode(example.answer.tolist())
    assert task.judge(text, example) == {"equation": 1.0, "answer": 1.0, "distracted": 0.0, "answer follows": 1.0}
    a, b = text.split()[1], text.split()[3]
    wrong = f"Question: {b} - {a} =? Answer: 3"
    assert task.judge(wrong, example) == {"equation": 0.0, "answer": 0.0, "distracted": 0.0, "answer follows": 0.0}
    assert task.judge("no equation", example) == {"equation": 0.0, "answer": 0.0, "distracted": 0.0}


def test_stories_are_graded_by_what_they_say() -> None:
    task = Stories()
    example = task.example(0, 0)
    begin, text = (task.words.decode(x.tolist()) for x in (example.tokens[: example.prompt], example.answer))
    assert task.grade(begin, text) == dict.fromkeys(("grammar", "consistency", "plot", "creativity"), 10.0)
    assert task.grade(begin, text, known=[text])["creativity"] == 0.0
    assert task.grade(begin, task.words.decode(task.example(0, 1).answer.tolist()))["consistency"] < 8.0
    backwards = ". ".join(reversed(text.strip().rstrip(".").split(". "))) + "."
    assert task.grade(begin, backwards)["plot"] < 10.0
    assert task.grade(begin, "the the the .")["grammar"] == 0.0


def test_a_language_model_can_judge() -> None:
    scores = {"grammar": 8, "consistency": 7, "plot": 6, "creativity": 5}
    answer = judge(lambda question: f"Sure. {scores}".replace("'", '"') if "once" in question else "?", "once", "x")
    assert answer == scores
    refuses("judge", judge, lambda question: '{"grammar": 11}', "once", "x")


def test_in_context_regression_is_solved_by_its_maps() -> None:
    task = InContextRegression.named("quick", segment=16)
    batch = task.examples(0, range(60))
    errors = [task.error(x, batch).mean() for x in (
        task.oracle(batch), task.ridge(batch, by_segment=True), task.ridge(batch, by_segment=False), task.trivial(batch)
    )]  # fmt: skip
    assert errors[0] < 1e-10 < errors[1] < 0.1 < errors[2] < errors[3]
    assert errors[3] == pytest.approx(1.0, abs=0.15)
    mask = task.query_mask()
    assert not mask[: task.length].triu(1).any()
    assert mask[task.length :, : task.length].all()
    assert torch.equal(mask[task.length :, task.length :], torch.eye(task.queries, dtype=torch.bool))


@pytest.mark.parametrize(
    "task", [RegBench(states=(2, 2), alphabet=(1, 1), edges=1, symbols=2), TinyMath(largest=6, operations=("-",))]
)
def test_a_split_without_examples_is_an_error_and_no_hang(task: Any) -> None:
    refuses("no example in the split", lambda: [task.example(0, 0, s) for s in ("train", "validation", "test")])
