"""What the recipe fast-weight-recall trains and measures: its model and task, what slots hold, and how many of them
queries around one point use. transformers is slow to import.

Shapes: B examples, T tokens of a stream, V tokens of the vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from random import Random
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from regard.memory.fast_weights import WriteRule, fast_weight_memory
from regard.nn import FastWeightProductKeyMemory
from regard.nn.memory_trace import Hits, SlotStatistics, WriterTrace, observed
from regard.tasks import IGNORED, CrossDocumentRecall, TokenExample, TokenTask

SPREADS, WEIGHTS = (0.25, 0.5, 1.0, 1.5), (0.0, 1.0, 10.0)  # of the queries, and of the entropy


@dataclass(frozen=True)
class RecallTokens(TokenTask):
    """Recall as a task of tokens, with every reading as a part. Labels are the values, in training of all readings but
    the first, on which nothing can be known."""

    name: ClassVar[str] = "recall-tokens"
    recall: CrossDocumentRecall

    @property
    def vocabulary(self) -> int:
        return self.recall.vocabulary

    def draw(self, random: Random, split: str) -> TokenExample:
        stream = self.recall.example(random.randrange(2**32), 0).stream
        position = torch.arange(len(stream))
        reading, asked = position // self.recall.length, position % 2 == 1
        if split == "train":
            asked &= reading % self.recall.reads > 0
        parts = {f"reading {i}": reading == i for i in range(self.recall.documents * self.recall.reads)}
        return TokenExample(stream, stream.where(asked, IGNORED), parts=parts)

    def oracle(self, example: TokenExample) -> Tensor:
        return example.tokens

    def trivial(self, example: TokenExample) -> Tensor:
        return torch.full_like(example.tokens, self.recall.keys)


class RecallModel(PreTrainedModel):
    """Embedding, memory, norm and output; the memory is empty at first, and each row of a batch has its own."""

    def __init__(self, vocabulary: int, width: int, **memory: Any) -> None:
        super().__init__(PreTrainedConfig(vocab_size=vocabulary))
        self.embed = nn.Embedding(vocabulary, width)
        self.memory = FastWeightProductKeyMemory(width, **memory)
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.output = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, use_cache: bool = False) -> CausalLMOutput:
        """Return logits, int [B, T] -> [B, T, V], and the loss of labels; label t is predicted at t - 1."""
        hidden = self.embed(input_ids)
        recalled, _ = self.memory(hidden)
        logits = self.output(self.norm(hidden + recalled))
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


@torch.no_grad()
def hits(model: Any, once: CrossDocumentRecall, seed: int, examples: int) -> tuple[float, float]:
    """Return, of the slots that keys retrieve on the second of two readings, the share to which the last writer, and
    any of the last four, gave the right value."""
    stream = once.examples(seed, range(examples)).stream
    with observed(model, WriterTrace) as traces:
        model(stream.to(model.device))
    retrieved = traces["memory"].retrieved()
    asked = (retrieved.position >= once.length) & (retrieved.position % 2 == 0)
    asked_hits = Hits(retrieved.hits(stream).hit, asked)
    return asked_hits.rate(1), asked_hits.rate(4)


def clustered_rows(seed: int) -> Iterator[dict[str, Any]]:
    """Yield the share of slots in use for each spread of the queries and weight of the entropy."""
    for spread, weight in product(SPREADS, WEIGHTS):
        yield {"kind": "clustered", "spread": spread, "weight": weight, "coverage": coverage(spread, weight, seed)}


@torch.no_grad()
def coverage(
    spread: float, weight: float, seed: int, *, sub_keys: int = 32, width: int = 64, top_k: int = 4, chunk: int = 128,
    chunks: int = 64, looked_at: int = 16, centre: float = 0.25,
) -> float:  # fmt: skip
    """Return the share of slots that are read in the last chunks, after the chunks before them have moved the keys.

    Every query is the same point, of standard deviation `centre` a coordinate, moved by noise of `spread` times as
    much; `weight` is that of the entropy.
    """
    early, slots = chunk * (chunks - looked_at), sub_keys**2
    draw = torch.Generator().manual_seed(seed)
    keys = (2 * torch.rand(1, 2, sub_keys, width // 2, generator=draw) - 1) * width**-0.5
    point, noise = (centre * torch.randn(rows, width, generator=draw) for rows in (1, chunk * chunks))
    query = (point + spread * noise)[None, :, None]
    # one value for all: what is written does not move the keys
    value, values = torch.zeros(1, chunk * chunks, 2), torch.zeros(slots, 2)
    watched, rule = SlotStatistics(slots), WriteRule("normalized", address_weight=weight)
    read = partial(fast_weight_memory, rule=rule, top_k=top_k, chunk_size=chunk)
    _, state = read(query[:, :early], value[:, :early], None, keys, values)
    read(query[:, early:], value[:, early:], None, keys, values, state=state, observer=watched)
    return watched.summary()["coverage"]
