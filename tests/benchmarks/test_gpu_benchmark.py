"""benchmarks/gpu.py without a GPU, in the interpreter: every row at toy size, what it stores and writes, how it judges.
Its times are worth nothing here."""

import argparse
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import python

import regard

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "results.md"
STORED = ROOT / "benchmarks" / "results" / "gpu.json"
BEGIN, END = "<!-- benchmarks/gpu.py: begin -->\n", "<!-- benchmarks/gpu.py: end -->"
PARTS = ("promises", "compact", "local_linear", "decoding", "memory", "models", "tools")


# Dry runs --------------------------------------------------------------------------------------------------------


def run(*arguments: object, code: int = 0) -> str:
    return python(ROOT / "benchmarks" / "gpu.py", *arguments, code=code, OMP_NUM_THREADS="1")


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_every_row_runs_at_toy_size(tmp_path: Path, module: Any, bench: Any, part: str) -> None:
    pytest.importorskip("triton")
    page, out = tmp_path / "page.md", tmp_path / "gpu.json"
    page.write_text(f"above\n{BEGIN}old\n{END}\nbelow\n", encoding="utf-8")
    run("--dry", "--part", part, "--out", out, "--page", page, "--figure", tmp_path / "figure.png", "--write")
    found = json.loads(out.read_text(encoding="utf-8"))
    assert set(found["rows"]) == {row.name for row in module(f"gpu_{part}").rows(bench())}
    failed = {name: row for name, row in found["rows"].items() if row["status"] not in ("measured", "not available")}
    assert not failed
    for name, row in found["rows"].items():
        if row["status"] == "not available":
            assert part == "tools" or any(peer in name for peer in ("adasplash", "fla ", "cudnn")), name
        elif row["part"] == "correctness":
            assert row["right"] is True, (name, row)
    origin = found["runs"][0]
    assert origin["dry"] is True
    assert origin["versions"]["torch"] == torch.__version__
    assert set(found["ceilings"]) == {"tflops", "gbps"}
    text = page.read_text(encoding="utf-8")
    assert text.startswith("above\n")
    assert text.endswith("below\n")
    assert "Toy sizes in the interpreter" in text
    assert (tmp_path / "figure.png").exists() == (part == "compact")
    assert (tmp_path / "gpu-roofline.png").exists() == (part in ("compact", "local_linear", "decoding"))


@pytest.mark.slow
def test_a_dry_run_can_be_taken_up_again(tmp_path: Path) -> None:
    """A row of the models, then one more; what was measured stays as it is."""
    out = tmp_path / "gpu.json"
    run("--dry", "--part", "models", "--match", "step, elu", "--out", out)
    first = json.loads(out.read_text(encoding="utf-8"))
    assert list(first["rows"]) == ["training step, elu"]
    assert first["rows"]["training step, elu"]["status"] == "measured"
    run("--dry", "--part", "models", "--match", "elu", "--out", out, "--resume")
    again = json.loads(out.read_text(encoding="utf-8"))
    assert again["rows"]["training step, elu"] == first["rows"]["training step, elu"]
    assert "training step, relu" in again["rows"]
    assert [r["run"] for r in again["rows"].values()].count(0) == 1
    assert len(again["runs"]) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    assert "no GPU here" in run("--part", "models", "--match", "elu", "--out", tmp_path / "gpu.json", code=1)


# Rows ------------------------------------------------------------------------------------------------------------


def test_what_would_be_measured(module: Any, bench: Any) -> None:
    assert module("gpu").PARTS == PARTS
    rows = module("gpu").rows_of(bench(dry=False), PARTS, "")
    names = [row.name for row in rows]
    for length in (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072):
        for dim in (64, 128):
            for peer in ("flash", "cudnn", "adasplash 2", "regard biweight", "regard relumax"):
                assert f"attention, T {length}, D {dim}, live 1, {peer}" in names
            assert f"local linear, T {length}, D {dim}, regard local-linear" in names
            assert f"local linear, T {length}, D {dim}, fla mesa" in names
        assert f"attention, T {length}, D 64, live 1, adasplash 1" in names
        assert (f"local linear, T {length}, D 128, naive" in names) == (length <= 8192)
    assert {f"training step, {name}" for name in regard.presets()} <= set(names)
    main = names[: next(i for i, row in enumerate(rows) if row.part != "correctness")]
    assert {name.split(", ")[1] for name in main} >= {"biweight", "relumax", "local-linear", "one query", "memory"}


