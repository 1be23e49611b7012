"""Measure the cost of regard on a CPU, side by side with alternatives: `python benchmarks/cpu.py --write`.

Seven parts, each with times, memory and its own provenance:

normalisers: regard's weightings of plain scores, torch.softmax and the entmax package;
attention: regard's compact kernels, scaled_dot_product_attention and dense entmax15 attention;
linear: the linear-time forms up to 65536 positions, and the cost of a decoded token;
local_linear: local linear attention, scaled_dot_product_attention and the plain dense form;
models: training steps of the language models, and what a cache saves in decoding;
fast_weights: a memory of fast weights, its dense form and the package fast-weight-product-key-memory;
token: one decoded token against few keys on one thread, `regard.attention` and scaled_dot_product_attention.

Within a configuration the contestants take turns, and ratios are those of medians within one run. Needs the extras
`lm`, `dev` and `cpu`. All parts take about half an hour on two quiet cores and at most 8 GiB of memory.
"""

import argparse
import importlib
import json
import tempfile
import time
from pathlib import Path

import cpu_table
import torch
from cpu_measure import ROOT, peaks, provenance, say

PARTS = ("normalisers", "attention", "linear", "local_linear", "models", "fast_weights", "token")
STORED = ROOT / "benchmarks" / "results" / "cpu.json"
PAGE = ROOT / "docs" / "results.md"


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="*", choices=PARTS, default=PARTS, help="parts to run; with none, only --write")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to check that it runs; stored elsewhere")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch and numba (default 2)")
    parser.add_argument("--out", type=Path, help=f"the JSON, of which other parts are kept (default {STORED})")
    parser.add_argument("--write", action="store_true", help="write the tables of the JSON into --page")
    parser.add_argument("--page", type=Path, default=PAGE, help=f"page with the markers (default {PAGE})")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def child(order: str) -> None:
    """What `cpu_measure.child_peaks` starts: prints the peaks of one contestant."""
    asked = json.loads(order)
    torch.set_num_threads(asked["threads"])
    part = importlib.import_module(f"cpu_{asked['part']}")
    found = peaks(part.functions(asked["config"])[asked["name"]], part.inputs, asked["config"])
    print(json.dumps(found))


def main() -> None:
    args = options()
    if args.child:
        child(args.child)
        return
    torch.set_num_threads(args.threads)
    out = args.out or (Path(tempfile.gettempdir()) / "regard-cpu-quick.json" if args.quick else STORED)
    stored = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    start = time.perf_counter()
    for name in args.part:
        say(f"{name} ({time.perf_counter() - start:.0f} s since the start)")
        before, begun = provenance(args.quick), time.perf_counter()
        found = importlib.import_module(f"cpu_{name}").run(args.quick, args.threads)
        before["seconds"] = round(time.perf_counter() - begun, 1)
        stored[name] = {"provenance": before, **found}
        out.parent.mkdir(parents=True, exist_ok=True)  # after every part: what is done is not lost with what fails
        out.write_text(cpu_table.dump({n: stored[n] for n in PARTS if n in stored}), encoding="utf-8")
        say(f"{name}: {before['seconds']} s, stored in {out}")
    if args.write:
        page = args.page.read_text(encoding="utf-8")
        args.page.write_text(cpu_table.placed(page, cpu_table.tables(stored)), encoding="utf-8")
        say(f"wrote the tables into {args.page}")


if __name__ == "__main__":
    main()
