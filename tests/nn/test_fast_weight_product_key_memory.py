"""The fast-weight product-key memory layer against its definition (fwpkm_oracle.py), its settings and errors.

What every memory layer keeps is tested in `tests/contracts`, and what a write does in `tests/memory`."""

from __future__ import annotations

import copy
import math
from dataclasses import asdict

import pytest
import torch
from fwpkm_layers import CHUNK, SMALL, C, N, close, layer, oracle, tokens
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
    "dot-mse-keys": {"score": "dot", "key_update": "mse", "learning_rate": 0.3, "look_ahead": False},
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


def test_preset_options():
    paper = FastWeightProductKeyMemory.from_preset("paper", C, **SMALL).settings.rule
    program = FastWeightProductKeyMemory.from_preset("program", C, **{**SMALL, "address_weight": 0.5}).settings.rule
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


# Gradients ------------------------------------------------------------------------------------------------------


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
    assert asdict(made.settings) == asdict(other.settings)
    shapes = [{name: x.shape for name, x in each.state_dict().items()} for each in (made, other)]
    assert shapes[0] == shapes[1]
    assert FastWeightProductKeyMemory(C, config, chunk_size=5, top_k=1).settings.top_k == 1


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
        ({"top_k": N + 1}, "top_k is 7"),
        ({"step_rule": "normalised-rule"}, "normalised-rule"),
        ({"impl": "spars"}, "Did you mean 'sparse'"),
        ({"value_dim": 1}, "value_dim"),
        ({"key_update": "entropie"}, "Did you mean 'entropy'"),
        ({"resident": True}, "shared=True"),
        ({"sync": "all_gather"}, "shared=True"),
        ({"shared": True, "sync": "sum"}, "sync is 'sum'"),
        ({"shared": True, "resident": True, "learn_initial": True}, "learn_initial"),
        ({"storage": "int8"}, "storage"),
    ],
    ids=str,
)
def test_options_that_do_not_fit(options, says):
    with pytest.raises(ArgumentError, match=says):
        layer(**options)
