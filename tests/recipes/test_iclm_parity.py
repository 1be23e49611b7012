"""`regard reproduce iclm-parity`, as small as it goes, and its verdicts on runs written by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from regard.checks import ArgumentError
from regard.recipes import recipes
from regard_recipes.iclm import iclm_parity as recipe
from regard_recipes.iclm import iclm_parity_output as output
from regard_recipes.lib.language_runs import LanguageRun, sized, train_language_model
from regard_recipes.lib.language_text import read_text

TINY = recipe.ParityConfig(
    size="quick", steps=3, trial_steps=2, rates=(1e-3, 3e-3), measured=300, looks=2, shapes=("2x16x2",), batch=2
)


def in_process(jobs, workers, progress):
    """`run_jobs` without processes, which would take most of the time."""
    runs = []
    for job in jobs:
        progress(f"{job.name}, seed {job.seed}")
        runs.append(train_language_model(job.config, job.material, job.budget, job.seed, name=job.name))
    return runs


@pytest.fixture(scope="module")
def findings():
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "run_jobs", in_process)
        found = recipes.get("iclm-parity").run(TINY, told.append)
    assert "trial of 0.003, 2x16x2 iclm-wv, seed 2" in told
    assert "2x16x2 iclm-wv-no-mlp, seed 1" in told
    return found


def transformer_parameters(vocabulary, layers, width, inner):
    """Attention without biases, a feed-forward layer and LayerNorms with; tied; a last LayerNorm."""
    feed_forward = 2 * width * inner + width + inner + 2 * width if inner else 0
    return vocabulary * width + layers * (4 * width**2 + 2 * width + feed_forward) + 2 * width


def test_what_is_trained(findings):
    models = {model["kind"]: model for model in findings.data["models"]}
    assert list(models) == [
        *("transformer", "iclm-wv", "iclm-full-matched", "iclm-full"),
        *("transformer-no-mlp", "iclm-wv-no-f-mlp", "iclm-wv-no-mlp"),
    ]
    counts = {kind: model["parameters"] for kind, model in models.items()}
    shown = int(findings.data["text"]["tokenizer"].split(", ")[1].split()[0])
    assert counts["transformer"] == transformer_parameters(shown, 2, 16, 64)
    assert counts["transformer-no-mlp"] == transformer_parameters(shown, 2, 16, 0)
    assert counts["iclm-wv"] == counts["transformer"] + 16  # the start vector
    assert counts["iclm-wv-no-mlp"] == counts["transformer-no-mlp"] + 16
    assert counts["iclm-wv"] - counts["iclm-wv-no-f-mlp"] == 2 * 16 * 64 + 16 + 64 + 2 * 16
    assert counts["iclm-full"] == counts["iclm-wv"]  # (2 + H) C^2 in the place of 4 C^2, with two heads
    assert abs(counts["iclm-full-matched"] - counts["transformer"]) <= 33
    for model in models.values():
        assert [run["seed"] for run in model["runs"]] == [0, 1]
        assert all(run["parameters"] == model["parameters"] for run in model["runs"])
        assert all(2 < run["held_out"][-1] < 6 for run in model["runs"])
    json.dumps(findings.data)


def test_one_rate_for_a_family_chosen_on_text_that_the_results_leave_out(findings):
    trials = {(t["shape"], t["family"]): t["held_out"] for t in findings.data["trials"]}
    assert set(trials) == {("2x16x2", "transformer"), ("2x16x2", "iclm")}
    for model in findings.data["models"]:
        tried = trials["2x16x2", recipe.KINDS[model["kind"]].family]
        assert f"{model['rate']:g}" == min(tried, key=tried.get)


def test_rates_are_tried_on_other_tokens_than_results_are_measured_on():
    config = sized(TINY, recipe.SIZES, "test")
    text = read_text(None, "char", context=32, measured=300, choice=150, call="test")
    entries, _ = recipe.plan(config, text.vocabulary)
    given = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "run_jobs", lambda jobs, *rest: given.extend(jobs) or in_process(jobs[:0], *rest))
        with pytest.raises(StopIteration):
            recipe.try_rates(config, entries, text, lambda told: None)
    assert len(given) == 4
    for job in given:
        assert job.material.train_tokens is text.train_tokens
        assert job.material.held_out_tokens is text.choice_tokens
    for job in recipe.final_jobs(config, entries, recipe.chosen(config, {}), text):
        assert job.material.held_out_tokens is text.held_out_tokens


def test_what_is_shown(findings):
    results, tried, sizes = findings.tables.values()
    assert [row[0] for row in results.rows] == [model["kind"] for model in findings.data["models"]]
    for row, model in zip(results.rows, findings.data["models"], strict=True):
        perplexities = [math.exp(run["held_out"][-1]) for run in model["runs"]]
        assert row[4].startswith(f"{sum(perplexities) / 2:.3f} ± ")
        assert row[1] == f"{model['parameters']:,}"
    assert [row[0] for row in tried.rows] == ["2x16x2 transformer", "2x16x2 iclm"]
    assert len(sizes.rows) == 3
    assert set(findings.figures) == {"iclm-parity.png", "iclm-parity-curves.png"}
    assert all(picture.startswith(b"\x89PNG") for picture in findings.figures.values())


def test_the_paper_s_sizes_are_counted():
    """Millions, as counted by hand from the paper's description."""
    found = recipe.report()
    millions = {shape: {kind: n and round(n / 1e6, 2) for kind, n in own.items()} for shape, own in found.items()}
    assert millions["8x512x8"]["transformer"] == millions["8x512x8"]["iclm-wv"] == 50.94
    assert (millions["8x512x8"]["iclm-full"], millions["12x512x8"]["iclm-full"]) == (57.23, 72.97)
    assert millions["12x512x8"]["transformer"] == millions["12x512x8"]["iclm-full-two-heads"] == 63.54
    large = millions["24x1024x16"]
    assert (large["transformer"], large["iclm-wv"], large["iclm-full"]) == (353.68, 353.68, 529.84)
    assert large["iclm-full-matched"] is None  # sixteen heads are more than f's feed-forward layers can make up for
    for shape in ("8x512x8", "12x512x8"):
        assert abs(found[shape]["iclm-full-matched"] / found[shape]["transformer"] - 1) < 1e-4


