"""The models of the recipe in-context-regression and their training; transformers is slow to import."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import PreTrainedConfig, PreTrainedModel

import regard
from regard.nn import Attention
from regard.tasks import InContextRegression
from regard.training.quiet import quiet_transformers
from regard.training.trainer import SealedTrainer, quiet_arguments


class MesaLayer(nn.Module):
    """Mesa attention with keys of length one and a learned ridge."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.project, self.out = heads, nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.ridge = nn.Parameter(torch.zeros(heads))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        q, k, v = self.project(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        ridge = nn.functional.softplus(self.ridge) + 0.05
        attended = regard.mesa_attention(normalize(q, dim=-1), normalize(k, dim=-1), v, ridge=ridge)[0]
        return (self.out(attended.transpose(1, 2).flatten(2)),)


class Regressor(PreTrainedModel):
    """Two layers between two linear maps: attention with the options given, or without options Mesa."""

    main_input_name = "inputs"

    def __init__(self, dim: int, width: int, queries: int, attention: Mapping[str, Any] | None, heads: int = 2) -> None:
        super().__init__(PreTrainedConfig())
        self.queries, self.embed, self.read = queries, nn.Linear(2 * dim, width), nn.Linear(width, dim)
        make = lambda: MesaLayer(width, heads) if attention is None else Attention(width, heads, **attention)  # noqa: E731
        self.layers = nn.ModuleList(make() for _ in range(2))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))

    def forward(self, inputs: Tensor, targets: Tensor, use_cache: bool = False) -> dict[str, Tensor]:
        x = self.embed(inputs)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))[0]
        prediction = self.read(x[:, -self.queries :])
        return {"loss": (prediction - targets).square().mean(), "prediction": prediction}


def train(model: Regressor, task: InContextRegression, *, steps: int, batch: int, rate: float, seed: int) -> float:
    """Train a model; return the mean loss of the last tenth of the steps."""

    def prompts(places: list[int]) -> dict[str, Tensor]:
        drawn = task.examples(seed, range(places[0] * batch, (places[0] + 1) * batch))
        return {"inputs": drawn.inputs, "targets": drawn.targets}

    order: Any = torch.randperm(steps, generator=torch.Generator().manual_seed(seed)).tolist()
    with tempfile.TemporaryDirectory() as folder, quiet_transformers():
        arguments = quiet_arguments(
            Path(folder), model.device, max_steps=steps, per_device_train_batch_size=1, learning_rate=rate,
            weight_decay=0.1, lr_scheduler_type="cosine", warmup_steps=max(steps // 20, 1), seed=seed,
            logging_strategy="steps", logging_steps=max(steps // 10, 1),
        )  # fmt: skip
        trainer = SealedTrainer(keep=1, model=model, args=arguments, train_dataset=order, data_collator=prompts)
        trainer.train()
    return float([entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1])
