"""Measure regard's kernels on a GPU, side by side with alternatives: `python benchmarks/gpu.py --write`.

Rows of eight parts, the most important first, until the time is up:

correctness: outputs and gradients on the device against dense float64 forms (`promises`: on inputs where only a device
can break them);
compact: compact attention, torch's flash and cuDNN attention, both versions of AdaSplash, the plain forms;
local_linear: local linear attention and Parallax, the naive form, flash-linear-attention's Parallax and Mesa;
decoding: one query against a cache;
memory: reading and writing a memory of fast weights;
models: training steps of small language models, one for every preset, and of a hybrid model with memories;
tools: the kernels of a call by their time, and what compute-sanitizer and ncu say of them, where they are installed.

Rows run in a process of their own, which is killed when one takes too long and started again when the device is lost.
The JSON is written before every row, which is then "running", and after it; what it fails with is stored in its place.
`--resume` measures what an earlier run had no time for, and leaves out what hung; without it a file that holds rows is
not overwritten. `--resume --again .` measures all rows anew; the same command goes on if it is repeated within an hour
on the same card. Peers are measured where they are installed: `pip install adasplash flash-linear-attention`.

`--dry` runs every row at toy size on the CPU, in Triton's interpreter: it shows that the script runs, no more.
"""

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Container, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if importlib.util.find_spec("regard") is None:  # a machine with torch and these sources alone
    sys.path.insert(0, str(ROOT / "src"))

sys.path.insert(0, str(Path(__file__).parent))
from gpu_worker import Worker  # noqa: E402

Ready = Callable[[Any], bool]
TUNING = 150
"""Seconds that a row may take in which a peer tunes itself."""
PARTS = ("promises", "compact", "local_linear", "decoding", "memory", "models", "tools")
STORED = ROOT / "benchmarks" / "results" / "gpu.json"
PAGE = ROOT / "docs" / "results.md"
FIGURE = ROOT / "docs" / "results" / "gpu-attention.png"
"""The roofline lies beside it, `gpu-roofline.png`."""


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9, help="minutes that the rows may take (default 9)")
    parser.add_argument(
        "--row-s", type=float, default=120, help="seconds after which a row is killed (default 120; where a peer tunes "
        f"itself {TUNING} at least)",
    )  # fmt: skip
    parser.add_argument("--part", nargs="*", choices=PARTS, default=PARTS, help="parts to run; with none, only --write")
    parser.add_argument("--match", default="", help="only rows whose name holds this")
    parser.add_argument(
        "--list", action="store_true", help="print the rows in their order, and stop; with --resume only those that "
        "were not measured, or with other sources of the kernels",
    )  # fmt: skip
    parser.add_argument("--dry", action="store_true", help="toy sizes in Triton's interpreter, stored elsewhere")
    parser.add_argument("--resume", action="store_true", help="keep what --out holds and measure what is not in it")
    parser.add_argument("--again", default="", help="with --resume: measure again rows whose name matches this")
    parser.add_argument("--keep-errors", action="store_true", help="with --resume: do not repeat rows that failed")
    parser.add_argument("--cold", action="store_true", help="do not compile in several processes first")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    parser.add_argument("--logs", type=Path, help="folder for what the compiling processes print")
    parser.add_argument(
        "--cache", type=Path, help="tarball of compiled kernels: unpacked first, and written at the end"
    )
    parser.add_argument("--tune-peers", action="store_true", help="let AdaSplash tune itself anew for every length")
    parser.add_argument("--out", type=Path, help=f"the JSON (default {STORED})")
    parser.add_argument("--write", action="store_true", help="write the tables of the JSON into --page")
    parser.add_argument("--page", type=Path, default=PAGE, help=f"page with the markers (default {PAGE})")
    parser.add_argument("--figure", type=Path, default=FIGURE, help=f"the figure (default {FIGURE})")
    return parser.parse_args(arguments)


