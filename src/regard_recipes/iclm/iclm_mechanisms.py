"""What the heads of an ICLM and of a Transformer do: attention sinks, induction, and which token a logit comes from.

The ICLM paper (section 7) looks at heatmaps of a few prompts and says: attention sinks show in phi alone, always at
the start token, while the Transformer is less consistent with their place; f weighs its context more evenly; where the
token to come stands in the context, f's weight on it dominates, at most layers, and phi shows nothing of it; without
f's feed-forward layers perplexity rises slightly. Here each of these is a number, over held-out text and every head,
beside what equal weights would give; and the maps are drawn.

Two trainings: on text, ICLM and Transformer of equal size with and without feed-forward layers; and, so that induction
can be seen forming, small pairs of layers on random blocks that repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from regard.checks import ArgumentError
from regard.recipes import Findings, Progress, recipes

from ..lib.language_runs import Budget, Corpus, Job, LanguageRun, initial_range, run_jobs, sized

if TYPE_CHECKING:
    from ..lib.language_text import LanguageText

CALL = "reproduce: iclm-mechanisms"
ICLM, TRANSFORMER = "iclm", "transformer"
NO_MLP = {ICLM: "iclm-no-f-mlp", TRANSFORMER: "transformer-no-mlp"}
"""The model without feed-forward layers that the paper sets beside each (table 3)."""
OPTIONS: dict[str, dict[str, Any]] = {
    ICLM: {},
    NO_MLP[ICLM]: {"f_mlp": "none"},
    TRANSFORMER: {"feed_forward": "gelu"},
    NO_MLP[TRANSFORMER]: {"feed_forward": "none"},
}
BLOCKS = {
    "vocabulary": 64,
    "shortest": 8,
    "longest": 24,
    "width": 64,
    "heads": 2,
    "context": 64,
    "batch": 16,
    "tokens": 400_000,
    "measured": 4096,
    "period": 16,
    "length": 48,
    "texts": 32,
}
"""The task of repeated blocks: lengths of a block in training, the models of two layers, and the texts that are looked
at, blocks of 16 said three times."""
BLOCK_RATE = 3e-3


@dataclass(frozen=True, kw_only=True)
class MechanismsConfig:
    """Train ICLM and Transformers, and measure what their heads do."""

    out: Path = Path("iclm-mechanisms-out")
    """Folder to write. An earlier result in it is replaced; any other folder must be empty."""
    size: Literal["quick", "desk", "paper"] = "desk"
    """What is taken where an option is not given: 'quick' needs two minutes on two cores, 'desk' six, 'paper' (24
    layers, width 1024, 16 heads, GPT-2 tokens) a GPU and --data."""
    quick: bool = False
    """The same as --size quick."""
    layers: int | None = None
    """Layers of the models of text, an even number: half as many of phi and of f."""
    width: int | None = None
    """Width of the models of text."""
    heads: int | None = None
    """Heads of every layer."""
    variant: Literal["wv", "full"] = "wv"
    """What f's heads average: wv, of the Transformer's size, as in the paper's heatmaps; or full."""
    tokenizer: str | None = None
    """char, byte or gpt2."""
    context: int | None = None
    """Tokens that a model sees at once."""
    batch: int | None = None
    """Windows of a step."""
    parts: int | None = None
    """In how many passes a step is made, where its memory is short."""
    steps: int | None = None
    """Optimiser steps of each model of text."""
    learning_rate: float | None = None
    """The highest of the models of text."""
    block_steps: int | None = None
    """Optimiser steps of each model of repeated blocks."""
    measured: int | None = None
    """Held-out tokens that perplexity is measured on."""
    looks: int | None = None
    """How often the losses are noted on the way."""
    texts: int | None = None
    """Held-out windows on which heads are looked at."""
    prompts: int | None = None
    """Prompts that are drawn."""
    prompt: int | None = None
    """Tokens of a prompt."""
    dtype: str | None = None
    """float32, or bfloat16 by autocast."""
    compile: bool | None = None
    """Train through torch.compile."""
    seeds: int | None = None
    """Models of each kind; they differ in first weights and windows."""
    seed: int = 0
    """The first of the seeds."""
    workers: int = 2
    """Models that are trained at the same time, each in a process with one thread."""
    device: str | None = None
    """'cpu', 'cuda', 'mps' or 'auto'. By default the CPU, and 'auto' for the size of the paper."""
    data: Path | None = None
    """UTF-8 text to learn from, a file or a folder. None: the Python manual inside the interpreter."""


