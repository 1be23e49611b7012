"""What `regard.attention` and `regard.local_linear_attention` with `impl="triton"` promise for every weighting: hidden
and non-finite numbers, bit equality, memory layouts, compilation, errors and diagnostics."""

from typing import Any

import pytest
import torch
from attention_calls import BATCH, HEADS, IDS, both, draw, far, pairs, some, triton, uncopied, weight_of
from contracts import oracle
from dense_oracles import RULES, attend, choices, equal, near, ratio, scores, seen_pairs
from mistakes import refuses
from operators import Recorder
from own_kernel import EVERY
from torch import Tensor

import regard

pytestmark = pytest.mark.usefixtures("in_bounds")

COMPACT = ("softmax", "sparsemax", "biweight", "triweight", "relumax", "normrelu")
SPECS = (*COMPACT, "solved", "loosely", "learned")
QUICK = ("biweight", "loosely")
FEW = ("biweight", "softmax", "relumax", "solved", "learned")
"""Specs for what hardly depends on the weighting."""


def leaves_of(spec: str, *sizes: Any, grad: bool = False, **more: Any) -> list[Tensor]:
    return draw(*sizes, probe=spec == "learned", grad=grad, spread=2.0 if spec in COMPACT else 1.0, **more)


@pytest.mark.parametrize("spec", some(SPECS, QUICK))
@pytest.mark.parametrize("what", some([torch.nan, torch.inf, 3e38], [torch.inf]))
def test_hidden_keys_never_matter(spec: str, what: float) -> None:
    """Outputs and gradients keep every bit, and hidden keys and values have gradient 0."""
    leaves = leaves_of(spec, 34, 34, 6, batch=1, heads=1)
    mask = torch.ones(1, 1, 1, 34, dtype=torch.bool)
    mask[..., 7:9] = mask[..., 20] = False
    how = {"attn_mask": mask, "exclude_self": True}
    weight = weight_of(leaves[0])
    before = both(leaves, spec, weight, **how)
    k, v = leaves[1:3]
    k[:, :, 7], v[:, :, 8], k[:, :, 20], v[:, :, 33] = what, what, -what, what  # no query sees the last key
    k[:, :, 33] = 1e6
    after = both(leaves, spec, weight, **how)
    equal(after, before)
    assert not any(x[:, :, [7, 8, 20, 33]].any() for x in after[2:4])


@pytest.mark.slow
@pytest.mark.parametrize("spec", some(SPECS, QUICK))
def test_rows_that_see_a_non_finite_number_are_nan(spec: str) -> None:
    """They pass no gradient, and all other rows keep every bit."""
    leaves = leaves_of(spec, 34, 34, 6, batch=2)
    weight = weight_of(leaves[0])
    weight[0, :, 20:] = 0
    weight[1, 1, 4] = 0
    before = both(leaves, spec, weight, is_causal=True)
    q, k, v = leaves[:3]
    k[0, 0, 20, 3], v[0, 0, 25, 0], q[1, 1, 4, 2] = torch.nan, torch.inf, torch.nan
    weight[0, :, 20:] = 1
    out, *grads = both(leaves, spec, weight, is_causal=True)
    assert bool(out[0, :, 20:].isnan().all())
    assert bool(out[1, 1, 4].isnan().all())
    rest = torch.ones(2, HEADS, 34, dtype=torch.bool)
    rest[0, :, 20:] = rest[1, 1, 4] = False
    assert torch.equal(out[rest], before[0][rest])
    assert all(bool(x.isfinite().all()) for x in grads)
    near(grads, before[1:], 1e-6, spec)


