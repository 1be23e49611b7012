"""What the linear attentions are: their laws, hard inputs, and when `impl="auto"` takes them."""

import itertools
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from mistakes import refuses
from recurrences import CASES, FORMS, SOLVERS, attend, close, loss
from torch import Tensor
from torch.autograd import gradcheck
from torch.nn.functional import normalize

import regard
from regard import mesa_attention

TEXT = "linear*fixed*normalised"
CASE = CASES["mesa, ridge by number"]


def test_derivatives_through_the_squares_of_the_state() -> None:
    """Finite differences in the second moments, where the guard holds the sum and where it does not."""
    x, first = CASES[TEXT].draw(4, grad=False), CASES[TEXT].run(CASES[TEXT].draw(3, 8, grad=False))[1]
    held = x["k"].clone()
    held[:, :, 1] = -held[:, :, 0]  # two keys whose weights cancel
    for keys, own in ((x["k"], first), (held[:, :, :2], first.reset())):
        squares, leaf = own.squares.detach().requires_grad_(), keys.clone().requires_grad_()
        found = []
        for form in ("chunked", "parallel"):

            def run(keys: Any, squares: Any, form: str = form, own: Any = own) -> Any:
                state = regard.LinearState(own.values, own.keys, squares, own.non_finite, tokens=own.tokens)
                tensors = (x["q"][:, :, : keys.shape[2]], keys, x["v"][:, :, : keys.shape[2]])
                out, after = regard.linear_attention(*tensors, TEXT, state=state, form=form, chunk_size=3)
                return out, after.squares

            if own is first:
                assert gradcheck(run, (leaf, squares), eps=1e-6, atol=1e-5, rtol=1e-4)
            out, after = run(leaf, squares)
            found.append(torch.autograd.grad(loss(out) + loss(after), (leaf, squares)))
        close(*found, 1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_the_guard_holds_a_sum_that_cancels(form: str) -> None:
    """Weights 1 and -1 are divided by 1e-3 sqrt(2 (1 + 1)); weights of zero by one; squares of 2^50 do not overflow."""
    one = torch.ones(1, 1, 2, 1)
    k, v = torch.tensor([1.0, -1.0]).view(1, 1, 2, 1), torch.eye(2)[None, None]
    for size in (1.0, 2.0**-40, 2.0**50):
        out, _ = regard.linear_attention(one * size, k * size, v, TEXT, form=form, scale=1.0)
        torch.testing.assert_close(out[0, 0], torch.tensor([[1.0, 0.0], [500.0, -500.0]]), rtol=1e-6, atol=0)
    leaf = torch.zeros(1, 1, 2, 1, requires_grad=True)
    out, _ = regard.linear_attention(one * 3, leaf, v, TEXT, form=form, scale=1.0)
    assert not out.any()
    (grad,) = torch.autograd.grad(out[0, 0, 1, 0], leaf)
    assert grad.flatten().tolist() == [3.0, 0.0]


def test_delta_product() -> None:
    """n steps a token after one decay: S <- alpha_t S, then a step S <- S (I - beta k k^T) + beta v k^T a pair."""
    n, length, make = 3, 20, torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(2, 3, length, *size, generator=make, dtype=torch.float64)  # noqa: E731
    leaves = (draw(4), normalize(draw(n, 4), dim=-1), draw(n, 5), draw(n).sigmoid(), -draw().exp())
    q, k, v, beta, g = (x.requires_grad_() for x in leaves)
    state, rows = torch.zeros(2, 3, 5, 4, dtype=torch.float64), []
    for t in range(length):
        state = g[:, :, t, None, None].exp() * state
        for j in range(n):
            at = k[:, :, t, j, :, None]
            error = v[:, :, t, j, :, None] - state @ at
            state = state + beta[:, :, t, j, None, None] * error @ at.mT
        rows.append((state @ q[:, :, t, :, None])[..., 0])
    expected = torch.stack(rows, 2)
    wanted = torch.autograd.grad(loss(expected), leaves)
    decays = torch.nn.functional.pad(g[..., None], (0, n - 1)).flatten(2)
    inputs = [x.flatten(2, 3) for x in (q[:, :, :, None].expand(-1, -1, -1, n, -1), k, v, beta)]
    for form in FORMS:
        out = regard.delta_rule(*inputs, log_decay=decays, form=form, chunk_size=7)[0][:, :, n - 1 :: n]
        close(out, expected, 1e-11)
        close(torch.autograd.grad(loss(out), leaves, retain_graph=True), wanted, 1e-10)


def test_a_full_step_of_the_delta_rule_stores_the_pair() -> None:
    """beta |k|^2 = 1: what was just written is read back, and orthogonal keys do not disturb it."""
    keys = torch.linalg.qr(torch.randn(1, 2, 6, 6, dtype=torch.float64))[0]
    values = torch.randn(1, 2, 6, 3, dtype=torch.float64)
    out, state = regard.delta_rule(keys, keys, values, 1.0, chunk_size=4)
    close(out, values, 1e-12)
    close(state.read(keys), values, 1e-12)
    again, _ = regard.delta_rule(keys, keys, values.flip(2), 1.0, state=state)
    close(again, values.flip(2), 1e-12)  # old values are overwritten, not added to


def test_it_is_least_squares() -> None:
    """Against torch.linalg.lstsq on the data with sqrt(ridge) I below; and a linear map is found from D pairs on."""
    q, k, v, _ = CASE.draw(12, grad=False).values()
    for way in SOLVERS:
        out, _, found = mesa_attention(q, k, v, ridge=0.5, return_diagnostics=True, **way)
        for b, h, i in itertools.product(range(2), range(4), (0, 3, 11)):
            rows = torch.cat([k[b, h // 2, : i + 1], 0.5**0.5 * torch.eye(4, dtype=torch.float64)])
            right = torch.cat([v[b, h // 2, : i + 1], torch.zeros(4, 3, dtype=torch.float64)])
            close(out[b, h, i], q[b, h, i] @ torch.linalg.lstsq(rows, right).solution, 1e-12)
        assert not found["status"].any()
        assert found["residual"].shape == (2, 4, 12)
        assert found["residual"].max() <= 1e-12
        close(mesa_attention(q, k, v, ridge=0.5, scale=3.0, **way)[0], 3 * out, 1e-12)
    truth = torch.randn(4, 3, dtype=torch.float64)
    out, _ = mesa_attention(q, k, k @ truth, ridge=1e-9, tol=1e-5)
    close(out[:, :, 6:], q[:, :, 6:] @ truth, 1e-6)


def test_hard_keys_are_answered_or_reported() -> None:
    """Duplicated, collinear, zero and enormous keys; a ridge too small for the precision."""
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 40, d, generator=make) for h, d in ((4, 8), (2, 8), (2, 3)))
    for keys in (k[:, :, :1].expand_as(k), torch.zeros_like(k), k[..., :1] * torch.ones(8), k * 1e4):
        few = [x[:, :, :8] for x in (q, keys, v)]
        exact = mesa_attention(*(x.double() for x in few), ridge=1.0, form="recurrent")[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the enormous ones
            out, _, found = mesa_attention(*few, ridge=1.0, return_diagnostics=True)
        sound = (found["status"] == 0)[..., None]
        close(torch.where(sound, out, 0), torch.where(sound, exact, 0), 2e-3)
        assert out.isfinite().all()
    with pytest.warns(RuntimeWarning, match="systems are unconverged, with residuals up to"):
        found = mesa_attention(q, k * 1e4, v, ridge=1e-6, return_diagnostics=True)[2]
    assert (found["status"] == 3).any()
    with pytest.warns(RuntimeWarning, match="unconverged"):
        found = mesa_attention(q, k, v, ridge=0.5, solver="cg", max_iter=2, return_diagnostics=True)[2]
    assert found["iterations"].max() == 2
    assert ((found["residual"] > 3.5e-4) == (found["status"] == 3)).all()


def test_conjugate_gradients_take_the_steps_that_a_small_ridge_needs() -> None:
    """The matrices of a chunk differ much from the first one, since every token fades by 0.3."""
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 64, 32, generator=make) for _ in range(3))
    how = {"ridge": 1e-3, "log_decay": -0.3, "solver": "cg", "return_diagnostics": True}
    found = mesa_attention(normalize(q, dim=-1), normalize(k, dim=-1), v, **how)[2]
    assert not found["status"].any()
    assert found["residual"].max() < 3e-4


SHAPE = (2, 4, 128, 16)
FINITE = ("linear", "cosine", "shift-cosine", "relu", "relu2", "elu")


def test_auto_takes_it_for_finite_features_and_for_nothing_else() -> None:
    for name, spec in regard.presets().items():
        assert (regard.explain(spec, SHAPE, is_causal=True).chosen == "linear") == (name in FINITE)
    for spec in ("linear*fixed*normalised", "linear*fixed*euclidean", "linear*fixed(bias=2)*cosine*unnormalised"):
        for how in ({}, {"mask": "keys"}, {"exclude_self": True}, {"is_causal": True, "query_offset": 3}):
            assert regard.explain(spec, SHAPE, **how).chosen == "linear"


@pytest.mark.parametrize(
    ("spec", "how", "why"),
    [
        ("softmax", {}, "finite features"),
        ("local-linear", {}, "finite features"),
        ("linear*fixed*elu*linear(ridge=0.1)", {}, "finite features"),
        ("elu", {"is_causal": True, "window": 4}, "has no window"),
        ("elu", {"mask": "pairs"}, "depend only on the key"),
        ("elu", {"return_diagnostics": True}, "has no row statistics"),
    ],
)
def test_reasons(spec: str, how: dict[str, Any], why: str) -> None:
    assert any(name == "linear" and why in str(said) for name, said, _ in regard.explain(spec, SHAPE, **how).rows)


def test_offsets_that_differ_are_refused_in_causal_order_alone() -> None:
    q, k, v = draw(4, 6)
    call: dict[str, Any] = {"query_offset": torch.tensor([0, 2]), "enable_gqa": True}
    run = partial(regard.attention, q, k, v, "elu", impl="linear", **call)
    refuses("needs one query_offset for all sequences", run, is_causal=True)
    out = run()
    expected = attend("elu", {"q": q, "k": k, "v": v}, torch.ones(4, 6, dtype=torch.bool))
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)


def test_costs_are_linear_and_say_when_pairs_are_cheaper() -> None:
    def cost(queries: int, keys: int, name: str) -> Any:
        rows = regard.explain("elu", (1, 4, queries, 64), (1, 4, keys, 64), is_causal=True).rows
        return next(cost for n, _, cost in rows if n == name)

    assert cost(65536, 65536, "linear").flops == pytest.approx(2 * cost(32768, 32768, "linear").flops, rel=1e-3)
    assert cost(65536, 65536, "linear").bytes <= 2.1 * cost(32768, 32768, "linear").bytes
    assert cost(4096, 4096, "linear").flops < cost(4096, 4096, "blocked").flops / 10
    # One query weighs the keys it has; making their sums first would cost F times as much.
    assert cost(1, 4096, "linear").flops <= 1.1 * cost(1, 4096, "blocked").flops


def draw(queries: int, keys: int, seed: int = 0) -> list[Tensor]:
    make = torch.Generator().manual_seed(seed)
    sizes = ((4, queries, 6), (2, keys, 6), (2, keys, 5))
    return [torch.randn(2, *s, generator=make, dtype=torch.float64).requires_grad_() for s in sizes]


def test_segments_whose_ids_are_out_of_reach_go_elsewhere() -> None:
    """A graph and the meta device hold no ids: another implementation computes the same."""
    assert regard.explain("elu", SHAPE, segments=True, device="meta").chosen != "linear"
    ids = (torch.arange(9) > 3).long()[None]
    q, k, v = (x.detach() for x in draw(9, 9))
    run = lambda q: regard.attention(q, k, v, "elu", segment_ids=ids, enable_gqa=True)  # noqa: E731
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q), run(q), rtol=1e-12, atol=1e-12)
