"""Wrong arguments of the calls with a state are named."""

from typing import Any

import pytest
import torch
from mistakes import error_of, refuses
from recurrences import CASES

import regard
from regard import DeltaState, LinearState, MesaState

F64 = torch.float64
CALLS: dict[str, Any] = {
    "linear": lambda q, k, v, **how: regard.linear_attention(q, k, v, how.pop("spec", "elu"), **how),
    "delta": lambda q, k, v, **how: regard.delta_rule(q, k, v, how.pop("beta", 1.0), **how),
    "mesa": lambda q, k, v, **how: regard.mesa_attention(q, k, v, **{"ridge": 1.0, **how}),
}
EVERY: list[tuple[dict[str, Any], str]] = [
    ({"form": "chunks"}, "unknown form='chunks'. Did you mean 'chunked'"),
    ({"is_causal": 1}, "is_causal is 1, expected True or False"),
    ({"exclude_self": 1}, "exclude_self is 1, expected True or False"),
    ({"chunk_size": 0}, "chunk_size is 0, expected a whole number >= 1"),
    ({"attn_mask": torch.ones(2, 9)}, "expected torch.bool"),
    ({"attn_mask": torch.ones(2, 4, 9, 9, dtype=torch.bool)}, "does not broadcast"),
    ({"scale": 0.0}, "scale is 0, expected scale > 0"),
    ({"log_decay": 0.5}, "log_decay is 0.5, expected log_decay <= 0"),
    ({"log_decay": torch.zeros(4)}, "log_decay has shape [4], which does not broadcast to [2]"),
    ({"log_decay": torch.zeros(2, 9)}, "expected [2] (per key head)"),
    ({"log_decay": "fast"}, "log_decay is 'fast' (str), expected a number or tensor"),
    ({"state": 3}, "state is a int, expected a "),
]
OWN: list[tuple[str, dict[str, Any], str]] = [
    ("linear", {"spec": "softmax"}, "softmax has no finite features"),
    ("linear", {"spec": "biweight"}, "those that have: linear, cosine, shift-cosine, relu, relu2, elu"),
    ("linear", {"spec": "local-linear"}, "no finite features"),
    ("linear", {"scale": 2.0}, "takes no scale"),
    ("linear", {"params": {"margin": 1.0}}, "unknown parameter 'margin'"),
    ("linear", {"spec": "linear*fixed*normalised", "log_decay": -1.0}, "divides signed weights by their sum"),
    (
        "linear",
        {"spec": "linear*fixed(bias=0.4)", "log_decay": torch.zeros(2, 2, 9, 4)},
        "has a bias, which belongs to no feature",
    ),
    ("linear", {"log_decay": torch.zeros(2, 9)}, "[2, 2, 9] (per token) or [2, 2, 9, 4] (per feature)"),
    ("linear", {"state": LinearState.empty("linear*fixed*normalised", 2, 2, 4, 3, dtype=F64)}, "its own state"),
    ("linear", {"state": LinearState.empty("elu", 2, 1, 4, 3, dtype=F64)}, "give each layer its own state"),
    ("delta", {"beta": -0.5}, "beta is -0.5, expected beta >= 0"),
    ("delta", {"beta": torch.ones(2, 4, 9)}, "beta has shape [2, 4, 9], which does not broadcast to [2, 2, 9]"),
    ("delta", {"state": DeltaState.empty(2, 1, 4, 3, dtype=F64)}, "give each layer its own state"),
    ("mesa", {"ridge": 0.0}, "ridge is 0, expected ridge > 0"),
    ("mesa", {"ridge": -1}, "ridge is -1, expected ridge > 0"),
    ("mesa", {"ridge": torch.ones(3)}, "ridge has shape [3], which does not broadcast to [4]"),
    ("mesa", {"ridge": torch.ones(1, 1, 1, 1, 1)}, "[4] (per head), [4, 4] (and dimension), [2, 4, 9] (per token)"),
    ("mesa", {"solver": "cgg"}, "unknown solver='cgg'. Did you mean 'cg'?"),
    ("mesa", {"solver": "cg", "form": "parallel"}, "form='parallel' solves directly; solver='cg' is for"),
    ("mesa", {"max_iter": 0}, "max_iter is 0, expected a whole number >= 1"),
    ("mesa", {"tol": 0.0}, "tol is 0, expected tol > 0"),
    ("mesa", {"log_decay": torch.zeros(2, 2, 9, 4)}, "expected [2] (per key head) or [2, 2, 9] (per token)."),
    ("mesa", {"beta": -1.0}, "beta is -1, expected beta >= 0"),
    ("mesa", {"state": MesaState.empty(2, 1, 4, 3, dtype=F64)}, "give each layer its own state"),
    ("mesa", {"state": MesaState.empty(2, 2, 4, 3)}, "convert it with state.map"),
]


@pytest.mark.parametrize(("name", "how", "message"), [*((name, *case) for name in CALLS for case in EVERY), *OWN])
def test_mistakes_are_named(name: str, how: dict[str, Any], message: str) -> None:
    assert message in error_of(CALLS[name], *CASES["elu"].draw(grad=False).values(), **how)


@pytest.mark.parametrize("name", CALLS)
def test_tensors_that_do_not_fit_each_other(name: str) -> None:
    q, k, v = CASES["elu"].draw(grad=False).values()
    for tensors, message in (
        ((q[:, :, :5], k, v), "causal order needs a key for every query"),
        ((q[:, :3], k, v), "must be a multiple"),
        ((q, k, v[:, :, :5]), "key and value differ in heads or length"),
        ((q, k, v.float()), r"value torch\.float32 on cpu"),
    ):
        refuses(message, CALLS[name], *tensors)
