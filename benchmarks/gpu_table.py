"""The tables and figures of `gpu.py` in docs/results.md, made from the stored JSON alone; torch is not needed."""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cpu_table import dump, markdown, number
from gpu_criteria import JUDGED, Entry, criteria, outdated, rows_of, select

__all__ = ["BEGIN", "END", "dump", "figure", "placed", "roofline", "tables"]
BEGIN, END = "<!-- benchmarks/gpu.py: begin -->", "<!-- benchmarks/gpu.py: end -->"
PASSES = ("forward", "both")
MARK = "†"
"""Of numbers of other sources of the kernels."""


def placed(page: str, text: str) -> str:
    """The page with what stands between its markers replaced.

    Raises:
        ValueError: the markers are not there, each once and in order.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"the page must hold {BEGIN} and, after it, {END}, each once.")
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n{text}{END}{rest.split(END)[1]}"


def tables(stored: Entry, figures: Sequence[str] = ()) -> str:
    """All tables, as Markdown: the criteria, whatever was measured, and then each part that has rows."""
    blocks = [*provenance(stored), *judged(stored)]
    old = {name: {**row, "mark": MARK} for name, row in stored.get("rows", {}).items() if outdated(stored, row)}
    if old:
        blocks.append(
            f"{MARK} Measured in an earlier run; sources of the kernels have changed since. Targets do not count it."
        )
        stored = {**stored, "rows": {**stored["rows"], **old}}
    said = {"roofline": "rates over operations a byte, and what the device reaches"}
    for name in figures:
        words = next((text for key, text in said.items() if key in name), "time of causal attention over the length")
        blocks.append(f"![{words}]({name})")
    for make in (correctness, compact, row_sums, local_linear, floors, decoding, memory, models, tools, missing):
        blocks += make(stored)
    return "".join(f"\n{block}\n" for block in blocks) + "\n"


def provenance(stored: Entry) -> Iterator[str]:
    runs = stored.get("runs", [])
    if not runs:
        yield (
            "**Not measured**: no GPU was at hand. What is proved without one is in [gpu.md](gpu.md); `python "
            "benchmarks/gpu.py --write` on a machine with a GPU fills this table and adds the others."
        )
        return
    for run in runs:
        used = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        own = run["hardware"]
        told = ", ".join(f"{name} {own[name]}" for name in ("cuda", "cudnn", "driver") if own.get(name))
        if run["dry"]:
            yield "**Toy sizes in the interpreter (`--dry`): shows that the script runs, and says nothing of speed.**"
        yield (
            f"`{run['command']}`, {run['date'][:10]}, {number(run.get('seconds', 0))} s: {own['name']}, {told}; "
            f"{used}; commit {run['commit'][:7] or 'unknown'}."
        )
    top = stored["ceilings"]
    yield (
        f"Ceilings measured in the same run: {number(top['tflops'])} TFLOP/s (a bfloat16 product of random 8192 x 8192 "
        f"matrices by torch), {number(top['gbps'])} GB/s (a copy, bytes read and written)."
    )


def judged(stored: Entry) -> Iterator[str]:
    yield "Targets, and the worst measured value for each:"
    rows = []
    for c in criteria(stored):
        found = "–" if c.found is None else f"{c.found:.3g}"
        rows.append([c.what, c.target, found, c.verdict])
    yield markdown(["", "target", "worst", ""], rows)


# Parts ---------------------------------------------------------------------------------------------------------


def correctness(stored: Entry) -> Iterator[str]:
    rows = {name: row for name, row in stored.get("rows", {}).items() if row["part"] == "correctness"}
    if not rows:
        return
    yield "Errors on the device against dense float64 forms, |found - wanted| / |wanted|."
    names = ("out", "dq", "dk", "dv", "dprobe")
    table = []
    for name, row in rows.items():
        if row["status"] == "measured":
            errors = [f"{row['errors'][n]:.1e}" if n in row["errors"] else "" for n in names]
            table.append(
                [name.removeprefix("correctness, ") + marked(row), *errors, "yes" if row["right"] else "**no**"]
            )
    yield markdown(["", *names, "within the targets"], table)


def compact(stored: Entry) -> Iterator[str]:
    rows = [row for row in rows_of(stored, "compact") if "forward" in row]
    places = sorted({(row["config"]["dim"], -row["config"]["share"]) for row in rows})
    for dim, minus in places:
        own = [row for row in rows if (row["config"]["dim"], -row["config"]["share"]) == (dim, minus)]
        lengths = sorted({row["config"]["length"] for row in own})
        live = sorted({row["live"]["biweight"] for row in own})
        share = " to ".join(dict.fromkeys(f"{x:.0%}" for x in (live[0], live[-1])))
        yield (
            f"Causal attention, {dim} features a head, bfloat16; {share} of the visible blocks of 64 x 64 pairs have "
            f"entmax-1.5 weight. Milliseconds, forward / forward + backward; in brackets the TFLOP/s of the latter if "
            f"all visible pairs are counted, and the peak MiB."
        )
        yield by_length(own, lengths, lambda row: cell(row, "dense_tflops"))


def by_length(rows: list[Entry], lengths: list[int], show: Any) -> str:
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    table = []
    for name in names:
        cells = [select(rows, name, length=length) for length in lengths]
        table.append([name, *("–" if row is None else show(row) for row in cells)])
    return markdown(["", *(f"T {length}" for length in lengths)], table)


def cell(row: Entry, rate: str) -> str:
    ms = " / ".join(row[which].get("error") or number(row[which]["ms"]) for which in PASSES)
    more = [number(row["both"][rate])] if rate in row["both"] else []
    more += [f"{number(row['both']['mib'])} MiB"] if row["both"]["mib"] is not None else []
    return (f"{ms} ({', '.join(more)})" if more else ms) + marked(row)


def marked(row: Entry) -> str:
    return f" {row['mark']}" if "mark" in row else ""


def row_sums(stored: Entry) -> Iterator[str]:
    rows = [row for row in rows_of(stored, "compact") if "from_one" in row]
    if rows:
        length = rows[0]["config"]["length"]
        yield f"Largest deviation of a row's sum of weights from one, float32, T {length}."
        yield markdown(
            ["", "normal scores", "nearly equal scores"],
            [
                [row["contestant"] + marked(row), *(f"{row['from_one'][name]:.1e}" for name in ("normal", "flat"))]
                for row in rows
            ],
        )


def local_linear(stored: Entry) -> Iterator[str]:
    rows = [row for row in rows_of(stored, "local_linear") if "forward" in row]
    for dim in sorted({row["config"]["dim"] for row in rows}):
        own = [row for row in rows if row["config"]["dim"] == dim]
        yield (
            f"Local linear attention and related methods, causal, {dim} features, bfloat16, 32 heads in all up to "
            f"16 K: milliseconds, forward / forward + backward (TFLOP/s of the algorithm's products, peak MiB)."
        )
        yield by_length(own, sorted({row["config"]["length"] for row in own}), lambda row: cell(row, "tflops"))
    steps = [row for row in rows_of(stored, "local_linear") if "steps" in row]
    if steps:
        yield "Steps of conjugate gradients at T 8192, of a tile of 64 rows (weighted by its keys) and of a row."
        names = list(steps[0]["steps"])
        table = [
            [f"D {row['config']['dim']}{marked(row)}", *(number(row["steps"][name]) for name in names)] for row in steps
        ]
        yield markdown(["", *names], table)


def floors(stored: Entry) -> Iterator[str]:
    rows = [row for row in rows_of(stored, "local_linear") if "floor" in row]
    if rows:
        yield "Local linear attention of bfloat16 inputs: error against float64, and the error of rounding alone."
        table = [
            [
                f"{row['config']['data']}, ridge {row['config']['ridge']:g}{marked(row)}",
                f"{row['error']:.1e}",
                f"{row['floor']:.1e}",
            ]
            for row in rows
        ]
        yield markdown(["", "error", "floor"], table)


def decoding(stored: Entry) -> Iterator[str]:
    rows = rows_of(stored, "decoding")
    if rows:
        yield (
            "One decoded token against a cache, bfloat16: microseconds on the device (a CUDA graph), and GB/s if keys "
            "and values are read once. A whole call of `regard.attention` also checks for non-finite numbers; "
            "compact rules read every value for this."
        )
        places = list(dict.fromkeys((r["config"]["length"], r["config"]["batch"], r["config"]["dim"]) for r in rows))
        names = list(dict.fromkeys(row["contestant"] for row in rows))
        table = []
        for name in names:
            found = [select(rows, name, length=t, batch=b, dim=d) for t, b, d in places]
            table.append([name, *("–" if row is None else decoded(row) for row in found)])
        yield markdown(["", *(f"{t} keys, B {b}, D {d}" for t, b, d in places)], table)


def decoded(row: Entry) -> str:
    return f"{number(1e3 * row['ms'])} ({number(row['gbps'])}){marked(row)}"


def memory(stored: Entry) -> Iterator[str]:
    rows = {name: row for name, row in stored.get("rows", {}).items() if row["part"] == "memory"}
    rows = {name: row for name, row in rows.items() if row["status"] == "measured"}
    if rows:
        own = next(iter(rows.values()))["config"]
        yield (
            f"A memory of {own['sub_keys']}^2 slots of {own['width']} numbers, {own['tokens']} tokens read and written "
            f"in chunks of {own['chunk']}: milliseconds as a CUDA graph, from Python, and peak MiB."
        )
        table = []
        for name, row in rows.items():
            eager = row.get("eager_ms", row["ms"])
            graph = number(row["ms"]) if row.get("eager_ms") and row["ms"] else "–"
            mib = "–" if row["mib"] is None else number(row["mib"])
            table.append([name.removeprefix("memory, ") + marked(row), graph, number(eager), mib])
        yield markdown(["", "graph", "from Python", "MiB"], table)


def models(stored: Entry) -> Iterator[str]:
    rows = rows_of(stored, "models")
    if rows:
        yield "Training steps (forward, backward, clipping, AdamW), bfloat16 autocast."
        table = []
        for row in rows:
            size = f"B {row['config']['batch']}, T {row['config']['tokens']}"
            mib = "–" if row["mib"] is None else number(row["mib"])
            by = {"fla": " by fla's kernels", "torch": " by PyTorch operations"}.get(row.get("delta_rule", ""), "")
            name = (row.get("preset") or row["model"] + by) + marked(row)
            cells = [number(row["ms"]), f"{row['tokens_per_second']:,.0f}", mib]
            table.append([f"{name}, {size}", row.get("runs", ""), *cells])
        yield markdown(["", "impl", "ms", "tokens/s", "MiB"], table)


def tools(stored: Entry) -> Iterator[str]:
    rows = {name: row for name, row in stored.get("rows", {}).items() if row["part"] == "tools"}
    rows = {name: row for name, row in rows.items() if row["status"] == "measured"}
    for kind, first in {"profile": "by torch's profiler", "ncu": "by ncu"}.items():
        own = {name.partition(", ")[2] + marked(row): row["kernels"]
               for name, row in rows.items() if name.startswith(kind)}  # fmt: skip
        columns = list(dict.fromkeys(key for kernels in own.values() for one in kernels for key in one))
        if own:
            yield f"The longest kernels of a call, {first}."
            table = [[name, *(number_or_text(one.get(key)) for key in columns)]
                     for name, kernels in own.items() for one in kernels[:5]]  # fmt: skip
            yield markdown(["", *columns], table)
    hosts = {name.partition(", ")[2]: row for name, row in rows.items() if "host_ms" in row}
    if hosts:
        yield "A call from Python: milliseconds of the device's kernels, of the host's part, and of the whole."
        rates = {key: words for key, words in {"tflops": "TFLOP/s", "gbps": "GB/s"}.items()
                 if any(key in row for row in hosts.values())}  # fmt: skip
        table = [[name, sized(row["config"]), row["launches"], number(row["us"] / 1e3), number(row["host_ms"]),
                  number(row["wall_ms"]), *(number_or_text(row.get(key)) for key in rates)]
                 for name, row in hosts.items()]  # fmt: skip
        yield markdown(["", "of", "launches", "kernels", "host", "whole", *rates.values()], table)
    judged_ = [[name, "none" if row["right"] else "**see the JSON**"] for name, row in rows.items() if "right" in row]
    if judged_:
        yield "Faults that compute-sanitizer finds."
        yield markdown(["", "faults"], judged_)


def sized(config: Entry) -> str:
    return ", ".join(x if isinstance(x, str) else f"{key.replace('_', ' ')} {x}" for key, x in config.items())


def number_or_text(x: Any) -> str:
    return "" if x is None else short(x) if isinstance(x, str) else number(x)


def short(kernel: str) -> str:
    """The name of a kernel; of one of torch, what it does."""
    if "::" not in kernel and not kernel.startswith("void"):
        return kernel
    names = re.findall(r"(\w+(?:_kernel_impl|_kernel_cuda|_cuda_out|_cuda|Functor)|(?<=::)\w+(?=[<(]))\b", kernel)
    told = next((x for x in names if not re.search("elementwise|^(gpu|Binary|Unary|array|operator)", x)), kernel[:30])
    return f"torch: {re.sub('(_kernel_impl|_kernel_cuda|_cuda_out|_cuda|Functor|_kernel)$', '', told)}"


def missing(stored: Entry) -> Iterator[str]:
    """What has no number, and why."""
    words = {"failed": "error", "hung": "error", "not available": "reason"}
    found: dict[str, list[str]] = {}
    for name, row in stored.get("rows", {}).items():
        if row["status"] != "measured":
            why = row.get(words.get(row["status"], ""), "")
            found.setdefault(f"{row['status']}{': ' + why if why else ''}", []).append(name)
    if found:
        yield "Without a number:"
        yield "\n".join(f"- {why.splitlines()[0][:300]}: {'; '.join(names)}" for why, names in found.items())


# The figure -----------------------------------------------------------------------------------------------------


def figure(stored: Entry, path: Path) -> bool:
    """Time over length by contestant, a panel for every share of live blocks; whether there was something to draw."""
    rows = [row for row in rows_of(stored, "compact") if "forward" in row and row["config"]["dim"] in (16, 64)]
    shares = sorted({row["config"]["share"] for row in rows}, reverse=True)
    if not rows:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    fig, axes = pyplot.subplots(1, len(shares), figsize=(4.2 * len(shares), 3.6), squeeze=False, layout="constrained")
    for axis, share in zip(axes[0], shares, strict=True):
        for name, points in curves([row for row in rows if row["config"]["share"] == share]):
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        axis.set(xscale="log", yscale="log", xlabel="tokens", title=f"live blocks: {share:.0%}")
        axis.set_xticks(JUDGED, [f"{n // 1024} K" for n in JUDGED])
    axes[0][0].set_ylabel("forward + backward, ms")
    axes[0][0].legend(fontsize=6)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=120)
    pyplot.close(fig)
    return True


def roofline(stored: Entry, path: Path) -> bool:
    """Rates of regard's kernels over operations a byte, and what the device reaches; whether there was something to
    draw. Operations are those that the rates of the tables count, bytes those of inputs and outputs, each once."""
    points = list(intensities(stored))
    if not points:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    top, memory_rate = stored["ceilings"]["tflops"], stored["ceilings"]["gbps"] / 1e3
    fig, axis = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
    most = max(2 * max(x for _, x, _ in points), 10 * top / memory_rate)
    least = min(0.5, *(x for _, x, _ in points))
    axis.plot(
        [least, top / memory_rate, most], [least * memory_rate, top, top], color="black", label="measured ceilings"
    )
    for name in dict.fromkeys(name for name, _, _ in points):
        own = [(x, y) for one, x, y in points if one == name]
        axis.plot(*zip(*own, strict=True), "o", markersize=4, label=name)
    axis.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s")
    axis.legend(fontsize=6)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=120)
    pyplot.close(fig)
    return True


def intensities(stored: Entry) -> Iterator[tuple[str, float, float]]:
    """Yield (name, operations a byte, TFLOP/s) of the rows of regard that have a rate."""
    for part, rate in {"compact": "dense_tflops", "local_linear": "tflops"}.items():
        for row in rows_of(stored, part):
            done = row.get("forward", {})
            if rate in done and row["contestant"].startswith("regard"):
                own = row["config"]
                size = 4 * 2 * own.get("batch", 1) * own["heads"] * own["length"] * own["dim"]  # q, k, v, out, bfloat16
                yield row["contestant"], done[rate] * done["ms"] * 1e9 / size, done[rate]
    for row in rows_of(stored, "decoding"):
        if row["contestant"].startswith("regard") and "gbps" in row:
            group = row["config"]["heads"] / row["config"]["kv_heads"]  # two operations a number and query head
            yield f"{row['contestant']}, one query", group, group * row["gbps"] / 1e3


def curves(rows: list[Entry]) -> Iterable[tuple[str, list[tuple[float, float]]]]:
    for name in dict.fromkeys(row["contestant"] for row in rows):
        own = [row for row in rows if row["contestant"] == name]
        points = sorted((row["config"]["length"], row["both"]["ms"]) for row in own if row["both"]["ms"])
        if points:
            yield name, points
