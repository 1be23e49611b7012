"""Sampling with a seeded generator."""

import pytest
import torch
from commands import continued
from mistakes import refuses
from transformers import LlamaConfig, LlamaForCausalLM

from regard.training import byte_tokenizer, char_tokenizer, generate_text
from regard.training.generate import SeededSampling, default_prompt, opening, unknown_characters

TOKENIZER = char_tokenizer("abcdefgh ")


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"vocab_size": len(TOKENIZER), "max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=0, eos_token_id=1)).eval()


def sampling(**changes: object) -> SeededSampling:
    return SeededSampling(**{"temperature": 1.0, "top_k": None, "seed": 0, "forbidden": [], **changes})


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 3.0])
    for temperature in (0.5, 1.0, 2.0):
        draws = sampling(temperature=temperature)(torch.empty(4000, 0), logits.expand(4000, 5)).argmax(-1)
        want = 4000 * torch.exp(logits / temperature) / torch.exp(logits / temperature).sum()
        counts = torch.bincount(draws, minlength=5)
        # 4 degrees of freedom: 23.5 is passed once in ten thousand
        assert ((counts - want) ** 2 / want).sum() < 23.5


def test_temperature_zero_top_k_and_forbidden_tokens() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 3.0]])
    assert sampling(temperature=0.0)(torch.empty(1, 0), logits).argmax(-1).item() == 4
    assert sampling(temperature=1e-310)(torch.empty(1, 0), logits).argmax(-1).item() == 4
    assert sampling(temperature=0.0, forbidden=[4])(torch.empty(1, 0), logits).argmax(-1).item() == 2
    processor = sampling(top_k=2)
    assert {processor(torch.empty(1, 0), logits).argmax(-1).item() for _ in range(200)} == {2, 4}
    assert torch.equal(logits, torch.tensor([[0.0, 1.0, 2.0, -1.0, 3.0]]))  # not written to


def test_the_same_seed_gives_the_same_text(model: LlamaForCausalLM) -> None:
    torch.manual_seed(5)
    first = generate_text(model, TOKENIZER, "abc", max_new_tokens=40, seed=3)
    torch.manual_seed(6)
    before = torch.get_rng_state()
    assert generate_text(model, TOKENIZER, "abc", max_new_tokens=40, seed=3) == first
    assert torch.equal(before, torch.get_rng_state())
    assert generate_text(model, TOKENIZER, "abc", max_new_tokens=40, seed=4) != first
    # exactly as long as asked, beyond the context: no special token was drawn, though the model likes them as much
    assert first.startswith("abc")
    assert len(first) == 43
    assert set(first) <= set("abcdefgh ")


def test_greedy_is_the_argmax_of_a_loop(model: LlamaForCausalLM) -> None:
    want = continued(model, TOKENIZER, "fed", 20)
    assert generate_text(model, TOKENIZER, "fed", max_new_tokens=20, temperature=0.0) == want


def test_unknown_characters_of_a_prompt() -> None:
    assert unknown_characters(TOKENIZER, "zebra!") == "!rz"


@pytest.mark.parametrize(("known", "prompt"), [("ab \n", "\n"), ("ab ", " "), ("xbé", "b"), (None, "\n")])
def test_the_default_prompt_is_known(known: str | None, prompt: str) -> None:
    assert default_prompt(byte_tokenizer() if known is None else char_tokenizer(known)) == prompt


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ad bed fed head", "bed fed"),  # the first word may be the end of one
        ("ad\nbed\nfed", "bed"),  # on one line
        ("ad zebra bed fed ace", "fed ace"),  # nothing unknown ("zebra bed" goes together)
        ("ad -bed fed cab", "cab"),
        ("abcdefgh" * 9, "abcdefghabcdefgh"),
        ("zzz", ""),
        ("", ""),
    ],
)
def test_words_to_begin_with(text: str, words: str) -> None:
    assert opening(TOKENIZER, text) == words


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": ""}, "^generate: the prompt is empty"),
        ({"prompt": ["a", "b"]}, r"^generate: prompt is \['a', 'b'\] \(list\), expected text"),
        ({"prompt": "a" * 17}, "^generate: the prompt has 17 tokens, more than the model's context of 16"),
        ({"max_new_tokens": 0}, "--max-new-tokens is 0"),
        ({"temperature": -1.0}, "--temperature is -1.0"),
        ({"temperature": float("nan")}, "--temperature is nan"),
        ({"top_k": 0}, "--top-k is 0"),
        ({"seed": -1}, "--seed is -1"),
        ({"seed": 2**32}, "--seed is 4294967296, expected 0 to 4294967295"),
    ],
)
def test_bad_arguments(model: LlamaForCausalLM, changes: dict, message: str) -> None:
    refuses(message, generate_text, model, TOKENIZER, **{"prompt": "a", **changes})
