"""`regard reproduce fwpkm-ablation`: what each variant is, what is measured of it, and what is claimed."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest
import torch
from tiny_runs import tiny

from regard.models import HybridForCausalLM
from regard.models.hybrid.memories import memory_modules
from regard_recipes.fwpkm.fwpkm_ablation import DOT, HEADS, NONE, OPTIONS, WHOLE, WIDER, FwPKMAblation
from regard_recipes.fwpkm.memory_study import needles
from regard_recipes.lib.recipe import Results, select
from regard_recipes.long_text.needle_text import needle_world


def study(**changes: object) -> FwPKMAblation:
    return FwPKMAblation(FwPKMAblation.configure("quick", **changes))


def memory(variant: str, **changes: object) -> Any:
    model = HybridForCausalLM(study(**changes).model_config(variant, 50))
    (found,) = memory_modules(model).values()
    return found


def test_every_part_of_appendix_b_can_be_left_out() -> None:
    whole = memory(WHOLE)
    own, rule = whole.settings, whole.settings.rule
    assert (rule.name, whole.heads, own.top_k, whole.slots, own.score) == ("normalized", 1, 4, 256, "idw")
    assert (rule.key_update, rule.look_ahead, rule.gate_loss) == ("entropy", True, True)
    assert all(memory(f"rule: {name}").settings.rule.name == name for name in ("paper", "reference"))
    assert [(memory(name).heads, memory(name).settings.top_k) for name in (WIDER, HEADS)] == [(1, 16), (4, 4)]
    assert memory("without address loss").settings.rule.key_update == "mse"
    assert memory("without loss weight").settings.rule.gate_loss is False
    assert memory("without look-ahead").settings.rule.look_ahead is False
    assert memory(DOT).settings.score == "dot"
    hidden = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(0))
    assert memory("without gating").projections(hidden).gate is None
    assert whole.projections(hidden).gate is not None
    spread = {name: memory(name).projections(hidden).value.std(-1) for name in (WHOLE, "without value norm")}
    assert (spread[WHOLE] - 1).abs().max() < 1e-3 < (spread["without value norm"] - 1).abs().max()


def test_the_sizes_of_models() -> None:
    model = HybridForCausalLM(study().model_config(NONE, 50))
    assert memory_modules(model) == {}
    assert model.config.mixers == ["gated-deltanet"] * 2
    made = FwPKMAblation(FwPKMAblation.configure("paper", device="cpu")).model_config(WIDER, 32_000)
    assert made.memories == "fwpkm@2,6,10"
    own = made.memory_options["fwpkm"]
    assert (own["sub_keys"], own["key_dim"], own["chunk_size"], own["top_k"]) == (512, 512, 512, 32)
    assert (made.hidden_size, made.num_hidden_layers) == (768, 12)


def test_needles_are_of_held_out_text() -> None:
    world = needle_world(None, common=60, needles=3, digits=2, call="test")
    haystacks, questions, answers = needles(world, 40, 5, 0)
    assert haystacks.shape == (5, 40)
    assert questions.shape[0] == answers.shape[0] == 5
    for haystack, question, answer in zip(haystacks.tolist(), questions.tolist(), answers.tolist(), strict=True):
        text = " ".join(world.words[token] for token in haystack)
        asked = " ".join(world.words[token] for token in (*question, *answer))
        assert asked in text
        assert text.count("number K") == 3


def test_a_run_has_every_row() -> None:
    _, results = tiny("fwpkm-ablation")
    names, runs = [NONE, WHOLE, "without gating"], results.select(kind="run")
    assert list(zip(runs["memory"], runs["task"], strict=True)) == [
        (name, task) for name in names for task in ("text", "needles")
    ]
    text = select(runs, task="text").set_index("memory")
    assert (text["loss"] > 0).all()
    assert text.loc[NONE, "frozen"] == pytest.approx(text.loc[NONE, "loss"])
    answers = results.select(kind="answers")
    assert answers["readings"].tolist() == [1, 2] * 3
    assert set(answers["asked"]) == {3}
    layers = results.select(kind="layer").set_index("memory")
    assert list(layers.index) == [WHOLE, "without gating"]
    assert (layers["reads"] == 128 * 2).all()
    assert layers["coverage"].between(0, 1, inclusive="right").all()
    assert sum(layers.loc[WHOLE, "histogram"]) == 128
    assert layers.loc["without gating", "histogram"] is None


def rows(
    name: str, loss: float, exact: list[int], coverage: float | None = 0.5, frozen: float = 3.0, seed: int = 0
) -> list[dict[str, Any]]:
    base = {"memory": name, "seed": seed, "task": "text"}
    step = {"step_cpu_seconds": 1.0, "held_out": loss}
    found = [{**base, "kind": "run", **step, "loss": loss, "frozen": frozen}]
    if coverage is not None:
        statistics = {"gate": 0.4, "coverage": coverage, "collisions": 0.9, "kl_uniform": 1.0}
        found.append({**base, "kind": "layer", "layer": "layer 3", **statistics, "histogram": [5, 5, *[0] * 7, 10]})
    found += [{**base, "kind": "look", "step": step, "train": loss, "held_out": loss} for step in (1, 2)]
    asked = {**base, "task": "needles"}
    found.append({**asked, "kind": "run", "step_cpu_seconds": 1.0, "held_out": 1.0})
    return found + [
        {**asked, "kind": "answers", "readings": i, "exact": n, "asked": 100} for i, n in enumerate(exact, 1)
    ]


def judged(*found: list[dict[str, Any]], seeds: int = 1) -> tuple[FwPKMAblation, Results, dict[str, Any]]:
    frame = pd.DataFrame([row for each in found for row in each])
    made = study(variants=tuple(dict.fromkeys(frame["memory"])), seeds=seeds, reads=2)
    results = Results(frame, {}, {})
    return made, results, {claim.wording: claim for claim in made.claims(results)}


def several(**changes: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Three seeds of each memory; losses vary together, so that the paired gaps are sharp."""
    own = {
        NONE: {"loss": 2.6, "exact": [0, 1], "coverage": None},
        WHOLE: {"loss": 2.5, "exact": [50, 90], "coverage": 0.8},
        "without look-ahead": {"loss": 2.9, "exact": [0, 0]},
        "without gating": {"loss": 2.55, "exact": [50, 88]},
        DOT: {"loss": 2.7, "exact": [10, 20], "coverage": 0.3},
    }
    made = {name: {**given, **changes.get(name, {})} for name, given in own.items()}
    return [
        rows(name, **{**given, "loss": given["loss"] + 0.1 * seed + 0.001 * seed * len(name), "seed": seed})
        for name, given in made.items()
        for seed in range(3)
    ]