def test_rows_of_the_criteria_come_first(module: Any, bench: Any) -> None:
    """Then the tools that were never measured; rows of one configuration stand together."""
    used, known = module("gpu_criteria").used(), {"ncu, biweight", "profile, biweight"}
    rows = [r for r in module("gpu").rows_of(bench(dry=False), PARTS, "", known) if r.part != "correctness"]
    assert {row.name for row in rows[: len(used)]} == used
    tools = {row.name for row in rows if row.part == "tools"} - known
    assert {row.name for row in rows[len(used) : len(used) + len(tools)]} == tools
    places = [row.name.rpartition(", ")[0] for row in rows[: len(used)] if row.part in ("compact", "decoding")]
    assert len([x for x, y in zip(places, [None, *places], strict=False) if x != y]) == len(set(places))
    for name in ("attention, T 65536, D 128, live 1, adasplash 2", "floor, recall, ridge 0.01", "training step, GDN"):
        assert name in used


def test_only_rows_that_a_criterion_uses_change_it(module: Any, stored_for: Any) -> None:
    """Of each kind one row is left out."""
    criteria, stored = module("gpu_criteria"), stored_for(1.25)
    whole, kinds = criteria.criteria(stored), set()
    for name, row in stored["rows"].items():
        kind = row["part"], row.get("contestant", name), name in criteria.used()
        if row["part"] != "correctness" and kind not in kinds:
            kinds.add(kind)
            less = {**stored, "rows": {key: value for key, value in stored["rows"].items() if key != name}}
            assert (criteria.criteria(less) != whole) == (name in criteria.used()), name


@pytest.fixture
def stored_for(module: Any, bench: Any) -> Callable[[float], dict[str, Any]]:
    """All full-size rows as if measured, regard's times `faster` times shorter than all others' but for what is said
    in `fake`; the order of the numbers decides every criterion."""
    full = [row for row in module("gpu").rows_of(bench(dry=False), PARTS, "") if row.part != "tools"]

    def stored(faster: float) -> dict[str, Any]:
        rows = {x.name: {"part": x.part, "status": "measured", **fake(x.name, x.part, faster)} for x in full}
        return {"rows": rows, "ceilings": {"tflops": 800.0, "gbps": 4000.0}, "runs": []}

    return stored


def fake(name: str, part: str, faster: float) -> dict[str, Any]:
    ms = {"regard relumax": 1 / 1.4, "regard local-linear": 1.9}.get(name.split(", ")[-1], 1.0)
    ms *= 1 / faster if "regard" in name else 1.0
    if part == "correctness":
        return {"errors": {"out": 1e-3}, "right": True}
    if part == "models":
        size = {"batch": 1, "tokens": 8}
        slow = 1.3 if "FwPKM" in name else 1.0
        hybrid = {"model": name.removeprefix("training step, "), "delta_rule": "fla"}
        own = hybrid if "GDN" in name else {"preset": name}
        return {"ms": slow, "tokens_per_second": 1.0, "mib": 1.0, "config": size, **own}
    if part == "memory":
        kind = {"eager_ms": 1.0} if "forward" in name else {}
        config = {"tokens": 1, "chunk": 1, "sub_keys": 1, "width": 1}
        return {"impl": name.split("=")[1], "ms": 0.45, "mib": 1.0, "config": config, **kind}
    words = name.split(", ")
    config: dict[str, Any] = {}
    for word in words:
        kind, _, number = word.rpartition(" ")
        if kind in ("T", "D", "live", "B", "ridge"):
            config[{"T": "length", "D": "dim", "live": "share", "B": "batch"}.get(kind, kind)] = float(number)
        elif word.endswith(" keys") and word[0].isdigit():
            config["length"] = int(word.split()[0])
    if part == "decoding":
        return {"config": config, "contestant": words[-1], "ms": ms, "gbps": 1.0}
    if words[0] == "floor":
        return {"config": {"data": words[1], **config}, "error": 2e-3, "floor": 1.8e-3, "bar": 1.5, "right": True}
    if words[0] == "row sums":
        return {"contestant": words[1], "config": {"length": 8192}, "from_one": {"normal": 1e-7, "flat": 2e-6}}
    if words[-1] == "steps":
        return {"config": config, "steps": {"local-linear": 9.0}}
    contestant = name.split(", ", 4)[4] if part == "compact" else name.split(", ", 3)[3]
    numbers = {"mib": 1.0, "of_ceiling": 0.5, "dense_tflops": 1.0, "tflops": 1.0}
    both = {"forward": {"ms": ms, **numbers}, "both": {"ms": 3 * ms, **numbers}}
    return {"config": config, "contestant": contestant, "live": {"biweight": 0.4, "relumax": 0.4}, **both}


