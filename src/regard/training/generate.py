"""Sampling text with an explicit random generator, on transformers' own `generate`.

Transformers samples from torch's global generator. Here the noise is added to the scores instead (the
Gumbel-max trick: the argmax of logits + Gumbel noise is distributed as softmax of the logits), so that greedy
search samples, and the same seed gives the same text whatever else the program draws.

Shapes: B prompts, V the vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import (
    BatchEncoding,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..checks import ArgumentError
from .config import check_seed
from .quiet import quiet_transformers
from .storage.saved_tokenizer import one_error


class SeededSampling(LogitsProcessor):
    """Turns scores [B, V] into scores whose argmax is a sample.

    Args:
        temperature: 0 takes the best token; 1 samples as the model says.
        top_k: sample among so many best tokens; None: among all.
        seed: of the generator.
        forbidden: token ids never taken.
    """

    def __init__(self, *, temperature: float, top_k: int | None, seed: int, forbidden: list[int]) -> None:
        self.temperature, self.top_k, self.forbidden = temperature, top_k, forbidden
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.double()
        scores[:, self.forbidden] = -torch.inf
        if self.temperature == 0:
            return scores
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            least = scores.topk(self.top_k, dim=-1).values[:, -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        # drawn on the CPU in float64, so that a seed means the same on every device
        uniform = torch.rand(scores.shape, generator=self.generator, dtype=torch.float64)
        gumbel = -torch.log(-torch.log(uniform.clamp_min(torch.finfo(torch.float64).tiny)))
        return scores / self.temperature + gumbel.to(scores.device)


def generate_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    max_new_tokens: int = 200,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> str:
    """Return the prompt and its continuation, `max_new_tokens` tokens long. The same arguments give the same text,
    whatever generation settings are saved with the model or set on it.

    Special tokens are never produced.

    Raises:
        ArgumentError: a prompt that is empty or longer than the model's context, or a number out of range.
    """
    check_sampling(max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, seed=seed)
    inputs = _prompt(model, tokenizer, prompt)
    sampling = SeededSampling(
        temperature=temperature, top_k=top_k, seed=seed, forbidden=list(tokenizer.all_special_ids)
    )
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id, eos_token_id=None
    )
    # quiet: it reminds of the context, beyond which one may go
    with quiet_transformers(), _without_settings(model):
        output = model.generate(**inputs, generation_config=settings, logits_processor=LogitsProcessorList([sampling]))
    with one_error("generate: the tokenizer cannot write the text"):
        return prompt + tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@contextmanager
def _without_settings(model: PreTrainedModel) -> Iterator[None]:
    """Put the generation settings of a model aside: transformers takes from them whatever a call leaves at None."""
    former = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = former


def _prompt(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> BatchEncoding:
    """The tokens [1, T] of a prompt that the model can continue, where the model is.

    Raises:
        ArgumentError: it has no tokens, or more than the model's context.
    """
    with one_error("generate: the tokenizer cannot read the prompt"):
        inputs = tokenizer(prompt, return_tensors="pt")
    tokens, context = inputs["input_ids"].shape[1], getattr(model.config, "max_position_embeddings", None)
    if not tokens:
        raise ArgumentError("generate: the prompt is empty; give at least one character.")
    if context is not None and tokens > context:
        raise ArgumentError(
            f"generate: the prompt has {tokens} tokens, more than the model's context of {context}; give a shorter one."
        )
    return inputs.to(model.device)


def check_sampling(*, max_new_tokens: int, temperature: float, top_k: int | None, seed: int) -> None:
    """The numbers of `generate_text`, which can be checked before a model is loaded.

    Raises:
        ArgumentError: one is out of range.
    """
    if max_new_tokens < 1:
        raise ArgumentError(f"generate: --max-new-tokens is {max_new_tokens}, expected at least 1.")
    if not 0 <= temperature < float("inf"):
        raise ArgumentError(f"generate: --temperature is {temperature}, expected 0 or more.")
    if top_k is not None and top_k < 1:
        raise ArgumentError(f"generate: --top-k is {top_k}, expected at least 1.")
    check_seed(seed, "generate")


def default_prompt(tokenizer: PreTrainedTokenizerBase) -> str:
    """One character that the tokenizer knows: a new line, else a blank, else the first of its vocabulary."""
    vocabulary = tokenizer.get_vocab()
    letters = [token for token in sorted(vocabulary, key=vocabulary.__getitem__) if len(token) == 1]
    return next((char for char in ("\n", " ", *letters) if not unknown_characters(tokenizer, char)), "\n")


def opening(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The first words of a text that make a prompt for a command line: one or two words, 16 characters at
    most, printable and all known to the tokenizer. "" where there are none."""
    words = re.findall(r"\S+(?: \S+)?", text[:4096])
    first = re.match(r"\S+\s+", text[:4096])
    if first and len(words) > 1:  # held-out text begins in the middle of a word
        words = re.findall(r"\S+(?: \S+)?", text[first.end() : 4096])
    for word in (found[:16].strip() for found in words):
        # a dash would be read as an option
        if word.isprintable() and not word.startswith("-") and not unknown_characters(tokenizer, word):
            return word
    return ""


def unknown_characters(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The characters of a text that the tokenizer does not know, each once, sorted."""
    if tokenizer.unk_token is None:
        return ""
    vocabulary = tokenizer.get_vocab()
    return "".join(sorted(char for char in set(text) if char not in vocabulary))
