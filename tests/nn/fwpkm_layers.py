"""A small fast-weight product-key memory layer, its tokens and its definition."""

import torch
from fwpkm_oracle import Oracle
from torch import Tensor

from regard.nn import FastWeightProductKeyMemory

C, N, DK, DV, CHUNK = 12, 6, 8, 5, 4
SMALL = {"sub_keys": N, "key_dim": DK, "value_dim": DV, "top_k": 3, "chunk_size": CHUNK}
NAMES = {"top_k": "k", "chunk_size": "chunk", "step_rule": "rule", "address_weight": "address", "learning_rate": "rate"}


def layer(
    seed: int = 0, dtype: torch.dtype = torch.float64, spread: float = 10.0, **options
) -> FastWeightProductKeyMemory:
    """A small layer whose queries and gates differ visibly from token to token."""
    torch.manual_seed(seed)
    made = FastWeightProductKeyMemory(C, **{**SMALL, **options})
    for name, number in made.named_parameters():
        if "norm" not in name:
            number.data.mul_(spread) if name.endswith("weight") else number.data.normal_(std=0.3)
        else:
            number.data.add_(0.1 * torch.randn_like(number))
    return made.to(dtype)


def tokens(length: int = 15, rows: int = 2, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(rows, length, C, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def oracle(made: FastWeightProductKeyMemory, **options) -> Oracle:
    named = {NAMES.get(name, name): value for name, value in {**SMALL, **options}.items()}
    known = {name: value for name, value in named.items() if name in Oracle.__dataclass_fields__}
    return Oracle(made.state_dict(), **known)


def close(found: Tensor, expected: Tensor, atol: float = 1e-10) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)
