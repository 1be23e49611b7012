"""The model of the recipe `fast-weight-recall`: made, trained and measured; runs in a process of its own.

Shapes: B examples, D documents, R readings, P pairs, T = D R 2 P tokens of a stream, V tokens of the vocabulary.
"""

import itertools
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.memory.fast_weights import WriteRule, fast_weight_memory
from regard.models.hybrid.memories import chunk_size
from regard.nn import FastWeightProductKeyMemory
from regard.nn.memory_trace import SlotStatistics, WriterTrace, observed
from regard.tasks import CrossDocumentRecall, RecallExamples
from regard.training.device import resolve_device

from .fast_weight_recall import EXACT, RULES, FastWeightRecall, task_of

BETAS = (0.9, 0.95)
TRAINED_READS = 2
WRITERS = 4  # kept of every slot
TEST_SEED = 1_000_000  # added to a run's seed for the examples that are measured
COLLAPSE = {"sub_keys": 32, "key_dim": 64, "top_k": 4, "chunk": 128, "chunks": 64, "looked_at": 16, "centre": 0.25}
"""The memory and the queries of the collapse test: every query is the same point, of standard deviation `centre` a
coordinate, moved by noise of `spread` times as much."""
SPREADS, WEIGHTS = (0.25, 0.5, 1.0, 1.5), (0.0, 1.0, 10.0)


