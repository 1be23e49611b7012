"""The training loop and the processes of the language recipes, against loops and formulas written out here."""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import time
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from regard.checks import ArgumentError
from regard.models import HybridConfig, HybridForCausalLM
from regard_recipes.kernels.kernel_selection import KernelSelection
from regard_recipes.lib import language_runs as runs
from regard_recipes.lib.language_output import Gap, band, order, rate_note, spread, verdict

V = 17
BUDGET = runs.Budget(
    context=12, batch=4, steps=7, learning_rate=2e-2, final_share=0.2, warmup=0.3, looks=3, measured=12, clip=0.7
)


def config(**changes: object) -> HybridConfig:
    sizes = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return HybridConfig(**sizes, **changes)


@pytest.fixture(scope="module")
def text() -> runs.Corpus:
    """A walk that goes on by 1, 2 or 3."""
    steps = torch.randint(1, 4, (900,), generator=torch.Generator().manual_seed(3))
    tokens = (steps.cumsum(0) % V).int()
    return runs.Corpus(tokens[:700], tokens[700:])


def test_wide_models_begin_with_smaller_weights() -> None:
    assert [runs.initial_range(width) for width in (32, 256, 384, 1024)] == [0.05, 0.05, 0.02, 0.02]
    paper = KernelSelection(KernelSelection.configure("paper"))
    assert paper.model_config(paper.cells()[0], 100).initializer_range == 0.02


def starts(seed: int, step: int, count: int, positions: int) -> list[int]:
    digest = hashlib.blake2b(f"{seed}:{step}".encode(), digest_size=8).digest()
    drawn = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return [int(torch.randint(positions, (1,), generator=drawn)) for _ in range(count)]


