"""Linear attention: specs whose weights are dot products of finite features, with a state of fixed size.

A spec with the linear kernel weighs key j by w_ij = q_i . k_j + bias = phi_i . psi_j. The state holds sums over keys
and values (kernel-selection paper, equations 13-16), and a query reads them (17-22):

    o_i = u_i                    unnormalised (22)
    o_i = u_i / Z_i              normalised (20, 21)

A signed Z_i near zero is kept at least GUARD sqrt(n_i Q_i) away from it, n_i the keys that query i sees, as in
`regard.attention`. With `log_decay` the sums fade (`decay`).

Legend: as in `feature_sums`. F counts the features of the similarity and one for the bias.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..checks import ArgumentError, within
from ..grammar import Spec, as_spec, presets
from ..grammar.kernels import least_reach
from ..grammar.weighting import GUARD, Plain
from ..pairwise.layout import Layout, any_layout, repeat_heads
from ..precision import full_precision, transformed
from . import feature_sums as forms
from .arguments import FAR, Call, Form, PerKey, Tokens, begin, log_decays, read_state, row_numbers, tokens
from .chunks import CHUNK, chunked
from .decay import decayed
from .feature_sums import Sums
from .states import Sizes, State, zeros

CALL = "linear_attention"


def finite_features(spec: Spec) -> bool:
    """Return whether the weights of the spec are dot products of finite features."""
    return spec.degree == 0 and isinstance(spec.weighting, Plain) and getattr(spec.kernel, "affine", False)


@dataclass(frozen=True)
class LinearState(State):
    """The state of linear attention, of fixed size.

    Attributes:
        values: sum psi v^T [B, Hkv, F, Dv], float32 or float64.
        keys: sum psi [B, Hkv, F]; its last entry counts the keys. With a decay per head or token, each counts as
            much as it has decayed.
        squares: sum psi psi^T [B, Hkv, F, F], for normalised signed weights; None elsewhere.
        non_finite: boolean [B, Hkv], whether a non-finite token was seen; every later row is then NaN.
        tokens: how many positions were seen, masked ones included.
    """

    OPTIONAL: ClassVar[dict[str, str]] = {"squares": "weights are signed and normalised"}

    values: Tensor
    keys: Tensor
    squares: Tensor | None
    non_finite: Tensor

    @classmethod
    def empty(
        cls,
        spec: Spec | str,
        batch: int,
        kv_heads: int,
        dim: int,
        value_dim: int | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> "LinearState":
        """Return the state before the first token, for keys of `dim` and values of `value_dim` (default `dim`); raise
        ArgumentError for a spec without finite features."""
        spec = _require_features(as_spec(spec))
        dtype = torch.promote_types(dtype, torch.float32)
        none = torch.zeros(batch, kv_heads, 0, dim, dtype=dtype, device=device)
        width = spec.similarity.features(none, none)[1].shape[-1] + 1
        sizes = cls.sizes(spec, width, dim if value_dim is None else value_dim)
        return cls(**zeros(batch, kv_heads, dtype, device, **sizes))

    @staticmethod
    def sizes(spec: Spec, width: int, value_dim: int) -> Sizes:
        """Return the size per head of every tensor but `non_finite`, for F = `width`."""
        squares = (width, width) if signed(spec) else None
        return {"values": (width, value_dim), "keys": (width,), "squares": squares}

    def read(
        self,
        query: Tensor,
        spec: Spec | str = "elu",
        *,
        scale: float | Tensor | None = None,
        params: Mapping[str, float | Tensor] | None = None,
    ) -> Tensor:
        """Return the output [B, H, Tq, Dv] of queries [B, H, Tq, D], in their dtype; `spec` is the one that wrote the
        state, `scale` and `params` are those of `linear_attention`."""
        return read_state(linear_attention, query, self, spec, form="parallel", scale=scale, params=params)


def bias_of(spec: Spec, numbers: Mapping[str, float | Tensor]) -> float | Tensor:
    """Return the bias of the call, or that of the spec."""
    return numbers.get("bias", spec.weighting.bias)  # type: ignore[attr-defined]


def signed(spec: Spec) -> bool:
    """Return whether the weights are divided by a sum that may vanish, which needs the guard and its squares."""
    return bool(spec.weighting.normalised and not spec.weighting.nonnegative)


@any_layout
def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, spec: Spec | str = "elu", *, log_decay: float | Tensor | None = None,
    state: LinearState | None = None, form: Form = "chunked", chunk_size: int | None = None,
    attn_mask: Tensor | None = None, is_causal: bool = True, exclude_self: bool = False,
    segment_ids: Tensor | None = None, scale: float | Tensor | None = None,
    params: Mapping[str, float | Tensor] | None = None, layout: Layout = "bhtd",
) -> tuple[Tensor, LinearState]:  # fmt: skip
    """Compute attention by sums over keys, in time linear in the length.

    Args:
        query, key, value: [B, H, Tq, D], [B, Hkv, Tk, D] and [B, Hkv, Tk, Dv]; H is a multiple of Hkv.
        spec: a spec with the linear kernel, or its text: linear, cosine, shift-cosine, relu, relu2, elu, ...
        log_decay: g <= 0; the weight of the pair (i, j) is multiplied, inside the dot product of the features, by
            exp(sum of g over j < l <= i). A number, per key head [Hkv] (RetNet), per token [B, Hkv, Tk] (Mamba-2) or
            per feature [B, Hkv, Tk, F] (GLA); -inf in a tensor clears the state. Not for signed weights that are
            normalised, and per feature not with a bias.
        state: the state that the previous call returned; None at the beginning. Prefill, chunks and single steps agree.
        form: "chunked" (all pairs inside chunks, sums between them), "parallel" (all pairs) or "recurrent" (one key at
            a time).
        chunk_size: positions of a chunk; default `chunks.CHUNK`.
        attn_mask: boolean over the keys, [B, Tk] or [B, 1, 1, Tk], False for padding, which changes nothing.
        is_causal: query i sees the state and the keys j <= i; Tq must equal Tk. Otherwise every query sees the
            state and all keys.
        exclude_self: j < i; implies `is_causal`. Query i reads the state before key i and before its decay g_i.
        segment_ids: integers [B or 1, T] of packed sequences, T = Tq = Tk. A new document begins wherever the id
            changes, padding included, and each is computed as if it were alone. States hold one entry per document on
            the batch axis, ordered row by row (`tokens` is that of the longest).
        scale, params: as in `regard.attention`.
        layout: "bthd" for tensors with tokens before heads, as in `regard.attention`; also in `log_decay`.

    Returns:
        (output [B, H, Tq, Dv] in the dtype of `query`, the state after all keys). Rows without a visible key are 0;
        rows that see a non-finite number are NaN, also in later calls.

    Raises:
        ArgumentError: shapes or dtypes that do not fit, a spec without finite features, or a decay that it cannot have.

    Precision: float32 (float64 for float64 inputs) for features, products and sums. Derivatives: "chunked" once, in
    reverse mode (under forward mode and torch.func transforms it runs as "parallel"); the other forms, and all with
    log_decay, to any order.
    Cost: O(T F Dv) time; "chunked" adds O(T chunk_size) pairs and O(T) memory, forward and backward; "parallel" O(T^2)
    both; the state is O(F Dv) a head, with squares O(F^2) more. Documents of similar lengths share a padded batch: at
    most T / 3 positions more, in O(log T) batches. Their ids are read on the host, which synchronises a GPU, and
    torch.compile leaves packed calls out of its graphs.
    """
    spec = _require_features(as_spec(spec, CALL))
    call = begin(CALL, query, key, value, attn_mask, form, chunk_size, is_causal, exclude_self, segment_ids)
    scale, bias = _numbers(query, spec, scale, params, call.dtype)
    with full_precision(query.device.type):
        qkv = tokens(call, query, key, value)
        q, k = spec.similarity.features(qkv.query, qkv.key)
        qkv = qkv._replace(query=q * (scale[..., None] if isinstance(scale, Tensor) else scale), key=k)
        state = call.state(state, LinearState, key, LinearState.sizes(spec, k.shape[3] + 1, value.shape[3]))
        fade = log_decays(CALL, log_decay, key, k.shape[-1], call.dtype)
        if fade is not None:
            _require_fading(spec, fade.value, bias)
            qkv = qkv._replace(bad_key=qkv.bad_key | fade.bad)
    out, after = call.run(_read, (qkv, bias, fade), state, spec=spec)
    return out.to(query.dtype), after


def _read(
    inputs: tuple[Tokens, Any, PerKey | None], mask: Tensor | None, state: LinearState, call: Call, spec: Spec
) -> tuple[Tensor, LinearState]:
    (qkv, bias, fade), (_, k, v, *_) = inputs, inputs[0]
    visible, held = call.visible(qkv, mask), state.keys[..., -1].detach()
    counts = visible.counts(k.device) + repeat_heads(held[..., None], qkv.query.shape[1])
    rows, non_finite = qkv.non_finite(visible, held > 0, state.non_finite)
    start, squares = torch.cat([state.values, state.keys[..., None]], -1), state.squares

    def sum_keys(q: Tensor, bias: float | Tensor) -> Sums:
        if fade is not None:
            g = fade.kept(mask).value
            if g.shape[-1] > 1:  # the bias is zero; its feature counts the keys and does not fade
                g = torch.nn.functional.pad(g, (0, 1))
            rows, after = decayed(*forms.augment(q, k, v, bias, mask), g, start, **call.how)
            return Sums(rows[..., :-1], rows[..., -1], None, after, None)
        form, order = call.form, (call.causal, -int(call.strict))
        if form == "chunked" and q.shape[2] == k.shape[2] == 1:
            form = "recurrent"
        elif form == "chunked" and transformed():  # `chunked` has no forward derivative
            form = "parallel"
        if form == "chunked":
            return chunked(q, k, v, bias, mask, start, squares, *order, min(call.chunk or CHUNK, FAR))
        make = forms.parallel if form == "parallel" else forms.recurrent
        return make(*forms.augment(q, k, v, bias, mask), start, squares, *order)

    out, summed = estimate(qkv.query, bias, counts, spec, sum_keys)
    assert summed.sums is not None
    sums, seen = summed.sums, state.tokens + k.shape[2]
    after = LinearState(sums[..., :-1], sums[..., -1], summed.squares, non_finite, tokens=seen)
    return torch.where(rows[..., None], torch.nan, out), after


def estimate(
    q: Tensor, bias: float | Tensor, counts: Tensor, spec: Spec, sum_keys: Callable[..., Sums]
) -> tuple[Tensor, Sums]:
    """Return (output [B, H, Tq, Dv], the sums that `sum_keys` made for q and bias). q holds features with the scale,
    bias is a number or [B, H, Tq], `counts` how many keys each query sees."""
    if not signed(spec):
        sums = sum_keys(q, bias)
        if not spec.weighting.normalised:
            return sums.values, sums
        mass = torch.where(sums.mass == 0, 1, sums.mass)
        return _quotient(sums.values, mass, mass.abs() < least_reach(q.dtype)), sums
    # Rows are scaled to size one, so that the squares of their scores stay in range; the quotient does not change.
    bias = bias if isinstance(bias, Tensor) else q.new_full(q.shape[:3], bias)
    unit = torch.maximum(q.detach().abs().amax(-1), bias.detach().abs())
    unit = torch.where(unit > 0, unit, 1)
    sums = sum_keys(q / unit[..., None], bias / unit)
    assert sums.power is not None
    some = sums.power > 0
    size = torch.where(some, (counts * torch.where(some, sums.power, 1)).sqrt(), 0)
    mass = sums.mass
    mass = torch.where(mass.abs() < GUARD * size, torch.where(mass < 0, -size, size) * GUARD, mass)
    mass = torch.where(some, mass, 1 / unit)  # weights of zero, divided by one
    small = ((mass * unit).abs() < least_reach(q.dtype)) | (some & (sums.power < torch.finfo(q.dtype).tiny))
    return _quotient(sums.values, mass, small), sums


def _quotient(values: Tensor, mass: Tensor, small: Tensor) -> Tensor:
    """Return values / mass, without gradient in rows whose sum of weights is so `small` that gradients divided by it
    would overflow."""
    small, mass = small[..., None], mass[..., None]
    fixed = values.detach() / mass.detach()
    return torch.where(small, fixed, torch.where(small, 0, values) / torch.where(small, 1, mass))


def _require_fading(spec: Spec, g: Tensor, bias: float | Tensor) -> None:
    """Raise ArgumentError if the spec cannot have a decay g [B, Hkv, T, 1 or F]."""
    if signed(spec):
        why = "divides signed weights by their sum, and the guard against sums near zero does not fade"
        hint = "Use log_decay with unnormalised weights (linear, cosine) or nonnegative features (elu, relu)"
        raise ArgumentError(f"{CALL}: log_decay: {spec} {why}. {hint}.")
    if g.shape[-1] > 1 and (isinstance(bias, Tensor) or bias != 0):
        hint = "give a log_decay per token [B, Hkv, T], or a spec without bias such as linear, cosine or elu"
        raise ArgumentError(f"{CALL}: log_decay: {spec} has a bias, which belongs to no feature; {hint}.")


def _numbers(
    query: Tensor, spec: Spec, scale: float | Tensor | None, params: Any, dtype: torch.dtype
) -> tuple[float | Tensor, float | Tensor]:
    """Return scale and bias, as numbers or [B, H, Tq]."""
    scale, given = row_numbers(CALL, query, scale, params, dtype)
    scale, numbers = within(CALL, None, spec.resolve, query.shape[3], scale, given)
    return scale, bias_of(spec, numbers)


def _require_features(spec: Spec) -> Spec:
    if not finite_features(spec):
        able = ", ".join(name for name, preset in presets().items() if finite_features(preset))
        why = f"which a state of fixed size needs; those that have: {able}, and every linear*fixed spec"
        raise ArgumentError(f"{CALL}: the spec {spec} has no finite features, {why}. Use regard.attention for {spec}.")
    return spec
