"""Muon for the matrices of hidden layers, AdamW for everything else, as one optimiser."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from ..nn.attention.ridge import RidgeProjection


class MuonAdamW(Optimizer):
    """Muon and AdamW as one optimiser. Each parameter group belongs to one of them; either may have no group.

    Muon (Jordan et al., 2024) makes the update of a matrix orthogonal. It is for matrices between hidden states;
    embeddings, heads, norms and tables are AdamW's. Updates of Muon are scaled so that AdamW's learning rates fit.
    """

    def __init__(self, muon: list[dict[str, Any]], adamw: list[dict[str, Any]], lr: float) -> None:
        super().__init__([*muon, *adamw], {"lr": lr})
        parts: list[Optimizer] = []
        if muon:
            parts.append(Muon(muon, lr=lr, adjust_lr_fn="match_rms_adamw"))
        if adamw:
            parts.append(AdamW(adamw, lr=lr))
        self.parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]

    @classmethod
    def of(cls, groups: Iterable[dict[str, Any]], lr: float, model: nn.Module) -> "MuonAdamW":
        """Return the optimiser of a model's groups of parameters, which are split by `hidden_matrices`."""
        muon, adamw, matrices = [], [], hidden_matrices(model)
        for group in groups:
            rest = {name: value for name, value in group.items() if name != "params"}
            parameters = list(group["params"])
            hidden = [p for p in parameters if id(p) in matrices and not rest.get("fixed_rate")]
            others = [p for p in parameters if id(p) not in {id(each) for each in hidden}]
            muon += [{**rest, "params": hidden}] if hidden else []
            adamw += [{**rest, "params": others}] if others else []
        return cls(muon, adamw, lr)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for part in self.parts:
            with FloatProducts():
                part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


class FloatProducts(TorchDispatchMode):
    """Multiply bfloat16 matrices on a CPU in float32: one without bfloat16 instructions takes tens of times as long."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        if func in products and args[0].dtype == torch.bfloat16 and args[0].device.type == "cpu":
            return func(*(x.float() for x in args), **(kwargs or {})).bfloat16()
        return func(*args, **(kwargs or {}))


def hidden_matrices(model: nn.Module) -> set[int]:
    """Return the `id` of every matrix between hidden states: weights of linear layers, the output head left out."""
    named = ("get_output_embeddings", "get_input_embeddings")
    heads = [module for name in named if (module := getattr(model, name, lambda: None)()) is not None]
    outer = {id(parameter) for head in heads for parameter in head.parameters()}
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear | RidgeProjection)]
    return {id(weight) for weight in weights if id(weight) not in outer and min(weight.shape) > 1}