class RecallModel(nn.Module):
    """Embedding, memory, norm and output; the memory is empty at first, and each row of a batch has its own."""

    def __init__(self, vocabulary: int, width: int, memory: dict[str, Any]) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.memory = FastWeightProductKeyMemory(width, **memory)
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.output = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits, int [B, T] -> [B, T, V]."""
        hidden = self.embed(tokens)
        recalled, _ = self.memory(hidden)
        return self.output(self.norm(hidden + recalled))


def make_model(config: FastWeightRecall, rule: str, *, stress: bool) -> RecallModel:
    """Return a model with the memory of the config, or with the one that is too small."""
    own, side = task_of(config), config.stress_sub_keys if stress else config.sub_keys
    memory = {
        "sub_keys": side, "key_dim": config.key_dim, "value_dim": config.key_dim, "top_k": config.top_k,
        "chunk_size": own.length, "address_weight": config.address_weight, **RULES[rule],
    }  # fmt: skip
    return RecallModel(own.vocabulary, config.width, memory)


def train_and_measure(
    config: FastWeightRecall, rule: str, seed: int, *, stress: bool = False
) -> Iterator[dict[str, Any]]:
    """Train on two readings of every document, the loss on the second; then measure. Yield rows of the kinds "run" (the
    model, its seconds, and shares of retrieved slots that hold the right value), "loss" (nats, means of eight parts of
    the training), "recall" (share of right values) and "once" (the same read once, by tokens of a chunk)."""
    device = torch.device(resolve_device(config.device, call="train_and_measure"))
    torch.manual_seed(seed)
    model = make_model(config, rule, stress=stress).to(device)
    steps = config.stress_steps if stress else config.steps
    start = time.perf_counter()
    losses = train(model, task_of(config, reads=TRAINED_READS), steps, config.batch, config.learning_rate, seed)
    seconds = time.perf_counter() - start
    model.eval()
    watched = not stress and rule in EXACT
    twice = task_of(config, documents=1, reads=2)
    seen = twice.examples(seed + TEST_SEED, range(config.examples))
    single = measure_single(model, twice, seen) if watched else {}
    few = twice.examples(seed + TEST_SEED, range(min(16, config.examples)))
    hits = measure_hits(model, twice, few) if watched else (None, None)
    parameters = sum(weight.numel() for weight in model.parameters())
    yield {"kind": "run", "slots": model.memory.slots, "parameters": parameters, "seconds": seconds,
           "fast_weights": model.memory.fast_numbers(), "hit_last": hits[0], "hit_four": hits[1]}  # fmt: skip
    yield from ({"kind": "loss", "part": part, "loss": loss} for part, loss in enumerate(losses, 1))
    task = task_of(config)
    shares = accuracy(model, task, task.examples(seed + TEST_SEED, range(config.examples))).tolist()
    for document, readings in enumerate(shares, 1):
        for reading, value in enumerate(readings, 1):
            yield {"kind": "recall", "document": document, "reading": reading, "accuracy": value}
    yield from ({"kind": "once", "chunk": chunk, "accuracy": value} for chunk, value in single.items())


def train(model: RecallModel, own: CrossDocumentRecall, steps: int, batch: int, rate: float, seed: int) -> list[float]:
    """Train in place with AdamW at a rate that falls evenly to 0; return the nats per value of eight even parts of the
    way."""
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
    """Return nats per value, the mean over every reading of a document but the first, on which nothing can be known."""
    logits = _at_keys(model(examples.stream), examples)
    return F.cross_entropy(logits[:, :, 1:].flatten(0, 3), examples.answers[:, :, 1:].flatten())


def _at_keys(logits: Tensor, examples: RecallExamples) -> Tensor:
    """Return the logits that predict values, [B, T, V] -> [B, D, R, P, V]."""
    return logits.unflatten(1, examples.tokens.shape[1:])[:, :, :, 0::2]


@torch.no_grad()
def accuracy(model: RecallModel, own: CrossDocumentRecall, examples: RecallExamples, batch: int = 16) -> Tensor:
    """Return the share of right values, float64 [D, R]."""
    device = next(model.parameters()).device
    parts = [RecallExamples(tokens) for tokens in examples.tokens.split(batch)]
    said = [_at_keys(model(part.stream.to(device)), part).argmax(-1).cpu() for part in parts]
    return 1 - torch.cat(list(map(own.error, said, parts))).mean((0, 3))


def measure_single(model: RecallModel, twice: CrossDocumentRecall, examples: RecallExamples) -> dict[int, float]:
    """Return accuracy by chunk size on a document that is read once and then comes again as questions. Where the
    chunk is the whole text, it is written after the questions."""
    found = {}
    for chunk in (2 * twice.length, twice.length, twice.length // 2, twice.length // 4):
        if chunk >= 2:
            with chunk_size(model, chunk):
                found[chunk] = accuracy(model, twice, examples)[0, 1].item()
    return found


@torch.no_grad()
def measure_hits(model: RecallModel, twice: CrossDocumentRecall, examples: RecallExamples) -> tuple[float, float]:
    """Return, of the slots that keys retrieve on the second reading, the share to which the last writer, and any of
    the last four, gave the right value."""
    device = next(model.parameters()).device
    with observed(model, lambda slots: WriterTrace(slots, WRITERS)) as seen:
        model(examples.stream.to(device))
    (trace,) = seen.values()
    retrieved = trace.retrieved()
    hit = retrieved.hits(examples.stream).hit
    asked = (retrieved.position >= twice.length) & (retrieved.position % 2 == 0)
    share = lambda last: hit[asked][..., :last].any(-1).double().mean().item()  # noqa: E731
    return share(1), share(WRITERS)


def measure_collapse(seed: int) -> Iterator[dict[str, Any]]:
    """Return rows of kind "clustered" for every spread of the cluster and weight of the entropy: the share of the slots
    that are read in the last chunks."""
    for spread, weight in itertools.product(SPREADS, WEIGHTS):
        found = coverage(spread, weight, seed)
        yield {"kind": "clustered", "spread": spread, "weight": weight, "coverage": found}


@torch.no_grad()
def coverage(spread: float, weight: float, seed: int, sizes: dict[str, Any] | None = None) -> float:
    """Return the share of slots that are read in the last chunks, after the chunks before them have moved the keys."""
    own = {**COLLAPSE, **(sizes or {})}
    n, width, chunk = own["sub_keys"], own["key_dim"], own["chunk"]
    tokens, early = chunk * own["chunks"], chunk * (own["chunks"] - own["looked_at"])
    draw = torch.Generator().manual_seed(seed)
    keys = (2 * torch.rand(1, 2, n, width // 2, generator=draw) - 1) * width**-0.5
    centre, noise = (own["centre"] * torch.randn(rows, width, generator=draw) for rows in (1, tokens))
    query = (centre + spread * noise)[None, :, None]
    watched = SlotStatistics(n * n)
    # one value for all: what is written does not move the keys
    value, values = torch.zeros(1, tokens, 2), torch.zeros(n * n, 2)
    rule = WriteRule("normalized", address_weight=weight)
    read = partial(fast_weight_memory, rule=rule, top_k=own["top_k"], chunk_size=chunk)
    _, state = read(query[:, :early], value[:, :early], None, keys, values)
    read(query[:, early:], value[:, early:], None, keys, values, state=state, observer=watched)
    return float((watched.reads > 0).double().mean())
