"""Keywords mean what they mean to transformers' own models: those of `from_pretrained` that are no fields, which do
nothing to a configuration, and those that reach the loss. Fields that are misspelt are refused, also beside them.
"""

import inspect
import re
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from any_model import PARTS, SIZES, every_model, make, text
from mistakes import refuses
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedConfig
from transformers import PreTrainedModel as Model
from transformers.models.auto.auto_factory import _BaseAutoModelClass as AutoModel

from regard.models import language_models

MIXERS = [case for case in PARTS if case.startswith("mixer-")]

VALUES = {
    "device_map": "cpu", "dtype": "auto", "torch_dtype": torch.float32, "subfolder": "", "num_labels": 3,
    "trust_remote_code": False, "use_safetensors": True, "low_cpu_mem_usage": True, "attn_implementation": "eager",
    "output_attentions": True, "revision": "main", "name_or_path": "elsewhere", "local_files_only": True,
    "_configuration_file": "config.json", "adapter_kwargs": {}, "adapter_name": "default", "key_mapping": {},
}  # fmt: skip
"""Values of keywords in these tests; the others are None."""
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


@cache
def loaded(load, folder):
    return load(folder)


def effects(load, folder, **given):
    """What a keyword changes in a configuration that is loaded with it, and which keywords were unused."""
    plain, (config, unused) = loaded(load, folder), load(folder, return_unused_kwargs=True, **given)
    before, after = plain.to_dict(), config.to_dict()
    changed = {key for key in before | after if before.get(key) != after.get(key)}
    assert load(folder, **given).to_dict() == after
    return changed, unused, config._attn_implementation, config.name_or_path == plain.name_or_path


def test_the_keywords_are_found():
    assert {"gguf_file", "device_map", "variant", "weights_only", "low_cpu_mem_usage", "subfolder"} <= set(keywords())
    assert len(keywords()) > 40


@pytest.mark.parametrize("keyword", keywords())
def test_every_keyword_does_what_it_does_to_a_llama(keyword, saved):
    given, llama = {keyword: VALUES.get(keyword)}, saved["llama"]
    by_auto = effects(AutoConfig.from_pretrained, llama, **given)
    by_own = effects(LlamaConfig.from_pretrained, llama, **given)
    for name in language_models.names():
        own = language_models.get(name).config
        if keyword in own().to_dict() and keyword not in LlamaConfig().to_dict():
            continue  # a field of ours, such as ICLM's variant
        assert effects(AutoConfig.from_pretrained, saved[name], **given) == by_auto, name
        assert effects(own.from_pretrained, saved[name], **given) == by_own, name


@every_model
def test_a_model_takes_what_a_llama_takes(name, saved):
    taken = {"device_map": "cpu", "low_cpu_mem_usage": True, "gguf_file": None, "weights_only": True, "dtype": "auto",
             "trust_remote_code": False, "use_safetensors": True, "quantization_config": None, "revision": "main",
             "tp_plan": None, "code_revision": None, "proxies": None, "disable_mmap": True}  # fmt: skip
    AutoModelForCausalLM.from_pretrained(saved["llama"], **taken)
    plain = AutoModelForCausalLM.from_pretrained(saved[name])
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(saved[name], **taken)(text()).logits
        torch.testing.assert_close(found, plain(text()).logits, atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("case", [*language_models.names(), "memory-pkm-before-mixer", *MIXERS, "iclm-steps"])
def test_weights_on_a_disk_give_the_same_logits(case, tmp_path):
    model, tokens = make(case, dtype=torch.float32), text(2, 9)
    model.save_pretrained(tmp_path / "saved")
    places = {f"model.{name}": "disk" for name, _ in model.model.named_children()}
    places |= dict.fromkeys(("model.embed_tokens", "lm_head", "unembed"), "cpu")
    files = {"device_map": places, "offload_folder": tmp_path / "offloaded"}
    again = type(model).from_pretrained(tmp_path / "saved", **files)
    assert any(weight.is_meta for weight in again.parameters())
    torch.testing.assert_close(again(tokens).logits, model(tokens).logits)


@every_model
def test_misspelt_fields_are_refused_wherever_they_stand(name, saved):
    own, model = language_models.get(name).config, language_models.get(name).model
    for load in (own.from_pretrained, AutoConfig.from_pretrained, model.from_pretrained,
                 AutoModelForCausalLM.from_pretrained):  # fmt: skip
        refuses(r"unknown field 'mixer'\. Did you mean 'mixers'", load, saved[name], gguf_file=None, mixer="biweight")
    refuses("unknown field 'flavour'", own.from_pretrained, saved[name], flavour="sweet")
    assert own.from_pretrained(saved[name], flavour="sweet", return_unused_kwargs=True)[1] == {"flavour": "sweet"}


IDS = torch.tensor([[0] * 5 + [1] * 7, [0] * 3 + [1] * 9])
MASK = torch.ones(2, 12, dtype=torch.long)
MASK[0, :3] = 0


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
    none = ({"labels": nothing, "num_items_in_batch": count} for count in (None, 0, torch.tensor(0)))
    for given in (*none, {"labels": tokens, "shift_labels": nothing}):
        loss = model(tokens, **given).loss
        loss.backward()
        assert loss.item() == 0
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ignore_index": None}, "ignore_index is None, expected an integer"),
        ({"shift_labels": [1, 2]}, r"shift_labels is \[1, 2\], expected integers"),
        ({"shift_labels": IDS[:, 1:]}, r"shift_labels has shape \[2, 11\], expected \[2, 12\]"),
    ],
)
def test_one_clear_line_for_keywords_of_the_loss(given, message):
    tokens = text(2, 12)
    refuses(message, model_of("transformer"), tokens, labels=tokens, **given)
