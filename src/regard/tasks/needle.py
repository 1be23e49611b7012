"""Needle in a haystack: sentences with secret numbers at random places of a text, followed by a question.

Fast-weight Product Key Memory paper, section 4.3: five needles "The secret number for ID-xxxx is dddddd." (four
hexadecimal characters, six digits) in a text of 4 K to 128 K tokens, and the question "The secret number for ID-xxxx
is " (with the final space) about one of them. A text is a sequence of pieces: words (strings, as the paper's program
counts) or tokens (integers).
"""

import random
import re
import string
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from ..checks import instance, optional_whole, refuse, require, whole
from .base import check_place, hashed, tasks

CALL = "NeedleInHaystack"


@dataclass(frozen=True)
class NeedleExample:
    """One haystack and its question.

    Attributes:
        haystack: pieces, needles included.
        question: pieces after the haystack.
        key: key of the needle in the question.
        answer: the number of that needle.
        numbers: key -> number of every needle, in the order of the haystack.
        places: index of the first piece of each needle.
    """

    haystack: tuple[Any, ...]
    question: tuple[Any, ...]
    key: str
    answer: str
    numbers: dict[str, str]
    places: tuple[int, ...]

    @property
    def prompt(self) -> tuple[Any, ...]:
        """Return the haystack and the question."""
        return self.haystack + self.question


@dataclass(frozen=True)
class NeedleScore:
    """The score of one prediction: whether it is the answer (`exact`), the share of the answer's digits that are right
    by position (`digits`), and whether it is the number of any needle (`candidate`)."""

    exact: bool
    digits: float
    candidate: bool


