"""Needle in a haystack: a few sentences with secret numbers at random places of any text, and a question after it.

Fast-weight Product Key Memory paper, section 4.3: five needles "The secret number for ID-xxxx is dddddd." (four
hexadecimal characters, six digits) in a text of 4 K to 128 K tokens, and the question "The secret number for ID-xxxx
is " (with the blank) for one of them. The paper's sets are files; here example `index` of the stream `seed` can be
made again alone, over whatever text is given and at whatever length.

A text is a sequence of pieces: words (strings, the paper's program counts those) or tokens (integers).
"""

from __future__ import annotations

import hashlib
import math
import random
import re
import string
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from ..checks import ArgumentError, instance, number, optional_whole, refuse, shown, whole
from .base import check_place, tasks

CALL = "NeedleInHaystack"


@dataclass(frozen=True)
class NeedleExample:
    """One haystack and its question.

    Attributes:
        haystack: pieces, needles included.
        question: pieces that come after it.
        key: of the needle that is asked for.
        answer: its number.
        numbers: key to number of every needle, in the order of the haystack.
        places: the piece at which each needle begins.
    """

    haystack: tuple[Any, ...]
    question: tuple[Any, ...]
    key: str
    answer: str
    numbers: dict[str, str]
    places: tuple[int, ...]

    @property
    def prompt(self) -> tuple[Any, ...]:
        """Haystack and question."""
        return self.haystack + self.question


@dataclass(frozen=True)
class NeedleScore:
    """How good one prediction is.

    Attributes:
        exact: it is the answer.
        digits: the share of the answer's digits that stand at their place.
        candidate: it is the number of one of the needles, the right one or another.
    """

    exact: bool
    digits: float
    candidate: bool


