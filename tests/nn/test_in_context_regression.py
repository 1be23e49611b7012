"""In-context regression on non-stationary data, as in section 4 of Local Linear Attention (arXiv 2510.01450), tiny: two
layers of attention without feed-forward parts see pairs (x, y) of several segments, each with a linear map of its own
on a cone of its own, and answer queries."""

import math

import pytest
import torch
from torch import Tensor, nn

from regard.nn import Attention
from regard.tasks import InContextRegression

SIZES = {"dim": 3, "length": 64, "segment": 16, "queries": 16}


class Regressor(nn.Module):
    """Two layers of attention between two linear maps."""

    def __init__(self, width: int = 16, heads: int = 2, **options: str) -> None:
        super().__init__()
        self.queries = SIZES["queries"]
        self.embed = nn.Linear(2 * SIZES["dim"], width)
        self.layers = nn.ModuleList(Attention(width, heads, **options) for _ in range(2))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.read = nn.Linear(width, SIZES["dim"])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))[0]
        return self.read(x[:, -self.queries :])


def trained(seed: int, steps: int = 300, **options: str) -> tuple[Regressor, float, list[float]]:
    """(model, mean squared error on 1000 prompts without noise, the gradient's size at the ridges step by step)."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Regressor(**options)
    task, exact = (InContextRegression(**SIZES, noise=noise) for noise in (0.1, 0.0))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1e-2, total_steps=steps)
    felt = []
    for step in range(steps):
        prompts = task.examples(seed, range(32 * step, 32 * step + 32))
        optimiser.zero_grad()
        (model(prompts.inputs) - prompts.targets).square().mean().backward()
        felt += [
            float(p.grad.norm()) for name, p in model.named_parameters() if "ridge_proj" in name and p.grad is not None
        ]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    with torch.no_grad():
        prompts = exact.examples(1000 + seed, range(1000))
        return model, float(exact.error(model(prompts.inputs), prompts).mean()), felt


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_local_linear_attention_with_a_learned_ridge_beats_softmax(seed: int) -> None:
    _, softmax, none = trained(seed, spec="softmax", qk_norm="rms")
    model, linear, felt = trained(seed, spec="local-linear", ridge="learned", qk_norm="rms")
    assert none == []
    assert len(felt) == 1200  # a weight and a bias in two layers, 300 steps
    assert min(felt) > 0
    for layer in model.layers:
        assert layer.ridge_proj.weight.abs().max() > 0.05  # from 0
        assert (layer.ridge_proj.bias - math.log(0.099 / 0.901)).abs().max() > 0.05  # from where the ridge is 0.1
    assert linear < 0.8 * softmax, (linear, softmax)
    assert softmax < 0.5  # which has learned too: answering 0 costs 1
