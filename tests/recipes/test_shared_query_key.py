"""`regard reproduce shared-query-key`, as small as it goes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from regard.checks import ArgumentError
from regard.recipes import recipes
from regard_recipes.kernels import shared_query_key as recipe

TINY = recipe.SharedQueryKeyConfig(steps=2, seeds=2, specs="softmax,elu")


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def findings(monkeypatch_module):
    """Loss on a few hundred characters."""
    told = []
    monkeypatch_module.setattr(recipe, "MEASURED", 600)
    found = recipes.get("shared-query-key").run(TINY, told.append)
    assert "elu, seed 1, queries and keys shared" in told
    return found


def test_what_is_counted(findings):
    """Two layers of width 64, four heads of 16 channels, 8 windows of 64 characters, float32."""
    kinds = {(run["spec"], run["shared"]): run for run in findings.data["runs"]}
    assert len(findings.data["runs"]) == 8
    for spec, cache in (("softmax", 2 * 2 * 512 * 64 * 4), ("elu", 2 * (4 * (17 * 16 + 17) * 4 + 4))):
        apart, shared = kinds[spec, False], kinds[spec, True]
        assert apart["parameters"] - shared["parameters"] == 2 * 64 * 64
        assert apart["query_key_bytes"] == 2 * shared["query_key_bytes"] == 2 * 2 * 8 * 64 * 64 * 4
        assert apart["kept_bytes"] - shared["kept_bytes"] >= 2 * 8 * 64 * 64 * 4
        assert apart["cache_bytes"] == shared["cache_bytes"] == cache
        assert 4 < apart["bits_per_char"] < 9


def test_what_is_shown(findings):
    table, gaps = findings.tables.values()
    assert [row[:2] for row in table.rows] == [(s, q) for s in ("softmax", "elu") for q in ("apart", "shared")]
    runs = {(r["spec"], r["seed"], r["shared"]): r["bits_per_char"] for r in findings.data["runs"]}
    first = runs["elu", 0, True] - runs["elu", 0, False]
    assert gaps.rows[1][2].startswith(f"{first:+.4f}")
    assert findings.figures["shared-query-key.png"].startswith(b"\x89PNG")
    assert "50% of their activations" in findings.notes[0]
    assert findings.notes[1].endswith("as they are.")
    json.dumps(findings.data)


def test_the_same_seed_gives_the_same_numbers(findings):
    again = recipes.get("shared-query-key").run(replace(TINY, seeds=1, seed=1, specs="elu"), lambda text: None)
    runs = [run for run in findings.data["runs"] if run["spec"] == "elu" and run["seed"] == 1]
    assert [run["bits_per_char"] for run in again.data["runs"]] == [run["bits_per_char"] for run in runs]


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
def test_mistakes_are_found_first(changes, message):
    with pytest.raises(ArgumentError, match=message):
        recipes.get("shared-query-key").run(replace(TINY, **changes), print)
