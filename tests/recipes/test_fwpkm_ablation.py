"""`regard reproduce fwpkm-ablation`: what each variant is, what is measured of it, and what is claimed."""

from itertools import product
from typing import Any

import pytest
import torch
from tiny_runs import tiny

from regard.models import HybridForCausalLM
from regard.models.hybrid.memories import memory_modules
from regard_recipes.fwpkm.fwpkm_ablation import DOT, HEADS, NONE, WHOLE, WIDER, FwPKMAblation


def study(**changes: object) -> FwPKMAblation:
    return FwPKMAblation.configure("quick", **changes)


def memory(variant: str, **changes: object) -> Any:
    (found,) = memory_modules(HybridForCausalLM(study(**changes).model_config(variant, 50))).values()
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
    names, runs = (NONE, WHOLE, "without gating"), results.select(kind="run", seed=0)
    assert list(zip(runs["task"], runs["model"], strict=True)) == list(product(("names", "needles"), names))
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
