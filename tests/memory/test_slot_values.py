"""Both stores of memories' values under random operations, against plain tables and autograd in float64."""

import pytest
import torch
from store_programs import SELECTED, SLOTS, TOKENS, WIDTH, Program, picks

from regard.memory.stores.slot_values import slot_values


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "without-gradients"])
@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 40))])
@pytest.mark.parametrize("name", ["reference", "sparse"])
def test_a_random_program_gives_what_plain_tables_give(name: str, seed: int, recorded: bool) -> None:
    program = Program(name, seed, recorded)
    for _ in range(30):
        program.step()
    if recorded:
        program.gradients_agree()


def test_shares_of_zero_leave_no_trace() -> None:
    base = torch.randn(SLOTS, WIDTH, dtype=torch.float64, requires_grad=True)
    nothing = torch.zeros(2, TOKENS, SELECTED, dtype=torch.float64, requires_grad=True)
    args = (
        picks(2, TOKENS, SELECTED, SLOTS, 0),
        nothing,
        torch.ones(2, TOKENS, WIDTH).double(),
        torch.ones(2, TOKENS) > 0,
    )
    store = slot_values.get("sparse").start(base, 2)
    assert store.write(*args).written().tolist() == [0, 0]
    with torch.no_grad():
        assert slot_values.get("sparse").start(base, 2).write(*args).pool.bytes == 0
    held = store.pool.bytes
    store.select(torch.tensor([1, 1, 0])).repeat(2)
    assert store.pool.bytes == held
