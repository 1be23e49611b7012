"""What `regard.fast_weight_memory(..., impl="triton")` promises whatever it computes, the layer that calls it, and
where it does not run."""

import copy
from typing import Any

import pytest
import torch
from attention_calls import far, some
from dense_fast_weights import stream
from dense_oracles import equal, near
from memory_calls import CHUNK, blend, dense, draw, grads, memory, rule, triton, weight_of
from programs import python
from torch import Tensor

import regard
from regard import nn
from regard.triton.memory.values import TableValues
from regard.triton.runtime.launch import watched

pytestmark = pytest.mark.usefixtures("in_bounds")


ALONE = """
import importlib.util, sys

word = "CUDA"
if "missing" in sys.argv:
    word, real = "needs triton", importlib.util.find_spec
    sys.modules["triton"] = None
    importlib.util.find_spec = lambda name, *rest: None if name == "triton" else real(name, *rest)
import torch
import regard

def refused(call):
    try:
        call()
    except regard.checks.ArgumentError as error:
        assert "\\n" not in str(error)
        return str(error)
    raise AssertionError("ran")

assert sys.modules.get("triton") is None, "importing regard imports triton"
x = torch.randn(1, 1, 8, 4)
given = torch.randn(1, 3, 1, 4), torch.randn(1, 3, 5), None, torch.randn(1, 2, 3, 2), torch.randn(9, 5)
assert word in refused(lambda: regard.attention(x, x, x, "biweight", impl="triton"))
assert word in refused(lambda: regard.local_linear_attention(x, x, x, impl="triton"))
assert word in refused(lambda: regard.fast_weight_memory(*given, top_k=2, impl="triton"))
found = regard.explain("biweight", (1, 1, 8, 4))
assert found.chosen != "triton" and word in {name: reason for name, reason, _ in found.rows}["triton"], found
for spec in ("biweight", "softmax", "local-linear"):
    assert regard.attention(x, x, x, spec).isfinite().all()
_, state = regard.fast_weight_memory(*given, top_k=2, impl="reference")
saved = {**state.to_tensors(), "store": torch.tensor(list(b"triton"), dtype=torch.uint8)}
stored = type(state).from_tensors(saved)
assert "move the state" in refused(lambda: regard.fast_weight_memory(*given, top_k=2, state=stored))
"""


@pytest.mark.parametrize("mix", [pytest.param(False, marks=pytest.mark.slow), True])
def test_padding_is_as_if_it_were_removed(mix: bool) -> None:
    """NaN in it, too: to the last bit, and with gradient 0."""
    leaves = draw(2, 12)
    mask = torch.rand(2, 12, generator=torch.Generator().manual_seed(1)) > 0.3
    counts = mask.sum(1).tolist()
    found = []
    for what in (0.0, torch.nan):
        given = [x.detach().clone() for x in leaves]
        for x in given[:3]:
            x[~mask] = what
        given = [x.requires_grad_() for x in given]
        out, _ = triton(given, rule=rule(), mask=mask, mix=mix)
        found.append([out.detach(), *grads((out * weight_of(out)).sum(), given)])
    assert not found[0][0][~mask].any()
    for x in found[0][1:4]:
        assert not x[~mask].any()
    equal(*found)
    for row, count in enumerate(counts):
        own = [x[row, mask[row]].detach().double() for x in leaves[:3]]
        expected = stream(memory(*(x.detach().double() for x in leaves[3:])), *(x[None] for x in own), CHUNK)[0]
        assert len(expected) == count
        if mix:
            expected = blend(expected, *own[1:])
        near([found[0][0][row][mask[row]]], [expected], 2e-5)


