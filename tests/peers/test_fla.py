"""`regard.compat.fla` has the signatures of fla (PyPI: flash-linear-attention) and computes what its naive forms do.

So do the functions of regard that it calls: the delta rule, linear, Mesa, local linear and softmax attention. The naive
forms compute in float32; those of the delta rule and of retention take [B, H, T, D], the others [B, T, H, D].
"""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_model import in_chunks, make, padded, text
from torch import Tensor

from regard.compat import fla as ours

pytest.importorskip("fla", reason="flash-linear-attention is not installed: run `make test-peers`")
pytestmark = pytest.mark.peers

B, H, HV, T, K, V = 2, 3, 6, 37, 16, 24
TOLERANCE = {"rtol": 3e-5, "atol": 3e-5}
FORMS = ("chunk", "fused_recurrent")


@pytest.fixture(autouse=True)
def quiet() -> None:
    warnings.filterwarnings("ignore", message="Triton is not supported")


def shown(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Name and default of what can be given by position."""
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values() if p.kind not in kinds]


@pytest.mark.parametrize("name", ours.__all__)
def test_signature(name: str) -> None:
    import fla.ops
    import fla.ops.mesa_net

    theirs = getattr(fla.ops, name, None) or getattr(fla.ops.mesa_net, name)
    assert shown(getattr(ours, name)) == shown(theirs)


def draw(heads: int = H, tokens: int = T, batch: int = B) -> dict[str, Tensor]:
    """q, unit k [B, T, H, K], v [B, T, HV, V], g, beta [B, T, HV], gk [B, T, HV, K] and a state [B, HV, K, V]."""
    make = torch.Generator().manual_seed(0)
    normal = lambda *sizes: torch.randn(sizes, generator=make)  # noqa: E731
    k = torch.nn.functional.normalize(normal(batch, tokens, H, K), dim=-1)
    x = {"q": normal(batch, tokens, H, K), "k": k, "v": normal(batch, tokens, heads, V)}
    x |= {"g": -normal(batch, tokens, heads).abs(), "gk": -normal(batch, tokens, heads, K).abs()}
    return {**x, "beta": normal(batch, tokens, heads).sigmoid(), "state": normal(batch, heads, K, V)}


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, **TOLERANCE)


def call(name: str, *args: Any, **how: Any) -> Any:
    return getattr(ours, name)(*args, **how, output_final_state=True)


@pytest.mark.parametrize("form", FORMS)
def test_delta_rule(form: str) -> None:
    from fla.ops.delta_rule.naive import delta_rule_recurrence

    x = draw()
    first = [x[n].transpose(1, 2) for n in ("q", "k", "v", "beta")]
    out, end = delta_rule_recurrence(*first, initial_state=x["state"])
    args = [x[n] for n in ("q", "k", "v", "beta")]
    same(call(f"{form}_delta_rule", *args, initial_state=x["state"]), (out.transpose(1, 2), end))


@pytest.mark.parametrize("form", FORMS)
def test_gated_delta_rule(form: str) -> None:
    from fla.ops.gated_delta_rule.gate import naive_gdn_gate
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

    x, speed = draw(), torch.linspace(-1, 1, H)
    given = {n: x[n] for n in ("q", "k", "v", "beta")}
    start = {"initial_state": x["state"]}
    expected = naive_recurrent_gated_delta_rule(**given, g=x["g"], **start, output_final_state=True)
    same(call(f"{form}_gated_delta_rule", **given, g=x["g"], **start), expected)
    gate = naive_gdn_gate(-x["g"], speed, speed)
    expected = naive_recurrent_gated_delta_rule(**given, g=gate, output_final_state=True)
    raw = {"use_gate_in_kernel": True, "A_log": speed, "dt_bias": speed}
    same(call(f"{form}_gdn", **given, g=-x["g"], **raw), expected)


@pytest.mark.parametrize("form", FORMS)
def test_kimi_delta_attention(form: str) -> None:
    from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate
    from fla.ops.kda.naive import naive_recurrent_kda

    x = draw(heads=HV)
    speed, lift = torch.linspace(-1, 1, HV), torch.linspace(0, 1, HV * K)
    given = {n: x[n] for n in ("q", "k", "v", "beta")}
    start = {"initial_state": x["state"], "scale": 0.3}
    expected = naive_recurrent_kda(**given, g=x["gk"], **start, output_final_state=True)
    same(call(f"{form}_kda", **given, g=x["gk"], **start), expected)
    raw = {"use_gate_in_kernel": True, "A_log": speed, "dt_bias": lift}
    for more, gate in (
        ({}, naive_kda_gate(x["gk"], speed, lift)),
        ({"lower_bound": -5.0}, naive_kda_lowerbound_gate(x["gk"], speed, lift, -5.0)),
    ):
        expected = naive_recurrent_kda(**given, g=gate, output_final_state=True)
        same(call(f"{form}_kda", **given, g=x["gk"], **raw, **more), expected)


@pytest.mark.parametrize("form", FORMS)
def test_gated_linear_attention(form: str) -> None:
    from fla.ops.gla.naive import naive_recurrent_gla

    x = draw()
    args = [x[n] for n in ("q", "k", "v", "gk")]
    expected = naive_recurrent_gla(*args, initial_state=x["state"], output_final_state=True)
    same(call(f"{form}_gla", *args, initial_state=x["state"]), expected)


@pytest.mark.parametrize("form", FORMS)
def test_simple_gated_linear_attention_and_retention(form: str) -> None:
    from fla.ops.retention.naive import naive_retention
    from fla.ops.simple_gla.naive import naive_recurrent_simple_gla

    x = draw()
    args = [x[n] for n in ("q", "k", "v")]
    expected = naive_recurrent_simple_gla(*args, x["g"], initial_state=x["state"], output_final_state=True)
    same(call(f"{form}_simple_gla", *args, x["g"], initial_state=x["state"]), expected)
    out, _ = call(f"{form}_retention", *args)
    same([out], [naive_retention(*(x.transpose(1, 2) for x in args)).transpose(1, 2)])


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_linear_attention(form: str, normalize: bool) -> None:
    from fla.ops.linear_attn.naive import naive_recurrent_linear_attn

    x = {n: t.abs() for n, t in draw().items()}
    how: dict[str, Any] = {"normalize": normalize, "output_final_state": True}
    for start in (None, (x["state"], x["state"][..., 0][:, None]) if normalize else x["state"]):
        args = [x[n] for n in ("q", "k", "v")]
        out, end = getattr(ours, f"{form}_linear_attn")(*args, initial_state=start, **how)
        expected, after = naive_recurrent_linear_attn(*args, initial_state=start, **how)
        same((out, *end) if normalize else (out, end), (expected, *after) if normalize else (expected, after))


def test_packed_sequences() -> None:
    from fla.ops.gated_delta_product.naive import naive_recurrent_gated_delta_product

    x, ends = draw(batch=1), torch.tensor([0, 5, 21, T])
    start = torch.randn(3, H, K, V, generator=torch.Generator().manual_seed(1))
    args, how = [x[n] for n in ("q", "k", "v", "g", "beta")], {"initial_state": start, "cu_seqlens": ends}
    expected = naive_recurrent_gated_delta_product(*args, scale=K**-0.5, output_final_state=True, **how)
    for form in FORMS:
        same(call(f"{form}_gated_delta_rule", **{n: x[n] for n in ("q", "k", "v", "g", "beta")}, **how), expected)


@pytest.mark.parametrize("form", FORMS)
def test_delta_product_is_the_delta_rule_with_interleaved_keys(form: str) -> None:
    """Each token fades at its first step; the row after its last step is read."""
    from fla.ops.gated_delta_product.naive import naive_recurrent_gated_delta_product

    steps = 3
    x, long = draw(), draw(tokens=T * steps)
    pairs = {"k": long["k"], "v": long["v"], "beta": 2 * long["beta"]}
    expected = naive_recurrent_gated_delta_product(
        x["q"], **pairs, g=x["g"], scale=K**-0.5, num_householder=steps, output_final_state=True
    )
    fade = torch.nn.functional.pad(x["g"][:, :, None], (0, 0, 0, steps - 1)).flatten(1, 2)
    out, state = call(f"{form}_gated_delta_rule", x["q"].repeat_interleave(steps, 1), **pairs, g=fade)
    same((out[:, steps - 1 :: steps], state), expected)


def test_mesa_net() -> None:
    from fla.ops.mesa_net import naive_mesa_net_decoding_one_step, naive_mesa_net_exact

    x = draw()
    ridge = 0.25 + torch.rand(H, K, generator=torch.Generator().manual_seed(3))
    args, v = [x["q"], x["k"]], x["v"][..., :K]
    kv = x["state"][..., :K].contiguous()
    kk = kv @ kv.mT
    expected = naive_mesa_net_exact(*args, v, x["g"], ridge, x["beta"], kk, kv)
    found = ours.chunk_mesa_net(*args, v, x["g"], x["beta"], ridge, kk, kv, output_final_state=True)
    torch.testing.assert_close(found[0], expected[0], rtol=2e-4, atol=2e-4)
    same(found[1:], expected[1:])
    step = [t[:, 0] for t in (*args, v, x["g"])]
    found = ours.mesa_net_decoding_one_step(*step, ridge, x["beta"][:, 0], kk, kv)
    expected = naive_mesa_net_decoding_one_step(*step, ridge, x["beta"][:, 0], kk, kv)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-3, atol=1e-3)
    same(found[1:], expected[1:])


@pytest.mark.parametrize("window", [None, 7])
def test_parallax_and_attention(window: int | None) -> None:
    from fla.ops.attn.naive import naive_parallel_attn
    from fla.ops.parallax.naive import naive_parallax

    make = torch.Generator().manual_seed(5)
    q, r, k, v = (torch.randn(B, T, heads, K, generator=make) for heads in (HV, HV, H, H))
    same([ours.parallel_parallax(q, r, k, v, 0.3, window)], [naive_parallax(q, r, k, v, 0.3, window)])
    expected = naive_parallel_attn(q, k, v, window_size=window)
    same([ours.parallel_attn(q, k, v, window_size=window)], expected[:1] if isinstance(expected, tuple) else [expected])


def test_unit_queries_and_keys() -> None:
    """In the kernels of fla: x / sqrt(|x|^2 + 1e-6). `naive_recurrent_kda` has no such argument."""
    from fla.ops.kda.naive import naive_recurrent_kda

    x = draw()
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (x["q"], 3 * x["k"]))
    expected = naive_recurrent_kda(q, k, x["v"], x["gk"], x["beta"], output_final_state=True)
    for form in FORMS:
        found = call(f"{form}_kda", x["q"], 3 * x["k"], x["v"], x["gk"], x["beta"], use_qk_l2norm_in_kernel=True)
        same(found, expected)


def test_gated_delta_net_runs_on_a_cpu_without_the_kernels_of_fla():
    model, (tokens, mask) = make("transformer", "gated-deltanet", torch.float32, num_hidden_layers=2), padded()
    model(tokens, attention_mask=mask, labels=tokens).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    with torch.no_grad():
        whole, parts = model(text(2)).logits, in_chunks(model, text(2), [4, 1, 1, 7])[0]
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=0)
