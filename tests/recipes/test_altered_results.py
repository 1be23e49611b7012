"""What stored rows, altered, say: claims that a run cannot test, and verdicts that the stored rows do not have."""

import math
from dataclasses import replace
from typing import Any

import pytest
from tiny_runs import stored

from regard_recipes.fwpkm.fwpkm_ablation import DOT
from regard_recipes.lib.claims import NOT_TESTABLE as NEVER

RUNS, PHI, F, OTHER = {"kind": "run"}, {"stream": "phi"}, {"stream": "f"}, {"stream": "transformer"}
SUNK, EVEN, UNLEARNED = {"first": 0.6, "strongest": 0.6}, {"first": 0.1, "strongest": 0.1}, {"validation": 0.0}
START, NO_SINKS, PLACE = "Sinks of phi always", "f has no sinks", "The place of the Transformer's sinks"
FORMED = "Induction heads form in f: the best head "
FA, GDN, WINDOWED = "FA | FwPKM", "GDN | FwPKM", "FA-pSWA | FwPKM"
FIRST, SECOND, LONGER = "One read is enough", "A second read", "Memories generalise"
MORE, WINDOWS, KEPT = "Longer texts", "Windows in training", "A memory kept"
LONG: Any = ({"length": 768}, {"length": 4096})
NORMAL, LAST = {"weights": "normalised", "query_key": "apart"}, {"kind": "look", "step": 450}
LINEAR = {"kind": "run", "model": "linear", "weights": "not normalised"}
KERNELS, SHARED, RBF = "All tested kernels", "Models converge with q = k", "RBF is marginally better"
RENAMED: Any = ({"model": GDN}, {"model": WINDOWED})


def share(answers: float, **where: Any) -> Any:
    return where, {"share": answers}


CASES: list[Any] = [
    *((name, [(RUNS, UNLEARNED)], {"": NEVER}) for name in (
        "fwpkm-case-studies", "recurring-names", "stories", "streaming-perplexity", "tinymath")),
    ("fwpkm-ablation", [(RUNS, UNLEARNED)], {"Writing": NEVER, "Removing": NEVER, "The memory": NEVER, "Dot": "fails"}),
    ("fwpkm-ablation", [({"kind": "run", "model": DOT}, {"diverged": True})], {"Dot": "holds"}),
    ("fwpkm-case-studies", [({"rule": "frozen"}, {"within": 0.0})], {"Writing": "fails", "They spike": NEVER}),
    ("iclm-mechanisms", [(PHI, EVEN), (F, EVEN)], {START: NEVER, NO_SINKS: NEVER, PLACE: NEVER}),
    ("iclm-mechanisms", [(PHI, SUNK), (F, EVEN), (OTHER, EVEN)], {START: "holds", NO_SINKS: "holds", PLACE: NEVER}),
    ("iclm-mechanisms", [(PHI, SUNK), (F, SUNK), (OTHER, SUNK)], {NO_SINKS: "fails", PLACE: "fails"}),
    ("iclm-mechanisms", [(PHI, {"first": 0.35, "strongest": 0.6})], {START: "holds"}),  # another may be stronger
    ("iclm-mechanisms", [({"when": "after"}, {"score": 0.7})], {f"{FORMED}after": "fails"}),
    ("iclm-mechanisms", [(RUNS, {"held_out": math.nan})], {
        "Heads of f copy": f"{NEVER}: the training of iclm-no-f-mlp on text, "}),
    ("iclm-parity", [({"model": "iclm-wv"}, {"test": math.nan})], {"Perplexity close": "undecided"}),
    ("iclm-parity", [({"model": "iclm-wv"}, {"step_cpu_seconds": 9.0})], {"Size, memory": "fails"}),
    ("kernel-selection", [({**LAST, "model": "relu", "query_key": "q = k"}, {"train": 9.0})],
     {SHARED: "fails", KERNELS: "holds", RBF: "holds"}),
    ("kernel-selection", [({**NORMAL, "model": "clipped-geometric", "kind": "look"}, {"train": math.nan})],
     {KERNELS: "fails", "The clipped geometric series": "fails", SHARED: "holds"}),
    ("kernel-selection", [(LINEAR, {"test": 9.0}), ({**NORMAL, "model": "rbf", "kind": "run"}, {"test": 9.0})],
     {"The linear kernel suffices": "fails", RBF: "fails"}),
    ("kernel-selection", [({**NORMAL, "model": "rbf", "kind": "run", "seed": 0}, {"test": 9.0})], {RBF: NEVER}),
    ("kernel-selection", [({"query_key": "q = k"}, {"query_key_bytes": 1e9})], {"q = k halves": "fails"}),
    ("needle", [share(0.0)], dict.fromkeys((FIRST, SECOND, LONGER, WINDOWS, KEPT), NEVER)),
    ("needle", [share(1.0, protocol="whole", read=1), share(0.4, protocol="whole", read=2),
                share(0.4, protocol="flushed", read=1)], {FIRST: "fails", SECOND: "fails"}),
    ("needle", [share(0.1, model="FA", length=768)], {LONGER: "holds"}),
    ("needle", [share(0.0, model=FA, length=768)], {LONGER: "fails"}),
    ("needle", [share(0.0, model="FA")], {LONGER: NEVER, SECOND: "holds"}),
    ("needle", [], {LONGER: NEVER}, {"context": 1000}),  # within a window of training
    ("needle", [share(0.2, state="kept")], {KEPT: "fails"}),
    ("needle", [LONG], {MORE: "fails"}, {"lengths": (48, 4096)}),
    ("needle", [LONG, share(0.0, length=4096, protocol="whole", read=2)], {MORE: "holds"}, {"lengths": (48, 4096)}),
    ("needle", [RENAMED, share(0.0, model=FA, length=768), share(1.0, model=WINDOWED, length=768)], {WINDOWS: "holds"},
     {"models": (FA, WINDOWED)}),
    ("needle", [RENAMED, share(1.0, model=FA, length=768), share(0.0, model=WINDOWED, length=768)], {WINDOWS: "fails"},
     {"models": (FA, WINDOWED)}),
]  # fmt: skip
"""Recipe; of the rows with these columns, other columns; start of a claim to its verdict; other options, if any."""


@pytest.mark.parametrize("case", CASES)
def test_verdicts(case: Any) -> None:
    name, changes, expected, *options = case
    made, found = stored(name)
    frame = found.frame.copy()
    for where, values in changes:
        rows = (frame[list(where)] == list(where.values())).all(axis=1)
        assert rows.any()
        frame.loc[rows, list(values)] = list(values.values())
    claims = replace(made, **dict(*options)).claims(replace(found, frame=frame))
    for start, verdict in expected.items():
        told = [f"{claim.verdict}: {claim.untestable}" for claim in claims if claim.wording.startswith(start)]
        assert told
        assert all(each.startswith(f"{verdict}:" if ":" not in verdict else verdict) for each in told), (start, told)
