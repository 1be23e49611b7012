"""Importing takes torch alone, and another package's part joins in through an entry point."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

import regard

ROOT = Path(__file__).parents[2]

KERNEL = '''
"""A kernel of somebody else's: the logistic kernel, K(d) = 2 / (1 + exp(d)) relative to the best key."""
from dataclasses import dataclass
from typing import ClassVar

import torch

from regard.grammar import kernels


@kernels.register("logistic")
@dataclass(frozen=True)
class Logistic:
    name: ClassVar[str] = "logistic"
    compact: ClassVar[bool] = False
    vanishes: ClassVar[bool] = False
    ranked: ClassVar[bool] = True
    scaled: ClassVar[bool] = True
    nonnegative: ClassVar[bool] = True
    bandwidth: ClassVar[str] = "fixed"
    params: ClassVar[dict] = {}

    def relative(self, d, reach, params):
        return torch.where(d < reach, 2 * torch.sigmoid(-d), 0)

    def relative_slope(self, d, reach, params):
        return torch.where(d < reach, 2 * torch.sigmoid(-d) * torch.sigmoid(d), 0)

    def value(self, a, params):
        return torch.sigmoid(a)

    def slope(self, a, params):
        return torch.sigmoid(a) * torch.sigmoid(-a)
'''


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as pip leaves it: a module, and metadata with an entry point."""
    site = tmp_path_factory.mktemp("site")
    (site / "somebody_elses_kernel.py").write_text(KERNEL)
    info = site / "somebody_else-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebody-else\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[regard.kernels]\nlogistic = somebody_elses_kernel\n")
    return site


def run(program: str, *extra: Path) -> str:
    """Standard output of a fresh interpreter."""
    path = os.pathsep.join([*map(str, extra), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", dedent(program)], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_takes_torch_alone() -> None:
    """Neither transformers nor triton, nor anything else that `import torch` has not loaded already."""
    found = json.loads(
        run("""
        import json, sys
        import torch
        before = {name.partition(".")[0] for name in sys.modules}
        import regard
        after = {name.partition(".")[0] for name in sys.modules}
        known = set(sys.stdlib_module_names) | before | {"regard"}
        print(json.dumps([sorted(after - known), sorted(after)]))
        """)
    )
    assert found[0] == []
    assert not {"transformers", "triton", "numba", "matplotlib", "tokenizers", "scipy"} & set(found[1])


def test_a_call_takes_torch_alone() -> None:
    """Not on the first call either."""
    names = run("""
        import sys, torch, regard
        x = torch.randn(1, 1, 4, 3, requires_grad=True)
        for spec in regard.presets():
            regard.attention(x, x, x, spec, is_causal=True).sum().backward()
        print(*sys.modules)
        """).split()
    assert not {"transformers", "triton", "numba", "matplotlib", "scipy"} & set(names)


def test_a_kernel_of_another_package(installed: Path) -> None:
    """Listed, parsed, printed and computed: by its formula here, in every implementation, with right gradients."""
    out = run(
        """
        import torch, regard
        assert "logistic" in regard.registries()["kernel"].names()
        spec = regard.Spec.parse("logistic*nearest(k=4)")
        assert str(spec) == "logistic*nearest(k=4)" and regard.Spec.from_json(spec.to_json()) == spec
        try:
            regard.Spec.parse("logistik")
        except regard.checks.ArgumentError as error:
            assert "'logistic'" in str(error), error
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 2, 7, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
        z = (q @ k.transpose(-1, -2) * 3**-0.5).masked_fill(~torch.ones(7, 7, dtype=torch.bool).tril(), -torch.inf)
        d = z.amax(-1, keepdim=True) - z
        w = 2 / (1 + d.exp())
        truth = (w / w.sum(-1, keepdim=True)) @ v
        # The best score anchors the arithmetic and has no gradient: a kernel of the distance alone would give one.
        for impl in ("reference", "blocked", "auto"):
            got = regard.attention(q, k, v, "logistic", is_causal=True, impl=impl)
            assert (got - truth).abs().max() < 1e-12, impl
        for sentence in ("logistic", "logistic*anchored(margin=0.7)", "logistic*nearest(k=3)", "logistic*fixed*unnormalised"):
            outs = [regard.attention(q, k, v, sentence, is_causal=True, impl=i) for i in ("reference", "blocked")]
            assert (outs[0] - outs[1]).abs().max() < 1e-12, sentence
            one, two = (torch.autograd.grad((o * torch.cos(o.detach())).sum(), (q, k, v)) for o in outs)
            assert all((a - b).abs().max() < 1e-11 for a, b in zip(one, two)), sentence
        assert regard.attention(q, k, v, "logistic*linear(ridge=0.1)").isfinite().all()
        print("passed")
        """,
        installed,
    )
    assert out == "passed\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_kernel_of_another_package_is_held_to_the_contracts(installed: Path) -> None:
    """The contracts of this folder, run with that package installed, enumerate its kernel with no edit."""
    env = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "pytest", str(ROOT / "tests/contracts"), "-q", "-k", "logistic and not compile"]
    command += ["-m", "not slow", "-p", "no:cacheprovider", "--no-header"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=880)
    assert done.returncode == 0, done.stdout[-4000:]
    count = int(done.stdout.splitlines()[-1].split(" passed")[0].split()[-1])
    assert count > 150


def test_nothing_built_in_can_be_replaced() -> None:
    with pytest.raises(regard.checks.ArgumentError, match="registered already"):
        regard.registries()["kernel"].register("gaussian")(object)
