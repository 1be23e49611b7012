"""Documents packed into rows of stock models with regard attention, in every way in which transformers' collator says
so: as each document alone, also where transformers itself drops the packing; what cannot be honoured is refused.
"""

import gc

import any_model
import pytest
import torch
import transformers
from mistakes import refuses
from packed import descended
from tiny_models import CAUSAL, DECODERS, SLIDING, VOCAB, positions, tiny, tokens
from transformers import DataCollatorWithFlattening, DynamicCache, StaticCache, Trainer, TrainingArguments
from transformers.masking_utils import create_causal_mask

from regard.integrations import transformers as integration
from regard.integrations.transformers import register
from regard.models import language_models
from regard.models.base.arguments import CACHE

register("local-linear[softmax]")
LENGTHS = (7, 1, 9, 3)
SPECS = ["regard_softmax", "regard_biweight"]
no_mask_of_pairs = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23),
    reason="transformers 5.20, the last release for Python 3.10, makes a mask of pairs, with the same results",
)


def texts(seed=0):
    return [tokens(1, n, seed=seed + i)[0] for i, n in enumerate(LENGTHS)]


def batch(documents, **options):
    """What the collator makes of documents, without labels."""
    made = DataCollatorWithFlattening(**options)([{"input_ids": text.tolist()} for text in documents])
    made.pop("labels")
    return made


def alone(model, documents):
    return torch.cat([model(text[None], use_cache=False).logits for text in documents], 1)


def drops(kind, model, packed):
    """What else is given, by which transformers drops the packing or not."""
    ones = torch.ones_like(packed["input_ids"])
    return {
        "plain": {"use_cache": False},
        "ones": {"use_cache": False, "attention_mask": ones},
        "cache": {},
        "given": {"past_key_values": DynamicCache(config=model.config), "attention_mask": ones},
        "fixed": {"past_key_values": StaticCache(config=model.config, max_cache_len=int(ones.sum()))},
    }[kind]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ["plain", "ones", "cache", "given", "fixed"])
@pytest.mark.parametrize("family", CAUSAL)
@pytest.mark.parametrize("spec", SPECS)
def test_each_document_gives_what_it_gives_alone(spec, family, kind, training):
    model = tiny(family, spec, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0).train(training)
    documents = texts()
    wanted = alone(model, documents)
    weigh = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    parameters = [p for p in model.parameters() if p.requires_grad]
    want = torch.autograd.grad((wanted * weigh).sum(), parameters)
    for options in ({}, {"return_flash_attn_kwargs": True, "return_seq_idx": True}):
        packed = batch(documents, **options)
        found = model(**packed, **drops(kind, model, packed)).logits
        assert (found - wanted).abs().max() < 1e-5
        got = torch.autograd.grad((found * weigh).sum(), parameters)
        assert all((a - b).abs().max() < 1e-4 * max(1.0, float(b.abs().max())) for a, b in zip(got, want, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["plain", "ones", "cache"])
@pytest.mark.parametrize("family", CAUSAL)
def test_rows_that_are_packed_differently(family, kind):
    """Two rows with documents and padding of their own; and one row of position ids for both."""
    model, ids = tiny(family, "regard_biweight"), tokens(2, 12)
    counted = torch.tensor([[*range(7), *range(5)], [*range(3), *range(9)]])
    packed = {"input_ids": ids, "position_ids": counted}
    found = model(**packed, **drops(kind, model, packed)).logits
    want = torch.cat([alone(model, [ids[0, :7], ids[0, 7:]]), alone(model, [ids[1, :3], ids[1, 3:]])])
    assert (found - want).abs().max() < 1e-5
    one = model(ids, position_ids=counted[:1], **drops(kind, model, packed)).logits
    assert (one - torch.cat([want[:1], alone(model, [ids[1, :7], ids[1, 7:]])])).abs().max() < 1e-5
    mask = torch.ones_like(ids)
    mask[0, 10:], mask[1, 8:] = 0, 0
    counted = counted.masked_fill(mask == 0, 1)
    padded = model(ids, attention_mask=mask, position_ids=counted, use_cache=kind == "cache").logits
    assert (padded - want)[mask.bool()].abs().max() < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("kind", ["plain", "ones", "cache"])
@pytest.mark.parametrize("family", DECODERS)
def test_more_families(family, kind):
    model, documents = tiny(family, "regard_biweight"), texts()
    packed = batch(documents)
    assert (model(**packed, **drops(kind, model, packed)).logits - alone(model, documents)).abs().max() < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("kind", ["plain", "ones", "cache"])
@pytest.mark.parametrize("family", CAUSAL)
def test_another_document_changes_no_bit(family, kind):
    model, documents = tiny(family, "regard_biweight"), texts()
    other = [documents[0] % 50 + 3, *documents[1:]]
    first, second = (model(**b, **drops(kind, model, b)).logits for b in map(batch, (documents, other)))
    assert torch.equal(first[:, 7:], second[:, 7:])
    assert not torch.equal(first[:, :7], second[:, :7])


@torch.no_grad()
@pytest.mark.parametrize("family", CAUSAL)
def test_weights_and_local_linear_models(family):
    documents = texts()
    packed = batch(documents)
    model = tiny(family, "regard_local-linear[softmax]")
    found = model(**packed, attention_mask=torch.ones_like(packed["input_ids"]), output_attentions=True)
    together = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))
    apart = together[:, None] != together
    assert (found.logits - alone(model, documents)).abs().max() < 1e-4
    assert all((w[..., apart] == 0).all() for w in found.attentions)


