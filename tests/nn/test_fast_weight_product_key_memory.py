"""The fast-weight product-key memory layer: its definition (fwpkm_layers.py), settings, precision, resident memories.
What every layer keeps is tested in `tests/contracts`, and what a write does in `tests/memory`."""

import copy
import math
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from dense_fast_weights import close
from fwpkm_layers import CHUNK, SMALL, C, N, layer, oracle, tokens
from mistakes import refuses
from programs import python
from torch.distributed import HashStore, destroy_process_group, init_process_group
from torch.utils.checkpoint import checkpoint

from regard import WriteRule
from regard.nn import FastWeightConfig, FastWeightProductKeyMemory
from regard.nn.memories import memory_layers
from regard.nn.memory.fast_weight_config import MemoryStore, SlotTable, ValueMix

VARIANTS = {
    "default": {},
    "paper": {"step_rule": "paper"},
    "reference": {"step_rule": "reference"},
    "program": {"step_rule": "reference", "border": False, "address_weight": 1.0},
    "shared": {"shared": True},
    "program-shared": {"step_rule": "reference", "border": False, "shared": True},
    "heads": {"heads": 2, "top_k": 2, "step_rule": "reference"},
    "top-5": {"top_k": 5},
    "no-value-norm": {"value_norm": False},
    "mse-keys": {"key_update": "mse", "step_rule": "paper", "learning_rate": 0.3},
    "fixed-keys": {"key_update": "none"},
    "no-gating": {"gating": False},
    "no-loss-weight": {"gate_loss": False},
    "no-look-ahead": {"look_ahead": False},
    "dot": {"score": "dot"},
    "dot-mse-keys": {"score": "dot", "key_update": "mse", "learning_rate": 0.3, "look_ahead": False},
    "rate": {"learning_rate": 0.5, "address_weight": 3.0, "idw_eps": 1e-2, "norm_eps": 1e-3},
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("impl", ["reference", "auto"])
def test_equals_its_definition(name, impl):
    options = VARIANTS[name]
    made, x = layer(impl=impl, **options), tokens()
    out, keys, values = oracle(made, **options).run(x)
    found, state = made(x)
    close(found, out)
    close(state.values.dense(), values)
    close(state.keys, keys)
    assert (values - made.values).abs().max() > 0.1, "nothing was written"
    if options.get("key_update") != "none":
        assert (keys - made.keys).abs().max() > 1e-3
    assert (out[:, CHUNK:] - oracle(made, **options, chunk_size=99).run(x)[0][:, CHUNK:]).abs().max() > 1e-3


def test_preset_options():
    paper = FastWeightProductKeyMemory.from_preset("paper", C, **SMALL).settings.rule
    program = FastWeightProductKeyMemory.from_preset("program", C, **{**SMALL, "address_weight": 0.5}).settings.rule
    assert (paper.name, paper.address_weight, paper.border, paper.learning_rate) == ("paper", 10.0, True, 1.0)
    assert program == WriteRule("reference", address_weight=0.5, border=False, key_update="pooled-entropy")
    refuses(r"unknown preset='papers'\. Did you mean 'paper'", FastWeightProductKeyMemory.from_preset, "papers", C)


def test_sizes_of_the_paper():
    """Table 2: three memories in a model of width 768 are 519.12 - 112.11 M numbers."""
    with torch.device("meta"):
        made = memory_layers.get("fwpkm")(768)
    slow = sum(p.numel() for p in made.parameters())
    assert slow == 1_190_408
    assert made.fast_numbers() == 2 * 512 * 256 + 512**2 * 512
    assert abs(3 * (slow + made.fast_numbers()) / 1e6 - (519.12 - 112.11)) < 0.01
    with torch.device("meta"):
        learned = FastWeightProductKeyMemory(768, learn_initial=True)
    assert learned.fast_numbers() == 0
    assert sum(p.numel() for p in learned.parameters()) == slow + made.fast_numbers()


def test_initial_values():
    torch.manual_seed(0)
    made = FastWeightProductKeyMemory(C, sub_keys=64, key_dim=32, value_dim=16, top_k=8)
    reach = 32**-0.5
    assert made.keys.abs().max() <= reach
    assert abs(float(made.keys.std()) - reach / math.sqrt(3)) < 0.003
    assert abs(float(made.values.std()) - 16**-0.5) < 0.003
    assert all(not p.any() for name, p in made.named_parameters() if name.endswith("proj.bias"))
    torch.manual_seed(0)
    again = FastWeightProductKeyMemory(C, sub_keys=64, key_dim=32, value_dim=16, top_k=8)
    assert torch.equal(again.values, made.values)
    assert not isinstance(made.values, torch.nn.Parameter)


def test_first_keys_and_values_can_be_learned():
    made = layer(learn_initial=True)
    made(tokens())[0].square().sum().backward()
    assert all(made.get_parameter(name).grad.any() for name in ("keys", "values"))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activations_made_again(reentrant):
    """A checkpointed layer has the same gradients, and its memory is written once."""
    made, x = layer(shared=True, resident=True), tokens(15)
    plain = copy.deepcopy(made)
    grads = []
    for each, again in ((plain, False), (made, True)):
        own = x.clone().requires_grad_()
        for _ in range(2):
            out = checkpoint(lambda t, m=each: m(t)[0], own, use_reentrant=reentrant) if again else each(own)[0]
            out.square().sum().backward()
        grads.append([own.grad, *(p.grad for p in each.parameters())])
    close(*grads, 1e-12)
    close(made.state_dict(), plain.state_dict(), 1e-12)


def test_groups_and_options_make_the_same_layer():
    options = {"sub_keys": N, "step_rule": "paper", "gating": False, "shared": True, "storage": "bfloat16"}
    made = FastWeightProductKeyMemory(C, **options, key_dim=8, value_dim=4, top_k=2, chunk_size=3)
    config = FastWeightConfig(
        table=SlotTable(sub_keys=N, key_dim=8, value_dim=4, top_k=2),
        rule=WriteRule("paper"),
        mix=ValueMix(gating=False),
        store=MemoryStore(shared=True, storage=torch.bfloat16),
        chunk_size=3,
    )
    other = FastWeightProductKeyMemory(C, config)
    assert str(made) == str(other)
    assert asdict(made.settings) == asdict(other.settings)
    shapes = [{name: x.shape for name, x in each.state_dict().items()} for each in (made, other)]
    assert shapes[0] == shapes[1]
    assert FastWeightProductKeyMemory(C, config, chunk_size=5, top_k=1).settings.top_k == 1


def test_every_option_has_its_default():
    """A model's `memory_options` may name any of them, as configurations that were saved do."""
    plain, given = FastWeightConfig(), FastWeightConfig().with_options(**FastWeightProductKeyMemory.defaults)
    assert plain == given
    assert len(FastWeightProductKeyMemory.defaults) == 26
    refuses(r"unknown option 'sub_key'\. Did you mean 'sub_keys'", FastWeightProductKeyMemory, C, sub_key=4)
    refuses(r"config is a dict, expected a FastWeightConfig", FastWeightProductKeyMemory, C, {"sub_keys": 4})
    refuses("rule is 'paper', expected a WriteRule", FastWeightConfig, rule="paper")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"top_k": N + 1}, "top_k is 7"),
        ({"step_rule": "normalised-rule"}, "normalised-rule"),
        ({"impl": "spars"}, "Did you mean 'sparse'"),
        ({"value_dim": 1}, "value_dim"),
        ({"key_update": "entropie"}, "Did you mean 'entropy'"),
        ({"resident": True}, "shared=True"),
        ({"sync": "all_gather"}, "shared=True"),
        ({"shared": True, "sync": "sum"}, "unknown sync='sum'"),
        ({"shared": True, "resident": True, "learn_initial": True}, "learn_initial"),
        ({"storage": "int8"}, "storage"),
    ],
    ids=str,
)
def test_options_that_do_not_fit(options, says):
    refuses(says, layer, **options)


