"""Needles in haystacks for small models: the text that they learn, and reading a haystack n times before a question.

Small models do not learn in minutes to copy six digits from bytes, so the commonest words are tokens (the rest share
one), and a needle is "number K3f 42 .", with a token for the key and for every two digits. If each needle of an example
were asked once, a model could answer without the keys, by leaving out numbers that were asked before; so needles are
drawn with replacement. Where all examples are haystacks, attention without a memory stays for thousands of steps at
choosing among the numbers that it has seen; it learns in hundreds of steps where some examples are pairs of keys and
numbers alone.

Protocols of reading (section 4.3 of the Fast-weight Product Key Memory paper, which has the first):

    whole       chunk = haystack and question; written after the question, before the second token of the answer, so
                that after one reading the first token comes from a memory that has not seen the haystack
    chunked     the chunk of the training; all but the last tokens of the haystack are written before the question
    flushed     chunk = haystack; written before the question

The chunk is changed only for memories with slots: fast-weight MLPs and LaCT, which make one step a chunk, keep theirs,
as in the paper. Every read begins with new keys and values, recurrent states and positions; only the memory, and for
LaCT its fast weights, is kept.

Shapes: B haystacks side by side, L tokens of each, Q of a question, A of an answer.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.checks import ArgumentError
from regard.inspect.capture import eval_mode
from regard.nn import FastWeightProductKeyMemory
from regard.nn.hooks import temporarily
from regard.tasks import NeedleInHaystack, NeedleResult, NeedleScore, TokenExample, TokenTask
from regard.tasks.tokens import Words, example_of

from ..lib.language_text import source_text

UNKNOWN, NUMBER, STOP = "<unk>", "number", "."
SENTENCE, PAIR = f"{NUMBER} {{key}} {{value}} {STOP}", "{key} {value}"
SHARES = {"train": (0.0, 0.8), "validation": (0.8, 0.9), "test": (0.9, 1.0)}
"""Parts of the text that the haystacks of each split are made of."""
LEAST = 1000  # number of words that a text must have
PROTOCOLS = {
    "whole": "written after the question (the paper)",
    "chunked": "the chunk of the training",
    "flushed": "written before the question",
}
AT_ONCE = 65_536  # tokens that are read side by side at most
PIECE = 4096  # tokens that are read in one pass, to bound the memory of attention; changes nothing else


@dataclass(frozen=True)
class NeedleText(TokenTask):
    """Haystacks of a text, each followed by its needles again as questions with answers."""

    name: ClassVar[str] = "needle-text"

    text: tuple[int, ...] = field(repr=False)  # the words of a text as tokens
    words: Words = field(repr=False)  # the word of each token
    length: int = 128  # tokens of an example
    most: int = 8  # needles of an example; there is at least one
    digits: int = 2  # of a needle's number, even
    key_digits: int = 1  # hexadecimal digits of a key
    pairs: float = 0.0  # share of the training examples that are `most` keys with their numbers alone, then the same

    @property
    def vocabulary(self) -> int:
        return len(self.words)

    def encode(self, sentence: str) -> list[int]:
        """Return the tokens of words separated by spaces; a number is split into pairs of digits."""
        return [self.words.numbers[piece] for piece in re.findall(r"\d\d|[^\d\s]\S*", sentence)]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return words separated by spaces, and pairs of digits joined."""
        sentence = " ".join(self.words.words[token] for token in tokens)
        return re.sub(r"\b(\d\d) (?=\d\d\b)", r"\1", sentence)

    def haystacks(self, length: int, needles: int, split: str = "test", sentence: str = SENTENCE) -> NeedleInHaystack:
        """Return the task of finding a needle in a haystack of `length` tokens."""
        first, end = (round(share * len(self.text)) for share in SHARES[split])
        return NeedleInHaystack(
            self.text[first:end], length, needles=needles, encode=self.encode, decode=self.decode, digits=self.digits,
            id_digits=self.key_digits, template=sentence, key="K{id}",
        )  # fmt: skip

    def draw(self, random: Random, split: str) -> TokenExample:
        answer = self.digits // 2
        if self.pairs and split == "train" and random.random() < self.pairs:
            needles = self.most
            task = self.haystacks(needles * (1 + answer), needles, split, PAIR)
        else:
            needles = random.randint(1, self.most)
            task = self.haystacks(self.length - needles * (3 + answer), needles, split)
        haystack = task.example(random.randrange(2**32), 0)
        tokens, labels = list(haystack.haystack), dict[int, int]()
        for key, value in random.choices(list(haystack.numbers.items()), k=needles):
            start = len(tokens) + len(self.encode(task.question(key)))
            tokens += self.encode(task.sentence(key, value))
            labels |= {position: tokens[position] for position in range(start, start + answer)}
        return example_of(tokens, labels)

    def oracle(self, example: TokenExample) -> Tensor:
        """Return what followed each key where it came first, int64 [T]; elsewhere the token itself."""
        tokens, predicted = example.tokens.tolist(), example.tokens.clone()
        first: dict[int, int] = {}
        for position, token in enumerate(tokens):
            if self.words.words[token].startswith("K"):
                before = first.setdefault(token, position)
                for after in range(1, self.digits // 2 + 1):
                    predicted[position + after] = tokens[before + after]
        return predicted

    def trivial(self, example: TokenExample) -> Tensor:
        """Return one number for all, int64 [T]."""
        return torch.full_like(example.tokens, self.words.numbers["00"])


@cache
def needle_text(data: Path | None, common: int, digits: int, key_digits: int, length: int, most: int) -> NeedleText:
    """Return the user's text, or the interpreter's manual, with a vocabulary of `common` words of its own."""
    _, content = source_text(data, "needles")
    if digits < 2 or digits % 2:
        raise ArgumentError(f"--digits is {digits}, expected an even number above 0: two of them are a token.")
    learned = re.findall(r"[^\W\d_]+|[.,;:()]", content)
    if len(learned) < LEAST:
        raise ArgumentError(f"the text has {len(learned)} words, expected at least {LEAST:,}; give more --data.")
    numbers, keys = (f"{i:02d}" for i in range(100)), (f"K{i:0{key_digits}x}" for i in range(16**key_digits))
    commonest = Counter(word.lower() for word in learned).most_common(common)
    words = Words([UNKNOWN, NUMBER, STOP, *numbers, *keys, *(word for word, _ in commonest)])
    tokens = tuple(words.numbers.get(word.lower(), 0) for word in learned)
    text = NeedleText(tokens, words, length, most, digits, key_digits)
    text.haystacks(length - most * (3 + digits // 2), most).example(0, 0)
    return text


@torch.no_grad()
def read_and_answer(
    model: Any, haystacks: Tensor, questions: Tensor, length: int, *, protocol: str = "flushed", reads: int = 4,
    reset: bool = True, recurrent: bool = False,
) -> Tensor:  # fmt: skip
    """Return greedy answers after 1 to n reads, int64 [n, E, B, A].

    Args:
        model: any causal language model of `regard.models`; its mode is restored.
        haystacks, questions: int [E, B, L] and [E, B, Q]: E examples for each of B rows, one after another.
        length: A, tokens of an answer.
        reads: n.
        reset: memories begin anew with every example. Otherwise (the paper's program) there is one stream for each
            number of reads, whose memory keeps all earlier examples and answers.
        recurrent: keep the states of mixers without positions from read to read, for LaCT.

    Cost: n reads with a reset, n (n + 1) / 2 without.
    """
    from transformers.cache_utils import Cache

    from regard.models.hybrid.memories import flush_memory, keep_memory

    device = next(model.parameters()).device

    def read(haystack: Tensor, before: Any, again: bool) -> Any:
        """Return the cache after a haystack, with the memories of `before`. What waits is written before the same is
        read again, unless the protocol is the training's."""
        if again and protocol != "chunked":
            flush_memory(model, before)
        cache = keep_memory(model, before, recurrent=recurrent)
        for piece in haystack.split(PIECE, dim=1):
            model(input_ids=piece.to(device).long(), cache=cache, logits_to_keep=1)
        return cache

    def answer(question: Tensor, cache: Any) -> Tensor:
        """Return greedy tokens [B, A] after the question; the cache is extended in place."""
        if protocol == "flushed":
            flush_memory(model, cache)
        return greedy(model, question.to(device).long(), length, cache, flush=protocol == "whole")

    answers = torch.empty(reads, *haystacks.shape[:2], length, dtype=torch.long)
    pairs = list(zip(haystacks, questions, strict=True))
    with ExitStack() as active:
        active.enter_context(eval_mode(model))
        for module in model.modules() if protocol != "chunked" else ():
            if isinstance(module, FastWeightProductKeyMemory):
                # tokens of the last answer that still wait must not end a chunk early
                chunk = 2 * (haystacks.shape[-1] + questions.shape[-1] + length)
                active.enter_context(temporarily(module, chunk_size=chunk))
        for example, (haystack, question) in enumerate(pairs if reset else ()):
            cache = None
            for turn in range(reads):
                cache = read(haystack, cache, turn > 0)
                # tensors of a cache are never changed in place
                answers[turn, example] = answer(question, Cache(layers=[copy(layer) for layer in cache.layers]))
        for many in range(0 if reset else reads):
            cache = None
            for example, (haystack, question) in enumerate(pairs):
                for turn in range(many + 1):
                    cache = read(haystack, cache, turn > 0)
                answers[many, example] = answer(question, cache)
    return answers


def greedy(model: Any, tokens: Tensor, length: int, cache: Any, flush: bool = False) -> Tensor:
    """Return greedy answers [B, A] to questions [B, Q], on the CPU; the cache is extended in place. With `flush`,
    tokens that wait are written once the question was read."""
    from regard.models.hybrid.memories import flush_memory

    answers: list[Tensor] = []
    for _ in range(length):
        logits = model(input_ids=tokens, cache=cache, logits_to_keep=1).logits
        if flush and not answers:
            flush_memory(model, cache)
        tokens = logits[:, -1:].argmax(-1)
        answers.append(tokens)
    return torch.cat(answers, 1).cpu()


def asked(text: NeedleText, length: int, needles: int, indices: range, seed: int) -> tuple[Tensor, Tensor, list[Any]]:
    """Return haystacks [E, L] and questions [E, Q] of the test text, int64, and the examples."""
    examples = text.haystacks(length, needles).examples(seed, indices)
    haystacks = torch.tensor([example.haystack for example in examples])
    return haystacks, torch.tensor([example.question for example in examples]), examples


def answer_rows(
    model: Any, text: NeedleText, length: int, needles: int, count: int, seed: int, *, protocol: str = "flushed",
    reads: int = 4, kept: int = 0, recurrent: bool = False,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield a row with the scores after each number of reads. `kept` examples of a stream are read without a reset in
    between; 0: there is a reset before each."""
    together = count // kept * kept if kept else max(1, min(count, AT_ONCE // length))
    task = text.haystacks(length, needles)
    scores: list[list[NeedleScore]] = [[] for _ in range(reads)]
    for start in range(0, together if kept else count, together):
        indices = range(start, min(count, start + together))
        haystacks, questions, examples = asked(text, length, needles, indices, seed)
        haystacks, questions = (x.unflatten(0, (kept or 1, -1)) for x in (haystacks, questions))
        said = read_and_answer(
            model, haystacks, questions, text.digits // 2, protocol=protocol, reads=reads, reset=not kept,
            recurrent=recurrent,
        )  # fmt: skip
        for read_scores, answers in zip(scores, said.flatten(1, -2).tolist(), strict=True):
            pairs = zip(answers, examples, strict=True)
            read_scores += [task.score(text.decode(tokens), example) for tokens, example in pairs]
    for read, read_scores in enumerate(scores, 1):
        result = NeedleResult.of(read_scores)
        yield {"kind": "answers", "length": length, "protocol": protocol, "read": read,
               "state": "kept" if kept else "new", "trials": len(read_scores), "share": result.exact.mean,
               "digits": result.digits, "candidate": result.candidate.mean}  # fmt: skip
