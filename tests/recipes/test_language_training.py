"""The training of the language recipes, against a loop written out here."""

import hashlib
import math
import os
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mistakes import refuses

from regard.models import HybridConfig, HybridForCausalLM
from regard.training.task import TaskBudget
from regard_recipes.kernels.kernel_selection import KernelSelection
from regard_recipes.lib import language_training as runs
from regard_recipes.lib.recipe import Cell
from regard_recipes.lib.results import plain
from regard_recipes.lib.running import run_calls
from regard_recipes.lib.text_recipe import initial_range
from regard_recipes.lib.trained import LanguageOptions

V = 17


class Options(LanguageOptions):
    """The options alone."""

    def cells(self) -> list[Cell]:
        return []

    def measure(self, cell: Cell, seed: int) -> list[Any]:
        return []


BUDGET, RATE = Options(context=12, batch=4, steps=7, looks=3), 2e-2


def config(**changes: object) -> HybridConfig:
    sizes = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return HybridConfig(**sizes, **changes)


@pytest.fixture(scope="module")
def text() -> runs.Corpus:
    """A walk that goes on by 1, 2 or 3."""
    steps = torch.randint(1, 4, (900,), generator=torch.Generator().manual_seed(3))
    tokens = (steps.cumsum(0) % V).int()
    return runs.Corpus(tokens[:700], tokens[700:712])


def test_wide_models_begin_with_smaller_weights() -> None:
    assert [initial_range(width) for width in (32, 256, 384, 1024)] == [0.05, 0.05, 0.02, 0.02]
    paper = KernelSelection.configure("paper")
    assert paper.model_config(paper.cells()[0], 100).initializer_range == 0.02


def train(
    text: runs.Corpus, seed: int = 0, changes: dict[str, Any] | None = None, **more: Any
) -> tuple[dict[str, Any], list[float], list[float]]:
    """Return the row of a run, and the training and held-out losses of its looks."""
    budget = replace(BUDGET, **(changes or {}))
    run, *looks = runs.train_language_model(config(), text, budget, RATE, seed, **more)
    assert [run["kind"], *(look["kind"] for look in looks)] == ["run"] + ["look"] * budget.looks
    assert [look["step"] for look in looks] == list(budget.look_steps())
    train, held_out = ([look[name] for look in looks] for name in ("train", "held_out"))
    assert [run["train"], run["held_out"]] == pytest.approx([train[-1], held_out[-1]], nan_ok=True)
    return run, train, held_out


def starts(seed: int, step: int, count: int, positions: int) -> list[int]:
    digest = hashlib.blake2b(f"{seed}:{step}".encode(), digest_size=8).digest()
    drawn = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return [int(torch.randint(positions, (1,), generator=drawn)) for _ in range(count)]


