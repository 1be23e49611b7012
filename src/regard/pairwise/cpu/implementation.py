"""impl="cpu": compact kernels on a CPU, by the row solvers of `rows` (numba, the extra `cpu`).

Two entries: attention, which is `blocked` with these rows (the weights of a block of scores are solved in place,
and keys without weight are left out of the products that follow, forward and backward), and `normalise` on plain
scores, for `regard.entmax` and its kin. Tensors are handed over without a copy; numba is imported at the first use,
compiles once, and later processes start from its cache.

Legend: n heads, q queries, w keys of a block; R = n x q rows.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...grammar import Spec
from ...grammar.bandwidths.adaptive import Adaptive
from ...grammar.bandwidths.anchored import Anchored
from ...grammar.bandwidths.fixed import Fixed
from ...grammar.bandwidths.nearest import Nearest
from ...grammar.kernels import Gaussian, Params, Polynomial, Uniform
from ...grammar.weighting import Ratio
from ...precision import transformed
from ..blocked.block_rows import FLAGS, FLOATS, SOLVERS, rows_of
from ..blocked.blocks import ELEMENTS, Block
from ..blocked.implementation import Blocked
from ..dispatch import Problem, register_impl

ALONE = 2**13
"""Pairs of a query and a key that one thread is done with before others are awake."""
_ONE_AT_A_TIME = threading.Lock()  # some of numba's thread pools end the process when two threads meet in them


MISSING = None if find_spec("numba") else "needs numba, which is not installed: pip install 'regard[cpu]'"
"""None where numba is installed, else how to get it; found once, as compiled code cannot look."""


def _importable() -> str | None:
    """None where numba can be imported, else why not. Compiled code cannot look, and finds out when it runs."""
    return None if torch.compiler.is_compiling() else _broken()


@lru_cache(maxsize=1)
def _broken() -> str | None:
    try:
        _rows()
    except ImportError as error:
        return f"needs numba, which is installed but cannot be imported ({error}); mend that installation"
    return None


def unsupported(spec: Spec) -> str | None:
    """None where the row solvers know the weighting of `spec`, else why not."""
    weighting, rule = spec.weighting, spec.bandwidth
    if type(weighting) is not Ratio or type(rule) not in (Adaptive, Anchored, Fixed, Nearest):
        return "solves the built-in bandwidth rules for normalised kernels with a hard gradient"
    if type(spec.kernel) not in (Polynomial, Uniform, Gaussian):
        return f"has no loop for the {spec.kernel.name} kernel"
    if type(spec.kernel) is Gaussian and type(rule) is Fixed:
        return "is for compact kernels; exponentials of whole rows are torch's own"
    return None


@lru_cache(maxsize=1)
def _rows() -> Any:
    from . import rows  # numba, and a second of loading: only where it runs

    return rows


@dataclass(frozen=True)
class NumbaRows:
    """The row solvers for one Spec."""

    spec: Spec
    marks: ClassVar[bool] = True

    def exact(self, params: Params) -> bool:
        """Kernels with a jump at the threshold, or with infinite slope there."""
        power = self.spec.bandwidth.kernel_params(params).get("r", getattr(self.spec.kernel, "r", 1.0))
        return not self.spec.kernel.vanishes or bool(torch.as_tensor(power < 1).any())

    elements: ClassVar[int] = 2 * ELEMENTS  # two blocks of pairs live at a time, where torch's rows need more

    @property
    def indices(self) -> int:
        return 3 if isinstance(self.spec.bandwidth, (Fixed, Nearest)) else 0

    @property
    def _rule(self) -> int:
        rows = _rows()
        codes = {"adaptive": rows.ADAPTIVE, "anchored": rows.ANCHORED, "fixed": rows.FIXED, "nearest": rows.NEAREST}
        return int(codes[self.spec.bandwidth.name])

    def _kernel(self, params: Params) -> int:
        rows, kernel = _rows(), self.spec.kernel
        if not isinstance(kernel, Polynomial):
            return int(rows.UNIFORM if isinstance(kernel, Uniform) else rows.GAUSSIAN)
        r = self.spec.bandwidth.kernel_params(params).get("r", kernel.r)
        return {1.0: rows.POWER1, 2.0: rows.POWER2, 3.0: rows.POWER3}.get(
            r if isinstance(r, float) else 0.0, rows.POWER
        )

    def _numbers(self, like: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        """(r, margin or bias) of every row [R], as `like` [R, w]."""
        rule = self.spec.bandwidth
        power = rule.kernel_params(params).get("r", getattr(self.spec.kernel, "r", 1.0))
        number: Any = 0.0
        if isinstance(rule, Anchored):
            number = params.get("margin", rule.margin)
        elif isinstance(rule, Fixed):
            number = params.get("bias", rule.bias or 0.0)
        return _column(power, like), _column(number, like)

    def solve(
        self,
        z: Tensor,
        p: Tensor,
        bounds: tuple[Tensor, Tensor],
        params: Params,
        counted: bool,
        start: int,
        marks: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Weights of the scores z [R, w] into p, which may be z. Row i sees columns [bounds[0][i], bounds[1][i]); the
        keys that its threshold or weights need are marked in marks [n, blocks of keys]; column 0 is key `start`.

        Returns:
            floats [R, FLOATS], flags int32 [R, FLAGS], index int64 [R, 3].
        """
        rows, rule = _rows(), self.spec.bandwidth
        found = z.new_empty(z.shape[0], FLOATS), z.new_empty(z.shape[0], FLAGS, dtype=torch.int32)
        index = z.new_empty(z.shape[0], 3, dtype=torch.int64)
        stand = {"uniform": rows.STAND_UNIFORM, "zero": rows.STAND_ZERO, "nearest": rows.STAND_NEAREST}
        k = min(getattr(rule, "k", 0), z.shape[1])
        with _entry(rows.forward, rows.forward_part, z) as forward:
            forward(
                *_arrays(z, _bits(z), p, *bounds), start, self._kernel(params), self._rule,
                *_arrays(*self._numbers(z, params)), k, stand[getattr(rule, "empty", "uniform")],
                p is z, counted, *_arrays(*found, index, marks.view(torch.uint8)),
                max(1, z.shape[0] // max(1, marks.shape[0])),
            )  # fmt: skip
        return *found, index

    def differentiate(
        self,
        z: Tensor,
        g: Tensor,
        p: Tensor,
        dz: Tensor,
        bounds: tuple[Tensor, Tensor],
        kept: tuple[Tensor, Tensor, Tensor],
        params: Params,
        names: list[str],
    ) -> list[Tensor]:
        """Weights into p [R, w] (or nowhere, [R, 0]) and dL/dz into dz; p may be z, and dz may be g.

        Returns:
            dL/dparameter [R] by `names`.
        """
        rows, rule = _rows(), self.spec.bandwidth
        grads = z.new_empty(z.shape[0], 2)
        stand = {"uniform": rows.STAND_UNIFORM, "zero": rows.STAND_ZERO, "nearest": rows.STAND_NEAREST}
        learned = "alpha" in names or "r" in names
        with _entry(rows.backward, rows.backward_part, z) as backward:
            backward(
                *_arrays(z, _bits(z), g, p, dz, *bounds), self._kernel(params), self._rule,
                *_arrays(self._numbers(z, params)[0]), stand[getattr(rule, "empty", "uniform")], learned,
                p is z,
                *_arrays(*kept, grads),
            )  # fmt: skip
        return [grads[:, 0 if name in ("alpha", "r") else 1] for name in names]

    def weigh(
        self, block: Block, z: Tensor, params: Params, counted: bool, marks: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        shape = z.shape[:2]
        z = block.hide(z, positional=False)
        flat, bounds = z.flatten(0, 1), _flat_bounds(block, z)
        floats, flags, index = self.solve(flat, flat, bounds, params, counted, block.low, marks)
        index = index[:, : self.indices]
        return z, (floats.unflatten(0, shape), flags.unflatten(0, shape), index.unflatten(0, shape))

    def derive(
        self,
        block: Block,
        z: Tensor,
        g: Tensor,
        kept: tuple[Tensor, Tensor, Tensor],
        params: Params,
        names: list[str],
        share: Tensor | None = None,
        p: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        assert share is None  # `supports` has refused an absolute ridge
        shape = z.shape[:2]
        z, g = block.hide(z, positional=False), g.contiguous()
        flat, flat_g = z.flatten(0, 1), g.flatten(0, 1)
        grads = self.differentiate(flat, flat_g, flat, flat_g, _flat_bounds(block, z), _flat_kept(kept), params, names)
        return z, g, [grad.unflatten(0, shape) for grad in grads]

    def again(self, block: Block, z: Tensor, kept: tuple[Tensor, Tensor, Tensor], params: Params) -> Tensor:
        z = block.hide(z, positional=False)
        flat, p = z.flatten(0, 1), torch.empty_like(z)
        nothing, bounds = torch.zeros_like(flat), _flat_bounds(block, z)  # a backward pass of nothing makes the weights
        self.differentiate(flat, nothing, p.flatten(0, 1), nothing, bounds, _flat_kept(kept), params, [])
        return p


def _flat_bounds(block: Block, z: Tensor) -> tuple[Tensor, Tensor]:
    if not block.work.visible.positional:
        return _whole(z.flatten(0, 1))
    low, high = block.bounds(z.device)
    return low.flatten(), high.flatten()


def _flat_kept(kept: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics as rows, with an index [R, 3] whether or not the rule has one."""
    floats, flags, index = (x.flatten(0, -2) for x in kept)
    return floats, flags, index if index.shape[1] else index.new_zeros(index.shape[0], 3)


def _column(number: Any, like: Tensor) -> Tensor:
    """A number, or row parameters [..., 1], as [R]."""
    if isinstance(number, Tensor):
        return number.to(like.dtype).flatten()
    limit = torch.finfo(like.dtype).max
    return like.new_full((like.shape[0],), max(-limit, min(number, limit)))


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int64)


def _arrays(*tensors: Tensor) -> list[Any]:
    """numpy views of the memory of contiguous tensors."""
    return [(x.detach() if x.requires_grad else x).contiguous().numpy() for x in tensors]


_FORKED: list[int] = []
"""Processes that are copies of one that had threads, which a copy does not have."""
os.register_at_fork(after_in_child=lambda: _FORKED.append(os.getpid()))


@contextmanager
def _entry(parallel: Any, part: Any, z: Tensor) -> Iterator[Any]:
    """The compiled function that does all rows of z: on as many threads as torch uses, or as a part of its own."""
    import numba

    wanted = torch.get_num_threads()
    most: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    threads = max(1, min(wanted, most))
    if threads == 1 or _FORKED or z.numel() < ALONE:
        yield partial(part, 0, z.shape[0])
        return
    with _ONE_AT_A_TIME:
        numba.set_num_threads(threads)
        if torch.get_num_threads() != wanted:  # numba starting its OpenMP pool resets the number that torch reads
            torch.set_num_threads(wanted)
        yield partial(parallel, min(4 * threads, max(1, z.shape[0])))


SOLVERS["cpu"] = NumbaRows


@register_impl("cpu", priority=20)
class Cpu(Blocked):
    """Theta(n d) memory, loops over rows in numba; compact kernels under every built-in bandwidth rule."""

    name: ClassVar[str] = "cpu"

    def available(self) -> str | None:
        return MISSING

    def supports(self, problem: Problem) -> str | None:
        if problem.device != "cpu":
            return f"runs on the CPU alone; the tensors are on {problem.device}"
        if problem.spec.ridge_mode == "absolute":
            return "knows no kernel weight in all, which an absolute ridge is weighed against"
        return super().supports(problem) or unsupported(problem.spec) or _importable()


# Normalisers -------------------------------------------------------------------------------------------------


@torch.library.custom_op(
    "regard::normalise_forward",
    mutates_args=(),
    schema="(Tensor z, Tensor? given, str spec, str[] names) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _normalise(z: Tensor, given: Tensor | None, spec: str, names: list[str]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(weights [R, w], floats [R, FLOATS], flags [R, FLAGS], index [R, n]) of scores z [R, w]; given [P, R]."""
    rows: Any = rows_of("cpu", spec)
    found = _normalise_outputs(z, rows)
    floats, flags, index = rows.solve(
        z.detach(), found[0], _whole(z), _named(names, given), False, 0, z.new_empty(1, 0, dtype=torch.bool)
    )
    return found[0], floats, flags, index[:, : rows.indices].contiguous()


def _normalise_outputs(z: Tensor, rows: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    size = z.shape[0]
    return (
        torch.empty_like(z),
        z.new_empty(size, FLOATS),
        z.new_empty(size, FLAGS, dtype=torch.int32),
        z.new_empty(size, rows.indices, dtype=torch.int64),
    )


@_normalise.register_fake
def _(z, given, spec, names):  # type: ignore[no-untyped-def]
    return _normalise_outputs(z, rows_of("cpu", spec))


@torch.library.custom_op(
    "regard::normalise_backward",
    mutates_args=(),
    schema="(Tensor g, Tensor z, Tensor? given, Tensor floats, Tensor flags, Tensor index, str spec, str[] names) "
    "-> (Tensor, Tensor)",
)
def _normalise_grad(
    g: Tensor, z: Tensor, given: Tensor | None, floats: Tensor, flags: Tensor, index: Tensor, spec: str,
    names: list[str],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(dL/dz [R, w], dL/dgiven [P, R])."""
    rows: Any = rows_of("cpu", spec)
    dz, kept = torch.empty_like(z), _flat_kept((floats, flags, index))
    nowhere = z.new_empty(z.shape[0], 0)
    grads = rows.differentiate(z, g, nowhere, dz, _whole(z), kept, _named(names, given), names)
    return dz, torch.stack(grads) if grads else z.new_empty(0, z.shape[0])


@_normalise_grad.register_fake
def _(g, z, given, floats, flags, index, spec, names):  # type: ignore[no-untyped-def]
    return torch.empty_like(z), z.new_empty(0 if given is None else given.shape[0], z.shape[0])


def _whole(z: Tensor) -> tuple[Tensor, Tensor]:
    """Every row sees all of its columns."""
    return z.new_zeros(z.shape[0], dtype=torch.int64), z.new_full((z.shape[0],), z.shape[1], dtype=torch.int64)


def _named(names: list[str], given: Tensor | None) -> dict[str, Tensor]:
    return {} if given is None else dict(zip(names, given[..., None], strict=True))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    z, given, *ctx.names = inputs
    ctx.save_for_backward(z, given, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad is None:
        return None, None, None, None
    z, given, *kept = ctx.saved_tensors
    if torch.is_grad_enabled():  # derivatives of this derivative are wanted: only the plain form has them
        return *_plain_grads(grad, z, given, *ctx.names), None, None
    dz, dgiven = _normalise_grad(grad.contiguous(), z, given, *kept, *ctx.names)
    return dz, None if given is None else dgiven, None, None


def _plain_grads(
    grad: Tensor, z: Tensor, given: Tensor | None, spec: str, names: list[str]
) -> tuple[Tensor | None, Tensor | None]:
    params, weighting = _named(names, given), Spec.from_json(spec).weighting
    wanted = [x for x in (z, given) if x is not None and x.requires_grad]
    p = weighting.weights(z, weighting.fit(z, params), params)
    found = iter(torch.autograd.grad(p, wanted, grad, create_graph=True))
    dz, dgiven = (next(found) if x is not None and x.requires_grad else None for x in (z, given))
    return dz, dgiven


_normalise.register_autograd(_differentiate, setup_context=_save)


def unable(spec: Spec, z: Tensor) -> str | None:
    """None where `normalise` can do it, else why not."""
    if z.device.type != "cpu":
        return f"runs on the CPU alone; the scores are on {z.device}"
    if transformed():
        return "has no forward-mode derivatives and no torch.func transforms"
    return MISSING or unsupported(spec) or _importable()


def normalise(spec: Spec, z: Tensor, params: dict[str, Tensor]) -> Tensor:
    """Weights of scores z [..., w] in float32 or float64 that `unable` has nothing against; params [..., 1] by name.
    Saves a threshold a row and recomputes in backward; second derivatives are those of the plain form."""
    shape = z.shape
    rows = [p.expand(*shape[:-1], 1).reshape(-1) for p in params.values()]
    flat = z.reshape(-1, shape[-1]).contiguous()
    if isinstance(spec.kernel, Uniform):  # 0 or 1: no score has a gradient, as in the plain form
        flat = flat.detach()
    return _normalise(flat, torch.stack(rows) if rows else None, spec.to_json(), list(params))[0].reshape(shape)
