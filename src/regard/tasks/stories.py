"""Short stories from a grammar, and a grader that needs no network.

In place of TinyStories and BabiStories and of the large language model that grades what is written (In-context Language
Model and sparse regression papers). A story has five parts: a setting, a wish, a problem, help and an end. Its people,
things and places are drawn once and come back, by name and by pronoun.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from random import Random
from typing import ClassVar

import torch
from torch import Tensor

from ..checks import ArgumentError, whole
from .base import Settings, tasks
from .tokens import SLOT, TokenExample, Words, WordTask, continued, pattern_of

GIRLS = tuple("Ann Eva Lily Mia Zoe Emma Ruby Ella Nora Iris Rosa Lucy Kate Amy Sue Liz Meg Fay Dora Jane".split())  # noqa: SIM905
BOYS = tuple("Tom Ben Max Sam Leo Jack Noah Owen Finn Hugo Luke Paul Adam Carl Dan Joe Bob Tim Ron Ian".split())  # noqa: SIM905
KINDS: dict[str, tuple[str, ...]] = {
    kind: tuple(words.split())
    for kind, words in {
        "thing": "kite boat drum doll bell lamp book ball hat cup box shell stone map wagon puppet ring spoon",
        "color": "red blue green yellow white black brown silver golden purple",
        "place": "garden forest park kitchen school market river beach field attic yard barn",
        "animal": "dog cat bird rabbit fox duck mouse horse owl frog bear goat",
        "mood": "happy sad tired proud worried glad angry curious calm shy",
        "weather": "sunny rainy windy cold warm cloudy snowy foggy",
    }.items()
}
PARTS: dict[str, tuple[str, ...]] = {
    "setting": (
        "Once there was a {child} named {hero} .",
        "{hero} was a little {child} .",
        "It was a {weather} day in the {place} .",
        "{hero} lived near the {place} with a {animal} .",
        "One {weather} day {hero} went to the {place} .",
    ),
    "wish": (
        "{hero} wanted to find a {color} {thing} .",
        "{He} liked the {color} {thing} very much .",
        "{He} wished for a {color} {thing} .",
        "{hero} loved to play with the {color} {thing} .",
    ),
    "problem": (
        "But the {thing} fell into the water .",
        "But the {thing} was too high to reach .",
        "Then {he} lost the {thing} in the {place} .",
        "But the {color} {thing} broke .",
        "{hero} was very {mood} about it .",
        "{He} looked for the {thing} but could not find it .",
    ),
    "help": (
        "{friend} came to the {place} to help .",
        '{friend} said , " do not be {mood} , {hero} . "',
        "The {animal} found the {thing} .",
        "{hero} asked {friend} for help .",
        "{friend} and {hero} looked for the {thing} together .",
    ),
    "end": (
        "{hero} got the {thing} back and was {mood} .",
        "{friend} and {hero} went home with the {color} {thing} .",
        "{He} thanked {friend} and they were friends .",
        "From that day {hero} took care of the {thing} .",
        "The end .",
    ),
}
SCORES = ("grammar", "consistency", "plot", "creativity")
PATTERNS = [(part, re.compile(pattern_of(template))) for part, many in PARTS.items() for template in many]


@tasks.register("stories")
@dataclass(frozen=True)
class Stories(WordTask):
    """Stories to be continued.

    Args:
        sentences: of each part of a story; parts with fewer templates have all of theirs.
        prompt: sentences that a model is given before it continues.
    """

    settings: ClassVar[Settings] = {"quick": {"sentences": 1, "prompt": 2}, "long": {"sentences": 4, "prompt": 4}}

    sentences: int = 2
    prompt: int = 3

    def __post_init__(self) -> None:
        whole("Stories", "sentences", self.sentences, 1, 4)
        whole("Stories", "prompt", self.prompt, 1, self.sentences * len(PARTS) - 1)

    @cached_property
    def words(self) -> Words:
        plain = SLOT.sub(" ", " ".join(t for many in PARTS.values() for t in many)).split()
        slots = [word for many in KINDS.values() for word in many]
        return Words(["\n", *plain, "He", "he", "She", "she", "boy", "girl", *slots, *GIRLS, *BOYS])

    def story(self, random: Random) -> list[str]:
        """Return the sentences of a story, words and signs with blanks between them."""
        girl = random.random() < 0.5
        hero, friend = random.choice(GIRLS if girl else BOYS), random.choice(GIRLS + BOYS)
        while friend == hero:
            friend = random.choice(GIRLS + BOYS)
        fixed = {kind: random.choice(words) for kind, words in KINDS.items()}
        fixed |= {"hero": hero, "friend": friend, "child": "girl" if girl else "boy"}
        fixed |= {"he": "she" if girl else "he", "He": "She" if girl else "He"}
        sentences = []
        for part, templates in PARTS.items():
            chosen = random.sample(range(len(templates)), min(self.sentences, len(templates)))
            if part == "setting" and not {0, 1} & set(chosen):
                chosen[0] = random.randrange(2)  # which says who it is about, before any pronoun
            sentences += [templates[at].format(**fixed) for at in sorted(chosen)]
        return sentences

    def draw(self, random: Random, split: str) -> TokenExample:
        sentences = [[self.words.numbers[word] for word in sentence.split()] for sentence in self.story(random)]
        first, rest = sentences[: self.prompt], sentences[self.prompt :]
        return continued(list(chain(*first)), [*chain(*rest), self.words.numbers["\n"]])

    def oracle(self, example: TokenExample) -> Tensor:
        """Return the true continuation, int64 [T]: it cannot be predicted from the beginning."""
        return example.tokens

    def trivial(self, example: TokenExample) -> Tensor:
        """Return a full stop at every place, int64 [T]."""
        return torch.full_like(example.tokens, self.words.numbers["."])

    def grade(self, beginning: str, text: str, known: Iterable[str] = ()) -> dict[str, float]:
        """Score a text that continues a beginning, each score from 0 to 10.

        Args:
            beginning, text: words and signs.
            known: stories that the writer has read, for creativity.

        Returns:
            "grammar": the share of sentences that the grammar can make; "consistency": the share of names, things,
            places and pronouns that agree with what came before; "plot": how many of the parts after the beginning
            come, in their order; "creativity": the share of runs of five words that are new, also to `known`.
        """
        before, after = _sentences(beginning), _sentences(text)
        bound: dict[str, str] = {}
        begun = [agreement for sentence in before if (agreement := _agreement(sentence, bound))]
        written = [agreement for sentence in after if (agreement := _agreement(sentence, bound))]
        slots = [right for _, agreeing in written for right in agreeing]
        order = [list(PARTS).index(part) for part, _ in written]
        start = max((list(PARTS).index(part) for part, _ in begun), default=0)
        wanted = set(range(start + 1, len(PARTS))) or {len(PARTS) - 1}
        rising = {p for at, p in enumerate(order) if p in wanted and all(q <= p for q in order[:at])}
        runs, seen = _runs(" ".join(after)), set(_runs(" ".join(before)))
        seen.update(run for story in known for run in _runs(" ".join(_sentences(story))))
        share = lambda part, whole: 10.0 * part / whole if whole else 0.0  # noqa: E731
        return {
            "grammar": share(len(written), len(after)),
            "consistency": share(sum(slots), len(slots)),
            "plot": share(len(rising), len(wanted)),
            "creativity": share(len(set(runs) - seen), len(runs)),
        }


def _sentences(text: str) -> list[str]:
    """Return the sentences of a text, its words and signs with one blank between them."""
    words = re.findall(r"\w+|[^\w\s]", text)
    sentences: list[list[str]] = [[]]
    quoted = False
    for word in words:
        sentences[-1].append(word)
        quoted ^= word == '"'
        if (word == "." and not quoted) or (word == '"' and not quoted and sentences[-1][-2:-1] == ["."]):
            sentences.append([])
    return [" ".join(sentence) for sentence in sentences if sentence]


def _agreement(sentence: str, bound: dict[str, str]) -> tuple[str, list[bool]] | None:
    """Return the part of a story that a sentence belongs to, and for each of its slots whether the word is of the right
    kind and agrees with `bound`, which learns the words that are new; None for a sentence that no template makes."""
    for part, pattern in PATTERNS:
        if (match := pattern.fullmatch(sentence)) is None:
            continue
        right = []
        for slot, word in match.groupdict().items():
            if slot in ("he", "He", "child"):
                fits = word.lower() in (("she", "girl") if bound.get("hero") in GIRLS else ("he", "boy"))
            else:
                fits = word in KINDS.get(slot, GIRLS + BOYS)
            if slot in ("hero", "friend", "thing", "color"):  # which stay the same in a story
                fits = fits and bound.setdefault(slot, word) == word
            right.append(fits)
        return part, right
    return None


def _runs(text: str, length: int = 5) -> list[tuple[str, ...]]:
    words = text.split()
    return [tuple(words[at : at + length]) for at in range(len(words) - length + 1)]


QUESTION = """Here is the beginning of a short story, and how a student continued it.

Beginning: {beginning}

Continuation: {text}

Grade the continuation from 0 to 10 for grammar, for consistency with the beginning, for its plot and for creativity.
Answer with one line of JSON: {{"grammar": 0, "consistency": 0, "plot": 0, "creativity": 0}}"""


def judge(ask: Callable[[str], str], beginning: str, text: str) -> dict[str, float]:
    """Score a continuation by a language model.

    Args:
        ask: from a question to the model's answer.
        beginning, text: as in `Stories.grade`.

    Raises:
        ArgumentError: an answer without the four scores.
    """
    answer = ask(QUESTION.format(beginning=beginning, text=text))
    for braced in re.findall(r"{[^{}]*}", answer):
        try:
            scores = json.loads(braced)
        except ValueError:
            continue
        if all(isinstance(scores.get(name), int | float) and 0 <= scores[name] <= 10 for name in SCORES):
            return {name: float(scores[name]) for name in SCORES}
    raise ArgumentError(f"judge: expected JSON with {', '.join(SCORES)} from 0 to 10, got {answer[:200]!r}.")
