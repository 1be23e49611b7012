"""How many kernels a call starts on a GPU: small ones around the large take the host's time."""

from typing import Any

import pytest

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
    assert sum(back_twice.values()) - sum(back.values()) <= 135


def test_the_count_sees_what_torch_starts(module: Any) -> None:
    import torch

    with module("gpu_launches").counted() as found:
        torch.ones(3, 4).transpose(0, 1).exp().neg()
    assert found == {"torch fill_": 1, "torch exp": 1, "torch neg": 1}
