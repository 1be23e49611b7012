"""What the forward kernels of compact attention keep of every row, and which blocks of pairs they mark, against dense
float64 formulas; and the thresholds of rows that are hard to solve."""

from __future__ import annotations

from typing import Any

import bounds
import pytest
import torch
from torch import Tensor

import regard
from regard.checks import ArgumentError
from regard.pairwise.dispatch import Inputs, Problem
from regard.pairwise.visibility import Visibility
from regard.triton.compact import implementation as compact
from regard.triton.runtime import tiles

ADAPTIVE = {"sparsemax": 1, "biweight": 2, "triweight": 3}
ANCHORED = {"relumax": (1, 1.0), "biweight*anchored(margin=1.5)": (2, 1.5), "triweight*anchored(margin=2.5)": (3, 2.5)}
FIXED = {
    "epanechnikov*fixed(bias=-2,empty=uniform)": (1, -2.0, "uniform"),
    "biweight*fixed(bias=-1,empty=zero)": (2, -1.0, "zero"),
    "triweight*fixed(bias=-2,empty=nearest)": (3, -2.0, "nearest"),
}
SENTENCES = ("softmax", *ADAPTIVE, *ANCHORED, *FIXED)
BATCH, HEADS, KV, QUERIES, KEYS, DIM, VALUES = 1, 2, 1, 27, 35, 5, 3
SMALL = {"rows": 16, "keys": 16}


def draw(*size: int, seed: int, spread: float = 1.0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)) * spread


def leaves(spread: float = 2.0) -> list[Tensor]:
    """Query, key and value, of which gradients are wanted."""
    q = draw(BATCH, HEADS, QUERIES, DIM, seed=1, spread=spread)
    k, v = draw(BATCH, KV, KEYS, DIM, seed=2), draw(BATCH, KV, KEYS, VALUES, seed=3)
    return [x.requires_grad_() for x in (q, k, v)]


def kept(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sentence: str,
    visible: Visibility,
    factor: Any = 0.7,
    sizes: Any = None,
    **params: Any,
) -> dict[str, Tensor]:
    """The tensors that the forward operator returns, by name; no access outside of tensors."""
    seen: list[tuple[Tensor, ...]] = []
    operator = compact.forward

    def spied(*arguments: Any) -> tuple[Tensor, ...]:
        seen.append(operator(*arguments))
        return seen[-1]

    spec = regard.Spec.parse(sentence)
    numbers = spec.resolve(DIM, 1.0, {})[1] | params
    sizes_of = (*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3])
    asked = Problem(spec, *sizes_of, diagnostics=True)
    inputs = Inputs(q, k, v, None, None, visible, asked, factor, numbers, factor=factor)
    with pytest.MonkeyPatch.context() as patch, tiles.forced(**(sizes or SMALL)), bounds.watched():
        patch.setattr(compact, "forward", spied)
        compact.run(inputs)
    return dict(zip(("out", "floats", "flags", "index", "tilt", "live"), seen[0], strict=True))


