"""Valid calls of the functions of score tensors."""

from dataclasses import replace
from typing import Any

import torch
from contracts import oracle
from torch import Tensor

import regard

from .draw import Arguments, Call, Draw, arguments, public, split
from .kinds import Anything, Kind, Mask, Real, Whole

FINE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _scores(draw: Draw) -> Arguments:
    size = [draw.whole(1, 5) for _ in range(draw.whole(1, 3))]
    dtype = draw.one(torch.float64, torch.float64, torch.float32)
    scores = draw.normal(*size, dtype=dtype, scale=draw.one(0.1, 1.0, 5.0))
    dim = draw.whole(-len(size), len(size) - 1)
    ranked = Kind(  # of any shape but a scalar
        also=(scores.long(), scores > 0, scores.to(torch.complex64), scores.to(torch.float8_e4m3fn)),
        skip=lambda v, given: isinstance(v, Tensor) and v.dtype in FINE and v.dim() > 0,
    )
    long = tuple(axis for axis, n in enumerate(size) if n > 1)
    return arguments(
        scores=(scores, ranked),
        dim=(dim, Whole(low=-len(size), high=len(size) - 1)),
        mask=(draw.often(draw.mask(*size)), Mask(none=True, fixed=long, broadcast=True)),
        impl=draw.word("auto", "reference", "cpu"),
    )


def _score_call(name: str, s: oracle.Choices, found: Arguments, **of: str) -> Call:
    """The call of a function of scores; `of` names its numbers as the oracle does."""
    given, kinds = split(found)
    dim = given["dim"]
    if any(isinstance(given[outer], Tensor) for outer in of):
        kinds["dim"] = Anything()  # the numbers of rows along one dim need not fit another

    def truth(**wide: Any) -> Tensor:
        z = wide["scores"].movedim(dim, -1)
        seen = torch.ones_like(z, dtype=torch.bool) if given["mask"] is None else given["mask"].movedim(dim, -1)
        rows = {inner: wide[outer].movedim(dim, -1) for outer, inner in of.items() if isinstance(wide[outer], Tensor)}
        bias = rows.pop("bias", s.bias)
        numbers = {name: row[..., 0] for name, row in rows.items()}
        return oracle.weights(s, z, seen, bias, numbers).movedim(-1, dim)

    tolerance = 1e-7 if given["scores"].dtype == torch.float64 else 2e-3
    return Call(name, getattr(regard, name), given, kinds, truth, tolerance, ("scores",))


def _number(draw: Draw, found: Arguments, first: float, last: float, **kind: Any) -> Any:
    """A number between `first` and `last`, or one for each row, and what it is."""
    (scores, _), (dim, _) = found["scores"], found["dim"]
    size = list(scores.shape)
    size[dim] = 1
    number = draw.one(first + (last - first) / 3, draw.uniform(first, last, *size, dtype=scores.dtype))
    return number, Real(rows=(tuple(size),), also=(torch.ones(7, 9),), **kind)


def _plain(number: Any, usual: float) -> float:
    """The number itself, `usual` in place of a tensor."""
    return usual if isinstance(number, Tensor) else number


@public("entmax")
def entmax(draw: Draw) -> Call:
    found = _scores(draw)
    alpha, kind = _number(draw, found, 1.2, 2.0, low=1.0, high=1001.0)
    alpha = draw.one(1.0, alpha)
    if _plain(alpha, 2.0) == 1.0:
        found["impl"] = ("auto", Anything())
    found["alpha"] = alpha, replace(kind, strict=found["impl"][0] == "cpu")
    s = oracle.Choices("gaussian", "fixed")
    if _plain(alpha, 2.0) > 1:
        s = oracle.Choices("polynomial", "adaptive", r=1 / (_plain(alpha, 2.0) - 1))
    return _score_call("entmax", s, found, alpha="alpha")


@public("sparsemax")
def sparsemax(draw: Draw) -> Call:
    return _score_call("sparsemax", oracle.Choices("polynomial", "adaptive", r=1.0), _scores(draw))


@public("relumax")
def relumax(draw: Draw) -> Call:
    found = _scores(draw)
    found["margin"] = margin, _ = _number(draw, found, 0.3, 2.0, low=0.0, strict=True)
    s = oracle.Choices("polynomial", "anchored", margin=_plain(margin, 1.0))
    return _score_call("relumax", s, found, margin="margin")


@public("normrelu")
def normrelu(draw: Draw) -> Call:
    found = _scores(draw)
    found["bias"] = bias, _ = _number(draw, found, -0.5, 1.0)
    found["empty"] = empty, _ = draw.word("uniform", "zero", "nearest")
    s = oracle.Choices("polynomial", "fixed", bias=_plain(bias, 0.0), empty=empty)
    return _score_call("normrelu", s, found, bias="bias")


def _topk(draw: Draw, name: str, kernel: str) -> Call:
    found = _scores(draw)
    k, (gradient, ways) = draw.whole(1, 6), draw.word("hard", "straight-through", "soft")
    if gradient != "hard":
        found["impl"] = ("auto", Anything())
    found["k"] = k, Whole(low=1)
    found["gradient"] = gradient, Anything() if found["impl"][0] == "cpu" else ways
    return _score_call(name, oracle.Choices(kernel, "nearest", k=k, gradient=gradient), found)


@public("topk_softmax")
def topk_softmax(draw: Draw) -> Call:
    return _topk(draw, "topk_softmax", "gaussian")


@public("topk_uniform")
def topk_uniform(draw: Draw) -> Call:
    return _topk(draw, "topk_uniform", "uniform")