@torch.no_grad()
@pytest.mark.parametrize("family", CAUSAL)
def test_padding_is_no_document(family):
    """Positions of padding as `generate` and others count them, before and inside; a prompt in pieces."""
    model, ids = tiny(family, "regard_biweight"), tokens()
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    for filler in (0, 1):
        counted = positions(mask).masked_fill(mask == 0, filler)
        whole = model(ids, attention_mask=mask, position_ids=counted, use_cache=False).logits
        want = model(ids[:1, 4:], use_cache=False).logits
        assert (whole[:1, 4:] - want).abs().max() < 1e-5
        cache, parts = DynamicCache(config=model.config), []
        for at in (slice(0, 3), slice(3, 8), slice(8, 12)):  # the first part of row 0 is all padding
            part = {"attention_mask": mask[:, : at.stop], "position_ids": counted[:, at], "past_key_values": cache}
            parts.append(model(ids[:, at], **part).logits)
        steps = torch.cat(parts, 1)
        assert (steps[mask.bool()] - whole[mask.bool()]).abs().max() < 1e-5
    if "sliding" not in family:  # windows count padding
        mask = torch.ones_like(ids)
        mask[:, 5] = 0
        counted = positions(mask).masked_fill(mask == 0, 1)
        whole = model(ids, attention_mask=mask, position_ids=counted, use_cache=False).logits
        want = model(ids[:, mask[0].bool()], use_cache=False).logits
        assert (whole[:, mask[0].bool()] - want).abs().max() < 1e-5


@no_mask_of_pairs
def test_documents_reach_attention_and_no_matrix_is_made(monkeypatch):
    """Llama's packed rows come as segments: no mask of pairs, on any of the ways."""
    seen = []

    def spy(*args, **kwargs):
        seen.append((kwargs.get("attn_mask"), kwargs.get("segment_ids")))
        return attention(*args, **kwargs)

    attention = integration.attention
    monkeypatch.setattr(integration, "attention", spy)
    model, packed = tiny("llama", "regard_biweight"), batch(texts())
    for kind in ("plain", "ones", "cache"):
        seen.clear()
        model(**packed, **drops(kind, model, packed))
        assert len(seen) == 2
        for mask, documents in seen:
            assert mask is None
            assert torch.equal(documents.unique_consecutive(return_counts=True)[1], torch.tensor(LENGTHS))
    seen.clear()
    model(packed["input_ids"], attention_mask=torch.ones_like(packed["input_ids"]))
    assert seen == [(None, None)] * 2


