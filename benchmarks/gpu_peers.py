"""What `gpu.py` compares with: torch's own attention kernels, and the packages adasplash and flash-linear-attention
where they are installed. All take and give [B, H, T, D]."""

import contextlib
import importlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

TORCH = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
ADASPLASH = {
    "adasplash 2": ("adasplash_v2", {"niter": 1}),
    "adasplash 2, 2 steps": ("adasplash_v2", {"niter": 2}),
    "adasplash 1": ("adasplash_v1", {"alpha": 1.5, "is_causal": True, "niter": 10}),
}
"""Entry points of the package 0.2; one step is what it takes by default."""


class Missing(Exception):
    """A peer that cannot run here, with the reason; the row says so instead of a time."""


def torch_attention(q: Tensor, k: Tensor, v: Tensor, *, backend: str, causal: bool = True) -> Tensor:
    """scaled_dot_product_attention by one of its backends alone."""
    if backend == "cudnn" and q.device.type != "cuda":
        raise Missing("cuDNN needs a GPU")
    with sdpa_kernel(TORCH[backend]):
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def adasplash(name: str, *, tuned_once: bool = True) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A version of AdaSplash, causal, alpha = 1.5.

    Its kernels time 6 to 30 configurations for every new length, which takes minutes. With `tuned_once` the best of the
    first length, for each number of features, are kept for all others.
    """
    require("adasplash", "pip install adasplash")
    entry, how = ADASPLASH[name]
    function = partial(getattr(importlib.import_module("adasplash"), entry), **how)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.device.type != "cuda" and not compiling():
            raise Missing("adasplash needs a GPU")
        return function(q, k, v)

    def kept(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.shape[-1] in SETTLED:
            return call(q, k, v)
        importlib.import_module("adasplash.adasplash_v2")
        keep_best("adasplash", q.shape[-1])
        if take_best("adasplash", q.shape[-1]):
            SETTLED[:] = [q.shape[-1]]
        return call(q, k, v)

    return kept if tuned_once and name.startswith("adasplash 2") else call


def compiling() -> bool:
    """Whether kernels are only compiled now."""
    from triton.runtime.jit import JITFunction

    return JITFunction.run.__module__ == "gpu_warm"


def tuners(package: str) -> Iterator[tuple[str, Any]]:
    """The kernels of a package that tune themselves."""
    from triton.runtime.autotuner import Autotuner

    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == package and module is not None:
            yield from ((key, kernel) for key, kernel in vars(module).items() if isinstance(kernel, Autotuner))


def choices() -> Path:
    """Where it is written which configurations were chosen, beside compiled kernels."""
    folder = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    return Path(folder) / "chosen.json"


def chosen() -> dict[str, str]:
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(choices().read_text(encoding="utf-8")))
    return {}


def chosen_of(row: str) -> bool:
    """Whether it is known which configurations a row takes, or it does not take over any."""
    dim = re.search(r"D (\d+)", row)
    return "adasplash 2" not in row or f"_bwd_kv_kernel, D {dim.group(1) if dim else 64}" in chosen()


def take_best(package: str, dim: int) -> bool:
    """Leave the tuned kernels of a package only the configuration that was chosen for so many features, or all;
    whether one is chosen for every kernel."""
    known, found = chosen(), []
    for name, kernel in tuners(package):
        every = ALL.setdefault(kernel, kernel.configs)
        best = [config for config in every if str(config) == known.get(f"{name}, D {dim}")]
        kernel.configs = best or every
        found.append(bool(best))
    return all(found)


def keep_best(package: str, dim: int) -> None:
    """Write down which configurations the tuned kernels of a package chose for so many features, the first time."""
    known = chosen()
    new = {
        f"{name}, D {dim}": str(config)
        for name, kernel in tuners(package)
        for key, config in kernel.cache.items()
        if dim in key and f"{name}, D {dim}" not in known
    }
    if new:
        choices().parent.mkdir(parents=True, exist_ok=True)
        choices().write_text(json.dumps({**known, **new}), encoding="utf-8")


ALL: dict[Any, list[Any]] = {}
"""All configurations of a kernel."""
SETTLED: list[int] = []
"""The number of features whose configurations the kernels have now."""


def parallax(q: Tensor, probe: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """fla's Parallax, causal; its probe is ours."""
    function = fla("fla.ops.parallax", "parallel_parallax")
    return turned(function(turned(q), turned(probe), turned(k), turned(v)))


def mesa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """fla's MesaNet without decay, ridge 0.1, its 30 steps of conjugate gradients. Its model is another one (no kernel
    weights); it is here for its time."""
    function = fla("fla.ops.mesa_net", "chunk_mesa_net")
    batch, heads, length, dim = q.shape
    gate = q.new_zeros(batch, length, heads, dtype=torch.float32)
    ridge = q.new_full((heads, dim), 0.1, dtype=torch.float32)
    keys = torch.nn.functional.normalize(k.float(), dim=-1).to(k.dtype)
    return turned(function(turned(q), turned(keys), turned(v), gate, torch.ones_like(gate), ridge)[0])


def fla(module: str, name: str) -> Callable[..., Any]:
    require("fla", "pip install flash-linear-attention")
    return getattr(importlib.import_module(module), name)


def turned(x: Tensor) -> Tensor:
    """[B, H, T, D] as [B, T, H, D], or back, contiguous as fla asks."""
    return x.transpose(1, 2).contiguous()


def require(module: str, how: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise Missing(f"not installed: {how}")
