"""`regard reproduce iclm-parity`: every model trained, counted and judged."""

from functools import partial

from tiny_runs import checked, tiny

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


def test_a_full_model_without_an_equal_is_left_out() -> None:
    own = made(layers=4, width=64, heads=16, models=("transformer", "iclm-full-matched"))
    assert [each["model"] for each in own.cells()] == ["transformer"]
    rows = [{"model": "transformer", "kind": "run", "rate": 3e-3, "held_out": 1.0, "seed": 0}]
    said = own.notes(Results(frame_of(rows), {}, {}))
    assert said == ["iclm-full-matched is left out: even without f's feed-forward layers it is larger than its rival."]
