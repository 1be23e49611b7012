"""The model of the recipe fast-weight-recall, its task, and what its slots hold; transformers is slow to import.

Shapes: B examples, T tokens of a stream, V tokens of the vocabulary.
"""

from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from regard.nn import FastWeightProductKeyMemory
from regard.nn.memory_trace import Hits, WriterTrace, observed
from regard.tasks import IGNORED, CrossDocumentRecall, TokenExample, TokenTask


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
