"""Keywords that reach the loss mean what they mean to transformers' own models: which labels are left out, labels that
are shifted already, and what the sum is divided by. What the model leaves out by itself it leaves out of all of them.
"""

import pytest
import torch
import torch.nn.functional as F
from any_model import make, text

from regard.checks import ArgumentError
from regard.models import language_models

IDS = torch.tensor([[0] * 5 + [1] * 7, [0] * 3 + [1] * 9])
MASK = torch.ones(2, 12, dtype=torch.long)
MASK[0, :3] = 0
every_model = pytest.mark.parametrize("name", language_models.names())


def model_of(name):
    return make(name, "biweight", torch.float32, num_hidden_layers=2)


def mean(logits, targets):
    """Over the targets that are not negative; targets [B, T] are those of the same position."""
    return F.cross_entropy(logits[targets >= 0], targets[targets >= 0])


def shifted(labels):
    return F.pad(labels[:, 1:], (0, 1), value=-100)


@torch.no_grad()
@every_model
@pytest.mark.parametrize("given", [{}, {"attention_mask": MASK}, {"segment_ids": IDS}], ids=["all", "mask", "packed"])
def test_which_labels_count(name, given):
    model, tokens = model_of(name), text(2, 12)
    logits, labels = model(tokens, **given).logits, tokens.clone()
    labels[:, 8] = -100
    wanted = shifted(labels)
    if "attention_mask" in given:
        wanted[0, :3] = -100  # the first real token is not predicted from a hidden one
    if "segment_ids" in given:
        wanted[0, 4] = wanted[1, 2] = -100
    expected = mean(logits, wanted)
    torch.testing.assert_close(model(tokens, labels=labels, num_items_in_batch=None, **given).loss, expected)
    summed = model(tokens, labels=labels, num_items_in_batch=10, **given).loss
    torch.testing.assert_close(summed, expected * int((wanted >= 0).sum()) / 10)
    other = model(tokens, labels=labels.where(labels >= 0, 0), ignore_index=0, **given).loss
    torch.testing.assert_close(other, mean(logits, wanted.where(wanted != 0, -100)))
    other = model(tokens, labels=tokens, shift_labels=shifted(labels), **given).loss
    torch.testing.assert_close(other, expected)
    strided = shifted(labels).T.contiguous().T
    torch.testing.assert_close(model(tokens, labels=tokens, shift_labels=strided, **given).loss, expected)


@every_model
def test_nothing_to_predict_is_a_loss_of_zero(name):
    model, tokens = model_of(name), text(2, 12)
    nothing = torch.full_like(tokens, -100)
    for said in ({"labels": nothing, "num_items_in_batch": None}, {"labels": tokens, "shift_labels": nothing}):
        loss = model(tokens, **said).loss
        loss.backward()
        assert loss.item() == 0
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"ignore_index": None}, "ignore_index is None, expected an integer"),
        ({"shift_labels": [1, 2]}, r"shift_labels is \[1, 2\], expected integers"),
        (
            {"shift_labels": torch.zeros(2, 11, dtype=torch.long)},
            r"shift_labels has shape \[2, 11\], expected \[2, 12\]",
        ),
    ],
)
def test_one_clear_line(said, message):
    tokens = text(2, 12)
    with pytest.raises(ArgumentError, match=message):
        model_of("transformer")(tokens, labels=tokens, **said)
