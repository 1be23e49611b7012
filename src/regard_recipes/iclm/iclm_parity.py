"""ICLM beside a Transformer of equal size: perplexity, time and memory, with and without feed-forward layers.

The ICLM paper (section 7, tables 1 and 2) reports perplexities close to those of a Transformer "with the same number of
parameters". Counted, the models of table 2 are equal (`wv`, a value head in the place of W_v); those of table 1, where
W_v is left out, are not: f attention alone has (2 + H) C^2 parameters to the Transformer's 4 C^2. Here `wv` stands
beside `full` as it is, `full` brought to the Transformer's number by narrower feed-forward layers of f, and (at the
paper's size) `full` with two heads in f, which is equal by itself. The parity report counts all of them at the paper's
three sizes.

All models see the same windows for equally many steps. The learning rate is chosen for each family, from one grid, on
the start of the held-out text; the results are measured on the rest of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from regard.checks import ArgumentError, suggestion
from regard.recipes import Findings, Progress, recipes

from ..lib.language_runs import Budget, Job, LanguageRun, initial_range, run_jobs, sized

if TYPE_CHECKING:
    from ..lib.language_text import LanguageText

CALL = "reproduce: iclm-parity"
TRANSFORMER = "transformer"
EQUAL = 0.005
"""Share by which two numbers of parameters may differ and still be called equal."""
PAPER_SHAPES = ("8x512x8", "12x512x8", "24x1024x16")
"""Layers, width and heads of the paper's small, middle and large models."""
GPT2_VOCABULARY = 50257


@dataclass(frozen=True)
class Kind:
    """One of the models.

    Attributes:
        family: whose learning rate it takes: "transformer" or "iclm".
        options: fields of its configuration.
        rival: the Transformer that it is compared to.
        matched: brought to the rival's number of parameters.
    """

    family: str
    options: Mapping[str, Any] = field(default_factory=dict)
    rival: str = TRANSFORMER
    matched: bool = False


KINDS: dict[str, Kind] = {
    TRANSFORMER: Kind("transformer", {"feed_forward": "gelu"}),
    "iclm-wv": Kind("iclm", {"variant": "wv"}),
    "iclm-full-matched": Kind("iclm", {"variant": "full"}, matched=True),
    "iclm-full": Kind("iclm", {"variant": "full"}),
    "iclm-full-two-heads": Kind("iclm", {"variant": "full", "f_attention_heads": 2}),
    "transformer-no-mlp": Kind("transformer", {"feed_forward": "none"}, rival="transformer-no-mlp"),
    "iclm-wv-no-f-mlp": Kind("iclm", {"variant": "wv", "f_mlp": "none"}),
    "iclm-wv-no-phi-mlp": Kind("iclm", {"variant": "wv", "phi_mlp": "none"}),
    "iclm-wv-no-mlp": Kind(
        "iclm", {"variant": "wv", "phi_mlp": "none", "f_mlp": "none"}, rival="transformer-no-mlp"
    ),
}  # fmt: skip
"""Name to model. The first five have all their feed-forward layers."""
MAIN = tuple(KINDS)[:5]
DESK = tuple(name for name in KINDS if name not in ("iclm-full-two-heads", "iclm-wv-no-phi-mlp"))


