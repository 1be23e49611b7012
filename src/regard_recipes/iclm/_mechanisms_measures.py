"""Measure the heads of a trained model; part of the recipe iclm-mechanisms.

Shapes: B texts, T tokens, H heads, L layers of f.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.inspect import mechanisms
from regard.inspect.hooks import run_with_hooks

Row = dict[str, Any]
BATCH = 16  # texts at a time where a loss is measured
BLOCKS = {"vocabulary": 64, "shortest": 8, "longest": 24, "width": 64, "heads": 2, "context": 64, "batch": 16,
          "tokens": 400_000, "measured": 4096, "period": 16, "length": 48, "texts": 32}  # fmt: skip
"""Repeated blocks: tokens of a block in training, `tokens` of the training text, `measured` of the held-out one; the
models and their windows; and what heads are measured on, `texts` of `length` tokens with blocks of `period`."""


def block_stream(length: int, seed: int) -> Tensor:
    """Return tokens to learn induction from, int32 [length]: random blocks, each two to four times. Their length
    varies, since with one length the distance would tell the next token."""
    generator = torch.Generator().manual_seed(seed)
    parts: list[Tensor] = []
    total = 0
    while total < length:
        period = int(torch.randint(BLOCKS["shortest"], BLOCKS["longest"] + 1, (1,), generator=generator))
        times = int(torch.randint(2, 5, (1,), generator=generator))
        parts.append(mechanisms.repeated_blocks(BLOCKS["vocabulary"], period, period * times, 1, generator)[0])
        total += period * times
    return torch.cat(parts)[:length].int()


def measure_blocks(model: Any, seed: int) -> Row:
    """Return induction scores on repeated blocks before and after the training with `seed`, by head, and a prompt."""
    vocabulary, period = BLOCKS["vocabulary"], BLOCKS["period"]
    generator = torch.Generator().manual_seed(seed + 1)
    tokens = mechanisms.repeated_blocks(vocabulary, period, BLOCKS["length"], BLOCKS["texts"], generator)
    tokens = tokens.to(model.device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        untrained = type(model)(model.config).to(model.device).eval()
    measured: Row = {"rows": []}
    for when, each in (("before", untrained), ("after", model)):
        logits, layers = mechanisms.patterns(each, tokens)
        right = logits[:, period:-1].argmax(-1) == tokens[:, period + 1 :]
        measured[f"accuracy_{when}"] = right.double().mean().item()
        for layer in layers:
            equal = mechanisms.uniform_attention()(layer.weights[:1, :1].double(), None)  # type: ignore[arg-type]
            common = {"kind": "head", "stream": layer.stream, "layer": layer.layer + 1, "when": when,
                      "uniform": mechanisms.induction(equal, layer.roles, period).item()}  # fmt: skip
            scores = mechanisms.induction(layer.weights, layer.roles, period).tolist()
            measured["rows"] += [{**common, "score": score} for score in scores]
    words = [str(token) for token in range(vocabulary)]
    measured["rows"].append({"prompt": "blocks", **measure_prompt(model, tokens[0].tolist(), words)})
    return measured


def measure_text(
    model: Any, *, windows: Tensor, prompts: Sequence[Sequence[int]], words: Sequence[str], from_row: int
) -> Row:
    """Return sinks (from row `from_row` on), copying and the cost of every head on held-out `windows` [B, T], losses
    with equal weights, the logit lens, and maps and sources of a logit of the prompts, as rows."""
    windows = windows.to(model.device).long()
    rows = head_rows(model, windows, from_row)
    whole = nats(model, windows)
    hooks: dict[str, dict[str, Any]] = {}  # stream to hook point to a hook
    for row in rows:
        name = row.pop("hook")
        row["cost"] = nats(model, windows, [(name, mechanisms.knock_out(row["head"] - 1))]) - whole
        hooks.setdefault(row["stream"], {})[name] = mechanisms.uniform_attention()
    for stream, equal in hooks.items():
        rows.append({"kind": "equal weights", "stream": stream, "cost": nats(model, windows, equal.items()) - whole})
    if hasattr(model, "contributions"):  # an ICLM
        lens = zip(mechanisms.logit_lens(model, windows), model.model.f, strict=True)
        for layer, (logits, block) in enumerate(lens, 1):
            rows.append({"kind": "lens", "layer": layer, "loss": losses(logits, windows).mean().item()})
            projections = mechanisms.head_projections(block.attn).detach()
            values = mechanisms.copying_eigenvalues(projections, model.lm_head.weight.detach())
            heads = zip(values.share.tolist(), values.balance.tolist(), strict=True)
            rows += [{"kind": "eigenvalues", "layer": layer, "head": head, "share": share, "balance": balance}
                     for head, (share, balance) in enumerate(heads, 1)]  # fmt: skip
    rows += [{"prompt": str(i), **measure_prompt(model, prompt, words)} for i, prompt in enumerate(prompts, 1)]
    return {"rows": rows}


def head_rows(model: Any, windows: Tensor, from_row: int) -> list[Row]:
    """Return every head's sink, evenness, and weight on earlier occurrences of the predicted and following token."""
    logits, layers = mechanisms.patterns(model, windows)
    rows = []
    for layer in layers:
        sink = mechanisms.sinks(layer.weights, from_row)
        wanted = (layer.wanted(logits), layer.roles.rows(windows, layer.weights.shape[2]))
        predicted, following = (mechanisms.copying(layer.weights, layer.roles, windows, tokens) for tokens in wanted)
        columns = {
            "first": sink.first, "strongest": sink.strongest, "place": sink.place,
            "even": mechanisms.evenness(layer.weights, from_row), "predicted": predicted.weight,
            "predicted_lift": predicted.lift, "following": following.weight, "following_lift": following.lift,
        }  # fmt: skip
        common = {"kind": "head", "stream": layer.stream, "layer": layer.layer + 1, "hook": layer.name,
                  "uniform": sink.uniform, "predicted_uniform": predicted.uniform}  # fmt: skip
        for head in range(layer.weights.shape[1]):
            rows.append({**common, "head": head + 1, **{name: x[head].item() for name, x in columns.items()}})
    return rows