def test_training_is_a_plain_loop(text: runs.Corpus) -> None:
    """AdamW, decay of matrices, warm-up over two of seven steps, cosine, clipped gradients, windows of (seed, step)."""
    found = runs.train_language_model(config(), text, BUDGET, 5, name="walk")
    torch.manual_seed(5)
    model = HybridForCausalLM(config()).train()
    decayed = [w for w in model.parameters() if w.dim() == 2]
    others = [w for w in model.parameters() if w.dim() == 1]
    assert len(others) == 3
    adam = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1.0, betas=(0.9, 0.95)
    )
    losses, held_out = [], []
    for step, rate in enumerate(
        [0.01, 0.02, *(0.02 * (0.2 + 0.8 * (1 + math.cos(math.pi * i / 4)) / 2) for i in range(5))]
    ):
        windows = torch.stack([text.train_tokens[s : s + 12].long() for s in starts(5, step, 4, 700 - 12 + 1)])
        for group in adam.param_groups:
            group["lr"] = rate
        adam.zero_grad()
        logits = model(input_ids=windows).logits
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, V), windows[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        adam.step()
        losses.append(loss.item())
        with torch.no_grad():
            tokens = text.held_out_tokens[:12].long()
            held_out.append(F.cross_entropy(model(input_ids=tokens[None]).logits[0, :-1], tokens[1:]).item())
    assert found.steps == (2, 5, 7)
    assert found.train == pytest.approx([sum(losses[:2]) / 2, sum(losses[2:5]) / 3, sum(losses[5:]) / 2], rel=1e-5)
    assert found.held_out == pytest.approx([held_out[1], held_out[4], held_out[6]], rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(held_out[6]), rel=1e-5)
    assert found.parameters == sum(w.numel() for w in model.parameters())
    assert found.step_seconds > 0
    assert not found.diverged


def test_a_step_in_parts_is_the_step(text: runs.Corpus) -> None:
    whole = runs.train_language_model(config(), text, BUDGET, 0, name="whole")
    parts = runs.train_language_model(config(), text, replace(BUDGET, parts=2), 0, name="parts")
    assert parts.held_out == pytest.approx(whole.held_out, rel=1e-4)
    assert parts.train == pytest.approx(whole.train, rel=1e-4)


def test_the_seed_decides_and_nothing_else_does(text: runs.Corpus) -> None:
    first = runs.train_language_model(config(), text, BUDGET, 1, name="a")
    before = torch.random.get_rng_state()
    again = runs.train_language_model(config(), text, BUDGET, 1, name="a")
    assert torch.equal(torch.random.get_rng_state(), before)
    other = runs.train_language_model(config(), text, BUDGET, 2, name="a")
    assert (first.train, first.held_out) == (again.train, again.held_out)
    assert first.held_out != other.held_out


def scale_up(model: HybridForCausalLM, factor: float) -> None:
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(factor)


def test_a_loss_that_is_not_finite_ends_the_training(text: runs.Corpus) -> None:
    burst = runs.train_language_model(config(), text, BUDGET, 0, name="x", prepare=partial(scale_up, factor=math.inf))
    assert burst.diverged
    assert len(burst.train) == len(burst.held_out) == 3
    assert burst.record()["held_out"] == [None] * 3
    json.dumps(burst.record(), allow_nan=False)
    found = replace(burst, extra={"heads": [{"loss": math.nan, "place": 3}, (math.inf, 0.5)]}).record()
    assert found["extra"] == {"heads": [{"loss": None, "place": 3}, [None, 0.5]]}
    assert spread([1.0, burst.held_out[-1]]) == "diverged"


def norm_of(model: HybridForCausalLM) -> dict[str, float]:
    return {"norm": model.model.embed_tokens.weight.norm().item(), "training": model.training}


def threads(model: HybridForCausalLM) -> dict[str, int]:
    return {"threads": torch.get_num_threads(), "process": os.getpid()}


def test_jobs_have_processes_of_their_own_and_equal_results(text: runs.Corpus) -> None:
    jobs = [
        runs.Job(name=spec, config=config(mixers=spec), material=text, budget=BUDGET, seed=seed, measure=threads)
        for spec, seed in (("softmax", 0), ("biweight", 3), ("softmax", 1))
    ]
    told: list[str] = []
    two = runs.run_jobs(jobs, 2, told.append)
    assert [(run.name, run.seed) for run in two] == [("softmax", 0), ("biweight", 3), ("softmax", 1)]
    assert all(run.extra["threads"] == 1 for run in two)
    assert len({run.extra["process"] for run in two} | {os.getpid()}) == 4
    assert len(told) == 3
    assert told[2].startswith("softmax, seed 1 (1/3 done")
    here = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for job, run in zip(jobs, two, strict=True):
            own = runs.train_language_model(job.config, text, BUDGET, job.seed, name=job.name, measure=norm_of)
            assert (own.train, own.held_out) == (run.train, run.held_out)
            assert own.extra["training"] is False
    finally:
        torch.set_num_threads(here)


BLOCK = 64 * 2**20


def test_peak_memory_is_that_of_the_training(text: runs.Corpus) -> None:
    if not os.path.exists("/proc/self/clear_refs"):
        pytest.skip("the system does not tell")
    budget = replace(BUDGET, steps=2, looks=1)
    plain, wide = runs.run_jobs(
        [
            runs.Job(name="plain", config=config(), material=text, budget=budget, seed=0),
            runs.Job(name="wide", config=config(), material=text, budget=budget, seed=0, prepare=widen),
        ],
        1,
        lambda text: None,
    )
    more = (wide.peak_bytes - wide.before_bytes) - (plain.peak_bytes - plain.before_bytes)
    assert 0.9 * BLOCK < more < 1.2 * BLOCK


def widen(model: HybridForCausalLM) -> None:
    """64 MiB that live during the forward pass alone."""
    model.register_forward_pre_hook(touch)


def touch(*_: object) -> None:
    torch.ones(BLOCK // 4)


def fail(model: HybridForCausalLM) -> None:
    raise ValueError("seventeen")


def die(model: HybridForCausalLM) -> None:
    os._exit(3)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (fail, r"odd one, seed 8 failed: ValueError: seventeen"),
        (die, r"process of odd one, seed 8 ended by exit code 3"),
    ],
)
def test_a_fault_names_its_job(text: runs.Corpus, prepare: object, message: str) -> None:
    plain = runs.Job(name="fine", config=config(), material=text, budget=replace(BUDGET, steps=10**6), seed=0)
    odd = replace(plain, name="odd one", seed=8, prepare=prepare)
    with pytest.raises(RuntimeError, match=message):
        runs.run_jobs([plain, odd], 2, lambda text: None)
    assert not multiprocessing.active_children()  # the endless one was ended


