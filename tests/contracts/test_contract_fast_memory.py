"""What every memory layer must do, whatever it is: `regard.nn.memories.memory_layers` is iterated, so that a new layer
is covered where it is registered. Sizes of known layers are kept small and some of their options varied; another one is
made as `cls(C)`, or with the options of its class attribute `small`, if it has one.

Expected values come from the layer itself on other inputs that must give the same: the same tokens in other calls, in
other rows, without padding, on their own. What the numbers are is checked beside each layer."""

import copy
import itertools
from typing import Any

import pytest
import torch
from mistakes import error_of, refuses
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.checks import debug
from regard.nn.memories import memory_layers

B, T, C = 3, 23, 10
SMALL: dict[str, dict[str, Any]] = {
    "pkm": {"sub_keys": 6, "key_dim": 8, "value_dim": 6, "heads": 2, "top_k": 3},
    "fwpkm": {"sub_keys": 6, "key_dim": 8, "value_dim": 6, "top_k": 3, "chunk_size": 4},
    "fwmlp": {"in_dim": 6, "hidden_dim": 9, "value_dim": 6, "chunk_size": 4},
}
VARIED: dict[str, list[dict[str, Any]]] = {
    "pkm": [{"query_norm": "none", "swilu": False}, {"score": "idw", "spec": "sparsemax", "heads": 1}],
    "fwpkm": [
        {"impl": "reference"},
        {"step_rule": "paper", "heads": 2, "key_update": "mse"},
        {"step_rule": "reference", "border": False, "learning_rate": 0.3},
        {"look_ahead": False, "gating": False, "value_norm": False, "key_update": "none"},
        {"score": "dot", "gate_loss": False, "spec": "sparsemax", "meta_grad": 2, "address_weight": 1.0},
        {"meta_grad": False, "learn_initial": True, "chunk_size": 5},
        {"top_k": 6, "sub_keys": 6, "chunk_size": 2},
    ],
    "fwmlp": [{"target": "look-ahead", "learning_rate": 0.02}, {"meta_grad": False, "chunk_size": 3}],
}
CASES = [
    pytest.param(
        name, {**SMALL.get(name, getattr(cls, "small", {})), **more}, id="-".join([name, *map(str, more.values())])
    )
    for name, cls in memory_layers.items()
    for more in [{}, *VARIED.get(name, [])]
]
REMEMBERING = [case for case in CASES if memory_layers.get(case.values[0]).remembers]
every = pytest.mark.parametrize(("name", "options"), CASES)
remembering = pytest.mark.parametrize(("name", "options"), REMEMBERING)


def situations(names: str, all_of: list[Any], some: list[Any]) -> Any:
    """Every layer as it is by default in all situations, every variant in some."""
    return pytest.mark.parametrize(
        ("name", "options", *names.split()),
        [
            pytest.param(*each.values, *where.values, id=f"{each.id}-{where.id}")
            for each in CASES
            for where in (all_of if each.id in memory_layers else some)
        ],
    )


def make(name: str, options: dict[str, Any], dtype: torch.dtype = torch.float64) -> Any:
    """The layer in evaluation, with matrices so large that everything in it matters."""
    torch.manual_seed(5)
    layer = memory_layers.get(name)(C, **options).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif parameter.shape[0] < 30:
                parameter.normal_(std=0.5)
    return layer.eval()


