"""`regard reproduce iclm-mechanisms`: what it measures on models, and its claims on rows made by hand."""

import copy
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from regard.models import HybridConfig, HybridForCausalLM, ICLMConfig, ICLMForCausalLM
from regard_recipes.iclm import _mechanisms_figures as figures
from regard_recipes.iclm import _mechanisms_measures as measure
from regard_recipes.iclm.iclm_mechanisms import Mechanisms
from regard_recipes.lib.language_text import Corpus
from regard_recipes.lib.recipe import frame_of, select

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
    stream = measure.block_stream(12_000, seed=2).tolist()
    assert len(stream) == 12_000
    at, lengths, times = 0, set(), set()
    while at < 11_900:
        period = stream.index(stream[at], at + 1) - at  # a block has no token twice
        said = 1
        while stream[at + said * period : at + (said + 1) * period] == stream[at : at + period]:
            said += 1
        lengths.add(period)
        times.add(said)
        at += said * period
    assert lengths == set(range(8, 25))
    assert times == {2, 3, 4}
    assert measure.block_stream(12_000, seed=2).tolist() == stream
    assert measure.block_stream(12_000, seed=3).tolist() != stream


def test_losses_with_and_without_heads(iclm, windows):
    with torch.no_grad():
        whole = iclm(input_ids=windows, labels=windows).loss.item()
    many = windows.repeat(measure.BATCH, 1)  # read in parts
    assert measure.nats(iclm, windows) == pytest.approx(whole, abs=1e-5) == measure.nats(iclm, many)
    rows = measure.measure_text(iclm, windows=windows, prompts=[[1, 2, 3]], words=WORDS, from_row=2)["rows"]
    heads = [row for row in rows if row["kind"] == "head"]
    named = [(row["layer"], row["stream"], row["head"]) for row in heads]
    assert named == list(product((1, 2), ("phi", "f"), (1, 2)))
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
    assert found["context"] + found["feed_forward"] + found["bias"] == pytest.approx(logits.max().item(), abs=1e-5)
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
    monkeypatch.setattr(measure.mechanisms, "patterns", lambda *_: (logits, [pattern]))
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
    assert figures.labels("f", said, "a") == (["b", "␣", "a ?"], ["a", "b", "␣"])
    assert figures.labels("phi", said, "a") == (["a", "b", "␣", "a ?"], ["start", "a", "b", "␣"])
    assert figures.labels("transformer", said, "b") == (["b", "␣", "b ?"], ["a", "b", "␣"])


def test_induction_heads_form_in_f():
    """A pair of layers, 150 steps on repeated blocks; the score is made here from the weights: in f's pattern row i - 1
    predicts token i, and column i - 16 carries token i - 16."""
    from regard_recipes.lib.language_training import train_language_model

    own = Mechanisms.configure("quick", block_steps=150).of_blocks()
    corpus = Corpus(measure.block_stream(400_000, 0), measure.block_stream(4096, 1))
    generator = torch.Generator().manual_seed(9)
    block = torch.stack([torch.randperm(64, generator=generator)[:16] for _ in range(8)])
    texts, kept = block.repeat(1, 3), {}

    def best(model):
        f = model(texts, output_attentions=True).attentions[-1]
        return max(f[:, head, range(16, 48), range(1, 33)].mean().item() for head in range(f.shape[1]))

    run, *rows = train_language_model(
        own.model_config({"model": "iclm"}, 64), corpus, own, own.learning_rate, 0,
        prepare=lambda model: kept.update(before=best(model.eval())) or model.train(),
        measure=lambda model: {"best": best(model), **measure.measure_blocks(model, seed=0)},
    )  # fmt: skip
    assert kept["before"] < 0.1
    assert run["best"] > 0.8
    assert run["accuracy_after"] > 0.9
    scores = select(frame_of(rows), kind="head", stream="f", when="after")["score"]
    assert scores.max() == pytest.approx(run["best"], abs=0.1)  # on other blocks
