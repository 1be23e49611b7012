"""Every kernel, as public functions launch it, compiled for sm_80 and sm_90 without a device: what may be spilt, and
the ceilings of resources/VERSION.json, which only fall.

REGARD_TRITON=FOLDER compiles with the Triton in a folder (`pip install --target FOLDER --no-deps triton==3.6.0`). Every
version has a file of its own, since another compiler spills elsewhere.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import python

triton = pytest.importorskip("triton")
from regard.triton.compact import rules as compact  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_resources.py"
OTHER = os.environ.get("REGARD_TRITON", "")


def version() -> str:
    """The version of Triton that compiles, without its last part."""
    found = next(Path(OTHER).glob("triton-*.dist-info")).name.split("-")[1] if OTHER else triton.__version__
    return ".".join(found.removesuffix(".dist").split(".")[:2])


STORED = ROOT / "tests" / "triton" / "resources" / f"{version()}.json"
NEWEST = "3.9"
FAMILIES = ("compact", "local linear", "decoding", "memory")
MOST_SHARED = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes of a program, by NVIDIA's tables of compute capabilities."""
EXCEPTED = 8
"""Bytes at most that kernels in float32 spill where nothing should be spilt."""
RENEW = "renew it: python benchmarks/gpu_resources.py --write"


@pytest.fixture(scope="module")
def script() -> Any:
    import gpu_resources

    return gpu_resources


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    return json.loads(STORED.read_text(encoding="utf-8"))


def run(folder: Path, *arguments: object) -> dict[str, Any]:
    """What the script reports, from a process in which Triton compiles."""
    out = folder / "rows.json"
    path = os.pathsep.join(filter(None, (OTHER, os.environ.get("PYTHONPATH"))))
    python(SCRIPT, "--out", out, *arguments, PYTHONPATH=path, TRITON_INTERPRET="0", OMP_NUM_THREADS="1")
    return json.loads(out.read_text(encoding="utf-8"))


def place(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("case", "pass", "kernel", "arch"))


def words(row: dict[str, Any]) -> str:
    return f"{row['case']}, {row['pass']}, {row['kernel']}, sm_{row['arch']}"


def allowed(case: Any, row: dict[str, Any]) -> float:
    """Bytes that a kernel may spill, whatever the file says.

    Tiles were chosen for sm_90, by times on a device where there was one. What other devices, kernels of more than 64
    features and older versions of Triton spill is held by the file alone.
    """
    loose = row["arch"] == 80 or case.dim > 64
    if loose or not case.strict(row["pass"]) or version() != NEWEST:
        return math.inf
    return EXCEPTED if "float32" in case.name else 0


def check(found: dict[str, Any], stored: dict[str, Any], cases: dict[str, Any], archs: tuple[int, ...]) -> None:
    ceilings = {place(row): row for row in stored["kernels"]}
    wanted = {(case, arch) for case in cases for arch in archs}
    assert {(row["case"], row["arch"]) for row in found["kernels"]} == wanted
    for row in found["kernels"]:
        assert 0 < row["registers"] <= 255, words(row)
        assert 0 < row["warps"] <= 32, words(row)
        assert row["shared"] <= MOST_SHARED[row["arch"]], words(row)
        assert row["local"] <= allowed(cases[row["case"]], row), f"{words(row)} spills {row['local']} bytes"
        if found["versions"]["triton"] == stored["versions"]["triton"]:
            assert place(row) in ceilings, f"{words(row)} is not in {STORED.name}; {RENEW}"
            assert row["local"] <= ceilings[place(row)]["local"], words(row)
    if found["versions"]["triton"] == stored["versions"]["triton"]:
        known = {place(row) for row in stored["kernels"] if row["case"] in cases and row["arch"] in archs}
        gone = known - {place(row) for row in found["kernels"]}
        assert not gone, f"{STORED.name} names kernels that are not launched any more; {RENEW}"


def test_the_core_of_the_kernels_compiles_within_its_ceilings(
    tmp_path: Path, script: Any, stored: dict[str, Any]
) -> None:
    """For sm_90 alone: the slow tests compile everything for both."""
    own = {case.name: case for case in script.cases(core=True)}
    check(run(tmp_path, "--core", "--arch", 90), stored, own, (90,))


