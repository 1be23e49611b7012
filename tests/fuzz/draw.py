"""What the fuzzer draws: numbers, tensors and valid calls."""

import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .kinds import POSITIVE, RATE, Anything, Flag, Kind, Real, Whole, Word

Arguments = dict[str, Any]
EPS = ("norm_eps", "rms_norm_eps", "layer_norm_eps", "initializer_range", "eps")
USUAL: dict[str, Kind] = {
    **dict.fromkeys(EPS, POSITIVE),
    **dict.fromkeys(("key_eps", "learning_rate", "address_weight"), RATE),
    **dict.fromkeys(("scale_limit", "persistent_scale_limit"), Real()),
    "rope_theta": Real(low=0.0, strict=True, most=1e30),
    "layer_idx": Whole(none=True, low=0),
}
"""What arguments of these names may be, whatever has them."""


@dataclass
class Call:
    """A valid call of a public function."""

    name: str  # what its errors call it
    run: Callable[..., Any]
    given: dict[str, Any]  # its arguments by name
    kinds: dict[str, Kind]  # what each of them may be; those without a kind are not replaced
    truth: Callable[..., Tensor] | None = None  # the expected result in float64, of the first tensor that comes back
    tolerance: float = 1e-9  # for the comparison with it
    gradients: tuple[str, ...] = ()  # the tensors among the arguments by which `truth` may be differentiated


def split(arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Kind]]:
    """Values and kinds of arguments: pairs (value, kind); a bool alone is a flag, anything else is not replaced."""
    given, kinds = {}, {}
    for name, argument in arguments.items():
        paired = type(argument) is tuple and len(argument) == 2 and isinstance(argument[1], Kind)
        alone = Flag() if isinstance(argument, bool) else Anything()
        given[name], kinds[name] = argument if paired else (argument, alone)
    return given, kinds


class Draw:
    """Choices from a source of random numbers, which hypothesis can replay and shrink."""

    def __init__(self, source: random.Random) -> None:
        self.source = source

    def one(self, *options: Any) -> Any:
        return options[self.source.randrange(len(options))]

    def word(self, *words: str, none: bool = False) -> tuple[str | None, Word]:
        """One of a few words (or None), and what it is."""
        return self.one(*words, *([None] if none else [])), Word(words=words, none=none)

    def whole(self, low: int, high: int) -> int:
        return self.source.randint(low, high)

    def flag(self) -> bool:
        return bool(self.source.randrange(2))

    def flags(self, *names: str) -> dict[str, bool]:
        """A flag for each name."""
        return {name: self.flag() for name in names}

    def often(self, value: Any, other: Any = None) -> Any:
        """`value` in one call of three, else `other`."""
        return value if self.source.randrange(3) == 0 else other

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.source.randrange(2**31))

    def normal(self, *size: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*size, generator=self._generator(), dtype=torch.float64)).to(dtype)

    def uniform(self, low: float, high: float, *size: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return (low + (high - low) * torch.rand(*size, generator=self._generator(), dtype=torch.float64)).to(dtype)

    def mask(self, *size: int) -> Tensor:
        return torch.rand(*size, generator=self._generator()) < 0.7

    def integers(self, high: int, *size: int) -> Tensor:
        return torch.randint(high, size, generator=self._generator())


def derived(draw: Draw, run: Callable[..., Any], named: Arguments) -> Arguments:
    """The arguments of `run` that its signature tells: a flag for each bool, and for the names in `USUAL` its default.
    Those in `named` stay as they are."""
    found: Arguments = {}
    for name, parameter in inspect.signature(run).parameters.items():
        if parameter.annotation in (bool, "bool"):
            found[name] = draw.flag()
        elif name in USUAL and parameter.default is not inspect.Parameter.empty:
            found[name] = (parameter.default, USUAL[name])
    return found | named


def called(name: str, run: Callable[..., Any], /, **arguments: Any) -> Call:
    """The call of a function, by its arguments as `split` takes them."""
    return Call(name, run, *split(arguments))


CALLS: dict[str, Callable[[Draw], Call]] = {}
"""All public calls that the fuzzer draws, by name."""


def arguments(**named: Any) -> Arguments:
    """Arguments as `split` takes them."""
    return named


def alike(kind: Kind, **values: Any) -> Arguments:
    """Arguments of one kind."""
    return {name: (value, kind) for name, value in values.items()}


def public(key: str, run: Callable[..., Any] | None = None) -> Any:
    """Register a function that draws a call, or only the arguments of `run`. Errors call `run` by `key`. What is drawn
    may leave out what `derived` finds."""

    def register(draws: Callable[[Draw], Any]) -> Callable[[Draw], Call]:
        def drawn(draw: Draw) -> Call:
            found = draws(draw)
            if isinstance(found, Call):
                return found
            assert run is not None
            return called(key, run, **derived(draw, run, found))

        CALLS[key] = drawn
        return drawn

    return register