def test_training_is_a_plain_loop(text: runs.Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW, decay of matrices, warm-up over two of seven steps, cosine, clipped gradients, windows of (seed, step)."""
    monkeypatch.setattr(runs, "TaskBudget", partial(TaskBudget, final_share=0.2, warmup=0.3, clip=0.7))
    run, train_losses, held_out_losses = train(text, 5)
    torch.manual_seed(5)
    model = HybridForCausalLM(config()).train()
    decayed = [w for w in model.parameters() if w.dim() == 2]
    others = [w for w in model.parameters() if w.dim() == 1]
    assert len(others) == 3
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95))
    losses, held_out = [], []
    cosine = [0.02 * (0.2 + 0.8 * (1 + math.cos(math.pi * i / 4)) / 2) for i in range(5)]
    for step, rate in enumerate([0.01, 0.02, *cosine]):
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
    assert BUDGET.look_steps() == (2, 5, 7)
    assert train_losses == pytest.approx([sum(losses[:2]) / 2, sum(losses[2:5]) / 3, sum(losses[5:]) / 2], rel=1e-5)
    assert held_out_losses == pytest.approx([held_out[1], held_out[4], held_out[6]], rel=1e-5)
    assert run["parameters"] == sum(w.numel() for w in model.parameters())
    assert run["step_seconds"] > 0


def test_weights_decay_and_gradients_are_clipped_as_on_tasks() -> None:
    schedule = TaskBudget()
    assert (schedule.weight_decay, schedule.clip, schedule.warmup, schedule.final_share) == (0.1, 1.0, 0.05, 0.1)


def test_a_step_in_parts_is_the_step(text: runs.Corpus) -> None:
    whole, parts = train(text), train(text, changes={"parts": 2})
    assert parts[1] == pytest.approx(whole[1], rel=1e-4)
    assert parts[2] == pytest.approx(whole[2], rel=1e-4)


def test_the_seed_decides_and_nothing_else_does(text: runs.Corpus) -> None:
    first = train(text, 1)
    before, others = torch.random.get_rng_state(), (random.getstate(), str(np.random.get_state()))  # noqa: NPY002
    again = train(text, 1)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert (random.getstate(), str(np.random.get_state())) == others  # noqa: NPY002
    assert first[1:] == again[1:]
    assert first[2] != train(text, 2)[2]


def scale_up(model: HybridForCausalLM, factor: float) -> None:
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(factor)


def test_a_loss_that_is_not_finite_ends_the_training(text: runs.Corpus) -> None:
    run, _, held_out = train(text, prepare=partial(scale_up, factor=math.inf))
    assert math.isnan(held_out[0])
    assert plain(run)["held_out"] is None


BLOCK = 64 * 2**20


def peak(text: runs.Corpus, prepare: Callable | None = None) -> int | None:
    """What a training of two steps holds, in this process."""
    run, *_ = train(text, changes={"steps": 2, "looks": 1}, prepare=prepare)
    return None if run["peak_bytes"] is None else run["peak_bytes"] - run["before_bytes"]


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="the system does not tell its peak memory")
def test_peak_memory_is_that_of_the_training_alone(text: runs.Corpus) -> None:
    """In fresh processes, whose parent holds much."""
    ballast = torch.ones(300 * 2**20 // 4)
    found = dict(run_calls({"plain": partial(peak, text), "wide": partial(peak, text, widen)}, 1))
    del ballast
    assert 0.9 * BLOCK < found["wide"] - found["plain"] < 1.2 * BLOCK
    assert found["plain"] < 150 * 2**20


def widen(model: HybridForCausalLM) -> None:
    """64 MiB that live during the forward pass alone."""
    model.register_forward_pre_hook(touch)


def touch(*_: object) -> None:
    torch.ones(BLOCK // 4)


def test_a_model_keeps_its_settings(text: runs.Corpus) -> None:
    """The Trainer turns the cache off while it trains."""
    kept = {}
    train(text, measure=lambda model: kept.update(cache=model.config.use_cache, training=model.training) or {})
    assert kept == {"cache": True, "training": False}


def test_what_a_model_leaves_out_of_its_loss_is_left_out(text: runs.Corpus) -> None:
    """A model that counts every other label has their mean as its loss, whatever the parts of a step."""

    def halve(model: HybridForCausalLM) -> None:
        def mask(module: object, args: object, given: dict) -> tuple:
            labels = given.get("labels")
            return args, given if labels is None else {**given, "labels": labels.where(labels % 2 == 0, -100)}

        model.register_forward_pre_hook(mask, with_kwargs=True)

    _, (loss,), _ = train(text, changes={"steps": 1, "looks": 1}, prepare=halve)
    torch.manual_seed(0)
    model = HybridForCausalLM(config())
    windows = torch.stack([text.train_tokens[s : s + 12].long() for s in starts(0, 0, 4, 700 - 12 + 1)])
    logits = model(input_ids=windows).logits[:, :-1].reshape(-1, V)
    targets = windows[:, 1:].reshape(-1)
    expected = F.cross_entropy(logits[targets % 2 == 0], targets[targets % 2 == 0]).item()
    assert loss == pytest.approx(expected, rel=1e-5)


def test_what_no_model_is_made_from(text: runs.Corpus) -> None:
    wrong = "got int, expected the configuration of a model: HybridConfig"
    refuses(wrong, runs.train_language_model, 3, text, BUDGET, RATE, 0)
    short = runs.Corpus(text.train_tokens[:5], text.held_out_tokens)
    refuses("the text has 5 tokens to train on", runs.train_language_model, config(), short, BUDGET, RATE, 0)
