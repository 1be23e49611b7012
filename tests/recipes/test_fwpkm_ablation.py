"""`regard reproduce fwpkm-ablation`: what each variant is, what is measured of it, and what is claimed."""

import math
from typing import Any

import pandas as pd
import pytest
import torch
from tiny_runs import tiny

from regard.models import HybridForCausalLM
from regard.models.hybrid.memories import memory_modules
from regard_recipes.fwpkm.fwpkm_ablation import DOT, HEADS, NONE, OPTIONS, WHOLE, WIDER, FwPKMAblation
from regard_recipes.lib.recipe import Results


def study(**changes: object) -> FwPKMAblation:
    return FwPKMAblation.configure("quick", **changes)


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
    made = FwPKMAblation.configure("paper", device="cpu").model_config(WIDER, 32_000)
    assert made.memories == "fwpkm@2,6,10"
    own = made.memory_options["fwpkm"]
    assert (own["sub_keys"], own["key_dim"], own["chunk_size"], own["top_k"]) == (512, 512, 512, 32)
    assert (made.hidden_size, made.num_hidden_layers) == (768, 12)


def test_a_run_has_every_row() -> None:
    _, results = tiny("fwpkm-ablation")
    names, runs = [NONE, WHOLE, "without gating"], results.select(kind="run", seed=0)
    assert list(zip(runs["task"], runs["model"], strict=True)) == [
        (task, name) for task in ("names", "needles") for name in names
    ]
    read = results.select(kind="document", seed=0).set_index(["model", "rule"])["across"].groupby(level=[0, 1]).mean()
    assert (read > 0).all()
    assert read[NONE, "frozen"] == pytest.approx(read[NONE, "paper"])
    assert read[WHOLE, "frozen"] != read[WHOLE, "paper"]
    answers = results.select(kind="answers", seed=0)
    assert answers["read"].tolist() == [1, 2] * 3
    assert set(answers["trials"]) == {3}
    layers = results.select(kind="layer", seed=0).set_index("model")
    assert list(layers.index) == [WHOLE, "without gating"]
    assert (layers["reads"] == 2 * 2 * 48 * 2).all()
    assert layers["coverage"].between(0, 1, inclusive="right").all()
    assert sum(layers.loc[WHOLE, "counts"]) == 2 * 2 * 48
    assert layers.loc["without gating", "counts"] is None


def rows(
    name: str, across: float, share: list[float], coverage: float | None = 0.5, frozen: float = 3.0, seed: int = 0,
    diverged: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    base = {"model": name, "seed": seed, "rate": 4e-3}
    text, asked = {**base, "task": "names"}, {**base, "task": "needles"}
    run = {"kind": "run", "validation": 0.9, "diverged": False, "steps": 2, "seconds": 1.0, "parameters": 5}
    found = [{**text, **run, "diverged": diverged}, {**asked, **run}]
    found += [{**each, "kind": "curve", "step": step, "validation": 0.5} for each in (text, asked) for step in (1, 2)]
    found += [{**text, "kind": "document", "rule": rule, "loss": loss, "within": loss, "across": loss}
              for rule, loss in (("paper", across), ("frozen", frozen)) if not diverged]  # fmt: skip
    if coverage is not None and not diverged:
        statistics = {"gate": 0.4, "coverage": coverage, "collisions": 0.9, "kl_uniform": 1.0}
        found.append({**text, "kind": "layer", "layer": "layer 2", **statistics, "counts": [5, 5, *[0] * 7, 10]})
    return found + [{**asked, "kind": "answers", "read": i, "share": n} for i, n in enumerate(share, 1)]


def judged(*found: list[dict[str, Any]], seeds: int = 1) -> tuple[FwPKMAblation, Results, dict[str, Any]]:
    frame = pd.DataFrame([row for each in found for row in each])
    made = study(models=tuple(dict.fromkeys(frame["model"])), seeds=seeds, reads=2)
    results = Results(frame, {}, {})
    return made, results, {claim.wording: claim for claim in made.claims(results)}


def several(**changes: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Three seeds of each memory; losses vary together, so that the paired gaps are sharp."""
    own = {
        NONE: {"across": 2.6, "share": [0.0, 0.01], "coverage": None},
        WHOLE: {"across": 0.5, "share": [0.5, 0.9], "coverage": 0.8},
        "without look-ahead": {"across": 2.9, "share": [0.0, 0.0]},
        "without gating": {"across": 0.55, "share": [0.5, 0.88]},
        DOT: {"across": 0.7, "share": [0.1, 0.2], "coverage": 0.3},
    }
    made = {name: {**given, **changes.get(name, {})} for name, given in own.items()}
    return [
        rows(name, **{**given, "across": given["across"] + 0.1 * seed + 0.001 * seed * len(name), "seed": seed})
        for name, given in made.items()
        for seed in range(3)
    ]


def test_claims_follow_the_numbers() -> None:
    *_, claims = judged(*several(), seeds=3)
    assert {claim.verdict for claim in claims.values()} == {"holds"}
    assert len(claims) == 6
    lower = claims["A memory lowers the loss on text"].estimates[""]
    assert lower.mean == pytest.approx(-2.1 + 0.001 * (len(WHOLE) - len(NONE)))
    found = claims["The memory answers needles"].estimates[""]
    assert found.mean == pytest.approx(0.9 - 0.01)
    changes = {"without look-ahead": {"across": 0.52, "share": [0.5, 0.99]}, DOT: {"coverage": 0.7}}
    *_, claims = judged(*several(**changes), seeds=3)
    verdicts = [claim.verdict for wording, claim in claims.items() if "look-ahead" in wording or "Dot" in wording]
    assert verdicts == ["fails", "fails", "fails"]
    lost = several(**{DOT: {"diverged": True}})
    *_, claims = judged(*lost, seeds=3)
    assert claims["Dot-product scores often result in memory collapsing and loss divergence"].verdict == "holds"


def test_what_no_model_learned_decides_nothing() -> None:
    found = [[{**row, "validation": 0.1} if row["kind"] == "run" else row for row in each] for each in several()]
    *_, claims = judged(*found, seeds=3)
    verdicts = [claim.verdict for claim in claims.values()]
    assert verdicts[:-1] == ["not testable at this size"] * 5


def test_one_seed_decides_nothing() -> None:
    *_, claims = judged(rows(NONE, 9.0, [0.0, 0.1], None), rows(WHOLE, 2.5, [0.5, 0.9]))
    assert {claim.verdict for claim in claims.values()} == {"not testable at this size"}
    assert judged(rows(NONE, 2.5, [0.0, 0.0], None))[2] == {}


def test_tables_and_gates() -> None:
    none, whole = rows(NONE, 3.0, [0.0, 0.1], None), rows(WHOLE, 0.5, [0.5, 0.9], 0.8, 2.5)
    lost = rows("without value norm", math.nan, [], diverged=True)
    made, results, _ = judged(none, whole, lost)
    parts, found, training = made.tables(results).values()
    assert parts.rows[0] == (NONE, "3.000", "3.000", "+2.500", "3.000", "–", "–", "–", "–", "10%")
    assert parts.rows[1][:6] == (WHOLE, "0.500", "0.500", "", "2.500", "0.40")
    assert parts.rows[2][1] == "–"
    assert found.rows[:2] == ((NONE, "0%", "10%"), (WHOLE, "50%", "90%"))
    assert len(training.rows) == 6
    assert all(png.startswith(b"\x89PNG") for png in made.figures(results).values())
    assert len(OPTIONS) == 12
