"""Hooks on a small model of our own, whose numbers can be worked out by hand, and `capture`. Every hook point of every
registered model is tested in `tests/models/test_hooks_everywhere.py`."""

import pickle
from types import SimpleNamespace

import pytest
import torch
from any_model import make, text
from mistakes import refuses
from torch import nn

from regard.inspect import capture
from regard.inspect.hooks import hooked, named_hook_points, run_with_cache, run_with_hooks
from regard.inspect.mechanisms import patterns
from regard.nn import Attention, HookPoint


class Layer(nn.Module):
    """x -> x + scale * x, at a hook point; a second point only runs while somebody listens to it."""

    def __init__(self, scale: float, label: str | None = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))
        self.hook_out, self.hook_rare = HookPoint(label), HookPoint()

    def forward(self, x):
        if self.hook_rare.active:
            x = self.hook_rare(x)
        return x + self.hook_out(x * self.scale)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(2.0), Layer(10.0, "last.hook_out")])
        self.idle = HookPoint("idle")  # never runs

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder()
        self.calls = 0

    def forward(self, input_ids, use_cache=True, factor=1.0):
        assert not use_cache
        self.calls += 1
        return SimpleNamespace(logits=self.model(input_ids.double()) * factor)


NAMES = ["layers.0.hook_out", "layers.0.hook_rare", "last.hook_out", "layers.1.hook_rare", "idle"]


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def ids():
    return torch.tensor([[1, 2, 3]])


def listening(model) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def test_names_are_labels_or_paths(model):
    assert list(named_hook_points(model)) == NAMES
    assert named_hook_points(model)["last.hook_out"] is model.model.layers[1].hook_out
    assert named_hook_points(nn.Linear(2, 2)) == {}
    wrapped = nn.Module()
    wrapped.module = model  # as DistributedDataParallel holds it
    assert list(named_hook_points(wrapped)) == NAMES
    wrapped.module, model.model.layers[0] = torch.compile(model), torch.compile(model.model.layers[0])
    assert list(named_hook_points(wrapped)) == NAMES
    model.model.layers[0].hook_out.label = "last.hook_out"
    refuses(r"two hook points of Model are named 'last.hook_out'", named_hook_points, model)
    for run in (run_with_cache, run_with_hooks):
        refuses(f"{run.__name__}: Linear has no hook points", run, nn.Linear(2, 2), torch.tensor([[1, 2, 3]]))


def test_the_cache_holds_what_passed(model, ids):
    output, cache = run_with_cache(model, ids, ["layers.0.hook_out", "last.hook_out"])
    assert output.logits.tolist() == [[33.0, 66.0, 99.0]]  # x (1 + 2) (1 + 10)
    assert list(cache) == ["layers.0.hook_out", "last.hook_out"]
    assert cache["layers.0.hook_out"].tolist() == [[2.0, 4.0, 6.0]]
    assert cache["last.hook_out"].tolist() == [[30.0, 60.0, 90.0]]
    assert output.logits.requires_grad
    assert not cache["last.hook_out"].requires_grad
    assert listening(model) == 0


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (None, NAMES[:4]),
        ("idle", None),
        ("last.hook_out", ["last.hook_out"]),
        (lambda name: name.endswith("rare"), ["layers.0.hook_rare", "layers.1.hook_rare"]),
        (lambda name: False, []),
        ([], []),
    ],
)
def test_what_is_kept_can_be_chosen(model, ids, names, kept):
    if kept is None:
        refuses("idle did not run, so its hook was never called", run_with_cache, model, ids, names)
    else:
        assert sorted(run_with_cache(model, ids, names)[1]) == sorted(kept)
    assert listening(model) == 0


def test_a_cache_moves_pickles_and_names_the_nearest(model, ids):
    _, cache = run_with_cache(model, ids, "last.hook_out")
    half = cache.to(torch.float32)
    assert (half["last.hook_out"].dtype, cache["last.hook_out"].dtype) == (torch.float32, torch.float64)
    assert type(pickle.loads(pickle.dumps(half))) is type(cache)
    refuses("there is no activation 'last.hook'. Did you mean 'last.hook_out'", cache.__getitem__, "last.hook")
    assert "last.hook" not in cache


