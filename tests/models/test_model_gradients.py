"""Gradients, training, compiled code and narrow numbers of every registered language model."""

import copy

import pytest
import torch
from any_model import (
    CASES,
    PARTS,
    SIZES,
    T,
    cases,
    central_difference,
    gradients,
    in_chunks,
    loss_of,
    make,
    padded,
    parts_first,
    plain_case,
    same_by_path,
    takes_embeddings,
    text,
    tolerance,
)
from hostile import some
from mistakes import refuses
from regression import ratio

from regard.models import language_models


@cases([case for case in CASES if case not in PARTS])
def test_every_parameter_has_its_derivative(case):
    """Along a random direction of each parameter, against a central difference; DDP needs a gradient for each."""
    model, tokens = make(case), text(2, 9)
    loss_of(model, tokens)[0].backward()
    draw = torch.Generator().manual_seed(7)
    for path, p in model.named_parameters():
        assert p.grad is not None, path
        along = torch.randn(p.shape, generator=draw, dtype=p.dtype)
        expected = central_difference(lambda: loss_of(model, tokens)[0], [p], [along])
        told = lambda words, path=path: f"{path}: {words}"  # noqa: E731
        torch.testing.assert_close((p.grad * along).sum(), expected, atol=1e-8, rtol=1e-5, msg=told)


@parts_first
def test_gradient_checkpointing_changes_nothing(case):
    model, (tokens, mask) = make(case).train(), padded()
    model(tokens, attention_mask=mask, labels=tokens).loss.backward()
    expected = gradients(model)
    for reentrant in (False, True):
        model.zero_grad()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model(tokens, attention_mask=mask, labels=tokens).loss.backward()
        same_by_path(gradients(model), expected, 1e-12)
        refuses("gradient checkpointing", model, tokens, use_cache=True)
        refuses("expected a transformers Cache", model, tokens, cache=5)
    assert model.eval()(tokens, use_cache=True).past_key_values is not None


@parts_first
def test_gradients_flow_through_a_cache(case):
    """A loss on the second half reaches weights by way of what the first half left in the cache."""
    model, tokens = make(case), text(2)
    model(tokens, use_cache=False).logits[:, 6:].square().mean().backward()
    expected = gradients(model)
    model.zero_grad()
    cache = model(tokens[:, :6], use_cache=True).past_key_values
    model(tokens[:, 6:], past_key_values=cache).logits.square().mean().backward()
    same_by_path(gradients(model), expected, 10 * tolerance(case))


def compiled_and_eager(case, bound, *, masked=True, **how):
    model, (tokens, mask) = make(case, **({} if "gd_steps" in CASES[case][1] else {"num_hidden_layers": 2})), padded()
    model, mask = model.train(), mask if masked else torch.ones_like(mask)
    given = {"attention_mask": mask} if masked else {}
    loss, expected = loss_of(model, tokens, **given)
    loss.backward()
    eager = gradients(model)
    model.zero_grad()
    torch._dynamo.reset()
    loss, found = loss_of(torch.compile(model, fullgraph=True, **how), tokens, **given)
    loss.backward()
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=bound, rtol=0)
    same_by_path(gradients(model), eager, bound)


BIWEIGHT = [f"{name}-biweight" for name in language_models.names()]
QUICK = [*language_models.names(), "iclm-steps-bos"]


@pytest.mark.parametrize("masked", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["masked", "whole"])
@pytest.mark.parametrize("case", some([*QUICK, *BIWEIGHT, "mosaic-distance"], *QUICK))
def test_one_graph_without_breaks(case, masked):
    compiled_and_eager(case, 1e-9, masked=masked, backend="aot_eager")


@pytest.mark.slow
@plain_case
def test_compiled_to_machine_code(case):
    compiled_and_eager(case, 1e-5)  # cosines of rotary angles are float32, and not rounded alike


@parts_first
def test_weights_and_inputs_of_zero_are_finite(case):
    model, (tokens, mask) = make(case), padded()
    if takes_embeddings(case):
        embedded = torch.zeros(5, T, SIZES["hidden_size"], dtype=torch.float64, requires_grad=True)
        model(inputs_embeds=embedded, attention_mask=mask, labels=tokens).loss.backward()
        assert all(g.isfinite().all() for g in [embedded.grad, *gradients(model).values()])
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    model.zero_grad()
    out = model(tokens, attention_mask=mask, labels=tokens)
    out.loss.backward()
    assert (out.logits == 0).all()
    assert all(g.isfinite().all() for g in gradients(model).values())


@torch.no_grad()
@plain_case
def test_bfloat16_is_near_float32(case):
    tokens = text(2, 40)
    wide = make(case, dtype=torch.float32)
    narrow = copy.deepcopy(wide).to(torch.bfloat16)
    wide.load_state_dict(narrow.state_dict())  # the same rounded weights
    expected, found = wide(tokens).logits, narrow(tokens).logits
    stepwise, _ = in_chunks(narrow, tokens, [1] * 40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = wide(tokens).logits
    for other in (found, stepwise, mixed):
        assert other.dtype == torch.bfloat16
        assert ratio(other, expected) < 0.05


@parts_first
def test_a_pass_changes_nothing_in_the_model(case):
    model, tokens = make(case), text(2)
    attributes = {path: set(vars(module)) for path, module in model.named_modules()}
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for training in (True, False):
        model.train(training)
        first, second = model(tokens).logits, model(tokens).logits
        assert torch.equal(first, second)
        assert (model(tokens).past_key_values is None) is training
        assert model(tokens, use_cache=True).past_key_values is not None
    assert {path: set(vars(module)) for path, module in model.named_modules()} == attributes
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
