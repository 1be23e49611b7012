"""One step of functional gradient descent on the next-token loss, as a layer: the f update of ICLM.

A text y_0, y_1, ... is read as pairs (phi_j, y_j): the covariate phi_j sums up the tokens before y_j. A function f of
the covariate predicts the token by softmax(W_e f). Descending the cross entropy in a reproducing-kernel space gives
(ICLM paper, equation 7)

    f_i <- f_i + sum_h P_h sum_{j < i} [w_{y_j} - E(w|f_j)] kappa_h(phi_i, phi_j),     E(w|f) = W_e softmax(W_e^T f)

which is attention that is strictly causal, whose queries and keys are covariates and whose values are embeddings of the
tokens that followed. Values stand one place ahead of keys: with the rows i = 0..R-1 of covariates and the values
j = 0..R-2, dropping the first query and the last key leaves ordinary causal attention, and no row without a pair.

Legend: B batch, R covariates given now, n pairs so far, H heads, D channels of a head, C width of a covariate, E width
of f and of embeddings, Dv channels of a head's value, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..checks import ArgumentError, flag, flags, floating, instance, refuse, require, shape, tensor
from ..grammar import Spec, as_spec
from ..pairwise.attention import attention
from ..pairwise.visibility import Visibility, runs_of
from ..precision import autocast, full_precision
from .arguments import check_hidden, check_layer_idx, check_positions, positive_int
from .attention.layer import Observer
from .attention.rotary import rotate
from .hooks import HookPoint

CALL = "nn.FunctionalGradient"
VARIANTS = ("full", "wv", "slice")


@dataclass(frozen=True)
class Pairs:
    """Which covariate goes with which value where some rows are padding, or belong to several documents: that of the
    last real row before it. Where a document begins there is none.

    Attributes:
        index: int64 [B, new], the place of each new pair's covariate among (the pending one, the rows given).
        last: int64 [B, 1], the place there of the covariate that waits for the next value.
        visible: boolean [B, n], the pairs whose value is real and has a covariate.
        real: boolean [B, R], the rows given now that are real.
        segments: integers [B or 1, R], the documents of the rows, before which there are no others then; None for one
            document a row.
    """

    index: Tensor
    last: Tensor
    visible: Tensor
    real: Tensor
    segments: Tensor | None = None

    @classmethod
    def of(cls, real: Tensor, rows: int, segments: Tensor | None = None) -> Pairs:
        """From booleans [B, S], true where a row is real, over all rows so far, of which the last `rows` are given
        now; and the documents of the rows, integers [B or 1, S], where all are given now.

        Raises:
            ArgumentError: documents with rows before those given now.
        """
        size = real.shape[1]
        require(
            segments is None or rows == size,
            f"{CALL} (Pairs.of)",
            f"segments come with {size} rows of which {rows} are given now, expected all: a cache holds one document.",
        )
        earlier = size - rows
        places = torch.arange(size, device=real.device).expand(real.shape)
        latest = torch.where(real, places, -1).cummax(1).values
        begins = torch.zeros_like(places) if segments is None else runs_of(segments)[0]
        visible = real[:, 1:] & (latest[:, :-1] >= begins[:, 1:])
        # with earlier rows, the pending covariate is candidate 0 and the first row given candidate 1
        found = (latest - earlier + int(earlier > 0)).clamp_min(0)
        return cls(found[:, max(earlier - 1, 0) : -1], found[:, -1:], visible, real[:, earlier:], segments)


def pair_rows(rows: Tensor, pending: Tensor | None, pairs: Pairs | None) -> tuple[Tensor, Tensor]:
    """What belongs to the new pairs, of something [B, H, R, D] that every row has.

    Args:
        rows: [B, H, R, D], of the rows given now.
        pending: [B, H, 1, D], of the row before them that had no value yet; None where they are the first.
        pairs: of a text with padding or several documents; None where every row is real.

    Returns:
        ([B, H, R, D], or [B, H, R - 1, D] without `pending`; the new pending one [B, H, 1, D]).
    """
    found = rows if pending is None else torch.cat((pending, rows), -2)
    if pairs is None:
        return found[..., :-1, :], found[..., -1:, :]
    pick = lambda index: found.gather(  # noqa: E731
        -2, index[:, None, :, None].expand(-1, found.shape[1], -1, found.shape[-1])
    )
    return pick(pairs.index), pick(pairs.last)


class PairCache(Protocol):
    """What the layer asks of a cache."""

    def pending(self, name: str) -> Tensor | None:
        """What waits for the next value, [B, H, 1, D], or None before the first row."""
        ...

    def extend(self, pending: dict[str, Tensor], **new: Tensor) -> dict[str, Tensor]:
        """Append along the last axis but one; everything so far, by name."""
        ...


class FunctionalGradient(nn.Module):
    """The update sum_h P_h sum_{j < i} r_j kappa_h(phi_i, phi_j) (ICLM paper, equations 7, 11 and 18).

    The values r_j are the caller's: embeddings w_{y_j}, or w_{y_j} - E(w|f_j) (`expected_embedding`).

    Args:
        covariate_size: C.
        value_size: E.
        num_heads: H, a divisor of C; for "wv" and "slice" of E too.
        spec: the kernels kappa_h, any sentence of the grammar, of W_Q phi_i and W_K phi_j.
        variant: what a head averages. "full": the values as they are; P_h is any E x E matrix, together
            `o_proj` [E, H E]. "wv": a learned projection of them to E/H channels, so that P_h has rank E/H (the
            parameters of ordinary attention). "slice": E/H channels of them.
        average: where the spec's weights do not sum to one, divide the sum by the number of pairs that the row sees,
            1/(i-1) (appendix B); False for the plain sum of equation 11.
        layer_idx: the layer's number for observers.

    Attributes:
        observer, observe_weights: as `regard.nn.Attention` has them; what is observed is not yet divided by the number
            of pairs.
        hook_pattern: sees the weights [B, H, rows, n], those that the values are multiplied by; while something listens
            they are computed densely, and what it returns is used in their place.
        hook_out: sees the update [B, R, E].

    Cost: scores H D a pair; "full" averages H E channels a pair where "wv" and "slice" average E.

    Raises:
        ArgumentError: sizes that do not fit, an unknown variant, or a spec that takes more than queries and keys (a
            learned solver).
    """

    def __init__(
        self,
        covariate_size: int,
        value_size: int,
        num_heads: int,
        *,
        spec: str | Spec = "softmax",
        variant: str = "full",
        average: bool = True,
        layer_idx: int | None = None,
    ) -> None:
        super().__init__()
        positive_int(CALL, "value_size", value_size)
        positive_int(CALL, "covariate_size", covariate_size)
        positive_int(CALL, "num_heads", num_heads)
        if covariate_size % num_heads:
            raise ArgumentError(
                f"{CALL}: covariate_size {covariate_size} is not a multiple of {num_heads} heads (num_heads)."
            )
        self.head_dim = covariate_size // num_heads
        flag(CALL, "average", average)
        if not isinstance(variant, str) or variant not in VARIANTS:
            raise refuse(CALL, "variant", variant, f"one of {', '.join(map(repr, VARIANTS))}")
        if variant != "full" and value_size % num_heads:
            raise ArgumentError(
                f"{CALL}: value_size {value_size} is not a multiple of {num_heads} heads (num_heads); change one, or "
                f"variant='full', whose heads all see the whole value."
            )
        self.covariate_size, self.value_size, self.num_heads = covariate_size, value_size, num_heads
        self.spec = check_kernel(CALL, as_spec(spec, CALL))
        self.variant, self.average, self.layer_idx = variant, average, check_layer_idx(CALL, layer_idx)
        self.observer: Observer | None = None
        self.observe_weights = False
        inner = num_heads * self.head_dim
        self.q_proj = nn.Linear(covariate_size, inner, bias=False)
        self.k_proj = nn.Linear(covariate_size, inner, bias=False)
        if variant == "wv":
            self.v_proj = nn.Linear(value_size, value_size, bias=False)
        self.o_proj = nn.Linear(value_size * (num_heads if variant == "full" else 1), value_size, bias=False)
        self.hook_pattern, self.hook_out = HookPoint(), HookPoint()

    def extra_repr(self) -> str:
        """Heads, kernel and variant, for `print(model)`."""
        return (
            f"num_heads={self.num_heads}, head_dim={self.head_dim}, spec={str(self.spec)!r}, variant={self.variant!r}"
        )

    def forward(
        self,
        covariates: Tensor,
        values: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        pairs: Pairs | None = None,
        cache: PairCache | None = None,
        output_attentions: bool = False,
        *,
        is_causal: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """The update of f at every covariate given.

        Args:
            covariates: [B, R, C].
            values: [B, n, E], of all pairs so far: n = R - 1 without a cache, else as many as rows so far less one.
                Value j goes with covariate j.
            position_embeddings: (cos, sin) of `rotary_angles` for the covariates, each [B or 1, R, D/2]; None for none.
            pairs: of a text with padding, whose hidden rows change nothing, or of several documents, none of which
                changes another; None where every row is real and all are one document.
            cache: of this layer's keys; it is extended.
            output_attentions: also return the weights, computed densely.
            is_causal: False: every covariate sees all n <= R pairs, those of the first n covariates, as in plain
                functional gradient descent on a fixed set of pairs (equations 16 and 17). No cache, no `pairs`.

        Returns:
            (update [B, R, E], weights [B, H, rows, n] or None). A row without a pair is 0. The very first row never has
            one, and `rows` leaves it out: n without a cache, R where rows came before.

        Raises:
            ArgumentError: shapes that do not fit.
        """
        flags(CALL, output_attentions=output_attentions, is_causal=is_causal)
        self._check(covariates, values, is_causal, cache, pairs)
        check_positions(CALL, position_embeddings, covariates, self.head_dim)
        if pairs is not None:  # zero times what is not finite would be NaN, in gradients of the weights too
            covariates = covariates.masked_fill(~pairs.real[..., None], 0)
            values = values.masked_fill(~pairs.visible[..., None], 0)
        query = self._heads(self.q_proj(covariates), position_embeddings)
        key = self._heads(self.k_proj(covariates), position_embeddings)
        first = 0
        if is_causal:
            pending = None if cache is None else cache.pending("key")
            key, waiting = pair_rows(key, pending, pairs)
            first = int(pending is None)
            value = self._values(values, key.shape[2])
            if cache is not None:
                own = {"value": value} if self.variant == "wv" else {}  # projected once, the others are views
                found = cache.extend({"key": waiting}, key=key, **own)
                key = found["key"]
                value = found["value"] if own else self._values(values, values.shape[1])
        else:
            key, value = key[:, :, : values.shape[1]], self._values(values, values.shape[1])
        out, weights = self._attend(query[:, :, first:], key, value, pairs, output_attentions, is_causal)
        update = self.o_proj(out.transpose(1, 2).flatten(2))
        return self.hook_out(F.pad(update, (0, 0, first, 0)) if first else update), weights

    def _check(
        self, covariates: Tensor, values: Tensor, is_causal: bool, cache: PairCache | None, pairs: Pairs | None
    ) -> None:
        if pairs is not None:
            instance(CALL, "pairs", pairs, Pairs, "Pairs or None")
        if cache is not None and not all(callable(getattr(cache, n, None)) for n in ("pending", "extend")):
            raise refuse(CALL, "cache", cache, "a cache with pending and extend, or None")
        check_hidden(CALL, "covariates", covariates, self.covariate_size, self.k_proj)
        tensor(CALL, "values", values, like=covariates, of="covariates")
        if values.dtype != covariates.dtype and not autocast(values.device.type):
            raise ArgumentError(f"{CALL}: values is {values.dtype}, but covariates {covariates.dtype}; convert one.")
        rows = covariates.shape[1]
        if values.dim() != 3 or values.shape[0] != covariates.shape[0] or values.shape[2] != self.value_size:
            raise ArgumentError(
                f"{CALL}: values has shape {shape(values)}, expected [{covariates.shape[0]}, n, {self.value_size}] for "
                f"covariates {shape(covariates)}."
            )
        n = values.shape[1]
        if not is_causal and (cache is not None or pairs is not None or n > rows):
            raise ArgumentError(
                f"{CALL}: is_causal=False takes no cache and no padding, and at most as many values ({n}) as "
                f"covariates ({rows})."
            )
        require(
            cache is None or pairs is None or pairs.segments is None,
            CALL,
            "pairs are of several documents, but a cache was given, which holds one a row; leave one of them out.",
        )
        if is_causal and cache is None and n != rows - 1:
            raise ArgumentError(
                f"{CALL}: {n} values for {rows} covariates, expected one less: value j follows covariate j, and the "
                f"last covariate is still without."
            )

    def _heads(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor] | None) -> Tensor:
        """[B, R, H D] -> [B, H, R, D], turned by the positions."""
        x = x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        return x if position_embeddings is None else rotate(x, *position_embeddings)

    def _values(self, values: Tensor, last: int) -> Tensor:
        """What the heads average of the last so many of values [B, n, E]: [B, H or 1, last, Dv]."""
        values = values[:, values.shape[1] - last :]
        if self.variant == "full":
            return values[:, None]
        if self.variant == "wv":
            values = self.v_proj(values)
        return values.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pairs: Pairs | None,
        output_attentions: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The weighted sums of values: ([B, H, rows, Dv], weights [B, H, rows, n] or None)."""
        (batch, heads, rows, _), n = query.shape, key.shape[2]
        if rows == 0 or n == 0:
            empty = self.hook_pattern(query.new_zeros(batch, heads, rows, n))
            return query.new_zeros(batch, heads, rows, value.shape[3]), empty if output_attentions else None
        value = value.to(query.dtype)  # under autocast projections are narrower than embeddings
        mask = None if pairs is None else pairs.visible[:, None, None]
        # the query of row i stands at the pair that the row completes
        segments = None if pairs is None or pairs.segments is None else pairs.segments[:, 1:]
        share = self._share(rows, n, mask, segments, is_causal, query)
        arguments: dict[str, Any] = {"attn_mask": mask, "is_causal": is_causal, "segment_ids": segments}
        dense = output_attentions or self.hook_pattern.active
        if self.observer is None and not dense:
            out = attention(query, key, value.expand(-1, heads, -1, -1), self.spec, **arguments)
            return out if share is None else out * share, None
        if not dense:
            return self._watched(query, key, value, share, arguments), None
        weights = self._weights(query, key, share, arguments)
        weights = self.hook_pattern(weights)
        if mask is not None:  # also what a hook gave to padding
            weights = weights.masked_fill(~mask, 0)
        return weights.to(value.dtype) @ value, weights if output_attentions else None

    def _watched(
        self, query: Tensor, key: Tensor, value: Tensor, share: Tensor | None, arguments: dict[str, Any]
    ) -> Tensor:
        """The sums, of which the observer is told."""
        assert self.observer is not None
        value = value.expand(-1, self.num_heads, -1, -1)
        impl = "reference" if self.observe_weights else "auto"
        out, seen = attention(query, key, value, self.spec, return_diagnostics=True, impl=impl, **arguments)
        self.observer(self.layer_idx, seen)
        return out if share is None else out * share

    def _weights(self, query: Tensor, key: Tensor, share: Tensor | None, arguments: dict[str, Any]) -> Tensor:
        """What the values are multiplied by, [B, H, rows, n]."""
        batch, heads, n, _ = key.shape
        if query.requires_grad or self.spec.degree:
            # a sum is linear in the values, so that the sums of unit vectors are its weights, with their gradients, and
            # solved for by the implementation that makes the sums
            unit = torch.eye(n, dtype=query.dtype, device=query.device).expand(batch, heads, n, n)
            weights = attention(query, key, unit, self.spec, **arguments)
        else:
            unit = query.new_zeros(batch, heads, n, 1)
            _, seen = attention(query, key, unit, self.spec, return_diagnostics=True, impl="reference", **arguments)
            weights = seen.weights if seen.effective_weights is None else seen.effective_weights
            if self.observer is not None:
                self.observer(self.layer_idx, seen)
        return weights if share is None else weights * share

    def _share(
        self, rows: int, n: int, mask: Tensor | None, segments: Tensor | None, is_causal: bool, like: Tensor
    ) -> Tensor | None:
        """1 / the number of pairs that a row sees, [B or 1, 1, rows, 1], where weights do not sum to one."""
        if self.spec.weighting.normalised or not self.average:
            return None
        runs = None if segments is None else runs_of(segments)
        visible = Visibility(rows, n, causal=is_causal, offset=n - rows, mask=mask, runs=runs)
        return 1 / visible.counts(like.device).clamp_min(1).to(like.dtype)[..., None]