def test_a_hook_replaces_what_passes(model, ids):
    seen = []

    def tripled(tensor, hook):
        seen.append((hook is model.model.layers[1].hook_out, tensor.tolist()))
        return tensor * 3

    output = run_with_hooks(model, ids, [("last.hook_out", tripled)], factor=2.0)
    assert output.logits.tolist() == [[2 * (3 + 90.0), 4 * (3 + 90.0), 6 * (3 + 90.0)]]
    assert seen == [(True, [[30.0, 60.0, 90.0]])]
    assert listening(model) == 0
    assert run_with_hooks(model, ids).logits.tolist() == [[33.0, 66.0, 99.0]]
    looks = lambda tensor, hook: seen.append(tensor.sum().item())  # noqa: E731
    assert run_with_hooks(model, ids, [("last.hook_out", looks)]).logits.tolist() == [[33.0, 66.0, 99.0]]
    assert seen[-1] == 180.0


def test_hooks_run_in_order_and_a_filter_hooks_every_point_that_it_takes(model, ids):
    hooks = [("layers.0.hook_out", lambda x, hook: x + 1), ("layers.0.hook_out", lambda x, hook: x * 0)]
    assert run_with_hooks(model, ids, hooks).logits.tolist() == [[11.0, 22.0, 33.0]]
    output, cache = run_with_cache(model, ids, "layers.0.hook_out", hooks[::-1])
    assert cache["layers.0.hook_out"].tolist() == [[1.0, 1.0, 1.0]]
    assert output.logits.tolist() == [[22.0, 33.0, 44.0]]
    none = [(lambda name: name.endswith("hook_out"), lambda x, hook: torch.zeros_like(x))]
    assert run_with_hooks(model, ids, none).logits.tolist() == [[1.0, 2.0, 3.0]]
    rare = [(lambda name: "rare" in name or name == "idle", lambda x, hook: -x)]  # idle is not asked, and need not be
    assert run_with_hooks(model, ids, rare).logits.tolist() == [[33.0, 66.0, 99.0]]


def test_gradients_flow_through_hooks(model, ids):
    kept = []

    def keep(x, hook):
        kept.append(x)
        x.retain_grad()

    run_with_hooks(model, ids, [("layers.0.hook_out", keep)]).logits.sum().backward()
    assert kept[0].grad.tolist() == [[11.0, 11.0, 11.0]]
    assert model.model.layers[0].scale.grad.item() == 11 * (1 + 2 + 3)


@pytest.mark.parametrize("fault", ["hook", "model", "shape", "name"])
def test_nothing_is_left_after_an_error(model, ids, fault):
    def fails(x, hook):
        raise RuntimeError("from the hook")

    hooks = [("layers.0.hook_out", lambda x, hook: None)]
    if fault == "hook":
        with pytest.raises(RuntimeError, match="from the hook"):
            run_with_hooks(model, ids, [*hooks, ("last.hook_out", fails)])
    elif fault == "model":
        with pytest.raises(TypeError, match="unknown"):
            run_with_cache(model, ids, None, hooks, unknown=1)
    elif fault == "shape":
        narrow, number = [*hooks, ("last.hook_out", lambda x, hook: x[:, :2])], [("last.hook_out", lambda x, hook: 1.0)]
        refuses(r"at last.hook_out returned \[1, 2\], expected None or \[1, 3\]", run_with_hooks, model, ids, narrow)
        refuses("at last.hook_out returned float, expected None", run_with_hooks, model, ids, number)
    else:
        named, unlike = [*hooks, ("last.hook_ou", fails)], ["last.hook_out", "nothing like it"]
        refuses("is named 'last.hook_ou'. Did you mean 'last.hook_out'", run_with_hooks, model, ids, named)
        refuses("run_with_cache: names: .* is named 'nothing like it'. Choose", run_with_cache, model, ids, unlike)
        assert model.calls == 0  # found before anything ran
    assert listening(model) == 0