@pytest.mark.parametrize("spec", some(SPECS, ("biweight", "learned")))
def test_rows_without_a_key_are_zero(spec: str, poisoned: None) -> None:
    """So are their gradients, and those of keys that only they see."""
    leaves = leaves_of(spec, 33, 18, 6)
    mask = torch.ones(BATCH, 1, 1, 18, dtype=torch.bool)
    mask[1] = False
    out, dq, dk, dv, *rest = both(leaves, spec, weight_of(leaves[0]), attn_mask=mask, is_causal=True)
    for x in (out[:, :, :15], out[1], dq[:, :, :15], dq[1], dk[1], dv[1], *(x[1] for x in rest)):
        assert not x.any()
    assert bool(out[0, :, 15:].any(-1).all()) or spec == "normrelu"
    if spec in ("solved", "loosely"):
        assert not dq[0, :, 15].any()  # the output of a row with one key is its value, whatever the query


EMPTY = [(batch, HEADS, 1, *sizes) for batch in (0, 1) for sizes in ((0, 5), (5, 0), (0, 0), (1, 1))]
EMPTY += [(1, 0, kv, 5, 7) for kv in (0, 2)]


@pytest.mark.parametrize(("batch", "heads", "kv", "queries", "keys"), EMPTY)
def test_empty_calls(batch: int, heads: int, kv: int, queries: int, keys: int) -> None:
    for spec in ("biweight", "softmax", "solved") if heads else ("solved", "learned"):
        leaves = leaves_of(spec, queries, keys, 6, batch=batch, heads=heads, kv=kv, grad=True)
        out = triton(leaves, spec)
        assert out.shape == (batch, heads, queries, 6)
        assert keys or not out.any()
        grads = torch.autograd.grad(out.sum(), leaves)
        assert [g.shape for g in grads] == [x.shape for x in leaves]
        assert keys == 1 or not any(bool(g.any()) for g in grads)


@pytest.mark.parametrize("spec", some([*SPECS[:5], "triweight*anchored", *SPECS[6:]], ["triweight"]))
def test_weights_sum_to_one(spec: str, small: None, poisoned: None) -> None:
    """Also for scores that differ by hundreds; in bfloat16 within its precision."""
    leaves = leaves_of(spec, 20, 50, 16, batch=1)
    if spec.split("*")[0] in COMPACT:
        leaves[0][:, :, ::3] *= 30
        leaves[0][:, :, 1::3] *= 0.01
    leaves[2] = torch.ones_like(leaves[2])
    for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, 2**-8 if spec not in SPECS[6:] else 2**-7)):
        out = triton([x.to(dtype) for x in leaves], spec, is_causal=spec in SPECS[6:])
        assert float((out.double() - 1).abs().max()) <= most


@pytest.mark.parametrize("spec", some(SPECS, QUICK))
def test_later_tokens_change_no_bit_of_a_row(spec: str, small: None) -> None:
    """Whether their rows take many steps to solve, few, or are not there; whether their keys are near or far."""
    leaves = leaves_of(spec, 21, 21, 4, batch=1, heads=1)
    before = triton(leaves, spec, is_causal=True)
    for cut in (7, 18):
        short = triton([x[:, :, :cut] for x in leaves], spec, is_causal=True)
        assert torch.equal(short, before[:, :, :cut]), cut
        for factor, shift in ((0.0, 0.0), (0.01, 0.0), (25.0, 0.0), (1.0, 1e3)):
            changed = [x.clone() for x in leaves]
            for x in changed[:3]:
                x[:, :, cut:] = x[:, :, cut:] * factor + shift
            after = triton(changed, spec, is_causal=True)
            assert torch.equal(after[:, :, :cut], before[:, :, :cut]), (cut, factor)


