"""Valid calls of the functions of score tensors."""

from typing import Any

import torch
from contracts import oracle
from torch import Tensor

import regard

from .draw import Call, Draw, public
from .kinds import Anything, Kind, Mask, Real, Whole, Word

FINE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _scores(draw: Draw) -> tuple[dict[str, Any], dict[str, Kind]]:
    size = [draw.whole(1, 5) for _ in range(draw.whole(1, 3))]
    dtype = draw.one(torch.float64, torch.float64, torch.float32)
    scores = draw.normal(*size, dtype=dtype, scale=draw.one(0.1, 1.0, 5.0))
    dim = draw.whole(-len(size), len(size) - 1)
    given = {
        "scores": scores,
        "dim": dim,
        "mask": draw.often(draw.mask(*size)),
        "impl": draw.one("auto", "reference", "cpu"),
    }
    kinds: dict[str, Kind] = {
        "scores": Kind(  # of any shape but a scalar
            also=(scores.long(), scores > 0, scores.to(torch.complex64), scores.to(torch.float8_e4m3fn)),
            skip=lambda v, given: isinstance(v, Tensor) and v.dtype in FINE and v.dim() > 0,
        ),
        "dim": Whole(low=-len(size), high=len(size) - 1),
        "mask": Mask(none=True, fixed=tuple(a for a in range(len(size)) if size[a] > 1), broadcast=True),
        "impl": Word(words=("auto", "cpu", "reference")),
    }
    return given, kinds


def _score_call(name: str, given: dict[str, Any], kinds: dict[str, Kind], s: oracle.Choices, **of: str) -> Call:
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


def _number(draw: Draw, low: float, high: float, scores: Tensor, dim: int) -> Any:
    size = list(scores.shape)
    size[dim] = 1
    return draw.one(low + (high - low) / 3, draw.uniform(low, high, *size, dtype=scores.dtype))


def _number_kind(given: dict[str, Any], low: float | None, strict: bool, high: float | None = None) -> Real:
    size = list(given["scores"].shape)
    size[given["dim"]] = 1
    return Real(low=low, high=high, strict=strict, rows=(tuple(size),), also=(torch.ones(7, 9),))


@public("entmax")
def entmax(draw: Draw) -> Call:
    given, kinds = _scores(draw)
    given["alpha"] = draw.one(1.0, _number(draw, 1.2, 2.0, given["scores"], given["dim"]))
    alpha = given["alpha"]
    if alpha == 1.0 if not isinstance(alpha, Tensor) else False:
        given["impl"], kinds["impl"] = "auto", Anything()
    kinds["alpha"] = _number_kind(given, 1.0, given["impl"] == "cpu", 1001.0)
    s = oracle.Choices("gaussian", "fixed")
    if isinstance(alpha, Tensor) or alpha > 1:
        s = oracle.Choices("polynomial", "adaptive", r=1.0 if isinstance(alpha, Tensor) else 1 / (alpha - 1))
    return _score_call("entmax", given, kinds, s, alpha="alpha")


@public("sparsemax")
def sparsemax(draw: Draw) -> Call:
    return _score_call("sparsemax", *_scores(draw), oracle.Choices("polynomial", "adaptive", r=1.0))


@public("relumax")
def relumax(draw: Draw) -> Call:
    given, kinds = _scores(draw)
    given["margin"] = _number(draw, 0.3, 2.0, given["scores"], given["dim"])
    kinds["margin"] = _number_kind(given, 0.0, True)
    margin = given["margin"]
    s = oracle.Choices("polynomial", "anchored", margin=1.0 if isinstance(margin, Tensor) else margin)
    return _score_call("relumax", given, kinds, s, margin="margin")


@public("normrelu")
def normrelu(draw: Draw) -> Call:
    given, kinds = _scores(draw)
    given |= {
        "bias": _number(draw, -0.5, 1.0, given["scores"], given["dim"]),
        "empty": draw.one("uniform", "zero", "nearest"),
    }
    kinds |= {"bias": _number_kind(given, None, False), "empty": Word(words=("uniform", "zero", "nearest"))}
    bias = given["bias"]
    s = oracle.Choices("polynomial", "fixed", bias=0.0 if isinstance(bias, Tensor) else bias, empty=given["empty"])
    return _score_call("normrelu", given, kinds, s, bias="bias")


def _topk(draw: Draw, name: str, kernel: str) -> Call:
    given, kinds = _scores(draw)
    given |= {"k": draw.whole(1, 6), "gradient": draw.one("hard", "straight-through", "soft")}
    if given["gradient"] != "hard":
        given["impl"] = "auto"
        kinds["impl"] = Anything()
    kinds |= {"k": Whole(low=1), "gradient": Word(words=("hard", "straight-through", "soft"))}
    if given["impl"] == "cpu":
        kinds["gradient"] = Anything()
    return _score_call(name, given, kinds, oracle.Choices(kernel, "nearest", k=given["k"], gradient=given["gradient"]))


@public("topk_softmax")
def topk_softmax(draw: Draw) -> Call:
    return _topk(draw, "topk_softmax", "gaussian")


@public("topk_uniform")
def topk_uniform(draw: Draw) -> Call:
    return _topk(draw, "topk_uniform", "uniform")
