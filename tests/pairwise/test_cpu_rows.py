"""The row solvers of impl="cpu" on plain scores, where the contracts' short rows do not reach: lengths on both sides of
their tiles and spans, rows with a few tiles in reach and gaps between them, every rule and kernel with all of its
derivatives, against dense float64 formulas; threads, processes and what is compiled."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from contracts import oracle
from contracts.oracle import close
from programs import python
from row_numbers import derivatives, leaves, numbers
from torch import Tensor

import regard
from regard.grammar import Spec

pytest.importorskip("numba")

from regard.pairwise.cpu import implementation as cpu
from regard.pairwise.cpu.rows import base

INF = float("inf")
LENGTHS = (1, 2, 31, 32, 33, 127, 128, 129, 511, 512, 513, 1000, 8192)
R, W, K = 6, 0.4, 7  # rows of a case, bias of the fixed rule, keys of the nearest one

CASES = [
    *(f"{kernel}*adaptive" for kernel in ("epanechnikov", "biweight", "triweight")),
    *(f"polynomial(r={r})*adaptive" for r in (1.5, 10, 0.5)),
    *(f"{kernel}*anchored(margin=1.1)" for kernel in ("epanechnikov", "biweight", "triweight", "gaussian", "uniform")),
    "polynomial(r=2.5)*anchored(margin=1.1)",
    *(f"{kernel}*fixed(bias={W})" for kernel in ("epanechnikov", "biweight", "uniform")),
    f"triweight*fixed(bias={W},empty=zero)",
    f"polynomial(r=1.7)*fixed(bias={W},empty=nearest)",
    *(f"{name}*nearest(k={K})" for name in ("epanechnikov", "biweight", "polynomial(r=1.5)", "gaussian", "uniform")),
]


def scores(n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """[R, n]: normal, flat, steep, few tiles in reach with gaps of every length, half hidden, ties."""
    make = torch.Generator().manual_seed(n)
    x = torch.randn(R, n, generator=make, dtype=torch.float64)
    x[1] *= 0.05
    x[2] *= 4
    far = x[3] * 0.2 - 9
    at, gap = 0, 0
    while at < n:  # one key a tile, at another place in each, after ever longer runs of tiles out of reach
        place = min(n - 1, at + (gap * 11) % base.TILE)
        far[place] = 0.3 * x[3, place].clamp(-1, 1)
        gap += 1
        at += base.TILE * (1 + gap % 8)
    x[3] = far
    x[4][torch.rand(n, generator=make) < 0.5] = -INF
    x[4, n // 2 : n // 2 + 2 * base.TILE] = -INF
    x[5] = (x[5] * 3).round() / 4
    return x.to(dtype)


def solve(label: str, z: Tensor, params: dict[str, Tensor]) -> Tensor:
    spec = Spec.parse(label)
    assert cpu.unable(spec, z) is None
    return cpu.normalise(spec, z, params)


def formula(label: str, z: Tensor, params: dict[str, Tensor]) -> Tensor:
    spec = oracle.read(Spec.parse(label))
    rows = {name: x.expand(len(z), 1)[:, 0] for name, x in params.items()}
    return oracle.weights(spec, z, z > -INF, params.get("bias", spec.bias), rows)


def compare(label: str, z: Tensor, learned: bool, tolerance: float) -> None:
    make = torch.Generator().manual_seed(7)
    g = torch.randn(z.shape, generator=make, dtype=torch.float64).to(z.dtype)
    wobble = torch.rand(len(z), 1, generator=make, dtype=torch.float64).to(z.dtype) * 0.2
    inputs = {"z": z, **numbers(Spec.parse(label), wobble if learned else 0 * wobble, learned)}
    results = []
    for dtype, run in ((z.dtype, solve), (torch.float64, formula)):
        own, kept = leaves(inputs, dtype), g.clone()
        p = run(label, own["z"], {name: x for name, x in own.items() if name != "z"})
        results.append({"weights": p, **derivatives(p, own, g)})
        assert torch.equal(g, kept)
        assert all(torch.equal(x.to(dtype), own[name]) for name, x in inputs.items()), "inputs are only read"
        inputs = own  # the formula takes the rounded numbers
    close(*results, tolerance)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("label", CASES)
def test_float64_equals_the_formula(label: str, n: int) -> None:
    compare(label, scores(n), False, 1e-11)


@pytest.mark.parametrize("n", [1, 2, 33, 513, 1000])
@pytest.mark.parametrize("label", [label for label in CASES if set(Spec.parse(label).params)])
def test_float64_with_numbers_of_every_row(label: str, n: int) -> None:
    """alpha, r, margin and bias as tensors, with their gradients."""
    compare(label, scores(n), True, 1e-9 if "0.5" in label else 1e-11)


@pytest.mark.parametrize("n", [1, 31, 32, 129, 512, 513, 8192])
@pytest.mark.parametrize("label", [label for label in CASES if "0.5" not in label])
def test_float32_equals_the_formula(label: str, n: int) -> None:
    """float32's own rounding alone. With r < 1 it is magnified without bound at the threshold."""
    compare(label, scores(n, torch.float32), False, 1e-5)