def test_a_bad_argument_in_a_job_is_one(text: runs.Corpus) -> None:
    short = runs.Corpus(text.train_tokens[:5], text.held_out_tokens)
    job = runs.Job(name="short", config=config(), material=short, budget=BUDGET, seed=0)
    with pytest.raises(ArgumentError, match="short, seed 0: the text has 5 tokens to train on"):
        runs.run_jobs([job], 1, lambda text: None)


def test_an_interrupt_ends_the_processes(text: runs.Corpus) -> None:
    def interrupt(said: str) -> None:
        if "seed 1" in said:
            raise KeyboardInterrupt

    budget = replace(BUDGET, steps=10**6)
    jobs = [runs.Job(name="long", config=config(), material=text, budget=budget, seed=seed) for seed in (0, 1)]
    begun = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        runs.run_jobs(jobs, 2, interrupt)
    assert time.perf_counter() - begun < 30
    assert not multiprocessing.active_children()


def test_memory_of_a_parent_is_not_counted(text: runs.Corpus) -> None:
    ballast = torch.ones(300 * 2**20 // 4)
    (run,) = runs.run_jobs(
        [runs.Job(name="a", config=config(), material=text, budget=replace(BUDGET, steps=1, looks=1), seed=0)],
        1,
        lambda text: None,
    )
    if run.peak_bytes is None:
        pytest.skip("the system does not tell")
    del ballast
    assert run.peak_bytes - run.before_bytes < 150 * 2**20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 1}, "--context is 1, expected at least 2"),
        ({"batch": 0}, "--batch is 0, expected at least 1"),
        ({"parts": 3}, "--parts 3 does not divide --batch 4"),
        ({"learning_rate": 0.0}, "--learning-rate is 0.0, expected a number above 0"),
        ({"warmup": 1.5}, "--warmup is 1.5, expected a share"),
        ({"weight_decay": -1.0}, "--weight-decay is -1.0"),
        ({"dtype": "float16"}, "--dtype is 'float16', expected one of float32, bfloat16"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"clip": math.nan}, "--clip is nan"),
    ],
)
def test_budgets_out_of_range(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        replace(BUDGET, **changes).check("here")


def test_what_no_model_is_made_from(text: runs.Corpus) -> None:
    with pytest.raises(ArgumentError, match="got int, expected the configuration of a model: HybridConfig"):
        runs.train_language_model(3, text, BUDGET, 0, name="x")
    with pytest.raises(ArgumentError, match="workers is 0, expected at least 1"):
        runs.run_jobs([], 0, print)


@dataclass(frozen=True)
class Sized:
    size: str = "desk"
    quick: bool = False
    workers: int = 2
    seed: int = 0
    seeds: int | None = None
    width: int | None = None


SIZES = {"quick": {"seeds": 1, "width": 8}, "desk": {"seeds": 3, "width": 64}}


def test_a_size_fills_what_is_not_given() -> None:
    assert runs.sized(Sized(), SIZES, "x") == Sized(seeds=3, width=64)
    assert runs.sized(Sized(quick=True, width=5), SIZES, "x") == Sized(size="quick", quick=True, seeds=1, width=5)
    for changes, message in (
        ({"size": "huge"}, "--size is 'huge', expected one of quick, desk"),
        ({"workers": 0}, "--workers is 0"),
        ({"seeds": 0}, "--seeds is 0"),
        ({"seed": -1}, "--seed is -1, expected 0 to 4294967293"),
    ):
        with pytest.raises(ArgumentError, match=message):
            runs.sized(Sized(**changes), SIZES, "x")


def made(name: str, seed: int, *held_out: float) -> runs.LanguageRun:
    return runs.LanguageRun(
        name=name, seed=seed, parameters=1, steps=tuple(range(1, len(held_out) + 1)), train=held_out,
        held_out=held_out, step_seconds=1.0, step_cpu_seconds=1.0, peak_bytes=None, before_bytes=None,
    )  # fmt: skip


def test_gaps_are_paired_and_judged_by_students_t() -> None:
    base = [made("a", seed, 9.0, last) for seed, last in enumerate((2.0, 2.5, 3.0))]
    near = [made("b", seed, 9.0, last) for seed, last in ((2, 2.91), (0, 1.9), (1, 2.39))]
    gap = Gap.between(near, base)
    assert gap.each == pytest.approx((-0.09, -0.1, -0.11))
    assert gap.noise == pytest.approx(4.303 * 0.01 / math.sqrt(3), rel=1e-3)  # t of 2 degrees of freedom at 97.5 %
    assert gap.side == "lower"
    assert Gap.between(base, near).side == "higher"
    assert Gap((-0.1, 0.1, -0.05)).side == "level"
    assert Gap((-0.1,)).side == "one seed"
    assert Gap((-0.1, math.nan)).side == "diverged"
    for count, point in ((13, 2.179), (31, 2.042), (32, 2.040), (61, 2.000), (121, 1.980)):
        many = Gap(tuple(float(i) for i in range(count)))
        deviation = math.sqrt(sum((i - (count - 1) / 2) ** 2 for i in range(count)) / (count - 1))
        assert many.noise == pytest.approx(point * deviation / math.sqrt(count), rel=5e-4)
    assert band([made("a", 0, 3.0, 1.0), made("a", 1, 5.0, 2.0)], "train") == ([3.0, 1.0], [4.0, 1.5], [5.0, 2.0])
    assert [name for name, _ in runs.by_name([*near, *base])] == ["b", "a"]


LOWER, HIGHER, LEVEL = Gap((-1.0, -1.1, -1.2)), Gap((1.0, 1.1, 1.2)), Gap((1.0, -1.0, 0.1))
ALONE, BROKEN = Gap((-1.0,)), Gap((-1.0, math.nan))


@pytest.mark.parametrize(
    ("gaps", "said"),
    [
        ((LOWER, LOWER), "holds"),
        ((LOWER, HIGHER, LEVEL), "holds in part"),
        ((LOWER, BROKEN), "holds in part"),
        ((LEVEL, LEVEL), "not seen here"),
        ((HIGHER, HIGHER), "does not hold here"),
        ((HIGHER, LEVEL), "does not hold here"),
        ((ALONE, ALONE), "not decided (one seed)"),
        ((ALONE, LEVEL), "not decided (one seed)"),
        ((BROKEN, LEVEL), "not decided (diverged)"),
    ],
)
def test_a_claim_of_several_gaps(gaps: tuple[Gap, ...], said: str) -> None:
    assert verdict(gaps, "lower") == said


def test_only_decided_sides_make_an_order() -> None:
    assert order(LOWER, LOWER) == order(HIGHER, HIGHER) == "the order stays"
    assert order(LOWER, HIGHER) == order(HIGHER, LOWER) == "the order changes"
    for open_one in (LEVEL, ALONE, BROKEN):
        assert {order(open_one, other) for other in (LOWER, HIGHER, open_one)} == {"not decided"}
        assert {order(other, open_one) for other in (LOWER, HIGHER)} == {"not decided"}


def test_the_note_on_learning_rates_names_them() -> None:
    assert "(0.003)" in rate_note(3e-3)
    assert "(0.02, at every depth)" in rate_note({1: 2e-2, 4: 2e-2})
    assert "(0.005 at depth 1, 0.001 at depth 12)" in rate_note({1: 5e-3, 12: 1e-3})