@pytest.mark.parametrize("mix", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_token_that_is_not_finite_is_not_written(mix: bool) -> None:
    """It keeps its place, reads 0, and is nobody's target; all else is finite."""
    leaves = [x.detach() for x in draw(1)]
    leaves[0][0, 3, 0, 2], leaves[1][0, 5, 1], leaves[2][0, 7] = torch.nan, torch.inf, torch.nan
    leaves = [x.requires_grad_() for x in leaves]
    out, state = triton(leaves, rule=rule(), mix=mix)
    found = grads(out.sum(), leaves)
    for t in (3, 5, 7):
        assert not out[0, t].any()
        assert not any(g[0, t].any() for g in found[:3])
    assert bool(out.isfinite().all())
    assert all(bool(g.isfinite().all()) for g in found)
    assert bool(state.values.dense().isfinite().all())
    query, value, gate, keys, values = (x.detach().double() for x in leaves)
    read = memory(keys, values).read(query[0, :3])
    near([out[0, :3]], [blend(read, value[0, :3], gate[0, :3]) if mix else read], 2e-5)


@pytest.mark.slow
def test_documents_begin_anew() -> None:
    """And none changes a bit of another, forward or backward."""
    leaves = draw(1, 23)
    ids = torch.tensor([[0] * 9 + [3] * 8 + [1] * 6])

    def run(given: list[Tensor], weight: Tensor) -> list[Tensor]:
        given = [x.detach().requires_grad_() for x in given]
        out, _ = triton(given, rule=rule(), segment_ids=ids)
        return [out.detach(), *grads((out * weight).sum(), given)]

    weight = torch.randn(1, 23, 7, generator=torch.Generator().manual_seed(2))
    before = run(leaves, weight)
    exact = [x.detach().double() for x in leaves]
    parts = [dense([*(x[:, a:b] for x in exact[:3]), *exact[3:]]) for a, b in ((0, 9), (9, 17), (17, 23))]
    near([before[0]], [torch.cat(parts, 1)], 2e-5)
    changed = [x.detach().clone() for x in leaves]
    for x in changed[:3]:
        x[:, 9:17] *= -7
    after = run(changed, weight)
    for part in (slice(0, 9), slice(17, 23)):
        equal([x[:, part] for x in after[:4]], [x[:, part] for x in before[:4]])


def test_a_batch_is_a_loop() -> None:
    leaves = draw(2, grad=False)
    out, state = triton(leaves, rule=rule())
    for b in range(2):
        own, left = triton([*(x[b : b + 1] for x in leaves[:3]), *leaves[3:]], rule=rule())
        assert torch.equal(own, out[b : b + 1])
        assert torch.equal(left.values.dense()[0], state.values.dense()[b])
        assert torch.equal(left.keys[0], state.keys[b])


@pytest.mark.slow
def test_what_comes_later_changes_no_bit() -> None:
    leaves = draw(1, grad=False)
    out, _ = triton(leaves, rule=rule())
    for cut in (3, 4, 5, 9):
        given = [x.clone() for x in leaves]
        for x in given[:3]:
            x[:, cut:] *= 30
        assert torch.equal(triton(given, rule=rule())[0][:, :cut], out[:, :cut])


def everything(leaves: list[Tensor], **call: Any) -> list[Tensor]:
    """What is read, its gradients, and the state."""
    given = [x.detach().requires_grad_() for x in leaves]
    out, state = triton(given, rule=rule(), **call)
    return [out.detach(), *grads((out * weight_of(out)).sum(), given), *state.to_tensors().values()]


@pytest.mark.slow
def test_repetition_autocast_and_strides_change_no_bit() -> None:
    """Although many tokens meet in every slot: sums have an order."""
    leaves, how = [x.detach() for x in draw(2, 64, 2, 3, 2, 5)], {"chunk_size": 32, "top_k": 3}
    turned = [x.mT.contiguous().mT for x in leaves]
    sparse = [torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2] for x in leaves]
    before = everything(leaves, **how)
    for given, cast in ((leaves, False), (leaves, True), (turned, False), (sparse, False)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            equal(everything(given, **how), before)


@pytest.mark.slow
def test_slots_that_lie_far_apart() -> None:
    """Offsets of 2^31 and more in the table that is given, and in the tokens."""
    leaves = draw(2, 7, 1, 2, 2, 3, grad=False)
    expected, _ = triton(leaves, top_k=2)
    for place, axis in ((4, 0), (3, 2), (0, 0), (1, 0)):
        spread = far(leaves[place], axis, 2**30 + 16 if place == 4 else 2**31 + 16)
        out, _ = triton([*leaves[:place], spread, *leaves[place + 1 :]], top_k=2)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("sizes", [(0, 5), (2, 0)])
def test_nothing_at_all(sizes: tuple[int, int]) -> None:
    leaves = draw(*sizes)
    for mix in (False, True):
        out, _ = triton(leaves, mix=mix)
        assert out.shape == (*sizes, 7)
        assert [g.shape for g in grads(out.sum(), leaves)] == [x.shape for x in leaves]


def test_compiled_calls_equal_eager_ones() -> None:
    """Writes are left out of graphs; reads of a memory that was written are one graph."""
    torch._dynamo.reset()
    leaves = draw(1, 10)
    compiled = torch.compile(lambda *given: triton(list(given), rule=rule()), backend="eager")
    found = []
    for call in (lambda *given: triton(list(given), rule=rule()), compiled):
        out, state = call(*leaves)
        found.append([out, state.values.dense(), *grads((out * weight_of(out)).sum(), leaves)])
    near(*found, 1e-5)
    with torch.no_grad():  # no backward pass leaves its table at an older version
        values = triton(leaves, rule=rule())[1].values
    slots = torch.zeros(1, 3, 4, dtype=torch.long)
    read = torch.compile(values.read, fullgraph=True, backend="eager")(torch.ones(1, 3, 4), slots)
    near([read], [values.read(torch.ones(1, 3, 4), slots)], 1e-6)


def a_layer(impl: str, **options: Any) -> nn.FastWeightProductKeyMemory:
    torch.manual_seed(0)
    sizes = {"sub_keys": 5, "key_dim": 6, "value_dim": 8, "top_k": 3, "chunk_size": 4, "address_weight": 0.5}
    made = nn.FastWeightProductKeyMemory(12, **{**sizes, **options}, impl=impl)
    for number in made.parameters():  # so that queries and gates differ
        number.data += 0.3 * torch.randn_like(number)
    return made


OPTIONS: list[dict[str, Any]] = [
    {"learn_initial": True},
    {"heads": 2, "key_update": "pooled-entropy", "learning_rate": 0.5},
    {"step_rule": "reference", "learning_rate": 0.2, "shared": True, "border": False},
    {"gating": False},
    {"step_rule": "paper", "gate_loss": False, "heads": 2},
    {"key_update": "none", "look_ahead": False, "gate_loss": True},
    {"key_update": "mse", "learning_rate": 0.5, "score": "dot"},
    {"spec": "sparsemax"},
]


@pytest.mark.parametrize("options", some(OPTIONS, OPTIONS[:3]), ids=str)
def test_the_layer_with_either_store(options: dict[str, Any]) -> None:
    """Outputs, keys and values at the end, and gradients, with padding and a token that is not finite."""
    x = torch.randn(2, 11, 12)
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[0, 3], mask[1, 8:], x[0, 3], x[1, 5, 2] = False, False, torch.nan, torch.inf
    found = []
    for impl, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        layer, hidden = a_layer(impl, **options).to(dtype), x.to(dtype).requires_grad_()
        out, state = layer(hidden, mask)
        assert isinstance(state.values, TableValues) == (impl == "triton")
        corrupted = out.isnan()
        assert corrupted[1, 5].all()
        assert corrupted.sum() == 12
        state = layer.flush(state)
        outs = [torch.where(corrupted, 0, out), state.keys, state.values.dense()]
        own = torch.autograd.grad(sum((x * weight_of(x)).sum() for x in outs), [hidden, *layer.parameters()])
        assert all(bool(g.any()) for g in own)
        found.append([*outs, *own])
    near(*found, [*[5e-6] * 3, *[1e-4] * len(own)])


def test_what_was_read_can_be_listened_to_and_changed() -> None:
    """Before the mix, which is then made apart."""
    layer, x, heard = a_layer("triton"), torch.randn(1, 7, 12), []
    own, exact = layer.projections(x), copy.deepcopy(layer.projections).double()
    value, gate = own.value.detach().double(), None if own.gate is None else own.gate.detach().double()

    def given(read: Tensor) -> Tensor:
        mixed = blend(read, value, gate)
        normed = mixed / (mixed.square().mean(-1, keepdim=True) + 1e-5).sqrt() * exact.out_norm.weight
        return normed @ exact.out_proj.weight.T + exact.out_proj.bias

    query = own.query.detach().double().unflatten(-1, (1, -1))
    read = dense([query, value, gate, layer.keys.double(), layer.values.double()], 4, k=3)
    near([layer(x)[0]], [given(read)], 3e-5)
    handle = layer.hook_read.register_forward_hook(lambda module, args, out: heard.append(out))
    near([layer(x)[0], *heard], [given(read), read], 3e-5)
    handle.remove()
    layer.hook_read.register_forward_hook(lambda module, args, out: -out)
    near([layer(x)[0]], [given(-read)], 3e-5)


@pytest.mark.parametrize("mix", [False, True])
def test_launches_of_a_chunk(mix: bool) -> None:
    """Five, mixed or not, after one that looks through the tokens; one more with more than 16 sub-keys of a half."""
    names: list[str] = []
    leaves = draw(1, 2 * CHUNK + 1, grad=False)
    with watched(lambda kernel, *_: names.append(kernel.fn.__name__)):
        triton(leaves, rule=rule(), mix=mix)
    found = ["_choose", "_rows"]
    write = ["_prepare", "_moved", "_write"]
    assert names == ["clean_kernel", *found] + (write + found) * 2


def test_a_store_of_another_kind_is_not_taken_for_it() -> None:
    """impl chooses at the start of a stream; a state keeps its own kind."""
    leaves = draw(grad=False)
    _, state = triton(leaves)
    _, plain = regard.fast_weight_memory(*leaves, top_k=4, chunk_size=CHUNK, impl="reference")
    assert type(state.values) is not type(plain.values)
    assert type(triton(leaves, state=state)[1].values) is type(state.values)


@pytest.mark.parametrize("missing", [(), pytest.param(("missing",), marks=pytest.mark.slow)], ids=len)
def test_without_the_interpreter(missing: tuple[str, ...]) -> None:
    """On the CPU it is refused with a reason; importing regard imports no triton, which need not be there at all."""
    python("-c", ALONE, *missing, TRITON_INTERPRET="0")
