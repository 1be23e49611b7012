"""Training on transformers' Trainer: text, tokenizers, seeded sampling, run folders, resuming.

    from pathlib import Path
    from regard.training import TrainConfig, train

    train(TrainConfig(data=Path("notes.txt"), spec=("biweight",), steps=500, out=Path("runs/notes")))

Names are imported on first use, so that `regard train --help` does not wait for transformers.
"""

# ruff: noqa: F401  (names for type checkers)
from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import extra_imports

if TYPE_CHECKING:
    from .config import TrainConfig
    from .data.text import Text, load_text, split_text
    from .data.tokenizers import TOKENIZERS, byte_tokenizer, char_tokenizer, encode, gpt2_tokenizer
    from .data.windows import SampledWindows, strided_windows, window_starts
    from .errors import TrainingInterrupted, TrainingStopped
    from .evaluation import Evaluation, Units, evaluate, mean_support, row_means
    from .generate import generate_text
    from .models import language_model, model_config
    from .run import RunSummary, train
    from .storage.folder import load_model
    from .storage.reproducer import rerun

_HOMES = {
    "config": ("TrainConfig",),
    "data.windows": ("SampledWindows", "strided_windows", "window_starts"),
    "errors": ("TrainingInterrupted", "TrainingStopped"),
    "evaluation": ("Evaluation", "Units", "evaluate", "mean_support", "row_means"),
    "storage.folder": ("load_model",),
    "generate": ("generate_text",),
    "models": ("language_model", "model_config"),
    "storage.reproducer": ("rerun",),
    "run": ("RunSummary", "train"),
    "data.text": ("Text", "load_text", "split_text"),
    "data.tokenizers": ("TOKENIZERS", "byte_tokenizer", "char_tokenizer", "encode", "gpt2_tokenizer"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with extra_imports():
        return getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
