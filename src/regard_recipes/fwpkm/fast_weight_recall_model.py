"""The model of the recipe `fast-weight-recall`: made, trained and measured; runs in a process of its own.

Shapes: B examples, D documents, R readings, P pairs, T = D R 2 P tokens of a stream, V tokens of the vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.nn import FastWeightProductKeyMemory
from regard.nn.memory_trace import SlotStatistics, WriterTrace, observed
from regard.tasks import CrossDocumentRecall, RecallExamples

from .fast_weight_recall import NORMALIZED, REFERENCE, RULES, FastWeightRecallConfig, task

BETAS = (0.9, 0.95)
TRAINED_READS = 2
WRITERS = 4
"""Kept of every slot."""
TEST_SEED = 1_000_000
"""Added to a run's seed for the examples that are measured."""
COLLAPSE = {"sub_keys": 32, "key_dim": 64, "top_k": 4, "chunk": 128, "chunks": 64, "looked_at": 16, "centre": 0.25}
"""The memory and the queries of the collapse test: every query is the same point, of standard deviation `centre` a
coordinate, moved by noise of `spread` times as much."""
SPREADS, WEIGHTS = (0.25, 0.5, 1.0, 1.5), (0.0, 1.0, 10.0)


@dataclass(frozen=True, kw_only=True)
class RecallRun:
    """One model.

    Attributes:
        rule, seed, slots: what it was.
        parameters: how many numbers are learned; fast_weights: how many are written.
        losses: of the training, at eight even distances, mean since the one before, in nats.
        seconds: of the training.
        accuracy: share of values that are right, for every document and reading.
        single: tokens of a chunk to accuracy of the second half of a text that is a document twice, read once.
        hits: share of retrieved slots that hold the right value, on the second reading of the first document: written
            last, and written by any of the last four.
    """

    rule: str
    seed: int
    slots: int
    parameters: int
    fast_weights: int
    losses: list[float]
    seconds: float
    accuracy: list[list[float]]
    single: dict[int, float]
    hits: tuple[float, float] | None

    def record(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


class RecallModel(nn.Module):
    """Embedding, memory, norm, output."""

    def __init__(self, vocabulary: int, width: int, memory: dict[str, Any]) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.memory = FastWeightProductKeyMemory(width, **memory)
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.output = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Int [B, T] -> logits [B, T, V]; the memory is empty at first, and each row has its own."""
        hidden = self.embed(tokens)
        recalled, _ = self.memory(hidden)
        return self.output(self.norm(hidden + recalled))


def make_model(config: FastWeightRecallConfig, rule: str, *, stress: bool) -> RecallModel:
    """A model with the memory of the config, or with the one that is too small.

    Raises:
        ArgumentError: sizes that do not fit.
    """
    numbers: Any = config
    own = task(config)
    memory = {
        "sub_keys": numbers.stress_sub_keys if stress else numbers.sub_keys,
        "key_dim": numbers.key_dim,
        "value_dim": numbers.key_dim,
        "top_k": numbers.top_k,
        "chunk_size": own.length,
        "address_weight": numbers.address_weight,
        **RULES[rule],
    }
    return RecallModel(own.vocabulary, numbers.width, memory)


def train_and_measure(config: FastWeightRecallConfig, rule: str, seed: int, *, stress: bool = False) -> RecallRun:
    """Train on two readings of every document, the loss on the second; then measure."""
    from regard.training.device import resolve_device

    numbers: Any = config
    device = torch.device(resolve_device(numbers.device, call="train_and_measure"))
    torch.manual_seed(seed)
    model = make_model(config, rule, stress=stress).to(device)
    steps = numbers.stress_steps if stress else numbers.steps
    start = time.perf_counter()
    losses = train(model, task(config, TRAINED_READS), steps, numbers.batch, numbers.learning_rate, seed)
    seconds = time.perf_counter() - start
    model.eval()
    single, hits = {}, None
    if not stress and rule in (NORMALIZED, REFERENCE):
        single = measure_single(model, config, seed)
        hits = measure_hits(model, config, seed)
    return RecallRun(
        rule=rule,
        seed=seed,
        slots=model.memory.slots,
        parameters=sum(weight.numel() for weight in model.parameters()),
        fast_weights=model.memory.fast_numbers(),
        losses=losses,
        seconds=seconds,
        accuracy=accuracy(model, task(config), test_examples(task(config), numbers.examples, seed)).tolist(),
        single=single,
        hits=hits,
    )


def train(model: RecallModel, own: CrossDocumentRecall, steps: int, batch: int, rate: float, seed: int) -> list[float]:
    """AdamW at a rate that falls evenly to 0, in place; the mean losses of eight even parts of the way."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=BETAS, weight_decay=0.0)
    device = next(model.parameters()).device
    noted: list[Tensor] = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - step / steps)
        examples = own.examples(seed, range(step * batch, (step + 1) * batch))
        loss = recall_loss(model, RecallExamples(examples.tokens.to(device)))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        noted.append(loss.detach())
    return [part.mean().item() for part in torch.stack(noted).chunk(8)]


