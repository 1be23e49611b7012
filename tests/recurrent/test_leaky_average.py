"""The leaky average of long and of packed sequences against the sum token by token in float64."""

import pytest
import torch
from mistakes import refuses
from packed import runs
from recurrences import recurrence

from regard.recurrent.leaky import LeakyState, leaky_average

RATES = torch.tensor([0.0, 0.05, 0.5, 5.0], dtype=torch.float64)


def dense(x, rates, mask=None, start=None):
    """h by its definition, one token after the other, after `start` [B, H, D]."""
    one = torch.ones_like(x[..., :1])
    held = {} if start is None else {"values": start[:, :, None]}
    return recurrence("sum")({"q": one, "k": one, "v": x, "g": -rates}, mask=mask, start=held)[0]


def sample(tokens, batch=2, dim=3, seed=0):
    return torch.randn(batch, 4, tokens, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_long_sequences_in_float32():
    x = sample(4096, batch=1)
    got, _ = leaky_average(x.float(), RATES[1:].float().repeat(2)[:4])
    want = dense(x, RATES[1:].repeat(2)[:4])
    assert (got.double() - want).abs().max() <= 1e-6 * want.abs().max()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(2, 3, 4)}, "x has shape"),
        ({"x": torch.zeros(2, 4, 3, 2).long()}, "floating-point"),
        ({"rate": torch.zeros(3)}, "one a head"),
        ({"rate": -1.0}, ">= 0"),
        ({"mask": torch.ones(2, 4, dtype=torch.bool)}, "mask has shape"),
        ({"mask": torch.ones(2, 3)}, "torch.bool"),
        ({"segment_ids": torch.zeros(2, 4, dtype=torch.long)}, "segment_ids has shape"),
        ({"segment_ids": torch.zeros(2, 3)}, "expected integers"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"state": LeakyState.empty(1, 4, 2)}, "state holds sums"),
        ({"state": 3}, "expected None or the LeakyState"),
    ],
)
def test_bad_arguments(change, words):
    arguments = {"x": torch.zeros(2, 4, 3, 2), "rate": RATES.float(), **change}
    refuses(words, leaky_average, arguments.pop("x"), arguments.pop("rate"), **arguments)


def test_no_token_leaves_the_state():
    for device in ("cpu", "meta"):
        out, state = leaky_average(torch.zeros(2, 4, 0, 3, device=device), 0.1)
        assert (out.shape, state.sums.shape, state.non_finite.shape) == ((2, 4, 0, 3), (2, 4, 3), (2, 4))


def test_compiles_without_a_break():
    packed = torch.compile(lambda x, r, s: leaky_average(x, r, segment_ids=s)[0], fullgraph=True, backend="aot_eager")
    x, rates = sample(40).float(), RATES.float()
    torch.testing.assert_close(packed(x, rates, PACKED), leaky_average(x, rates, segment_ids=PACKED)[0])


PACKED = torch.tensor([[4] * 7 + [9] + [4] * 20 + [0] * 12, [1] * 1 + [2] * 31 + [3] * 8])
"""Documents of two rows of 40 tokens; an id that comes back begins another document."""


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("size", [None, 1, 5, 64])
def test_every_document_is_alone(masked, size):
    """Against the dense form of each document; gradients too."""
    x = sample(40).requires_grad_()
    rates = RATES.clone().requires_grad_()
    mask = torch.rand(2, 40, generator=torch.Generator().manual_seed(2)) < 0.7 if masked else None
    out, after = leaky_average(x, rates, mask=mask, segment_ids=PACKED, chunk_size=size)
    expected = torch.zeros_like(out)
    for row, span in runs(PACKED):
        seen = None if mask is None else mask[row, span][None]
        expected[row, :, span] = dense(x[row, :, span][None], rates, seen)[0]
    torch.testing.assert_close((out, after.sums), (expected, expected[:, :, -1]), rtol=0, atol=1e-12)
    weigh = torch.randn_like(out)
    got, want = (torch.autograd.grad((y * weigh).sum(), (x, rates)) for y in (out, expected))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def test_a_row_of_ids_serves_the_batch_and_the_state_belongs_to_the_first_document():
    x, start = sample(40), sample(1, seed=3)[:, :, 0]
    state = LeakyState(start, torch.zeros(2, 4, dtype=torch.bool), tokens=5)
    for ids in (PACKED[:1], PACKED):
        out, after = leaky_average(x, RATES, segment_ids=ids, state=state)
        for row, span in runs(ids.expand(2, -1)):
            begin = start[row][None] if span.start == 0 else None
            want = dense(x[row, :, span][None], RATES, None, begin)[0]
            torch.testing.assert_close(out[row, :, span], want, rtol=0, atol=1e-12)
        assert after.tokens == 45
    one, _ = leaky_average(x[:, :, :1], RATES, segment_ids=PACKED[:, :1], state=state)
    torch.testing.assert_close(one, dense(x[:, :, :1], RATES, None, start))
    none, kept = leaky_average(x[:, :, :0], RATES, segment_ids=PACKED[:, :0], state=state)
    assert none.shape == (2, 4, 0, 3)
    assert torch.equal(kept.sums, start)


def test_documents_hear_nothing_of_one_another():
    """Large numbers, NaN and infinity in one document do not move a bit of the next."""
    x, rates = sample(40).float(), RATES.float()
    out, _ = leaky_average(x, rates, segment_ids=PACKED)
    for junk in (1e16, -torch.inf, torch.nan):
        dirty = x.clone()
        dirty[0, :, :7] = junk
        dirty[1, :, 0] = junk
        dirty.requires_grad_()
        got, after = leaky_average(dirty, rates, segment_ids=PACKED)
        assert torch.equal(got[0, :, 7:], out[0, :, 7:])
        assert torch.equal(got[1, :, 1:], out[1, :, 1:])
        assert not after.non_finite.any()
        (got[0, :, 7:].sum() + got[1, :, 1:].sum()).backward()
        assert torch.equal(dirty.grad[0, :, :7], torch.zeros(4, 7, 3))
        assert dirty.grad.isfinite().all()
    corrupted = LeakyState(torch.zeros(2, 4, 3), torch.ones(2, 4, dtype=torch.bool), tokens=1)
    got, after = leaky_average(x, rates, segment_ids=PACKED, state=corrupted)
    assert got[0, :, :7].isnan().all()
    assert torch.equal(got[0, :, 7:], out[0, :, 7:])
    assert not after.non_finite.any()
