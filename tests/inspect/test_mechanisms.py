"""Measures of heads on patterns written by hand, whose values are known."""

import functools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from any_model import SIZES, make, text
from mistakes import refuses

from regard.inspect import mechanisms


def even(rows: int, columns: int | None = None) -> torch.Tensor:
    """Every row the same weight on all that it sees, [1, 1, R, K]."""
    columns = rows if columns is None else columns
    weights = torch.tril(torch.ones(rows, columns, dtype=torch.float64), columns - rows)
    return (weights / weights.sum(-1, keepdim=True))[None, None]


def on(column_of_row: list[int], columns: int) -> torch.Tensor:
    """All weight of each row on one column, [1, 1, R, K]."""
    return F.one_hot(torch.tensor(column_of_row), columns).double()[None, None]


def test_sinks_of_hand_made_heads():
    heads = [on([0, 0, 0, 0], 4), on([0, 1, 1, 1], 4), on([0, 1, 2, 3], 4), even(4)]
    found = mechanisms.sinks(torch.cat(heads, 1))
    assert found.first.tolist() == pytest.approx([1, 1 / 4, 1 / 4, (1 + 1 / 2 + 1 / 3 + 1 / 4) / 4])
    assert found.strongest.tolist() == pytest.approx([1, 3 / 4, 1 / 4, (1 + 1 / 2 + 1 / 3 + 1 / 4) / 4])
    assert found.place.tolist()[:2] == [0, 1]
    assert found.uniform == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)
    assert found.rate() == 0.5  # the first head, and the even one because there is so little to see
    assert found.anywhere() == 0.75
    assert (found.rate(0.6), found.anywhere(0.6)) == (0.25, 0.5)


def test_sinks_leave_out_rows_average_over_texts_and_see_earlier_columns():
    found = mechanisms.sinks(torch.cat([on([0, 0, 1, 2], 4), even(4)], 1), from_row=2)
    assert found.first.tolist() == pytest.approx([0, (1 / 3 + 1 / 4) / 2])
    assert found.strongest.tolist()[0] == 0.5
    assert found.uniform == pytest.approx((1 / 3 + 1 / 4) / 2)
    found = mechanisms.sinks(torch.cat([on([0, 0, 0, 0], 4), on([0, 1, 2, 3], 4)]))  # averaged before they are counted
    assert found.first.tolist() == [(1 + 0.25) / 2]
    assert found.rate() == 1.0
    found = mechanisms.sinks(even(2, 4))
    assert [found.first.item(), found.uniform] == pytest.approx([(1 / 3 + 1 / 4) / 2] * 2)


def test_evenness_of_hand_made_heads():
    halves = torch.zeros(1, 1, 4, 4)
    for row in range(4):
        halves[0, 0, row, : row + 1][-2:] = 0.5 if row else 1.0
    found = mechanisms.evenness(torch.cat([even(4), on([0, 1, 0, 2], 4), halves.double(), torch.zeros(1, 1, 4, 4)], 1))
    ones = (1 + 1 / 2 + 1 / 3 + 1 / 4) / 4
    assert found.tolist() == pytest.approx([1, ones, (1 + 1 + 2 / 3 + 2 / 4) / 4, 0])
    assert mechanisms.evenness(halves, from_row=3).tolist() == pytest.approx([0.5])


def test_what_rows_and_columns_stand_for():
    text = torch.tensor([[7, 8, 9]])
    assert mechanisms.ROLES["f"].columns(text, 3).tolist() == [[7, 8, 9]]
    assert mechanisms.ROLES["f"].rows(text, 3).tolist() == [[8, 9, -1]]
    assert mechanisms.ROLES["phi"].columns(text, 4).tolist() == [[-1, 7, 8, 9]]
    assert mechanisms.ROLES["phi"].rows(text, 4).tolist() == [[7, 8, 9, -1]]
    assert mechanisms.ROLES["transformer"] == mechanisms.ROLES["f"]
    assert mechanisms.Roles(1, 1).columns(text, 3).tolist() == [[8, 9, -1]]  # a look-ahead in the values


