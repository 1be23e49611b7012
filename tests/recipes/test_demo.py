"""The demo from its flags to its folder."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from mistakes import refuses

import regard
from regard.checks import ArgumentError
from regard.training import TrainConfig, TrainingInterrupted, TrainingStopped, generate_text, load_model
from regard.training.fields import read_spec, split_specs
from regard.training.storage.files import LOCK, only_run
from regard_recipes.demo import demo_output, demo_recall, demo_train
from regard_recipes.demo.demo import DemoConfig, run_demo
from regard_recipes.demo.ngram import NGram

SPECS = "softmax,gaussian*nearest(k=4)"
LENGTH = 80
"""Characters of a sample: more than a piece of half a context."""


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "story.txt"
    lines = [f"On day {i} the {i % 7}th fox ate {i * i % 11} plums & <left> the rest.\n" for i in range(60)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def done(story: Path, tmp_path_factory: pytest.TempPathFactory) -> DemoConfig:
    """A whole demo of three steps."""
    out = tmp_path_factory.mktemp("demo") / "out"
    config = DemoConfig(steps=3, recall_steps=1, data=story, specs=SPECS, out=out, seed=5, workers=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_train, "write_on", partial(demo_train.write_on, length=LENGTH))
        assert run_demo(config) == 0
    return config


@pytest.fixture
def quick(story: Path, tmp_path: Path) -> DemoConfig:
    """A demo of one step of one model."""
    return DemoConfig(steps=1, recall_steps=0, data=story, specs="softmax", out=tmp_path / "out", workers=0)


def results(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text(encoding="utf-8"))


def test_specs_are_parsed() -> None:
    parts = split_specs("triweight*anchored(margin=0.5),local-linear[biweight],topk-softmax")
    found = [read_spec(part, "--specs", "demo") for part in parts]
    assert found == [
        regard.Spec("triweight", regard.Spec.parse("triweight*anchored(margin=0.5)").bandwidth),
        regard.Spec("biweight", degree=1, ridge=0.1),
        regard.presets()["topk-softmax"],
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"specs": "softmax,biweigt"}, "--specs.*biweigt.*biweight"),
        ({"specs": "softmax,,relumax"}, "--specs"),
        ({"specs": ""}, "--specs"),
        ({"specs": "softmax,biweight,biweight*adaptive"}, "'biweight' twice"),
        ({"specs": "triweight*anchored(margin=-1)"}, "margin"),
        ({"steps": 0}, "--steps is 0"),
        ({"recall_steps": -1}, "--recall-steps is -1"),
        ({"workers": -1}, "--workers is -1"),
        ({"seed": -1}, "--seed is -1"),
        ({"seed": 2**32}, "--seed is 4294967296, expected 0 to 4294967295"),
        ({"data": Path("/nowhere/at/all.txt")}, "does not exist"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_written(
    quick: DemoConfig, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(demo_train, "train", lambda *_, **__: pytest.fail("training began"))
    assert refuses(message, run_demo, replace(quick, **changes)).startswith("demo: ")
    assert not quick.out.exists()


def test_a_spec_that_cannot_be_trained_is_found_first(quick: DemoConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    build = demo_train.language_model

    def refusing(config: TrainConfig, tokenizer: Any) -> Any:
        if config.spec == ("biweight",):
            raise ArgumentError("attention: no implementation.")
        return build(config, tokenizer)

    monkeypatch.setattr(demo_train, "language_model", refusing)
    monkeypatch.setattr(demo_train, "train", lambda *_, **__: pytest.fail("training began"))
    wrong = replace(quick, specs="softmax,biweight")
    refuses("demo: --specs: biweight cannot be trained: attention: no impl", run_demo, wrong)
    assert not quick.out.exists()


def test_everything_is_there(done: DemoConfig) -> None:
    found = {str(path.relative_to(done.out)) for path in done.out.rglob("*") if path.is_file()}
    assert {
        *("report.html", "table.md", "results.json", "text.txt"),
        *("figures/curves.png", "figures/kernels.png", "figures/recall.png"),
        *("figures/attention-1-softmax.png", "figures/attention-2-gaussian-nearest-k-4.png"),
        "runs/1-softmax/model/model.safetensors",
        "runs/2-gaussian-nearest-k-4/model/model.safetensors",
    } <= found


def test_the_results_say_what_was_done(done: DemoConfig, story: Path) -> None:
    found = results(done.out)
    assert found["finished"] is True
    assert (found["settings"]["steps"], found["settings"]["seed"]) == ("3", "5")
    assert found["installation"]["versions"]["torch"] == torch.__version__
    assert found["text"]["source"] == str(story)
    assert [model["spec"] for model in found["models"]] == ["softmax", "gaussian*nearest(k=4)"]
    for model in found["models"]:
        assert model["train_seconds"] > 0
        assert model["tokens_per_second"] == pytest.approx(3 * 8 * 128 / model["train_seconds"])
        assert model["curve"]["steps"] == model["curve"]["held_out_steps"] == [1, 2, 3]
        assert model["curve"]["held_out_bits"][-1] == model["bits_per_char"]
        assert len(model["sample"]) == LENGTH
        assert model["prompt"].startswith("On day")
    assert [model["name"] for model in found["recall"]] == list(demo_recall.MODELS)
    for model in found["recall"]:
        assert (model["steps"], len(model["accuracy"])) == ([1], 1)
        assert 0 <= model["final"] <= 1


def test_models_differ_in_their_attention_only(done: DemoConfig) -> None:
    one, two = results(done.out)["models"]
    assert one["parameters"] == two["parameters"]
    assert one["support"] == pytest.approx(64.5)  # softmax: all of 1 .. 128 visible keys
    assert two["support"] == pytest.approx((1 + 2 + 3 + 125 * 4) / 128)
    configs = [json.loads((done.out / m["run"] / "config.json").read_text()) for m in (one, two)]
    assert {key for key in configs[0] if configs[0][key] != configs[1][key]} == {"spec", "out"}


def test_the_bits_are_those_of_the_saved_model(done: DemoConfig) -> None:
    """Measured again without the library's evaluation: every held-out character but the first, from the
    64 or more characters before it that lie in the first window of 128, at steps of 64, that holds it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = done.out / "runs" / "1-softmax" / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    text = (done.out / "text.txt").read_text(encoding="utf-8")
    held_out = text[len(text) - round(len(text) / 10) :]
    ids = torch.tensor(tokenizer(held_out)["input_ids"])
    assert len(ids) == len(held_out) > 128
    nats = 0.0
    for i in range(1, len(ids)):
        window = 0 if i < 128 else min(-(-(i - 127) // 64) * 64, len(ids) - 128)
        with torch.no_grad():
            logits = model(ids[window:i][None]).logits[0, -1].double()
        nats -= logits.log_softmax(-1)[ids[i]].item()
    measured = results(done.out)["models"][0]["bits_per_char"]
    assert nats / (len(ids) - 1) / math.log(2) == pytest.approx(measured, abs=1e-4)


def test_the_table_shows_what_was_measured(done: DemoConfig) -> None:
    found = results(done.out)
    lines = (done.out / "table.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:5]]
    assert rows[0][:2] == ["5-gram", f"{found['baseline']['bits_per_char']:.3f}"]
    for row, model in zip(rows[1:], found["models"], strict=True):
        against = model["bits_per_char"] - found["baseline"]["bits_per_char"]
        assert row[:3] == [model["spec"], f"{model['bits_per_char']:.3f}", f"{against:+.3f}"]
        assert row[5:] == [f"{model['parameters']:,}", f"{model['support']:.1f}"]


def test_the_four_kernels_weigh_the_scores_of_the_trained_model(done: DemoConfig) -> None:
    """Softmax as torch computes it from queries and keys that a hook on the projections sees; sparsemax as a
    projection onto the simplex does."""
    from entmax import sparsemax

    from regard.inspect.hooks import run_with_cache
    from regard.inspect.measures import attention_maps

    model, tokenizer = load_model(done.out / "runs" / "1-softmax", call="test")
    text = "On day 3 the 3th fox ate 9"
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    maps = attention_maps(model, tokens, list(text))
    seen = demo_train.kernel_weights(model, tokens)
    layer, head, weights = seen["layer"], seen["head"], seen["weights"]
    assert list(weights) == list(demo_train.KERNELS)
    torch.testing.assert_close(weights["softmax"], maps.weights[layer, head, -1])
    names = [f"layers.{layer}.self_attn.hook_{part}" for part in "qk"]
    _, kept = run_with_cache(model, tokens[None], names)
    q, k = (kept[name][0, head].double() for name in names)
    scores = k @ q[-1] / q.shape[-1] ** 0.5
    torch.testing.assert_close(weights["sparsemax"].double(), sparsemax(scores, -1), atol=1e-6, rtol=0)


def test_the_baseline_saw_the_same_text(done: DemoConfig) -> None:
    text = (done.out / "text.txt").read_text(encoding="utf-8")
    learn, held_out = text[: len(text) - round(len(text) / 10)], text[len(text) - round(len(text) / 10) :]
    letters = sorted(set(learn))
    model = NGram([letters.index(c) for c in learn], len(letters) + 3, 5)
    expected = model.loss([letters.index(c) for c in held_out]) / math.log(2)
    # per character of the whole text, as for the models: the first is not predicted, and counts
    assert results(done.out)["baseline"]["bits_per_char"] == pytest.approx(expected, rel=1e-9)


def test_the_page_holds_it_all(done: DemoConfig) -> None:
    html = (done.out / "report.html").read_text(encoding="utf-8")
    assert html.count("data:image/png;base64,") == 5
    for model in results(done.out)["models"]:
        assert f"{model['bits_per_char']:.3f}" in html
    assert "&lt;left&gt;" in html
    assert "<left>" not in html


def test_the_same_seed_gives_the_same_results(done: DemoConfig, tmp_path: Path) -> None:
    again = replace(done, out=tmp_path / "again", specs="softmax", recall_steps=0)
    run_demo(again)
    first, second = results(done.out)["models"][0], results(again.out)["models"][0]
    for key in ("bits_per_char", "support", "curve"):
        assert first[key] == second[key], key
    assert second["sample"].startswith(first["sample"])
    assert len(second["sample"]) == demo_train.SAMPLE


def test_the_largest_seed_still_writes_a_sample(done: DemoConfig) -> None:
    model, tokenizer = load_model(done.out / "runs" / "1-softmax", call="test")
    half, length = demo_train.CONTEXT // 2, demo_train.CONTEXT
    text = demo_train.write_on(model, tokenizer, "On day", 2**32 - 1, length)
    assert len(text) == length
    tail = text[:half]  # the second piece is drawn with seed 0
    assert text[half:] == generate_text(model, tokenizer, tail, max_new_tokens=half, temperature=0.8, seed=0)[half:]


def trained_or(failing: str, error: Exception) -> Callable[..., Any]:
    """Return `train`, failing for one spec."""
    train = demo_train.train

    def run(config: TrainConfig, **arguments: Any) -> Any:
        if config.spec == (failing,):
            raise error
        return train(config, **arguments)

    return run


def test_one_model_stops_and_the_others_are_kept(
    quick: DemoConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_train, "train", trained_or("biweight", TrainingStopped("the loss is nan at step 2")))
    assert run_demo(replace(quick, specs="biweight,softmax")) == 1
    stopped, kept = results(quick.out)["models"]
    assert stopped == {"spec": "biweight", "run": "runs/1-biweight", "failure": "the loss is nan at step 2"}
    assert kept["bits_per_char"] > 0
    assert "stopped" in capsys.readouterr().out
    assert "the loss is nan at step 2" in (quick.out / "report.html").read_text(encoding="utf-8")


def test_an_interrupted_demo_leaves_a_folder_that_may_be_replaced(
    quick: DemoConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(demo_train, "train", trained_or("softmax", TrainingInterrupted("interrupted")))
        with pytest.raises(TrainingInterrupted):
            run_demo(quick)
    assert results(quick.out)["finished"] is False
    (quick.out / "mine.txt").write_text("keep me")
    assert run_demo(quick) == 0
    assert results(quick.out)["finished"] is True
    assert (quick.out / "mine.txt").read_text() == "keep me"


def test_one_demo_at_a_time(quick: DemoConfig) -> None:
    with only_run(quick.out, call="demo"):
        refuses("is in use: process", run_demo, quick)
    assert [path.name for path in quick.out.iterdir()] == [LOCK]
    demo_output.check_out(quick.out, "demo")  # the lock alone is no reason to refuse


def test_results_that_cannot_be_written(quick: DemoConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: str) -> None:
        if path.name == demo_output.PAGE:
            raise OSError(28, "No space left on device")
        path.write_text(content, encoding="utf-8", newline="")

    monkeypatch.setattr(demo_output, "_write", full)
    with pytest.raises(TrainingStopped, match=r"No space left on device; the trained models are in .*runs"):
        run_demo(quick)
    assert results(quick.out)["finished"] is False
