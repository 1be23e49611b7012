"""Documents packed into rows give what they give alone, in every model, mixer and memory that takes them. The
registries are walked through, so that one that is registered later is tested with no other edit."""

from itertools import accumulate, pairwise

import any_model
import pytest
import torch
import torch.nn.functional as F
from any_model import CASES, SIZES, SMALL, cases, counts_padding, every_model, make, same_by_path, takes_embeddings
from mistakes import refuses
from packed import alone, documents, packed_rows, positions

from regard import presets
from regard.models import HybridConfig, HybridForCausalLM, TokenMixer, token_mixers
from regard.nn.memories import MemoryLayer, memory_layers

SLOW = ("-relumax", "-shift-cosine")
packed_case = cases([case for case in CASES if not case.endswith(SLOW)])


def model_of(case, dtype=torch.float64, **fields):
    model = make(case, dtype=dtype, **fields)
    if not model.model.honours_segments:
        tokens, ids = packed_rows(documents())
        refuses("several documents", model, tokens, segment_ids=ids)
        pytest.skip("refuses packed documents")
    return model


def close(found, expected, tolerance=1e-5):
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def gradients(model, logits):
    """Of a fixed weighting of the logits, by parameter."""
    model.zero_grad()
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5), dtype=logits.dtype)
    (logits * weights).sum().backward()
    return any_model.gradients(model)


@packed_case
def test_each_document_gives_what_it_gives_alone(case):
    model, rows = model_of(case), documents()
    tokens, ids = packed_rows(rows)
    expected = alone(lambda text: model(text).logits, rows)
    wanted = gradients(model, expected)
    for marks in ({"segment_ids": ids}, {"position_ids": positions(rows)}, {"seq_idx": ids.int()}):
        found = model(tokens, **marks)
        assert found.past_key_values is None
        close(found.logits, expected)
        same_by_path(gradients(model, found.logits), wanted, 1e-5)
    for row, text in enumerate(tokens):
        ends = torch.tensor([0, *accumulate(map(len, rows[row]))], dtype=torch.int32)
        marks = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 9, "max_length_k": 9}
        close(model(text[None], **marks).logits[0], expected[row])
        close(model.model(text[None], **marks, use_cache=False).last_hidden_state[0],
              alone(lambda one: model.model(one).last_hidden_state, [rows[row]])[0])  # fmt: skip


@torch.no_grad()
@packed_case
def test_one_row_of_numbers_is_for_every_row(case):
    model = model_of(case)
    tokens, ids = packed_rows(documents())
    one = ids[:1]
    assert torch.equal(model(tokens, segment_ids=one).logits, model(tokens, segment_ids=one.expand_as(ids)).logits)


@every_model
@pytest.mark.parametrize("mixers", presets())
def test_every_preset_keeps_documents_apart(name, mixers):
    model, rows = make(name, mixers, num_hidden_layers=2), documents()
    tokens, ids = packed_rows(rows)
    found, expected = model(tokens, segment_ids=ids).logits, alone(lambda text: model(text).logits, rows)
    close(found, expected)
    same_by_path(gradients(model, found), gradients(model, expected), 1e-5)


@torch.no_grad()
@packed_case
def test_another_document_changes_no_bit(case):
    """Nor does one that is not numbers."""
    model, rows = model_of(case, torch.float32), documents()
    tokens, ids = packed_rows(rows)
    before = model(tokens, segment_ids=ids).logits
    for number in range(3):
        other = torch.where(ids == number, tokens % 28 + 1, tokens)
        after = model(other, segment_ids=ids).logits
        assert torch.equal(after[ids != number], before[ids != number])
        assert not torch.equal(after[ids == number], before[ids == number])
    for poison in (torch.nan, torch.inf) if takes_embeddings(case) else ():
        embedded = torch.where(ids[..., None] == 1, poison, model.get_input_embeddings()(tokens))
        after = model(inputs_embeds=embedded, segment_ids=ids).logits
        assert torch.equal(after[ids != 1], before[ids != 1])


@torch.no_grad()
@packed_case
def test_padding_before_between_inside_and_after_documents(case):
    """Hidden tokens belong to no document, whatever their numbers and positions are."""
    model, rows = model_of(case), documents()
    tokens, ids = packed_rows(rows)
    cuts = {0: 2, 5: 1, 8: (0 if counts_padding(case) else 2), tokens.shape[1]: 3}

    def padded(x, value):
        parts = [x[:, a:b] for a, b in pairwise([*cuts, None])]
        gaps = [x.new_full((len(x), n), value) for n in cuts.values()]
        return torch.cat([piece for pair in zip(gaps, parts, strict=False) for piece in pair] + gaps[len(parts) :], 1)

    real, wide = padded(torch.ones_like(tokens), 0), padded(tokens, 7)
    numbers, ones, zeros = padded(ids, 9), padded(positions(rows), 1), padded(positions(rows), 0)
    expected = alone(lambda text: model(text).logits, rows).flatten(0, 1)
    named = {"segment_ids": numbers}
    for marks in (named, {"position_ids": ones}, {"position_ids": zeros}, {**named, "position_ids": ones}):
        close(model(wide, attention_mask=real, **marks).logits[real.bool()], expected)


