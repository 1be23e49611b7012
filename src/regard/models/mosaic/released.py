"""Conversion of weights of the released Memory Mosaics programs (github.com/facebookresearch/MemoryMosaics).

Two programs are recognised by the names in their state dicts: nanoMosaics and the Library's memory_mosaics. Sizes are
read from the tensors; the options are those of the program.
Shapes: V vocabulary, C model width, H heads, D = C / H, S slots.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ...checks import ArgumentError, require, shape
from .configuration_memory_mosaic import MemoryMosaicConfig
from .modeling_memory_mosaic import MemoryMosaicForCausalLM

CALL = "from_released"
NANO_LIMIT = math.log(2**16 - 1)
"""Limit of the logarithm of the factor by which nanoMosaics multiplies unit keys, so that float16 holds it. The factor
is beta in the contextual memory, which compares such keys with each other, and beta^2 in the persistent memory, whose
slots have none."""


@dataclass(frozen=True)
class _Names:
    """Parameter names of a program, where {i} stands for the block and {c} for the copy of slots."""

    embedding: str  # identifies the program
    norm: str
    head: str
    block: str  # prefix of a block
    tensors: Mapping[str, str]  # our names in a block to the program's, without biases; {c} is in names of one copy
    buffers: tuple[str, ...] = ()  # suffixes of names that are not weights
    options: Mapping[str, Any] = field(default_factory=dict)  # fields of the configuration that the program implies


_TENSORS = (
    ("contextual_norm.weight", "ln_1.weight", "ln1.weight"),
    ("contextual.keys.proj.weight", "attn.k_featurizer.W_k.weight", "attn.k_featurizer.conv.weight"),
    ("contextual.keys.rate", "attn.k_featurizer.leaky_avg.leaky_key_beta", "attn.leaky_key_beta"),
    ("contextual.sharpness.scale", "attn.k_featurizer.key_scale", "attn.kernel_beta"),
    ("contextual.values.proj.weight", "attn.v_featurizer.W_v.weight", "attn.v_featurizer.linear.weight"),
    ("contextual.values.mix", "attn.v_featurizer.coef", "attn.v_featurizer.coef"),
    ("contextual.values.scale", "attn.v_featurizer.val_scale", "attn.value_beta"),
    ("contextual.out_proj.weight", "attn.c_proj.weight", "attn.c_proj.weight"),
    ("persistent_norm.weight", "ln_2.weight", "ln2.weight"),
    ("persistent.keys.proj.weight", "mlp.k_featurizer.W_k.weight", "pmem.k_featurizer.conv.weight"),
    ("persistent.keys.rate", "mlp.k_featurizer.leaky_avg.leaky_key_beta", "pmem.leaky_key_beta"),
    ("persistent.sharpness.scale", "mlp.k_featurizer.key_scale", "pmem.kernel_beta"),
    ("persistent.scale", "mlp.out_scale", "pmem.value_beta"),
    ("persistent.out_proj.weight", "mlp.c_proj.weight", "pmem.c_proj.weight"),
    ("persistent.slot_keys", "mlp.P_k", "pmem.pmem.M_k{c}"),
    ("persistent.slot_values", "mlp.P_v", "pmem.pmem.M_v{c}"),
)
"""Names of the tensors of a block here, in nanoMosaics and in the Library; biases follow their `.weight`."""
NANO = _Names(
    embedding="mosaic.wte.weight",
    norm="mosaic.ln_f",
    head="lm_head.weight",
    block="mosaic.h.{i}.",
    tensors={ours: nano for ours, nano, _ in _TENSORS},
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
    embedding="emb.weight",
    norm="ln_out",
    head="head.weight",
    block="blocks.{i}.",
    tensors={ours: library for ours, _, library in _TENSORS},
    options={"look_ahead": "convex", "leaky": "average"},
)


def from_released(weights: Mapping[str, Tensor], **changes: Any) -> MemoryMosaicForCausalLM:
    """Return the model of a released program's state dict, with the same outputs as that program.

    Args:
        weights: names to tensors, as nanoMosaics (`mosaic.h.0.attn...`) or the Library's memory_mosaics
            (`blocks.0.attn...`) write them. Masks and tables among them are ignored.
        changes: further fields of the configuration, such as mixers.

    Raises:
        ArgumentError: names of neither program, or a tensor that is missing, unknown, of a wrong shape or not finite.
    """
    names = next((program for program in (NANO, LIBRARY) if program.embedding in weights), None)
    if names is None:
        expected = f"names as {NANO.embedding} (nanoMosaics) or {LIBRARY.embedding}"
        raise ArgumentError(f"{CALL}: got {', '.join(sorted(weights)[:3]) or 'nothing'}, expected {expected}.")
    left = {name: tensor for name, tensor in weights.items() if not name.endswith(names.buffers)}
    model = MemoryMosaicForCausalLM(_config(names, left, changes))
    ours = {name: _shaped(name, _pop(left, theirs), model) for name, theirs in _name_pairs(names, model)}
    head = _pop(left, [names.head]) if names.head in left else ours["model.embed_tokens.weight"]
    tied = torch.equal(head, weights[names.embedding]) or not model.config.tie_word_embeddings
    require(tied, CALL, f"{names.head} differs from {names.embedding}; give tie_word_embeddings=False to keep both.")
    require(not left, CALL, f"unknown names {', '.join(sorted(left)[:3])}; expected the weights of one model.")
    model.load_state_dict({**ours, "lm_head.weight": head})
    return model.eval()


def _config(names: _Names, weights: Mapping[str, Tensor], changes: Mapping[str, Any]) -> MemoryMosaicConfig:
    first = names.block.format(i=0)
    vocab, width = _need(weights, names.embedding).shape
    heads = _need(weights, first + names.tensors["contextual.keys.rate"]).numel()
    label, last = first + names.tensors["persistent.slot_keys"], names.tensors["contextual.out_proj.weight"]
    slots = _need(weights, label.format(c=0))
    copies = sum(label.format(c=c) in weights for c in range(len(weights))) if "{c}" in label else slots.shape[0]
    fields = {
        "vocab_size": vocab,
        "hidden_size": width,
        "num_hidden_layers": next(i for i in count() if names.block.format(i=i) + last not in weights),
        "num_attention_heads": heads,
        "persistent_slots": slots.shape[-2],
        "persistent_copies": copies,
        "bias": names.norm + ".bias" in weights,
    }
    return MemoryMosaicConfig(**{**fields, **names.options, **changes})


def _name_pairs(names: _Names, model: MemoryMosaicForCausalLM) -> list[tuple[str, list[str]]]:
    """Return our names with the program's, several for copies of slots."""
    config = model.config
    pairs = [("model.embed_tokens.weight", [names.embedding]), ("model.norm.weight", [names.norm + ".weight"])]
    for i in range(config.num_hidden_layers):
        for ours, theirs in names.tensors.items():
            copies = range(config.persistent_copies if "{c}" in theirs else 1)
            copied = [names.block.format(i=i) + theirs.format(c=c) for c in copies]
            pairs.append((f"model.layers.{i}.{ours}", copied))
    if config.bias:
        biased = [(ours, theirs) for ours, (theirs, *_) in pairs if theirs.endswith(".weight")]
        to_bias = lambda name: name.removesuffix("weight") + "bias"  # noqa: E731
        pairs += [(to_bias(ours), [to_bias(theirs)]) for ours, theirs in biased if ours != "model.embed_tokens.weight"]
    return pairs


def _need(weights: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in weights:
        raise ArgumentError(f"{CALL}: {name} is missing.")
    return weights[name]


def _pop(left: dict[str, Tensor], names: list[str]) -> Tensor:
    """Remove the tensors of these names and return them, copies stacked on a new first axis."""
    tensors = [_need(left, name) for name in names]
    for name in names:
        tensor = left.pop(name)
        require(bool(torch.isfinite(tensor).all()), CALL, f"{name} holds NaN or infinite values.")
    return tensors[0] if len(tensors) == 1 else torch.stack(tensors)


def _shaped(name: str, tensor: Tensor, model: MemoryMosaicForCausalLM) -> Tensor:
    """Return the tensor in the shape of our parameter, which may differ in axes of size one."""
    ours = model.get_parameter(name)
    given, wanted = [n for n in tensor.shape if n != 1], [n for n in ours.shape if n != 1]
    require(given == wanted, CALL, f"{name} would be {shape(tensor)}, expected {shape(ours)}.")
    return tensor.reshape(ours.shape).to(ours.dtype)
