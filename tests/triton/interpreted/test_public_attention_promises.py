"""What `regard.attention(..., impl="triton")` promises at degree 0 whatever it computes: which numbers never
matter, which bits never change, how tensors may lie, what compilers see and what it says of itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_calls import BATCH, HEADS, IDS, both, draw, far, pairs, some, triton, weight_of
from dense_oracles import RULES, attend, near, ratio, scores, seen_pairs
from operator_calls import Calls
from torch import Tensor

import regard
from regard.triton.runtime import tiles

pytestmark = pytest.mark.usefixtures("in_bounds")

SPECS = ("softmax", "sparsemax", "biweight", "triweight", "relumax", "normrelu")


QUICK_SPECS = ("biweight",)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "wide": ({"dim": 257}, "256"),
    "wide values": ({"value_dim": 300}, "256"),
    "float16": ({"dtype": torch.float16}, "float32 and bfloat16"),
    "float64": ({"dtype": torch.float64}, "float32 and bfloat16"),
    "a mask of pairs": ({"attn_mask": torch.ones(12, 12, dtype=torch.bool)}, "over keys"),
    "nearest": ({"spec": "topk-softmax"}, "."),
    "linear": ({"spec": "linear"}, "."),
    "another power": ({"spec": "polynomial(r=1.7)"}, "."),
    "a learned power": ({"params": {"alpha": torch.tensor(1.5)}}, "alpha"),
}


@pytest.mark.parametrize("spec", some(SPECS, QUICK_SPECS))
@pytest.mark.parametrize("what", some([torch.nan, torch.inf, 3e38], [torch.inf]))
def test_what_is_hidden_never_matters(spec: str, what: float) -> None:
    """To the last bit, forward and backward; and it has no gradient itself."""
    q, k, v = (x.detach() for x in draw(34, 34, 6, batch=1, heads=1))
    mask = torch.ones(1, 1, 1, 34, dtype=torch.bool)
    mask[..., 7:9] = mask[..., 20] = False
    weight = weight_of(q)
    before = both([q, k, v], spec, weight, attn_mask=mask, exclude_self=True)
    k[:, :, 7], v[:, :, 8], k[:, :, 20], v[:, :, 33] = what, what, -what, what  # the last key is nobody's past
    after = both([q, k, v], spec, weight, attn_mask=mask, exclude_self=True)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one, other)
    assert not after[2][:, :, [7, 8, 20, 33]].any()
    assert not after[3][:, :, [7, 8, 20, 33]].any()


@pytest.mark.slow
@pytest.mark.parametrize("spec", some(SPECS, QUICK_SPECS))
def test_what_is_not_finite_spoils_the_rows_that_see_it(spec: str) -> None:
    q, k, v = (x.detach() for x in draw(34, 34, 6, batch=2))
    weight = weight_of(q)
    weight[0, :, 20:] = 0
    weight[1, 1, 4] = 0
    before = both([q, k, v], spec, weight, is_causal=True)
    k[0, 0, 20, 3], v[0, 0, 25, 0], q[1, 1, 4, 2] = torch.nan, torch.inf, torch.nan
    weight[0, :, 20:] = 1  # passes no gradient
    after = both([q, k, v], spec, weight, is_causal=True)
    out = after[0]
    assert bool(out[0, :, 20:].isnan().all())
    assert bool(out[1, 1, 4].isnan().all())
    rest = torch.ones(2, HEADS, 34, dtype=torch.bool)
    rest[0, :, 20:] = rest[1, 1, 4] = False
    assert torch.equal(out[rest], before[0][rest])
    for one, other in zip(before[1:], after[1:], strict=True):
        assert bool(other.isfinite().all())
        near([other], [one], 1e-6, spec)


@pytest.mark.parametrize("spec", some(SPECS, QUICK_SPECS))
def test_rows_without_a_key(spec: str, poisoned: None) -> None:
    """Are 0 and have gradient 0; so has what only they see."""
    leaves = draw(40, 25, 6)
    mask = torch.ones(BATCH, 1, 1, 25, dtype=torch.bool)
    mask[1] = False
    weight = weight_of(leaves[0])
    out, dq, dk, dv = both(leaves, spec, weight, attn_mask=mask, is_causal=True)
    assert not out[:, :, :15].any()  # before the first key
    assert not out[1].any()
    assert bool(out[0, :, 15:].any(-1).all()) or spec == "normrelu"
    assert not dq[:, :, :15].any()
    assert not dq[1].any()
    assert not dk[1].any()
    assert not dv[1].any()


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0), (1, 1)])
def test_nothing_at_all(sizes: tuple[int, int]) -> None:
    for batch in (0, 1):
        for spec in ("biweight", "softmax"):
            leaves = draw(*sizes, 6, batch=batch)
            out = triton(leaves, spec)
            assert out.shape == (batch, HEADS, sizes[0], 6)
            if sizes[1] == 0:
                assert not out.any()
            grads = torch.autograd.grad(out.sum(), leaves)
            assert [g.shape for g in grads] == [x.shape for x in leaves]
            assert sizes[1] == 1 or not any(bool(g.any()) for g in grads)


@pytest.mark.parametrize("spec", some([*SPECS[:5], "triweight*anchored"], ["triweight"]))
def test_rows_sum_to_one(spec: str, poisoned: None) -> None:
    """Also in the presence of scores that differ by hundreds, and to the last bit of a bfloat16 that does not."""
    q, k, v = draw(20, 50, 16, batch=1, grad=False)
    q[:, :, ::3] *= 30
    q[:, :, 1::3] *= 0.01
    for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, 2**-8)):
        with tiles.forced(rows=16, keys=16):
            out = triton([q.to(dtype), k.to(dtype), torch.ones_like(v).to(dtype)], spec)
        assert float((out.double() - 1).abs().max()) <= most


@pytest.mark.parametrize("spec", some(SPECS, QUICK_SPECS))
def test_no_bit_of_a_row_depends_on_what_comes_later(spec: str) -> None:
    """Later tokens that are hard (a threshold that takes long to find), easy, or not there."""
    q, k, v = draw(21, 21, 8, batch=1, heads=1, grad=False)
    with tiles.forced(rows=16, keys=16):
        before = triton([q, k, v], spec, is_causal=True)
        for cut in (7, 18):
            short = triton([x[:, :, :cut] for x in (q, k, v)], spec, is_causal=True)
            assert torch.equal(short, before[:, :, :cut]), cut
            for factor in (0.0, 0.01, 25.0):
                a, b, c = (x.clone() for x in (q, k, v))
                for x in (a, b, c):
                    x[:, :, cut:] *= factor
                assert torch.equal(triton([a, b, c], spec, is_causal=True)[:, :, :cut], before[:, :, :cut]), cut


@pytest.mark.parametrize("spec", some(SPECS, QUICK_SPECS))
def test_packed_sequences(spec: str) -> None:
    """Equal calls of their own; and no bit of one depends on another, forward or backward."""
    leaves = draw(batch=1)
    ids, runs = IDS[:1], [(0, 5), (5, 14), (14, 15), (15, 21)]
    weight = weight_of(leaves[0])
    packed = both(leaves, spec, weight, segment_ids=ids, is_causal=True)
    apart = [both([x[:, :, a:b] for x in leaves], spec, weight[:, :, a:b], is_causal=True) for a, b in runs]
    near(packed, [torch.cat(x, 2) for x in zip(*apart, strict=True)], (2e-6, *[2e-5] * 3), spec)
    changed = [x.detach().clone() for x in leaves]
    for x in changed:
        x[:, :, 5:14] *= -3
        x[:, :, 14:15] = torch.nan
    weight[:, :, 5:15] = 100
    other = both(changed, spec, weight, segment_ids=ids, is_causal=True)
    for one, two in zip(packed, other, strict=True):
        assert torch.equal(one[:, :, :5], two[:, :, :5])
        assert torch.equal(one[:, :, 15:], two[:, :, 15:])


@pytest.mark.slow
@pytest.mark.parametrize("spec", some(SPECS, QUICK_SPECS))
def test_a_batch_is_a_loop(spec: str) -> None:
    """To the last bit: no sequence and no key head depends on another."""
    leaves = draw(18, 20, 8, heads=4, kv=2)
    weight = weight_of(leaves[0])
    whole = both(leaves, spec, weight, is_causal=True)
    for b in range(BATCH):
        for h in range(2):
            part = [leaves[0][b : b + 1, 2 * h : 2 * h + 2], *(x[b : b + 1, h : h + 1] for x in leaves[1:])]
            own = both(part, spec, weight[b : b + 1, 2 * h : 2 * h + 2], is_causal=True)
            for place, x in enumerate(own):
                heads = slice(2 * h, 2 * h + 2) if place < 2 else slice(h, h + 1)
                assert torch.equal(whole[place][b : b + 1, heads], x), place


@pytest.mark.slow
@pytest.mark.parametrize("dtype", some([torch.float32, torch.bfloat16], [torch.bfloat16]))
@pytest.mark.parametrize("spec", some(["biweight", "softmax", "relumax"], ["biweight"]))
def test_it_is_the_same_again(spec: str, dtype: torch.dtype) -> None:
    leaves = draw(dtype=dtype)
    weight = weight_of(leaves[0])
    for one, other in zip(both(leaves, spec, weight), both(leaves, spec, weight), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("spec", some(["biweight", "softmax"], []))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_that_are_not_contiguous(spec: str, dtype: torch.dtype) -> None:
    """[B, T, H, D] turned, every other feature, features that step by more than one, one key for all, and a gradient
    that comes from a sum."""
    q, k, v = (x.detach() for x in draw(18, 18, 8, heads=4, kv=2, batch=1, dtype=dtype))
    expected = both([q, k, v], spec, torch.ones_like(q), is_causal=True)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    wide = [torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2] for x in (q, k, v)]
    long = [torch.cat([x, torch.full_like(x, torch.nan)], -1)[..., :8] for x in (q, k, v)]
    across = [x.mT.contiguous().mT for x in (q, k, v)]
    late = [torch.stack([torch.full_like(x, torch.nan), x], 2).flatten(2, 3)[:, :, 18:] for x in (q, k, v)]
    for how in (turned, wide, long, across, late):
        for one, other in zip(expected, both(how, spec, torch.ones_like(q), is_causal=True), strict=True):
            assert torch.equal(one, other)
    leaves = [x.detach().requires_grad_() for x in turned]
    with tiles.forced(rows=16, keys=16):
        found = torch.autograd.grad(triton(leaves, spec, is_causal=True).sum(), leaves)  # an expanded gradient
    for one, other in zip(expected[1:], found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("spec", some(["biweight", "softmax"], ["biweight"]))
def test_tensors_that_are_expanded(spec: str) -> None:
    q, k, v = (x.detach() for x in draw(20, 20, 8, batch=1, heads=2, kv=1))
    base = [x.clone().requires_grad_() for x in (q, k, v)]
    with tiles.forced(rows=16, keys=16):
        out = triton([base[0].expand(3, 2, 20, 8), base[1].expand(3, 2, 20, 8), base[2].expand(3, 2, 20, 8)], spec)
        found = torch.autograd.grad(out.sum(), base)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected = attend(*exact, seen_pairs(1, 2, 20, 20), RULES["adaptive 2" if spec == "biweight" else "softmax"])
    wanted = torch.autograd.grad(3 * expected.sum(), exact)
    near([out, *found], [expected.expand(3, 2, 20, 8), *wanted], (3e-6, *[4e-5] * 3))


@pytest.mark.parametrize(("axis", "direct"), pairs([(a, d) for a in range(3) for d in (False, True)], [(2, True)]))
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
        for one, other in zip(*(both(x, "biweight", torch.ones_like(q)) for x in (near_by, spread)), strict=True):
            assert torch.equal(one, other)
        assert torch.equal(triton(spread, "biweight"), triton(near_by, "biweight"))  # no gradient is asked


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("spec", ["biweight", "softmax"])
def test_rows_of_a_block_that_lie_far_apart(spec: str, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that fit in 32 bits, of which those of one block together do not."""
    from regard.triton.attention import Triton

    monkeypatch.setattr(Triton, "clean", lambda self, x: (x, None))
    tensors = [x.detach() for x in draw(18, 18, 8, batch=1, heads=1, dtype=torch.bfloat16)]
    spread = torch.empty_strided((1, 1, 18, 8), (8, 8, 2**28, 1), dtype=torch.bfloat16).copy_(tensors[place])
    apart = [spread if n == place else x for n, x in enumerate(tensors)]
    weight = torch.ones_like(tensors[0])
    for one, other in zip(both(tensors, spec, weight), both(apart, spec, weight), strict=True):
        assert torch.equal(one, other)
    apart[0], tensors[0] = (x[:, :, -1:] for x in (apart[0], tensors[0]))  # one query, of which no gradient is asked
    assert torch.equal(triton(apart, spec), triton(tensors, spec))