@tasks.register("needle")
@dataclass(frozen=True)
class NeedleInHaystack:
    """Needles in a text, generated from (seed, index).

    A haystack is a stretch of the text from a random piece on (the text goes round at its end) in which the needles
    stand at random places, each whole; it has exactly `length` pieces. Keys are unique among all examples of a seed,
    as long as there are enough of them, and always within one.

    Args:
        text: pieces: words, or tokens.
        length: pieces of a haystack.
        needles: how many; encode: a sentence to pieces, for tokens; default: its words.
        decode: pieces to a sentence, for the oracle; default: words with blanks between them.
        breaks: pieces after which a needle may begin (the tokens of blanks, so that no word is cut); None: all.
        digits: of a number; id_digits: hexadecimal characters that tell keys apart.
        reserved: how many keys each example has for itself; default: as many as needles. One number for tasks with
            different needles keeps their neighbouring examples apart.
        template: of a needle, with {key} and {value}; what stands before {value} is the question.
        key: of a needle, with {id}.

    Raises:
        ArgumentError: a number out of range, needles that do not fit into the length, text that is empty or has no
            place for a needle.
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
        for name, known in {"template": {"key", "value"}, "key": {"id"}}.items():
            _check_template(name, getattr(self, name), known)
        if min(10**self.digits, 16**self.id_digits) < self.needles:
            raise ArgumentError(
                f"{CALL}: {self.needles} needles with digits={self.digits} and id_digits={self.id_digits} "
                f"need as many different keys and numbers; give them more digits."
            )
        if self.template.index("{key}") > self.template.index("{value}"):
            raise ArgumentError(f"{CALL}: template {self.template!r} must name {{key}} before {{value}}.")
        if self.breaks is not None:
            instance(CALL, "breaks", self.breaks, (Set, list, tuple), "a set of pieces, or None")
        if self.breaks is not None and not any(piece in self.breaks for piece in self.text):
            raise ArgumentError(f"{CALL}: no piece of the text is among breaks; needles would have no place.")

    def sentence(self, key: str, value: str) -> str:
        """A needle."""
        return self.template.format(key=key, value=value)

    def question(self, key: str) -> str:
        """What comes before the value, the blank included."""
        return self.template.partition("{value}")[0].format(key=key)

    def example(self, seed: int, index: int) -> NeedleExample:
        """The example `index` of the stream `seed`.

        Cost: O(length) time.

        Raises:
            ArgumentError: the needles do not fit.
        """
        check_place(f"{CALL}.example", seed, index)
        digest = hashlib.blake2b(f"needle:{seed}:{index}".encode(), digest_size=8).digest()
        draw = random.Random(int.from_bytes(digest, "little"))
        first = index * (self.needles if self.reserved is None else self.reserved)
        ids = (unique_id(seed, first + i, self.id_digits) for i in range(self.needles))
        keys = [self.key.format(id=each) for each in ids]
        values = [f"{number:0{self.digits}d}" for number in draw.sample(range(10**self.digits), self.needles)]
        asked = draw.randrange(self.needles)
        numbers = dict(zip(keys, values, strict=True))
        sentences = [self._needle(key, value) for key, value in numbers.items()]
        filler = self._filler(draw, self.length - sum(map(len, sentences)))
        cuts = self._cuts(draw, filler)
        haystack: list[Any] = []
        places = []
        for begin, end, sentence in zip([0, *cuts], [*cuts, len(filler)], [*sentences, ()], strict=True):
            haystack += filler[begin:end]
            places.append(len(haystack))
            haystack += sentence
        question = self._pieces(self.question(keys[asked]))
        return NeedleExample(
            tuple(haystack), tuple(question), keys[asked], values[asked], numbers, tuple(places[: self.needles])
        )

    def examples(self, seed: int, indices: Iterable[int]) -> list[NeedleExample]:
        """Examples in the order of `indices`."""
        return [self.example(seed, index) for index in indices]

    def _pieces(self, sentence: str) -> list[Any]:
        return list(sentence.split() if self.encode is None else self.encode(sentence))

    def _needle(self, key: str, value: str) -> list[Any]:
        sentence = self.sentence(key, value)
        return self._pieces(sentence if self.encode is None else sentence + " ")

    def _filler(self, draw: random.Random, count: int) -> list[Any]:
        """`count` pieces of the text from a random one on."""
        if count < 0:
            raise ArgumentError(
                f"{CALL}: {self.needles} needles have {self.length - count} pieces, more than a haystack of length "
                f"{self.length}; make it longer, or give fewer needles."
            )
        start, total = draw.randrange(len(self.text)), len(self.text)
        first = list(self.text[start : start + count])
        while len(first) < count:
            first += list(self.text[: count - len(first)][:total])
        return first

    def _cuts(self, draw: random.Random, filler: Sequence[Any]) -> list[int]:
        """Where needles go in, sorted: after how many pieces of the filler."""
        fit: Sequence[int] = range(len(filler) + 1)
        if self.breaks is not None:
            fit = [0, *(i + 1 for i, piece in enumerate(filler) if piece in self.breaks)]
        return sorted(draw.choice(fit) for _ in range(self.needles))

    def score(self, prediction: str, example: NeedleExample) -> NeedleScore:
        """A prediction, blanks around it left out, against the answer."""
        said = prediction.strip()
        right = sum(one == other for one, other in zip(said, example.answer, strict=False))
        return NeedleScore(said == example.answer, right / len(example.answer), said in example.numbers.values())

    def error(self, prediction: str, example: NeedleExample) -> float:
        """1 where the prediction is not the answer, else 0."""
        return float(not self.score(prediction, example).exact)

    def oracle(self, example: NeedleExample) -> str:
        """The answer of who reads the haystack with a regular expression; empty where it does not stand there."""
        text = " ".join(example.haystack) if self.decode is None else self.decode(example.haystack)
        found = re.search(re.escape(self.question(example.key)) + rf"(\d{{{self.digits}}})", text)
        return found.group(1) if found else ""


def _check_template(name: str, given: Any, wanted: set[str]) -> None:
    """Check that a template holds the fields that are wanted, and no others."""
    try:
        found = {part for _, part, _, _ in string.Formatter().parse(instance(CALL, name, given, str, "a text")) if part}
    except ValueError:
        found = set()
    if found != wanted:
        raise refuse(CALL, name, given, f"a text with {', '.join(f'{{{each}}}' for each in sorted(wanted))} alone")


def unique_id(seed: int, number: int, digits: int = 4) -> str:
    """Hexadecimal characters: a permutation of 0 .. 16^digits - 1 that the seed names, at `number` modulo 16^digits.

    Four rounds of a Feistel network of two halves of 2 `digits` bits, keyed by a hash.
    """
    half = 4**digits
    left, right = divmod(number % half**2, half)
    for turn in range(4):
        mixed = hashlib.blake2b(f"{seed}:{turn}:{right}".encode(), digest_size=4).digest()
        left, right = right, left ^ int.from_bytes(mixed, "little") % half
    return f"{left * half + right:0{digits}x}"


@dataclass(frozen=True)
class Share:
    """How often something happened, with the 95 % interval of Wilson (1927), which needs no large numbers and never
    leaves [0, 1]."""

    hits: int
    trials: int

    @property
    def mean(self) -> float:
        """Hits by trials; 0 where nothing was tried."""
        return self.hits / self.trials if self.trials else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """(low, high); (0, 1) where nothing was tried."""
        return wilson(self.hits, self.trials)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.mean:.0%} ({low:.0%} to {high:.0%})"


def wilson(hits: int, trials: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """Wilson's interval of a share: where a share p would make `hits` of `trials` no further off than z of its
    standard deviations, sqrt(p (1 - p) / trials). The default z gives 95 %.

    Returns:
        (low, high); (0, 1) for no trials.

    Raises:
        ArgumentError: hits that are not from 0 to trials.
    """
    whole("wilson", "trials", trials, 0, 2**53)
    if whole("wilson", "hits", hits) > trials or hits < 0:
        raise ArgumentError(f"wilson: hits is {shown(hits)} of {trials} trials, expected 0 to {trials}.")
    z = number("wilson", "z", z, low=0.0, high=1e6)
    if trials == 0:
        return 0.0, 1.0
    share, by = hits / trials, z * z / trials
    middle = (share + by / 2) / (1 + by)
    half = z * math.sqrt(share * (1 - share) / trials + by / (4 * trials)) / (1 + by)
    low = 0.0 if hits == 0 else max(0.0, middle - half)
    high = 1.0 if hits == trials else min(1.0, middle + half)
    return low, high


@dataclass(frozen=True)
class NeedleResult:
    """Scores of many examples, counted.

    Attributes:
        exact, candidate: as in `NeedleScore`.
        digits: the mean over answers. It has no interval here: digits of one answer come and go together.
    """

    exact: Share
    digits: float
    candidate: Share

    @classmethod
    def of(cls, scores: Sequence[NeedleScore]) -> NeedleResult:
        """Counted."""
        many = len(scores)
        return cls(
            Share(sum(score.exact for score in scores), many),
            sum(score.digits for score in scores) / max(1, many),
            Share(sum(score.candidate for score in scores), many),
        )