def check_kernel(call: str, spec: Spec) -> Spec:
    """`spec`, after checking that queries and keys are all that it takes.

    Raises:
        ArgumentError: its solver is learned.
    """
    learned = spec.degree == 1 and spec.solver.name == "learned"
    require(not learned, call, f"spec: {spec} takes a probe that the f update has not; choose another solver.")
    return spec


def expected_embedding(f: Tensor, table: Tensor, chunk: int = 4096) -> Tensor:
    """E(w|f) = W_e softmax(W_e^T f), the mean embedding under the prediction (ICLM paper, equation 8).

    Args:
        f: [..., E].
        table: [V, E], one embedding a row.
        chunk: tokens of the vocabulary at a time.

    Returns:
        [..., E], in the dtype of `f`; differentiable (once) in both.

    Raises:
        ArgumentError: widths differ.

    Cost: 4 E V operations a row forward and 8 E V backward, which makes the probabilities again; memory for `chunk`
    numbers a row, whatever V. Logits, their normaliser and the sum in float32 at least.
    """
    call = "expected_embedding"
    floating(call, "f", f)
    tensor(call, "table", table, like=f, of="f")
    if table.dim() != 2 or f.dim() == 0 or f.shape[-1] != table.shape[1]:
        raise ArgumentError(f"{call}: f has shape {shape(f)} and table {shape(table)}, expected [..., E] and [V, E].")
    positive_int(call, "chunk", chunk)
    wide = torch.promote_types(torch.promote_types(f.dtype, table.dtype), torch.float32)
    with full_precision(f.device.type):
        out = _Expectation.apply(f.to(wide).flatten(0, -2), table.to(wide), chunk)
    return out.reshape(f.shape).to(f.dtype)


