"""Make `fast_weight_heads.npz`: the program of the fast-weight paper's authors with four heads.

    python make_fast_weight_heads.py FWPKM_PY

FWPKM_PY is `src/models/fwpkm/fwpkm.py` of github.com/LikeACloud7/fast-weight-product-key-memory (the numbers were made
at b1c8e23, in which the file is that of f41c5c0). Nothing of it is kept here. Two things are put in its way: its Triton
embedding bag, for which a gather does the same on a CPU, and the parameters themselves, for which copies are given,
since it overwrites them before autograd has used them.
"""

import importlib.util
import sys
import types
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch

HEADS, SUB_KEYS, WIDTH, VALUE, TOP_K, CHUNK, BATCH, LENGTH = 4, 12, 10, 6, 4, 16, 2, 45
CASES = {"default": {}, "addressing": {"addr_loss_weight": 10.0}, "dot": {"qk_score_type": "dot_product"}}


def gathered(indices: torch.Tensor, weight: torch.Tensor, per_sample_weights: torch.Tensor) -> torch.Tensor:
    """Return sums of rows of `weight` in proportion to `per_sample_weights`, both [bags, entries]."""
    return (weight[indices] * per_sample_weights[..., None]).sum(1)


def program(path: Path) -> types.ModuleType:
    """Load the program's module as one of a package whose embedding bag is a gather."""
    package = types.ModuleType("program")
    package.__path__ = []  # type: ignore[attr-defined]
    bag = types.ModuleType("program.xformer_embeddingbag_grad_wrapper")
    bag.xformers_embedding_bag = gathered  # type: ignore[attr-defined]
    sys.modules.update({package.__name__: package, bag.__name__: bag})
    spec = importlib.util.spec_from_file_location("program.fwpkm", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(module: types.ModuleType, options: dict[str, object], seed: int) -> dict[str, torch.Tensor]:
    """Read and write three chunks (the last of 13 tokens), and take gradients of a weighted sum of what was read."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    memory = module.FastWeightProductKeyMemory(
        mem_k_dim=WIDTH, mem_v_dim=VALUE, mem_heads=HEADS, mem_topk=TOP_K, mem_n_subkeys=SUB_KEYS, **options
    ).train()
    with torch.no_grad():
        memory.keys.copy_(normal(*memory.keys.shape))
        memory.values.copy_(normal(*memory.values.shape))
    first = {"keys": memory.keys.detach().view(HEADS, 2, SUB_KEYS, WIDTH // 2).clone()}
    first["values"] = memory.values.detach().clone()
    memory.get_fw_named_params = lambda: OrderedDict((n, p.clone()) for n, p in memory.named_parameters())
    given = {
        "query": normal(BATCH, LENGTH, HEADS, WIDTH).requires_grad_(),
        "value": normal(BATCH, LENGTH, VALUE).requires_grad_(),
        "gate": torch.rand(BATCH, LENGTH, generator=generator).requires_grad_(),
    }
    output = memory(given["query"].flatten(2), given["value"], given["gate"], CHUNK)["output"]
    probe = normal(*output.shape)
    leaves = {**given, "keys": memory.keys, "values": memory.values}
    gradients = torch.autograd.grad((output * probe).sum(), list(leaves.values()))
    found = {f"grad_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    found["grad_keys"] = found["grad_keys"].view(first["keys"].shape)
    last = {"final_keys": memory.keys.view(first["keys"].shape), "final_values": memory.values}
    return {**given, **first, "output": output, "probe": probe, **found, **last}


if __name__ == "__main__":
    made = program(Path(sys.argv[1]))
    numbers = {
        f"{name}/{key}": value.detach().float().numpy()
        for seed, (name, options) in enumerate(CASES.items())
        for key, value in run(made, options, seed).items()
    }
    np.savez_compressed(Path(__file__).with_name("fast_weight_heads.npz"), **numbers)
