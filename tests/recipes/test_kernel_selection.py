"""`regard reproduce kernel-selection`: every kernel trained, counted and judged."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from regard.checks import ArgumentError
from regard.cli import main
from regard.models import HybridForCausalLM
from regard_recipes.kernels import kernel_selection as recipe
from regard_recipes.kernels import kernel_selection_output as shown
from regard_recipes.kernels.kernel_selection import MEAN, Kind
from regard_recipes.lib.language_runs import LanguageRun

SMALL = (
    "--size quick --kernels exponential linear rbf clipped-geometric --earlier rbf --seeds 2 --layers 1 --width 16 "
    "--heads 2 --context 16 --batch 2 --steps 4 --measured 300 --looks 2"
)
TINY = SMALL.split()
FORMULAS = {
    "exponential": lambda q, k: math.exp(q @ k / 2),
    "linear": lambda q, k: q @ k / 2,
    "geometric": lambda q, k: 1 / (1 - cosine(q, k)),
    "cosine": lambda q, k: cosine(q, k),
    "shift-cosine": lambda q, k: 1 + cosine(q, k),
    "rbf": lambda q, k: math.exp(-((q - k) @ (q - k)) / 4),
    "clipped-geometric": lambda q, k: 1 / (1 + 1e-4 - min(q @ k, 300) / 300),
    "relu": lambda q, k: q.clamp(min=0) @ k.clamp(min=0) + 1e-4,
    "relu2": lambda q, k: q.clamp(min=0) ** 2 @ k.clamp(min=0) ** 2 + 1e-4,
    "elu": lambda q, k: feature(q) @ feature(k),
}
"""Table 1, in heads of 4 channels with the customary scale 1/2: exp(z), z and exp(-|q - k|^2 / (2 sqrt d))."""


def cosine(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q @ k / ((1e-3 + q @ q) * (1e-3 + k @ k)) ** 0.5


def feature(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x, x.exp() - 1) + 1


def defaults(**changes: object) -> recipe.KernelSelectionConfig:
    return recipe.check(recipe.KernelSelectionConfig(**changes))


@pytest.mark.parametrize("kernel", recipe.PRESETS)
@pytest.mark.parametrize("normalised", [True, False])
def test_sentences_are_table_1(kernel: str, normalised: bool) -> None:
    import regard

    drawn = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, 4, dtype=torch.float64, generator=drawn) for _ in range(3))
    weights = torch.tensor([[float(FORMULAS[kernel](a, b)) for b in k] for a in q], dtype=torch.float64)
    wanted = weights @ v / (weights.sum(-1, keepdim=True) if normalised else 1)
    found = regard.attention(q[None, None], k[None, None], v[None, None], Kind(kernel, normalised).spec)[0, 0]
    assert (found - wanted).abs().max() < 1e-9 * wanted.abs().max()


def test_equal_weights_are_equal() -> None:
    import regard

    drawn = torch.Generator().manual_seed(0)
    q, k, v = (50 * torch.randn(1, 1, 6, 4, dtype=torch.float64, generator=drawn) for _ in range(3))
    found = regard.attention(q, k, v, Kind(MEAN, True).spec, is_causal=True)[0, 0]
    assert (found - v[0, 0].cumsum(0) / torch.arange(1, 7)[:, None]).abs().max() < 1e-9


def test_what_is_trained() -> None:
    made, refused = recipe.kinds(defaults())
    assert not refused
    assert len({kind.name for kind in made}) == len(made) == 1 + 20 + 10 + 4
    assert {k.kernel for k in made if k.shared and not k.normalised} == {"linear", "cosine"}
    assert {k.kernel for k in made if k.earlier} == {"exponential", "geometric", "rbf", "clipped-geometric"}
    strict = recipe.model_config(defaults(), Kind("rbf", True, shared=True, earlier=True), 50)
    assert (strict.share_query_key, strict.exclude_self, strict.feed_forward, strict.norm) == (
        True,
        True,
        "gelu",
        "layer",
    )
    plain = recipe.model_config(defaults(), Kind("rbf", True), 50)
    assert (plain.share_query_key, plain.exclude_self, plain.mixers) == (False, False, ["rbf", "rbf"])


def test_the_size_of_the_paper_is_nanogpts() -> None:
    """Six blocks of 12 C^2 and biases, C = 384, a vocabulary of 65: 10.65 M with positions, which are rotary here."""
    paper = defaults(size="paper", device="cpu")
    model = HybridForCausalLM(recipe.model_config(paper, Kind("exponential", True), 65))
    layer = 4 * 384**2 + 2 * 384 * 1536 + 1536 + 384 + 4 * 384
    assert sum(w.numel() for w in model.parameters()) == 65 * 384 + 6 * layer + 2 * 384
    assert (paper.context, paper.batch, paper.steps, paper.learning_rate) == (256, 64, 5000, 1e-3)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("kernels") / "out"
    assert main(["reproduce", "kernel-selection", "--out", str(out), *TINY]) == 0
    return out


def test_every_kind_and_seed_is_there(tiny: Path) -> None:
    found = json.loads((tiny / "kernel-selection.json").read_text())
    names = [(run["name"], run["seed"]) for run in found["runs"]]
    assert len(names) == len(set(names)) == 2 * (1 + 8 + 4 + 1)
    assert found["numbers"]["steps"] == 4
    runs = dict(zip(names, found["runs"], strict=True))
    apart, shared = runs["rbf, normalised", 1], runs["rbf, normalised, q = k", 1]
    assert apart["parameters"] - shared["parameters"] == 16 * 16
    assert apart["extra"]["query_key_bytes"] == 2 * shared["extra"]["query_key_bytes"] == 2 * 2 * 16 * 16 * 4
    assert apart["extra"]["cache_bytes"] == shared["extra"]["cache_bytes"] == 2 * 512 * 16 * 4
    assert apart["steps"] == [2, 4]
    for name in ("kernel-selection-curves.png", "kernel-selection-final.png"):
        assert (tiny / name).read_bytes().startswith(b"\x89PNG")


def test_the_bigram_bar_is_a_bigram_model(tiny: Path) -> None:
    """Between what the best table of pairs could have, fitted to the very text, and an even guess."""
    from regard_recipes.demo import demo_text

    found = json.loads((tiny / "kernel-selection.json").read_text())["bigram"]
    material = demo_text.prepare(None, context=17, excerpt=16, call="test")
    held_out = material.held_out_tokens[:300].tolist()
    pairs, first = Counter(itertools.pairwise(held_out)), Counter(held_out[:-1])
    best = -sum(count * math.log(count / first[a]) for (a, _), count in pairs.items()) / 299
    assert best < found < math.log(len(material.tokenizer))


def run(kind: Kind, seed: int, *losses: float, kept: float = 1.0) -> LanguageRun:
    half = 1 if kind.shared else 2
    extra = {"query_key_bytes": 1024 * half, "kept_bytes": 8192 + 1024 * half, "cache_bytes": 4096}
    return LanguageRun(
        name=kind.name, seed=seed, parameters=1, steps=tuple(range(1, len(losses) + 1)), train=losses, held_out=losses,
        step_seconds=1.0, step_cpu_seconds=1.0, peak_bytes=None, before_bytes=None, extra=extra,
    )  # fmt: skip


def groups(**ends: float) -> dict[Kind, list[LanguageRun]]:
    """Three seeds of every kind, which end at the given loss, or at 2."""
    kinds = [Kind(MEAN, True), *(Kind(k, n) for n in (True, False) for k in ("exponential", "linear", "rbf"))]
    kinds += [Kind("clipped-geometric", True), Kind("exponential", True, shared=True)]
    kinds += [Kind("exponential", True, shared=True, earlier=True)]
    end = lambda kind: ends.get(kind.name.replace(", ", "_").replace(" ", "_").replace("=", "is"), 2.0)  # noqa: E731
    return {k: [run(k, s, 4.0, 3.0, end(k) + 0.1 * s + 1e-3 * (s == 1)) for s in range(3)] for k in kinds}


def note(notes: tuple[str, ...], start: str) -> str:
    (found,) = (text for text in notes if text.startswith(start))
    return found


def test_verdicts_follow_the_numbers() -> None:
    better = groups(
        mean_of_the_past=2.5, rbf_normalised=1.9, linear_not_normalised=2.2, exponential_normalised_q_is_k=2.3
    )
    told = shown.notes(better, 2.6, {}, 3e-3)
    assert "holds, 7 of 7 forms do" in note(told, '"All tested')
    assert ": holds. Its loss is 2.3003 ± 0.1000, -0.3000 ± 0.0000 from equal weights (lower)" in note(
        told, '"The linear'
    )
    assert ": holds; its loss is -0.1000" in note(told, '"RBF')
    assert ": holds, 2.1003" in note(told, '"The clipped')
    assert "-0.5000 ± 0.0000 from equal weights on the whole past (lower)" in note(told, '"The clipped')
    assert "may be up to 0.05 above the one before" in note(told, '"All tested')
    assert "at no look over 0.05 above the one before" in str(shown.tables(better)["Kernels"].note)
    assert "holds. Cost in nats/char: exponential +0.3000 ± 0.0000 (higher)." in note(told, '"Models converge with q')
    assert "50% of the activations" in note(told, '"q = k halves')
    assert "10% of all" in note(told, '"q = k halves')
    assert "exponential -0.3000 ± 0.0000 (lower)" in note(told, "With q = k")
    assert "has 7 of these 7" in note(told, "The grammar")


def test_verdicts_can_fail() -> None:
    worse = groups(mean_of_the_past=2.0, rbf_normalised=2.1, linear_not_normalised=2.7, clipped=2.0)
    worse[Kind("clipped-geometric", True)] = [run(Kind("clipped-geometric", True), s, 2.0, math.nan) for s in range(3)]
    told = shown.notes(worse, 2.6, {"geometric, normalised": "why"}, 3e-3)
    assert "does not hold here, 6 of 7 forms do; not for clipped-geometric, normalised" in note(told, '"All tested')
    assert ": does not hold here. Its loss is 2.8003" in note(told, '"The linear')
    assert "does not hold here: it is worse" in note(told, '"RBF')
    assert ": does not hold here, diverged" in note(told, '"The clipped')
    assert "refused: geometric, normalised (why)" in note(told, "The grammar")
    level = groups(rbf_normalised=2.0)
    level[Kind("rbf", True)] = [run(Kind("rbf", True), s, 4.0, 2.0 + 0.1 * (s % 2)) for s in range(3)]
    assert "not seen: level within the seeds" in note(shown.notes(level, 2.6, {}, 3e-3), '"RBF')
    one = {kind: runs[:1] for kind, runs in groups(rbf_normalised=1.5, linear_not_normalised=1.9).items()}
    told = shown.notes(one, 2.6, {}, 3e-3)
    for claim in ('"RBF', '"The linear kernel'):
        assert "not decided (one seed)" in note(told, claim)
    assert "(0.003)" in note(told, "All have the same learning rate")
    assert shown.tables(worse)
    assert set(shown.figures(worse)) == {"kernel-selection-curves.png", "kernel-selection-final.png"}


def test_a_loss_that_climbs_does_not_converge() -> None:
    kind = Kind("rbf", True)
    assert shown.converges([run(kind, 0, 4.0, 3.0, 3.04, 2.9)])
    assert not shown.converges([run(kind, 0, 4.0, 3.0, 3.06, 2.9)])
    assert not shown.converges([run(kind, 0, 4.0, 3.0), run(kind, 1, 3.0, 3.01)])
    assert not shown.converges([run(kind, 0, 4.0, math.inf)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"kernels": ("exponential", "geometrik")},
            "names no kernel of Table 1: 'geometrik'. Did you mean 'geometric'",
        ),
        ({"kernels": ("exponential", "rbf", "rbf")}, "names 'rbf' twice"),
        ({"kernels": ("rbf",)}, "lacks exponential"),
        ({"earlier": ("softmax",)}, "--earlier names no kernel"),
        ({"steps": 0}, "--steps is 0, expected at least 1"),
        ({"heads": 3}, "64"),
        ({"device": "abacus"}, "unknown device 'abacus'"),
        ({"seeds": 0}, "--seeds is 0"),
    ],
)
def test_mistakes_are_found_first(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        defaults(**changes)
