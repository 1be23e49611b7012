"""The public face: names, what importing costs, signatures."""

import inspect
import re

import pytest
from programs import python

import regard

NAMES = {
    *("Diagnostics", "Spec", "attention", "checks", "entmax", "explain", "normrelu", "presets"),
    *("registries", "relumax", "segment_ids", "sparsemax", "topk_softmax", "topk_uniform", "varlen_attention"),
}


def ran(code: str) -> str:
    return python("-c", code).strip()


def test_names() -> None:
    assert set(regard.__all__) >= NAMES
    assert all(hasattr(regard, name) for name in regard.__all__)
    assert [name for name in NAMES if len(getattr(regard, name).__doc__ or "") <= 20] == []
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", regard.__version__)


def test_signature_of_attention() -> None:
    parameters = inspect.signature(regard.attention).parameters
    assert list(parameters) == [
        "query", "key", "value", "spec", "attn_mask", "is_causal", "exclude_self", "window", "query_offset",
        "segment_ids", "scale", "params", "enable_gqa", "layout", "impl", "return_diagnostics",
    ]  # fmt: skip
    defaults = {n: p.default for n, p in parameters.items() if p.default is not inspect.Parameter.empty}
    assert {n: x for n, x in defaults.items() if x} == {"spec": "softmax", "layout": "bhtd", "impl": "auto"}
    off = ("is_causal", "exclude_self", "enable_gqa", "return_diagnostics")
    assert all(defaults[n] is (False if n in off else None) for n in list(parameters)[4:] if not defaults[n])
    assert [n for n, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY] == list(parameters)[4:]


def test_import_and_calls_need_torch_alone() -> None:
    """The import loads no other package, and calls need none: optional packages are hidden from them."""
    code = """
import sys

HIDDEN = ("transformers", "accelerate", "tokenizers", "safetensors", "tyro", "rich", "matplotlib", "jinja2",
          "numba", "triton", "entmax", "statsmodels", "scipy", "pytest", "hypothesis", "datasets", "lm_eval")
import torch
torch_alone = set(sys.modules)
import regard
regard.attention
new = {m.split(".")[0] for m in set(sys.modules) - torch_alone}
third = {m for m in new if m not in sys.stdlib_module_names and m not in ("regard", "torch", "__editable__")}
assert not third, third
assert "torch._dynamo" not in sys.modules, "the compiler takes seconds to import; load it when it is used"
sys.modules.update(dict.fromkeys(HIDDEN))  # None: importing it fails
x = torch.zeros(1, 1, 2, 4, requires_grad=True)
for spec in regard.presets():
    regard.attention(x, x, x, spec, is_causal=True).sum().backward()
print(sorted(regard.presets())[0])
"""
    assert ran(code) == "biweight"


def test_the_global_state_of_torch_is_left_alone() -> None:
    code = """
import torch
def state():
    settings = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    return torch.get_rng_state().tolist(), settings
before = state()
import regard
x = torch.zeros(1, 1, 2, 4)
regard.attention(x, x, x, "biweight")
assert state() == before
"""
    ran(code)


def test_the_import_waits_for_the_first_name() -> None:
    code = """
import sys, regard
print("torch" in sys.modules, end=" ")
print(sorted(set(regard.__all__) - set(dir(regard))), hasattr(regard, "nonsense"), regard.nn.__name__, end=" ")
print(callable(regard.registries), end=" ")
print([m for m in ("regard.models", "regard.tasks", "regard_recipes.long_text.needle") if m in sys.modules], end=" ")
print("mqar" in regard.registries()["task"])
"""
    assert ran(code) == "False [] False regard.nn True [] True"


def test_names_may_be_used_first_inside_a_graph() -> None:
    """Neither the lazy package nor a subpackage imported alone breaks a graph that is compiled as a whole."""
    lazy = """
import torch, regard
x = torch.randn(1, 1, 5, 4)
f = torch.compile(lambda q: regard.attention(q, q, q, "biweight"), backend="eager", fullgraph=True)
print(torch.equal(f(x), regard.attention(x, x, x, "biweight")))
"""
    alone = """
import torch
from regard.nn import Attention
from regard.pairwise.attention import attention
x = torch.randn(1, 1, 5, 4)
f = torch.compile(lambda q: attention(q, q, q, "biweight"), backend="eager", fullgraph=True)
print(torch.equal(f(x), attention(x, x, x, "biweight")))
"""
    assert ran(lazy) == ran(alone) == "True"


@pytest.mark.slow
def test_any_package_may_be_imported_first() -> None:
    code = r"""
import gc, importlib, multiprocessing, pathlib, warnings
warnings.simplefilter("ignore")
import torch, transformers, regard
transformers.PreTrainedModel

def held(first):
    try:
        importlib.import_module(first)
    except BaseException as error:
        return {"error": repr(error)}
    from regard.registry import Registry
    kinds = [o for o in gc.get_objects() if type(o) is Registry and o.kind not in ("recipe", "model", "token mixer")]
    return {registry.kind: registry.names() for registry in kinds}

root = pathlib.Path(regard.__file__).parent
packages = sorted(".".join(("regard", *path.parent.relative_to(root).parts)) for path in root.rglob("__init__.py"))
with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:  # a process for each
    found = pool.map(held, ["regard.public", *packages], chunksize=1)
for first, registries in zip(["regard.public", *packages], found):
    for kind, names in registries.items():
        if kind == "error" or names != found[0].get(kind, names):
            print(first, kind, names)
"""
    assert ran(code) == ""


def test_an_import_without_its_extra_names_the_command_that_installs_it() -> None:
    code = """
import sys
sys.modules["transformers"] = None
for name in ("models", "integrations.transformers", "training"):
    try:
        exec(f"from regard.{name} import *")
    except ModuleNotFoundError as error:
        print(error)
"""
    assert ran(code).splitlines() == ["transformers is not installed; pip install 'regard[lm]'"] * 3