def entmax(z: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """(weights [z / r - tau]_+^r of sum one, reach r max(z / r - tau)) by bisection; z is -inf where hidden."""
    top = z.amax(-1, keepdim=True)
    low, high = torch.zeros_like(top), torch.ones_like(top)
    for _ in range(80):
        peak = (low + high) / 2
        total = (peak - (top - z) / r).clamp(min=0).pow(r).sum(-1, keepdim=True)
        low, high = torch.where(total < 1, peak, low), torch.where(total < 1, high, peak)
    return (high - (top - z) / r).clamp(min=0) ** r, r * high


def dense(
    q: Tensor, k: Tensor, v: Tensor, sentence: str, seen: Tensor, factor: Any = 0.7, number: Any = None
) -> dict[str, Tensor]:
    """The same by definition. p [B, H, Tq, Tk]; the slopes of the weights over their sum are `tilted`."""
    q, k, v = (x.detach().double() for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // KV, 1) for x in (k, v))
    z = q @ k.mT * (factor[..., None].double() if isinstance(factor, Tensor) else factor)
    z = torch.where(seen, z, -torch.inf)
    empty = ~seen.any(-1, keepdim=True)
    z = torch.where(empty, 0.0, z)
    top, fallback = z.amax(-1, keepdim=True), torch.zeros_like(empty)
    theta, stand = torch.full_like(top, -torch.inf), torch.zeros_like(z)
    reach, r = torch.ones_like(top), 1
    if sentence == "softmax":
        w = (z - top).exp()
    else:
        if sentence in ADAPTIVE:
            r = ADAPTIVE[sentence]
            reach = entmax(z, r)[1]
            theta = top - reach
        elif sentence in ANCHORED:
            r, margin = ANCHORED[sentence]
            reach = torch.full_like(top, margin) if number is None else number[..., None].double()
            theta = top - reach
        else:
            r, bias, how = FIXED[sentence]
            theta = torch.full_like(top, -bias) if number is None else -number[..., None].double()
            fallback = (top <= theta) & ~empty
            reach = torch.where(fallback | empty, 1.0, top - theta)
            if how == "uniform":
                stand = seen / seen.sum(-1, keepdim=True).clamp(min=1)
            elif how == "nearest":
                stand.scatter_(-1, z.argmax(-1, keepdim=True), 1.0)
        w = ((z - theta).clamp(min=0) / reach) ** r
    w = torch.where(empty, 0.0, w)
    mass = w.sum(-1, keepdim=True)
    p = torch.where(fallback, stand, w / torch.where(mass > 0, mass, 1))
    lower = torch.where(w > 0, w.clamp(min=1e-300) ** ((r - 1) / r), 0)
    lower = lower / lower.sum(-1, keepdim=True).clamp(min=1e-300)
    blank = empty | fallback
    floats = [
        torch.where(empty, 0, top),
        torch.where(empty, -1, theta),
        torch.where(blank, 1, reach),
        torch.where(blank, 1, mass),
        (p > 0).sum(-1, keepdim=True).double(),
        torch.where((p > 0).any(-1, keepdim=True), 1 / p.square().sum(-1, keepdim=True).clamp(min=1e-9), 0),
    ]
    flags = torch.cat([empty, fallback, torch.zeros_like(empty)], -1).int()
    return {
        "out": p @ v, "floats": torch.cat(floats, -1), "flags": flags, "tilt": lower @ v, "p": p, "z": z, "top": top
    }  # fmt: skip


def blocks_of(pairs: Tensor, rows: int, keys: int) -> Tensor:
    """Whether a block of pairs holds one that is True: uint8 [B, H, ceil(Tq / rows), ceil(Tk / keys)]."""
    padding = (0, -pairs.shape[-1] % keys, 0, -pairs.shape[-2] % rows)
    padded = torch.nn.functional.pad(pairs.to(torch.uint8), padding)
    return padded.unflatten(-1, (-1, keys)).unflatten(-3, (-1, rows)).amax((-1, -3))


SIGHTS: dict[str, Visibility] = {
    "strict window": Visibility(QUERIES, KEYS, causal=True, strict=True, window=15, offset=0),
    "mask": Visibility(QUERIES, KEYS, mask=draw(BATCH, 1, 1, KEYS, seed=4) > 0.2),
}


SEEN = [
    pytest.param(sentence, sight, marks=() if (i + j) % 2 == 0 else pytest.mark.slow)
    for i, sentence in enumerate(SENTENCES)
    for j, sight in enumerate(SIGHTS)
]


@pytest.mark.parametrize(("sentence", "sight"), SEEN)
def test_what_is_kept(sentence: str, sight: str, poisoned: None) -> None:
    found, visible = kept(*(x := leaves()), sentence, SIGHTS[sight]), SIGHTS[sight]
    block = visible.block(0, QUERIES, 0, KEYS, torch.device("cpu"))
    assert block is not None
    right = dense(*x, sentence, block.expand(BATCH, HEADS, QUERIES, KEYS))
    assert torch.equal(found["flags"], right["flags"])
    torch.testing.assert_close(found["out"].double(), right["out"], rtol=0, atol=2e-5)
    torch.testing.assert_close(found["floats"].double(), right["floats"], rtol=3e-5, atol=2e-5)
    p = right["p"]
    if sentence in ADAPTIVE:
        torch.testing.assert_close(found["tilt"].double(), right["tilt"], rtol=0, atol=1e-4)
    if sentence in ANCHORED:
        assert torch.equal(found["index"][..., :2], right["z"].argmax(-1, keepdim=True).expand(-1, -1, -1, 2).int())
        assert torch.equal(found["index"][..., 2], 1 - right["flags"][..., 0])
    if sentence in FIXED and FIXED[sentence][2] != "zero":
        lost = right["flags"][..., 1] > 0
        own = (p > 0).sum(-1) if FIXED[sentence][2] == "uniform" else p.argmax(-1)
        assert lost.any()
        assert torch.equal(found["index"][..., 0], torch.where(lost, own, -1).int())
    if sentence != "softmax":
        weighty = blocks_of(p > 0, 16, 16)
        assert found["live"].shape == weighty.shape
        assert (found["live"] >= weighty).all()
        assert (found["live"] <= 1).all()
        if sentence not in ADAPTIVE:  # their marks are of the threshold before its last step
            assert torch.equal(found["live"], weighty)


NUMBERED = (
    ("relumax", "margin"),
    ("triweight*fixed(bias=-2,empty=nearest)", "bias"),
    ("biweight", ""),
    ("softmax", ""),
)


@pytest.mark.parametrize(("sentence", "name"), NUMBERED)
def test_numbers_of_rows(sentence: str, name: str, poisoned: None) -> None:
    factor = draw(BATCH, HEADS, QUERIES, seed=5)
    factor[..., ::5], factor[..., 1::5], factor[..., 2::5] = 0, -0.7, 1e-30  # of any sign, and none
    number = draw(BATCH, HEADS, QUERIES, seed=6).abs() + 0.1
    visible, x = Visibility(QUERIES, KEYS, causal=True, offset=8), leaves()
    seen = torch.ones(QUERIES, KEYS, dtype=torch.bool).tril(8).expand(BATCH, HEADS, -1, -1)
    found = kept(*x, sentence, visible, factor, **({name: number} if name else {}))
    right = dense(*x, sentence, seen, factor, number if name else None)
    torch.testing.assert_close(found["out"].double(), right["out"], rtol=0, atol=3e-5)
    torch.testing.assert_close(found["floats"].double(), right["floats"], rtol=1e-4, atol=3e-5)


def line(scores: Tensor, r: int, sizes: Any = None) -> dict[str, Tensor]:
    """What is kept of one row with these scores."""
    q, k = torch.ones(1, 1, 1, 1), scores.reshape(1, 1, -1, 1)
    v = torch.cat([k, torch.ones_like(k)], -1)
    sentence = {r: name for name, r in ADAPTIVE.items()}[r]
    return kept(q, k, v.requires_grad_(), sentence, Visibility(1, scores.numel()), 1.0, sizes)


@pytest.mark.parametrize("r", [1, 2, 3])
def test_equal_keys_share(r: int) -> None:
    for count, level in ((1, 3.0), (50, -2.0), (200, 4096.0)):
        found = line(torch.full((count,), level), r)
        peak = count ** (-1 / r)
        torch.testing.assert_close(found["floats"][0, 0, 0, 2].item(), r * peak, rtol=1e-5, atol=abs(level) * 2**-20)
        torch.testing.assert_close(found["out"][0, 0, 0], torch.tensor([level, 1.0]), rtol=1e-6, atol=0)
        assert found["floats"][0, 0, 0, 4] == count
        assert found["flags"].sum() == 0


LONG = [
    pytest.param(r, spread, marks=() if i == r else pytest.mark.slow)
    for r in (1, 2, 3)
    for i, spread in enumerate((0.02, 0.3, 3.0), start=1)
]


@pytest.mark.parametrize(("r", "spread"), LONG)
def test_thresholds_of_long_rows(r: int, spread: float) -> None:
    z = draw(700, seed=7, spread=spread)
    found = line(z, r, {"rows": 16, "keys": 64})
    p, reach = entmax(z.double()[None], r)
    torch.testing.assert_close(found["floats"][0, 0, 0, 2].double(), reach[0, 0], rtol=2e-5, atol=0)
    assert abs(found["floats"][0, 0, 0, 4] - (p > 0).sum()) <= 1
    torch.testing.assert_close(found["out"][0, 0, 0, 0].double(), p[0] @ z.double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["out"][0, 0, 0, 1].item(), 1.0, rtol=1e-6, atol=0)
    assert found["flags"].sum() == 0


def test_scores_far_from_zero_keep_their_best_key() -> None:
    """A margin below what scores of that size can tell apart is the least that they can."""
    for best in (2e7, 1e8, 3e25):
        z = torch.full((40,), -best / 7)
        z[7] = best
        for r in (1, 2, 3):
            assert line(z, r)["out"][0, 0, 0, 0] == z[7]
        q, k = torch.ones(1, 1, 1, 1), z.reshape(1, 1, -1, 1)
        found = kept(q, k, k, "epanechnikov*anchored(margin=1e-4)", Visibility(1, 40), 1.0)
        assert found["out"].item() == z[7]


def test_blocks_without_weight_are_not_marked() -> None:
    """Sixteen keys and queries in a row are of one kind of four; kinds are far apart: one block in four has weight."""
    kind = torch.arange(64) // 16
    x = torch.nn.functional.one_hot(kind, 4).float().reshape(1, 1, 64, 4) * 3
    q, k, v = x, x, draw(1, 1, 64, 2, seed=8)
    for sentence in (*ADAPTIVE, "relumax"):
        live = kept(q, k, v.requires_grad_(), sentence, Visibility(64, 64), 1.0)["live"]
        assert torch.equal(live, torch.eye(4, dtype=torch.uint8)[None, None]), sentence


@pytest.mark.parametrize("sentence", ["sparsemax", "triweight", "relumax"])
def test_several_granules_of_rows(sentence: str, poisoned: None) -> None:
    """Shipped tiles in bfloat16: 128 rows search together, 64 share a mark; weights are applied as they are rounded."""
    q, k = draw(1, 1, 140, 16, seed=9, spread=2.0), draw(1, 1, 140, 16, seed=10)
    v = torch.ones(1, 1, 140, 16)
    x = [y.bfloat16() for y in (q, k, v)]
    visible = Visibility(140, 140, causal=True, window=50)
    found = kept(*x[:2], x[2].requires_grad_(), sentence, visible, 0.25, {"stages": 1})
    seen = torch.ones(140, 140, dtype=torch.bool).tril().triu(-49)
    z = torch.where(seen, x[0][0, 0].double() @ x[1][0, 0].double().mT * 0.25, -torch.inf)
    p = entmax(z, ADAPTIVE[sentence])[0] if sentence in ADAPTIVE else (z - z.amax(-1, keepdim=True) + 1).clamp(min=0)
    assert (found["live"][0, 0] >= blocks_of(p > 0, 64, 64)).all()
    assert torch.equal(found["out"].float(), torch.ones(1, 1, 140, 16))
    reach = entmax(z, ADAPTIVE[sentence])[1][:, 0] if sentence in ADAPTIVE else torch.ones(140).double()
    torch.testing.assert_close(found["floats"][0, 0, :, 2].double(), reach, rtol=2e-3, atol=0)


@pytest.mark.parametrize(
    "sentence",
    [s if i in (0, 2, 5, 9) else pytest.param(s, marks=pytest.mark.slow) for i, s in enumerate(SENTENCES)],
)
def test_rows_do_not_hear_of_what_they_do_not_see(sentence: str) -> None:
    """Not one bit of a row changes with later keys, nor with other rows of its block that take longer to solve."""
    visible, (q, k, v) = Visibility(QUERIES, QUERIES, causal=True), leaves()
    k, v = k[:, :, :QUERIES], v[:, :, :QUERIES]
    late = torch.arange(QUERIES)[:, None] >= 20
    changed = (torch.where(late, x * 3 + 1, x) for x in (q, k, v))
    first, second = kept(q, k, v, sentence, visible), kept(*changed, sentence, visible)
    for name in ("out", "floats", "flags", "index", "tilt"):
        assert torch.equal(first[name][:, :, :20], second[name][:, :, :20]), name


def test_nothing_at_all(poisoned: None) -> None:
    for batch, queries, keys in ((0, 3, 3), (2, 0, 4), (2, 3, 0)):
        q, k, v = torch.ones(batch, 2, queries, 4), torch.ones(batch, 2, keys, 4), torch.ones(batch, 2, keys, 5)
        for sentence in ("softmax", "biweight", "relumax", "normrelu"):
            found = kept(q, k, v, sentence, Visibility(queries, keys))
            assert torch.equal(found["out"], torch.zeros(batch, 2, queries, 5))
            assert found["flags"][..., 0].all()


def test_what_is_refused() -> None:
    x = [torch.ones(1, 1, 4, 4) for _ in range(3)]
    for sentence, reason in (
        ("polynomial(r=1.5)", "knows the powers r = 1, 2 and 3; this is r = 1.5"),
        ("gaussian*anchored(margin=1)", "knows polynomial kernels"),
        ("epanechnikov*nearest(k=2)", "knows normalised kernels under the rules adaptive, anchored and fixed"),
        ("linear", "knows normalised kernels"),
    ):
        with pytest.raises(ArgumentError, match=reason):
            regard.attention(*x, sentence, impl="triton")
    with pytest.raises(ArgumentError, match="takes alpha as a number"):
        regard.attention(*x, "biweight", impl="triton", params={"alpha": torch.tensor(1.5)})
    with pytest.raises(ArgumentError, match=r"knows the powers r = 1, 2 and 3; this is r = 1\.25"):
        regard.attention(*x, "biweight", impl="triton", params={"alpha": 1.8})