@pytest.mark.parametrize(
    ("spec", "backend"),
    [
        ("biweight", "eager"),
        *(pytest.param(s, "eager", marks=pytest.mark.slow) for s in ("softmax", "normrelu")),
        *(pytest.param(s, "aot_eager", marks=pytest.mark.slow) for s in ("biweight", "relumax", "softmax")),
    ],
)
def test_one_graph(spec: str, backend: str) -> None:
    torch._dynamo.reset()
    leaves, mask = draw(20, 20, 8), torch.rand(BATCH, 1, 1, 20) > 0.2

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.attention(q, k, v, spec, attn_mask=mask, is_causal=True, enable_gqa=True, impl="triton")

    drawn = torch.compile(call, fullgraph=True, backend=backend)
    plain, out = call(*leaves), drawn(*leaves)
    weight = weight_of(out)
    near([out], [plain], 1e-6)
    found = torch.autograd.grad((out * weight).sum(), leaves)
    near(found, torch.autograd.grad((plain * weight).sum(), leaves), 1e-5)
    longer = draw(26, 26, 8)
    mask = torch.rand(BATCH, 1, 1, 26) > 0.2
    near([drawn(*longer)], [call(*longer)], 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("spec", some(["biweight", "relumax", "softmax", "normrelu"], ["biweight"]))
def test_operators_are_what_they_say(spec: str) -> None:
    """opcheck: schema, fake kernels and autograd of every operator that a call makes."""
    leaves = draw(18, 18, 8)
    calls = Calls()
    with calls:
        triton(leaves, spec, is_causal=True, params={}).sum().backward()
        with torch.no_grad():
            triton([x[:, :, -1:] if place == 0 else x for place, x in enumerate(leaves)], spec)
    names = [func.name() for func in calls.made]
    assert any("triton" in name for name in names), names
    for func, (args, kwargs) in calls.made.items():
        if "triton" not in func.name():
            continue
        leaf = lambda x: x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x  # noqa: E731
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(func, tuple(leaf(x) for x in args), kwargs, test_utils=checks)


@pytest.mark.slow
@pytest.mark.parametrize("spec", some(["biweight", "softmax"], ["softmax"]))
def test_autocast_changes_nothing(spec: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        leaves = draw(20, 20, 8, dtype=dtype)
        weight = weight_of(leaves[0])
        plain = both(leaves, spec, weight)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = both(leaves, spec, weight)
        for one, other in zip(plain, cast, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


def test_transforms_are_refused() -> None:
    q, k, v = draw(8, 8, 4, kv=HEADS, grad=False)
    with pytest.raises(regard.checks.ArgumentError, match=r"impl='triton' .*no torch\.func transforms"):
        torch.func.vmap(lambda q, k, v: regard.attention(q, k, v, "biweight", impl="triton"))(
            *(x[None] for x in (q, k, v))
        )
    with pytest.raises(regard.checks.ArgumentError, match=r"impl='triton' .*forward mode"):
        torch.func.jvp(lambda q: regard.attention(q, k, v, "biweight", impl="triton"), (q,), (q,))


def test_there_is_no_second_derivative() -> None:
    leaves = draw(8, 8, 4)
    out = triton(leaves, "biweight")
    first = torch.autograd.grad((out * weight_of(out)).sum(), leaves, create_graph=True)
    with pytest.raises((RuntimeError, regard.checks.ArgumentError), match="differentiable once"):
        torch.autograd.grad(first[0].sum(), leaves)


@pytest.mark.slow
@pytest.mark.parametrize("needed", some([(0,), (1,), (2,), (0, 2)], [(1,)]))
def test_some_gradients_alone(needed: tuple[int, ...]) -> None:
    leaves = draw(20, 20, 8)
    weight = weight_of(leaves[0])
    whole = both(leaves, "biweight", weight)[1:]
    some = [x.detach().requires_grad_(place in needed) for place, x in enumerate(leaves)]
    with tiles.forced(rows=16, keys=16):
        found = torch.autograd.grad((triton(some, "biweight") * weight).sum(), [some[i] for i in needed])
    for place, x in zip(needed, found, strict=True):
        assert torch.equal(x, whole[place])


@pytest.mark.slow
@pytest.mark.parametrize("name", some(RULES, ["adaptive 3"]))
def test_diagnostics(name: str) -> None:
    leaves = draw(37, 37, 6, grad=False)
    rule, how = RULES[name], {"is_causal": True, "window": 30}
    with tiles.forced(rows=16, keys=16):
        out, told = triton(leaves, rule.text, return_diagnostics=True, **how)
        plain = triton(leaves, rule.text, **how)
    seen = seen_pairs(BATCH, HEADS, 37, 37, **how)
    p = rule.weights(scores(leaves[0].double(), leaves[1].double()), seen)
    support, visible = (p > 0).sum(-1), seen.sum(-1)
    near([out], [plain], 1e-6)
    assert float((told.support - support).abs().max()) <= 1  # a key at the very edge
    assert float((told.support != support).double().mean()) <= 0.02
    square = p.square().sum(-1)
    size = torch.where(square > 0, 1 / torch.where(square > 0, square, 1), 0)
    near([told.effective_sample_size, told.density], [size, support / visible], 2e-2)
    assert not told.empty.any()
    assert not told.status.any()
    if rule.kind == "adaptive":
        inside = torch.where(p > 0, scores(leaves[0].double(), leaves[1].double()) / rule.power, torch.inf)
        tau = inside.amin(-1) - p.where(p > 0, torch.tensor(1e9, dtype=p.dtype)).amin(-1) ** (1 / rule.power)
        assert float((told.tau - tau).abs().max()) <= 1e-4


@pytest.mark.parametrize("name", BAD)
def test_what_it_cannot_do(name: str) -> None:
    """An error that names who can, and the same without `impl`; never a number."""
    how, pattern = BAD[name]
    how = dict(how)
    dim, value_dim, dtype = how.pop("dim", 8), how.pop("value_dim", None), how.pop("dtype", torch.float32)
    spec = how.pop("spec", "biweight")
    leaves = draw(12, 12, dim, value_dim, dtype=dtype)
    with pytest.raises(regard.checks.ArgumentError, match=f"impl='triton' .*{pattern}") as raised:
        triton(leaves, spec, **how)
    text = str(raised.value)
    assert "\n" not in text
    assert "Those that can: " in text
    able = text.split("Those that can: ")[1].rstrip(".").split(", ")
    assert "triton" not in able
    assert {"blocked", "reference"} & set(able)
    out = regard.attention(*leaves, spec, enable_gqa=True, **how)
    assert bool(out.isfinite().all())
    mask = "pairs" if "attn_mask" in how else None
    if "params" not in how:
        sizes = [tuple(x.shape) for x in leaves]
        told = regard.explain(spec, sizes[0], sizes[1], sizes[2][-1], dtype=dtype, mask=mask, device="cuda")
        reasons = {name: reason for name, reason, _ in told.rows}
        assert reasons["triton"] is not None
        assert told.chosen not in ("triton", "nothing")
        assert reasons["triton"] in str(told)


@pytest.mark.parametrize("spec", [rule.text for rule in RULES.values()])
def test_explain_prefers_it_on_a_gpu(spec: str) -> None:
    memory = []
    for length in (4096, 8192):
        sizes = ((2, 8, length, 64), (2, 2, length, 64))
        told = regard.explain(spec, *sizes, dtype=torch.bfloat16, device="cuda", is_causal=True)
        reason, cost = {name: (reason, cost) for name, reason, cost in told.rows}["triton"]
        assert reason is None
        assert cost is not None
        assert cost.flops > 0
        memory.append(cost.bytes)
        assert spec == "softmax" or told.chosen == "triton"
    assert 0 < memory[1] <= 2.5 * memory[0]  # linear in the length, but for a bit of every 64 x 64 pairs


def test_other_devices_are_refused() -> None:
    told = regard.explain("biweight", (1, 1, 8, 8), device="mps")
    reason = {name: reason for name, reason, _ in told.rows}["triton"]
    assert reason is not None
    assert "CUDA" in reason
    meta = [x.detach().to("meta") for x in draw(8, 8, 4)]
    with pytest.raises(regard.checks.ArgumentError, match="CUDA"):
        triton(meta, "biweight")


@pytest.mark.slow
def test_gradients_do_not_round_twice() -> None:
    """bfloat16: the gradients' own error is near that of rounding them once."""
    leaves = draw(60, 60, 32, batch=1, heads=4, kv=1, dtype=torch.bfloat16)
    weight = weight_of(leaves[0])
    found = both(leaves, "biweight", weight)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = attend(*exact, seen_pairs(1, 4, 60, 60), RULES["adaptive 2"])
    wanted = torch.autograd.grad((expected * weight.double()).sum(), exact)
    floor = ratio(expected.to(torch.bfloat16), expected)
    for a, b in zip(found, [expected, *wanted], strict=True):
        assert ratio(a, b) <= 4 * floor
