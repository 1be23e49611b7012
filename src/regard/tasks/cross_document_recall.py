"""Documents of key -> value pairs, each read several times, whose keys mean something else in the next document.

What an episodic memory is for, with nothing around it: a document is a sequence of pairs of tokens (k_1, v_1, k_2,
v_2, ...) that no other document repeats, so that the value after a key can be told only by whoever kept it from an
earlier reading. On the first reading nothing can be told; on the second everything can, by a memory that was written in
one step; in the next document the same keys have other values, so that what was written has to be overwritten. The
iterative reading of "Fast-weight Product Key Memory" (section 4.3) in its smallest form.

Tokens 0, ..., keys - 1 are keys, the `values` tokens after them are values. Values are drawn with replacement.

Legend: D documents, R readings of each, P pairs of a document, L = 2 P tokens of a reading.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import ArgumentError, flag, whole
from .base import check_place, tasks

CALL = "CrossDocumentRecall"


@dataclass(frozen=True)
class RecallExamples:
    """One example, or B of them with a batch axis before all others.

    Attributes:
        tokens: int64 [..., D, R, L], keys at even places, each followed by its value.
    """

    tokens: Tensor

    @property
    def keys(self) -> Tensor:
        """int64 [..., D, R, P]."""
        return self.tokens[..., 0::2]

    @property
    def answers(self) -> Tensor:
        """The token that follows each key, int64 [..., D, R, P]."""
        return self.tokens[..., 1::2]

    @property
    def stream(self) -> Tensor:
        """All readings of all documents, one after the other, int64 [..., D R L]."""
        return self.tokens.flatten(-3)


@tasks.register("cross-document-recall")
@dataclass(frozen=True)
class CrossDocumentRecall:
    """Recall of pairs over several readings, and after they were given other values.

    Args:
        keys, values: how many tokens of each kind there are.
        pairs: of a document, no key twice.
        documents: one after the other. All of an example have the same keys, in another order and with other values.
        reads: how often each is read before the next begins.
        shuffled: every reading has the pairs in an order of its own, so that no model can go by their order.

    Raises:
        ArgumentError: a number out of range, or more pairs than keys.
    """

    keys: int = 128
    values: int = 128
    pairs: int = 64
    documents: int = 3
    reads: int = 2
    shuffled: bool = False

    def __post_init__(self) -> None:
        for name in ("keys", "values", "pairs", "documents", "reads"):
            whole(CALL, name, getattr(self, name), 1, 2**40)
        flag(CALL, "shuffled", self.shuffled)
        if self.pairs > self.keys:
            raise ArgumentError(
                f"{CALL}: pairs is {self.pairs}, expected at most the {self.keys} keys, since a document has no key "
                f"twice; give fewer pairs or more keys."
            )

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        return self.keys + self.values

    @property
    def length(self) -> int:
        """L, the tokens of one reading."""
        return 2 * self.pairs

    @property
    def chance(self) -> float:
        """Accuracy of whoever knows what a value is, but not which."""
        return 1 / self.values

    def example(self, seed: int, index: int) -> RecallExamples:
        """The example `index` of the stream `seed`, without a batch axis. More documents or readings continue it: the
        first ones are the same."""
        check_place(f"{CALL}.example", seed, index)
        digest = hashlib.blake2b(f"cross-document-recall:{seed}:{index}".encode(), digest_size=8).digest()
        draw = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        own = torch.randperm(self.keys, generator=draw)[: self.pairs]
        documents = []
        for _ in range(self.documents):
            keys = own[torch.randperm(self.pairs, generator=draw)]
            answers = self.keys + torch.randint(self.values, (self.pairs,), generator=draw)
            # orders have draws of their own, so that their number does not move the next document
            order = torch.Generator().manual_seed(int(torch.randint(2**62, (1,), generator=draw)))
            readings = []
            for _ in range(self.reads):
                place = torch.randperm(self.pairs, generator=order) if self.shuffled else slice(None)
                readings.append(torch.stack([keys[place], answers[place]], -1).flatten())
            documents.append(torch.stack(readings))
        return RecallExamples(torch.stack(documents))

    def examples(self, seed: int, indices: Iterable[int]) -> RecallExamples:
        """Examples with a batch axis, in the order of `indices`."""
        return RecallExamples(torch.stack([self.example(seed, index).tokens for index in indices]))

    def error(self, prediction: Tensor, example: RecallExamples) -> Tensor:
        """1 where the token predicted to follow a key is not the one that does, int [..., D, R, P] -> float64 of the
        same shape."""
        return (prediction != example.answers).double()

    def oracle(self, example: RecallExamples) -> Tensor:
        """What a memory without faults says, int64 [..., D, R, P]: the value that the key had when it was last read,
        and the first of all values for a key that was never read.

        Cost: O(D R P) time.
        """
        keys, answers = (x.reshape(-1, x.shape[-3:].numel()) for x in (example.keys, example.answers))
        known = torch.full((len(keys), self.keys), self.keys, dtype=torch.long)
        rows, found = torch.arange(len(keys)), []
        for at in range(keys.shape[1]):
            found.append(known[rows, keys[:, at]])
            known[rows, keys[:, at]] = answers[:, at]
        return torch.stack(found, -1).reshape(example.keys.shape)
