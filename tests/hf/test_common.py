"""transformers' own common tests of models and configurations, over every registered model: `make test-hf`. What does
not apply to regard is in exceptions.py, with the reason."""

import unittest
from typing import Any
from unittest.mock import patch

import pytest
import torch
from exceptions import reasons
from source import prepare
from transformers.models.auto import modeling_auto as auto

GENERATES = prepare()

from tests.generation.test_utils import GenerationTesterMixin  # noqa: E402
from tests.test_configuration_common import ConfigTester  # noqa: E402
from tests.test_modeling_common import ModelTesterMixin  # noqa: E402
from tests.test_training_mixin import TrainingTesterMixin  # noqa: E402

from regard.models import language_models  # noqa: E402

pytestmark = pytest.mark.peers
SIZES = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 512,
}  # fmt: skip
for _, _entry in language_models.items():  # the mixins choose by these names what to ask of a class
    auto.MODEL_MAPPING_NAMES[_entry.config.model_type] = _entry.model.model_class.__name__
    auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[_entry.config.model_type] = _entry.model.__name__
MODELS = {name: (name, {}) for name in language_models.names()}
MODELS["hybrid"] = ("transformer", {"mixers": ["gated-deltanet", "biweight"]})


class Tester:
    """What the mixins ask for: a tiny configuration and inputs for it."""

    batch_size, seq_length, is_training = 3, 7, True

    def __init__(self, name: str) -> None:
        kind, fields = MODELS[name]
        self.entry, self.fields = language_models.get(kind), {**SIZES, **fields}
        self.causal_lm_class, self.base_model_class = self.entry.model, self.entry.model.model_class
        for field, size in SIZES.items():
            setattr(self, field, size)

    def get_config(self) -> Any:
        return self.entry.config(**self.fields)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        tokens = torch.randint(3, SIZES["vocab_size"], (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


class Common(ModelTesterMixin, GenerationTesterMixin, TrainingTesterMixin):
    """The mixins, for one model."""

    name: str
    model_tester: Any = None
    test_can_init_all_missing_weights_before_2023 = True  # run it whatever the year of the file

    training_overfit_learning_rate = 3e-3

    def setUp(self) -> None:
        for reason in reasons(self._testMethodName, self.name, not GENERATES):
            raise unittest.SkipTest(reason)
        self.model_tester = Tester(self.name)
        self.all_model_classes = (self.model_tester.base_model_class, self.model_tester.causal_lm_class)

    def test_can_init_all_missing_weights(self) -> None:
        """Without the check that a checkpoint holds every tensor, which the test leaves out."""
        with patch("regard.models.base.loading.misfits", lambda *_: []):
            super().test_can_init_all_missing_weights()

    def _check_past_key_values_for_generate(
        self, batch_size: int, past_key_values: Any, seq_length: int, config: Any
    ) -> None:
        """The caches of regard hold keys and values or states; what they have in common is the length."""
        assert past_key_values.get_seq_length() == seq_length

    def test_config(self) -> None:
        fields = {name: SIZES[name] for name in ("hidden_size", "vocab_size", "num_attention_heads")}
        ConfigTester(self, config_class=self.model_tester.entry.config, **fields).run_common_tests()


for _name in MODELS:
    _class = "Test" + "".join(word.capitalize() for word in _name.split("-"))
    globals()[_class] = type(_class, (Common, unittest.TestCase), {"name": _name, "__module__": __name__})
del Common
