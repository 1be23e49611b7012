"""Sampling is a pure function of (seed, step)."""

import random

import torch

from regard.training import SampledWindows, window_starts


def test_starts_depend_on_seed_and_step_alone() -> None:
    torch.manual_seed(1)
    first = window_starts(3, 7, 40, 1000)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert torch.equal(first, window_starts(3, 7, 40, 1000))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first[:5], window_starts(3, 7, 5, 1000))
    assert not torch.equal(first, window_starts(3, 8, 40, 1000))
    assert not torch.equal(first, window_starts(4, 7, 40, 1000))
    # (1, 23) and (12, 3) must not be one and the same
    assert not torch.equal(window_starts(1, 23, 9, 1000), window_starts(12, 3, 9, 1000))


def test_starts_are_uniform_and_reach_both_ends() -> None:
    counts = torch.zeros(10)
    for step in range(500):
        counts += torch.bincount(window_starts(0, step, 8, 10), minlength=10)
    # 4000 draws over 10 cells: chi-squared with 9 degrees of freedom stays below 33.7 with p = 1 - 1e-4
    assert ((counts - 400) ** 2 / 400).sum() < 33.7


def test_examples_do_not_depend_on_the_order_of_reading() -> None:
    data = SampledWindows(torch.arange(100, dtype=torch.int32), context=8, steps=6, per_step=4, seed=5)
    assert len(data) == 24
    in_order = [data[i]["input_ids"] for i in range(24)]
    order = list(range(24))
    random.Random(0).shuffle(order)
    again = SampledWindows(torch.arange(100, dtype=torch.int32), context=8, steps=60, per_step=4, seed=5)
    for i in order:
        window = again[i]["input_ids"]
        assert torch.equal(window, in_order[i])
        assert torch.equal(window, torch.arange(int(window[0]), int(window[0]) + 8))  # a stretch of the text
        assert torch.equal(again[i]["labels"], window)
        assert window.dtype == torch.int64


def test_a_text_of_one_context_has_one_window() -> None:
    data = SampledWindows(torch.arange(8), context=8, steps=1, per_step=3, seed=0)
    assert [data[i]["input_ids"].tolist() for i in range(3)] == [list(range(8))] * 3
