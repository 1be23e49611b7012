"""How well each kernel recalls what was stored: against the number of pairs, noisy cues, partial cues, damage.

Random unit keys, random unit values. A cue is a stored key as the condition makes it; what is retrieved is compared
with the value stored beside that key:

* relative squared error |retrieved - value|^2 / |value|^2;
* exact match: the stored value nearest to what is retrieved is the right one (nothing retrieved is no match).

With clean cues the error is split as in equation 5 of the local-linear-attention paper. What is retrieved is
sum_j' a_j' v_j', with a_j the weight of the cue's own value: (a_j - 1) v_j is the signal bias, the rest interference,
and the inverse signal-to-noise ratio sum |interference|^2 / sum |a_j v_j|^2.

Beside the kernels stand global linear models of the same pairs (Mesa, the delta rule), whose state is what is damaged.

Every kernel sees the same keys, values, cues and damage. A kernel that takes a scale is given each of the scales; for
one that takes none, keys and cues are multiplied by the root of it, which makes the same of their dot products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from regard.checks import ArgumentError, suggestion
from regard.grammar import Spec, as_spec, presets_registry
from regard.memory.associative import AssociativeMemory
from regard.memory.associative.sums import trend_of
from regard.recipes import Findings, Progress, recipes
from regard.recurrent.linear import finite_features
from regard.recurrent.trends import trends

CALL = "reproduce: recall-capacity"
DIGITS = 4
"""Significant ones, of the numbers in the JSON file."""
PAIRWISE = 2**24
"""Numbers that a read of a local linear model may build at once."""


@dataclass(frozen=True, kw_only=True)
class RecallCapacityConfig:
    """Measure how well every preset recalls stored pairs."""

    out: Path = Path("recall-capacity-out")
    """Folder to write. An earlier result in it is replaced; any other folder must be empty."""
    specs: tuple[str, ...] = ()
    """Sentences to measure, such as softmax 'triweight*anchored(margin=1)'. By default every preset."""
    models: tuple[str, ...] = ("mesa(ridge=0.01)", "mesa(ridge=1)", "delta")
    """Global linear models to measure beside them."""
    scales: tuple[float, ...] = (1.0, 5.0, 20.0, 75.0, 300.0)
    """Scales of the scores. The figure shows, for each kernel, the one with most exact matches in all conditions."""
    pairs: tuple[int, ...] = (16, 64, 256, 1024, 4096)
    """Numbers of stored pairs, with clean cues."""
    stored: int = 256
    """Pairs stored in all other conditions."""
    noise: tuple[float, ...] = (0.5, 1.0, 2.0, 3.0, 4.0)
    """Cue noise: length of a random vector added to a unit key; the cue is then made a unit vector again."""
    erased: tuple[float, ...] = (0.25, 0.5, 0.75, 0.875, 0.9375)
    """Fractions of a cue's coordinates that are set to zero."""
    zeroed: tuple[float, ...] = (0.1, 0.25, 0.5, 0.75, 0.9)
    """Damage: fractions of the stored numbers that are set to zero."""
    jitter: tuple[float, ...] = (0.5, 1.0, 2.0)
    """Damage: standard deviation of noise on the stored numbers, in units of their root mean square."""
    cues: int = 64
    """Cues per memory, of different pairs (all pairs where fewer are stored)."""
    dim: int = 64
    """Channels of keys and values."""
    seeds: int = 5
    """Independent memories per condition; tables give mean and standard deviation over them."""
    seed: int = 0
    """Decides all of them."""


@dataclass(frozen=True)
class Condition:
    """One cell of the figure."""

    panel: str  # "pairs", "noise", "erased", "zeroed" or "jitter"
    level: float
    pairs: int


@dataclass(frozen=True)
class Trial:
    """The memories and cues of one condition, the same for every kernel.

    Attributes:
        keys, values: [S, 1, n, D] unit vectors, one memory a seed.
        cues: [S, 1, C, D], made of the first C keys.
        condition: what is done to them.
        seed: of the damage.
    """

    keys: Tensor
    values: Tensor
    cues: Tensor
    condition: Condition
    seed: int


def conditions(config: RecallCapacityConfig) -> list[Condition]:
    """All of them, panel by panel."""
    own = [Condition("pairs", n, n) for n in config.pairs]
    for panel in ("noise", "erased", "zeroed", "jitter"):
        own += [Condition(panel, level, config.stored) for level in getattr(config, panel)]
    return own


