"""Read a haystack n times, then answer a question about it.

Fast-weight Product Key Memory paper, section 4.3 (its n-iter evaluation). The paper's program sets the chunk to the
length of the whole input, so that the memory is written once, after the input was read. The first digit of the answer
is then predicted from a memory that has seen this haystack only in earlier reads; with one read, not at all. Three
protocols, the first is the paper's:

    whole       chunk = haystack and question; written after the question was read, before the second digit
    chunked     the chunk of the training: all but the last tokens of the haystack are written before the question
    flushed     chunk = haystack; written before the question

The chunk is changed only for memories with slots. Fast-weight MLPs and LaCT, which make one step a chunk, keep theirs,
as in the paper; tokens that wait are written at the same moments. In all protocols keys and values, recurrent states
and positions begin anew at every read; only the memory is kept, and for LaCT its fast weights.

Shapes: B haystacks side by side, L tokens of each, Q of a question, A of an answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from regard.inspect.capture import eval_mode
from regard.tasks import NeedleResult, NeedleScore

from ..fwpkm.memory_layouts import LACT, Row
from .needle_text import FINAL, NeedleWorld
from .streaming import copied, passed

Protocol = Literal["whole", "chunked", "flushed"]
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)
KEPT_PROTOCOLS: tuple[Protocol, ...] = ("whole", "flushed")  # also measured without a reset between samples
AT_ONCE = 65_536  # tokens that are read side by side at most


@torch.no_grad()
def read_and_answer(
    model: Any, haystacks: Tensor, questions: Tensor, length: int, *, protocol: Protocol = "flushed", reads: int = 4,
    reset: bool = True, recurrent: bool = False, piece: int = 4096,
) -> Tensor:  # fmt: skip
    """Return greedy answers after 1 to n reads, int64 [n, B, A] or [n, E, B, A].

    Args:
        model: any causal language model of `regard.models`; its mode is restored.
        haystacks: int [B, L], or [E, B, L]: E examples for each of B rows, one after another.
        questions: int [B, Q], or [E, B, Q].
        length: A, tokens of an answer.
        protocol: see above.
        reads: n.
        reset: memories begin anew with every example. Otherwise (the paper's program) there is one stream for each
            number of reads, whose memory keeps all earlier examples and answers.
        recurrent: keep the states of mixers without positions from read to read, for LaCT.
        piece: tokens that are read in one pass, to bound the memory of attention; changes nothing else.

    Cost: n reads with a reset, n (n + 1) / 2 without.
    """
    single = haystacks.dim() == 2
    if single:
        haystacks, questions = haystacks[None], questions[None]
    reader = _Reader(model, protocol, length, piece, recurrent, haystacks.shape[-1], questions.shape[-1])
    with eval_mode(model), reader.chunks():
        found = reader.fresh(haystacks, questions, reads) if reset else reader.kept(haystacks, questions, reads)
    return found[:, 0] if single else found


@dataclass(frozen=True)
class _Reader:
    """A model, a protocol, and tokens of an answer, a piece, a haystack and a question."""

    model: Any
    protocol: Protocol
    length: int
    piece: int
    recurrent: bool
    haystack: int
    question: int

    @contextmanager
    def chunks(self) -> Iterator[None]:
        """Use the chunk of this protocol inside the block."""
        from regard.nn import FastWeightProductKeyMemory

        slots = [module for module in self.model.modules() if isinstance(module, FastWeightProductKeyMemory)]
        before = [module.chunk_size for module in slots]
        try:
            for module in slots if self.protocol != "chunked" else ():
                # tokens of the last answer that still wait must not end the chunk early
                module.chunk_size = 2 * (self.haystack + self.question + self.length)
            yield
        finally:
            for module, old in zip(slots, before, strict=True):
                module.chunk_size = old

    def fresh(self, haystacks: Tensor, questions: Tensor, reads: int) -> Tensor:
        """Return answers [n, E, B, A] with new memories for every example."""
        found = []
        for haystack, question in zip(haystacks, questions, strict=True):
            answers, cache = [], None
            for _ in range(reads):
                cache = self.read(haystack, cache)
                answers.append(self.answer(question, copied(cache))[0])
                self.close(cache)
            found.append(torch.stack(answers))
        return torch.stack(found, 1)

    def kept(self, haystacks: Tensor, questions: Tensor, reads: int) -> Tensor:
        """Return answers [n, E, B, A] with memories kept between examples, for each number of reads alone."""
        found = []
        for many in range(1, reads + 1):
            answers, cache = [], None
            for haystack, question in zip(haystacks, questions, strict=True):
                for turn in range(many):
                    cache = self.read(haystack, cache)
                    if turn + 1 < many:
                        self.close(cache)
                answer, cache = self.answer(question, cache)
                answers.append(answer)
            found.append(torch.stack(answers))
        return torch.stack(found)

    def read(self, haystack: Tensor, before: Any) -> Any:
        """Return the cache after a haystack, with the memories of `before`."""
        cache = passed(self.model, before, memory=True, recurrent=self.recurrent)
        for piece in haystack.split(self.piece, dim=1):
            self.model(input_ids=piece.to(self.device).long(), cache=cache, logits_to_keep=1)
        return cache

    def close(self, cache: Any) -> None:
        """Write the tokens that wait before the next read, unless the protocol is the training's."""
        from regard.models.hybrid.memories import flush_memory

        if self.protocol != "chunked":
            flush_memory(self.model, cache)

    def answer(self, question: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Return greedy tokens [B, A] after the question, and the cache, which is extended in place."""
        from regard.models.hybrid.memories import flush_memory

        if self.protocol == "flushed":
            flush_memory(self.model, cache)
        given, answer = question.to(self.device).long(), []
        for place in range(self.length):
            logits = self.model(input_ids=given, cache=cache, logits_to_keep=1).logits
            if place == 0 and self.protocol == "whole":
                flush_memory(self.model, cache)
            given = logits[:, -1:].argmax(-1)
            answer.append(given)
        return torch.cat(answer, 1).cpu(), cache

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


def answer_rows(
    model: Any, row: Row, world: NeedleWorld, lengths: tuple[int, ...], reads: int, samples: int, kept: int, seed: int
) -> dict[str, Any]:
    """Return rows with the scores by length, protocol and number of reads, memories new for each haystack and kept.

    A model without fast weights reads once: it would answer the same after any number of reads.
    """
    protocols, most = (PROTOCOLS, reads) if row.rereads else (PROTOCOLS[:1], 1)
    cases = [("new", length, protocol) for length in lengths for protocol in protocols]
    if row.rereads and kept:
        cases += [("kept", lengths[0], protocol) for protocol in KEPT_PROTOCOLS]
    rows = []
    for state, length, protocol in cases:
        together = 0 if state == "new" else kept
        many = range(samples // kept * kept if together else samples)
        for read, found in enumerate(ask(model, row, world, length, many, protocol, most, seed, together)):
            result = NeedleResult.of(found)
            rows.append({"kind": "answers", "length": length, "protocol": protocol, "read": read + 1, "state": state,
                         "trials": len(found), "exact": result.exact.hits, "digits": result.digits * len(found),
                         "candidate": result.candidate.hits})  # fmt: skip
    return {"rows": rows}


def ask(
    model: Any, row: Row, world: NeedleWorld, length: int, indices: range, protocol: Protocol, reads: int, seed: int,
    kept: int = 0,
) -> list[list[NeedleScore]]:  # fmt: skip
    """Return the scores of every example after 1 to n reads. `kept` examples of a stream are read without a reset in
    between; 0: there is a reset before each."""
    task = world.task(length)
    together = len(indices) // kept if kept else max(1, min(len(indices), AT_ONCE // length))
    found: list[list[NeedleScore]] = [[] for _ in range(reads)]
    steps = [indices] if kept else [indices[i : i + together] for i in range(0, len(indices), together)]
    for part in steps:
        examples = task.examples(FINAL + seed, part)
        haystacks, questions = (torch.tensor([getattr(each, name) for each in examples])
                                for name in ("haystack", "question"))  # fmt: skip
        if kept:
            haystacks, questions = (x.unflatten(0, (kept, together)) for x in (haystacks, questions))
        answers = read_and_answer(
            model, haystacks, questions, world.digits // 2, protocol=protocol, reads=reads, reset=not kept,
            recurrent=row.layout == LACT,
        )  # fmt: skip
        for scores, tokens in zip(found, answers.flatten(1, -2), strict=True):
            pairs = zip(tokens.tolist(), examples, strict=True)
            scores += [task.score(world.decode(answer), example) for answer, example in pairs]
    return found