# Verdicts --------------------------------------------------------------------------------------------------------


def outcome(kind, *losses, parameters=100, rival=100, seconds=1.0, memory=50):
    entry = recipe.Entry(
        shape="2x16x2", kind=kind, config=SimpleNamespace(), parameters=parameters, rival_parameters=rival
    )
    runs = [
        LanguageRun(
            name=entry.name,
            seed=seed,
            parameters=parameters,
            steps=(1,),
            train=(loss,),
            held_out=(loss,),
            step_seconds=seconds,
            step_cpu_seconds=seconds,
            peak_bytes=1000 + memory,
            before_bytes=1000,
        )
        for seed, loss in enumerate(losses)
    ]
    return recipe.Outcome(entry, 1e-3, runs)


BASE = outcome("transformer", math.log(10), math.log(12))  # mean perplexity 11


@pytest.mark.parametrize(
    ("perplexities", "verdict"),
    [
        ((10.0, 12.0), "+0.0% (+0.0000 ± 0.0000 nats per token), within 5%."),
        ((10.4, 12.48), "within 5%."),
        ((11.0, 13.2), "+10.0% (+0.0953 ± 0.0000 nats per token), not within 5%."),
        ((11.0, 12.0), "+4.5% (+0.0477 ± 0.6055 nats per token), within 5%, undecided beyond the seeds' noise"),
        ((11.5, 12.5), "not within 5%, undecided beyond the seeds' noise"),
        ((9.0, 10.8), "-10.0% (-0.1054 ± 0.0000 nats per token), lower by more than 5%."),
        ((9.0, 9.0), "-18.2% (-0.1965 ± 1.1583 nats per token), lower by more than 5%, undecided"),
        ((11.0,), "+0.0% (+0.0953 nats per token), within 5%, one seed"),
    ],
)
def test_parity_is_judged_by_the_ratio_of_mean_perplexities(perplexities, verdict):
    note = output.parity_note(outcome("iclm-wv", *map(math.log, perplexities)), BASE)
    assert verdict in note
    assert "of equal size" in note
    assert "1.0% to 5.9% above" in note


def test_what_diverged_is_compared_to_nothing():
    lost = outcome("iclm-wv", math.log(10), math.nan)
    assert output.parity_note(lost, BASE) == "2x16x2 iclm-wv (of equal size): no comparison: a run diverged."
    (note,) = output.mlp_notes([BASE, lost, outcome("iclm-wv-no-f-mlp", math.nan, 1.0)], "2x16x2", BASE)
    assert note.endswith("without f's feed-forward layers: no comparison: a run diverged.")
    both = [outcome("transformer", math.nan), outcome("transformer-no-mlp", math.nan)]
    (note,) = output.mlp_notes(both, "2x16x2", both[0])
    assert note.endswith("without all feed-forward layers: no comparison: a run diverged.")
    assert [row[6] for row in output.results([BASE, lost], {}).rows] == ["", "diverged"]
    assert output.dots([both[0], lost]).startswith(b"\x89PNG")


