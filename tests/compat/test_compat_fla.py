"""`regard.compat.fla` against loops over the tokens in float64.

Legend: q, k [B, T, H, K], v [B, T, HV, V], g [B, T, HV] or [B, T, HV, K], beta [B, T, HV], state [B, HV, K, V].
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from contracts import oracle as attention_oracle
from mistakes import refuses
from recurrent.recurrences import recurrence
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from regard.compat import fla

B, T, H, HV, K, V = 2, 11, 2, 4, 3, 5
ENDS = [0, 4, 4, 11]
"""Boundaries of three sequences, the second without tokens."""
EXACT = {"rtol": 1e-9, "atol": 1e-10}


def draw(batch: int = B, heads: int = H, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=make, dtype=torch.float64)

    x = {"q": normal(batch, T, H, K), "k": normal(batch, T, H, K) / 2, "v": normal(batch, T, heads, V)}
    x |= {"g": logsigmoid(normal(batch, T, heads)), "gk": logsigmoid(normal(batch, T, heads, K))}
    return {n: t.to(dtype) for n, t in {**x, "beta": normal(batch, T, heads).sigmoid()}.items()}


def state(count: int, heads: int = H, rows: int = K, columns: int = V) -> Tensor:
    return torch.randn(count, heads, rows, columns, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def fades(name: str, x: dict[str, Tensor]) -> dict[str, Tensor]:
    """The decays that each function takes by keyword."""
    if name.endswith("simple_gla"):
        return {"g": x["g"]}
    if name.endswith("gla"):
        return {"g" if name == "chunk_gla" else "gk": x["gk"]}
    return {"g": x["gk"] if name.endswith("kda") else x["g"]} if name.endswith(("gated_delta_rule", "kda")) else {}


def loop(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, beta: Tensor | None = None, scale: float | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(outputs, last state) of the delta rule, without beta of linear attention."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    given = {"q": scale * q, "k": k, "v": v, "g": g, "beta": beta}
    x = {name: t.transpose(1, 2) for name, t in given.items() if t is not None}
    start = None if state is None else {"values": state}
    rows, after = recurrence("sum" if beta is None else "delta")(x, start=start)
    return rows.transpose(1, 2), after["values"]


def mesa(ridge: Tensor, kk: Tensor, kv: Tensor, **tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(outputs, last kk, last kv) of MesaNet; ridge [H, K]."""
    x = {name: t.transpose(1, 2) for name, t in tokens.items() if name != "gk"}
    rows, after = recurrence("mesa")({**x, "ridge": ridge}, start={"values": kv, "gram": kk})
    return rows.transpose(1, 2), after["gram"], after["values"]


