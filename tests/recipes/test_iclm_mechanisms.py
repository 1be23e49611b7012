"""`regard reproduce iclm-mechanisms`: what it measures on models, and its claims on rows made by hand."""

import copy

import pytest
import torch
import torch.nn.functional as F

from regard.models import HybridConfig, HybridForCausalLM, ICLMConfig, ICLMForCausalLM
from regard_recipes.iclm import _mechanisms_figures as figures
from regard_recipes.iclm import _mechanisms_measures as measure
from regard_recipes.iclm.iclm_mechanisms import Mechanisms
from regard_recipes.lib.recipe import Results, frame_of, select

WORDS = [f"w{i}" for i in range(19)]


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


def test_the_stream_has_every_block_two_to_four_times():
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
    many = windows.repeat(measure.BATCH, 1)  # read in parts
    assert measure.nats(iclm, windows) == pytest.approx(whole, abs=1e-5) == measure.nats(iclm, many)
    rows = measure.measure_text(iclm, windows=windows, prompts=[[1, 2, 3]], words=WORDS, from_row=2)["rows"]
    heads = [row for row in rows if row["kind"] == "head"]
    assert [(row["stream"], row["layer"], row["head"]) for row in heads] == [
        (stream, layer, head) for layer in (1, 2) for stream in ("phi", "f") for head in (1, 2)
    ]
    silent = copy.deepcopy(iclm)
    with torch.no_grad():
        silent.model.f[1].attn.o_proj.weight[:, 16:] = 0  # the second head of the last f block adds nothing
        loss = silent(input_ids=windows, labels=windows).loss.item()
    assert heads[-1]["cost"] == pytest.approx(loss - whole, abs=1e-5)
    equal = {row["stream"]: row["cost"] for row in rows if row["kind"] == "equal weights"}
    assert set(equal) == {"phi", "f"}
    assert all(abs(cost) > 1e-4 for cost in equal.values())
    lens = [row["loss"] for row in rows if row["kind"] == "lens"]
    assert lens[-1] == pytest.approx(whole, abs=1e-5)
    assert lens[0] != pytest.approx(lens[1], abs=1e-3)


def test_a_prompt_is_explained_in_full(iclm, windows):
    found = measure.measure_prompt(iclm, windows[0].tolist(), WORDS)
    with torch.no_grad():
        logits = iclm(windows[:1]).logits[0, -1]
    assert found["predicted_word"] == WORDS[logits.argmax()]
    assert found["chance"] == pytest.approx(logits.softmax(-1).max().item(), abs=1e-6)
    parts = torch.tensor(found["parts"])
    assert parts.shape == (10, 2)
    assert parts.sum().item() == pytest.approx(found["context"], abs=1e-5)
    same = parts[windows[0] == logits.argmax()]
    assert found["same"] == (pytest.approx(same.sum().item(), abs=1e-5) if len(same) else None)
    total = found["context"] + found["feed_forward"] + found["bias"]
    assert total == pytest.approx(logits.max().item(), abs=1e-5)
    assert found["missed"] < 1e-5
    attentions = iclm(windows[:1], output_attentions=True).attentions
    assert torch.allclose(torch.tensor(found["maps"]["f"]["weights"]), attentions[3][0].mean(0), atol=1e-4)
    assert {stream: len(own["weights"]) for stream, own in found["maps"].items()} == {"phi": 11, "f": 10}


def test_a_transformer_is_measured_too(windows):
    model = HybridForCausalLM(HybridConfig(vocab_size=19, hidden_size=16, num_hidden_layers=2, num_attention_heads=2))
    rows = measure.measure_text(model.eval(), windows=windows, prompts=[[1, 2, 3, 4]], words=WORDS, from_row=2)["rows"]
    assert {row["kind"] for row in rows} == {"head", "equal weights", "prompt"}
    assert "logit" not in rows[-1]


