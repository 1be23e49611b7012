"""A tiny language model per mixer, trained until it knows a short text by heart.

Trained, since the logits of an untrained model are nearly tied and equal tokens would then say little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch

from regard.models import HybridConfig, HybridForCausalLM

TEXT = (
    "the miller keeps seven grey geese behind the barn, and every morning they walk in a line to the pond. "
    "a fox sleeps under the bridge; when it rains the fox moves into the old boat and dreams of plums. "
    "nobody in the village owns a clock, so the baker counts to nine hundred before opening the oven. "
    "on market day the tall woman sells blue thread, brass buttons and a kind of honey that tastes of smoke. "
)
ALPHABET = sorted(set(TEXT))

Mixers = str | list[str]


def _encode(text: str) -> torch.Tensor:
    return torch.tensor([ALPHABET.index(letter) + 1 for letter in text])


def _config(mixers: Mixers = "softmax", **changes: object) -> HybridConfig:
    sizes: dict[str, object] = {
        "vocab_size": len(ALPHABET) + 1,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
    }
    return HybridConfig(mixers=mixers, **{**sizes, **changes})


def _model(mixers: Mixers = "softmax", seed: int = 0, **changes: object) -> HybridForCausalLM:
    torch.manual_seed(seed)
    return HybridForCausalLM(_config(mixers, **changes)).eval()


def _train(mixers: Mixers, steps: int = 140, length: int = 48, batch: int = 12) -> HybridForCausalLM:
    """Train on windows of the text, at random places; the model in evaluation mode."""
    model = _model(mixers).train()
    tokens = _encode(TEXT + TEXT[:length])
    places = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=6e-3, total_steps=steps, pct_start=0.2)
    for _ in range(steps):
        start = torch.randint(len(TEXT), (batch, 1), generator=places)
        window = tokens[start + torch.arange(length)]
        loss = model(window, labels=window).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    assert loss.item() < 1.5, f"{mixers}: loss {loss.item():.2f} after {steps} steps is not a trained model's"
    return model.eval()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors this small are slower on several threads, and much slower when test workers share the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def encode() -> Callable[[str], torch.Tensor]:
    """`encode(text)`: token numbers [T]; 0 is kept for padding."""
    return _encode


@pytest.fixture(scope="session")
def make_config() -> Callable[..., HybridConfig]:
    """`make_config(mixers, **changes)`: two layers, four query heads in two groups."""
    return _config


@pytest.fixture(scope="session")
def make_model() -> Callable[..., HybridForCausalLM]:
    """`make_model(mixers, seed=0, **changes)`: untrained, in evaluation mode, the same for the same seed."""
    return _model


@pytest.fixture(scope="session")
def trained() -> Callable[[str], HybridForCausalLM]:
    """`trained(mixer)`: the trained model, made when it is first asked for."""
    return cache(_train)
