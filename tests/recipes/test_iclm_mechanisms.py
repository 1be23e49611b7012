"""`regard reproduce iclm-mechanisms`, as small as it goes; what it reads off models; its verdicts on runs by hand."""

from __future__ import annotations

import copy
import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from regard.checks import ArgumentError
from regard.models import HybridConfig, HybridForCausalLM, ICLMConfig, ICLMForCausalLM
from regard.recipes import recipes
from regard_recipes.iclm import iclm_mechanisms as recipe
from regard_recipes.iclm import iclm_mechanisms_figures as figures
from regard_recipes.iclm import iclm_mechanisms_measure as measure
from regard_recipes.iclm import iclm_mechanisms_output as output
from regard_recipes.lib.language_runs import LanguageRun, sized, train_language_model

TINY = recipe.MechanismsConfig(
    size="quick", layers=2, width=16, steps=2, block_steps=2, measured=300, looks=1, texts=2, prompt=12, context=16
)


def in_process(jobs, workers, progress):
    """`run_jobs` without processes, which would take most of the time."""
    runs = []
    for job in jobs:
        progress(f"{job.name}, seed {job.seed}")
        made = train_language_model(job.config, job.material, job.budget, job.seed, name=job.name, measure=job.measure)
        runs.append(made)
    return runs


@pytest.fixture(scope="module")
def findings():
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "run_jobs", in_process)
        found = recipes.get("iclm-mechanisms").run(TINY, told.append)
    assert "iclm-no-f-mlp, seed 0" in told
    assert "transformer on blocks, seed 0" in told
    return found


@pytest.fixture(scope="module")
def iclm():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = ICLMConfig(
            vocab_size=19, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, initializer_range=0.3
        )
        return ICLMForCausalLM(config).eval()


@pytest.fixture(scope="module")
def windows():
    return torch.randint(0, 19, (3, 10), generator=torch.Generator().manual_seed(1))


# The recipe ------------------------------------------------------------------------------------------------------


def test_what_is_measured(findings):
    runs = {run["name"]: run for run in findings.data["runs"]}
    names = ["iclm", "iclm-no-f-mlp", "transformer", "transformer-no-mlp"]
    assert list(runs) == [*names, "iclm on blocks", "iclm-no-f-mlp on blocks", "transformer on blocks"]
    assert [layer["stream"] for layer in runs["iclm"]["extra"]["layers"]] == ["phi", "f"]
    assert [layer["stream"] for layer in runs["transformer"]["extra"]["layers"]] == ["transformer"] * 2
    assert len(runs["iclm"]["extra"]["prompts"]) == 1
    for name in ("iclm on blocks", "transformer on blocks"):
        before = runs[name]["extra"]["before"]["layers"]
        assert all(score < 0.1 for layer in before for score in layer["score"])
    json.dumps(findings.data)


def test_what_is_shown(findings):
    sinks, copying, blocks, lost, eigen, logits = findings.tables.values()
    layers = ["phi 1", "f 1", "Transformer 1", "Transformer 2"]
    assert [row[0] for row in sinks.rows] == [row[0] for row in copying.rows] == layers
    assert [row[0] for row in blocks.rows] == ["iclm, phi", "iclm, f", "transformer"]
    assert len(lost.rows) == 4
    assert len(eigen.rows) == 2
    assert [row[0] for row in logits.rows] == ["iclm, 1", "iclm, 2", "iclm-no-f-mlp, 1", "iclm-no-f-mlp, 2"]
    assert all(float(row[-1]) < 1e-5 for row in logits.rows)
    assert [row[5] for row in logits.rows[2:]] == ["0.000", "0.000"]
    assert "whose end has occurred in them before" in logits.note
    shown = ["sinks", "induction", "prompt-1", "prompt-1-logit", "blocks", "blocks-logit"]
    assert list(findings.figures) == [f"iclm-mechanisms-{name}.png" for name in shown]
    assert all(picture.startswith(b"\x89PNG") for picture in findings.figures.values())
    assert len(findings.notes) == 13
    assert findings.notes[0].endswith(
        "rests on 1 seed (no spread over seeds is known). Heads that it is judged by: on text phi 2, f 2, Transformer "
        "4; on repeated blocks phi 2, f 2, Transformer 4."
    )


