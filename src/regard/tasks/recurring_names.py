"""Long documents in which people come back: what is worth remembering beyond a window.

A document is a stream of short sentences. Some are statements about a person ("Ann keeps a kite ."), the same whenever
the person comes up again; others are about nobody. Who keeps what is drawn anew for each document, so that the last
word of a statement can be predicted only from an earlier statement of the same document. Recurrences are scored
separately by distance: "near", the person's last statement lies inside the window, and "far", it does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import ClassVar

from torch import Tensor

from ..checks import flag, require
from .base import Settings, tasks
from .tiny_math import NAMES, OBJECTS
from .tokens import TokenExample, WordTask, check_sizes, example_of

_FILLER = (
    "the rain fell on the roof, the wind came from the sea, the road was long and empty, a dog ran by, "
    "the bell rang twice, the night was cold, a boat came in, the market opened early, the lamp went out, "
    "the snow lay deep, a letter arrived, the river rose, the door stood open, the fire burned low"
)
FILLER = tuple(f"{sentence} ." for sentence in _FILLER.split(", "))
VERBS = ("keeps", "wants", "likes", "paints")


@tasks.register("recurring-names")
@dataclass(frozen=True)
class RecurringNames(WordTask):
    """What each person of a document keeps, likes and wants, repeated many times.

    Args:
        sentences: of a document.
        people: of a document.
        share: of sentences that are statements about a person.
        window: tokens; an earlier statement further away than that is "far".
        everything: whether every token has a label (for training a language model), not recurring last words alone.

    Raises:
        ArgumentError: a number out of range.
    """

    name: ClassVar[str] = "recurring-names"
    settings: ClassVar[Settings] = {
        "quick": {"sentences": 40, "people": 4, "window": 32},
        "long": {"sentences": 1024, "people": 24, "window": 256},
    }

    sentences: int = 256
    people: int = 16
    share: float = 0.5
    window: int = 64
    everything: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, sentences=2, people=1, window=1)
        flag(type(self).__name__, "everything", self.everything)
        call = type(self).__name__
        require(self.people <= len(NAMES), call, f"people is {self.people}, expected at most {len(NAMES)}.")
        require(0.0 < self.share <= 1.0, call, f"share is {self.share}, expected a number above 0, at most 1.")
        listed = [word for sentence in FILLER for word in sentence.split()]
        self._list([*listed, "a", *VERBS, *NAMES, *OBJECTS])

    def draw(self, random: Random, split: str) -> TokenExample:
        people = random.sample(NAMES, self.people)
        facts = {(who, verb): random.choice(OBJECTS) for who in people for verb in VERBS}
        numbers, tokens = self.words.numbers, list[int]()
        last: dict[tuple[str, str], int] = {}
        places: dict[str, list[int]] = {"new": [], "near": [], "far": []}
        for _ in range(self.sentences):
            if random.random() >= self.share:
                tokens += [numbers[word] for word in random.choice(FILLER).split()]
                continue
            fact = random.choice(people), random.choice(VERBS)
            tokens += [numbers[word] for word in (*fact, "a", facts[fact], ".")]
            at = len(tokens) - 2
            part = "new" if fact not in last else "near" if at - last[fact] <= self.window else "far"
            places[part].append(at)
            last[fact] = at
        asked = range(len(tokens)) if self.everything else sorted(places["near"] + places["far"])
        return example_of(tokens, {at: tokens[at] for at in asked}, places)

    def oracle(self, example: TokenExample) -> Tensor:
        """Return the last word of each statement from its earlier occurrence, int64 [T]; elsewhere the token itself,
        since nothing before it predicts it."""
        tokens, found = example.tokens.tolist(), example.tokens.clone()
        verbs = {self.words.numbers[verb] for verb in VERBS}
        known: dict[tuple[int, int], int] = {}
        for at, token in enumerate(tokens):
            if token in verbs:
                fact = tokens[at - 1], token
                found[at + 2] = known.get(fact, tokens[at + 2])
                known[fact] = tokens[at + 2]
        return found

    def trivial(self, example: TokenExample) -> Tensor:
        """Return the last word of the statement before, about any person, int64 [T]."""
        tokens, found = example.tokens.tolist(), example.tokens.clone()
        verbs, last = {self.words.numbers[verb] for verb in VERBS}, self.words.numbers[OBJECTS[0]]
        for at, token in enumerate(tokens):
            if token in verbs:
                found[at + 2], last = last, tokens[at + 2]
        return found