@pytest.mark.parametrize("stream", ["f", "phi"])
def test_copying_is_the_weight_on_the_wanted_token(stream):
    """Text a b a c; the next token is wanted. Only the row that predicts the second a has an earlier one."""
    text = torch.tensor([[0, 1, 0, 2]])
    roles = mechanisms.ROLES[stream]
    columns = 4 + (stream == "phi")
    pattern = torch.rand(1, 2, columns, columns, generator=torch.Generator().manual_seed(0)).tril()
    pattern = pattern / pattern.sum(-1, keepdim=True)
    found = mechanisms.copying(pattern, roles, text, roles.rows(text, columns))
    row, column = 2 - roles.predicts, 0 - roles.holds  # where x_2 is predicted, where x_0 is held
    assert found.rows == 1
    assert found.weight.tolist() == pytest.approx(pattern[0, :, row, column].tolist())
    visible = 2 + (stream == "phi")  # x_0, x_1 and the start
    assert found.uniform == pytest.approx(1 / visible)
    assert found.lift.tolist() == pytest.approx([w * visible for w in pattern[0, :, row, column].tolist()])


def test_copying_counts_every_occurrence_and_every_row():
    text = torch.tensor([[0, 0, 1, 0], [2, 3, 2, 2]])
    pattern = torch.cat([even(4), even(4)]).repeat(1, 3, 1, 1)
    pattern[:, 1] = on([0, 0, 0, 0], 4)[:, 0]
    pattern[:, 2] = on([0, 1, 2, 3], 4)[:, 0]
    wanted = torch.tensor([[0, -1, 0, 5], [3, 2, 2, -1]])
    found = mechanisms.copying(pattern, mechanisms.ROLES["f"], text, wanted)
    # rows with an occurrence: (0, 0): 1 of 1; (0, 2): x_0, x_1 of 3; (1, 1): x_0 of 2; (1, 2): x_0, x_2 of 3
    shares = [1, 2 / 3, 1 / 2, 2 / 3]
    assert found.rows == 4
    assert found.uniform == pytest.approx(np.mean(shares))
    assert found.weight.tolist() == pytest.approx([np.mean(shares), 1.0, np.mean([1, 0, 0, 1])])
    assert found.lift.tolist()[0] == pytest.approx(1.0)


def test_copying_counts_rows_that_see_the_token():
    """Nothing recurs; a token after the row does not count, even if the pattern has weight there."""
    roles, tokens = mechanisms.ROLES["f"], torch.tensor([[0, 1, 2]])
    found = mechanisms.copying(even(3), roles, tokens, torch.tensor([[1, 2, -1]]))
    assert (found.rows, found.weight.tolist(), found.lift.tolist()) == (0, [0.0], [0.0])
    assert mechanisms.copying(torch.ones(1, 1, 3, 3) / 3, roles, tokens, torch.full((1, 3), 2)).rows == 1


def test_induction_of_an_exact_head():
    """In slots: f looks P back, phi and a Transformer P - 1; that is where x_{i - P} is held."""
    period, tokens = 3, 9
    f = on([max(0, (row + 1) - period - 0) for row in range(tokens)], tokens)  # row r is slot r + 1
    phi = on([max(0, slot - period + 1) for slot in range(tokens + 1)], tokens + 1)
    transformer = on([max(0, t - period + 1) for t in range(tokens)], tokens)
    for name, pattern in (("f", f), ("phi", phi), ("transformer", transformer)):
        assert mechanisms.induction(pattern, mechanisms.ROLES[name], period).tolist() == [1.0]
        assert mechanisms.induction(pattern, mechanisms.ROLES[name], period - 1).tolist() == [0.0]
        assert mechanisms.induction(pattern.roll(1, -1), mechanisms.ROLES[name], period).tolist() == [0.0]


def test_induction_counts_the_rows_that_can_know():
    """Period 2, four tokens: x_3 (row 2) and x_4 (row 3) follow from the block; x_2 from nothing before it."""
    pattern = torch.zeros(1, 1, 4, 4)
    pattern[0, 0, 1, 0], pattern[0, 0, 2, 1], pattern[0, 0, 3, 2] = 1.0, 0.5, 0.1
    assert mechanisms.induction(pattern, mechanisms.ROLES["f"], 2).tolist() == pytest.approx([0.3])
    chance = np.mean([1 / (row + 1) for row in range(16, 32)])
    assert mechanisms.induction(even(32), mechanisms.ROLES["f"], 16).item() == pytest.approx(chance)