def recall_loss(model: RecallModel, examples: RecallExamples) -> Tensor:
    """Nats a value, mean over every reading of a document but the first, on which nothing can be known."""
    logits = _at_keys(model(examples.stream), examples)
    return F.cross_entropy(logits[:, :, 1:].flatten(0, 3), examples.answers[:, :, 1:].flatten())


def _at_keys(logits: Tensor, examples: RecallExamples) -> Tensor:
    """[B, T, V] -> [B, D, R, P, V], those that predict values."""
    return logits.unflatten(1, examples.tokens.shape[1:])[:, :, :, 0::2]


def test_examples(own: CrossDocumentRecall, count: int, seed: int) -> RecallExamples:
    """Of a stream of their own."""
    return own.examples(seed + TEST_SEED, range(count))


@torch.no_grad()
def accuracy(model: RecallModel, own: CrossDocumentRecall, examples: RecallExamples, batch: int = 16) -> Tensor:
    """Share of right values, float64 [D, R]."""
    device = next(model.parameters()).device
    wrong = []
    for part in examples.tokens.split(batch):
        some = RecallExamples(part)
        said = _at_keys(model(some.stream.to(device)), some).argmax(-1).cpu()
        wrong.append(own.error(said, some))
    return 1 - torch.cat(wrong).mean((0, 3))


@contextmanager
def chunked(model: RecallModel, tokens: int) -> Iterator[None]:
    """Inside, the memory is written after so many tokens."""
    before = model.memory.chunk_size
    model.memory.chunk_size = tokens
    try:
        yield
    finally:
        model.memory.chunk_size = before


def measure_single(model: RecallModel, config: FastWeightRecallConfig, seed: int) -> dict[int, float]:
    """A document and then the same as questions, read once: accuracy on the questions by chunk size. Where the chunk is
    the whole text, it is written after the questions."""
    numbers: Any = config
    twice = CrossDocumentRecall(numbers.keys, numbers.keys, numbers.pairs, documents=1, reads=2)
    examples = test_examples(twice, numbers.examples, seed)
    found = {}
    for chunk in (2 * twice.length, twice.length, twice.length // 2, twice.length // 4):
        if chunk >= 2:
            with chunked(model, chunk):
                found[chunk] = accuracy(model, twice, examples)[0, 1].item()
    return found


@torch.no_grad()
def measure_hits(model: RecallModel, config: FastWeightRecallConfig, seed: int) -> tuple[float, float]:
    """Of the slots that keys retrieve on the second reading, the share that the last writer, and any of the last four,
    gave the right value."""
    numbers: Any = config
    twice = CrossDocumentRecall(numbers.keys, numbers.keys, numbers.pairs, documents=1, reads=2)
    examples = test_examples(twice, min(16, numbers.examples), seed)
    device = next(model.parameters()).device
    with observed(model, lambda slots: WriterTrace(slots, WRITERS)) as seen:
        model(examples.stream.to(device))
    (trace,) = seen.values()
    retrieved = trace.retrieved()
    hit = retrieved.hits(examples.stream).hit
    asked = (retrieved.position >= twice.length) & (retrieved.position % 2 == 0)
    share = lambda last: hit[asked][..., :last].any(-1).double().mean().item()  # noqa: E731
    return share(1), share(WRITERS)


# Clustered queries -----------------------------------------------------------------------------------------------


def measure_collapse(seed: int) -> list[dict[str, float]]:
    """How many slots clustered queries come to use, for every spread of the cluster and weight of the entropy.

    Returns:
        One record each: spread, weight, seed, and the coverage (share of the slots that are read) in the last chunks.
    """
    return [
        {"spread": spread, "weight": weight, "seed": seed, "coverage": coverage(spread, weight, seed)}
        for spread in SPREADS
        for weight in WEIGHTS
    ]


@torch.no_grad()
def coverage(spread: float, weight: float, seed: int, sizes: dict[str, Any] | None = None) -> float:
    """Share of the slots that are read in the last chunks, after the chunks before them have moved the keys."""
    from regard.memory.fast_weights import WriteRule, fast_weight_memory

    own = {**COLLAPSE, **(sizes or {})}
    n, width, tokens = own["sub_keys"], own["key_dim"], own["chunk"] * own["chunks"]
    draw = torch.Generator().manual_seed(seed)
    keys = (2 * torch.rand(1, 2, n, width // 2, generator=draw) - 1) * width**-0.5
    centre, noise = (own["centre"] * torch.randn(rows, width, generator=draw) for rows in (1, tokens))
    query = (centre + spread * noise)[None, :, None]
    watched = SlotStatistics(n * n)
    early = (own["chunks"] - own["looked_at"]) * own["chunk"]
    # one value for all: what is written does not move the keys
    value, values = torch.zeros(1, tokens, 2), torch.zeros(n * n, 2)
    options: dict[str, Any] = {
        "rule": WriteRule("normalized", address_weight=weight),
        "top_k": own["top_k"],
        "chunk_size": own["chunk"],
    }
    _, state = fast_weight_memory(query[:, :early], value[:, :early], None, keys, values, **options)
    late = {**options, "state": state, "observer": watched}
    fast_weight_memory(query[:, early:], value[:, early:], None, keys, values, **late)
    return float((watched.reads > 0).double().mean())
