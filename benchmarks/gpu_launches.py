"""Count the kernels that a call starts on a GPU, on a machine without one: `python benchmarks/gpu_launches.py --write`.

The tensors lie on the CPU, kernels are recorded instead of started, and operations of torch are counted by its
profiler. Views and allocations start nothing and are left out; every other operation counts as one kernel, though a sum
or a scan may take several.
"""

import argparse
import collections
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile

ROOT = Path(__file__).resolve().parents[1]
if importlib.util.find_spec("regard") is None:  # a machine with torch and these sources alone
    sys.path.insert(0, str(ROOT / "src"))

from gpu_compiled import pretended, zeros  # noqa: E402

import regard  # noqa: E402
from regard.triton.runtime.launch import watched  # noqa: E402

STORED = ROOT / "benchmarks" / "results" / "gpu-launches.md"
SPECS = ("softmax", "biweight", "relumax", "sparsemax", "local-linear")
_NOTHING = """
view _unsafe_view expand as_strided transpose permute slice select unsqueeze squeeze detach alias t reshape unbind split
unflatten flatten _reshape_alias split_with_sizes empty empty_strided empty_like new_empty empty_permuted
new_empty_strided resize_ result_type item _local_scalar_dense contiguous to lift_fresh promote_types
"""
FREE = set(_NOTHING.split())
"""Operations that start no kernel."""


@contextmanager
def counted() -> Iterator[collections.Counter[str]]:
    """Count kernels and operations in this context, by name."""
    found: collections.Counter[str] = collections.Counter()
    with pretended(90), watched(lambda kernel, *_: found.update([kernel.fn.__name__])), profile() as profiler:
        yield found
    found.update(f"torch {name}" for event in profiler.events() for name in started(event))


def started(event: Any) -> list[str]:
    """Return the name of an operation of torch that starts something, and calls no other that does."""
    name, prefix = event.name.removeprefix("aten::"), event.name.partition("::")[0]
    return [name] if prefix == "aten" and name not in FREE and not any(map(started, event.cpu_children)) else []


def launches(spec: str, causal: bool = True) -> tuple[dict[str, int], dict[str, int]]:
    """What a forward pass and its backward pass start."""
    q, k, v = (torch.randn(1, 2, 256, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    with counted() as forward:
        out = regard.attention(q, k, v, spec, is_causal=causal, impl="triton")
    grad = torch.ones_like(out)
    with counted() as backward:
        torch.autograd.grad(out, (q, k, v), grad)
    return dict(forward), dict(backward)


def of_memory(writes: int) -> tuple[dict[str, int], dict[str, int]]:
    """What a pass over a memory of fast weights with so many writes starts, and its backward pass; without fills, since
    what is allocated is filled with zeros here."""
    tokens = 16 * (writes + 1)
    leaves = [torch.rand(1, tokens, *shape).requires_grad_() for shape in ((1, 32), (32,), ())]
    keys, values, found = torch.randn(1, 2, 64, 16), torch.randn(64**2, 32), []
    how: dict[str, Any] = {"chunk_size": 16, "mix": True, "impl": "triton"}
    with zeros():
        with counted() as forward:
            out, _ = regard.fast_weight_memory(*leaves, keys, values, **how)
        with counted() as backward:
            torch.autograd.grad(out, leaves, torch.ones_like(out))
    for which in (forward, backward):
        found.append({name: n for name, n in which.items() if name not in ("torch zero_", "torch fill_")})
    return found[0], found[1]


def table() -> str:
    """The counts of every spec, as a page."""
    lines = ["| call | pass | launches | what |", "|---|---|---:|---|"]
    calls = {spec: launches(spec) for spec in SPECS} | {"memory of fast weights, one write": of_memory(1)}
    for spec, both in calls.items():
        for which, found in zip(("forward", "backward"), both, strict=True):
            what = ", ".join(f"{name} {count}" if count > 1 else name for name, count in found.items())
            lines.append(f"| {spec} | {which} | {sum(found.values())} | {what} |")
    head = (
        "# What a call starts on a GPU\n\nWritten by `python benchmarks/gpu_launches.py --write`, on a machine without "
        "a GPU: kernels and operations of torch of causal self-attention with gradients, bfloat16, and of a memory of "
        "two chunks, without fills.\n\n"
    )
    return head + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {STORED}")
    text = table()
    print(text)
    if parser.parse_args().write:
        STORED.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