def test_it_is_said_who_is_within_the_bar_and_who_is_not():
    both = lambda perplexity: (math.log(perplexity), math.log(1.2 * perplexity))  # noqa: E731  (as the base's seeds)
    outcomes = [
        BASE,
        outcome("transformer-no-mlp", *both(13)),
        outcome("iclm-wv", *both(11)),
        outcome("iclm-full-matched", math.log(10), math.log(13)),
        outcome("iclm-full", *both(10.4), parameters=112),
        outcome("iclm-wv-no-f-mlp", *both(40), parameters=60),
        outcome("iclm-wv-no-mlp", *both(13.13)),
    ]
    assert output.within_note(outcomes, "2x16x2") == (
        "2x16x2, perplexity beside the Transformer's: not within 5%: iclm-wv (+10.0%, equal size); within 5%: "
        "iclm-full-matched (+4.5%, equal size, undecided beyond the seeds' noise), iclm-full (+4.0%, +12.0% "
        "parameters), iclm-wv-no-mlp (+1.0%, equal size, to transformer-no-mlp)."
    )
    assert output.notes(outcomes, {"a": {"transformer": 1, "iclm-full": 1}})[0].startswith("2x16x2, perplexity beside")
    assert output.within_note([BASE], "2x16x2").endswith("no ICLM was trained.")
    lost = outcome("iclm-wv", math.nan)
    assert "no comparison: a run diverged: iclm-wv (diverged" in output.within_note([BASE, lost], "2x16x2")


def test_rates_at_the_edge_of_the_grid_are_named():
    outcomes = [BASE, outcome("iclm-wv", 2.0), outcome("iclm-wv-no-mlp", 2.0)]  # they took 1e-3
    trials = {
        ("2x16x2", "transformer"): {5e-4: 2.0, 1e-3: 1.5, 2e-3: math.nan},
        ("2x16x2", "iclm"): {5e-4: 2.0, 1e-3: 1.5, 2e-3: 1.5},
    }
    inside = output.tried(outcomes, trials)
    assert inside.note.endswith("may be better: none.")
    assert "Nats per token of transformer and iclm-wv on" in inside.note
    assert inside.rows == (
        ("2x16x2 transformer", "2.000", "1.500 *", "nan"),
        ("2x16x2 iclm", "2.000", "1.500 *", "1.500"),
    )
    assert "Rate: chosen for each family with transformer and iclm-wv." in output.results(outcomes[:2], trials).note
    assert "Rate: given, not chosen for any." in output.results(outcomes[:2], {}).note
    edge = {key: {rate / 2: loss for rate, loss in found.items()} for key, found in trials.items()}
    assert output.tried(outcomes, edge).note.endswith("may be better: 2x16x2 transformer, 2x16x2 iclm.")


def test_models_of_another_size_are_called_so():
    note = output.parity_note(outcome("iclm-full", math.log(11), math.log(11), parameters=112), BASE)
    assert "with +12.0% parameters" in note
    assert recipe.Entry(shape="", kind="", config=None, parameters=1004, rival_parameters=1000).equal
    assert not recipe.Entry(shape="", kind="", config=None, parameters=1006, rival_parameters=1000).equal


@pytest.mark.parametrize(
    ("more", "verdict"),
    [(0.04, ": within +0.05 nats, with"), (0.06, ": not within +0.05 nats, with"), (-1, ": within +0.05 nats, with")],
)
def test_nats_are_judged_seed_by_seed(more, verdict):
    own = outcome("iclm-full", math.log(10) + more, math.log(12) + more)
    assert verdict in output.nats_note(own, BASE)
    assert f"is {more:+.4f}" in output.nats_note(own, BASE)
    noisy = output.nats_note(outcome("iclm-full", math.log(10.1), math.log(13)), BASE)
    assert "within +0.05 nats, undecided beyond the seeds' noise, with" in noisy
    assert output.nats_note(outcome("iclm-full", math.nan, 1.0), BASE).endswith("no comparison: a run diverged.")


@pytest.mark.parametrize(
    ("seconds", "memory", "verdict"),
    [
        (1.2, 55, "+20% processor time a step and +10% memory in training beside the Transformer: very similar"),
        (1.3, 50, "not very similar"),
        (1.0, 70, "+40% memory in training beside the Transformer: not very similar"),
    ],
)
def test_cost_is_judged_by_time_and_memory(seconds, memory, verdict):
    assert verdict in output.cost_note(outcome("iclm-wv", 1.0, seconds=seconds, memory=memory), BASE)


def test_what_feed_forward_layers_are_worth():
    outcomes = [
        BASE,
        outcome("iclm-wv", math.log(10), math.log(20)),
        outcome("transformer-no-mlp", math.log(11)),
        outcome("iclm-wv-no-f-mlp", math.log(10.4), math.log(20.8), parameters=60),
        outcome("iclm-wv-no-phi-mlp", math.log(9), math.log(18)),
        outcome("iclm-wv-no-mlp", math.log(13), math.log(20)),
    ]
    f, phi, everything, transformer = output.mlp_notes(outcomes, "2x16x2", BASE)
    assert "without f's feed-forward layers: perplexity +4.0%, slight (up to 5%), with -40% parameters" in f
    assert "+0.6% on TinyMath" in f
    assert "perplexity -10.0%, lower (up to 5%)" in phi
    assert "feed-forward layers: perplexity +10.0%, not slight, undecided beyond the seeds' noise (up" in everything
    assert "perplexity +0.0%, slight, one seed (up" in transformer
    assert "+4.0% on TinyMath" in transformer