def trial(config: RecallCapacityConfig, condition: Condition) -> Trial:
    """Keys, values and cues, a function of (seed, number of pairs, condition)."""
    draw = torch.Generator().manual_seed(config.seed * 1_000_003 + condition.pairs)
    shape = (config.seeds, 1, condition.pairs, config.dim)
    keys, values = (normalize(torch.randn(shape, generator=draw), dim=-1) for _ in range(2))
    cues = keys[:, :, : config.cues]
    if condition.panel == "noise":
        cues = normalize(cues + condition.level * normalize(torch.randn(cues.shape, generator=draw), dim=-1), dim=-1)
    elif condition.panel == "erased":
        rank = torch.rand(cues.shape, generator=draw).argsort(-1).argsort(-1)
        cues = cues * (rank >= round(condition.level * config.dim))
    return Trial(keys, values, cues, condition, config.seed + 1)


@dataclass(frozen=True)
class Reader:
    """One kernel or model.

    Attributes:
        make: an empty memory.
        stretch: factor of keys and cues.
        pairwise: whether a read builds numbers for every pair and channel.
    """

    make: Callable[[], AssociativeMemory]
    stretch: float = 1.0
    pairwise: bool = False

    def read(self, case: Trial, values: Tensor, damaged: bool) -> Tensor:
        """What the cues retrieve, [S, 1, C, Dv], float64."""
        memory = self.make()
        memory.write(case.keys * self.stretch, values)
        if damaged:
            damage(memory, case.condition, torch.Generator().manual_seed(case.seed))
        cues = case.cues * self.stretch
        step = max(1, PAIRWISE // case.keys.numel()) if self.pairwise else cues.shape[2]
        return torch.cat([memory.read(part) for part in cues.split(step, dim=2)], 2).double()


def reader(spec: Spec, scale: float, store: str) -> Reader:
    """A kernel at a scale."""
    own = scale if spec.takes_scale else None
    make = lambda: AssociativeMemory(spec, scale=own, store=store, impl="reference")  # noqa: E731
    return Reader(make, 1.0 if spec.takes_scale else scale**0.5, bool(spec.degree))


def model(text: str) -> Reader:
    """A global linear model."""
    return Reader(lambda: AssociativeMemory("linear", store=text))


def recall(how: Reader, case: Trial) -> dict[str, Tensor]:
    """Relative squared error and exact-match rate, [S] each; with clean cues the parts of the error."""
    found = how.read(case, case.values, True)
    values = case.values.double()
    own = values[:, :, : found.shape[2]]
    error = (found - own).square().sum(-1).mean((1, 2))
    nearest = (found @ values.transpose(-1, -2)).argmax(-1)  # of unit vectors the nearest
    right = (nearest == torch.arange(found.shape[2])) & (found != 0).any(-1)
    parts = split(how, case, found, own) if case.condition.panel == "pairs" else {}
    return {"error": error, "match": right.double().mean((1, 2)), **parts}


def split(how: Reader, case: Trial, found: Tensor, own: Tensor) -> dict[str, Tensor]:
    """Signal bias and interference, means of squares, and the inverse signal-to-noise ratio, [S] each."""
    pairs, cues = case.keys.shape[2], found.shape[2]
    marks = torch.eye(pairs, cues, dtype=case.values.dtype).expand(*case.keys.shape[:2], -1, -1)
    weight = how.read(case, marks, False).diagonal(dim1=-2, dim2=-1)  # of the cue's own value
    signal = weight[..., None] * own
    interference = (found - signal).square().sum(-1)
    power = signal.square().sum(-1).sum((1, 2))
    return {
        "bias": (signal - own).square().sum(-1).mean((1, 2)),
        "interference": interference.mean((1, 2)),
        "inverse_snr": interference.sum((1, 2)) / power.clamp(min=torch.finfo(power.dtype).tiny),
    }


def damage(memory: AssociativeMemory, condition: Condition, draw: torch.Generator) -> None:
    """Zero a fraction of the stored numbers, or add noise to them."""
    if condition.panel == "zeroed":
        memory.transform(lambda t: t * (torch.rand(t.shape, generator=draw) >= condition.level))
    elif condition.panel == "jitter":
        size = lambda t: condition.level * t.square().mean().sqrt()  # noqa: E731
        memory.transform(lambda t: t + size(t) * torch.randn(t.shape, generator=draw))


def measure(config: RecallCapacityConfig, progress: Progress) -> dict[str, Any]:
    """Kernel to its record: for every store and scale, mean and standard deviation of match and error by panel."""
    cases = [trial(config, condition) for condition in conditions(config)]
    found: dict[str, Any] = {}
    for place, (names, spec) in enumerate(sentences := list(distinct(config))):
        progress(f"{names[0]} ({place + 1}/{len(sentences)})")
        runs = []
        for store in ("pairs", "sums") if finite_features(spec) else ("pairs",):
            for scale in config.scales:
                # whole pairs and whole sums read the same, so that sums differ where they are damaged
                own = [c for c in cases if store == "pairs" or c.condition.panel in ("zeroed", "jitter")]
                runs.append({"store": store, "scale": scale, **_summary(reader(spec, scale, store), own)})
        best = max((r for r in runs if r["store"] == "pairs"), key=_merit)["scale"]
        found[names[0]] = {
            "same_as": names[1:],
            "sentence": "*".join(spec.parts()),
            "scale_is": "of the scores" if spec.takes_scale else "square of the length of keys and cues",
            "best_scale": best,
            "runs": runs,
        }
    return found


def _summary(how: Reader, cases: list[Trial]) -> dict[str, Any]:
    """Panel to lists over its levels: match, error and its parts, each [mean, standard deviation]."""
    panels: dict[str, Any] = {}
    for case in cases:
        panel = panels.setdefault(case.condition.panel, {})
        for name, numbers in recall(how, case).items():
            spread = numbers.std().item() if len(numbers) > 1 else 0.0
            rounded = [float(f"{x:.{DIGITS}g}") for x in (numbers.mean().item(), spread)]
            panel.setdefault(name, []).append(rounded)
    return panels


def measure_models(config: RecallCapacityConfig, progress: Progress) -> dict[str, Any]:
    """Model to its panels."""
    cases = [trial(config, condition) for condition in conditions(config)]
    found: dict[str, Any] = {}
    for name in config.models:
        progress(name)
        found[name] = _summary(model(name), cases)
    return found


def _merit(run: dict[str, Any]) -> tuple[float, float]:
    """Exact matches over all conditions, ties broken by the smaller error."""
    panels = [panel for name, panel in run.items() if name not in ("store", "scale")]
    match = [mean for panel in panels for mean, _ in panel["match"]]
    error = [mean for panel in panels for mean, _ in panel["error"]]
    return round(sum(match) / len(match), DIGITS), -sum(error) / len(error)


def distinct(config: RecallCapacityConfig) -> Iterator[tuple[list[str], Spec]]:
    """(names, sentence), names of the same sentence together."""
    groups: dict[Spec, list[str]] = {}
    for name in config.specs or presets_registry.names():
        groups.setdefault(Spec.parse(name), []).append(name)
    yield from ((names, spec) for spec, names in groups.items())


@recipes.register("recall-capacity")
class RecallCapacity:
    """Recall of every preset against stored pairs, noisy cues, partial cues and damage to what is stored."""

    Config: ClassVar[type[Any]] = RecallCapacityConfig

    @staticmethod
    def run(config: RecallCapacityConfig, progress: Progress) -> Findings:
        """Measure and draw."""
        check(config)
        found = measure(config, progress)
        models = measure_models(config, progress)
        progress("drawing")
        from . import recall_capacity_output as output

        pictures = {
            "recall-capacity.png": output.figure(config, found, "match"),
            "recall-capacity-error.png": output.figure(config, found, "error"),
        }
        tables = {
            "Exact matches in percent": output.table(config, found),
            "Exact matches in percent by scale, over all conditions": output.by_scale(config, found),
            "Exact matches of global linear models in percent": output.models(config, models),
            "Signal and interference": output.parts(config, found, models),
        }
        return Findings({"kernels": found, "models": models}, tables, pictures, output.notes(config))


def check(config: RecallCapacityConfig) -> None:
    """The numbers are in range, the sentences can be read.

    Raises:
        ArgumentError: one is not.
    """
    for name in ("stored", "cues", "dim", "seeds"):
        if getattr(config, name) < 1:
            raise ArgumentError(f"{CALL}: --{name} is {getattr(config, name)}, expected at least 1.")
    if not 0 <= config.seed < 2**31:
        raise ArgumentError(f"{CALL}: --seed is {config.seed}, expected 0 to {2**31 - 1}.")
    for name, low, high in (("scales", 1e-6, 1e6), ("pairs", 1, 2**20), ("noise", 0, 1e6), ("jitter", 0, 1e6),
                            ("erased", 0, 1), ("zeroed", 0, 1)):  # fmt: skip
        levels = getattr(config, name)
        if not levels:
            raise ArgumentError(f"{CALL}: --{name} names no number; give at least one.")
        for level in levels:
            if not low <= level <= high:
                raise ArgumentError(f"{CALL}: --{name} is {level:g}, expected {low:g} to {high:g}.")
    for text in config.specs:
        as_spec(text, CALL, "--specs")
    for text in config.models:
        if trend_of(text, CALL, "--models") is None:
            raise ArgumentError(f"{CALL}: --models: unknown model {text!r}.{suggestion(text, trends.names())}")
