"""Digests of the results of public calls, bit for bit: compare them before and after a change that must not alter any.

    PYTHONPATH=tests python -m fuzz.golden write FILE
    PYTHONPATH=tests python -m fuzz.golden compare FILE

The calls are the valid ones of the fuzzer, with fixed seeds, and the logits, losses and gradients of small models.
Digests hold for one machine and one version of torch only.
"""

import dataclasses
import hashlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.memory.stream import StreamState

from .draw import Draw
from .judge import quiet
from .table import CALLS

SEEDS = 8
SPECS = ("softmax", "biweight", "relumax", "sparsemax", "topk-softmax", "elu", "normrelu", "shift-cosine")
MIXERS = ("local-linear[softmax]", "local-linear[biweight]", "gated-deltanet", "lact")
OPTIONS = {
    "HybridConfig": (*SPECS, *MIXERS, "memories=PKM@0", "memories=FwPKM@0", "memories=FwMLP@1"),
    "MemoryMosaicConfig": SPECS,
    "ICLMConfig": SPECS,
}
CONFIGS = tuple(OPTIONS)


def pieces(x: Any) -> Iterator[bytes]:
    """Everything in a result that is a number or text, as bytes."""
    if isinstance(x, Tensor):
        x = x.detach().cpu().clone(memory_format=torch.contiguous_format)
        yield f"{x.dtype}{tuple(x.shape)}".encode()
        yield x.reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""
    elif isinstance(x, nn.Module):
        yield from pieces(x.state_dict())
    elif isinstance(x, StreamState):
        yield from pieces(x.to_tensors())  # what it holds, not how
    elif dataclasses.is_dataclass(x) and not isinstance(x, type):
        yield from pieces({f.name: getattr(x, f.name) for f in dataclasses.fields(x)})
    elif isinstance(x, dict):
        for key, value in x.items():
            yield str(key).encode()
            yield from pieces(value)
    elif isinstance(x, (list, tuple)):
        for value in x:
            yield from pieces(value)
    elif isinstance(x, (int, float, str, bool, type(None))):
        yield repr(x).encode()
    else:
        yield type(x).__name__.encode()


def digest(x: Any) -> str:
    return hashlib.sha256(b"|".join(pieces(x))).hexdigest()[:16]


def of_call(name: str, seed: int) -> str:
    torch.manual_seed(seed)
    call = CALLS[name](Draw(random.Random(f"golden {name} {seed}")))
    given = {n: x.clone().requires_grad_() if n in call.gradients else x for n, x in call.given.items()}
    with quiet():
        result = call.run(**given)
    first = result[0] if isinstance(result, tuple) else result
    if isinstance(first, Tensor) and first.requires_grad and first.is_floating_point():
        first.sum().backward()
    return digest([result, [given[n].grad for n in call.gradients]])


def of_model(name: str, option: str) -> str:
    from regard import models

    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    sizes = dict(zip(names, (17, 16, 2, 2, 32), strict=True))
    more = {"memories": option.removeprefix("memories=")} if "=" in option else {"mixers": option}
    config = getattr(models, name)(**sizes, **more)
    kind = next(m for _, m in models.language_models.items() if m.config is type(config))
    torch.manual_seed(0)
    model = kind.model(config)
    ids = torch.randint(config.vocab_size, (2, 9))
    with quiet():
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
    return digest([out.logits, out.loss, [p.grad for p in model.parameters()]])


def everything() -> dict[str, str]:
    torch.set_num_threads(1)
    found = {}
    for name in sorted(CALLS):
        for seed in range(SEEDS):
            found[f"{name} {seed}"] = attempt(of_call, name, seed)
    for name in CONFIGS:
        for option in OPTIONS[name]:
            found[f"model of {name} {option}"] = attempt(of_model, name, option)
    return found


def attempt(make: Any, name: str, seed: Any) -> str:
    try:
        return make(name, seed)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:120]}"


if __name__ == "__main__":
    command, path = sys.argv[1], Path(sys.argv[2])
    new = everything()
    errors = {k: v for k, v in new.items() if ":" in v}
    print(f"{len(new)} calls, {len(errors)} end in an error")
    if command == "write":
        path.write_text(json.dumps(new, indent=0) + "\n")
        for k, v in list(errors.items())[:20]:
            print(k, v)
    else:
        old = json.loads(path.read_text())
        apart = [k for k in sorted({*old, *new}) if old.get(k) != new.get(k)]
        print(f"{len(apart)} differ")
        for k in apart[:60]:
            print(k, old.get(k), new.get(k))
        sys.exit(bool(apart))
