"""A task from the words of a command line."""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

from ...checks import ArgumentError, require, suggestion, within
from ...tasks import TokenTask, tasks
from ..fields import from_text


def make_task(kind: Any, setting: str, options: tuple[str, ...], call: str) -> TokenTask:
    """Return a task of the class `kind` with a named setting, changed by `options` (texts key=value).

    Raises:
        ArgumentError: a task without tokens, an unknown setting or field, or a value that does not fit.
    """
    if not (isinstance(kind, type) and issubclass(kind, TokenTask)):
        known = [name for name, each in tasks.items() if isinstance(each, type) and issubclass(each, TokenTask)]
        raise ArgumentError(f"{call}: --task: {kind.__name__} is no task of tokens; choose from {', '.join(known)}.")
    hints = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    changes: dict[str, Any] = {}
    for word in options:
        key, equals, text = word.partition("=")
        name = key.strip().replace("-", "_")
        expected = f"expected key=value with a field of the task.{suggestion(name, names)}"
        require(bool(equals) and name in names, call, f"--task-option is {word!r}, {expected}")
        require(name not in changes, call, f"--task-option {name} is given twice; give it once.")
        changes[name] = from_text(text.strip(), hints[name], f"{call}: --task-option {name}")
    return within(call, "--setting", lambda: kind.named(setting, **changes))
