"""Compare the JSON of `gpu.py` with the targets of regard's kernels; torch is not needed."""

import datetime
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

Entry = dict[str, Any]
Find = Callable[[str], Entry | None]
"""The row of a name, None where it was not measured or is outdated."""
JUDGED = (8192, 16384, 32768, 65536)
FAMILIES = ("normal", "normalised", "anisotropic", "recall")
CACHES = ("16384 keys, B 1", "32768 keys, B 8", "131072 keys, B 1")


@dataclass(frozen=True)
class Criterion:
    """A target.

    Attributes:
        what: is compared, in words.
        target: in words.
        found: the worst that was measured, None where nothing was.
        met: whether that reaches the target.
        configurations: how many were measured, and of how many.
    """

    what: str
    target: str
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


def session(runs: list[Entry], number: int) -> int:
    """The first of the runs, within an hour before this one, on the same card: ratios may take rows of each."""
    card, date = runs[number]["hardware"].get("card"), datetime.datetime.fromisoformat(runs[number]["date"])
    for at, run in enumerate(runs[:number] if card else []):
        near = date - datetime.datetime.fromisoformat(run["date"]) <= datetime.timedelta(hours=1)
        if near and run["hardware"].get("card") == card:
            return at
    return number


def open_row(stored: Entry, name: str, kernels: str) -> str:
    """Why a row is to be measured yet, "" if it is not; `kernels` is the hash of the present sources."""
    row = stored.get("rows", {}).get(name, {})
    if row.get("status") != "measured":
        return row.get("status", "not measured")
    now = {**stored, "runs": [*stored["runs"], {"kernels": kernels}]}
    return "measured with other kernels" if outdated(now, row) else ""


def select(rows: Iterable[Entry], contestant: str, **config: Any) -> Entry | None:
    """The row of a contestant in a configuration, or None."""
    for row in rows:
        same = row.get("contestant") == contestant and "config" in row
        if same and all(row["config"].get(name) == value for name, value in config.items()):
            return row
    return None


def at_most(what: str, target: float, found: list[float | None]) -> Criterion:
    """The largest of what was found may be `target`."""
    known = [x for x in found if x is not None]
    worst = max(known, default=None)
    met = worst is not None and worst <= target
    return Criterion(what, f"at most {target:g}", worst, met, (len(known), len(found)))


def at_least(what: str, target: float, found: list[float | None]) -> Criterion:
    known = [x for x in found if x is not None]
    worst = min(known, default=None)
    met = worst is not None and worst >= target
    return Criterion(what, f"at least {target:g}", worst, met, (len(known), len(found)))


def criteria(stored: Entry) -> list[Criterion]:
    """All of them, in the order in which they were asked for, judged by rows that are not outdated."""
    now = {name: row for name, row in stored.get("rows", {}).items() if not outdated(stored, row)}
    runs = stored.get("runs", [])
    measured = {
        name: {**row, "session": session(runs, row["run"])} if "run" in row else row
        for name, row in now.items()
        if row["status"] == "measured"
    }
    return [correct(now), *(criterion for make in MAKERS for criterion in make(measured.get))]


def used() -> set[str]:
    """The names of the rows that the criteria look at, apart from those of the part `correctness`."""
    names: set[str] = set()
    for make in MAKERS:
        list(make(names.add))  # which finds nothing
    return names


def correct(rows: dict[str, Entry]) -> Criterion:
    every = [row for row in rows.values() if row["part"] == "correctness"]
    measured = [row for row in every if row["status"] == "measured"]
    wrong = sum(not row["right"] for row in measured) + sum(row["status"] in ("failed", "hung") for row in every)
    found = float(wrong) if measured or wrong else None
    counts = (len(measured), max(len(every), 1))
    return Criterion("configurations whose outputs or gradients are off", "0", found, wrong == 0, counts)


def ratio(find: Find, ours: str, theirs: str, number: Callable[[Entry], float | None]) -> float | None:
    """A number of our row over that of theirs, None where one is missing or was measured in another session."""
    a, b = find(ours), find(theirs)
    if a is None or b is None or a.get("session") != b.get("session"):
        return None
    over, under = number(a), number(b)
    return over / under if over and under else None  # a pass that did not fit has no time


