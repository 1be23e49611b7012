"""Piecewise linear regression with one cone of keys per piece: the data of "test-time regression".

Local Linear Attention paper, section 4 and appendix F.1. A sequence of L pairs is cut into n = L / S segments of S.
Segment c has a cone, given by the signs of the first m = log2 n coordinates, and a linear map A_c; inside the segment

    k_i = (s_c1 |z_1|, ..., s_cm |z_m|, z_m+1, ..., z_d),   z ~ N(0, I)
    v_i = A_c k_i + e_i,   A_c and e_i / delta normal, of mean 0 and variance 1

Equation 52 also takes absolute values of the coordinates after the m-th, unlike equation 51 and the stated distribution
(a Gaussian conditioned to lie in the cone); here those coordinates are normal. The signs are the bits of c = 1, ..., n,
the least significant first. Queries are keys plus `query_noise` times normal vectors; targets follow by the map A_c.

Legend: B examples, L positions, S positions of a segment, n = L / S segments, d channels of keys and of values.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..checks import ArgumentError, number
from .base import Stackable, check_sizes, generator, on_cpu, tasks

CALL = "ConeRegression"
LEAST_RIDGE = 1e-8
"""Ridge of the oracle without noise."""


@dataclass(frozen=True)
class ConeExamples:
    """One example, or B of them with a batch axis before all others.

    Attributes:
        keys: [..., L, d]; values [..., L, d].
        queries: [..., L, d]; the keys if there is no query noise.
        targets: [..., L, d], the true outputs at the queries; the values if there is no query noise.
        maps: [..., n, d, d], A_c of every segment.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    targets: Tensor
    maps: Tensor


@tasks.register("cone-regression")
@dataclass(frozen=True)
class ConeRegression(Stackable[ConeExamples]):
    """Regression of values that are linear in the keys, with one linear map and one cone of keys per segment.

    Args:
        dim: channels of keys and values.
        length: positions of a sequence.
        segment: positions of a segment; `length / segment` is a power of two, at most 2^dim.
        noise: delta, the standard deviation of every coordinate of a value around A_c k.
        query_noise: the standard deviation of every coordinate of a query around its key.
    """

    dim: int = 64
    length: int = 1024
    segment: int = 64
    noise: float = 0.1
    query_noise: float = 0.0

    def __post_init__(self) -> None:
        check_sizes(self, dim=1, length=1, segment=1)
        for name in ("noise", "query_noise"):
            number(CALL, name, getattr(self, name), low=0.0)
        count, rest = divmod(self.length, self.segment)
        if rest or count & (count - 1) or count.bit_length() - 1 > self.dim:
            sizes = f"length {self.length} and segment {self.segment} make {self.length / self.segment:g} segments"
            raise ArgumentError(f"{CALL}: {sizes}, expected a power of two, at most 2^dim = 2^{self.dim}.")

    @property
    def segments(self) -> int:
        """Return n, the number of segments."""
        return self.length // self.segment

    def signs(self) -> Tensor:
        """Return the cone of every segment, [n, m] of +1 and -1: the sign of coordinate j is bit j of c = 1, ..., n."""
        bits = self.segments.bit_length() - 1
        number = torch.arange(1, self.segments + 1)[:, None]
        return (((number >> torch.arange(bits)) & 1) * 2 - 1).float()

    @on_cpu()
    def example(self, seed: int, index: int) -> ConeExamples:
        """Return one example, float32, without a batch axis; its keys and maps do not depend on the noise."""
        draw = generator(f"{CALL}.example", "cone-regression", seed, index)
        normal = lambda rows: torch.randn(self.segments, rows, self.dim, generator=draw, dtype=torch.float32)  # noqa: E731
        keys, maps = normal(self.segment), normal(self.dim)
        noise, moved = normal(self.segment) * self.noise, normal(self.segment) * self.query_noise
        signs = self.signs()
        coned = keys[..., : signs.shape[1]].abs() * signs[:, None]
        keys = torch.cat([coned, keys[..., signs.shape[1] :]], -1)
        values = keys @ maps.mT + noise
        flat = lambda x: x.flatten(0, 1)  # noqa: E731
        return ConeExamples(flat(keys), flat(values), flat(keys + moved), flat(values + moved @ maps.mT), maps)

    def error(self, prediction: Tensor, example: ConeExamples) -> Tensor:
        """Return |prediction - target|^2 at every position, float64 [..., L] (the paper's l_i)."""
        return (prediction.double() - example.targets.double()).square().sum(-1)

    def oracle(self, example: ConeExamples, *, exclude_self: bool = False) -> Tensor:
        """Return the least-squares prediction from the visible pairs of the query's segment, [..., L, d].

        It knows the segments and the noise, but not the maps. Its ridge is the squared noise, at least LEAST_RIDGE, so
        that it is the posterior mean of A_c k, the best prediction from those pairs.

        Args:
            exclude_self: leave out the pair at the query's own position.

        Cost: O(L d^2) time, in float64; O(n d^2) memory an example.
        """
        shape = (*example.keys.shape[:-2], self.segments, self.segment, self.dim)
        k, v, q = (x.double().reshape(shape) for x in (example.keys, example.values, example.queries))
        eye = torch.eye(self.dim, dtype=k.dtype, device=k.device)
        spread = (eye / max(self.noise**2, LEAST_RIDGE)).expand(*shape[:-2], self.dim, self.dim)
        fitted = torch.zeros_like(spread)
        predictions = []
        for i in range(self.segment):  # recursive least squares, of all segments at once
            before = fitted
            gain = (spread @ k[..., i, :, None])[..., 0]
            gain = gain / (1 + (k[..., i, :] * gain).sum(-1, keepdim=True))
            residual = v[..., i, :] - (fitted @ k[..., i, :, None])[..., 0]
            fitted = fitted + residual[..., None] * gain[..., None, :]
            spread = spread - gain[..., None] * (k[..., i, None, :] @ spread)
            predictions.append(((before if exclude_self else fitted) @ q[..., i, :, None])[..., 0])
        return torch.stack(predictions, -2).reshape(example.keys.shape)
