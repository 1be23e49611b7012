"""Energies of associative memories, which a read never increases.

A read replaces the query by q' = sum_j p_j(q) k_j, in a memory whose values are its keys. Three families of specs have
an energy:

* Weights that are the gradient of a convex function f of the scores, p = grad f(z), with the dot product or the
  Euclidean similarity. With g(q) = f(z(q)) / scale (plus |q|^2 / 2 for the Euclidean one, which makes g convex) a read
  is q' = grad g(q), and E(q) = |q|^2 / 2 - g(q) falls by convexity: E(q) - E(q') >= |q' - q|^2 / 2. For softmax, f is
  log sum exp z (Ramsauer et al. 2021), for alpha-entmax the conjugate of Tsallis' entropy (Hopfield-Fenchel-Young,
  Santos et al. 2024 and 2025; cited by the sparse-attention paper, section 3.1), for top-k softmax and the mean of the
  k nearest a maximum over subsets of such functions.
* Unnormalised sums with the dot product: f = sum_j Phi(z_j), Phi' = K. With K linear this is the classical associator
  (generalized-memory paper, equations 9 to 12b), with K a rectified polynomial the dense associative memory of Krotov
  and Hopfield (2016).
* Normalised kernels of fixed bandwidth with the Euclidean similarity: mean shift, which increases sum_j Phi(z_j), a
  density estimate with the next smoother kernel (Cheng 1995). E = -sum_j Phi(z_j) / scale falls by at least
  sum_j K_j |q' - q|^2 / 2.

Constants that depend only on the keys are left out, so energies may be negative.

Shapes: z [B, H, Tq, n], -inf at masked pairs; q [B, H, Tq, D]; k [B, H, n, D]; energies [B, H, Tq].
"""

from functools import singledispatch
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ...checks import ArgumentError
from ...grammar import Spec, presets_registry
from ...grammar.kernels import ClippedGeometric, Gaussian, Linear, Number, Params, Polynomial, Uniform
from ...precision import full_precision
from ...registry import Registry

CALL = "AssociativeMemory.energy"

energies: "Registry[type[Energy]]" = Registry("energy", "regard.energies")


class Energy(Protocol):
    """A family of specs with an energy."""

    additive: ClassVar[bool] = True  # whether the energy of a sum of two reads is the sum of their energies

    @staticmethod
    def covers(spec: Spec) -> bool:
        """Return whether `spec` belongs to the family."""

    @staticmethod
    def potential(z: Tensor, spec: Spec, params: Params) -> Tensor:
        """Return f [B, H, Tq] of scores z; any finite number for rows without a visible key."""


def family(spec: Spec) -> type[Energy] | None:
    return next((known for _, known in energies.items() if known.covers(spec)), None)


def require_energy(spec: Spec, call: str) -> type[Energy]:
    """Return the family of `spec`, or raise an error that lists the presets that have one."""
    known = family(spec)
    if known is None:
        able = ", ".join(name for name, preset in presets_registry.items() if family(preset) is not None)
        more = "unnormalised sums on the dot product and fixed polynomial kernels on the euclidean similarity"
        raise ArgumentError(f"{call}: no energy is known for {spec}; presets that have one: {able}; so do {more}.")
    return known


def well(spec: Spec, query: Tensor, key: Tensor, mask: Tensor | None, scale: Number | None, params: Params) -> Tensor:
    """Return g(q) [B, H, Tq] of one memory: E(q) = |q|^2 / 2 - sum of g over the memories whose reads are added."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    with full_precision(query.device.type):
        query, key = query.to(dtype), key.to(dtype)
        if mask is not None:
            key = torch.where(mask[..., None], key, 0)
        factor, numbers = spec.resolve(query.shape[-1], scale, params)
        rows = {name: _row(number, dtype) for name, number in numbers.items()}
        beta = _row(factor, dtype)
        q, k = spec.similarity.features(query, key)
        z = (q * beta) @ k.transpose(-1, -2)
        if mask is not None:
            z = torch.where(mask[..., None, :], z, -torch.inf)
        if z.shape[-1] == 0:
            return z.new_zeros(z.shape[:-1])
        g = require_energy(spec, CALL).potential(z, spec, rows) / (beta[..., 0] if isinstance(beta, Tensor) else beta)
        if spec.similarity.name == "euclidean":
            g = g + query.square().sum(-1) / 2
        return torch.where((z != -torch.inf).any(-1), g, 0)


def _row(number: Number, dtype: torch.dtype) -> Number:
    """Return a tensor [B, H, Tq] as [B, H, Tq, 1], and a number as it is."""
    return number.to(dtype)[..., None] if isinstance(number, Tensor) else number


def _weights(z: Tensor, spec: Spec, params: Params) -> Tensor:
    return spec.weighting.weights(z, spec.weighting.fit(z, params), params)


def _split(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best score of each row, without gradient, and the scores less it, 0 at masked pairs. In gradients,
    large scores would leave no digits to their differences."""
    hidden = z == -torch.inf
    top = torch.where(hidden.all(-1), 0, z.detach().amax(-1))
    return top, torch.where(hidden, 0, z - top[..., None])


def _straight(spec: Spec) -> bool:
    """Return whether scores are affine in the query, up to a term that is equal for all keys."""
    return spec.degree == 0 and spec.similarity.name in ("dot", "euclidean")


