"""One step of functional gradient descent on the next-token loss, as a layer: the f update of ICLM.

A text y_0, y_1, ... is a sequence of pairs (phi_j, y_j), where the covariate phi_j encodes the tokens before y_j. A
function f of the covariate predicts the token by softmax(W_e f). Descending the cross entropy in a reproducing-kernel
space gives (ICLM paper, equation 7)

    f_i <- f_i + sum_h P_h sum_{j < i} [w_{y_j} - E(w|f_j)] kappa_h(phi_i, phi_j),     E(w|f) = W_e softmax(W_e^T f)

This is causal attention without the diagonal, with covariates as queries and keys and embeddings of the next tokens as
values. For rows i = 0..R-1 of covariates and values j = 0..R-2, it equals causal attention without the first query and
the last key, so that no computed row is empty.

Legend: B batch, R covariates in this call, n pairs so far, H heads, D channels of a head, C width of a covariate, E
width of f and of embeddings, Dv channels of a head's value, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..checks import ArgumentError, flags, floating, instance, one_of, optional_whole, refuse, require, shape, tensor
from ..grammar import Spec, as_spec
from ..precision import autocast, full_precision
from .arguments import check_hidden, check_positions, described, positive_int, positive_ints
from .attention.layer import Observer
from .attention.rotary import in_heads
from .hooks import HookPoint, Seen, observed_attention
from .shifted_pairs import Pairs, pair_rows

CALL = "nn.FunctionalGradient"
VARIANTS = ("full", "wv", "slice")


class FunctionalGradient(nn.Module):
    """The update sum_h P_h sum_{j < i} r_j kappa_h(phi_i, phi_j) (ICLM paper, equations 7, 11 and 18).

    The caller passes the values r_j: embeddings w_{y_j}, or w_{y_j} - E(w|f_j) (`expected_embedding`).

    Args:
        covariate_size, value_size: C and E.
        num_heads: H, a divisor of C; for "wv" and "slice" of E too.
        spec: the kernels kappa_h of W_Q phi_i and W_K phi_j, any attention spec.
        variant: what a head averages. "full": the values; P_h is any E x E matrix, all of them together `o_proj` [E, H
            E]. "wv": a learned projection of the values to E/H channels, so that P_h has rank E/H (the parameters of
            ordinary attention). "slice": E/H channels of the values.
        average: for weights that do not sum to one, divide the sum by the number of visible pairs, 1/(i-1) (appendix
            B); False for the plain sum of equation 11.
        layer_idx: passed to observers.

    Attributes:
        observer, observe_weights: as in `regard.nn.Attention`; diagnostics are not divided by the number of pairs.
        hook_pattern: sees the final weights [B, H, rows, n] and may replace them; while a hook is registered they are
            computed densely.
        hook_out: sees the update [B, R, E].

    Cost: scores cost H D per pair; "full" averages H E channels per pair, "wv" and "slice" E.

    Raises:
        ArgumentError: sizes that do not fit, an unknown variant, or a spec with a learned solver, which needs a probe.
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
        positive_ints(CALL, value_size=value_size, covariate_size=covariate_size, num_heads=num_heads)
        even = covariate_size % num_heads == 0
        require(even, CALL, f"covariate_size {covariate_size} is not a multiple of {num_heads} heads (num_heads).")
        self.head_dim = covariate_size // num_heads
        flags(CALL, average=average)
        one_of(CALL, "variant", variant, VARIANTS)
        uneven = f"value_size {value_size} is not a multiple of {num_heads} heads; change one, or give variant='full'."
        require(variant == "full" or value_size % num_heads == 0, CALL, uneven)
        self.covariate_size, self.value_size, self.num_heads = covariate_size, value_size, num_heads
        self.spec = check_kernel(CALL, as_spec(spec, CALL))
        self.variant, self.average = variant, average
        self.layer_idx: int | None = optional_whole(CALL, "layer_idx", layer_idx, 0)
        self.observer: Observer | None = None
        self.observe_weights = False
        self.q_proj = nn.Linear(covariate_size, covariate_size, bias=False)
        self.k_proj = nn.Linear(covariate_size, covariate_size, bias=False)
        if variant == "wv":
            self.v_proj = nn.Linear(value_size, value_size, bias=False)
        self.o_proj = nn.Linear(value_size * (num_heads if variant == "full" else 1), value_size, bias=False)
        self.hook_pattern, self.hook_out = HookPoint(), HookPoint()

    def extra_repr(self) -> str:
        return described(num_heads=self.num_heads, head_dim=self.head_dim, spec=str(self.spec), variant=self.variant)

    def forward(
        self,
        covariates: Tensor,
        values: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        pairs: Pairs | None = None,
        cache: Any = None,
        output_attentions: bool = False,
        *,
        is_causal: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the update of f at every covariate.

        Args:
            covariates: [B, R, C].
            values: [B, n, E], of all pairs so far; n is one less than the rows so far. Value j belongs to covariate j.
            position_embeddings: (cos, sin) of `rotary_angles`, each [B or 1, R, D/2]; None for none.
            pairs: of a text with padding, whose masked rows have no effect, or with several documents, which are kept
                apart; None if every row is real and holds one document.
            cache: of this layer's keys. `pending(name)` returns what waits for the next value, [B, H, 1, D], or None
                before the first row; `extend(pending, **new)` appends along the second-to-last axis, and returns
                everything so far, by name.
            output_attentions: also return the weights, computed densely.
            is_causal: if False, every covariate sees all n <= R pairs, those of the first n covariates, as in
                functional gradient descent on a fixed set of pairs (equations 16 and 17). Without cache and `pairs`.

        Returns:
            Update [B, R, E], zero in a row without a pair, and weights [B, H, rows, n] or None. The first row of a text
            never has a pair and is left out of `rows`: n without earlier rows in a cache, else R.
        """
        flags(CALL, output_attentions=output_attentions, is_causal=is_causal)
        self._check(covariates, values, is_causal, cache, pairs)
        check_positions(CALL, position_embeddings, covariates, self.head_dim)
        if pairs is not None:  # otherwise zero times a non-finite masked row would be NaN, also in gradients
            covariates = covariates.masked_fill(~pairs.real[..., None], 0)
            values = values.masked_fill(~pairs.visible[..., None], 0)
        query = in_heads(self.q_proj(covariates), self.head_dim, position_embeddings)
        key = in_heads(self.k_proj(covariates), self.head_dim, position_embeddings)
        first = 0
        if is_causal:
            pending = None if cache is None else cache.pending("key")
            key, waiting = pair_rows(key, pending, pairs)
            first = int(pending is None)
            value = self._values(values, key.shape[2])
            if cache is not None:
                projected = {"value": value} if self.variant == "wv" else {}  # the other variants are views
                cached = cache.extend({"key": waiting}, key=key, **projected)
                key = cached["key"]
                value = cached["value"] if projected else self._values(values, values.shape[1])
        else:
            key, value = key[:, :, : values.shape[1]], self._values(values, values.shape[1])
        out, weights = self._attend(query[:, :, first:], key, value, pairs, output_attentions, is_causal)
        update = self.o_proj(out.transpose(1, 2).flatten(2))
        return self.hook_out(F.pad(update, (0, 0, first, 0)) if first else update), weights

    def _check(self, covariates: Tensor, values: Tensor, is_causal: bool, cache: Any, pairs: Pairs | None) -> None:
        if pairs is not None:
            instance(CALL, "pairs", pairs, Pairs, "Pairs or None")
        if cache is not None and not all(callable(getattr(cache, n, None)) for n in ("pending", "extend")):
            raise refuse(CALL, "cache", cache, "a cache with pending and extend, or None")
        check_hidden(CALL, "covariates", covariates, self.covariate_size, self.k_proj)
        rows = covariates.shape[1]
        # torch.compile cannot trace the text of a symbolic length
        why = "" if torch.compiler.is_compiling() else f" for covariates {shape(covariates)}"
        axes = (covariates.shape[0], "n", self.value_size)
        tensor(CALL, "values", values, *axes, like=covariates, of="covariates", why=why)
        if values.dtype != covariates.dtype and not autocast(values.device.type):
            raise ArgumentError(f"{CALL}: values is {values.dtype}, but covariates {covariates.dtype}; convert one.")
        n = values.shape[1]
        if not is_causal and (cache is not None or pairs is not None or n > rows):
            most = f"at most as many values ({n}) as covariates ({rows})"
            raise ArgumentError(f"{CALL}: is_causal=False takes no cache and no padding, and {most}.")
        text = "pairs are of several documents, but a cache was given, which holds one per row; leave one of them out."
        require(cache is None or pairs is None or pairs.segments is None, CALL, text)
        if is_causal and cache is None and n != rows - 1:
            why = "value j follows covariate j, and the last covariate has no value yet"
            raise ArgumentError(f"{CALL}: {n} values for {rows} covariates, expected one less: {why}.")

    def _values(self, values: Tensor, last: int) -> Tensor:
        """Return what the heads average of the last values [B, n, E]: [B, H or 1, last, Dv]."""
        values = values[:, values.shape[1] - last :]
        if self.variant == "full":
            return values[:, None]
        if self.variant == "wv":
            values = self.v_proj(values)
        return values.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, pairs: Pairs | None, output_attentions: bool, is_causal: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the weighted sums of values [B, H, rows, Dv] and the weights [B, H, rows, n] or None."""
        mask = None if pairs is None else pairs.visible[:, None, None]
        # the query of row i is at the position of the pair that the row completes
        segments = None if pairs is None or pairs.segments is None else pairs.segments[:, 1:]
        how: dict[str, Any] = {"attn_mask": mask, "is_causal": is_causal, "segment_ids": segments}
        if self.average and not self.spec.weighting.normalised:  # 1 / the number of pairs that a row sees
            how["share"] = 1 / Seen(**how).counts(query, key).clamp_min(1).to(query.dtype)[..., None]
        # under autocast projections are narrower than embeddings
        value = value.to(query.dtype).expand(-1, self.num_heads, -1, -1)
        out, weights = observed_attention(self, query, key, value, output_attentions, **how)
        if weights is not None and mask is not None:  # a hook may have changed the weights of padding
            weights = weights.masked_fill(~mask, 0)
        return out, weights


def check_kernel(call: str, spec: Spec) -> Spec:
    """Return `spec`, after checking that it needs only queries and keys."""
    learned = spec.degree == 1 and spec.solver.name == "learned"
    require(not learned, call, f"spec: {spec} needs a probe, which the f update does not have; choose another solver.")
    return spec


def expected_embedding(f: Tensor, table: Tensor, chunk: int = 4096) -> Tensor:
    """Compute E(w|f) = W_e softmax(W_e^T f), the mean embedding under the prediction (ICLM paper, equation 8).

    Args:
        f: [..., E].
        table: embeddings [V, E].
        chunk: vocabulary entries processed at a time.

    Returns:
        [..., E], in the dtype of `f`; differentiable (once) in both.

    Raises:
        ArgumentError: shapes or dtypes that do not fit, or a `chunk` below 1.

    Cost: 4 E V operations per row forward and 8 E V backward, which recomputes the probabilities; memory for `chunk`
    values per row. Logits, their normaliser and the sum are at least in float32.
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
    """Return E(w|0), the mean of the rows of `table` [V, E], [E]; summed at least in float32."""
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
