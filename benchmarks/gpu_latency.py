"""Estimate the time of a chunk of the fast-weight memory by counting instructions; no GPU is needed.

    python benchmarks/gpu_latency.py            # print the table
    python benchmarks/gpu_latency.py --write    # and store it

4096 tokens in chunks of 512, 512^2 slots of 512 numbers, 8 slots a token. The kernels are compiled for sm_90, and the
loops of their machine code are weighed by how often they run. A program takes

    instructions x max(1.5, resident warps / 4) + 600 x rounds of loads that wait for one another

cycles of 1.75 GHz, and as many waves as its programs need of 132 multiprocessors; a kernel begins 1.2 us after the one
before it. A review counted the first version of four kernels by hand (`BEFORE`); for that version this script gives 50,
28, 21 and 21 us. A measurement may differ by 30 percent.
"""

import argparse
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import gpu_compiled as tools
import torch
import triton
from triton import knobs

import regard
from regard.triton.runtime.launch import watched

OLDER = triton.__version__.startswith("3.6")
RESULT = Path(__file__).resolve().parent / "results" / ("gpu-latency-3.6.md" if OLDER else "gpu-latency.md")
GHZ, PROCESSORS, ROUND, LAUNCH = 1.75, 132, 600, 1.2
TOKENS, CHUNK, SUB_KEYS, WIDTH, TOP = 4096, 512, 512, 512, 8
HALF, ENTRIES = WIDTH // 2, CHUNK * TOP


