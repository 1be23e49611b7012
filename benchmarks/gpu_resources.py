"""List the registers and memory that kernels take of a GPU, without one: `python benchmarks/gpu_resources.py --write`.

Every case below is a call of a public function. What it would launch is compiled for sm_80 and sm_90
(`gpu_compiled`), and registers, local memory and shared memory of every kernel go into
tests/triton/resources/VERSION.json, with which `tests/triton/test_compile.py` compares the kernels, and as a table into
benchmarks/results/gpu-resources-VERSION.md. VERSION is that of Triton, such as 3.9: another compiler uses other numbers
of registers. For another one, `pip install --target FOLDER --no-deps triton==3.6.0` and set PYTHONPATH=FOLDER.

Limits may only fall: if a kernel takes more local memory than the file says, --write stops with an error, unless
--reason gives the reason.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from gpu_compiled import SHARED, resources_of
from torch import Tensor

import regard

ROOT = Path(__file__).resolve().parents[1]
VERSION = ".".join(triton.__version__.split(".")[:2])
STORED = ROOT / "tests" / "triton" / "resources" / f"{VERSION}.json"
TABLE = ROOT / "benchmarks" / "results" / f"gpu-resources-{VERSION}.md"
COMPACT = ("softmax", "sparsemax", "biweight", "triweight", "relumax", "normrelu")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
ARCHS = tuple(SHARED)
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A call whose kernels are compiled.

    Attributes:
        family: "compact", "local linear", "decoding" or "memory".
        name: of the case.
        dim: width of keys and values, by which spills are allowed.
        call: gives an output; where it is differentiable, its backward pass is compiled too.
        core: whether it belongs to the few that every test run compiles.
        backward: whether the backward pass is compiled where there is one.
    """

    family: str
    name: str
    dim: int
    call: Callable[[], Tensor]
    core: bool = False
    backward: bool = True

    def strict(self, which: str) -> bool:
        """Whether nothing may be spilt in that pass: up to 64 features, and up to 128 in forward passes."""
        return self.dim <= 64 or (which == "forward" and self.dim <= 128)


# Cases ---------------------------------------------------------------------------------------------------------


def tensors(dim: int, dtype: torch.dtype, queries: int = 256, keys: int = 256) -> Any:
    """Queries [2, 4, queries, dim], keys and values [2, 2, keys, dim] that ask for gradients where queries are many."""
    grad = queries > 1
    pairs = [torch.zeros(2, 2, keys, dim, dtype=dtype, requires_grad=grad) for _ in range(2)]
    return torch.zeros(2, 4, queries, dim, dtype=dtype, requires_grad=grad), *pairs


def attend(
    spec: str, dim: int, dtype: str, queries: int = 256, keys: int = 256, masks: int = 0, **options: Any
) -> Callable[[], Tensor]:
    """A call with as many masks of a sequence: 0, 1 or one a head."""

    def call() -> Tensor:
        q, k, v = tensors(dim, DTYPES[dtype], queries, keys)
        more = {"is_causal": True, **options}
        if masks:
            more["attn_mask"] = torch.ones(2, masks, 1, keys, dtype=torch.bool)
        if spec.endswith("solver=learned)"):
            more["params"] = {"probe": torch.zeros(2, 4, queries, dim, dtype=torch.float32, requires_grad=queries > 1)}
        found = regard.attention(q, k, v, spec, enable_gqa=True, impl="triton", **more)
        return found if isinstance(found, Tensor) else found[0]

    return call


