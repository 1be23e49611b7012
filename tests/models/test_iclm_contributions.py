"""The parts of an ICLM's logits: their sum, each part by loops over weights and matrices, and packed rows."""

import pytest
import torch
from any_model import ICLM, make, text
from packed import documents, packed_rows

from regard import presets
from regard.checks import ArgumentError

IDS = text(2, 9, seed=4)
BOUND = {"atol": 1e-8, "rtol": 1e-8}


@pytest.mark.parametrize("fields", [*ICLM.values(), *({"mixers": name} for name in presets())], ids=str)
def test_the_parts_of_packed_rows_add_up_to_their_logits(fields):
    model, rows = make("iclm", **fields), documents()
    tokens, ids = packed_rows(rows)
    some = torch.tensor([3, 11, 20])
    found, logits = model.contributions(tokens, segment_ids=ids), model(tokens, segment_ids=ids).logits
    torch.testing.assert_close(found.logits(), logits, **BOUND)
    rest, logits = found.mlp(some).sum(2) + found.bias(some), logits[..., some]
    torch.testing.assert_close(found.per_token(some).sum(2) + rest, logits, **BOUND)
    torch.testing.assert_close(found.per_head(some).sum((2, 3)) + rest, logits, **BOUND)
    torch.testing.assert_close(found.per_layer(some).sum(2) + rest, logits, **BOUND)
    torch.testing.assert_close(found.parts(some).sum((2, 3, 4)) + rest, logits, **BOUND)
    assert found.mlp().shape[2] == (0 if model.config.f_mlp == "none" else len(model.model.f))
    if model.config.f_mlp != "none":
        assert found.mlp().abs().max() > 0.05, "a remainder that is no rounding error"


@pytest.mark.parametrize("name", ICLM)
def test_contributions_of_packed_rows_are_those_of_their_documents(name):
    """Tokens of other documents add nothing, and padding changes nothing."""
    model, rows = make(f"iclm-{name}"), documents()
    tokens, ids = packed_rows(rows)
    some = torch.tensor([3, 11, 20])
    found = model.contributions(tokens, segment_ids=ids)
    seen = (ids[:, :, None] == ids[:, None]).tril()
    assert not found.per_token(some)[~seen].any()
    for row, texts in enumerate(rows):
        at = 0
        for document in texts:
            span = slice(at, at + len(document))
            own = model.contributions(document[None])
            torch.testing.assert_close(found.parts(some)[row, span, span], own.parts(some)[0], **BOUND)
            torch.testing.assert_close(found.mlp(some)[row, span], own.mlp(some)[0], **BOUND)
            at += len(document)
    few = model.contributions(tokens, positions=[-1, 6], segment_ids=ids)
    torch.testing.assert_close(few.per_token(some), found.per_token(some)[:, [12, 6]], **BOUND)
    real = torch.ones(2, 19, dtype=torch.bool)
    real[:, [0, 1, 7, 12, 13, 18]] = False  # before, between, inside and after documents
    spread = lambda x, filler: x.new_full(real.shape, filler).masked_scatter(real, x)  # noqa: E731
    hidden = model.contributions(spread(tokens, 3), real, segment_ids=spread(ids, 9))
    torch.testing.assert_close(hidden.logits()[real], found.logits().flatten(0, 1), **BOUND)
    inner = hidden.per_token(some)[real].view(2, 13, 19, 3)
    assert not inner[:, :, ~real[0]].any()
    torch.testing.assert_close(inner[:, :, real[0]], found.per_token(some), **BOUND)


def test_each_part_is_a_weight_times_what_its_token_says():
    """Weights, embeddings and matrices read from the model, part by part in loops, in float64."""
    model = make("iclm", f_mlp="none")
    with torch.no_grad():
        weights = model(IDS, output_attentions=True).attentions[2:]
        seen = []
        handle = model.model.ln_final.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
        model(IDS)
        handle.remove()
    table, gain = model.lm_head.weight.detach(), model.model.ln_final.weight.detach()
    chosen = torch.tensor([3, 28])
    parts = model.contributions(IDS).parts(chosen)
    assert parts.shape == (2, 9, 9, 2, 2, 2)
    for b in range(2):
        for t in range(9):
            spread = (seen[0][b, t].var(unbiased=False) + 1e-5).sqrt()
            for j in range(9):
                word = table[IDS[b, j]]
                for layer in range(2):
                    out = model.model.f[layer].attn.o_proj.weight.detach()
                    for h in range(2):
                        x = out[:, 16 * h : 16 * h + 16] @ word
                        lean = (x - x.mean()) / spread * gain
                        weight = weights[layer][b, h, t, j] if j <= t else 0.0
                        wanted = weight * (table[chosen] @ lean)
                        torch.testing.assert_close(parts[b, t, j, layer, h], wanted, atol=1e-10, rtol=0)