def test_criteria_are_met_missed_or_not_measured(module: Any, stored_for: Any) -> None:
    judge = module("gpu_criteria").criteria
    assert {c.verdict for c in judge({})} == {"not measured"}
    met = judge(stored_for(1.25))
    assert {c.verdict for c in met} == {"met"}, [c for c in met if c.verdict != "met"]
    for words, value in {
        "T 8192: time over AdaSplash-2's": 1 / 1.25,
        "entmax-1.5 over ReLUmax": 1.4,
        "ReLUmax, forward + backward, 70 %": 1 / 1.25 / 1.4,
        "backward over forward": 2.0,
        "one decoded token": 1.9,
        "what bfloat16 allows": 2 / 1.8 / 1.5,
        "a training step": 1.3,
    }.items():
        assert next(c.found for c in met if words in c.what) == pytest.approx(value), words
    missed = [c.what for c in judge(stored_for(0.6)) if c.verdict == "missed"]
    assert sum("AdaSplash" in what for what in missed) == 4
    assert sum("flash" in what for what in missed) == 3


def test_a_criterion_tells_what_was_left_out_and_counts_what_failed(module: Any, stored_for: Any) -> None:
    stored = stored_for(1.25)
    for name, row in stored["rows"].items():
        if "T 8192" in name and "adasplash 2" in name and "D 128" in name:
            row["status"] = "no time"
    verdicts = {c.what: c.verdict for c in module("gpu_criteria").criteria(stored)}
    words = verdicts["entmax-1.5, causal, forward + backward, T 8192: time over AdaSplash-2's"]
    assert words == "met (3 of 6 configurations measured)"
    stored["rows"]["correctness, biweight, D 64, bfloat16"] |= {"status": "failed", "error": "no"}
    stored["rows"]["correctness, relumax, D 64, bfloat16"]["right"] = False
    first = module("gpu_criteria").criteria(stored)[0]
    assert (first.found, first.met) == (2.0, False)
    stored["rows"]["training step, GDN"]["delta_rule"] = "torch"  # as slow as the memories would have to be
    assert module("gpu_criteria").criteria(stored)[-1].verdict == "not measured"
    assert "GDN by PyTorch operations" in module("gpu_table").tables(stored)


def test_the_tables_hold_the_numbers_and_what_has_none(module: Any, stored_for: Any) -> None:
    stored = stored_for(1.25)
    run = {"command": "gpu.py", "date": "2026-01-01", "dry": False, "commit": "", "seconds": 9}
    stored["runs"] = [{**run, "versions": {"torch": "x"}, "hardware": {"name": "a GPU", "driver": "1"}}]
    stored["rows"]["attention, T 1024, D 64, live 1, cudnn"] = {"part": "compact", "status": "failed", "error": "E: oh"}
    text = module("gpu_table").tables(stored, ["figure.png"])
    assert "a GPU" in text
    assert "800 TFLOP/s" in text
    assert "(figure.png)" in text
    assert "- failed: E: oh: attention, T 1024, D 64, live 1, cudnn" in text
    assert "| regard biweight | 0.8 / 2.4 (1, 1 MiB) |" in text
    assert "Not measured" not in text


