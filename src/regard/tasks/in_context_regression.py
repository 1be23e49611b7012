"""In-context regression on piecewise linear data: pairs in a prompt, then queries without an answer.

Local Linear Attention paper, section 5 (its Figure 4a). The pairs are those of `ConeRegression`, with maps of variance
1/d, so that targets have variance near 1; they come shuffled, and after them queries from the same cones. A position
holds `[x; y]` for a pair and `[x; 0]` for a query; the model is asked for y at the queries. The paper does not say
whether a query sees earlier queries; `query_mask` keeps them apart. Models are trained with noise 0.1, tested without.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from .base import Named, Settings, Stackable, check_sizes, on_cpu, tasks
from .cone_regression import ConeRegression


@dataclass(frozen=True)
class RegressionPrompts:
    """One prompt, or B of them with a batch axis before all others.

    Attributes:
        inputs: float32 [..., L + L', 2 d]: pairs, then queries.
        targets: float32 [..., L', d].
        segments: int64 [..., L + L'], the cone that each position belongs to.
        maps: float32 [..., n, d, d], of every cone.
    """

    inputs: Tensor
    targets: Tensor
    segments: Tensor
    maps: Tensor


@tasks.register("in-context-regression")
@dataclass(frozen=True)
class InContextRegression(Named, Stackable[RegressionPrompts]):
    """Linear maps to be inferred from pairs, one for every cone.

    Args:
        dim: d, channels of inputs and of targets.
        length: L, pairs of a prompt.
        segment: pairs of a cone; `length / segment` is a power of two, at most 2^dim.
        queries: L'.
        noise: the standard deviation of every coordinate of a target of a pair; queries have none.
    """

    settings: ClassVar[Settings] = {
        "quick": {"dim": 4, "length": 32, "segment": 8, "queries": 8},
        **{f"paper-{n}": {"length": n, "segment": n // 4} for n in (64, 128, 256, 512)},
    }

    dim: int = 32
    length: int = 64
    segment: int = 16
    queries: int = 16
    noise: float = 0.1

    def __post_init__(self) -> None:
        check_sizes(self, queries=1)
        _ = self.cones  # checks the other numbers

    @cached_property
    def cones(self) -> ConeRegression:
        """Return the task that draws the pairs."""
        return ConeRegression(self.dim, self.length, self.segment, self.noise)

    @on_cpu()
    def example(self, seed: int, index: int) -> RegressionPrompts:
        """Return example `index` of the stream `seed`, without a batch axis."""
        made = self.cones.example(seed, index)
        d, size = self.dim, self.dim**0.5
        draw = torch.Generator().manual_seed(int(made.maps.view(torch.int32)[0, 0, 0]) & 0x7FFFFFFF)
        noise = made.values - (made.maps[:, None] @ made.keys.view(-1, self.segment, d, 1)).view(-1, d)
        clean = (made.values - noise) / size
        order = torch.randperm(self.length, generator=draw)
        which = torch.arange(self.length) // self.segment
        asked = torch.randint(self.cones.segments, (self.queries,), generator=draw)
        signs = self.cones.signs()[asked]
        x = torch.randn(self.queries, d, generator=draw, dtype=torch.float32)
        x = torch.cat([x[:, : signs.shape[1]].abs() * signs, x[:, signs.shape[1] :]], -1)
        pairs = torch.cat([made.keys, clean + noise], -1)[order]
        inputs = torch.cat([pairs, torch.cat([x, torch.zeros_like(x)], -1)])
        maps = made.maps / size
        targets = (maps[asked] @ x[..., None])[..., 0]
        return RegressionPrompts(inputs, targets, torch.cat([which[order], asked]), maps)

    def query_mask(self) -> Tensor:
        """Return which positions may see which, boolean [L + L', L + L']: all see pairs before them, and themselves."""
        size = self.length + self.queries
        mask = torch.ones(size, size, dtype=torch.bool).tril()
        mask[:, self.length :] = False
        return mask | torch.eye(size, dtype=torch.bool)

    def error(self, prediction: Tensor, example: RegressionPrompts) -> Tensor:
        """Return the mean square error at every query, [..., L', d] -> float64 [..., L']."""
        return (prediction.double() - example.targets.double()).square().mean(-1)

    def oracle(self, example: RegressionPrompts) -> Tensor:
        """Return A_c x at every query, [..., L', d]: the prediction of a solver that knows the maps."""
        which = example.segments[..., self.length :, None, None].expand(*example.targets.shape, self.dim)
        x = example.inputs[..., self.length :, : self.dim]
        return (example.maps.gather(-3, which) @ x[..., None])[..., 0]

    def ridge(self, example: RegressionPrompts, *, by_segment: bool) -> Tensor:
        """Return the ridge regression on the prompt's pairs, evaluated at every query, float64 [..., L', d].

        The ridge is the squared noise times d, at least 1e-8: the best for maps of variance 1/d.

        Args:
            by_segment: use only the pairs of the query's cone, which a model has to find; False: use all pairs.
        """
        x, y = example.inputs.double().split(self.dim, -1)
        pairs, asked = x[..., : self.length, :], x[..., self.length :, :]
        same_segment = example.segments[..., self.length :, None] == example.segments[..., None, : self.length]
        weights = same_segment.double() if by_segment else torch.ones_like(same_segment, dtype=torch.float64)
        eye = torch.eye(self.dim, dtype=torch.float64) * max(self.dim * self.noise**2, 1e-8)
        gram = torch.einsum("...qn,...ni,...nj->...qij", weights, pairs, pairs) + eye
        right = torch.einsum("...qn,...ni,...nj->...qij", weights, pairs, y[..., : self.length, :])
        return (torch.linalg.solve(gram, right).mT @ asked[..., None])[..., 0]

    def trivial(self, example: RegressionPrompts) -> Tensor:
        """Return zeros [..., L', d], the mean of the targets."""
        return torch.zeros_like(example.targets)
