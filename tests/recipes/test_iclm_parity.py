"""`regard reproduce iclm-parity`: every model trained, counted and judged."""

import math
from functools import partial
from typing import Any

from tiny_runs import checked, course_rows, tiny, verdicts

from regard_recipes.iclm import iclm_parity as recipe
from regard_recipes.lib.recipe import Results, frame_of

made = partial(checked, "iclm-parity", "quick")


def transformer_parameters(vocabulary: int, layers: int, width: int, inner: int) -> int:
    """Attention without biases, a feed-forward layer and LayerNorms with; tied; a last LayerNorm."""
    feed_forward = 2 * width * inner + width + inner + 2 * width if inner else 0
    return vocabulary * width + layers * (4 * width**2 + 2 * width + feed_forward) + 2 * width


def test_what_is_trained() -> None:
    results = tiny("iclm-parity")[1]
    runs = results.select(kind="run")
    assert len(runs) == 14  # of seven models with two learning rates
    counts = runs.groupby("model")["parameters"].first().to_dict()
    shown = int(results.facts["text"]["tokenizer"].split(", ")[1].split()[0])
    assert counts["transformer"] == transformer_parameters(shown, 2, 16, 64)
    assert counts["transformer-no-mlp"] == transformer_parameters(shown, 2, 16, 0)
    assert counts["iclm-wv"] == counts["transformer"] + 16  # the start vector
    assert counts["iclm-wv-no-mlp"] == counts["transformer-no-mlp"] + 16
    assert counts["iclm-wv"] - counts["iclm-wv-no-f-mlp"] == 2 * 16 * 64 + 16 + 64 + 2 * 16
    assert counts["iclm-full"] == counts["iclm-wv"]  # (2 + H) C^2 in place of 4 C^2, with two heads
    assert abs(counts["iclm-full-matched"] - counts["transformer"]) <= 33
    assert runs["held_out"].between(2, 6).all()


def test_tables_show_every_rate_and_its_edges() -> None:
    own = made(seeds=1, layers=2, width=16, heads=2, rates=(1e-3, 3e-3))
    results = results_of(own, course_rows(own, partial(usual_course, loss=2.0)))
    tables = own.tables(results)
    rates = "Validation loss by learning rate"
    assert list(tables) == ["ICLM and Transformer", rates, "Parameters at the paper's sizes"]
    assert tables[rates].header == ("model", "0.001", "0.003")
    assert "edge of the grid" in own.notes(results)[0]  # of two rates each is


def test_the_paper_s_sizes_are_counted() -> None:
    """Millions, as counted by hand from the paper's description."""
    found = recipe.paper_sizes()
    millions = {shape: {kind: n and round(n / 1e6, 2) for kind, n in own.items()} for shape, own in found.items()}
    assert millions["8x512x8"]["transformer"] == millions["8x512x8"]["iclm-wv"] == 50.94
    assert (millions["8x512x8"]["iclm-full"], millions["12x512x8"]["iclm-full"]) == (57.23, 72.97)
    assert millions["12x512x8"]["transformer"] == millions["12x512x8"]["iclm-full-two-heads"] == 63.54
    large = millions["24x1024x16"]
    assert (large["transformer"], large["iclm-wv"], large["iclm-full"]) == (353.68, 353.68, 529.84)
    assert large["iclm-full-matched"] is None  # sixteen heads are more than f's feed-forward layers can make up for
    for shape in ("8x512x8", "12x512x8"):
        assert abs(found[shape]["iclm-full-matched"] / found[shape]["transformer"] - 1) < 1e-4


EQUAL, FULL = "Perplexity close to a Transformer's of equal size", "Perplexity of the full model, of another size,"
SLIGHT, COST = "Only a slight increase in perplexity without", "Size, memory and training time are very similar"
COUNT = "Without W_v the number of parameters is the same"


def usual_course(
    each: dict[str, Any], seed: int, loss: float, seconds: float = 1.0, memory: float = 50
) -> tuple[list[float], dict[str, Any]]:
    """A course of one look, and the columns of its run: iclm-wv takes so many seconds and so much memory."""
    wv = each["model"] == "iclm-wv"
    return [loss], {"parameters": 112 if each["model"] == "iclm-full" else 100, "step_seconds": 1.0,
                    "step_cpu_seconds": seconds if wv else 1.0, "before_bytes": 1000,
                    "peak_bytes": 1000 + (memory if wv else 50)}  # fmt: skip


