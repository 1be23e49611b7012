"""Check the arguments of an associative memory, and give tensors four axes."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ...checks import ArgumentError, floating, integers, refuse, require, shape, shown, token_mask
from .contents import Pairs


def four_axes(name: str, tensor: Tensor, call: str) -> Tensor:
    """Return a floating-point tensor [n, D], [H, n, D] or [B, H, n, D] with all four axes, after checking it."""
    floating(call, name, tensor)
    if tensor.dim() not in (2, 3, 4) or tensor.shape[-1] == 0:
        raise ArgumentError(f"{call}: {name} has shape {shape(tensor)}, expected [n, D], [H, n, D] or [B, H, n, D].")
    return tensor[(None,) * (4 - tensor.dim())]


def paired(keys: Tensor, values: Tensor | None, mask: Tensor | None, call: str) -> Pairs:
    """Return keys, values (None: the keys) and mask as `Pairs`, after checking that they fit each other."""
    key = four_axes("keys", keys, call)
    value = key if values is None or values is keys else four_axes("values", values, call)
    if key.shape[:3] != value.shape[:3] or key.dtype != value.dtype or key.device != value.device:
        given = f"keys {shape(key)} {key.dtype} {key.device} and values {shape(value)} {value.dtype} {value.device}"
        hint = "give them the same axes but the last, the same dtype and device"
        raise ArgumentError(f"{call}: {given} do not pair up; {hint}.")
    if isinstance(mask, Tensor) and mask.dim() == 1 and len(key) == 1:
        mask = mask[None]
    token_mask(call, "mask", mask, key.shape[0], key.shape[2], like=key, of="keys")
    return Pairs(key, value, None if mask is None else mask[:, None])


def one_way(call: str, given: Mapping[str, bool], able: tuple[str, ...], why: str) -> None:
    """Check that exactly one argument is given, and one that the store supports (`able`)."""
    ways = [name for name, there in given.items() if there]
    if len(ways) != 1:
        raise ArgumentError(f"{call}: got {', '.join(ways) or 'nothing'}; give one of {', '.join(able)}.")
    require(ways[0] in able, call, f"{ways[0]} does not apply: {why}; use {' or '.join(able)}.")


def places_of(call: str, indices: Any, held: int) -> list[int]:
    """Return `indices`, a sequence of integers or a tensor of them, as a list, checked to be among `held` pairs."""
    if isinstance(indices, Tensor):
        indices = integers(call, "indices", indices, "n").tolist()
    if not isinstance(indices, (list, tuple, range)):
        raise refuse(call, "indices", indices, "a sequence of whole numbers")
    for index in indices:
        if isinstance(index, bool) or not isinstance(index, int) or not -held <= index < held:
            hint = f"there are {held} pairs, numbered from 0"
            raise ArgumentError(f"{call}: indices: there is no pair {shown(index)}; {hint}.")
    return list(indices)


def transforming(call: str, fn: Any) -> Callable[[Tensor], Tensor]:
    """Return `fn` for floating-point tensors (other values are unchanged), checked to keep shape, dtype and device."""
    if not callable(fn):
        raise refuse(call, "fn", fn, "a function of a tensor")

    def changed(t: Tensor) -> Tensor:
        if not t.is_floating_point() or not t.numel():
            return t
        new = fn(t)
        if not isinstance(new, Tensor) or (new.shape, new.dtype, new.device) != (t.shape, t.dtype, t.device):
            raise ArgumentError(f"{call}: fn made {shown(new)} of {shown(t)}, expected the same shape and dtype.")
        return new

    return changed


def checked_queries(call: str, queries: Tensor, sizes: tuple[int, int] | None, held: Any, slots: Any) -> Tensor:
    """Return the queries with four axes, checked to fit D and Dv (`sizes`), short-term memory and learned slots."""
    query = four_axes("queries", queries, call)
    dims = [] if sizes is None else [("queries: D", query.shape[3], sizes[0])]
    require_fit(call, "queries", query, dims, held, slots, any_batch=held is not None and held.leading[0] == 1)
    return query


def require_fit(
    call: str, name: str, x: Tensor, dims: list[tuple[str, Any, Any]], held: Any, slots: Any, any_batch: bool = False
) -> None:
    """Check that x [B, H, n, D], called `name`, fits the memory, its slots and `dims`: (name, size, expected size)."""
    wanted, like = dims, slots if held is None else held
    if held is not None:
        batch, heads = held.leading
        wanted = [*dims, (f"{name}: B and H", tuple(x.shape[:2]), (x.shape[0] if any_batch else batch, heads))]
    elif slots is not None:
        wanted = [*dims, (f"{name}: heads", x.shape[1], slots.shape[0])]
    if like is not None:
        wanted = [*wanted, (f"{name}: dtype", x.dtype, like.dtype), (f"{name}: device", x.device, like.device)]
    for of, came, expected in wanted:
        if came != expected:
            hint = "; convert one with .to()" if of.endswith(("dtype", "device")) else ""
            raise ArgumentError(f"{call}: {of} is {came}, expected {expected}, that of the memory{hint}.")
