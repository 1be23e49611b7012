"""How many kernels a call starts, small ones around the large among them, and how many instructions they run."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")


@pytest.mark.parametrize("spec", ["softmax", "biweight", "relumax", "sparsemax", "local-linear"])
def test_a_forward_pass_starts_at_most_ten(module: Any, spec: str) -> None:
    forward, backward = module("gpu_launches").launches(spec)
    assert sum(forward.values()) <= 10, forward
    assert sum(backward.values()) <= 10, backward
    assert forward["clean_kernel"] == backward["clean_kernel"] == 1


def test_what_a_write_of_a_memory_adds(module: Any) -> None:
    """To a training step: the host takes longer to start so many small operations than the device to do them."""
    (one, back), (two, back_twice) = (module("gpu_launches").of_memory(writes) for writes in (1, 2))
    assert {name: n - one[name] for name, n in two.items() if n > one[name]} == dict.fromkeys(
        ("_rough", "_choose", "_rows", "_prepare", "_moved", "_write"), 1
    )
    assert sum(back_twice.values()) - sum(back.values()) <= 75


def test_the_count_sees_what_torch_starts(module: Any) -> None:
    with module("gpu_launches").counted() as found:
        torch.ones(3, 4).transpose(0, 1).exp().neg()
    assert found == {"torch fill_": 1, "torch exp": 1, "torch neg": 1}


def test_instructions_of_loops_count_as_often_as_they_run(module: Any) -> None:
    """Of ten: four before the loops, three of an inner loop in an outer one of five, one after them."""
    words = ["NOP", "NOP", "NOP", "NOP", "ADD", "MUL", "LDG", "@P0 BRA 0x50", "@P1 BRA 0x40", "EXIT"]
    found = [(16 * i, text) for i, text in enumerate(words)]
    executed = module("gpu_latency").executed
    assert executed(found, [6, 2], "k") == 5 + 2 * 2 + 3 * 6
    assert executed(found, [0, 2], "k") == 5 + 2 * 2
    with pytest.raises(AssertionError, match="k has 2 loops, 1 are known"):
        executed(found, [6], "k")


def test_programs_of_a_multiprocessor_share_its_schedulers(module: Any) -> None:
    took = module("gpu_latency").microseconds
    cycles = lambda *x: took(*x) * 1750  # noqa: E731
    assert cycles(1, 4, 32, 0, 100, 2) == pytest.approx(150 + 1200)
    assert cycles(132, 8, 32, 0, 100, 2) == pytest.approx(200 + 1200)
    assert cycles(264, 8, 32, 0, 100, 2) == pytest.approx(400 + 1200)
    assert cycles(264, 8, 255, 0, 100, 2) == pytest.approx(2 * (200 + 1200))  # registers of one alone


@pytest.mark.slow
def test_the_stored_table_is_that_of_the_kernels(module: Any) -> None:
    """A loop more in a kernel, or other tiles, need `python benchmarks/gpu_latency.py --write`."""
    latency = module("gpu_latency")
    stored = latency.RESULT.read_text(encoding="utf-8")
    if f"Triton {latency.triton.__version__}." not in stored:
        pytest.skip("the table is that of another Triton")
    assert latency.page(latency.measured()) == stored
