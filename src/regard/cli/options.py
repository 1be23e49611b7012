"""Reading dataclasses from flags (by tyro) and TOML files, with every mistake reported in one line."""

import argparse
import dataclasses
import io
import re
from contextlib import redirect_stderr
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from ..errors import ArgumentError, suggestion
from ..training.fields import flag as flag_of
from ..training.fields import from_mapping, read_mapping

C = TypeVar("C")
_BOX = re.compile(r"[─-╿▀-▟]+")
_TITLES = ("Value error", "Parsing error", "Required options", "Invalid choice", "Missing argument")
_PLAIN = {
    r"Error parsing (\S+): invalid literal for int.* base 10: (.*)": r"\1 is \2, expected an integer.",
    r"Error parsing (\S+): could not convert string to float: (.*)": r"\1 is \2, expected a number.",
    r"Missing value for argument '(.*)'\. Expected 1 values\.": r"\1 expects a value.",
    r"Missing from regard [\w ]+: (\S+) .*": r"\1 is missing. See --help.",
}
_OTHER_NAMES = {"output": "out", "mixers": "spec"}
"""The former name of --out, which appears in stored results, and what models call --spec."""
_CONFIG = "--config FILE.toml reads any of these options from a file; flags override the file."
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def parse(
    cls: type[C], argv: list[str], *, command: str, base: C | None = None, about: str | None = None, epilogue: str = ""
) -> C:
    """Return the dataclass `cls` from flags, which override the file of `--config`, which overrides `base`.

    Args:
        base: values set by neither flag nor file; default: the defaults of the class.
        about, epilogue: a docstring (default: that of the class) and a last paragraph for `--help`.

    Raises:
        ArgumentError: an unknown flag or key, or a value of the wrong type.
        SystemExit: with 0, after `--help`.
    """
    import tyro

    call = command.replace(" ", ": ")  # as the errors of a recipe begin
    file, argv = _prepare([_renamed(word, cls) for word in argv], cls, call)
    default = cls() if base is None else base
    if file is not None:
        default = from_mapping(default, read_mapping(file, call=call), call=call, source=str(file))
    shown = _grouped(default)
    summary = " ".join((about or cls.__doc__ or "").split("\n\n")[0].split())
    errors = io.StringIO()
    try:
        with redirect_stderr(errors):
            value, unknown = tyro.cli(
                type(shown),
                args=argv,
                default=shown,
                prog=f"regard {command}",
                description="\n\n".join(part for part in (summary, epilogue, _CONFIG) if part),
                return_unknown_args=True,
                config=(tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone, tyro.conf.OmitArgPrefixes),
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ArgumentError(f"{call}: {_squash(errors.getvalue())}") from None
    if unknown and not unknown[0].startswith("-"):
        raise ArgumentError(f"{call}: unexpected argument {unknown[0]!r}; options begin with --. See --help.")
    if unknown:
        flag, flags = unknown[0].partition("=")[0], map(flag_of, _values(default))
        hint = suggestion(flag.replace("_", "-"), [*flags, "--config", "--help"])
        raise ArgumentError(f"{call}: unknown option {flag}.{hint}")
    if shown is not default:
        value = cls(**{name: x for part in _values(value).values() for name, x in _values(part).items()})
    return value


def _renamed(word: str, cls: type[Any]) -> str:
    """Return a flag with another name of an option by the option's own."""
    name, equals, value = word.removeprefix("--").partition("=")
    field_name = _OTHER_NAMES.get(name) if word.startswith("--") else None
    return f"--{field_name}{equals}{value}" if field_name in {field.name for field in dataclasses.fields(cls)} else word


def _grouped(options: Any) -> Any:
    """Return the options with one dataclass per group, if the class has `groups`, so that --help shows the groups."""
    groups = getattr(options, "groups", None)
    if groups is None:
        return options
    parts = {name: kind(**_values(options, kind)) for name, kind in groups.items()}
    return dataclasses.make_dataclass("Options", [(name, type(part)) for name, part in parts.items()])(**parts)


def _values(options: Any, kind: Any = None) -> dict[str, Any]:
    """Return the values of the fields of a dataclass, or only of those that its base class `kind` has."""
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(kind or options)}


def _prepare(argv: list[str], cls: type[Any], call: str) -> tuple[Path | None, list[str]]:
    """Return the file of `--config` and the other arguments, with one occurrence of each repeatable flag."""
    reader = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    reader.add_argument("--config", type=Path)
    for name in (field.name for field in dataclasses.fields(cls) if field.metadata.get("repeatable")):
        reader.add_argument(flag_of(name), f"--{name}", dest=flag_of(name), nargs="+", action="extend")
    try:
        options, rest = reader.parse_known_args(argv)
    except argparse.ArgumentError as error:
        flag, _, _ = str(error.argument_name).partition("/")
        what = "a file, such as --config run.toml" if flag == "--config" else "a value"
        raise ArgumentError(f"{call}: {flag} expects {what}.") from None
    repeated = {flag: words for flag, words in vars(options).items() if flag != "config" and words}
    return options.config, rest + [word for flag, words in repeated.items() for word in (flag, *words)]


def _squash(box: str) -> str:
    """Return a boxed message as one line, without the help text that tyro repeats below it."""
    lines = (_BOX.sub(" ", line).strip() for line in _ANSI.sub("", box).splitlines())
    message = takewhile(lambda line: not line.startswith(("Argument helptext", "For full helptext")), lines)
    # without UTF-8 a box is made of dashes
    text = " ".join(word for line in message if line.strip("-") and line not in _TITLES for word in line.split())
    for pattern, plain in _PLAIN.items():
        text = re.sub(pattern, plain, text)
    return text or "the options could not be read. See --help."
