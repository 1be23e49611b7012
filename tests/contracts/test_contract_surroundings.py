"""What goes on around a call must not change it: autocast, forward mode, torch.func transforms, narrow windows."""

import pytest
import torch
from torch import Tensor

import regard
from regard.pairwise.blocked import block_rows
from regard.pairwise.blocked.blocks import Work
from regard.pairwise.cpu import implementation as cpu

from .cases import IMPLS, Data, attend, gradients, named

SPECS = [name for name, spec in regard.presets().items() if str(spec) == name]
RULES = ["epanechnikov*nearest(k=4)", "gaussian*nearest(k=4)", "triweight*anchored(margin=0.5)"]


def leaves(dtype: torch.dtype, length: int = 12) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1, 2, length, 8, generator=generator).to(dtype).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("spec", [*SPECS, *RULES, "local-linear[biweight]"])
def test_autocast_changes_nothing(spec: str, impl: str, dtype: torch.dtype) -> None:
    """Neither around the call nor, but for the reference, around its backward pass."""
    data = Data(*leaves(dtype))

    def run(inside: bool, after: bool) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            out = attend(regard.Spec.parse(spec), impl, data, is_causal=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=after):
            return [] if out is None else [out.detach(), *gradients(out, named(data)).values()]

    expected = run(False, False)
    for inside, after in ((True, False), (True, impl != "reference")):  # autograd of the reference is torch's own
        for found, wanted in zip(run(inside, after), expected, strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("spec", ["softmax", "biweight", "relumax", "shift-cosine"])
def test_forward_mode_through_the_default_implementation(spec: str) -> None:
    """The tangent equals a central difference."""
    query, key, value = (x.detach().double() for x in leaves(torch.float32, 6))
    direction = torch.linspace(-1, 1, query.numel(), dtype=torch.float64).view_as(query)

    def run(x: Tensor) -> Tensor:
        return regard.attention(x, key, value, spec, is_causal=True)

    _, tangent = torch.func.jvp(run, (query,), (direction,))
    step = 1e-6
    expected = (run(query + step * direction) - run(query - step * direction)) / (2 * step)
    assert expected.abs().max() > 1e-3
    assert (tangent - expected).abs().max() < 1e-7
    with pytest.raises(regard.checks.ArgumentError, match="no forward mode"):
        torch.func.jvp(lambda x: regard.attention(x, key, value, spec, impl="blocked"), (query,), (direction,))


@pytest.mark.parametrize("elements", [32, 256])
@pytest.mark.parametrize("window", [1, 3, 2**62])
def test_blocks_of_any_size_under_a_window(elements: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for rows in (block_rows.Rows, cpu.NumbaRows):
        monkeypatch.setattr(rows, "elements", elements)
    made = []
    blocks = Work.blocks
    monkeypatch.setattr(Work, "blocks", lambda self: made.append(found := list(blocks(self))) or iter(found))
    tensors = leaves(torch.float32, 65)
    results = []
    for impl in ("blocked", "cpu", "reference"):
        out = regard.attention(*tensors, "biweight", is_causal=True, window=window, impl=impl)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), tensors)])
    assert min(map(len, made)) > 4
    for one, another, other in zip(*results, strict=True):
        assert (one - other).abs().max() < 1e-5
        assert (another - other).abs().max() < 1e-5


def test_gradient_of_alpha_in_float32_near_softmax() -> None:
    """r^2 times a cancelled sum: float32 must follow float64 down to alpha = 1.0001."""
    for alpha in (1.5, 1.1, 1.01, 1.001, 1.0001):
        found = []
        for dtype in (torch.float32, torch.float64):
            query, key, value = (x.detach().to(dtype) for x in leaves(torch.float32, 9))
            number = torch.tensor(alpha, dtype=dtype, requires_grad=True)
            out = regard.attention(query, key, value, "biweight", params={"alpha": number}, impl="blocked")
            weight = torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)
            found.append(float(torch.autograd.grad((out * weight).sum(), number)[0]))
        assert abs(found[0] - found[1]) < 0.02 * abs(found[1]), (alpha, found)


def test_a_score_one_ulp_inside_the_edge_has_a_finite_gradient() -> None:
    texts = ("0x0p0", "-0x1.c4a4ep-5", "-0x1.d97ca8p-3", "-0x1.e85b5ep-1")
    z = torch.tensor([[float.fromhex(t) for t in texts]], requires_grad=True)
    (grad,) = torch.autograd.grad(regard.entmax(z, 1.6)[0, 0], z)
    assert bool(torch.isfinite(grad).all())
    assert abs(float(grad.sum())) < 1e-5
