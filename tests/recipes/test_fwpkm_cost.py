"""`regard reproduce fwpkm-cost`: the paper's table 2, counted by other means, and what is said about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from regard.checks import ArgumentError
from regard.cli import main
from regard_recipes.fwpkm import fwpkm_cost as recipe
from regard_recipes.fwpkm import fwpkm_cost_output as shown
from regard_recipes.fwpkm.memory_layouts import Row
from regard_recipes.lib.language_runs import LanguageRun

WIDTH, INNER, WORDS, TOKENS = 768, 2304, 32_000, 8 * 4096
FEED_FORWARD = 3 * WIDTH * INNER
GDN = WIDTH * (4 * 512 + 16) + 3 * 512 * 4 + 2 * 8 + 64 + 512 * WIDTH
ATTENTION = WIDTH * (2 * 768 + 2 * 256) + 768 * WIDTH + 2 * 64
PKM = WIDTH * 4 * 512 + 4 * 512 + 2 * (WIDTH * 512) + 4 * 2 * 512 * 256
FWPKM = 3 * (WIDTH * 512 + 512) + WIDTH * 8 + 8
"""Learned numbers of one layer, from the tables of the paper's appendix; values and norms apart."""


def counts() -> dict[Row, recipe.Counted]:
    return {Row(*key): recipe.counted(Row(*key), recipe.PAPER_SIZES, 8) for key in recipe.PAPER}


@pytest.fixture(scope="module")
def counted() -> dict[Row, recipe.Counted]:
    return counts()


def test_table_2_to_its_last_digit(counted: dict[Row, recipe.Counted]) -> None:
    assert len(counted) == 16
    for row, count in counted.items():
        parameters, flops, *_ = recipe.PAPER[row.layout, row.memory]
        assert count.numbers / 1e6 == pytest.approx(parameters, abs=0.005)
        assert count.paper_flops / 1e12 == pytest.approx(flops, abs=0.02)


def test_counts_by_hand(counted: dict[Row, recipe.Counted]) -> None:
    """Sums over the layers, from the sizes of their matrices."""
    base = WORDS * WIDTH + 12 * FEED_FORWARD
    tables = 512 * 512 * 512
    expected = {
        Row("GDN"): base + 12 * GDN,
        Row("FA"): base + 12 * ATTENTION,
        Row("GDN+SWA"): base + 9 * GDN + 3 * ATTENTION,
        Row("GDN", "PKM"): base + 12 * GDN + 3 * (PKM + tables - FEED_FORWARD),
        Row("GDN", "FwPKM"): base + 12 * GDN + 3 * FWPKM,
    }
    for row, numbers in expected.items():
        assert counted[row].learned == pytest.approx(numbers, rel=4e-4)  # norms and biases
    assert counted[Row("GDN", "FwPKM")].fast == 3 * (tables + 2 * 512 * 256)
    assert counted[Row("GDN", "PKM+FwPKM")].fast == 2 * (tables + 2 * 512 * 256)
    assert counted[Row("GDN", "PKM")].table == 3 * tables
    assert counted[Row("GDN", "PKM")].fast == 0


def test_operations_by_hand(counted: dict[Row, recipe.Counted]) -> None:
    """Attention by a sum over all visible pairs; memories by their loops."""
    full, window = (sum(min(t + 1, seen) for t in range(4096)) / 4096 for seen in (4096, 512))
    assert counted[Row("FA")].parts["attention"] == pytest.approx(12 * 12 * 64 * 2 * 2 * full)
    assert counted[Row("GDN+FA")].parts["attention"] == pytest.approx(3 * 12 * 64 * 2 * 2 * full)
    assert counted[Row("GDN+SWA")].parts["attention"] == pytest.approx(3 * 12 * 64 * 2 * 2 * window)
    assert counted[Row("GDN")].parts["attention"] == 0
    assert counted[Row("GDN")].parts["delta rule"] == 12 * 8 * (7 * 64**2 + 2 * 4 * 3 * 64)
    pkm = counted[Row("GDN", "PKM")].parts
    assert pkm["search"] == 3 * 4 * 2 * (2 * 512 * 256)
    assert pkm["read"] == 3 * 4 * 32 * 2 * 512
    assert pkm["write"] == 0
    fast = counted[Row("GDN", "FwPKM")].parts
    assert fast["search"] == 3 * 2 * (2 * 512 * 256)
    assert fast["read"] == 3 * 8 * 2 * 512
    assert fast["write"] == 3 * (2 * 512 + 8 * 2 * 512 + 2 * 8 * 3 * 256)
    total = 3 * sum(fast.values()) * TOKENS
    assert counted[Row("GDN", "FwPKM")].flops == pytest.approx(total)
    assert fast["projections"] * TOKENS * 3 == pytest.approx(counted[Row("GDN", "FwPKM")].paper_flops, rel=2e-3)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cost") / "out"
    words = ["--quick", "--layouts", "GDN", "--memories", "none", "FwPKM", "--steps", "2", "--workers", "2"]
    assert main(["reproduce", "fwpkm-cost", "--out", str(out), *words]) == 0
    return out


