"""Product-key memory with slow weights: values, gradients and counts against dense float64 formulas written here."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from contracts import oracle
from dense_fast_weights import numbers as drawn
from mistakes import refuses
from operators import Allocations
from torch import Tensor, nn

from regard.memory.stores.slot_sums import slot_sums
from regard.nn import ProductKeyMemory, optimizer_groups

SIZES: dict[str, Any] = {"sub_keys": 6, "key_dim": 8, "value_dim": 5, "heads": 2, "top_k": 3}


def memory(**options: Any) -> ProductKeyMemory:
    torch.manual_seed(0)
    layer = ProductKeyMemory(7, **{**SIZES, **options}).double()
    with torch.no_grad():  # queries that tell the keys apart
        layer.q_proj.weight.mul_(4)
        layer.keys.mul_(4)
    return layer


def all_slots(layer: ProductKeyMemory, x: Tensor, score: str = "dot", weigh: Any = None) -> Tensor:
    """The layer with the scores of all n^2 slots, one token and head at a time."""
    p = dict(layer.named_parameters())
    query = x @ p["q_proj.weight"].T + p["q_proj.bias"]
    if "q_norm.weight" in p:
        query = query / (query.square().mean(-1, keepdim=True) + 1e-5).sqrt() * p["q_norm.weight"]
    out = []
    for token, q in zip(x.flatten(0, 1), query.flatten(0, 1), strict=True):
        total = torch.zeros(5, dtype=torch.float64)
        for head, own in enumerate(q.view(2, 2, 4)):
            if score == "dot":
                halves = [p["keys"][head, half] @ own[half] for half in range(2)]
            else:
                halves = [-torch.log(1e-3 + (p["keys"][head, half] - own[half]).square().sum(-1)) for half in range(2)]
            scores = (halves[0][:, None] + halves[1][None, :]).flatten()
            best = sorted(range(36), key=lambda i: -scores[i].item())[:3]
            z = scores[best]
            weights = weigh(z) if weigh else torch.exp(z - z.max()) / torch.exp(z - z.max()).sum()
            total = total + sum(w * p["values"][i] for w, i in zip(weights, best, strict=True))
        if "gate_proj.weight" in p:
            gate = p["gate_proj.weight"] @ token + p["gate_proj.bias"]
            total = total * gate / (1 + torch.exp(-gate))
        out.append(p["out_proj.weight"] @ total + p["out_proj.bias"])
    return torch.stack(out).view(*x.shape)


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({}, {}),
        ({"query_norm": "none", "swilu": False}, {}),
        ({"score": "idw"}, {"score": "idw"}),
        ({"spec": "sparsemax"}, {"weigh": lambda z: oracle.of_scores(z, "adaptive")}),
    ],
)
def test_output_and_gradients_are_those_of_all_slots_scored(options: dict[str, Any], how: dict[str, Any]) -> None:
    layer, x = memory(**options), drawn(2, 4, 7, seed=1).requires_grad_()
    out, state = layer(x)
    assert state is None
    wanted = all_slots(layer, x, **how)
    torch.testing.assert_close(out, wanted, atol=1e-10, rtol=0)
    up, leaves = drawn(2, 4, 7, seed=2), [x, *layer.parameters()]
    grads = [torch.autograd.grad((x * up).sum(), leaves) for x in (out, wanted)]
    torch.testing.assert_close(*grads, atol=1e-9, rtol=0)
    of_row = torch.func.grad(lambda row, up: (layer(row[None])[0][0] * up).sum())
    torch.testing.assert_close(torch.func.vmap(of_row)(x.detach(), up), grads[0][0], atol=1e-9, rtol=0)
    moved = torch.func.jvp(lambda x: layer(x)[0], (x.detach(),), (up,))[1]
    torch.testing.assert_close((moved * up).sum(), (grads[0][0] * up).sum(), atol=1e-9, rtol=0)


def test_batch_norm_takes_real_tokens_alone() -> None:
    layer, x = memory(query_norm="batch"), drawn(2, 5, 7, seed=3)
    mask = torch.tensor([[True, True, False, True, True], [True, False, False, False, True]])
    out, _ = layer(torch.where(mask[..., None], x, torch.nan), mask)
    query = (x @ layer.q_proj.weight.T + layer.q_proj.bias)[mask]
    torch.testing.assert_close(layer.q_norm.running_mean, 0.1 * query.mean(0))
    torch.testing.assert_close(layer.q_norm.running_var, 0.9 + 0.1 * query.var(0))
    plain = memory(query_norm="none")  # whose queries are made the normed ones
    normed = (query - query.mean(0)) / (query.var(0, unbiased=False) + 1e-5).sqrt()
    plain.q_proj.weight.data.zero_()
    for got, q, token in zip(out[mask], normed, x[mask], strict=True):
        plain.q_proj.bias.data.copy_(q)
        torch.testing.assert_close(got, all_slots(plain, token[None, None])[0, 0], atol=1e-10, rtol=0)
    layer.eval()
    mean, var = layer.q_norm.running_mean.clone(), layer.q_norm.running_var.clone()
    alone = layer(x[:1, :1])[0][0, 0]
    plain.q_proj.bias.data.copy_((x[0, 0] @ layer.q_proj.weight.T + layer.q_proj.bias - mean) / (var + 1e-5).sqrt())
    torch.testing.assert_close(alone, all_slots(plain, x[:1, :1])[0, 0], atol=1e-10, rtol=0)


SWIGLU = 3 * 768 * 2304
GATED_DELTA_NET = (
    32000 * 768  # embeddings, tied
    + 768  # the last norm
    + 12 * (2 * 768 + SWIGLU)  # norms and feed-forward layers
    # queries, keys, values, gates of 8 heads x 64; beta and decay; convolutions of 4; A and dt; norm; output
    + 12 * (768 * 4 * 512 + 768 * 16 + 3 * 512 * 4 + 16 + 64 + 512 * 768)
)


def test_parameters_at_the_papers_sizes() -> None:
    """Table 2: 112.11 M for GDN, 509.08 M with product-key memories in place of three feed-forward layers."""
    with torch.device("meta"):
        layer = ProductKeyMemory(768)
    count = sum(p.numel() for p in layer.parameters())
    values, keys, query = 512**2 * 512, 4 * 2 * 512 * 256, 768 * 4 * 512 + 4 * 512
    assert count == values + keys + query + 4 * 512 + (768 * 512 + 512) + (512 * 768 + 768)
    assert abs(GATED_DELTA_NET / 1e6 - 112.11) <= 0.005
    assert abs((GATED_DELTA_NET + 3 * (count - SWIGLU)) / 1e6 - 509.08) <= 0.005
    assert layer.fast_numbers() == 0


def test_first_values() -> None:
    torch.manual_seed(0)
    layer = ProductKeyMemory(16, sub_keys=40, key_dim=64, value_dim=32)
    assert layer.keys.abs().max() <= 1 / 8
    assert abs(layer.keys.var().item() - (1 / 4) ** 2 / 12) < 1e-4
    assert abs(layer.values.var().item() - 1 / 32) < 1e-3


def test_derivatives_of_sums_to_the_second_order() -> None:
    slots = torch.tensor([[0, 3, 3], [2, 0, 5]])
    values, weights = drawn(7, 4, seed=1).requires_grad_(), drawn(2, 3, seed=2).requires_grad_()
    call = lambda v, w: slot_sums(v, slots, w)  # noqa: E731
    hot = F.one_hot(slots, 7).double()
    torch.testing.assert_close(call(values, weights), torch.einsum("rk,rkn,nd->rd", weights, hot, values))
    assert torch.autograd.gradcheck(call, (values, weights))
    assert torch.autograd.gradgradcheck(call, (values, weights))


def test_sums_of_shapes_that_do_not_fit() -> None:
    values, slots = drawn(7, 4), torch.zeros(2, 3, dtype=torch.long)
    words = r"values \[7, 4\], slots \[2, 3\], weights \[3\], expected \[N, Dv\], \[..., K\]"
    refuses(words, slot_sums, values, slots, drawn(3))
    refuses("slots has dtype torch.int32, expected torch.int64", slot_sums, values, slots.int(), drawn(2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_float32_whatever_the_table(dtype: torch.dtype) -> None:
    """At widths where rows are summed in several parts; frozen tables leave the weights their gradient."""
    values = drawn(50, 300, seed=3).to(dtype)
    slots = torch.randint(50, (40, 20), generator=torch.Generator().manual_seed(4))
    weights = drawn(40, 20, seed=5).float().requires_grad_()
    out = slot_sums(values, slots, weights)
    assert out.dtype == torch.float32
    hot = F.one_hot(slots, 50).double()
    wanted = torch.einsum("rk,rkn,nd->rd", weights.double(), hot, values.double())
    torch.testing.assert_close(out.double(), wanted, atol=1e-4, rtol=0)
    up = drawn(40, 300, seed=6)
    (own,) = torch.autograd.grad(out, weights, up.float())
    torch.testing.assert_close(own.double(), torch.einsum("rd,rkn,nd->rk", up, hot, values.double()), atol=1e-3, rtol=0)
    values.requires_grad_()
    (table,) = torch.autograd.grad(slot_sums(values, slots, weights), values, up.float())
    assert table.dtype == dtype
    exact = torch.einsum("rd,rkn,rk->nd", up, hot, weights.double())
    torch.testing.assert_close(table.double(), exact, atol=1e-4 if dtype == torch.float32 else 0.1, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_picked_is_never_held(dtype: torch.dtype) -> None:
    """64 tokens x 32 rows x 256 numbers would be 524288."""
    values = drawn(100, 256, seed=7).to(dtype).requires_grad_()
    slots = torch.randint(100, (64, 32), generator=torch.Generator().manual_seed(8))
    weights = drawn(64, 32, seed=9).float().requires_grad_()
    with Allocations() as seen:
        slot_sums(values, slots, weights).sum().backward()
    assert 25600 <= max(size for size, _ in seen.sizes) <= 2**17


def test_sparse_gradients_are_those_of_the_rows_read() -> None:
    layer, twin = memory(sparse_grad=True), memory()
    x, up = drawn(1, 2, 7, seed=10), drawn(1, 2, 7, seed=11)
    before = layer.values.detach().clone()
    for each in (layer, twin):
        (each(x)[0] * up).sum().backward()
    assert layer.values.grad.is_sparse
    rows = layer.values.grad.coalesce().indices()[0]
    assert 1 <= len(rows) <= 12
    table = all_slots(twin, x)
    (wanted,) = torch.autograd.grad((table * up).sum(), twin.values)
    torch.testing.assert_close(layer.values.grad.to_dense(), wanted, atol=1e-10, rtol=0)
    torch.optim.SparseAdam(optimizer_groups(layer).sparse).step()
    assert (layer.values != before).any(-1).nonzero()[:, 0].tolist() == rows.tolist()


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(9, 7), nn.LayerNorm(7)
        self.memory = ProductKeyMemory(7, **{**SIZES, **options})
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.head = nn.Linear(7, 9, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("fast", torch.zeros(3, 3))


def names(model: nn.Module, groups: Any) -> dict[str, set[str]]:
    known = {id(p): name for name, p in model.named_parameters()}
    return {g["name"]: {known[id(p)] for p in g["params"]} for g in (*groups.dense, *groups.sparse)}


PROJECTIONS = {f"memory.{name}" for name in ("q_proj", "gate_proj", "out_proj")}
VECTORS = {f"{name}.bias" for name in PROJECTIONS} | {"memory.q_norm.weight", "norm.weight", "norm.bias"}
MATRICES = {f"{name}.weight" for name in PROJECTIONS} | {"embed.weight"}


def test_every_parameter_that_learns_is_in_one_group() -> None:
    model = Model()
    groups = optimizer_groups(model, weight_decay=0.3)
    wanted = {"matrices": MATRICES, "vectors": VECTORS, "memory": {"memory.keys", "memory.values"}}
    assert names(model, groups) == wanted
    assert [(g["weight_decay"], g.get("lr")) for g in groups.dense] == [(0.3, None), (0.0, None), (0.0, 1e-3)]
    without = names(model, optimizer_groups(model, memory_keys=False))
    assert without == {"matrices": {*MATRICES, "memory.keys"}, "vectors": VECTORS, "memory": {"memory.values"}}
    sparse = Model(sparse_grad=True)
    found = optimizer_groups(sparse, memory_rate=0.01)
    assert names(sparse, found) == {**wanted, "memory": {"memory.keys"}, "sparse": {"memory.values"}}
    assert found.sparse[0]["lr"] == found.dense[2]["lr"] == 0.01
    assert [g["name"] for g in optimizer_groups(nn.Linear(2, 2)).dense] == ["matrices", "vectors"]
    refuses("memory_rate is -1", optimizer_groups, model, memory_rate=-1.0)


def test_rows_that_are_not_read_do_not_wear_away() -> None:
    model = Model()
    optimizer = torch.optim.AdamW(optimizer_groups(model, weight_decay=0.5).dense, lr=0.1)
    before = copy.deepcopy(model.state_dict())
    model.memory(drawn(1, 1, 7).float())[0].sum().backward()
    read = model.memory.values.grad.any(-1)
    optimizer.step()
    after = model.state_dict()
    moved = (after["memory.values"] - before["memory.values"]).abs().amax(-1)
    assert 1 <= read.sum() <= 6
    assert not moved[~read].any()
    torch.testing.assert_close(moved[read], torch.full_like(moved[read], 1e-3), atol=1e-5, rtol=0)  # Adam's first step
    assert (after["memory.q_proj.weight"] - before["memory.q_proj.weight"]).abs().max() > 0.05


def test_groups_of_a_trained_run_keep_their_rate() -> None:
    transformers = pytest.importorskip("transformers")
    from regard.training.trainer import RegardTrainer

    torch.manual_seed(0)
    trainer = RegardTrainer.__new__(RegardTrainer)
    trainer.model, trainer.optimizer, trainer.lr_scheduler = Model(), None, None
    trainer.optimizer_cls_and_kwargs, trainer.muon, trainer.shard = None, False, False
    sizes = {"learning_rate": 0.2, "weight_decay": 0.4, "warmup_steps": 4, "max_steps": 10}
    trainer.args = transformers.TrainingArguments(output_dir="unused", use_cpu=True, report_to="none", **sizes)
    optimizer = trainer.create_optimizer()
    scheduler = trainer.create_scheduler(10)
    seen = []
    for _ in range(6):
        seen.append([g["lr"] for g in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.4, 0.0, 0.0]
    matrices, vectors, own = zip(*seen, strict=True)
    assert matrices == vectors
    assert matrices[:5] == pytest.approx([0.0, 0.05, 0.1, 0.15, 0.2])
    assert set(own) == {1e-3}
    refused = RegardTrainer.__new__(RegardTrainer)
    refused.model, refused.optimizer, refused.args = Model(sparse_grad=True), None, trainer.args
    refused.muon, refused.shard = False, False
    refuses("sparse_grad=True", refused.create_optimizer)
