"""Silence notices and progress bars of other libraries."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging

UNCONVERGED = "systems did not converge"
"""Text of the warning that `unconverged_once` filters."""


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Let transformers print only errors and no progress bars, inside a block or a decorated function."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def unconverged_once(say: Callable[[str], None]) -> Iterator[None]:
    """Pass the first warning about local linear systems that did not converge to `say`, and drop the later ones."""
    shown = False
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
            nonlocal shown
            if UNCONVERGED not in str(message):
                others(message, category, *args, **kwargs)
            elif not shown:
                shown = True
                say(f"{message} (Shown once; see `unconverged` in metrics.jsonl.)")

        warnings.showwarning = show
        warnings.filterwarnings("always", message=f".*{UNCONVERGED}", category=RuntimeWarning)
        yield