@no_mask_of_pairs
def test_what_transformers_closes_over_is_still_known():
    """The documents are read out of a function of transformers; where that changes, masks of pairs are made again."""
    model, packed = tiny("llama", "regard_biweight"), batch(texts())
    arguments = {"config": model.config, "attention_mask": None, CACHE: None}
    embedded = torch.zeros(1, sum(LENGTHS), 32)
    found = create_causal_mask(inputs_embeds=embedded, position_ids=packed["position_ids"], **arguments)
    assert found.shape == (1, sum(LENGTHS))
    assert found.dtype == torch.int64
    extra = {"and_mask_function": lambda b, h, q, k: k != 2}
    found = create_causal_mask(inputs_embeds=embedded, position_ids=packed["position_ids"], **arguments, **extra)
    assert found.shape == (1, 1, sum(LENGTHS), sum(LENGTHS))
    assert not found[..., 2].any()


@torch.no_grad()
def test_the_same_position_ids_with_other_masks():
    """What was found for a tensor of position ids holds for as long as nothing changes."""
    gc.collect()
    before = len(integration._FOUND)
    model, ids = tiny("llama", "regard_biweight"), tokens(1)
    counted = torch.tensor([[0, 1, 2, 3, 4, 1, 5, 6, 7, 8, 9, 10]])
    hole = torch.ones(1, 12, dtype=torch.long)
    hole[0, 5] = 0
    split = model(ids, attention_mask=torch.ones(1, 12), position_ids=counted, use_cache=False).logits
    one = model(ids, attention_mask=hole, position_ids=counted, use_cache=False).logits
    assert (split[:, 6:] - one[:, 6:]).abs().max() > 1e-3
    again = model(ids, attention_mask=torch.ones(1, 12), position_ids=counted, use_cache=False).logits
    assert torch.equal(split, again)
    plain = model(ids, attention_mask=torch.ones(1, 12), use_cache=False).logits
    counted.copy_(torch.arange(12))
    torch.testing.assert_close(model(ids, attention_mask=torch.ones(1, 12), position_ids=counted).logits, plain)
    with torch.inference_mode():
        inside = torch.arange(12)[None] % 6
        split = model(ids, attention_mask=torch.ones(1, 12), position_ids=inside).logits
        inside.copy_(torch.arange(12))
        torch.testing.assert_close(model(ids, attention_mask=torch.ones(1, 12), position_ids=inside).logits, plain)
    del inside, counted
    gc.collect()
    assert len(integration._FOUND) <= before


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_refused(family):
    model, documents = tiny(family, "regard_biweight"), texts()
    packed = batch(documents, return_flash_attn_kwargs=True)
    without = {name: x for name, x in packed.items() if name != "position_ids"}
    for kind in ("plain", "ones", "cache"):
        words = "position_ids do not begin again where the documents of cu_seq_lens_q"
        refuses(words, model, **without, **drops(kind, model, packed))
    cache = DynamicCache(config=model.config)
    model(tokens(1, 4), past_key_values=cache)
    refuses("several documents, but keys come from a cache", model, **batch(documents), past_key_values=cache)
    fixed = StaticCache(config=model.config, max_cache_len=30)
    refuses("several documents, but keys come from a cache", model, **batch(documents), past_key_values=fixed)
    wrong = {**packed, "cu_seq_lens_q": torch.tensor([0, 3]), "cu_seq_lens_k": None, "use_cache": True}
    refuses("cu_seq_lens_q must begin with 0, end with the number of tokens", model, **wrong)
    one = {"cu_seq_lens_q": packed["cu_seq_lens_q"], "use_cache": True}
    refuses("how one row is packed, but 2 rows are given", model, tokens(2, 20), **one)


