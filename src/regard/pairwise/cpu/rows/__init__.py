"""Numba loops: scores to weights and the derivative, one row at a time, in parallel over rows.

Imported only when `impl="cpu"` runs (numba is the extra `cpu`). The mathematics is that of `regard.grammar`: with
top = max z, d = top - z and reach = top - theta, the weight of a key is

    p = K(1 - d / reach) / mass,        K(u) = [u]_+^r, or 1 where u > 0, or exp(-d),

and the rules differ in reach only. The forward pass finds the largest score of every tile of a row. The adaptive rule
first solves for these scores alone. Fewer keys have a larger peak, so this is an upper bound: it tells which tiles can
have weight, and Newton's descent on those starts from it. The backward pass needs only the statistics of the row. Spans
of columns without weight are skipped.

Legend: z, p, g, dz [R, n] rows of scores, weights, dL/dp, dL/dz; row i sees columns [lo[i], hi[i]) whose score is not
-inf. `bits` is z read as integers. `floats` [R, 6] top, theta, reach, mass, support, effective sample size;
`flags` [R, 3] empty, fallback, status; `index` [R, 3] positions that the rules need; `power`, `number` [R] the
kernel's r and the rule's margin or bias. Both passes can work in place (p is z, dz is g): a span of columns is read
before it is written.
"""

import inspect
import re
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from . import base
from .passes import backward, backward_part, forward, forward_part, local_linear, local_linear_part

__all__ = [
    "backward", "backward_part", "base", "forward", "forward_part", "local_linear", "local_linear_part", "with_kernel",
]  # fmt: skip


def with_kernel(function: Callable[[Any, Any], Any]) -> Any:
    """Return this package loaded once more, under a name of its own, with `function` as the kernel `OWN`: (d, reach) ->
    (K(reach - d) / K(reach), K'(reach - d) / K(reach)) of one key, in code that numba compiles."""
    name = f"{__name__}_{re.sub(r'[^a-zA-Z0-9]', '_', f'{function.__module__}.{function.__qualname__}')}"
    own = ModuleType(f"{name}.own")
    source = Path(inspect.getfile(function))
    own.SOURCE = source.read_bytes() if source.is_file() else function.__code__.co_code  # type: ignore[attr-defined]
    own.relative = base.jit(function)  # type: ignore[attr-defined]
    spec = spec_from_file_location(name, __file__, submodule_search_locations=list(__path__))
    assert spec is not None
    assert spec.loader is not None
    package = module_from_spec(spec)
    sys.modules |= {name: package, own.__name__: own}
    spec.loader.exec_module(package)
    return package
