"""The fast-weight product-key memory layer against its definition (fwpkm_oracle.py), and cut otherwise."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from fwpkm_layers import CHUNK, SMALL, C, N, close, layer, oracle, tokens
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard import WriteRule
from regard.checks import ArgumentError
from regard.nn import FastWeightConfig, FastWeightProductKeyMemory
from regard.nn.memories import memory_layers
from regard.nn.memory.fast_weight_config import MemoryStore, SlotTable, ValueMix

# The definition -------------------------------------------------------------------------------------------------

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
    "rate": {"learning_rate": 0.5, "address_weight": 3.0, "idw_eps": 1e-2, "norm_eps": 1e-3},
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("impl", ["reference", "auto"])
def test_equals_its_definition(name, impl):
    options = VARIANTS[name]
    made, x = layer(impl=impl, **options), tokens()
    named = {{"norm_eps": "eps"}.get(key, key): value for key, value in options.items()}
    out, keys, values = oracle(made, **named).run(x)
    found, state = made(x)
    close(found, out)
    close(state.values.dense(), values)
    close(state.keys, keys)
    assert (values - made.values).abs().max() > 0.1, "nothing was written"
    if options.get("key_update") != "none":
        assert (keys - made.keys).abs().max() > 1e-3
    assert (out[:, CHUNK:] - oracle(made, **named, chunk_size=99).run(x)[0][:, CHUNK:]).abs().max() > 1e-3


def test_padding_counts_as_if_it_were_not_there():
    made, x = layer(), tokens(20)
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[0, :5], mask[0, 9], mask[1, 12:] = False, False, False
    x = torch.where(mask[..., None], x, torch.nan)
    found, state = made(x, mask)
    assert torch.equal(found[~mask], torch.zeros_like(found[~mask]))
    for row in range(2):
        alone, after = made(x[row][mask[row]][None])
        close(found[row][mask[row]], alone[0])
        close(state.values.dense()[row], after.values.dense()[0])
        close(state.keys[row], after.keys[0])
    out, keys, values = oracle(made).run(x, mask)
    close(found, out)
    close(state.values.dense(), values)
    close(state.keys, keys)


def test_rows_without_tokens_give_zero_and_no_gradient():
    made, x = layer(), tokens(9).requires_grad_()
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1] = False
    out, state = made(x, mask)
    assert not out[1].any()
    out.sum().backward()
    assert not x.grad[1].any()
    assert x.grad[0].any()
    assert int(state.values.written()[1]) == 0


def test_preset_options():
    paper = FastWeightProductKeyMemory.from_preset("paper", C, **SMALL).rule
    program = FastWeightProductKeyMemory.from_preset("program", C, **{**SMALL, "address_weight": 0.5}).rule
    assert (paper.name, paper.address_weight, paper.border, paper.learning_rate) == ("paper", 10.0, True, 1.0)
    assert (program.name, program.address_weight, program.border) == ("reference", 0.5, False)
    with pytest.raises(ArgumentError, match=r"unknown preset 'papers'\. Did you mean 'paper'"):
        FastWeightProductKeyMemory.from_preset("papers", C)


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


# One write ------------------------------------------------------------------------------------------------------


def read_of(made: FastWeightProductKeyMemory, x: Tensor, state=None) -> Tensor:
    """What the memory says to tokens [1, T, C], before the mix; nothing is written."""
    heard: list[Tensor] = []
    hook = made.hook_read.register_forward_hook(lambda module, args, out: heard.append(out.detach()))
    frozen, made.frozen = made.frozen, True
    made(x, state=state)
    made.frozen = frozen
    hook.remove()
    return heard[0][0]


def test_one_write_makes_a_single_pair_exact():
    """The query of one token, the value of the next, keys at rest."""
    made = layer(chunk_size=2, key_update="none", gate_loss=False, top_k=4)
    for seed in range(5):
        x = tokens(2, rows=1, seed=seed)
        target = oracle(made).project(x)[1][0, 1]
        # the second token has no target and writes nothing, but where it reads the same slots it halves the step
        slots = [set(oracle(made, top_k=4).look(q, made.keys)[0]) for q in oracle(made).project(x)[0][0]]
        if slots[0] & slots[1]:
            continue
        state = made.flush(made(x)[1])
        close(read_of(made, x[:, :1], state)[0], target, 1e-9)
        break
    else:
        pytest.fail("no pair of queries without a common slot")


@pytest.mark.parametrize(("rule", "grows"), [("normalized", False), ("reference", True)])
def test_a_query_on_a_key_written_again_and_again(rule, grows):
    """With all weight on one slot the program's step overshoots 3 times, the other not."""
    made = layer(
        step_rule=rule, key_update="none", gate_loss=False, top_k=4, look_ahead=False, chunk_size=1, value_norm=True
    )
    x = tokens(1, rows=1)
    q, v, _ = (part.detach() for part in oracle(made).project(x))
    made.keys[:, :, 2] = q[0, 0]
    x, state, errors = x.expand(1, 6, C), None, []
    for t in range(6):
        _, state = made(x[:, t : t + 1], state=state)
        errors.append(float((read_of(made, x[:, :1], made.flush(state)) - v[0, 0]).norm()))
    if grows:
        assert errors[-1] > 100 * errors[0]
    else:
        assert max(errors) < 1e-6


