"""Memories that stay in the module between calls, and those of several processes."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fwpkm_layers import N, close, layer, tokens

from regard.checks import ArgumentError

# A resident memory ----------------------------------------------------------------------------------------------


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
    for name, tensor in made.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor), name


def test_what_a_resident_memory_keeps_is_chosen():
    made = layer(shared=True, resident=True)
    first = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    x = tokens(10)
    fresh = made(x)[0]
    held = made.snapshot()
    second = made(x)[0]
    assert (second - fresh).abs().max() > 1e-3
    made.restore(held)
    assert torch.equal(made(x)[0], second)
    made.frozen = True
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    made(tokens(12, seed=3))
    for name, tensor in made.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    made.frozen = False
    made.reset()
    for name, tensor in made.state_dict().items():
        assert torch.equal(tensor, first[name]), name
    assert torch.equal(made(x)[0], fresh)
    with pytest.raises(ArgumentError, match="snapshot"):
        layer(shared=True, resident=True, sub_keys=N + 1).restore(held)
    with pytest.raises(ArgumentError, match="resident"):
        layer().restore(held)


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


# Several processes ----------------------------------------------------------------------------------------------

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
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    here = Path(__file__).parent
    done = subprocess.run(
        [*launch, str(folder / "program.py"), str(folder), str(here), str(here.parent)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_processes_that_write_together_equal_one_with_the_whole_batch(processes: Path) -> None:
    alone = layer(shared=True, resident=True)
    for seed in range(2):
        x = tokens(11, rows=4, seed=seed)
        x[1, 4] = torch.nan
        out = alone(x)[0].nan_to_num()
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
        for seed in range(2):
            x = tokens(11, rows=4, seed=seed)
            x[1, 4] = torch.nan
            alone(x[2 * rank : 2 * rank + 2])
        close(found["values"], alone.state_dict()["values"])