def parallax(q: Tensor, r: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Softmax means plus the covariance of k and v under the same weights, applied to -r; H heads of keys serve all."""
    q, r, k, v = (x.transpose(1, 2) for x in (q, r, k, v))
    seen = attention_oracle.visible(*q.shape[:3], k.shape[2], is_causal=True, window=window)
    choices = attention_oracle.Choices("gaussian", "fixed", degree=1, solver="learned")
    return attention_oracle.attention(choices, q, k, v, seen, None, {"probe": r})[0].transpose(1, 2)


def apart(run: Callable[..., Any], ends: list[int], states: list[Tensor], tokens: dict[str, Tensor]) -> list[Tensor]:
    """`run` of each sequence by itself: the outputs joined along T, and the states joined along N."""
    found = [
        run(**{name: x[:, a:b] for name, x in tokens.items()}, states=[state[i : i + 1] for state in states])
        for i, (a, b) in enumerate(pairwise(ends))
    ]
    return [torch.cat(parts, 0 if i else 1) for i, parts in enumerate(zip(*found, strict=True))]


KINDS = ("delta_rule", "gated_delta_rule", "kda", "gla", "simple_gla", "retention", "linear_attn")
NAMES = [f"{form}_{kind}" for form in ("chunk", "fused_recurrent") for kind in KINDS]


def oracle(name: str, x: dict[str, Tensor], states: list[Tensor] | None = None, **how: Any) -> tuple[Tensor, Tensor]:
    g = next(iter(fades(name, x).values()), None)
    if name.endswith("retention"):
        g = torch.log(1 - 2.0 ** (-5 - torch.arange(H, dtype=torch.float64))).expand(x["q"].shape[:3])
    beta = x["beta"] if name.endswith(("delta_rule", "kda")) else None
    return loop(x["q"], x["k"], x["v"], g, beta, state=states[0] if states else None, **how)


def call(name: str, x: dict[str, Tensor], **how: Any) -> Any:
    more = {"beta": x["beta"]} if name.endswith(("delta_rule", "kda")) else {}
    more |= {"normalize": False} if name.endswith("linear_attn") else {}
    return getattr(fla, name)(x["q"], x["k"], x["v"], **fades(name, x), **more, **how)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_states_and_gradients(name: str) -> None:
    x, start = {n: t.requires_grad_() for n, t in draw().items()}, state(B).requires_grad_()
    found = call(name, x, initial_state=start, output_final_state=True, scale=0.7)
    expected = oracle(name, x, [start], scale=0.7)
    used = [x["q"], x["k"], x["v"], start, *fades(name, x).values()]
    slopes = [torch.autograd.grad(out.sin().sum() + end.cos().sum(), used) for out, end in (found, expected)]
    torch.testing.assert_close([*found, *slopes[0]], [*expected, *slopes[1]], **EXACT)
    out, none = call(name, x)
    assert none is None
    torch.testing.assert_close(out, oracle(name, x)[0], **EXACT)


@pytest.mark.parametrize("name", NAMES)
def test_packed_sequences(name: str) -> None:
    x, start = draw(batch=1), state(3)
    found = call(name, x, initial_state=start, output_final_state=True, cu_seqlens=torch.tensor(ENDS))

    def run(states: list[Tensor], **tokens: Tensor) -> tuple[Tensor, Tensor]:
        if not tokens["q"].shape[1]:
            return tokens["v"], states[0]
        return oracle(name, tokens, states)

    torch.testing.assert_close(found, apart(run, ENDS, [start], x), **EXACT)
    _, without = call(name, x, output_final_state=True, cu_seqlens=torch.tensor(ENDS))
    assert without[1].abs().max() == 0


@pytest.mark.parametrize(
    "name", [*(n for n in NAMES if n.endswith(("gated_delta_rule", "kda", "gla"))), "fused_recurrent_retention"]
)
def test_states_with_values_first(name: str) -> None:
    x, start = draw(), state(B)
    out, end = call(name, x, initial_state=start.mT, output_final_state=True, state_v_first=True)
    expected, after = oracle(name, x, [start])
    torch.testing.assert_close((out, end), (expected, after.mT), **EXACT)


@pytest.mark.parametrize("name", [n for n in NAMES if n.endswith(("gated_delta_rule", "kda"))])
def test_heads_of_values_gates_and_logits(name: str) -> None:
    """More heads of values than of keys; the gate and the step size are made from raw numbers; unit q and k."""
    x, start = draw(heads=HV), state(B, HV)
    kda = name.endswith("kda")
    raw, logits = (x["gk"] if kda else x["g"]) + 0.5, x["beta"] - 0.5
    speed, bias = torch.linspace(-1, 1, HV, dtype=torch.float64), torch.linspace(0, 1, HV * K if kda else HV).double()
    lift = bias.view(HV, K) if kda else bias
    rate = speed.exp()[:, None] if kda else speed.exp()
    gate = -rate * softplus(raw + lift)
    how = {"A_log": speed, "dt_bias": bias, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    how |= {"allow_neg_eigval": True, "use_qk_l2norm_in_kernel": True, "output_final_state": True}
    given = {**x, ("gk" if kda else "g"): raw, "beta": logits}
    q, k = (x[n] / (x[n].square().sum(-1, keepdim=True) + 1e-6).sqrt() for n in "qk")
    expected = loop(q, k, x["v"], gate, 2 * logits.sigmoid(), state=start)
    torch.testing.assert_close(call(name, given, initial_state=start, **how), expected, **EXACT)
    if kda:
        for rated, log in ((rate, speed), (1, None)):
            gate = -5 * torch.sigmoid(rated * (raw + lift))
            expected = loop(q, k, x["v"], gate, 2 * logits.sigmoid())
            found = call(name, given, **{**how, "A_log": log, "lower_bound": -5.0})
            torch.testing.assert_close(found[0], expected[0], **EXACT)


def test_decays_by_head_and_by_channel_add_up() -> None:
    x = draw()
    found, _ = fla.fused_recurrent_gated_delta_rule(x["q"], x["k"], x["v"], x["g"], x["gk"], beta=x["beta"])
    expected, _ = loop(x["q"], x["k"], x["v"], x["g"][..., None] + x["gk"], x["beta"])
    torch.testing.assert_close(found, expected, **EXACT)
    gamma = torch.tensor([-0.1, -0.7], dtype=torch.float64)
    for name in ("chunk_simple_gla", "fused_recurrent_simple_gla"):
        found, _ = getattr(fla, name)(x["q"], x["k"], x["v"], x["g"], gamma)
        torch.testing.assert_close(found, loop(x["q"], x["k"], x["v"], x["g"] + gamma)[0], **EXACT)
    found, _ = fla.fused_recurrent_delta_rule(x["q"], x["k"], x["v"])
    torch.testing.assert_close(found, loop(x["q"], x["k"], x["v"], beta=torch.ones_like(x["beta"]))[0], **EXACT)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["chunk_linear_attn", "fused_recurrent_linear_attn"])
def test_normalised_linear_attention(name: str, packed: bool) -> None:
    x = {n: t.abs() for n, t in draw(batch=1).items()}
    start = (state(3 if packed else 1).abs(), state(3 if packed else 1, 1, H, K).abs())
    how: dict[str, Any] = {"normalize": True, "output_final_state": True, "initial_state": start}
    how |= {"cu_seqlens": torch.tensor(ENDS)} if packed else {}
    out, (kv, z) = getattr(fla, name)(x["q"], x["k"], x["v"], **how)

    def run(states: list[Tensor], q: Tensor, k: Tensor, v: Tensor, **_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not q.shape[1]:
            return v, states[0], states[1]
        rows, end = loop(q, k, v, state=states[0])
        sums = states[1] + k.cumsum(1)
        return rows / ((q * sums).sum(-1, keepdim=True) / K**0.5 + 1e-10), end, sums[:, -1:]

    torch.testing.assert_close((out, kv, z), apart(run, ENDS if packed else [0, T], [*start], x), **EXACT)


@pytest.mark.parametrize("packed", [False, True])
def test_mesa_net(packed: bool) -> None:
    x, count = draw(batch=1), 3 if packed else 1
    ridge = torch.full((H, K), 0.4, dtype=torch.float64)
    kk, kv = state(count, H, K, K), state(count)
    kk = kk @ kk.mT
    how: dict[str, Any] = {"output_final_state": True, **({"cu_seqlens": torch.tensor(ENDS)} if packed else {})}
    found = fla.chunk_mesa_net(x["q"], x["k"], x["v"], x["g"], x["beta"], ridge, kk, kv, **how)

    def run(states: list[Tensor], **tokens: Tensor) -> Any:
        return mesa(ridge, *states, **tokens) if tokens["q"].shape[1] else (tokens["v"], *states)

    torch.testing.assert_close(found, apart(run, ENDS if packed else [0, T], [kk, kv], x), **EXACT)


def test_one_step_of_mesa_net() -> None:
    x, ridge = draw(), torch.full((H, K), 0.4, dtype=torch.float64)
    first = {n: t[:, 0] for n, t in x.items()}
    kk, kv = state(B, H, K, K), state(B)
    kk = kk @ kk.mT
    step = fla.mesa_net_decoding_one_step(*(first[n] for n in "qkvg"), ridge, first["beta"], kk, kv)
    expected = mesa(ridge, kk, kv, **{n: t[:, :1] for n, t in x.items()})
    torch.testing.assert_close(step, (expected[0][:, 0], *expected[1:]), **EXACT)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_parallax_and_softmax_attention(packed: bool, window: int | None) -> None:
    make = torch.Generator().manual_seed(2)
    x = {n: torch.randn(1, T, 4 if n in "qr" else 2, K, generator=make, dtype=torch.float64) for n in "qrkv"}
    how: dict[str, Any] = {"window_size": window, **({"cu_seqlens": torch.tensor(ENDS)} if packed else {})}

    def run(states: list[Tensor], q: Tensor, r: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
        return (parallax(q, r, k, v, window),) if q.shape[1] else (q,)

    (expected,) = apart(run, ENDS if packed else [0, T], [], x)
    torch.testing.assert_close(fla.parallel_parallax(*x.values(), **how), expected, **EXACT)
    (expected,) = apart(run, ENDS if packed else [0, T], [], {**x, "r": 0 * x["r"]})
    torch.testing.assert_close(fla.parallel_attn(x["q"], x["k"], x["v"], **how), expected, **EXACT)


def test_dtypes() -> None:
    x = draw(dtype=torch.bfloat16)
    out, end = fla.chunk_gated_delta_rule(*(x[n] for n in ("q", "k", "v", "g", "beta")), output_final_state=True)
    expected, after = loop(*(x[n].double() for n in ("q", "k", "v", "g", "beta")))
    assert (out.dtype, end.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(end.double(), after, rtol=1e-5, atol=1e-5)


def test_what_is_not_finite_stays_in_the_state() -> None:
    x = draw()
    x["v"][0, 3] = torch.nan
    out, end = fla.chunk_delta_rule(x["q"], x["k"], x["v"], x["beta"], output_final_state=True)
    assert out[0, :3].isfinite().all()
    assert out[0, 3:].isnan().all()
    assert end[0].isnan().all()
    assert end[1].isfinite().all()


def message(name: str, **how: Any) -> str:
    return refuses(f"^{name}: ", call, name, {**draw(batch=how.pop("batch", B)), **how.pop("x", {})}, **how)


def test_mistakes() -> None:
    zero, ends = torch.zeros(1), torch.tensor(ENDS)
    for name, how in {
        "fused_recurrent_gla": {"gv": zero}, "fused_recurrent_retention": {"reverse": True},
        "chunk_kda": {"use_graph": True}, "chunk_gated_delta_rule": {"cp_context": zero},
    }.items():  # fmt: skip
        assert f"{next(iter(how))} is not supported; " in message(name, **how)
    assert "packs sequences into one row, but q has 2 rows" in message("chunk_gla", cu_seqlens=ends)
    assert "non-decreasing integers starting at 0" in message("chunk_gla", batch=1, cu_seqlens=torch.tensor([4, 7]))
    wrong = message("chunk_gla", batch=1, cu_seqlens=ends, initial_state=state(2))
    assert "initial_state has shape [2, 2, 3, 5], expected [3, 2, 3, 5]" in wrong
    assert "beta has shape [2, 11], expected [2, 11, 2]" in message("chunk_delta_rule", x={"beta": torch.rand(B, T)})
    assert "g has shape [2, 11, 2], expected [2, 11, 2, 3]" in message("chunk_gla", x={"gk": draw()["g"]})
    assert "k has shape" in message("chunk_retention", x={"k": draw()["k"].transpose(1, 2)})
    assert "v has 3 heads, expected a multiple of the 2" in message("chunk_kda", x={"v": torch.zeros(B, T, 3, V)})
    assert "needs A_log" in message("chunk_gated_delta_rule", use_gate_in_kernel=True)
    gated = partial(message, "chunk_kda", use_gate_in_kernel=True)
    assert "A_log has shape [1], expected 2 numbers for g [2, 11, 2, 3]." in gated(A_log=zero)
    assert "dt_bias has shape [1], expected 6 numbers" in gated(A_log=torch.zeros(2), dt_bias=zero)
    assert "lower_bound is 1, expected lower_bound <= 0" in gated(lower_bound=1.0)
    assert "A_log is a list" in gated(A_log=[0.0, 0.0])
    assert "use_beta_sigmoid_in_kernel" in message("chunk_kda", allow_neg_eigval=True)
    assert "normalize=True" in message("chunk_linear_attn", initial_state=(zero, zero))
    for name in ("chunk_linear_attn", "chunk_delta_rule", "parallel_attn"):
        assert "scale has shape [2, 5]" in message(name, scale=torch.ones(2, 5))
        assert "layout" not in message(name, scale=torch.ones(2, 5))
    mesa = [draw()[n] for n in ("q", "k", "v", "g", "beta")]
    refuses("^chunk_mesa_net: max_CG_iteration is 0", fla.chunk_mesa_net, *mesa, torch.ones(H, K), max_CG_iteration=0)
    assert "window_size is 0" in message("parallel_attn", window_size=0)
    with pytest.raises(TypeError, match="head_first"):
        fla.chunk_gla(zero, zero, zero, zero, head_first=True)  # type: ignore[call-arg]