@pytest.mark.parametrize(
    "label", ["biweight*adaptive", "epanechnikov*anchored(margin=1.1)", f"gaussian*nearest(k={K})"]
)
def test_65536_columns(label: str) -> None:
    compare(label, scores(65536)[3:4], False, 1e-11)
    compare(label, scores(65536, torch.float32)[:1], False, 1e-5)


@pytest.mark.parametrize("border", [base.TILE, base.GAP * base.TILE, base.SPAN])
@pytest.mark.parametrize("label", [CASES[1], CASES[6], CASES[15], f"biweight*nearest(k={K})"])
def test_keys_at_either_side_of_a_border(label: str, border: int) -> None:
    """One column in reach here and one there, at every place where a tile, a gap or a span may end."""
    n = 4 * base.SPAN + 5
    z = torch.full((12, n), -50.0, dtype=torch.float64)
    for i in range(12):
        first = border * (1 + i % 3)
        for place, score in ((first - 1, 0.2), (first, 0.1), (first + border - 1, 0.35), (n - 1 - i, 0.0), (i, -0.1)):
            z[i, place] = score + 0.01 * i
        z[i, first + 1] = -INF
    compare(label, z, False, 1e-11)


@pytest.mark.parametrize("k", [1, 31, 32, 33, 512, 999, 1000, 1001, 5000])
@pytest.mark.parametrize("kernel", ["gaussian", "uniform", "epanechnikov"])
def test_any_number_of_nearest_keys(kernel: str, k: int) -> None:
    compare(f"{kernel}*nearest(k={k})", scores(1000), False, 1e-11)


def everything(label: str, z: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    leaf = z.clone().requires_grad_()
    p = solve(label, leaf, numbers(Spec.parse(label), torch.zeros(1, dtype=z.dtype), False))
    return p.detach(), derivatives(p, {"z": leaf}, g)["z"]


@pytest.mark.parametrize("label", CASES)
def test_bits_of_a_row_do_not_depend_on_other_rows_or_threads(label: str) -> None:
    z = torch.cat([scores(1000, torch.float32), scores(1000, torch.float32).flip(-1)])
    g = torch.randn(z.shape, generator=torch.Generator().manual_seed(2))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(everything(label, z, g))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    alone = [everything(label, z[i : i + 1], g[i : i + 1]) for i in range(len(z))]
    for one, two, rows in zip(*found, zip(*alone, strict=True), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, torch.cat(rows))


def test_calls_from_several_python_threads_at_once() -> None:
    labels = list(CASES)
    inputs = [(label, scores(500 + i), torch.ones(R, 500 + i).double()) for i, label in enumerate(labels * 3)]
    serial = [everything(*given) for given in inputs]
    before = torch.get_num_threads()
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda given: everything(*given), inputs))
    assert torch.get_num_threads() == before
    assert all(all(map(torch.equal, one, other)) for one, other in zip(serial, together, strict=True))


def test_what_weighs_nothing_passes_nothing_on_not_even_nan() -> None:
    """dL/dp = NaN or infinity at a key without weight is multiplied by nothing."""
    z = torch.tensor([[0.5, 0.4, -9.0, -INF, 0.3] + [-20.0] * 100], dtype=torch.float64)
    g = torch.ones_like(z).cumsum(-1)
    bad = g.clone()
    bad[0, 3], bad[0, 50], bad[0, 80] = float("nan"), INF, float("nan")
    fixed = f"epanechnikov*fixed(bias={W})"
    for label in ("biweight*adaptive", "epanechnikov*anchored", fixed, "gaussian*nearest(k=3)"):
        leaf = z.clone().requires_grad_()
        p = solve(label, leaf, numbers(Spec.parse(label), torch.zeros(1, dtype=torch.float64), False))
        clean, found = (torch.autograd.grad(p, leaf, x, retain_graph=True)[0] for x in (g, bad))
        assert torch.equal(clean, found), label


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("r", [0.5, 1.0, 1.5, 2.0, 3.0, 10.0])
def test_every_search_converges(r: float, dtype: torch.dtype) -> None:
    """On all kinds of rows, far from zero too; and what was found is reported."""
    for n in (1, 33, 1000, 8192):
        for scale, shift in ((1.0, 0.0), (1e-3, 0.0), (1.0, 1e3), (100.0, -1e4)):
            z = scores(n, dtype) * scale + shift
            key = z.view(1, R, n, 1)
            query = torch.ones(1, R, 1, 1, dtype=dtype)
            _, found = regard.attention(
                query, key, key.nan_to_num(neginf=0.0), f"polynomial(r={r})*adaptive", scale=1.0, impl="cpu",
                attn_mask=(key > -INF).transpose(-1, -2), return_diagnostics=True,
            )  # fmt: skip
            assert not bool(found.status.any())


