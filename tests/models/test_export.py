"""torch.export: one graph for every length, which computes what the model computes. Specs, mixers and models come from
the registries: what is registered later is exported too, or is named here as what cannot be."""

import pytest
import torch
from any_model import make, text
from hostile import some
from mistakes import refuses
from programs import python

from regard.grammar import presets
from regard.models import language_models, token_mixers
from regard.nn.memories import memory_layers

REFUSED = {"lact", "fwmlp"}
"""Fast weights whose chunks depend on the tokens."""
ONE_LENGTH = {"interpolated", "deltanet", "gla", "mamba2", "mesa", "retention"}
"""Chunks of decaying sums and of the mesa and delta rules have a graph for each length."""
LENGTHS = (3, 32, 65, 300)


def exported(model, tokens, least=2, **kwargs):
    """The program of a dynamic length, from an example."""
    length = torch.export.Dim("length", min=least, max=4096)
    given = {"input_ids": tokens, **kwargs}
    with torch.no_grad():
        return torch.export.export(model, (), given, dynamic_shapes={name: {1: length} for name in given}).module()


@torch.no_grad()
def same_at_every_length(model, program, *, padded=False):
    for length in LENGTHS:
        given = {"input_ids": text(2, length, seed=length)}
        if padded:
            given["attention_mask"] = torch.ones(2, length, dtype=torch.long)
            given["attention_mask"][0, : length // 2] = 0
        found, expected = program(**given).logits, model(**given).logits
        if padded:
            found, expected = (x[given["attention_mask"].bool()] for x in (found, expected))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("mixer", some([*presets(), "local-linear[biweight]"], "biweight", "relumax"))
def test_every_spec(mixer):
    model = make("transformer", mixer, torch.float32, num_hidden_layers=1)
    same_at_every_length(model, exported(model, text(2, 9)))


@pytest.mark.parametrize("mixer", token_mixers.names())
def test_every_mixer(mixer):
    model = make("transformer", mixer, torch.float32, num_hidden_layers=1)
    if mixer in REFUSED:
        refuses("an exported graph cannot hold", exported, model, text(2, 9))
    elif mixer in ONE_LENGTH:
        with torch.no_grad():
            program = torch.export.export(model, (text(2, 9),)).module()
            torch.testing.assert_close(program(text(2, 9)).logits, model(text(2, 9)).logits, atol=1e-5, rtol=0)
    else:
        same_at_every_length(model, exported(model, text(2, 9)))


@pytest.mark.parametrize("mixers", some(["softmax", "biweight", "elu", "topk-softmax"], "biweight"))
@pytest.mark.parametrize("name", language_models.names())
def test_every_model(name, mixers):
    """A Memory Mosaic has one pair less than tokens, and a graph of its own for two tokens."""
    model = make(name, mixers, torch.float32, num_hidden_layers=2)
    same_at_every_length(model, exported(model, text(2, 9), least=3))


SLOW = [pytest.param(name, mixer, marks=pytest.mark.slow) for name in language_models.names()
        for mixer in ("biweight", "softmax")]  # fmt: skip


@pytest.mark.parametrize(("name", "mixer"), [("transformer", "gated-deltanet"), *SLOW])
def test_padding(name, mixer):
    model = make(name, mixer, torch.float32, num_hidden_layers=2)
    program = exported(model, text(2, 9), least=3, attention_mask=torch.ones(2, 9, dtype=torch.long))
    same_at_every_length(model, program, padded=True)


FWPKM = {"memories": "FwPKM@0", "memory_options": {"fwpkm": {"chunk_size": 8}}}  # several chunks


@pytest.mark.parametrize("name", memory_layers.names())
def test_every_memory(name):
    fields = FWPKM if name == "fwpkm" else {"memories": f"{name}@0"}
    model = make("transformer", "biweight", torch.float32, num_hidden_layers=1, **fields)
    if name in REFUSED:
        refuses("an exported graph cannot hold", exported, model, text(2, 21))
    else:
        same_at_every_length(model, exported(model, text(2, 21)))


TRAINED = [("memory-mosaic", {}), ("transformer", {"mixers": "gated-deltanet"}), ("transformer", FWPKM)]


@pytest.mark.parametrize(("name", "fields"), TRAINED, ids=str)
def test_an_exported_program_can_be_trained(name, fields):
    model, tokens = make(name, dtype=torch.float32, **{"num_hidden_layers": 1, **fields}).train(), text(2, 21)
    program = torch.export.export(model, (tokens,)).module()
    program(tokens).logits.square().sum().backward()
    found = {path: p.grad for path, p in program.named_parameters()}
    model.zero_grad()
    model(tokens).logits.square().sum().backward()
    assert len(found) >= len(list(model.parameters()))
    for path, p in model.named_parameters():
        torch.testing.assert_close(found[path], p.grad, atol=1e-4, rtol=1e-4, msg=path)


LOAD = """
import sys, torch
import regard.models
for path in sys.argv[1:]:
    given, expected = torch.load(path + ".data")
    found = torch.export.load(path).module()(given).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
"""


@torch.no_grad()
def test_saved_programs_are_loaded_in_another_process(tmp_path):
    """`import regard.models` is what they need: operators, and the type of the output."""
    paths, tokens = [], text(2, 21)
    attention = [("transformer", {"mixers": spec}) for spec in ("biweight", "local-linear")]
    for name, fields in [*attention, *TRAINED]:
        model = make(name, dtype=torch.float32, **{"num_hidden_layers": 1, **fields})
        paths.append(str(tmp_path / f"{len(paths)}.pt2"))
        torch.export.save(torch.export.export(model, (tokens,)), paths[-1])
        torch.save((tokens, model(tokens).logits), paths[-1] + ".data")
    python("-W", "ignore", "-c", LOAD, *paths)


@pytest.mark.parametrize("name", language_models.names())
def test_a_cache_is_refused(name):
    given = make(name, num_hidden_layers=2), (text(2, 9),), {"use_cache": True}
    refuses("a cache cannot be exported", torch.export.export, *given)
