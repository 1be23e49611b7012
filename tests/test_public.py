"""The public face: names, what importing costs, signatures."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import pytest
import torch

import regard

NAMES = {
    "ArgumentError",
    "Diagnostics",
    "Spec",
    "attention",
    "checks",
    "entmax",
    "explain",
    "normrelu",
    "presets",
    "registries",
    "relumax",
    "sparsemax",
    "topk_softmax",
    "topk_uniform",
}


def test_names() -> None:
    assert NAMES - {"ArgumentError"} <= set(regard.__all__)
    for name in regard.__all__:
        assert hasattr(regard, name)
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", regard.__version__)


@pytest.mark.parametrize("name", sorted(n for n in NAMES if n not in ("ArgumentError", "checks")))
def test_every_public_object_is_documented(name: str) -> None:
    found = getattr(regard, name)
    assert found.__doc__
    assert len(found.__doc__) > 20
    if inspect.isfunction(found):
        hints = inspect.signature(found).parameters.values()
        assert all(p.annotation is not inspect.Parameter.empty for p in hints)


def test_signature_of_attention() -> None:
    parameters = inspect.signature(regard.attention).parameters
    assert list(parameters) == [
        "query", "key", "value", "spec", "attn_mask", "is_causal", "exclude_self", "window", "query_offset",
        "segment_ids", "scale", "params", "enable_gqa", "impl", "return_diagnostics",
    ]  # fmt: skip
    defaults = {n: p.default for n, p in parameters.items() if p.default is not inspect.Parameter.empty}
    assert defaults == {
        "spec": "softmax",
        "attn_mask": None,
        "is_causal": False,
        "exclude_self": False,
        "window": None,
        "query_offset": None,
        "segment_ids": None,
        "scale": None,
        "params": None,
        "enable_gqa": False,
        "impl": "auto",
        "return_diagnostics": False,
    }
    keyword = [n for n, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert keyword == list(parameters)[4:]


def test_import_needs_torch_alone() -> None:
    """No optional dependency is imported, and none is needed: they are hidden here."""
    code = """
import sys

HIDDEN = ("transformers", "accelerate", "tokenizers", "safetensors", "tyro", "rich", "matplotlib", "jinja2",
          "numba", "triton", "entmax", "statsmodels", "scipy", "pytest", "hypothesis", "datasets", "lm_eval")
sys.modules.update(dict.fromkeys(HIDDEN))  # None: importing it fails
import torch
torch_alone = set(sys.modules)
import regard
new = {m.split(".")[0] for m in set(sys.modules) - torch_alone}
third = {m for m in new if m not in sys.stdlib_module_names and m not in ("regard", "torch", "__editable__")}
assert not third, third
assert "torch._dynamo" not in sys.modules, "the compiler takes seconds to import; load it when it is used"
x = torch.zeros(1, 1, 2, 4)
regard.attention(x, x, x, "biweight")
print(sorted(regard.presets())[0])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "biweight"


def test_the_global_state_of_torch_is_left_alone() -> None:
    code = """
import torch
state = torch.get_rng_state(), torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
import regard
x = torch.zeros(1, 1, 2, 4)
regard.attention(x, x, x, "biweight")
after = torch.get_rng_state(), torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
assert torch.equal(state[0], after[0]) and state[1:] == after[1:]
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr


def test_errors_are_caught_by_one_name() -> None:
    with pytest.raises(regard.checks.ArgumentError):
        regard.attention(torch.zeros(1), torch.zeros(1), torch.zeros(1))
