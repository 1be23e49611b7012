"""`regard reproduce kernel-selection`: every kernel trained, counted and judged."""

import itertools
import math
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from tiny_runs import checked, make, stored

from regard.models import HybridForCausalLM
from regard_recipes.kernels import kernel_selection as recipe
from regard_recipes.kernels.kernel_selection import APART, EARLIER, KERNELS, MEAN, NORMALISED, PLAIN
from regard_recipes.lib.recipe import frame_of
from regard_recipes.lib.results import Journal, measure_into, unfinished_units

FORMULAS = {
    "exponential": lambda q, k: math.exp(q @ k / 2), "linear": lambda q, k: q @ k / 2,
    "geometric": lambda q, k: 1 / (1 - cosine(q, k)),
    "cosine": lambda q, k: cosine(q, k), "shift-cosine": lambda q, k: 1 + cosine(q, k),
    "rbf": lambda q, k: math.exp(-((q - k) @ (q - k)) / 4),
    "clipped-geometric": lambda q, k: 1 / (1 + 1e-4 - min(q @ k, 300) / 300),
    "relu": lambda q, k: q.clamp(min=0) @ k.clamp(min=0) + 1e-4,
    "relu2": lambda q, k: q.clamp(min=0) ** 2 @ k.clamp(min=0) ** 2 + 1e-4,
    "elu": lambda q, k: feature(q) @ feature(k),
}  # fmt: skip
"""Table 1, in heads of 4 channels with the customary scale 1/2: exp(z), z and exp(-|q - k|^2 / (2 sqrt d))."""


def cosine(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q @ k / ((1e-3 + q @ q) * (1e-3 + k @ k)) ** 0.5


def feature(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x, x.exp() - 1) + 1


def cell(kernel: str, weights: str = NORMALISED, query_key: str = APART) -> dict[str, str]:
    return {"model": kernel, "weights": weights, "query_key": query_key}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("weights", [NORMALISED, PLAIN])
def test_specs_are_table_1(kernel: str, weights: str) -> None:
    import regard

    drawn = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, 4, dtype=torch.float64, generator=drawn) for _ in range(3))
    own = torch.tensor([[float(FORMULAS[kernel](a, b)) for b in k] for a in q], dtype=torch.float64)
    wanted = own @ v / (own.sum(-1, keepdim=True) if weights == NORMALISED else 1)
    found = regard.attention(q[None, None], k[None, None], v[None, None], recipe.spec_of(kernel, weights))[0, 0]
    assert (found - wanted).abs().max() < 1e-9 * wanted.abs().max()


def test_equal_weights_are_equal() -> None:
    import regard

    drawn = torch.Generator().manual_seed(0)
    q, k, v = (50 * torch.randn(1, 1, 6, 4, dtype=torch.float64, generator=drawn) for _ in range(3))
    found = regard.attention(q, k, v, recipe.spec_of(MEAN), is_causal=True)[0, 0]
    assert (found - v[0, 0].cumsum(0) / torch.arange(1, 7)[:, None]).abs().max() < 1e-9


def test_how_cells_become_models() -> None:
    strict = made().model_config(cell("rbf", NORMALISED, EARLIER), 50)
    kept = (strict.share_query_key, strict.exclude_self, strict.feed_forward, strict.norm)
    assert kept == (True, True, "gelu", "layer")
    plain = made().model_config(cell("rbf"), 50)
    assert (plain.share_query_key, plain.exclude_self, plain.mixers) == (False, False, ["rbf", "rbf"])
    assert [made().model_config(cell("relu", weights), 50).output_norm for weights in (NORMALISED, PLAIN)] == [0, 1]


def test_the_size_of_the_paper_is_nanogpts() -> None:
    """Six blocks of 12 C^2 and biases, C = 384, a vocabulary of 65: 10.65 M with positions, which are rotary here."""
    own = made("paper", device="cpu")
    model = HybridForCausalLM(own.model_config(cell("exponential"), 65))
    layer = 4 * 384**2 + 2 * 384 * 1536 + 1536 + 384 + 4 * 384
    assert sum(w.numel() for w in model.parameters()) == 65 * 384 + 6 * layer + 2 * 384
    assert (own.context, own.batch, own.steps, own.rates) == (256, 64, 5000, (1e-3,))


def test_the_bigram_baseline_is_a_bigram_model(tmp_path: Path) -> None:
    """Between what the best table of pairs could have, fitted to the very text, and an even guess."""
    (tmp_path / "text.txt").write_text("".join(f"{i * i} crows sat on {i % 7} fences.\n" for i in range(400)))
    own = make("kernel-selection", data=tmp_path / "text.txt")
    found = own.prepare()["bigram"]
    held_out = own.test_tokens.tolist()
    assert len(held_out) == 300
    pairs, first = Counter(itertools.pairwise(held_out)), Counter(held_out[:-1])
    best = -sum(count * math.log(count / first[a]) for (a, _), count in pairs.items()) / 299
    assert best < found < math.log(own.vocabulary)


made = partial(checked, "kernel-selection")


def test_a_loss_that_climbs_does_not_fall_steadily() -> None:
    falls = lambda *courses: recipe.falling(frame_of([  # noqa: E731
        {**cell("rbf"), "seed": seed, "kind": "look", "step": step, "train": loss}
        for seed, course in enumerate(courses) for step, loss in enumerate(course)
    ]))["rbf", NORMALISED, APART]  # fmt: skip
    assert falls([4.0, 3.0, 3.04, 2.9])
    assert not falls([4.0, 3.0, 3.06, 2.9])
    assert not falls([4.0, 3.0], [3.0, 3.01])
    assert not falls([4.0, math.nan])


def test_two_kernels_have_more_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = made(seed=5, seeds=2, close_seeds=4, out=tmp_path)
    units = unfinished_units(own, Journal.open(own, ()))
    assert [seed for each, seed in units if each == {**cell("relu"), "rate": 0.01}] == [5, 6]
    for kernel, seeds in (("rbf", {5, 6, 7, 8}), ("exponential", {5, 6, 7, 8}), ("elu", {5, 6})):
        assert {seed for each, seed in units if each.items() >= cell(kernel).items()} == seeds
    assert {seed for each, seed in units if each.items() >= cell("rbf", PLAIN).items()} == {5, 6}
    earlier = Journal.open(own, ())
    del earlier.header["config"]["close_seeds"]  # as in journals of earlier versions
    earlier.begin({})
    monkeypatch.setattr(recipe.KernelSelection, "measure", lambda *_: [{}])
    measure_into(earlier.path, own, units[0])
    assert unfinished_units(own, Journal.open(own, ())) == units[1:]


def test_the_note_tells_the_seeds_that_were_measured() -> None:
    own, results = stored("kernel-selection")
    assert own.tables(results)["Kernels"].note.startswith("3 seeds, 8 of normalised exponential and rbf: mean")
    early = replace(results, frame=results.frame[results.frame["seed"] < 3])
    assert own.tables(early)["Kernels"].note.startswith("3 seeds: mean")
