"""Recipes as small as they go, each run once for all tests, whichever process they are in."""

import os
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from regard.recipes import recipes
from regard_recipes.fwpkm._recall_measures import coverage
from regard_recipes.lib.recipe import Recipe, Results, check_shared
from regard_recipes.lib.results import load
from regard_recipes.lib.running import run

TASK: dict[str, Any] = {"steps": 2, "width": 16, "batch": 2, "examples": 2, "seeds": 2}
MEMORY: dict[str, Any] = {**TASK, "sub_keys": 8, "memory_dim": 8, "top_k": 2, "context": 48, "chunk": 8}
NEEDLES: dict[str, Any] = {**MEMORY, "haystack": 40, "examples": 3, "reads": 2, "words": 60}
TEXT: dict[str, Any] = {"steps": 2, "width": 16, "batch": 2, "heads": 2, "layers": 2, "context": 32, "measured": 300}
TINY: dict[str, dict[str, Any]] = {
    "associative-recall": {**TASK, "models": ("softmax", "linear")},
    "boundary-bias": {"sizes": (64, 256), "seeds": 6, "radii": 24, "directions": 3},
    "dispersion": {"seeds": 2, "lengths": (16, 32), "queries": 4, "dim": 8},
    "fast-weight-recall": {
        "rules": ("paper",), "sub_keys": 8, "stress_sub_keys": 4, "key_dim": 16, "top_k": 2, "width": 16, "keys": 12,
        "pairs": 6, "documents": 2, "reads": 3, "steps": 3, "stress_steps": 2, "batch": 2, "examples": 3,
    },
    "fwpkm-ablation": {**NEEDLES, "documents": 2, "segments": 2, "models": ("no memory", "FwPKM", "without gating")},
    "fwpkm-case-studies": {**NEEDLES, "gate_chunk": 4, "gate_tokens": 50, "documents": 2, "drawn": 30},
    "fwpkm-cost": {"layouts": ("GDN",), "memories": ("none", "FwPKM"), "steps": 2},
    "iclm-mechanisms": {
        "layers": 2, "width": 16, "steps": 2, "block_steps": 2, "measured": 300, "looks": 1, "texts": 2, "prompt": 12,
        "context": 16, "seeds": 1,
    },
    "iclm-parity": {**TEXT, "steps": 3, "rates": (1e-3, 3e-3), "looks": 2, "seeds": 1},
    "in-context-language": TASK,
    "in-context-regression": {**TASK, "width": 8, "dim": 2, "length": 8, "segments": (4,)},
    "kernel-selection": {
        "models": ("exponential", "linear", "rbf", "clipped-geometric"), "rates": (1e-3,), "earlier": ("rbf",),
        "seeds": 2, "layers": 1,
        "width": 16, "heads": 2, "context": 16, "batch": 2, "steps": 4, "measured": 300, "looks": 2,
    },
    "kernel-zoo": {"points": 13, "plane": 7},
    "length-generalization": TASK,
    "lla-numerics": {
        "length": 96, "dim": 8, "draws": 2, "families": ("normal", "anisotropic"), "steps": (1, 4, 16),
        "tols": (0.01, 0.0001), "ridges": (1.0, 0.1),
    },
    "lla-variants": {
        "dim": 8, "length": 128, "segment": 32, "sequences": 3, "windows": (16, 32), "steps": (0, 1, 4),
        "tols": (0.1, 0.001), "repeats": 2, "ridges": (0.1, 1.0),
    },
    "lla-pretraining": {**TEXT, "models": ("softmax, normalised", "local linear, ridge 0.1, normalised")},
    "mosaic-kernels": {
        **TEXT, "models": ("softmax", "topk-uniform", "normrelu", "biweight"), "released": ("fast",), "layers": (1, 2),
        "ks": (3,), "seeds": 2, "context": 16, "steps": 4, "looks": 2,
    },
    "needle": {
        **MEMORY, "examples": 4, "lengths": (40, 70), "models": ("GDN", "GDN | FwPKM", "GDN | FwMLP"), "words": 9,
    },
    "out-of-distribution": {**TEXT, "models": ("softmax", "relumax")},
    "recall-capacity": {
        "dim": 32, "pairs": (8, 64), "stored": 48, "noise": (0.5, 4.0), "erased": (0.25, 0.9),
        "zeroed": (0.1, 0.5, 0.9), "jitter": (0.5, 4.0), "cues": 32, "seeds": 3, "scales": (1.0, 30.0),
    },
    "recurring-names": {**TASK, "sentences": 12, "people": 2, "sub_keys": 8},
    "shared-query-key": {"steps": 2, "seeds": 2, "models": ("softmax", "elu"), "rates": (3e-3,), "measured": 600},
    "slot-use": {**TEXT, "models": ("no norm, many slots", "batch norm, many slots"), "sub_keys": 8, "memory_dim": 8},
    "state-tracking": {**TASK, "models": ("softmax", "Mamba")},
    "stories": {**TASK, "graded": 2, "models": ("Transformer", "ICLM")},
    "streaming-perplexity": {**MEMORY, "models": ("GDN", "GDN | FwPKM", "FA", "FA | FwPKM"), "examples": 4},
    "sweep": {"steps": 2, "batch": 2, "examples": 2},
    "tinymath": {**TASK, "layers": 2},
    "test-time-regression": {
        "dims": (4, 16), "segments": (8, 32), "length": 64, "sequences": 3, "held_out": 1, "query_noise": (0.5,),
        "noisy_segment": 32, "specs": ("softmax", "biweight"), "residuals": ("softmax+mesa", "biweight+linear"),
        "scales": (0.5, 1.0), "ridges": (0.1, 1.0), "tol": 1e-4,
    },
}  # fmt: skip
SHORTER = {
    "fast-weight-recall": ("regard_recipes.fwpkm._recall_measures.coverage",
                           partial(coverage, sub_keys=8, chunks=4, looked_at=2)),
}  # fmt: skip
"""Constants and functions to replace in a tiny run."""


def make(name: str, **changes: Any) -> Any:
    """Return a recipe with the options of a tiny run."""
    return configured(name, **{"workers": 0, **TINY[name], **changes})


def configured(name: str, size: str = "quick", **changes: Any) -> Any:
    """Return a recipe of a size with some options changed."""
    return recipes.get(name).configure(size, **changes)


def checked(name: str, size: str = "small", **changes: Any) -> Any:
    """Return a recipe of a size with some options changed, after its options were checked."""
    made = configured(name, size, **changes)
    check_shared(made)
    return made


FOLDER = Path(tempfile.gettempdir()) / f"tiny-runs-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}"
"""Of all processes of a test run."""


@cache
def tiny(name: str) -> tuple[Any, Results]:
    """Return a recipe and what a tiny run stored; `made.out` is its folder."""
    FOLDER.mkdir(exist_ok=True)
    made: Recipe = make(name, out=FOLDER / name)
    with FileLock(FOLDER / f"{name}.lock"), pytest.MonkeyPatch.context() as patch:
        if name in SHORTER:
            patch.setattr(*SHORTER[name])
        if not (FOLDER / name / f"{name}.json").exists():
            run(made, [], lambda text: None)
    return made, load(type(made), made.out)[1]


def stored(name: str) -> tuple[Any, Results]:
    """Return a recipe and what a run stored for the pages of the docs."""
    return load(recipes.get(name), Path(__file__).parents[2] / "docs" / "results")


def without_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build figures, but leave their pictures empty, which takes most of the time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    monkeypatch.setattr(FigureCanvasAgg, "print_png", lambda self, file, **how: None)
