"""Long texts segment by segment: losses by hand, what is carried, gates; and n reads of a haystack."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from torch import Tensor, nn

from regard.models import HybridConfig, HybridForCausalLM
from regard_recipes.long_text.needle_reading import PROTOCOLS, read_and_answer
from regard_recipes.long_text.streaming import Carry, Streamed, streamed

V, C, CHUNK = 23, 16, 4
MEMORY = {"sub_keys": 4, "key_dim": 8, "value_dim": 8, "top_k": 2, "chunk_size": CHUNK}


def hybrid(layout: str, memories: str | None = None, **options: object) -> HybridForCausalLM:
    torch.manual_seed(1)
    fields: dict = {"mixer_options": {"gated-deltanet": {"num_heads": 2, "head_dim": 8}}} if "GDN" in layout else {}
    if memories:
        fields["memory_options"] = {"fwpkm": {**MEMORY, **options}}
    config = HybridConfig.layout(
        layout, memories, vocab_size=V, hidden_size=C, num_hidden_layers=4 if "+" in layout else 2,
        num_attention_heads=2, head_dim=8, intermediate_size=16, max_position_embeddings=64,
        initializer_range=0.3, **fields,
    )  # fmt: skip
    return HybridForCausalLM(config).eval()


def texts(*sizes: int, seed: int = 0) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return [torch.randint(V, (size,), generator=drawn) for size in sizes]


def nats(model: HybridForCausalLM, tokens: Tensor) -> float:
    """Of one pass over all tokens but the last, every one the target of the one before."""
    with torch.no_grad():
        logits = model(input_ids=tokens[None, :-1], use_cache=False).logits[0].double().numpy()
    return -float(log_softmax(logits, -1)[np.arange(len(tokens) - 1), tokens[1:].numpy()].sum())


def sums(found: Streamed) -> list[float]:
    """Return the nats of each document."""
    return [losses.double().sum().item() for losses in found.losses]


class Bigram(nn.Module):
    """A table of logits: what comes next depends on the last token alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(V, V, generator=torch.Generator().manual_seed(4)))
        self.model = SimpleNamespace(new_cache=lambda: SimpleNamespace(layers=[]))
        self.modes: list[bool] = []

    def forward(self, input_ids: Tensor, cache: object) -> SimpleNamespace:
        self.modes.append(self.training)
        return SimpleNamespace(logits=self.table[input_ids], cache=cache)


@pytest.mark.parametrize("segment", [1, 7, 50, 400])
@pytest.mark.parametrize("rows", [1, 3])
def test_every_token_but_the_first_is_predicted_once(segment: int, rows: int) -> None:
    model = Bigram().train()
    documents = texts(50, 50, 50) if rows == 3 else texts(50, 2, 33)
    found = streamed(model, documents, segment, rows=rows)
    logp = log_softmax(model.table.detach().double().numpy(), -1)
    for losses, document in zip(found.losses, documents, strict=True):
        d = document.numpy()
        assert losses.numpy() == pytest.approx(-logp[d[:-1], d[1:]], rel=1e-5)
    assert model.training
    assert not any(model.modes)


@pytest.mark.parametrize("memories", [None, "FwPKM@1"])
@pytest.mark.parametrize("segment", [5, 8])
def test_with_all_states_carried_segments_are_one_text(memories: str | None, segment: int) -> None:
    """A delta net and a memory that go on know no segments; new ones do."""
    model = hybrid("GDN", memories)
    documents = texts(30, 23)
    carried = streamed(model, documents, segment, Carry("document", "document"))
    assert sums(carried) == pytest.approx([nats(model, document) for document in documents], rel=1e-4)
    new = streamed(model, documents, segment, Carry("segment", "segment"))
    pieces = [[d[i : i + segment + 1] for i in range(0, len(d) - 1, segment)] for d in documents]
    assert sums(new) == pytest.approx([sum(nats(model, piece) for piece in each) for each in pieces], rel=1e-4)
    assert sums(carried) != pytest.approx(sums(new), rel=1e-4)


