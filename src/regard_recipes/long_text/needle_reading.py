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

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from regard.inspect.capture import eval_mode
from regard.nn import FastWeightProductKeyMemory
from regard.nn.hooks import temporarily
from regard.tasks import NeedleResult, NeedleScore

from .needle_text import NeedleText
from .streaming import copied, passed

Protocol = Literal["whole", "chunked", "flushed"]
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)
AT_ONCE = 65_536  # tokens that are read side by side at most
PIECE = 4096  # tokens that are read in one pass, to bound the memory of attention; changes nothing else


@torch.no_grad()
def read_and_answer(
    model: Any, haystacks: Tensor, questions: Tensor, length: int, *, protocol: Protocol = "flushed", reads: int = 4,
    reset: bool = True, recurrent: bool = False,
) -> Tensor:  # fmt: skip
    """Return greedy answers after 1 to n reads, int64 [n, E, B, A].

    Args:
        model: any causal language model of `regard.models`; its mode is restored.
        haystacks: int [E, B, L]: E examples for each of B rows, one after another.
        questions: int [E, B, Q].
        length: A, tokens of an answer.
        protocol: see above.
        reads: n.
        reset: memories begin anew with every example. Otherwise (the paper's program) there is one stream for each
            number of reads, whose memory keeps all earlier examples and answers.
        recurrent: keep the states of mixers without positions from read to read, for LaCT.

    Cost: n reads with a reset, n (n + 1) / 2 without.
    """
    from regard.models.hybrid.memories import flush_memory

    device = next(model.parameters()).device

    def read(haystack: Tensor, before: Any, again: bool) -> Any:
        """Return the cache after a haystack, with the memories of `before`. What waits is written before the same is
        read again, unless the protocol is the training's."""
        if again and protocol != "chunked":
            flush_memory(model, before)
        cache = passed(model, before, memory=True, recurrent=recurrent)
        for piece in haystack.split(PIECE, dim=1):
            model(input_ids=piece.to(device).long(), cache=cache, logits_to_keep=1)
        return cache

    def answer(question: Tensor, cache: Any) -> Tensor:
        """Return greedy tokens [B, A] after the question; the cache is extended in place."""
        if protocol == "flushed":
            flush_memory(model, cache)
        given, said = question.to(device).long(), []
        for place in range(length):
            logits = model(input_ids=given, cache=cache, logits_to_keep=1).logits
            if place == 0 and protocol == "whole":
                flush_memory(model, cache)
            given = logits[:, -1:].argmax(-1)
            said.append(given)
        return torch.cat(said, 1).cpu()

    found = torch.empty(reads, *haystacks.shape[:2], length, dtype=torch.long)
    # tokens of the last answer that still wait must not end a chunk early
    chunk = None if protocol == "chunked" else 2 * (haystacks.shape[-1] + questions.shape[-1] + length)
    pairs = list(zip(haystacks, questions, strict=True))
    with eval_mode(model), _chunk_of_slots(model, chunk):
        for example, (haystack, question) in enumerate(pairs if reset else ()):
            cache = None
            for turn in range(reads):
                cache = read(haystack, cache, turn > 0)
                found[turn, example] = answer(question, copied(cache))
        for many in range(0 if reset else reads):
            cache = None
            for example, (haystack, question) in enumerate(pairs):
                for turn in range(many + 1):
                    cache = read(haystack, cache, turn > 0)
                found[many, example] = answer(question, cache)
    return found


@contextmanager
def _chunk_of_slots(model: Any, tokens: int | None) -> Iterator[None]:
    """Give the memories with slots another chunk inside the block; None: their own."""
    with ExitStack() as changes:
        for module in model.modules():
            if tokens and isinstance(module, FastWeightProductKeyMemory):
                changes.enter_context(temporarily(module, chunk_size=tokens))
        yield


def asked(text: NeedleText, length: int, needles: int, indices: range, seed: int) -> tuple[Tensor, Tensor, list[Any]]:
    """Return haystacks [E, L] and questions [E, Q] of the test text, int64, and the examples."""
    examples = text.haystacks(length, needles).examples(seed, indices)
    haystacks, questions = (torch.tensor([getattr(each, name) for each in examples])
                            for name in ("haystack", "question"))  # fmt: skip
    return haystacks, questions, examples


def answer_rows(
    model: Any, text: NeedleText, length: int, needles: int, count: int, seed: int, *, protocol: Protocol = "flushed",
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
        for own, answers in zip(scores, said.flatten(1, -2).tolist(), strict=True):
            own += [task.score(text.decode(tokens), example) for tokens, example in zip(answers, examples, strict=True)]
    for read, own in enumerate(scores, 1):
        result = NeedleResult.of(own)
        yield {"kind": "answers", "length": length, "protocol": protocol, "read": read,
               "state": "kept" if kept else "new", "trials": len(own), "share": result.exact.mean,
               "digits": result.digits, "candidate": result.candidate.mean}  # fmt: skip
