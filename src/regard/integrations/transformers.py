"""Attention specs as attention implementations of Hugging Face transformers.

    from regard.integrations.transformers import register
    register()                                            # "regard_softmax", "regard_biweight", ...
    model.set_attn_implementation("regard_biweight")      # or attn_implementation= when a model is made

An attention implementation is two functions under one name: the attention (`attend`), and its mask function
(`visible_keys`), which is called before. The mask that is passed between them takes one of these forms:

    None                 no key is masked; causal if the layer is causal, with queries at the end of the keys
    boolean [B, Tk]      keys that are masked for every query of a causal layer, with queries at the end of the keys
    integers [B, Tk]     causal within runs of equal numbers, which are the documents packed into a row
    boolean 4-D          [B or 1, H or 1, Tq or 1, Tk or 1], causal order and windows included
    additive 4-D         the same from older callers: 0 where a key may be attended, else the lowest number

A caller's 4-D mask is complete. A mask made here may lack packed documents, since transformers does not look for them
if there is a padding mask (even of ones) or a cache (even an empty one). `attend` then finds them in arguments of the
layer: position ids that start again, `cu_seq_lens_q`, `seq_idx`, `segment_ids`.

Legend: B batch, H query heads, Hkv key heads, Tq and Tk queries and keys, D and Dv channels per head.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as drop
from torch.nn.functional import pad
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import extra_imports

with extra_imports():
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from .. import Spec, attention, presets
from ..checks import ArgumentError, shape
from ..grammar import as_spec
from ..models.base.packing import ARGUMENTS, Documents
from ..pairwise.attention import diagnosed_attention

try:  # tells whether a model collects weights, if a layer does not pass `output_attentions` on (GPT-2)
    from transformers.utils.output_capturing import _active_collector
except ImportError:
    _active_collector = None

CALL = "integrations.transformers"
PREFIX = "regard_"
READ_BY_TRANSFORMERS = ("/", "flash", "flex_attention", "sdpa")
"""Parts of a name by which transformers recognises a repository on its hub or a backend of its own."""

HIDDEN = -1e4
"""Additive masks hold 0 or a number below this."""

REFUSED = {
    "softcap": "caps the scores",
    "s_aux": "adds a sink to the normaliser",
    "sinks": "adds a sink to the normaliser",
    "position_bias": "adds a bias to the scores",
    "head_mask": "multiplies the weights",
    "cache": "pages the keys (continuous batching)",
}
"""Arguments of other attention functions that would change the result, with their effects."""

_SPECS: dict[str, Spec] = {}
_ROWS = "_regard_rows"
"""Attribute of 4-D masks made here: which queries are not padding, boolean [B, Tq], or None for all."""
_FOUND = WeakIdKeyDictionary()
"""Last result of `_documents` by position ids, which all layers of a model share."""

Model = TypeVar("Model", bound=PreTrainedModel)


def register(*specs: Spec | str, **named: Spec | str) -> list[str]:
    """Register every preset, its local linear form, and the given specs as an `attn_implementation` of transformers.

    May be called again, which also registers presets that have been added since.

    Args:
        specs: specs, named "regard_" and their text without spaces: `register("biweight*anchored(margin=2)")` registers
            "regard_biweight*anchored(margin=2)".
        named: specs by name: `register(sharp="biweight*anchored(margin=0.5)")` registers "regard_sharp".

    Returns:
        The names of all presets (those of other packages included), "regard_local-linear[NAME]" for the presets whose
        weights are nonnegative and sum to one, then the given ones in order.

    Raises:
        ArgumentError: an invalid spec, a name that is already used for another spec, or one that transformers would
            misread ("/", "flash", "flex_attention", "sdpa").
    """
    for name, spec in ({f"specs[{i}]": spec for i, spec in enumerate(specs)} | named).items():
        as_spec(spec, "register", name)
    given = [(_name(spec), spec) for spec in specs] + list(named.items())
    linear = [f"local-linear[{name}]" for name, spec in presets().items() if spec.degree == 0 and spec.convex]
    wanted: list[tuple[str, Spec | str]] = [*presets().items(), *((name, name) for name in linear), *given]
    return [_register(name, spec) for name, spec in wanted]


def convert(model: Model, spec: Spec | str) -> Model:
    """Replace softmax by `spec` in every attention layer of a model, in place.

    Args:
        model: a model of transformers whose layers look up their attention function by name.
        spec: a spec, its text, or a name returned by `register`.

    Returns:
        The model. `model.set_attn_implementation("sdpa")` reverts it.

    Raises:
        ArgumentError: an invalid spec, or a model that computes attention itself (transformers would keep softmax).
    """
    if not isinstance(model, PreTrainedModel):
        raise ArgumentError(f"convert: model is a {type(model).__name__}, expected a transformers PreTrainedModel.")
    if not (isinstance(spec, str) and spec in _SPECS):
        as_spec(spec, "convert")
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    fixed = [part for part in parts if not part._can_set_attn_implementation()]
    files = (sys.modules.get(type(layer).__module__) for layer in model.modules())
    if fixed or not any(hasattr(file, "ALL_ATTENTION_FUNCTIONS") for file in files):  # transformers' table of functions
        hint = "use a model whose layers use transformers' AttentionInterface"
        problem = f"{type((fixed or parts)[0]).__name__} computes attention by itself and would not change"
        raise ArgumentError(f"convert: {problem}; {hint}.")
    name = spec if isinstance(spec, str) and spec in _SPECS else _register(_name(spec), spec)
    for part in parts:  # also those with a configuration of their own, which some releases leave as they are
        part.set_attn_implementation(name)
    return model


def _name(spec: Spec | str) -> str:
    return "".join(spec.split()) if isinstance(spec, str) else str(as_spec(spec))


def _register(name: str, spec: Spec | str) -> str:
    """Register both functions under PREFIX + name, once."""
    spec, full = as_spec(spec), PREFIX + name
    for part in READ_BY_TRANSFORMERS:
        if part in name:
            raise ArgumentError(f"register: transformers reads {part!r} in {full!r} as its own; choose another name.")
    if _SPECS.setdefault(full, spec) != spec:
        raise ArgumentError(f"register: {full!r} is already {_SPECS[full]}; choose another name.")
    AttentionInterface.register(full, partial(attend, spec))
    AttentionMaskInterface.register(full, visible_keys)
    return full


def visible_keys(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """Return the mask in the smallest form: None, boolean [B, Tk], [B, 1, 1, Tk] or [B, 1, Tq, Tk], or the documents of
    packed rows, integers [B, Tk]. transformers calls it as its own `sdpa_mask`.

    `q_offset` is a tensor for a cache of fixed length. Only such caches, windows and chunks need B Tq Tk bytes.
    """
    aligned = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length
    causal = mask_function is causal_mask_function and allow_is_causal_skip and aligned
    if causal or (mask_function is bidirectional_mask_function and allow_is_bidirectional_skip):
        keys = _real_keys(attention_mask, kv_length, kv_offset)
        if keys is None or causal:
            return keys
        return _with_rows(keys[:, None, None, :], attention_mask, q_offset, q_length)
    documents = _packed(mask_function)
    if documents is not None and aligned and attention_mask is None:
        return documents
    # In the first pass over a fixed-length cache, transformers would return None for queries at the first keys; here
    # None means queries at the last keys.
    made = sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip and aligned,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip, **kwargs,
    )  # fmt: skip
    return None if made is None else _with_rows(made, attention_mask, q_offset, q_length)


def _packed(mask_function: Callable[..., Any]) -> Tensor | None:
    """Return the documents [B, T] of transformers' mask function for packed sequences, from variables in its closure;
    None for any other function, whose full mask is computed."""
    if torch.compiler.is_compiling():
        return None
    both = _closed_over(mask_function).get("mask_functions", ())
    if len(both) != 2:
        return None
    # transformers 5.24 has them in the other order
    documents, order = sorted(map(_closed_over, both), key=lambda names: "packed_sequence_mask" not in names)
    alone = documents.keys() == {"packed_sequence_mask"} and order.get("mask_function") is causal_mask_function
    return documents["packed_sequence_mask"] if alone else None


def _closed_over(function: Callable[..., Any]) -> dict[str, Any]:
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    return {} if code is None else {n: cell.cell_contents for n, cell in zip(code.co_freevars, cells, strict=True)}


def _with_rows(made: Tensor, mask: Tensor | None, offset: int | Tensor, queries: int) -> Tensor:
    """Return the mask `made` with an attribute for the queries that are not padding."""
    rows = None
    if mask is not None:
        at = offset + torch.arange(queries, device=mask.device)
        rows = mask.bool().index_select(1, at.clamp(max=mask.shape[1] - 1))
    setattr(made, _ROWS, rows)
    return made


def _real_keys(mask: Tensor | None, length: int, offset: int) -> Tensor | None:
    """Return a boolean mask [B, Tk], False at padding, or None without padding."""
    if mask is None:
        return None
    missing = offset + length - mask.shape[-1]
    mask = pad(mask, (0, missing)) if missing > 0 else mask
    mask = mask[:, offset : offset + length].bool()
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return None if not traced and bool(mask.all()) else mask


def attend(
    spec: Spec,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | Tensor | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute `regard.attention` as transformers' layers call it.

    Cost: that of `regard.attention`. Dropout and returned weights use its dense reference in Theta(Tq Tk) memory, with
    dropout or gradients at Tk / Dv + 1 times the work of the weighted sum.

    Args:
        spec: the spec, bound by `register`.
        module: the layer; its attribute `is_causal` is the default of the argument.
        query, key, value: [B, H, Tq, D], [B, Hkv, Tk, D] and [B, Hkv, Tk, Dv], Hkv a divisor of H.
        attention_mask: one of the forms listed in the module.
        dropout: share of the weights set to zero; the others are divided by 1 - dropout, as in transformers' "eager".
        scaling: scale of the scores, ignored by specs without one (`spec.takes_scale`: feature maps, bounded
            similarities, clipped-geometric).
        is_causal: whether the layer is causal, if the mask does not include causal order.
        sliding_window: number of last positions that are visible if the mask is None (on both sides, the query's own
            included, if the layer is not causal). Other masks include it.
        kwargs: `output_attentions`; `position_ids` [B or 1, Tq] and `regard.models.base.packing.ARGUMENTS`, which
            determine packed documents. Arguments that would change the result are errors; others are ignored.

    Returns:
        The output [B, Tq, H, Dv] in the dtype of `value`, and the weights [B, H, Tq, Tk] after dropout, with
        weights @ value = output, or None. Weights of local linear attention may be negative. Queries without visible
        keys give 0.

    Raises:
        ArgumentError: soft caps, sinks, biases, head masks, paged caches; other kinds of masks; packed documents in a
            layer that is not causal, after tokens in a cache, or whose positions continue from one to the next.
    """
    for name, what in REFUSED.items():
        if kwargs.get(name) is not None:
            raise ArgumentError(f"{CALL}: {name} {what}, which {spec} does not support; use a model without it.")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    tokens = (query.shape[0], query.shape[2])
    how = _scale(spec, scaling) | _seen(attention_mask, causal, sliding_window, tokens[1])
    if not _is_complete(attention_mask):
        documents = _documents(module, tokens, key.shape[2], causal, attention_mask, kwargs)
        if documents is not None and _of_pairs(how.get("attn_mask")):
            how["attn_mask"] = how["attn_mask"] & (documents[:, None, :, None] == documents[:, None, None, :])
        elif documents is not None:
            how["segment_ids"] = documents
    if query.shape[1] != key.shape[1]:
        how["enable_gqa"] = True
    dtype = value.dtype
    wide = torch.promote_types(torch.promote_types(query.dtype, key.dtype), dtype)  # dtypes differ under autocast
    query, key, value = query.to(wide), key.to(wide), value.to(wide)
    if dropout or _weights_wanted(kwargs):
        out, weights = _dense(query, key, value, spec, dropout, how)
        weights = weights.to(dtype)
    else:
        out, weights = attention(query, key, value, spec, **how), None
    return out.to(dtype).transpose(1, 2).contiguous(), weights


