"""Sampling text with an explicit random generator, on transformers' `generate`. Shapes: B prompts, V the vocabulary."""

import re
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import LogitsProcessor, LogitsProcessorList, TopKLogitsWarper

from ..checks import instance, require
from ..nn.hooks import temporarily
from .config import check_seed
from .errors import one_error
from .quiet import quiet_transformers


class SeededSampling(LogitsProcessor):
    """Turn scores [B, V] into scores whose argmax is a sample of the `top_k` most likely tokens (None: of all) but the
    `forbidden` ones, at a temperature (0: the most likely token): the argmax of scores plus Gumbel noise is distributed
    as their softmax. (transformers itself samples from torch's global generator.)"""

    def __init__(self, *, temperature: float, top_k: int | None, seed: int, forbidden: list[int]) -> None:
        self.temperature, self.top_k, self.forbidden = temperature, top_k, forbidden
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.double()
        scores[:, self.forbidden] = -torch.inf
        if self.temperature == 0:
            return scores
        if self.top_k is not None:
            scores = TopKLogitsWarper(int(self.top_k))(input_ids, scores)
        # drawn on the CPU in float64, so that a seed gives the same text on every device
        uniform = torch.rand(scores.shape, generator=self.generator, dtype=torch.float64)
        gumbel = -torch.log(-torch.log(uniform.clamp_min(torch.finfo(torch.float64).tiny)))
        above = scores - scores.max(dim=-1, keepdim=True).values  # at most 0: no tiny temperature makes it infinite
        return above / self.temperature + gumbel.to(scores.device)


def generate_text(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, *, max_new_tokens: int = 200,
    temperature: float = 1.0, top_k: int | None = None, seed: int = 0,
) -> str:  # fmt: skip
    """Return the prompt and its continuation by `max_new_tokens` tokens, special tokens excluded.

    The same arguments give the same text; generation settings saved with the model are ignored.

    Raises:
        ArgumentError: a prompt that is empty or longer than the model's context, or a number out of range.
    """
    check_sampling(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, seed=seed)
    instance("generate", "prompt", prompt, str, "text")
    with one_error("generate: the tokenizer cannot read the prompt"):
        inputs = tokenizer(prompt, return_tensors="pt")
    tokens, context = inputs["input_ids"].shape[1], getattr(model.config, "max_position_embeddings", None)
    require(tokens > 0, "generate", "the prompt is empty; give at least one character.")
    text = f"the prompt has {tokens} tokens, more than the model's context of {context}; give a shorter one."
    require(context is None or tokens <= context, "generate", text)
    forbidden = list(tokenizer.all_special_ids)
    sampling = SeededSampling(temperature=temperature, top_k=top_k, seed=seed, forbidden=forbidden)
    greedy: dict[str, Any] = {"do_sample": False, "pad_token_id": tokenizer.pad_token_id, "eos_token_id": None}
    settings = GenerationConfig(max_new_tokens=max_new_tokens, **greedy)
    # transformers warns beyond the model's context, which is allowed, and takes what is None from the model's settings
    with quiet_transformers(), temporarily(model, generation_config=GenerationConfig()):
        chosen = LogitsProcessorList([sampling])
        output = model.generate(**inputs.to(model.device), generation_config=settings, logits_processor=chosen)
    with one_error("generate: the tokenizer cannot write the text"):
        return prompt + tokenizer.decode(output[0, tokens:], skip_special_tokens=True)


def check_sampling(*, max_new_tokens: int, temperature: float, top_k: int | None, seed: int) -> None:
    """Check the numbers given to `generate_text`."""
    require(max_new_tokens >= 1, "generate", f"--max-new-tokens is {max_new_tokens}, expected at least 1.")
    require(0 <= temperature < float("inf"), "generate", f"--temperature is {temperature}, expected 0 or more.")
    require(top_k is None or top_k >= 1, "generate", f"--top-k is {top_k}, expected at least 1.")
    check_seed(seed, "generate")


def default_prompt(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return one character that the tokenizer knows: a newline, else a space, else the first of its vocabulary."""
    vocabulary = tokenizer.get_vocab()
    letters = [token for token in sorted(vocabulary, key=vocabulary.__getitem__) if len(token) == 1]
    return next((char for char in ("\n", " ", *letters) if not unknown_characters(tokenizer, char)), "\n")


def opening(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Return one or two words of a text, printable, known and at most 16 characters, to be a prompt; "" if none."""
    words = re.findall(r"\S+(?: \S+)?", text[:4096])
    first = re.match(r"\S+\s+", text[:4096])
    if first and len(words) > 1:  # held-out text begins in the middle of a word
        words = re.findall(r"\S+(?: \S+)?", text[first.end() : 4096])
    for word in (pair[:16].strip() for pair in words):
        # a word that begins with a dash would be read as an option
        if word.isprintable() and not word.startswith("-") and not unknown_characters(tokenizer, word):
            return word
    return ""


def unknown_characters(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Return the characters of a text that the tokenizer does not know, sorted, each once."""
    if tokenizer.unk_token is None:
        return ""
    vocabulary = tokenizer.get_vocab()
    return "".join(sorted(char for char in set(text) if char not in vocabulary))
