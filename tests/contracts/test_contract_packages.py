"""Another package's part joins in through an entry point."""

import os
from pathlib import Path
from textwrap import dedent

import pytest
from mistakes import refuses
from programs import python

import regard

ROOT = Path(__file__).parents[2]

KERNEL = '''
"""Kernels of somebody else's: expm1(a), which ends at its threshold, and softplus of the score itself."""
from dataclasses import dataclass
from typing import ClassVar

import torch

from regard.grammar.kernels.base import Kernel, RankedKernel, kernels


@kernels.register("expm1")
@dataclass(frozen=True)
class Expm1(RankedKernel):
    compact: ClassVar[bool] = True
    vanishes: ClassVar[bool] = True
    bandwidth: ClassVar[str] = "anchored"

    def relative(self, d, reach, params):
        inside = d < reach
        w = torch.expm1(-torch.where(inside, d, 0)) - torch.expm1(-reach)
        return torch.where(inside, w / -torch.expm1(-reach), 0)

    def relative_slope(self, d, reach, params):
        inside = d < reach
        return torch.where(inside, torch.exp(-torch.where(inside, d, 0)) / -torch.expm1(-reach), 0)

    def value(self, a, params):
        return torch.expm1(torch.relu(a))

    def slope(self, a, params):
        return torch.where(a > 0, torch.exp(torch.relu(a)), 0)


@kernels.register("softplus")
@dataclass(frozen=True)
class Softplus(Kernel):
    scaled: ClassVar[bool] = True

    def value(self, a, params):
        return torch.nn.functional.softplus(a)

    def slope(self, a, params):
        return torch.sigmoid(a)
'''


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as pip leaves it: a module, and metadata with an entry point."""
    site = tmp_path_factory.mktemp("site")
    (site / "somebody_elses_kernels.py").write_text(KERNEL)
    info = site / "somebody_else-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebody-else\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[regard.kernels]\nexpm1 = somebody_elses_kernels\n")
    return site


def run(program: str, *extra: Path) -> str:
    path = os.pathsep.join([*map(str, extra), os.environ.get("PYTHONPATH", "")])
    return python("-c", dedent(program), PYTHONPATH=path, OMP_NUM_THREADS="1")


def test_a_kernel_of_another_package(installed: Path) -> None:
    """Listed, parsed, printed and computed: by its formula here, in every implementation, gradients too."""
    out = run(
        """
        import torch, regard
        assert {"expm1", "softplus"} <= set(regard.registries()["kernel"].names())
        spec = regard.Spec.parse("expm1*nearest(k=4)")
        assert str(spec) == "expm1*nearest(k=4)" and regard.Spec.from_json(spec.to_json()) == spec
        try:
            regard.Spec.parse("softplug")
        except regard.checks.ArgumentError as error:
            assert "'softplus'" in str(error), error
        else:
            raise AssertionError("a misspelt name was accepted")
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 2, 7, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
        z = q @ k.transpose(-1, -2) * 3**-0.5
        seen = torch.ones(7, 7, dtype=torch.bool).tril()
        best = z.masked_fill(~seen, -torch.inf).amax(-1, keepdim=True)
        truth = {
            "expm1*anchored(margin=0.7)": torch.expm1(torch.relu(z - best + 0.7)),
            "expm1*fixed(bias=4)": torch.expm1(torch.relu(z + 4)),
            "softplus": torch.log1p(z.exp()),
        }
        for spec, w in truth.items():
            w = torch.where(seen, w, 0)
            out = (w / w.sum(-1, keepdim=True)) @ v
            expected = torch.autograd.grad(out.sin().sum(), (q, k, v), retain_graph=True)
            for impl in ("reference", "blocked", "auto"):
                got = regard.attention(q, k, v, spec, is_causal=True, impl=impl)
                assert (got - out).abs().max() < 1e-12, (spec, impl)
                grads = torch.autograd.grad(got.sin().sum(), (q, k, v))
                assert all((a - b).abs().max() < 1e-11 for a, b in zip(grads, expected)), (spec, impl)
        assert regard.attention(q, k, v, "softplus*linear(ridge=0.1)").isfinite().all()
        w = torch.where(seen, truth["expm1*anchored(margin=0.7)"], 0).detach()
        away = k[..., None, :, :] - q[..., :, None, :]
        design = torch.cat([torch.ones_like(away[..., :1]), away], -1)
        gram = torch.einsum("bhij,bhija,bhijc->bhiac", w, design, design)
        gram = gram + 0.2 * torch.diag(torch.tensor([0.0, 1, 1, 1], dtype=torch.float64))
        expected = torch.linalg.solve(gram, torch.einsum("bhij,bhija,bhjd->bhiad", w, design, v))[..., 0, :]
        for impl in ("reference", "blocked"):
            spec = "expm1*anchored(margin=0.7)*linear(ridge=0.2,ridge_mode=absolute)"
            got = regard.attention(q, k, v, spec, is_causal=True, impl=impl)
            assert (got - expected).abs().max() < 1e-11, impl
        print("passed")
        """,
        installed,
    )
    assert out == "passed\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_kernel_of_another_package_is_held_to_the_contracts(installed: Path) -> None:
    """The contracts of this folder, run with that package installed, enumerate its kernel with no edit."""
    chosen = ["-k", "(expm1 or softplus) and not compile and not length_1000"]
    words = ("-m", "pytest", ROOT / "tests/contracts", "-q", "-p", "no:cacheprovider", *chosen)
    found = python(*words, cwd=ROOT, timeout=880, PYTHONPATH=str(installed))
    count = int(found.splitlines()[-1].split(" passed")[0].split()[-1])
    assert count > 150


def test_nothing_built_in_can_be_replaced() -> None:
    refuses("registered already", regard.registries()["kernel"].register("gaussian"), object)
