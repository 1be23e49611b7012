"""Long documents with recurring names: facts to remember beyond a window of attention.

A document is a stream of short sentences. Some are statements about a person ("Ann keeps a kite ."), the same whenever
the person comes up again, and drawn anew for each document: the last word can be predicted only from an earlier
statement. Scores are separate for statements that are "new", "near" (the last one lies inside the window) and "far".
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import ClassVar

from torch import Tensor

from ..checks import flag, optional_whole, require
from .base import Settings, check_share, check_sizes, tasks
from .tiny_math import NAMES, OBJECTS
from .tokens import TokenExample, Words, WordTask, example_of

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
    """Facts about the people of a document, each stated many times.

    Args:
        sentences: of a document.
        people: of a document.
        share: of sentences that are statements about a person.
        verbs: kinds of statements about a person, at most 4. With 0 a statement is a name and a thing ("Ann kite ."),
            which small models learn to recall in a few hundred steps.
        window: tokens; an earlier statement further away than that is "far".
        everything: whether every token has a label (for training a language model), not recurring last words alone.
        length: tokens after which a document ends, even within a sentence; None for whole sentences. Without
            `everything`, a document in which nothing recurs has no label.
    """

    settings: ClassVar[Settings] = {
        "quick": {"sentences": 40, "people": 4, "window": 32},
        "terse": {"sentences": 24, "people": 6, "share": 0.8, "verbs": 0, "window": 8},
        "long": {"sentences": 1024, "people": 24, "window": 256},
    }

    sentences: int = 256
    people: int = 16
    share: float = 0.5
    verbs: int = len(VERBS)
    window: int = 64
    everything: bool = False
    length: int | None = None

    def __post_init__(self) -> None:
        check_sizes(self, sentences=2, people=1, verbs=0, window=1)
        check_share(self)
        call = type(self).__name__
        flag(call, "everything", self.everything)
        optional_whole(call, "length", self.length, 1)
        require(self.people <= len(NAMES), call, f"people is {self.people}, expected at most {len(NAMES)}.")
        require(self.verbs <= len(VERBS), call, f"verbs is {self.verbs}, expected at most {len(VERBS)}.")

    @cached_property
    def words(self) -> Words:
        listed = [word for sentence in FILLER for word in sentence.split()]
        return Words([*listed, "a", *VERBS, *NAMES, *OBJECTS])

    def draw(self, random: Random, split: str) -> TokenExample:
        people, verbs = random.sample(NAMES, self.people), VERBS[: self.verbs] or ("",)
        facts = {(who, verb): random.choice(OBJECTS) for who in people for verb in verbs}
        numbers, tokens = self.words.numbers, list[int]()
        last: dict[tuple[str, str], int] = {}
        places: dict[str, list[int]] = {"new": [], "near": [], "far": []}
        for _ in range(self.sentences):
            if random.random() >= self.share:
                tokens += [numbers[word] for word in random.choice(FILLER).split()]
                continue
            fact = random.choice(people), random.choice(verbs)
            said = (*fact, "a", facts[fact], ".") if self.verbs else (fact[0], facts[fact], ".")
            tokens += [numbers[word] for word in said]
            at = len(tokens) - 2
            part = "new" if fact not in last else "near" if at - last[fact] <= self.window else "far"
            places[part].append(at)
            last[fact] = at
        tokens = tokens[: self.length]
        places = {part: [at for at in positions if at < len(tokens)] for part, positions in places.items()}
        asked = range(len(tokens)) if self.everything else sorted(places["near"] + places["far"])
        return example_of(tokens, {at: tokens[at] for at in asked}, places)

    def statements(self, tokens: list[int]) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield of each statement that is complete the words that it is about and the position of its last word."""
        names, (words, further) = {self.words.numbers[name] for name in NAMES}, (2, 3) if self.verbs else (1, 1)
        for last in range(further, len(tokens)):
            first = last - further
            if tokens[first] in names:
                yield tuple(tokens[first : first + words]), last

    def oracle(self, example: TokenExample) -> Tensor:
        """Return the last word of each statement from an earlier one, int64 [T]; elsewhere the token itself."""
        tokens, answer = example.tokens.tolist(), example.tokens.clone()
        known: dict[tuple[int, ...], int] = {}
        for fact, at in self.statements(tokens):
            answer[at] = known.get(fact, tokens[at])
            known[fact] = tokens[at]
        return answer

    def trivial(self, example: TokenExample) -> Tensor:
        """Return the last word of the statement before, about any person, int64 [T]."""
        tokens, answer = example.tokens.tolist(), example.tokens.clone()
        last = self.words.numbers[OBJECTS[0]]
        for _, at in self.statements(tokens):
            answer[at], last = last, tokens[at]
        return answer
