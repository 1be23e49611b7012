"""What benchmarks/gpu.py and gpu_tiles.py compile ahead, the order of rows meanwhile, and the tiles that are tried."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def test_a_row_whose_kernels_are_still_compiled_comes_later(module: Any) -> None:
    ready, seen = {"a": True, "b": False, "c": True, "d": True, "e": False}, []
    for row in module("gpu").in_turn(list(ready), ready.__getitem__):
        seen.append(row)
        if row == "c":
            ready["b"] = True
    assert seen == ["a", "c", "b", "d", "e"]


def test_a_row_that_is_slow_since_it_tunes_costs_no_other(module: Any) -> None:
    script, row = module("gpu"), module("gpu_measure").Row

    class Slow:
        def ask(self, what: str, limit: float) -> None:
            raise TimeoutError("took more than 1 s")

        def stop(self) -> None:
            pass

    entries = [script.measured(row("a", "b", 0, dict, tunes=tunes), Slow(), 1.0) for tunes in (0, 2)]
    assert [(entry["status"], entry.get("lost")) for entry in entries] == [("hung", True), ("no time", None)]


def test_what_loses_the_device_is_not_tried_again(module: Any) -> None:
    """Of the rows of that contestant, or of that spec where it was correctness, none; all others are."""
    script, row = module("gpu"), module("gpu_measure").Row
    names = [f"attention, T {n}, D 64, live 1, {who}" for n in (1024, 2048) for who in ("flash", "regard biweight")]
    rows = [row(name, "compact", 0, dict) for name in names]
    rows += [row(f"correctness, {s}, D {d}, bfloat16", "correctness", 0, dict) for s in ("a", "b") for d in (64, 128)]
    done: dict[str, Any] = {names[3]: {"status": "no time"}, names[1]: {"status": "failed", "error": "E"}}
    script.leave_out(rows[1], rows, done)
    script.leave_out(rows[4], rows, done)
    assert {name for name, entry in done.items() if "left out" in entry.get("error", "")} == {names[3], rows[5].name}
    assert names[0] not in done
    assert done[names[1]]["error"] == "E"


def test_the_kernels_of_every_kind_of_row_are_compiled_ahead_once(module: Any, bench: Any) -> None:
    warm = module("gpu_warm")
    rows = module("gpu").rows_of(bench(dry=False), module("gpu").PARTS, "")
    kinds = [row.name for row in warm.kinds(rows)]
    ours = "attention, T {}, D 64, live {}, regard biweight"
    assert ours.format(8192, 0.4) in kinds
    assert ours.format(65536, 0.4) not in kinds
    assert ours.format(8192, 0.3) not in kinds
    assert not [name for name in kinds if "adasplash" in name or "flash" in name or "impl=sparse" in name]
    assert {"memory, forward, impl=triton", "correctness, biweight, D 64, float32"} <= set(kinds)
    first, training, late = ({row.name for row in found} for found in warm.peers(rows))
    splash = "attention, T {}, D {}, live 0.4, adasplash 2"
    assert first == {splash.format(8192, 64), splash.format(8192, 128)}
    assert training == {"training step, GDN", "training step, GDN + FwPKM"}
    assert {splash.format(16384, 64), f"{splash.format(8192, 64)}, 2 steps", "row sums, adasplash 2"} <= late
    assert not [name for name in late if "live 0.3" in name or "adasplash 2" not in name]


def _add(x, n, SIZE: "tl.constexpr"):  # noqa: F821 - a kernel that nothing compiles
    pass


def test_processes_share_the_kernels_and_the_configurations_that_are_tuned(module: Any, tmp_path: Path) -> None:
    """Every kernel, of a tuned one every configuration, is claimed once; one that does not compile keeps no other."""
    triton = pytest.importorskip("triton")
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    add = triton.jit(_add)
    if not isinstance(add, JITFunction):
        pytest.skip("the interpreter compiles nothing")
    warm, compiled = module("gpu_warm"), []

    def real(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        assert warmup
        compiled.append((kernel.__name__, options.get("SIZE"), options.get("num_warps")))
        if options.get("SIZE") == 32:
            raise ValueError

    configs = [triton.Config({"SIZE": size}, num_warps=warps) for size in (32, 64) for warps in (4, 8)]
    tuned = Autotuner(add, add.arg_names, configs, ["n"], None, None)
    x = torch.zeros(64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", real)
        for n in (16, 32, 48, 7, 1):  # only multiples of 16, other numbers and 1 differ
            with warm.warming(90, tmp_path):
                tuned[(1,)](x, n)
    assert len(compiled) == len(set(map(str, compiled))) * 3 == 12


def test_configurations_that_were_chosen_are_taken_over(module: Any, tmp_path: Path, monkeypatch: Any) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton.runtime.autotuner import Autotuner

    peers, tuned = module("gpu_peers"), object.__new__(Autotuner)
    a, b, c = (triton.Config({"SIZE": size}) for size in (16, 32, 64))
    tuned.configs, tuned.cache = [a, b, c], {}
    inside = types.ModuleType("splash.kernels")
    inside.kernel = tuned
    monkeypatch.setitem(sys.modules, "splash.kernels", inside)
    assert not peers.take_best("splash", 64)
    assert tuned.configs == [a, b, c]
    tuned.cache = {(8192, 64, "torch.bfloat16"): b}
    peers.keep_best("splash", 64)
    tuned.cache[16384, 64, "torch.bfloat16"] = c  # the first choice stays
    peers.keep_best("splash", 64)
    assert peers.take_best("splash", 64)
    assert tuned.configs == [b]
    assert not peers.take_best("splash", 128)
    assert tuned.configs == [a, b, c]
    assert not peers.chosen_of("attention, T 16384, D 64, live 0.4, adasplash 2")
    assert peers.chosen_of("local linear, T 8192, D 64, fla mesa")


def test_tiles_that_are_tried(module: Any) -> None:
    """Of every target: the shipped ones first, each once, those of the grid on enough warps."""
    pytest.importorskip("triton")
    for name in ("compact.backward", "compact.rules", "local_linear.backward", "local_linear.forward"):
        module(f"regard.triton.{name}")
    module("regard.triton.decode.local_linear")
    tables, script = module("regard.triton.runtime.tiles").TileTable.tables, module("gpu_tiles")
    for _, dim, name in script.TARGETS:
        shipped = tables[name].pick(dim, torch.bfloat16)
        found = script.candidates(tables[name], shipped)
        assert found[0] == shipped
        assert len(set(found)) == len(found) > 12
        assert all(tiles.rows * tiles.keys <= 64 * 64 * tiles.warps for tiles in found)
    row = {"tiles": [64, 64, 4, 3], "shipped": True, "registers": 9, "spill": 0, "shared": 1, "ms": 2.0}
    faster = {**row, "shipped": False, "ms": 1.5}
    text = script.told({"model": "a", "dim": 64, "table": "b", "rows": [row, faster]}, 3.0)
    assert [line.split()[0] for line in text.splitlines()[1:]] == ["shipped", "1.5", "2.0"]