def rows_of(bench: Any, parts: tuple[str, ...], match: str, known: Container[str] = ()) -> list[Any]:
    """The rows of these parts in the order in which they run: correctness; the rows that a criterion looks at, those of
    one configuration together, since a ratio takes both from one run; tools that are not `known` yet; the rest."""
    import gpu_criteria

    found = [row for part in parts for row in importlib.import_module(f"gpu_{part}").rows(bench)]
    names = [row.name for row in found]
    assert len(set(names)) == len(names), "two rows of one name"
    used, places = gpu_criteria.used(), {}
    for at, row in enumerate(found):
        if row.name in used:
            place = row.name.rpartition(", ")[0]
            places[place] = min(places.get(place, (99, at)), (row.priority, places.get(place, (99, at))[1]))

    def order(row: Any) -> tuple[Any, ...]:
        if row.name in used:
            return 1, *places[row.name.rpartition(", ")[0]], row.priority
        early = row.priority <= 1 and row.part in ("correctness", "tools")
        return 0 if early else 2 if row.part == "tools" and row.name not in known else 3, row.priority

    return sorted((row for row in found if match in row.name), key=order)


def main() -> int:
    args = options()
    if args.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # which triton reads when it is imported
        assert "triton" not in sys.modules
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # what Triton does by itself, without its warning
    os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")  # a process that is started again need not tune again
    gpu_measure, gpu_table = (importlib.import_module(name) for name in ("gpu_measure", "gpu_table"))
    import torch

    bench = gpu_measure.Bench(args.dry, args.tune_peers)
    out = args.out or (Path(tempfile.gettempdir()) / "regard-gpu-dry.json" if args.dry else STORED)
    stored = json.loads(out.read_text(encoding="utf-8")) if out.exists() and (args.resume or not args.part) else {}
    rows = rows_of(bench, tuple(args.part), args.match, stored.get("rows", {})) if args.part else []
    if args.compile:
        compile_some(args, stored, gpu_measure.Bench)
        return 0
    if args.list:
        show(rows, stored if args.resume else None, gpu_measure.kernels(ROOT))
        return 0
    if rows and not args.resume and holds_rows(out):
        print(f"{out} holds rows of an earlier run, which would be lost: add --resume, or --out FILE.", file=sys.stderr)
        return 1
    if rows and not args.dry and not torch.cuda.is_available():
        print("no GPU here; --dry shows that the script runs, --list what it would measure.", file=sys.stderr)
        return 1
    if rows:
        unpack(args.cache)
        worker = Worker(dry=args.dry, tune_peers=args.tune_peers, parts=tuple(args.part), match=args.match)
        try:
            run(args, worker, rows, stored, out)
        finally:
            worker.stop()
            pack(args.cache)
    if args.write:
        write(args, gpu_table, stored)
    return 0


def holds_rows(out: Path) -> bool:
    """Whether a file holds rows that were measured on a GPU."""
    stored = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    return bool(stored.get("rows")) and not all(run["dry"] for run in stored["runs"])


def show(rows: list[Any], stored: dict[str, Any] | None, kernels: str) -> None:
    """Print the rows in their order; with what is stored, those alone that were not measured with these kernels."""
    import gpu_criteria

    found = [(row, "" if stored is None else gpu_criteria.open_row(stored, row.name, kernels)) for row in rows]
    left = [(row, why) for row, why in found if why or stored is None]
    for row, why in left:
        print(f"{row.priority:3} {row.seconds:5.0f} s  {row.name}{': ' if why else ''}{why}")
    if stored is not None:
        counts = [f"{sum(why == one for _, why in left)} {one}" for one in dict.fromkeys(why for _, why in left)]
        print(f"{len(left)} of {len(rows)} rows are open: {', '.join(counts) or 'none'}.")


def run(args: argparse.Namespace, worker: Worker, rows: list[Any], stored: dict[str, Any], out: Path) -> None:
    """Measure row after row and write the JSON before and after each."""
    begun = time.perf_counter()
    stored.setdefault("runs", []).append(worker.ask("provenance"))
    save(out, stored)
    with contextlib.ExitStack() as stack:
        ready: Ready = lambda row: True  # noqa: E731
        if not args.dry and not args.cold:
            ready = stack.enter_context(warm_up(args, rows, stored, out, begun))
        measure(args, worker, rows, stored, out, begun, ready)