@dataclass(frozen=True, kw_only=True)
class ParityConfig:
    """Train ICLM and Transformers of equal size on the same text, and compare them."""

    out: Path = Path("iclm-parity-out")
    """Folder to write. An earlier result in it is replaced; any other folder must be empty."""
    size: Literal["quick", "desk", "paper"] = "desk"
    """What is taken where an option is not given: 'quick' needs two minutes on two cores, 'desk' thirteen, 'paper' (the
    paper's three sizes on GPT-2 tokens) a GPU and --data."""
    quick: bool = False
    """The same as --size quick."""
    shapes: tuple[str, ...] | None = None
    """Layers x width x heads, such as 4x128x4; the paper's are 8x512x8, 12x512x8 and 24x1024x16."""
    models: tuple[str, ...] | None = None
    """Which of transformer, iclm-wv, iclm-full-matched, iclm-full, iclm-full-two-heads, transformer-no-mlp,
    iclm-wv-no-f-mlp, iclm-wv-no-phi-mlp and iclm-wv-no-mlp; a model comes with the Transformer it is compared to."""
    tokenizer: str | None = None
    """char, byte or gpt2."""
    context: int | None = None
    """Tokens that a model sees at once."""
    batch: int | None = None
    """Windows of a step."""
    parts: int | None = None
    """In how many passes a step is made, where its memory is short."""
    steps: int | None = None
    """Optimiser steps of each model."""
    rates: tuple[float, ...] | None = None
    """Learning rates to choose from, the same for both families; a single one is taken without a trial."""
    trial_steps: int | None = None
    """Optimiser steps of a trial."""
    measured: int | None = None
    """Held-out tokens that the results are measured on; half as many before them serve the choice."""
    looks: int | None = None
    """How often the losses are noted on the way."""
    dtype: str | None = None
    """float32, or bfloat16 by autocast."""
    compile: bool | None = None
    """Train through torch.compile."""
    seeds: int | None = None
    """Models of each kind; they differ in first weights and windows."""
    seed: int = 0
    """The first of the seeds; trials have one of their own."""
    workers: int = 2
    """Models that are trained at the same time, each in a process with one thread."""
    device: str | None = None
    """'cpu', 'cuda', 'mps' or 'auto'. By default the CPU, and 'auto' for the size of the paper."""
    data: Path | None = None
    """UTF-8 text to learn from, a file or a folder. None: the Python manual inside the interpreter."""


SIZES: dict[str, dict[str, Any]] = {
    "quick": {
        "shapes": ("2x32x4",),
        "models": DESK,
        "tokenizer": "char",
        "context": 32,
        "batch": 8,
        "parts": 1,
        "steps": 150,
        "rates": (3e-3,),
        "trial_steps": 20,
        "measured": 2048,
        "looks": 3,
        "dtype": "float32",
        "compile": False,
        "device": "cpu",
        "seeds": 2,
    },
    "desk": {
        "shapes": ("4x128x4",),
        "models": DESK,
        "tokenizer": "char",
        "context": 64,
        "batch": 16,
        "parts": 1,
        "steps": 800,
        "rates": (1e-3, 2e-3, 4e-3, 8e-3),
        "trial_steps": 120,
        "measured": 8192,
        "looks": 4,
        "dtype": "float32",
        "compile": False,
        "device": "cpu",
        "seeds": 3,
    },
    "paper": {
        "shapes": PAPER_SHAPES,
        "models": MAIN,
        "tokenizer": "gpt2",
        "context": 512,
        "batch": 32,
        "parts": 1,
        "steps": 20_000,
        "rates": (1e-4, 3e-4, 1e-3),
        "trial_steps": 1000,
        "measured": 262_144,
        "looks": 10,
        "dtype": "bfloat16",
        "compile": True,
        "device": "auto",
        "seeds": 1,
    },
}
"""Size to the numbers that it decides. Desk is the size of the published comparison of characters: 4 layers, 4 heads,
width 128, 800 steps of 16 windows of 64."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A model of one shape, ready to be built.

    Attributes:
        config: its configuration.
        parameters: how many numbers it learns; rival_parameters: those of the Transformer it is compared to.
    """

    shape: str
    kind: str
    config: Any
    parameters: int
    rival_parameters: int

    @property
    def name(self) -> str:
        """Of its runs."""
        return f"{self.shape} {self.kind}"

    @property
    def gap(self) -> float:
        """Parameters more than the rival's, as a share of those."""
        return self.parameters / self.rival_parameters - 1

    @property
    def equal(self) -> bool:
        """Whether the two are of the same size."""
        return abs(self.gap) <= EQUAL


@dataclass(frozen=True)
class Outcome:
    """What came of a model: the learning rate it was given and its runs, one a seed."""

    entry: Entry
    rate: float
    runs: Sequence[LanguageRun]


