"""The public face: names, what importing costs, signatures."""

import inspect
import re

import pytest
import torch
from programs import python

import regard

NAMES = {
    *("ArgumentError", "Diagnostics", "Spec", "attention", "checks", "entmax", "explain", "normrelu", "presets"),
    *("registries", "relumax", "segment_ids", "sparsemax", "topk_softmax", "topk_uniform", "varlen_attention"),
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
        "segment_ids", "scale", "params", "enable_gqa", "layout", "impl", "return_diagnostics",
    ]  # fmt: skip
    defaults = {n: p.default for n, p in parameters.items() if p.default is not inspect.Parameter.empty}
    assert {n: x for n, x in defaults.items() if x} == {"spec": "softmax", "layout": "bhtd", "impl": "auto"}
    off = ("is_causal", "exclude_self", "enable_gqa", "return_diagnostics")
    assert all(defaults[n] is (False if n in off else None) for n in list(parameters)[4:] if not defaults[n])
    keyword = [n for n, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert keyword == list(parameters)[4:]


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
state = torch.get_rng_state(), torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
import regard
x = torch.zeros(1, 1, 2, 4)
regard.attention(x, x, x, "biweight")
after = torch.get_rng_state(), torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
assert torch.equal(state[0], after[0]) and state[1:] == after[1:]
"""
    ran(code)


def test_errors_are_caught_by_one_name() -> None:
    with pytest.raises(regard.checks.ArgumentError):
        regard.attention(torch.zeros(1), torch.zeros(1), torch.zeros(1))


def ran(code: str) -> str:
    """What a program in a process of its own prints."""
    return python("-c", code).strip()


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
    """Whatever comes first, nothing fails, and registries hold the same names in the same order."""
    code = r"""
import gc, importlib, os, pathlib, sys, warnings
warnings.simplefilter("ignore")
import torch, transformers, regard
transformers.PreTrainedModel

def held(first):
    importlib.import_module(first)
    from regard.registry import Registry
    kinds = [o for o in gc.get_objects() if type(o) is Registry and o.kind not in ("recipe", "model", "token mixer")]
    return {registry.kind: registry.names() for registry in kinds}

def apart(first):
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            found = repr(held(first))
        except BaseException as error:
            found = repr({"error": repr(error)})
        with open(write, "w") as file:
            file.write(found)
        os._exit(0)
    os.close(write)
    with open(read) as file:
        found = eval(file.read())
    os.wait()
    return found

root = pathlib.Path(regard.__file__).parent
names = sorted(".".join(("regard", *path.parent.relative_to(root).parts)) for path in root.rglob("__init__.py"))
whole = apart("regard.public")
for name in names:
    for kind, found in apart(name).items():
        if found != whole.get(kind, found):
            print(name, kind, found)
        if kind == "error":
            print(name, found)
"""
    assert ran(code) == ""


WITHOUT_TRANSFORMERS = """
import sys
sys.modules["transformers"] = None
for name in ("models", "integrations.transformers", "training"):
    try:
        exec(f"from regard.{name} import *")
    except ModuleNotFoundError as error:
        print(name, error)
"""


def test_an_import_without_its_extra_names_the_command_that_installs_it() -> None:
    command = "transformers is not installed; pip install 'regard[lm]'"
    assert ran(WITHOUT_TRANSFORMERS).splitlines() == [
        f"{name} {command}" for name in ("models", "integrations.transformers", "training")
    ]
