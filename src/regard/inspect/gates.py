"""The gates of memory layers, token by token: on which tokens does a model read its episodic memory?

The output of a fast-weight memory layer is g * (output of the memory) + (1 - g) * (the token's own value), with a gate
g in [0, 1]. "Fast-weight Product Key Memory" (arXiv:2601.00671) shows histograms of g (figure 3), and g on the tokens
of one text, where upper layers open on rare names (section 5.2). Here the second is measured: the rank correlation of g
with how rare the token, or its word, is in the training text.

Legend: M memory layers that have a gate, T tokens.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..checks import ArgumentError, instance, integers, require, tensor, whole, within
from .capture import check_labels, eval_mode
from .hooks import named_hook_points, run_with_cache

GATE = "hook_gate"
"""Name of the hook point of a gate."""
BINS = 10
"""Bins of a histogram on [0, 1], as in the paper's figure 3."""
_WORD = re.compile(r"[^\W\d_]+")


@dataclass(frozen=True)
class GateTrace:
    """The gates of a model on one text.

    Attributes:
        labels: the T tokens as text.
        layers: names of the M memory layers in order, such as "layer 3".
        gates: float32 [M, T], on the CPU.
    """

    labels: tuple[str, ...]
    layers: tuple[str, ...]
    gates: Tensor


@torch.no_grad()
def gate_trace(
    model: nn.Module, input_ids: Tensor, labels: Sequence[str], *, chunk_size: int | None = None
) -> GateTrace:
    """Run a causal language model over one text with empty memories, and record every gate.

    Args:
        model: called as `model(input_ids=[1, T], use_cache=False)`, in evaluation mode.
        input_ids, labels: the tokens, int [T], and the same as text.
        chunk_size: tokens between writes in this pass (32 in the paper for a short text); None for the model's own.

    Raises:
        ArgumentError: no memory layer of the model has a gate, or labels do not match the tokens.
    """
    call = "gate_trace"
    check_labels(call, labels, integers(call, "input_ids", input_ids, "T"))
    names = [name for name in named_hook_points(model) if name.rpartition(".")[2] == GATE]
    gated = 'give a model with memories such as HybridConfig(memories="FwPKM@2") and gating=True'
    missing = f"no memory layer of {type(model).__name__} has a gate; {gated}."
    require(bool(names), call, missing)
    tokens = input_ids.long()[None].to(next(model.parameters()).device)
    with eval_mode(model), ExitStack() as changes:
        if chunk_size is not None:
            from ..models.hybrid import memories

            changes.enter_context(memories.chunk_size(model, chunk_size))
        _, cache = within(call, None, run_with_cache, model, tokens, names.__contains__)
    require(bool(cache), call, missing)
    gates = torch.stack([gate.reshape(-1).float().cpu() for gate in cache.values()])
    return GateTrace(tuple(labels), tuple(map(layer_name, cache)), gates)


def layer_name(hook: str) -> str:
    """Return "layer 3" for the hook point "layers.2.memory.hook_gate", or the hook point's name without a number."""
    number = re.search(r"\d+", hook)
    return hook.removesuffix(f".{GATE}") if number is None else f"layer {int(number[0]) + 1}"


def histogram(gates: Tensor, bins: int = BINS) -> Tensor:
    """Return the share of gates in each of `bins` equal parts of [0, 1], [..., T] -> float64 [..., bins].

    Non-finite gates are in no bin. Without tokens the shares are 0.
    """
    return within("histogram", None, bin_counts, gates, bins).double() / max(1, gates.shape[-1])


def bin_counts(gates: Tensor, bins: int = BINS) -> Tensor:
    """Count the gates in each of `bins` equal parts of [0, 1], [..., T] -> int64 [..., bins].

    An edge belongs to the bin above it, 1 to the last bin, and non-finite gates to none.
    """
    call = "bin_counts"
    require(tensor(call, "gates", gates).dim() > 0, call, "gates is a scalar, expected at least one axis.")
    whole(call, "bins", bins, 1, 2**31)
    finite = gates.isfinite()
    index = (torch.where(finite, gates, 0).double() * bins).long().clamp(0, bins - 1)
    counts = torch.zeros(*gates.shape[:-1], bins, dtype=torch.long, device=gates.device)
    return counts.scatter_add_(-1, index, finite.long())


def token_surprisal(tokens: Tensor, learned: Tensor, vocabulary: int) -> Tensor:
    """Return how rare each token is in the training text, in bits, int [T] -> float64 [T].

    For a token that occurs n times among N training tokens with a vocabulary of V: -log2 (n + 1) / (N + V).
    """
    call = "token_surprisal"
    whole(call, "vocabulary", vocabulary, 1, 2**31)
    for name, given in (("tokens", tokens), ("learned", learned)):
        integers(call, name, given, "T")
        least, most = (0, 0) if given.is_meta or not given.numel() else map(int, given.aminmax())
        if given.is_meta or least < 0 or most >= vocabulary:
            raise ArgumentError(f"{call}: {name} holds a token outside 0 to {vocabulary - 1} (vocabulary).")
    counts = torch.bincount(learned.long(), minlength=vocabulary).double()
    return -((counts + 1) / (counts.sum() + vocabulary)).log2()[tokens.long()]


def word_counts(text: str) -> Counter[str]:
    """Count the words, which are runs of letters (case-sensitive)."""
    return Counter(_WORD.findall(text))


def word_surprisal(labels: Sequence[str], counts: Mapping[str, int]) -> Tensor:
    """Return how rare the word of each token is, in bits, float64 [T]; NaN for tokens outside words.

    For tokens that are characters or pieces of words, which are common even in rare names. A token that is part of
    several words gets the rarest. The formula is that of `token_surprisal`, with one more word for all unseen ones.

    Args:
        labels: the tokens as text, which joined give the text.
        counts: `word_counts` of the training text.
    """
    call = "word_surprisal"
    check_labels(call, labels)
    instance(call, "counts", counts, Mapping, "a mapping of words to how often they occur")
    total, kinds = sum(counts.values()), len(counts) + 1
    bits = lambda word: -math.log2((counts.get(word, 0) + 1) / (total + kinds))  # noqa: E731
    sizes = torch.tensor([len(label) for label in labels], dtype=torch.long)
    token = torch.arange(len(labels)).repeat_interleave(sizes)
    characters = torch.full(token.shape, -math.inf, dtype=torch.float64)
    for match in _WORD.finditer("".join(labels)):
        characters[slice(*match.span())] = bits(match[0])
    values = torch.full((len(labels),), -math.inf, dtype=torch.float64).scatter_reduce_(0, token, characters, "amax")
    return values.where(values > -math.inf, torch.nan)


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Return Spearman's rank correlation of x and y [T], with mean ranks for ties, where neither is NaN.

    0 if fewer than two values are left or one side is constant.
    """
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
    return (counts.cumsum(0).double() - (counts.double() - 1) / 2)[inverse]