@recipes.register("iclm-parity")
class Parity:
    """ICLM beside Transformers of equal size: perplexity, time and memory, with and without feed-forward layers."""

    Config: ClassVar[type[Any]] = ParityConfig

    @staticmethod
    def run(config: ParityConfig, progress: Progress) -> Findings:
        """See `regard.recipes.Recipe`."""
        config = sized(config, SIZES, CALL)
        check(config)
        progress("reading the text")
        from ..lib.language_text import read_text

        numbers: Any = config  # `sized` has filled in every one
        text = read_text(
            config.data,
            numbers.tokenizer,
            context=numbers.context,
            measured=numbers.measured,
            choice=numbers.measured // 2,
            call=CALL,
        )
        entries, left_out = plan(config, text.vocabulary)
        trials = try_rates(config, entries, text, progress)
        rates = chosen(config, trials)
        runs = run_jobs(final_jobs(config, entries, rates, text), config.workers, progress)
        outcomes = gather(entries, rates, runs)
        progress("drawing")
        from . import iclm_parity_output as output

        parity = report()
        tables, figures = output.tables(outcomes, trials, parity), output.figures(outcomes)
        return Findings(
            {"used": used(config), "text": text.described, **output.data(outcomes, trials, parity)},
            tables,
            figures,
            (*output.notes(outcomes, parity), *left_out),
        )


def check(config: ParityConfig) -> None:
    """Every number is in range and every model can be made; nothing is trained.

    Raises:
        ArgumentError: one is not.
    """
    from regard.training import TOKENIZERS

    for name in ("shapes", "models", "rates"):
        given = getattr(config, name)
        if not given:
            raise ArgumentError(f"{CALL}: --{name} names nothing; give at least one.")
        for each in given:
            if given.count(each) > 1:
                raise ArgumentError(f"{CALL}: --{name} names {each} twice.")
    for kind in config.models or ():
        if kind not in KINDS:
            raise ArgumentError(f"{CALL}: --models names {kind!r}.{suggestion(kind, KINDS)}")
    missing = {KINDS[kind].rival for kind in config.models or ()} - set(config.models or ())
    if missing or TRANSFORMER not in (config.models or ()):
        lacking = sorted(missing | {TRANSFORMER} - set(config.models or ()))
        raise ArgumentError(f"{CALL}: --models lacks {lacking[0]}, to which others are compared; add it.")
    if (config.trial_steps or 0) < 1:
        raise ArgumentError(f"{CALL}: --trial-steps is {config.trial_steps}, expected at least 1.")
    TOKENIZERS.get(config.tokenizer or "")
    for rate in config.rates or ():
        budget(config, rate).check(CALL)
    for shape in config.shapes or ():
        sizes(shape)
    plan(config, 100)


def sizes(shape: str) -> dict[str, int]:
    """ "4x128x4" as the fields of a configuration.

    Raises:
        ArgumentError: it is written otherwise.
    """
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+)", shape)
    if found is None:
        raise ArgumentError(f"{CALL}: --shapes names {shape!r}, expected layers x width x heads, such as 4x128x4.")
    layers, width, heads = map(int, found.groups())
    return {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}


def budget(config: ParityConfig, rate: float, steps: int | None = None) -> Budget:
    """How the models are trained."""
    names = {each.name for each in fields(Budget)} - {"learning_rate"}
    given = {name: getattr(config, name) for name in names if getattr(config, name, None) is not None}
    return Budget(**{**given, "learning_rate": rate, **({} if steps is None else {"steps": steps, "looks": 1})})


def build(kind: str, shape: str, vocabulary: int, context: int) -> Any:
    """The configuration of a model, not yet matched."""
    from regard.models import HybridConfig, ICLMConfig

    own = sizes(shape)
    common = {
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        "initializer_range": initial_range(own["hidden_size"]),
        **own,
    }
    if KINDS[kind].family == "transformer":
        return HybridConfig(norm="layer", **common, **KINDS[kind].options)
    return ICLMConfig(**common, **KINDS[kind].options)


