"""`regard reproduce shared-query-key`, as small as it goes."""

import pandas as pd
import pytest
from tiny_runs import tiny

from regard_recipes.lib.recipe import Results


@pytest.fixture
def results() -> Results:
    return tiny("shared-query-key")[1]


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
