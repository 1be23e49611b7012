"""Read a haystack n times before a question about a needle, by several protocols.

Section 4.3 of the Fast-weight Product Key Memory paper has the first of them:

    whole       chunk = haystack and question; written after the question, before the second token of the answer, so
                that after one reading the first token comes from a memory that has not seen the haystack
    chunked     the chunk of the training; all but the last tokens of the haystack are written before the question
    flushed     chunk = haystack; written before the question

The chunk is changed only for memories with slots: fast-weight MLPs and LaCT, which make one step a chunk, keep theirs,
as in the paper. Every read begins with new keys and values, recurrent states and positions; only the memory, and for
LaCT its fast weights, is kept.

Shapes: B haystacks side by side, L tokens of each, Q of a question, A of an answer.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from copy import copy
from typing import Any

import torch
from torch import Tensor

from regard.inspect.capture import eval_mode
from regard.nn import FastWeightProductKeyMemory
from regard.nn.hooks import temporarily
from regard.tasks import NeedleResult, NeedleScore

from .needle_text import NeedleText

PROTOCOLS = {
    "whole": "written after the question (the paper)",
    "chunked": "the chunk of the training",
    "flushed": "written before the question",
}
AT_ONCE = 65_536  # tokens that are read side by side at most
PIECE = 4096  # tokens that are read in one pass, to bound the memory of attention; changes nothing else


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

    def read(haystack: Tensor, before: Any, again: bool) -> Any:
        """Return the cache after a haystack, with the memories of `before`. What waits is written before the same is
        read again, unless the protocol is the training's."""
        if again and protocol != "chunked":
            flush_memory(model, before)
        cache = keep_memory(model, before, recurrent=recurrent)
        for piece in haystack.split(PIECE, dim=1):
            model(input_ids=piece.to(model.device).long(), cache=cache, logits_to_keep=1)
        return cache

    def answer(question: Tensor, cache: Any) -> Tensor:
        """Return greedy tokens [B, A] after the question; the cache is extended in place."""
        if protocol == "flushed":
            flush_memory(model, cache)
        return greedy(model, question.to(model.device).long(), length, cache, flush=protocol == "whole")

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
    """Yield a row of scores after each number of reads. `kept` examples of a stream are read without a reset."""
    together = count // kept * kept if kept else max(1, min(count, AT_ONCE // length))
    task = text.haystacks(length, needles)
    scores: list[list[NeedleScore]] = [[] for _ in range(reads)]
    for start in range(0, together if kept else count, together):
        indices = range(start, min(count, start + together))
        haystacks, questions, examples = asked(text, length, needles, indices, seed)
        haystacks, questions = (x.unflatten(0, (kept or 1, -1)) for x in (haystacks, questions))
        answers_by_read = read_and_answer(
            model, haystacks, questions, text.digits // 2, protocol=protocol, reads=reads, reset=not kept,
            recurrent=recurrent,
        )  # fmt: skip
        for read_scores, answers in zip(scores, answers_by_read.flatten(1, -2).tolist(), strict=True):
            pairs = zip(answers, examples, strict=True)
            read_scores += [task.score(text.decode(tokens), example) for tokens, example in pairs]
    for read, read_scores in enumerate(scores, 1):
        result = NeedleResult.of(read_scores)
        yield {"kind": "answers", "length": length, "protocol": protocol, "read": read,
               "state": "kept" if kept else "new", "trials": len(read_scores), "share": result.exact.mean,
               "digits": result.digits, "candidate": result.candidate.mean}  # fmt: skip