@pytest.mark.parametrize("size", ["quick", "desk", "paper"])
def test_every_size_decides_every_number(size):
    config = sized(recipe.MechanismsConfig(size=size, device="cpu"), recipe.SIZES, "test")
    assert all(value is not None for name, value in vars(config).items() if name != "data")
    recipe.check(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "--steps is 0"),
        ({"block_steps": 0}, "--block-steps is 0, expected 1 or more"),
        ({"texts": 0}, "--texts is 0, expected 1 or more"),
        ({"prompts": -1}, "--prompts is -1, expected 0 or more"),
        ({"prompt": 3}, "--prompt is 3, expected 4 or more"),
        ({"prompt": 17}, "--prompt is 17, more than the --context of 16"),
        ({"layers": 3}, "--layers, --width or --heads: ICLMConfig: num_hidden_layers is 3, expected an even number"),
        ({"heads": 5}, "--layers, --width or --heads"),
        ({"tokenizer": "word"}, "unknown tokenizer 'word'"),
        ({"seed": -1}, "--seed is -1"),
        ({"learning_rate": 0.0}, "--learning-rate is 0.0"),
    ],
)
def test_mistakes_are_found_first(changes, message, monkeypatch):
    monkeypatch.setattr(recipe, "run_jobs", lambda *args: pytest.fail("something was trained"))
    with pytest.raises(ArgumentError) as caught:
        recipes.get("iclm-mechanisms").run(replace(TINY, **changes), lambda text: None)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# Measures --------------------------------------------------------------------------------------------------------


def test_the_stream_says_every_block_two_to_four_times():
    stream = measure.block_stream(64, 5, 9, 3000, seed=2).tolist()
    assert len(stream) == 3000
    at, lengths, times = 0, set(), set()
    while at < 2900:
        period = stream.index(stream[at], at + 1) - at  # a block has no token twice
        said = 1
        while stream[at + said * period : at + (said + 1) * period] == stream[at : at + period]:
            said += 1
        lengths.add(period)
        times.add(said)
        at += said * period
    assert lengths == {5, 6, 7, 8, 9}
    assert times == {2, 3, 4}
    assert measure.block_stream(64, 5, 9, 3000, seed=2).tolist() == stream
    assert measure.block_stream(64, 5, 9, 3000, seed=3).tolist() != stream


def test_losses_with_and_without_heads(iclm, windows):
    with torch.no_grad():
        whole = iclm(input_ids=windows, labels=windows).loss.item()
    found = measure.ablations(iclm, windows)
    assert found["whole"] == pytest.approx(whole, abs=1e-5)
    assert measure.nats(iclm, windows) == pytest.approx(whole, abs=1e-5)
    assert [(h["stream"], h["layer"], h["head"]) for h in found["heads"]] == [
        (stream, layer, head) for layer in range(2) for stream in ("phi", "f") for head in range(2)
    ]
    silent = copy.deepcopy(iclm)
    with torch.no_grad():
        silent.model.f[1].attn.o_proj.weight[:, 16:] = 0  # the second head of the last f block adds nothing
        loss = silent(input_ids=windows, labels=windows).loss.item()
    assert found["heads"][-1]["loss"] == pytest.approx(loss, abs=1e-5)
    assert set(found["uniform"]) == {"phi", "f"}
    assert all(abs(loss - whole) > 1e-4 for loss in found["uniform"].values())


