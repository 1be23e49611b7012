"""Recall of key-value pairs over several readings of a document, with other values in the next document.

A document is a sequence of pairs of tokens (k_1, v_1, k_2, v_2, ...) with random values, drawn with replacement, which
a model can predict only from an earlier reading. The next document has the same keys with other values, so that the
memory must be overwritten. This is a minimal form of the iterative reading in "Fast-weight Product Key Memory"
(section 4.3). Tokens 0, ..., keys - 1 are keys, and the next `values` tokens are values.

Legend: D documents, R readings of each, P pairs of a document, L = 2 P tokens of a reading.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import flag, require
from .base import Stackable, check_sizes, generator, on_cpu, tasks

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
        """Return the keys, int64 [..., D, R, P]."""
        return self.tokens[..., 0::2]

    @property
    def answers(self) -> Tensor:
        """Return the token after each key, int64 [..., D, R, P]."""
        return self.tokens[..., 1::2]

    @property
    def stream(self) -> Tensor:
        """Return all readings of all documents in order, int64 [..., D R L]."""
        return self.tokens.flatten(-3)


@tasks.register("cross-document-recall")
@dataclass(frozen=True)
class CrossDocumentRecall(Stackable[RecallExamples]):
    """Recall of pairs over several readings, and after their values have changed.

    Args:
        keys, values: number of tokens of each kind.
        pairs: pairs of a document, with different keys.
        documents: number of documents; they have the same keys, in another order and with other values.
        reads: number of readings of a document before the next one begins.
        shuffled: give every reading its own order of the pairs, so that a model cannot rely on the order.
    """

    keys: int = 128
    values: int = 128
    pairs: int = 64
    documents: int = 3
    reads: int = 2
    shuffled: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, keys=1, values=1, pairs=1, documents=1, reads=1)
        flag(CALL, "shuffled", self.shuffled)
        many = f"pairs is {self.pairs}, expected at most the {self.keys} keys, since a document has no key twice"
        require(self.pairs <= self.keys, CALL, f"{many}; give fewer pairs or more keys.")

    @property
    def vocabulary(self) -> int:
        """Return the number of tokens."""
        return self.keys + self.values

    @property
    def length(self) -> int:
        """Return L, the number of tokens of one reading."""
        return 2 * self.pairs

    @property
    def chance(self) -> float:
        """Return the accuracy of guessing among the values."""
        return 1 / self.values

    @on_cpu()
    def example(self, seed: int, index: int) -> RecallExamples:
        """Return one example without a batch axis; with more documents or readings, the first ones stay the same."""
        draw = generator(f"{CALL}.example", "cross-document-recall", seed, index)
        used = torch.randperm(self.keys, generator=draw)[: self.pairs]
        documents = []
        for _ in range(self.documents):
            keys = used[torch.randperm(self.pairs, generator=draw)]
            answers = self.keys + torch.randint(self.values, (self.pairs,), generator=draw)
            # orders have their own generator, so that their number does not change the next document
            order = torch.Generator().manual_seed(int(torch.randint(2**62, (1,), generator=draw)))
            readings = []
            for _ in range(self.reads):
                chosen = torch.randperm(self.pairs, generator=order) if self.shuffled else slice(None)
                readings.append(torch.stack([keys[chosen], answers[chosen]], -1).flatten())
            documents.append(torch.stack(readings))
        return RecallExamples(torch.stack(documents))

    def error(self, prediction: Tensor, example: RecallExamples) -> Tensor:
        """Return 1 where the predicted value of a key is wrong, else 0: float64 of the shape [..., D, R, P]."""
        return (prediction != example.answers).double()

    def oracle(self, example: RecallExamples) -> Tensor:
        """Return the value that was last read for each key, or the first value token if there is none: int64
        [..., D, R, P], in O(D R P) time."""
        keys, answers = (x.reshape(-1, x.shape[-3:].numel()) for x in (example.keys, example.answers))
        known = keys.new_full((len(keys), self.keys), self.keys)
        rows, predictions = torch.arange(len(keys), device=keys.device), []
        for at in range(keys.shape[1]):
            predictions.append(known[rows, keys[:, at]])
            known[rows, keys[:, at]] = answers[:, at]
        return torch.stack(predictions, -1).reshape(example.keys.shape)