def test_claims_follow_the_numbers() -> None:
    *_, claims = judged(*several(), seeds=3)
    assert {claim.verdict for claim in claims.values()} == {"holds"}
    assert len(claims) == 6
    lower = claims["A memory lowers the loss on text"].estimates[""]
    assert lower.mean == pytest.approx(-0.1 + 0.001 * (len(WHOLE) - len(NONE)))
    found = claims["The memory answers needles"].estimates[""]
    assert found.mean == pytest.approx(0.9 - 0.01)
    changes = {"without look-ahead": {"loss": 2.52, "exact": [50, 99]}, DOT: {"coverage": 0.7}}
    *_, claims = judged(*several(**changes), seeds=3)
    verdicts = [claim.verdict for wording, claim in claims.items() if "look-ahead" in wording or "Dot" in wording]
    assert verdicts == ["fails", "fails", "fails"]
    diverged = several(**{DOT: {"loss": math.nan, "coverage": 0.9}})
    *_, claims = judged(*diverged, seeds=3)
    assert claims["Dot-product scores often result in memory collapsing and loss divergence"].verdict == "holds"


def test_one_seed_decides_nothing_about_losses() -> None:
    *_, claims = judged(rows(NONE, 9.0, [0, 1], None), rows(WHOLE, 2.5, [50, 90]))
    assert claims["A memory lowers the loss on text"].verdict == "not testable at this size"
    assert claims["The memory answers needles"].verdict == "holds"  # its interval is over questions
    assert judged(rows(NONE, 2.5, [0, 0], None))[2] == {}


def test_tables_and_gates() -> None:
    none, whole = rows(NONE, math.log(20), [0, 10], None), rows(WHOLE, math.log(10), [50, 90], 0.8, math.log(15))
    made, results, _ = judged(none, whole, rows("without value norm", math.nan, [0, 0], 0.9))
    parts, found = made.tables(results).values()
    assert parts.rows[0][:5] == (NONE, "20.00", "+0.6931", "–", "–")
    assert parts.rows[1][:6] == (WHOLE, "10.00", "", "15.00", "0.40", "0.800")
    assert parts.rows[2][1:3] == ("diverged", "diverged")
    assert found.rows[:2] == ((NONE, "0%", "10%"), (WHOLE, "50%", "90%"))
    assert all(png.startswith(b"\x89PNG") for png in made.figures(results).values())
    assert len(OPTIONS) == 12
