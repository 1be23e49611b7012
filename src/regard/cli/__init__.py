"""The `regard` command.

A command is a function `(arguments) -> exit code`, named here as "module:function" and imported when it is run, so that
`regard --help` imports nothing. Mistakes in the arguments (`ArgumentError`) give one line on standard error and exit
code 2, a run that cannot continue gives one line and 1, an interrupted run 130.
"""

import difflib
import gc
import sys
from collections.abc import Callable
from pkgutil import resolve_name

COMMANDS = {
    "demo": (None, "train small models on real text and on recall, and write tables and a report"),
    "train": ("regard.cli.commands:train", "train a language model on your text"),
    "eval": ("regard.cli.commands:evaluate", "measure a trained model on held-out text"),
    "generate": ("regard.cli.commands:generate", "continue a prompt with a trained model"),
    "reproduce": (None, "run an experiment: table, figures and JSON in a folder"),
    "list": ("regard.cli.show:listing", "show what can be selected by name: presets, kernels, ..."),
    "doctor": ("regard.cli.show:doctor", "show versions, devices, and available implementations"),
}
"""Command name to ("module:function", one line of help). None: an entry point of the group "regard.commands"."""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    name, rest = arguments[0], arguments[1:]
    if name in ("-V", "--version", "version"):
        from .._version import __version__

        print(f"regard {__version__}")
        return 0
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
        hint = f"Did you mean {close[0]!r}?" if close else f"Choose from: {', '.join(COMMANDS)}."
        return _fail(f"regard: error: unknown command {name!r}. {hint}", 2)
    return _guarded(name, rest)


def usage() -> str:
    """Return the text of `regard --help`."""
    lines = "\n".join(f"  {name:<10}{text}" for name, (_, text) in COMMANDS.items())
    return (
        "regard: attention as regression at test time.\n\nusage: regard COMMAND [options]\n\n"
        f"{lines}\n\n`regard COMMAND --help` lists the options of a command.\n"
        "Start with `regard demo`, or with `regard train --data FILE` and `regard generate runs/train`."
    )


def _guarded(name: str, rest: list[str]) -> int:
    """Run a command, and turn errors into one line and an exit code."""
    prefix = f"regard {name}: error: "
    collects = gc.isenabled()
    if name in ("list", "doctor") or rest in (["-h"], ["--help"]):
        gc.disable()  # saves a third of a second of imports
    try:
        return _load(name)(rest)
    except SystemExit as stop:  # --help
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        return _fail(f"regard {name}: interrupted", 130)
    except BrokenPipeError:  # `regard list | head`
        sys.stderr.close()
        return 0
    except ModuleNotFoundError as error:
        from ..errors import missing

        if what := missing(error, "recipes" if COMMANDS[name][0] is None else None):
            return _fail(prefix + what, 2)
        raise
    except Exception as error:
        from ..errors import ArgumentError
        from ..training.errors import TrainingInterrupted, TrainingStopped

        message = " ".join(str(error).split()).removeprefix(f"{name}: ")
        if isinstance(error, ArgumentError):
            return _fail(prefix + message, 2)
        if isinstance(error, TrainingInterrupted):
            return _fail(f"regard {name}: {message}", 130)
        if isinstance(error, TrainingStopped):
            return _fail(prefix + message, 1)
        if limit := _limit(error):
            return _fail(prefix + limit, 2)
        raise
    finally:
        if collects:
            gc.enable()


def _limit(error: Exception) -> str | None:
    """Return one line about input that is too large, too deep or unreadable, or None for a bug."""
    text = " ".join(str(error).split())
    if isinstance(error, RecursionError):
        return "the input is nested too deeply."
    if isinstance(error, OverflowError) or "overflow" in text.lower():  # torch's are RuntimeError and TypeError
        return f"a number is too large ({text[:200]})."
    if isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text:
        return f"there is not enough memory for these sizes ({text[:200] or 'MemoryError'})."
    if isinstance(error, (OSError, UnicodeError)):
        return text
    return None


def _load(name: str) -> Callable[[list[str]], int]:
    target = COMMANDS[name][0]
    if target is None:
        from importlib.metadata import entry_points

        (point,) = entry_points(group="regard.commands", name=name)
        return point.load()
    return resolve_name(target)


def _fail(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code
