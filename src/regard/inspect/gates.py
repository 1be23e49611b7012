"""The gates of memory layers, token by token: on which tokens does a model read its episodic memory?

A fast-weight memory layer gives g * (what the memory says) + (1 - g) * (the token's own value), with g in [0, 1].
"Fast-weight Product Key Memory" looks at histograms of g (figure 3), and at g on the tokens of one text, where upper
layers open on rare names (section 5.2). The second is made a number here: the rank correlation of g with how rare the
token, or the word that it belongs to, is in the text that the model learned from.

Legend: M memory layers that have a gate, T tokens.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import ArgumentError, instance, integers, refuse, require, tensor, whole
from .capture import check_labels
from .hooks import hooked, named_hook_points

GATE = "hook_gate"
"""What the hook point of a gate is called."""
BINS = 10
"""Of a histogram, on [0, 1], as in the paper's figure 3."""
_WORD = re.compile(r"[^\W\d_]+")


@dataclass(frozen=True)
class GateTrace:
    """The gates of a model on one text.

    Attributes:
        labels: the tokens as text, T of them.
        layers: the name of every memory layer, M of them, from the first to the last: "layer 3".
        gates: float32 [M, T], on the CPU.
    """

    labels: tuple[str, ...]
    layers: tuple[str, ...]
    gates: Tensor


@torch.no_grad()
def gate_trace(
    model: nn.Module, input_ids: Tensor, labels: Sequence[str], *, chunk_size: int | None = None
) -> GateTrace:
    """Run a causal language model over one text, its memories empty, and keep every gate.

    Args:
        model: called as `model(input_ids=[1, T], use_cache=False)`, in evaluation mode.
        input_ids: int [T].
        labels: the T tokens as text.
        chunk_size: tokens after which the memories are written, in this pass only (the paper takes 32 for a short
            text); None for the model's own.

    Raises:
        ArgumentError: no memory layer of the model has a gate, or labels do not match the tokens.
    """
    call = "gate_trace"
    check_labels(call, labels, integers(call, "input_ids", input_ids, "T"))
    names = [name for name in named_hook_points(model) if name.rpartition(".")[2] == GATE]
    missing = (
        f"no memory layer of {type(model).__name__} has a gate; give a model with memories such as "
        f'HybridConfig(memories="FwPKM@2") and gating=True.'
    )
    require(bool(names), call, missing)
    heard: dict[str, list[Tensor]] = {name: [] for name in names}
    listen = lambda name: lambda gate, hook: heard[name].append(gate.detach().reshape(-1).float().cpu())  # noqa: E731
    training = model.training
    model.eval()
    try:
        with _chunked(model, chunk_size), hooked(model, [(name, listen(name)) for name in names], required=False):
            model(input_ids=input_ids.long()[None].to(_device(model)), use_cache=False)
    finally:
        model.train(training)
    found = {name: torch.cat(parts) for name, parts in heard.items() if parts}
    require(bool(found), call, missing)
    return GateTrace(tuple(labels), tuple(map(layer_name, found)), torch.stack(list(found.values())))


def _chunked(model: nn.Module, tokens: int | None) -> Any:
    if tokens is None:
        return nullcontext()
    from ..models.hybrid.memories import chunk_size

    return chunk_size(model, tokens)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def layer_name(hook: str) -> str:
    """ "layer 3" of the hook point "layers.2.memory.hook_gate"; the hook point's own name where it has no number."""
    number = re.search(r"\d+", hook)
    return hook.removesuffix(f".{GATE}") if number is None else f"layer {int(number[0]) + 1}"


def histogram(gates: Tensor, bins: int = BINS) -> Tensor:
    """The share of gates in each of `bins` equal parts of [0, 1], [..., T] -> float64 [..., bins] of sum 1 (less where
    some are not finite). Without a token 0 throughout."""
    _check_gates("histogram", gates, bins)
    return bin_counts(gates, bins).double() / max(1, gates.shape[-1])


def _check_gates(call: str, gates: Tensor, bins: int) -> None:
    if tensor(call, "gates", gates).dim() == 0:
        raise ArgumentError(f"{call}: gates is a scalar, expected at least one axis.")
    whole(call, "bins", bins, 1, 2**31)


