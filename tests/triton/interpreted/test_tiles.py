"""Which tiles a kernel takes: what tuning does, that every alternative of every table gives the right numbers, and that
tiles which do not fit one another cannot make wrong ones."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count
from typing import Any

import attention_calls
import memory_calls
import pytest
import torch
from dense_oracles import RULES, attend, seen_pairs
from triton.runtime.errors import OutOfResources

from regard.triton.compact import rules as compact
from regard.triton.runtime import tiles
from regard.triton.runtime.tiles import Tiles, TileTable

MODULES = ("compact.rules", "compact.backward", "local_linear.forward", "local_linear.backward", "memory.rounds")
COMPACT = ("softmax", "adaptive 2", "anchored 1", "fixed 3")
OWN, FIRST, SECOND = Tiles(16, 16), Tiles(32, 16), Tiles(64, 64)
MOST = 5
"""As many alternatives as a table has at most, by rows and keys: warps and stages mean nothing here."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Tuning is on; what is timed runs once and takes the next of these times, or less than whatever came before."""
    given: list[float] = []
    falling = count(1000, -1)

    def bench(run: Callable[[], Any], **options: Any) -> float:
        assert options["return_mode"] == "median"
        run()
        return given.pop(0) if given else next(falling)

    for name in MODULES:
        importlib.import_module(f"regard.triton.{name}")
    monkeypatch.setenv("REGARD_TRITON_TUNE", "1")
    monkeypatch.setattr("triton.testing.do_bench", bench)
    for table in TileTable.tables.values():
        monkeypatch.setattr(table, "tuned", {})
    yield given
    assert not given


# A table alone --------------------------------------------------------------------------------------------------


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> TileTable:
    monkeypatch.setattr(TileTable, "tables", {})
    return TileTable("some", {(64, 2): OWN, (128, 4): SECOND}, [FIRST, SECOND, OWN])


def test_the_fastest_is_taken_and_timed_once_for_a_key(clock: list[float], table: TileTable) -> None:
    ran: list[Tiles] = []
    clock += [3.0, 1.0, 2.0]
    assert table.pick(64, torch.bfloat16, ran.append, (1, True)) == FIRST
    assert ran == [OWN, FIRST, SECOND]
    assert table.pick(64, torch.bfloat16, ran.append, (1, True)) == FIRST
    assert len(ran) == 3
    clock += [1.0, 2.0, 3.0]
    assert table.pick(64, torch.bfloat16, ran.append, (2, True)) == OWN
    clock += [2.0, 3.0, 1.0]
    assert table.pick(65, torch.float32, ran.append) == OWN
    assert ran[6:] == [SECOND, FIRST, OWN]


