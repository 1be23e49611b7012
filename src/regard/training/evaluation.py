"""Held-out loss over a whole text, with a strided window; bits per character and per byte; support size.

How context is handled: the text is read in windows of `context` tokens that advance by `stride` (half the
context unless told otherwise). Every token but the first is predicted exactly once, in the window where it
was first seen, from at least `context - stride` tokens before it (fewer only in the very first window). A
smaller stride gives more context, a lower loss and a longer wait. Nothing is drawn at random.

Shapes: B windows at once, C the context, V the vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checks import ArgumentError
from ..grammar import SolveStatus
from ..pairwise.diagnostics import Diagnostics
from .data.windows import strided_windows

_OF_MEMORIES = ("coverage", "collisions", "kl_uniform", "marginal_entropy", "gate", "not_finite")


@dataclass(frozen=True)
class Units:
    """How many tokens, characters and UTF-8 bytes a text has: turns nats per token into bits.

    With n tokens for c characters, a loss of l nats per token is l n / (c ln 2) bits per character, whatever
    the tokenizer.
    """

    tokens: int
    characters: int
    bytes: int

    @classmethod
    def of(cls, text: str, tokens: int) -> Units:
        return cls(tokens, len(text), len(text.encode()))

    def bits_per_char(self, loss: float) -> float:
        """Bits per Unicode character for a loss in nats per token."""
        return loss / math.log(2) * self.tokens / self.characters

    def bits_per_byte(self, loss: float) -> float:
        """Bits per UTF-8 byte for a loss in nats per token."""
        return loss / math.log(2) * self.tokens / self.bytes


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` measured.

    Attributes:
        loss: mean negative log-likelihood, nats per token.
        bits_per_char, bits_per_byte: the same in bits per character and per UTF-8 byte.
        tokens: tokens that were predicted.
        tokens_per_second: over the whole evaluation, tokens read again in overlaps not counted.
        support: mean number of keys with non-zero weight, over the layers, heads and positions of the first
            batch of windows; None where no layer reports it, or nobody asked.
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
    """Loss of a causal language model on a text.

    Args:
        model: called as `model(input_ids=[B, C], use_cache=False).logits` [B, C, V].
        tokens: int [n], n >= 2, on any device.
        units: the sizes of the text that `tokens` encodes (or of the longer text it is the start of).
        context: C; stride: tokens between windows, 1 .. C - 1, default C // 2; batch: B.
        support: also measure the support, by one more pass that keeps the weights of every layer.

    Raises:
        ArgumentError: a stride out of range, or fewer than two tokens.
    """
    stride = max(1, context // 2) if stride is None else stride
    if not 1 <= stride < context:
        raise ArgumentError(f"evaluate: stride is {stride}, expected 1 to {context - 1} (context - 1).")
    if len(tokens) < 2:
        raise ArgumentError(f"evaluate: the text has {len(tokens)} tokens; at least 2 are needed.")
    windows = strided_windows(len(tokens), context, stride)
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64)
    begin = time.perf_counter()
    with _eval_mode(model):
        keys = mean_support(model, _stack(tokens, windows[:batch], context).to(device)) if support else None
        for i in range(0, len(windows), batch):
            total += _nll(model, tokens, windows[i : i + batch], context, device)
    seconds = time.perf_counter() - begin
    loss = total.item() / (len(tokens) - 1)
    return Evaluation(
        loss=loss,
        bits_per_char=units.bits_per_char(loss),
        bits_per_byte=units.bits_per_byte(loss),
        tokens=len(tokens) - 1,
        tokens_per_second=(len(tokens) - 1) / max(seconds, 1e-9),
        support=keys,
        seconds=seconds,
    )


def mean_support(model: nn.Module, input_ids: Tensor) -> float | None:
    """Mean number of keys with non-zero weight per query, over layers, heads and positions.

    Args:
        input_ids: int64 [B, C].

    Returns:
        None where no layer of the model reports diagnostics.
    """
    return row_means(model, input_ids).get("support")


@torch.no_grad()
def row_means(model: nn.Module, input_ids: Tensor) -> dict[str, float]:
    """What the diagnostics of the attention layers say, in one number each.

    Args:
        input_ids: int64 [B, C].

    Returns:
        Nothing where no layer reports diagnostics, else means over layers, heads and positions: support (keys with
        non-zero weight) and density (their share of the visible keys). Where a layer's bandwidth can miss all keys (a
        fixed one, of a kernel with an edge) also, over those layers: empty_rows, the share of the rows that see keys
        and give weight to none by their own rule. Where layers are local linear also, over those:
        negative_mass (sum of the negative weights' sizes), solver_iterations, solver_residual (the largest) and
        unconverged (the share of rows whose system was not solved to the tolerance). Where there are memories that
        can be observed, what `nn.memory_trace.memory_means` says of them: memory_coverage, memory_collisions,
        memory_kl_uniform, memory_marginal_entropy, memory_gate, memory_not_finite.
    """
    from ..inspect import capture
    from ..nn.memory_trace import memory_means

    with _eval_mode(model), capture(model) as seen:
        memories = memory_means(model, lambda: model(input_ids=input_ids, use_cache=False))
    layers = list(seen.layers.values())
    can_miss = _can_miss(model)
    missed = [_empty_rows(layer) for key, layer in seen.layers.items() if key in can_miss]
    local = [(layer.negative_mass, layer.solver) for layer in layers if layer.solver is not None]
    mean = lambda rows: torch.stack([row.double().mean() for row in rows]).mean().item()  # noqa: E731
    found = {}
    if layers:
        found["support"] = mean(layer.support for layer in layers)
        found["density"] = mean(layer.density for layer in layers)
    if missed:
        found["empty_rows"] = torch.stack(missed).mean().item()
    if local:
        found["negative_mass"] = mean(mass for mass, _ in local if mass is not None)
        found["solver_iterations"] = mean(solver["iterations"] for _, solver in local)
        found["solver_residual"] = max(solver["residual"].max().item() for _, solver in local)
        found["unconverged"] = mean(solver["status"] == SolveStatus.UNCONVERGED for _, solver in local)
    return found | {f"memory_{name}": value for name, value in memories.items() if name in _OF_MEMORIES}


def _can_miss(model: nn.Module) -> set[int]:
    """The layers, as `capture` numbers them, in which a row that sees keys can have none within the bandwidth."""
    layers = [
        module for module in model.modules() if hasattr(module, "observer") and hasattr(module, "observe_weights")
    ]
    found = set()
    for place, layer in enumerate(layers):
        spec, index = getattr(layer, "spec", None), getattr(layer, "layer_idx", None)
        if spec is not None and spec.bandwidth.name == "fixed" and spec.bandwidth.may_miss(spec.kernel):
            found.add(place if index is None else int(index))
    return found


def _empty_rows(layer: Diagnostics) -> Tensor:
    """The share of the rows with visible keys that have none within the bandwidth, float64."""
    sees = ~layer.empty
    missed = sees & (layer.fallback | (layer.support == 0))
    return missed.sum().double() / sees.sum().clamp_min(1)


def _stack(tokens: Tensor, windows: list[tuple[int, int]], context: int) -> Tensor:
    """The windows as one batch, int64 [B, C]."""
    return torch.stack([tokens[start : start + context] for start, _ in windows]).long()


def _nll(
    model: nn.Module, tokens: Tensor, windows: list[tuple[int, int]], context: int, device: torch.device
) -> Tensor:
    """Summed negative log-likelihood of the counted tokens of some windows, in nats, float64 on the CPU."""
    ids = _stack(tokens, windows, context).to(device)
    targets = ids[:, 1:].clone()
    for row, (_, skip) in zip(targets, windows, strict=True):
        row[: skip - 1] = -100  # target j is token j + 1
    logits: Any = model(input_ids=ids, use_cache=False).logits[:, :-1]
    each = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="none")
    return each.double().sum().cpu()


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