def test_a_stream_goes_on_through_documents() -> None:
    """The next document's first token follows the last one that was read."""
    model = hybrid("GDN", "FwPKM@1")
    one, other = texts(21, 18)
    found = streamed(model, [one, other], 6, Carry("stream", "stream"))
    both = torch.cat([one[:-1], other])
    before = nats(model, torch.cat([one[:-1], other[:1]]))
    assert sums(found)[1] == pytest.approx(nats(model, both) - before, rel=1e-4)
    assert sums(found)[0] == pytest.approx(nats(model, one), rel=1e-4)
    apart = streamed(model, [one, other], 6, Carry("document", "document"))
    assert sums(apart)[0] == pytest.approx(sums(found)[0], rel=1e-6)
    assert sums(apart)[1] != pytest.approx(sums(found)[1], rel=1e-5)


@pytest.mark.parametrize("layout", ["GDN", "GDN+FA", "FA"])
def test_rows_are_streams_of_their_own(layout: str) -> None:
    model = hybrid(layout, "FwPKM@1")
    documents = texts(19, 19, 19)
    rows = streamed(model, documents, 6, Carry("stream", "segment"), rows=2)
    first = streamed(model, [documents[0], documents[2]], 6, Carry("stream", "segment"))
    second = streamed(model, [documents[1]], 6, Carry("stream", "segment"))
    assert (sums(rows)[0], sums(rows)[2]) == pytest.approx(sums(first), rel=1e-4)
    assert sums(rows)[1] == pytest.approx(sums(second)[0], rel=1e-4)


def test_pairs_are_new_at_every_segment() -> None:
    model = hybrid("FA")
    (document,) = texts(25)
    new = sum(nats(model, document[i : i + 9]) for i in range(0, 24, 8))
    for carry in (Carry("document"), Carry("stream", "stream")):
        assert sums(streamed(model, [document], 8, carry))[0] == pytest.approx(new, rel=1e-4)


def test_frozen_memories_do_not_depend_on_what_was_read() -> None:
    model = hybrid("FA", "FwPKM@1")
    documents = texts(25, 25)
    read = [sums(streamed(model, documents, 8, Carry(span, frozen=True))) for span in ("segment", "stream")]
    assert read[0] == pytest.approx(read[1], rel=1e-6)
    assert sums(streamed(model, documents, 8, Carry("stream"))) != pytest.approx(read[0], rel=1e-4)
    assert not any(module.frozen for module in model.modules() if hasattr(module, "frozen"))


def test_gates_and_slots_are_counted() -> None:
    model = hybrid("GDN", "FwPKM@1")
    heard: list[Tensor] = []
    point = model.model.layers[1].memory.hook_gate
    documents = texts(26, 26)
    with point.register_forward_hook(lambda module, args, out: heard.append(out.detach().flatten(1))):
        found = streamed(model, documents, 5, Carry("stream"), rows=2, statistics=True)
    (gates,) = found.gates.values()
    assert torch.equal(torch.stack(gates), torch.cat(heard, 1))
    assert gates[0].shape == found.losses[0].shape == (25,)
    (slots,) = found.slots.values()
    assert slots["reads"] == 2 * 25 * MEMORY["top_k"]
    assert 0 < slots["coverage"] <= 1
    assert not streamed(model, documents, 5).gates
    assert not streamed(hybrid("GDN"), documents, 5, statistics=True).gates


def greedy(model: HybridForCausalLM, haystacks: Tensor, questions: Tensor, length: int) -> list[list[int]]:
    """Row by row, by passes over everything, without a cache."""
    said = []
    for tokens in torch.cat([haystacks, questions], 1):
        for _ in range(length):
            with torch.no_grad():
                logits = model(input_ids=tokens[None], use_cache=False).logits[0, -1]
            tokens = torch.cat([tokens, logits.argmax()[None]])
        said.append(tokens[-length:].tolist())
    return said


def answers(model: HybridForCausalLM, haystacks: Tensor, questions: Tensor, length: int, **how: Any) -> Tensor:
    """Return the answers to one example for each row, [n, B, A]."""
    return read_and_answer(model, haystacks[None], questions[None], length, **how)[:, 0]


def asked(seed: int = 3, length: int = 21) -> tuple[Tensor, Tensor]:
    return torch.stack(texts(length, length, seed=seed)), torch.stack(texts(5, 5, seed=seed + 1))