def names() -> list[str]:
    """Of all cases, without what the script needs to know them better."""
    stored = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {"kernels": []}
    return list(dict.fromkeys(row["case"] for row in stored["kernels"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_every_kernel_compiles_within_its_ceilings(
    tmp_path: Path, script: Any, stored: dict[str, Any], name: str
) -> None:
    """A process for each call: those of the widest kernels take a minute."""
    (case,) = (case for case in script.cases() if case.name == name)
    check(run(tmp_path, "--case", name), stored, {name: case}, tuple(MOST_SHARED))


def test_the_file_knows_every_case_and_gives_a_reason_for_what_is_spilt(script: Any, stored: dict[str, Any]) -> None:
    cases = {case.name: case for case in script.cases()}
    assert set(script.FAMILIES) == set(FAMILIES)
    assert {(row["case"], row["arch"]) for row in stored["kernels"]} == {(c, a) for c in cases for a in MOST_SHARED}
    assert len({place(row) for row in stored["kernels"]}) == len(stored["kernels"])
    for row in stored["kernels"]:
        assert row["local"] <= allowed(cases[row["case"]], row), words(row)
        if row["local"]:
            assert len(row["reason"]) > 20, words(row)
    gradients = {
        name
        for name, case in cases.items()
        if case.family in ("compact", "local linear") and case.backward and "without" not in name
    }
    assert gradients <= {row["case"] for row in stored["kernels"] if row["pass"] == "backward"}


def test_the_table_shows_the_file(script: Any, stored: dict[str, Any]) -> None:
    page = script.TABLE.with_name(f"gpu-resources-{version()}.md").read_text(encoding="utf-8")
    assert page == script.table(stored), RENEW
    row = stored["kernels"][0]
    cell = f"{row['registers']}, {row['local']}, {row['shared'] / 1024:.3g} KiB"
    line = next(x for x in page.splitlines() if x.startswith(f"| {row['case']} | {row['pass']} | `{row['kernel']}` |"))
    assert cell in line


def test_programs_of_a_multiprocessor(script: Any) -> None:
    """By CUDA's occupancy calculator: registers, warps, blocks and shared memory set the limit in turn."""
    limits = {(168, 4, 0): "3", (255, 8, 0): "1", (16, 8, 0): "8", (16, 1, 0): "32", (32, 4, 66 * 1024): "3"}
    for (registers, warps, shared), wanted in limits.items():
        row = {"registers": registers, "warps": warps, "shared": shared, "arch": 90}
        assert script.programs(row) == wanted
    assert script.programs({"registers": 32, "warps": 4, "shared": 66 * 1024, "arch": 80}) == "2"
    assert script.programs(None) == "–"


def test_spills_are_forbidden_where_the_cases_are_narrow(script: Any) -> None:
    by_dim = {case.dim: case for case in script.cases(["compact"])}
    assert {dim: (by_dim[dim].strict("forward"), by_dim[dim].strict("backward")) for dim in (64, 128, 256)} == {
        64: (True, True),
        128: (True, False),
        256: (False, False),
    }
    assert all(case.strict("backward") for case in script.cases(["memory"]))


def a_row(local: int, **more: Any) -> dict[str, Any]:
    row = {"family": "compact", "case": "biweight, D 256, bfloat16", "pass": "backward", "kernel": "k", "arch": 90}
    return {**row, "registers": 255, "local": local, "shared": 1024, "warps": 4, **more}


def test_a_ceiling_that_would_rise_is_told_and_a_reason_stays_with_its_kernel(script: Any) -> None:
    stored = {"versions": {}, "kernels": [a_row(40, reason="because")]}
    assert script.raised([a_row(40)], stored) == []
    assert script.raised([a_row(48)], stored) == ["biweight, D 256, bfloat16, backward, k, sm_90: 48 bytes"]
    assert script.raised([a_row(8, kernel="new")], stored) != []
    names = {"biweight, D 256, bfloat16"}
    assert script.merged([a_row(16)], stored, names, "")["kernels"] == [a_row(16, reason="because")]
    assert script.merged([a_row(0)], stored, names, "")["kernels"] == [a_row(0)]
    assert script.merged([a_row(48)], stored, names, "wider")["kernels"] == [a_row(48, reason="wider")]
    assert script.merged([], stored, set(), "")["kernels"] == stored["kernels"]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dim", [16, 64, 128, 256])
@pytest.mark.parametrize("width", [16, 64, 128, 256])
def test_marks_of_blocks_fit_the_tiles_of_all_kernels_of_compact_attention(size: int, dim: int, width: int) -> None:
    """A search goes by the width of the keys, what reads values by the wider of both."""
    dtype, widest = {2: torch.bfloat16, 4: torch.float32}[size], max(dim, width)
    stream = compact.STREAM[size].pick(widest, dtype)
    marked = min(compact.MASK_TILE, stream.rows)
    for tiles in (
        compact.SEARCH[size].pick(dim, dtype),
        *(table[size].pick(widest, dtype) for table in (compact.WEIGH, compact.WEIGH_MEAN)),
    ):
        assert tiles.keys == stream.keys
        assert tiles.rows % marked == 0