# Streams --------------------------------------------------------------------------------------------------------


def cut(made, x, sizes, mask=None):
    state, parts, at = None, [], 0
    for size in sizes:
        seen = None if mask is None else mask[:, at : at + size]
        out, state = made(x[:, at : at + size], seen, state)
        parts, at = [*parts, out], at + size
    assert at == x.shape[1]
    return torch.cat(parts, 1), state


@pytest.mark.parametrize("options", [{}, {"step_rule": "reference", "border": False}, {"shared": True}], ids=str)
@pytest.mark.parametrize(
    "sizes", [[1] * 67, [16] * 4 + [3], [15, 17, 1, 16, 18], [67 - 33, 33]], ids=["1", "C", "C+-1", "2"]
)
def test_any_partition_of_a_stream_is_the_same_stream(sizes, options):
    """In float32."""
    made = layer(dtype=torch.float32, chunk_size=16, sub_keys=8, **options)
    x = tokens(67, dtype=torch.float32)
    whole, last = made(x)
    parts, after = cut(made, x, sizes)
    close(parts, whole, 1e-5)
    close(after.values.dense(), last.values.dense(), 1e-5)
    close(after.keys, last.keys, 1e-5)
    one, other = made.flush(last), made.flush(after)
    close(one.values.dense(), other.values.dense(), 1e-5)
    assert (one.values.dense() - last.values.dense()).abs().max() > 1e-2


def test_a_token_changes_nothing_before_it():
    """To the last bit."""
    made, x = layer(), tokens(14)
    out = made(x)[0]
    for t in (3, 4, 7, 8, 13):
        other = x.clone()
        other[:, t] = torch.randn(2, C, dtype=x.dtype)
        assert torch.equal(made(other)[0][:, :t], out[:, :t])
        assert not torch.equal(made(other)[0][:, t], out[:, t])


def test_rows_do_not_know_of_each_other():
    made, x = layer(), tokens(rows=3)
    out = made(x)[0]
    order = torch.tensor([2, 0, 1])
    close(made(x[order])[0], out[order])
    close(made(x[1:2])[0], out[1:2])
    shared = layer(shared=True)
    assert (shared(x[1:2])[0] - shared(x)[0][1:2]).abs().max() > 1e-3


def test_the_chunk_size_may_change_between_calls():
    made, x = layer(), tokens(16)
    made.chunk_size = 8
    close(made(x)[0], oracle(made, chunk_size=8).run(x)[0])
    made.chunk_size = 16
    state = made(x)[1]
    assert not state.values.written().any()
    assert made.flush(state).values.written().all()
    made.chunk_size = 1
    with pytest.raises(ArgumentError, match="chunk_size"):
        made(x)


def test_documents_packed_into_a_row():
    """Each has a memory of its own."""
    made, x = layer(), tokens(18)
    ids = torch.tensor([[0] * 7 + [1] * 11, [5] * 18])
    out = made(x, segment_ids=ids)[0]
    close(out[0, :7], made(x[:1, :7])[0][0])
    close(out[0, 7:], made(x[:1, 7:])[0][0])
    close(out[1], made(x[1:])[0][0])


def test_frozen_memories_stay_as_they_are():
    """Bit for bit, and what was read is what a state says at that time."""
    made, x = layer(), tokens(11)
    _, state = made(x)
    before = {name: tensor.clone() for name, tensor in state.to_tensors().items()}
    made.frozen = True
    out, after = made(tokens(30, seed=5), state=state)
    for name, tensor in after.to_tensors().items():
        assert torch.equal(tensor, before[name]), name
    again, _ = made(tokens(30, seed=5)[:, 20:], state=state)
    close(again, out[:, 20:])
    made.frozen = False
    assert not torch.equal(made(tokens(30, seed=5), state=state)[1].values.dense(), state.values.dense())


def test_states_are_snapshots():
    made, x = layer(), tokens(16)
    _, state = made(x[:, :7])
    want = made(x[:, 7:], state=state)[0]
    made(tokens(30, seed=9), state=state)
    close(made(x[:, 7:], state=state)[0], want, 1e-14)
    loaded = type(state).from_tensors(state.to_tensors())
    close(made(x[:, 7:], state=loaded)[0], want, 1e-14)
    close(made(x[1:, 7:], state=state.select(torch.tensor([1])))[0], want[1:])
    with pytest.raises(ArgumentError):
        layer(sub_keys=N + 1)(x, state=state)
    with pytest.raises(ArgumentError):
        made(tokens(rows=3), state=state)


# Gradients ------------------------------------------------------------------------------------------------------


