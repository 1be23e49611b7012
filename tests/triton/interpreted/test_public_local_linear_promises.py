"""What `regard.local_linear_attention(..., impl="triton")` promises whatever it computes: which numbers never
matter, which bits never change, how tensors may lie, what compilers see and what it says of itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dense_oracles import local_linear, near, scores, seen_pairs, softmax_rows
from linear_calls import BATCH, HEADS, IDS, T, both, draw, far, triton, weight_of
from operator_calls import Calls
from torch import Tensor

import regard
from regard.triton.runtime import tiles

pytestmark = pytest.mark.usefixtures("in_bounds")

QUICK_KINDS = ("loosely",)


KINDS: dict[str, dict[str, Any]] = {
    "solved": {"ridge": 0.05},
    "loosely": {"ridge": 0.05, "solver": "cg", "tol": 1e-2},
    "probe": {"solver": "learned"},
}


def with_kind(kind: str, rows: int, dim: int, heads: int = HEADS, batch: int = 1) -> dict[str, Any]:
    how = dict(KINDS[kind])
    if kind == "probe":
        how["probe"] = torch.randn(batch, heads, rows, dim, generator=torch.Generator().manual_seed(7))
    return how


BAD: dict[str, dict[str, Any]] = {
    "wide": {"dim": 257},
    "wide values": {"value_dim": 300},
    "float16": {"dtype": torch.float16},
    "float64": {"dtype": torch.float64},
    "a mask of pairs": {"attn_mask": torch.ones(12, 40, dtype=torch.bool)},
    "compact weights": {"spec": "biweight"},
    "an absolute ridge": {"ridge_mode": "absolute"},
    "cholesky": {"solver": "cholesky"},
    "blocks": {"solver": "block-diagonal"},
    "no ridge": {"ridge": 0.0},
}


@pytest.mark.parametrize("kind", [k if k in QUICK_KINDS else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
@pytest.mark.parametrize("what", [torch.inf, *(pytest.param(x, marks=pytest.mark.slow) for x in (torch.nan, 3e38))])
def test_what_is_hidden_never_matters(kind: str, what: float) -> None:
    """To the last bit, forward and backward; and it has no gradient itself."""
    q, k, v = (x.detach() for x in draw(34, 34, 6, batch=1, heads=1))
    mask = torch.ones(1, 1, 1, 34, dtype=torch.bool)
    mask[..., 7:9] = mask[..., 20] = False
    weight, how = weight_of(q), {"attn_mask": mask, "exclude_self": True, **with_kind(kind, 34, 6, 1)}
    before = both([q, k, v], weight, **how)
    k[:, :, 7], v[:, :, 8], k[:, :, 20], v[:, :, 33] = what, what, -what, what
    k[:, :, 33] = 1e6
    after = both([q, k, v], weight, **how)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one, other)
    assert not after[2][:, :, [7, 8, 20, 33]].any()
    assert not after[3][:, :, [7, 8, 20, 33]].any()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [k if k in QUICK_KINDS else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_what_is_not_finite_spoils_the_rows_that_see_it(kind: str) -> None:
    q, k, v = (x.detach() for x in draw(34, 34, 6, batch=2))
    weight, how = weight_of(q), {"is_causal": True, **with_kind(kind, 34, 6, batch=2)}
    weight[0, :, 20:] = 0
    weight[1, 1, 4] = 0
    before = both([q, k, v], weight, **how)
    k[0, 0, 20, 3], v[0, 0, 25, 0], q[1, 1, 4, 2] = torch.nan, torch.inf, torch.nan
    weight[0, :, 20:] = 1  # passes no gradient
    after = both([q, k, v], weight, **how)
    out = after[0]
    assert bool(out[0, :, 20:].isnan().all())
    assert bool(out[1, 1, 4].isnan().all())
    rest = torch.ones(2, HEADS, 34, dtype=torch.bool)
    rest[0, :, 20:] = rest[1, 1, 4] = False
    assert torch.equal(out[rest], before[0][rest])
    for one, other in zip(before[1:], after[1:], strict=True):
        assert bool(other.isfinite().all())
        near([other], [one], 1e-6, kind)


@pytest.mark.parametrize("kind", ["probe", *(pytest.param(k, marks=pytest.mark.slow) for k in ("solved", "loosely"))])
def test_rows_without_a_key(kind: str, poisoned: None) -> None:
    """Are 0 and have gradient 0; so has what only they see."""
    leaves = draw(24, 9, 6)
    mask = torch.ones(BATCH, 1, 1, 9, dtype=torch.bool)
    mask[1] = False
    how = {"attn_mask": mask, "is_causal": True, **with_kind(kind, 24, 6, batch=BATCH)}
    out, dq, dk, dv = both(leaves, weight_of(leaves[0]), **how)
    assert not out[:, :, :15].any()
    assert not out[1].any()
    assert bool(out[0, :, 15:].any(-1).all())
    for x in (dq[:, :, :15], dq[1], dk[1], dv[1]):
        assert not x.any()
    assert not dq[0, :, 15].any() or kind == "probe"  # of one key it sees the value, whatever the query


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0), (1, 1)])
def test_nothing_at_all(sizes: tuple[int, int]) -> None:
    for batch in (0, 1):
        leaves = draw(*sizes, 6, batch=batch)
        out = triton(leaves)
        assert out.shape == (batch, HEADS, sizes[0], 6)
        assert sizes[1] or not out.any()
        grads = torch.autograd.grad(out.sum(), leaves)
        assert [g.shape for g in grads] == [x.shape for x in leaves]
        assert sizes[1] == 1 or not any(bool(g.any()) for g in grads)


@pytest.mark.parametrize("kv", [0, 2])
@pytest.mark.parametrize("kind", ["solved", "probe"])
def test_no_heads(kind: str, kv: int) -> None:
    """Nobody looks at the keys: their gradients are 0, and those of queries empty."""
    leaves = draw(5, 7, 6, batch=1, heads=0, kv=kv)
    how = {"solver": "learned", "probe": torch.zeros(1, 0, 5, 6, requires_grad=True)} if kind == "probe" else {}
    out = triton(leaves, **how)
    assert out.shape == (1, 0, 5, 6)
    every = [*leaves, *(x for x in how.values() if isinstance(x, torch.Tensor))]
    grads = torch.autograd.grad(out.sum(), every)
    assert [g.shape for g in grads] == [x.shape for x in every]
    assert not any(bool(g.any()) for g in grads)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [k if k in QUICK_KINDS else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_weights_sum_to_one(kind: str, poisoned: None) -> None:
    """Values of one give one, whatever is solved and however well."""
    q, k, v = draw(17, 40, 16, batch=1, grad=False)
    how = with_kind(kind, 17, 16)
    for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, 2**-7)):
        with tiles.forced(rows=16, keys=16):
            out = triton([q.to(dtype), k.to(dtype), torch.ones_like(v).to(dtype)], is_causal=True, **how)
        assert float((out.double() - 1).abs().max()) <= most


@pytest.mark.parametrize("kind", [k if k in QUICK_KINDS else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_no_bit_of_a_row_depends_on_what_comes_later(kind: str) -> None:
    """Later tokens whose systems take many steps, few, or that are not there; keys far away from all others."""
    q, k, v = draw(21, 21, 4, batch=1, heads=1, grad=False)
    how = {"is_causal": True, **with_kind(kind, 21, 4, 1)}
    with tiles.forced(rows=16, keys=16):
        before = triton([q, k, v], **how)
        for cut in (7, 18):
            part = {**how, "probe": how["probe"][:, :, :cut]} if kind == "probe" else how
            short = triton([x[:, :, :cut] for x in (q, k, v)], **part)
            assert torch.equal(short, before[:, :, :cut]), cut
            for factor, shift in ((0.0, 0.0), (0.01, 0.0), (10.0, 0.0), (1.0, 1e3)):
                a, b, c = (x.clone() for x in (q, k, v))
                for x in (a, b, c):
                    x[:, :, cut:] = x[:, :, cut:] * factor + shift
                assert torch.equal(triton([a, b, c], **how)[:, :, :cut], before[:, :, :cut]), (cut, factor)


@pytest.mark.parametrize("kind", [k if k in QUICK_KINDS else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_packed_sequences(kind: str) -> None:
    """Equal calls of their own; and no bit of one depends on another, forward or backward."""
    leaves = draw(T, T, 4, batch=1)
    runs, how = [(0, 5), (5, 12), (12, 13), (13, 19)], with_kind(kind, T, 4)
    weight = weight_of(leaves[0])
    packed = both(leaves, weight, segment_ids=IDS[:1], is_causal=True, **how)
    apart = []
    for a, b in runs:
        own = {**how, "probe": how["probe"][:, :, a:b]} if kind == "probe" else how
        apart.append(both([x[:, :, a:b] for x in leaves], weight[:, :, a:b], is_causal=True, **own))
    most = (1e-2, 1e-1) if kind == "loosely" else (1e-5, 1e-4)
    near(packed, [torch.cat(x, 2) for x in zip(*apart, strict=True)], (most[0], *[most[1]] * 3), kind)
    changed = [x.detach().clone() for x in leaves]
    for x in changed:
        x[:, :, 5:12] = x[:, :, 5:12] * -3 + 50
        x[:, :, 12:13] = torch.nan
    weight[:, :, 5:13] = 100
    other = both(changed, weight, segment_ids=IDS[:1], is_causal=True, **how)
    for one, two in zip(packed, other, strict=True):
        assert torch.equal(one[:, :, :5], two[:, :, :5])
        assert torch.equal(one[:, :, 13:], two[:, :, 13:])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [k if k in QUICK_KINDS else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_a_batch_is_a_loop(kind: str) -> None:
    """To the last bit."""
    leaves, how = draw(5, 18, 4, heads=4, kv=2), with_kind(kind, 5, 4, heads=4, batch=BATCH)
    weight = weight_of(leaves[0])
    whole = both(leaves, weight, is_causal=True, **how)
    for b in range(BATCH):
        for h in range(2):
            heads = (slice(b, b + 1), slice(2 * h, 2 * h + 2))
            part = [leaves[0][heads], *(x[b : b + 1, h : h + 1] for x in leaves[1:])]
            own = {**how, "probe": how["probe"][heads]} if kind == "probe" else how
            for place, x in enumerate(both(part, weight[heads], is_causal=True, **own)):
                at = heads if place < 2 else (slice(b, b + 1), slice(h, h + 1))
                assert torch.equal(whole[place][at], x), place


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_that_are_not_contiguous(dtype: torch.dtype) -> None:
    """And the same again: [B, T, H, D] turned, every other feature, parts of longer rows, one key for all."""
    q, k, v = (x.detach() for x in draw(18, 18, 4, heads=2, kv=2, batch=1, dtype=dtype))
    expected = both([q, k, v], torch.ones_like(q), is_causal=True)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    every = [torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2] for x in (q, k, v)]
    across = [x.mT.contiguous().mT for x in (q, k, v)]
    late = [torch.stack([torch.full_like(x, torch.nan), x], 2).flatten(2, 3)[:, :, 18:] for x in (q, k, v)]
    for how in ([q, k, v], turned, every, across, late):
        for one, other in zip(expected, both(how, torch.ones_like(q), is_causal=True), strict=True):
            assert torch.equal(one, other)
    leaves = [x.detach().requires_grad_() for x in turned]
    with tiles.forced(rows=16, keys=16):
        found = torch.autograd.grad(triton(leaves, is_causal=True).sum(), leaves)  # an expanded gradient
    for one, other in zip(expected[1:], found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_elements_that_lie_far_apart(axis: int, direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets of 2^31 and more, between sequences, heads and rows; `direct`: in every kernel, not only in that which
    looks for what is not finite and leaves a copy."""
    if direct:
        from regard.triton.attention import Triton

        monkeypatch.setattr(Triton, "clean", lambda self, x: (x, None))
    sizes = {"batch": 2 if axis == 0 else 1, "heads": 2, "kv": 2 if axis == 1 else 1}
    for length in (2, 1):
        q, k, v = (x.detach() for x in draw(length, 2, 8, dtype=torch.bfloat16, **sizes))
        near_by, spread = [q, k, v], [far(x, axis) for x in (q, k, v)]
        for one, other in zip(*(both(x, torch.ones_like(q)) for x in (near_by, spread)), strict=True):
            assert torch.equal(one, other)
        assert torch.equal(triton(spread), triton(near_by))  # no gradient is asked


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1, 2])
def test_rows_of_a_block_that_lie_far_apart(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that fit in 32 bits, of which those of one block together do not."""
    from regard.triton.attention import Triton

    monkeypatch.setattr(Triton, "clean", lambda self, x: (x, None))
    tensors = [x.detach() for x in draw(18, 18, 4, batch=1, heads=1, dtype=torch.bfloat16)]
    spread = torch.empty_strided((1, 1, 18, 4), (4, 4, 2**28, 1), dtype=torch.bfloat16).copy_(tensors[place])
    apart = [spread if n == place else x for n, x in enumerate(tensors)]
    weight = torch.ones_like(tensors[0])
    for one, other in zip(both(tensors, weight), both(apart, weight), strict=True):
        assert torch.equal(one, other)
    apart[0], tensors[0] = (x[:, :, -1:] for x in (apart[0], tensors[0]))  # one query, of which no gradient is asked
    assert torch.equal(triton(apart), triton(tensors))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "backend"),
    [("solved", "aot_eager"), *(pytest.param(k, "eager", marks=pytest.mark.slow) for k in ("solved", "probe"))],
)
def test_one_graph(kind: str, backend: str) -> None:
    torch._dynamo.reset()
    how = with_kind(kind, 18, 4)
    probe = how.pop("probe", None)
    leaves = draw(18, 18, 4, batch=1)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.local_linear_attention(
            q, k, v, is_causal=True, enable_gqa=True, impl="triton", probe=probe, **how
        )

    drawn = torch.compile(call, fullgraph=True, backend=backend)
    plain, out = call(*leaves), drawn(*leaves)
    weight = weight_of(out)
    near([out], [plain], 1e-6)
    found = torch.autograd.grad((out * weight).sum(), leaves)
    near(found, torch.autograd.grad((plain * weight).sum(), leaves), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["solved", "probe"])
def test_operators_are_what_they_say(kind: str) -> None:
    """opcheck: schema, fake kernels and autograd of every operator that a call makes."""
    leaves, how = draw(18, 18, 4, batch=1), with_kind(kind, 18, 4)
    calls = Calls()
    with calls:
        triton(leaves, is_causal=True, **how).sum().backward()
        with torch.no_grad():
            own = {**how, "probe": how["probe"][:, :, -1:]} if kind == "probe" else how
            triton([leaves[0][:, :, -1:], *leaves[1:]], **own)
    names = [func.name() for func in calls.made]
    assert any("triton" in name and "linear" in name for name in names), names
    for func, (args, kwargs) in calls.made.items():
        if "triton" not in func.name():
            continue
        leaf = lambda x: x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x  # noqa: E731
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(func, tuple(leaf(x) for x in args), kwargs, test_utils=checks)


@pytest.mark.slow
def test_autocast_changes_nothing() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        leaves = draw(18, 18, 4, batch=1, dtype=dtype)
        weight = weight_of(leaves[0])
        plain = both(leaves, weight)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = both(leaves, weight)
        for one, other in zip(plain, cast, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", BAD)
def test_what_it_cannot_do(name: str) -> None:
    """An error that names who can, or the right number; the same without `impl` is a number."""
    how = dict(BAD[name])
    dim, value_dim, dtype = how.pop("dim", 8), how.pop("value_dim", None), how.pop("dtype", torch.float32)
    leaves = draw(12, 40, dim, value_dim, dtype=dtype, grad=False)
    try:
        out = triton(leaves, **how)
    except regard.checks.ArgumentError as error:
        text = str(error)
        assert "impl='triton'" in text
        assert "\n" not in text
        able = text.split("Those that can: ")[1].rstrip(".").split(", ")
        assert {"blocked", "reference"} & set(able)
        assert "triton" not in able
        assert bool(regard.local_linear_attention(*leaves, enable_gqa=True, **how).isfinite().all())
        return
    assert name in ("cholesky", "no ridge"), "given a number where an error was due"
    expected = local_linear(*(x.double() for x in leaves), seen_pairs(BATCH, HEADS, 12, 40), how.get("ridge", 0.1))
    near([out], [expected], 1e-4)


def test_explain() -> None:
    """On a GPU it is chosen; a solver or a weight that it does not know is a reason."""
    shape = (2, 8, 4096, 64)
    memory = []
    for length in (4096, 8192):
        known = (*shape[:2], length, shape[3])
        told = regard.explain("local-linear", known, dtype=torch.bfloat16, device="cuda", is_causal=True)
        assert told.chosen == "triton"
        memory += [cost.bytes for name, _, cost in told.rows if name == "triton" and cost is not None]
    assert 0 < memory[1] <= 2.1 * memory[0]  # linear in the length
    for spec in (
        "local-linear[biweight]", "gaussian*fixed*linear(ridge=0.1,solver=block-diagonal)",
        "gaussian*fixed*linear(ridge=0.1,ridge_mode=absolute)",
    ):  # fmt: skip
        told = regard.explain(spec, shape, device="cuda")
        assert {name: reason for name, reason, _ in told.rows}["triton"]
        assert told.chosen not in ("triton", "nothing")


@pytest.mark.slow
def test_diagnostics() -> None:
    """Of softmax and of the solver; where weights are negative is counted or not said, never said wrongly."""
    leaves, seen = draw(30, 30, 6, batch=1, grad=False), seen_pairs(1, HEADS, 30, 30, is_causal=True)
    with tiles.forced(rows=16, keys=16):
        out, told = triton(leaves, is_causal=True, ridge=0.1, return_diagnostics=True)
        near([triton(leaves, is_causal=True, ridge=0.1)], [out], 1e-6)
    q, k, _ = (x.double() for x in leaves)
    k = k.repeat_interleave(HEADS, 1)
    p = softmax_rows(scores(q, k), seen)
    near([told.effective_sample_size], [1 / p.square().sum(-1)], 1e-4)
    near([told.support.double()], [seen.sum(-1).double()], 1e-6)
    assert not told.empty.any()
    assert told.solver is not None
    assert not told.solver["status"].any()
    assert float(told.solver["residual"].max()) <= 1e-5
    if told.negative_mass is not None:
        mean = p @ k
        apart = k[:, :, None] - mean[:, :, :, None]
        matrix = torch.einsum("bhij,bhija,bhijc->bhiac", p, apart, apart) + 0.1 * torch.eye(6, dtype=torch.float64)
        t = torch.linalg.solve(matrix, (q - mean)[..., None])
        weights = p * (1 + (apart @ t)[..., 0])
        near([told.negative_mass], [weights.clamp(max=0).sum(-1).neg()], 1e-4)