@torch.no_grad()
def nats(model: Any, windows: Tensor, hooks: Any = ()) -> float:
    """Return the mean loss of windows [B, T] under hooks, in nats per token."""
    parts = [losses(run_with_hooks(model, part, hooks).logits, part) for part in windows.split(BATCH)]
    return torch.cat(parts).mean().item()


def losses(logits: Tensor, windows: Tensor) -> Tensor:
    """Return the losses [B, T - 1] of logits [B, T, V] on the tokens that follow, float64."""
    return F.cross_entropy(logits[:, :-1].float().mT, windows[:, 1:], reduction="none").double()


def choose_prompts(tokens: Tensor, length: int, count: int) -> list[list[int]]:
    """Return the first windows of a text [n] without overlap whose end has occurred in them before, so that there is
    something to copy. Ends are as long as enough windows allow; rows of one sign (rules, indentation) do not count."""
    text = tokens.tolist()
    windows: list[list[int]] = []
    for size in (8, 6, 4, 3, 2, 1, 0):
        windows, start = [], 0
        while len(windows) < count and start + length <= len(text):
            window = text[start : start + length]
            end = window[length - size :]
            varied = 3 * len(set(window)) >= min(length, 24) and 2 * len(set(end)) > size - 1
            recurs = varied and any(window[i : i + size] == end for i in range(length - 2 * size + 1))
            windows += [window] if recurs else []
            start += length if recurs else 1
        if len(windows) == count:
            break
    return windows


@torch.no_grad()
def measure_prompt(model: Any, prompt: Sequence[int], words: Sequence[str]) -> Row:
    """Return a row with the prediction after T tokens, and the weights of the middle layer of every stream, the mean of
    its heads. Of an ICLM also what context tokens (`parts`, T x L), feed-forward layers and bias add to the predicted
    token's logit, by how much they miss it, and what its own earlier occurrences add (`same`, None without any)."""
    tokens = torch.tensor([list(prompt)], device=model.device)
    logits, layers = mechanisms.patterns(model, tokens)
    chance = logits[0, -1].double().softmax(-1)
    predicted = int(chance.argmax())
    row: Row = {"kind": "prompt", "words": [words[token] for token in prompt], "predicted_word": words[predicted],
                "chance": chance[predicted].item(), "maps": {}}  # fmt: skip
    for stream in dict.fromkeys(layer.stream for layer in layers):
        of_stream = [layer for layer in layers if layer.stream == stream]
        middle = of_stream[len(of_stream) // 2]
        mean = middle.weights[0].double().mean(0)
        rounded = [[round(weight, 4) for weight in weights] for weights in mean.tolist()]
        row["maps"][stream] = {"layer": middle.layer + 1, "layers": len(of_stream), "weights": rounded}
    if not hasattr(model, "contributions"):
        return row
    added, asked = model.contributions(tokens, positions=[-1]), torch.tensor([predicted], device=tokens.device)
    parts = added.parts(asked)[0, 0, ..., 0].double().sum(-1)  # [T, L]
    feed_forward = added.mlp(asked)[0, 0, :, 0].double().sum().item()
    logit, bias = logits[0, -1, predicted].item(), float(added.bias(asked).flatten()[0])
    same = parts[tokens[0] == predicted]
    return row | {
        "logit": logit, "context": parts.sum().item(), "same": same.sum().item() if len(same) else None,
        "feed_forward": feed_forward, "bias": bias,
        "missed": abs(math.fsum([*parts.flatten().tolist(), feed_forward, bias]) - logit), "parts": parts.tolist(),
    }  # fmt: skip