def remember(
    dtype: str, score: str = "idw", sub_keys: int = 64, width: int = 512, grad: bool = True, mix: bool = True
) -> Any:
    """A memory of fast weights: two chunks of tokens, read and written."""

    def call() -> Tensor:
        query = torch.zeros(2, 128, 1, width, requires_grad=grad)
        value = torch.zeros(2, 128, width, requires_grad=grad)
        gate = torch.zeros(2, 128, requires_grad=grad)
        keys = torch.zeros(1, 2, sub_keys, width // 2, requires_grad=grad)
        values = torch.zeros(sub_keys**2, width, dtype=DTYPES[dtype], requires_grad=grad)
        how: dict[str, Any] = {"chunk_size": 64, "top_k": 8, "score": score, "mix": mix, "impl": "triton"}
        return regard.fast_weight_memory(query, value, gate, keys, values, **how)[0]

    return call


def compact_cases() -> Iterator[Case]:
    for spec in COMPACT:
        for dtype in DTYPES:
            for dim in (64, 128):
                core = (spec, dtype, dim) in {("biweight", "bfloat16", 64), ("relumax", "bfloat16", 128)}
                whole = dim == 64 or dtype == "bfloat16" or spec == "biweight"
                yield Case("compact", f"{spec}, D {dim}, {dtype}", dim, attend(spec, dim, dtype), core, whole)
    for dim in (64, 128):
        frozen = torch.no_grad()(attend("biweight", dim, "bfloat16"))
        yield Case("compact", f"biweight, D {dim}, bfloat16, without gradients", dim, frozen)
    for dim in (16, 256):
        yield Case("compact", f"biweight, D {dim}, bfloat16", dim, attend("biweight", dim, "bfloat16"))
    few: dict[str, Any] = {"masked keys": {"masks": 1}, "window": {"window": 100}, "both ways": {"is_causal": False}}
    for words, options in few.items():
        call = attend("biweight", 64, "bfloat16", **options)
        yield Case("compact", f"biweight, D 64, bfloat16, {words}", 64, call)


def local_linear_cases() -> Iterator[Case]:
    for dtype in DTYPES:
        for dim in (64, 128):
            core = (dtype, dim) == ("bfloat16", 64)
            name = f"local-linear, D {dim}, {dtype}"
            yield Case("local linear", name, dim, attend("local-linear", dim, dtype), core)
            learned = "gaussian*fixed*linear(ridge=0.1,solver=learned)"
            yield Case("local linear", f"learned solver, D {dim}, {dtype}", dim, attend(learned, dim, dtype))
    few: dict[str, Any] = {"masked keys": {"masks": 1}, "window 128": {"window": 128}, "1024 keys": {"keys": 1024}}
    few["diagnostics"] = {"return_diagnostics": True}
    for words, options in few.items():
        call = attend("local-linear", 64, "bfloat16", **options)
        yield Case("local linear", f"local-linear, D 64, bfloat16, {words}", 64, call)


def decoding_cases() -> Iterator[Case]:
    for spec in (*COMPACT, "local-linear"):
        for dtype in DTYPES:
            for dim in (64, 128):
                core = (spec, dtype, dim) == ("biweight", "bfloat16", 64)
                call = attend(spec, dim, dtype, queries=1)
                yield Case("decoding", f"{spec}, one query, D {dim}, {dtype}", dim, call, core)
    for spec in ("softmax", "biweight", "local-linear"):
        for dim in (64, 128):
            call = attend(spec, dim, "bfloat16", queries=1, masks=4)
            yield Case("decoding", f"{spec}, one query, a mask a head, D {dim}, bfloat16", dim, call)


def memory_cases() -> Iterator[Case]:
    """No width of theirs allows spills."""
    for dtype in DTYPES:
        for grad in (True, False):
            words = "with gradients" if grad else "without gradients"
            call = remember(dtype, grad=grad)
            yield Case("memory", f"values {dtype}, {words}", 0, call, core=dtype == "float32" and not grad)
    yield Case("memory", "dot scores, not mixed", 0, remember("float32", score="dot", mix=False))


FAMILIES: dict[str, Callable[[], Iterable[Case]]] = {
    "compact": compact_cases,
    "local linear": local_linear_cases,
    "decoding": decoding_cases,
    "memory": memory_cases,
}


def cases(families: Iterable[str] = tuple(FAMILIES), core: bool = False) -> list[Case]:
    found = [case for family in families for case in FAMILIES[family]()]
    return [case for case in found if case.core] if core else found


# Measures --------------------------------------------------------------------------------------------------------


def measured(case: Case, arch: int) -> list[Row]:
    """A row for every kernel of a pass."""
    made: list[Tensor] = []
    rows = [(which, x) for which, x in (("forward", x) for x in resources_of(lambda: made.append(case.call()), arch))]
    if made[0].requires_grad and case.backward:
        rows += [("backward", x) for x in resources_of(lambda: made[0].sum().backward(), arch)]
    found = []
    for which, x in rows:
        numbers = asdict(x)
        numbers.pop("launches")
        found.append({"family": case.family, "case": case.name, "pass": which, **numbers})
    return found


def key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("case", "pass", "kernel", "arch"))