def test_autocast_leaves_the_memory_in_float32():
    made, x = layer(dtype=torch.float32, spread=5.0), tokens(dtype=torch.float32)
    exact = made(x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        out, state = made(x)
        out.sum().backward()
    assert out.dtype == state.values.dense().dtype == state.keys.dtype == torch.float32
    assert not torch.equal(out, exact)
    # slots are chosen by rounded queries, so that single tokens may read others
    assert (out - exact).abs().median() < 0.05 * exact.abs().mean()
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in made.parameters())


def test_bfloat16():
    _, state = layer(dtype=torch.bfloat16)(tokens(dtype=torch.bfloat16))
    assert state.keys.dtype == torch.float32
    stored = layer(dtype=torch.float32, storage="bfloat16")
    _, state = stored(tokens(dtype=torch.float32))
    values = state.values.dense().float()
    moved = values[(values - stored.values.bfloat16().float()).abs().amax(-1) > 0.1]
    assert len(moved) > 10
    assert torch.equal(moved, moved.bfloat16().float())


def whole_graph(made):
    made.frozen = True
    torch._dynamo.reset()
    return torch.compile(made, fullgraph=True, backend="eager")


@pytest.mark.parametrize("masked", [False, True])
def test_the_read_path_compiles_in_one_graph(masked):
    made, x = layer(dtype=torch.float32), tokens(dtype=torch.float32)
    mask = torch.arange(15) >= torch.tensor([[3], [0]]) if masked else None
    compiled = whole_graph(made)
    close(compiled(x, mask)[0], made(x, mask)[0], 1e-6)


