"""torch.compile: one whole graph for all lengths, equal to eager, forward and backward; custom operators."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from operators import check_operators
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import regard

from .cases import PRESETS, REPRESENTATIVES, SPECS, Data, close, draw, gradients, learned, named

LENGTHS = (5, 24, 33, 64, 70)  # on both sides of the presets' k = 32
OPCHECKED = ("biweight", "normrelu", "topk-softmax", "cosine", "local-linear")
INDUCTOR = ("softmax", "biweight", "relumax", "shift-cosine")


pytestmark = pytest.mark.usefixtures("fresh_dynamo")
Run = Callable[..., Tensor]


def compiles(run: Run, backend: str, steps: Iterable[Callable[[Run], None]]) -> None:
    """Each step calls the compiled function at another length; whatever the first step compiles (dynamo may
    start again within it, once it knows which numbers are constants) serves them all."""
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(run, backend=counter, fullgraph=True, dynamic=True)
    counts = []
    for step in steps:
        step(compiled)
        counts.append(counter.frame_count)
    assert counts[0] >= 1
    assert counts == counts[:1] * len(LENGTHS)


def equal(run: Run, compiled: Run, data: Data) -> None:
    eager, traced = data.leaves(), data.leaves()
    out, again = run(*eager.tensors), compiled(*traced.tensors)
    close(again, out, 2e-6, "output")
    close(gradients(again, named(traced)), gradients(out, named(eager)), 1e-5, "gradients")


ONE_GRAPH = [
    *((name, impl, "aot_eager") for name in PRESETS for impl in ("auto", "reference")),
    *((name, "auto", "inductor") for name in INDUCTOR),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "impl", "backend"), ONE_GRAPH)
def test_one_graph_for_all_lengths(name: str, impl: str, backend: str) -> None:

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.attention(q, k, v, name, is_causal=True, impl=impl)

    def at(length: int) -> Callable[..., None]:
        return lambda compiled: equal(run, compiled, draw(length, dtype=torch.float32, seed=length))

    compiles(run, backend, map(at, LENGTHS))


@pytest.mark.slow
@pytest.mark.parametrize("label", REPRESENTATIVES)
def test_one_graph_with_every_argument(label: str) -> None:
    """Masks, a window, offsets, grouped heads, learned numbers and scale; other lengths of queries and keys."""
    spec = SPECS[label]

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, offset: Tensor, rest: Any, scale: Any) -> Tensor:
        how = {"attn_mask": mask, "query_offset": offset, "params": rest, "scale": scale}
        return regard.attention(q, k, v, spec, is_causal=True, window=9, enable_gqa=True, **how)

    def check(compiled: Run, queries: int, keys: int) -> None:
        data = draw(queries, keys, heads=4, kv_heads=2, dtype=torch.float32).leaves()
        mask = torch.ones(2, 1, 1, keys, dtype=torch.bool)
        mask[0, ..., :3] = False
        params, scale = learned(spec, data)
        given = (*data.tensors, mask, torch.tensor([keys - queries, 2]), params, scale)
        out, again = run(*given), compiled(*given)
        close(again, out, 2e-6)
        inputs = named(data, params, scale)
        close(gradients(again, inputs), gradients(out, inputs), 2e-5)

    sizes = ((5, 7), (24, 40), (33, 34), (12, 20), (9, 50))
    compiles(run, "aot_eager", [partial(check, queries=q, keys=k) for q, k in sizes])


def test_two_texts_that_were_never_parsed_in_one_graph() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = regard.attention(q, k, v, "polynomial(r=1.2031)*adaptive", is_causal=True)
        second = regard.interpolated_attention(q, k, v, "mesa(ridge=0.2031)", "biweight*anchored(margin=1.2031)")
        return first + second + regard.interpolated_attention(q, k, v, "linear-attention(log_decay=-0.2031)")

    data = draw(5, dtype=torch.float32)
    close(torch.compile(run, backend="eager", fullgraph=True)(*data.tensors), run(*data.tensors), 2e-6)


def test_decoding_compiles_once() -> None:

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.attention(q, k, v, "biweight", is_causal=True)

    def check(compiled: Run, keys: int) -> None:
        data = draw(1, keys, dtype=torch.float32)
        with torch.no_grad():
            close(compiled(*data.tensors), run(*data.tensors), 2e-6)

    compiles(run, "aot_eager", [partial(check, keys=keys) for keys in (6, 17, 33, 40, 66)])


@pytest.mark.parametrize(
    "name",
    [
        "relumax",
        "topk_softmax",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("entmax", "sparsemax", "normrelu", "topk_uniform")),
    ],
)
def test_normalisers_compile_once(name: str) -> None:
    """The weightings on plain scores, forward and backward."""
    extra = (3,) if name.startswith("topk") else ()

    def run(z: Tensor) -> Tensor:
        return getattr(regard, name)(z, *extra)

    def check(compiled: Run, length: int) -> None:
        z = draw(length, dtype=torch.float32).q.transpose(2, 3).contiguous()
        one, two = z.clone().requires_grad_(), z.clone().requires_grad_()
        out, again = run(one), compiled(two)
        close(again, out, 2e-6)
        if out.requires_grad:
            close(gradients(again, {"z": two})["z"], gradients(out, {"z": one})["z"], 1e-5)

    compiles(run, "aot_eager", [partial(check, length=length) for length in LENGTHS])


@pytest.mark.parametrize(
    "label",
    [
        pytest.param(label, marks=() if label in OPCHECKED else pytest.mark.slow)
        for label in [*REPRESENTATIVES, *(label for label in SPECS if "linear(ridge=0.3" in label)]
    ],
)
def test_opcheck(label: str) -> None:
    """torch.library.opcheck on every operator of ours that a forward and a backward pass calls."""
    mask = torch.ones(2, 1, 6, 9, dtype=torch.bool)
    mask[0, 0, 3] = False
    spec = SPECS[label]
    for how in ({"is_causal": True}, {"attn_mask": mask, "exclude_self": True, "query_offset": torch.tensor([3, 5])}):
        data = draw(6, 9, heads=4, kv_heads=2, dtype=torch.float32).leaves()
        params, scale = learned(spec, data)
        call = partial(regard.attention, *data.tensors, spec, params=params, scale=scale, enable_gqa=True, **how)
        check_operators(partial(call, impl="blocked"), "blocked")
