"""`regard reproduce mosaic-kernels`: every weighting trained, as defined and as released, counted and judged."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from regard.checks import ArgumentError
from regard.cli import main
from regard.models import MemoryMosaicForCausalLM
from regard_recipes.lib.language_runs import LanguageRun
from regard_recipes.lib.language_text import read_text
from regard_recipes.mosaic import mosaic_kernels as recipe
from regard_recipes.mosaic import mosaic_kernels_output as shown
from regard_recipes.mosaic.mosaic_kernels import DEFINED, HARD, Kind

SMALL = (
    "--size quick --weightings softmax topk-uniform normrelu biweight --released fast --depths 1 2 --ks 3 --seeds 2 "
    "--width 16 --heads 2 --context 16 --batch 2 --steps 4 --deep-steps 3 --measured 300 --looks 2"
)
TINY = SMALL.split()


def defaults(**changes: object) -> recipe.MosaicKernelsConfig:
    return recipe.check(recipe.MosaicKernelsConfig(**changes))


def model(kind: Kind, **changes: object) -> MemoryMosaicForCausalLM:
    torch.manual_seed(0)
    config = defaults(size="quick", **changes)
    made = MemoryMosaicForCausalLM(recipe.model_config(config, kind, 20))
    prepare = recipe.released(kind)
    if prepare is not None:
        prepare(made)
    return made


def test_what_is_trained() -> None:
    made = recipe.kinds(defaults())
    assert len({kind.name for kind in made}) == len(made)
    first = [kind for kind in made if kind.depth == 1]
    assert {(k.weighting, k.k) for k in first if k.form == DEFINED} == {
        *(("topk-softmax", k) for k in (16, 32, 64)),
        *(("topk-uniform", k) for k in (16, 32, 64)),
        *((name, None) for name in ("softmax", "normrelu", "relumax", "sparsemax", "biweight", "triweight")),
    }
    assert [(k.weighting, k.k) for k in first if k.form == HARD] == [("topk-uniform", 32)]
    assert {(k.weighting, k.form) for k in first if k.form not in (DEFINED, HARD)} == {
        (rule, form) for rule in ("normrelu", "relumax") for form in ("fast", "mended", "regular")
    }
    deep = [kind for kind in made if kind.depth == 4]
    assert len(deep) == 8
    assert all(kind.form == DEFINED and kind.k in (None, 32) for kind in deep)
    desk = defaults(seed=5)
    for kind in made:
        alone = kind.depth == 4 or kind.k in (16, 64)
        assert list(recipe.seeds(desk, kind)) == ([5] if alone else [5, 6, 7])
    assert [recipe.budget(desk, depth).steps for depth in (1, 4)] == [700, 400]


def test_the_size_of_the_paper() -> None:
    """Tables 3 and 5: twelve heads of 64 channels, 2688 slots; 12 C^2 a block beside the embeddings of 50304 tokens."""
    paper = defaults(size="paper", device="cpu")
    assert paper.depths == (1, 8, 12)
    assert [recipe.budget(paper, depth).learning_rate for depth in (1, 8, 12)] == [5e-3, 5e-3, 1e-3]
    ends = [b.learning_rate * b.final_share for b in (recipe.budget(paper, depth) for depth in (1, 8, 12))]
    assert ends == pytest.approx([1e-4, 1e-4, 5e-5])
    budget = recipe.budget(paper, 1)
    assert (budget.context, budget.batch, budget.steps, budget.weight_decay) == (512, 512, 80_000, 0.1)
    assert round(budget.warmup * budget.steps) == 2000
    with torch.device("meta"):
        made = MemoryMosaicForCausalLM(recipe.model_config(paper, Kind("biweight", 1), 50304))
    assert made.config.persistent_slots == 2688
    assert sum(w.numel() for w in made.parameters()) == pytest.approx(50304 * 768 + 12 * 768**2, rel=0.01)


def test_a_bandwidth_that_is_too_narrow_is_seen_in_empty_rows() -> None:
    windows = torch.randint(20, (3, 14), generator=torch.Generator().manual_seed(0)).tolist()
    wide = recipe.inside(model(Kind("normrelu", 1)), windows)
    narrow = model(Kind("normrelu", 1))
    with torch.no_grad():
        narrow.model.layers[0].contextual.numbers.log_h.fill_(math.log(1e-3))
    found = recipe.inside(narrow, windows)
    assert wide["empty"] < 0.1
    assert found["empty"] > 0.4  # all but exact repetitions of the last tokens
    assert found["h"] == [[0.001, 0.001]]
    assert "sharpness" not in found


def test_what_is_counted_inside() -> None:
    """Softmax weighs every pair; the fast program sees one less and leaves the second row empty."""
    windows = torch.randint(20, (2, 10), generator=torch.Generator().manual_seed(0)).tolist()
    whole = recipe.inside(model(Kind("softmax", 2)), windows)
    assert whole["support"] == pytest.approx(np.arange(1, 10).mean())
    assert whole["empty"] == 0
    assert np.asarray(whole["sharpness"]) == pytest.approx(math.e**2 * np.ones((2, 2)), rel=1e-4)
    near = recipe.inside(model(Kind("topk-uniform", 1, 3)), windows)
    assert near["support"] == pytest.approx(np.minimum(np.arange(1, 10), 3).mean())
    fast = recipe.inside(model(Kind("relumax", 1, form="fast")), windows)
    assert fast["support"] is None
    assert fast["empty"] == pytest.approx(1 / 9)
    trained = model(Kind("relumax", 1)).train()
    assert recipe.inside(trained, windows)["margin"] == [[1.0, 1.0]]
    assert trained.training


def test_keys_of_uniform_weights_learn_only_with_a_gradient() -> None:
    tokens = torch.randint(20, (2, 12), generator=torch.Generator().manual_seed(0))
    for form, learns in ((DEFINED, True), (HARD, False)):
        made = model(Kind("topk-uniform", 1, 3, form))
        made(input_ids=tokens, labels=tokens).loss.backward()
        gradient = made.model.layers[0].contextual.keys.proj.weight.grad
        assert (gradient is not None and bool(gradient.abs().max() > 0)) == learns


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("mosaics") / "out"
    assert main(["reproduce", "mosaic-kernels", "--out", str(out), *TINY]) == 0
    return out


def test_every_kind_and_seed_is_there(tiny: Path) -> None:
    found = json.loads((tiny / "mosaic-kernels.json").read_text())
    names = [(run["name"], run["seed"]) for run in found["runs"]]
    first, deep = 1 + 2 + 2 + 1, 4  # uniform weights without a gradient and the fast program at the first depth
    assert len(names) == len(set(names)) == 2 * first + deep
    runs = dict(zip(names, found["runs"], strict=True))
    assert runs["normrelu, depth 1", 0]["extra"]["h"] != runs["normrelu, depth 1", 1]["extra"]["h"]
    assert set(found["empty_at_the_start"]) == {"normrelu, depth 1", "normrelu, depth 2"}
    assert found["numbers"]["deep_seeds"] == 1
    assert {run["steps"][-1] for run in found["runs"] if "depth 1" in run["name"]} == {4}
    assert {run["steps"][-1] for run in found["runs"] if "depth 2" in run["name"]} == {3}
    for name in ("curves", "final", "released"):
        assert (tiny / f"mosaic-kernels-{name}.png").read_bytes().startswith(b"\x89PNG")
    said = (tiny / "mosaic-kernels.md").read_text()
    assert "Depth 2, biweight no worse than softmax beyond seed noise: not decided (one seed)" in said


def run(kind: Kind, seed: int, end: float) -> LanguageRun:
    extra = {"empty": 0.25 if kind.weighting == "normrelu" else 0.0, "support": 7.0, "h": [[1.2, 1.4]]}
    seconds = 0.03 if kind.weighting == "biweight" else 0.02
    return LanguageRun(
        name=kind.name, seed=seed, parameters=5, steps=(1, 2), train=(4.0, end), held_out=(4.0, end + 0.1 * seed),
        step_seconds=seconds, step_cpu_seconds=seconds, peak_bytes=None, before_bytes=None, extra=extra,
    )  # fmt: skip


def groups(seeds: int = 3, **ends: float) -> dict[Kind, list[LanguageRun]]:
    """Every kind of the desk size at depth 1, which ends at the given loss, or at 2."""
    kinds = [kind for kind in recipe.kinds(defaults()) if kind.depth == 1]
    made = {}
    for kind in kinds:
        name = kind.weighting if kind.form == DEFINED else f"{kind.weighting}_{kind.form}"
        end = ends.get(name.replace("-", "_").replace(" ", "_"), 2.0)
        made[kind] = [run(kind, seed, end + 1e-3 * (seed == 1)) for seed in range(seeds)]
    return made


def note(notes: tuple[str, ...], part: str) -> str:
    (found,) = (text for text in notes if part in text)
    return found


BEGUN = {"normrelu, depth 1": 0.01}
RATES = {1: 2e-2}


def test_verdicts_follow_the_numbers() -> None:
    told = shown.notes(
        groups(sparsemax=1.8, biweight=1.7, triweight=1.9, topk_uniform=2.2, normrelu=2.1, relumax=1.85,
               relumax_fast=2.0, relumax_mended=1.95, normrelu_fast=2.1, topk_uniform_no_gradient=2.5), BEGUN, RATES,
    )  # fmt: skip
    assert "holds, it is better; -0.3000" in note(told, "biweight no worse")
    assert "holds (of 9 gaps 9 lower)" in note(told, '"compact kernels below')
    assert "biweight to topk-uniform -0.5000" in note(told, '"compact kernels below')
    assert "holds: topk-uniform +0.2000" in note(told, "are worse than softmax")
    faults = note(told, "Released less defined")
    assert "ReLUmax: fast +0.1500" in faults
    assert "the scale +0.1000 ± 0.0000 (higher) and the mask +0.0500 ± 0.0000 (higher)" in faults
    assert "regular +0.1500" in faults
    ranking = note(told, "ranking?")
    assert (
        "ReLUmax to sparsemax: fast +0.2000 ± 0.0000 (higher), defined +0.0500 ± 0.0000 (higher), the order stays"
        in ranking
    )
    assert "k = 32 -0.3000 ± 0.0000 (lower)." in note(told, "a straight-through gradient")
    assert "1.00% at the start and 25.00% after training (h from 1.20 to 1.40)" in note(told, "Empty rows")
    assert "biweight 1.50" in note(told, "in units of softmax's")


def test_verdicts_can_fail() -> None:
    told = shown.notes(groups(biweight=2.1, sparsemax=1.9, relumax=1.8, relumax_fast=2.0), BEGUN, RATES)
    assert "does not hold here; +0.1000" in note(told, "biweight no worse")
    assert "holds in part (of 9 gaps 3 lower, 3 higher, 3 level)" in note(told, '"compact kernels below')
    assert "not seen here" in note(told, "are worse than softmax")
    assert "(higher), defined -0.1000 ± 0.0000 (lower), the order changes" in note(told, "ranking?")
    level = groups()
    level[Kind("biweight", 1)] = [run(Kind("biweight", 1), s, 2.0 + 0.01 * (s % 2)) for s in range(3)]
    assert "holds, they are level" in note(shown.notes(level, BEGUN, RATES), "biweight no worse")
    single = shown.notes(groups(seeds=1, biweight=1.0), BEGUN, RATES)
    for claim in ("biweight no worse", '"compact kernels below', "are worse than softmax"):
        assert "not decided (one seed)" in note(single, claim)
    assert note(single, "ranking?").count("(one seed), not decided") == 2
    worse = shown.notes(groups(sparsemax=2.1, biweight=2.2, triweight=2.3, topk_uniform=1.9, normrelu=1.9,
                               topk_uniform_no_gradient=1.8, relumax=2.1, relumax_fast=1.9), BEGUN, RATES)  # fmt: skip
    assert "does not hold here (of 9 gaps 9 higher)" in note(worse, '"compact kernels below')
    assert "does not hold here: topk-uniform -0.1000" in note(worse, "are worse than softmax")
    assert "(0.02), chosen for none" in note(worse, "learning rate")
    broken = groups(biweight=math.nan)
    assert "not decided (diverged)" in note(shown.notes(broken, BEGUN, RATES), "biweight no worse")
    assert shown.tables(broken)
    assert len(shown.figures(broken)) == 3


def test_the_text_is_split_and_encoded(tmp_path: Path) -> None:
    content = "".join(chr(97 + (i * i) % 13) for i in range(100_000))
    (tmp_path / "text.txt").write_text(content)
    text = read_text(tmp_path / "text.txt", "byte", context=8, measured=100, call="test")
    decoded = text.tokenizer.decode(text.held_out_tokens.tolist())
    assert decoded == content[-len(decoded) :]
    assert len(decoded) == 10_000
    assert text.windows(3, 8) == text.held_out_tokens[:24].reshape(3, 8).tolist()
    assert len(text.windows(10**6, 8)) == 1250
    assert text.vocabulary == len(text.tokenizer)
    with pytest.raises(ArgumentError, match="each part must have at least a context of 20000"):
        read_text(tmp_path / "text.txt", "byte", context=20_000, measured=100, call="test")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"weightings": ("softmax", "biwait")},
            "--weightings names 'biwait', which is unknown. Did you mean 'biweight'",
        ),
        ({"weightings": ("biweight",)}, "lacks softmax"),
        ({"released": ("fast", "fast")}, "--released names 'fast' twice"),
        ({"depths": (1, 1)}, "--depths is \\(1, 1\\), expected"),
        ({"ks": (0,)}, "--ks is \\(0,\\), expected"),
        ({"learning_rates": (1e-3, 1e-3, 1e-3)}, "--learning-rates has 3 numbers for 2 depths"),
        ({"deep_seeds": 0}, "--deep-seeds is 0"),
        ({"k_seeds": 0}, "--k-seeds is 0"),
        ({"deep_steps": 0}, "--deep-steps is 0"),
        ({"heads": 5}, "64"),
        ({"steps": 0}, "--steps is 0"),
    ],
)
def test_mistakes_are_found_first(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        defaults(**changes)
