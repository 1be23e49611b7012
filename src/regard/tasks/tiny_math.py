"""TinyMath: a story with two numbers that matter and some that do not, a question, and its answer.

In-context Language Model paper, section 5.3 (Table 3, Figure 3). An example reads

    Story: Tom is 7 years old and has 28 pens. At 5 o'clock Tom loses 12 pens. How many pens does Tom have left?
    Question: 28 - 12 = ?
    We start with 28 and take away 12. 28 - 12 = 16.
    Answer: 16

A model is given the story and writes the rest. The paper's stories are not released; these come from templates, with
the four operations, distracting numbers, indirect phrasings and four forms of explanation.

Splits: an operation with its operands (28 - 12) belongs to one split, by a hash of it; with `operands` "seen" all
splits have those of "train", in new stories. With `phrasings` "held-out" the last one of each operation
comes in the split "test" alone.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..checks import ArgumentError, flag, one_of, refuse
from .base import Settings, check_sizes, check_span, tasks
from .tokens import IGNORED, WORD, TokenExample, Words, WordTask, continued, drawn, pattern_of, split_of

NAMES, OBJECTS = (
    tuple(words.split())
    for words in (
        "Tom Ann Ben Eva Max Lily Sam Mia Leo Zoe Jack Emma Noah Ruby Owen Ella Finn Nora Hugo Iris Luke Rosa Paul "
        "Anna Mark Lucy Adam Jane Carl Kate Dan Amy Joe Sue Bob Liz Tim Meg Ron Fay Ian Dora",
        "pens apples books coins shells stamps cards marbles stickers balloons cookies flowers stones buttons toys "
        "cups plates hats socks keys eggs pears plums nuts ribbons beads blocks crayons pencils maps kites dolls "
        "drums bells boxes bags candles lamps spoons leaves feathers tickets",
    )
)
OPERATIONS = ("+", "-", "*", "/")
PHRASINGS: dict[str, tuple[str, ...]] = {
    "+": (
        "{name} has {a} {things} and finds {b} more. How many {things} does {name} have now?",
        "{name} has {a} {things}. {other} gives {name} {b} {things}. How many {things} does {name} have in all?",
        "There are {a} {things} on the table and {b} on the floor. How many {things} are there together?",
        "{name} buys {a} {things} in the morning and {b} in the evening. What is the number of {things}?",
        "{name} has {a} {things} and {other} has {b}. How many {things} do they have together?",
        "{name} puts {b} {things} into a box that holds {a} of them. What number of {things} is in the box?",
    ),
    "-": (
        "{name} has {a} {things} and loses {b}. How many {things} does {name} have left?",
        "{name} has {a} {things}. {name} gives {b} of them to {other}. How many {things} remain?",
        "There are {a} {things} in a box. {name} takes {b} of them away. What is the remaining number?",
        "{name} needs {a} {things} and has {b}. How many {things} does {name} need?",
        "{name} has {a} {things} and {other} has {b}. How many more {things} does {name} have?",
        "Of {a} {things} {name} sells {b}. What number of {things} is not sold?",
    ),
    "*": (
        "{name} has {a} boxes with {b} {things} each. How many {things} does {name} have?",
        "{name} buys {a} bags of {b} {things}. How many {things} are there in all?",
        "On each of {a} days {name} finds {b} {things}. What is the number of {things}?",
        "There are {a} rows of {b} {things}. How many {things} are there?",
        "Each of {a} friends brings {b} {things}. How many {things} are there together?",
        "{name} fills {a} cups with {b} {things} each. What number of {things} is in the cups?",
    ),
    "/": (
        "{name} shares {a} {things} among {b} friends. How many {things} does each get?",
        "{name} puts {a} {things} into {b} boxes, the same number into each. How many are in each box?",
        "{a} {things} are laid in {b} rows of the same length. How many {things} are in each row?",
        "{b} friends find {a} {things} and share them. What is the number for each?",
        "In {b} days {name} eats {a} {things}, the same number on each day. How many on each day?",
        "{a} {things} fill {b} cups, the same number in each. What number of {things} is in each cup?",
    ),
}
HELD_OUT = 1
"""How many phrasings of each operation, the last ones, are held out."""
DISTRACTORS = (
    "{name} is {n} years old.",
    "It is {n} o ' clock.",
    "{n} people look on.",
    "The bus costs {n} coins.",
    "{other} is {n} years old.",
    "It is day {n} of the month.",
)
EXPLANATIONS: dict[str, tuple[str, ...]] = {
    "+": (
        "We start with {a} and add {b}.",
        "There are {a} and then {b} more.",
        "We put {a} and {b} together.",
        "The sum of {a} and {b} is needed.",
    ),
    "-": (
        "We start with {a} and take away {b}.",
        "There are {a} and then {b} fewer.",
        "We take {b} from {a}.",
        "The difference of {a} and {b} is needed.",
    ),
    "*": (
        "We take {b} as often as {a} times.",
        "There are {a} times {b}.",
        "We add {b} to itself until there are {a}.",
        "The product of {a} and {b} is needed.",
    ),
    "/": (
        "We share {a} among {b}.",
        "There are {a} in {b} equal parts.",
        "We see how often {b} goes into {a}.",
        "The quotient of {a} and {b} is needed.",
    ),
}
QUESTION = re.compile(r"Question: (\d+) ([-+*/]) (\d+) =")
ANSWER = re.compile(r"Answer: (\d+)")


class Problem(NamedTuple):
    """An operation, its operands and its result."""

    a: int
    operation: str
    b: int

    @property
    def result(self) -> int:
        """Return the answer."""
        results = {"+": self.a + self.b, "-": self.a - self.b, "*": self.a * self.b, "/": self.a // max(self.b, 1)}
        return results[self.operation]

    @property
    def split(self) -> str:
        """Return the split that the problem belongs to; 3 + 5 and 5 + 3 are in one split."""
        low, high = sorted((self.a, self.b)) if self.operation in "+*" else (self.a, self.b)
        return split_of(f"{low} {self.operation} {high}")


@tasks.register("tiny-math")
@dataclass(frozen=True)
class TinyMath(WordTask):
    """Stories with an arithmetic question, in words.

    Args:
        largest: operands and results of + and - are at most this; factors and quotients at most `factor`.
        factor: the largest factor.
        operations: those that are drawn.
        distractors: (least, most) sentences with a number that does not matter.
        explanation: whether a sentence of explanation comes before the answer.
        phrasings: "all" in every split; "held-out": the last phrasing of each operation in the split test alone, and
            no other there.
        operands: "held-out": those of a split come in no other one; "seen": all splits have those of "train".
    """

    settings: ClassVar[Settings] = {
        "quick": {"largest": 20, "factor": 4, "distractors": (0, 1), "explanation": False},
        "small": {"largest": 60, "factor": 9, "distractors": (0, 1), "explanation": False},
        "paper": {},
    }

    largest: int = 198
    factor: int = 12
    operations: tuple[str, ...] = OPERATIONS
    distractors: tuple[int, int] = (1, 3)
    explanation: bool = True
    phrasings: str = "all"
    operands: str = "held-out"

    def __post_init__(self) -> None:
        check_sizes(self, largest=6, factor=2)
        call = type(self).__name__
        known = isinstance(self.operations, (tuple, list, str)) and all(op in OPERATIONS for op in self.operations)
        if not (known and self.operations):
            raise refuse(call, "operations", self.operations, f"some of {', '.join(OPERATIONS)}")
        one_of(call, "phrasings", self.phrasings, ("all", "held-out"))
        one_of(call, "operands", self.operands, ("held-out", "seen"))
        flag(call, "explanation", self.explanation)
        check_span(self, "distractors", 0, len(DISTRACTORS))

    @cached_property
    def words(self) -> Words:
        texts = [p for group in (PHRASINGS, EXPLANATIONS) for many in group.values() for p in many] + list(DISTRACTORS)
        plain = " ".join(re.sub(r"{\w+}", " ", text) for text in texts)
        signs = WORD.findall(f"Story : Question = ? Answer . , + - * / \n {plain}")
        return Words([*signs, *NAMES, *OBJECTS, *map(str, range(max(self.largest, self.factor**2, 59) + 1))])

    def problem(self, random: Random, split: str) -> Problem:
        """Return an operation with its operands that belongs to a split."""
        split = "train" if self.operands == "seen" else split
        return drawn(lambda: self._any_problem(random), lambda problem: problem.split == split, self, split)

    def _any_problem(self, random: Random) -> Problem:
        operation = random.choice(self.operations)
        if operation in "*/":
            a, b = random.randint(2, self.factor), random.randint(2, self.factor)
            return Problem(a * b if operation == "/" else a, operation, b)
        a, b = random.randint(2, self.largest // 2), random.randint(2, self.largest // 2)
        return Problem(a + b if operation == "-" and a <= b else a, operation, b)

    def text(self, random: Random, split: str) -> tuple[str, str]:
        """Return a story and what follows it."""
        problem = self.problem(random, split)
        name, other = random.sample(NAMES, 2)
        fields = {"name": name, "other": other, "things": random.choice(OBJECTS), "a": problem.a, "b": problem.b}
        known = PHRASINGS[problem.operation]
        if self.phrasings == "held-out":
            known = known[-HELD_OUT:] if split == "test" else known[:-HELD_OUT]
        sentences = random.sample(DISTRACTORS, random.randint(*self.distractors))
        beside = [sentence.format(n=random.randint(2, 12), **fields) for sentence in sentences]
        story = " ".join(["Story:", *beside, random.choice(known).format(**fields)])
        equation = f"{problem.a} {problem.operation} {problem.b} ="
        rest = f"Question: {equation} ?\n"
        if self.explanation:
            why = random.choice(EXPLANATIONS[problem.operation]).format(**fields)
            rest += f"{why} {equation} {problem.result}.\n"
        return story + "\n", rest + f"Answer: {problem.result}\n"

    def draw(self, random: Random, split: str) -> TokenExample:
        story, rest = self.text(random, split)
        prompt, answer = self.words.encode(story), self.words.encode(rest)
        places = {"equation": [len(prompt) + at for at in (2, 3, 4)], "answer": [len(prompt) + len(answer) - 2]}
        return continued(prompt, answer, places=places)

    def judge(self, text: str, example: TokenExample) -> dict[str, float]:
        """Return the metrics of a text that a model wrote after the story.

        Returns:
            "equation": operands and operation are right; "answer": the number behind "Answer" is right;
            "answer follows": it is the result of the equation that was written; "distracted": an operand is a number of
            the story that does not matter.
        """
        prompt, expected = (self.words.decode(x.tolist()) for x in (example.tokens[: example.prompt], example.answer))
        truth = QUESTION.search(expected)
        said, number, right = QUESTION.search(text), ANSWER.search(text), ANSWER.search(expected)
        assert truth is not None
        assert right is not None
        others = set(re.findall(r"\d+", prompt)) - {truth[1], truth[3]}
        metrics = {
            "equation": float(said is not None and said.groups() == truth.groups()),
            "answer": float(number is not None and number[1] == right[1]),
            "distracted": float(said is not None and bool({said[1], said[3]} & others)),
        }
        if said is not None and not (said[2] == "/" and int(said[3]) == 0):
            result = Problem(int(said[1]), said[2], int(said[3])).result
            metrics["answer follows"] = float(number is not None and int(number[1]) == result)
        return metrics

    def oracle(self, example: TokenExample) -> Tensor:
        """Return the right words, int64 [T]; in the explanation, which cannot be known, the labels."""
        answer = self._solved(self.words.decode(example.tokens[: example.prompt].tolist()))
        answers, begin = example.labels.clone(), example.prompt or 0
        answers[[begin + 2, begin + 3, begin + 4, -2]] = torch.tensor([self.words.numbers[word] for word in answer])
        return torch.where(answers == IGNORED, 0, answers)

    def _solved(self, story: str) -> tuple[str, str, str, str]:
        """Return first operand, operation, second operand and result, from the phrasing that the story ends with."""
        for operation, many in PHRASINGS.items():
            for phrasing in many:
                if match := re.search(pattern_of(phrasing, numbers=("a", "b")) + r"\n$", story):
                    a, b = int(match["a"]), int(match["b"])
                    return str(a), operation, str(b), str(Problem(a, operation, b).result)
        raise ArgumentError(f"{type(self).__name__}.oracle: no phrasing of the task fits the story {story[:80]!r}.")

    def trivial(self, example: TokenExample) -> Tensor:
        """Return the labels with the first number of the story in place of every number, int64 [T]."""
        prompt = self.words.decode(example.tokens[: example.prompt].tolist())
        first = self.words.numbers[re.findall(r"\d+", prompt)[0]]
        number = torch.tensor([word.isdigit() for word in self.words.words])
        labels = example.labels.clamp_min(0)
        return torch.where(number[labels], first, labels)