def plan(config: ParityConfig, vocabulary: int) -> tuple[list[Entry], list[str]]:
    """The models of every shape, and a sentence for each that has no equal.

    Raises:
        ArgumentError: a shape that a model does not take.
    """
    entries: list[Entry] = []
    left_out: list[str] = []
    for shape in config.shapes or ():
        for kind in config.models or ():
            try:
                made = entry(kind, shape, vocabulary, config.context or 2)
            except ArgumentError as error:
                raise ArgumentError(f"{CALL}: --shapes {shape}: {error}") from None
            if made is None:
                left_out.append(f"{kind} is left out at {shape}: even without f's feed-forward layers it is larger.")
            else:
                entries.append(made)
    return entries, left_out


def entry(kind: str, shape: str, vocabulary: int, context: int) -> Entry | None:
    """The model; None where it cannot be brought to the size of its rival."""
    from regard.models.base.matching import count_parameters, match_parameters

    made = build(kind, shape, vocabulary, context)
    rival = count_parameters(build(KINDS[kind].rival, shape, vocabulary, context))
    if KINDS[kind].matched:
        least = build(kind, shape, vocabulary, context)
        setattr(least, least.size_field, 1)
        least.normalise()
        if count_parameters(least) > rival:
            return None
        made = match_parameters(made, rival).config
    return Entry(shape=shape, kind=kind, config=made, parameters=count_parameters(made), rival_parameters=rival)


def try_rates(
    config: ParityConfig, entries: Sequence[Entry], text: LanguageText, progress: Progress
) -> dict[tuple[str, str], dict[float, float]]:
    """(shape, family) to learning rate to the loss on the start of the held-out text, measured with the first model of
    the family; empty where there is one rate only."""
    rates = config.rates or ()
    if len(rates) < 2:
        return {}
    first: dict[tuple[str, str], Entry] = {}
    for each in entries:
        first.setdefault((each.shape, KINDS[each.kind].family), each)
    seed, material = config.seed + (config.seeds or 1), text.choosing
    jobs = [
        Job(
            name=f"trial of {rate:g}, {each.name}",
            config=each.config,
            material=material,
            budget=budget(config, rate, config.trial_steps),
            seed=seed,
        )
        for each in first.values()
        for rate in rates
    ]
    runs = iter(run_jobs(jobs, config.workers, progress))
    return {key: {rate: next(runs).held_out[-1] for rate in rates} for key in first}


def chosen(
    config: ParityConfig, trials: Mapping[tuple[str, str], Mapping[float, float]]
) -> dict[tuple[str, str], float]:
    """(shape, family) to the rate with the least loss; of equals the first, and never one that diverged."""
    found = {}
    for shape in config.shapes or ():
        for family in ("transformer", "iclm"):
            losses = trials.get((shape, family), {})
            rates = [rate for rate in losses if losses[rate] == losses[rate]] or list(config.rates or ())
            found[shape, family] = min((losses.get(rate, 0.0), place, rate) for place, rate in enumerate(rates))[2]
    return found


def final_jobs(
    config: ParityConfig, entries: Sequence[Entry], rates: Mapping[tuple[str, str], float], text: LanguageText
) -> list[Job]:
    """Every model with every seed."""
    return [
        Job(
            name=each.name,
            config=each.config,
            material=text,
            budget=budget(config, rates[each.shape, KINDS[each.kind].family]),
            seed=seed,
        )
        for each in entries
        for seed in range(config.seed, config.seed + (config.seeds or 1))
    ]


def gather(
    entries: Sequence[Entry], rates: Mapping[tuple[str, str], float], runs: Sequence[LanguageRun]
) -> list[Outcome]:
    """The runs with what they are runs of."""
    return [
        Outcome(
            each,
            rates[each.shape, KINDS[each.kind].family],
            tuple(run for run in runs if run.name == each.name),
        )
        for each in entries
    ]


def report() -> dict[str, dict[str, int | None]]:
    """Parameters at the paper's sizes with GPT-2's vocabulary: shape to model to their number, None where a full model
    cannot be brought to the Transformer's."""
    found: dict[str, dict[str, int | None]] = {}
    for shape in PAPER_SHAPES:
        made = {kind: entry(kind, shape, GPT2_VOCABULARY, 1024) for kind in MAIN}
        found[shape] = {kind: None if each is None else each.parameters for kind, each in made.items()}
    return found


def used(config: ParityConfig) -> dict[str, Any]:
    """The config with the numbers of its size."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()}
