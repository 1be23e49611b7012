"""Training on a task: it learns, stops when it may and sees the same examples every time; and Muon with AdamW."""

from dataclasses import replace

import pytest
import torch
from mistakes import refuses
from torch import nn
from torch.optim import AdamW, Muon

from regard.models import HybridConfig, HybridForCausalLM
from regard.tasks import Sort, StackedMQAR, tasks
from regard.training.muon import MuonAdamW, hidden_matrices
from regard.training.task import TaskBudget, TaskExamples, score_task, train_on_task
from regard.training.task.scores import check_metric

TASK = Sort(symbols=3, least=2, most=3)


def model(**fields: object) -> HybridForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": TASK.vocabulary, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return HybridForCausalLM(HybridConfig(**sizes | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_learns_and_stops_when_it_is_good_enough(optimizer: str) -> None:
    seen = []
    budget = TaskBudget(
        steps=400, batch=32, learning_rate=1e-2, eval_every=20, eval_examples=64, stop_at=0.8, optimizer=optimizer
    )
    found = train_on_task(model(), TASK, budget, report=lambda step, scores: seen.append(step))
    assert found.best("accuracy") >= 0.8
    assert found.step < 400
    assert [step for step, _ in found.scored] == seen == list(range(20, found.step + 1, 20))
    assert found.loss[-1] < found.loss[0]


def test_the_same_budget_gives_the_same_model() -> None:
    budget = TaskBudget(steps=3, batch=4, eval_every=3, eval_examples=4)
    one, two = model(), model()
    train_on_task(one, TASK, budget)
    train_on_task(two, TASK, budget)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    batches = TaskExamples(TASK, budget)
    assert not torch.equal(batches[0]["input_ids"], batches[1]["input_ids"])


def test_the_rate_rises_and_falls() -> None:
    budget = TaskBudget(steps=100, warmup=0.1, final_share=0.2)
    rates = [budget.rate(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == 1.0
    assert rates[-1] == pytest.approx(0.2)


@pytest.mark.parametrize("change", [{"steps": 0}, {"learning_rate": -1.0}, {"warmup": 2.0}, {"optimizer": "muo"}])
def test_a_budget_out_of_range_is_refused(change: dict[str, object]) -> None:
    refuses(f"TaskBudget: {min(change)} is ", TaskBudget, **change)


def test_what_cannot_be_trained_is_refused() -> None:
    budget = TaskBudget(steps=1, batch=2, eval_examples=2)
    refuses("no metric 'f1'; it has accuracy, exact", train_on_task, model(), TASK, replace(budget, metric="f1"))
    refuses("model has 2 tokens", train_on_task, model(vocab_size=2), TASK, budget)
    broken = model()
    next(broken.parameters()).data.fill_(float("nan"))
    refuses("loss is nan at step 1", train_on_task, broken, TASK, budget)


def test_muon_takes_the_matrices_and_adamw_the_rest() -> None:
    """A step is that of torch's own two optimisers, and a state that is saved and loaded goes on alike."""
    net = model(tie_word_embeddings=False)
    matrices = hidden_matrices(net)
    named = {name for name, p in net.named_parameters() if id(p) in matrices}
    assert named
    assert all("proj" in name or "mlp" in name for name in named)
    learned = model(mixers="local-linear", ridges="learned")
    assert {id(p) for name, p in learned.named_parameters() if "ridge_proj.weight" in name} <= hidden_matrices(learned)
    assert "ridge_proj.weight" in str([*learned.state_dict()])
    assert not any("embed" in name or "lm_head" in name or "norm" in name for name in named)
    same = model(tie_word_embeddings=False)
    both = MuonAdamW.of([{"params": list(net.parameters()), "weight_decay": 0.0}], 0.01, net)
    own = hidden_matrices(same)
    hidden = [p for p in same.parameters() if id(p) in own]
    rest = [p for p in same.parameters() if id(p) not in own]
    muon = Muon(hidden, lr=0.01, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    apart = [muon, AdamW(rest, lr=0.01, weight_decay=0)]
    tokens = torch.arange(6)[None] % TASK.vocabulary
    for turn in range(3):
        if turn == 2:
            again = MuonAdamW.of([{"params": list(net.parameters()), "weight_decay": 0.0}], 0.01, net)
            again.load_state_dict(both.state_dict())
            both = again
        for each in (net, same):
            each.zero_grad()
            each(tokens, labels=tokens).loss.backward()
        both.step()
        for part in apart:
            part.step()
    torch.testing.assert_close([*net.parameters()], [*same.parameters()])


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_an_update_of_muon_changes_singular_values_alone(shape: tuple[int, int]) -> None:
    """Newton-Schulz steps are a polynomial of the singular values, which is evaluated here in float64."""
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight = nn.Parameter(torch.zeros(shape))
    weight.grad = gradient.clone()
    MuonAdamW([{"params": [weight], "momentum": 0.0, "nesterov": False}], [], lr=1.0).step()
    u, s, v = torch.linalg.svd(gradient.double(), full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    expected = -0.2 * max(shape) ** 0.5 * (u * s) @ v  # the scale of match_rms_adamw
    assert (weight.detach().double() - expected).norm() < 0.02 * expected.norm()


def test_groups_of_muon_follow_a_schedule() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = MuonAdamW.of([{"params": list(net.parameters())}], 0.1, net)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    schedule.step()
    assert [group["lr"] for part in optimizer.parts for group in part.param_groups] == [0.05, 0.05]


def test_two_tokens_at_a_position_are_the_sum_of_their_embeddings() -> None:
    """A single layer of attention without a feed-forward layer solves stacked recall; it cannot without the values."""
    task = StackedMQAR(tokens=16, length=12, pairs=2)
    budget = TaskBudget(steps=400, batch=32, learning_rate=2e-2, eval_every=50, eval_examples=64, stop_at=0.8)
    assert train_on_task(model(vocab_size=16, num_attention_heads=1), task, budget).best("accuracy") >= 0.8


def test_a_metric_that_the_task_lacks_is_found_before_training() -> None:
    task = tasks.get("recurring-names").named("terse")
    found = score_task(model(vocab_size=task.vocabulary), task, split="validation", examples=8)
    assert len(found) > 3
    for metric in found:
        check_metric("test", task, metric, "validation", 8)
    refuses("test: the task has no metric 'L1'; it has accuracy, ", check_metric, "test", task, "L1", "validation", 8)
    refuses("train_on_task: the task has no metric 'loss on x'", train_on_task, model(), TASK,
            TaskBudget(metric="loss on x"))  # fmt: skip