def test_tokens_and_positions_can_be_chosen():
    model = make("iclm")
    whole = model.contributions(IDS)
    few = model.contributions(IDS, positions=[4, -1])
    assert few.positions.tolist() == [4, 8]
    torch.testing.assert_close(few.per_token(), whole.per_token()[:, [4, 8]])
    chosen = torch.tensor([5, 0, 28])
    own = chosen.expand(2, 2, 3)
    for name in ("per_token", "per_head", "per_layer", "mlp", "logits", "parts"):
        everything = getattr(few, name)(torch.arange(29))
        for given in (chosen, own):
            found = getattr(few, name)(given)
            torch.testing.assert_close(found, everything[..., chosen], atol=1e-6, rtol=1e-5)
    assert few.bias(own).shape == (2, 2, 3)
    target = torch.tensor([[[1], [2]], [[3], [4]]])  # a token of its own at every position
    found = few.per_token(target)
    for b in range(2):
        for q in range(2):
            torch.testing.assert_close(found[b, q, :, 0], few.per_token()[b, q, :, target[b, q, 0]])


def test_the_vocabulary_comes_in_pieces():
    found = make("iclm").contributions(IDS)
    pieces = list(found.vocabulary(8))
    assert [len(piece) for piece in pieces] == [8, 8, 8, 5]
    torch.testing.assert_close(torch.cat([found.per_token(piece) for piece in pieces], -1), found.per_token())


def test_differences_and_types():
    found = make("iclm").contributions(IDS)
    one, other = torch.tensor([3]), torch.tensor([9])
    each = found.per_token()
    torch.testing.assert_close(found.difference(one, other)[..., 0], each[..., 3] - each[..., 9])
    types, sums = found.per_type(one)
    assert types.tolist() == sorted(set(IDS.flatten().tolist()))
    for place, kind in enumerate(types.tolist()):
        for b in range(2):
            wanted = each[b, :, IDS[b] == kind, 3].sum(-1)
            torch.testing.assert_close(sums[b, :, place, 0], wanted, atol=1e-6, rtol=1e-5)


def test_one_token_is_a_text_and_its_parts_hold_no_graph():
    for start in ("param", "bos"):
        model = make("iclm", start=start)
        found = model.contributions(IDS[:, :1])
        assert not found.logits().requires_grad
        torch.testing.assert_close(found.logits(), model(IDS[:, :1]).logits.detach(), atol=1e-5, rtol=1e-6)
        assert found.per_token().any() == (start == "param")


def test_nothing_listens_afterwards():
    model = make("iclm")
    model.contributions(IDS)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with pytest.raises(ArgumentError, match="input_ids holds 0 to 99"):
        model.contributions(torch.tensor([[0, 99]]))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"tokens": torch.tensor([29])}, "tokens holds 29 to 29, expected tokens from 0 to 28"),
        (
            {"tokens": torch.tensor([0.5])},
            r"tokens is a torch.float32 tensor \[1\], expected integers \[M\] or \[2, 9, M\]",
        ),
        ({"tokens": torch.zeros(1, 9, 2, dtype=torch.long)}, r"tokens is .*\[1, 9, 2\], expected integers \[M\] or"),
        *(
            ({"positions": p}, r"positions is .*, expected integers \[Q\] from -9 to 8")
            for p in ([9], [], [0.5], [[1]])
        ),
        ({"positions": [-10]}, r"positions is .*, expected integers \[Q\] from -9 to 8"),
        ({"input_ids": [[1, 2]]}, r"input_ids is \[\[1, 2\]\], expected an integer tensor"),
        ({"input_ids": torch.arange(3)}, r"input_ids is a torch.int64 tensor \[3\], expected an integer tensor"),
    ],
)
def test_bad_calls(call, message):
    call = dict(call)
    tokens = call.pop("tokens", None)
    with pytest.raises(ArgumentError, match=message):
        make("iclm").contributions(**{"input_ids": IDS, **call}).per_token(tokens)