def in_turn(rows: list[Any], ready: Ready) -> Iterator[Any]:
    """The rows in their order; one whose kernels are still compiled comes once they are, or at the end."""
    waiting: list[Any] = []
    for row in rows:
        for other in [one for one in waiting if ready(one)]:
            waiting.remove(other)
            yield other
        if ready(row):
            yield row
        else:
            waiting.append(row)
    yield from waiting


def measure(
    args: argparse.Namespace, worker: Worker, rows: list[Any], stored: dict[str, Any], out: Path, begun: float,
    ready: Ready,
) -> None:  # fmt: skip
    stored["ceilings"] = worker.ask("ceilings")
    done, number = stored.setdefault("rows", {}), len(stored["runs"]) - 1
    for row in in_turn(rows, ready):
        if settled(args, stored, row):
            continue
        before = done.get(row.name, {"part": row.part, "status": "no time"})
        if before["status"] == "running":  # an earlier run was stopped with it
            error = "the run ended during this row"
            done[row.name] = {"run": number, "part": row.part, "status": "hung", "error": error}
            leave_out(row, rows, done)
            continue
        left = 60 * args.minutes - (time.perf_counter() - begun)
        if left < row.seconds and not args.dry:
            done.setdefault(row.name, before)
            save(out, stored)
            continue
        done[row.name] = {"part": row.part, "status": "running"}
        save(out, stored)
        limit = max(args.row_s, TUNING) if row.tunes and not args.dry else args.row_s
        entry = measured(row, worker, 3600 if args.dry else min(limit, max(left, 1)))
        if entry["status"] in ("hung", "no time") and not args.dry and left < limit:  # the time was up
            done[row.name] = before
            save(out, stored)
            continue
        done[row.name] = {"run": number, **entry}
        say(row.name, entry, time.perf_counter() - begun)
        if entry.pop("lost", False):
            leave_out(row, rows, done)
        save(out, stored)
    stored["runs"][-1]["seconds"] = round(time.perf_counter() - begun, 1)
    save(out, stored)


def settled(args: argparse.Namespace, stored: dict[str, Any], row: Any) -> bool:
    """Whether a row need not be measured in the last run. What `--again` names is kept if a run of the same session
    measured it with the same kernels, so that a command that is repeated goes on."""
    import gpu_criteria

    entry, runs = stored.get("rows", {}).get(row.name, {}), stored.get("runs", [])
    if args.again and re.search(args.again, row.name) and runs:
        own = "run" in entry and gpu_criteria.session(runs, entry["run"]) == gpu_criteria.session(runs, len(runs) - 1)
        if not own or gpu_criteria.outdated(stored, entry):
            return False
    given_up = args.keep_errors and entry.get("status") in ("failed", "not available")
    return given_up or entry.get("status") in ("measured", "hung") or entry.get("error", "").startswith("left out")


def measured(row: Any, worker: Worker, limit: float) -> dict[str, Any]:
    """Return what a row finds; one that hangs or ends the process is stored too, and the next has a fresh process."""
    start = time.perf_counter()
    try:
        entry = worker.ask(row.name, limit)
    except TimeoutError as error:
        entry = {"part": row.part, "status": "hung", "error": str(error), "lost": True}
        if row.tunes:  # the next row, or run, takes up what was tuned so far
            entry = {"part": row.part, "status": "no time", "error": f"{error}, tuning"}
            worker.stop()
    except ChildProcessError as error:
        entry = {"part": row.part, "status": "failed", "error": str(error), "lost": True}
    if entry.get("lost"):
        worker.stop()
    return {"seconds": round(time.perf_counter() - start, 1), **entry}


