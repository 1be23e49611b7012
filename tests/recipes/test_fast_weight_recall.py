"""`regard reproduce fast-weight-recall`: what is trained, measured and claimed."""

import math

import pandas as pd
import pytest
import torch
from tiny_runs import make, tiny
from transformers.modeling_outputs import CausalLMOutput

from regard.tasks import CrossDocumentRecall, collate
from regard_recipes.fwpkm._recall_measures import RecallTokens, coverage
from regard_recipes.fwpkm.fast_weight_recall import DETACHED, NORMALIZED, ROOM, RULES, FastWeightRecall
from regard_recipes.lib.recipe import select


def test_values_are_labelled_in_training_after_a_first_reading() -> None:
    task = RecallTokens(CrossDocumentRecall(keys=3, values=4, pairs=2, documents=2, reads=3))
    train, test = (task.example(0, 1, split) for split in ("train", "test"))
    values = [t for t in range(24) if t % 2]
    assert test.asked.nonzero().flatten().tolist() == values
    assert train.asked.nonzero().flatten().tolist() == [t for t in values if (t // 4) % 3]
    assert torch.equal(train.labels[train.asked], train.tokens[train.asked])
    predicted = test.tokens.clone()
    predicted[13] = 0  # a value on the first reading of document 2
    assert [task.scores(predicted, test)[f"accuracy on reading {i}"] for i in range(6)] == [1, 1, 1, 0.5, 1, 1]


def test_accuracy_is_by_document_and_reading() -> None:
    """Of a model that is right everywhere but at the first value of one reading of one document."""
    own = make("fast-weight-recall", examples=3)
    task, model = own.task(), own.make_model(NORMALIZED, False)
    wrong = task.length * (task.reads + 1)  # where reading 2 of document 2 begins; the value comes after the key

    def right(input_ids: torch.Tensor, **_: object) -> CausalLMOutput:
        following = input_ids.roll(-1, 1)
        following[:, wrong] = 0  # a key
        return CausalLMOutput(logits=torch.nn.functional.one_hot(following, task.vocabulary).float())

    model.forward = right
    shares = own.accuracy(model, task, 0)
    assert shares.pop(task.reads + 1) == pytest.approx(1 - 2 / task.length)
    assert shares == [1] * (task.documents * task.reads - 1)


def test_the_loss_is_of_labels() -> None:
    model, task = make("fast-weight-recall").make_model(NORMALIZED, False), make("fast-weight-recall").task()
    batch = collate(RecallTokens(task).examples(0, range(2)))
    with torch.no_grad():
        found = model(**batch)
    chances = found.logits.double().softmax(-1)
    nats = [-math.log(float(chances[b, t - 1, batch["labels"][b, t]])) for b, t in (batch["labels"] >= 0).nonzero()]
    assert float(found.loss) == pytest.approx(sum(nats) / len(nats), rel=1e-6)


def test_models_have_the_memory_of_their_rule() -> None:
    own = make("fast-weight-recall")
    for name, options in RULES.items():
        for small, slots in ((False, 64), (True, 16)):
            memory = own.make_model(name, small).memory
            assert (memory.slots, memory.settings.top_k, memory.chunk_size) == (slots, 2, 12)
            assert memory.settings.rule.name == options["step_rule"]
            assert memory.settings.meta_grad is (name != DETACHED)

    model = FastWeightRecall.configure().make_model(NORMALIZED, small=False)
    assert (sum(weight.numel() for weight in model.parameters()), model.memory.slots) == (46_344, 1024)


def test_one_reading_writes_before_the_questions_only_in_smaller_chunks() -> None:
    """Trained for a moment; read once, it answers where the document was written before the questions come."""
    own = make("fast-weight-recall", steps=150, batch=8, examples=6, sub_keys=12)
    frame = pd.DataFrame(own.measure({"memory": ROOM, "rule": NORMALIZED}, 0))
    once = select(frame, kind="once").set_index("chunk")["accuracy"]
    assert list(once.index) == [24, 12, 6, 3]
    assert once[24] < 0.3
    assert min(once[12], once[6]) > once[24] + 0.3
    (run,) = select(frame, kind="run").to_dict("records")
    assert run["hit_last"] <= run["hit_four"]
    recall = select(frame, kind="recall")
    assert recall[["document", "reading"]].to_numpy().tolist() == [[d, r] for d in (1, 2) for r in (1, 2, 3)]
    first, second = recall["accuracy"][:2]
    assert second > 0.6 > 0.3 > first
    losses = select(frame, kind="loss")["loss"].tolist()
    assert losses[-1] < losses[0]


def test_coverage_is_counted() -> None:
    """Against a dense search: without an entropy the keys stay, and slots can be found by brute force."""
    sizes = {"sub_keys": 5, "width": 6, "top_k": 3, "chunk": 8, "chunks": 4, "looked_at": 2, "centre": 0.3}
    found = coverage(0.7, 0.0, 3, **sizes)
    draw = torch.Generator().manual_seed(3)
    keys = ((2 * torch.rand(1, 2, 5, 3, generator=draw) - 1) * 6**-0.5)[0].double()
    centre, noise = (0.3 * torch.randn(rows, 6, generator=draw) for rows in (1, 32))
    used = set()
    for q in (centre + 0.7 * noise).double()[16:]:
        first, second = ([-math.log(1e-3 + float((half - key).square().sum())) for key in own] for half, own in zip(q.split(3), keys, strict=True))  # fmt: skip # noqa: E501
        scores = {(i, j): first[i] + second[j] for i in range(5) for j in range(5)}
        used |= set(sorted(scores, key=lambda slot: -scores[slot])[:3])
    assert found == pytest.approx(len(used) / 25)


def test_the_entropy_spreads_clustered_queries() -> None:
    sizes = {"sub_keys": 16, "chunks": 32, "looked_at": 8, "chunk": 64}
    assert coverage(0.5, 1.0, 0, **sizes) > 1.5 * coverage(0.5, 0.0, 0, **sizes)


def test_a_run_has_every_row() -> None:
    _, results = tiny("fast-weight-recall")
    runs = results.select(kind="run")
    assert list(zip(runs["memory"], runs["slots"], strict=True)) == [("room enough", 64), ("too few slots", 16)]
    assert all(runs["fast_weights"] == runs["slots"] * 16 + 2 * runs["slots"] ** 0.5 * 8)
    recall = results.select(kind="recall")
    assert recall.groupby("memory").size().tolist() == [2 * 3, 2 * 3]
    assert recall["accuracy"].between(0, 1).all()
    assert set(results.select(kind="clustered")["weight"]) == {0.0, 1.0, 10.0}
