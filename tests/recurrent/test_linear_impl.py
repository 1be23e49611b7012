"""impl="linear": which calls it takes, and the sums over many chunks against all pairs."""

from typing import Any

import pytest
import torch
from recurrences import attend
from torch import Tensor

import regard
from regard.checks import ArgumentError

SHAPE = (2, 4, 128, 16)
FINITE = ("linear", "cosine", "shift-cosine", "relu", "relu2", "elu")


def test_auto_takes_it_for_finite_features_and_for_nothing_else() -> None:
    for name, spec in regard.presets().items():
        assert (regard.explain(spec, SHAPE, is_causal=True).chosen == "linear") == (name in FINITE)
    for spec in ("linear*fixed*normalised", "linear*fixed*euclidean", "linear*fixed(bias=2)*cosine*unnormalised"):
        for how in ({}, {"mask": "keys"}, {"exclude_self": True}, {"is_causal": True, "query_offset": 3}):
            assert regard.explain(spec, SHAPE, **how).chosen == "linear"


@pytest.mark.parametrize(
    ("spec", "how", "why"),
    [
        ("softmax", {}, "finite features"),
        ("local-linear", {}, "finite features"),
        ("linear*fixed*elu*linear(ridge=0.1)", {}, "finite features"),
        ("elu", {"is_causal": True, "window": 4}, "has no window"),
        ("elu", {"mask": "pairs"}, "depend on the key alone"),
        ("elu", {"return_diagnostics": True}, "has no row statistics"),
    ],
)
def test_reasons(spec: str, how: dict[str, Any], why: str) -> None:
    assert any(name == "linear" and why in str(said) for name, said, _ in regard.explain(spec, SHAPE, **how).rows)


def test_offsets_that_differ_are_refused_in_causal_order_alone() -> None:
    q, k, v = draw(4, 6)
    call: dict[str, Any] = {"query_offset": torch.tensor([0, 2]), "enable_gqa": True}
    with pytest.raises(ArgumentError, match="needs one query_offset for all sequences"):
        regard.attention(q, k, v, "elu", impl="linear", is_causal=True, **call)
    out = regard.attention(q, k, v, "elu", impl="linear", **call)
    expected = attend("elu", {"q": q, "k": k, "v": v}, torch.ones(4, 6, dtype=torch.bool))
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)


def test_costs_are_linear_and_say_when_pairs_are_cheaper() -> None:
    def cost(queries: int, keys: int, name: str) -> Any:
        rows = regard.explain("elu", (1, 4, queries, 64), (1, 4, keys, 64), is_causal=True).rows
        return next(cost for n, _, cost in rows if n == name)

    assert cost(65536, 65536, "linear").flops == pytest.approx(2 * cost(32768, 32768, "linear").flops, rel=1e-3)
    assert cost(65536, 65536, "linear").bytes <= 2.1 * cost(32768, 32768, "linear").bytes
    assert cost(4096, 4096, "linear").flops < cost(4096, 4096, "blocked").flops / 10
    # One query weighs the keys it has; making their sums first would cost F times as much.
    assert cost(1, 4096, "linear").flops <= 1.1 * cost(1, 4096, "blocked").flops


def draw(queries: int, keys: int, seed: int = 0) -> list[Tensor]:
    make = torch.Generator().manual_seed(seed)
    sizes = ((4, queries, 6), (2, keys, 6), (2, keys, 5))
    return [torch.randn(2, *s, generator=make, dtype=torch.float64).requires_grad_() for s in sizes]


def test_segments_whose_ids_are_out_of_reach_go_elsewhere() -> None:
    """A graph and the meta device hold no ids: another implementation computes the same."""
    assert regard.explain("elu", SHAPE, segments=True, device="meta").chosen != "linear"
    ids = (torch.arange(9) > 3).long()[None]
    q, k, v = (x.detach() for x in draw(9, 9))
    run = lambda q: regard.attention(q, k, v, "elu", segment_ids=ids, enable_gqa=True)  # noqa: E731
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q), run(q), rtol=1e-12, atol=1e-12)