def test_what_is_left_behind(tiny: Path) -> None:
    found = json.loads((tiny / "fwpkm-cost.json").read_text())
    assert set(found["counted"]) == {"GDN", "GDN | FwPKM"}
    assert [run["name"] for run in found["runs"]] == ["GDN", "GDN | FwPKM"]
    assert found["paper"]["GDN"] == [112.11, 22.05, 121.82, 42.81]
    assert all(run["step_cpu_seconds"] > 0 for run in found["runs"])
    assert (tiny / "fwpkm-cost-steps.png").read_bytes().startswith(b"\x89PNG")
    said = (tiny / "fwpkm-cost.md").read_text()
    assert "2 of 2 rows within 0.005 M" in said
    assert "| GDN \\| FwPKM | 519.122 | 519.12 |" in said


def run(row: Row, seconds: float) -> LanguageRun:
    return LanguageRun(
        name=row.name, seed=0, parameters=5, steps=(1,), train=(4.0,), held_out=(4.0,), step_seconds=9.0,
        step_cpu_seconds=seconds, peak_bytes=300 * 2**20, before_bytes=100 * 2**20,
    )  # fmt: skip


def test_notes_follow_the_numbers(counted: dict[Row, recipe.Counted]) -> None:
    rows = [Row("GDN"), Row("GDN", "FwPKM"), Row("FA"), Row("FA", "FwPKM")]
    some = {row: counted[row] for row in rows}
    runs = {row: [run(row, s)] for row, s in zip(rows, (1.0, 1.25, 2.0, 5.0), strict=True)}
    told = " ".join(shown.notes(some, runs, 2))
    assert "GDN | FwPKM 1.25 (paper 2.66), FA | FwPKM 2.50 (paper 2.61)" in told
    assert "4 of 4 rows within 0.005 M" in told
    table = shown.tables(some, runs, 2)["Measured"].markdown()
    assert "| GDN \\| FwPKM | 5 | 1.60 | 1.25 | 2.66 | 16.10 | 200 MiB |" in table
    off = {Row("GDN"): recipe.Counted(112_000_000, 0, 0, counted[Row("GDN")].parts, TOKENS)}
    told = " ".join(shown.notes(off, {Row("GDN"): [run(Row("GDN"), 1.0)]}, 2))
    assert "0 of 1 rows within 0.005 M; the furthest is GDN, by 0.1100 M" in told


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layouts": ("GDM",)}, "--layouts names 'GDM', which is unknown. Did you mean 'GDN'"),
        ({"memories": ("PKM",)}, "--memories lacks none"),
        ({"memories": ("none", "none")}, "--memories names 'none' twice"),
        ({"layouts": ()}, "--layouts names nothing"),
        ({"steps": 0}, "--steps is 0"),
        ({"sub_keys": 0}, "--sub-keys is 0"),
        ({"memory_dim": 9}, "--memory-dim is 9, expected an even"),
        ({"chunk": 33}, "has less than two chunks of 33"),
        ({"layers": 2}, "--layers is 2, expected at least 4"),
        ({"size": "huge"}, "--size is 'huge'"),
    ],
)
def test_mistakes_are_found_first(changes: dict, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        recipe.check(recipe.FwpkmCostConfig(**{"size": "quick", **changes}))
