"""The variants that the recipe lla-variants compares, and what they cost by the formulas of the paper's Table 1."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from regard.grammar.solvers import Auto, BlockDiagonal, Cholesky, ConjugateGradient
from regard.pairwise.attention import attention
from regard.pairwise.local_linear_attention import local_linear_attention
from regard.recurrent.mesa import mesa_attention

from ..lib.display import MISSING
from ..lib.recipe import Frame

ROWS = 128  # the B of the formulas: regard's own blocks of queries
COSTS = {
    "softmax": ("O(nd)", "4*n*d", "2nd/B", "2*n*d/B"),
    "mesa": ("O(Td²) + O(d²)", "2*T*d**2 + 6*d**2", "O(d)", "4*d"),
    "lla, weights again": ("O(Td²) + O(nd)", "6*T*n*d + 10*n*d", "(T+3)nd/B", "(T+3)*n*d/B"),
    "lla, weights kept": (MISSING, "4*T*n*d + 8*n*d", MISSING, "(T+3)*n*d/B + (T+2)*n"),
    "lla, direct": (MISSING, "n*d*(d+1) + d**3/3 + 8*n*d", MISSING, "3*n*d/B + d**2"),
    "block-diagonal, cg": (
        "O(Td²/g²) + O(nd)", "n*d*(d/g+1) + 2*T*d**2/g + 8*n*d", "(T+3)nd/B", "3*n*d/B + d**2/g"),
    "block-diagonal, direct": (
        "O(d³/g²) + O(nd)", "n*d*(d/g+1) + d**3/(3*g**2) + 8*n*d", "3nd/B", "3*n*d/B + d**2/g"),
}  # fmt: skip
"""Operations of a query and numbers that it moves, forward: as in the paper's Table 1, and corrected, as formulas of
n keys that a query sees, d channels, T steps, g diagonal blocks and B queries of a block.

A multiplication and an addition count as two; exponentials and what is linear in n or d alone are left out. A step of
conjugate gradients takes 4 n d with kept weights and 6 n d with weights computed again. A step of d^2 needs the matrix,
which n d (d + 1) operations form (half of a symmetric one), or n d (d / g + 1) with blocks.
"""


class Variant(NamedTuple):
    """A way to predict: its name and group in tables and figures, a row of `COSTS`, a function of queries, keys, values
    and options, whether it takes a ridge, the keys that a query sees (None: all), and its diagonal blocks."""

    name: str
    group: str
    cost: str
    call: Callable[..., Any]
    takes_ridge: bool = True
    window: int | None = None
    blocks: int = 1

    def predict(self, k: Tensor, v: Tensor, ridge: float | None, strict: bool, counted: bool = False) -> Any:
        """Return predictions [B, T, d] at the keys, and if counted the iterations of every row, None without a solver.
        Plain attention cannot hide a position's own pair."""
        if self.name == "sdpa" and not strict:
            return scaled_dot_product_attention(k, k, v, is_causal=True)[:, 0], None
        more = {"ridge": ridge, "return_diagnostics": counted} if self.takes_ridge else {}
        result = self.call(k, k, v, exclude_self=strict, **more)
        out, *_, seen = result if isinstance(result, tuple) else (result, None)
        if not counted or not self.takes_ridge or self.cost.endswith("direct"):
            return out[:, 0], None
        return out[:, 0], (seen if self.name == "mesa" else seen.solver)["iterations"]


def variants(config: Any) -> list[Variant]:
    """Return those of the options of a recipe, plain attention first."""
    how: dict[str, Any] = {"is_causal": True, "impl": "blocked"}
    softmax, local, cg = partial(attention, **how), partial(local_linear_attention, **how), ConjugateGradient
    kept, parts = "lla, weights kept", "block-diagonal, direct"
    made = [
        Variant("sdpa", "softmax", "softmax", attention, False),
        Variant("softmax", "softmax", "softmax", softmax, False),
        Variant("mesa", "mesa", "mesa", partial(mesa_attention, solver="cg", tol=1e-3, max_iter=4 * config.dim)),
        Variant("auto", "exact", kept, partial(local, solver=Auto())),
        Variant("cholesky", "exact", "lla, direct", partial(local, solver=Cholesky())),
        *(Variant(f"tol {t:g}", "tolerances", kept, partial(local, solver=cg(tol=t))) for t in config.tols),
        *(Variant(f"steps {n}", "steps", kept, partial(local, solver=cg(max_iter=n))) for n in config.steps),
        *(Variant(f"blocks {g}", "blocks", parts, partial(local, solver=BlockDiagonal(g)), blocks=g)
          for g in blocks(config.dim)),
    ]  # fmt: skip
    for w in (w for w in config.windows if w < config.length):
        near = partial(local, window=w)
        made += [
            Variant(f"softmax, window {w}", "softmax windows", "softmax", partial(softmax, window=w), False, w),
            Variant(f"window {w}", "windows", kept, partial(near, solver=cg(tol=config.tols[-1])), window=w),
            *(Variant(f"blocks {g}, window {w}", "windows and blocks", parts, partial(near, solver=BlockDiagonal(g)),
                      window=w, blocks=g) for g in blocks(config.dim)[-2:] if g > 1),
        ]  # fmt: skip
    return made


def blocks(dim: int) -> list[int]:
    """Return 1, 2, 4, ..., dim, a power of two."""
    return [2**i for i in range(dim.bit_length())]


def costs(rows: Frame, dim: int) -> Frame:
    """Return rows with the corrected formulas of their `cost` evaluated: `flops`, `numbers`, and GFLOP/s as `speed`."""
    rows = rows.assign(n=rows["keys"], d=dim, T=rows["steps"].astype(float).fillna(0.0), g=rows["blocks"], B=ROWS)
    for name, part in rows.groupby("cost"):
        for column, formula in (("flops", COSTS[name][1]), ("numbers", COSTS[name][3])):
            rows.loc[part.index, column] = part.eval(formula)
    return rows.assign(speed=rows["flops"] / rows["microseconds"] / 1e3)


def formulas() -> Any:
    """Return the paper's Table 1 with the corrected formulas."""
    from regard.inspect.tables import Table

    written = lambda text: text.replace("**2", "²").replace("**3", "³").replace("*", "")  # noqa: E731
    rows = tuple((name, *map(written, parts)) for name, parts in COSTS.items())
    header = ("form", "operations, paper", "corrected", "numbers moved, paper", "corrected")
    sizes = "n keys that a query sees, d channels, T steps, g diagonal blocks, B queries of a block"
    return Table(header, rows, f"{sizes}; for a query, forward.")
