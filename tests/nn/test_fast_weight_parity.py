"""Golden numbers of other people's programs.

`tests/data/fast_weight_package.npz`: fast-weight-product-key-memory 0.2.2 (PyPI), one head, float32, two rows of 3
chunks of 8 and 3 tokens more. What differs from this library, and how the file makes both comparable:

    write rule      mean over a slot's readers of g w e without the top-k factor: the paper's rule ("paper");
    key update      marginal entropy, weight 2 in two cases, 0 in "plain"; the pull of the error on the keys is off;
    border pair     the last query of a chunk is bound to the value of the FIRST token of its own chunk, not of the next
                    chunk: in the file all chunks begin with one token, so that both are the same number. Gradients
                    of these tokens are not: only their sum agrees;
    boundary query  in the case "boundary" a learned vector takes the place of the last query of each chunk and is added
                    to that token; the operator is given these queries, the layer has no such vector;
    z-score         with the biased variance and eps 1e-5 inside, the layer here has the unbiased one: its values are
                    smaller by sqrt((D - 1) / D), which the norm at the end takes away if those in memory are too;
    more heads      one softmax and one row of values for each head: nothing to compare.

`tests/data/fast_weight_authors.npz`: the program of the paper's authors (fwpkm.py at f41c5c0 of
github.com/LikeACloud7/fast-weight-product-key-memory) without cache, in training: one memory for both rows, chunks of
16, 16 and 13 tokens, of which the last is written too, float32 (its Triton embedding bag replaced by a gather). That is
the rule "reference" without border pairs, shared by the batch, flushed at the end. In "error-to-keys" the error moves
the keys and the entropy does not.

`tests/data/fast_weight_heads.npz`: the same program with four heads, made by `tests/data/make_fast_weight_heads.py`. It
takes one marginal over all heads ("pooled-entropy"). The package above and the paper (section 3.3: "for each of FwPKM's
sub key set") take one for every set of sub-keys ("entropy").

`tests/data/gated_delta_rule.npz`: the naive recurrence of fla-core 0.5.2 (naive_recurrent_gated_delta_rule; float32).
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from regard.memory.fast_weights import flush

DATA = Path(__file__).parents[1] / "data"
CHUNK, TOP_K = 8, 4
CASES = {"plain": 0.0, "addressing": 2.0, "boundary": 2.0}  # name: weight of the key update
Numbers = dict[str, Tensor]


def golden(name: str, prefix: str = "", dtype: torch.dtype = torch.float32) -> Numbers:
    with np.load(DATA / f"{name}.npz") as file:
        chosen = [key for key in file.files if key.startswith(prefix)]
        return {key.removeprefix(prefix): torch.tensor(file[key], dtype=dtype) for key in chosen}


def unit(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm with the machine epsilon of float32, as torch.nn.RMSNorm."""
    return x / (x.pow(2).mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt() * weight


def projected(numbers: Numbers, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query [B, T, 1, 14], value [B, T, 10] and gate [B, T] as the package makes them of tokens [B, T, 12]."""
    last = (torch.arange(x.shape[1]) % CHUNK == CHUNK - 1)[:, None]
    asking = x
    if "p.boundary_embed" in numbers:
        asking = torch.where(last, numbers["p.boundary_embed"], x)
        x = torch.where(last, x + numbers["p.boundary_embed"], x)

    def linear(name: str, of: Tensor) -> Tensor:
        return unit(of, numbers[f"p.{name}.0.weight"]) @ numbers[f"p.{name}.1.weight"].mT

    value = linear("to_values", x)
    value = value - value.mean(-1, keepdim=True)
    value = value / (value.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    return linear("to_queries", asking)[:, :, None], value, linear("to_gates", x)[..., 0].sigmoid()


def rule(weight: float, **options: object) -> regard.WriteRule:
    return regard.WriteRule("paper", address_weight=weight, key_update="entropy" if weight else "none", **options)


def run(
    numbers: Numbers, x: Tensor, weight: float, cuts: list[int], border: bool = True, **options: object
) -> tuple[Tensor, object]:
    query, value, gate = projected(numbers, x)
    keys, values = numbers["p.keys"].transpose(0, 1), numbers["p.memories"][:, 0]
    how = {"rule": rule(weight, border=border), "top_k": TOP_K, "chunk_size": CHUNK, **options}
    reads, state = [], None
    for part in zip(query.split(cuts, 1), value.split(cuts, 1), gate.split(cuts, 1), strict=True):
        read, state = regard.fast_weight_memory(*part, keys, values, state=state, **how)
        reads.append(read)
    mixed = value + gate[..., None] * (torch.cat(reads, 1) - value)
    return unit(mixed, numbers["p.to_out.0.weight"]) @ numbers["p.to_out.1.weight"].mT, state


@pytest.mark.parametrize("impl", ["reference", "auto"])
@pytest.mark.parametrize("cuts", [[27], [1] * 27, [7, 1, 9, 10]], ids=["whole", "tokens", "cuts"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_memory_of_the_package(name: str, cuts: list[int], impl: str) -> None:
    """The memory after three written chunks; the 3 tokens of the fourth wait in both."""
    numbers = golden("fast_weight_package", f"{name}/")
    out, state = run(numbers, numbers["tokens"], CASES[name], cuts, impl=impl)
    assert (out - numbers["output"]).abs().max() < 1e-4
    moved = state.values.dense() - numbers["p.memories"][:, 0]
    assert numbers["written_values"].abs().max() > 0.5
    assert (moved - numbers["written_values"][:, :, 0]).abs().max() < 1e-4
    keys = (state.keys - numbers["p.keys"].transpose(0, 1)).reshape(2, 2, 8, 7)
    assert (keys - numbers["written_keys"][:, :, 0].transpose(0, 1)).abs().max() < 1e-4


@pytest.mark.parametrize("impl", ["reference", "auto"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_the_package(name: str, impl: str) -> None:
    """Through three writes of values and keys, to the tokens, the projection of the query and the first memory."""
    numbers = golden("fast_weight_package", f"{name}/")
    names = {"tokens": "tokens", "values": "p.memories", "keys": "p.keys", "query": "p.to_queries.1.weight"}
    leaves = {of: numbers[key].requires_grad_() for of, key in names.items()}
    out, _ = run(numbers, leaves["tokens"], CASES[name], [27], impl=impl)
    found = dict(zip(names, torch.autograd.grad((out * numbers["probe"]).sum(), tuple(leaves.values())), strict=True))
    expected = {of: numbers[f"grad_{of}"] for of in names}
    for own in (found, expected):  # of the tokens that chunks begin with, the sum
        own["first"] = own["tokens"][:, ::CHUNK].sum(1)
        own["tokens"] = torch.cat([own["tokens"][:, i::CHUNK] for i in range(1, CHUNK)], 1)
    for of, gradient in expected.items():
        assert gradient.abs().max() > 0.1
        assert (found[of] - gradient).abs().max() < 1e-4 * gradient.abs().max(), of


def test_the_border_pair_differs_without_equal_first_tokens() -> None:
    """The listed difference is there: with the border pair left out, outputs part company after the first chunk."""
    numbers = golden("fast_weight_package", "plain/")
    out, _ = run(numbers, numbers["tokens"], 0.0, [27], border=False)
    gap = (out - numbers["output"]).abs().amax((0, 2))
    assert gap[:CHUNK].max() < 1e-5
    assert gap[CHUNK:].max() > 1e-2


AUTHORS = {
    "default": {"address_weight": 1.0},
    "addressing": {"address_weight": 10.0},
    "same-token": {"address_weight": 1.0, "look_ahead": False},
    "error-to-keys": {"key_update": "mse"},
    "dot": {"address_weight": 1.0},
}
FILES = [("fast_weight_authors", name) for name in AUTHORS]
FILES += [("fast_weight_heads", name) for name in ("default", "addressing", "dot")]


@pytest.mark.parametrize("impl", ["reference", "auto"])
@pytest.mark.parametrize(("file", "name"), FILES)
def test_the_program_of_the_authors(file: str, name: str, impl: str) -> None:
    """Reads through two writes with their gradients, and the memory after the third."""
    numbers, score = golden(file, f"{name}/"), "dot" if name == "dot" else "idw"
    rule = regard.WriteRule("reference", border=False, **{"key_update": "pooled-entropy", **AUTHORS[name]})
    names = ("query", "value", "gate", "keys", "values")
    leaves = [numbers[key].requires_grad_() for key in names]
    how = {"rule": rule, "top_k": 4, "chunk_size": 16, "shared": True, "score": score, "impl": impl}
    out, state = regard.fast_weight_memory(*leaves, **how)
    assert (out - numbers["output"]).abs().max() < 1e-5
    for key, gradient in zip(names, torch.autograd.grad((out * numbers["probe"]).sum(), leaves), strict=True):
        expected = numbers[f"grad_{key}"]
        assert (gradient - expected).abs().max() < 1e-4 * expected.abs().max(), key
    state = flush(state.detach(), rule=rule, score=score)
    assert (numbers["final_values"] - numbers["values"]).abs().max() > 1
    assert (state.values.dense()[0] - numbers["final_values"]).abs().max() < 1e-5
    assert (state.keys.reshape(numbers["keys"].shape) - numbers["final_keys"]).abs().max() < 1e-5


def test_the_program_pools_over_heads() -> None:
    """With one marginal for every head, which is the paper's, four heads part company after the first write."""
    numbers = golden("fast_weight_heads", "default/")
    given = (numbers[key] for key in ("query", "value", "gate", "keys", "values"))
    rule = regard.WriteRule("reference", address_weight=1.0, border=False)
    out, _ = regard.fast_weight_memory(*given, rule=rule, top_k=4, chunk_size=16, shared=True)
    gap = (out - numbers["output"]).abs().amax((0, 2))
    assert gap[:16].max() < 1e-5
    assert gap[16:].max() > 1e-2


def test_gated_delta_rule_of_fla_and_transformers() -> None:
    """fla-core's recurrence, transformers' chunked form and `regard.delta_rule` from the same state."""
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    one = golden("gated_delta_rule")
    names = ("query", "key", "value", "log_decay", "beta")
    out, state = modeling.torch_chunk_gated_delta_rule(
        *(one[name] for name in names), initial_state=one["state"], output_final_state=True
    )
    assert (out - one["output"]).abs().max() < 1e-5
    assert (state - one["final_state"]).abs().max() < 1e-5

    query, key, value, log_decay, beta = (one[name].transpose(1, 2) for name in names)
    begun = regard.recurrent.delta.DeltaState(one["state"], torch.zeros(one["state"].shape[:2], dtype=torch.bool))
    own, after = regard.delta_rule(
        query, key, value, beta, log_decay=log_decay, state=begun, scale=query.shape[-1] ** -0.5
    )
    assert (own.transpose(1, 2) - one["output"]).abs().max() < 1e-5
    assert (after.values - one["final_state"]).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["plain", "addressing"])
def test_the_layer_in_the_place_of_the_package(name: str) -> None:
    """Token by token too; within 1e-4, of which the z-scores' eps takes the most."""
    numbers = golden("fast_weight_package", f"{name}/")
    sizes = {"sub_keys": 8, "key_dim": 14, "value_dim": 10, "top_k": TOP_K, "chunk_size": CHUNK}
    how = {"step_rule": "paper", "address_weight": CASES[name], "norm_eps": torch.finfo(torch.float32).eps}
    layer = regard.nn.FastWeightProductKeyMemory(12, **sizes, **how)
    parts = {"q": "to_queries", "v": "to_values", "gate": "to_gates", "out": "to_out"}
    with torch.no_grad():
        for own, other in parts.items():
            getattr(layer.projections, f"{own}_norm").weight.copy_(numbers[f"p.{other}.0.weight"])
            getattr(layer.projections, f"{own}_proj").weight.copy_(numbers[f"p.{other}.1.weight"])  # eight gates alike
        layer.keys.copy_(numbers["p.keys"].transpose(0, 1))
        layer.values.copy_(numbers["p.memories"][:, 0] * 0.9**0.5)  # (D - 1) / D
        out, _ = layer(numbers["tokens"])
        state, single = None, []
        for token in numbers["tokens"].split(1, 1):
            given, state = layer(token, state=state)
            single.append(given)
    assert (out - numbers["output"]).abs().max() < 1e-4
    assert (torch.cat(single, 1) - numbers["output"]).abs().max() < 1e-4
