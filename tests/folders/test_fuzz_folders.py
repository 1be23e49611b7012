"""Every file of a run folder, mutated in every way we know, read by every command.

Each ends with the right answer or with one line of ours: no traceback, no hang, no other answer. Each is tried twice:
as damage, where the seals stay as they were, and as malice, where they are written anew. After malice the answer may be
another one (who changes a weight or a setting and seals it gets what was asked for), but the end is as clean.
"""

import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Result
from hostile import COMMANDS, answer, reseal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regard.cli import main

SECONDS = 90
BOUND = 12 << 30


def limit() -> None:
    """Bound the memory of this process."""
    resource.setrlimit(resource.RLIMIT_AS, (BOUND, BOUND))
    torch.set_num_threads(1)


def execute(words: list[str]) -> tuple[int, str, str]:
    """Run a command line; return the exit code and what was printed."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = main(words)
        except BaseException:
            code = 99
            traceback.print_exc()
    return code, out.getvalue(), err.getvalue()


class Server:
    """A process that runs one command line after the other, with a limit of memory, and of time for each."""

    def __init__(self) -> None:
        self.pool = multiprocessing.get_context("spawn").Pool(1, limit)

    def run(self, words: tuple) -> Result:
        """The exit code and what was printed; code -1 where there was no answer in time, or none at all."""
        try:
            return Result(*self.pool.apply_async(execute, ([str(word) for word in words],)).get(SECONDS))
        except multiprocessing.TimeoutError:  # also where the process has died
            self.pool.terminate()
            self.__init__()
            return Result(-1, "", "no answer")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.pool.terminate()


def replaced(make: Callable[[Path], object]) -> Callable:
    """The file gives place to something else."""

    def mutate(path: Path, draw: random.Random) -> None:
        path.unlink()
        make(path)

    return mutate


def written(change: Callable[[bytes, random.Random], bytes]) -> Callable:
    """The bytes of the file change."""
    return lambda path, draw: path.write_bytes(change(path.read_bytes(), draw)) and None


def flipped(content: bytes, draw: random.Random) -> bytes:
    corrupted = bytearray(content)
    for _ in range(draw.choice((1, 1, 3, 20))):
        corrupted[draw.randrange(len(corrupted))] ^= 1 << draw.randrange(8)
    return bytes(corrupted)


def swapped(content: bytes, draw: random.Random) -> bytes:
    """Two stretches change places: lengths stay as they were."""
    size = max(1, len(content) // 20)
    i, j = sorted(draw.sample(range(len(content) - size), 2))
    if j < i + size:
        return content[:i] + content[i + size :] + content[i : i + size]
    return content[:i] + content[j : j + size] + content[i + size : j] + content[i : i + size] + content[j + size :]


VALUES = (0, -1, 1, 3, 10**9, 2**31, 2**63, 10**30, 10**400, 1e308, -1e308, 0.5, float("nan"), float("inf"))
OTHERS = (*VALUES, None, True, "", "x", "\0", "/dev/zero", "../..", "x" * 10**5, [], [[]], {}, {"a": 1}, [1, "b", None])


def places(table: Any, path: tuple = ()) -> Iterator[tuple]:
    """The paths to every value in a JSON table."""
    items = table.items() if isinstance(table, dict) else enumerate(table) if isinstance(table, list) else ()
    for key, value in list(items)[:200]:
        yield (*path, key)
        yield from places(value, (*path, key))


def revalued(content: bytes, draw: random.Random) -> bytes:
    """One value of a JSON file, or one key, becomes another."""
    table = json.loads(content)
    *above, last = draw.choice(list(places(table)))
    inner = table
    for key in above:
        inner = inner[key]
    kind = draw.randrange(4)
    if kind == 0 and isinstance(inner, dict):
        inner[draw.choice(("x", "", "\0", "__class__", "to_dict", "num_labels", "step"))] = inner.pop(last)
    elif kind == 1:
        del inner[last]
    else:
        inner[last] = draw.choice(OTHERS)
    return json.dumps(table).encode()


def nested(content: bytes, draw: random.Random) -> bytes:
    return b'{"a":' * 10**5 + b"1" + b"}" * 10**5


ANY = {
    "flip": written(flipped),
    "swap": written(swapped),
    "cut": written(lambda content, draw: content[: draw.randrange(len(content))]),
    "empty": written(lambda content, draw: b""),
    "zeros": written(lambda content, draw: b"\0" * len(content)),
    "tail of zeros": written(lambda content, draw: content[: len(content) // 2] + b"\0" * 100),
    "longer": written(lambda content, draw: content + content),
    "missing": replaced(lambda path: None),
    "folder": replaced(Path.mkdir),
    "pipe": replaced(os.mkfifo),
    "link to zeros": replaced(lambda path: path.symlink_to("/dev/zero")),
    "link to nothing": replaced(lambda path: path.symlink_to("nowhere")),
    "link to itself": replaced(lambda path: path.symlink_to(path.name)),
}
JSON = {"nested": written(nested), "value": written(revalued)}


def mutations(path: Path) -> dict[str, Callable]:
    return {**ANY, **JSON} if path.suffix == ".json" else ANY


READERS = {"checkpoint-4": ("resume",), "tokenizer": ("resume",), "model": ("generate", "eval")}
"""Which commands read what lies in a folder of the run; all three read what lies in none of these."""


def files(run: Path) -> list[str]:
    """What a command may read in a run folder."""
    # written only, read in another test, or as good as checkpoint-4
    skipped = ("tensorboard", "summary.json", "metrics.jsonl", "checkpoint-2")
    paths = (path.relative_to(run).as_posix() for path in sorted(run.rglob("*")) if path.is_file())
    return [path for path in paths if not path.startswith(skipped)]


def clean(told: Result) -> bool:
    """One line of ours, or an answer with at most lines about skipped checkpoints and progress."""
    if told.code == 0:
        return "Traceback" not in told.err
    return told.code in (1, 2) and told.err.count("\n") == 1 and told.err.startswith("regard")


def spoil(trained: Path, run: Path, name: str, mutation: Callable, draw: random.Random, *, again: bool) -> None:
    """Make `run` a copy of the trained one with one file mutated, and sealed again or not."""
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(trained, run, ignore=shutil.ignore_patterns("tensorboard"))
    mutation(run / name, draw)
    if again and not name.endswith(("COMPLETE.json", "run.json")):
        reseal(run)


def numbers(lines: list[str]) -> str:
    return re.sub(r"/\S+", "", " ".join(lines))


def look(
    server: Server, trained: Path, run: Path, want: dict, name: str, how: str, seed: int, again: bool
) -> list[str]:
    """What is wrong with how the commands take one mutation. (From an older checkpoint, which is said, other steps are
    done with the schedule of the new number of steps.)"""
    wrong = []
    for command in READERS.get(name.partition("/")[0], tuple(COMMANDS)):
        words = COMMANDS[command]
        spoil(trained, run, name, mutations(Path(name))[how], random.Random(seed), again=again)
        told = server.run(words(run))
        same = numbers(answer(told)) == numbers(want[command]) or "skipping checkpoint" in told.err
        if not clean(told):
            wrong.append(f"{command}, {name}, {how}, {seed}, again={again}: {told.code} {told.err[-600:]}")
        elif told.code == 0 and not again and not same:
            wrong.append(f"{command}, {name}, {how}, {seed}: another answer")
    return wrong


def wanted(server: Server, trained: Path, run: Path) -> dict[str, list[str]]:
    """What the commands say of the run as it was trained."""
    found = {}
    for command, words in COMMANDS.items():
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(trained, run)
        told = server.run(words(run))
        assert told.code == 0, told.err
        found[command] = answer(told)
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("again", [False, True], ids=["damage", "malice"])
def test_every_file_in_every_way(server: Server, trained: Path, tmp_path: Path, again: bool) -> None:
    want = wanted(server, trained, tmp_path / "run")
    wrong = []
    for name in files(trained):
        for how in mutations(Path(name)):
            for seed in range(3 if how == "value" else 1):
                wrong += look(server, trained, tmp_path / "run", want, name, how, seed, again)
    assert not wrong, f"{len(wrong)} mutations:\n" + "\n".join(wrong)


examples = settings(
    max_examples=int(os.environ.get("REGARD_FUZZ_EXAMPLES", "100")), deadline=None, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
def test_drawn_mutations(server: Server, trained: Path, tmp_path: Path) -> None:
    """As many as REGARD_FUZZ_EXAMPLES says; 10,000 take hours."""
    want = wanted(server, trained, tmp_path / "run")

    @examples
    @given(name=st.sampled_from(files(trained)), seed=st.integers(0, 2**32 - 1), again=st.booleans(), data=st.data())
    def each(name: str, seed: int, again: bool, data: st.DataObject) -> None:
        how = data.draw(st.sampled_from(sorted(mutations(Path(name)))))
        wrong = look(server, trained, tmp_path / "run", want, name, how, seed, again)
        assert not wrong, "\n".join(wrong)

    each()


@pytest.mark.parametrize(
    ("name", "how"), [("run.json", "value"), ("config.json", "pipe"), ("model/config.json", "nested")]
)
def test_some_files_in_some_ways(server: Server, trained: Path, tmp_path: Path, name: str, how: str) -> None:
    want = wanted(server, trained, tmp_path / "run")
    wrong = look(server, trained, tmp_path / "run", want, name, how, 1, False)
    wrong += look(server, trained, tmp_path / "run", want, name, how, 2, True)
    assert not wrong, "\n".join(wrong)