@pytest.mark.parametrize("spec", some(SPECS, QUICK))
def test_packed_sequences_are_separate_calls(spec: str) -> None:
    """No bit of one depends on another, forward or backward."""
    leaves = leaves_of(spec, 21, 21, 4, batch=1)
    ids, runs = IDS[:1], [(0, 5), (5, 14), (14, 15), (15, 21)]
    weight = weight_of(leaves[0])
    packed = both(leaves, spec, weight, segment_ids=ids, is_causal=True)
    apart = [both([x[:, :, a:b] for x in leaves], spec, weight[:, :, a:b], is_causal=True) for a, b in runs]
    most = {"solved": (1e-5, 1e-4), "loosely": (1e-2, 1e-1), "learned": (1e-5, 1e-4)}.get(spec, (2e-6, 2e-5))
    near(packed, [torch.cat(x, 2) for x in zip(*apart, strict=True)], (most[0], *[most[1]] * len(leaves)), spec)
    changed = [x.clone() for x in leaves]
    for x in changed[:3]:
        x[:, :, 5:14] = x[:, :, 5:14] * -3 + (0 if spec in COMPACT else 50)
        x[:, :, 14:15] = torch.nan
    weight[:, :, 5:15] = 100
    other = both(changed, spec, weight, segment_ids=ids, is_causal=True)
    for part in (slice(0, 5), slice(15, 21)):
        equal([x[:, :, part] for x in other], [x[:, :, part] for x in packed])


@pytest.mark.slow
@pytest.mark.parametrize("spec", some(SPECS, QUICK))
def test_a_batch_is_a_loop(spec: str) -> None:
    """To the last bit: no sequence and no key head depends on another."""
    leaves = leaves_of(spec, 18, 20, 8, heads=4, kv=2)
    weight = weight_of(leaves[0])
    whole = both(leaves, spec, weight, is_causal=True)
    for b in range(BATCH):
        for h in range(2):
            by_query, by_key = (slice(b, b + 1), slice(2 * h, 2 * h + 2)), (slice(b, b + 1), slice(h, h + 1))
            heads = [by_query, by_key, by_key, by_query][: len(leaves)]
            own = both([x[at] for x, at in zip(leaves, heads, strict=True)], spec, weight[by_query], is_causal=True)
            equal(own, [x[at] for x, at in zip(whole, (by_query, *heads), strict=True)])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", some([torch.float32, torch.bfloat16], [torch.bfloat16]))
@pytest.mark.parametrize("spec", some(FEW, ["biweight"]))
def test_results_are_reproducible_and_autocast_changes_nothing(spec: str, dtype: torch.dtype) -> None:
    leaves = leaves_of(spec, 20, 20, 6, dtype=dtype)
    weight = weight_of(leaves[0])
    plain = both(leaves, spec, weight)
    equal(both(leaves, spec, weight), plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        equal(both(leaves, spec, weight), plain)


@pytest.mark.parametrize("spec", some(["biweight", "softmax", "solved"], []))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_need_not_be_contiguous(spec: str, dtype: torch.dtype, small: None) -> None:
    leaves = leaves_of(spec, 18, 18, 8, heads=4, kv=2, batch=1, dtype=dtype)
    q, k, v = leaves
    expected = both(leaves, spec, torch.ones_like(q), is_causal=True)
    by_token = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    every_other = [torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2] for x in (q, k, v)]
    in_wider_rows = [torch.cat([x, torch.full_like(x, torch.nan)], -1)[..., :8] for x in (q, k, v)]
    by_feature = [x.mT.contiguous().mT for x in (q, k, v)]
    behind = [torch.stack([torch.full_like(x, torch.nan), x], 2).flatten(2, 3)[:, :, 18:] for x in (q, k, v)]
    for how in (by_token, every_other, in_wider_rows, by_feature, behind):
        equal(both(how, spec, torch.ones_like(q), is_causal=True), expected)
    leaves = [x.detach().requires_grad_() for x in by_token]
    found = torch.autograd.grad(triton(leaves, spec, is_causal=True).sum(), leaves)  # an expanded gradient
    equal(found, expected[1:])
    expanded = [q.expand(2, -1, -1, -1), *(x[:, :1].expand(2, 2, -1, -1) for x in (k, v))]
    weight = torch.ones(2, 4, 18, 8, dtype=dtype)
    equal(both(expanded, spec, weight), both([x.contiguous() for x in expanded], spec, weight))


FAR = [(s, a, d) for s in ("biweight", "local-linear") for a in range(3) for d in (False, True)]


