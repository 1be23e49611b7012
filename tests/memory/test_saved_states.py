"""States that an earlier version saved load and go on (`tests/data/make_memory_states.py`)."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from regard.memory.fast_weight_mlp import FastMLPState, fast_weight_mlp
from regard.memory.fast_weights import FastWeightState, fast_weight_memory
from regard.memory.large_chunk import LargeChunkState, large_chunk_ttt

DATA = Path(__file__).parents[1] / "data"
sys.path.insert(0, str(DATA))
from make_memory_states import SHARED, calls  # noqa: E402

KINDS = {
    "fast_weight_memory": (fast_weight_memory, FastWeightState),
    "fast_weight_mlp": (fast_weight_mlp, FastMLPState),
    "large_chunk_ttt": (large_chunk_ttt, LargeChunkState),
}


@pytest.mark.parametrize(("name", "shared"), [(name, shared) for name, kinds in SHARED.items() for shared in kinds])
def test_a_saved_state_loads_goes_on_and_keeps_its_names(name: str, shared: bool) -> None:
    held = np.load(DATA / "memory_states.npz")
    prefix = f"{name} {shared} state "
    tensors = {key.removeprefix(prefix): torch.tensor(held[key]) for key in held if key.startswith(prefix)}
    function, kind = KINDS[name]
    state = kind.from_tensors(tensors)
    out, after = function(**calls(name, shared)[1], state=state)
    torch.testing.assert_close(out, torch.tensor(held[f"{name} {shared} out"]), rtol=0, atol=1e-12)
    assert state.to_tensors().keys() == tensors.keys()
    assert after.to_tensors().keys() - {"waiting.good"} == tensors.keys() - {"waiting.good"}
