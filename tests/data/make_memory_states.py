"""Make `memory_states.npz`: saved states of the memories that are written in chunks, and what came out after them.

    python make_memory_states.py

The file was made at 40896ff. A newer version must load it and give the same outputs, so make it again only when a
format is dropped on purpose.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.memory.fast_weight_mlp import fast_weight_mlp
from regard.memory.fast_weights import fast_weight_memory
from regard.memory.large_chunk import large_chunk_ttt

BATCH, CHUNK, FIRST, AFTER = 2, 4, 11, 6
SHARED = {"fast_weight_memory": (False, True), "fast_weight_mlp": (False, True), "large_chunk_ttt": (False,)}


def calls(name: str, shared: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of a first call, with padding, and of a second one."""
    draw = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return 0.5 * torch.randn(*sizes, generator=draw, dtype=torch.float64)

    def of(tokens: int) -> dict[str, Any]:
        if name == "fast_weight_memory":
            return {"query": normal(BATCH, tokens, 1, 4), "value": normal(BATCH, tokens, 3), "gate": None}
        if name == "fast_weight_mlp":
            return {"query": normal(BATCH, tokens, 3), "value": normal(BATCH, tokens, 2)}
        heads = {part: normal(BATCH, tokens, 2, 3) for part in ("query", "key", "value")}
        return {**heads, "rates": normal(BATCH, tokens, 2, 3).abs(), "share": normal(BATCH, tokens, 2).sigmoid()}

    how: dict[str, Any] = {"chunk_size": CHUNK}
    if name == "fast_weight_memory":
        how |= {"keys": normal(1, 2, 4, 2), "values": normal(16, 3), "top_k": 2, "shared": shared, "impl": "sparse"}
    elif name == "fast_weight_mlp":
        how |= {"weights": (normal(4, 4), normal(4, 4), normal(2, 5)), "shared": shared}
    else:
        how |= {"weights": (normal(2, 4, 3), normal(2, 4, 3), normal(2, 3, 4))}
    mask = torch.ones(BATCH, FIRST, dtype=torch.bool)
    mask[1, 2:5] = False
    return {**of(FIRST), **how, "mask": mask}, {**of(AFTER), **how}


if __name__ == "__main__":
    functions = {f.__name__: f for f in (fast_weight_memory, fast_weight_mlp, large_chunk_ttt)}
    found = {}
    for name, kinds in SHARED.items():
        for shared in kinds:
            first, second = calls(name, shared)
            state = functions[name](**first)[1]
            case = f"{name} {shared}"
            found |= {f"{case} state {key}": x.numpy() for key, x in state.to_tensors().items()}
            found[f"{case} out"] = functions[name](**second, state=state)[0].numpy()
    np.savez_compressed(Path(__file__).with_name("memory_states.npz"), **found)
