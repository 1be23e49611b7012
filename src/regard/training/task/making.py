"""A task from the words of a command line."""

from __future__ import annotations

import dataclasses
from typing import Any, get_type_hints

from ...checks import ArgumentError, suggestion, within
from ...tasks import TokenTask, tasks
from ..fields import from_text


def make_task(kind: Any, setting: str, options: tuple[str, ...], call: str) -> TokenTask:
    """Return a task with a named setting and some fields changed.

    Args:
        kind: a class of `regard.tasks`.
        setting: its named setting.
        options: texts key=value.

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
        if not equals or name not in names:
            raise ArgumentError(
                f"{call}: --task-option is {word!r}, expected key=value with a field of the task."
                f"{suggestion(name, names)}"
            )
        if name in changes:
            raise ArgumentError(f"{call}: --task-option {name} is given twice; give it once.")
        changes[name] = from_text(text.strip(), hints[name], f"{call}: --task-option {name}")
    return within(call, "--setting", lambda: kind.named(setting, **changes))
