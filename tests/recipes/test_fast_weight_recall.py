"""`regard reproduce fast-weight-recall`: what is trained, measured and judged."""

from __future__ import annotations

import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.checks import ArgumentError
from regard.cli import main
from regard.tasks import CrossDocumentRecall
from regard_recipes.fwpkm import fast_weight_recall as recipe
from regard_recipes.fwpkm import fast_weight_recall_model as trained
from regard_recipes.fwpkm import fast_weight_recall_output as shown
from regard_recipes.fwpkm.fast_weight_recall import DETACHED, NORMALIZED, PAPER, REFERENCE, RULES
from regard_recipes.fwpkm.fast_weight_recall_model import RecallRun
from regard_recipes.lib.language_runs import sized
from regard_recipes.lib.processes import run_calls

SMALL = (
    "--quick --rules normalized paper --sub-keys 8 --stress-sub-keys 4 --key-dim 16 --top-k 2 --width 16 --keys 12 "
    "--pairs 6 --documents 2 --reads 3 --steps 3 --stress-steps 2 --batch 2 --examples 3"
)
TINY = SMALL.split()


def config(**changes: object) -> recipe.FastWeightRecallConfig:
    small = dict(zip((w[2:].replace("-", "_") for w in TINY[4::2]), map(int, TINY[5::2]), strict=True))
    return sized(recipe.FastWeightRecallConfig(**{"size": "quick", **small, **changes}), recipe.SIZES, recipe.CALL)


# The model -------------------------------------------------------------------------------------------------------