def test_gradients_through_the_writes():
    """Finite differences through three chunks, of the tokens and of every parameter, the first memory among them."""
    made = layer(learn_initial=True, spread=5.0)
    x = tokens(11, rows=1).requires_grad_()
    names = [name for name, _ in made.named_parameters()]
    numbers = [p.detach().clone().requires_grad_() for p in made.parameters()]

    def run(x, *numbers):
        return torch.func.functional_call(made, dict(zip(names, numbers, strict=True)), (x,))[0]

    run(x, *numbers).square().sum().backward()
    generator = torch.Generator().manual_seed(3)
    for name, leaf in [("x", x), *zip(names, numbers, strict=True)]:
        way = torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype)

        def loss(step, leaf=leaf, way=way):
            moved = [each + step * way if each is leaf else each for each in (x, *numbers)]
            return run(*moved).detach().square().sum()

        slope = (loss(1e-6) - loss(-1e-6)) / 2e-6
        assert abs(float((leaf.grad * way).sum() - slope)) < 1e-5 * (1 + abs(float(slope))), name


@pytest.mark.parametrize(
    ("meta_grad", "reaches"), [(True, (1, 1, 1)), (False, (0, 0, 0)), (2, (0, 0, 1)), (3, (0, 0, 0))]
)
def test_how_far_gradients_reach_back(meta_grad, reaches):
    """From the fourth chunk to the tokens of the others; the third is the second and last write before a cut."""
    made, x = layer(meta_grad=meta_grad), tokens(16, rows=1).requires_grad_()
    made(x)[0][:, 12:].sum().backward()
    assert tuple(int(x.grad[:, 4 * c : 4 * c + 3].any()) for c in range(3)) == reaches
    assert x.grad[:, 12:].any()


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
    for one, other in zip(*grads, strict=True):
        close(one, other, 1e-12)
    for name, tensor in plain.state_dict().items():
        close(made.state_dict()[name], tensor, 1e-12)


# Settings -------------------------------------------------------------------------------------------------------


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
    assert made._options() == other._options()
    shapes = [{name: x.shape for name, x in each.state_dict().items()} for each in (made, other)]
    assert shapes[0] == shapes[1]
    assert FastWeightProductKeyMemory(C, config, chunk_size=5, top_k=1).top_k == 1


def test_every_option_has_its_default():
    """A model's `memory_options` may name any of them, as configurations that were saved do."""
    plain, given = FastWeightConfig(), FastWeightConfig().with_options(**FastWeightProductKeyMemory.defaults)
    assert plain == given
    assert len(FastWeightProductKeyMemory.defaults) == 26
    with pytest.raises(ArgumentError, match=r"unknown option 'sub_key'\. Did you mean 'sub_keys'"):
        FastWeightProductKeyMemory(C, sub_key=4)
    with pytest.raises(ArgumentError, match=r"config is a dict, expected a FastWeightConfig"):
        FastWeightProductKeyMemory(C, {"sub_keys": 4})
    with pytest.raises(ArgumentError, match="rule is 'paper', expected a WriteRule"):
        FastWeightConfig(rule="paper")


# Refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"chunk_size": 1}, "chunk_size is 1"),
        ({"top_k": N + 1}, "top_k is 7"),
        ({"key_dim": 7}, "key_dim is 7"),
        ({"sub_keys": 0}, "sub_keys is 0"),
        ({"heads": 1.5}, "heads is 1.5"),
        ({"step_rule": "normalised-rule"}, "normalised-rule"),
        ({"score": "cosine"}, "cosine"),
        ({"spec": "linear"}, "linear"),
        ({"impl": "spars"}, "Did you mean 'sparse'"),
        ({"meta_grad": -1}, "meta_grad is -1"),
        ({"idw_eps": 0.0}, "idw_eps is 0"),
        ({"norm_eps": 0.0}, "norm_eps is 0"),
        ({"value_dim": 1}, "value_dim"),
        ({"shared": "yes"}, "shared is 'yes'"),
        ({"key_update": "entropie"}, "Did you mean 'entropy'"),
        ({"learning_rate": -1.0}, "learning_rate is -1"),
        ({"gate_loss": 1}, "gate_loss is 1"),
        ({"gating": 2}, "gating is 2"),
        ({"resident": True}, "shared=True"),
        ({"sync": "all_gather"}, "shared=True"),
        ({"shared": True, "sync": "sum"}, "sync is 'sum'"),
        ({"shared": True, "resident": True, "learn_initial": True}, "learn_initial"),
    ],
    ids=str,
)
def test_options_that_do_not_fit(options, says):
    with pytest.raises(ArgumentError, match=says):
        layer(**options)


def test_calls_that_do_not_fit():
    made = layer()
    with pytest.raises(ArgumentError, match=r"hidden has shape \[2, 15, 13\], expected \[B, T, 12\]"):
        made(torch.zeros(2, 15, C + 1))
    with pytest.raises(ArgumentError, match="mask has dtype"):
        made(tokens(), torch.ones(2, 15))
    with pytest.raises(ArgumentError, match="mask"):
        made(tokens(), torch.ones(2, 14, dtype=torch.bool))
    with pytest.raises(ArgumentError, match="state"):
        made(tokens(), state="later")
