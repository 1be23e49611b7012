"""Every call with a state of fixed size against its definition in float64."""

import itertools
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hostile import some
from mistakes import refuses
from operators import Recorder
from recurrences import CASES, FADING, FEW, GUARDED, ORDERS, Case, Inputs, close, cut, fields, grads, key_mask, loss
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import regard

ORDERED = [(name, order) for name, case in CASES.items() for order in case.orders]


@pytest.mark.parametrize(("name", "order"), ORDERED)
def test_every_form_is_its_definition(name: str, order: str) -> None:
    """Outputs, states and gradients, grouped heads, with and without a mask, chunks that do and do not divide T."""
    case = CASES[name]
    for mask in (None, key_mask()):
        x = case.draw()
        expected, last = case.define(x, order, mask)
        wanted = grads(expected, last.values(), x)
        for way in case.ways:
            out, state = case.run(x, attn_mask=mask, **way, **ORDERS[order])
            close(out, expected, 1e-12 * case.loose, way)
            close(fields(state, last), last.values(), 1e-12, way)
            assert (getattr(state, "squares", None) is not None) == (name.split(",")[0] in GUARDED)
            close(grads(out, fields(state, last), x), wanted, 1e-11 * case.loose**1.5, way)
            assert state.tokens == 9


@pytest.mark.parametrize(("name", "order"), [pair for pair in ORDERED if pair[1] != "all"])
def test_prefill_chunks_and_steps_are_one_call(name: str, order: str) -> None:
    """However the sequence is cut, with gradients that flow through the states."""
    case, mask = CASES[name], key_mask()
    x = case.draw()
    expected, last = case.define(x, order, mask)
    wanted = grads(expected, last.values(), x)
    for cuts, way in itertools.product(((0, 4, 9), range(10)), case.few):
        state, parts = None, []
        for a, b in itertools.pairwise(cuts):
            out, state = case.run(cut(x, a, b), state=state, attn_mask=mask[:, a:b], **way, **ORDERS[order])
            parts.append(out)
        out = torch.cat(parts, 2)
        close(out, expected, 1e-12 * case.loose, way)
        close(grads(out, fields(state, last), x), wanted, 1e-11 * case.loose**1.5, way)
        assert state.tokens == 9


@pytest.mark.parametrize("name", FEW)
def test_float32_and_lengths(name: str) -> None:
    """All forms to 1e-5, with the state they leave."""
    case = CASES[name]
    loose = 300 if name in GUARDED else 1
    for length in (1, 63, 65):
        x = case.draw(length, grad=False)
        expected, last = case.define(x)
        for way in case.few:
            out, state = case.run({n: t.float() for n, t in x.items()}, **way)
            close(out, expected, 1e-5 * loose, way)
            assert out.dtype == fields(state)[0].dtype == torch.float32
            close(fields(state, last), last.values(), 1e-5, way)


@pytest.mark.parametrize("name", FEW)
def test_bfloat16_is_rounded_once(name: str) -> None:
    """Inputs and output are rounded, nothing between."""
    case = CASES[name]
    x = case.draw(dtype=torch.bfloat16, grad=False)
    expected, _ = case.define({n: t.double() for n, t in x.items()})
    for way in case.few:
        out, state = case.run(x, **way)
        assert out.dtype == torch.bfloat16
        assert all(t.dtype == torch.float32 for t in fields(state))
        near = 2**-8 * expected.abs() + 1e-5 * case.loose * expected.abs().amax().clamp(min=1)
        assert ((out.double() - expected).abs() <= near).all()


