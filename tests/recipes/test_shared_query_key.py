"""`regard reproduce shared-query-key`, as small as it goes."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from regard.checks import ArgumentError
from regard_recipes.kernels import shared_query_key as module
from regard_recipes.kernels.shared_query_key import SharedQueryKey
from regard_recipes.lib.recipe import check_shared, run
from regard_recipes.lib.results import Results

TINY = {"steps": 2, "seeds": 2, "specs": "softmax,elu", "workers": 0}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Loss on a few hundred characters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MEASURED", 600)
        config = SharedQueryKey.configure(out=tmp_path_factory.mktemp("shared"), **TINY)
        return run(SharedQueryKey(config), [], lambda text: None)


def kind(results: Results, spec: str, shared: str, seed: int = 0) -> pd.Series:
    return results.select(spec=spec, seed=seed, **{"q and k": shared}).iloc[0]


def test_what_is_counted(results: Results) -> None:
    """Two layers of width 64, four heads of 16 channels, 8 windows of 64 characters, float32."""
    assert len(results.frame) == 8
    for spec, cache in (("softmax", 2 * 2 * 512 * 64 * 4), ("elu", 2 * (4 * (17 * 16 + 17) * 4 + 4))):
        apart, shared = (kind(results, spec, way) for way in ("apart", "shared"))
        assert apart["parameters"] - shared["parameters"] == 2 * 64 * 64
        assert apart["query_key_bytes"] == 2 * shared["query_key_bytes"] == 2 * 2 * 8 * 64 * 64 * 4
        assert apart["kept_bytes"] - shared["kept_bytes"] >= 2 * 8 * 64 * 64 * 4
        assert apart["cache_bytes"] == shared["cache_bytes"] == cache
        assert 4 < apart["bits_per_char"] < 9


def test_what_is_shown(results: Results) -> None:
    made = SharedQueryKey(SharedQueryKey.configure(**TINY))
    (table,) = made.tables(results).values()
    assert [row[:2] for row in table.rows] == [(s, q) for s in ("softmax", "elu") for q in ("apart", "shared")]
    gaps = [kind(results, "elu", "shared", s)["bits_per_char"] - kind(results, "elu", "apart", s)["bits_per_char"]
            for s in (0, 1)]  # fmt: skip
    assert table.rows[3][3].startswith(f"{sum(gaps) / 2:+.4f} ± ")
    assert made.figures(results)["loss"].startswith(b"\x89PNG")
    halves, cost = made.claims(results)
    assert (halves.verdict, halves.measured()) == ("holds", "softmax 0.500; elu 0.500")
    assert cost.estimates["elu"].mean == pytest.approx(sum(gaps) / 2)


def test_a_seed_gives_the_same_numbers_alone(results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MEASURED", 600)
    config = SharedQueryKey.configure(out=tmp_path, **{**TINY, "seeds": 1, "seed": 1, "specs": "elu"})
    again = run(SharedQueryKey(config), [], lambda text: None)
    losses = results.select(spec="elu", seed=1)["bits_per_char"]
    assert again.frame["bits_per_char"].tolist() == losses.tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "--steps is 0, expected at least 1"),
        ({"seeds": 0}, "--seeds is 0, expected at least 1"),
        ({"seed": -1}, "--seed is -1, expected 0 to"),
        ({"specs": "sofmax"}, "Did you mean 'softmax'"),
        ({"specs": "elu,elu"}, "names 'elu' twice"),
    ],
)
def test_mistakes_are_found_first(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        check_shared(SharedQueryKey(SharedQueryKey.configure(**{**TINY, **changes})))