def compiled_is_eager(model, marks, tokens, **how):
    expected = model(tokens, **marks, labels=tokens)
    wanted = gradients(model, expected.logits)
    found = torch.compile(model, **how)(tokens, **marks, labels=tokens)
    assert found.past_key_values is None
    close(found.logits, expected.logits)
    close(found.loss, expected.loss)
    same_by_path(gradients(model, found.logits), wanted, 1e-5)
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_compiled_model_keeps_documents_apart():
    """In training in one graph; elsewhere it looks whether there are several documents, since it may keep a cache."""
    model, rows = make("transformer", mixers=["biweight"], num_hidden_layers=1), documents()
    tokens = packed_rows(rows)[0]
    compiled_is_eager(model, {"position_ids": positions(rows)}, tokens, backend="eager")
    compiled_is_eager(model.train(), {"position_ids": positions(rows)}, tokens, backend="eager", fullgraph=True)


@pytest.mark.slow
@packed_case
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_is_eager(case):
    fields = {"num_hidden_layers": 2} if set(CASES[case][1]) == {"mixers"} else {}
    model, rows = model_of(case, **fields).train(), documents()
    tokens = packed_rows(rows)[0]
    compiled_is_eager(model, {"position_ids": positions(rows)}, tokens, backend="aot_eager")


@packed_case
def test_recomputation_keeps_documents_apart(case):
    model, rows = model_of(case).train(), documents()
    tokens, ids = packed_rows(rows)
    wanted = gradients(model, model(tokens, segment_ids=ids).logits)
    model.gradient_checkpointing_enable()
    same_by_path(gradients(model, model(tokens, segment_ids=ids).logits), wanted, 1e-5)


def test_a_window_of_training_stays_inside_documents():
    model, rows = make("transformer", training_window=3, training_window_share=1.0).train(), documents()
    tokens, ids = packed_rows(rows)
    close(model(tokens, segment_ids=ids).logits, alone(lambda text: model(text).logits, rows))


def mean_loss(model, texts):
    """Over all tokens of the documents but their first ones, which are not predicted."""
    terms = [F.cross_entropy(model(text[None]).logits[0, :-1], text[1:], reduction="sum") for text in texts]
    return sum(terms) / sum(len(text) - 1 for text in texts)


@torch.no_grad()
@every_model
@pytest.mark.parametrize("flash", [False, True])
def test_the_collator_that_flattens_gives_the_loss_of_the_documents(name, flash):
    from transformers import DataCollatorWithFlattening

    model, rows = model_of(name), documents()
    texts = [text for row in rows for text in row]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=flash, return_seq_idx=flash)
    batch = collate([{"input_ids": text.tolist()} for text in texts])
    close(model(**batch).loss.double(), mean_loss(model, texts))
    for position in (0, 2):  # some models count positions from another number
        collate = DataCollatorWithFlattening(position_ids_start=position)
        close(model(**collate([{"input_ids": text.tolist()} for text in texts])).loss.double(), mean_loss(model, texts))
    tokens, ids = packed_rows(rows)
    kept = model(tokens[:1], labels=tokens[:1, -8:], logits_to_keep=8, segment_ids=ids[:1]).loss
    close(kept.double(), mean_loss(model, [rows[0][2]]))


@torch.no_grad()
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_cache_that_is_asked_for_is_refused():
    model, (tokens, ids) = make("transformer", num_hidden_layers=1), packed_rows(documents())
    for asked in ({"use_cache": True}, {"past_key_values": model.model.new_cache()}):
        for marks in ({"segment_ids": ids}, {"position_ids": positions(documents())}):
            refuses(r"a cache was asked for; .* call with use_cache=False", model, tokens, **asked, **marks)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        with pytest.raises(RuntimeError, match="a cache was asked for"):
            compiled(tokens, **asked, position_ids=positions(documents()))
    assert model(tokens, position_ids=torch.arange(tokens.shape[1])[None], use_cache=True).past_key_values is not None