@pytest.mark.parametrize("name", ["linear", "shift-cosine", "delta", "mesa, ridge by head"])
def test_autocast_changes_nothing(name: str) -> None:
    """The forward pass stays in full precision, and the backward pass of linear attention without decay too."""
    results = []
    for on in (False, True):
        x = CASES[name].draw(dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            out, state = CASES[name].run(x, chunk_size=4)
        with torch.autocast("cpu", torch.bfloat16, enabled=on and name in ("linear", "shift-cosine")):
            results.append((out, state.values, *grads(out, fields(state), x)))
    for one, two in zip(*results, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, two)


@pytest.mark.parametrize("name", FADING)
def test_strong_decay_is_exact(name: str) -> None:
    """-20 a token, one step of -1e4 between weak ones, and -inf: no overflow, no loss of digits, finite gradients."""
    case = CASES[name]
    for strength in (-20.0, -1e4, -torch.inf):
        x = case.draw(40, grad=False)
        strong = torch.full_like(x["g"], strength)
        if x["g"].dim() > 1 and strength < -20:
            strong = torch.where(torch.arange(40).view(-1, *(1,) * (x["g"].dim() - 3)) % 10 == 5, strength, x["g"])
        expected, _ = case.define({**x, "g": strong})
        small = {n: t.float().requires_grad_() for n, t in {**x, "g": strong}.items()}
        for way in case.ways:
            out, state = case.run(small, **way)
            close(out.detach(), expected, 2e-6, (way, strength))
            assert all(t.isfinite().all() for t in grads(out, fields(state), small))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, torch.finfo(torch.float64).max])
@pytest.mark.parametrize("name", FEW)
def test_hidden_content_never_matters(name: str, bad: float) -> None:
    """Anything in masked keys, values and numbers of pairs: the same bits, and gradients of exactly zero there."""
    case, mask = CASES[name], key_mask()
    pairs = [n for n, t in case.draw().items() if n in "kvgbeta" and t.dim() > 2]
    for way in case.few:
        results = []
        for fill in (None, bad):
            x = case.draw(grad=False)
            for n in pairs if fill else ():
                x[n].transpose(1, 2)[~mask] = -bad if n == "g" and bad > 0 else bad
            x = {n: t.requires_grad_() for n, t in x.items()}
            out, state = case.run(x, attn_mask=mask, **way)
            found = dict(zip(x, grads(out, fields(state), x), strict=True))
            assert not any(found[n].transpose(1, 2)[~mask].any() for n in pairs)
            results.append((out, *fields(state), *found.values()))
        assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


@pytest.mark.parametrize("name", FEW)
def test_what_is_not_finite_shows_in_exactly_the_rows_that_see_it(name: str) -> None:
    """Also in the calls that come after, through the state."""
    case = CASES[name]
    clean = case.draw(grad=False)
    for which, way in itertools.product([n for n, t in clean.items() if n in "qkvgbeta" and t.dim() > 2], case.few):
        corrupted = {n: t.clone() for n, t in clean.items()}
        corrupted[which].view(2, corrupted[which].shape[1], 9, -1)[0, 0, 5, 0] = torch.nan
        outs = []
        for x in (clean, corrupted):
            first, state = case.run(cut(x, 0, 7), **way)
            second, state = case.run(cut(x, 7, 9), state=state, **way)
            outs.append(torch.cat([first, second], 2))
        hit = torch.zeros(2, 4, 9, dtype=torch.bool)
        hit[(0, 0, 5) if which == "q" else (0, slice(2), slice(5, None))] = True  # two query heads of the key head
        assert outs[1][hit].isnan().all()
        assert torch.equal(outs[1][~hit], outs[0][~hit])
        assert all(t.isfinite().all() for t in fields(state))
        assert state.non_finite.tolist() == [[which != "q", False], [False, False]]


@pytest.mark.parametrize("name", CASES)
def test_later_tokens_leave_earlier_rows_alone(name: str) -> None:
    """To the last bit, whatever they become; at 2^55, which counts as finite, the steps of the delta rule overflow."""
    case = CASES[name]
    x = case.draw(dtype=torch.float32, grad=False)
    for way in ({"chunk_size": 4}, *(way for way in case.ways if "solver" in way)):
        out, _ = case.run(x, **way)
        for fill, begin in itertools.product((1e4, 2.0**55, torch.nan, torch.finfo(torch.float32).max), (2, 6)):
            later = {n: t.clone() for n, t in x.items()}
            for n in {*"qkv"} & {*later}:
                later[n][:, :, begin:] = fill
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                assert torch.equal(case.run(later, **way)[0][:, :, :begin], out[:, :, :begin])


