"""The recipe layer: intervals against statsmodels and by hand, verdicts, journal, continuation, rebuilding."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
from mistakes import refuses

from regard.checks import ArgumentError
from regard.cli import main
from regard.errors import missing
from regard.recipes import recipes
from regard_recipes.lib.claims import Claim, Estimate, claims_of, exact, mean_interval, mean_intervals, paired
from regard_recipes.lib.display import gap, interval, lines, means, only, pivot, spread, stat
from regard_recipes.lib.pages import marks
from regard_recipes.lib.recipe import Cell, Recipe, Results, check_shared
from regard_recipes.lib.results import load, plain, read_journal
from regard_recipes.lib.running import measure_units, run

NAME = "recipe-of-the-tests"


class Squares(Recipe):
    """Squares of numbers."""

    name = NAME
    seeds: int = 3  # Seeds.
    values: tuple[int, ...] = (1, 2, 3)  # Cells.
    shift: float = 0.0  # Added to everything.
    fault: int = -1  # The value whose cell fails.
    tasks: tuple[str, ...] = ("one",)  # Nothing depends on them.
    limits: ClassVar = {"fault": (-1, 9)}
    by_size: ClassVar = {"quick": {"seeds": 2, "values": (1, 2)}}

    def prepare(self) -> dict[str, Any]:
        self.offset = 10
        return {"offset": 10}

    def cells(self) -> list[Cell]:
        return [{"value": value, "even": value % 2 == 0} for value in self.values]

    def measure(self, cell: Cell, seed: int) -> Iterator[dict[str, Any]]:
        if cell["value"] == self.fault:
            raise ArgumentError("this cell fails.")
        if cell["value"] == -100:
            os._exit(3)
        yield {"kind": "run", "square": cell["value"] ** 2 + 0.1 * seed + self.offset + self.shift}
        for step in (1, 2):
            yield {"kind": "look", "step": step, "loss": math.nan if step == 2 else 1.0 * seed}

    def claims(self, results: Results) -> list[Claim]:
        runs = {value: results.select(kind="run", value=value) for value in self.values}
        return [Claim("P", "table 1", "2 is larger", {"": paired(runs[2], runs[1], "square")}, "above", 0)]

    def tables(self, results: Results) -> dict[str, Any]:
        return {"Squares": pivot(results.select(kind="run"), ["value"], {"square": spread("square", 2)})}

    def figures(self, results: Results) -> dict[str, bytes]:
        return {"loss": lines({"all": results.select(kind="look")}, "step", {"loss": "loss"}, "value")}

    def notes(self, results: Results) -> list[str]:
        return [f"Offset {results.facts['offset']}."]


@pytest.fixture
def squares() -> Iterator[type[Squares]]:
    recipes.register(NAME)(Squares)
    yield Squares
    recipes._objects.pop(NAME)


def reproduce(*words: object) -> int:
    return main(["reproduce", NAME, *map(str, words)])


def record(out: Path) -> dict[str, Any]:
    return json.loads((out / f"{NAME}.json").read_text())


def test_intervals_are_those_of_statsmodels() -> None:
    from statsmodels.stats.weightstats import DescrStatsW

    samples = [0.3, -0.1, 0.45, 0.2]
    found = mean_interval(samples)
    assert (found.low, found.high) == pytest.approx(DescrStatsW(samples).tconfint_mean(), rel=1e-9)
    assert found.text(3, signed=True) == f"+{np.mean(samples):.3f} ± {found.half:.3f}"
    assert Estimate(0.7, 0.4, 0.8, 9).text() == "0.700 (0.400 to 0.800)"
    assert mean_interval([1.0]).half == math.inf
    assert mean_interval([1.0, math.nan]).text() == "diverged"
    assert exact(0.5).text() == "0.500"
    groups = pd.DataFrame({"rule": ["b", "b", "a"], "chunk": [8.0, 8.0, 4.0], "x": [1.0, 3.0, 5.0]})
    wanted = {"b, 8": mean_interval([1.0, 3.0]), "a, 4": mean_interval([5.0])}
    assert mean_intervals(groups, ["rule", "chunk"], "x") == wanted


def test_pairs_are_of_equal_seeds() -> None:
    a = pd.DataFrame({"seed": [0, 1, 2, 2], "x": [1.0, 2.0, 3.0, 5.0]})
    b = pd.DataFrame({"seed": [2, 1, 9], "x": [1.0, 1.5, 100.0]})
    assert paired(a, b, "x") == mean_interval([0.5, 3.0])
    assert paired(a, b, "x", ratio=True).mean == pytest.approx((2 / 1.5 + 4) / 2)


@pytest.mark.parametrize(
    ("says", "estimate", "verdict"),
    [
        ("above", Estimate(2, 1.5, 2.5, 3), "holds"),
        ("above", Estimate(0, -0.5, 0.5, 3), "fails"),
        ("above", Estimate(1, 0.8, 1.2, 3), "undecided"),
        ("above", Estimate(1, 0.1, 1.9, 3), "not testable at this size"),  # wider than the effect of 0.5
        ("above", Estimate(2, -math.inf, math.inf, 1), "not testable at this size"),
        ("above", Estimate(math.nan, -math.inf, math.inf, 3), "undecided"),
        ("above", exact(1), "fails"),
        ("at least", exact(1), "holds"),
        ("below", Estimate(0, -0.5, 0.5, 3), "holds"),
        ("below", exact(1), "fails"),
        ("at most", exact(1), "holds"),
        ("at most", Estimate(3, 2, 4, 3), "fails"),
        ("within", Estimate(0, -0.9, 0.9, 3), "holds"),
        ("within", Estimate(0.9, 0.7, 1.1, 3), "undecided"),
        ("within", Estimate(-2, -2.1, -1.9, 3), "fails"),
    ],
)
def test_verdicts(says: Any, estimate: Estimate, verdict: str) -> None:
    claim = Claim("P", "1", "x", {"": estimate}, says, 1.0, effect=0.5)
    assert claim.verdict == claim.judge(estimate) == claim.record()["verdict"] == verdict


def test_a_claim_about_many_holds_where_all_do() -> None:
    good, open_, bad = Estimate(2, 1.5, 2.5, 3), Estimate(1, 0.8, 1.2, 3), Estimate(0, -0.5, 0.5, 3)
    verdict = lambda *some: Claim("P", "1", "x", dict(zip("abcd", some)), "above", 1.0).verdict  # noqa: B905, E731
    assert verdict(good, good) == "holds"
    assert verdict(good, open_) == "undecided"
    assert verdict(good, open_, bad) == "fails"
    many = Claim("P", "1", "x", dict(zip("abcd", (good, bad, good, good), strict=True)), "above", 1.0)
    assert many.measured() == "of 4: 3 holds, 1 fails; b 0.000 ± 0.500"
    off = Claim("P", "1", "x", {}, "above", untestable="no GPU")
    assert (off.verdict, off.measured()) == ("not testable at this size", "no GPU")


def test_pivots() -> None:
    columns = {"k": ["b", "b", "a", "a"], "c": [1, 2, 1, 1], "seed": [0, 0, 0, 1], "x": [1.0, 2.0, 3.0, 5.0]}
    frame = pd.DataFrame(columns)
    by_column = pivot(frame, {"k": "kind"}, {"x": spread("x", 1)}, columns="c", note="n")
    assert by_column.header == ("kind", "1", "2")
    assert by_column.rows == (("b", "1.0", "2.0"), ("a", "4.0 ± 1.4", "–"))
    base = frame[frame["k"] == "b"]
    several = pivot(frame, ["k"], {"gap": gap("x", base, 1), "mid": stat("x", "median", "{:.1f}", 10)})
    assert several.rows == (("b", "", "15.0"), ("a", "+1.5", "40.0"))
    same = pivot(frame, ["k", "c"], {"gap": gap("x", base, 1, same=["c"])})
    assert same.rows == (("b", "1", ""), ("b", "2", ""), ("a", "1", "+2.0"))
    assert interval("x", 1)(frame[2:]) == mean_interval([3, 5]).text(1)
    assert spread("x")(pd.DataFrame({"x": [1.0, math.nan]})) == "diverged"
    frame["y"] = [None, 2, 4, None]
    texts = {"both": "{x:.1f} of {y:g}", "b alone": only("{y:g} m", k="b"), "least": stat("x", "min", "{:.0f}")}
    assert pivot(frame, ["k"], texts).rows == (("b", "1.5 of 2", "2 m", "1"), ("a", "4.0 of 4", "–", "3"))
    assert [show(frame[:1]) for show in (means("{y:g}"), stat("y", "mean"))] == ["–"] * 2


def test_claims_from_rows() -> None:
    told = [("section 1", "a", exact(1.0), "above", 0, "n"), ("section 2", "b", {}, "below", 0, "n"),
            ("section 2", "no samples", mean_interval([]), "below", 0, "n"),
            ("section 3", "c", {"x": exact(2.0), "no samples": mean_interval([])}, "at most", 3, "n",
             {"effect": 2.0, "digits": 1})]  # fmt: skip
    first_one, other = claims_of("Paper", told, effect=1.0)
    assert first_one == Claim("Paper", "section 1", "a", {"": exact(1.0)}, "above", 0, effect=1.0, note="n")
    assert other == Claim("Paper", "section 3", "c", {"x": exact(2.0)}, "at most", 3, effect=2.0, note="n", digits=1)


def test_a_run_leaves_rows_page_and_figures(squares: type[Squares], tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    assert reproduce("--out", out, "--workers", 0) == 0
    found = record(out)
    assert len(found["rows"]) == 3 * 3 * 3
    assert found["columns"] == ["value", "even", "seed", "kind", "square", "step", "loss"]
    assert found["claims"][0]["verdict"] == "holds"
    assert found["facts"] == {"offset": 10}
    page = (out / f"{NAME}.md").read_text()
    assert "| “2 is larger” (table 1) | holds | above 0 | +3.000 ± 0.000 |" in page
    assert "| 3 | 19.10 ± 0.10 |" in page
    assert "- Offset 10." in page
    assert (out / f"{NAME}-loss.png").read_bytes().startswith(b"\x89PNG")
    assert "holds" in capsys.readouterr().out
    made, results = load(squares, out)
    assert made.values == (1, 2, 3)
    assert results.select(kind="look", step=2)["loss"].isna().all()


def test_sizes_give_way_to_flags(squares: type[Squares], tmp_path: Path) -> None:
    assert reproduce("--out", tmp_path / "a", "--workers", 0, "--quick") == 0
    assert record(tmp_path / "a")["config"]["seeds"] == 2
    assert reproduce("--out", tmp_path / "b", "--workers", 0, "--size", "quick", "--seeds", 3) == 0
    config = record(tmp_path / "b")["config"]
    assert (config["size"], config["seeds"], config["values"]) == ("quick", 3, [1, 2])
    assert reproduce("--size", "paper") == 2
    assert reproduce("--size", "paper", "--quick") == 2
    refuses("expected small or quick", squares.configure, "paper")


def test_a_killed_run_goes_on(
    squares: type[Squares], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    assert reproduce("--out", out, "--workers", 0, "--values", 1, 2, "--fault", 2) == 2
    assert "this cell fails" in capsys.readouterr().err
    journal = out / f"{NAME}.jsonl"
    header, rows, finished = read_journal(journal)
    assert not finished
    assert [(row["cell"]["value"], row["seed"]) for row in rows] == [(1, 0)] * 3
    assert reproduce("--out", out, "--workers", 0, "--values", 1, 2, "--shift", 5) == 2
    assert "unfinished run with other options (--shift 0.0, --fault 2)" in capsys.readouterr().err
    kept = json.loads(journal.read_text().splitlines()[0])
    kept["config"]["fault"] = -1
    lines_before = [json.dumps(kept), *journal.read_text().splitlines()[1:3]]  # killed within a cell
    journal.write_text("\n".join(lines_before) + '\n5\n{"cell": {}}\n{"cell": {"val')
    with monkeypatch.context() as full:
        full.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        assert reproduce("--out", out, "--workers", 0, "--values", 1, 2) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert journal.read_text().startswith("\n".join(lines_before))  # nothing was lost
    assert reproduce("--out", out, "--workers", 0, "--values", 1, 2) == 0
    assert read_journal(journal)[2]
    first_run = record(out)
    assert first_run["date"] == header["date"]
    assert len(first_run["rows"]) == 2 * 3 * 3
    marked = json.loads(journal.read_text().splitlines()[1])["measured"]["square"]
    assert marked == 11.0
    changed = journal.read_text().replace('{"finished"', '{"dropped"').replace(f'"square": {marked}', '"square": 77.0')
    journal.write_text("\n".join(changed.splitlines()[:-1]) + "\n")
    assert reproduce("--out", out, "--workers", 0, "--values", 1, 2) == 0  # measures nothing that is there
    assert 77.0 in [row[4] for row in record(out)["rows"]]
    assert reproduce("--out", out, "--workers", 0, "--values", 1, 2) == 0  # finished: a new run
    assert 77.0 not in [row[4] for row in record(out)["rows"]]


def test_rows_of_a_killed_process_are_there_and_count_once(tmp_path: Path) -> None:
    import recipe_of_processes as other

    code = "import sys; from pathlib import Path; from recipe_of_processes import Cubes; " \
           "from regard_recipes.lib.running import run; Cubes.dies = True; " \
           "run(Cubes.configure(out=Path(sys.argv[1]), workers=0), [], print)"  # fmt: skip
    killed = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=Path(other.__file__).parent)
    assert killed.returncode == -signal.SIGKILL
    journal = tmp_path / "cubes.jsonl"
    assert [json.loads(line).get("measured") for line in journal.read_text().splitlines()] == [None, {"cube": 2}]
    assert read_journal(journal)[1] == []
    results = run(other.Cubes.configure(out=tmp_path, workers=0), [], lambda text: None)
    assert list(results.frame["cube"]) == [2, -1, 8, -1]
    assert [line["row"] for line in read_journal(journal)[1]] == [0, 1, 0, 1]
    assert load(other.Cubes, tmp_path)[1].frame.equals(results.frame)


def test_more_seeds_are_added_to_what_is_there(squares: type[Squares], tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out"
    call = ("--out", out, "--workers", 0, "--values", 1, 2)
    assert reproduce(*call, "--seeds", 2) == 0
    journal = out / f"{NAME}.jsonl"
    head, *rows, end = journal.read_text().replace('"square": 11.0', '"square": 77.0').splitlines()
    journal.write_text("\n".join([head, *reversed(rows), end]) + "\n")
    assert reproduce(*call, "--seeds", 3) == 0
    found = record(out)
    assert [(row[2], row[0]) for row in found["rows"]] == [(s, v) for s in (0, 1, 2) for v in (1, 2) for _ in range(3)]
    assert 77.0 in [row[4] for row in found["rows"]]
    assert found["config"]["seeds"] == 3
    assert reproduce(*call, "--seeds", 3, "--tasks", "one", "two") == 0  # more names
    assert 77.0 in [row[4] for row in record(out)["rows"]]
    assert reproduce(*call, "--seeds", 2) == 0  # fewer: a new run
    assert 77.0 not in [row[4] for row in record(out)["rows"]]
    journal.write_text("\n".join(journal.read_text().splitlines()[:-1]) + "\n")  # killed before its end
    assert reproduce(*call, "--seeds", 1) == 2
    assert "unfinished run with other options (--seeds 2)" in capsys.readouterr().err
    assert reproduce(*call, "--seeds", 4) == 0


def test_processes_measure_the_same_and_their_end_is_reported(squares: type[Squares], tmp_path: Path) -> None:
    import recipe_of_processes as other

    results = run(other.Cubes.configure(out=tmp_path / "p", workers=2, seeds=2), [], lambda text: None)
    alone = run(other.Cubes.configure(out=tmp_path / "t", workers=0, seeds=2), [], lambda text: None)
    pd.testing.assert_frame_equal(results.frame, alone.frame)
    dying, journal = other.Cubes.configure(values=(-100, 1), workers=1), tmp_path / "cubes.jsonl"
    with pytest.raises(RuntimeError, match="value -100, seed 0 ended before it was done"):
        measure_units(dying, [({"value": -100}, 0)], journal, lambda text: None)
    with pytest.raises(RuntimeError, match=r"value 0, seed 0 failed: .*by zero"):
        measure_units(dying, [({"value": 0}, 0), ({"value": 1}, 0)], journal, lambda text: None)
    with pytest.raises(ModuleNotFoundError) as caught:  # the command names the extra
        measure_units(dying, [({"value": -200}, 0)], journal, lambda text: None)
    assert missing(caught.value) == "jinja2 is not installed; pip install 'regard[lm]'"


def test_a_page_is_rebuilt_from_rows(squares: type[Squares], tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    out, page = tmp_path / "docs" / "results", tmp_path / "docs" / "page.md"
    assert reproduce("--out", out, "--workers", 0) == 0
    whole = {path.name: path.read_bytes() for path in out.iterdir()}
    monkeypatch.setattr(squares, "measure", None)
    monkeypatch.setattr(squares, "prepare", None)
    for name in whole:
        if not name.endswith((".json", ".jsonl")):
            (out / name).unlink()
    begin, end = marks(NAME)
    page.write_text(f"# Page\n\n{begin}\nold\n{end}\n\nafter\n")
    assert reproduce("--rebuild", out, "--page", page) == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == whole
    text = page.read_text()
    assert text.startswith(f"# Page\n\n{begin}\n\nMade by ")
    assert text.endswith(f"\n{end}\n\nafter\n")
    assert f"(results/{NAME}-loss.png)" in text
    (out / f"{NAME}.json").unlink()
    assert reproduce("--rebuild", out) == 0  # from the journal
    assert (out / f"{NAME}.json").read_bytes() == whole[f"{NAME}.json"]
    (tmp_path / "pages").mkdir()
    page.rename(tmp_path / "pages" / "page.md")
    assert reproduce("--rebuild", out, "--page", tmp_path / "pages" / "page.md") == 0  # a page elsewhere
    assert f"(../docs/results/{NAME}-loss.png)" in (tmp_path / "pages" / "page.md").read_text()
    page.write_text("no marks")
    assert reproduce("--rebuild", out, "--page", page) == 2
    assert reproduce("--rebuild", tmp_path) == 2
    (out / f"{NAME}.json").unlink()
    damages = {"json": ("{", "[]", '{"rows": [], "columns": []}'), "jsonl": ("", "{", '{"made_by": "x"}', "\udcff")}
    for ending in ("jsonl", "json"):  # the record is read first
        for damaged in damages[ending]:
            (out / f"{NAME}.{ending}").write_text(damaged, errors="surrogateescape")
            capsys.readouterr()
            assert reproduce("--rebuild", out) == 2
            assert f"{NAME}: cannot read {out / f'{NAME}.{ending}'}: " in capsys.readouterr().err


def test_every_size_of_every_recipe_is_in_range() -> None:
    for name, kind in recipes.items():
        if isinstance(kind, type) and issubclass(kind, Recipe):
            assert kind.name == name
            for size in ("small", *kind.by_size):
                made = kind.configure(size, device="cpu")
                check_shared(made)
                cells = made.cells()
                assert len({json.dumps(cell) for cell in cells}) == len(cells) > 0, (name, size)


def test_a_value_without_a_type_is_a_new_default() -> None:
    """A dataclass alone would keep the value of the base class."""
    few: Any = type("Few", (Squares,), {"seeds": 2})
    assert (few().seeds, few.configure("quick", seeds=1).seeds, Squares().seeds) == (2, 1, 3)
    for hidden in (property(lambda self: 2), lambda self: 2):
        refuses("seeds is an option of the recipe, but a .* here", type, "Few", (Squares,), {"seeds": hidden})


def test_a_folder_with_other_files_is_left_alone(squares: type[Squares], tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert reproduce("--out", tmp_path) == 2
    assert "nothing was deleted" in capsys.readouterr().err


def test_plain_data() -> None:
    values = (math.inf, np.float32(0.5), np.bool_(True), Path("a"), None)
    assert plain({1: values}) == {"1": [None, 0.5, True, "a", None]}
