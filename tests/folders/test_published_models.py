"""A saved model carries what the Hugging Face Hub and programs that do not import regard need."""

import json
from pathlib import Path

import pytest
import torch
from any_model import make, text
from huggingface_hub import ModelCard
from programs import python

from regard.models import HybridConfig, language_models
from regard.training import load_model

TOKENS = [[3, 1, 4, 1, 5]]
LOAD = f"""
import sys, torch
from pathlib import Path
from transformers import AutoModel, AutoModelForCausalLM
assert "regard" not in sys.modules
for folder in Path(sys.argv[1]).iterdir():
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    base = AutoModel.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("regard."), type(model)
    model.save_pretrained(folder)  # copies no source
    tokens = torch.tensor({TOKENS})
    torch.save([model(tokens).logits, base(tokens).last_hidden_state], folder / "out.pt")
"""


def test_a_program_that_does_not_import_regard_loads_every_model(tmp_path: Path) -> None:
    models = {name: make(name, dtype=torch.float32) for name in language_models.names()}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    files = {name: {path.name for path in (tmp_path / name).iterdir()} for name in models}
    python("-c", LOAD, tmp_path)
    for name, model in models.items():
        logits, hidden = torch.load(tmp_path / name / "out.pt")
        torch.testing.assert_close(logits, model(torch.tensor(TOKENS)).logits)
        torch.testing.assert_close(hidden, model.model(torch.tensor(TOKENS)).last_hidden_state)
        assert {path.name for path in (tmp_path / name).iterdir()} == files[name] | {"out.pt"}


def test_regard_does_not_run_the_module(run_folder: Path) -> None:
    (run_folder / "model" / "COMPLETE.json").unlink()  # the seal would refuse the change
    (run_folder / "model" / "regard_auto.py").write_text("raise SystemExit('ran')")
    model, _ = load_model(run_folder, call="test")
    assert model.generate(text(1, 4), max_new_tokens=2).shape == (1, 6)  # SystemExit would fail the test


def test_a_configuration_that_is_not_registered_is_saved_without_a_module(tmp_path: Path) -> None:
    class Other(HybridConfig.__base__):  # type: ignore[misc, name-defined]
        model_type = "other"

    Other().save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_the_card_says_what_was_trained_and_measured(trained: Path) -> None:
    card = ModelCard.load(trained / "model" / "README.md")
    summary, run = (json.loads((trained / name).read_text()) for name in ("summary.json", "run.json"))
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    measured = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert measured["bits_per_byte"] == pytest.approx(summary["bits_per_byte"], abs=1e-6)
    assert f"{summary['parameters']:,} parameters" in card.text
    source = run["text"]
    assert f"text.txt: {source['characters']:,} characters, SHA-256 `{source['sha256']}`" in card.text
    assert "| hidden_size | 16 |" in card.text
    assert "| use_cache | True |" in card.text
    assert str(trained.parent) not in card.content
