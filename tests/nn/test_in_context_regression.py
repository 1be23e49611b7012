"""In-context regression on non-stationary data, as in section 4 of Local Linear Attention (arXiv 2510.01450), tiny: the
models and the training of `regard reproduce in-context-regression`."""

import pytest

from regard_recipes.local_linear.in_context_regression import LLA, SOFTMAX, InContextRegressionRecipe

SIZES = {"dim": 3, "segments": (16,), "width": 16, "steps": 600, "batch": 32, "examples": 1000, "stop_at": 2.0}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_local_linear_attention_with_a_learned_ridge_beats_softmax(seed: int) -> None:
    recipe, errors, ridges = InContextRegressionRecipe.configure(**SIZES), {}, []
    for model in (SOFTMAX, LLA):
        rows = list(recipe.measure({"task": "16", "model": model, "rate": 1e-2}, seed))
        errors[model] = rows[-1]["score"]
        ridges += [row for row in rows if row["kind"] == "ridge"]
    before, after = ([row for row in ridges if row["when"] == when] for when in ("before", "after"))
    assert len(before) == len(after) == 2
    for start, end in zip(before, after, strict=True):
        assert start["low"] == pytest.approx(0.1)
        assert start["high"] == pytest.approx(0.1)
        assert end["high"] > 1.1 * end["low"]
        assert abs(end["median"] - 0.1) > 0.005
    assert errors[LLA] < 0.8 * errors[SOFTMAX]
    assert errors[SOFTMAX] < 0.5  # which has learned too: answering 0 costs 1