def test_a_block_holds_for_every_call_in_it_and_hooks_of_others_stay(model, ids):
    seen, other = [], []
    handle = model.model.layers[0].hook_out.register_forward_hook(lambda *args: other.append(1))
    with hooked(model, [("last.hook_out", lambda x, hook: seen.append(len(seen)))]):
        model(ids, use_cache=False)
        model(ids, use_cache=False)
    run_with_cache(model, ids)
    assert seen == [0, 1]
    assert other == [1, 1, 1]
    assert listening(model) == 1
    handle.remove()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_runs_uncompiled_under_hooks(model, ids, in_place):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = model
    if in_place:
        model.model.compile(backend=backend)
    else:
        compiled = torch.compile(model, backend=backend)
    assert compiled(ids, use_cache=False).logits.tolist() == [[33.0, 66.0, 99.0]]
    built = len(graphs)
    assert built > 0
    output, cache = run_with_cache(compiled, ids, "last.hook_out", [("layers.0.hook_out", lambda x, hook: x * 0)])
    assert (output.logits.tolist(), cache["last.hook_out"].tolist()) == ([[11.0, 22.0, 33.0]], [[10.0, 20.0, 30.0]])
    assert len(graphs) == built
    assert compiled(ids, use_cache=False).logits.tolist() == [[33.0, 66.0, 99.0]]


def test_every_documented_name_of_an_iclm_is_there_with_its_shape():
    """B = 2 texts of T = 5 tokens in S = 6 slots, C = E = 16, V = 29, H = 2 heads of D = 8 on phi and 4 heads on f."""
    tokens = text(2, 5)
    shapes = {"embed.hook_out": (2, 5, 16), "ln_final.hook_scale": (2, 5, 1), "unembed.hook_out": (2, 5, 29)}
    for layer in (0, 1):
        shapes |= {f"phi.{layer}.attn.hook_{part}": (2, 2, 6, 8) for part in "qkv"}
        shapes |= {f"phi.{layer}.attn.hook_pattern": (2, 2, 6, 6), f"f.{layer}.attn.hook_pattern": (2, 4, 5, 5)}
        streams = ("phi.{}.attn", "phi.{}.mlp", "f.{}.attn", "f.{}.mlp", "f.{}")
        shapes |= {name.format(layer) + ".hook_out": (2, 6, 16) for name in streams}
    model = make("iclm", f_attention_heads=4)
    output, cache = run_with_cache(model, tokens)
    assert {name: tuple(cache[name].shape) for name in shapes} == shapes
    assert set(shapes) == set(named_hook_points(model)) == set(cache)
    for name, weights in cache.items():
        if name.endswith("hook_pattern"):
            assert torch.allclose(weights.sum(-1), torch.ones(()).double(), atol=1e-6)
            assert bool((weights >= 0).all())
    assert torch.equal(cache["unembed.hook_out"], output.logits)
    assert torch.equal(cache["embed.hook_out"], model.model.embed_tokens.weight[tokens])
    assert torch.allclose(model(tokens).logits, output.logits, atol=1e-5)
    assert listening(model) == 0
    names = named_hook_points(make("iclm", f_mlp="none", phi_mlp="none"))
    assert set(names) == {name for name in shapes if "mlp" not in name}


def test_every_documented_name_of_a_transformer_is_there_with_its_shape():
    model = make("transformer", num_hidden_layers=2)
    wanted = ["layers.0.self_attn.hook_pattern", "layers.1.self_attn.hook_out", "layers.1.hook_mlp_out"]
    _, cache = run_with_cache(model, torch.tensor([[1, 2, 3, 4]]), wanted)
    assert [tuple(cache[name].shape) for name in wanted] == [(1, 2, 4, 4), (1, 4, 16), (1, 4, 16)]