def runs(name: str, c: dict[str, Any]) -> tuple[list[int], int]:
    """Return how often each loop runs, by its address, and the rounds of loads of a program. Loops that only run for
    tokens that are not counted, or where the first search cannot be sure, run 0 times."""
    if name == "_rough":
        return [HALF // c["DT"]], 3
    if name == "_choose":
        others = [1, 0, 0, TOP] if OLDER else [1, 0, 0, 0, 1]
        return [SUB_KEYS // c["KT"], HALF // c["FINE"], *others], 5 + HALF // c["FINE"]
    if name == "use":
        blocks = ENTRIES // c["RU"]
        return [blocks, blocks, 1, 0], 2 * blocks + 2
    if name == "order":
        return [ENTRIES // c["OT"]], 2
    if name == "_moved":
        blocks = -(-ENTRIES * c["KT"] // SUB_KEYS // c["R"])
        return [blocks, 0], 3 * blocks + 2
    return {"errors": ([1], 2), "_write": ([1, 1] if OLDER else [1], 4)}.get(name, ([], 2))


def instructions(cubin: bytes) -> list[tuple[int, str]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-sass", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [(int(at, 16), words) for at, words in re.findall(r"^\s*/\*([0-9a-f]{4,5})\*/\s+(.*?);", text, re.MULTILINE)]


def executed(found: list[tuple[int, str]], times: list[int], name: str) -> int:
    """Return how many instructions a warp executes."""
    jumps = [(at, re.search(r"\bBRA 0x([0-9a-f]+)", words)) for at, words in found]
    loops = [(int(to[1], 16), at) for at, to in jumps if to and int(to[1], 16) < at]
    assert len(loops) == len(times), f"{name} has {len(loops)} loops, {len(times)} are known"
    total = 0
    for at, _ in found:
        own = [n for n, (first, last) in zip(times, loops, strict=True) if first <= at <= last]
        total += 1 if not own else 0 if 0 in own else max(own)  # an inner loop's number counts the outer one
    return total


def microseconds(programs: int, warps: int, registers: int, shared: int, executed: int, rounds: int) -> float:
    room = min(64 // warps, 65536 // (max(registers, 1) * 32 * warps), (227 << 10) // max(shared, 1), 32)
    each = min(room, -(-programs // PROCESSORS))
    waves = max(1.0, programs / (PROCESSORS * each))
    return waves * (executed * max(1.5, each * warps / 4) + ROUND * rounds) / (GHZ * 1000)


def counted(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> tuple[int, int]:
    """Return how many instructions a warp executes, and the rounds of loads of a program. Of `_prepare`, whose programs
    do one of three jobs, each compiled alone here: the mean, and the most rounds."""
    if kernel.fn.__name__ != "_prepare":
        made = kernel.warmup(*args, grid=grid, **options)
        times, rounds = runs(made.metadata.name, options)
        return executed(instructions(made.asm["cubin"]), times, made.metadata.name), rounds
    total, most, first = 0, 0, args[7] + args[8]
    for i, (name, programs) in enumerate({"use": args[7], "order": args[8], "errors": grid[0] - first}.items()):
        alone = [x if i == j else None for j, x in enumerate(args[:3])]
        made = kernel.warmup(*alone, *args[3:], grid=grid, **options)
        times, rounds = runs(name, options)
        total += programs * executed(instructions(made.asm["cubin"]), times, name)
        most = max(most, rounds)
    return total // grid[0], most


def chunk() -> Any:
    query, value, gate = (
        torch.zeros(1, CHUNK * 2, 1, WIDTH),
        torch.zeros(1, CHUNK * 2, WIDTH),
        torch.zeros(1, CHUNK * 2),
    )
    keys, values = torch.zeros(1, 2, SUB_KEYS, HALF), torch.zeros(SUB_KEYS**2, WIDTH)
    how: dict[str, Any] = {"chunk_size": CHUNK, "top_k": TOP, "score": "idw", "mix": True, "impl": "triton"}
    return regard.fast_weight_memory(query, value, gate, keys, values, **how)


def measured() -> dict[str, list[Any]]:
    """Return programs, registers, instructions, rounds and microseconds of every kernel of a chunk."""
    rows: dict[str, list[Any]] = {}

    def seen(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        made = kernel.warmup(*args, grid=grid, **options)
        name, programs, warps = made.metadata.name, torch.Size(grid).numel(), options["num_warps"]
        if name in rows or name == "clean_kernel":  # once a call, not once a chunk
            return
        count, rounds = counted(kernel, grid, args, options)
        registers, _ = tools._usage(made.asm["cubin"])
        took = microseconds(programs, warps, registers, made.metadata.shared, count, rounds)
        rows[name] = [programs, registers, count, rounds, took]

    with tools.pretended(90), tools.zeros(), watched(seen):
        chunk()
    return rows


BEFORE = {"_choose": 44, "_prepare": 45, "_moved": 20}
"""By a review of the first version of these kernels, which gave the others 24 together; without the launches that
`_prepare` saves."""


MEASURED = (
    "Not measured on a GPU yet: the version before, with eight kernels a chunk, took 0.533 ms for 4096 tokens on an "
    "H200, where its count was 0.36 ms."
)


def page(rows: dict[str, list[Any]]) -> str:
    lines = [
        f"| `{name}` | {programs} | {registers} | {count:,} | {rounds} | {took:.1f} | {BEFORE.get(name, '')} |"
        for name, (programs, registers, count, rounds, took) in rows.items()
    ]
    total = sum(row[-1] for row in rows.values()) + LAUNCH * len(rows)
    head = ["kernel", "programs", "registers", "instructions of a warp", "rounds of loads", "us"]
    head += ["us before, by a review"]
    table = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1), *lines]
    return (
        "# Time of the fast-weight memory, by count\n\nWritten by `python benchmarks/gpu_latency.py --write`, which "
        f"says how it counts; compiled for sm_90 by Triton {triton.__version__}. {MEASURED}\n\n"
        + "\n".join(table)
        + f"\n\nA chunk of {CHUNK} tokens takes {total:.0f} us with its {len(rows)} launches, {TOKENS} tokens "
        f"{total * TOKENS / CHUNK / 1000:.2f} ms (before, by the review: 133 us and 1.1 ms; target: 0.5 ms).\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"store the table in {RESULT.name}")
    text = page(measured()) if (args := parser.parse_args()) else ""
    print(text)
    if args.write:
        RESULT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