@torch.no_grad()
def test_rows_of_one_document_are_ordinary_rows():
    model, tokens = make("transformer", mixers=["softmax", "elu", "biweight", "linear"]), packed_rows(documents())[0]
    before = model(tokens)
    assert before.past_key_values is not None
    for marks in (
        {"segment_ids": torch.full_like(tokens, 4)},
        {"position_ids": torch.arange(tokens.shape[1])[None]},
        {"seq_idx": torch.zeros(1, tokens.shape[1], dtype=torch.int32)},
    ):
        found = model(tokens, **marks)
        assert torch.equal(found.logits, before.logits)
        assert found.past_key_values is not None


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        ({"segment_ids": torch.zeros(1, 4)}, r"segment_ids is a torch.float32 tensor \[1, 4\], expected integers"),
        ({"segment_ids": [0, 0, 1]}, r"segment_ids is \[0, 0, 1\], expected integers"),
        ({"segment_ids": torch.zeros(1, 5).long()}, r"segment_ids has shape \[1, 5\], expected \[B or 1, 4\]"),
        ({"seq_idx": torch.zeros(2, 4, dtype=torch.long)}, r"seq_idx has shape \[2, 4\]"),
        ({"cu_seq_lens_q": torch.tensor([0, 3])}, "cu_seq_lens_q must begin with 0, end with the number of tokens"),
        ({"cu_seq_lens_q": torch.tensor([1, 4])}, "cu_seq_lens_q must begin with 0"),
        ({"cu_seq_lens_q": torch.tensor([0, 3, 2, 4])}, "never fall"),
        ({"cu_seq_lens_q": torch.tensor([[0, 4]])}, r"cu_seq_lens_q has shape \[1, 2\], expected \[documents \+ 1\]"),
        ({"cu_seq_lens_q": torch.tensor([0.0, 4.0])}, "cu_seq_lens_q is a torch.float32 tensor"),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 4]), "cu_seq_lens_k": torch.tensor([0, 1, 4])}, "differ"),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 4]), "cu_seq_lens_k": torch.tensor([0, 4])}, "cu_seq_lens_k"),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 4]), "segment_ids": torch.tensor([[0, 1, 1, 1]])}, "do not begin"),
        ({"cu_seq_lens_q": torch.tensor([0, 2, 4]), "position_ids": torch.tensor([[0, 0, 1, 2]])}, "do not grow"),
        ({"segment_ids": torch.tensor([[1, 1, 2, 2]]), "seq_idx": torch.tensor([[0, 1, 1, 1]])}, "do not begin"),
        ({"cu_seqlens_q": torch.tensor([0, 2, 4])}, "unknown argument 'cu_seqlens_q'. Did you mean 'cu_seq_lens_q'"),
        ({"segment_id": torch.tensor([[1, 1, 2, 2]])}, "unknown argument 'segment_id'. Did you mean 'segment_ids'"),
    ],
)
def test_one_clear_line_for_bad_documents(marks, message):
    model, tokens = make("transformer", num_hidden_layers=1), torch.tensor([[1, 2, 3, 4]])
    assert "HybridForCausalLM" in refuses(message, model, tokens, **marks)


def test_lengths_speak_of_one_row():
    tokens, _ = packed_rows(documents())
    message = "how one row is packed, but 2 rows are given; give segment_ids"
    refuses(message, make("transformer"), tokens, cu_seq_lens_q=torch.tensor([0, 5, 13]))


def test_one_memory_for_the_batch_is_refused():
    tokens, ids = packed_rows(documents())
    for name in ("fwpkm", "fwmlp"):
        fields = {"memories": f"{name}@0", "memory_options": {name: {**SMALL[name], "shared": True}}}
        model = make("transformer", num_hidden_layers=1, **fields)
        refuses("segment_ids need a memory per document, but shared=True", model, tokens, segment_ids=ids)


class Careless(TokenMixer):
    """A running mean of all tokens so far, which knows nothing of documents."""

    cache_layer = token_mixers.get("lact").cache_layer

    def forward(self, hidden, position_embeddings=None, mask=None, cache=None, output_attentions=False):
        return hidden.cumsum(1) / torch.arange(1, hidden.shape[1] + 1)[:, None], None

    @staticmethod
    def build(config, layer_idx, options):
        return Careless()


class CarelessMemory(MemoryLayer):
    remembers = False

    def __init__(self, hidden_size):
        super().__init__()

    def forward(self, hidden, mask=None, state=None):
        return hidden.cumsum(1), None


@pytest.mark.parametrize(
    ("registry", "kind", "fields"),
    [
        (token_mixers, Careless, {"mixers": ["softmax", "careless"]}),
        (memory_layers, CarelessMemory, {"mixers": "softmax", "memories": "careless@1"}),
    ],
)
def test_a_part_that_does_not_say_that_it_honours_documents_is_refused(monkeypatch, registry, kind, fields):
    monkeypatch.setitem(registry._objects, "careless", kind)
    config = HybridConfig(**{**SIZES, "num_hidden_layers": 2, **fields})
    model, (tokens, ids) = HybridForCausalLM(config).eval(), packed_rows(documents())
    model(tokens, use_cache=False)
    refuses(rf"{kind.__name__} at layer 1 does not keep apart", model, tokens, use_cache=False, segment_ids=ids)