def mean_embedding(table: Tensor) -> Tensor:
    """E(w|0), the mean of the rows of `table` [V, E]: [E], summed in float32 at least."""
    return table.to(torch.promote_types(table.dtype, torch.float32)).mean(0).to(table.dtype)


class _Expectation(torch.autograd.Function):
    """`expected_embedding` for rows [R, E], in one pass over the vocabulary forward and one backward."""

    @staticmethod
    def forward(ctx: Any, f: Tensor, table: Tensor, chunk: int) -> Tensor:
        top = f.new_full((f.shape[0], 1), -torch.inf)
        mass, total = torch.zeros_like(top), torch.zeros_like(f)
        for part in table.split(chunk):
            z = f @ part.T
            higher = torch.maximum(top, z.amax(-1, keepdim=True))
            p, shrink = torch.exp(z - higher), torch.exp(top - higher)
            mass = mass * shrink + p.sum(-1, keepdim=True)
            total = total * shrink + p @ part
            top = higher
        mean = total / mass
        ctx.save_for_backward(f, table, mean, top + mass.log())
        ctx.chunk = chunk
        return mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        f, table, mean, log_mass = ctx.saved_tensors
        with full_precision(f.device.type):  # backward() may be called where autocast is on
            centre = (grad * mean).sum(-1, keepdim=True)
            df, parts = torch.zeros_like(f), []
            for part in table.split(ctx.chunk):
                p = torch.exp(f @ part.T - log_mass)
                dz = p * (grad @ part.T - centre)
                df = df + dz @ part
                parts.append(p.T @ grad + dz.T @ f)
        return df, torch.cat(parts), None