def compact(find: Find) -> Iterator[Criterion]:
    def over(which: str, ours: str, theirs: str, length: int, dim: int, share: float) -> float | None:
        place = f"attention, T {length}, D {dim}, live {share:g}"
        return ratio(find, f"{place}, {ours}", f"{place}, {theirs}", lambda row: row[which]["ms"])

    for length in JUDGED:
        here = [(length, dim, share) for dim in (64, 128) for share in (0.4, 0.3, 1.0)]
        yield at_most(
            f"entmax-1.5, causal, forward + backward, T {length}: time over AdaSplash-2's",
            1.0,
            [over("both", "regard biweight", "adasplash 2", *place) for place in here],
        )
    sums = find("row sums, regard biweight")
    found = [None if sums is None else max(sums["from_one"].values())]
    yield at_most("entmax-1.5, sums of a row's weights, float32: distance from one", 1e-5, found)
    sparse = [(length, dim, 0.4) for length in JUDGED for dim in (64, 128)]
    yield at_most(
        "entmax-1.5, forward, 60 % of the blocks empty: time over flash attention's",
        1.5,
        [over("forward", "regard biweight", "flash", *place) for place in sparse],
    )
    yield at_least(
        "entmax-1.5 over ReLUmax, forward + backward, 60 % of the blocks empty: time",
        1.2,
        [over("both", "regard biweight", "regard relumax", *place) for place in sparse],
    )
    emptier = [(length, dim, 0.3) for length in JUDGED if length >= 16384 for dim in (64, 128)]
    for spec, words in (("biweight", "entmax-1.5"), ("relumax", "ReLUmax")):
        yield at_most(
            f"{words}, forward + backward, 70 % of the blocks empty, from 16 K on: time over flash attention's",
            1.0,
            [over("both", f"regard {spec}", "flash", *place) for place in emptier],
        )


def local_linear(find: Find) -> Iterator[Criterion]:
    own = [find(f"local linear, T 8192, D {dim}, regard local-linear") for dim in (64, 128)]
    yield at_least(
        "local linear attention, forward, T 8192: share of the measured matrix ceiling",
        0.35,
        [None if row is None else row["forward"].get("of_ceiling") for row in own],
    )
    timed = [None if row is None or None in (row["both"]["ms"], row["forward"]["ms"]) else row for row in own]
    backward = [None if row is None else row["both"]["ms"] / row["forward"]["ms"] - 1 for row in timed]
    yield at_most("local linear attention, T 8192: backward over forward time", 2.5, backward)
    floors = [find(f"floor, {data}, ridge {ridge}") for data in FAMILIES for ridge in ("0.1", "0.01")]
    found = [None if row is None else row["error"] / row["floor"] / row["bar"] for row in floors]
    what = "local linear attention, error over what bfloat16 allows (1.5 times the floor at ridge 0.1, twice at 0.01)"
    yield at_most(what, 1.0, found)


def decoding(find: Find) -> Iterator[Criterion]:
    caches = [f"decoding, {cache}, D {dim}" for cache in CACHES for dim in (64, 128)]
    found = [
        ratio(find, f"{cache}, regard local-linear", f"{cache}, regard softmax", lambda row: row["ms"])
        for cache in caches
    ]
    yield at_most("local linear attention, one decoded token, kernels alone: time over softmax attention's", 3.0, found)


def memory(find: Find) -> Iterator[Criterion]:
    row = find("memory, forward, impl=triton")
    what = "memory of fast weights, 4096 tokens read and written, 512^2 slots of 512 numbers: ms"
    yield at_most(what, 0.5, [None if row is None else row["ms"]])


def hybrid(find: Find) -> Iterator[Criterion]:
    def ms(row: Entry) -> float | None:
        return row["ms"] if row["delta_rule"] == "fla" else None

    found = ratio(find, "training step, GDN + FwPKM", "training step, GDN", ms)
    what = "GDN, by fla's kernels, with three memories of fast weights, a training step: time over GDN's"
    yield at_most(what, 1.35, [found])


MAKERS: tuple[Callable[[Find], Iterator[Criterion]], ...] = (compact, local_linear, decoding, memory, hybrid)
