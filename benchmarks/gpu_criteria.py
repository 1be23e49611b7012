"""What regard's kernels must reach on a GPU, judged from the JSON of `gpu.py` alone; torch is not needed."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

Entry = dict[str, Any]
JUDGED = (8192, 16384, 32768, 65536)


@dataclass(frozen=True)
class Criterion:
    """A bar.

    Attributes:
        what: is compared, in words.
        bar: in words.
        found: the worst that was measured, None where nothing was.
        met: whether that reaches the bar.
        configurations: how many were measured, and of how many.
    """

    what: str
    bar: str
    found: float | None
    met: bool
    configurations: tuple[int, int]

    @property
    def verdict(self) -> str:
        if self.found is None:
            return "not measured"
        measured, all_of_them = self.configurations
        part = "" if measured == all_of_them else f" ({measured} of {all_of_them} configurations measured)"
        return ("met" if self.met else "missed") + part


def rows_of(stored: Entry, part: str) -> list[Entry]:
    """The rows of a part that were measured."""
    found = stored.get("rows", {}).values()
    return [row for row in found if row["part"] == part and row["status"] == "measured"]


def outdated(stored: Entry, row: Entry) -> bool:
    """Return whether a row tells of other sources of regard's kernels than the last run's."""
    runs = stored.get("runs", [])
    if "run" not in row or not row.get("contestant", "regard").startswith("regard"):
        return False
    return bool(runs[row["run"]].get("kernels") != runs[-1].get("kernels"))


def select(rows: Iterable[Entry], contestant: str, **config: Any) -> Entry | None:
    """The row of a contestant in a configuration, or None."""
    for row in rows:
        same = row.get("contestant") == contestant and "config" in row
        if same and all(row["config"].get(name) == value for name, value in config.items()):
            return row
    return None


def at_most(what: str, bar: float, found: list[float | None]) -> Criterion:
    """The largest of what was found may be `bar`."""
    known = [x for x in found if x is not None]
    worst = max(known, default=None)
    met = worst is not None and worst <= bar
    return Criterion(what, f"at most {bar:g}", worst, met, (len(known), len(found)))


def at_least(what: str, bar: float, found: list[float | None]) -> Criterion:
    known = [x for x in found if x is not None]
    worst = min(known, default=None)
    met = worst is not None and worst >= bar
    return Criterion(what, f"at least {bar:g}", worst, met, (len(known), len(found)))


def criteria(stored: Entry) -> list[Criterion]:
    """All of them, in the order in which they were asked for, judged by rows that are not outdated."""
    now = {name: row for name, row in stored.get("rows", {}).items() if not outdated(stored, row)}
    stored = {**stored, "rows": now}
    makers = (correct, compact, local_linear, decoding, memory, hybrid)
    return [criterion for make in makers for criterion in make(stored)]


def correct(stored: Entry) -> Iterator[Criterion]:
    every = [row for row in stored.get("rows", {}).values() if row["part"] == "correctness"]
    measured = [row for row in every if row["status"] == "measured"]
    wrong = sum(not row["right"] for row in measured) + sum(row["status"] in ("failed", "hung") for row in every)
    found = float(wrong) if measured or wrong else None
    counts = (len(measured), max(len(every), 1))
    yield Criterion("configurations whose outputs or gradients are off", "0", found, wrong == 0, counts)


def ratio(
    rows: list[Entry], which: str, ours: str, theirs: str, config: Entry, number: Callable[[Entry], float] | None = None
) -> float | None:
    """Ours over theirs in a configuration, None where one is missing or another run measured it."""
    a, b = select(rows, ours, **config), select(rows, theirs, **config)
    if a is None or b is None or a.get("run") != b.get("run"):
        return None
    get = number or (lambda row: row[which]["ms"])
    return get(a) / get(b) if get(a) and get(b) else None  # a pass that did not fit has no time


def compact(stored: Entry) -> Iterator[Criterion]:
    rows = rows_of(stored, "compact")
    places = [{"length": length, "dim": dim} for length in JUDGED for dim in (64, 128)]
    for length in JUDGED:
        here = [{"length": length, "dim": dim, "share": share} for dim in (64, 128) for share in (0.4, 0.3, 1.0)]
        yield at_most(
            f"entmax-1.5, causal, forward + backward, T {length}: time over AdaSplash-2's",
            1.0,
            [ratio(rows, "both", "regard biweight", "adasplash 2", config) for config in here],
        )
    sums = [row for row in rows if row.get("contestant") == "regard biweight" and "from_one" in row]
    found: list[float | None] = [max(row["from_one"].values()) for row in sums]
    yield at_most("entmax-1.5, sums of a row's weights, float32: distance from one", 1e-5, found or [None])
    sparse = [{**place, "share": 0.4} for place in places]
    yield at_most(
        "entmax-1.5, forward, 60 % of the blocks empty: time over flash attention's",
        1.5,
        [ratio(rows, "forward", "regard biweight", "flash", config) for config in sparse],
    )
    yield at_least(
        "entmax-1.5 over ReLUmax, forward + backward, 60 % of the blocks empty: time",
        1.2,
        [ratio(rows, "both", "regard biweight", "regard relumax", config) for config in sparse],
    )
    emptier = [{**place, "share": 0.3} for place in places if place["length"] >= 16384]
    for spec, words in (("biweight", "entmax-1.5"), ("relumax", "ReLUmax")):
        yield at_most(
            f"{words}, forward + backward, 70 % of the blocks empty, from 16 K on: time over flash attention's",
            1.0,
            [ratio(rows, "both", f"regard {spec}", "flash", config) for config in emptier],
        )


def local_linear(stored: Entry) -> Iterator[Criterion]:
    rows = rows_of(stored, "local_linear")
    name, places = "regard local-linear", [{"length": 8192, "dim": dim} for dim in (64, 128)]
    own = [select(rows, name, **place) for place in places]
    yield at_least(
        "local linear attention, forward, T 8192: share of the measured matrix ceiling",
        0.35,
        [None if row is None else row["forward"].get("of_ceiling") for row in own],
    )
    timed = [None if row is None or None in (row["both"]["ms"], row["forward"]["ms"]) else row for row in own]
    backward = [None if row is None else row["both"]["ms"] / row["forward"]["ms"] - 1 for row in timed]
    yield at_most("local linear attention, T 8192: backward over forward time", 2.5, backward)
    floors = [row for row in rows if "floor" in row]
    found: list[float | None] = [row["error"] / row["floor"] / row["bar"] for row in floors]
    what = "local linear attention, error over what bfloat16 allows (1.5 times the floor at ridge 0.1, twice at 0.01)"
    yield at_most(what, 1.0, found + [None] * (8 - len(found)))


def decoding(stored: Entry) -> Iterator[Criterion]:
    rows = rows_of(stored, "decoding")
    places = [{"length": length, "dim": dim} for length in (16384, 32768, 131072) for dim in (64, 128)]
    ours, softmax = "regard local-linear", "regard softmax"
    found = [ratio(rows, "", ours, softmax, place, lambda row: row["ms"]) for place in places]
    yield at_most("local linear attention, one decoded token, kernels alone: time over softmax attention's", 3.0, found)


def memory(stored: Entry) -> Iterator[Criterion]:
    rows = rows_of(stored, "memory")
    own = [row["ms"] for row in rows if row.get("impl") == "triton" and "eager_ms" in row]
    what = "memory of fast weights, 4096 tokens read and written, 512^2 slots of 512 numbers: ms"
    yield at_most(what, 0.5, own or [None])


def hybrid(stored: Entry) -> Iterator[Criterion]:
    steps = {row["model"]: row["ms"] for row in rows_of(stored, "models") if row.get("delta_rule") == "fla"}
    found = steps["GDN + FwPKM"] / steps["GDN"] if len(steps) == 2 else None
    what = "GDN, by fla's kernels, with three memories of fast weights, a training step: time over GDN's"
    yield at_most(what, 1.35, [found])
