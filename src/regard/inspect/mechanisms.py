"""Measures of what attention heads do: sinks, copying, induction, and what is lost without a head.

All of them take the weights of one layer, `pattern` [B, H, R, K]: R rows (queries), K columns (keys), aligned at their
ends, so that row r sees the columns 0 .. r + K - R. What rows and columns stand for differs between the streams of an
ICLM and a Transformer; `Roles` says it, in tokens x_0 .. x_{T-1}:

    stream        pattern         row r predicts  column c holds
    phi           [T + 1, T + 1]  x_r             x_{c-1}, column 0 the start token
    f             [T, T]          x_{r+1}         x_c: a key is a context, its value the token that followed
    Transformer   [T, T]          x_{r+1}         x_c

The row that predicts x_i therefore sees x_0 .. x_{i-1} in each of them. An induction head of f looks from the slot of
x_i to that of its earlier occurrence, P slots before; one of phi or of a Transformer to the position P - 1 before: in
all three that is the column which holds the token to be copied.

Shapes: B texts, H heads, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import ArgumentError, floating, instance, integers, on_device, shape, shown, tensor, whole
from ..nn.hooks import HookPoint
from .hooks import HookFunction, run_with_cache

EPSILON = 0.3
"""The mean weight above which a first token counts as a sink (Gu et al., arXiv 2410.10781, section 3)."""


@dataclass(frozen=True)
class Roles:
    """What rows and columns of a pattern stand for.

    Attributes:
        predicts: row r stands where token `predicts + r` is predicted.
        holds: column c carries token `holds + c`; -1 is a start token that is none of the text.
    """

    predicts: int
    holds: int

    def columns(self, tokens: Tensor, count: int) -> Tensor:
        """The tokens [B, count] that the columns carry, -1 where it is none of the text [B, T]."""
        return _placed(tokens, self.holds, count)

    def rows(self, tokens: Tensor, count: int) -> Tensor:
        """The tokens [B, count] that the rows predict, -1 where it is none of the text [B, T]."""
        return _placed(tokens, self.predicts, count)


ROLES = {"phi": Roles(0, -1), "f": Roles(1, 0), "transformer": Roles(1, 0)}
"""Stream to what its patterns' rows and columns stand for."""


BEGUN = {"phi": Roles(1, 0), "f": Roles(2, 1), "transformer": Roles(1, 0)}
"""The same for an ICLM whose start token is the first of the text: it is never a value, nor predicted."""


def _placed(tokens: Tensor, first: int, count: int) -> Tensor:
    places = torch.arange(first, first + count, device=tokens.device)
    inside = (places >= 0) & (places < tokens.shape[1])
    return tokens[:, places.clamp(0, tokens.shape[1] - 1)].masked_fill(~inside, -1)


def _visible(pattern: Tensor) -> Tensor:
    """Which column each row may see, [R, K]."""
    rows, columns = pattern.shape[-2:]
    return torch.ones(rows, columns, dtype=torch.bool, device=pattern.device).tril(columns - rows)


def _check(call: str, pattern: Tensor) -> None:
    floating(call, "pattern", pattern)
    if pattern.dim() != 4 or pattern.is_meta or pattern.shape[2] > pattern.shape[3]:
        raise ArgumentError(
            f"{call}: pattern has shape {shape(pattern)} and dtype {pattern.dtype}, expected floating weights "
            f"[B, H, R, K] of a causal layer, with no more rows than columns."
        )


def _check_rows(call: str, pattern: Tensor, from_row: int) -> None:
    _check(call, pattern)
    if type(from_row) is not int or not 0 <= from_row < pattern.shape[2]:
        raise ArgumentError(f"{call}: from_row is {shown(from_row)}, expected 0 to {pattern.shape[2] - 1}.")


@dataclass(frozen=True)
class Sinks:
    """Where the heads of a layer leave their weight, whatever the query: means over texts and rows.

    Attributes:
        first: [H], the mean weight of column 0.
        strongest: [H], the largest mean weight of any column.
        place: int64 [H], which column that is.
        uniform: the mean weight of column 0 if every row weighed all that it sees alike.
    """

    first: Tensor
    strongest: Tensor
    place: Tensor
    uniform: float

    def rate(self, epsilon: float = EPSILON) -> float:
        """Share of heads whose column 0 has a mean weight above `epsilon`."""
        return (self.first > epsilon).double().mean().item()

    def anywhere(self, epsilon: float = EPSILON) -> float:
        """Share of heads with any column of such a mean weight."""
        return (self.strongest > epsilon).double().mean().item()


