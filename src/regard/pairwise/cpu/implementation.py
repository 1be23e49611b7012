"""impl="cpu": compact kernels on a CPU with the numba loops of `rows` (the extra `cpu`).

It has two entries. Attention is `blocked` with these rows: weights replace the scores of a block in place, and keys
without weight are left out of later products, forward and backward. `normalise` works on plain scores, for
`regard.entmax` and similar functions. Tensors are passed without a copy. numba is imported at the first use and caches
compiled code on disk.

Legend: n heads, q queries, w keys of a block; R = n x q rows.
"""

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
from ...one_node import differentiable, operator
from ...precision import transformed
from ..blocked.block_rows import FLAGS, FLOATS, SOLVERS, Kept, Rows, rows_of
from ..blocked.blocks import ELEMENTS, Block
from ..blocked.implementation import Blocked
from ..blocked.live_rows import ByRow
from ..dispatch import Problem, register_impl

ALONE = 2**13
"""Below this number of query-key pairs, use one thread."""
_ONE_AT_A_TIME = threading.Lock()  # some of numba's thread pools abort on concurrent use


MISSING = None if find_spec("numba") else "needs numba, which is not installed: pip install 'regard[cpu]'"
"""None if numba is installed, else how to install it. Computed once, since compiled code cannot search for modules."""


@lru_cache(maxsize=1)
def _broken() -> str | None:
    """Return None if numba can be imported, else why not."""
    try:
        _rows()
    except ImportError as error:
        return f"needs numba, which is installed but cannot be imported ({error}); repair that installation"
    return None


def unsupported(spec: Spec) -> str | None:
    """Return None if the numba loops can compute the weighting of `spec`, else why not; under compilation
    without a look at whether numba can be imported."""
    weighting, rule = spec.weighting, spec.bandwidth
    if type(weighting) is not Ratio or type(rule) not in (Adaptive, Anchored, Fixed, Nearest):
        return 'supports only normalised kernels with a built-in thresholding rule and gradient="hard"'
    own = getattr(spec.kernel, "numba_relative", None)
    if type(spec.kernel) not in (Polynomial, Uniform, Gaussian) and own is None:
        return f"has no loop for the {spec.kernel.name} kernel"
    if own is not None and (spec.kernel.params or not (spec.kernel.compact and spec.kernel.vanishes)):
        only = "compact kernels that are continuous at the threshold and have no parameters"
        return f"supports numba_relative only for {only}"
    if type(spec.kernel) is Gaussian and type(rule) is Fixed:
        return "is for compact kernels; for softmax over whole rows use torch"
    return None if torch.compiler.is_compiling() else _broken()


@lru_cache(maxsize=32)
def _rows(function: Any = None) -> Any:
    """Import the compiled loops, with the function of a kernel that brings its own."""
    from . import rows  # loads numba, which takes a second

    return rows if function is None else rows.with_kernel(function)