def _dense(
    query: Tensor, key: Tensor, value: Tensor, spec: Spec, dropout: float, seen: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, Tq, Dv] and the weights [B, H, Tq, Tk], with gradients.

    With dropout, the weights are computed as the output for identity values, since the output is linear in the values.
    The true values are appended, so that queries that see a non-finite value become NaN.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    query, key, value = query.to(wide), key.to(wide), value.to(wide)
    if not dropout:
        out, rows = diagnosed_attention(query, key, value, spec, impl="reference", **seen)
        return out, rows.weights if rows.effective_weights is None else rows.effective_weights
    keys = key.shape[2]
    eye = torch.eye(keys, dtype=wide, device=value.device).expand(*value.shape[:2], keys, keys)
    both = attention(query, key, torch.cat((eye, value), -1), spec, impl="reference", **seen)
    weights = drop(both[..., :keys], dropout)
    finite = torch.where(value.isfinite(), value, 0)
    return weights @ finite.repeat_interleave(query.shape[1] // value.shape[1], dim=1), weights


def _weights_wanted(kwargs: dict[str, Any]) -> bool:
    if kwargs.get("output_attentions"):
        return True
    if _active_collector is None or (torch.compiler.is_compiling() and not _active_collector.compiling):
        return False  # a ContextVar cannot be traced; a fully compiled model uses a plain variable
    return any(name.endswith("attentions") for name in _active_collector.get() or ())


def _scale(spec: Spec, scaling: float | Tensor | None) -> dict[str, Any]:
    """Return the argument `scale` of `regard.attention`, for specs that take one."""
    if scaling is None or not spec.takes_scale:
        return {}
    if isinstance(scaling, Tensor) and scaling.dim():
        raise ArgumentError(f"{CALL}: scaling has shape {shape(scaling)}, expected one number for all heads.")
    return {"scale": scaling}


def _seen(mask: Tensor | None, causal: bool, window: int | None, queries: int) -> dict[str, Any]:
    """Return the visible keys as arguments of `regard.attention`."""
    if mask is None:
        # a single query at the end sees every key
        return {"is_causal": causal and (queries > 1 or window is not None), "window": window}
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
        what = shape(mask) if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        expected = "[B, Tk] or [B, H or 1, Tq, Tk]; add axes with unsqueeze"
        raise ArgumentError(f"{CALL}: attention_mask is {what}, expected {expected}.")
    if mask.dim() == 2 and mask.dtype in (torch.int32, torch.int64):
        return {"is_causal": True, "window": window, "segment_ids": mask}
    mask = _boolean(mask)
    if mask.dim() == 4:
        return {"attn_mask": mask}
    if not causal:
        why = "which is for causal layers; for this one write mask[:, None, None, :]"
        raise ArgumentError(f"{CALL}: attention_mask is {shape(mask)}, {why}.")
    return {"attn_mask": mask[:, None, None, :], "is_causal": queries > 1}


def _is_complete(mask: Tensor | None) -> bool:
    """Return whether a mask includes packed documents: transformers found them, or it is the caller's own."""
    return mask is not None and (not hasattr(mask, _ROWS) if mask.dim() == 4 else mask.dtype != torch.bool)


def _documents(
    module: nn.Module, tokens: tuple[int, int], keys: int, causal: bool, mask: Tensor | None, kwargs: dict[str, Any]
) -> Tensor | None:
    """Return the numbers of the documents packed into the rows, integers [B or 1, T]; None if each row is one document.

    Position ids are read once for all layers, which synchronises the device. A compiled graph without a full mask
    instead asserts that each row is one document.
    """
    positions, packing = kwargs.get("position_ids"), {n: kwargs[n] for n in ARGUMENTS if kwargs.get(n) is not None}
    fits = isinstance(positions, Tensor) and tuple(positions.shape) in (tokens, (1, tokens[1]))
    crossed = getattr(module, "is_cross_attention", False) or "Cross" in type(module).__name__
    if not fits or crossed:  # ids of images have more axes; in cross-attention they are not those of the keys
        positions = None
    if positions is None and not packing:
        return None
    if positions is None or torch.compiler.is_compiling():
        return _look(tokens, keys, causal, mask, positions, packing)
    held = (mask, *packing.values())
    inputs = [tokens, keys, causal, *packing, *map(_stamp, (positions, *held))]
    known = _FOUND.get(positions)
    if known is None or known[0] != inputs:
        known = inputs, held, _look(tokens, keys, causal, mask, positions, packing)
        _FOUND[positions] = known
    return known[2]


def _stamp(x: object) -> object:
    """Return a value that changes when x, which must be kept alive, changes; for inference tensors, always."""
    if not isinstance(x, Tensor):
        return id(x)
    return object() if x.is_inference() else (id(x), x._version)


def _look(
    tokens: tuple[int, int], keys: int, causal: bool, mask: Tensor | None, positions: Tensor | None,
    packing: dict[str, Any],
) -> Tensor | None:  # fmt: skip
    """Compute `_documents` without cache."""
    rows = getattr(mask, _ROWS, None)
    if mask is not None and mask.dim() == 2:
        rows = mask[:, mask.shape[1] - tokens[1] :]
    given = Documents.of(CALL, tokens, rows, None, packing) if packing else None
    counted = None if positions is None else Documents.of(CALL, tokens, rows, positions, {})
    documents = counted if given is None else given
    if documents is None:
        return None
    faults = dict(documents.faults)
    if given is not None and counted is not None:
        where = f"where the documents of {' and '.join(packing)} do"
        count = "give position_ids that count from the same number in every document"
        faults[f"position_ids do not begin again {where}; {count}"] = (given.begins != counted.begins).any()
    blind = torch.compiler.is_compiling() and not _of_pairs(mask)  # segments would make every call slower
    for refused, why in (
        (not causal, "but this layer is not causal; give each document a row of its own, or a 4-D mask"),
        (keys != tokens[1], "but keys come from a cache, which holds one document a row; call with use_cache=False"),
        (blind, "which a compiled model keeps apart only if called without attention_mask and with use_cache=False"),
    ):
        if refused:
            faults[f"the rows hold several documents, {why}"] = documents.begins.any()
    segments = replace(documents, faults=faults).segments(CALL, cache_kept=False, cache_asked=False)
    return None if blind else segments


def _of_pairs(mask: Tensor | None) -> bool:
    """Return whether a mask has an entry for every query and key."""
    return mask is not None and mask.dim() == 4 and mask.shape[2] > 1


def _boolean(mask: Tensor) -> Tensor:
    """Return the mask as booleans; raise for a bias on the scores, which would silently mask everything."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        expected = "expected torch.bool with True where a key may be attended; write mask != 0"
        raise ArgumentError(f"{CALL}: attention_mask has dtype {mask.dtype}, {expected}.")
    allowed = mask == 0
    if not torch.compiler.is_compiling() and not bool((allowed | (mask <= HIDDEN)).all()):
        expected = f"expected 0 or below {HIDDEN:g} everywhere; give a boolean mask, True where a key may be attended"
        raise ArgumentError(f"{CALL}: attention_mask adds numbers to the scores (ALiBi, a relative bias), {expected}.")
    return allowed
