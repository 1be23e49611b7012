"""PEFT's LoRA: adapters attach, nothing else is trained, and merging them leaves the logits as they are."""

from pathlib import Path

import pytest
import torch
from any_model import make, padded, text
from pages import run

from regard.models import language_models

peft = pytest.importorskip("peft", reason="the extra `peers` brings it")
pytestmark = pytest.mark.peers
CASES = [
    *[(name, {}) for name in language_models.names()],
    ("transformer", {"mixers": ["gated-deltanet", "lact", "softmax", "local-linear[biweight]"]}),
    ("transformer", {"mixers": ["hyena", "local-linear", "softmax", "local-linear[biweight]"], "ridges": "learned"}),
    ("transformer", {"memories": "PKM@1+FwPKM@2", "output_gate": True}),
]


@pytest.mark.parametrize(("name", "fields"), CASES, ids=str)
def test_lora_trains_merges_and_comes_back(name, fields, tmp_path):
    model = make(name, **{"mixers": "biweight", **fields}, dtype=torch.float32)
    (tokens, mask), before = padded(), {path: p.detach().clone() for path, p in model.named_parameters()}
    real, plain = mask.bool(), model(*padded()).logits.detach()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    torch.testing.assert_close(adapted(tokens, attention_mask=mask).logits[real], plain[real], atol=1e-5, rtol=0)
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.5)
    losses = []
    for _ in range(4):
        loss = adapted.train()(tokens, attention_mask=mask, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    adapted.eval()
    trained = adapted(tokens, attention_mask=mask).logits.detach()
    assert (trained - plain)[real].abs().max() > 1e-4
    adapted.save_pretrained(tmp_path)
    fresh = make(name, **{"mixers": "biweight", **fields}, dtype=torch.float32)
    again = peft.PeftModel.from_pretrained(fresh, tmp_path)
    torch.testing.assert_close(again.eval()(tokens, attention_mask=mask).logits[real], trained[real], atol=1e-5, rtol=0)
    made = adapted.generate(input_ids=text(1, 5), max_new_tokens=4, do_sample=False)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(tokens, attention_mask=mask).logits[real], trained[real], atol=1e-4, rtol=0)
    assert torch.equal(merged.generate(input_ids=text(1, 5), max_new_tokens=4, do_sample=False), made)
    for path, p in merged.named_parameters():
        if p.dim() != 2:  # norms and numbers of heads
            assert torch.equal(p, before[path]), path


@pytest.mark.parametrize(
    ("case", "target"), [("iclm-f-none", "all-linear"), ("iclm-steps", r".*(embed_tokens|o_proj|lm_head)")]
)
def test_matrices_that_iclm_reads_have_what_an_adapter_adds(case, target):
    model, tokens = make(case, dtype=torch.float32, tie_word_embeddings=False), text(2, 9)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=target))
    with torch.no_grad():
        for path, p in adapted.named_parameters():
            p += 0.2 * ("lora" in path)
    logits = adapted.eval()(tokens).logits
    torch.testing.assert_close(model.contributions(tokens).logits(), logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(adapted.merge_and_unload()(tokens).logits, logits, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", language_models.names())
def test_virtual_tokens_stand_before_the_others(name):
    model, (tokens, mask) = make(name), padded()
    adapted = peft.get_peft_model(model, peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")).eval()
    virtual = adapted.get_prompt(len(tokens)).double()
    embedded = torch.cat([virtual, model.get_input_embeddings()(tokens)], 1)
    whole = model(inputs_embeds=embedded, attention_mask=torch.nn.functional.pad(mask, (3, 0), value=1)).logits
    torch.testing.assert_close(adapted(tokens, attention_mask=mask).logits, whole)


def test_the_page_about_lora_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(Path(__file__).parents[2] / "docs" / "cookbook" / "finetune-with-lora.md") is None
