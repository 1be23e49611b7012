"""`score_task`: what a model that knows the answer, and one that does not, score."""

import math

import pytest
import torch
from mistakes import refuses
from transformers.modeling_outputs import CausalLMOutput

from regard.models import HybridConfig, HybridForCausalLM
from regard.tasks import MQAR, RecurringNames, RegBench, Reverse, TokenTask
from regard.training.task import TaskScore, score_task


class Knowing(HybridForCausalLM):
    """A model whose logits are a task's solution of the sequence that it is given."""

    task: TokenTask
    answers: dict[tuple[int, ...], torch.Tensor]

    def forward(self, input_ids, attention_mask=None, **_):  # type: ignore[no-untyped-def, override]
        logits = torch.zeros(*input_ids.shape, self.config.vocab_size)
        for row, tokens in enumerate(input_ids.tolist()):
            tokens = tuple(tokens[: int(attention_mask[row].sum())] if attention_mask is not None else tokens)
            for whole, answer in self.answers.items():
                if whole[: len(tokens)] == tokens:
                    n = min(len(tokens), len(answer) - 1)
                    logits[row, torch.arange(n), answer[1 : n + 1].clamp_min(0)] = 9.0
        return CausalLMOutput(logits=logits)


def small(vocabulary: int) -> HybridConfig:
    return HybridConfig(vocab_size=vocabulary, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)


def knowing(task: TokenTask, count: int) -> Knowing:
    model = Knowing(small(task.vocabulary))
    model.generation_config.use_cache = False  # it looks at the whole sequence
    examples = task.examples(0, range(count), "test")
    model.answers = {
        tuple(e.tokens.tolist()): e.labels if e.probabilities is not None else task.oracle(e) for e in examples
    }
    return model


@pytest.mark.parametrize(("task", "generate"), [(MQAR.named("quick"), False), (Reverse.named("quick"), True)])
def test_a_model_that_knows_the_answer_scores_one(task: TokenTask, generate: bool) -> None:
    found = score_task(knowing(task, 12), task, examples=12, batch=5, generate=generate)
    assert found.pop("loss").mean < 1.0
    assert set(found) == {"accuracy", "exact", *(["free-running accuracy", "free-running exact"] if generate else [])}
    assert all(score.values == (1.0,) * 12 for score in found.values())


def test_exact_answers_are_exact_free_running_too() -> None:
    """One wrong token in five of twelve answers; what is written after it is wrong as well."""
    model = knowing(Reverse.named("quick"), 12)
    for answer in [*model.answers.values()][:5]:
        answer[-3] = (answer[-3] + 1) % 16
    found = score_task(model, Reverse.named("quick"), examples=12, generate=True)
    assert found["exact"].mean == found["free-running exact"].mean == pytest.approx(7 / 12)
    assert found["free-running accuracy"].mean < found["accuracy"].mean


def test_an_untrained_model_is_near_the_floor() -> None:
    task = Reverse.named("quick")
    torch.manual_seed(0)
    found = score_task(HybridForCausalLM(small(task.vocabulary)), task, examples=24, generate=True)
    assert found["accuracy"].mean < 0.3
    assert found["free-running exact"].mean == 0.0


def test_losses_of_parts_make_up_the_loss() -> None:
    """The labels of recurring names are those of near and far statements; new ones have none."""
    task = RecurringNames.named("terse")
    torch.manual_seed(0)
    model = HybridForCausalLM(small(task.vocabulary))
    for index in range(3):
        found = {name: score.values[0] for name, score in score_task(model, task, examples=1, seed=index).items()}
        parts = task.example(index, 0, "test").parts
        near, far = int(parts["near"].sum()), int(parts["far"].sum())
        whole = (near * found["loss on near"] + far * found["loss on far"]) / (near + far)
        assert found["loss"] == pytest.approx(whole, rel=1e-5)
        assert "loss on new" not in found


def test_a_mean_has_its_standard_error() -> None:
    score = TaskScore((0.0, 1.0, 1.0, 0.0))
    assert score.mean == 0.5
    assert score.standard_error == pytest.approx((1 / 3) ** 0.5 / 2)
    assert str(TaskScore((1.0,))) == "1.0000 ± nan (n = 1)"
    assert str(TaskScore((1.0, math.nan))) == "nan ± nan (n = 2)"


def test_what_cannot_be_scored_is_refused() -> None:
    few, task = HybridForCausalLM(small(5)), RegBench.named("quick")
    refuses("score_task: model has 5 tokens, but the task mqar has 128", score_task, few, MQAR.named("quick"))
    told = {"examples": 2, "generate": True}
    refuses("generate=True needs answers that continue their prompts", score_task, knowing(task, 2), task, **told)
    refuses("examples", score_task, knowing(task, 2), task, examples=0)
