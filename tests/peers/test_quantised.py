"""Weight-only quantisation on a CPU, by bitsandbytes and torchao: near the model itself, or an error."""

from pathlib import Path

import pytest
import torch
from any_model import PARTS, make, text
from mistakes import refuses
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from regard.models import language_models

pytestmark = pytest.mark.peers
CASES = [*language_models.names(), *(name for name in PARTS if "-before-" not in name)]
KINDS = {"bitsandbytes": "Int8Params", "torchao": "Int8Tensor"}
SKIPPED = ["lm_head", "filter_in", "filter_out"]


@pytest.fixture(params=KINDS)
def library(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param, reason=f"{request.param} is not installed: see docs/hub-and-evaluation.md")
    return request.param


def settings(library: str) -> BitsAndBytesConfig | TorchAoConfig:
    if library == "bitsandbytes":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=SKIPPED)
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig(), modules_to_not_convert=SKIPPED)


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_near_the_model_itself(case: str, library: str, tmp_path: Path) -> None:
    model, tokens = make(case, dtype=torch.float32, hidden_size=64, vocab_size=64), text(2, 9)
    model.save_pretrained(tmp_path)
    small = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=settings(library), device_map="cpu")
    assert [type(weight).__name__ for weight in small.parameters()].count(KINDS[library]) >= 4
    exact, found = model(tokens).logits, small(tokens).logits
    assert 1e-4 < (found - exact).norm() / exact.norm() < 0.35
    assert small.generate(tokens, max_new_tokens=3, do_sample=False).shape == (2, 12)


def test_matrices_that_are_read_directly(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    for case in ("mixer-hyena", "iclm"):
        make(case, dtype=torch.float32, hidden_size=64).save_pretrained(tmp_path / case)
        settings = BitsAndBytesConfig(load_in_8bit=True)
        small = AutoModelForCausalLM.from_pretrained(tmp_path / case, quantization_config=settings, device_map="cpu")
        refuses("a matrix is quantised", small if case == "mixer-hyena" else small.contributions, text(1, 5))
