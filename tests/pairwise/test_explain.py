"""What runs, and why the others do not."""

import pytest
import torch
from mistakes import refuses

import regard
from regard.pairwise import dispatch

SHAPE = (2, 4, 128, 16)


def reasons(spec: str, **how) -> dict[str, str | None]:
    return {name: reason for name, reason, _ in regard.explain(spec, SHAPE, **how).rows}


def test_every_implementation_is_listed_best_first() -> None:
    names = [name for name, _ in dispatch.implementations()]
    assert names[-1] == "reference"
    assert {"sdpa", "blocked", "reference"} <= set(names)
    assert [name for name, _, _ in regard.explain("softmax", SHAPE).rows] == names
    assert all(reason is None or isinstance(reason, str) for _, reason in dispatch.implementations())
    assert {"sdpa", "blocked", "reference"} <= {name for name, reason in dispatch.implementations() if reason is None}


@pytest.mark.parametrize(
    ("spec", "how", "chosen"),
    [
        ("softmax", {}, "sdpa"),
        ("rbf", {}, "sdpa"),
        ("softmax", {"is_causal": True}, "sdpa"),
        ("softmax", {"mask": "pairs"}, "sdpa"),
        ("softmax", {"return_diagnostics": True}, "blocked"),
        ("softmax", {"exclude_self": True}, "blocked"),
        ("softmax", {"is_causal": True, "window": 8}, "blocked"),
        ("softmax", {"is_causal": True, "mask": "keys"}, "sdpa"),
        ("biweight", {}, "cpu"),
        ("relumax", {"is_causal": True}, "cpu"),
        ("local-linear", {}, "blocked"),
        ("local-linear[relumax]", {}, "cpu"),
        ("gaussian*fixed*linear(ridge=0.1,ridge_mode=absolute)", {"segments": True}, "blocked"),
        ("biweight*anchored*linear(ridge=0.1,ridge_mode=absolute)", {}, "blocked"),
    ],
)
def test_what_auto_takes(spec: str, how: dict, chosen: str) -> None:
    found = regard.explain(spec, SHAPE, **how)
    assert found.chosen == chosen
    lines = str(found).splitlines()
    assert lines[0] == f"impl='auto' runs {chosen!r}"
    assert len(lines) == 1 + len(found.rows)
    for line, (name, reason, cost) in zip(lines[1:], found.rows, strict=True):
        assert line.split()[0] == name
        if reason is None:
            assert all(words in line for words in ("can: ", "flops forward", "MiB extra"))
            assert min(cost.flops, cost.bytes) > 0
        else:
            assert f"cannot: {reason}" in line
            assert cost is None


def test_reasons() -> None:
    """Those of the errors (tests/pairwise/test_mistakes.py), and where nothing hinders."""
    assert "normalised Gaussian weights" in reasons("biweight")["sdpa"]
    assert "an absolute ridge" in reasons("biweight*anchored*linear(ridge_mode=absolute)")["cpu"]
    assert reasons("local-linear")["blocked"] is reasons("local-linear")["reference"] is None
    assert reasons("softmax", segments=True)["sdpa"]


def test_cross_attention_and_decoding_shapes() -> None:
    one = regard.explain("softmax", (1, 4, 1, 16), (1, 2, 500, 16), is_causal=True)
    assert one.chosen == "sdpa"  # a single query at the end sees every key
    some = regard.explain("softmax", (1, 4, 5, 16), (1, 2, 500, 16), is_causal=True)
    assert some.chosen == "blocked"  # torch would align the five queries to the first keys
    wide = regard.explain("softmax", SHAPE, value_dim=64).rows[0][2]
    assert wide.flops > regard.explain("softmax", SHAPE).rows[0][2].flops


def test_explain_agrees_with_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    q = k = v = torch.linspace(-1, 1, 48).view(1, 2, 6, 4)
    ran: list[str] = []
    for name, entry in dispatch.implementations_registry.items():
        run = entry.impl.run
        monkeypatch.setattr(
            entry.impl, "run", lambda inputs, run=run, name=name: (ran.append(name), run(inputs))[1], raising=False
        )
    for spec in ("softmax", "biweight", "local-linear", "linear"):
        regard.attention(q, k, v, spec)
        assert ran.pop() == regard.explain(spec, (1, 2, 6, 4)).chosen
        for impl in ("reference", "blocked"):
            regard.attention(q, k, v, spec, impl=impl)
            assert ran.pop() == impl


def test_costs_grow_as_they_should() -> None:
    """Reference memory is quadratic in the length, blocked memory linear once the rows outgrow a block."""
    rows = {n: regard.explain("softmax", (1, 1, n, 64)).rows for n in (65536, 131072)}
    cost = {(name, length): row for length in rows for name, _, row in rows[length]}
    assert cost["reference", 131072].bytes == 4 * cost["reference", 65536].bytes
    assert cost["blocked", 131072].bytes <= 2.1 * cost["blocked", 65536].bytes
    assert cost["blocked", 131072].flops == 4 * cost["blocked", 65536].flops


def test_messages() -> None:
    refuses("explain: mask is 'rows'", regard.explain, "softmax", SHAPE, mask="rows")
    refuses("cannot be divided", regard.explain, "softmax", SHAPE, (2, 3, 128, 16))
    refuses("Did you mean 'softmax'", regard.explain, "sofmax", SHAPE)


def test_an_implementation_of_ones_own() -> None:
    """One class with one registration is listed, chosen by priority, run by name, and can say no."""
    registry = dispatch.implementations_registry

    @dispatch.register_impl("zeros", priority=1000)
    class Zeros:
        def available(self) -> str | None:
            return None

        def supports(self, problem) -> str | None:
            return None if problem.queries == 3 else "does three queries"

        def cost(self, problem):
            return dispatch.Cost(1, 1)

        def run(self, inputs):
            return torch.zeros_like(inputs.v[:, :, :3]), None

    try:
        q = torch.ones(1, 1, 3, 4)
        assert regard.explain("softmax", (1, 1, 3, 4)).chosen == "zeros"
        assert not bool(regard.attention(q, q, q).any())
        q = torch.ones(1, 1, 4, 4)
        assert regard.explain("softmax", (1, 1, 4, 4)).chosen == "sdpa"
        assert bool(regard.attention(q, q, q).any())
        refuses(r"impl='zeros' does three queries\. Those that can: sdpa", regard.attention, q, q, q, impl="zeros")
        refuses("'zeros' is registered already", dispatch.register_impl("zeros", priority=1), Zeros)
    finally:
        dispatch._ranking.remove(registry._objects.pop("zeros"))
        dispatch.plans.clear()