def test_blocks_repeat_and_hold_no_token_twice():
    made = mechanisms.repeated_blocks(20, 6, 15, 40, torch.Generator().manual_seed(1), first=3)
    assert (made.shape, made.dtype) == ((40, 15), torch.int64)
    assert torch.equal(made[:, 6:], made[:, :-6])
    assert all(len(set(row)) == 6 for row in made[:, :6].tolist())
    assert (made.min().item(), made.max().item()) == (3, 22)
    assert torch.equal(made, mechanisms.repeated_blocks(20, 6, 15, 40, torch.Generator().manual_seed(1), first=3))
    counts = torch.bincount(made[:, 0] - 3, minlength=20)
    assert counts.max().item() < 12  # all tokens are drawn, none much more than others


def test_eigenvalues_of_known_maps():
    embedding = torch.eye(4).repeat(2, 1)  # W_e W_e^T = 2 I
    turn = torch.zeros(4, 4)
    turn[:2, :2] = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
    low_rank = torch.zeros(4, 4)
    low_rank[0, 0] = 3.0
    heads = torch.stack([torch.eye(4), -torch.eye(4), torch.diag(torch.tensor([1.0, 1, 1, -1])), turn, low_rank])
    found = mechanisms.copying_eigenvalues(heads, embedding)
    assert found.share.tolist() == pytest.approx([1, 0, 0.75, 0, 1])
    assert found.balance.tolist() == pytest.approx([1, -1, 0.5, 0, 1], abs=1e-9)
    found = mechanisms.copying_eigenvalues(torch.zeros(1, 4, 4), embedding)
    assert (found.balance.tolist(), found.share.tolist()) == ([0.0], [0.0])
    heads[1, 0, 0] = math.nan
    found = mechanisms.copying_eigenvalues(heads, embedding)
    for values in (found.share, found.balance):
        assert values.isnan().nonzero().tolist() == [[1]]


def test_eigenvalues_are_those_of_the_map_between_tokens():
    """W_e^T P W_e, V x V, has the same eigenvalues and zeros besides."""
    rng = np.random.default_rng(0)
    embedding, head = rng.normal(size=(9, 5)), rng.normal(size=(5, 5))
    wide = np.linalg.eigvals(embedding @ head @ embedding.T)
    found = mechanisms.copying_eigenvalues(torch.tensor(head)[None], torch.tensor(embedding))
    assert found.balance.item() == pytest.approx(wide.sum().real / np.abs(wide).sum(), rel=1e-9)
    large = wide[np.abs(wide) > 1e-9]
    assert found.share.item() == pytest.approx(np.mean(large.real > 0))


def test_ablations_touch_the_named_heads_only():
    pattern = torch.rand(2, 3, 4, 5).tril(1)
    assert torch.equal(mechanisms.knock_out(1)(pattern, None), pattern * torch.tensor([1, 0, 1])[:, None, None])
    assert not mechanisms.knock_out()(pattern, None).any()
    level = mechanisms.uniform_attention(0, 2)(pattern, None)
    assert torch.equal(level[:, 1], pattern[:, 1])
    for row in range(4):
        expected = [1 / (row + 2)] * (row + 2) + [0.0] * (3 - row)
        for head in (0, 2):
            assert level[1, head, row].tolist() == pytest.approx(expected)
    refuses("head 3 does not exist, expected 0 to 2", mechanisms.knock_out(3), pattern, None)


def test_ablations_of_non_finite_weights_and_of_outputs():
    pattern = torch.full((1, 2, 3, 3), math.nan)
    pattern[:, 0] = even(3)[0, 0]
    assert not mechanisms.knock_out(1)(pattern, None)[:, 1].any()
    assert mechanisms.uniform_attention(1)(pattern, None).isfinite().all()
    x = torch.arange(12.0).reshape(2, 3, 2)
    assert not mechanisms.zero(x, None).any()
    left = mechanisms.mean(x, None)
    assert left.shape == x.shape
    assert left[1, 2].tolist() == [5.0, 6.0]


iclm = functools.partial(make, "iclm")


def test_the_patterns_of_an_iclm():
    model, ids = iclm(dtype=torch.float32), text(2, 7, seed=3)
    logits, found = mechanisms.patterns(model, ids)
    assert [(p.name, p.stream, p.layer) for p in found] == [
        (f"{stream}.{layer}.attn.hook_pattern", stream, layer) for layer in range(2) for stream in ("phi", "f")
    ]
    assert torch.equal(logits.argmax(-1), model(ids).logits.argmax(-1))
    for p in found:
        start = p.stream == "phi"
        assert p.weights.shape == (2, 2, 7 + start, 7 + start)
        assert torch.allclose(p.weights.sum(-1), torch.ones(()), atol=1e-5)
        assert not p.weights.triu(1).any()
        assert torch.equal(p.wanted(logits), F.pad(logits.argmax(-1), (int(start), 0), value=-1))
    assert [p.stream for p in mechanisms.patterns(model, ids, ["f"])[1]] == ["f", "f"]