@pytest.mark.parametrize("name", CASES)
def test_nothing_to_do_and_nothing_seen(name: str) -> None:
    """No tokens and no sequences leave the state; rows that see nothing are 0 with gradient 0."""
    case = CASES[name]
    x = case.draw()
    before = case.run(x)[1]
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1] = False
    order = ORDERS["strict" if "strict" in case.orders else "causal"]
    mask[:, 0] &= bool(order)  # the first row sees nothing
    for way in case.few:
        out, state = case.run(cut(x, 0, 0), state=before, **way)
        assert out.shape == (2, 4, 0, 3)
        assert state.tokens == 9
        assert all(torch.equal(a, b) for a, b in zip(fields(state), fields(before), strict=True))
        out, state = case.run({n: t if t.dim() < 3 else t[:0] for n, t in x.items()}, **way)
        assert out.shape == (0, 4, 9, 3)
        assert fields(state)[0].shape[:2] == (0, 2)
        out, _ = case.run(x, attn_mask=mask[:, None, None], **way, **order)
        assert not out[:, :, 0].any()
        assert not out[1].any()
        found = dict(zip(x, torch.autograd.grad(loss(out), list(x.values())), strict=True))
        assert all(t.isfinite().all() for t in found.values())
        assert not any(t[1].any() for t in found.values() if t.dim() > 2)
        assert not found.get("q", out)[:, :, 0].any()
        if "all" in case.orders:
            none = {n: t[:, :, :0] if n in "kvgbeta" and t.dim() > 2 else t for n, t in x.items()}
            assert not case.run(none, is_causal=False, **way)[0].any()


@pytest.mark.parametrize("name", CASES)
def test_tensors_without_numbers(name: str) -> None:
    """On the meta device: shapes of outputs and gradients, with a mask and a state."""
    case, mask = CASES[name], torch.ones(2, 9, dtype=torch.bool, device="meta")
    x = {n: t.detach().to("meta").requires_grad_() for n, t in case.draw().items()}
    for way, order in itertools.product(case.few, case.orders):
        _, state = case.run(x, **way, **ORDERS[order])
        out, after = case.run(x, attn_mask=mask, state=state.detach(), **way, **ORDERS[order])
        assert (out.shape, out.device.type, fields(after)[0].device.type) == ((2, 4, 9, 3), "meta", "meta")
        found = torch.autograd.grad(out.sum(), list(x.values()), allow_unused=True)
        assert all(g is None or g.shape == t.shape for g, t in zip(found, x.values(), strict=True))


def small(case: Case, length: int, seed: int = 0) -> Inputs:
    """One sequence, two query heads of one key head."""
    x = case.draw(length, seed, grad=False)
    short = {n: t[:1] if n in "kv" or t.dim() > 2 else t for n, t in x.items()}
    heads = {"q": 2, "scale": 2, "bias": 2, "ridge": 2}
    head = lambda n, t: t if t.dim() == 0 else t[:, : heads.get(n, 1)] if t.dim() > 2 else t[: heads.get(n, 1)]  # noqa: E731
    return {n: head(n, t).clone().requires_grad_() for n, t in short.items()}