PROGRAM = """
import json, sys, time
import torch, regard
assert "numba" not in sys.modules, "import regard imports numba"
z = torch.linspace(-1, 1, 500).reshape(2, 250).requires_grad_()
p = regard.entmax(z, 1.5, impl="cpu")
assert "numba" in sys.modules
(p * z.detach()).sum().backward()
from regard.pairwise.cpu import rows
entries = [rows.forward, rows.backward, rows.forward_part, rows.backward_part]  # by the number of threads
stats = [d.stats for d in entries]
print(json.dumps({
    "hits": sum(sum(s.cache_hits.values()) for s in stats),
    "misses": sum(sum(s.cache_misses.values()) for s in stats),
    "parts": sum(len(d.overloads) for m in list(sys.modules.values())
                 if m.__name__.startswith("regard.pairwise.cpu.rows.")
                 for d in vars(m).values() if hasattr(d, "overloads") and d not in entries),
    "p": p.tolist(), "grad": z.grad.tolist(),
}))
"""


def run(program: str, **environment: str) -> Any:
    """What a fresh process prints, as JSON."""
    return json.loads(python("-c", program, **environment))


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path: Any) -> None:
    first, second = (run(PROGRAM, NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2))
    assert (first["hits"], first["misses"]) == (0, 2)
    assert (second["hits"], second["misses"]) == (2, 0)
    assert first["parts"] > 0 == second["parts"]
    assert (first["p"], first["grad"]) == (second["p"], second["grad"])


FORK = """
import json, os, torch, regard
torch.set_num_threads(2)
z = torch.linspace(-1, 1, 400000).reshape(400, 1000)
p = regard.entmax(z, 1.5, impl="cpu")
torch.set_num_threads(1)
assert torch.equal(regard.entmax(z, 1.5, impl="cpu"), p)
torch.set_num_threads(2)
child = os.fork()
if child == 0:
    torch.set_num_threads(1)  # as a data loader's worker does: torch's own threads do not survive a fork
    os._exit(0 if torch.equal(regard.entmax(z, 1.5, impl="cpu"), p) else 3)
print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_threads_and_a_forked_process_change_no_bit() -> None:
    """Workers of a data loader are forked."""
    assert run(FORK, NUMBA_NUM_THREADS="2", OMP_NUM_THREADS="2") == 0


BOUNDS = """
import json, torch, regard
def attend(spec, keys, **how):
    make = torch.Generator().manual_seed(keys)
    q, k, v = (torch.randn(1, 1, n, 4, generator=make).requires_grad_() for n in (40, keys, keys))
    regard.attention(q, k, v, spec, impl="cpu", **how).sum().backward()
specs = "biweight*nearest(k=3)", "gaussian*nearest(k=3)", "biweight", "relumax", "epanechnikov*fixed(empty=nearest)"
for spec in specs:
    for keys in (1, 127, 128, 129, 256):
        for how in ({}, {"is_causal": True}, {"exclude_self": True, "query_offset": -5},
                    {"is_causal": True, "window": 4, "query_offset": torch.tensor([keys])},
                    {"is_causal": True, "window": 3, "query_offset": 2 * keys},
                    {"window": 4, "query_offset": torch.tensor([keys - 2])}):
            attend(spec, keys, **how)
calls = (regard.entmax, regard.sparsemax, regard.relumax, regard.normrelu,
         lambda z, impl: regard.topk_softmax(z, 7, impl=impl), lambda z, impl: regard.entmax(z, 3.0, impl=impl))
for n in (1, 31, 32, 33, 63, 64, 65, 511, 512, 513, 1500):
    z = torch.randn(3, n, generator=torch.Generator().manual_seed(n))
    z[1] = -torch.inf
    for call in calls:
        leaf = z.clone().requires_grad_()
        call(leaf, impl="cpu").square().sum().backward()
print(json.dumps(True))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_is_read_or_written_outside_its_array(tmp_path: Any) -> None:
    """With numba's check of every index, which compiles another program."""
    assert run(BOUNDS, NUMBA_CACHE_DIR=str(tmp_path), NUMBA_BOUNDSCHECK="1")