def test_an_exact_copier_is_recognised(monkeypatch):
    """Weights put in place: f sees the earlier occurrence alone, where there is one."""
    texts = torch.arange(6).repeat(3)[None]
    logits = F.one_hot(texts.roll(-1, 1), 6).double()
    weights = F.one_hot((torch.arange(18) - 5).clamp_min(0), 18).double()[None, None]
    from regard.inspect.mechanisms import ROLES, LayerPattern

    pattern = LayerPattern("f.0.attn.hook_pattern", "f", 0, ROLES["f"], weights)
    monkeypatch.setattr(measure, "patterns", lambda *_: (logits, [pattern]))
    (row,) = measure.head_rows(None, texts, 2)
    assert row["predicted"] == pytest.approx(1.0)
    assert row["predicted_lift"] == pytest.approx(1 / row["predicted_uniform"])


def test_prompts_end_with_what_they_held_before():
    text = "the cat sat on the mat. ------------------------ a dog ran to the cat and to the dog and"
    tokens = torch.tensor([ord(c) for c in text])
    (found,) = measure.choose_prompts(tokens, 24, 1)
    said = "".join(chr(token) for token in found)
    assert len(said) == 24
    assert said in text
    assert said[-6:] in said[:-6]
    assert "-----" not in said[-8:]
    plain = [ord("a") + i % 26 for i in range(26)]  # nothing recurs: windows are taken as they come
    assert measure.choose_prompts(torch.tensor(plain), 13, 2) == [plain[:13], plain[13:]]
    assert measure.choose_prompts(tokens, 24, 0) == []


def test_maps_are_labelled_by_role():
    said = ["a", "b", " "]
    assert figures.labels("f", said, "a", (3, 3)) == (["b", "␣", "a ?"], ["a", "b", "␣"])
    assert figures.labels("phi", said, "a", (4, 4)) == (["a", "b", "␣", "a ?"], ["start", "a", "b", "␣"])
    assert figures.labels("transformer", said, "b", (3, 3)) == (["b", "␣", "b ?"], ["a", "b", "␣"])


def head_row(stream, *, strongest=0.1, first=0.05, even=0.5, weight=0.2, lift=1.0):
    model = "transformer" if stream == "transformer" else "iclm"
    return {"task": "text", "model": model, "seed": 0, "kind": "head", "stream": stream, "layer": 1, "first": first,
            "strongest": strongest, "even": even, "predicted": weight, "predicted_lift": lift}  # fmt: skip


def claims(*heads, without=5.1, after=0.95, before=0.03, feed_forward=0.25, held_out=1.0):
    """Verdicts by the start of the claim; heads that are not given have no sink and equal weights."""
    rows = [*heads, *(head_row(s) for s in ("phi", "f", "transformer") if s not in [h["stream"] for h in heads])]
    for name, perplexity in {"iclm": 5.0, "iclm-no-f-mlp": without, "transformer": 5.0}.items():
        nats = float(torch.tensor(perplexity).log()) * held_out
        rows.append({"task": "text", "model": name, "seed": 0, "kind": "run", "held_out": nats})
    for when, score in (("before", before), ("after", after)):
        rows += [{"task": "blocks", "model": model, "seed": 0, "kind": "head", "stream": stream, "when": when,
                  "score": score} for model, stream in (("iclm", "f"), ("transformer", "transformer"))]  # fmt: skip
    for name, opaque in (("iclm", feed_forward), ("iclm-no-f-mlp", 0.0)):
        rows.append({"task": "text", "model": name, "seed": 0, "kind": "prompt", "same": 1.5, "feed_forward": opaque,
                     "missed": 2e-7})  # fmt: skip
    made = Mechanisms.configure()
    return {claim.wording: claim for claim in made.claims(Results(frame_of(rows), {}, {}))}


PHI, F_SINKS, PLACE = "Sinks of phi always", "f has no sinks", "The place of the Transformer's sinks"
ROWS, COLUMNS = (f"f's scores are significantly more balanced than phi's, {how}" for how in ("row", "col"))
COPY, MORE, DOMINATES = "Heads of f copy", "Heads of f copy more", "f's weight on the next token"
AFTER, BEFORE = "Induction heads form in f: the best head after", "Induction heads form in f: the best head before"
DIRECT, BARE = "Weight on a token's embedding", "Without f's feed-forward layers"
SUNK = {"strongest": 0.6, "first": 0.6}


