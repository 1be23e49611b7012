"""Attention maps of a model, what is measured on them, and what is seen of local linear layers."""

import math
from dataclasses import replace

import pytest
import torch
from contracts import oracle
from mistakes import refuses
from torch import Tensor, nn

import regard
from regard.inspect.measures import AttentionMaps, attention_maps
from regard.inspect.report import Page, Section, layer_table, render
from regard.models import HybridConfig, HybridForCausalLM, ICLMConfig, ICLMForCausalLM

ALL_BACK = torch.tensor([[1.0, 0, 0], [1.0, 0, 0], [1.0, 0, 0]])
ONE_BACK = torch.tensor([[1.0, 0, 0], [1.0, 0, 0], [0, 1.0, 0]])
HERE = torch.eye(3)


def maps(*heads: torch.Tensor) -> AttentionMaps:
    weights = torch.stack(heads)[None]
    return AttentionMaps(("a", "b", "c"), weights, (weights != 0).sum(-1).float())


def small(mixers: list[str], size: float = 0.02) -> HybridForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "hidden_size": 16, "num_hidden_layers": len(mixers), "num_attention_heads": 2}
    return HybridForCausalLM(HybridConfig(**sizes, mixers=mixers, initializer_range=size))


MIXED = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [0.25, 0.25, 0.5]])
MIXED_BACK = (0 + 0.5 + 0.75) / 3


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (HERE, 0),
        (ONE_BACK, 2 / 3),
        (ALL_BACK, 1),
        (torch.zeros(3, 3), 0),
        *((MIXED * size, MIXED_BACK) for size in (1, 7, -1, torch.tensor([1, -1, 1]))),
        (ALL_BACK * torch.tensor([[0], [1], [1]]), 1.5),  # a row without weight does not count
    ],
)
def test_look_back_by_hand(head: Tensor, expected: float) -> None:
    assert maps(HERE, head).look_back().tolist()[0] == pytest.approx([0, expected])


def test_the_farthest_head_and_the_first_among_equals() -> None:
    assert maps(HERE, ALL_BACK, ONE_BACK).farthest() == (0, 1)
    assert maps(ALL_BACK, ALL_BACK).farthest() == (0, 0)


def test_what_has_no_maps() -> None:
    refuses("2 labels for 3 tokens", attention_maps, small(["softmax"]), torch.tensor([1, 2, 3]), ["a", "b"])
    plain = nn.Module()
    plain.forward = lambda input_ids, use_cache: input_ids
    refuses("no layer", attention_maps, plain, torch.tensor([1]), ["a"])
    streams = ICLMForCausalLM(ICLMConfig(vocab_size=4, hidden_size=8, num_hidden_layers=2, num_attention_heads=2))
    shapes = r"weights of different shapes, \[2, 2, 2\], \[2, 1, 1\], expected one; .*run_with_cache"
    refuses(shapes, attention_maps, streams, torch.tensor([1]), ["a"])


def test_maps_of_a_model() -> None:
    model = small(["softmax", "biweight", "topk-uniform"]).train()
    tokens = torch.tensor([3, 1, 4, 1, 5, 9, 2], dtype=torch.int32)
    found = attention_maps(model, tokens, list("abcdefg"))
    assert model.training
    assert found.weights.shape == (3, 2, 7, 7)
    assert not found.weights.requires_grad
    assert found.weights.sum(-1) == pytest.approx(1, abs=1e-5)
    assert (found.weights.triu(1) == 0).all()
    assert torch.equal(found.support, (found.weights != 0).sum(-1).float())
    visible = torch.arange(1.0, 8.0)
    assert torch.equal(found.support[0], visible.expand(2, 7))  # softmax leaves no key out
    assert torch.equal(found.weights[2], (torch.ones(7, 7).tril() / visible[:, None]).expand(2, 7, 7))


