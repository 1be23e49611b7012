"""`layout="bthd"` of every function that has it: the same numbers with tokens before heads."""

import inspect
from typing import Any

import pytest
import torch
from mistakes import refuses
from torch import Tensor

import regard

B, H, T, D = 2, 4, 6, 3
NUMBERS = {"log_decay", "beta", "ridge", "scale", "probe"}


def draw(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def calls() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Each function with numbers per token and per head among its arguments."""
    fade, step = -draw(B, H, T, seed=1).abs(), draw(B, H, T, seed=2).sigmoid()
    each, ridge = -draw(B, H, T, D, seed=3).abs(), draw(B, H, T, D, seed=4).abs() + 0.5
    scale = draw(B, H, T, seed=5).abs() + 0.5
    probe = {"solver": "learned", "probe": draw(B, H, T, D, seed=6)}
    return {
        "attention": (regard.attention, {"spec": "biweight", "scale": scale, "is_causal": True}),
        "per head": (regard.attention, {"scale": scale[0, :, :1], "segment_ids": torch.tensor([[0, 0, 1, 1, 1, 2]])}),
        "params": (regard.attention, {"spec": "relumax", "params": {"margin": scale}}),
        "mask": (regard.attention, {"attn_mask": draw(B, 1, T, T) > -0.5}),
        "local linear": (regard.local_linear_attention, {"ridge": ridge, "scale": scale}),
        "learned": (regard.local_linear_attention, {**probe, "is_causal": True, "ridge": 0.1}),
        "linear": (regard.linear_attention, {"spec": "elu", "log_decay": each, "scale": None}),
        "retention": (regard.linear_attention, {"spec": "linear", "log_decay": fade[0, :, 0]}),
        "delta": (regard.delta_rule, {"beta": step, "log_decay": each, "scale": scale}),
        "mesa": (regard.mesa_attention, {"ridge": ridge, "log_decay": fade, "beta": step}),
        "ridge by head": (regard.mesa_attention, {"ridge": ridge[0, :, 0]}),
        "interpolated": (regard.interpolated_attention, {"trend": "mesa", "scale": scale}),
    }


def turned(x: Any) -> Any:
    return x.transpose(1, 2) if isinstance(x, Tensor) and x.dim() > 2 else x


@pytest.mark.parametrize("name", calls())
def test_the_same_numbers(name: str) -> None:
    function, how = calls()[name]
    tensors = [draw(B, H, T, D, seed=s).requires_grad_() for s in (7, 8, 9)]
    other = {n: turned(x) if n in NUMBERS else x for n, x in how.items()}
    if "params" in how:
        other["params"] = {n: turned(x) for n, x in how["params"].items()}
    straight = function(*tensors, **how)
    across = function(*map(turned, tensors), **other, layout="bthd")
    if isinstance(straight, tuple):
        for a, b in zip(straight[1]._tensors().values(), across[1]._tensors().values(), strict=True):
            assert torch.equal(a, b)
        straight, across = straight[0], across[0]
    torch.testing.assert_close(across, turned(straight), rtol=0, atol=0)
    a, b = (torch.autograd.grad(out.sin().sum(), tensors) for out in (straight, across))
    torch.testing.assert_close(a, b)


def test_positional_arguments_and_grouped_heads() -> None:
    q, k, v, beta = draw(B, T, 4, D), draw(B, T, 2, D) / 2, draw(B, T, 2, 5), draw(B, T, 2).sigmoid()
    out, _ = regard.delta_rule(q, k, v, beta, layout="bthd")
    assert torch.equal(out.transpose(1, 2), regard.delta_rule(*map(turned, (q, k, v, beta)))[0])
    out, found = regard.attention(q, k, v, enable_gqa=True, layout="bthd", return_diagnostics=True)
    assert out.shape == (B, T, 4, 5)
    assert found.support.shape == (B, 4, T)


@pytest.mark.parametrize(
    "name", ["attention", "linear_attention", "delta_rule", "mesa_attention", "interpolated_attention"]
)
def test_the_argument_is_shown_and_checked(name: str) -> None:
    function = getattr(regard, name)
    shown = inspect.signature(function).parameters["layout"]
    assert (shown.kind, shown.default) == (shown.KEYWORD_ONLY, "bhtd")
    x = draw(B, T, H, D)
    refuses(r"layout is 'thd', expected 'bhtd' or 'bthd'", function, x, x, x, layout="thd")


def test_errors_say_in_which_layout_they_show_shapes() -> None:
    x = draw(B, T, H, D)
    refuses("number or tensor.$", regard.attention, x, x, x, scale="x", layout="bthd")  # shows none
    refuses(r"\[2, 4, 5, 3\].*Shapes .* with heads before tokens", regard.attention, x, x[:, 1:], x, layout="bthd")


@pytest.mark.slow
def test_graphs() -> None:
    x = draw(B, T, H, D)
    f = torch.compile(lambda x: regard.attention(x, x, x, "biweight", layout="bthd"), backend="eager", fullgraph=True)
    assert torch.equal(f(x), regard.attention(x, x, x, "biweight", layout="bthd"))