_HERE = {"tokenizer": "char", "parts": 1, "dtype": "float32", "compile": False, "device": "cpu"}
SIZES: dict[str, dict[str, Any]] = {
    "quick": {
        **_HERE, "layers": 4, "width": 32, "heads": 2, "context": 48, "batch": 8, "steps": 120, "learning_rate": 4e-3,
        "block_steps": 150, "measured": 2048, "looks": 3, "texts": 16, "prompts": 1, "prompt": 32, "seeds": 1,
    },
    "desk": {
        **_HERE, "layers": 4, "width": 128, "heads": 4, "context": 64, "batch": 16, "steps": 1000,
        "learning_rate": 2e-3, "block_steps": 2000, "measured": 16_384, "looks": 4, "texts": 64, "prompts": 3,
        "prompt": 48, "seeds": 1,
    },
    "paper": {
        "layers": 24, "width": 1024, "heads": 16, "tokenizer": "gpt2", "context": 512, "batch": 32, "parts": 2,
        "steps": 20_000, "learning_rate": 3e-4, "block_steps": 4000, "measured": 262_144, "looks": 10, "texts": 8,
        "prompts": 4, "prompt": 64, "seeds": 1, "dtype": "bfloat16", "compile": True, "device": "auto",
    },
}  # fmt: skip
"""Size to the numbers that it decides."""


@recipes.register("iclm-mechanisms")
class Mechanisms:
    """Attention sinks, induction heads and the sources of a logit in ICLM and Transformer, claim by claim."""

    Config: ClassVar[type[Any]] = MechanismsConfig

    @staticmethod
    def run(config: MechanismsConfig, progress: Progress) -> Findings:
        """See `regard.recipes.Recipe`."""
        config = sized(config, SIZES, CALL)
        check(config)
        progress("reading the text")
        from ..lib.language_text import read_text

        numbers: Any = config  # `sized` has filled in every one
        text = read_text(config.data, numbers.tokenizer, context=numbers.context, measured=numbers.measured, call=CALL)
        jobs = [*text_jobs(config, text), *block_jobs(config)]
        runs = run_jobs(jobs, config.workers, progress)
        count = len(OPTIONS) * numbers.seeds
        progress("drawing")
        from . import iclm_mechanisms_figures as figures
        from . import iclm_mechanisms_output as output

        found = output.Seen(runs[:count], runs[count:])
        words = word_lists(text, runs[:count])
        used = {each.name: getattr(config, each.name) for each in fields(config)}
        used |= {"out": str(config.out), "data": None if config.data is None else str(config.data)}
        data = {"used": used, "blocks": BLOCKS, "text": text.described, "runs": [run.record() for run in runs]}
        return Findings(data, output.tables(found), figures.figures(found, words), output.notes(found))


def check(config: MechanismsConfig) -> None:
    """Every number is in range and every model can be made; nothing is trained.

    Raises:
        ArgumentError: one is not.
    """
    from regard.training import TOKENIZERS

    numbers: Any = config
    least = {"block_steps": 1, "texts": 1, "prompts": 0, "prompt": 4}
    for name, low in least.items():
        if getattr(config, name) < low:
            raise ArgumentError(
                f"{CALL}: --{name.replace('_', '-')} is {getattr(config, name)}, expected {low} or more."
            )
    if numbers.prompt > numbers.context:
        raise ArgumentError(f"{CALL}: --prompt is {numbers.prompt}, more than the --context of {numbers.context}.")
    TOKENIZERS.get(numbers.tokenizer)
    budget(config).check(CALL)
    try:
        for name in OPTIONS:
            text_model(config, name, 100)
    except ArgumentError as error:
        raise ArgumentError(f"{CALL}: --layers, --width or --heads: {error}") from None


