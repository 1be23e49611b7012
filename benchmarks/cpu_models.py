"""Part 5 of `cpu.py`: training steps of the language models, and the time that their caches save in decoding."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from cpu_measure import Function, child_peaks, digits, interleaved, say, summary
from torch import Tensor
from torch.func import functional_call

from regard.models import (
    HybridConfig,
    ICLMConfig,
    MemoryMosaicConfig,
    RegardConfig,
    count_parameters,
    language_models,
    match_parameters,
)
from regard.models.base.catalogue import model_of

MOSAIC, TRANSFORMER = "memory-mosaic softmax", "transformer softmax"
GROUPS = {
    MOSAIC: ("memory-mosaic softmax", "memory-mosaic biweight", "memory-mosaic biweight*fixed"),
    TRANSFORMER: ("transformer softmax", "iclm full", "iclm wv"),
}
"""Baseline to those that are compared with it. Models of the second group have as many parameters as the first."""
VOCABULARY = 96
NEW_TOKENS = 256
PROMPTS = (16, 256)
BARS = {"memory-mosaic biweight": 2.0, "decoding": 5.0}
"""Step of the one against the same with softmax at most; decoding without a cache against with one at least."""


def model_config(name: str, config: dict[str, Any]) -> RegardConfig:
    """The configuration of a contestant at the sizes of `config`."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": config["width"],
        "num_hidden_layers": config["layers"],
        "num_attention_heads": config["heads"],
        "max_position_embeddings": config["length"],
    }
    transformer = HybridConfig(**sizes, feed_forward="gelu", norm="layer")
    kind, _, how = name.partition(" ")
    if kind == "transformer":
        return transformer
    if kind == "iclm":
        return match_parameters(ICLMConfig(**sizes, variant=how), transformer).config
    return MemoryMosaicConfig(**sizes, mixers=how)


@cache
def built(name: str, *sizes: tuple[str, int]) -> torch.nn.Module:
    """A contestant with its first weights, in training mode."""
    torch.manual_seed(0)
    config = model_config(name, dict(sizes))
    return model_of(config)(config).train()


def model_and_tokens(name: str, config: dict[str, Any]) -> tuple[torch.nn.Module, Tensor]:
    """A contestant, and windows [batch, length] of random tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (config["batch"], config["length"]), generator=generator)
    return built(name, *((key, config[key]) for key in ("width", "layers", "heads", "length"))), tokens


def stepper(name: str, config: dict[str, Any]) -> Callable[[], None]:
    """A training step: forward, backward, clipping, AdamW."""
    model, tokens = model_and_tokens(name, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def functions(config: dict[str, Any]) -> dict[str, Function]:
    """The loss as a function of the parameters, by contestant: for the memory of a pass."""

    def loss(name: str, *parameters: Tensor) -> Tensor:
        model, tokens = model_and_tokens(name, config)
        given = dict(zip((key for key, _ in model.named_parameters()), parameters, strict=True))
        return functional_call(model, given, kwargs={"input_ids": tokens, "labels": tokens}).loss

    return {name: partial(loss, name) for names in GROUPS.values() for name in names}


def inputs(config: dict[str, Any]) -> tuple[list[Tensor], Tensor]:
    """The parameters of the contestant `config["name"]`, and the cotangent of a loss."""
    model, _ = model_and_tokens(config["name"], config)
    return [p.detach() for p in model.parameters()], torch.ones(())


def configs(quick: bool) -> list[dict[str, Any]]:
    """The sizes of `regard train` as they are, and twice the context at half the batch."""
    if quick:
        return [{"width": 16, "layers": 2, "heads": 2, "length": 16, "batch": 2}]
    return [
        {"width": 128, "layers": 4, "heads": 4, "length": length, "batch": batch}
        for length, batch in ((256, 16), (512, 8))
    ]


def run(quick: bool, threads: int) -> dict[str, Any]:
    """times of a step, sizes, decoding and memory."""
    most, budget = (2, 1.0) if quick else (9, 12.0)
    times, sizes = [], []
    for config in configs(quick):
        for baseline, names in GROUPS.items():
            say(f"  models: T {config['length']}, B {config['batch']}, step, against {baseline}")
            samples = interleaved({name: stepper(name, config) for name in names}, most=most, budget=budget)
            entry = {"config": config, "pass": "step", "baseline": baseline}
            times.append({**entry, "contestants": summary(samples, baseline)})
            parameters = {name: count_parameters(model_config(name, config)) for name in names}
            sizes.append({"config": config, "baseline": baseline, "parameters": parameters})
            built.cache_clear()
    return {
        "bars": BARS,
        "times": times,
        "parameters": sizes,
        "decoding": decoding(quick),
        "memory": memory(configs(quick)[0], quick, threads),
    }


def decoding(quick: bool) -> list[dict[str, Any]]:
    """Every registered model: greedy tokens after a prompt, with the model's cache and without any. Ratios are to the
    former, so that they say how much the cache saves."""
    return [entry for length in ((8,) if quick else PROMPTS) for entry in decoding_after(length, quick)]


def decoding_after(length: int, quick: bool) -> list[dict[str, Any]]:
    """The same after a prompt of `length` tokens."""
    new = 4 if quick else NEW_TOKENS
    config = {"width": 16 if quick else 256, "layers": 2 if quick else 4, "heads": 2 if quick else 4}
    config |= {"batch": 1, "prompt": length, "new_tokens": new}
    prompt = torch.randint(VOCABULARY, (1, config["prompt"]), generator=torch.Generator().manual_seed(0))
    found = []
    for name, entry in language_models.items():
        say(f"  models: decoding of {name}")
        torch.manual_seed(0)
        sizes = {"hidden_size": config["width"], "num_hidden_layers": config["layers"]}
        sizes |= {"num_attention_heads": config["heads"], "max_position_embeddings": config["prompt"] + new}
        model = entry.model(entry.config(vocab_size=VOCABULARY, **sizes)).eval()
        calls = {
            f"{name}, {how}": partial(decode, model, prompt, new, how == "a cache") for how in ("a cache", "no cache")
        }
        samples = interleaved(calls, most=2 if quick else 5, budget=20.0)
        baseline = f"{name}, a cache"
        found.append({"config": config, "baseline": baseline, "contestants": summary(samples, baseline)})
    return found


def decode(model: Any, prompt: Tensor, new: int, cached: bool) -> Tensor:
    """Greedy tokens, exactly `new` of them."""
    return model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        use_cache=cached,
        pad_token_id=0,
    )


def memory(config: dict[str, Any], quick: bool, threads: int) -> list[dict[str, Any]]:
    """Peaks in MiB of the loss and of its gradient by all parameters, beside the parameters."""
    found = []
    for names in GROUPS.values():
        for name in names[:1] if quick else names:
            say(f"  models: memory of {name}, T {config['length']}")
            mib = child_peaks("models", name, {**config, "name": name}, threads)
            parameters = digits(4 * count_parameters(model_config(name, config)) / 2**20)
            found.append({"name": name, "config": config, "mib": mib, "parameters_mib": parameters})
    return found