def test_many_texts_are_read_in_parts(iclm):
    many = torch.randint(0, 19, (2 * measure.BATCH + 3, 6), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert measure.nats(iclm, many) == pytest.approx(iclm(input_ids=many, labels=many).loss.item(), abs=1e-5)


def test_the_lens_ends_with_the_loss(iclm, windows):
    found = measure.lens(iclm, windows)
    assert len(found) == 2
    assert found[-1] == pytest.approx(measure.nats(iclm, windows), abs=1e-5)
    assert found[0] != pytest.approx(found[1], abs=1e-3)


def test_a_prompt_is_explained_in_full(iclm, windows):
    found = measure.look_at_prompt(iclm, windows[0].tolist())
    with torch.no_grad():
        logits = iclm(windows[:1]).logits[0, -1]
    assert found["predicted"] == logits.argmax().item()
    assert found["chance"] == pytest.approx(logits.softmax(-1).max().item(), abs=1e-6)
    parts = found["contributions"]
    total = math.fsum(x for token in parts["tokens"] for x in token) + sum(parts["feed_forward"]) + parts["bias"]
    assert total == pytest.approx(logits.max().item(), abs=1e-5)
    assert parts["missed"] < 1e-5
    assert (len(parts["tokens"]), len(parts["tokens"][0]), len(parts["feed_forward"])) == (10, 2, 2)
    weights = torch.tensor(found["maps"]["f"]["weights"])
    attentions = iclm(windows[:1], output_attentions=True).attentions
    assert torch.allclose(weights, attentions[3][0].mean(0), atol=1e-4)
    assert {stream: len(own["weights"]) for stream, own in found["maps"].items()} == {"phi": 11, "f": 10}


def test_a_transformer_is_looked_at_too(windows):
    model = HybridForCausalLM(HybridConfig(vocab_size=19, hidden_size=16, num_hidden_layers=2, num_attention_heads=2))
    found = measure.look_at_text(model.eval(), windows=windows, prompts=[[1, 2, 3, 4]], from_row=2)
    assert "lens" not in found
    assert "contributions" not in found["prompts"][0]
    assert [(each["stream"], len(each["first"])) for each in found["layers"]] == [("transformer", 2)] * 2


def test_an_exact_copier_is_recognised(windows):
    """Weights put in place: f looks at the earlier occurrence alone, where there is one."""
    texts = torch.arange(6).repeat(3)[None]
    logits = F.one_hot(texts.roll(-1, 1), 6).double()
    weights = F.one_hot((torch.arange(18) - 5).clamp_min(0), 18).double()[None, None]
    from regard.inspect.mechanisms import ROLES, LayerPattern

    pattern = LayerPattern("f.0.attn.hook_pattern", "f", 0, ROLES["f"], weights)
    found = measure._copied(pattern, texts, pattern.wanted(logits))
    assert found["weight"] == [pytest.approx(1.0)]
    assert found["rows"] == 13  # the first block's tokens have not occurred; its repetitions and the one to come have
    assert found["lift"][0] == pytest.approx(1 / found["uniform"])


def test_prompts_end_with_what_they_held_before():
    text = "the cat sat on the mat. ------------------------ a dog ran to the cat and to the dog and"
    tokens = torch.tensor([ord(c) for c in text])
    found = measure.choose_prompts(tokens, 24, 1)
    said = "".join(chr(token) for token in found[0])
    assert len(said) == 24
    assert said in text
    assert said[-6:] in said[:-6]
    assert "-----" not in said[-8:]
    plain = [ord("a") + i % 26 for i in range(26)]  # nothing recurs: windows are taken as they come
    assert measure.choose_prompts(torch.tensor(plain), 13, 2) == [plain[:13], plain[13:]]
    assert measure.choose_prompts(tokens, 24, 0) == []


# Figures ---------------------------------------------------------------------------------------------------------


def test_maps_are_labelled_by_role():
    words = {7: "a", 8: "b", 9: " "}
    rows, columns = figures.labels("f", [7, 8, 9], 7, (3, 3), words)
    assert (rows, columns) == (["b", "␣", "a ?"], ["a", "b", "␣"])
    rows, columns = figures.labels("phi", [7, 8, 9], 7, (4, 4), words)
    assert (rows, columns) == (["a", "b", "␣", "a ?"], ["start", "a", "b", "␣"])
    rows, columns = figures.labels("transformer", [7, 8, 9], 8, (3, 3), words)
    assert (rows, columns) == (["b", "␣", "b ?"], ["a", "b", "␣"])


def test_every_block_has_its_colour_in_the_legend():
    axes = Figure().subplots()
    figures._bars(axes, np.array([[1.0, -1.0], [-0.5, 2.0], [0.0, 0.5]]))
    patches = axes.get_legend().get_patches()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["f block 1", "f block 2"]
    drawn = [to_hex(bars.patches[0].get_facecolor()) for bars in axes.containers]
    assert [to_hex(patch.get_facecolor()) for patch in patches] == [drawn[0], drawn[2]]
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]


