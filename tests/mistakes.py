"""Calls that end in an error of regard."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from regard.checks import ArgumentError


def error_of(call: Callable[..., Any], /, *given: Any, **named: Any) -> str:
    """Return the message of the `ArgumentError` that a call raises, which is one line."""
    with pytest.raises(ArgumentError) as caught:
        call(*given, **named)
    text = str(caught.value)
    assert "\n" not in text, text
    return text


def refuses(words: str, call: Callable[..., Any], /, *given: Any, **named: Any) -> str:
    """Check that a call raises an `ArgumentError` whose message holds `words`, a regular expression; return it."""
    text = error_of(call, *given, **named)
    assert re.search(words, text), f"{words!r} is not in {text!r}"
    return text


def says(words: str, call: Callable[..., Any], /, *given: Any, **named: Any) -> str:
    """Check that a call raises an `ArgumentError` whose message holds `words`, pieces that " ... " separates, in that
    order; return the message."""
    return refuses(".*".join(map(re.escape, words.split(" ... "))), call, *given, **named)