@pytest.mark.parametrize(("spec", "axis", "direct"), pairs(FAR, [("biweight", 2, True)]))
def test_steps_may_exceed_32_bits(spec: str, axis: int, direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between sequences, heads and rows; `direct` in every kernel, not only in the check for non-finite numbers."""
    if direct:
        uncopied(monkeypatch)
    sizes = {"batch": 2 if axis == 0 else 1, "heads": 2, "kv": 2 if axis == 1 else 1}
    for length in (2, 1):
        leaves = draw(length, 2, 8, dtype=torch.bfloat16, grad=False, **sizes)
        spread, weight = [far(x, axis) for x in leaves], torch.ones_like(leaves[0])
        equal(both(spread, spec, weight), both(leaves, spec, weight))
        assert torch.equal(triton(spread, spec), triton(leaves, spec))


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("spec", ["biweight", "softmax", "local-linear"])
def test_rows_of_a_block_may_span_more_than_32_bits(spec: str, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    uncopied(monkeypatch)
    tensors = draw(18, 18, 8, batch=1, heads=1, dtype=torch.bfloat16, grad=False)
    spread = torch.empty_strided((1, 1, 18, 8), (8, 8, 2**28, 1), dtype=torch.bfloat16).copy_(tensors[place])
    apart = [spread if n == place else x for n, x in enumerate(tensors)]
    weight = torch.ones_like(tensors[0])
    equal(both(apart, spec, weight), both(tensors, spec, weight))
    apart[0], tensors[0] = (x[:, :, -1:] for x in (apart[0], tensors[0]))  # one query without gradient decodes
    assert torch.equal(triton(apart, spec), triton(tensors, spec))


GRAPHS = [(s, b) for s in FEW for b in ("eager", "aot_eager")]


@pytest.mark.parametrize(("spec", "backend"), pairs(GRAPHS, [("biweight", "eager")]))
def test_a_call_compiles_to_one_graph(spec: str, backend: str) -> None:
    torch._dynamo.reset()
    leaves, mask = leaves_of(spec, 20, 20, 4, grad=True), torch.rand(BATCH, 1, 1, 20) > 0.2

    def call(*leaves: Tensor) -> Tensor:
        return triton(list(leaves), spec, attn_mask=mask, is_causal=True)

    drawn = torch.compile(call, fullgraph=True, backend=backend)
    plain, out = call(*leaves), drawn(*leaves)
    weight = weight_of(out)
    near([out], [plain], 1e-6)
    found = torch.autograd.grad((out * weight).sum(), leaves)
    near(found, torch.autograd.grad((plain * weight).sum(), leaves), 1e-5)
    longer = leaves_of(spec, 26, 26, 4)
    mask = torch.rand(BATCH, 1, 1, 26) > 0.2
    near([drawn(*longer)], [call(*longer)], 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("spec", some([*FEW, "normrelu"], ["biweight"]))
def test_operators_pass_opcheck(spec: str) -> None:
    leaves = leaves_of(spec, 18, 18, 4, batch=1, grad=True)
    with Recorder() as seen:
        triton(leaves, spec, is_causal=True).sum().backward()
        with torch.no_grad():
            one = [x[:, :, -1:] if place in (0, 3) else x for place, x in enumerate(leaves)]
            triton(one, spec)
    called = {func: args for func, args in reversed(seen.calls) if "triton" in func.name()}
    assert sum("decode" in func.name() for func in called) == 1
    assert len(called) >= 3
    for func, args in called.items():
        utils = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(func, args, test_utils=utils)


@pytest.mark.parametrize("spec", ["biweight", "local-linear"])
def test_higher_derivatives_and_transforms_are_refused(spec: str) -> None:
    q, k, v = leaves = draw(8, 8, 4)
    out = triton(leaves, spec)
    first = torch.autograd.grad((out * weight_of(out)).sum(), leaves, create_graph=True)
    with pytest.raises((RuntimeError, regard.checks.ArgumentError), match="differentiable once"):
        torch.autograd.grad(first[0].sum(), leaves)
    q, k, v = (x.detach() for x in leaves)
    batched = torch.func.vmap(lambda q, k, v: triton([q, k, v], spec))
    refuses(r"impl='triton' .*no torch\.func transforms", batched, *(x[None] for x in (q, k, v)))
    refuses(r"impl='triton' .*forward mode", torch.func.jvp, lambda q: triton([q, k, v], spec), (q,), (q,))


@pytest.mark.slow
@pytest.mark.parametrize("needed", some([(0,), (1,), (2,), (0, 2)], [(1,)]))
def test_gradients_of_some_arguments(needed: tuple[int, ...], small: None) -> None:
    leaves = draw(20, 20, 8)
    weight = weight_of(leaves[0])
    whole = both(leaves, "biweight", weight)[1:]
    some = [x.detach().requires_grad_(place in needed) for place, x in enumerate(leaves)]
    found = torch.autograd.grad((triton(some, "biweight") * weight).sum(), [some[i] for i in needed])
    equal(found, [whole[i] for i in needed])


@pytest.mark.slow
@pytest.mark.parametrize("name", some(EVERY, ["adaptive 3", "own anchored"]))
def test_diagnostics(name: str, small: None) -> None:
    leaves = draw(37, 37, 6, grad=False)
    rule, how = EVERY[name], {"is_causal": True, "window": 30}
    out, found = triton(leaves, rule, return_diagnostics=True, **how)
    plain = triton(leaves, rule, **how)
    seen = seen_pairs(BATCH, HEADS, 37, 37, **how)
    z = scores(leaves[0].double(), leaves[1].double())
    p = oracle.weights(choices(rule), z, seen, choices(rule).bias)
    support, visible = (p > 0).sum(-1), seen.sum(-1)
    near([out], [plain], 1e-6)
    assert float((found.support - support).abs().max()) <= 1  # a key at the very edge
    assert float((found.support != support).double().mean()) <= 0.02
    square = p.square().sum(-1)
    size = torch.where(square > 0, 1 / torch.where(square > 0, square, 1), 0)
    near([found.effective_sample_size, found.density], [size, support / visible], 2e-2)
    assert not found.empty.any()
    assert not found.status.any()
    if choices(rule).rule == "adaptive":
        inside = torch.where(p > 0, z / choices(rule).r, torch.inf)
        tau = inside.amin(-1) - p.where(p > 0, torch.tensor(1e9, dtype=p.dtype)).amin(-1) ** (1 / choices(rule).r)
        assert float((found.tau - tau).abs().max()) <= 1e-4


PAIRS = torch.ones(12, 40, dtype=torch.bool)
BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "wide": ("", {"dim": 257}, "256"),
    "wide values": ("", {"value_dim": 300}, "256"),
    "float16": ("", {"dtype": torch.float16}, "float32 and bfloat16"),
    "float64": ("", {"dtype": torch.float64}, "float32 and bfloat16"),
    "a mask of pairs": ("", {"attn_mask": PAIRS}, "over keys"),
    "nearest": ("topk-softmax", {}, "supports normalised kernels"),
    "linear": ("linear", {}, "supports normalised kernels"),
    "anchored gaussian": ("gaussian*anchored(margin=1)", {}, "supports polynomial kernels"),
    "another power": ("polynomial(r=1.7)", {}, "supports the powers r = 1, 2 and 3, not r = 1.7"),
    "another alpha": ("biweight", {"params": {"alpha": 1.8}}, r"supports the powers r = 1, 2 and 3, not r = 1\.25"),
    "a learned power": ("biweight", {"params": {"alpha": torch.tensor(1.5)}}, "takes alpha as a number"),
    "compact weights": ("local-linear", {"spec": "biweight"}, "softmax"),
    "an absolute ridge": ("local-linear", {"ridge_mode": "absolute"}, "relative"),
    "cholesky": ("local-linear", {"solver": "cholesky"}, "solves by"),
    "no ridge": ("local-linear", {"ridge": 0.0}, "needs a ridge above 0"),
    "block-diagonal": ("local-linear", {"solver": "block-diagonal"}, "solves by"),
}


@pytest.mark.parametrize("name", BAD)
def test_unsupported_calls_say_who_can(name: str) -> None:
    """They raise an error of one line that names other implementations, and run without `impl`."""
    only, how, pattern = BAD[name]
    sizes = {x: how[x] for x in ("dim", "value_dim", "dtype") if x in how}
    call = {x: y for x, y in how.items() if x not in sizes}
    for spec in [only] if only else ["biweight", "local-linear"]:
        leaves = draw(12, 40, **{"dim": 8, "grad": False, **sizes})
        text = refuses(f"impl='triton' .*{pattern}", triton, leaves, spec, **call)
        able = text.split("Those that can: ")[1].rstrip(".").split(", ")
        assert "triton" not in able
        assert {"blocked", "reference"} & set(able)
        if spec == "local-linear":
            out = regard.local_linear_attention(*leaves, enable_gqa=True, **call)
        else:
            out = regard.attention(*leaves, spec, enable_gqa=True, **call)
        assert bool(out.isfinite().all())
        if not only:
            shapes = [tuple(x.shape) for x in leaves]
            mask = "pairs" if "attn_mask" in how else None
            explained = regard.explain(
                spec, shapes[0], shapes[1], shapes[2][-1], dtype=leaves[0].dtype, mask=mask, device="cuda"
            )
            reason = {row: reason for row, reason, _ in explained.rows}["triton"]
            assert reason is not None
            assert reason in str(explained)
            assert explained.chosen not in ("triton", "nothing")


@pytest.mark.parametrize("spec", [*RULES.values(), "local-linear"])
def test_explain_prefers_it_on_a_gpu(spec: str) -> None:
    memory = []
    for length in (4096, 8192):
        sizes = ((2, 8, length, 64), (2, 2, length, 64))
        explained = regard.explain(spec, *sizes, dtype=torch.bfloat16, device="cuda", is_causal=True)
        reason, cost = {name: (reason, cost) for name, reason, cost in explained.rows}["triton"]
        assert reason is None
        assert cost is not None
        assert cost.flops > 0
        memory.append(cost.bytes)
        assert spec == "softmax" or explained.chosen == "triton"
    assert 0 < memory[1] <= 2.5 * memory[0]  # linear in the length, but for a byte of every 64 x 64 pairs


def test_other_devices_are_refused() -> None:
    explained = regard.explain("biweight", (1, 1, 8, 8), device="mps")
    reason = {name: reason for name, reason, _ in explained.rows}["triton"]
    assert reason is not None
    assert "CUDA" in reason
    refuses("CUDA", triton, [x.detach().to("meta") for x in draw(8, 8, 4)], "biweight")


@pytest.mark.slow
def test_gradients_in_bfloat16_are_rounded_once() -> None:
    leaves = draw(60, 60, 32, batch=1, heads=4, kv=1, dtype=torch.bfloat16)
    weight = weight_of(leaves[0])
    found = both(leaves, "biweight", weight)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = attend(*exact, seen_pairs(1, 4, 60, 60), RULES["adaptive 2"])
    wanted = torch.autograd.grad((expected * weight.double()).sum(), exact)
    floor = ratio(expected.to(torch.bfloat16), expected)
    for a, b in zip(found, [expected, *wanted], strict=True):
        assert ratio(a, b) <= 4 * floor


@pytest.mark.parametrize(("spec", "param"), [("relumax", "margin"), ("normrelu", "bias")])
def test_rows_with_parameters_that_are_not_finite(spec: str, param: str) -> None:
    q, k, v = (torch.randn(1, 1, 6, 16).requires_grad_() for _ in range(3))
    numbers = torch.ones(1, 1, 6)
    numbers[0, 0, 2], numbers[0, 0, 4] = torch.nan, torch.inf
    out = regard.attention(q, k, v, spec, is_causal=True, params={param: numbers}, impl="triton")
    assert out.isnan().all(-1).flatten().tolist() == [False, False, True, False, True, False]
    out[0, 0, [0, 1, 3, 5]].sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    assert not q.grad[0, 0, [2, 4]].any()