def draw(batch: int = B, tokens: int = T, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Tokens that come back, so that what was written is read."""
    make = torch.Generator().manual_seed(seed)
    kinds = torch.randn(6, C, generator=make, dtype=torch.float64)
    chosen = torch.randint(0, 6, (batch, tokens), generator=make)
    return (kinds[chosen] + 0.1 * torch.randn(batch, tokens, C, generator=make, dtype=torch.float64)).to(dtype)


def read(layer: Any, hidden: Tensor, cuts: list[int] | None = None, mask: Tensor | None = None) -> tuple[Tensor, Any]:
    """The tokens in calls of `cuts` tokens, one after another."""
    cuts = [hidden.shape[1]] if cuts is None else cuts
    outs, state = [], None
    for at, piece in zip(torch.tensor([0, *cuts]).cumsum(0).tolist(), hidden.split(cuts, 1), strict=False):
        own = None if mask is None else mask[:, at : at + piece.shape[1]]
        out, state = layer(piece, mask=own, state=state)
        outs.append(out)
    return torch.cat(outs, 1), state


def tensors(state: Any) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in state.to_tensors().items()}


def same(one: Any, other: Any) -> bool:
    a, b = tensors(one), tensors(other)
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def gap(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


@every
def test_the_shape_of_the_contract(name: str, options: dict[str, Any]) -> None:
    layer = make(name, options)
    for batch, length in ((B, T), (1, 1), (1, 2)):
        hidden = draw(batch, length).requires_grad_()
        out, state = layer(hidden)
        assert (out.shape, out.dtype) == ((batch, length, C), torch.float64)
        assert out.isfinite().all()
        assert (state is not None) == layer.remembers
        out.sum().backward()
        assert hidden.grad.isfinite().all()
    assert layer.fast_numbers() >= 0
    assert (layer.fast_numbers() > 0) == (layer.remembers and not options.get("learn_initial", False))


@remembering
def test_what_was_read_matters_later(name: str, options: dict[str, Any]) -> None:
    """Otherwise the rest would prove nothing."""
    layer, hidden = make(name, options), draw()
    out, _ = layer(hidden)
    other = hidden.clone()
    other[:, 1] = draw(seed=9)[:, 1]
    assert gap(layer(other)[0][:, 12:], out[:, 12:]) > 1e-4


@every
@pytest.mark.parametrize(
    "cuts", [[1] * T, [3, 1, 4, 1, 5, 9], [2, 21], [4] * 5 + [3], [5, 18], [8, 15], [16, 7]], ids=str
)
def test_any_cut_of_a_stream(name: str, options: dict[str, Any], cuts: list[int]) -> None:
    layer, hidden = make(name, options), draw()
    whole, end = read(layer, hidden)
    pieces, state = read(layer, hidden, cuts)
    assert gap(whole, pieces) < 1e-10
    if layer.remembers:
        one, other = tensors(end), tensors(state)
        after = draw(seed=4)
        assert gap(layer(after, state=end)[0], layer(after, state=state)[0]) < 1e-10
        assert {key for key in one if one[key].shape != other[key].shape} == set()


@every
def test_a_later_token_changes_no_earlier_output(name: str, options: dict[str, Any]) -> None:
    layer, hidden = make(name, options), draw()
    out, _ = layer(hidden)
    for t in (0, 1, 3, 4, 5, 8, 12, T - 1):
        changed = hidden.clone()
        changed[:, t:] = draw(seed=7)[:, t:]
        assert torch.equal(layer(changed)[0][:, :t], out[:, :t])


@every
def test_rows_are_streams_of_their_own(name: str, options: dict[str, Any]) -> None:
    layer, hidden = make(name, options), draw()
    out, _ = layer(hidden)
    order = torch.tensor([2, 0, 1])
    assert gap(layer(hidden[order])[0], out[order]) < 1e-10
    for row in range(B):
        assert gap(layer(hidden[row : row + 1])[0], out[row : row + 1]) < 1e-10


MASKS = {
    "left": torch.arange(T) >= torch.tensor([[0], [3], [9]]),
    "right": torch.arange(T) < torch.tensor([[T], [T - 3], [11]]),
    "between": torch.rand(B, T, generator=torch.Generator().manual_seed(2)) > 0.4,
    "a row of padding": torch.tensor([[True], [False], [True]]).expand(B, T),
    "nothing": torch.zeros(B, T, dtype=torch.bool),
}


CUTS = {"cuts": [1, 3, 4, 5, 10], "whole": [T], "tokens": [1] * T}
PADDED = [pytest.param(kind, cuts, id=f"{kind}-{calls}") for kind in MASKS for calls, cuts in CUTS.items()]


@situations("kind cuts", PADDED, [each for each in PADDED if each.id in ("left-cuts", "between-cuts")])
def test_padding_is_as_if_removed(name: str, options: dict[str, Any], kind: str, cuts: list[int]) -> None:
    layer, hidden, mask = make(name, options), draw(), MASKS[kind]
    hidden[~mask] = torch.nan
    out, state = read(layer, hidden, cuts, mask)
    assert (out[~mask] == 0).all()
    after = draw(seed=4)
    more = layer(after, state=state)[0]
    for row in range(B):
        real = hidden[row : row + 1, mask[row]]
        alone, own = layer(real) if real.shape[1] else (out[row : row + 1, :0], None)
        assert gap(out[row, mask[row]], alone[0]) < 1e-10 if real.shape[1] else True
        assert gap(layer(after[row : row + 1], state=own)[0], more[row : row + 1]) < 1e-10


@every
def test_padding_has_no_gradient_and_spoils_none(name: str, options: dict[str, Any]) -> None:
    layer, mask = make(name, options), MASKS["between"]
    grads = []
    for content in (torch.nan, torch.inf, 0.0, 3.0):
        hidden = draw()
        hidden[~mask] = content
        hidden.requires_grad_()
        layer.zero_grad()
        out, _ = layer(hidden, mask=mask)
        out.square().sum().backward()
        assert (hidden.grad[~mask] == 0).all()
        grads.append([hidden.grad, *(p.grad for p in layer.parameters() if p.grad is not None)])
    assert all(g.isfinite().all() for g in grads[0])
    assert all(all(torch.equal(a, b) for a, b in zip(grads[0], other, strict=True)) for other in grads[1:])


SPOILT = [
    pytest.param(at, content, id=f"{at}-{content}") for at in (3, 0, 2, 4, 7) for content in (torch.nan, torch.inf)
]


@situations("at content", SPOILT, SPOILT[:1])
def test_a_token_that_is_not_finite(name: str, options: dict[str, Any], at: int, content: float) -> None:
    """Its own output says so; nothing else does, in any row or later call, and no gradient is lost."""
    layer, hidden = make(name, options), draw()
    clean, _ = layer(hidden)
    hidden[1, at, 3] = content
    hidden.requires_grad_()
    out, state = layer(hidden)
    corrupted = torch.zeros(B, T, dtype=torch.bool)
    corrupted[1, at] = True
    assert out[1, at].isnan().all()
    assert out[~corrupted].isfinite().all()
    assert gap(out[[0, 2]], clean[[0, 2]]) < 1e-10
    assert gap(out[1, :at], clean[1, :at]) < 1e-10 if at else True
    assert layer(draw(seed=4), state=state)[0].isfinite().all()
    layer.zero_grad()
    out[~corrupted].square().sum().backward()
    assert hidden.grad[~corrupted].isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)
    with debug():
        refuses("hidden", layer, hidden)


@remembering
def test_frozen_reads_and_writes_nothing(name: str, options: dict[str, Any]) -> None:
    layer = make(name, options)
    _, state = layer(draw())
    before = tensors(state)
    layer.frozen = True
    outs = [layer(draw(seed=4), state=state) for _ in range(2)]
    for _, after in outs:
        assert all(torch.equal(value, before[key]) for key, value in tensors(after).items())
    assert torch.equal(outs[0][0], outs[1][0])
    pieces, kept = [], state
    for piece in draw(seed=4).split([5, 17, 1], 1):
        out, kept = layer(piece, state=kept)
        pieces.append(out)
    assert gap(torch.cat(pieces, 1), outs[0][0]) < 1e-10
    layer.frozen = False
    assert same(state, type(state).from_tensors(before))


@remembering
def test_a_state_is_never_changed(name: str, options: dict[str, Any], tmp_path: Any) -> None:
    """Snapshots cost nothing: what came of a state can be made again from it, also from files; reset begins anew."""
    layer = make(name, options)
    _, state = layer(draw())
    before = tensors(state)
    first, _ = layer(draw(seed=4), state=state)
    layer(draw(seed=5), state=state)
    assert gap(first, layer(draw(seed=4), state=state)[0]) < 1e-12
    assert all(torch.equal(value, before[key]) for key, value in tensors(state).items())
    save_file({key: value.contiguous() for key, value in before.items()}, tmp_path / "state.safetensors")
    again = type(state).from_tensors(load_file(tmp_path / "state.safetensors"))
    assert same(again, state)
    assert gap(layer(draw(seed=4), state=again)[0], first) < 1e-12
    assert same(state.clone(), state)
    assert same(state.detach(), state)
    fresh, _ = layer(draw(seed=4))
    assert gap(first, fresh) > 1e-4
    assert gap(layer(draw(seed=4), state=state.reset())[0], fresh) < 1e-10


@remembering
def test_a_state_forks(name: str, options: dict[str, Any]) -> None:
    """Beams: rows that are chosen, repeated and go on apart."""
    layer = make(name, options)
    _, state = layer(draw())
    after = draw(6, seed=4)
    out, grown = layer(after, state=state.repeat(2))
    for row in range(6):
        alone, _ = layer(after[row : row + 1], state=state.select(torch.tensor([row // 2])))
        assert gap(out[row : row + 1], alone) < 1e-10
    chosen = torch.tensor([5, 0, 0, 3])
    out, _ = layer(after[:4], state=grown.select(chosen))
    for row, of in enumerate(chosen.tolist()):
        _, own = layer(after[of : of + 1], state=state.select(torch.tensor([of // 2])))
        assert gap(out[row : row + 1], layer(after[row : row + 1], state=own)[0]) < 1e-10
    assert gap(layer(after[:1], state=state.select(torch.tensor([False, True, False])))[0],
               layer(after[:1], state=state.select(torch.tensor([1])))[0]) < 1e-12  # fmt: skip


@every
@pytest.mark.parametrize("pad", [False, True])
def test_documents_packed_into_a_row(name: str, options: dict[str, Any], pad: bool) -> None:
    """Each is read on its own; the first goes on from the state, the last leaves its own."""
    layer, hidden = make(name, options), draw()
    ids = torch.tensor([[0] * 9 + [1] * 2 + [2] * 12, [5] * 23, [1] * 4 + [0] * 4 + [1] * 15])
    mask = MASKS["between"] if pad else torch.ones(B, T, dtype=torch.bool)
    hidden[~mask] = torch.nan
    _, state = layer(draw(seed=3))
    out, after = layer(hidden, mask=mask, state=state, segment_ids=ids)
    more = layer(draw(seed=4), state=after)[0]
    for row in range(B):
        borders = [0, *((ids[row, 1:] != ids[row, :-1]).nonzero()[:, 0] + 1).tolist(), T]
        own = state.select(torch.tensor([row])) if layer.remembers else None
        for start, stop in itertools.pairwise(borders):
            real = hidden[row, start:stop][mask[row, start:stop]][None]
            alone, own = layer(real, state=own)
            assert gap(out[row, start:stop][mask[row, start:stop]], alone[0]) < 1e-10
            last, own = own, None
        assert gap(more[row : row + 1], layer(draw(seed=4)[row : row + 1], state=last)[0]) < 1e-10


@remembering
def test_the_chunk_size_changes_between_calls(name: str, options: dict[str, Any]) -> None:
    """However the calls are cut before and after; sizes that make no pair are refused."""
    layer, hidden = make(name, options), draw()

    def run(cuts: list[tuple[int, int]]) -> Tensor:
        outs, state, at = [], None, 0
        for tokens, chunk in cuts:
            layer.chunk_size = chunk
            out, state = layer(hidden[:, at : at + tokens], state=state)
            outs.append(out)
            at += tokens
        return torch.cat(outs, 1)

    for before, between, after in ((4, 8, 3), (3, 2, 7), (8, 100, 2), (100, 3, 3)):
        whole = run([(7, before), (9, between), (7, after)])
        assert gap(whole, run([(3, before), (4, before), (1, between), (8, between), *[(1, after)] * 7])) < 1e-10
    for wrong in (0, -3, 1.5, True, "4"):
        refuses("chunk_size", lambda: setattr(layer, "chunk_size", wrong) or layer(hidden))  # noqa: B023


@remembering
def test_flush_writes_what_waits(name: str, options: dict[str, Any]) -> None:
    """Twice is once; the state that was flushed stays as it was; what comes then reads what was written."""
    layer = make(name, options)
    layer.chunk_size = 64
    hidden = draw()
    out, state = layer(hidden)
    before = tensors(state)
    flushed = layer.flush(state)
    assert all(torch.equal(value, before[key]) for key, value in tensors(state).items())
    assert gap(layer(hidden, state=state)[0], out) < 1e-10  # nothing was written yet
    assert gap(layer(hidden, state=flushed)[0], out) > 1e-4
    assert same(layer.flush(flushed), flushed)


@remembering
def test_gradients_through_any_cut(name: str, options: dict[str, Any]) -> None:
    """As if in one call, until the state is detached."""
    layer = make(name, options)

    def gradients(cuts: list[int]) -> list[Tensor]:
        hidden = draw().requires_grad_()
        out, _ = read(layer, hidden, cuts)
        wanted = [hidden, *layer.parameters()]
        found = torch.autograd.grad(out.square()[:, 9:].sum(), wanted, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]

    whole = gradients([T])
    assert whole[0].abs().max() > 1e-3
    for cuts in ([1] * T, [3, 1, 4, 1, 5, 9], [9, 14]):
        for one, other in zip(whole, gradients(cuts), strict=True):
            assert gap(one, other) < 1e-8 * (1 + one.abs().max().item())
    hidden = draw().requires_grad_()
    _, state = layer(hidden[:, :9])
    out, _ = layer(hidden[:, 9:], state=state.detach())
    (grad,) = torch.autograd.grad(out.square().sum(), hidden)
    assert (grad[:, :9] == 0).all()
    assert grad[:, 9:].abs().max() > 0


THROUGH_ALL_WRITES = [case for case in CASES if case.values[1].get("meta_grad", True) is True]
"""Layers of which no write stops gradients."""


@pytest.mark.parametrize(("name", "options"), THROUGH_ALL_WRITES)
def test_gradients_are_the_slope(name: str, options: dict[str, Any]) -> None:
    """Through chunks and writes, against central differences in a few directions."""
    layer = make(name, options)
    hidden = draw(2, 14).requires_grad_()
    mask = MASKS["between"][:2, :14]
    leaves = [hidden, *(p for p in layer.parameters() if p.requires_grad)]

    def value() -> Tensor:
        return layer(hidden, mask=mask)[0].sin().sum()

    slopes = torch.autograd.grad(value(), leaves, allow_unused=True)
    make_noise = torch.Generator().manual_seed(1)
    for leaf, slope in zip(leaves, slopes, strict=True):
        direction = torch.randn(leaf.shape, generator=make_noise, dtype=torch.float64)
        step = 1e-6
        found = []
        for sign in (1, -1):
            with torch.no_grad():
                leaf.add_(sign * step * direction)
                found.append(value())
                leaf.sub_(sign * step * direction)
        expected = (found[0] - found[1]).item() / (2 * step)
        own = 0.0 if slope is None else (slope * direction).sum().item()
        assert own == pytest.approx(expected, abs=2e-5, rel=2e-5)


@every
def test_recomputed_activations(name: str, options: dict[str, Any]) -> None:
    layer = make(name, options)
    found = []
    for kept in (True, False):
        hidden = draw().requires_grad_()
        out = layer(hidden)[0] if kept else checkpoint(lambda x: layer(x)[0], hidden, use_reentrant=False)
        grads = torch.autograd.grad(out.square().sum(), [hidden, *layer.parameters()], allow_unused=True)
        found.append([out.detach(), *(g for g in grads if g is not None)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@every
def test_narrow_numbers(name: str, options: dict[str, Any]) -> None:
    """bfloat16 in gives bfloat16 out, near the truth; autocast around a float32 layer stays near it too."""
    layer = make(name, options, torch.float32)
    hidden = draw(dtype=torch.float32)
    out, _ = layer(hidden)
    scale = out.abs().max().item()
    with torch.autocast("cpu", torch.bfloat16):
        inside, _ = layer(hidden)
    assert inside.isfinite().all()
    assert (inside.float() - out).abs().mean() < 0.1 * scale
    low = copy.deepcopy(layer).bfloat16()
    narrow, _ = low(hidden.bfloat16())
    assert narrow.dtype == torch.bfloat16
    assert (narrow.float() - out).abs().mean() < 0.15 * scale


@every
def test_parameters_and_memory_are_saved(name: str, options: dict[str, Any]) -> None:
    layer = make(name, options)
    torch.manual_seed(99)
    other = memory_layers.get(name)(C, **options).double().eval()
    assert gap(other(draw())[0], layer(draw())[0]) > 1e-6
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(draw())[0], layer(draw())[0])


@every
def test_wrong_inputs_are_refused(name: str, options: dict[str, Any]) -> None:
    """Also a state of another shape, and what is no state."""
    layer = make(name, options)
    wrong: list[tuple[Tensor, dict[str, Any]]] = [
        (draw()[..., :-1], {}),
        (draw()[0], {}),
        (draw(), {"mask": torch.ones(B, T)}),
        (draw(), {"mask": torch.ones(B, T + 1, dtype=torch.bool)}),
        (torch.zeros(B, T, C, dtype=torch.long), {}),
    ]
    if layer.remembers:
        wrong += [(draw(), {"segment_ids": x}) for x in (torch.zeros(B, T - 1, dtype=torch.long), torch.zeros(B, T))]
        wrong += [(draw(), {"state": x}) for x in ("state", {"values": 1}, torch.zeros(3))]
        wrong += [(draw(2), {"state": layer(draw())[1]})]
    for hidden, more in wrong:
        error_of(layer, hidden, **more)


def test_the_registry_has_the_memories_of_the_library() -> None:
    assert {"pkm", "fwpkm", "fwmlp"} <= set(memory_layers.names())