def test_numbers_of_other_kernels_are_marked_and_judged_no_more(module: Any, stored_for: Any) -> None:
    stored = stored_for(4.0)
    run = {"command": "x", "date": "2026-01-01T00", "hardware": {"name": "y"}, "versions": {}, "dry": False}
    stored["runs"] = [{**run, "commit": "", "kernels": name} for name in "ab"]
    for name, row in stored["rows"].items():
        row["run"] = 0 if name in ("memory, forward, impl=triton", "attention, T 8192, D 64, live 0.4, flash") else 1
    found = {c.what: c.verdict for c in module("gpu_criteria").criteria(stored)}
    missing = [what for what, verdict in found.items() if verdict == "not measured"]
    assert missing == [what for what in found if what.startswith("memory")]
    lines = module("gpu_table").tables(stored).splitlines()
    assert [line.split(" | ")[0] for line in lines if "†" in line and "|" in line] == ["| forward, impl=triton †"]


def test_runs_of_an_hour_on_one_card_are_a_session(module: Any, bench: Any) -> None:
    """Ratios take rows of both, and `--again` keeps what the first measured with the same kernels."""
    criteria, settled = module("gpu_criteria"), module("gpu").settled
    runs = [
        {"date": f"2026-01-01T{time}:00+00:00", "kernels": "a", "hardware": {"card": card}}
        for time, card in (("10:00", "x"), ("10:50", "x"), ("11:10", "x"), ("11:20", "y"), ("11:30", None))
    ]
    assert [criteria.session(runs, at) for at in range(5)] == [0, 0, 1, 3, 4]
    again = argparse.Namespace(again=".", keep_errors=False)
    (row,) = [r for r in module("gpu_memory").rows(bench(dry=False)) if r.name == "memory, forward, impl=triton"]
    measured = {"rows": {row.name: {"part": "memory", "status": "measured", "run": 0, "ms": 1.0}}}
    assert settled(again, {**measured, "runs": runs[:2]}, row)
    assert not settled(again, {**measured, "runs": runs[:3]}, row)
    assert not settled(again, {**measured, "runs": [runs[0], {**runs[1], "kernels": "b"}]}, row)
    assert settled(argparse.Namespace(again="", keep_errors=False), {**measured, "runs": runs[:3]}, row)
    names = [f"decoding, 16384 keys, B 1, D 64, regard {name}" for name in ("local-linear", "softmax")]
    for second, verdict in ((1, "met (1 of 6 configurations measured)"), (2, "not measured")):
        rows = {n: {"part": "decoding", "status": "measured", "run": r, "ms": 1.0, "contestant": "regard"}
                for n, r in zip(names, (0, second), strict=True)}  # fmt: skip
        found = {c.what: c.verdict for c in criteria.criteria({"rows": rows, "runs": runs[: second + 1]})}
        what = "local linear attention, one decoded token, kernels alone: time over softmax attention's"
        assert found[what] == verdict


def test_rows_of_an_earlier_run_are_not_lost(tmp_path: Path, module: Any) -> None:
    out = tmp_path / "gpu.json"
    names = ["training step, elu", "training step, relu"]
    rows = {name: {"part": "models", "status": "measured", "run": 0} for name in names}
    text = json.dumps({"runs": [{"dry": False, "kernels": "old"}], "rows": {names[0]: rows[names[0]]}})
    out.write_text(text, encoding="utf-8")
    said = run("--part", "models", "--match", "elu", "--out", out, code=1)
    assert "holds rows of an earlier run, which would be lost: add --resume, or --out FILE." in said
    assert out.read_text(encoding="utf-8") == text
    said = run("--part", "models", "--match", "step, ", "--out", out, "--resume", "--list")
    assert f"{names[0]}: measured with other kernels" in said
    assert f"{names[1]}: not measured" in said
    assert f"of {said.count('training step')} rows are open: " in said
    assert "1 measured with other kernels" in said
    now = module("gpu_measure").kernels(ROOT)
    kept = {"runs": [{"dry": False, "kernels": now}], "rows": rows}
    assert [module("gpu_criteria").open_row(kept, name, now) for name in (*names, "x")] == ["", "", "not measured"]
    assert not module("gpu").holds_rows(tmp_path / "none.json")
    out.write_text(json.dumps({"runs": [{"dry": True}], "rows": rows}), encoding="utf-8")
    assert not module("gpu").holds_rows(out)


