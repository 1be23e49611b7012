"""What `gpu.py` compares with: torch's own attention kernels, and the packages adasplash and flash-linear-attention
where they are installed. All take and give [B, H, T, D]."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import partial
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
    first length are kept for all others.
    """
    require("adasplash", "pip install adasplash")
    entry, how = ADASPLASH[name]
    function = partial(getattr(importlib.import_module("adasplash"), entry), **how)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.device.type != "cuda":
            raise Missing("adasplash needs a GPU")
        return function(q, k, v)

    def kept(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = call(q, k, v)
        keep_best("adasplash")
        return out

    return kept if tuned_once and name.startswith("adasplash 2") else call


def keep_best(package: str) -> int:
    """Leave the autotuned kernels of a package that have run only the configuration they chose; how many were cut."""
    from triton.runtime.autotuner import Autotuner

    cut = 0
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == package and module is not None:
            for kernel in vars(module).values():
                best = getattr(kernel, "best_config", None)
                if isinstance(kernel, Autotuner) and best is not None and len(kernel.configs) > 1:
                    kernel.configs, cut = [best], cut + 1
    return cut


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