class Two(nn.Module):
    def __init__(self, spec: str, layer_idx: tuple[int | None, int | None] = (0, 1)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = Attention(16, 2, spec=spec, layer_idx=layer_idx[0])
        self.second = Attention(16, 2, spec=spec, layer_idx=layer_idx[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)[0])[0]


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 9, 16, generator=torch.Generator().manual_seed(1))


SPECS = ["softmax", "biweight", "relumax", "shift-cosine", "topk-uniform", "local-linear[relumax]"]


@pytest.mark.parametrize("spec", SPECS)
def test_support_is_the_number_of_nonzero_weights_and_looking_changes_nothing(spec: str, x: torch.Tensor) -> None:
    model, seen = Two(spec), {}
    before = model(x)
    for weights in (False, True):
        with capture(model, weights=weights) as seen[weights]:
            assert (model(x) - before).abs().max() <= 1e-5
    assert torch.equal(model(x), before)
    fast, dense = seen[False].layers, seen[True].layers
    assert list(fast) == list(dense) == [0, 1]
    for layer in (0, 1):
        weights = dense[layer].weights
        assert weights.shape == (3, 2, 9, 9)
        assert fast[layer].weights is None
        assert (weights.triu(1) == 0).all()
        for found in (fast, dense):
            assert torch.equal(found[layer].support.long(), (weights != 0).sum(-1))


def test_nothing_keeps_the_graph_alive(x: torch.Tensor) -> None:
    for spec in ("biweight", "local-linear[biweight]"):
        model = Two(spec)
        with capture(model, weights=True) as seen:
            model(x.requires_grad_()).sum().backward()
        assert x.grad is not None
        values = [v for layer in seen.layers.values() for v in (*vars(layer).values(), *(layer.solver or {}).values())]
        assert not any(value.requires_grad for value in values if isinstance(value, torch.Tensor))


def test_the_latest_pass_is_kept_and_layers_without_a_number_go_by_their_place(x: torch.Tensor) -> None:
    model = Two("softmax", layer_idx=(None, None))
    with capture(model) as seen:
        model(x)
        model(x[:, :4])
    assert list(seen.layers) == [0, 1]
    assert seen.layers[1].support.shape == (3, 2, 4)


def test_observers_are_put_back_after_an_error_too(x: torch.Tensor) -> None:
    calls: list[int | None] = []
    model = Two("softmax")
    mine = lambda layer, diagnostics: calls.append(layer)  # noqa: E731
    model.first.observer, model.first.observe_weights = mine, True
    with capture(model):
        model(x)
    with pytest.raises(RuntimeError, match="in the block"), capture(model):
        raise RuntimeError("in the block")
    assert calls == []
    assert (model.first.observer, model.first.observe_weights) == (mine, True)
    assert (model.second.observer, model.second.observe_weights) == (None, False)
    model(x)
    assert calls == [0]


def test_one_capture_inside_another(x: torch.Tensor) -> None:
    model = Two("softmax")
    with capture(model) as outer:
        with capture(model, weights=True) as inner:
            model(x)
        assert not outer.layers
        model(x)
    assert inner.layers[0].weights is not None
    assert outer.layers[0].weights is None
    assert model.first.observer is None


def test_a_mixer_whose_output_is_not_weights_times_values_offers_no_weights_to_hooks():
    model, tokens = make("transformer", mixers=["interpolated", "softmax"], num_hidden_layers=2), text(1, 6)
    assert "layers.0.self_attn.hook_pattern" not in named_hook_points(model)
    output, kept = run_with_cache(model, tokens)
    torch.testing.assert_close(output.logits, model(tokens).logits)
    assert [name for name in kept if name.endswith("hook_pattern")] == ["layers.1.self_attn.hook_pattern"]
    assert [found.name for found in patterns(model, tokens)[1]] == ["layers.1.self_attn.hook_pattern"]
    with capture(model, weights=True) as seen:
        model(tokens)
    assert seen.layers[0].weights.shape == (1, 2, 6, 6), "of the weights that average the residuals"