@pytest.mark.parametrize("name", some(FEW, "linear, given", "delta, decay by head"))
def test_derivatives(name: str) -> None:
    """Finite differences in every input and in the state that comes in; second ones where there are any."""
    case = CASES[name]
    x, before = small(case, 4), case.run(small(case, 3, 8))[1].detach()
    held = {n: t for n, t in before._tensors().items() if n in ("values", "keys", "gram", "sums")}
    if "gram" in held:
        held["gram"] = torch.linalg.cholesky(held["gram"] + 1e-3 * torch.eye(4, dtype=torch.float64))
    leaves = [*x.values(), *(t.detach().requires_grad_() for t in held.values())]
    mask = torch.tensor([[True, True, False, True]])

    def run(*given: Tensor, **way: Any) -> tuple[Tensor, ...]:
        own = dict(zip(held, given[len(x) :], strict=True))
        if "gram" in own:  # stays symmetric
            own["gram"] = own["gram"] @ own["gram"].mT
        state = replace(before, **own)
        inputs = dict(zip(x, given, strict=False))
        out, after = case.run(inputs, state=state, attn_mask=mask, **{**way, "chunk_size": 2})
        return out, *fields(after, held)

    for way in case.few:
        assert gradcheck(lambda *y, way=way: run(*y, **way), leaves, eps=1e-6, atol=1e-5, rtol=1e-4)
        if case.once and "form" not in way:
            out = run(*leaves, **way)[0]
            first = torch.autograd.grad(out.square().sum(), leaves[0], create_graph=True)[0]
            refuses("form='parallel'", torch.autograd.grad, first.square().sum(), leaves[1])
        else:
            assert gradgradcheck(lambda *y, way=way: run(*y, **way), leaves, atol=1e-4, rtol=1e-3, fast_mode=True)


@pytest.mark.parametrize("name", FEW)
def test_forward_mode_and_vmap_see_the_derivative(name: str) -> None:
    """The tangent is a central difference; vmap over sequences is one call with all of them."""
    case = CASES[name]
    x = case.draw(grad=False)
    n = "k" if "k" in x else "v"
    direction = torch.linspace(-1, 1, x[n].numel(), dtype=torch.float64).view_as(x[n])
    out, tangent = torch.func.jvp(lambda y: case.run({**x, n: y}, chunk_size=4)[0], (x[n],), (direction,))
    ends = [case.define({**x, n: x[n] + e * direction})[0] for e in (1e-6, -1e-6)]
    close(out, case.define(x)[0], 1e-10)
    close(tangent, (ends[0] - ends[1]) / 2e-6, 1e-5 if name in GUARDED else 1e-7)
    assert tangent.abs().max() > 0.1
    each = {n: t for n, t in x.items() if t.dim() > 2}
    run = lambda *y: case.run({**x, **{n: t[None] for n, t in zip(each, y, strict=True)}}, chunk_size=4)[0][0]  # noqa: E731
    close(torch.func.vmap(run)(*each.values()), out, 1e-10)


