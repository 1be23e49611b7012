"""What the released programs computed, against their formulas in loops."""

import numpy as np
import pytest
import torch

from regard.models import MemoryMosaicConfig, MemoryMosaicForCausalLM
from regard.nn import ContextualMemory
from regard_recipes.mosaic.released_weightings import FORMS, RULES, ReleasedMemory, use_released, weigh


def row(rule: str, form: str, cosines: np.ndarray, token: int, beta2: float) -> tuple[np.ndarray, bool]:
    """Weights of all pairs for one token; pair j has the key of token j and is complete at token j + 1."""
    seen = np.arange(len(cosines)) <= token - (2 if form == "fast" else 1)
    nothing = np.zeros(len(cosines))
    if token == 0:
        return nothing, True
    sharp = beta2**2 if form == "regular" else beta2
    if rule == "normrelu" and form == "regular":
        raw = np.maximum(2 * sharp * np.where(seen, cosines, 0) + 1 - 2 * beta2, 0)
    elif rule == "normrelu":
        raw = np.where(seen, np.maximum(cosines, 0), 0)
    else:
        top = max(cosines[seen], default=0.0)
        raw = np.where(seen, np.maximum(sharp * (cosines - top) + 1, 0), 0)
    if raw.sum() == 0:
        return (seen / seen.sum() if seen.any() else nothing), True
    return raw / max(raw.sum(), 1e-6), False


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("beta2", [0.3, 1.0, 7.4])
def test_weights_are_the_formulas(rule: str, form: str, beta2: float) -> None:
    cosines = torch.rand(2, 3, 9, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    cosines[0, 0, 4] = -cosines[0, 0, 4].abs()  # a row without a positive cosine
    found, empty = weigh(rule, form, cosines, torch.full((3,), beta2, dtype=torch.float64))
    for at in np.ndindex(2, 3, 9):
        wanted, none = row(rule, form, cosines[at].numpy(), at[2], beta2)
        assert np.abs(found[at].numpy() - wanted).max() < 1e-12
        assert bool(empty[at]) == none


def mosaic(spec: str = "softmax", **options: object) -> MemoryMosaicForCausalLM:
    torch.manual_seed(0)
    size = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    return MemoryMosaicForCausalLM(MemoryMosaicConfig(**size, mixers=spec, **options))


def test_the_mended_relumax_is_the_defined_one_at_its_first_margin() -> None:
    """relu(beta^2 (s - m) + 1): the margin of 1 that `relumax` has before it is learned."""
    tokens = torch.randint(11, (2, 20), generator=torch.Generator().manual_seed(2))
    changed, defined = mosaic(), mosaic("relumax", learned=[])
    defined.load_state_dict(changed.state_dict())
    before = changed(tokens).logits
    use_released(changed, "relumax", "mended")
    assert (changed(tokens).logits - defined(tokens).logits).abs().max() < 1e-5
    assert (before - changed(tokens).logits).abs().max() > 1e-4


@pytest.mark.parametrize("form", FORMS)
def test_a_changed_model_learns_and_sees_no_future(form: str) -> None:
    model = mosaic()
    parameters = dict(model.named_parameters())
    use_released(model, "relumax", form)
    assert all(parameters[name] is weight for name, weight in model.named_parameters())
    memories = [module for module in model.modules() if isinstance(module, ContextualMemory)]
    assert [type(memory) for memory in memories] == [ReleasedMemory] * 2
    tokens = torch.randint(11, (1, 12), generator=torch.Generator().manual_seed(3))
    other = tokens.clone()
    other[:, 7:] = (other[:, 7:] + 1) % 11
    assert torch.equal(model(tokens).logits[:, :7], model(other).logits[:, :7])
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert all(weight.grad is not None for weight in parameters.values())
    assert memories[0].fallen.shape == (1, 2, 12)
    assert memories[0].fallen[..., 0].all()


def test_normalised_relu_of_the_fast_program_learns_no_sharpness() -> None:
    model = mosaic()
    use_released(model, "normrelu", "fast")
    tokens = torch.randint(11, (1, 12), generator=torch.Generator().manual_seed(3))
    model(input_ids=tokens, labels=tokens).loss.backward()
    without = {name for name, weight in model.named_parameters() if weight.grad is None}
    assert without == {f"model.layers.{layer}.contextual.sharpness.scale" for layer in (0, 1)}