@tasks.register("needle")
@dataclass(frozen=True)
class NeedleInHaystack:
    """Needles in a text.

    A haystack has exactly `length` pieces: the text from a random piece on (continued at its beginning), with needles
    at random places. Keys are unique in an example, and among the examples of a seed as long as there are enough.

    Args:
        text: words or tokens.
        length: pieces of a haystack.
        needles: number of needles.
        encode: function from a sentence to pieces; default: its words.
        decode: function from pieces to a sentence, for the oracle; default: the words, joined by spaces.
        breaks: pieces after which a needle may begin (tokens of spaces, so that no word is cut); None for all.
        digits: digits of a number.
        id_digits: hexadecimal digits of a key.
        reserved: number of keys reserved for each example; default `needles`. Tasks with different `needles` share no
            keys between different examples if they have the same number here.
        template: text of a needle, with {key} and {value}; the question is the part before {value}.
        key: text of a key, with {id}.

    Raises:
        ArgumentError: a number is out of range, the needles do not fit into the length, or the text is empty, has no
            place for a needle, or holds tokens without encode and decode.
    """

    text: Sequence[Any] = field(repr=False)
    length: int = 4096
    needles: int = 5
    encode: Callable[[str], Sequence[Any]] | None = None
    decode: Callable[[Sequence[Any]], str] | None = None
    breaks: frozenset[Any] | None = None
    digits: int = 6
    id_digits: int = 4
    reserved: int | None = None
    template: str = "The secret number for {key} is {value}."
    key: str = "ID-{id}"

    def __post_init__(self) -> None:
        for name, high in {"length": 2**40, "needles": 2**40, "digits": 18, "id_digits": 8}.items():
            whole(CALL, name, getattr(self, name), 1, high)
        if not isinstance(self.text, Sequence) or len(self.text) == 0:
            raise refuse(CALL, "text", self.text, "words or tokens, at least one")
        optional_whole(CALL, "reserved", self.reserved, self.needles)
        for name in ("encode", "decode"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise refuse(CALL, name, getattr(self, name), "a function or None")
            words = isinstance(self.text[0], str) or getattr(self, name) is not None
            pieces = f"text holds pieces of type {type(self.text[0]).__name__}, which are not words"
            require(words, CALL, f"{pieces}; give encode and decode, functions from a sentence to pieces and back.")
        for name, known in {"template": {"key", "value"}, "key": {"id"}}.items():
            _check_template(name, getattr(self, name), known)
        few = f"{self.needles} needles with digits={self.digits} and id_digits={self.id_digits} need as many different"
        enough = min(10**self.digits, 16**self.id_digits) >= self.needles
        require(enough, CALL, f"{few} keys and numbers; give them more digits.")
        ordered = self.template.index("{key}") < self.template.index("{value}")
        require(ordered, CALL, f"template {self.template!r} must name {{key}} before {{value}}.")
        if self.breaks is not None:
            instance(CALL, "breaks", self.breaks, (Set, list, tuple), "a set of pieces, or None")
            possible = any(piece in self.breaks for piece in self.text)
            require(possible, CALL, "no piece of the text is among breaks; needles would have no place.")

    def sentence(self, key: str, value: str) -> str:
        """Return the text of a needle."""
        return self.template.format(key=key, value=value)

    def question(self, key: str) -> str:
        """Return the text before the value, the final space included."""
        return self.template.partition("{value}")[0].format(key=key)

    def example(self, seed: int, index: int) -> NeedleExample:
        """Return example `index` of the stream `seed`, in O(length) time; raise `ArgumentError` if it has no room."""
        check_place(f"{CALL}.example", seed, index)
        draw = random.Random(hashed(f"needle:{seed}:{index}"))
        first = index * (self.needles if self.reserved is None else self.reserved)
        keys = [self.key.format(id=unique_id(seed, first + i, self.id_digits)) for i in range(self.needles)]
        values = [f"{number:0{self.digits}d}" for number in draw.sample(range(10**self.digits), self.needles)]
        asked = draw.randrange(self.needles)
        numbers = dict(zip(keys, values, strict=True))
        space = "" if self.encode is None else " "
        sentences = [self._pieces(self.sentence(key, value) + space) for key, value in numbers.items()]
        filler = self._filler(draw, self.length - sum(map(len, sentences)))
        fit: Sequence[int] = range(len(filler) + 1)  # where a needle may be inserted
        if self.breaks is not None:
            fit = [0, *(i + 1 for i, piece in enumerate(filler) if piece in self.breaks)]
        cuts = sorted(draw.choice(fit) for _ in range(self.needles))
        haystack: list[Any] = []
        places = []
        for begin, end, sentence in zip([0, *cuts], [*cuts, len(filler)], [*sentences, ()], strict=True):
            haystack += filler[begin:end]
            places.append(len(haystack))
            haystack += sentence
        question = tuple(self._pieces(self.question(keys[asked])))
        return NeedleExample(tuple(haystack), question, keys[asked], values[asked], numbers, tuple(places[:-1]))

    def examples(self, seed: int, indices: Iterable[int]) -> list[NeedleExample]:
        """Return the examples of `indices`, in order."""
        return [self.example(seed, index) for index in indices]

    def _pieces(self, sentence: str) -> list[Any]:
        return list(sentence.split() if self.encode is None else self.encode(sentence))

    def _filler(self, draw: random.Random, count: int) -> list[Any]:
        problem = f"{self.needles} needles have {self.length - count} pieces, more than a haystack"
        require(count >= 0, CALL, f"{problem} of length {self.length}; make it longer, or give fewer needles.")
        start = draw.randrange(len(self.text))
        first = list(self.text[start : start + count])
        while len(first) < count:
            first += self.text[: count - len(first)]
        return first

    def score(self, prediction: str, example: NeedleExample) -> NeedleScore:
        """Compare a prediction, without surrounding whitespace, with the answer."""
        said = prediction.strip()
        right = sum(one == other for one, other in zip(said, example.answer, strict=False))
        return NeedleScore(said == example.answer, right / len(example.answer), said in example.numbers.values())

    def error(self, prediction: str, example: NeedleExample) -> float:
        """Return 0 if the prediction is the answer, else 1."""
        return float(not self.score(prediction, example).exact)

    def oracle(self, example: NeedleExample) -> str:
        """Return the answer, found by a regular expression in the haystack; empty if it is not there."""
        text = " ".join(example.haystack) if self.decode is None else self.decode(example.haystack)
        match = re.search(re.escape(self.question(example.key)) + rf"(\d{{{self.digits}}})", text)
        return match.group(1) if match else ""


def _check_template(name: str, given: Any, wanted: set[str]) -> None:
    try:
        names = {part for _, part, _, _ in string.Formatter().parse(instance(CALL, name, given, str, "a text")) if part}
    except ValueError:
        names = set()
    if names != wanted:
        raise refuse(CALL, name, given, f"a text with {', '.join(f'{{{each}}}' for each in sorted(wanted))} alone")


def unique_id(seed: int, number: int, digits: int = 4) -> str:
    """Return entry `number` (modulo 16^digits) of a permutation of 0 .. 16^digits - 1, as hexadecimal digits.

    The seed selects the permutation: a Feistel network of four rounds, halves of 2 `digits` bits and a hash.
    """
    half = 4**digits
    left, right = divmod(number % half**2, half)
    for turn in range(4):
        left, right = right, left ^ hashed(f"{seed}:{turn}:{right}", size=4) % half
    return f"{left * half + right:0{digits}x}"


@dataclass(frozen=True)
class Share:
    """A share of trials. `scipy.stats.binomtest(hits, trials).proportion_ci()` gives its interval."""

    hits: int
    trials: int

    @property
    def mean(self) -> float:
        """Return hits / trials; 0 without trials."""
        return self.hits / self.trials if self.trials else 0.0

    def __str__(self) -> str:
        return f"{self.mean:.0%} of {self.trials}"


@dataclass(frozen=True)
class NeedleResult:
    """Shares of `NeedleScore`, and the mean of `digits`, without an interval since those of an answer are dependent."""

    exact: Share
    digits: float
    candidate: Share

    @classmethod
    def of(cls, scores: Sequence[NeedleScore]) -> "NeedleResult":
        """Count the scores."""
        many = len(scores)
        return cls(
            Share(sum(score.exact for score in scores), many),
            sum(score.digits for score in scores) / max(1, many),
            Share(sum(score.candidate for score in scores), many),
        )