def results_of(own: Any, rows: list[dict[str, Any]], full: int = 1120) -> Results:
    """Results with these rows, and sizes of one shape."""
    sizes = {"a": {**dict.fromkeys(recipe.MAIN, 1000), "iclm-full": full, "iclm-full-matched": None}}
    return Results(frame_of(rows), {"floor": 9.0, "paper_sizes": sizes}, {})


def judged(
    seeds: int = 3, seconds: float = 1.0, memory: float = 50, full: int = 1120, **above: float
) -> tuple[dict[str, tuple[str, str]], dict[str, tuple[str, ...]]]:
    """Claims and rows of the first table, where each model has the perplexity 10, or this share more of it."""
    own = made(seeds=seeds, layers=2, width=16, heads=2, rates=(1e-3,))

    def course(each: dict[str, Any], seed: int) -> tuple[list[float], dict[str, Any]]:
        loss = math.log(10 * (1 + above.get(each["model"].replace("-", "_"), 0.0))) + 0.1 * seed
        return usual_course(each, seed, loss, seconds, memory)

    rows = course_rows(own, course)
    results = results_of(own, rows, full)
    assert len(own.figures(results)) == 2
    return verdicts(own, rows, dict(results.facts)), {
        row[0]: row for row in own.tables(results)["ICLM and Transformer"].rows
    }


def verdict(told: dict[str, tuple[str, str]], start: str) -> tuple[str, str]:
    (found,) = (each for wording, each in told.items() if wording.startswith(start))
    return found


def test_verdicts_follow_the_numbers() -> None:
    told, rows = judged(iclm_wv=0.01, iclm_full_matched=0.02, iclm_full=-0.03, iclm_wv_no_f_mlp=0.05, full=1000)
    assert verdict(told, EQUAL) == ("holds", "iclm-wv 0.010 ± 0.000; iclm-full-matched 0.020 ± 0.000")
    assert verdict(told, FULL) == ("holds", "iclm-full (+12.0% parameters) -0.030 ± 0.000")
    assert verdict(told, SLIGHT)[0] == verdict(told, COST)[0] == verdict(told, COUNT)[0] == "holds"
    assert rows["iclm-wv-no-f-mlp"][6:8] == ("+5.0% ± 0.0%", "+4.0% ± 0.0%")
    assert rows["transformer"][6:8] == rows["iclm-wv"][7:8] * 2 == ("", "")
    assert rows["iclm-full"][1:3] == ("112", "+12.00%")


def test_verdicts_can_fail() -> None:
    told, _ = judged(iclm_wv=0.06, iclm_full=0.06, iclm_wv_no_mlp=0.2, transformer_no_mlp=0.04, seconds=1.3)
    assert {verdict(told, start)[0] for start in (EQUAL, FULL, SLIGHT, COST, COUNT)} == {"fails"}
    assert verdict(told, SLIGHT)[1].startswith("transformer-no-mlp 0.040")
    assert verdict(told, COUNT)[1] == "a +0.120"
    assert verdict(judged(memory=70)[0], COST)[0] == "fails"
    assert verdict(judged(memory=math.nan)[0], COST)[1].startswith("processor time +0.000; parameters")
    assert verdict(judged(seeds=1)[0], EQUAL)[0] == "not testable at this size"
    lost, rows = judged(iclm_wv=math.nan)
    assert verdict(lost, EQUAL)[0] == "undecided"
    assert rows["iclm-wv"][4:7] == ("diverged", "diverged", "diverged")


def test_a_full_model_without_an_equal_is_left_out() -> None:
    own = made(layers=4, width=64, heads=16, models=("transformer", "iclm-full-matched"))
    assert [each["model"] for each in own.cells()] == ["transformer"]
    rows = [{"model": "transformer", "kind": "run", "rate": 3e-3, "held_out": 1.0, "seed": 0}]
    said = own.notes(Results(frame_of(rows), {}, {}))
    assert said == ["iclm-full-matched is left out: even without f's feed-forward layers it is larger than its rival."]