def versions() -> dict[str, str]:
    import triton
    from triton import knobs

    return {"triton": triton.__version__, "ptxas": str(knobs.nvidia.ptxas.version), "torch": torch.__version__}


def raised(rows: Iterable[Row], stored: dict[str, Any]) -> list[str]:
    """What would take more local memory than the file allows it, in words."""
    before = {key(row): row["local"] for row in stored.get("kernels", [])}
    found = []
    for row in rows:
        if row["local"] > before.get(key(row), 0):
            found.append(f"{row['case']}, {row['pass']}, {row['kernel']}, sm_{row['arch']}: {row['local']} bytes")
    return found


def merged(rows: list[Row], stored: dict[str, Any], measured_cases: set[str], reason: str) -> dict[str, Any]:
    """The new contents of the file: rows of the cases that were measured are replaced. The reason of a ceiling stays
    with it."""
    before = {key(row): row for row in stored.get("kernels", [])}
    kept = [row for row in before.values() if row["case"] not in measured_cases]
    for row in rows:
        old = before.get(key(row), {"local": 0})
        if row["local"]:
            row["reason"] = reason if row["local"] > old["local"] else old["reason"]
    order = {case.name: i for i, case in enumerate(cases())}
    kept = [row for row in [*kept, *rows] if row["case"] in order]
    kept.sort(key=lambda row: (order[row["case"]], row["arch"], row["pass"] != "forward"))
    return {"versions": versions(), "kernels": kept}


def dump(stored: dict[str, Any]) -> str:
    """The JSON, a kernel a line."""
    rows = ",\n".join("  " + json.dumps(row) for row in stored["kernels"])
    return f'{{\n "versions": {json.dumps(stored["versions"])},\n "kernels": [\n{rows}\n ]\n}}\n'


def load(path: Path = STORED) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


# The table --------------------------------------------------------------------------------------------------------

HEAD = """# What the kernels take of a GPU

Written by `python benchmarks/gpu_resources.py --write`: registers of a thread, bytes of local memory (stack and spills)
of a thread, shared memory of a program, as shipped, and how many programs run at once on a multiprocessor, for both
compute capabilities. Programs of a kernel with several variants in one call (boundary blocks, say) are one line with
the largest numbers.

"""
MOST = 65536, 64, 32
"""Registers, warps and programs of a multiprocessor."""


def table(stored: dict[str, Any]) -> str:
    """Return the table: a line for every case, pass and kernel, both capabilities side by side."""
    lines: dict[tuple[Any, ...], dict[int, Row]] = {}
    for row in stored["kernels"]:
        lines.setdefault((row["case"], row["pass"], row["kernel"]), {})[row["arch"]] = row
    head = [words for arch in ARCHS for words in (f"sm_{arch}: registers, local, shared", "programs")]
    text = ["| call | pass | kernel | " + " | ".join(head) + " |", "|---|---|---|" + "---:|" * len(head)]
    for (case, which, kernel), by_arch in lines.items():
        cells = [text for arch in ARCHS for text in (numbers(by_arch.get(arch)), programs(by_arch.get(arch)))]
        text.append(f"| {case} | {which} | `{kernel}` | " + " | ".join(cells) + " |")
    used = ", ".join(f"{name} {version}" for name, version in stored["versions"].items())
    reasons = sorted({row["reason"] for row in stored["kernels"] if row.get("reason")})
    said = "".join(f"\n- {reason}" for reason in reasons) or " nothing is spilt."
    there = {row["case"] for row in stored["kernels"]}
    open_ = [case.name for case in cases() if case.name not in there]
    left = f"\n\nNot in the file yet: {'; '.join(open_)}." if open_ else ""
    return f"{HEAD}Compiled with {used}.\n\n" + "\n".join(text) + left + f"\n\nWhere local memory is not 0:{said}\n"