# Verdicts --------------------------------------------------------------------------------------------------------


def layer(stream, number, *, strongest=(0.1, 0.1), place=(5, 5), even=0.5, weight=0.2, lift=1.0, first=0.05):
    heads = len(strongest)
    copied = {"weight": [weight] * heads, "lift": [lift] * heads, "uniform": weight / max(lift, 1e-9), "rows": 9}
    return {
        "stream": stream,
        "layer": number,
        "first": [s if p == 0 else first for s, p in zip(strongest, place, strict=True)],
        "strongest": list(strongest),
        "place": list(place),
        "uniform": 0.03,
        "even": [even] * heads,
        "predicted": copied,
        "following": copied,
    }


def run(name, *layers, perplexity=5.0, extra=None):
    return LanguageRun(
        name=name,
        seed=0,
        parameters=1,
        steps=(1,),
        train=(1.0,),
        held_out=(math.log(perplexity),),
        step_seconds=1.0,
        step_cpu_seconds=1.0,
        peak_bytes=None,
        before_bytes=None,
        extra={"layers": list(layers), "prompts": [], **(extra or {})},
    )


def seen(phi=None, f=None, transformer=None, without=5.0, after=0.95, before=0.03, feed_forward=0.25):
    scores = lambda stream, score: {"layers": [{"stream": stream, "layer": 0, "score": [0.01, score], "uniform": 0.04}]}  # noqa: E731
    shown = {
        "tokens": [3, 4, 3],
        "predicted": 3,
        "contributions": {"tokens": [[1.0], [0.25], [0.5]], "feed_forward": [], "bias": 0.0, "missed": 2e-7},
    }
    opaque = {**shown, "contributions": {**shown["contributions"], "feed_forward": [0.5, feed_forward], "missed": 1e-8}}
    blocks = [
        run("iclm on blocks", extra={"before": scores("f", before), "after": scores("f", after), "prompt": opaque}),
        run("iclm-no-f-mlp on blocks", extra={"prompt": shown}),
        run("transformer on blocks", extra={"after": scores("transformer", 0.4)}),
    ]
    text = [
        run("iclm", phi or layer("phi", 0), f or layer("f", 0)),
        run("iclm-no-f-mlp", perplexity=without),
        run("transformer", transformer or layer("transformer", 0)),
        run("transformer-no-mlp", perplexity=5.5),
    ]
    return output.Seen(text, blocks)


def test_sinks_of_phi():
    assert "nothing to judge" in output.phi_note(seen())
    there = layer("phi", 0, strongest=(0.6, 0.4), place=(0, 0))
    assert "2 of 2 heads of phi have one, 2 of them there: holds." in output.phi_note(seen(phi=there))
    elsewhere = layer("phi", 0, strongest=(0.6, 0.4), place=(0, 1))
    assert "1 of them there: does not hold." in output.phi_note(seen(phi=elsewhere))
    both = layer("phi", 0, strongest=(0.6, 0.5), place=(0, 1), first=0.35)  # "at least": another may be stronger
    assert "2 of them there: holds." in output.phi_note(seen(phi=both))


