"""A step with numbers that are not finite: what is kept of it, and how to run it again."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...checks import ArgumentError
from ..device import gathered
from .files import regular_size
from .saved_model import read_model

NON_FINITE = "non-finite"
"""The folder inside a run folder."""
BATCH = "batch.safetensors"


def keep(folder: Path, model: Any, inputs: dict[str, Any], weights: dict[str, Tensor] | None = None) -> str:
    """Save the weights and the batch of a step; return a clause for the error, empty if the disk does not take them."""
    batch = {name: x.detach().cpu().contiguous() for name, x in inputs.items() if isinstance(x, Tensor)}
    try:
        model.save_pretrained(folder, state_dict=weights)
        save_file(batch, folder / BATCH)
    except Exception:  # of many kinds; the error that is being reported matters more
        return ""
    return f"regard.training.rerun({str(folder)!r}) runs the step again; "


def rerun(folder: str | Path) -> str | None:
    """Run a step again that ended a run, and return the first tensor that is not finite.

    Args:
        folder: `non-finite` inside the run folder. It holds the weights before the step as a model that
            `from_pretrained` reads, and the batch in `batch.safetensors`.

    Returns:
        The name of a parameter, of the output of a layer, or of a gradient; None if all numbers are finite here.

    Raises:
        ArgumentError: files that are not there or cannot be read, or weights that are not finite, which it names.

    What is in memories with fast weights, which earlier steps wrote, is not part of the weights.
    """
    path = Path(folder)
    model = read_model(path, call="rerun").train()
    try:
        regular_size(path / BATCH)
        inputs: dict[str, Any] = load_file(path / BATCH)
    except (OSError, SafetensorError) as error:
        raise ArgumentError(f"rerun: {path / BATCH} cannot be read: {error}.") from None
    loss = model(**inputs).loss
    if not torch.isfinite(loss):
        return first_non_finite(model, inputs)
    loss.backward()
    return non_finite_gradient(model)


def non_finite_gradient(model: nn.Module) -> str | None:
    """Return which gradient, or the norm of all of them, is not finite; None if none."""
    named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    if torch.isfinite(gathered(nn.utils.get_total_norm([grad for _, grad in named]))):
        return None
    bad = next((name for name, grad in named if not torch.isfinite(gathered(grad)).all()), None)
    return f"the gradient of {bad}" if bad else "the norm of all gradients (each is finite)"


@torch.no_grad()
def first_non_finite(model: nn.Module, inputs: dict[str, Any]) -> str:
    """Return the first parameter, or else the first module output in one more pass, that holds NaN or infinity."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(gathered(parameter)).all():
            return f"parameter {name}"
    outputs: list[str] = []

    def watch(name: str, module: nn.Module, args: Any, output: Any) -> None:
        tensors = (x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point())
        if not outputs and not all(torch.isfinite(x).all() for x in tensors):
            outputs.append(f"output of {name or 'the model'} ({type(module).__name__})")

    with ExitStack() as hooks:
        for name, module in model.named_modules():  # a hook for all modules would see outputs before other hooks do
            hooks.enter_context(module.register_forward_hook(partial(watch, name)))
        model(**inputs)
    return outputs[0] if outputs else "the loss itself (every output of a module is finite)"