def sinks(pattern: Tensor, from_row: int = 0) -> Sinks:
    """The sinks of one layer: the mean weight of every column over the rows from `from_row` on (a column counts as 0
    in rows that do not see it), averaged over the texts.

    With `from_row` = 0 the number for column 0 is alpha of Gu et al. (arXiv 2410.10781, equation in section 3.1), which
    the first rows, with little else to see, raise: compare with `uniform`, or leave them out.

    Args:
        pattern: [B, H, R, K], without padding.
        from_row: the first row that counts, 0 to R - 1.

    Raises:
        ArgumentError: a pattern of another kind, a row that it does not have.
    """
    _check_rows("sinks", pattern, from_row)
    mean = pattern[:, :, from_row:].double().mean((0, 2))
    strongest, place = mean.max(-1)
    uniform = (1 / _visible(pattern)[from_row:].sum(-1).double()).mean().item()
    return Sinks(mean[:, 0], strongest, place, uniform)


def evenness(pattern: Tensor, from_row: int = 0) -> Tensor:
    """How evenly heads weigh what they see: [H], the mean over texts and rows of (sum p)^2 / (n sum p^2), where a row
    sees n columns: 1 for equal weights, 1/n for all weight on one column.

    Args:
        pattern: [B, H, R, K], without padding.
        from_row: the first row that counts.

    Raises:
        ArgumentError: as `sinks`.
    """
    _check_rows("evenness", pattern, from_row)
    weights = pattern[:, :, from_row:].double()
    squares = weights.square().sum(-1)
    share = weights.sum(-1).square() / squares.where(squares > 0, torch.ones_like(squares))
    return (share / _visible(pattern)[from_row:].sum(-1)).mean((0, 2))


@dataclass(frozen=True)
class Copying:
    """How much weight the heads of a layer give to columns that carry the wanted token.

    Attributes:
        weight: [H], the mean of sum_j A_ij over the columns j with x_j the token wanted in row i, over all rows in
            which there is one.
        uniform: the same of weights that are alike on all columns a row sees: the mean of count / visible.
        rows: over how many rows; 0 rows give weight 0.
    """

    weight: Tensor
    uniform: float
    rows: int

    @property
    def lift(self) -> Tensor:
        """[H], weight / uniform: 1 for a head that does not care, 0 where there was no row."""
        return self.weight / self.uniform if self.rows else torch.zeros_like(self.weight)


def copying(pattern: Tensor, roles: Roles, tokens: Tensor, wanted: Tensor) -> Copying:
    """The induction score on any text: the weight on earlier occurrences of the token that is predicted.

    Args:
        pattern: [B, H, R, K], without padding.
        roles: what rows and columns stand for.
        tokens: int [B, T], the text.
        wanted: int [B, R], the token that counts in each row: the model's prediction there, or the token that does
            follow (`roles.rows`); negative where a row is not to count.

    Raises:
        ArgumentError: shapes that do not fit.
    """
    _check("copying", pattern)
    instance("copying", "roles", roles, Roles, "Roles")
    integers("copying", "tokens", tokens)
    integers("copying", "wanted", wanted)
    batch, _, rows, columns = pattern.shape
    for name, given in (("tokens", tokens), ("wanted", wanted)):
        on_device("copying", name, given, pattern.device, "pattern")
    if tokens.dim() != 2 or tokens.shape[0] != batch or tuple(wanted.shape) != (batch, rows):
        raise ArgumentError(
            f"copying: tokens has shape {shape(tokens)} and wanted {shape(wanted)}, expected [{batch}, T] and "
            f"[{batch}, {rows}] for pattern {shape(pattern)}."
        )
    held = roles.columns(tokens, columns)
    same = (held[:, None, :] == wanted[:, :, None]) & (held[:, None, :] >= 0) & _visible(pattern)
    counts = same.sum(-1)
    counted = counts > 0
    total = int(counted.sum())
    on_them = (pattern.double() * same[:, None]).sum(-1)
    weight = (on_them * counted[:, None]).sum((0, 2)) / max(total, 1)
    shares = counts.double() / _visible(pattern).sum(-1)
    return Copying(weight, (shares.sum() / max(total, 1)).item(), total)


def induction(pattern: Tensor, roles: Roles, period: int) -> Tensor:
    """The induction score on blocks that repeat: [H], the mean weight on the column that carries token i - P in the
    rows that predict token i, over all i > P (token P itself follows from nothing before it).

    Args:
        pattern: [B, H, R, K] on a text that repeats with this period.
        roles: what rows and columns stand for.
        period: P >= 1.

    Raises:
        ArgumentError: a pattern too short to hold a repetition.
    """
    _check("induction", pattern)
    instance("induction", "roles", roles, Roles, "Roles")
    whole("induction", "period", period, 1, 2**48)
    rows = torch.arange(pattern.shape[2], device=pattern.device)
    columns = rows + roles.predicts - period - roles.holds
    kept = (rows + roles.predicts > period) & (columns >= 0) & (columns < pattern.shape[3])
    if not bool(kept.any()):
        raise ArgumentError(f"induction: a pattern of {pattern.shape[2]} rows repeats nothing with period {period}.")
    return pattern[:, :, rows[kept], columns[kept]].double().mean((0, 2))