@contextlib.contextmanager
def warm_up(
    args: argparse.Namespace, rows: list[Any], stored: dict[str, Any], out: Path, begun: float
) -> Iterator[Ready]:
    """Compile ahead, a quarter of the time at most before the rows and then beside them; what sanitizers say is found
    out meanwhile. Give whether a row's kernels are compiled, if a peer's tune themselves in it."""
    import gpu_tools
    import gpu_warm

    chosen = ["--part", *args.part, "--match", args.match, "--out", str(out), "--resume", "--again", args.again]
    capability = 90 if int(stored["runs"][-1]["hardware"]["capability"].split(".")[0]) >= 9 else 80
    with tempfile.TemporaryDirectory() as claims:
        warming = gpu_warm.Warming("gpu.py", chosen, capability, Path(claims))
        number = len(stored["runs"]) - 1
        left = [row for row in rows if not settled(args, stored, row)]
        tools = gpu_tools.Beside(left, partial(warming.reached, "small"))
        try:
            done = warming.wait("early", 15 * args.minutes, tools.done)
            for name, entry in tools.stop().items():
                stored.setdefault("rows", {})[name] = {"run": number, **entry}
                say(name, entry, time.perf_counter() - begun)
            save(out, stored)
            print(f"{time.perf_counter() - begun:6.1f} s  compiled ahead; {done} processes had done their share")
            yield lambda row: not row.tunes or warming.reached(gpu_warm.mark_of(row))
        finally:
            tools.stop()
            warming.stop()
            if args.logs:
                shutil.copytree(claims, args.logs, ignore=lambda _, names: [x for x in names if "log" not in x])


def compile_some(args: argparse.Namespace, stored: dict[str, Any], bench: Any) -> None:
    """What a process does that `gpu_warm` started."""
    import gpu_warm
    import torch

    number, arch, claims = args.compile.split("/", 2)
    benches = (bench(False, compiling=True, at=at) for at in ("cpu", "cuda" if torch.cuda.is_available() else "cpu"))
    cpu, device = (
        [
            row
            for row in rows_of(bench, tuple(args.part), args.match, stored.get("rows", {}))
            if not settled(args, stored, row)
        ]
        for bench in benches
    )
    gpu_warm.compile_share(cpu, device, int(arch), Path(claims), int(number))


def kernels() -> Path:
    """Where Triton keeps what it compiled."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


def unpack(cache: Path | None) -> None:
    """Put compiled kernels of an earlier run where Triton finds them; they are taken for the same sources alone."""
    if cache is not None and cache.exists():
        kernels().mkdir(parents=True, exist_ok=True)
        with tarfile.open(cache) as archive:
            archive.extractall(kernels(), filter="data")


def pack(cache: Path | None) -> None:
    """Write what Triton compiled into a tarball, if one is asked for."""
    if cache is not None and kernels().is_dir():
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(cache, "w:gz") as archive:
            archive.add(kernels(), arcname=".")


def leave_out(row: Any, rows: list[Any], done: dict[str, Any]) -> None:
    """Mark what runs the same kernels as a row that hung or lost the device: each would cost a start."""
    place = 1 if row.part == "correctness" else -1
    for other in rows:
        same = other.part == row.part and other.name.split(", ")[place] == row.name.split(", ")[place]
        if same and done.get(other.name, {}).get("status") != "measured" and other.name != row.name:
            error = f"left out: {row.name!r} hung or lost the device"
            run = done.get(row.name, {}).get("run")
            done[other.name] = {"run": run, "part": other.part, "status": "failed", "error": error, "seconds": 0.0}


def say(name: str, entry: dict[str, Any], since: float) -> None:
    told = {k: v for k, v in entry.items() if k not in ("part", "run", "trace", "config", "contestant", "seconds")}
    print(f"{since:6.1f} s  {name}: {json.dumps(told)[:400]}", flush=True)


def save(out: Path, stored: dict[str, Any]) -> None:
    """Beside the old file first: what stops this process must not cost what was measured."""
    import gpu_table

    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_suffix(".part")
    beside.write_text(gpu_table.dump(stored), encoding="utf-8")
    beside.replace(out)


def write(args: argparse.Namespace, gpu_table: Any, stored: dict[str, Any]) -> None:
    drawn = {gpu_table.figure: args.figure, gpu_table.roofline: args.figure.with_name("gpu-roofline.png")}
    names = [os.path.relpath(path, args.page.parent) for draw, path in drawn.items() if draw(stored, path)]
    page = args.page.read_text(encoding="utf-8")
    args.page.write_text(gpu_table.placed(page, gpu_table.tables(stored, names)), encoding="utf-8")
    print(f"wrote the tables into {args.page}")


if __name__ == "__main__":
    sys.exit(main())