def test_without_a_run_or_without_the_variable_nothing_is_timed(
    clock: list[float], table: TileTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert table.pick(64, torch.bfloat16) == OWN
    assert table.pick(64, torch.float32) == SECOND
    assert table.pick(999, torch.float32) == SECOND
    monkeypatch.delenv("REGARD_TRITON_TUNE")
    ran: list[Tiles] = []
    assert table.pick(64, torch.bfloat16, ran.append) == OWN
    with tiles.forced(rows=128, warps=8):
        assert table.pick(64, torch.bfloat16, ran.append) == Tiles(128, 16, 8, 2)
    assert not ran


def test_what_a_device_has_no_room_for_is_left_out(clock: list[float], table: TileTable) -> None:
    def run(found: Tiles) -> None:
        if found not in fits:
            raise OutOfResources(1, 0, "shared memory")

    fits = [SECOND]
    clock += [1.0]
    assert table.pick(64, torch.bfloat16, run) == SECOND
    fits = []
    assert table.pick(32, torch.bfloat16, run) == OWN  # whose launch says what is amiss


# All tables -----------------------------------------------------------------------------------------------------


def choices(table: TileTable) -> list[Tiles]:
    """Everything that a table names, with other rows or keys than the others."""
    return list({(x.rows, x.keys): x for x in (*table.shipped.values(), *table.others)}.values())


@pytest.fixture
def chosen(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> Callable[[int], dict[str, Tiles]]:
    """Has every table that is tuned take its nth choice, from the last to the first; returns these by name."""

    def choose(nth: int) -> dict[str, Tiles]:
        found = {}
        for name, table in TileTable.tables.items():
            of = choices(table)
            found[name] = of[nth % len(of)]
            monkeypatch.setattr(table, "others", (found[name],))
        return found

    return choose


def tuned() -> dict[str, Tiles]:
    """What was taken, by the name of the table: of one key each."""
    return {name: found for name, table in TileTable.tables.items() for found in table.tuned.values()}


def attended(rule: str, dtype: torch.dtype, what: Any = "", length: int = 150, **forced: int) -> None:
    """Compact attention of so many tokens, the forward pass with tiles of its own, against its dense form."""
    leaves = attention_calls.draw(length, length, 16, batch=1, heads=1, dtype=dtype)
    wide = attention_calls.wide(leaves)
    seen = seen_pairs(1, leaves[0].shape[1], length, length, is_causal=True)
    with tiles.forced(**forced) if forced else nullcontext():
        out = attention_calls.triton(leaves, rule, is_causal=True)
    most = (2e-5, 1e-4) if dtype == torch.float32 else (0.01, 0.02)
    attention_calls.compared(out, attend(*wide, seen, rule), leaves, wide, most, what)


EVERY = [(name, nth, dtype) for nth in range(MOST) for dtype in (torch.bfloat16, torch.float32) for name in COMPACT]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("name", "nth", "dtype"), attention_calls.pairs(EVERY, EVERY[1::9]))
def test_compact_attention(name: str, nth: int, dtype: torch.dtype, chosen: Callable[[int], dict[str, Tiles]]) -> None:
    taken = chosen(nth)
    attended(RULES[name], dtype, taken, 80)
    size = dtype.itemsize
    output = "compact_weigh" if name.startswith("anchored") else "compact_weigh_mean"
    passes = {
        "softmax": ("compact_stream",), "fixed 3": ("compact_stream", "compact_stand_in"),
    }.get(name, ("compact_search", output))  # fmt: skip
    assert tuned() == {x: taken[x] for x in (*(f"{x}_{size}" for x in passes), "compact_dq", "compact_dkv")}
    assert all(len(choices(table)) <= MOST for table in TileTable.tables.values())


@pytest.mark.slow
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("nth", range(MOST))
def test_local_linear_attention(nth: int, chosen: Callable[[int], dict[str, Tiles]]) -> None:
    chosen(nth)
    leaves = attention_calls.draw(40, 40, 6, batch=1, spread=1.0)
    attention_calls.checked(leaves, "local-linear", (1e-5, 1e-4), is_causal=True)
    assert {"local_linear_backward_rows", "local_linear_backward_keys"} <= tuned().keys()


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("nth", attention_calls.some(range(MOST), (1,)))
def test_memory(nth: int, chosen: Callable[[int], dict[str, Tiles]]) -> None:
    taken, leaves = chosen(nth), memory_calls.draw(heads=2)
    wide = attention_calls.wide(leaves)
    out, _ = memory_calls.triton(leaves, rule=memory_calls.rule())
    attention_calls.compared(out, memory_calls.dense(wide), leaves, wide, (2e-5, 5e-4), taken)
    assert {"memory_search", "memory_rows"} <= tuned().keys()


# Marks of blocks ------------------------------------------------------------------------------------------------


ODD = [
    (odd, name, size)
    for size in ((16, 16), (256, 128))
    for odd, name in (
        ("STREAM", "adaptive 2"), ("STREAM", "fixed 3"), ("STAND_IN", "fixed 3"), ("SEARCH", "adaptive 2"),
        ("SEARCH", "anchored 1"), ("WEIGH_MEAN", "adaptive 2"), ("WEIGH", "anchored 1"),
    )
]  # fmt: skip


@pytest.mark.usefixtures("poisoned", "in_bounds")
@pytest.mark.parametrize(("odd", "name", "size"), attention_calls.pairs(ODD, ODD[2:7]))
def test_tiles_that_do_not_fit_the_others_are_brought_to_fit(
    odd: str, name: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table with rows or keys that cut through the blocks which the others mark."""
    monkeypatch.setattr(getattr(compact, odd)[2], "shipped", {(256, 2): Tiles(*size)})
    attended(RULES[name], torch.bfloat16, (odd, size))


@pytest.mark.usefixtures("poisoned", "in_bounds")
@pytest.mark.parametrize("name", COMPACT)
def test_a_backward_pass_keeps_to_the_marks_of_its_forward_pass(name: str) -> None:
    attended(RULES[name], torch.float32, length=60, rows=16, keys=16)