def repeated_blocks(
    vocabulary: int, period: int, length: int, count: int, generator: torch.Generator, first: int = 0
) -> Tensor:
    """Texts that repeat one random block: int64 [count, length], cut where the length ends.

    A block has no token twice, so that the token to come is found behind the earlier occurrence of the present one and
    nowhere else.

    Args:
        vocabulary: how many tokens to draw from, at least `period`: first .. first + vocabulary - 1.

    Raises:
        ArgumentError: a vocabulary too small for the block.
    """
    call = "repeated_blocks"
    for name, size in {"vocabulary": vocabulary, "length": length, "count": count}.items():
        whole(call, name, size, 0, 2**40)
    whole(call, "first", first, 0, 2**62)
    if generator is not None:
        instance(call, "generator", generator, torch.Generator, "a torch.Generator")
    if whole(call, "period", period) < 1 or period > vocabulary:
        raise ArgumentError(f"{call}: period is {shown(period)}, expected 1 to the vocabulary's {vocabulary} tokens.")
    order = torch.rand(count, vocabulary, generator=generator).argsort(-1)[:, :period]
    return order[:, torch.arange(length) % period] + first


@dataclass(frozen=True)
class Eigenvalues:
    """Whether heads raise the token that they read: of the matrices P_h W_e W_e^T (their eigenvalues are those of the
    V x V maps from a token read to logits written, up to zeros).

    Attributes:
        share: [H], share of the eigenvalues that are not 0 whose real part is positive.
        balance: [H], sum of eigenvalues / sum of their sizes, in [-1, 1] (Elhage et al. 2021, "copying").
        Both are NaN for heads whose map has an entry that is not finite.
    """

    share: Tensor
    balance: Tensor


@torch.no_grad()
def copying_eigenvalues(projections: Tensor, embedding: Tensor) -> Eigenvalues:
    """Eigenvalues of the heads' maps from the embedding of a token read to the logits written.

    Args:
        projections: P_h, [H, C, C]: a head adds P_h e(x) to the stream, e(x) as a column.
        embedding: W_e^T, [V, C], tied: e(x) are its rows, and logits are e(v) . f.

    Cost: O(V C^2 + H C^3), in float64.

    Raises:
        ArgumentError: shapes that do not fit.
    """
    floating("copying_eigenvalues", "embedding", embedding)
    tensor("copying_eigenvalues", "projections", projections, like=embedding, of="embedding")
    width = embedding.shape[-1] if embedding.dim() else 0
    if embedding.dim() != 2 or projections.dim() != 3 or tuple(projections.shape[1:]) != (width, width):
        raise ArgumentError(
            f"copying_eigenvalues: projections has shape {shape(projections)} and embedding {shape(embedding)}, "
            f"expected [H, C, C] and [V, C]."
        )
    wide = embedding.double()
    maps = projections.double() @ (wide.T @ wide)
    known = maps.isfinite().all(-1).all(-1)
    found = torch.linalg.eigvals(maps.where(known[:, None, None], 0.0))
    size = found.abs()
    counted = size > 1e-9 * size.amax(-1, keepdim=True)
    share = ((found.real > 0) & counted).sum(-1) / counted.sum(-1).clamp_min(1)
    total = size.sum(-1)
    balance = torch.where(total > 0, found.real.sum(-1) / total.where(total > 0, 1.0), 0.0)
    return Eigenvalues(share.where(known, math.nan), balance.where(known, math.nan))


def knock_out(*heads: int) -> HookFunction:
    """A hook for weights [B, H, R, K] that puts those of the given heads to zero (all heads where none is named)."""

    def silence(pattern: Tensor, hook: HookPoint) -> Tensor:
        return _for_heads(pattern, torch.zeros_like(pattern), heads, "knock_out")

    return silence


def uniform_attention(*heads: int) -> HookFunction:
    """A hook for weights [B, H, R, K] without padding that spreads those of the given heads evenly over the columns a
    row sees (all heads where none is named): what is left is the mean, and no choice."""

    def spread(pattern: Tensor, hook: HookPoint) -> Tensor:
        seen = _visible(pattern).to(pattern.dtype)
        return _for_heads(pattern, (seen / seen.sum(-1, keepdim=True)).expand_as(pattern), heads, "uniform_attention")

    return spread


def zero(tensor: Tensor, hook: HookPoint) -> Tensor:
    """A hook that removes what a block adds."""
    return torch.zeros_like(tensor)


