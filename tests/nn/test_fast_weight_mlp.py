"""The layer FwMLP: projections, sizes, dtypes, errors. `tests/memory` and `tests/contracts` have the rest."""

import pytest
import torch
from dense_fast_weights import close, numbers
from fwmlp_oracle import DIN, DV, B, F, T, layer, stream, tokens
from fwpkm_layers import mixed, projected
from mistakes import error_of

from regard.memory.fast_weight_mlp import FastMLPState, fast_weight_mlp
from regard.nn import FastWeightMLP
from regard.nn.memories import memory_layers


@pytest.mark.parametrize("value_norm", [True, False])
@pytest.mark.parametrize("gating", [True, False])
def test_layer_is_the_projections_around_the_memory(value_norm, gating):
    made, hidden = layer(value_norm=value_norm, gating=gating), tokens()
    p, net = dict(made.named_parameters()), (made.gate, made.up, made.down)
    query, value, gate = projected(p, hidden, value_norm, gating)
    read = torch.stack([stream(q, v, net)[0] for q, v in zip(query, value, strict=True)])
    close(made(hidden)[0], mixed(p, read, value, gate), 1e-10)


def test_sizes_of_the_paper():
    made = FastWeightMLP(768)
    assert made.fast_numbers() == 2 * 2304 * 513 + 512 * 2305 == 3_544_064
    assert sum(x.numel() for x in made.parameters()) == 1_190_408
    assert made.chunk_size == 512
    assert (made.settings.learning_rate, made.settings.target) == (0.1, "mean")
    learned = FastWeightMLP(8, in_dim=4, hidden_dim=4, value_dim=4, learn_initial=True)
    assert learned.fast_numbers() == 0
    learned(torch.randn(1, 9, 8))[0].sum().backward()
    assert all(learned.get_parameter(name).grad is not None for name in ("gate", "up", "down"))
    assert memory_layers.get("fwmlp") is FastWeightMLP


def test_numbers_beyond_all_bounds_count_as_not_finite():
    made, hidden = layer().float(), tokens().float()
    hidden[1, 3] = 1e30
    out, state = made(hidden)
    assert out[1, 3].isnan().all()
    assert out.isnan().any(-1).sum() == 1
    assert state.gate.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_memory_is_float32_whatever_the_layer_is(dtype):
    made, hidden = layer().to(dtype), tokens().to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.float32):
        out, state = made(hidden)
    assert out.dtype == dtype
    assert state.gate.dtype == torch.float32
    expected = made.double()(hidden.double())[0]
    assert (out.double() - expected).abs().max() < 0.1 * expected.abs().max()


def test_hooks_see_gates_and_readings_and_may_replace_them():
    made, hidden = layer(), tokens()
    seen = {}
    made.hook_gate.register_forward_hook(lambda module, inputs, out: seen.setdefault("gate", out))
    handle = made.hook_read.register_forward_hook(lambda module, inputs, out: seen.setdefault("read", out))
    out, _ = made(hidden)
    assert seen["gate"].shape == (B, T)
    assert seen["read"].shape == (B, T, DV)
    handle.remove()
    made.hook_read.register_forward_hook(lambda module, inputs, out: out + 1)
    assert (made(hidden)[0] - out).abs().max() > 1e-3


def narrowed():
    """A state as a damaged file gives it: the queries that wait have lost a channel."""
    kept = layer()(tokens())[1].to_tensors()
    return FastMLPState.from_tensors({**kept, "query": kept["query"][..., 1:]})


WITHOUT_BIASES = (numbers(F, DIN), numbers(F, DIN), numbers(DV, F))
MISTAKES = {
    "chunk_size is 1": lambda: layer(chunk_size=1),
    "unknown target='meen'. Did you mean 'mean'": lambda: layer(target="meen"),
    "value_dim >= 2": lambda: layer(value_dim=1),
    "segment_ids need a memory per doc": lambda: layer(shared=True)(tokens(), None, None, torch.zeros(B, T).long()),
    "state has 2 rows": lambda: layer()(tokens(), state=layer()(tokens(rows=2))[1]),
    "state holds gate [3, 5, 5]": lambda: layer()(tokens(), state=layer(hidden_dim=5)(tokens())[1]),
    f"state holds query [{B}, 2, {DIN - 1}], but these tensors need [..., {DIN}]": lambda: layer()(
        tokens(), state=narrowed()
    ),
    "state has shared=True": lambda: layer()(tokens(), state=layer(shared=True)(tokens())[1]),
    "state is torch.float32": lambda: layer()(tokens(), state=layer().float()(tokens().float())[1]),
    "got query [1, 0, 4] and value [1, 0, 3], expected [B, T, Din]": lambda: fast_weight_mlp(
        numbers(1, 0, DIN), numbers(1, 0, DV), WITHOUT_BIASES
    ),
    "weights gate have shape [4], expected a matrix": lambda: fast_weight_mlp(
        numbers(1, 2, DIN), numbers(1, 2, DV), (numbers(DIN),) * 3
    ),
    "weights gate are [6, 4]": lambda: fast_weight_mlp(numbers(1, 2, DIN), numbers(1, 2, DV), WITHOUT_BIASES),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_named(message):
    assert message in error_of(MISTAKES[message])
