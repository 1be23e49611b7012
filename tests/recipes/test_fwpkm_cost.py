"""`regard reproduce fwpkm-cost`: the paper's table 2, counted by other means, and what is said about it."""

import io
from pathlib import Path
from typing import Any

import pytest
from mistakes import refuses
from tiny_runs import tiny

from regard.recipes import recipes
from regard_recipes.fwpkm import fwpkm_cost as recipe
from regard_recipes.fwpkm.memory_recipe import Row
from regard_recipes.lib.results import Journal, _write_line

WIDTH, INNER, WORDS, TOKENS = 768, 2304, 32_000, 8 * 4096
FEED_FORWARD = 3 * WIDTH * INNER
GDN = WIDTH * (4 * 512 + 16) + 3 * 512 * 4 + 2 * 8 + 64 + 512 * WIDTH
ATTENTION = WIDTH * (2 * 768 + 2 * 256) + 768 * WIDTH + 2 * 64
PKM = WIDTH * 4 * 512 + 4 * 512 + 2 * (WIDTH * 512) + 4 * 2 * 512 * 256
FWPKM = 3 * (WIDTH * 512 + 512) + WIDTH * 8 + 8
"""Learned numbers of one layer, from the tables of the paper's appendix; values and norms apart."""


@pytest.fixture(scope="module")
def counted() -> dict[Row, Any]:
    return {Row(*key): recipe.counted(Row(*key)) for key in recipe.TABLE_2}


def test_table_2_to_its_last_digit(counted: dict[Row, Any]) -> None:
    assert len(counted) == 16
    for row, count in counted.items():
        parameters, flops, *_ = recipe.TABLE_2[row.layout, row.memory]
        assert count["numbers"] / 1e6 == pytest.approx(parameters, abs=0.005)
        assert count["paper_flops"] / 1e12 == pytest.approx(flops, abs=0.02)


def test_counts_by_hand(counted: dict[Row, Any]) -> None:
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
        assert counted[row]["learned"] == pytest.approx(numbers, rel=4e-4)  # norms and biases
    assert counted[Row("GDN", "FwPKM")]["fast"] == 3 * (tables + 2 * 512 * 256)
    assert counted[Row("GDN", "PKM+FwPKM")]["fast"] == 2 * (tables + 2 * 512 * 256)
    assert counted[Row("GDN", "PKM")]["table"] == 3 * tables
    assert counted[Row("GDN", "PKM")]["fast"] == 0


def test_operations_by_hand(counted: dict[Row, Any]) -> None:
    """Attention by a sum over all visible pairs; memories by their loops."""
    full, window = (sum(min(t + 1, seen) for t in range(4096)) / 4096 for seen in (4096, 512))
    assert counted[Row("FA")]["attention"] == pytest.approx(12 * 12 * 64 * 2 * 2 * full)
    assert counted[Row("GDN+FA")]["attention"] == pytest.approx(3 * 12 * 64 * 2 * 2 * full)
    assert counted[Row("GDN+SWA")]["attention"] == pytest.approx(3 * 12 * 64 * 2 * 2 * window)
    assert counted[Row("GDN")]["attention"] == 0
    assert counted[Row("GDN")]["delta rule"] == 12 * 8 * (7 * 64**2 + 2 * 4 * 3 * 64)
    pkm = counted[Row("GDN", "PKM")]
    assert pkm["search"] == 3 * 4 * 2 * (2 * 512 * 256)
    assert pkm["read"] == 3 * 4 * 32 * 2 * 512
    assert pkm["write"] == 0
    fast = counted[Row("GDN", "FwPKM")]
    assert fast["search"] == 3 * 2 * (2 * 512 * 256)
    assert fast["read"] == 3 * 8 * 2 * 512
    assert fast["write"] == 3 * (2 * 512 + 8 * 2 * 512 + 2 * 8 * 3 * 256)
    total = 3 * sum(fast[name] for name in recipe.PARTS) * TOKENS
    assert counted[Row("GDN", "FwPKM")]["flops"] == pytest.approx(total)
    assert fast["projections"] * TOKENS * 3 == pytest.approx(counted[Row("GDN", "FwPKM")]["paper_flops"], rel=2e-3)


def test_a_run_has_every_row() -> None:
    made, results = tiny("fwpkm-cost")
    assert results.select(kind="count")["model"].tolist() == ["GDN", "GDN | FwPKM"]
    assert (results.select(kind="run")["step_cpu_seconds"] > 0).all()
    assert [(claim.verdict, claim.note[-10:]) for claim in made.claims(results)] == [("holds", "hest of 2.")] * 2
    assert made.tables(results)["Table 2, counted"].rows[1][:3] == ("GDN | FwPKM", "519.122", "519.12")


def test_a_run_begun_before_an_option_existed_is_continued(tmp_path: Path) -> None:
    made = recipes.get("fwpkm-cost").configure(quick=True, out=tmp_path)
    earlier = Journal.open(made, ())
    del earlier.header["config"]["compile"]
    earlier.begin({})
    assert "compile" not in Journal.open(made, ()).header["config"]
    refuses("lacks the rows of", earlier.finish, made)


def test_a_cut_line_of_a_journal_is_an_error() -> None:
    class Full(io.RawIOBase):
        def write(self, data: Any) -> int:
            return len(data) - 1

    with pytest.raises(OSError, match="no space left"):
        _write_line(Full(), {"row": 0})
