"""Bad values for every argument of the calls with a state: each error names the call and the argument."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from fuzz.kinds import OBJECTS
from mistakes import error_of

import regard
from regard import DeltaState, LinearState, MesaState

make = torch.Generator().manual_seed(0)
INPUTS = {n: torch.randn(2, h, 5, 3, generator=make) for n, h in (("query", 4), ("key", 2), ("value", 2))}
CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "linear_attention": (LinearState.empty("elu", 2, 2, 3), {}),
    "delta_rule": (DeltaState.empty(2, 2, 3), {"beta": 0.5}),
    "mesa_attention": (MesaState.empty(2, 2, 3), {"ridge": 1.0}),
}
"""The state of each call, and what it needs besides."""


@pytest.mark.parametrize("call", CALLS)
def test_bad_states_are_named(call: str) -> None:
    """States of another class, of other shapes, dtypes and devices, and damaged ones."""
    own, needed = CALLS[call]
    others = [state for name, (state, _) in CALLS.items() if name != call]
    for bad in [
        *OBJECTS[:2], True, 3, torch.ones(3), *others, type(own), own.map(lambda x: x[:1]), own.map(lambda x: x[:, :1]),
        own.map(lambda x: x.double() if x.is_floating_point() else x), own.map(lambda x: x.to("meta")),
        own.map(lambda x: x.to(torch.int64)), own.map(lambda x: x[..., None]),
        *(replace(own, **{name: bad}) for name in own._tensors() for bad in (None, 3, torch.ones(1), torch.ones(2, 2))),
        *(replace(own, tokens=bad) for bad in (None, "x", 1.5, True, torch.ones(3), -1)),
    ]:  # fmt: skip
        text = error_of(getattr(regard, call), **INPUTS, **needed, state=bad)
        assert text.startswith(f"{call}: "), text
        assert "state" in text
        assert len(text) < 600
    more = {"ridge": 1.0} if call == "mesa_attention" else {}
    sizes = ((3,), (2, 4, 5, 4), (3, 4, 5, 3))
    for query in (None, 3, *(torch.ones(size) for size in sizes), torch.ones(2, 4, 5, 3).long()):
        text = error_of(own.read, query, **more)  # passes the call's errors on
        assert text.startswith(f"{call}: "), text
        assert "query" in text or "state" in text


@pytest.mark.parametrize("call", CALLS)
def test_values_at_the_edge_are_taken(call: str) -> None:
    """Whole numbers beyond every length are no mistakes."""
    given = {**INPUTS, **CALLS[call][1]}
    expected = getattr(regard, call)(**given)[0]
    for chunk in (1, 2**31, 2**63, 10**30):
        torch.testing.assert_close(getattr(regard, call)(**given, chunk_size=chunk)[0], expected, rtol=1e-5, atol=1e-5)
    if call == "mesa_attention":
        out = regard.mesa_attention(**given, solver="cg", max_iter=10**30)[0]
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
