"""LaCT against its definition written out here (autograd on the loss, dense attention), and against itself cut another
way.

Shapes: B rows, T tokens, C model width, H attention heads, HF fast-weight heads, D = C / HF, F inner width.
"""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.autograd import grad, gradcheck

from regard.checks import ArgumentError, debug
from regard.estimators.large_chunk import OPTIMIZERS, STEPS, LargeChunkState, flush, large_chunk_ttt, orthogonal
from regard.nn import LargeChunkTTT
from regard.nn.large_chunk_ttt import PRESETS, WindowState

B, T, C, H, HF, F, CHUNK, WINDOW = 3, 15, 12, 3, 2, 9, 4, 5
D = C // HF
Weights = tuple[Tensor, Tensor, Tensor]
OPTIONS = {"fast_heads": HF, "inner": F / D, "window": WINDOW, "chunk_size": CHUNK, "layer_idx": 0}
everyone = pytest.mark.parametrize("optimizer", list(OPTIMIZERS))


def numbers(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def layer(seed: int = 0, **options) -> LargeChunkTTT:
    """A small layer in float64 that learns fast enough to be seen."""
    torch.manual_seed(seed)
    made = LargeChunkTTT(C, H, **{**OPTIONS, **options}).double()
    with torch.no_grad():
        for name, number in made.named_parameters():
            if name not in ("gate", "up", "down"):
                number.add_(0.2 * torch.randn_like(number))
        made.rate_proj.bias.fill_(5.0)
    return made


def tokens(length: int = T, rows: int = B, seed: int = 1) -> Tensor:
    return numbers(rows, length, C, seed=seed)


def angles(place: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions [B or 1, T] (0, 1, ... where None) for heads of C / H channels."""
    half = C // H // 2
    place = torch.arange(T)[None] if place is None else place
    angle = place[..., None].double() * 100.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    return angle.cos(), angle.sin()


def counted(mask: Tensor) -> Tensor:
    """The positions of real tokens: how many come before each."""
    return (mask.long().cumsum(1) - 1).clamp_min(0)


def cache() -> SimpleNamespace:
    return SimpleNamespace(layers=[SimpleNamespace(window_state=None, fast_state=None)])


def in_pieces(
    made: LargeChunkTTT, hidden: Tensor, parts: list[int], mask: Tensor | None = None
) -> tuple[Tensor, LargeChunkState]:
    """The stream call by call: (output, the fast weights' state at the end)."""
    place = torch.arange(hidden.shape[1])[None] if mask is None else counted(mask)
    kept, out = cache(), []
    for first, last in pairwise(accumulate(parts, initial=0)):
        seen = None if mask is None else mask[:, :last]
        out.append(made(hidden[:, first:last], angles(place[:, first:last]), seen, kept)[0])
    return torch.cat(out, 1), kept.layers[0].fast_state


def close(found: Tensor, expected: Tensor, atol: float = 1e-11) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


# The definition -------------------------------------------------------------------------------------------------


def network(x: Tensor, w: Weights) -> Tensor:
    """x [..., D] through one head's SwiGLU network."""
    a = x @ w[0].T
    return (a / (1 + torch.exp(-a)) * (x @ w[1].T)) @ w[2].T


def polar(step: Tensor) -> Tensor:
    """The polynomials applied to the singular values."""
    u, s, v = torch.linalg.svd(step, full_matrices=False)
    s = s / (s.square().sum().sqrt() + 1e-7)
    for a, b, c in STEPS:
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ v


class Learner:
    """One head of one sequence, taught chunk by chunk by autograd on - sum_t v_t^T f(k_t)."""

    def __init__(self, w: Weights, optimizer: str) -> None:
        self.first = self.w = w
        self.momentum, self.muon = "momentum" in optimizer, "muon" in optimizer
        self.steps: tuple[Tensor, ...] | None = None

    def teach(self, key: Tensor, value: Tensor, rates: Tensor, share: Tensor) -> None:
        """key, value [P, D], rates [P, 3] of gate, up and down, share [P]."""
        leaves = [x if x.requires_grad else x.detach().requires_grad_() for x in self.w]
        whole = [torch.zeros_like(x) for x in leaves]
        for k, v, eta in zip(key, value, rates, strict=True):
            loss = -(v * network(k, (leaves[0], leaves[1], leaves[2]))).sum()
            parts = grad(loss, leaves, create_graph=True)
            whole = [g - rate * part for g, rate, part in zip(whole, eta, parts, strict=True)]
        if self.momentum and self.steps is not None:
            whole = [g + share.mean() * s for g, s in zip(whole, self.steps, strict=True)]
        self.steps = tuple(whole)
        new = [x + (polar(s) if self.muon else s) for x, s in zip(leaves, whole, strict=True)]
        size = [x.square().sum(1, keepdim=True).sqrt() for x in new]
        old = [x.square().sum(1, keepdim=True).sqrt() for x in self.first]
        made = [x / (n + 1e-5) * o for x, n, o in zip(new, size, old, strict=True)]
        self.w = (made[0], made[1], made[2])


def inputs(seed: int = 0, length: int = T, rows: int = B) -> dict[str, Tensor]:
    """What `large_chunk_ttt` is given, rates and shares as a layer would make them."""
    size = (rows, length, HF)
    made = {name: numbers(*size, D, seed=seed + i) for i, name in enumerate(("query", "key", "value"))}
    return {**made, "rates": numbers(*size, 3, seed=seed + 3).abs(), "share": numbers(*size, seed=seed + 4).sigmoid()}


def weights() -> Weights:
    made = [numbers(HF, *size, seed=20 + i) / 2 for i, size in enumerate(((F, D), (F, D), (D, F)))]
    return made[0], made[1], made[2]


def expected_reads(
    given: dict[str, Tensor], w: Weights, optimizer: str, chunk: int
) -> tuple[Tensor, list[list[Learner]]]:
    """What is read [B, T, HF, D], and the learners [B][HF] after every chunk that a next token closed."""
    rows, length = given["query"].shape[:2]
    learners = [[Learner((w[0][h], w[1][h], w[2][h]), optimizer) for h in range(HF)] for _ in range(rows)]
    out = []
    for start in range(0, length, chunk):
        span = slice(start, start + chunk)
        read = [[network(given["query"][b, span, h], learners[b][h].w) for h in range(HF)] for b in range(rows)]
        out.append(torch.stack([torch.stack(row, 1) for row in read]))
        if start + chunk < length:
            for b in range(rows):
                for h in range(HF):
                    learners[b][h].teach(*(given[n][b, span, h] for n in ("key", "value", "rates", "share")))
    return torch.cat(out, 1), learners


@everyone
@pytest.mark.parametrize("chunk", [1, 4, 5, 30])
def test_reads_and_writes_by_autograd(optimizer, chunk):
    given, w = inputs(rows=2), weights()
    out, state = large_chunk_ttt(**given, weights=w, chunk_size=chunk, optimizer=optimizer)
    expected, learners = expected_reads(given, w, optimizer, chunk)
    close(out, expected, 1e-9)
    for b in range(2):
        for h in range(HF):
            for name, x in zip(("gate", "up", "down"), learners[b][h].w, strict=True):
                close(getattr(state, name)[b, h], x, 1e-9)
    still = torch.stack([network(given["query"][:, :, h], (w[0][h], w[1][h], w[2][h])) for h in range(HF)], 2)
    assert chunk > T or (out - still).abs().max() > 1e-2


@everyone
def test_gradients_reach_everything_through_the_writes(optimizer):
    given = {name: x.requires_grad_() for name, x in inputs(length=10, rows=1).items()}
    w = [x.requires_grad_() for x in weights()]
    probe = numbers(1, 10, HF, D, seed=30)
    leaves = [*(x for name, x in given.items() if name != "share" or "momentum" in optimizer), *w]
    out, _ = large_chunk_ttt(**given, weights=(w[0], w[1], w[2]), chunk_size=3, optimizer=optimizer)
    expected, _ = expected_reads(given, (w[0], w[1], w[2]), optimizer, 3)
    for a, b in zip(grad((out * probe).sum(), leaves), grad((expected * probe).sum(), leaves), strict=True):
        close(a, b, 1e-7 * (1 + float(b.abs().max())))


@everyone
def test_derivatives_by_finite_differences_through_three_chunks(optimizer):
    size = (1, 6, 1)
    given = {name: numbers(*size, 2, seed=i) for i, name in enumerate(("query", "key", "value"))}
    given |= {"rates": numbers(*size, 3, seed=3).abs(), "share": numbers(*size, seed=4).sigmoid()}
    w = [numbers(1, *shape, seed=i) for i, shape in enumerate(((3, 2), (3, 2), (2, 3)))]

    def read(*leaves: Tensor) -> Tensor:
        named = dict(zip(given, leaves[:5], strict=True))
        made = (leaves[5], leaves[6], leaves[7])
        return large_chunk_ttt(**named, weights=made, chunk_size=2, optimizer=optimizer)[0][:, 3:]

    assert gradcheck(read, [x.requires_grad_() for x in (*given.values(), *w)], atol=1e-6)


def test_orthogonal_factor():
    for size in ((4, 7), (7, 4), (5, 5)):
        x = numbers(3, *size)
        close(orthogonal(x), torch.stack([polar(part) for part in x]), 1e-9)
        large = torch.linalg.svdvals(x) > 0.005 * x.square().sum((-2, -1), keepdim=True)[..., 0].sqrt()
        assert ((torch.linalg.svdvals(orthogonal(x)) - 1).abs() < 0.12).sum() >= large.sum()
    x = torch.zeros(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert (orthogonal(x) == 0).all()
    assert grad(orthogonal(x).sum(), x)[0].isfinite().all()
    s = torch.logspace(math.log10(0.005), 0, 5001, dtype=torch.float64)
    for a, b, c in STEPS:
        s = a * s + b * s**3 + c * s**5
    assert 0.97 < s.min() < s.max() < 1.12


@everyone
def test_rows_keep_their_norms(optimizer):
    _, state = large_chunk_ttt(**inputs(), weights=weights(), chunk_size=CHUNK, optimizer=optimizer)
    for name in ("gate", "up", "down"):
        norms = [getattr(state, n).square().sum(-1).sqrt() for n in (name, f"{name}_first")]
        torch.testing.assert_close(norms[0], norms[1].expand_as(norms[0]), rtol=1e-4, atol=0)
        assert (getattr(state, name) - getattr(state, f"{name}_first")).abs().max() > 1e-2


def layer_by_hand(made: LargeChunkTTT, hidden: Tensor, places: tuple[Tensor, Tensor] | None) -> Tensor:
    """The whole layer of its parameters, one row after another."""
    p, rows, length = dict(made.named_parameters()), hidden.shape[0], hidden.shape[1]

    def turned(x: Tensor) -> Tensor:  # [B, T, C] by attention heads
        x = x.unflatten(-1, (H, -1))
        if places is None:
            return x
        cos, sin = (part[:, :, None] for part in places)
        half = x.shape[-1] // 2
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def linear(name: str) -> Tensor:
        out = hidden @ p[f"{name}.weight"].T
        return out + p[f"{name}.bias"] if f"{name}.bias" in p else out

    def silu(x: Tensor) -> Tensor:
        return x / (1 + torch.exp(-x))

    q, k, v = linear("q_proj"), linear("k_proj"), linear("v_proj")
    if "q_norm.weight" in p:
        q, k = (
            x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * p[f"{n}_norm.weight"]
            for n, x in (("q", q), ("k", k))
        )
    scores = torch.einsum("bthd,bshd->bhts", turned(q), turned(k)) / math.sqrt(C // H)
    ahead = torch.arange(length)[:, None] - torch.arange(length)
    scores = scores.masked_fill((ahead < 0) | (ahead >= made.window), -math.inf)
    attended = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v.unflatten(-1, (H, -1))).flatten(2)
    fast = []
    for name, x in (("q", q), ("k", k)):
        x = silu(x * p[f"{name}_scale"] + p[f"{name}_shift"]).unflatten(-1, (HF, D))
        x = (x / (x.square().sum(-1, keepdim=True).sqrt() + 1e-5)).flatten(2)
        fast.append((turned(x).flatten(2) if made.fast_rotary else x).unflatten(-1, (HF, D)))
    rates = torch.log1p(torch.exp(linear("rate_proj") + math.log(math.expm1(1e-3)))).unflatten(-1, (HF, 3))
    share = linear("momentum_proj").sigmoid() if "momentum_proj.weight" in p else torch.zeros(rows, length, HF)
    given = {"query": fast[0], "key": fast[1], "value": silu(v).unflatten(-1, (HF, D)), "rates": rates, "share": share}
    read, _ = expected_reads(given, (p["gate"], p["up"], p["down"]), made.optimizer, made.chunk_size)
    read = read / (read.square().mean(-1, keepdim=True) + 1e-6).sqrt() * p["read_norm.weight"]
    read = read * silu(linear("read_proj"))[..., None]
    return (attended + read.flatten(2)) @ p["o_proj.weight"].T


VARIANTS = {
    "default": {},
    "sgd": {"optimizer": "sgd"},
    "muon": {"optimizer": "muon"},
    "plain turned": {"fast_rotary": False},
    "norms and biases": {"qk_norm": True, "bias": True},
    "wide": {"window": 100, "chunk_size": 7},
    "itself": {"window": 1},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_layer_by_hand(options):
    made, hidden = layer(**options), tokens(rows=2)
    close(made(hidden, angles())[0], layer_by_hand(made, hidden, angles()), 1e-9)
    close(made(hidden)[0], layer_by_hand(made, hidden, None), 1e-9)


def test_sizes_and_presets():
    made = LargeChunkTTT(768, 12)
    assert (
        sum(x.numel() for x in made.parameters())
        == 4 * 768**2 + 3 * 768 * 192 + 4 * 768 + 5 * 4 * 769 + 192
        == 2_820_308
    )
    assert (made.chunk_size, made.window, made.optimizer) == (512, 2048, "momentum")
    assert [(p["chunk_size"], p["window"]) for p in PRESETS.values()] == [
        (512, 512),
        (512, 2048),
        (512, 4096),
        (2048, 2048),
    ]
    assert LargeChunkTTT.from_preset("2048C+2048W", C, H, fast_heads=2).chunk_size == 2048
    rate = torch.nn.functional.softplus(torch.tensor(math.log(math.expm1(1e-3)), dtype=torch.float64))
    assert abs(float(rate) - 1e-3) < 1e-12


# Streams --------------------------------------------------------------------------------------------------------

PARTITIONS = {
    "tokens": [1] * T,
    "chunks": [CHUNK] * 3 + [3],
    "odd": [1, CHUNK - 1, CHUNK, CHUNK + 1, 2],
    "late": [14, 1],
}


@everyone
@pytest.mark.parametrize("parts", PARTITIONS.values(), ids=PARTITIONS)
def test_any_partition_of_a_stream_gives_the_same(parts, optimizer):
    made, hidden = layer(optimizer=optimizer), tokens()
    expected, _ = made(hidden, angles())
    _, whole = in_pieces(made, hidden, [T])
    out, state = in_pieces(made, hidden, parts)
    close(out, expected, 1e-10)
    for name, x in state.memory.items():
        close(x, getattr(whole, name), 1e-10)
    assert (state.waits, state.writes, state.tokens) == ((3,) * B, (3,) * B, T)


def test_long_stream_in_float32():
    made, hidden = layer(chunk_size=64, window=32).float(), tokens(600, rows=1).float()
    with torch.no_grad():
        made.rate_proj.bias.fill_(0.0)
        whole, kept, out = made(hidden)[0], cache(), []
        for first, last in pairwise(accumulate([1] * 70 + [63, 64, 65, 1, 200, 137], initial=0)):
            out.append(made(hidden[:, first:last], past_key_values=kept)[0])
    assert (torch.cat(out, 1) - whole).abs().max() < 1e-5


def test_the_last_complete_chunk_is_learned():
    made, hidden = layer(), tokens(8)
    _, state = in_pieces(made, hidden, [8])
    assert (state.waits, state.writes) == ((4,) * B, (1,) * B)
    after = made.flush(state)
    assert (after.waits, after.writes) == ((0,) * B, (2,) * B)
    _, longer = in_pieces(made, tokens(9), [9])
    _, other = in_pieces(made, torch.cat([hidden, tokens(1, seed=7)], 1), [9])
    close(after.down, other.down)
    assert longer.writes == (2,) * B
    assert flush(after) is after


def test_a_later_token_changes_nothing_before_it():
    made, hidden = layer(), tokens().requires_grad_()
    out, _ = made(hidden, angles())
    for t in (0, 3, 4, 8, T - 2):
        back = grad(out[:, t].sum(), hidden, retain_graph=True)[0]
        assert (back[:, t + 1 :] == 0).all()
        assert (back[:, t] != 0).any()
    assert (grad(out[:, -1].sum(), hidden, retain_graph=True)[0][:, 0] != 0).any()  # beyond the window, it was learned
    changed = hidden.detach().clone()
    changed[:, 9] += 1
    close(made(changed, angles())[0][:, :9], out[:, :9], 0)


MASK = torch.ones(B, T, dtype=torch.bool)
MASK[0, :5], MASK[1, :1] = False, False


@pytest.mark.parametrize("parts", [[T], [1] * T, [3, 7, 5]], ids=["once", "tokens", "pieces"])
def test_padding_at_the_left_is_as_if_removed(parts):
    made = layer()
    padded = tokens().masked_fill(~MASK[..., None], torch.nan).requires_grad_()
    out, state = in_pieces(made, padded, parts, MASK)
    assert (out[~MASK] == 0).all()
    for b, first in enumerate((5, 1, 0)):
        expected, alone = in_pieces(made, padded[b : b + 1, first:].detach(), [T - first])
        close(out[b, first:], expected[0], 1e-10)
        close(state.down[b], alone.down[0], 1e-10)
        assert (state.waits[b], state.writes[b]) == (alone.waits[0], alone.writes[0])
    back = grad(out.square().sum(), padded)[0]
    assert back.isfinite().all()
    assert (back[~MASK] == 0).all()


def test_padding_inside_takes_no_place_in_a_chunk():
    given, w = inputs(), weights()
    mask = numbers(B, T, seed=40) > -0.5
    out, state = large_chunk_ttt(
        **{n: x.masked_fill(~mask.view(B, T, *(1,) * (x.dim() - 2)), torch.nan) for n, x in given.items()},
        weights=w,
        mask=mask,
        chunk_size=CHUNK,
    )
    assert (out[~mask] == 0).all()
    for b in range(B):
        expected, alone = large_chunk_ttt(
            **{n: x[b : b + 1, mask[b]] for n, x in given.items()}, weights=w, chunk_size=CHUNK
        )
        close(out[b, mask[b]], expected[0])
        close(state.up[b], alone.up[0])


def test_a_call_of_padding_alone_changes_nothing():
    made, hidden, kept = layer(), tokens(), cache()
    made(hidden, past_key_values=kept)
    before = kept.layers[0].fast_state
    mask = torch.cat([torch.ones(B, T, dtype=torch.bool), torch.zeros(B, 2, dtype=torch.bool)], 1)
    out, _ = made(hidden[:, :2], None, mask, kept)
    assert (out == 0).all()
    after = kept.layers[0].fast_state
    assert all(torch.equal(x, after.memory[name]) for name, x in before.memory.items())
    assert after.waits == before.waits


def test_rows_know_nothing_of_each_other():
    made, hidden, order = layer(), tokens(), torch.tensor([2, 0, 1])
    out, state = in_pieces(made, hidden, [T], MASK)
    turned, moved = in_pieces(made, hidden[order], [T], MASK[order])
    close(turned, out[order])
    close(moved.gate, state.gate[order])


def test_packed_documents_are_sequences_of_their_own():
    made, hidden = layer(), tokens()
    ids = torch.tensor([7] * 6 + [3] + [7] * 8).expand(B, T).clone()
    ids[1] = torch.tensor([1] * 5 + [2] * 10)
    out, _ = made(hidden, segment_ids=ids)
    for b, cuts in enumerate([(0, 6, 7, T), (0, 5, T), (0, 6, 7, T)]):
        for a, z in pairwise(cuts):
            close(out[b, a:z], made(hidden[b : b + 1, a:z])[0][0])
    kept, parts = cache(), []
    for piece, part in zip(hidden.split([3, 7, 5], 1), ids.split([3, 7, 5], 1), strict=True):
        parts.append(made(piece, past_key_values=kept, segment_ids=part)[0])
    close(torch.cat(parts, 1), out)


def test_documents_and_padding_together():
    made, hidden = layer(), tokens()
    ids = torch.tensor([1] * 7 + [2] * 8).expand(B, T).clone()
    mask = MASK.clone()
    mask[2, 7], mask[2, 12:] = False, False
    ids[~mask] = -1
    out, _ = made(hidden.masked_fill(~mask[..., None], torch.inf), None, mask, segment_ids=ids)
    for b in range(B):
        for span in (slice(0, 7), slice(7, T)):
            close(out[b, span][mask[b, span]], made(hidden[b : b + 1, span][:, mask[b, span]])[0][0])


# Gradients ------------------------------------------------------------------------------------------------------


def chunk_gradients(meta_grad: bool | int) -> list[list[bool]]:
    """Whether what chunk c reads has a gradient to the keys of chunk d, [c][d]."""
    given = {name: x.requires_grad_() for name, x in inputs(length=16).items()}
    out, _ = large_chunk_ttt(**given, weights=weights(), chunk_size=4, meta_grad=meta_grad)
    found = []
    for c in range(0, 16, 4):
        back = grad(out[:, c : c + 4].sum(), list(given.values()), retain_graph=True, allow_unused=True)
        back = [torch.zeros(B, 16) if g is None else g.flatten(2) for g in back]
        found.append([any(bool((g[:, d : d + 4] != 0).any()) for g in back) for d in range(0, c + 4, 4)])
    return found


def test_gradients_through_writes_can_be_cut():
    assert chunk_gradients(True) == [[True], [True] * 2, [True] * 3, [True] * 4]
    assert chunk_gradients(False) == [[True], [False, True], [False, False, True], [False, False, False, True]]
    assert chunk_gradients(2) == [[True], [True, True], [False, False, True], [False, False, True, True]]


def test_first_weights_are_learned():
    made = layer()
    made(tokens())[0].square().sum().backward()
    assert all((x.grad is not None) and bool((x.grad != 0).any()) for x in made.parameters())


# The state ------------------------------------------------------------------------------------------------------


def test_states_select_repeat_and_are_restored():
    made, hidden, kept = layer(), tokens(), cache()
    place = torch.arange(T)[None]
    made(hidden[:, :7], angles(place[:, :7]), MASK[:, :7], kept)
    window, fast = kept.layers[0].window_state, kept.layers[0].fast_state

    def rest(rows: Tensor, change) -> Tensor:
        now = SimpleNamespace(layers=[SimpleNamespace(window_state=change(window), fast_state=change(fast))])
        return made(hidden[rows, 7:], angles(place[:, 7:]), MASK[rows], now)[0]

    everything = torch.arange(B)
    expected = rest(everything, lambda state: state)
    order = torch.tensor([2, 2, 0])
    close(rest(order, lambda state: state.select(order)), expected[order])
    doubled = everything.repeat_interleave(2)
    close(rest(doubled, lambda state: state.repeat(2)), expected[doubled])
    close(rest(everything, lambda state: type(state).from_tensors(state.to_tensors())), expected, 0)
    close(rest(everything, lambda state: state.clone().detach()), expected, 0)


def test_reset_goes_back_to_the_first_weights():
    given, w = inputs(), weights()
    expected, state = large_chunk_ttt(**given, weights=w, chunk_size=CHUNK)
    again = state.reset()
    close(large_chunk_ttt(**given, weights=w, chunk_size=CHUNK, state=again)[0], expected)
    assert again.tokens == 0
    assert (again.waits, again.writes) == ((0,) * B, (0,) * B)
    some = state.restart(torch.tensor([False, True, False]))
    close(some.down[1], w[2])
    close(some.down[0], state.down[0], 0)
    assert (some.gate_step[1] == 0).all()


def test_window_holds_no_more_than_it_reaches():
    made, kept = layer(), cache()
    for _ in range(3):
        made(tokens(4), past_key_values=kept)
    window = kept.layers[0].window_state
    assert isinstance(window, WindowState)
    assert window.key.shape == (B, H, WINDOW - 1, C // H)
    assert window.tokens == kept.layers[0].fast_state.tokens == 12


def test_a_call_changes_no_state_but_the_cache():
    made, hidden, kept = layer(), tokens(), cache()
    made(hidden, past_key_values=kept)
    states = (kept.layers[0].window_state, kept.layers[0].fast_state)
    before = [{name: x.clone() for name, x in state.to_tensors().items()} for state in states]
    made(hidden, past_key_values=kept)
    for state, then in zip(states, before, strict=True):
        assert all(torch.equal(x, then[name]) for name, x in state.to_tensors().items())


def test_frozen_reads_and_leaves_the_state():
    made, hidden, kept = layer(), tokens(), cache()
    made(hidden, past_key_values=kept)
    state = kept.layers[0].fast_state
    made.frozen = True
    out, _ = made(hidden, past_key_values=kept)
    assert kept.layers[0].fast_state is state
    assert (out - layer()(hidden)[0]).abs().max() > 1e-6


# Whatever comes -------------------------------------------------------------------------------------------------


def test_weights_of_the_attention():
    made, hidden = layer(), tokens()
    out, found = made(hidden, angles(), output_attentions=True)
    assert found.shape == (B, H, T, T)
    close(found.sum(-1), torch.ones(B, H, T, dtype=torch.float64))
    assert (found.tril(-WINDOW) == 0).all()
    close(out, made(hidden, angles())[0])


def test_a_token_that_is_not_finite_is_neither_seen_nor_learned():
    made, hidden = layer(), tokens()
    spoilt = hidden.clone()
    spoilt[1, 6, 3] = torch.nan
    leaf = spoilt.requires_grad_()
    out, state = in_pieces(made, leaf, [T])
    assert out[1, 6].isnan().all()
    assert out.isnan().any(-1).sum() == 1
    assert state.gate.isfinite().all()
    close(out[[0, 2]], made(hidden, angles())[0][[0, 2]])
    others = out.masked_fill(out.isnan(), 0)
    assert grad(others.sum(), leaf)[0].nan_to_num(7.0, 7.0, 7.0)[0].abs().max() < 1e3
    given, w = inputs(rows=1), weights()
    good = {name: x.clone() for name, x in given.items()}
    given["key"][0, 2, 0, 0] = torch.inf
    read, _ = large_chunk_ttt(**given, weights=w, chunk_size=4, optimizer="sgd")
    good["rates"][0, 2] = 0  # it keeps its place and teaches nothing
    close(read[0, 3:], large_chunk_ttt(**good, weights=w, chunk_size=4, optimizer="sgd")[0][0, 3:])
    with debug(), pytest.raises(ArgumentError, match="NaN"):
        made(leaf)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fast_weights_are_wide_whatever_the_layer_is(dtype):
    made, hidden, kept = layer().to(dtype), tokens().to(dtype), cache()
    out, _ = made(hidden, past_key_values=kept)
    assert out.dtype == dtype
    assert kept.layers[0].fast_state.gate.dtype == torch.float32
    made(hidden, past_key_values=kept)
    expected = made.double()(hidden.double())[0]
    assert (out.double() - expected).abs().max() < 0.1 * expected.abs().max()


def test_autocast_does_not_reach_the_fast_weights():
    made, hidden, kept = layer().float(), tokens().float(), cache()
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, _ = made(hidden, past_key_values=kept)
    assert kept.layers[0].fast_state.gate.dtype == torch.float32
    assert out.isfinite().all()


def test_hooks_see_and_may_replace():
    made, hidden, seen = layer(), tokens(), {}
    for name in ("q", "k", "v", "read", "out"):
        made.get_submodule(f"hook_{name}").register_forward_hook(
            lambda module, given, out, name=name: seen.setdefault(name, out.shape) and None
        )
    out, _ = made(hidden)
    assert seen["q"] == seen["k"] == seen["v"] == (B, H, T, C // H)
    assert seen["read"] == (B, T, HF, D)
    assert seen["out"] == (B, T, C)
    made.hook_read.register_forward_hook(lambda module, given, out: out * 0)
    assert (made(hidden)[0] - out).abs().max() > 1e-3


def through(kept: SimpleNamespace | None, **options) -> None:
    layer(**options)(tokens(), past_key_values=kept)


def kept_by(rows: int = B, **options) -> SimpleNamespace:
    kept = cache()
    layer(**options)(tokens(rows=rows), past_key_values=kept)
    kept.layers[0].window_state = None
    return kept


MISTAKES = {
    "chunk_size is 0": lambda: layer(chunk_size=0),
    "chunk_size is True": lambda: layer(chunk_size=True),
    "window is 0": lambda: layer(window=0),
    "unknown optimizer 'moun'": lambda: layer(optimizer="moun"),
    "hidden_size 12 is not a multiple of 5 fast_heads": lambda: layer(fast_heads=5),
    "hidden_size 12 is not a multiple of 5 heads": lambda: LargeChunkTTT(12, 5, fast_heads=2),
    "inner is 0.0": lambda: layer(inner=0.0),
    "meta_grad is -1": lambda: layer(meta_grad=-1),
    "unknown preset '512C'": lambda: LargeChunkTTT.from_preset("512C", C, H),
    "hidden has shape [3, 15, 11]": lambda: layer()(tokens()[..., 1:]),
    "attention_mask has shape [3, 4]": lambda: layer()(tokens(), None, MASK[:, :4]),
    "give segment_ids for packed documents": lambda: layer()(tokens(), None, torch.ones(B, 1, T, T, dtype=torch.bool)),
    "expected torch.bool": lambda: layer()(tokens(), None, MASK.long()),
    "segment_ids has shape [3, 14]": lambda: layer()(tokens(), segment_ids=MASK.long()[:, 1:]),
    "a layer without layer_idx": lambda: through(cache(), layer_idx=None),
    "no place for window and fast weights": lambda: through(SimpleNamespace(layers=[SimpleNamespace()])),
    "the cache holds a NoneType": lambda: through(SimpleNamespace(layers=[])),
    "state is of 2 rows": lambda: through(kept_by(rows=2)),
    "state holds gate [3, 2, 12, 6]": lambda: through(kept_by(inner=2.0)),
    "state holds gate_step [3, 2, 0, 0]": lambda: through(kept_by(optimizer="sgd")),
    "momentum, which needs share": lambda: large_chunk_ttt(**{**inputs(), "share": None}, weights=weights()),
    "rates has shape": lambda: large_chunk_ttt(**{**inputs(), "rates": torch.zeros(B, T, HF, 2)}, weights=weights()),
    "weights down are [2, 9, 6]": lambda: large_chunk_ttt(
        **inputs(), weights=(weights()[0], weights()[1], weights()[0])
    ),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_named(message):
    with pytest.raises(ArgumentError) as error:
        MISTAKES[message]()
    assert message in str(error.value)
    assert "\n" not in str(error.value)