def test_sinks_of_f():
    assert output.f_note(seen()).endswith("not decided, since phi has none either.")
    there = layer("phi", 0, strongest=(0.6, 0.4), place=(0, 0))
    assert output.f_note(seen(phi=there)).endswith(": holds.")
    own = layer("f", 0, strongest=(0.1, 0.7), place=(3, 2))
    assert (
        "1 of 2 heads of f have one (the strongest mean weight is 0.70, on column 2): does not hold."
        in output.f_note(seen(f=own))
    )


def test_where_sinks_stand():
    phi = layer("phi", 0, strongest=(0.6,) * 4, place=(0,) * 4)
    assert "nothing to compare" in output.place_note(seen(phi=phi))
    few = layer("transformer", 0, strongest=(0.6, 0.4), place=(0, 2))
    note = output.place_note(seen(phi=phi, transformer=few))
    assert "50% of them at least at the first token; of the 4 of phi 100% at the start token: not decided" in note
    many = layer("transformer", 0, strongest=(0.6,) * 4, place=(0, 2, 2, 3))
    note = output.place_note(seen(phi=phi, transformer=many))
    assert "25% of them" in note
    assert "not decided (as few by accident: 0.07" in note
    none = layer("transformer", 0, strongest=(0.6,) * 4, place=(1, 2, 2, 3))
    assert ": holds (as few by accident: 0.01" in output.place_note(seen(phi=phi, transformer=none))
    first = layer("transformer", 0, strongest=(0.6, 0.4), place=(0, 0))
    assert "does not hold" in output.place_note(seen(phi=phi, transformer=first))
    too = layer("transformer", 0, strongest=(0.6,) * 4, place=(1, 2, 2, 3), first=0.31)
    assert "does not hold" in output.place_note(seen(phi=phi, transformer=too))


@pytest.mark.parametrize("table", [(0, 4, 4, 4), (3, 7, 9, 11), (5, 5, 0, 3), (2, 9, 1, 2), (0, 3, 0, 5)])
def test_the_luck_of_few_marks(table):
    """All ways to deal the marks, counted one by one."""
    marked, count, others_marked, others = table
    ways = list(itertools.combinations(range(count + others), marked + others_marked))
    few = sum(sum(place < count for place in way) <= marked for way in ways)
    assert output.luck_of(*table) == pytest.approx(few / len(ways))


@pytest.mark.parametrize(
    ("rows", "columns", "verdicts"),
    [
        ((0.8, 0.3), (0.1, 0.6), ("holds", "holds")),
        ((0.4, 0.5), (0.5, 0.4), ("does not hold", "does not hold")),
        ((0.6, 0.5), (0.5, 0.6), ("not decided", "not decided")),
        ((0.1, 0.9), (0.2, 0.3), ("does not hold", "holds")),
    ],
)
def test_balance(rows, columns, verdicts):
    f, phi = (
        layer(name, 0, even=even, strongest=(strongest - 0.05, strongest + 0.05))
        for name, even, strongest in zip(("f", "phi"), rows, columns, strict=True)
    )
    note = output.even_note(seen(f=f, phi=phi))
    assert f"{rows[0]:.2f} in f, {rows[1]:.2f} in phi and 0.50 in the Transformer: {verdicts[0]}; " in note
    assert f"{columns[0]:.2f} in f, {columns[1]:.2f} in phi and 0.10 in the Transformer: {verdicts[1]}." in note


def test_copying_heads():
    copies, dominates, absent = output.copy_notes(seen(f=layer("f", 0, weight=0.7, lift=3.0)))
    assert "3.00 times" in copies
    assert ": holds" in copies
    assert "above 0.5 in 1 of 1: holds" in dominates
    assert "1.00: holds" in absent
    copies, dominates, absent = output.copy_notes(seen(phi=layer("phi", 0, lift=2.0)))
    assert "does not hold" in copies
    assert "above 0.5 in 0 of 1: does not hold" in dominates
    assert "2.00: does not hold" in absent
    stronger = output.copy_notes(seen(f=layer("f", 0, lift=2.0), transformer=layer("transformer", 0, lift=2.5)))
    assert "does not hold" in next(stronger)


