"""Configurations take the keywords of transformers' `from_pretrained` that are no fields, and do with them what
transformers' own configurations do: nothing. Fields that are misspelt are refused, also beside them.
"""

import inspect
import re

import pytest
import torch
from any_model import SIZES, make, text
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedConfig
from transformers import PreTrainedModel as Model
from transformers.models.auto.auto_factory import _BaseAutoModelClass as AutoModel

from regard.checks import ArgumentError
from regard.models import language_models

VALUES = {
    "device_map": "cpu", "dtype": "auto", "torch_dtype": torch.float32, "subfolder": "", "num_labels": 3,
    "trust_remote_code": False, "use_safetensors": True, "low_cpu_mem_usage": True, "attn_implementation": "eager",
    "output_attentions": True, "revision": "main", "name_or_path": "elsewhere", "local_files_only": True,
    "_configuration_file": "config.json", "adapter_kwargs": {}, "adapter_name": "default", "key_mapping": {},
}  # fmt: skip
"""What a keyword is given in these tests; None where nothing is said."""
NOT_KEYWORDS = {"pretrained_model_name_or_path", "args", "kwargs", "model_args", "config_dict", "return_unused_kwargs"}


def keywords():
    """The keywords that transformers' loading functions name in their signature, their documentation or their code."""
    found = set()
    for loads in (
        Model.from_pretrained, AutoModel.from_pretrained, AutoConfig.from_pretrained, PreTrainedConfig.from_pretrained,
        PreTrainedConfig._get_config_dict, PreTrainedConfig.from_dict,
    ):  # fmt: skip
        code = inspect.getsource(loads)
        found |= set(inspect.signature(loads).parameters)
        found |= set(re.findall(r"^ +(\w+) ?\(`", loads.__doc__ or "", re.M))
        found |= set(re.findall(r'kwargs\.(?:pop|get)\(\s*"(\w+)"', code))
        for names in re.findall(r"for name in \[([^\]]+)\]", code):
            found |= set(re.findall(r'"(\w+)"', names))
    return sorted(found - NOT_KEYWORDS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders with a model each: those registered, and a Llama."""
    folders = {name: tmp_path_factory.mktemp(name) for name in [*language_models.names(), "llama"]}
    for name in language_models.names():
        make(name, dtype=torch.float32, num_hidden_layers=2).save_pretrained(folders[name])
    LlamaForCausalLM(LlamaConfig(**{**SIZES, "intermediate_size": 8})).save_pretrained(folders["llama"])
    return folders


def told(load, folder, **given):
    """What a configuration says that was loaded with a keyword, beside what it says without it, and what was unused."""
    plain, (config, unused) = load(folder), load(folder, return_unused_kwargs=True, **given)
    before, after = plain.to_dict(), config.to_dict()
    changed = {key for key in before | after if before.get(key) != after.get(key)}
    assert load(folder, **given).to_dict() == after
    return changed, unused, config._attn_implementation, config.name_or_path == plain.name_or_path


def test_the_keywords_are_found():
    assert {"gguf_file", "device_map", "variant", "weights_only", "low_cpu_mem_usage", "subfolder"} <= set(keywords())
    assert len(keywords()) > 40


@pytest.mark.parametrize("keyword", keywords())
@pytest.mark.parametrize("name", language_models.names())
def test_every_keyword_does_what_it_does_to_a_llama(name, keyword, saved):
    given = {keyword: VALUES.get(keyword)}
    own = type(AutoConfig.from_pretrained(saved[name]))
    if keyword in own().to_dict() and keyword not in LlamaConfig().to_dict():
        return  # a field of ours, such as ICLM's variant
    assert told(AutoConfig.from_pretrained, saved[name], **given) == told(
        AutoConfig.from_pretrained, saved["llama"], **given
    )
    assert told(own.from_pretrained, saved[name], **given) == told(LlamaConfig.from_pretrained, saved["llama"], **given)


@pytest.mark.parametrize("name", language_models.names())
def test_a_model_takes_what_a_llama_takes(name, saved):
    taken = {"device_map": "cpu", "low_cpu_mem_usage": True, "gguf_file": None, "weights_only": True, "dtype": "auto",
             "trust_remote_code": False, "use_safetensors": True, "quantization_config": None, "revision": "main",
             "tp_plan": None, "code_revision": None, "proxies": None, "disable_mmap": True}  # fmt: skip
    AutoModelForCausalLM.from_pretrained(saved["llama"], **taken)
    plain = AutoModelForCausalLM.from_pretrained(saved[name])
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(saved[name], **taken)(text()).logits
        torch.testing.assert_close(found, plain(text()).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", language_models.names())
def test_misspelt_fields_are_refused_wherever_they_stand(name, saved):
    own, model = language_models.get(name).config, language_models.get(name).model
    for load in (own.from_pretrained, AutoConfig.from_pretrained, model.from_pretrained,
                 AutoModelForCausalLM.from_pretrained):  # fmt: skip
        with pytest.raises(ArgumentError, match=r"unknown field 'mixer'\. Did you mean 'mixers'"):
            load(saved[name], gguf_file=None, mixer="biweight")
    with pytest.raises(ArgumentError, match="unknown field 'flavour'"):
        own.from_pretrained(saved[name], flavour="sweet")
    assert own.from_pretrained(saved[name], flavour="sweet", return_unused_kwargs=True)[1] == {"flavour": "sweet"}