def test_reading_a_written_memory_compiles_in_one_graph():
    made, x = layer(dtype=torch.float32), tokens(dtype=torch.float32)
    with torch.no_grad():
        _, state = made(x)
        out, after = whole_graph(made)(x, state=state)
        close(out, made(x, state=state)[0], 1e-6)
    assert (out - made(x)[0]).abs().max() > 1e-2
    assert torch.equal(after.values.dense(), state.values.dense())


def test_compiled_writes_equal_eager_ones():
    """However many tokens wait, the same graphs serve."""
    made, x = layer(dtype=torch.float32), tokens(24, dtype=torch.float32)
    torch._dynamo.reset()
    compiled, graphs = torch.compile(made, backend="eager"), []
    state = after = None
    for at in range(0, 24, 3):
        out, state = compiled(x[:, at : at + 3].contiguous(), state=state)
        want, after = made(x[:, at : at + 3].contiguous(), state=after)
        close(out, want, 1e-5)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    close(state.values.dense(), after.values.dense(), 1e-5)
    assert graphs[-1] == graphs[2]


def same(made, expected):
    torch.testing.assert_close(made.state_dict(), expected, rtol=0, atol=0)


def test_a_resident_memory_goes_on():
    made = layer(shared=True, resident=True)
    carried = layer(shared=True)
    state = None
    for seed in range(3):
        x = tokens(10, rows=2, seed=seed)
        out, after = carried(x, state=state)
        state = carried.flush(after)
        close(made.train(seed == 0)(x)[0], out)
    saved = made.state_dict()
    close(saved["values"], state.values.dense()[0])
    close(saved["keys"], state.keys[0])
    fresh = layer(seed=7, shared=True, resident=True)
    fresh.load_state_dict(saved)
    x = tokens(10, seed=8)
    assert torch.equal(fresh(x)[0], made(x)[0])
    same(made, fresh.state_dict())


@pytest.fixture
def one_process():
    """A process group of this process alone."""
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("sync", [None, "all_gather"])
def test_a_resident_memory_that_was_read_in_inference_mode_can_be_trained(sync):
    """With sync the tokens that wait are written at the end of a call, in inference mode as elsewhere."""
    made, plain = layer(shared=True, resident=True, sync=sync), layer(shared=True, resident=True)
    for seed in range(2):
        with torch.inference_mode():
            made(tokens(25, seed=seed))
        plain(tokens(25, seed=seed))
    found = []
    for memory in (made, plain):
        x = tokens(25, seed=8).requires_grad_()
        memory(x)[0].square().sum().backward()
        found.append(x.grad)
    close(*found)
    close(made.state_dict()["values"], plain.state_dict()["values"])


def test_forward_mode_and_transforms_run_in_the_reference():
    made, x = layer(meta_grad=True), tokens(10, rows=3)
    slopes = torch.func.vmap(torch.func.grad(lambda x: made(x[None])[0].square().sum()))(x)
    leaf = x.clone().requires_grad_()
    made(leaf)[0].square().sum().backward()
    close(slopes, leaf.grad)
    close(torch.func.jvp(lambda x: made(x)[0].square().sum(), (x,), (x,))[1], (leaf.grad * x).sum())
    sparse = layer(impl="sparse")
    refuses("impl='reference' can", torch.func.grad(lambda x: sparse(x)[0].sum()), x)
    state = sparse(x)[1]
    refuses("state .* impl='reference'", torch.func.grad(lambda x: sparse(x, state=state)[0].sum()), x)
    resident = layer(shared=True, resident=True)
    refuses("resident=False", torch.func.grad(lambda x: resident(x)[0].sum()), x)