B, H, T, D = 2, 3, 12, 4


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("impl", ["reference", "blocked", "auto"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("spec", ["local-linear", "local-linear[relumax]"])
def test_diagnostics_of_degree_one(spec: str, window: int | None, impl: str) -> None:
    q, k, v = (draw(B, H, T, D, seed=seed) for seed in (1, 2, 3))
    mask = torch.ones(B, 1, 1, T, dtype=torch.bool)
    mask[0, :, :, :3] = False
    at = torch.arange(T)
    seen = (at <= at[:, None]) & (at > at[:, None] - (window or T)) & mask
    seen = seen.expand(B, H, T, T)
    eye = torch.eye(T, dtype=torch.float64).expand(B, H, T, T)
    signed, p = oracle.attention(oracle.read(regard.Spec.parse(spec)), q, k, eye, seen)
    given = {"attn_mask": mask, "is_causal": True, "window": window, "return_diagnostics": True, "impl": impl}
    out, found = regard.attention(q, k, v, spec, **given)
    torch.testing.assert_close(out, signed @ v, atol=1e-9, rtol=0)
    negative = -torch.where(signed < 0, signed, 0).sum(-1)
    torch.testing.assert_close(found.negative_mass, negative, atol=1e-9, rtol=0)
    assert negative.max() > 0.05
    visible = seen.sum(-1).double()
    share = torch.where(visible > 0, (p != 0).sum(-1) / visible.clamp(min=1), 0)
    torch.testing.assert_close(found.density, share, atol=1e-12, rtol=0)
    assert bool((found.density[0, :, :3] == 0).all())
    assert set(found.solver) == {"status", "iterations", "residual", "jitter"}
    assert all(rows.shape == (B, H, T) for rows in found.solver.values())
    assert found.solver["status"].dtype == torch.int32
    assert bool((found.solver["status"] == 0).all())
    assert found.solver["residual"].max() < 1e-8
    if impl == "reference":
        torch.testing.assert_close(found.weights, p, atol=1e-12, rtol=0)
        torch.testing.assert_close(found.effective_weights, signed, atol=1e-9, rtol=0)
    else:
        assert found.weights is None
        assert found.effective_weights is None


@pytest.mark.parametrize("impl", ["reference", "auto"])
def test_diagnostics_of_degree_zero(impl: str) -> None:
    q, k, v = (draw(B, H, T, D, seed=seed) for seed in (1, 2, 3))
    for spec in ("softmax", "biweight"):
        _, found = regard.attention(q, k, v, spec, is_causal=True, return_diagnostics=True, impl=impl)
        assert found.effective_weights is None
        assert found.solver is None
        assert bool((found.negative_mass == 0).all())
    given = {"is_causal": True, "return_diagnostics": True}
    _, found = regard.attention(q, k, v, "linear", impl=impl, **given)
    _, moved = regard.attention(q, k, v, "relu", impl=impl, params={"bias": -1.0}, **given)
    z, s = (q @ k.mT / math.sqrt(D)).tril(), q.relu() @ k.relu().mT - 1
    if impl == "reference":
        torch.testing.assert_close(found.negative_mass, -z.clamp(max=0).sum(-1), atol=1e-12, rtol=0)
        w = s.tril() / s.tril().sum(-1, keepdim=True)
        torch.testing.assert_close(moved.negative_mass, -w.clamp(max=0).sum(-1), atol=1e-12, rtol=1e-9)
    else:
        assert found.negative_mass is None  # signed, and not looked at
        assert moved.negative_mass is None  # the bias of the call makes weights negative


def test_a_system_that_is_not_solved_is_seen() -> None:
    q, k, v = (draw(B, H, 40, 20, seed=seed) for seed in (1, 2, 3))
    spec = "gaussian*linear(ridge=0.001,solver=cg(max_iter=2))"
    with pytest.warns(RuntimeWarning, match="systems did not converge"):
        _, found = regard.attention(q, k, v, spec, is_causal=True, return_diagnostics=True)
    failed = found.solver["status"] == regard.grammar.SolveStatus.UNCONVERGED
    assert bool(failed.any())
    assert found.solver["residual"][failed].min() > 1e-6
    assert bool((found.solver["iterations"][failed] >= 2).all())


def test_maps_of_a_model_have_the_signed_weights() -> None:
    model, tokens = small(["local-linear[biweight]", "softmax"], 0.3), torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    found = attention_maps(model, tokens, list("abcdefgh"))
    given = model(tokens[None], output_attentions=True).attentions
    for at in (0, 1):
        torch.testing.assert_close(found.weights[at], given[at][0], atol=1e-5, rtol=0)
    torch.testing.assert_close(found.weights.sum(-1), torch.ones(2, 2, 8), atol=1e-5, rtol=0)
    assert found.negative_mass()[0].max() > 0
    assert bool((found.negative_mass()[1] == 0).all())
    torch.testing.assert_close(found.density, (found.weights != 0).sum(-1) / torch.arange(1.0, 9))
    assert [sorted(each) for each in found.solver] == [["iterations", "jitter", "residual", "status"], []]


def test_strong_weights_are_counted_by_size() -> None:
    weights = torch.tensor([[1.0, 0, 0], [1.05, -0.05, 0], [0.7, -0.3, 0.6]])
    maps = AttentionMaps(("a", "b", "c"), weights[None, None], torch.ones(1, 1, 3))
    assert maps.strong().item() == pytest.approx((1 + 1 + 3) / 3)
    assert maps.strong(0.65).item() == pytest.approx(1)
    assert maps.negative_mass()[0, 0].tolist() == pytest.approx([0, 0.05, 0.3])


def by_layer() -> AttentionMaps:
    first = torch.tensor([[1.0, 0], [1.2, -0.2]])
    second = {"status": 3.0, "iterations": 5.0, "residual": 0.25, "jitter": 0.0}  # those of the first query are 0
    solver = {name: torch.tensor([[0.0, value]]) for name, value in second.items()}
    weights = torch.stack([first, torch.eye(2)])[:, None]
    support, density = torch.tensor([[[1.0, 2]], [[1, 1]]]), torch.tensor([[[1.0, 1]], [[1, 0.5]]])
    return AttentionMaps(("a", "b"), weights, support, density, (solver, {}))


def test_the_table_of_layers() -> None:
    table = layer_table(by_layer())
    header = ("layer", "keys with weight", "of the visible", "with weight above 0.1", "negative weight")
    assert table.header[:5] == header
    assert table.rows == (
        ("1", "1.5", "100%", "1.5", "0.100", "2.5", "2.5e-01", "1 of 2"),
        ("2", "1.0", "75%", "1.0", "0.000", "-", "-", "-"),
    )
    assert "Residual" in table.note
    plain = replace(by_layer(), density=None, solver=())
    assert layer_table(plain).rows == (("1", "1.5", "-", "1.5", "0.100"), ("2", "1.0", "-", "1.0", "0.000"))


def test_the_page_shows_it() -> None:
    section = Section(title="one", maps=by_layer(), layers=layer_table(by_layer()))
    parts = {"title": "t", "introduction": "i", "parts": [], "settings": {}}
    html = render(Page(**parts, sections=[section, Section(title="two")]))
    assert html.count("<h3>Layers</h3>") == 1
    assert "<td>1 of 2</td>" in html
    assert "negative ones sum to about" in html
