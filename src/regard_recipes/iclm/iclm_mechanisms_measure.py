"""What the ICLM mechanisms recipe reads off a trained model, as plain data; runs in the process that trained it.

Shapes: B texts, T tokens, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.inspect.hooks import run_with_hooks
from regard.inspect.mechanisms import (
    LayerPattern,
    copying,
    copying_eigenvalues,
    evenness,
    head_projections,
    induction,
    knock_out,
    logit_lens,
    patterns,
    repeated_blocks,
    sinks,
    uniform_attention,
)

DIGITS = 4
"""Decimals of weights in the JSON file."""
BATCH = 16
"""Texts at a time, where weights of all heads are made."""


# Texts of repeated blocks ----------------------------------------------------------------------------------------


def block_stream(vocabulary: int, shortest: int, longest: int, length: int, seed: int) -> Tensor:
    """Tokens to learn induction from, int32 [length]: random blocks of random length, each said two to four times.

    The length has to vary: of blocks of one length the offset alone would tell what comes, whatever the tokens are.
    """
    generator = torch.Generator().manual_seed(seed)
    parts: list[Tensor] = []
    total = 0
    while total < length:
        period = int(torch.randint(shortest, longest + 1, (1,), generator=generator))
        times = int(torch.randint(2, 5, (1,), generator=generator))
        parts.append(repeated_blocks(vocabulary, period, period * times, 1, generator)[0])
        total += period * times
    return torch.cat(parts)[:length].int()


def look_at_blocks(model: Any, *, vocabulary: int, period: int, length: int, count: int, seed: int) -> dict[str, Any]:
    """Induction scores of every head on repeated blocks, of the model and of the same model before its training.

    Args:
        period, length, count: of the blocks, of a text, and how many texts.
        seed: of the model's training; the texts have one of their own.
    """
    device = next(model.parameters()).device
    texts = repeated_blocks(vocabulary, period, length, count, torch.Generator().manual_seed(seed + 1)).to(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        untrained = type(model)(model.config).to(device).eval()
    before, after = (_scores(each, texts, period) for each in (untrained, model))
    return {"period": period, "before": before, "after": after, "prompt": look_at_prompt(model, texts[0].tolist())}


def _scores(model: Any, texts: Tensor, period: int) -> dict[str, Any]:
    logits, found = patterns(model, texts)
    known = texts[:, period + 1 :]
    right = logits[:, period:-1].argmax(-1) == known
    return {
        "accuracy": right.double().mean().item(),
        "layers": [
            {
                "stream": each.stream,
                "layer": each.layer,
                "score": induction(each.weights, each.roles, period).tolist(),
                "uniform": induction(_even(each), each.roles, period).item(),
            }
            for each in found
        ],
    }


def _even(pattern: LayerPattern) -> Tensor:
    """Equal weights in the shape of one text and one head of a pattern."""
    return uniform_attention()(pattern.weights[:1, :1].double(), None)  # type: ignore[arg-type]


# Language --------------------------------------------------------------------------------------------------------


def look_at_text(model: Any, *, windows: Tensor, prompts: Sequence[Sequence[int]], from_row: int) -> dict[str, Any]:
    """Sinks, copying, what is lost without a head, the lens and the prompts.

    Args:
        windows: int [B, T], held-out text.
        prompts: texts to look at closely, as tokens.
        from_row: the first row that counts for sinks.
    """
    windows = windows.to(next(model.parameters()).device).long()
    found: dict[str, Any] = {
        "layers": layers(model, windows, from_row),
        "ablations": ablations(model, windows),
        "prompts": [look_at_prompt(model, prompt) for prompt in prompts],
    }
    if _is_iclm(model):
        found["eigenvalues"] = eigenvalues(model)
        found["lens"] = lens(model, windows)
    return found


def layers(model: Any, windows: Tensor, from_row: int) -> list[dict[str, Any]]:
    """For every layer and head: the sink, the evenness, and the weight on earlier occurrences of the token that the
    model predicts and of the token that does follow."""
    logits, found = patterns(model, windows)
    records = []
    for each in found:
        sink = sinks(each.weights, from_row)
        records.append(
            {
                "stream": each.stream,
                "layer": each.layer,
                "first": sink.first.tolist(),
                "strongest": sink.strongest.tolist(),
                "place": sink.place.tolist(),
                "uniform": sink.uniform,
                "even": evenness(each.weights, from_row).tolist(),
                "predicted": _copied(each, windows, each.wanted(logits)),
                "following": _copied(each, windows, each.roles.rows(windows, each.weights.shape[2])),
            }
        )
    return records


def _copied(pattern: LayerPattern, windows: Tensor, wanted: Tensor) -> dict[str, Any]:
    found = copying(pattern.weights, pattern.roles, windows, wanted)
    return {
        "weight": found.weight.tolist(),
        "uniform": found.uniform,
        "lift": found.lift.tolist(),
        "rows": found.rows,
    }


def ablations(model: Any, windows: Tensor) -> dict[str, Any]:
    """Nats per token with all heads, with equal weights in every layer of a stream, and without each single head."""
    _, found = patterns(model, windows[:1])
    record: dict[str, Any] = {"whole": nats(model, windows), "uniform": {}, "heads": []}
    for stream in dict.fromkeys(each.stream for each in found):
        own = [(each.name, uniform_attention()) for each in found if each.stream == stream]
        record["uniform"][stream] = nats(model, windows, own)
    for each in found:
        for head in range(each.weights.shape[1]):
            loss = nats(model, windows, [(each.name, knock_out(head))])
            record["heads"].append({"stream": each.stream, "layer": each.layer, "head": head, "loss": loss})
    return record


@torch.no_grad()
def nats(model: Any, windows: Tensor, hooks: Any = ()) -> float:
    """Mean loss of windows [B, T] under hooks, in nats per token."""
    total = 0.0
    for part in windows.split(BATCH):
        logits = run_with_hooks(model, part, hooks).logits[:, :-1]
        total += F.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten(), reduction="sum").item()
    return total / (windows.shape[0] * (windows.shape[1] - 1))


def lens(model: Any, windows: Tensor) -> list[float]:
    """Nats per token if the model ended after each f block."""
    targets = windows[:, 1:].flatten()
    return [F.cross_entropy(z[:, :-1].flatten(0, 1).float(), targets).item() for z in logit_lens(model, windows)]


def eigenvalues(model: Any) -> list[dict[str, Any]]:
    """For every f block whether its heads raise the tokens that they read."""
    embedding = model.lm_head.weight.detach()
    records = []
    for layer, block in enumerate(model.model.f):
        found = copying_eigenvalues(head_projections(block.attn).detach(), embedding)
        records.append({"layer": layer, "share": found.share.tolist(), "balance": found.balance.tolist()})
    return records


def _is_iclm(model: Any) -> bool:
    return hasattr(model, "contributions")


# Prompts ---------------------------------------------------------------------------------------------------------


def choose_prompts(tokens: Tensor, length: int, count: int) -> list[list[int]]:
    """Windows of a text [n] whose end has occurred in them before, so that there is something to copy: the first ones
    that do not overlap. The text decides, no model is asked; the ends are as long as enough windows allow, and rows of
    one sign (rules, indentation) do not count."""
    text = tokens.tolist()
    found: list[list[int]] = []
    for size in (8, 6, 4, 3, 2, 1, 0):
        found = list(_recurring(text, length, size, count))
        if len(found) == count:
            break
    return found


def _recurring(text: list[int], length: int, size: int, count: int) -> Iterator[list[int]]:
    """Up to `count` windows whose last `size` tokens stand in them before."""
    start = given = 0
    while given < count and start + length <= len(text):
        window = text[start : start + length]
        end = window[length - size :]
        varied = 3 * len(set(window)) >= min(length, 24) and 2 * len(set(end)) > size - 1
        if varied and any(window[i : i + size] == end for i in range(length - 2 * size + 1)):
            yield window
            given += 1
            start += length
        else:
            start += 1


def look_at_prompt(model: Any, prompt: Sequence[int]) -> dict[str, Any]:
    """The weights halfway through every stream, the mean over its heads, and where the logit of the predicted token
    comes from.

    Args:
        prompt: T tokens; what is predicted is the next one.
    """
    tokens = torch.tensor([list(prompt)], device=next(model.parameters()).device)
    logits, found = patterns(model, tokens)
    chance = logits[0, -1].double().softmax(-1)
    predicted = int(chance.argmax())
    record: dict[str, Any] = {"tokens": list(prompt), "predicted": predicted, "chance": chance[predicted].item()}
    record["maps"] = {}
    for stream in dict.fromkeys(each.stream for each in found):
        own = [each for each in found if each.stream == stream]
        middle = own[len(own) // 2]
        mean = middle.weights[0].double().mean(0)
        rounded = [[round(weight, DIGITS) for weight in row] for row in mean.tolist()]
        record["maps"][stream] = {"layer": middle.layer, "layers": len(own), "weights": rounded}
    if _is_iclm(model):
        record["contributions"] = contributions(model, tokens, predicted, logits[0, -1, predicted].item())
    return record


@torch.no_grad()
def contributions(model: Any, tokens: Tensor, predicted: int, logit: float) -> dict[str, Any]:
    """What every context token adds to the logit of a token, by layer; what feed-forward layers and the bias add; and
    by how much the parts miss the model's own logit."""
    asked = torch.tensor([predicted], device=tokens.device)
    found = model.contributions(tokens, positions=[-1])
    parts = found.parts(asked)[0, 0, ..., 0].double().sum(-1)  # [T, L]
    opaque = found.mlp(asked)[0, 0, :, 0].double().tolist()
    bias = float(found.bias(asked).flatten()[0])
    return {
        "tokens": parts.tolist(),
        "feed_forward": opaque,
        "bias": bias,
        "logit": logit,
        "missed": abs(math.fsum([*parts.flatten().tolist(), *opaque, bias]) - logit),
    }