MASKED: dict[str, Any] = {
    "linear": regard.linear_attention,
    "delta": partial(regard.delta_rule, beta=0.5),
    "mesa": partial(regard.mesa_attention, ridge=0.5),
    "interpolated": partial(regard.interpolated_attention, trend="linear-attention"),
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("call", MASKED)
def test_a_mask_in_a_whole_graph_of_any_length(call: str) -> None:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        out = MASKED[call](q, k, v, attn_mask=mask)
        return out if call == "interpolated" else out[0]

    compiled = torch.compile(run, backend="eager", fullgraph=True, dynamic=True)
    for length in (16, 24, 33):
        x = (*torch.randn(3, 2, 2, length, 4, generator=torch.Generator().manual_seed(0)), key_mask(length))
        torch.testing.assert_close(compiled(*x), run(*x), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", FEW)
def test_one_whole_graph(name: str) -> None:
    """Forward and backward after an earlier state; linear attention without decay at several lengths."""
    case = CASES[name]
    lengths = (9,) if "decay" in name or not name.startswith(("linear", "relu2")) else (10, 24)

    def run(x: Inputs, mask: Tensor, state: Any) -> tuple[Tensor, Tensor]:
        out, state = case.run(x, attn_mask=mask, state=state, chunk_size=4)
        return out, fields(state)[0]

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=len(lengths) > 1 or None)
    first = case.run(case.draw(3, 1, torch.float32, grad=False))[1]
    for length in lengths:
        results = []
        for fn in (run, compiled):
            x = case.draw(length, dtype=torch.float32)
            out, values = fn(x, key_mask(length), first)
            results.append((out, values, *grads(out, [values], x)))
        torch.testing.assert_close(*reversed(results), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_step_is_compiled_once() -> None:
    """Decoding: the state goes in and out, and its size never changes."""
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    case, counts = CASES["elu"], []
    compiled = torch.compile(lambda x, state: case.run(x, state=state), backend=count, fullgraph=True)
    x = case.draw(12, dtype=torch.float32, grad=False)
    state, (whole, _) = case.run(cut(x, 0, 4))[1], case.run(x)
    for t in range(4, 12):
        out, state = compiled({n: y.contiguous() for n, y in cut(x, t, t + 1).items()}, state)
        torch.testing.assert_close(out, whole[:, :, t : t + 1], rtol=1e-5, atol=1e-5)
        counts.append(count.frame_count)
    assert state.tokens == 12
    assert counts[2:] == [counts[2]] * 6  # once dynamo knows that the number of tokens changes


LINEAR = {"linear_forward", "linear_backward"}
MESA = {"decayed_scan", "mesa_solve", "mesa_attach"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way", "operators"),
    [
        ("shift-cosine, given", {}, LINEAR),
        ("linear*fixed*normalised, given", {}, LINEAR),
        ("linear, decay by token", {}, {"decayed_scan"}),
        ("delta, decay by feature", {}, {"decayed_scan"}),
        ("mesa, ridge by head", {}, MESA),
        ("mesa, ridge by head, decay", {}, MESA),
        ("mesa, ridge by head, decay", {"solver": "cg"}, MESA),
    ],
)
def test_operators_are_what_torch_asks_for(name: str, way: dict[str, Any], operators: set[str]) -> None:
    """Every operator that a forward and a backward pass calls, with and without a state and a mask."""
    case = CASES[name]
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, :3] = False
    first = case.run(case.draw(3, 1, torch.float32))[1].detach()
    for more in ({}, {"state": first, "attn_mask": mask}):
        with Recorder() as seen:
            out, state = case.run(case.draw(dtype=torch.float32), chunk_size=4, **way, **more)
            (out.sum() + state.values.sum()).backward()
        found = {func.name().split("::")[1]: (func, args) for func, args in seen.calls}
        assert set(found) == operators
        for operator, (func, args) in found.items():
            gradient = operator in ("decayed_scan", "linear_forward")  # the others have no derivative of every input
            fresh = [
                x.detach().clone().requires_grad_(gradient and x.is_floating_point()) if isinstance(x, Tensor) else x
                for x in args
            ]
            torch.library.opcheck(func, tuple(fresh))


def test_a_decay_multiplies_each_pair_by_what_lies_between() -> None:
    """Against the sum over pairs, w_ij = sum_f q_if k_jf exp(sum of g over j < l <= i), and with a bias."""
    x = CASES["linear, decay by feature"].draw(grad=False)
    q, k = x["q"] / 2, x["k"].repeat_interleave(2, 1)
    total = x["g"].cumsum(2).repeat_interleave(2, 1)
    fade = (total[:, :, :, None] - total[:, :, None]).exp()
    w = torch.einsum("bhif,bhjf,bhijf->bhij", q, k, fade).tril()
    close(CASES["linear, decay by feature"].run(x)[0], w @ x["v"].repeat_interleave(2, 1), 1e-12)
    token = x["g"][..., 0]
    tensors = (x["q"], x["k"], x["v"])
    out, _ = regard.linear_attention(*tensors, "linear*fixed(bias=1.5)", log_decay=token, chunk_size=4)
    fade = (token.cumsum(2)[:, :, :, None] - token.cumsum(2)[:, :, None]).exp().repeat_interleave(2, 1)
    close(out, ((q @ k.mT + 1.5) * fade).tril() @ x["v"].repeat_interleave(2, 1), 1e-12)
