"""Reading and replacing activations at the hook points (`regard.nn.hooks.HookPoint`) of a model.

`named_hook_points` lists them. Hooks are active for one call or one `with hooked(...)` block, and are always removed
afterwards. The names and functions are as in TransformerLens: `phi.0.attn.hook_pattern`, and `fn(tensor, hook)` that
returns a replacement or None.

Shapes: B batch, T tokens.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import ArgumentError, flag, instance, refuse, require, shape, shown, suggestion, within
from ..nn.hooks import HookPoint

HookFunction = Callable[[Tensor, HookPoint], Tensor | None]
Filter = Callable[[str], bool]
_WRAPPERS = ("module.", "model.")


class Activations(dict[str, Tensor]):
    """Activations by hook point, in the order in which the points ran, detached from the graph."""

    def to(self, *args: Any, **kwargs: Any) -> "Activations":
        """Apply `Tensor.to` to all tensors, in a new cache."""
        return Activations({name: value.to(*args, **kwargs) for name, value in self.items()})

    def __missing__(self, name: str) -> Tensor:
        raise ArgumentError(f"Activations: there is no activation {name!r}.{suggestion(name, list(self))}")


def named_hook_points(model: nn.Module) -> dict[str, HookPoint]:
    """Return the hook points of a model by name, in the order of its modules.

    The name is the point's label, or else its path in the model, without the prefix `model.` of causal language models
    and without the wrappers of torch.compile and DistributedDataParallel.

    Raises:
        ArgumentError: two points of the model have the same name.
    """
    instance("named_hook_points", "model", model, nn.Module, "a torch.nn.Module")
    points: dict[str, HookPoint] = {}
    for path, module in model.named_modules():
        if not isinstance(module, HookPoint):
            continue
        path = path.replace("_orig_mod.", "")
        name = module.label if module.label is not None else reduce(str.removeprefix, _WRAPPERS, path)
        if name in points:
            raise ArgumentError(f"named_hook_points: two hook points of {_kind(model)} are named {name!r}.")
        points[name] = module
    return points


def run_with_hooks(
    model: nn.Module, input_ids: Tensor, hooks: Iterable[tuple[str | Filter, HookFunction]] = (), **kwargs: Any
) -> Any:
    """Run `model(input_ids=..., use_cache=False, **kwargs)` with hooks, and return its output.

    Args:
        model: a model with hook points, in its current mode; gradients flow as usual.
        input_ids: int [B, T].
        hooks: pairs (name, fn) or (filter of names, fn). `fn(tensor, hook)` is called with the activation and the
            `HookPoint`, and may return a replacement of the same shape. Several hooks at one point are called in the
            given order, each with the result of the one before.
        kwargs: further arguments of the model.

    Raises:
        ArgumentError: the model has no hook points, an unknown name, a replacement of another shape, or a named point
            that did not run.
    """
    with hooked(model, hooks, call="run_with_hooks"):
        return within("run_with_hooks", None, model, input_ids=input_ids, **{"use_cache": False, **kwargs})


def run_with_cache(
    model: nn.Module,
    input_ids: Tensor,
    names: str | Sequence[str] | Filter | None = None,
    hooks: Iterable[tuple[str | Filter, HookFunction]] = (),
    **kwargs: Any,
) -> tuple[Any, Activations]:
    """Run a forward pass and keep the activations at hook points.

    Args:
        model, input_ids, kwargs: as in `run_with_hooks`.
        names: points to keep: a name, several, a filter of names, or None for all. Attention weights are computed by
            the dense reference in O(T^2) memory for every layer and head, so name only what is needed.
        hooks: as in `run_with_hooks`; activations are kept after these.

    Returns:
        (the model's output, the detached activations). Of a point that runs several times, the last is kept.

    Raises:
        ArgumentError: as `run_with_hooks`.
    """
    call, kept = "run_with_cache", Activations()

    def keep(name: str) -> HookFunction:
        return lambda tensor, hook: kept.__setitem__(name, tensor.detach())

    points = _points(model, call)
    by_filter = names is None or callable(names)
    chosen = [*points] if names is None else [names] if callable(names) or isinstance(names, str) else names
    if not isinstance(chosen, (list, tuple, set, frozenset)):
        raise refuse(call, "names", names, "a name, several, a filter of names, or None")
    wanted = [name for which in chosen for name in within(call, "names", _names, which, points, call)]
    listeners = [(name, keep(name)) for name in wanted]
    with hooked(model, hooks, call=call), hooked(model, listeners, call=call, required=not by_filter):
        output = within(call, None, model, input_ids=input_ids, **{"use_cache": False, **kwargs})
    return output, kept


@contextmanager
def hooked(
    model: nn.Module, hooks: Iterable[tuple[str | Filter, HookFunction]], *, call: str = "hooked", required: bool = True
) -> Iterator[None]:
    """Activate hooks for every pass in this block, `generate` included. A compiled model runs uncompiled in it.

    Args:
        model, hooks: as in `run_with_hooks`.
        call: for error messages.
        required: whether every hook that was given by name must be called in the block.

    Raises:
        ArgumentError: as `run_with_hooks`.
    """
    points, called = _points(model, call), dict[str, bool]()
    flag(call, "required", required)
    with ExitStack() as active:
        for which, function in _pairs(call, hooks):
            for name in within(call, "hooks", _names, which, points, call):
                called.setdefault(name, callable(which))
                active.enter_context(points[name].register_forward_hook(_listener(name, function, called, call)))
        compiled = any(getattr(m, "_compiled_call_impl", None) or hasattr(m, "_orig_mod") for m in model.modules())
        if compiled:  # a compiled graph would not call hooks that were added later
            active.enter_context(torch.compiler.set_stance("force_eager"))
        yield
    unused = next((name for name, done in called.items() if not done), None)
    require(not required or unused is None, call, f"hooks: {unused} did not run, so its hook was never called.")


def _points(model: nn.Module, call: str) -> dict[str, HookPoint]:
    points = within(call, "model", named_hook_points, model)
    require(bool(points), call, f"{_kind(model)} has no hook points; models of regard do, such as ICLMForCausalLM.")
    return points


def _pairs(call: str, hooks: Any) -> list[tuple[str | Filter, HookFunction]]:
    expected = "pairs (name or filter of names, function)"
    if not isinstance(hooks, Iterable) or isinstance(hooks, (str, bytes, Tensor)):
        raise refuse(call, "hooks", hooks, expected)
    pairs = list(hooks)
    for pair in pairs:
        valid = isinstance(pair, (tuple, list)) and len(pair) == 2 and callable(pair[1])
        if not valid or not (isinstance(pair[0], str) or callable(pair[0])):
            raise refuse(call, "hooks", pair, expected)
    return pairs


def _names(which: str | Filter, points: dict[str, HookPoint], call: str) -> list[str]:
    if callable(which):
        return [name for name in points if which(name)]
    if not isinstance(which, str) or which not in points:
        raise ArgumentError(f"{call}: no hook point is named {shown(which)}.{suggestion(shown(which), list(points))}")
    return [which]


def _listener(name: str, function: HookFunction, called: dict[str, bool], call: str) -> Callable[..., Tensor | None]:
    def listen(point: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        called[name] = True
        assert isinstance(point, HookPoint)
        replaced = function(output, point)
        if replaced is None:
            return None
        if not isinstance(replaced, Tensor) or replaced.shape != output.shape:
            got = shape(replaced) if isinstance(replaced, Tensor) else type(replaced).__name__
            raise ArgumentError(f"{call}: the hook at {name} returned {got}, expected None or {shape(output)}.")
        return replaced

    return listen


def _kind(model: nn.Module) -> str:
    return type(getattr(model, "_orig_mod", model)).__name__