def test_the_loss_is_of_values_after_a_first_reading() -> None:
    """A model whose logits are chosen: each right value after the first reading costs what its logit says."""
    task = CrossDocumentRecall(keys=3, values=3, pairs=2, documents=2, reads=3)
    examples = task.examples(0, range(2))

    def model(stream: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*stream.shape, 6)
        logits[..., 0] = torch.arange(stream.shape[1]) / 10.0
        return logits

    found = trained.recall_loss(model, examples)  # type: ignore[arg-type]
    places = [t for t in range(24) if t % 2 == 0 and (t // 4) % 3 > 0]
    wanted = sum(math.log(5 + math.exp(t / 10)) for t in places) / len(places)
    assert float(found) == pytest.approx(wanted, rel=1e-6)


def test_accuracy_counts_right_values_by_document_and_reading() -> None:
    task = CrossDocumentRecall(keys=3, values=4, pairs=2, documents=2, reads=2)
    examples = task.examples(1, range(3))

    class Knows(torch.nn.Module):
        """Right everywhere but on the first reading, and on the first pair of document 2."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def forward(self, stream: torch.Tensor) -> torch.Tensor:
            right = torch.nn.functional.one_hot(stream.roll(-1, 1), 7).float()
            wrong = torch.tensor([(t // 4) % 2 == 0 or t == 12 for t in range(16)])
            return torch.where(wrong[None, :, None], -right, right)

    found = trained.accuracy(Knows(), task, examples, batch=2)  # type: ignore[arg-type]
    assert found.tolist() == [[0.0, 1.0], [0.0, 0.5]]


def test_models_have_the_memory_of_their_rule() -> None:
    for name, options in RULES.items():
        for stress, slots in ((False, 64), (True, 16)):
            memory = trained.make_model(config(), name, stress=stress).memory
            assert (memory.slots, memory.top_k, memory.chunk_size) == (slots, 2, 12)
            assert memory.rule.name == options["step_rule"]
            assert memory.meta_grad is (name != DETACHED)


def test_the_desk_model_is_of_the_size_of_the_notes() -> None:
    model = trained.make_model(
        sized(recipe.FastWeightRecallConfig(), recipe.SIZES, recipe.CALL), NORMALIZED, stress=False
    )
    count = sum(weight.numel() for weight in model.parameters())
    assert 45_000 < count < 65_000
    assert model.memory.slots == 1024


def test_one_reading_writes_before_the_questions_only_in_smaller_chunks() -> None:
    """Trained for a moment; read once, it answers where the document was written before the questions come."""
    torch.manual_seed(0)
    own = config(steps=150, batch=8, examples=6, sub_keys=12)
    found = trained.train_and_measure(own, NORMALIZED, 0)
    assert list(found.single) == [24, 12, 6, 3]
    assert found.single[24] < 0.3
    assert min(found.single[chunk] for chunk in (12, 6)) > found.single[24] + 0.3
    assert found.hits is not None
    assert found.hits[0] <= found.hits[1]
    assert found.accuracy[0][1] > 0.6 > 0.3 > found.accuracy[0][0]
    assert found.losses[-1] < found.losses[0]


# Clustered queries -----------------------------------------------------------------------------------------------


def test_coverage_is_counted() -> None:
    """Against a dense search: without an entropy the keys stay, and slots can be found by brute force."""
    sizes = {"sub_keys": 5, "key_dim": 6, "top_k": 3, "chunk": 8, "chunks": 4, "looked_at": 2, "centre": 0.3}
    found = trained.coverage(0.7, 0.0, 3, sizes)
    draw = torch.Generator().manual_seed(3)
    keys = ((2 * torch.rand(1, 2, 5, 3, generator=draw) - 1) * 6**-0.5)[0].double()
    centre, noise = (0.3 * torch.randn(rows, 6, generator=draw) for rows in (1, 32))
    query = (centre + 0.7 * noise).double()
    used = set()
    for q in query[16:]:
        first, second = ([-math.log(1e-3 + float((half - key).square().sum())) for key in own] for half, own in zip(q.split(3), keys, strict=True))  # fmt: skip # noqa: E501
        scores = {(i, j): first[i] + second[j] for i in range(5) for j in range(5)}
        used |= set(sorted(scores, key=lambda slot: -scores[slot])[:3])
    assert found == pytest.approx(len(used) / 25)


def test_the_entropy_spreads_clustered_queries() -> None:
    sizes = {"sub_keys": 16, "chunks": 32, "looked_at": 8, "chunk": 64}
    assert trained.coverage(0.5, 1.0, 0, sizes) > 1.5 * trained.coverage(0.5, 0.0, 0, sizes)


# The recipe ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("recall") / "out"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trained, "COLLAPSE", {**trained.COLLAPSE, "sub_keys": 8, "chunks": 4, "looked_at": 2})
        assert main(["reproduce", "fast-weight-recall", "--out", str(out), *TINY]) == 0
    return out


def test_the_folder_is_complete(tiny: Path) -> None:
    found = json.loads((tiny / "fast-weight-recall.json").read_text())
    assert [(run["rule"], run["seed"], run["slots"]) for run in found["runs"]] == [
        ("normalized", 0, 64),
        ("paper", 0, 64),
    ]
    assert [(run["rule"], run["slots"]) for run in found["stress"]] == [("normalized", 16), ("paper", 16)]
    for run in (*found["runs"], *found["stress"]):
        assert [len(document) for document in run["accuracy"]] == [3, 3]
        assert all(0 <= share <= 1 for document in run["accuracy"] for share in document)
        assert run["fast_weights"] == run["slots"] * 16 + 2 * math.isqrt(run["slots"]) * 8
    assert len(found["collapse"]) == 1
    assert {record["weight"] for record in found["collapse"][0]} == {0.0, 1.0, 10.0}
    assert found["used"]["steps"] == 3
    for name in ("fast-weight-recall.png", "fast-weight-recall-collapse.png"):
        assert (tiny / name).read_bytes().startswith(b"\x89PNG")
    assert "# fast-weight-recall" in (tiny / "fast-weight-recall.md").read_text()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--rules sgd", "unknown rule 'sgd'"),
        ("--reads 1", "--reads is 1, expected 2 or more"),
        ("--pairs 200", "pairs is 200, expected at most the 128 keys"),
        ("--top-k 40", "top_k"),
        ("--learning-rate 0", "--learning-rate is 0.0, expected a number above 0"),
        ("--seeds 0", "--seeds is 0"),
        ("--size huge", "huge"),
    ],
)
def test_mistakes_are_found_before_anything_is_trained(
    flags: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["reproduce", "fast-weight-recall", "--out", str(tmp_path / "o"), *flags.split()])
    told = capsys.readouterr().err
    assert code != 0
    assert said in re.sub(r"\s+", " ", told)
    assert not (tmp_path / "o").exists()


# Verdicts --------------------------------------------------------------------------------------------------------

GOOD = [[0.01, 0.995, 1.0, 1.0], [0.01, 0.97, 1.0, 1.0]]


def run(rule: str, seed: int, accuracy: list[list[float]], **changes: Any) -> RecallRun:
    own: dict[str, Any] = {"single": {}, "hits": None, "slots": 1024, **changes}
    return RecallRun(
        rule=rule, seed=seed, parameters=1, fast_weights=2, losses=[1.0], seconds=3.0, accuracy=accuracy, **own
    )


def seen(*rules: RecallRun, collapse: list[dict[str, float]] | None = None) -> shown.Seen:
    records = collapse or [{"spread": 0.5, "weight": w, "seed": 0, "coverage": c} for w, c in ((0.0, 0.1), (1.0, 0.3))]
    small = [run(PAPER, 0, [[0.0, 0.5, 0.6, 0.7], [0.0, 0.1, 0.2, 0.3]], slots=144)]
    task = CrossDocumentRecall(documents=2, reads=4)
    return shown.Seen(rules, small, [records], task)


def note(notes: tuple[str, ...], start: str) -> str:
    (found,) = (text for text in notes if text.startswith(start))
    return found


def test_verdicts_follow_the_numbers() -> None:
    single = {256: 0.009, 128: 1.0, 64: 0.99}
    told = shown.notes(
        seen(
            run(NORMALIZED, 0, GOOD, single=single, hits=(0.8, 0.97)),
            run(NORMALIZED, 1, GOOD, single=single, hits=(0.76, 0.96)),
            run(PAPER, 0, [[0.01, 0.98, 1.0, 1.0], [0.0, 0.6, 0.8, 0.9]]),
            run(DETACHED, 0, [[0.02, 0.99, 1.0, 1.0], [0.0, 0.9, 1.0, 1.0]]),
        )
    )
    assert "holds, at most 2.0%" in note(told, "Chance")
    assert "holds, in 2 of 2 seeds" in note(told, "One-step rewriting")
    assert "0.995 or more" in note(told, "One-step rewriting")
    assert "0.970 or more after remapping" in note(told, "One-step rewriting")
    assert "0.980 on the second" in note(told, "The paper's equation 35")
    assert "0.000, 0.600, 0.800, 0.900 on readings 1 to 4" in note(told, "The paper's equation 35")
    assert "0.990 and 0.900, with them 0.995 and 0.970" in note(told, "Without gradients")
    assert "With 144 slots for 128 pairs" in note(told, "With 144")
    assert "paper 0.500, 0.100, after 4 readings 0.700, 0.300" in note(told, "With 144")
    assert "(normalized): holds." in note(told, "One reading")
    assert "one of the protocol" in note(told, "One reading")
    assert "(normalized): holds." in note(told, "Retrieved")
    assert "76.0% of the retrieved" in note(told, "Retrieved")
    assert "holds. spread 0.5: 3.0 times with weight 1." in note(told, "The entropy")


def test_failures_are_told() -> None:
    told = shown.notes(
        seen(
            run(REFERENCE, 0, GOOD, single={256: 0.2, 128: 1.0}, hits=(0.8, 0.9)),
            run(REFERENCE, 1, [[0.05, 0.98], [0.0, 0.99]], single={256: 0.0, 128: 1.0}, hits=(0.9, 0.9)),
            collapse=[
                {"spread": 0.5, "weight": w, "seed": 0, "coverage": c} for w, c in ((0.0, 0.2), (1.0, 0.3), (10.0, 0.1))
            ],
        )
    )
    assert "does not hold, at most 5.0%" in note(told, "Chance")
    assert "does not hold, in 1 of 2 seeds" in note(told, "One-step rewriting")
    assert "(reference): does not hold" in note(told, "One reading")
    assert "one of the protocol" not in note(told, "One reading")
    assert "(reference): does not hold" in note(told, "Retrieved")
    assert "does not hold. spread 0.5: 1.5 times with weight 1, 0.5 times with weight 10" in note(told, "The entropy")
    assert note(told, "The entropy").endswith("fewer are used at some spread: 10.")


def test_tables_have_every_rule() -> None:
    found = shown.tables(
        seen(run(NORMALIZED, 0, GOOD, single={256: 0.0, 128: 1.0}, hits=(0.5, 0.75)), run(PAPER, 0, GOOD))
    )
    first, small, single, collapse = found.values()
    assert first.rows[0][:3] == (NORMALIZED, "0.010 / 0.995 / 1.000 / 1.000", "0.010 / 0.970 / 1.000 / 1.000")
    assert (first.rows[0][-2], first.rows[1][-2]) == ("0.50 / 0.75", "-")
    assert small.rows[0][0] == PAPER
    assert single.rows == ((NORMALIZED, "0.000", "1.000"),)
    assert collapse.rows == (("0.5", "0.100", "0.300 (3.0x)"),)


# Processes -------------------------------------------------------------------------------------------------------


def test_calls_are_made_in_processes_of_their_own() -> None:
    import os

    told: list[str] = []
    found = run_calls({"one": os.getpid, "two": partial(max, 3, 4), "three": torch.get_num_threads}, 2, told.append)
    assert list(found) == ["one", "two", "three"]
    assert found["one"] != os.getpid()
    assert (found["two"], found["three"]) == (4, 1)
    assert [line.split(" (")[0] for line in told] == ["one", "two", "three"]


def test_failures_of_processes_are_told(capfd: pytest.CaptureFixture[str]) -> None:
    import os

    with pytest.raises(ArgumentError, match="pairs is 9"):
        run_calls({"bad": partial(CrossDocumentRecall, keys=3, pairs=9)}, 1, lambda text: None)
    with pytest.raises(RuntimeError, match="nope failed: TypeError"):
        run_calls({"nope": partial(max, 3)}, 1, lambda text: None)
    with pytest.raises(RuntimeError, match="the process of gone ended by exit code 3"):
        run_calls({"gone": partial(os._exit, 3)}, 1, lambda text: None)
    with pytest.raises(ArgumentError, match="workers is 0"):
        run_calls({"two": partial(max, 3, 4)}, 0, lambda text: None)
    assert "TypeError" in capfd.readouterr().err
