"""Tensors that a checkpoint lacks get the initial values of a new model, not what lies in memory."""

from collections.abc import Iterator

import pytest
import torch
from any_model import CASES, SIZES, every_case

from regard.models import language_models


@pytest.fixture(autouse=True)
def _empty_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # torch then fills new tensors with NaN
    yield
    torch.use_deterministic_algorithms(False)


@every_case
def test_missing_tensors_get_initial_values(case: str) -> None:
    kind, own = CASES[case]
    entry = language_models.get(kind)
    new = entry.model(entry.config(**{**SIZES, **own})).state_dict()
    loaded, report = entry.model.from_pretrained(
        None, config=entry.config(**{**SIZES, **own}), state_dict={}, output_loading_info=True
    )
    assert len(report["missing_keys"]) >= len(new) - 1  # the output matrix is the embedding
    for name, value in loaded.state_dict().items():
        assert value.isfinite().all(), name
        if new[name].unique().numel() == 1:
            assert torch.equal(value, new[name]), name
        elif value.numel() >= 64:
            assert 0.5 < value.double().square().mean() / new[name].double().square().mean() < 2, name