def test_kernels_are_known_by_their_sources(module: Any, tmp_path: Path) -> None:
    kernels = module("gpu_measure").kernels
    folder = tmp_path / "src" / "regard" / "triton" / "compact"
    folder.mkdir(parents=True)
    names = []
    for name, text in (("a.py", "x"), ("a.py", "y"), ("b.py", "y"), ("notes.md", "z")):
        (folder / name).write_text(text, encoding="utf-8")
        names.append(kernels(tmp_path))
    assert len(set(names)) == 3
    assert names[2] == names[3]


def test_the_roofline_holds_what_has_a_rate(module: Any) -> None:
    table = module("gpu_table")
    config = {"length": 1024, "dim": 64, "batch": 2, "heads": 4}
    passes = {"forward": {"ms": 1.0, "dense_tflops": 0.5}, "both": {"ms": 2.0}}
    one = {"config": {**config, "kv_heads": 2, "heads": 8}, "gbps": 3000.0, "contestant": "regard softmax"}
    rows = {
        "a": {"part": "compact", "status": "measured", "config": config, "contestant": "regard biweight", **passes},
        "b": {"part": "compact", "status": "measured", "config": config, "contestant": "flash", **passes},
        "c": {"part": "decoding", "status": "measured", **one},
    }
    found = list(table.intensities({"rows": rows, "ceilings": {"tflops": 800.0, "gbps": 4000.0}}))
    assert found[0] == ("regard biweight", pytest.approx(0.5e9 / (4 * 2 * 2 * 4 * 1024 * 64)), 0.5)
    assert found[1:] == [("regard softmax, one query", 4.0, 12.0)]


