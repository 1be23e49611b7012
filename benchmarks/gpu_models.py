"""Part `models` of `gpu.py`: training steps of small language models, one for every preset, and of the hybrid model
with memories beside the one without."""

import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gpu_peers
import torch
from cpu_measure import digits
from gpu_measure import Bench, Row, small_tiles

import regard

FIRST = ("softmax", "biweight", "relumax", "local-linear")
DELTA_RULE = "fla.ops.gated_delta_rule"
"""Where it is installed transformers takes its kernels, else loops of PyTorch operations, beside which memories look
cheap."""


def rows(bench: Bench) -> Iterator[Row]:
    for name in regard.presets():
        early = FIRST.index(name) if name in FIRST else len(FIRST)
        yield Row(f"training step, {name}", "models", 10 + early, partial(preset, name, bench), 15)
    for name in ("GDN", "GDN + FwPKM"):
        yield Row(f"training step, {name}", "models", 4, partial(hybrid, name, bench), 40, 2)


def preset(name: str, bench: Bench) -> dict[str, Any]:
    """A hybrid model all of whose layers have this preset: 4 layers of 512 features, 8 heads, windows of 2048."""
    gpu_peers.require("transformers", "pip install transformers")
    from regard.models import HybridConfig

    size = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 4096}
    batch, tokens = (1, 16) if bench.dry else (8, 2048)
    if bench.dry:
        size |= {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 32}
    config = HybridConfig(**size, mixers=name, max_position_embeddings=tokens)
    heads = config.num_attention_heads
    shape = (batch, heads, tokens, config.hidden_size // heads)
    dtype = torch.float32 if bench.dry else torch.bfloat16
    told = regard.explain(name, shape, dtype=dtype, device=bench.device.type, is_causal=True)
    return {**stepped(config, batch, tokens, bench), "preset": name, "runs": told.chosen}


def layout(name: str, bench: Bench) -> tuple[Any, int, int, dict[str, str]]:
    """Return the paper's Gated DeltaNet model, 12 layers of 768 features, without memories or with three of fast
    weights: its configuration, sequences of a batch and their tokens, and what is to be said of it."""
    gpu_peers.require("transformers", "pip install transformers")
    from regard.models import HybridConfig

    size: dict[str, Any] = {}
    batch, tokens = (1, 32) if bench.dry else (8, 128 if bench.compiling else 4096)
    if bench.dry:
        size = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}
        size |= {"vocab_size": 64, "mixer_options": {"gated-deltanet": {"num_heads": 2, "head_dim": 8}}}
    places = None
    if "FwPKM" in name:
        places = "FwPKM@1,2,3" if bench.dry else "FwPKM@2,6,10"
        if bench.dry:
            size["memory_options"] = {"fwpkm": {"sub_keys": 8, "key_dim": 8, "value_dim": 8, "chunk_size": 16}}
    return HybridConfig.layout("GDN", places, **size), batch, tokens, {} if bench.dry else allowed()


def hybrid(name: str, bench: Bench) -> dict[str, Any]:
    """A training step of that model."""
    *what, note = layout(name, bench)
    found = stepped(*what, bench)
    return {**found, "model": name, "delta_rule": "fla" if DELTA_RULE in sys.modules else "torch", **note}


def allowed() -> dict[str, str]:
    """Let fla's backward pass run where it refuses to, for its time alone."""
    try:
        gated = importlib.import_module("fla.ops.common.chunk_o")
    except ImportError:
        return {}
    from fla.utils import TRITON_ABOVE_3_7_1

    if TRITON_ABOVE_3_7_1 or not (gated.IS_NVIDIA_HOPPER and gated.TRITON_ABOVE_3_4_0):
        return {}
    gated.TRITON_ABOVE_3_7_1 = True
    return {
        "note": "fla's gradients of decays are wrong with this Triton on Hopper (its issue 640): only the time counts"
    }


def stepped(config: Any, batch: int, tokens: int, bench: Bench) -> dict[str, Any]:
    """Time, tokens a second and peak of a training step; bfloat16 autocast on the GPU."""
    step = stepper(config, batch, tokens, bench)
    with small_tiles(bench):
        ms = bench.milliseconds(step)
        mib = bench.peak(step)
    return {
        "config": {"batch": batch, "tokens": tokens},
        "ms": digits(ms),
        "tokens_per_second": digits(1e3 * batch * tokens / ms),
        "mib": mib,
    }


def stepper(config: Any, batch: int, tokens: int, bench: Bench) -> Callable[[], None]:
    """Forward, backward, clipping, AdamW."""
    from regard.models.base.catalogue import model_of
    from regard.nn import optimizer_groups

    torch.manual_seed(0)
    model = model_of(config)(config).to(bench.device).train()
    optimizer = torch.optim.AdamW(optimizer_groups(model).dense, lr=1e-4)
    text = torch.randint(config.vocab_size, (batch, tokens), generator=bench.generator(), device=bench.device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(bench.device.type, torch.bfloat16, enabled=not bench.dry):
            loss = model(input_ids=text, labels=text, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step
