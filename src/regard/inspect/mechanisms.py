"""Measures of what attention heads do: sinks, copying, induction, and the effect of removing a head.

All take the weights of one layer, `pattern` [B, H, R, K]: R rows (queries) and K columns (keys), aligned at their ends,
so that row r sees the columns 0 .. r + K - R. `Roles` describes what rows and columns stand for in the streams of an
ICLM and in a Transformer, for tokens x_0 .. x_{T-1}:

    stream        pattern         row r predicts  column c holds
    phi           [T + 1, T + 1]  x_r             x_{c-1}, column 0 the start token
    f             [T, T]          x_{r+1}         x_c: the key is a context, its value the token that followed
    Transformer   [T, T]          x_{r+1}         x_c

The row that predicts x_i therefore sees x_0 .. x_{i-1} in each of them. With period P, an induction head of f attends P
positions back, and one of phi or of a Transformer P - 1 positions: always to the column with the token to be copied.

Shapes: B texts, H heads, T tokens, V vocabulary.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import ArgumentError, floating, instance, integers, on_device, require, shape, tensor, whole
from ..nn.hooks import HookPoint
from .hooks import HookFunction, named_hook_points, run_with_cache

EPSILON = 0.3
"""Mean weight above which the first token is a sink (Gu et al., arXiv 2410.10781, section 3)."""


@dataclass(frozen=True)
class Roles:
    """What rows and columns of a pattern stand for: row r predicts token `predicts + r`, and column c holds token
    `holds + c`, where -1 is a start token outside the text."""

    predicts: int
    holds: int

    def columns(self, tokens: Tensor, count: int) -> Tensor:
        """Return the tokens [B, count] that the columns hold, -1 outside the text [B, T]."""
        return _placed(tokens, self.holds, count)

    def rows(self, tokens: Tensor, count: int) -> Tensor:
        """Return the tokens [B, count] that the rows predict, -1 outside the text [B, T]."""
        return _placed(tokens, self.predicts, count)


ROLES = {"phi": Roles(0, -1), "f": Roles(1, 0), "transformer": Roles(1, 0)}
"""Roles by stream."""
BEGUN = {"phi": Roles(1, 0), "f": Roles(2, 1), "transformer": Roles(1, 0)}
"""Roles of an ICLM whose start token is the first of the text, which is neither a value nor predicted."""


def _placed(tokens: Tensor, first: int, count: int) -> Tensor:
    positions = torch.arange(first, first + count, device=tokens.device)
    inside = (positions >= 0) & (positions < tokens.shape[1])
    return tokens[:, positions.clamp(0, tokens.shape[1] - 1)].masked_fill(~inside, -1)


def _visible(pattern: Tensor) -> Tensor:
    """Return which columns each row sees, [R, K]."""
    rows, columns = pattern.shape[-2:]
    return torch.ones(rows, columns, dtype=torch.bool, device=pattern.device).tril(columns - rows)


def _check(call: str, pattern: Tensor, *from_row: Any) -> None:
    floating(call, "pattern", pattern)
    if pattern.dim() != 4 or pattern.is_meta or pattern.shape[2] > pattern.shape[3]:
        expected = "floating weights [B, H, R, K] of a causal layer, with no more rows than columns"
        got = f"shape {shape(pattern)} and dtype {pattern.dtype}"
        raise ArgumentError(f"{call}: pattern has {got}, expected {expected}.")
    for row in from_row:
        whole(call, "from_row", row, 0, pattern.shape[2] - 1)


@dataclass(frozen=True)
class Sinks:
    """Mean weights of the columns over texts and rows, for the heads of a layer.

    Attributes:
        first: [H], mean weight of column 0.
        strongest: [H], largest mean weight of any column.
        place: int64 [H], that column.
        uniform: mean weight of column 0 under uniform attention.
    """

    first: Tensor
    strongest: Tensor
    place: Tensor
    uniform: float

    def rate(self, epsilon: float = EPSILON) -> float:
        """Return the share of heads whose column 0 has a mean weight above `epsilon`."""
        return (self.first > epsilon).double().mean().item()

    def anywhere(self, epsilon: float = EPSILON) -> float:
        """Return the share of heads with any column of such a mean weight."""
        return (self.strongest > epsilon).double().mean().item()


def sinks(pattern: Tensor, from_row: int = 0) -> Sinks:
    """Return the mean weight of the columns over the texts and the rows from `from_row` on, 0 for unseen columns.

    With `from_row` = 0, that of column 0 is alpha of Gu et al. (arXiv 2410.10781, section 3.1). The first rows see few
    columns and increase it: compare with `uniform`, or exclude them. `pattern` [B, H, R, K] is without padding, and
    `from_row` is 0 to R - 1.
    """
    _check("sinks", pattern, from_row)
    mean = pattern[:, :, from_row:].double().mean((0, 2))
    strongest, index = mean.max(-1)
    uniform = (1 / _visible(pattern)[from_row:].sum(-1).double()).mean().item()
    return Sinks(mean[:, 0], strongest, index, uniform)


def evenness(pattern: Tensor, from_row: int = 0) -> Tensor:
    """Return how uniform the weights of the heads are, [H], with arguments as `sinks`.

    This is the mean over texts and rows of (sum p)^2 / (n sum p^2) for a row that sees n columns: 1 for equal weights,
    1/n for all weight on one column.
    """
    _check("evenness", pattern, from_row)
    weights = pattern[:, :, from_row:].double()
    squares = weights.square().sum(-1)
    share = weights.sum(-1).square() / squares.where(squares > 0, torch.ones_like(squares))
    return (share / _visible(pattern)[from_row:].sum(-1)).mean((0, 2))


@dataclass(frozen=True)
class Copying:
    """Weight that the heads of a layer give to columns with the wanted token.

    Attributes:
        weight: [H], the sum of A_ij over the columns j that hold the token wanted in row i, as the mean over all rows
            with such a column.
        uniform: the same under uniform attention.
        rows: number of these rows; 0 rows give weight 0.
    """

    weight: Tensor
    uniform: float
    rows: int

    @property
    def lift(self) -> Tensor:
        """Return weight / uniform, [H]: 1 for uniform attention, 0 without rows."""
        return self.weight / self.uniform if self.rows else torch.zeros_like(self.weight)


def copying(pattern: Tensor, roles: Roles, tokens: Tensor, wanted: Tensor) -> Copying:
    """Return the induction score on any text: the weight on earlier occurrences of the predicted token.

    Args:
        pattern: [B, H, R, K], without padding.
        roles: what rows and columns stand for.
        tokens: int [B, T], the text.
        wanted: int [B, R], the token for each row: the model's prediction, or the true next token (`roles.rows`);
            negative for rows that do not count.
    """
    _check("copying", pattern)
    instance("copying", "roles", roles, Roles, "Roles")
    batch, _, rows, columns = pattern.shape
    for name, given, length in (("tokens", tokens, "T"), ("wanted", wanted, rows)):
        integers("copying", name, given, batch, length, why=", with the axes of pattern")
        on_device("copying", name, given, pattern.device, "pattern")
    held = roles.columns(tokens, columns)
    same = (held[:, None, :] == wanted[:, :, None]) & (held[:, None, :] >= 0) & _visible(pattern)
    counts = same.sum(-1)
    total = int((counts > 0).sum())
    weight = (pattern.double() * same[:, None]).sum(-1).sum((0, 2)) / max(total, 1)
    shares = counts.double() / _visible(pattern).sum(-1)
    return Copying(weight, (shares.sum() / max(total, 1)).item(), total)


def induction(pattern: Tensor, roles: Roles, period: int) -> Tensor:
    """Return the induction score on a text that repeats a block of P = `period` tokens, [H].

    This is the mean weight of the rows that predict token i on the column that holds token i - P, over all i > P.
    `pattern` is [B, H, R, K], `roles` says what its rows and columns stand for, and P >= 1.
    """
    _check("induction", pattern)
    instance("induction", "roles", roles, Roles, "Roles")
    whole("induction", "period", period, 1, 2**48)
    rows = torch.arange(pattern.shape[2], device=pattern.device)
    columns = rows + roles.predicts - period - roles.holds
    kept = (rows + roles.predicts > period) & (columns >= 0) & (columns < pattern.shape[3])
    few = f"a pattern of {pattern.shape[2]} rows repeats nothing with period {period}."
    require(bool(kept.any()), "induction", few)
    return pattern[:, :, rows[kept], columns[kept]].double().mean((0, 2))


def repeated_blocks(
    vocabulary: int, period: int, length: int, count: int, generator: torch.Generator, first: int = 0
) -> Tensor:
    """Return texts that repeat one random block of `period` different tokens, int64 [count, length].

    The next token is thus found only after the earlier occurrence of the current one. Tokens are drawn from first ..
    first + vocabulary - 1, at least `period` of them.
    """
    call = "repeated_blocks"
    for name, size in {"vocabulary": vocabulary, "length": length, "count": count}.items():
        whole(call, name, size, 0, 2**40)
    whole(call, "first", first, 0, 2**62)
    if generator is not None:
        instance(call, "generator", generator, torch.Generator, "a torch.Generator")
    whole(call, "period", period, 1, vocabulary, why=", the tokens of the vocabulary")
    order = torch.rand(count, vocabulary, generator=generator).argsort(-1)[:, :period]
    return order[:, torch.arange(length) % period] + first


@dataclass(frozen=True)
class Eigenvalues:
    """Whether heads increase the logit of the token that they read, from the eigenvalues of P_h W_e W_e^T. Up to zeros,
    these are the eigenvalues of the V x V maps from a token read to the logits written.

    Attributes:
        share: [H], share of the nonzero eigenvalues whose real part is positive.
        balance: [H], sum of eigenvalues / sum of their sizes, in [-1, 1] (Elhage et al. 2021, "copying").
        Both are NaN for heads whose map has a non-finite entry.
    """

    share: Tensor
    balance: Tensor


@torch.no_grad()
def copying_eigenvalues(projections: Tensor, embedding: Tensor) -> Eigenvalues:
    """Return statistics of the eigenvalues of the heads' maps from the embedding of a token read to the logits written.

    A head adds P_h e(x) to the stream. `projections` [H, C, C] has the P_h, and the tied `embedding` [V, C] the e(x);
    the logits are e(v) . f. Cost: O(V C^2 + H C^3), in float64.
    """
    floating("copying_eigenvalues", "embedding", embedding)
    tensor("copying_eigenvalues", "projections", projections, like=embedding, of="embedding")
    width = embedding.shape[-1] if embedding.dim() else 0
    square = embedding.dim() == 2 and projections.dim() == 3 and tuple(projections.shape[1:]) == (width, width)
    got = f"projections has shape {shape(projections)} and embedding {shape(embedding)}"
    require(square, "copying_eigenvalues", f"{got}, expected [H, C, C] and [V, C].")
    wide = embedding.double()
    maps = projections.double() @ (wide.T @ wide)
    known = maps.isfinite().all(-1).all(-1)
    values = torch.linalg.eigvals(maps.where(known[:, None, None], 0.0))
    size = values.abs()
    counted = size > 1e-9 * size.amax(-1, keepdim=True)
    share = ((values.real > 0) & counted).sum(-1) / counted.sum(-1).clamp_min(1)
    total = size.sum(-1)
    balance = torch.where(total > 0, values.real.sum(-1) / total.where(total > 0, 1.0), 0.0)
    return Eigenvalues(share.where(known, math.nan), balance.where(known, math.nan))


def knock_out(*heads: int) -> HookFunction:
    """Return a hook for weights [B, H, R, K] that sets those of the given heads (default: all) to zero."""

    def silence(pattern: Tensor, hook: HookPoint) -> Tensor:
        return _for_heads(pattern, torch.zeros_like(pattern), heads, "knock_out")

    return silence


def uniform_attention(*heads: int) -> HookFunction:
    """Return a hook for weights [B, H, R, K] without padding that makes those of the given heads (default: all)
    uniform over the columns a row sees."""

    def spread(pattern: Tensor, hook: HookPoint) -> Tensor:
        seen = _visible(pattern).to(pattern.dtype)
        return _for_heads(pattern, (seen / seen.sum(-1, keepdim=True)).expand_as(pattern), heads, "uniform_attention")

    return spread


def zero(tensor: Tensor, hook: HookPoint) -> Tensor:
    """Remove the output of a block (a hook)."""
    return torch.zeros_like(tensor)


def mean(tensor: Tensor, hook: HookPoint) -> Tensor:
    """Replace the output [B, T, C] of a block by its mean over all positions of the batch (a hook)."""
    return tensor.mean((0, 1), keepdim=True).expand_as(tensor)


def _for_heads(pattern: Tensor, other: Tensor, heads: tuple[int, ...], call: str) -> Tensor:
    """Return `pattern` with the given heads taken from `other`."""
    count = pattern.shape[1]
    for head in heads:
        require(0 <= head < count, call, f"head {head} does not exist, expected 0 to {count - 1}.")
    chosen = torch.zeros(count, dtype=torch.bool, device=pattern.device)
    chosen[list(heads) if heads else slice(None)] = True
    return torch.where(chosen[:, None, None], other, pattern)


@dataclass(frozen=True)
class LayerPattern:
    """The weights of one layer of a model on some texts.

    Attributes:
        name: name of the hook point.
        stream: "phi", "f" or "transformer"; layer: its number in the stream, from 0.
        roles: what rows and columns stand for.
        weights: [B, H, R, K].
    """

    name: str
    stream: str
    layer: int
    roles: Roles
    weights: Tensor

    def wanted(self, logits: Tensor) -> Tensor:
        """Return the tokens [B, R] that the logits [B, T, V] predict in each row, -1 for rows without prediction."""
        return _placed(logits.argmax(-1), self.roles.predicts - 1, self.weights.shape[2])


_POINT = re.compile(r"(?:(phi|f)|layers)\.(\d+)\.(?:self_)?attn\.hook_pattern")


@torch.no_grad()
def patterns(
    model: nn.Module, input_ids: Tensor, streams: Sequence[str] | None = None
) -> tuple[Tensor, list[LayerPattern]]:
    """Run an ICLM or a Transformer and return the weights of its heads.

    Args:
        model: `ICLMForCausalLM` or `HybridForCausalLM`.
        input_ids: int [B, T], without padding.
        streams: any of "phi", "f" and "transformer"; default all that the model has.

    Returns:
        (logits [B, T, V], the patterns in the order in which the layers run).

    Raises:
        ArgumentError: the model has no such layers.
    """
    matches = [_POINT.fullmatch(name) for name in named_hook_points(model)]
    streams_of = {match[0]: (match[1] or "transformer", int(match[2])) for match in matches if match is not None}
    kept = [name for name, (stream, _) in streams_of.items() if stream in (streams or ROLES)]
    output, cache = run_with_cache(model, input_ids, kept.__contains__)
    unknown = f"{type(model).__name__} has no attention with known rows; give an ICLM or Transformer."
    require(bool(cache), "patterns", unknown)
    roles = BEGUN if getattr(getattr(model, "config", None), "start", "param") == "bos" else ROLES
    layers = ((name, *streams_of[name], weights) for name, weights in cache.items())
    return output.logits, [LayerPattern(name, stream, i, roles[stream], weights) for name, stream, i, weights in layers]


@torch.no_grad()
def logit_lens(model: Any, input_ids: Tensor) -> Tensor:
    """Return the logits [L/2, B, T, V] that an ICLM would give if it ended after each f block.

    The final norm and the output matrix are applied to f, which is in the space of the embeddings from the start. With
    `f_mlp="side"` the sum of the feed-forward outputs at the side is excluded. `model` is an
    `ICLMForCausalLM`; `input_ids`, integers [B, T], are without padding.
    """
    _, cache = run_with_cache(model, input_ids, lambda name: re.fullmatch(r"f\.\d+\.hook_out", name) is not None)
    require(bool(cache), "logit_lens", f"{type(model).__name__} has no f blocks; ICLMForCausalLM has.")
    return torch.stack([model.lm_head(model.model.ln_final(f[:, -input_ids.shape[1] :])) for f in cache.values()])


def head_projections(layer: Any) -> Tensor:
    """Return P_h of a `regard.nn.FunctionalGradient`, [H, E, E]: a head with all its weight on value r adds P_h r to f.

    In the variants "wv" and "slice", P_h has rank E/H.
    """
    heads, size = layer.num_heads, layer.value_size
    outputs = layer.o_proj.weight.unflatten(1, (heads, -1)).transpose(0, 1)  # [H, E, Dv]
    if layer.variant == "full":
        return outputs
    identity = torch.eye(size, dtype=outputs.dtype, device=outputs.device)
    read = layer.v_proj.weight if layer.variant == "wv" else identity
    return outputs @ read.unflatten(0, (heads, -1))
