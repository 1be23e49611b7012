"""FwMLP against autograd on its loss, written out here, and against itself cut otherwise.

Shapes: B rows, T tokens, DIN, F, DV widths of input, inner layer and output, C model width.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.autograd import grad, gradcheck

from regard.checks import ArgumentError, debug
from regard.estimators.fast_weight_mlp import FastMLPState, SwiGLU, fast_weight_mlp, flush
from regard.nn import FastWeightMLP
from regard.nn.memories import memory_layers

B, T, DIN, F, DV, C, CHUNK = 3, 14, 4, 6, 3, 10, 4
RATE = 0.1
Weights = tuple[Tensor, Tensor, Tensor]


def numbers(*size: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def weights(seed: int = 5) -> Weights:
    made = [
        numbers(*size, seed=seed + i, scale=0.5) for i, size in enumerate(((F, DIN + 1), (F, DIN + 1), (DV, F + 1)))
    ]
    return made[0], made[1], made[2]


def network(x: Tensor, w: Weights) -> Tensor:
    """x [..., DIN] through the SwiGLU network, biases in the last columns."""
    a, u = x @ w[0][:, :-1].T + w[0][:, -1], x @ w[1][:, :-1].T + w[1][:, -1]
    return (a / (1 + torch.exp(-a)) * u) @ w[2][:, :-1].T + w[2][:, -1]


def taught(w: Weights, groups: list[list[tuple[Tensor, Tensor]]], target: str, rate: float = RATE) -> Weights:
    """One step on the pairs of consecutive tokens (query, value) of every group, by autograd."""
    pairs = [(a, b) for group in groups for a, b in itertools.pairwise(group)]
    if not pairs:
        return w
    found = network(torch.stack([a[0] for a, _ in pairs]), w)
    wanted = torch.stack([(a[1] + b[1]) / 2 if target == "mean" else b[1] for a, b in pairs])
    made = [x if x.requires_grad else x.detach().requires_grad_() for x in w]
    found = network(torch.stack([a[0] for a, _ in pairs]), (made[0], made[1], made[2]))
    steps = grad(((found - wanted) ** 2).mean(), made, create_graph=True)
    after = [x - rate * g for x, g in zip(made, steps, strict=True)]
    return after[0], after[1], after[2]


def stream(
    query: Tensor, value: Tensor, w: Weights, target: str = "mean", chunk: int = CHUNK
) -> tuple[Tensor, Weights]:
    """What one row [T, ...] reads, token by token, and the weights after all chunks that a next token closed."""
    waits: list[tuple[Tensor, Tensor]] = []
    out = []
    for q, v in zip(query, value, strict=True):
        if len(waits) == chunk:
            w, waits = taught(w, [[*waits, (q, v)]], target), []
        out.append(network(q, w))
        waits.append((q, v))
    return torch.stack(out), w


def layer(seed: int = 0, **options) -> FastWeightMLP:
    """A small layer in float64 whose writes are visible."""
    torch.manual_seed(seed)
    sizes = {"in_dim": DIN, "hidden_dim": F, "value_dim": DV, "chunk_size": CHUNK, "learning_rate": RATE}
    made = FastWeightMLP(C, **{**sizes, **options}).double()
    for name, number in made.named_parameters():
        if "norm" not in name:
            number.data.normal_(std=0.5)
    return made


def tokens(length: int = T, rows: int = B, seed: int = 1) -> Tensor:
    return numbers(rows, length, C, seed=seed)


def close(found: Tensor, expected: Tensor, atol: float = 1e-11) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def same(a: FastMLPState, b: FastMLPState, atol: float = 1e-11) -> None:
    for name in ("gate", "up", "down"):
        close(getattr(a, name), getattr(b, name), atol)


# The definition -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["mean", "look-ahead"])
@pytest.mark.parametrize("chunk", [2, 4, 5, 20])
def test_reads_and_writes_are_gradient_steps_on_the_loss(target, chunk):
    query, value, w = numbers(B, T, DIN), numbers(B, T, DV, seed=1), weights()
    out, state = fast_weight_mlp(query, value, w, chunk_size=chunk, learning_rate=RATE, target=target)
    for b in range(B):
        expected, after = stream(query[b], value[b], w, target, chunk)
        close(out[b], expected)
        for name, x in zip(("gate", "up", "down"), after, strict=True):
            close(getattr(state, name)[b], x)
    assert state.writes == ((T - 1) // chunk,) * B
    assert chunk > T or (out - network(query, w)).abs().max() > 1e-2  # the writes could be seen


def test_gradients_reach_all_inputs_through_the_writes():
    w = weights()
    leaves = [x.requires_grad_() for x in (numbers(1, T, DIN), numbers(1, T, DV, seed=1), *w)]
    probe = numbers(1, T, DV, seed=9)
    out, _ = fast_weight_mlp(
        leaves[0], leaves[1], (leaves[2], leaves[3], leaves[4]), chunk_size=CHUNK, learning_rate=RATE
    )
    expected, _ = stream(leaves[0][0], leaves[1][0], (leaves[2], leaves[3], leaves[4]))
    for a, b in zip(grad((out * probe).sum(), leaves), grad((expected[None] * probe).sum(), leaves), strict=True):
        close(a, b, 1e-10)


@pytest.mark.parametrize("meta_grad", [True, 2])
def test_derivatives_by_finite_differences_through_three_chunks(meta_grad):
    def read(query: Tensor, value: Tensor, *w: Tensor) -> Tensor:
        return fast_weight_mlp(query, value, (w[0], w[1], w[2]), chunk_size=2, learning_rate=RATE, meta_grad=meta_grad)[
            0
        ][:, -1 if meta_grad is True else slice(0, 4)]

    inputs = [x.requires_grad_() for x in (numbers(2, 7, DIN), numbers(2, 7, DV, seed=1), *weights())]
    assert gradcheck(read, inputs, atol=1e-7)


def test_closed_form_gradients_with_a_rate_for_every_token_and_matrix():
    w = [x.requires_grad_() for x in weights()]
    x, error, rates = numbers(5, DIN), numbers(5, DV, seed=1), numbers(3, 5, 1, seed=2).abs()
    found = SwiGLU(*w).gradients(x, error, SwiGLU(*rates))
    for i, part in enumerate(found):
        expected = sum(rates[i, t] * grad((network(x[t], (w[0], w[1], w[2])) * error[t]).sum(), w)[i] for t in range(5))
        close(part, expected)


def test_a_write_lowers_the_loss_of_its_pairs():
    query, value, w = numbers(1, 5, DIN), numbers(1, 5, DV, seed=1), weights()
    _, state = fast_weight_mlp(query, value, w, chunk_size=4, learning_rate=0.05)
    wanted = (value[0, :4] + value[0, 1:]) / 2
    after = (state.gate[0], state.up[0], state.down[0])
    losses = [((network(query[0, :4], x) - wanted) ** 2).mean() for x in (w, after)]
    assert losses[1] < losses[0]


def test_layer_is_the_projections_around_the_memory():
    made, hidden = layer(), tokens()
    p = dict(made.named_parameters())

    def projected(name: str) -> Tensor:
        gain = p[f"projections.{name}_norm.weight"]
        normed = hidden / (hidden.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain
        return normed @ p[f"projections.{name}_proj.weight"].T + p[f"projections.{name}_proj.bias"]

    value = projected("v")
    centred = value - value.mean(-1, keepdim=True)
    value = centred / ((centred.square().sum(-1, keepdim=True) / (DV - 1)).sqrt() + 1e-6)
    gate = torch.sigmoid(projected("gate").mean(-1, keepdim=True))
    read = torch.stack(
        [stream(q, v, (made.gate, made.up, made.down))[0] for q, v in zip(projected("q"), value, strict=True)]
    )
    mixed = gate * read + (1 - gate) * value
    normed = mixed / (mixed.square().mean(-1, keepdim=True) + 1e-5).sqrt() * p["projections.out_norm.weight"]
    expected = normed @ p["projections.out_proj.weight"].T + p["projections.out_proj.bias"]
    close(made(hidden)[0], expected, 1e-10)


def test_sizes_of_the_paper():
    made = FastWeightMLP(768)
    assert made.fast_numbers() == 2 * 2304 * 513 + 512 * 2305 == 3_544_064
    assert sum(x.numel() for x in made.parameters()) == 1_190_408
    assert made.chunk_size == 512
    assert made.rule == (0.1, "mean")
    learned = FastWeightMLP(8, in_dim=4, hidden_dim=4, value_dim=4, learn_initial=True)
    assert learned.fast_numbers() == 0
    assert isinstance(learned.down, torch.nn.Parameter)
    assert memory_layers.get("fwmlp") is FastWeightMLP


# Streams --------------------------------------------------------------------------------------------------------

PARTITIONS = {
    "tokens": [1] * T,
    "chunks": [CHUNK] * 3 + [2],
    "odd": [1, CHUNK - 1, CHUNK, CHUNK + 1, 1],
    "late": [13, 1],
}


@pytest.mark.parametrize("parts", PARTITIONS.values(), ids=PARTITIONS)
@pytest.mark.parametrize("shared", [False, True])
def test_any_partition_of_a_stream_gives_the_same(parts, shared):
    made, hidden = layer(shared=shared), tokens()
    expected, state = made(hidden)
    now, out = None, []
    for piece in hidden.split(parts, 1):
        part, now = made(piece, state=now)
        out.append(part)
    close(torch.cat(out, 1), expected)
    same(now, state)
    assert (now.waits, now.writes, now.tokens) == (state.waits, state.writes, T)
    close(made.flush(now).down, made.flush(state).down)


def test_a_later_token_changes_nothing_before_it():
    made, hidden = layer(), tokens().requires_grad_()
    out, _ = made(hidden)
    for t in (0, 3, 4, 8, T - 2):
        back = grad(out[:, t].sum(), hidden, retain_graph=True)[0]
        assert (back[:, t + 1 :] == 0).all()
        assert (back[:, t] != 0).any()
    changed = hidden.detach().clone()
    changed[:, 9] += 1
    close(made(changed)[0][:, :9], out[:, :9], 0)
    assert (made(changed)[0][:, 12:] - out[:, 12:]).abs().max() > 1e-6  # it was learned


MASK = torch.ones(B, T, dtype=torch.bool)
MASK[0, :5], MASK[1, 6:9], MASK[1, 0], MASK[2, 10:] = False, False, False, False


@pytest.mark.parametrize("parts", [[T], [1] * T, [2, 7, 5]], ids=["once", "tokens", "pieces"])
def test_padding_is_as_if_removed(parts):
    made, hidden = layer(), tokens()
    padded = hidden.masked_fill(~MASK[..., None], torch.nan).requires_grad_()
    now, out = None, []
    for piece, mask in zip(padded.split(parts, 1), MASK.split(parts, 1), strict=True):
        part, now = made(piece, mask, now)
        out.append(part)
    whole = torch.cat(out, 1)
    assert (whole[~MASK] == 0).all()
    for b in range(B):
        expected, state = made(hidden[b : b + 1, MASK[b]])
        close(whole[b, MASK[b]], expected[0])
        close(now.down[b], state.down[0])
        assert (now.waits[b], now.writes[b]) == (state.waits[0], state.writes[0])
    back = grad(whole.square().sum(), padded)[0]
    assert back.isfinite().all()
    assert (back[~MASK] == 0).all()


def test_a_call_of_padding_alone_changes_nothing():
    made, hidden = layer(), tokens()
    _, state = made(hidden)
    none = torch.zeros(B, 3, dtype=torch.bool)
    out, after = made(hidden[:, :3], none, state)
    assert (out == 0).all()
    same(after, state, 0)
    assert after.tokens == T + 3
    close(made(hidden, state=after)[0], made(hidden, state=state)[0], 0)
    close(made(hidden[:, :3], none)[0], torch.zeros(B, 3, C, dtype=torch.float64), 0)


def test_rows_know_nothing_of_each_other():
    made, hidden = layer(), tokens()
    order = torch.tensor([2, 0, 1])
    out, state = made(hidden, MASK)
    turned, moved = made(hidden[order], MASK[order])
    close(turned, out[order])
    close(moved.gate, state.gate[order])


@pytest.mark.parametrize("parts", [[T], [3, 4, 7]], ids=["once", "pieces"])
def test_a_shared_network_learns_from_all_rows_at_once(parts):
    query, value, w = numbers(B, T, DIN), numbers(B, T, DV, seed=1), weights()
    now, out = None, []
    for q, v in zip(query.split(parts, 1), value.split(parts, 1), strict=True):
        options = {"chunk_size": CHUNK, "learning_rate": RATE, "shared": True}
        part, now = fast_weight_mlp(q, v, w, state=now, **options)
        out.append(part)
    net = w
    for start in range(0, T, CHUNK):
        stop = min(start + CHUNK, T)
        close(torch.cat(out, 1)[:, start:stop], network(query[:, start:stop], net))
        if start + CHUNK < T:
            rows = [[(query[b, t], value[b, t]) for t in range(start, stop + 1)] for b in range(B)]
            net = taught(net, rows, "mean")
    close(now.down[0], net[2])
    assert now.down.shape[0] == 1


def test_shared_network_and_padding():
    query, value, w = numbers(2, 6, DIN), numbers(2, 6, DV, seed=1), weights()
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, :2], mask[1, 5:], mask[:, 3] = False, False, False
    options = {"chunk_size": 4, "learning_rate": RATE, "shared": True}
    out, state = fast_weight_mlp(query.masked_fill(~mask[..., None], torch.nan), value, w, mask=mask, **options)
    columns = [0, 1, 2, 4, 5]  # the clock of the batch does not count column 3
    rows = [[(query[b, t], value[b, t]) for t in columns if mask[b, t]] for b in range(2)]
    net = taught(w, rows, "mean")
    close(state.down[0], net[2])
    close(out[0, 5], network(query[0, 5], net))
    assert (out[~mask] == 0).all()


def test_packed_documents_are_sequences_of_their_own():
    made, hidden = layer(), tokens()
    ids = torch.tensor([7] * 6 + [3] + [8] * 7).expand(B, T).clone()
    ids[1] = torch.tensor([1] * 5 + [2] * 9)
    out, state = made(hidden, segment_ids=ids)
    for b, cuts in enumerate([(0, 6, 7, T), (0, 5, T), (0, 6, 7, T)]):
        for a, z in itertools.pairwise(cuts):
            expected, alone = made(hidden[b : b + 1, a:z])
            close(out[b, a:z], expected[0])
        close(state.gate[b], alone.gate[0])
    now, parts = None, []
    for piece, part in zip(hidden.split([3, 7, 4], 1), ids.split([3, 7, 4], 1), strict=True):
        x, now = made(piece, state=now, segment_ids=part)
        parts.append(x)
    close(torch.cat(parts, 1), out)  # a document goes on where a call ends inside it


def test_documents_and_padding_together():
    made, hidden = layer(), tokens()
    ids = torch.tensor([1] * 7 + [2] * 7).expand(B, T)
    out, _ = made(hidden.masked_fill(~MASK[..., None], torch.inf), MASK, segment_ids=ids)
    for b in range(B):
        for span in (slice(0, 7), slice(7, T)):
            if MASK[b, span].any():
                expected, _ = made(hidden[b : b + 1, span][:, MASK[b, span]])
                close(out[b, span][MASK[b, span]], expected[0])


def test_chunk_size_may_change_between_calls():
    made, hidden = layer(), tokens(12, rows=1)
    _, state = made(hidden[:, :4])
    assert state.waits == (4,)
    made.chunk_size = 3
    _, state = made(hidden[:, 4:], state=state)
    assert state.writes == (3,)  # the four that waited, then 4..6 and 7..9
    made.chunk_size = 100
    _, state = made(tokens(50, rows=1), state=state)
    assert state.writes == (3,)


# Gradients ------------------------------------------------------------------------------------------------------


def chunk_gradients(meta_grad: bool | int) -> list[list[bool]]:
    """Whether what chunk c reads has a gradient to the tokens of chunk d, [c][d]."""
    made, hidden = layer(meta_grad=meta_grad), tokens(16).requires_grad_()
    out, _state = made(hidden)
    own = [grad(out[:, c : c + 4].sum(), hidden, retain_graph=True)[0] for c in range(0, 16, 4)]
    return [[bool((g[:, d : d + 4] != 0).any()) for d in range(0, c * 4 + 4, 4)] for c, g in enumerate(own)]


def test_gradients_through_writes_can_be_cut():
    assert chunk_gradients(True) == [[True], [True] * 2, [True] * 3, [True] * 4]
    assert chunk_gradients(False) == [[True], [False, True], [False, False, True], [False, False, False, True]]
    assert chunk_gradients(2) == [[True], [True, True], [False, False, True], [False, False, True, True]]


def test_cut_gradients_leave_the_numbers_and_the_cut_of_padded_rows():
    hidden = tokens()
    expected, _ = layer()(hidden, MASK)
    for meta_grad in (False, 1, 2):
        close(layer(meta_grad=meta_grad)(hidden, MASK)[0], expected)
    made, given = layer(meta_grad=2), hidden.clone().requires_grad_()
    whole = grad(made(given, MASK)[0].square().sum(), given)[0]
    for b in range(B):
        row = hidden[b : b + 1, MASK[b]].clone().requires_grad_()
        close(whole[b, MASK[b]], grad(made(row)[0].square().sum(), row)[0][0])


def test_gradients_cross_calls_until_detached():
    made, hidden = layer(), tokens().requires_grad_()
    _, state = made(hidden[:, :6])
    for now, found in ((state, True), (state.detach(), False)):
        out, _ = made(hidden[:, 6:], state=now)
        assert bool((grad(out.sum(), hidden, retain_graph=True)[0][:, :6] != 0).any()) is found


def test_the_first_weights_can_be_learned():
    made = layer(learn_initial=True)
    out, _ = made(tokens())
    out.square().sum().backward()
    assert all((getattr(made, name).grad != 0).any() for name in ("gate", "up", "down"))


# The state ------------------------------------------------------------------------------------------------------


def test_state_selects_repeats_resets_and_is_restored():
    made, hidden = layer(), tokens()
    _, state = made(hidden[:, :7], MASK[:, :7])
    rest, mask = hidden[:, 7:], MASK[:, 7:]
    expected, _ = made(rest, mask, state)
    order = torch.tensor([2, 2, 0])
    close(made(rest[order], mask[order], state.select(order))[0], expected[order])
    flags = torch.tensor([True, False, True])
    close(made(rest[flags], mask[flags], state.select(flags))[0], expected[flags])
    doubled = torch.arange(B).repeat_interleave(2)
    close(made(rest[doubled], mask[doubled], state.repeat(2))[0], expected[doubled])
    again = FastMLPState.from_tensors(state.to_tensors())
    assert (again.waits, again.writes, again.shared, again.tokens) == (state.waits, state.writes, False, 7)
    close(made(rest, mask, again)[0], expected, 0)
    close(made(rest, mask, state.clone().detach())[0], expected, 0)
    close(made(hidden, MASK, state.reset())[0], made(hidden, MASK)[0], 0)
    assert state.reset().tokens == 0


def test_state_is_not_changed_by_a_call():
    made, hidden = layer(), tokens()
    _, state = made(hidden)
    before = {name: x.clone() for name, x in state.to_tensors().items()}
    made(hidden, state=state)
    assert all(torch.equal(x, before[name]) for name, x in state.to_tensors().items())


def test_frozen_reads_and_leaves_the_state():
    made, hidden = layer(), tokens()
    _, state = made(hidden[:, :6])
    made.frozen = True
    out, after = made(hidden[:, 6:], MASK[:, 6:], state)
    assert after is state
    made.frozen = False
    made.chunk_size = 100  # nothing is written for want of tokens
    close(out, made(hidden[:, 6:], MASK[:, 6:], state)[0])
    made.frozen = True
    assert made(hidden)[1].writes == (0,) * B


def test_flush_writes_the_pairs_that_are_there():
    query, value, w = numbers(1, 7, DIN), numbers(1, 7, DV, seed=1), weights()
    _, state = fast_weight_mlp(query, value, w, chunk_size=4, learning_rate=RATE)
    after = flush(state, learning_rate=RATE)
    rows = list(zip(query[0], value[0], strict=True))
    expected = taught(taught(w, [rows[:5]], "mean"), [rows[4:]], "mean")
    close(after.up[0], expected[1])
    assert after.waits == (0,)
    assert flush(after) is after


def test_a_shared_network_refuses_beams():
    _, state = layer(shared=True)(tokens())
    for call in (lambda: state.select(torch.tensor([0, 0])), lambda: state.repeat(2)):
        with pytest.raises(ArgumentError, match="shared by the batch"):
            call()


# Whatever comes -------------------------------------------------------------------------------------------------


def test_a_token_that_is_not_finite_is_neither_learned_nor_learned_from():
    made, hidden = layer(chunk_size=5), tokens(9, rows=1)
    spoilt = hidden.clone()
    spoilt[0, 2, 1] = torch.nan
    leaf = spoilt.requires_grad_()
    out, state = made(leaf)
    assert out[0, 2].isnan().all()
    others = [t for t in range(9) if t != 2]
    assert out[0, others].isfinite().all()
    assert grad(out[0, others].sum(), leaf)[0][0, others].isfinite().all()
    made.chunk_size = 4  # without the token the first chunk has one token less
    expected, clean = made(hidden[:, [0, 1, 3, 4, 5, 6, 7, 8]])
    close(out[0, [0, 1, 3, 4]], expected[0, :4])
    close(out[0, 5:], expected[0, 4:])
    close(state.down, clean.down)
    with debug(), pytest.raises(ArgumentError, match="NaN"):
        made(leaf)


def test_numbers_beyond_all_bounds_count_as_not_finite():
    made, hidden = layer().float(), tokens().float()
    hidden[1, 3] = 1e30
    out, state = made(hidden)
    assert out[1, 3].isnan().all()
    assert out.isnan().any(-1).sum() == 1
    assert state.gate.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_memory_is_wide_whatever_the_layer_is(dtype):
    made, hidden = layer().to(dtype), tokens().to(dtype)
    out, state = made(hidden)
    assert out.dtype == dtype
    assert state.gate.dtype == torch.float32
    expected = made.double()(hidden.double())[0]
    assert (out.double() - expected).abs().max() < 0.1 * expected.abs().max()


def test_autocast_does_not_reach_the_memory():
    made, hidden = layer().float(), tokens().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, state = made(hidden)
    assert state.gate.dtype == torch.float32
    assert out.dtype == torch.float32
    assert out.isfinite().all()


def test_hooks_see_gates_and_readings_and_may_replace_them():
    made, hidden = layer(), tokens()
    seen = {}
    made.hook_gate.register_forward_hook(lambda module, inputs, out: seen.setdefault("gate", out))
    handle = made.hook_read.register_forward_hook(lambda module, inputs, out: seen.setdefault("read", out))
    out, _ = made(hidden)
    assert seen["gate"].shape == (B, T)
    assert seen["read"].shape == (B, T, DV)
    handle.remove()
    made.hook_read.register_forward_hook(lambda module, inputs, out: out + 1)
    assert (made(hidden)[0] - out).abs().max() > 1e-3


MISTAKES = {
    "chunk_size is 0": lambda: layer(chunk_size=0),
    "chunk_size is 1": lambda: layer(chunk_size=1),
    "chunk_size is 2.5": lambda: layer(chunk_size=2.5),
    "hidden_dim is 0": lambda: layer(hidden_dim=0),
    "in_dim is -1": lambda: layer(in_dim=-1),
    "learning_rate is -1": lambda: layer(learning_rate=-1.0),
    "unknown target 'meen'. Did you mean 'mean'": lambda: layer(target="meen"),
    "meta_grad is 0": lambda: layer(meta_grad=0),
    "shared is 1": lambda: layer(shared=1),
    "value_dim >= 2": lambda: layer(value_dim=1),
    "hidden has shape": lambda: layer()(torch.zeros(2, 3, C + 1, dtype=torch.float64)),
    "T >= 1": lambda: layer()(torch.zeros(2, 0, C, dtype=torch.float64)),
    "mask has shape": lambda: layer()(tokens(), MASK[:, :3]),
    "expected torch.bool": lambda: layer()(tokens(), MASK.long()),
    "segment_ids has shape": lambda: layer()(tokens(), segment_ids=torch.zeros(B, 3, dtype=torch.long)),
    "expected an integer tensor": lambda: layer()(tokens(), segment_ids=torch.zeros(B, T)),
    "segment_ids need a memory per document": lambda: layer(shared=True)(tokens(), segment_ids=MASK.long()),
    "state is a str": lambda: layer()(tokens(), state="x"),
    "state is of 2 rows": lambda: layer()(tokens(), state=layer()(tokens(rows=2))[1]),
    "state holds gate [3, 5, 5]": lambda: layer()(tokens(), state=layer(hidden_dim=5)(tokens())[1]),
    "state has shared=True": lambda: layer()(tokens(), state=layer(shared=True)(tokens())[1]),
    "state is torch.float32": lambda: layer()(tokens(), state=layer().float()(tokens().float())[1]),
    "weights gate are [6, 4]": lambda: fast_weight_mlp(
        numbers(1, 2, DIN), numbers(1, 2, DV), (numbers(F, DIN), numbers(F, DIN), numbers(DV, F))
    ),
    "value has shape [1, 3, 3]": lambda: fast_weight_mlp(numbers(1, 2, DIN), numbers(1, 3, DV), weights()),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_named(message):
    with pytest.raises(ArgumentError) as error:
        MISTAKES[message]()
    assert message in str(error.value)
    assert "\n" not in str(error.value)
