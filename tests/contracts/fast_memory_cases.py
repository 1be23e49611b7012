"""Memory layers as their contract is tested: small, with options varied, and tokens to read."""

from typing import Any

import pytest
import torch
from torch import Tensor

from regard.nn.memories import memory_layers

B, T, C = 3, 23, 10
SMALL: dict[str, dict[str, Any]] = {
    "pkm": {"sub_keys": 6, "key_dim": 8, "value_dim": 6, "heads": 2, "top_k": 3},
    "fwpkm": {"sub_keys": 6, "key_dim": 8, "value_dim": 6, "top_k": 3, "chunk_size": 4},
    "fwmlp": {"in_dim": 6, "hidden_dim": 9, "value_dim": 6, "chunk_size": 4},
}
VARIED: dict[str, list[dict[str, Any]]] = {
    "pkm": [{"query_norm": "none", "swilu": False}, {"score": "idw", "spec": "sparsemax", "heads": 1}],
    "fwpkm": [
        {"impl": "reference"},
        {"step_rule": "paper", "heads": 2, "key_update": "mse"},
        {"step_rule": "reference", "border": False, "learning_rate": 0.3},
        {"look_ahead": False, "gating": False, "value_norm": False, "key_update": "none"},
        {"score": "dot", "gate_loss": False, "spec": "sparsemax", "meta_grad": 2, "address_weight": 1.0},
        {"meta_grad": False, "learn_initial": True, "chunk_size": 5},
        {"top_k": 6, "sub_keys": 6, "chunk_size": 2},
    ],
    "fwmlp": [{"target": "look-ahead", "learning_rate": 0.02}, {"meta_grad": False, "chunk_size": 3}],
}
CASES = [
    pytest.param(
        name, {**SMALL.get(name, getattr(cls, "small", {})), **more}, id="-".join([name, *map(str, more.values())])
    )
    for name, cls in memory_layers.items()
    for more in [{}, *VARIED.get(name, [])]
]
REMEMBERING = [case for case in CASES if memory_layers.get(case.values[0]).remembers]
every = pytest.mark.parametrize(("name", "options"), CASES)
remembering = pytest.mark.parametrize(("name", "options"), REMEMBERING)


def situations(names: str, all_of: list[Any], some: list[Any]) -> Any:
    """Every layer as it is by default in all situations, every variant in some."""
    return pytest.mark.parametrize(
        ("name", "options", *names.split()),
        [
            pytest.param(*each.values, *where.values, id=f"{each.id}-{where.id}")
            for each in CASES
            for where in (all_of if each.id in memory_layers else some)
        ],
    )


def make(name: str, options: dict[str, Any], dtype: torch.dtype = torch.float64) -> Any:
    """The layer in evaluation, with matrices so large that everything in it matters."""
    torch.manual_seed(5)
    layer = memory_layers.get(name)(C, **options).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif parameter.shape[0] < 30:
                parameter.normal_(std=0.5)
    return layer.eval()


def draw(batch: int = B, tokens: int = T, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Tokens that come back, so that what was written is read."""
    make = torch.Generator().manual_seed(seed)
    kinds = torch.randn(6, C, generator=make, dtype=torch.float64)
    chosen = torch.randint(0, 6, (batch, tokens), generator=make)
    return (kinds[chosen] + 0.1 * torch.randn(batch, tokens, C, generator=make, dtype=torch.float64)).to(dtype)


def read(layer: Any, hidden: Tensor, cuts: list[int] | None = None, mask: Tensor | None = None) -> tuple[Tensor, Any]:
    """The tokens in calls of `cuts` tokens, one after another."""
    cuts = [hidden.shape[1]] if cuts is None else cuts
    outs, state = [], None
    for at, piece in zip(torch.tensor([0, *cuts]).cumsum(0).tolist(), hidden.split(cuts, 1), strict=False):
        own = None if mask is None else mask[:, at : at + piece.shape[1]]
        out, state = layer(piece, mask=own, state=state)
        outs.append(out)
    return torch.cat(outs, 1), state


def tensors(state: Any) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in state.to_tensors().items()}


def same(one: Any, other: Any) -> bool:
    """Two states that hold the same bits."""
    a, b = tensors(one), tensors(other)
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def gap(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()
