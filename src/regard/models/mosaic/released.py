"""Weights of the released Memory Mosaics programs (github.com/facebookresearch/MemoryMosaics) as this package's model.

Two programs are known by the names in their state dicts: nanoMosaics and the Library's memory_mosaics. Sizes are read
from the tensors, and the options are those under which that program computes.

Shapes: V vocabulary, C model width, H heads, D = C / H, S slots.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...checks import ArgumentError, require, shape
from .configuration_memory_mosaic import MemoryMosaicConfig
from .modeling_memory_mosaic import MemoryMosaicForCausalLM

CALL = "from_released"
NANO_LIMIT = math.log(2**16 - 1)
"""nanoMosaics multiplies unit keys by a factor whose logarithm ends here, so that float16 holds it. In the contextual
memory, which compares such keys with one another, the factor is beta; in the persistent memory, whose slots have none,
it is beta^2."""


@dataclass(frozen=True)
class _Names:
    """How one program calls what a block holds; {i} is the block, {c} the copy of slots.

    Attributes:
        mark: a name by which its state dicts are known.
        embedding, norm, head, block: of the whole.
        tensors: our names in a block to theirs, without `.bias` ones, which are found by their `.weight`.
        slots: our names to theirs; one tensor with all copies, or one per copy where {c} is in it.
        buffers: ends of names that are no weights.
        options: the fields of the configuration under which the program computes.
    """

    mark: str
    embedding: str
    norm: str
    head: str
    block: str
    tensors: Mapping[str, str]
    slots: Mapping[str, str]
    buffers: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


NANO = _Names(
    mark="mosaic.wte.weight",
    embedding="mosaic.wte.weight",
    norm="mosaic.ln_f",
    head="lm_head.weight",
    block="mosaic.h.{i}.",
    tensors={
        "contextual_norm.weight": "ln_1.weight",
        "contextual.keys.proj.weight": "attn.k_featurizer.W_k.weight",
        "contextual.keys.rate": "attn.k_featurizer.leaky_avg.leaky_key_beta",
        "contextual.sharpness.scale": "attn.k_featurizer.key_scale",
        "contextual.values.proj.weight": "attn.v_featurizer.W_v.weight",
        "contextual.values.mix": "attn.v_featurizer.coef",
        "contextual.values.scale": "attn.v_featurizer.val_scale",
        "contextual.out_proj.weight": "attn.c_proj.weight",
        "persistent_norm.weight": "ln_2.weight",
        "persistent.keys.proj.weight": "mlp.k_featurizer.W_k.weight",
        "persistent.keys.rate": "mlp.k_featurizer.leaky_avg.leaky_key_beta",
        "persistent.sharpness.scale": "mlp.k_featurizer.key_scale",
        "persistent.scale": "mlp.out_scale",
        "persistent.out_proj.weight": "mlp.c_proj.weight",
    },
    slots={"persistent.slot_keys": "mlp.P_k", "persistent.slot_values": "mlp.P_v"},
    buffers=("attn.bias", "leaky_avg.coef"),
    options={
        "look_ahead": "convex",
        "key_eps": 1e-10,
        "scale_limit": 2 * NANO_LIMIT,
        "persistent_scale_limit": NANO_LIMIT,
        "scale_logits": False,
        "initializer": "gpt2",
    },
)
LIBRARY = _Names(
    mark="emb.weight",
    embedding="emb.weight",
    norm="ln_out",
    head="head.weight",
    block="blocks.{i}.",
    tensors={
        "contextual_norm.weight": "ln1.weight",
        "contextual.keys.proj.weight": "attn.k_featurizer.conv.weight",
        "contextual.keys.rate": "attn.leaky_key_beta",
        "contextual.sharpness.scale": "attn.kernel_beta",
        "contextual.values.proj.weight": "attn.v_featurizer.linear.weight",
        "contextual.values.mix": "attn.v_featurizer.coef",
        "contextual.values.scale": "attn.value_beta",
        "contextual.out_proj.weight": "attn.c_proj.weight",
        "persistent_norm.weight": "ln2.weight",
        "persistent.keys.proj.weight": "pmem.k_featurizer.conv.weight",
        "persistent.keys.rate": "pmem.leaky_key_beta",
        "persistent.sharpness.scale": "pmem.kernel_beta",
        "persistent.scale": "pmem.value_beta",
        "persistent.out_proj.weight": "pmem.c_proj.weight",
    },
    slots={"persistent.slot_keys": "pmem.pmem.M_k{c}", "persistent.slot_values": "pmem.pmem.M_v{c}"},
    options={"look_ahead": "convex", "leaky": "average"},
)


def from_released(weights: Mapping[str, Tensor], **changes: Any) -> MemoryMosaicForCausalLM:
    """The model of a released program's state dict; it computes what that program would.

    Args:
        weights: names to tensors, as nanoMosaics (`mosaic.h.0.attn...`) or the Library's memory_mosaics
            (`blocks.0.attn...`) write them. Masks and tables among them are left out.
        changes: fields of the configuration to set besides, such as mixers.

    Raises:
        ArgumentError: names of neither program, tensors that are missing, not known, misshapen or not finite.
    """
    names = next((program for program in (NANO, LIBRARY) if program.mark in weights), None)
    if names is None:
        some = ", ".join(sorted(weights)[:3]) or "nothing"
        raise ArgumentError(f"{CALL}: got {some}, expected names as {NANO.mark} (nanoMosaics) or {LIBRARY.mark}.")
    left = {name: tensor for name, tensor in weights.items() if not name.endswith(names.buffers)}
    model = MemoryMosaicForCausalLM(_config(names, left, changes))
    found = {ours: _shaped(ours, _one(left, theirs), model) for ours, theirs in _pairs(names, left, model)}
    embedding = found["model.embed_tokens.weight"]
    head = _one(left, [names.head]) if names.head in left else embedding
    tied = torch.equal(head, weights[names.embedding]) or not model.config.tie_word_embeddings
    require(tied, CALL, f"{names.head} is not {names.embedding}; give tie_word_embeddings=False to keep both.")
    require(not left, CALL, f"does not know {', '.join(sorted(left)[:3])}; expected the weights of one model.")
    model.load_state_dict({**found, "lm_head.weight": head})
    return model.eval()


def _config(names: _Names, weights: Mapping[str, Tensor], changes: Mapping[str, Any]) -> MemoryMosaicConfig:
    """Sizes, as the tensors have them."""
    first = names.block.format(i=0)
    vocab, width = _need(weights, names.embedding).shape
    heads = _need(weights, first + names.tensors["contextual.keys.rate"]).numel()
    slots = _need(weights, first + names.slots["persistent.slot_keys"].format(c=0))
    label = first + names.slots["persistent.slot_keys"]
    copies = sum(label.format(c=c) in weights for c in range(len(weights))) if "{c}" in label else slots.shape[0]
    blocks = 0
    while names.block.format(i=blocks) + names.tensors["contextual.out_proj.weight"] in weights:
        blocks += 1
    fields = {
        "vocab_size": vocab,
        "hidden_size": width,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "persistent_slots": slots.shape[-2],
        "persistent_copies": copies,
        "bias": names.norm + ".bias" in weights,
        **names.options,
    }
    return MemoryMosaicConfig(**{**fields, **changes})


def _pairs(names: _Names, weights: Mapping[str, Tensor], model: MemoryMosaicForCausalLM) -> list[tuple[str, list[str]]]:
    """Our names, and theirs: several are copies."""
    config = model.config
    found = [("model.embed_tokens.weight", [names.embedding]), ("model.norm.weight", [names.norm + ".weight"])]
    for i in range(config.num_hidden_layers):
        ours, theirs = f"model.layers.{i}.", names.block.format(i=i)
        found += [(ours + name, [theirs + other]) for name, other in names.tensors.items()]
        for name, other in names.slots.items():
            copies = range(config.persistent_copies) if "{c}" in other else [0]
            found.append((ours + name, [theirs + other.format(c=c) for c in copies]))
    if config.bias:
        biased = [(ours, theirs) for ours, (theirs, *_) in found if theirs.endswith(".weight")]
        swap = lambda name: name.removesuffix("weight") + "bias"  # noqa: E731
        found += [(swap(ours), [swap(theirs)]) for ours, theirs in biased if ours != "model.embed_tokens.weight"]
    return found


def _need(weights: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in weights:
        raise ArgumentError(f"{CALL}: {name} is missing.")
    return weights[name]


def _one(left: dict[str, Tensor], names: list[str]) -> Tensor:
    """The tensor of these names, which are taken out; copies on an axis in front."""
    tensors = [_need(left, name) for name in names]
    for name in names:
        tensor = left.pop(name)
        require(bool(torch.isfinite(tensor).all()), CALL, f"{name} holds NaN or infinite numbers.")
    return tensors[0] if len(tensors) == 1 else torch.stack(tensors)


def _shaped(name: str, tensor: Tensor, model: MemoryMosaicForCausalLM) -> Tensor:
    """In our shape, where axes of one were between or behind."""
    ours = model.get_parameter(name)
    full, wanted = [n for n in tensor.shape if n != 1], [n for n in ours.shape if n != 1]
    require(full == wanted, CALL, f"{name} would be {shape(tensor)}, expected {shape(ours)}.")
    return tensor.reshape(ours.shape).to(ours.dtype)