def bin_counts(gates: Tensor, bins: int = BINS) -> Tensor:
    """How many gates are in each of `bins` equal parts of [0, 1], [..., T] -> int64 [..., bins]; an edge belongs to the
    part above it, 1 to the last, and what is not finite to none."""
    _check_gates("bin_counts", gates, bins)
    finite = gates.isfinite()
    place = (torch.where(finite, gates, 0).double() * bins).long().clamp(0, bins - 1)
    counts = torch.zeros(*gates.shape[:-1], bins, dtype=torch.long, device=gates.device)
    return counts.scatter_add_(-1, place, finite.long())


# Rarity ----------------------------------------------------------------------------------------------------------


def token_surprisal(tokens: Tensor, learned: Tensor, vocabulary: int) -> Tensor:
    """How rare each token is where the model learned, in bits: -log2 (n + 1) / (N + V), for a token that occurs n
    times among the N learned, V of a kind; int [T] -> float64 [T]."""
    call = "token_surprisal"
    whole(call, "vocabulary", vocabulary, 1, 2**31)
    for name, given in (("tokens", tokens), ("learned", learned)):
        integers(call, name, given, "T")
        least, most = (0, 0) if given.is_meta or not given.numel() else map(int, given.aminmax())
        if given.is_meta or least < 0 or most >= vocabulary:
            raise ArgumentError(f"{call}: {name} holds what is no token from 0 to {vocabulary - 1} (vocabulary).")
    counts = torch.bincount(learned.long(), minlength=vocabulary).double()
    share = (counts + 1) / (counts.sum() + vocabulary)
    return -share.log2()[tokens.long()]


def word_counts(text: str) -> Counter[str]:
    """How often each word occurs: runs of letters, as they are written."""
    return Counter(_WORD.findall(text))


def word_surprisal(labels: Sequence[str], counts: Mapping[str, int]) -> Tensor:
    """How rare the word is that each token belongs to, in bits, float64 [T]; NaN for tokens outside words.

    The measure where tokens are characters or pieces of words, which are common even in the rarest name. A token that
    reaches into several words has the rarest.

    Args:
        labels: the tokens as text, which in a row are the text.
        counts: of `word_counts`, where the model learned; as `token_surprisal`, with one more kind for all unseen.
    """
    call = "word_surprisal"
    if not isinstance(labels, (list, tuple)) or not all(isinstance(each, str) for each in labels):
        raise refuse(call, "labels", labels, "a list of texts")
    instance(call, "counts", counts, Mapping, "a mapping of words to how often they occur")
    total, kinds = sum(counts.values()), len(counts) + 1
    bits = lambda word: -math.log2((counts.get(word, 0) + 1) / (total + kinds))  # noqa: E731
    return _over_tokens(labels, ((match.span(), bits(match[0])) for match in _WORD.finditer("".join(labels))))


def _over_tokens(labels: Sequence[str], spans: Any) -> Tensor:
    """Values of spans of characters, as the largest that each token reaches into."""
    sizes = torch.tensor([len(label) for label in labels], dtype=torch.long)
    owner = torch.arange(len(labels)).repeat_interleave(sizes)
    found = torch.full(owner.shape, -math.inf, dtype=torch.float64)
    for (start, stop), value in spans:
        found[start:stop] = value
    values = torch.full((len(labels),), -math.inf, dtype=torch.float64).scatter_reduce_(0, owner, found, "amax")
    return values.where(values > -math.inf, torch.nan)


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Spearman's: the correlation of ranks, equal values sharing the mean of theirs, over the places where neither is
    NaN, [T] each. 0 where there are fewer than two places, or one side is constant."""
    tensor("rank_correlation", "x", x, "T")
    tensor("rank_correlation", "y", y, len(x), like=x, of="x", why=", as long as x")
    known = ~(x.isnan() | y.isnan())
    ranks = [_ranks(each[known].double()) for each in (x, y)]
    if len(ranks[0]) < 2:
        return 0.0
    one, other = (rank - rank.mean() for rank in ranks)
    size = one.norm() * other.norm()
    return float(one @ other / size) if size > 0 else 0.0


def _ranks(x: Tensor) -> Tensor:
    _, inverse, counts = x.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts.double() - 1) / 2)[inverse]