@torch.no_grad()
def test_layers_that_are_not_causal_refuse():
    model, ids = tiny("Roberta", "regard_biweight"), tokens(1)
    model(ids, position_ids=torch.arange(2, 14)[None])
    again = torch.tensor([[2, 3, 4, 5, 6, 7, 8, 2, 3, 4, 5, 6]])
    for mask in (None, torch.ones_like(ids)):
        refuses("several documents, but this layer is not causal", model, ids, position_ids=again, attention_mask=mask)
    ends = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 5, 12]))
    refuses("this layer is not causal", model, ids, **ends)
    padding = torch.ones_like(ids)
    padding[:, 9:] = 0
    model(ids, attention_mask=padding, position_ids=torch.tensor([[*range(2, 11), 1, 1, 1]]))
    together = torch.zeros(1, 1, 12, 12, dtype=torch.bool)
    together[..., :7, :7], together[..., 7:, 7:] = True, True
    model(ids, position_ids=again, attention_mask=together)  # one's own mask says it


@torch.no_grad()
def test_masks_of_ones_own_say_all():
    """A tree of guesses, whose positions repeat, is no set of documents."""
    model, ids = tiny("llama", "regard_biweight"), tokens(1, 5)
    tree = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]) > 0
    found = model(ids, attention_mask=tree[None, None], position_ids=torch.tensor([[0, 1, 1, 2, 2]])).logits
    for path in ([0, 1, 3], [0, 2, 4]):
        assert (found[:, path] - model(ids[:, path]).logits).abs().max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, SLIDING])
@pytest.mark.usefixtures("fresh_dynamo")
@torch.no_grad()
def test_compiled(fields):
    """Without a mask and a cache as eager; where transformers drops the packing an assertion inside the graph."""
    model = tiny("qwen3", "regard_biweight", **fields)
    packed = batch(texts())
    compiled = torch.compile(model, backend="aot_eager")
    want = model(**packed, use_cache=False).logits
    torch.testing.assert_close(compiled(**packed, use_cache=False).logits, want, rtol=1e-4, atol=1e-5)
    ones = torch.ones_like(packed["input_ids"])
    window = tiny("qwen3", "regard_biweight", **{**SLIDING, "max_window_layers": 0})
    want = window(**packed, use_cache=False, attention_mask=ones).logits
    found = torch.compile(window, backend="aot_eager")(**packed, use_cache=False, attention_mask=ones).logits
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)  # a mask of pairs takes documents in
    with pytest.raises(RuntimeError, match="which a compiled model keeps apart only if"):
        compiled(**packed, use_cache=False, attention_mask=ones)
    straight = {"input_ids": packed["input_ids"], "position_ids": torch.arange(sum(LENGTHS))[None]}
    want = model(**straight, use_cache=False, attention_mask=ones).logits
    found = compiled(**straight, use_cache=False, attention_mask=ones).logits
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
    assert want.shape[-1] == VOCAB


pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
TRAINED = (11, 7, 5, 12, 1, 2)
RATE = 0.1
COLLATORS = {"positions": {}, "flash": {"return_flash_attn_kwargs": True, "return_seq_idx": True}}


def model_of(name):
    if name in language_models.names():
        return any_model.make(name, "biweight", torch.float32)
    register()
    return tiny(name, "regard_biweight", attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)


@pytest.mark.parametrize("collator", COLLATORS)
@pytest.mark.parametrize("name", [*language_models.names(), "llama", "gpt2"])
def test_losses_are_those_of_the_documents(name, collator, tmp_path):
    model, rows = model_of(name), [any_model.text(1, n, seed=n + i) for i, n in enumerate(TRAINED)]
    _, wanted = descended(model, rows, 2, RATE)
    data = [{"input_ids": ids[0].tolist()} for ids in rows]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=len(rows), per_device_eval_batch_size=len(rows),
            max_steps=2, learning_rate=RATE, optim="sgd", max_grad_norm=0.0, lr_scheduler_type="constant",
            logging_steps=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
            prediction_loss_only=True, remove_unused_columns=False,
        ),
        train_dataset=data,
        eval_dataset=data,
        data_collator=DataCollatorWithFlattening(**COLLATORS[collator]),
    )  # fmt: skip
    assert trainer.evaluate()["eval_loss"] == pytest.approx(wanted[0], abs=1e-5)  # with the cache that models make
    trainer.train()
    logged = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert logged == pytest.approx(wanted, abs=1e-4)