def programs(row: Row | None) -> str:
    """How many programs a multiprocessor has room for, as CUDA's occupancy calculator counts: registers go to a warp by
    256 and to four warps at a time, shared memory by 128 bytes, with 1 KiB a program more than it asks for."""
    if row is None:
        return "–"
    registers, warps, most = MOST
    taken = -(-max(row["registers"], 1) * 32 // 256) * 256
    shared = -(-(row["shared"] + 1024) // 128) * 128
    room = registers // taken // 4 * 4 // row["warps"]
    return str(min(room, warps // row["warps"], most, (SHARED[row["arch"]] + 1024) // shared))


def numbers(row: Row | None) -> str:
    return "–" if row is None else f"{row['registers']}, {row['local']}, {row['shared'] / 1024:.3g} KiB"


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="*", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--match", default="", help="only cases whose name holds this")
    parser.add_argument("--case", default="", help="only the case of this name")
    parser.add_argument("--core", action="store_true", help="only the cases of the fast tests")
    parser.add_argument("--arch", nargs="*", type=int, choices=ARCHS, default=list(ARCHS))
    parser.add_argument("--out", type=Path, help="write the rows there, as JSON")
    parser.add_argument("--write", action="store_true", help=f"renew {STORED.name} and {TABLE.name}")
    parser.add_argument("--reason", default="", help="why limits must rise")
    return parser.parse_args(arguments)


def main() -> int:
    args = options()
    chosen = [c for c in cases(args.family, args.core) if args.match in c.name and args.case in ("", c.name)]
    rows: list[Row] = []
    failed: list[str] = []
    for case in chosen:
        start = time.perf_counter()
        try:
            own = [row for arch in args.arch for row in measured(case, arch)]
        except Exception as error:  # the others are still worth knowing
            failed.append(f"{case.name}: {type(error).__name__}: {str(error).strip()[:600]}")
            print(f"{case.name}: FAILED\n{failed[-1]}", flush=True)
            continue
        rows += own
        print(f"{case.name}: {time.perf_counter() - start:.1f} s", flush=True)
        for row in own:
            print(f"  {row['pass']:<9}{row['kernel']:<40} sm_{row['arch']} {numbers(row)}", flush=True)
    if args.out:
        args.out.write_text(dump({"versions": versions(), "kernels": rows}), encoding="utf-8")
    return _write(args, rows, {case.name for case in chosen}, failed) if args.write else int(bool(failed))


def _write(args: argparse.Namespace, rows: list[Row], names: set[str], failed: list[str]) -> int:
    """Renew the file and the table; 1 where that would raise a ceiling without a reason, or where something failed."""
    stored = load()
    higher = raised(rows, stored)
    if failed or args.arch != list(ARCHS):
        print("nothing written: it needs all cases that were asked for, and both capabilities.", file=sys.stderr)
        return 1
    if higher and not args.reason:
        print("nothing written: ceilings may only fall; give --reason, or mend:\n" + "\n".join(higher), file=sys.stderr)
        return 1
    stored = merged(rows, stored, names, args.reason)
    STORED.write_text(dump(stored), encoding="utf-8")
    TABLE.write_text(table(stored), encoding="utf-8")
    print(f"wrote {STORED} and {TABLE}")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # what Triton does by itself, without its warning
    sys.exit(main())