@pytest.mark.parametrize(
    ("heads", "changes", "expected"),
    [
        ([], {}, {PHI: "not testable", F_SINKS: "not testable", PLACE: "not testable", BARE: "not testable"}),
        ([head_row("phi", **SUNK)], {}, {PHI: "holds", F_SINKS: "holds", PLACE: "not testable"}),
        ([head_row("phi", **SUNK), head_row("phi", strongest=0.4)], {}, {PHI: "fails"}),
        ([head_row("phi", **SUNK), *[head_row("phi")] * 19], {}, {PHI: "not testable", F_SINKS: "not testable"}),
        ([head_row("phi", strongest=0.6, first=0.35)], {}, {PHI: "holds"}),  # "at least": another may be stronger
        ([head_row("f", strongest=0.7)], {}, {F_SINKS: "fails"}),
        ([head_row("phi", **SUNK), head_row("transformer", strongest=0.6)], {}, {PLACE: "holds"}),
        ([head_row("phi", **SUNK), head_row("transformer", **SUNK)], {}, {PLACE: "fails"}),
        ([head_row("f", even=0.8), head_row("phi", even=0.3)], {}, {ROWS: "holds", COLUMNS: "fails"}),
        ([head_row("f", strongest=0.1), head_row("phi", strongest=0.2)], {}, {ROWS: "fails", COLUMNS: "holds"}),
        ([head_row("f", weight=0.7, lift=3.0)], {}, {COPY: "holds", MORE: "holds", DOMINATES: "holds"}),
        ([head_row("f", lift=2.0), head_row("phi", lift=2.5)], {}, {COPY: "holds", MORE: "fails", "phi sh": "fails"}),
        ([], {"after": 0.95}, {AFTER: "holds", BEFORE: "holds", DIRECT: "holds", "phi shows": "holds"}),
        ([], {"after": 0.7, "before": 0.2, "feed_forward": 2.0}, {AFTER: "fails", BEFORE: "fails", DIRECT: "fails"}),
        ([head_row("phi", **SUNK)], {"held_out": float("nan")}, {PHI: "not testable", BARE: "undecided"}),
    ],
)
def test_verdicts(heads, changes, expected):
    found = claims(*heads, **changes)
    for start, verdict in expected.items():
        claim = next(claim for wording, claim in found.items() if wording.startswith(start))
        assert claim.verdict.startswith(verdict), (start, claim.verdict)


def test_a_training_that_diverged_is_named():
    found = claims(held_out=float("nan"))
    assert found[COPY].untestable == "the training of iclm on text, iclm-no-f-mlp on text, transformer on text diverged"


def test_induction_heads_form_in_f():
    """A pair of layers, 150 steps on repeated blocks; the score is made here from the weights: in f's pattern row i - 1
    predicts token i, and column i - 16 carries token i - 16."""
    from regard_recipes.lib.language_training import train_language_model

    own = Mechanisms.configure("quick", block_steps=150)
    corpus = measure.block_corpus(0)
    assert (len(corpus.train_tokens), len(corpus.held_out_tokens)) == (400_000, 8192)
    generator = torch.Generator().manual_seed(9)
    block = torch.stack([torch.randperm(64, generator=generator)[:16] for _ in range(8)])
    texts, kept = block.repeat(1, 3), {}

    def best(model):
        f = model(texts, output_attentions=True).attentions[-1]
        return max(f[:, head, range(16, 48), range(1, 33)].mean().item() for head in range(f.shape[1]))

    run, *rows = train_language_model(
        own.model({"task": "blocks", "model": "iclm"}, 64), corpus, own.budget("blocks"), 0, name="blocks",
        prepare=lambda model: kept.update(before=best(model.eval())) or model.train(),
        measure=lambda model: {"best": best(model), **measure.measure_blocks(model, seed=0)},
    )  # fmt: skip
    assert kept["before"] < 0.1
    assert run["best"] > 0.8
    assert run["accuracy_after"] > 0.9
    scores = select(frame_of(rows), kind="head", stream="f", when="after")["score"]
    assert scores.max() == pytest.approx(run["best"], abs=0.1)  # on other blocks
