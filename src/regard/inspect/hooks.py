"""Listening at the named places of a model, and putting other tensors in the place of what passes there.

The places are the `HookPoint` modules (`regard.nn.hooks`) of a model; `named_hook_points` lists them. Hooks hold for
one call, or for one `with hooked(...)` block, and are gone afterwards, also after an exception. Names and manners are
those that users of TransformerLens know: `phi.0.attn.hook_pattern`, and functions `fn(tensor, hook)` that return a
replacement or None.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import ArgumentError, flag, instance, refuse, shape, shown, suggestion, within
from ..nn.hooks import HookPoint

HookFunction = Callable[[Tensor, HookPoint], Tensor | None]
Filter = Callable[[str], bool]
_WRAPPERS = ("_orig_mod.", "module.", "model.")


class Activations(dict[str, Tensor]):
    """Name of a hook point to what passed there, in the order in which it ran. Detached from the graph."""

    def to(self, *args: Any, **kwargs: Any) -> Activations:
        """All tensors by `Tensor.to`, in a new cache."""
        return Activations({name: value.to(*args, **kwargs) for name, value in self.items()})

    def __missing__(self, name: str) -> Tensor:
        raise ArgumentError(f"Activations: nothing was kept under {name!r}.{suggestion(name, list(self))}")


def named_hook_points(model: nn.Module) -> dict[str, HookPoint]:
    """Name to hook point, in the order of the model's modules; empty for a model without any.

    A point goes by its label, else by its path in the model, without the `model.` under which a causal language model
    holds its decoder and without the wrappers of torch.compile and DistributedDataParallel.

    Raises:
        ArgumentError: two points of the model have the same name.
    """
    instance("named_hook_points", "model", model, nn.Module, "a torch.nn.Module")
    found: dict[str, HookPoint] = {}
    for path, module in model.named_modules():
        if not isinstance(module, HookPoint):
            continue
        name = module.label if module.label is not None else _plain(path)
        if name in found:
            raise ArgumentError(f"named_hook_points: two hook points of {_kind(model)} are called {name!r}.")
        found[name] = module
    return found


def run_with_hooks(
    model: nn.Module, input_ids: Tensor, hooks: Iterable[tuple[str | Filter, HookFunction]] = (), **kwargs: Any
) -> Any:
    """One forward pass under hooks: `model(input_ids=..., use_cache=False, **kwargs)`.

    Args:
        model: in whatever mode it is (call `model.eval()` first to look at a trained model); gradients flow as usual.
        input_ids: int [B, T].
        hooks: pairs (name, fn), or (filter of names, fn). `fn(tensor, hook)` is called with what passes and the
            `HookPoint`, and may return a tensor of the same shape that takes its place. Several at one place are called
            in the order given, each with what the one before left.
        kwargs: further arguments of the model.

    Returns:
        The model's output.

    Raises:
        ArgumentError: the model has no hook points, a name it does not have (the nearest is suggested), a replacement
            of another shape, or a named point that did not run, so that the hook was never asked.
    """
    call = "run_with_hooks"
    with hooked(model, hooks, call=call):
        return within(call, None, model, input_ids=input_ids, **{"use_cache": False, **kwargs})


def run_with_cache(
    model: nn.Module,
    input_ids: Tensor,
    names: str | Sequence[str] | Filter | None = None,
    hooks: Iterable[tuple[str | Filter, HookFunction]] = (),
    **kwargs: Any,
) -> tuple[Any, Activations]:
    """One forward pass that keeps what passes at hook points.

    Args:
        model, input_ids, kwargs: as in `run_with_hooks`.
        names: which to keep: a name, several, a filter of names, or None for all. Whoever listens to the weights of
            attention has them made in full, in O(T^2) memory for every layer and head, by the dense reference: name
            what is needed.
        hooks: as in `run_with_hooks`; what is kept is what these left.

    Returns:
        (the model's output, the cache). The cache is detached, a point that runs more than once keeps its last.

    Raises:
        ArgumentError: as `run_with_hooks`.
    """
    kept = Activations()
    call = "run_with_cache"

    def keep(name: str) -> HookFunction:
        return lambda tensor, hook: kept.__setitem__(name, tensor.detach())

    points = _points(model, call)
    chosen = [names] if isinstance(names, str) else names
    if chosen is None or callable(chosen):
        wanted = [name for name in points if chosen is None or chosen(name)]
        required = False
    else:
        if not isinstance(chosen, (list, tuple, set, frozenset)):
            raise refuse(call, "names", names, "a name, several, a filter of names, or None")
        wanted, required = [within(call, "names", _names, name, points, call)[0] for name in chosen], True
    listeners = [(name, keep(name)) for name in wanted]
    with hooked(model, hooks, call=call), hooked(model, listeners, call=call, required=required):
        output = within(call, None, model, input_ids=input_ids, **{"use_cache": False, **kwargs})
    return output, kept


@contextmanager
def hooked(
    model: nn.Module,
    hooks: Iterable[tuple[str | Filter, HookFunction]],
    *,
    call: str = "hooked",
    required: bool = True,
) -> Iterator[None]:
    """Hooks for every pass in this block, `generate` included; a compiled model runs uncompiled in it.

    Args:
        model, hooks: as in `run_with_hooks`.
        call: for error messages.
        required: whether a hook that was given by name must have been asked at least once when the block ends.

    Raises:
        ArgumentError: as `run_with_hooks`.
    """
    points = _points(model, call)
    flag(call, "required", required)
    hooks = _pairs(call, hooks)
    asked: dict[str, bool] = {}
    handles = []
    try:
        for which, function in hooks:
            for name in within(call, "hooks", _names, which, points, call):
                asked.setdefault(name, callable(which))
                handles.append(points[name].register_forward_hook(_listener(name, function, asked, call)))
        with _uncompiled(model):
            yield
    finally:
        for handle in handles:
            handle.remove()
    silent = [name for name, heard in asked.items() if not heard]
    if silent and required:
        raise ArgumentError(f"{call}: hooks: nothing passed at {silent[0]}, so that its hook was never asked.")


def _points(model: nn.Module, call: str) -> dict[str, HookPoint]:
    points = within(call, "model", named_hook_points, model)
    if not points:
        raise ArgumentError(f"{call}: {_kind(model)} has no hook points; ICLMForCausalLM is a model that has.")
    return points


def _pairs(call: str, hooks: Any) -> list[tuple[str | Filter, HookFunction]]:
    """Return the pairs (name or filter, function) that were given."""
    expected = "pairs (name or filter of names, function)"
    if not isinstance(hooks, Iterable) or isinstance(hooks, (str, bytes, Tensor)):
        raise refuse(call, "hooks", hooks, expected)
    pairs = list(hooks)
    for pair in pairs:
        known = isinstance(pair, (tuple, list)) and len(pair) == 2 and callable(pair[1])
        if not known or not (isinstance(pair[0], str) or callable(pair[0])):
            raise refuse(call, "hooks", pair, expected)
    return pairs


def _names(which: str | Filter, points: dict[str, HookPoint], call: str) -> list[str]:
    """The points that are meant."""
    if callable(which):
        return [name for name in points if which(name)]
    if not isinstance(which, str) or which not in points:
        raise ArgumentError(f"{call}: no hook point is called {shown(which)}.{suggestion(shown(which), list(points))}")
    return [which]


def _listener(name: str, function: HookFunction, asked: dict[str, bool], call: str) -> Callable[..., Tensor | None]:
    """`function` as a forward hook of torch that says so when it was asked."""

    def listen(point: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        asked[name] = True
        assert isinstance(point, HookPoint)
        replaced = function(output, point)
        if replaced is None:
            return None
        if not isinstance(replaced, Tensor) or replaced.shape != output.shape:
            came = shape(replaced) if isinstance(replaced, Tensor) else type(replaced).__name__
            raise ArgumentError(f"{call}: the hook at {name} returned {came}, expected None or {shape(output)}.")
        return replaced

    return listen


def _plain(path: str) -> str:
    for wrapper in _WRAPPERS:
        path = path.removeprefix(wrapper)
    return path


def _kind(model: nn.Module) -> str:
    return type(getattr(model, "_orig_mod", model)).__name__


def _uncompiled(model: nn.Module) -> AbstractContextManager[Any]:
    """Graphs that were compiled before the hooks came would not call them."""
    compiled = any(getattr(m, "_compiled_call_impl", None) or hasattr(m, "_orig_mod") for m in model.modules())
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()
