"""Held-out loss over a whole text with a strided window, in bits per character and per byte; support size.

Shapes: B windows at once, C the context, V the vocabulary.
"""

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checks import require
from ..grammar import SolveStatus
from ..inspect.capture import capture, eval_mode, observable_layers
from ..nn.memory_trace import memory_means
from ..pairwise.diagnostics import Diagnostics
from .data.windows import strided_windows

_OF_MEMORIES = ("coverage", "collisions", "kl_uniform", "marginal_entropy", "gate", "not_finite")


@dataclass(frozen=True)
class Units:
    """Number of tokens, characters and UTF-8 bytes of a text, for converting nats per token to bits.

    With n tokens for c characters, a loss of l nats per token is l n / (c ln 2) bits per character.
    """

    tokens: int
    characters: int
    bytes: int

    @classmethod
    def of(cls, text: str, tokens: int) -> "Units":
        return cls(tokens, len(text), len(text.encode()))

    def bits_per_char(self, loss: float) -> float:
        """Return the bits per Unicode character for a loss in nats per token."""
        return loss / math.log(2) * self.tokens / self.characters

    def bits_per_byte(self, loss: float) -> float:
        """Return the bits per UTF-8 byte for a loss in nats per token."""
        return loss / math.log(2) * self.tokens / self.bytes


@dataclass(frozen=True)
class Evaluation:
    """Result of `evaluate`.

    Attributes:
        loss: mean negative log-likelihood in nats per token.
        bits_per_char, bits_per_byte: the loss in bits per character and per UTF-8 byte.
        tokens: number of predicted tokens.
        tokens_per_second: predicted tokens per second of the whole evaluation.
        support: mean number of keys with nonzero weight, over the layers, heads and positions of the first batch of
            windows; None if no layer reports it or it was not measured.
        seconds: wall time.
    """

    loss: float
    bits_per_char: float
    bits_per_byte: float
    tokens: int
    tokens_per_second: float
    support: float | None
    seconds: float


@torch.no_grad()
def evaluate(
    model: nn.Module,
    tokens: Tensor,
    units: Units,
    *,
    context: int,
    stride: int | None = None,
    batch: int = 16,
    support: bool = True,
) -> Evaluation:
    """Return the loss of a causal language model on a text, which is read in windows that advance by `stride`.

    Every token but the first is predicted exactly once, from at least `context - stride` tokens before it (fewer only
    in the first window). A smaller stride gives more context, a lower loss and takes longer. Nothing is random.

    Args:
        model: called as `model(input_ids=[B, C], use_cache=False).logits` [B, C, V].
        tokens: int [n], n >= 2, on any device.
        units: sizes of the text that `tokens` encodes, or of a longer text that begins with it.
        context: C; stride: tokens between windows, 1 .. C - 1, default C // 2; batch: B.
        support: also measure the support, with one more pass over the first batch.

    Raises:
        ArgumentError: a stride out of range, or fewer than two tokens.
    """
    stride = max(1, context // 2) if stride is None else stride
    require(1 <= stride < context, "evaluate", f"stride is {stride}, expected 1 to {context - 1} (context - 1).")
    require(len(tokens) >= 2, "evaluate", f"the text has {len(tokens)} tokens; at least 2 are needed.")
    windows = strided_windows(len(tokens), context, stride)
    device = next(model.parameters()).device
    total, keys = torch.zeros((), dtype=torch.float64), None
    begin = time.perf_counter()
    with eval_mode(model):
        for i in range(0, len(windows), batch):
            part = windows[i : i + batch]
            ids = torch.stack([tokens[start : start + context] for start, _ in part]).long().to(device)
            if support and i == 0:
                keys = mean_support(model, ids)
            total += _nll(model, ids, part)
    seconds, count = time.perf_counter() - begin, len(tokens) - 1
    loss = total.item() / count
    bits = units.bits_per_char(loss), units.bits_per_byte(loss)
    return Evaluation(loss, *bits, count, count / max(seconds, 1e-9), keys, seconds)


def mean_support(model: nn.Module, input_ids: Tensor) -> float | None:
    """Return the mean number of keys with nonzero weight per query for int64 [B, C], over layers, heads and positions;
    None if no layer reports diagnostics."""
    return row_means(model, input_ids).get("support")


@torch.no_grad()
def row_means(model: nn.Module, input_ids: Tensor) -> dict[str, float]:
    """Return means of the attention layers' diagnostics over layers, heads and positions.

    Args:
        input_ids: int64 [B, C].

    Returns:
        Empty if no layer reports diagnostics, else by name:

        - support, density: keys with nonzero weight, and their share of the visible keys.
        - empty_rows: share of the queries with visible keys of which none lies within the bandwidth, over the layers
          with a fixed bandwidth and a compactly supported kernel.
        - negative_mass (sum of the sizes of negative weights), solver_iterations, solver_residual (the largest) and
          unconverged (share of the systems that did not converge or are inaccurate), over local linear layers.
        - memory_coverage, memory_collisions, memory_kl_uniform, memory_marginal_entropy, memory_gate,
          memory_not_finite: see `nn.memory_trace.memory_means`.
    """
    with eval_mode(model), capture(model) as seen:
        memories = memory_means(model, lambda: model(input_ids=input_ids, use_cache=False))
    layers = list(seen.layers.values())
    can_miss = _can_miss(model)
    missed = [_empty_rows(layer) for key, layer in seen.layers.items() if key in can_miss]
    local = [(layer.negative_mass, layer.solver) for layer in layers if layer.solver is not None]
    mean = lambda rows: torch.stack([row.double().mean() for row in rows]).mean().item()  # noqa: E731
    means = {}
    if layers:
        means["support"] = mean(layer.support for layer in layers)
        means["density"] = mean(layer.density for layer in layers)
    if missed:
        means["empty_rows"] = torch.stack(missed).mean().item()
    if local:
        means["negative_mass"] = mean(mass for mass, _ in local if mass is not None)
        means["solver_iterations"] = mean(solver["iterations"] for _, solver in local)
        means["solver_residual"] = max(solver["residual"].max().item() for _, solver in local)
        means["unconverged"] = mean(solver["status"] >= SolveStatus.UNCONVERGED for _, solver in local)
    return means | {f"memory_{name}": value for name, value in memories.items() if name in _OF_MEMORIES}


def _can_miss(model: nn.Module) -> set[int]:
    """Return the layers, as `capture` numbers them, in which a query may have no visible key within the bandwidth."""
    numbers = set()
    for position, layer in enumerate(observable_layers(model)):
        spec: Any = getattr(layer, "spec", None)
        index = getattr(layer, "layer_idx", None)
        if spec is not None and spec.bandwidth.name == "fixed" and spec.bandwidth.may_miss(spec.kernel):
            numbers.add(position if index is None else int(index))
    return numbers


def _empty_rows(layer: Diagnostics) -> Tensor:
    """Return the share of the queries with visible keys that have none within the bandwidth, float64."""
    sees = ~layer.empty
    missed = sees & (layer.fallback | (layer.support == 0))
    return missed.sum().double() / sees.sum().clamp_min(1)


def _nll(model: nn.Module, ids: Tensor, windows: list[tuple[int, int]]) -> Tensor:
    """Return the summed negative log-likelihood of the counted tokens of some windows, in nats, float64 on the CPU."""
    targets = ids[:, 1:].clone()
    for row, (_, skip) in zip(targets, windows, strict=True):
        row[: skip - 1] = -100  # target j is token j + 1
    logits: Any = model(input_ids=ids, use_cache=False).logits[:, :-1]
    each = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none")
    return each.double().sum().cpu()
