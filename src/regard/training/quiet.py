"""Keeps notices and progress bars of others off the terminal, where ours say what matters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Errors only and no bars inside the block (or the function it decorates); as before afterwards."""
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
    """Inside the block the warning that local linear systems did not converge, which may come at every step, is given
    to `say` when it comes first; other warnings go where they went."""
    said = False
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            nonlocal said
            if UNCONVERGED not in str(message):
                others(message, category, *place, **more)
            elif not said:
                said = True
                say(f"{message} (Said once; `unconverged` in metrics.jsonl goes on to count.)")

        warnings.showwarning = show
        warnings.filterwarnings("always", message=f".*{UNCONVERGED}", category=RuntimeWarning)
        yield


UNCONVERGED = "systems did not converge"
"""What the warning says."""
