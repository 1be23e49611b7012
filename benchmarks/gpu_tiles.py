"""Time every kernel with other tiles: `python benchmarks/gpu_tiles.py --minutes 4 --out tiles.json`.

A target is a table of tiles (`TileTable`) and a call that uses it. Of every target the launch is timed alone, with the
default tiles and with those of a grid (`candidates`); tiles that do not fit or spill more than SPILL bytes are not
timed. Many processes compile the targets in their order, while those that are compiled are timed. The JSON is written
after every target: its tables, tiles and milliseconds, registers, spilled bytes.

`--list` prints the targets; `--compile-only` needs no GPU and shows registers and spilled bytes.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

if importlib.util.find_spec("regard") is None:  # a machine with torch and these sources alone
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parent))

LENGTH, SHARE, SPILL = 8192, 0.4, 256
TARGETS = [
    (line.split()[0], int(line.split()[1]), f"{line.split()[2]}_{name}")
    for line in """biweight 64 compact search_2 weigh_mean_2 weigh_2
        biweight 128 compact search_2 weigh_mean_2 weigh_2
        relumax 64 compact weigh_2 dkv
        biweight 64 compact dkv dq
        local-linear 64 local_linear solve
        local-linear 128 local_linear solve
        parallax 128 local_linear output moments
        local-linear 128 local_linear backward_keys
        local-linear 64 local_linear backward_keys
        relumax 128 compact weigh_2 dkv
        biweight 128 compact dkv dq
        relumax 64 compact dq
        local-linear 64 local_linear moments output backward_rows backward_right
        local-linear 128 local_linear moments output backward_rows backward_right
        parallax 64 local_linear output backward_keys
        decode-local-linear 128 local_linear decode_moments decode
        decode-biweight 128 compact decode
        decode-softmax 128 compact decode
        softmax 64 compact stream_2
        softmax 128 compact stream_2""".splitlines()
    for name in line.split()[3:]
]
"""(model, features, table), the most valuable first."""


def candidates(table: Any, shipped: Any) -> list[Any]:
    """The shipped tiles, the table's own alternatives, and a grid: 64 or 128 rows of the program's own axis on 4 or 8
    warps, other blocks of 32 to 128, 2 and 3 stages; 1 and 4 stages of the shipped tiles."""
    from regard.triton.runtime.tiles import Tiles

    if "decode" in table.name:
        grid = [(keys, warps, stages) for keys in (32, 64, 128, 16) for warps in (4, 8) for stages in (2, 3, 4)]
        return list(dict.fromkeys([shipped, *table.others, *(Tiles(shipped.rows, *rest) for rest in grid)]))
    by_keys = table.name in ("compact_dkv", "local_linear_backward_keys")
    streamed = dict.fromkeys((shipped.rows if by_keys else shipped.keys, 64, 32, 128))
    grid = [(own, other, warps, stages) for own in (64, 128) for warps in (4, 8) for other in streamed
            for stages in (2, 3) if own * other <= 64 * 32 * warps and (own, other) != (128, 128)]  # fmt: skip
    tiles = [Tiles(other, own, *rest) if by_keys else Tiles(own, other, *rest) for own, other, *rest in grid]
    deep = [Tiles(shipped.rows, shipped.keys, shipped.warps, stages) for stages in (1, 2, 3, 4)]
    return list(dict.fromkeys([shipped, *deep, *table.others, *tiles]))


@lru_cache(maxsize=2)
def call_of(model: str, dim: int, bench: Any) -> dict[str, Callable[[], Any]]:
    """Both passes of a call; while it only compiles, of a short one."""
    import gpu_compact
    import gpu_local_linear
    from gpu_measure import passes

    if model.startswith("decode-"):
        import gpu_decoding

        given = gpu_decoding.inputs(bench, 2048 if bench.compiling else 32768, 8, dim)
        return {"forward": torch.no_grad()(partial(gpu_decoding.decode, model.removeprefix("decode-"), *given))}
    length = LENGTH // 8 if bench.compiling else LENGTH
    if model in ("local-linear", "parallax"):
        q, k, v, g, probe = gpu_local_linear.inputs(bench, length, dim)
        more = (probe,) if model == "parallax" else ()
        return passes(gpu_local_linear.contestant(f"regard {model}"), (q, k, v, *more), g)
    *given, g = gpu_compact.inputs(bench, length, dim, SHARE)
    return passes(gpu_compact.contestant(f"regard {model}", bench), given, g)


def swept(target: tuple[str, int, str], bench: Any, visit: Callable[[Any, Any, Callable[[Any], Any]], None]) -> None:
    """Make the call of a target, and at the first question to its table `visit` (table, shipped tiles, launch)."""
    from regard.triton.runtime.tiles import TileTable

    model, dim, name = target
    asked, trial = [], []
    pick, calls = TileTable.pick, call_of(model, dim, bench)
    alone = name == "compact_stream_2" or (name == "compact_weigh_2" and model != "relumax")
    call = calls["forward" if alone or len(calls) == 1 else "both"]

    def picked(table: Any, width: int, dtype: Any, run: Any = None, flags: Any = ()) -> Any:
        shipped = pick(table, width, dtype)
        if table.name != name:
            return shipped
        if not asked:
            asked.append((table, shipped))
            if run is not None:
                asked.append(None)
                visit(table, shipped, run)
        return trial[-1] if trial else shipped

    def whole(tiles: Any) -> None:
        trial.append(tiles)
        try:
            call()
        finally:
            trial.pop()

    with mock.patch.object(TileTable, "pick", picked):
        call()
        if not asked:
            raise RuntimeError(f"{name} was not asked by {model}")
        if len(asked) == 1:  # the table is not asked with a launch: all kernels of the call are timed
            visit(*asked[0], whole)


# Compiling -----------------------------------------------------------------------------------------------------


def compile_share(targets: list[Any], number: int, arch: int, claims: Path) -> None:
    from gpu_measure import Bench
    from gpu_warm import warming

    def visit(table: Any, shipped: Any, run: Callable[[Any], Any]) -> None:
        for tiles in candidates(table, shipped):
            with contextlib.suppress(Exception):
                run(tiles)

    os.nice(10)
    for at, target in enumerate(targets):
        with contextlib.suppress(Exception), warming(arch, claims):
            swept(target, Bench(False, compiling=True), visit)
        (claims / f"target{at}-{number}").touch()


@contextlib.contextmanager
def compiled(into: list[tuple[str, Any]]) -> Iterator[None]:
    """Within it launches are compiled, not started: put (name, compiled kernel) into a list."""
    from regard.triton.runtime.launch import watched

    def note(kernel: Any, grid: Any, args: Any, options: Any) -> None:
        one = kernel.warmup(*args, grid=grid, **options)
        into.append((one.metadata.name, one))

    with watched(note):
        yield


# Timing --------------------------------------------------------------------------------------------------------


def timed(target: tuple[str, int, str], bench: Any, end: float) -> dict[str, Any]:
    """Milliseconds, registers and spilled bytes of a target for every candidate, until the time is up."""
    from gpu_compiled import SHARED, _usage
    from triton.testing import do_bench

    rows: list[dict[str, Any]] = []
    seen: set[Any] = set()

    def visit(table: Any, shipped: Any, run: Callable[[Any], Any]) -> None:
        for tiles in candidates(table, shipped):
            kernels: list[tuple[str, Any]] = []
            row: dict[str, Any] = {"tiles": astuple(tiles), "shipped": tiles == shipped}
            if time.monotonic() > end:
                return
            try:
                with compiled(kernels):
                    run(tiles)
                own = tuple(kernel.hash for _, kernel in kernels)
                if own in seen:  # a kernel that takes its blocks from elsewhere
                    continue
                seen.add(own)
                used = [_usage(kernel.asm["cubin"]) for _, kernel in kernels]
                shared = max(kernel.metadata.shared for _, kernel in kernels)
                row |= {"kernels": [name for name, _ in kernels], "registers": max(r for r, _ in used)}
                row |= {"spill": max(spill for _, spill in used), "shared": shared}
                if row["spill"] <= SPILL and shared <= SHARED[90] and not bench.compiling:
                    start = partial(run, tiles)
                    start = bench.graphed(start) if run.__name__ == "whole" else start
                    ms = do_bench(start, warmup=5, rep=25, return_mode="median")
                    row["ms"] = round(ms, 4)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {str(error).strip()[:200]}"
            rows.append(row)

    swept(target, bench, visit)
    model, dim, table = target
    return {"model": model, "dim": dim, "table": table, "length": LENGTH, "rows": rows}


def told(found: dict[str, Any], since: float) -> str:
    """The shipped tiles and the five fastest."""
    name = f"{since:6.1f} s  {found['table']}, {found['model']}, D {found['dim']}"
    if "error" in found:
        return f"{name}: {found['error']}"

    def cell(row: dict[str, Any]) -> str:
        said = row.get("error") or f"{row['registers']} registers, {row['spill']} spilled, {row['shared']} shared"
        return f"{row.get('ms', '–')} ms {row['tiles']} ({said})"

    best = sorted((row for row in found["rows"] if "ms" in row), key=lambda row: row["ms"])[:5]
    first = [f"shipped {cell(row)}" for row in found["rows"] if row["shipped"]]
    return "\n".join([name, *(f"    {text}" for text in [*first, *map(cell, best or found["rows"])])])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4, help="minutes that all may take (default 4)")
    parser.add_argument("--match", default="", help="only targets that hold this: 'compact_dkv, biweight, D 64'")
    parser.add_argument("--out", type=Path, default=Path("tiles.json"), help="the JSON")
    parser.add_argument("--list", action="store_true", help="print the targets, and stop")
    parser.add_argument("--compile-only", action="store_true", help="no GPU is needed; nothing is timed")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as gpu.py, whose compiled kernels it then finds
    os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")
    targets = [one for one in TARGETS if args.match in f"{one[2]}, {one[0]}, D {one[1]}"]
    if args.list:
        print("\n".join(f"{table}, {model}, D {dim}" for model, dim, table in targets))
        return 0
    if args.compile:
        number, arch, claims = args.compile.split("/", 2)
        compile_share(targets, int(number), int(arch), Path(claims))
        return 0
    import gpu_warm
    from gpu_compiled import pretended, zeros
    from gpu_measure import Bench, provenance

    from regard.triton.runtime.launch import watched

    begun, found = time.monotonic(), []
    end, dry = begun + 60 * args.minutes, args.compile_only
    run = provenance(Bench(dry))
    with tempfile.TemporaryDirectory() as claims, contextlib.ExitStack() as stack:
        warming = gpu_warm.Warming("gpu_tiles.py", ["--match", args.match], 90, Path(claims))
        stack.callback(warming.stop)
        for manager in (pretended(90), zeros(), watched(lambda *_: None)) if dry else ():
            stack.enter_context(manager)
        for at, target in enumerate(targets):
            warming.wait(f"target{at}", max(0.0, end - time.monotonic()))
            if time.monotonic() > end:
                break
            try:
                found.append(timed(target, Bench(False, compiling=dry), end))
            except Exception as error:
                found.append(dict(zip(("model", "dim", "table"), target, strict=True), error=repr(error)[:300]))
            args.out.write_text(json.dumps({"run": run, "tables": found}, indent=1), encoding="utf-8")
            print(told(found[-1], time.monotonic() - begun), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
