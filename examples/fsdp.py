"""Shard a model over several processes (FSDP2), and save and load a sharded checkpoint.

    torchrun --nproc-per-node 2 examples/fsdp.py FOLDER

Every process holds a part of each weight, gradient and optimiser state, and reads its own part of the batch. The
checkpoint holds the parts too, and is loaded by any number of processes, here by each one alone. On GPUs choose the
mesh "cuda" and the backend "nccl".
"""

from __future__ import annotations

import sys

import torch
from torch import distributed
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from regard.models import HybridConfig, HybridForCausalLM

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def make_model() -> HybridForCausalLM:
    """Return the same model in every process."""
    torch.manual_seed(0)
    return HybridForCausalLM(HybridConfig(**SIZES, mixers=["biweight", "elu"], initializer_range=0.1))


def train(model: HybridForCausalLM, tokens: torch.Tensor, steps: int = 3) -> list[float]:
    """Train on one batch; return the losses of this process's part."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(folder: str) -> None:
    """Compare sharded processes with one process that has the whole batch."""
    distributed.init_process_group("gloo")
    rank, count = distributed.get_rank(), distributed.get_world_size()
    tokens = torch.randint(64, (2 * count, 16), generator=torch.Generator().manual_seed(1))
    alone = make_model()
    expected = train(alone, tokens)

    mesh, model = init_device_mesh("cpu", (count,)), make_model()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses = torch.tensor(train(model, tokens[2 * rank : 2 * rank + 2]))
    distributed.all_reduce(losses)
    torch.testing.assert_close(losses / count, torch.tensor(expected), rtol=0, atol=1e-5)

    checkpoint.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    loaded = make_model()
    weights = {"model": loaded.state_dict()}
    checkpoint.load(weights, checkpoint_id=folder)  # fills the tensors where they are
    torch.testing.assert_close(weights["model"], alone.state_dict(), rtol=0, atol=1e-4)
    print(f"process {rank}: losses and the loaded weights equal those of one process")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