@pytest.mark.parametrize("layout", ["GDN", "GDN+FA", "FA"])
@pytest.mark.parametrize("memories", [None, "FwPKM@1"])
def test_one_read_is_reading_on(layout: str, memories: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the training's chunk the answer is what plain greedy decoding says."""
    model = hybrid(layout, memories)
    haystacks, questions = asked()
    monkeypatch.setattr("regard_recipes.long_text.needle_reading.PIECE", 8)
    found = answers(model, haystacks, questions, 4, protocol="chunked", reads=1)[0]
    assert found.tolist() == greedy(model, haystacks, questions, 4)


def test_the_papers_protocol_answers_before_it_writes() -> None:
    """The first token comes from a memory that has not seen the haystack; with it written, another one may."""
    model = hybrid("FA", "FwPKM@1")
    haystacks, questions = asked()
    found = answers(model, haystacks, questions, 3, protocol="whole", reads=2)
    blank = hybrid("FA", "FwPKM@1", chunk_size=1000)
    assert found[0, :, :1].tolist() == greedy(blank, haystacks, questions, 1)


def test_flushed_is_written_before_the_question() -> None:
    """As a memory without pairs across chunks whose chunk is the haystack: it is written when the question begins."""
    model = hybrid("GDN", "FwPKM@1", border=False)
    same = hybrid("GDN", "FwPKM@1", border=False, chunk_size=21)
    haystacks, questions = asked()
    found = answers(model, haystacks, questions, 3, protocol="flushed", reads=1)[0]
    assert found.tolist() == greedy(same, haystacks, questions, 3)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_reads_one_by_one_or_in_a_line(protocol: str) -> None:
    """A single example without a reset is an example with one; without a memory no read adds anything."""
    model = hybrid("GDN", "FwPKM@1")
    haystacks, questions = asked()
    line = answers(model, haystacks, questions, 3, protocol=protocol, reads=3)
    apart = read_and_answer(model, haystacks[None], questions[None], 3, protocol=protocol, reads=3, reset=False)
    assert line.shape == (3, 2, 3)
    assert torch.equal(line, apart[:, 0])
    none = answers(hybrid("GDN"), haystacks, questions, 3, protocol=protocol, reads=3)
    assert torch.equal(none[0], none[2])
    assert model.model.layers[1].memory.chunk_size == CHUNK


@pytest.mark.parametrize(("memories", "layout"), [("FwMLP@1", "GDN"), (None, "LaCT")])
def test_fast_weights_without_slots_keep_their_chunk(memories: str | None, layout: str) -> None:
    """They make one step a chunk: with that of a whole haystack they would learn nothing of it in time."""
    torch.manual_seed(1)
    options = {"in_dim": 8, "value_dim": 8, "hidden_dim": 8, "chunk_size": CHUNK, "learning_rate": 5.0}
    model = HybridForCausalLM(
        HybridConfig.layout(
            layout, memories, vocab_size=V, hidden_size=C, num_hidden_layers=2, num_attention_heads=2, head_dim=8,
            num_key_value_heads=2, intermediate_size=16, initializer_range=0.3,
            mixer_options={"lact": {"chunk_size": CHUNK, "window": 4, "fast_heads": 2}} if layout == "LaCT"
            else {"gated-deltanet": {"num_heads": 2, "head_dim": 8}},
            memory_options={"fwmlp": options} if memories else None,
        )
    ).eval()  # fmt: skip
    haystacks, questions = asked()
    written: list[int] = []
    layer = model.model.layers[1].memory if memories else model.model.layers[1].self_attn
    with layer.register_forward_hook(lambda module, args, out: written.append(module.chunk_size)):
        found = answers(model, haystacks, questions, 2, protocol="whole", reads=2, recurrent=True)
    assert set(written) == {CHUNK}
    # the first token sees every full chunk of its own haystack, as in one pass
    assert found[0, :, :1].tolist() == greedy(model, haystacks, questions, 1)


def test_without_a_reset_the_order_matters() -> None:
    """On the first read nothing of the haystack has been written by the paper's protocol: what differs is what was
    read before."""
    model = hybrid("FA", "FwPKM@1")
    haystacks, questions = (torch.stack(each) for each in zip(*map(asked, range(10, 18)), strict=True))
    new = read_and_answer(model, haystacks, questions, 2, protocol="whole", reads=1)[0]
    kept = read_and_answer(model, haystacks, questions, 2, protocol="whole", reads=1, reset=False)[0]
    assert new.shape == kept.shape == (8, 2, 2)
    assert torch.equal(new[0], kept[0])
    assert not torch.equal(new[1:], kept[1:])