def _hard(spec: Spec) -> bool:
    return spec.bandwidth.name == "nearest" and spec.bandwidth.gradient != "soft"


@energies.register("exponential")
class _Exponential(Energy):
    """f = log sum exp z, over the keys that are kept: softmax and top-k softmax."""

    @staticmethod
    def covers(spec: Spec) -> bool:
        reach = spec.bandwidth.name == "fixed" or _hard(spec)
        return _straight(spec) and isinstance(spec.kernel, Gaussian) and bool(spec.normalise) and reach

    @staticmethod
    def potential(z: Tensor, spec: Spec, params: Params) -> Tensor:
        with torch.no_grad():
            kept = ~(_weights(z, spec, params) == 0)
        kept = kept | ~kept.any(-1, keepdim=True)  # an empty row must not become log 0
        top, below = _split(z)
        return top + torch.logsumexp(torch.where(kept, below, -torch.inf), -1)


@energies.register("tsallis")
class _Tsallis(Energy):
    """f = max over p of p . z + H(p), H = sum (p - p^alpha) / (alpha (alpha - 1)): alpha-entmax, alpha = 1 + 1/r."""

    @staticmethod
    def covers(spec: Spec) -> bool:
        return _straight(spec) and isinstance(spec.kernel, Polynomial) and spec.bandwidth.name == "adaptive"

    @staticmethod
    def potential(z: Tensor, spec: Spec, params: Params) -> Tensor:
        r = spec.bandwidth.kernel_params(params).get("r", spec.kernel.r)
        p = _weights(z, spec, params)
        log = torch.where(p > 0, p, 1).log()
        # (p - p^alpha) / (alpha (alpha - 1)) without the cancellation that alpha near 1 brings
        entropy = -(p * torch.expm1(log / r)).sum(-1, keepdim=True) * (r * r / (r + 1))
        top, below = _split(z)
        return top + (p * below).sum(-1) + entropy[..., 0]


@energies.register("subset-mean")
class _SubsetMean(Energy):
    """f = the mean of the k best scores: the mean of the k nearest."""

    @staticmethod
    def covers(spec: Spec) -> bool:
        return _straight(spec) and isinstance(spec.kernel, Uniform) and _hard(spec)

    @staticmethod
    def potential(z: Tensor, spec: Spec, params: Params) -> Tensor:
        return (_weights(z.detach(), spec, params).detach() * torch.where(z == -torch.inf, 0, z)).sum(-1)


@energies.register("sum")
class _Sum(Energy):
    """f = sum Phi(z + bias), Phi' = K: sums that are not normalised, on the dot product."""

    @staticmethod
    def covers(spec: Spec) -> bool:
        dot = _straight(spec) and spec.similarity.name == "dot"
        return dot and not spec.normalise and has_integral(spec.kernel)

    @staticmethod
    def potential(z: Tensor, spec: Spec, params: Params) -> Tensor:
        hidden = z == -torch.inf
        bias = params.get("bias", spec.bandwidth.bias or 0.0)
        integrals = integral(spec.kernel, torch.where(hidden, 0, z) + bias, spec.bandwidth.kernel_params(params))
        return torch.where(hidden, 0, integrals).sum(-1)


@energies.register("mean-shift")
class _MeanShift(_Sum):
    """f = sum Phi(z + bias), Phi' = K: normalised sparse kernels under the fixed rule, on the Euclidean similarity."""

    additive = False

    @staticmethod
    def covers(spec: Spec) -> bool:
        euclidean = _straight(spec) and spec.similarity.name == "euclidean"
        fixed = spec.bandwidth.name == "fixed" and bool(spec.normalise)
        return euclidean and fixed and spec.kernel.compact and has_integral(spec.kernel)


@singledispatch
def integral(kernel: Any, a: Tensor, params: Params) -> Tensor:
    """Return Phi(a), the integral of K, for kernels that do not fall as the score rises. Register one with a kernel's
    class; a kernel without one (`has_integral`) is an ArgumentError."""
    hint = f"@regard.memory.associative.energy.integral.register for {type(kernel).__name__}"
    raise ArgumentError(f"energy: no integral of {kernel!r} is known; give one with {hint}.")


def has_integral(kernel: Any) -> bool:
    """Return whether `integral` supports the kernel."""
    return integral.dispatch(type(kernel)) is not integral.dispatch(object)


@integral.register
def _(kernel: Gaussian, a: Tensor, params: Params) -> Tensor:
    return torch.exp(a)


@integral.register
def _(kernel: Polynomial, a: Tensor, params: Params) -> Tensor:
    r = params.get("r", kernel.r)
    inside = a > 0
    return torch.where(inside, torch.where(inside, a, 1) ** (r + 1), 0) / (r + 1)


@integral.register
def _(kernel: Uniform, a: Tensor, params: Params) -> Tensor:
    return a.relu()


@integral.register
def _(kernel: Linear, a: Tensor, params: Params) -> Tensor:
    return a.square() / 2


@integral.register
def _(kernel: ClippedGeometric, a: Tensor, params: Params) -> Tensor:
    edge, one = kernel.limit, 1 + kernel.eps
    return -edge * torch.log(one - a.clamp(max=edge) / edge) + (a - edge).relu() / kernel.eps
