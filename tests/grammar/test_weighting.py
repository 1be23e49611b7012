"""The protocol every estimator and fast form rests on: blocks of keys, statistics, flags, the derivative's parts."""

import pytest
import torch
from contracts.cases import SPECS
from torch import Tensor

from regard.grammar import Spec

TEXTS = sorted(
    {"*".join(s.parts()) for s in SPECS.values() if not s.degree and (s.similarity.name == "dot" or "geo" in str(s))}
    | {"gaussian*fixed*unnormalised", "polynomial(r=10)*adaptive", "uniform*nearest(k=3,gradient=soft,temperature=0.4)"}
)
"""The specs that the contracts run over and whose scores may be negative, written out in parts, and a few more."""
# Weights that change when every score of a row grows by the same amount.
MOVED_BY_A_SHIFT = ("fixed", "linear", "geometric")


def rows() -> Tensor:
    """Scores [2, 6, 9] below 1, with ties, hidden keys, rows without a key and rows with one."""
    g = torch.Generator().manual_seed(0)
    z = torch.randn(2, 6, 9, generator=g, dtype=torch.float64).clamp(max=0.95) - 0.2
    z = torch.where(torch.rand(2, 6, 9, generator=g) < 0.2, -torch.inf, z)
    z[0, 0] = -torch.inf
    z[0, 1] = 0.25
    z[0, 2, 1:] = -torch.inf
    z[0, 2, 0] = -0.5
    z[0, 3, 4:] = z[0, 3, 3]
    z[1, 0] = torch.arange(9.0) / -10
    return z


@pytest.mark.parametrize("text", TEXTS)
@torch.no_grad()
def test_flags_say_what_the_weights_do(text: str) -> None:
    z = rows()
    weighting = Spec.parse(text).weighting
    stats = weighting.fit(z, {})
    p = weighting.weights(z, stats, {})
    assert not weighting.nonnegative or bool((p >= 0).all())
    total = p.sum(-1)
    seen = (z > -torch.inf).any(-1)
    if weighting.normalised and "empty=zero" not in text and weighting.nonnegative:
        torch.testing.assert_close(total, seen.double(), rtol=0, atol=1e-14)
    assert bool((p[z == -torch.inf] == 0).all())
    assert torch.equal(stats.empty[..., 0], ~seen)
    moved = z + 0.04  # stays below 1
    shifted = weighting.weights(moved, weighting.fit(moved, {}), {})
    same = torch.allclose(shifted, p, rtol=0, atol=1e-13)
    assert weighting.shift_invariant <= same
    ranked_without_edge = text in ("gaussian*fixed",)  # softmax is invariant though its rule is not
    assert same == (not any(word in text for word in MOVED_BY_A_SHIFT) or ranked_without_edge)