class NumbaRows(Rows):
    """The numba loops for one Spec."""

    marks: ClassVar[bool] = True
    elements: ClassVar[int] = 2 * ELEMENTS  # needs two arrays of a block, torch more

    def exact(self, params: Params) -> bool:
        """Return True for kernels with a jump or an infinite slope at the threshold."""
        power = self.spec.bandwidth.power(self.spec.kernel, params)
        return not self.spec.kernel.vanishes or bool(torch.as_tensor(power < 1).any())

    @property
    def indices(self) -> int:
        return 3

    @property
    def _loops(self) -> Any:
        return _rows(getattr(self.spec.kernel, "numba_relative", None))

    def _code(self, name: str) -> int:
        return int(getattr(self._loops.base, name.upper()))

    @property
    def _fallback(self) -> int:
        return self._code(f"fallback_{getattr(self.spec.bandwidth, 'empty', 'uniform')}")

    def _kernel(self, params: Params) -> int:
        kernel = self.spec.kernel
        if not isinstance(kernel, Polynomial):
            return self._code("own" if hasattr(kernel, "numba_relative") else kernel.name)
        r = self.spec.bandwidth.power(kernel, params)
        return self._code(f"power{r:g}" if isinstance(r, float) and r in (1.0, 2.0, 3.0) else "power")

    def _numbers(self, like: Tensor, params: Params) -> tuple[Tensor, Tensor]:
        """Return (r, margin or bias) of every row [R], in the dtype of `like` [..., w]."""
        rule, number = self.spec.bandwidth, 0.0
        if isinstance(rule, Anchored):
            number = params.get("margin", rule.margin)
        elif isinstance(rule, Fixed):
            number = params.get("bias", rule.bias or 0.0)
        return _column(rule.power(self.spec.kernel, params), like), _column(number, like)

    def solve(
        self, z: Tensor, p: Tensor, bounds: tuple[Tensor, Tensor], params: Params, counted: bool, start: int,
        marks: Tensor,
    ) -> Kept:  # fmt: skip
        """Write the weights of the scores z [..., w] into p, which may be z. Return the statistics, with 3 positions.
        Row i of R sees columns [bounds[0][i], bounds[1][i]). Mark keys with weight, or that determine a threshold, in
        marks [n, blocks of keys]; column 0 is key `start`."""
        loops, rule, kept = self._loops, self.spec.bandwidth, _statistics(z)
        k, group = min(getattr(rule, "k", 0), z.shape[-1]), max(1, _count(z) // max(1, marks.shape[0]))
        with _entry(loops.forward, loops.forward_part, z) as forward:
            forward(
                *_rows_of(z, _bits(z), p), *_arrays(*bounds), start, self._kernel(params), self._code(rule.name),
                *_arrays(*self._numbers(z, params)), k, self._fallback,
                p is z, counted, *_rows_of(*kept), *_arrays(marks.view(torch.uint8)), group,
            )  # fmt: skip
        return kept

    def differentiate(
        self, z: Tensor, g: Tensor, p: Tensor, dz: Tensor, bounds: tuple[Tensor, Tensor], kept: Kept, params: Params,
        names: list[str],
    ) -> list[Tensor]:  # fmt: skip
        """Write the weights into p [..., w] (unless p is [..., 0]) and dL/dz into dz; p may be z, and dz may be g.
        Return dL/dparameter [...] by `names`."""
        loops, grads = self._loops, z.new_empty(*z.shape[:-1], 2)
        learned = "alpha" in names or "r" in names
        with _entry(loops.backward, loops.backward_part, z) as backward:
            backward(
                *_rows_of(z, _bits(z), g, p, dz), *_arrays(*bounds), self._kernel(params),
                self._code(self.spec.bandwidth.name), *_arrays(self._numbers(z, params)[0]), self._fallback, learned,
                p is z, *_rows_of(*kept, grads),
            )  # fmt: skip
        return [grads[..., 0 if name in ("alpha", "r") else 1] for name in names]

    def weigh(self, block: Block, z: Tensor, params: Params, counted: bool, marks: Tensor) -> tuple[Tensor, Kept]:
        z = block.hide(z, positional=False)
        return z, self.solve(z, z, _bounds(block, z), params, counted, block.low, marks)

    def derive(
        self, block: Block, z: Tensor, g: Tensor, kept: Kept, params: Params, share: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        assert share is None  # `supports` has refused an absolute ridge
        z, g = block.hide(z, positional=False), g.contiguous()
        return z, g, self.differentiate(z, g, z, g, _bounds(block, z), kept, params, block.work.names)

    def again(self, block: Block, z: Tensor, kept: Kept, params: Params) -> Tensor:
        z = block.hide(z, positional=False)
        p, nothing = torch.empty_like(z), torch.zeros_like(z)  # a backward pass with g = 0 gives the weights
        self.differentiate(z, nothing, p, nothing, _bounds(block, z), kept, params, [])
        return p

    def by_row(self, system: Any, right: Tensor, source: Tensor | None) -> ByRow:
        p, mean, ridge, (y, origin) = system.p.flatten(0, 1), system.mean, system.ridge, system.points()
        rows, loops = p.shape[0], self._loops
        value, corrections = right.new_empty(right.shape), p.new_empty(p.shape)  # contiguous: others would be copied
        left = torch.empty(rows, dtype=torch.bool)
        solved = ByRow(value, corrections, p.new_empty(rows), left, p.new_empty(rows))
        if isinstance(ridge, Tensor):
            ridge = ridge.expand(*mean.shape[:2], -1).flatten(0, 1)
        else:
            ridge = p.new_full((1, 1), ridge)
        origin = y.new_zeros(y.shape[0], y.shape[2]) if origin is None else origin.flatten(0, 1)
        given = p, y, origin, mean.flatten(0, 1), right, ridge, p.new_empty(1, 0) if source is None else source
        with _entry(loops.local_linear, loops.local_linear_part, p) as run:
            run(*_arrays(*given), system.counted, *_arrays(*solved))
        return solved


def _bounds(block: Block, z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the columns that each row of z sees, int64 [R] each."""
    if not block.work.visible.positional:
        return _whole(z)
    low, high = block.bounds(z.device)
    return low.flatten(), high.flatten()


def _whole(z: Tensor) -> tuple[Tensor, Tensor]:
    return z.new_zeros(_count(z), dtype=torch.int64), z.new_full((_count(z),), z.shape[-1], dtype=torch.int64)


def _count(z: Tensor) -> int:
    """Return the number R of rows of z [..., w]."""
    return math.prod(z.shape[:-1])


def _statistics(z: Tensor) -> Kept:
    """Return room for the statistics of the rows of z [..., w]."""
    shape = z.shape[:-1]
    floats, flags = z.new_empty(*shape, FLOATS), z.new_empty(*shape, FLAGS, dtype=torch.int32)
    return floats, flags, z.new_empty(*shape, 3, dtype=torch.int64)


def _column(number: Any, like: Tensor) -> Tensor:
    """Return a number, or row parameters [..., 1], as [R]."""
    if isinstance(number, Tensor):
        return number.to(like.dtype).flatten()
    limit = torch.finfo(like.dtype).max
    return like.new_full((_count(like),), max(-limit, min(number, limit)))


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int64)


def _rows_of(*tensors: Tensor) -> list[Any]:
    """Return tensors [..., n] as arrays [R, n], which share their memory if it is contiguous."""
    return [x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) for x in _arrays(*tensors)]


def _arrays(*tensors: Tensor) -> list[Any]:
    return [(x.detach() if x.requires_grad else x).contiguous().numpy() for x in tensors]


_FORKED: list[int] = []
"""Not empty in forked processes, which lack the threads of their parent."""
os.register_at_fork(after_in_child=lambda: _FORKED.append(os.getpid()))


@contextmanager
def _entry(parallel: Any, part: Any, z: Tensor) -> Iterator[Any]:
    """Yield the compiled function for all rows of z, on as many threads as torch uses."""
    import numba

    wanted = torch.get_num_threads()
    most: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    threads = max(1, min(wanted, most))
    if threads == 1 or _FORKED or z.numel() < ALONE:
        yield partial(part, 0, _count(z))
        return
    with _ONE_AT_A_TIME:
        numba.set_num_threads(threads)
        if torch.get_num_threads() != wanted:  # numba's OpenMP pool changes torch's number of threads
            torch.set_num_threads(wanted)
        yield partial(parallel, min(4 * threads, max(1, _count(z))))


SOLVERS["cpu"] = NumbaRows


@register_impl("cpu", priority=20)
class Cpu(Blocked):
    """Solve rows in numba, in Theta(n d) memory; takes kernels with zeros or a threshold, under every built-in rule."""

    name: ClassVar[str] = "cpu"

    def available(self) -> str | None:
        return MISSING

    def supports(self, problem: Problem) -> str | None:
        if problem.device != "cpu":
            return f"runs on the CPU only; the tensors are on {problem.device}"
        if problem.spec.ridge_mode == "absolute":
            return "does not compute the total kernel weight, which an absolute ridge needs"
        return super().supports(problem) or unsupported(problem.spec)


# Normalisers -------------------------------------------------------------------------------------------------


@operator("normalise_forward", "(Tensor z, Tensor? given, str spec, str[] names) -> (Tensor, Tensor, Tensor, Tensor)")
def _normalise(z: Tensor, given: Tensor | None, spec: str, names: list[str]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (weights [R, w], floats [R, FLOATS], flags [R, FLAGS], index [R, 3]) of scores z [R, w]; given [P, R]."""
    rows: Any = rows_of("cpu", spec)
    p, unmarked = torch.empty_like(z), z.new_empty(1, 0, dtype=torch.bool)
    return p, *rows.solve(z.detach(), p, _whole(z), _named(names, given), False, 0, unmarked)


@_normalise.register_fake
def _(z, given, spec, names):  # type: ignore[no-untyped-def]
    return torch.empty_like(z), *_statistics(z)


@operator(
    "normalise_backward",
    "(Tensor g, Tensor z, Tensor? given, Tensor floats, Tensor flags, Tensor index, str spec, str[] names) "
    "-> (Tensor, Tensor)",
)
def _normalise_grad(
    g: Tensor, z: Tensor, given: Tensor | None, floats: Tensor, flags: Tensor, index: Tensor, spec: str,
    names: list[str],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (dL/dz [R, w], dL/dgiven [P, R])."""
    rows: Any = rows_of("cpu", spec)
    dz, nowhere, kept = torch.empty_like(z), z.new_empty(z.shape[0], 0), (floats, flags, index)
    grads = rows.differentiate(z, g, nowhere, dz, _whole(z), kept, _named(names, given), names)
    return dz, torch.stack(grads) if grads else z.new_empty(0, z.shape[0])


@_normalise_grad.register_fake
def _(g, z, given, floats, flags, index, spec, names):  # type: ignore[no-untyped-def]
    return torch.empty_like(z), z.new_empty(0 if given is None else given.shape[0], z.shape[0])


def _named(names: list[str], given: Tensor | None) -> dict[str, Tensor]:
    return {} if given is None else dict(zip(names, given[..., None], strict=True))


def _gradients(grad: Tensor, z: Tensor, given: Tensor | None, *kept: Any) -> tuple[Tensor | None, ...]:
    *statistics, spec, names = kept
    if not torch.is_grad_enabled():
        return _normalise_grad(grad.contiguous(), z, given, *statistics, spec, names)
    # Second derivatives: only the reference has them.
    params, weighting = _named(names, given), Spec.from_json(spec).weighting
    p = weighting.weights(z, weighting.fit(z, params), params)
    wanted = [x for x in (z, given) if x is not None and x.requires_grad]
    slopes = iter(torch.autograd.grad(p, wanted, grad, create_graph=True))
    return tuple(next(slopes) if x is not None and x.requires_grad else None for x in (z, given))


differentiable(_normalise, _normalise_grad, _gradients, lambda inputs, output: ((*inputs[:2], *output[1:]), inputs[2:]))


def unable(spec: Spec, z: Tensor) -> str | None:
    """Return None if `normalise` can compute this, else why not."""
    if z.device.type != "cpu":
        return f"runs on the CPU only; the scores are on {z.device}"
    if transformed():
        return "has no forward-mode derivatives and no torch.func transforms"
    return MISSING or unsupported(spec)


def normalise(spec: Spec, z: Tensor, params: dict[str, Tensor]) -> Tensor:
    """Return the weights of scores z [..., w] in float32 or float64, where `unable` is None; params [..., 1] by name.
    Saves the statistics of the rows for the backward pass. Second derivatives are those of the reference."""
    shape = z.shape
    rows = [p.expand(*shape[:-1], 1).reshape(-1) for p in params.values()]
    flat = z.reshape(-1, shape[-1]).contiguous()
    if isinstance(spec.kernel, Uniform):  # weights without gradient, as in the reference
        flat = flat.detach()
    return _normalise(flat, torch.stack(rows) if rows else None, spec.to_json(), list(params))[0].reshape(shape)