def mean(tensor: Tensor, hook: HookPoint) -> Tensor:
    """A hook for [B, T, C] that leaves of what a block adds its mean over all positions of the batch."""
    return tensor.mean((0, 1), keepdim=True).expand_as(tensor)


def _for_heads(pattern: Tensor, other: Tensor, heads: tuple[int, ...], call: str) -> Tensor:
    """`pattern` with those heads from `other`."""
    count = pattern.shape[1]
    wrong = [head for head in heads if not 0 <= head < count]
    if wrong:
        raise ArgumentError(f"{call}: head {wrong[0]} is none of the layer's {count}, expected 0 to {count - 1}.")
    chosen = torch.zeros(count, dtype=torch.bool, device=pattern.device)
    chosen[list(heads) if heads else slice(None)] = True
    return torch.where(chosen[:, None, None], other, pattern)


# Models ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerPattern:
    """The weights of one layer of a model on some texts.

    Attributes:
        name: of the hook point.
        stream: "phi", "f" or "transformer"; layer: its place in the stream, from 0.
        roles: what rows and columns stand for.
        weights: [B, H, R, K].
    """

    name: str
    stream: str
    layer: int
    roles: Roles
    weights: Tensor

    def wanted(self, logits: Tensor) -> Tensor:
        """The tokens [B, R] that a model predicts in each row, from its logits [B, T, V] (position t predicts x_{t+1}),
        -1 where no position does."""
        return _placed(logits.argmax(-1), self.roles.predicts - 1, self.weights.shape[2])


_POINT = re.compile(r"(?:(phi|f)|layers)\.(\d+)\.(?:self_)?attn\.hook_pattern")


@torch.no_grad()
def patterns(
    model: nn.Module, input_ids: Tensor, streams: Sequence[str] | None = None
) -> tuple[Tensor, list[LayerPattern]]:
    """Run an ICLM or a Transformer and keep the weights of its heads.

    Args:
        model: `ICLMForCausalLM` or `HybridForCausalLM`, in whatever mode it is.
        input_ids: int [B, T], without padding.
        streams: which of "phi", "f" and "transformer"; default all that there are.

    Returns:
        (logits [B, T, V], the patterns in the order in which the layers run).

    Raises:
        ArgumentError: the model has no such layers.
    """
    kept = lambda name: (found := _POINT.fullmatch(name)) is not None and _stream(found) in (streams or ROLES)  # noqa: E731
    output, cache = run_with_cache(model, input_ids, kept)
    if not cache:
        raise ArgumentError(
            f"patterns: {type(model).__name__} has no attention whose rows and columns are known here; ICLM and "
            f"Transformer have."
        )
    config: Any = getattr(model, "config", None)
    roles = BEGUN if getattr(config, "start", "param") == "bos" else ROLES
    found = []
    for name, weights in cache.items():
        matched = _POINT.fullmatch(name)
        assert matched is not None
        stream = _stream(matched)
        found.append(LayerPattern(name, stream, int(matched[2]), roles[stream], weights))
    return output.logits, found


def _stream(matched: re.Match[str]) -> str:
    return matched[1] or "transformer"


@torch.no_grad()
def logit_lens(model: Any, input_ids: Tensor) -> Tensor:
    """What an ICLM would predict if it ended after each f block: the last norm and the output matrix on f as it is
    there, with the divisor of its own variance. Natural here, as f lives in the space of the embeddings from 0 on.

    Args:
        model: `ICLMForCausalLM`. With `f_mlp="side"` the sum of what feed-forward layers add aside is left out.
        input_ids: int [B, T], without padding.

    Returns:
        Logits [L/2, B, T, V].
    """
    _, cache = run_with_cache(model, input_ids, lambda name: re.fullmatch(r"f\.\d+\.hook_out", name) is not None)
    if not cache:
        raise ArgumentError(f"logit_lens: {type(model).__name__} has no f blocks; ICLMForCausalLM has.")
    tokens = input_ids.shape[1]
    return torch.stack([model.lm_head(model.model.ln_final(f[:, -tokens:])) for f in cache.values()])


def head_projections(layer: Any) -> Tensor:
    """P_h of a `regard.nn.FunctionalGradient`, [H, E, E]: a head with all its weight on value r adds P_h r to f.

    The variants "wv" and "slice" have P_h of rank E/H.
    """
    heads, size = layer.num_heads, layer.value_size
    outputs = layer.o_proj.weight.unflatten(1, (heads, -1)).transpose(0, 1)  # [H, E, Dv]
    if layer.variant == "full":
        return outputs
    identity = torch.eye(size, dtype=outputs.dtype, device=outputs.device)
    read = layer.v_proj.weight if layer.variant == "wv" else identity
    return outputs @ read.unflatten(0, (heads, -1))
