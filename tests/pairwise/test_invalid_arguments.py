"""Bad values for every argument of the calls with a state: each error names the call and the argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import DeltaState, LinearState, MesaState
from regard.checks import ArgumentError

HUGE = 10**400
"""An int that no float holds."""


class Stranger:
    """An object of no kind that a call knows, whose text is of no use."""

    def __repr__(self) -> str:
        return "x" * 10_000


def draw() -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(0)
    return {n: torch.randn(2, h, 5, 3, generator=make) for n, h in (("query", 4), ("key", 2), ("value", 2))}


STATES: dict[str, Any] = {
    "linear_attention": LinearState.empty("elu", 2, 2, 3),
    "delta_rule": DeltaState.empty(2, 2, 3),
    "mesa_attention": MesaState.empty(2, 2, 3),
}
NEEDED: dict[str, dict[str, Any]] = {
    "linear_attention": {},
    "delta_rule": {"beta": 0.5},
    "mesa_attention": {"ridge": 1.0},
    "interpolated_attention": {"enable_gqa": True},
}

OBJECTS: list[Any] = ["x", b"x", [1.0], (), {}, {1}, 1j, object(), Stranger(), Stranger, len, torch.float32]


def numbers(*rows: int, low: float | None = None, high: float | None = None) -> list[Any]:
    """What is no number in the range, and no tensor of numbers that broadcasts to `rows`."""
    bad = [
        *OBJECTS, True, float("nan"), float("inf"), HUGE, -HUGE, torch.ones(2, dtype=torch.int64), torch.tensor(True),
        torch.tensor(1j), torch.ones(7), torch.ones(1, 1, 1, 1, 1), torch.ones(rows, device="meta"),
        torch.ones(2, 2, 5, 3, dtype=torch.float8_e4m3fn),
    ]  # fmt: skip
    bad += [] if low is None else [low, low - 1]
    return bad + ([] if high is None else [high + 1, 1])


def tensors(x: Tensor) -> list[Any]:
    """What cannot stand in place of x [2, H, 5, 3] beside the others."""
    return [
        None, *OBJECTS, True, 3, 0.5, HUGE, x.tolist(), x.numpy(), x.long(), x > 0, x.to(torch.complex64), x.double(),
        x.to(torch.float8_e4m3fn), x.half(), x[0], x[None], x[0, 0, 0, 0], x.to("meta"), x[:1], x[:0], x[:, :0],
        x.expand(3, 2, *x.shape)[:, 0].flatten(0, 1)[:3], x[..., :0], x[:, :, :3], torch.cat([x, x, x], 1)[:, :3],
    ]  # fmt: skip


def flags(optional: bool = False) -> list[Any]:
    return [*OBJECTS, 0, 1, 0.5, torch.tensor(True), *([] if optional else [None])]


WHOLE: list[Any] = [*OBJECTS, True, 0, -1, -HUGE, 2.5, float("nan"), torch.tensor(2), torch.ones(3)]
WORDS: list[Any] = [*OBJECTS, None, 3, True, torch.ones(3), "", "Chunked", "cholesky "]
MASKS: list[Any] = [
    *OBJECTS, True, 3, torch.ones(2, 5), torch.ones(2, 5, dtype=torch.int64), torch.ones(2, 6, dtype=torch.bool),
    torch.ones(3, 5, dtype=torch.bool), torch.ones(2, 1, 5, dtype=torch.bool), torch.ones(2, 4, 5, 5, dtype=torch.bool),
    torch.ones(2, 5, dtype=torch.bool, device="meta"), torch.ones(1, 2, 1, 1, 5, dtype=torch.bool),
    torch.tensor(True),
]  # fmt: skip
IDS: list[Any] = [
    *OBJECTS, True, 3, torch.ones(2, 5), torch.ones(2, 5, dtype=torch.bool), torch.ones(5, dtype=torch.int64),
    torch.ones(2, 6, dtype=torch.int64), torch.ones(3, 5, dtype=torch.int64),
    torch.ones(2, 5, dtype=torch.int64, device="meta"), torch.ones(2, 1, 1, 5, dtype=torch.int64),
]  # fmt: skip
SPECS: list[Any] = [
    *(x for x in OBJECTS if x != "x"),
    None,
    3,
    True,
    "elo",
    "",
    "x" * 200,
    "((((",
    torch.ones(3),
    "local-linear",
]
PARAMS: list[Any] = [
    *(x for x in OBJECTS if x != {}), 3, True, torch.ones(3), {"bandwidth": 1.0}, {3: 1.0}, {None: 1.0},
    *({"bias": bad} for bad in numbers(2, 4, 5)),
]  # fmt: skip


def states(call: str) -> list[Any]:
    """States of another class, of other shapes, dtypes and devices, and spoilt ones."""
    own = STATES[call]
    others = [state for name, state in STATES.items() if name != call]
    return [
        *OBJECTS, True, 3, torch.ones(3), *others, type(own), own.map(lambda x: x[:1]), own.map(lambda x: x[:, :1]),
        own.map(lambda x: x.double() if x.is_floating_point() else x), own.map(lambda x: x.to("meta")),
        own.map(lambda x: x.to(torch.int64)), own.map(lambda x: x[..., None]),
        *(replace(own, **{name: bad}) for name in own._tensors() for bad in (None, 3, torch.ones(1), torch.ones(2, 2))),
        *(replace(own, tokens=bad) for bad in (None, "x", 1.5, True, torch.ones(3), -1)),
    ]  # fmt: skip


def bad_values(call: str) -> dict[str, list[Any]]:
    """Argument to bad values."""
    found: dict[str, list[Any]] = {n: tensors(x) for n, x in draw().items()}
    found |= {"attn_mask": MASKS, "segment_ids": IDS, "is_causal": flags(), "exclude_self": flags()}
    found["scale"] = numbers(2, 4, 5, low=0)
    if call == "interpolated_attention":
        found["query"] = [
            x for x in found["query"] if getattr(x, "shape", ()) != (2, 4, 3, 3)
        ]  # fewer queries are fine
        found |= {"spec": [*SPECS, "elu*linear", "linear"], "params": PARAMS, "enable_gqa": flags()}
        found["query_offset"] = [*OBJECTS, True, 2.5, float("nan"), torch.tensor(2), torch.ones(3)]
        found["trend"] = [
            *(x for x in OBJECTS if not callable(x)), None, 3, True, torch.ones(3), "mesaa", "", "mesa(ridge=-1)",
            "mesa(rige=1)", "mesa(ridge=", lambda *x, **how: 3, lambda *x, **how: x[0][:, :1], lambda *x, **how: None,
        ]  # fmt: skip
        return found
    found |= {"state": states(call), "form": WORDS, "chunk_size": WHOLE, "log_decay": numbers(2, 2, 5, high=0)}
    if call == "linear_attention":
        return found | {"spec": [*SPECS, "softmax"], "params": PARAMS}
    found["beta"] = [*numbers(2, 2, 5), -1, *([None] if call == "delta_rule" else [])]
    if call == "mesa_attention":
        found |= {"ridge": [None, *numbers(2, 4, 5, 3, low=0)], "solver": WORDS, "max_iter": WHOLE}
        found |= {"tol": [*OBJECTS, True, 0, -1, float("nan"), HUGE, torch.tensor(0.1)], "return_diagnostics": flags()}
    return found


CASES = [(call, name) for call in NEEDED for name in inspect.signature(getattr(regard, call)).parameters]


def outcome(run: Callable[[], Any]) -> str:
    """The first line of what happened."""
    try:
        run()
    except ArgumentError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:160]
    return "no error"


@pytest.mark.parametrize(("call", "name"), CASES)
def test_every_bad_value_is_named(call: str, name: str) -> None:
    """The error begins with the call, names the argument, stays short and on one line."""
    left = []
    for bad in bad_values(call)[name]:
        given = {**draw(), **NEEDED[call], name: bad}
        text = outcome(lambda given=given: getattr(regard, call)(**given))
        if not text.startswith(f"{call}: ") or name not in text or len(text) > 600 or "\n" in text:
            left.append(f"{type(bad)!s} {str(bad)[:60]!r}: {text[:200]}")
    assert not left, "\n".join(left)


@pytest.mark.parametrize("call", [call for call in NEEDED if call != "interpolated_attention"])
def test_reading_a_state_names_what_is_wrong(call: str) -> None:
    """`state.read` passes the call's errors on."""
    more = {"mesa_attention": {"ridge": 1.0}}.get(call, {})
    for query in (
        None,
        3,
        torch.ones(3),
        torch.ones(2, 4, 5, 4),
        torch.ones(3, 4, 5, 3),
        torch.ones(2, 4, 5, 3).long(),
    ):
        text = outcome(lambda query=query: STATES[call].read(query, **more))
        assert text.startswith(f"{call}: "), text
        assert "query" in text or "state" in text


@pytest.mark.parametrize("call", NEEDED)
def test_values_at_the_edge_are_taken(call: str) -> None:
    """Whole numbers beyond every length, and numbers as small and large as float32 holds, are no mistakes."""
    given = {**draw(), **NEEDED[call]}
    expected = getattr(regard, call)(**given)
    if call == "interpolated_attention":
        for offset in (10**30, 2**63, -(10**30)):
            regard.interpolated_attention(**given, query_offset=offset)
        return
    for chunk in (1, 2**31, 2**63, 10**30):
        out = getattr(regard, call)(**given, chunk_size=chunk)[0]
        torch.testing.assert_close(out, expected[0], rtol=1e-5, atol=1e-5)
    if call == "mesa_attention":
        out = regard.mesa_attention(**given, solver="cg", max_iter=10**30)[0]
        torch.testing.assert_close(out, expected[0], rtol=1e-4, atol=1e-4)
