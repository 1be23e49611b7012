"""The three memories that are written in chunks, small and called in one way: `slots` is `fast_weight_memory`,
`network` is `fast_weight_mlp`, `heads` is `large_chunk_ttt`, and `KIND+shared` one memory for all rows of the batch."""

from typing import Any

import torch
from dense_fast_weights import numbers as normal
from torch import Tensor

from regard.memory import fast_weight_mlp, fast_weights, large_chunk
from regard.memory.fast_weights import WriteRule

Fields = dict[str, Tensor]
CHUNK = 5
SLOTS = {"rule": WriteRule(address_weight=0.3), "top_k": 4}
KINDS: dict[str, dict[str, Any]] = {
    "slots": SLOTS,
    "slots-dense": {**SLOTS, "impl": "reference"},
    "slots-paper": {**SLOTS, "rule": WriteRule("paper", learning_rate=0.5, address_weight=0.3)},
    "slots-program": {**SLOTS, "rule": WriteRule("reference", learning_rate=0.5, address_weight=0.3)},
    "network": {"learning_rate": 0.1},
    **{f"heads-{name}": {"optimizer": name} for name in large_chunk.OPTIMIZERS},
}
FUNCTIONS = {
    "slots": (fast_weights.fast_weight_memory, fast_weights.flush),
    "network": (fast_weight_mlp.fast_weight_mlp, fast_weight_mlp.flush),
    "heads": (large_chunk.large_chunk_ttt, large_chunk.flush),
}
SHARED = [f"{kind}+shared" for kind in KINDS if "heads" not in kind]


def family(kind: str) -> str:
    return kind.partition("+")[0].partition("-")[0]


def draw(kind: str, rows: int, tokens: int, seed: int = 0) -> Fields:
    """Return the fields of the tokens, [rows, tokens, ...]."""
    sizes = {"slots": ((2, 6), (4,), ()), "network": ((4,), (3,)), "heads": ((2, 4), (2, 4), (2, 4), (2, 3), (2,))}
    names = {"slots": ("query", "value", "gate"), "network": ("query", "value")}
    own = family(kind)
    named = zip(names.get(own, ("query", "key", "value", "rates", "share")), sizes[own], strict=True)
    made = {n: normal(rows, tokens, *size, seed=10 * seed + i) for i, (n, size) in enumerate(named)}
    made |= {n: made[n].sigmoid() for n in ("gate", "rates", "share") if n in made}
    return made if "momentum" in kind else {n: x for n, x in made.items() if n != "share"}


def first(kind: str, seed: int = 99) -> list[Tensor]:
    """Return the values that a memory begins with, as leaves."""
    sizes = {"slots": ((2, 2, 6, 3), (36, 4)), "network": ((6, 5), (6, 5), (3, 7)), "heads": ((2, 5, 4),) * 2}
    own = sizes[family(kind)] + (((2, 4, 5),) if "heads" in kind else ())
    return [(normal(*s, seed=seed + i) * (1.0 if "slots" in kind else 0.5)).requires_grad_() for i, s in enumerate(own)]


def call(kind: str, given: Fields, firsts: list[Tensor] | None = None, **how: Any) -> tuple[Tensor, Any]:
    firsts = [x.detach() for x in first(kind)] if firsts is None else firsts
    begin = {"keys": firsts[0], "values": firsts[1]} if "slots" in kind else {"weights": tuple(firsts)}
    name, _, shared = kind.partition("+")
    options = {"chunk_size": CHUNK, **KINDS[name], **({"shared": True} if shared else {}), **how}
    out, state = FUNCTIONS[family(kind)][0](**given, **begin, **options)
    return out.flatten(2), state


def pieces(kind: str, given: Fields, cuts: list[int], firsts: Any = None, state: Any = None, mask: Any = None,
           ids: Any = None, **how: Any) -> tuple[Tensor, Any]:  # fmt: skip
    """Give a stream in calls of so many tokens."""
    out, at = [], 0
    for size in cuts:
        span = slice(at, at + size)
        part = {"mask": mask, "segment_ids": ids}
        part = {n: x[:, span] for n, x in part.items() if x is not None}
        read, state = call(kind, {n: x[:, span] for n, x in given.items()}, firsts, state=state, **part, **how)
        out, at = [*out, read], at + size
    assert at == next(iter(given.values())).shape[1]
    return torch.cat(out, 1), state


def rows(given: Fields, index: Any, places: Any = slice(None)) -> Fields:
    """Return tokens at `places` of the rows `index` (an integer: that row alone)."""
    index = slice(index, index + 1) if isinstance(index, int) else index
    return {n: x[index][:, places] for n, x in given.items()}


def spoil(given: Fields, where: Tensor, content: float = torch.nan) -> Fields:
    """Put `content` where `where` [B, T] says."""
    return {n: x.masked_fill(where.view(*where.shape, *(1,) * (x.dim() - 2)), content) for n, x in given.items()}


def flush(kind: str, state: Any) -> Any:
    known = ("rule", "learning_rate", "optimizer")
    return FUNCTIONS[family(kind)][1](state, **{n: x for n, x in KINDS[kind.partition("+")[0]].items() if n in known})


def written(state: Any) -> list[Tensor]:
    """Return what a state has written, [M, ...]."""
    return [state.keys, state.values.dense()] if hasattr(state, "keys") else list(state.memory.values())
