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


def test_the_count_sees_what_torch_starts(module: Any) -> None:
    import torch

    with module("gpu_launches").counted() as found:
        torch.ones(3, 4).transpose(0, 1).exp().neg()
    assert found == {"torch fill_": 1, "torch exp": 1, "torch neg": 1}