def budget(config: MechanismsConfig) -> Budget:
    """How the models of text are trained."""
    given = {each.name: getattr(config, each.name) for each in fields(Budget) if hasattr(config, each.name)}
    return Budget(**given)


def block_budget(config: MechanismsConfig) -> Budget:
    """How the models of repeated blocks are trained."""
    own: Any = {name: BLOCKS[name] for name in ("context", "batch", "measured")}
    device: Any = config.device
    return Budget(**own, steps=config.block_steps or 1, learning_rate=BLOCK_RATE, looks=8, device=device)


def text_model(config: MechanismsConfig, name: str, vocabulary: int) -> Any:
    """The configuration of a model of text."""
    numbers: Any = config
    return model_config(
        name,
        numbers.variant,
        vocab_size=vocabulary,
        hidden_size=numbers.width,
        num_hidden_layers=numbers.layers,
        num_attention_heads=numbers.heads,
        max_position_embeddings=numbers.context,
        initializer_range=initial_range(numbers.width),
    )


def model_config(name: str, variant: str, **sizes: Any) -> Any:
    """An ICLM, or a GPT-2 with rotary positions.

    Raises:
        ArgumentError: sizes that do not fit.
    """
    from regard.models import HybridConfig, ICLMConfig

    if name.startswith(ICLM):
        return ICLMConfig(**sizes, variant=variant, **OPTIONS[name])
    return HybridConfig(**sizes, norm="layer", **OPTIONS[name])


def text_jobs(config: MechanismsConfig, text: LanguageText) -> list[Job]:
    """Every model of text with every seed; the first seed's are shown the prompts."""
    from .iclm_mechanisms_measure import choose_prompts, look_at_text

    numbers: Any = config
    unseen = text.held_out_tokens
    windows = unseen[: len(unseen) // numbers.context * numbers.context].view(-1, numbers.context)
    every = max(1, len(windows) // numbers.texts)
    windows = windows[::every][: numbers.texts].clone()
    prompts = choose_prompts(unseen, numbers.prompt, numbers.prompts)
    return [
        Job(
            name=name,
            config=text_model(config, name, text.vocabulary),
            material=text,
            budget=budget(config),
            seed=seed,
            measure=partial(
                look_at_text,
                windows=windows,
                prompts=prompts if seed == config.seed else [],
                from_row=numbers.context // 4,
            ),
        )
        for name in OPTIONS
        for seed in range(config.seed, config.seed + numbers.seeds)
    ]


def block_jobs(config: MechanismsConfig) -> list[Job]:
    """A pair of layers of each kind on repeated blocks, with every seed."""
    from .iclm_mechanisms_measure import block_stream, look_at_blocks

    own = BLOCKS
    stream = [
        block_stream(own["vocabulary"], own["shortest"], own["longest"], length, seed)
        for length, seed in ((own["tokens"], config.seed), (2 * own["measured"], config.seed + 1))
    ]
    material = Corpus(*stream)
    sizes = {
        "vocab_size": own["vocabulary"],
        "hidden_size": own["width"],
        "num_hidden_layers": 2,
        "num_attention_heads": own["heads"],
        "max_position_embeddings": own["context"],
        "initializer_range": initial_range(own["width"]),
    }
    look = {"vocabulary": own["vocabulary"], "period": own["period"], "length": own["length"], "count": own["texts"]}
    return [
        Job(
            name=f"{name} on blocks",
            config=model_config(name, config.variant, **sizes),
            material=material,
            budget=block_budget(config),
            seed=seed,
            measure=partial(look_at_blocks, **look, seed=seed),
        )
        for name in (ICLM, NO_MLP[ICLM], TRANSFORMER)
        for seed in range(config.seed, config.seed + (config.seeds or 1))
    ]


def word_lists(text: LanguageText, runs: Sequence[LanguageRun]) -> dict[int, str]:
    """The text of every token that a prompt holds or a model predicts there."""
    import torch

    used = {
        token for run in runs for prompt in run.extra["prompts"] for token in (*prompt["tokens"], prompt["predicted"])
    }
    ids = sorted(used)
    return dict(zip(ids, text.words(torch.tensor(ids)), strict=True))