@pytest.mark.parametrize(
    ("after", "before", "verdict"),
    [(0.95, 0.03, "): holds."), (0.7, 0.03, "): does not hold."), (0.95, 0.2, "): does not hold.")],
)
def test_induction_heads(after, before, verdict):
    note = output.induction_note(seen(after=after, before=before))
    assert verdict in note
    assert note.endswith("many steps: 0.40.")


def test_feed_forward_layers():
    f, transformer = output.mlp_notes(seen(without=5.1))
    assert "from 5.000 to 5.100, +2.0%: slight, one seed (up to 5%)" in f
    assert "+10.0%: not slight, one seed (" in transformer
    f, _ = output.mlp_notes(seen(without=math.nan))
    assert f.endswith("perplexity of iclm: no comparison: a run diverged.")


def test_nothing_is_said_of_heads_after_a_training_that_diverged():
    first, *notes = output.notes(seen(without=math.inf))
    assert "since the training of iclm-no-f-mlp (seed 0) diverged: lower --learning-rate." in first
    assert notes == list(output.mlp_notes(seen(without=math.inf)))


def test_a_training_that_diverges_is_shown():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "run_jobs", in_process)
        found = recipes.get("iclm-mechanisms").run(replace(TINY, learning_rate=1e30, steps=3), lambda text: None)
    assert found.notes[0].startswith("Nothing is said of heads")
    assert len(found.notes) == 3
    lost, eigen = found.tables["What is lost"], found.tables["Heads of f as maps between tokens"]
    assert [row[2] for row in lost.rows] == ["diverged"] * 4
    assert [row[1] for row in eigen.rows] == ["nan"] * 2
    assert all(picture.startswith(b"\x89PNG") for picture in found.figures.values())


def test_the_parts_of_a_logit():
    assert output.exact_note(seen()).endswith("to 2e-07 at most.")
    note = output.direct_note(seen())
    assert "iclm: 1.50 and 0.75 (holds); iclm-no-f-mlp: 1.50 and 0.00 (holds)." in note
    assert "iclm: 1.50 and 2.50 (does not hold); iclm-no-f-mlp" in output.direct_note(seen(feed_forward=2.0))


# Training --------------------------------------------------------------------------------------------------------


def test_induction_heads_form_in_f():
    """A pair of layers, 150 steps on repeated blocks; the score is made here from the weights: in f's pattern row i - 1
    predicts token i, and column i - 16 carries token i - 16."""
    config = sized(replace(TINY, block_steps=150), recipe.SIZES, "test")
    job = next(job for job in recipe.block_jobs(config) if job.name == "iclm on blocks")
    generator = torch.Generator().manual_seed(9)
    block = torch.stack([torch.randperm(64, generator=generator)[:16] for _ in range(8)])
    texts = block.repeat(1, 3)

    def best(model):
        f = model(texts, output_attentions=True).attentions[-1]
        return max(f[:, head, range(16, 48), range(1, 33)].mean().item() for head in range(f.shape[1]))

    kept = {}
    trained = train_language_model(
        job.config, job.material, job.budget, job.seed, name=job.name,
        prepare=lambda model: kept.update(before=best(model.eval())) or model.train(),
        measure=lambda model: {"best": best(model), **job.measure(model)},
    )  # fmt: skip
    assert kept["before"] < 0.1
    assert trained.extra["best"] > 0.8
    assert trained.extra["after"]["accuracy"] > 0.9
    scores = [score for each in trained.extra["after"]["layers"] if each["stream"] == "f" for score in each["score"]]
    assert max(scores) == pytest.approx(trained.extra["best"], abs=0.1)  # on other blocks
