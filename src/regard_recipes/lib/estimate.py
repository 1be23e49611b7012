"""Estimate the size of a run without training: parameters, tokens, operations and memory of each model.

`regard reproduce NAME --estimate --size paper` makes every model on torch's meta device, which stores no weights.
"""

from typing import Any

import torch
from torch import nn

from regard.checks import ArgumentError
from regard.nn import FastWeightProductKeyMemory, ProductKeyMemory

from .recipe import Recipe, check_shared
from .trained import TrainedRecipe

STATE_BYTES = 16
"""Bytes of a parameter in training: weight, gradient and the two averages of AdamW, float32."""
RATE = 1e14
"""Operations per second that hours are given for."""
NOTE = (
    f"Operations are 6 for each parameter and token, without attention scores, embeddings that are only read and slots "
    f"of memories. Hours are those operations at {RATE / 1e12:.0f} TFLOP/s; nothing was measured. Memory is "
    f"{STATE_BYTES} bytes a parameter for weights, gradients and AdamW; activations come on top."
)


def estimate(made: Recipe) -> Any:
    """Return a table with a row for each model, and one for the whole run."""
    from regard.inspect.tables import Table

    if not isinstance(made, TrainedRecipe):
        raise ArgumentError(f"{made.call()}: --estimate: the recipe does not train models by steps, so run it.")
    check_shared(made)
    runs: dict[str, int] = {}
    sizes: dict[str, tuple[int, float, float]] = {}
    for cell in made.cells():
        name = ", ".join("-" if cell[column] is None else str(cell[column]) for column in made.per)
        runs[name] = runs.get(name, 0) + made.seeds_of(cell)
        if name not in sizes:
            with torch.device("meta"):
                model, length = made.untrained(cell)
            parameters = sum(weight.numel() for weight in model.parameters())
            sizes[name] = (parameters, float(length), 6.0 * used(model) * length)
    rows = [row(name, runs[name], *size, runs[name] * size[2]) for name, size in sizes.items()]
    tokens, operations = (sum(runs[name] * size[i] for name, size in sizes.items()) for i in (1, 2))
    largest = max(size[0] for size in sizes.values())
    rows.append(row("all runs; the largest model", sum(runs.values()), largest, tokens, operations, operations))
    numbers = ("runs", "parameters", "tokens of a run", "operations of a run", "hours of all runs", "memory")
    return Table((", ".join(made.per), *numbers), tuple(rows), NOTE)


def row(name: str, runs: int, parameters: int, tokens: float, operations: float, of_all: float) -> tuple[str, ...]:
    """Return a row of the table; `of_all` are the operations that hours are given for."""
    hours = of_all / RATE / 3600
    shown = f"{hours:,.{0 if hours >= 10 else 2}f}"
    memory = f"{STATE_BYTES * parameters / 2**30:.2f} GiB"
    return name, f"{runs}", f"{parameters:,}", f"{tokens:.2e}", f"{operations:.2e}", shown, memory


def used(model: Any) -> int:
    """Return the number of parameters that multiply every token: without embeddings that are only read, and without the
    slots of product-key memories."""
    multiplied = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    read = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)} - multiplied
    memories = (ProductKeyMemory, FastWeightProductKeyMemory)
    read |= {id(module.values) for module in model.modules() if isinstance(module, memories)}
    return sum(weight.numel() for weight in model.parameters() if id(weight) not in read)