def test_the_claim_of_equal_numbers():
    sizes = {"a": {"transformer": 1000, "iclm-wv": 1001, "iclm-full": 1120, "iclm-full-matched": None}}
    (note,) = output.parity_notes(sizes)
    assert "(within 0.5%): iclm-wv." in note
    assert "+12% to +12%" in note
    assert "does not hold for it" in note
    (other,) = output.parity_notes({"a": {"transformer": 1000, "iclm-full": 1000}})
    assert other.endswith("parameters holds for it.")


def test_the_best_rate_is_taken_and_never_one_that_diverged():
    config = replace(TINY, rates=(1.0, 2.0, 3.0))
    trials = {
        ("2x16x2", "transformer"): {1.0: 2.0, 2.0: 1.5, 3.0: math.nan},
        ("2x16x2", "iclm"): {1.0: 1, 2.0: 1, 3.0: 2},
    }
    assert recipe.chosen(config, trials) == {("2x16x2", "transformer"): 2.0, ("2x16x2", "iclm"): 1.0}
    assert set(recipe.chosen(replace(config, rates=(5.0,)), {}).values()) == {5.0}


def test_a_full_model_without_an_equal_is_left_out():
    config = sized(
        replace(TINY, shapes=("4x64x16",), models=("transformer", "iclm-full-matched")), recipe.SIZES, "test"
    )
    entries, said = recipe.plan(config, 100)
    assert [each.kind for each in entries] == ["transformer"]
    assert said == ["iclm-full-matched is left out at 4x64x16: even without f's feed-forward layers it is larger."]


@pytest.mark.parametrize("size", ["quick", "desk", "paper"])
def test_every_size_decides_every_number(size):
    config = sized(recipe.ParityConfig(size=size, device="cpu"), recipe.SIZES, "test")
    assert all(value is not None for name, value in vars(config).items() if name != "data")
    recipe.check(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "--steps is 0, expected at least 1"),
        ({"trial_steps": 0}, "--trial-steps is 0, expected at least 1"),
        ({"shapes": ("4x128",)}, "names '4x128', expected layers x width x heads"),
        ({"shapes": ("3x16x2",)}, "--shapes 3x16x2: ICLMConfig: num_hidden_layers is 3, expected an even number"),
        ({"shapes": ()}, "--shapes names nothing"),
        ({"rates": (1e-3, 1e-3)}, "--rates names 0.001 twice"),
        ({"rates": (-1.0,)}, "learning-rate is -1.0"),
        ({"models": ("transformer", "iclm-w")}, "--models names 'iclm-w'. Did you mean 'iclm-wv'"),
        ({"models": ("iclm-wv",)}, "--models lacks transformer"),
        ({"models": ("transformer", "iclm-wv-no-mlp")}, "--models lacks transformer-no-mlp"),
        ({"tokenizer": "chars"}, "Did you mean 'char'"),
        ({"dtype": "float16"}, "--dtype is 'float16'"),
        ({"seeds": 0}, "--seeds is 0"),
        ({"workers": 0}, "--workers is 0"),
        ({"size": "huge"}, "--size is 'huge'"),
        ({"context": 20_000, "measured": 40_000}, "each part must have at least a context"),
    ],
)
def test_mistakes_are_found_first(changes, message, monkeypatch):
    monkeypatch.setattr(recipe, "run_jobs", lambda *args: pytest.fail("something was trained"))
    with pytest.raises(ArgumentError) as caught:
        recipes.get("iclm-parity").run(replace(TINY, **changes), lambda text: None)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_text_of_a_tokenizer_of_bytes(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("".join(f"line {i} of a text\n" for i in range(300)), encoding="utf-8")
    text = read_text(file, "byte", context=16, measured=64, choice=32, call="test")
    assert len(text.choice_tokens) == 32
    shown = "".join(text.words(torch.cat((text.choice_tokens, text.held_out_tokens))))
    assert shown == file.read_text()[-len(shown) :]
    assert text.vocabulary == 258
    third = read_text(file, "byte", context=16, measured=64, choice=10**6, call="test")
    assert len(third.choice_tokens) == len(shown) // 3
    with pytest.raises(ArgumentError, match="each part must have at least a context of 33"):
        read_text(file, "byte", context=33, measured=64, choice=32, call="test")
    with pytest.raises(ArgumentError, match="does not exist"):
        read_text(tmp_path / "none", "byte", context=16, measured=64, call="test")