def test_the_columns_of_f_hold_the_token_that_is_averaged():
    """Changing x_j changes no weight of the rows that do not see it, and the value of column j alone."""
    model, ids = iclm(dtype=torch.float32, f_mlp="none", phi_mlp="none", num_hidden_layers=2), text(1, 7, seed=3)
    _, (phi, f) = mechanisms.patterns(model, ids)
    other = ids.clone()
    other[0, 4] = (ids[0, 4] + 1) % SIZES["vocab_size"]
    _, (phi2, f2) = mechanisms.patterns(model, other)
    row_f, row_phi = 5 - f.roles.predicts, 5 - phi.roles.predicts  # the first rows that see x_4 predict x_5
    assert torch.equal(f.weights[:, :, :row_f], f2.weights[:, :, :row_f])
    assert torch.equal(phi.weights[:, :, :row_phi], phi2.weights[:, :, :row_phi])
    assert not torch.equal(phi.weights[:, :, row_phi], phi2.weights[:, :, row_phi])
    assert phi.roles.columns(ids, 8)[0, 5] == f.roles.columns(ids, 7)[0, 4] == ids[0, 4]


def test_the_patterns_of_an_iclm_that_begins_with_a_token():
    model, ids = iclm(dtype=torch.float32, start="bos"), text(2, 7, seed=3)
    _, found = mechanisms.patterns(model, ids)
    phi, f = found[0], found[1]
    assert (phi.weights.shape[2], f.weights.shape[2]) == (7, 6)
    assert torch.equal(f.roles.columns(ids, 6), ids[:, 1:])
    assert torch.equal(f.roles.rows(ids, 6)[:, :5], ids[:, 2:])
    assert torch.equal(phi.roles.columns(ids, 7), ids)


def test_the_patterns_of_a_transformer():
    model, ids = make("transformer", dtype=torch.float32, num_hidden_layers=2), text(2, 7, seed=3)
    logits, found = mechanisms.patterns(model, ids)
    assert [(p.stream, p.layer, p.weights.shape) for p in found] == [
        ("transformer", layer, (2, 2, 7, 7)) for layer in range(2)
    ]
    weights = model(ids, output_attentions=True).attentions
    for p in found:
        assert torch.allclose(p.weights, weights[p.layer], atol=1e-6)
        assert torch.equal(p.wanted(logits), logits.argmax(-1))
    refuses("no f blocks", mechanisms.logit_lens, model, ids)
    refuses("no attention with known rows", mechanisms.patterns, model, ids, ["f"])


def test_the_lens_ends_with_the_prediction():
    model, ids = iclm(dtype=torch.float32), text(2, 7, seed=3)
    found = mechanisms.logit_lens(model, ids)
    assert found.shape == (2, 2, 7, SIZES["vocab_size"])
    assert torch.allclose(found[-1], model(ids).logits, atol=1e-5)
    f = model(ids, output_hidden_states=True).hidden_states[3].double()  # before the second f block
    norm = model.model.ln_final
    centred = f - f.mean(-1, keepdim=True)
    read = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias
    assert torch.allclose(found[0].double(), read @ model.model.embed_tokens.weight.double().T, atol=1e-4)


@pytest.mark.parametrize("variant", ["full", "wv", "slice"])
def test_projections_are_what_a_head_adds(variant):
    """All weight of one head on one value, none of the other heads: the update is P_h times the value."""
    layer = iclm(dtype=torch.float32, variant=variant).model.f[0].attn
    projections = mechanisms.head_projections(layer)
    assert projections.shape == (2, 16, 16)
    covariates, values = torch.randn(1, 4, 16), torch.randn(1, 3, 16)
    for head in range(2):
        pattern = torch.zeros(1, 2, 3, 3)
        pattern[0, head, 2, 1] = 1.0
        with layer.hook_pattern.register_forward_hook(lambda *args, pattern=pattern: pattern):
            update, _ = layer(covariates, values)
        expected = projections[head].detach() @ values[0, 1]
        assert torch.allclose(update[0, 3].detach(), expected, atol=1e-5)
