"""In-context regression on non-stationary data, as in section 4 of Local Linear Attention (arXiv 2510.01450), tiny: two
layers of attention without feed-forward parts see pairs (x, y) of several segments, each with a linear map of its own
on a cone of its own, and answer queries. All randomness from generators given here."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from regard.nn import Attention


@dataclass(frozen=True)
class Task:
    """`segments` = 2^m cones and maps over the `length` pairs of a prompt, in random order, then `queries`."""

    dim: int = 3
    length: int = 64
    segments: int = 4
    queries: int = 16

    def prompts(self, batch: int, noise: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """(tokens [batch, length + queries, 2 dim], answers [batch, queries, dim]).

        Appendix F.1 with m = log2(segments): the first m coordinates of a Gaussian x get the signs of the segment's
        bits; y = A x + noise with A ~ N(0, 1 / dim). A query's y is given as 0.
        """
        bits = int(math.log2(self.segments))
        signs = torch.tensor([[1.0 - 2.0 * (c >> b & 1) for b in range(bits)] for c in range(self.segments)])
        maps = torch.randn(batch, self.segments, self.dim, self.dim, generator=generator) / math.sqrt(self.dim)

        def pairs(segment: Tensor) -> tuple[Tensor, Tensor]:
            x = torch.randn(*segment.shape, self.dim, generator=generator)
            x = torch.cat((x[..., :bits].abs() * signs[segment], x[..., bits:]), -1)
            return x, (maps[torch.arange(batch)[:, None], segment] @ x[..., None])[..., 0]

        order = torch.stack([torch.randperm(self.length, generator=generator) for _ in range(batch)])
        x, y = pairs(order // (self.length // self.segments))
        y = y + noise * torch.randn(y.shape, generator=generator)
        asked, answers = pairs(torch.randint(self.segments, (batch, self.queries), generator=generator))
        tokens = torch.cat((torch.cat((x, y), -1), torch.cat((asked, torch.zeros_like(answers)), -1)), 1)
        return tokens, answers


class Regressor(nn.Module):
    """Two layers of attention between two linear maps."""

    def __init__(self, task: Task, width: int = 16, heads: int = 2, **options: str) -> None:
        super().__init__()
        self.queries = task.queries
        self.embed = nn.Linear(2 * task.dim, width)
        self.layers = nn.ModuleList(Attention(width, heads, **options) for _ in range(2))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.read = nn.Linear(width, task.dim)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))[0]
        return self.read(x[:, -self.queries :])


def trained(task: Task, seed: int, steps: int = 300, **options: str) -> tuple[Regressor, float, list[float]]:
    """(model, mean squared error on 1000 prompts without noise, the gradient's size at the ridges step by step)."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Regressor(task, **options)
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1e-2, total_steps=steps)
    felt = []
    for _ in range(steps):
        tokens, answers = task.prompts(32, 0.1, generator)
        optimiser.zero_grad()
        (model(tokens) - answers).square().mean().backward()
        felt += [
            float(p.grad.norm()) for name, p in model.named_parameters() if "ridge_proj" in name and p.grad is not None
        ]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    with torch.no_grad():
        tokens, answers = task.prompts(1000, 0.0, torch.Generator().manual_seed(1000 + seed))
        return model, float((model(tokens) - answers).square().mean()), felt


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_local_linear_attention_with_a_learned_ridge_beats_softmax(seed: int) -> None:
    task = Task()
    _, softmax, none = trained(task, seed, spec="softmax", qk_norm="rms")
    model, linear, felt = trained(task, seed, spec="local-linear", ridge="learned", qk_norm="rms")
    assert none == []
    assert len(felt) == 1200  # a weight and a bias in two layers, 300 steps
    assert min(felt) > 0
    for layer in model.layers:
        assert layer.ridge_proj.weight.abs().max() > 0.05  # from 0
        assert (layer.ridge_proj.bias - math.log(0.099 / 0.901)).abs().max() > 0.05  # from where the ridge is 0.1
    assert linear < 0.8 * softmax, (linear, softmax)
    assert softmax < 0.5  # which has learned too: answering 0 costs 1