def test_what_a_resident_memory_keeps_is_chosen():
    made = layer(shared=True, resident=True)
    first = copy.deepcopy(made.state_dict())
    x = tokens(10)
    fresh = made(x)[0]
    held = made.snapshot()
    second = made(x)[0]
    assert (second - fresh).abs().max() > 1e-3
    made.restore(held)
    assert torch.equal(made(x)[0], second)
    made.frozen = True
    before = copy.deepcopy(made.state_dict())
    made(tokens(12, seed=3))
    same(made, before)
    made.frozen = False
    made.reset()
    same(made, first)
    assert torch.equal(made(x)[0], fresh)
    refuses("snapshot", layer(shared=True, resident=True, sub_keys=N + 1).restore, held)
    refuses("resident", layer().restore, held)


def test_copies_and_conversions_have_what_was_written():
    made, x = layer(shared=True, resident=True), tokens(10)
    made(x)
    other = copy.deepcopy(made)
    want = made(x)[0]
    close(other(x)[0], want)
    narrow = copy.deepcopy(other).float()
    assert narrow.values.dtype == torch.float32
    close(narrow.values.double(), other.state_dict()["values"], 1e-6)
    close(narrow(x.float())[0].double(), made(x)[0], 1e-3)


def test_a_backward_pass_after_the_next_call():
    """Writes of a call never change what the call before had read."""
    made, plain = (layer(shared=True, resident=resident) for resident in (True, False))
    x, y = tokens(10).requires_grad_(), tokens(10, seed=2)
    out = made(x)[0]
    made(y)
    made(y)
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    (want,) = torch.autograd.grad(plain(x)[0].square().sum(), x)
    close(grad, want)


def test_a_resident_memory_continues_a_state():
    """Decoding: the caller's state, not the module's, is what a call with one goes on from."""
    made, plain = layer(shared=True, resident=True), layer(shared=True)
    x = tokens(14)
    whole = plain(x)[0]
    out, state = made(x[:, :9])
    more, _ = made(x[:, 9:], state=state)
    close(torch.cat([out, more], 1), whole)


def run(made, rows=slice(None)):
    """Two calls of four rows, of which `rows` are given, with a token that is not finite."""
    for seed in range(2):
        x = tokens(11, rows=4, seed=seed)
        x[1, 4] = torch.nan
        out = made(x[rows])[0].nan_to_num()
    return out


PROGRAM = """
import sys, torch
from torch.distributed import destroy_process_group, get_rank, init_process_group
from torch.nn.parallel import DistributedDataParallel
sys.path[:0] = sys.argv[2:]
from fwpkm_layers import layer, tokens

if __name__ == "__main__":
    torch.set_num_threads(1)
    init_process_group("gloo")
    rank = get_rank()
    for sync in (None, "all_gather"):
        made = layer(shared=True, resident=True, sync=sync)
        running = DistributedDataParallel(made, broadcast_buffers=False)
        for seed in range(2):
            x = tokens(11, rows=4, seed=seed)
            x[1, 4] = torch.nan
            x = x[2 * rank : 2 * rank + 2].requires_grad_()
            out = running(x)[0].nan_to_num()
            out.square().mean().backward()
        torch.save({"out": out.detach(), "grad": x.grad, **made.state_dict()}, f"{sys.argv[1]}/{sync}.{rank}")
    destroy_process_group()
"""


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    (folder / "program.py").write_text(PROGRAM)
    here = Path(__file__).parent
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    python(*launch, folder / "program.py", folder, here, here.parent, OMP_NUM_THREADS="1")
    return folder


def test_processes_that_write_together_equal_one_with_the_whole_batch(processes: Path) -> None:
    alone = layer(shared=True, resident=True)
    out = run(alone)
    first, second = (torch.load(processes / f"all_gather.{rank}") for rank in range(2))
    assert min(first["grad"].abs().max(), second["grad"].abs().max()) > 0
    for name in ("keys", "values"):
        assert torch.equal(first[name], second[name])
        close(first[name], alone.state_dict()[name])
    close(torch.cat([first["out"], second["out"]]), out.detach())


def test_processes_have_memories_of_their_own_unless_told(processes: Path) -> None:
    for rank in range(2):
        found = torch.load(processes / f"None.{rank}")
        alone = layer(shared=True, resident=True)
        run(alone, slice(2 * rank, 2 * rank + 2))
        close(found["values"], alone.state_dict()["values"])