@pytest.mark.slow
def test_training_at_toy_size(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    out, names = tmp_path / "train.json", ["biweight", "softmax, window of 256, FwPKM"]
    python(ROOT / "benchmarks" / "gpu_train.py", "--dry", "--out", out, "--write", "--model", *names)
    found = json.loads(out.read_text(encoding="utf-8"))
    assert list(found) == names
    assert all(math.isfinite(row["held_out"]) and row["curve"] for row in found.values())
    assert out.with_suffix(".md").read_text(encoding="utf-8").count("| biweight |") == 1


# How it runs -------------------------------------------------------------------------------------------------------


FAKE = """
import os, time
from pathlib import Path
from gpu_measure import Row
from gpu_peers import Missing

def run(name, result):
    with open(os.environ["REGARD_RAN"], "a") as file:
        print(name, os.getpid(), file=file)
    if isinstance(result, Exception):
        raise result
    return result() if callable(result) else result

def rows(bench):
    found = {
        "a, x": {"ms": 1.0}, "b, x": ValueError("out of range"), "c, x": Missing("not installed: pip install c"),
        "d, hangs": lambda: time.sleep(300), "e, dies": lambda: os._exit(3), "f, dies": {"ms": 9.0},
        "g, x": {"ms": 2.0}, "h, long": {"ms": 3.0},
    }
    for at, (name, result) in enumerate(found.items()):
        yield Row(name, "fake", at, lambda n=name, r=result: run(n, r), 1000 if "long" in name else 0.1)
"""


HOW = {"minutes": 5.0, "row_s": 2.0, "keep_errors": False, "cold": True, "dry": False, "again": ""}


@pytest.fixture
def worker(tmp_path: Path, module: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A process that runs the rows of `FAKE`."""
    (tmp_path / "gpu_fake.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("REGARD_RAN", str(tmp_path / "ran"))
    made = module("gpu_worker").Worker(dry=True, tune_peers=False, parts=("fake",), match="")
    yield made
    made.stop()


def test_rows_run_in_a_process_that_can_be_killed(tmp_path: Path, module: Any, bench: Any, worker: Any) -> None:
    script, out = module("gpu"), tmp_path / "gpu.json"
    rows, stored = script.rows_of(bench(), ("fake",), ""), {}

    def run(some: list[Any], **how: Any) -> None:
        script.run(argparse.Namespace(**HOW | how), worker, some, stored, out)

    run(rows)
    found = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert {name: entry["status"] for name, entry in found.items()} == {
        "a, x": "measured", "b, x": "failed", "c, x": "not available", "d, hangs": "hung", "e, dies": "failed",
        "f, dies": "failed", "g, x": "measured", "h, long": "no time",
    }  # fmt: skip
    assert found["b, x"]["error"] == "ValueError: out of range"
    assert found["c, x"]["reason"] == "not installed: pip install c"
    assert found["d, hangs"]["error"] == "took more than 2 s"
    assert found["e, dies"]["error"] == "the process ended with exit code 3"
    assert found["f, dies"]["error"] == "left out: 'e, dies' hung or lost the device"
    ran = [line.rsplit(" ", 1) for line in (tmp_path / "ran").read_text().splitlines()]
    assert [name for name, _ in ran] == ["a, x", "b, x", "c, x", "d, hangs", "e, dies", "g, x"]
    assert len({process for _, process in ran}) == 3
    stored["rows"]["g, x"]["status"] = "running"  # as if the whole run had been killed with it
    run(rows, keep_errors=True, minutes=50.0)
    worker.stop()
    assert {name: stored["rows"][name]["status"] for name in ("d, hangs", "g, x", "h, long")} == {
        "d, hangs": "hung", "g, x": "hung", "h, long": "measured",
    }  # fmt: skip
    assert stored["rows"]["h, long"]["run"] == 1
    assert (tmp_path / "ran").read_text().splitlines()[len(ran) :][0].startswith("h, long ")
    run(rows[:1] + rows[4:5], again="^a|dies")
    assert {name: stored["rows"][name]["run"] for name in ("a, x", "e, dies", "h, long")} == {
        "a, x": 2, "e, dies": 2, "h, long": 1,
    }  # fmt: skip


def test_a_row_that_the_end_of_the_time_stops_keeps_its_number(
    tmp_path: Path, module: Any, bench: Any, worker: Any
) -> None:
    script = module("gpu")
    rows = [row for row in script.rows_of(bench(), ("fake",), "") if row.name == "d, hangs"]
    before = {"part": "fake", "status": "measured", "ms": 1.0, "run": 0}
    stored = {"runs": [worker.ask("provenance")], "rows": {"d, hangs": before}}  # its start is not part of the time
    how = argparse.Namespace(**HOW | {"minutes": 0.05, "row_s": 60.0, "again": "."})
    script.run(how, worker, rows, stored, tmp_path / "gpu.json")
    assert stored["rows"]["d, hangs"] == before
    assert (tmp_path / "ran").read_text().startswith("d, hangs ")


def test_compiled_kernels_travel_as_a_tarball(tmp_path: Path, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    script, here, there = module("gpu"), tmp_path / "here", tmp_path / "there"
    (here / "abc").mkdir(parents=True)
    (here / "abc" / "kernel.cubin").write_bytes(b"code")
    cache = tmp_path / "out" / "kernels.tar.gz"
    script.unpack(None)
    script.unpack(cache)  # not there yet
    monkeypatch.setenv("TRITON_CACHE_DIR", str(here))
    script.pack(cache)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(there))
    script.unpack(cache)
    assert (there / "abc" / "kernel.cubin").read_bytes() == b"code"


def test_the_results_page_shows_what_is_stored(module: Any) -> None:
    table = module("gpu_table")
    stored = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    drawn = [f"results/gpu-{name}.png" for name in ("attention", "roofline")]
    drawn = [name for name in drawn if (ROOT / "docs" / name).exists()]
    shown = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    assert shown == table.tables(stored, drawn), "run `python benchmarks/gpu.py --part --write`"
    if not stored:
        assert shown.count("not measured") == len(table.criteria({})) == 16
        assert "**Not measured**" in shown


# Peers --------------------------------------------------------------------------------------------------------------


def test_peers_that_are_not_there_are_missing_and_no_error(module: Any) -> None:
    peers = module("gpu_peers")
    with pytest.raises(peers.Missing, match="not installed: pip install nothing"):
        peers.require("no_such_module_at_all", "pip install nothing")
    x = torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    with pytest.raises(peers.Missing, match="cuDNN"):
        peers.torch_attention(x, x, x, backend="cudnn")
    dense = (x @ x.mT / 2).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf).softmax(-1) @ x
    torch.testing.assert_close(peers.torch_attention(x, x, x, backend="flash"), dense)
