"""Every sentence of the grammar as an attention implementation of Hugging Face transformers.

    from regard.integrations.transformers import register
    register()                                            # "regard_softmax", "regard_biweight", ...
    model.set_attn_implementation("regard_biweight")      # or attn_implementation= when a model is made

An attention implementation is two functions under one name: one that computes (`attend`), one that says beforehand
who sees whom (`visible_keys`). Between the two a mask is one of five things:

    None                 no key is hidden; causal order if the layer is causal, queries at the end of the keys
    boolean [B, Tk]      keys that are hidden from every query of a causal layer; queries at the end of the keys
    integers [B, Tk]     causal order inside the runs of equal numbers: documents that are packed into a row
    boolean 4-D          [B or 1, H or 1, Tq or 1, Tk or 1], causal order and windows included
    additive 4-D         the same from older callers: 0 where a key may be attended, else the lowest number

A caller's own mask of four axes says all there is to say. A mask that is made here may lack packed documents: where
there is a padding mask, even one of ones, or a cache, even an empty one, transformers does not look for them. `attend`
looks for them in what layers hand on: position ids that begin again, `cu_seq_lens_q`, `seq_idx`, `segment_ids`.

Legend: B batch, H query heads, Hkv key heads, Tq and Tk queries and keys, D and Dv channels of a head.
"""

from __future__ import annotations

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
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from .. import Spec, attention, presets
from ..checks import ArgumentError, shape
from ..grammar import as_spec
from ..models.base.packing import ARGUMENTS, Documents
from ..pairwise.attention import diagnosed_attention

try:  # how a model says that it collects weights, where a layer does not hand `output_attentions` on (GPT-2)
    from transformers.utils.output_capturing import _active_collector
except ImportError:
    _active_collector = None

CALL = "integrations.transformers"
PREFIX = "regard_"
READ_BY_TRANSFORMERS = ("/", "flash", "flex_attention", "sdpa")
"""What transformers takes in a name as a repository on its hub or as a backend of its own."""

HIDDEN = -1e4
"""Additive masks hold 0 or something below this."""

REFUSED = {
    "softcap": "caps the scores",
    "s_aux": "adds a sink to the normaliser",
    "sinks": "adds a sink to the normaliser",
    "position_bias": "adds a bias to the scores",
    "head_mask": "multiplies the weights",
    "cache": "pages the keys (continuous batching)",
}
"""Arguments of other attention functions that would change the result, and what they do."""

_SPECS: dict[str, Spec] = {}
_ROWS = "_regard_rows"
"""The attribute of 4-D masks made here: which queries are real, boolean [B, Tq], or None for all."""
_FOUND = WeakIdKeyDictionary()
"""Position ids to what `_documents` found in them last, since all layers of a model ask the same."""

Model = TypeVar("Model", bound=PreTrainedModel)


def register(*specs: Spec | str, **named: Spec | str) -> list[str]:
    """Make every preset, its local linear form, and the sentences given, an `attn_implementation` of transformers.

    Args:
        specs: sentences or their text; the name is "regard_" and the text without spaces, as given (of a Spec, as
            it prints): `register("biweight*anchored(margin=2)")` files "regard_biweight*anchored(margin=2)".
        named: names of your own: `register(sharp="biweight*anchored(margin=0.5)")` files "regard_sharp".

    Returns:
        The names: those of all presets (those of other packages included), "regard_local-linear[NAME]" for those whose
        weights are not negative and sum to one, then those given, in order. Calling again is harmless, and files
        presets that have been added since.

    Raises:
        ArgumentError: a text that cannot be read, a name that stands for another sentence already, or one that
            transformers would take for something else ("/", "flash", "flex_attention", "sdpa").
    """
    wanted_specs = {f"specs[{i}]": spec for i, spec in enumerate(specs)} | named
    for name, spec in wanted_specs.items():
        as_spec(spec, "register", name)
    given = [(_name(spec), spec) for spec in specs] + list(named.items())
    linear = [f"local-linear[{name}]" for name, spec in presets().items() if spec.degree == 0 and spec.convex]
    wanted: list[tuple[str, Spec | str]] = [*presets().items(), *((name, name) for name in linear), *given]
    return [_file(name, spec) for name, spec in wanted]


def convert(model: Model, spec: Spec | str) -> Model:
    """Put `spec` in the place of softmax in every attention layer of a model, in place.

    Args:
        model: any model of transformers whose layers ask for their attention function by name.
        spec: a sentence, its text, or a name that `register` returned.

    Returns:
        The model. `model.set_attn_implementation("sdpa")` undoes it.

    Raises:
        ArgumentError: a model with attention of its own (transformers itself would go on with softmax and only
            log a warning), or a text that cannot be read.
    """
    if not isinstance(model, PreTrainedModel):
        raise ArgumentError(f"convert: model is a {type(model).__name__}, expected a transformers PreTrainedModel.")
    if not (isinstance(spec, str) and spec in _SPECS):
        as_spec(spec, "convert")
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    deaf = [part for part in parts if not part._can_set_attn_implementation()]
    if deaf or not any(map(_asks_by_name, model.modules())):
        raise ArgumentError(
            f"convert: {type((deaf or parts)[0]).__name__} computes attention by itself and would stay as it is; take "
            f"a model whose layers use transformers' AttentionInterface."
        )
    model.set_attn_implementation(spec if isinstance(spec, str) and spec in _SPECS else _file(_name(spec), spec))
    return model


def _asks_by_name(layer: nn.Module) -> bool:
    """Whether the file that defines the layer knows transformers' table of attention functions."""
    return hasattr(sys.modules.get(type(layer).__module__), "ALL_ATTENTION_FUNCTIONS")


def _name(spec: Spec | str) -> str:
    return "".join(spec.split()) if isinstance(spec, str) else str(as_spec(spec))


def _file(name: str, spec: Spec | str) -> str:
    """Register both functions under PREFIX + name, once."""
    spec, full = as_spec(spec), PREFIX + name
    for part in READ_BY_TRANSFORMERS:
        if part in name:
            raise ArgumentError(f"register: transformers reads {part!r} in {full!r} as its own; choose another name.")
    if _SPECS.setdefault(full, spec) != spec:
        raise ArgumentError(f"register: {full!r} stands for {_SPECS[full]} already; choose another name.")
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
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """The mask function: who sees whom, in the smallest form that says it (see the module).

    Args:
        batch_size, q_length, kv_length: B, Tq, Tk.
        q_offset: position of the first query; a tensor where a cache has a fixed length.
        kv_offset: position of the first key.
        mask_function: of transformers: (b, h, q, k) -> whether query q sees key k.
        attention_mask: boolean [B, tokens], False at padding, over all positions so far.
        local_size: the window or chunk, where there is one.
        allow_is_causal_skip, allow_is_bidirectional_skip: False where the model needs the pairs themselves.
        kwargs: what transformers' `sdpa_mask` takes besides.

    Returns:
        None, boolean [B, Tk], [B, 1, 1, Tk] or [B, 1, Tq, Tk], or the documents of packed rows, integers [B, Tk]. Only
        windows, chunks and caches of a fixed length need pairs, which take B Tq Tk bytes.
    """
    aligned = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length
    causal = mask_function is causal_mask_function and allow_is_causal_skip and aligned
    if causal or (mask_function is bidirectional_mask_function and allow_is_bidirectional_skip):
        keys = _real_keys(attention_mask, kv_length, kv_offset)
        return (
            keys if keys is None or causal else _made_here(keys[:, None, None, :], attention_mask, q_offset, q_length)
        )
    documents = _packed(mask_function)
    if documents is not None and aligned and attention_mask is None:
        return documents
    # transformers leaves the mask out of a first pass over a fixed-length cache too, where None would mean that the
    # queries stand at the first keys; here it means the last.
    made = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip and aligned,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        **kwargs,
    )
    return None if made is None else _made_here(made, attention_mask, q_offset, q_length)


def _packed(mask_function: Callable[..., Any]) -> Tensor | None:
    """Read the documents [B, T] out of transformers' mask function for packed sequences; None for every other function,
    and for one that says more than causal order inside documents.

    The variables that it closes over have no public names. Where they are not found, the mask is computed pair by pair,
    as transformers does it.
    """
    if torch.compiler.is_compiling():
        return None
    both = _closed_over(mask_function).get("mask_functions", ())
    if len(both) != 2:
        return None
    documents, order = map(_closed_over, both)
    alone = documents.keys() == {"packed_sequence_mask"} and order.get("mask_function") is causal_mask_function
    return documents["packed_sequence_mask"] if alone else None


def _closed_over(function: Callable[..., Any]) -> dict[str, Any]:
    """The variables that a function has from where it was made, by name."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    return {} if code is None else {n: cell.cell_contents for n, cell in zip(code.co_freevars, cells, strict=True)}


def _made_here(made: Tensor, mask: Tensor | None, offset: int | Tensor, queries: int) -> Tensor:
    """The mask `made`, marked with the queries that are real by a mask over all positions so far."""
    rows = None
    if mask is not None:
        at = offset + torch.arange(queries, device=mask.device)
        rows = mask.bool().index_select(1, at.clamp(max=mask.shape[1] - 1))
    setattr(made, _ROWS, rows)
    return made


def _real_keys(mask: Tensor | None, length: int, offset: int) -> Tensor | None:
    """Boolean [B, Tk], False at padding; None where nothing is."""
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
    """The attention function: `regard.attention` as transformers' layers call it.

    Args:
        spec: the sentence; bound by `register`.
        module: the layer; its `is_causal` says whether it is causal where the argument does not.
        query: [B, H, Tq, D].
        key: [B, Hkv, Tk, D], Hkv a divisor of H.
        value: [B, Hkv, Tk, Dv].
        attention_mask: one of the four forms of the module's legend.
        dropout: share of the weights put to zero, the others divided by 1 - dropout, as in transformers' "eager".
        scaling: of the scores. Sentences without a scale (`spec.takes_scale`: feature maps, bounded similarities,
            clipped-geometric) have their own and do not look at it.
        is_causal: causal order where the mask does not say it.
        sliding_window: where the mask is None, the last so many positions (to both sides, the query's own
            included, if the layer is not causal). Elsewhere the mask holds it.
        kwargs: `output_attentions`; `position_ids` [B or 1, Tq] and the keywords of
            `regard.models.base.packing.ARGUMENTS`, which say where packed documents begin; what would change
            the result is refused; the rest is for other functions.

    Returns:
        The output [B, Tq, H, Dv] in the dtype of `value`, and the weights [B, H, Tq, Tk] or None. The weights, after
        dropout, are those with weights @ value = output: those of a local linear model may be negative. Rows that
        see no key are 0.

    Raises:
        ArgumentError: soft caps, sinks, biases, head masks, paged caches; masks of other kinds; packed documents in a
            layer that is not causal, after tokens in a cache, or whose positions go on from one to the next.

    Cost: that of `regard.attention`. With dropout or weights, its dense reference in Theta(Tq Tk) memory; where these
    need a gradient or dropout, Tk / Dv + 1 times the work of the weighted sum.
    """
    for name, what in REFUSED.items():
        if kwargs.get(name) is not None:
            raise ArgumentError(f"{CALL}: {name} {what}, which {spec} has no place for; use a model without it.")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    seen = _seen(attention_mask, causal, sliding_window, query.shape[2])
    if not _says_all(attention_mask):
        tokens = (query.shape[0], query.shape[2])
        documents = _documents(module, tokens, key.shape[2], causal, attention_mask, kwargs)
        if documents is not None:
            _keep_apart(seen, documents)
    if scaling is not None and spec.takes_scale:
        seen["scale"] = _number(scaling)
    if query.shape[1] != key.shape[1]:
        seen["enable_gqa"] = True
    dtype = value.dtype
    wide = torch.promote_types(torch.promote_types(query.dtype, key.dtype), dtype)  # autocast leaves some narrower
    query, key, value = query.to(wide), key.to(wide), value.to(wide)
    if dropout or _weights_wanted(kwargs):
        out, weights = _dense(query, key, value, spec, dropout, seen)
        weights = weights.to(dtype)
    else:
        out, weights = attention(query, key, value, spec, **seen), None
    return out.to(dtype).transpose(1, 2).contiguous(), weights


def _dense(
    query: Tensor, key: Tensor, value: Tensor, spec: Spec, dropout: float, seen: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Output [B, H, Tq, Dv] and weights [B, H, Tq, Tk], with gradients.

    For dropout: every estimate is linear in the values, so that the identity as values gives the weights, of degree 1
    too. The values themselves ride along: rows that see one that is not finite become NaN, and no others.
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
        return False  # a ContextVar, which cannot be traced; a model compiled as a whole keeps a plain variable
    return any(name.endswith("attentions") for name in _active_collector.get() or ())


def _number(scaling: float | Tensor) -> float | Tensor:
    """A scale for all heads; others would have to say which axis they follow."""
    if isinstance(scaling, Tensor) and scaling.dim():
        raise ArgumentError(f"{CALL}: scaling has shape {shape(scaling)}, expected one number for all heads.")
    return scaling


def _seen(mask: Tensor | None, causal: bool, window: int | None, queries: int) -> dict[str, Any]:
    """Who sees whom, as arguments of `regard.attention`."""
    if mask is None:
        # One query at the end sees every key, which implementations need not find out from causal order.
        return {"is_causal": causal and (queries > 1 or window is not None), "window": window}
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
        what = shape(mask) if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise ArgumentError(
            f"{CALL}: attention_mask is {what}, expected [B, Tk] or [B, H or 1, Tq, Tk]; add axes with unsqueeze."
        )
    if mask.dim() == 2 and mask.dtype in (torch.int32, torch.int64):
        return {"is_causal": True, "window": window, "segment_ids": mask}
    mask = _boolean(mask)
    if mask.dim() == 4:
        return {"attn_mask": mask}
    if not causal:
        raise ArgumentError(
            f"{CALL}: attention_mask is {shape(mask)}, which is for causal layers; for this one write "
            f"mask[:, None, None, :]."
        )
    return {"attn_mask": mask[:, None, None, :], "is_causal": queries > 1}


def _says_all(mask: Tensor | None) -> bool:
    """Whether packed documents cannot be missing in a mask: transformers found them, or it is the caller's own."""
    return mask is not None and (not hasattr(mask, _ROWS) if mask.dim() == 4 else mask.dtype != torch.bool)


def _documents(
    module: nn.Module, tokens: tuple[int, int], keys: int, causal: bool, mask: Tensor | None, kwargs: dict[str, Any]
) -> Tensor | None:
    """Number the documents that are packed into the rows, integers [B or 1, T]; None where each row is one.

    Looks at the position ids of a call once for all layers, which waits for a device. A graph that is being compiled
    cannot look: where there is no mask of pairs, it asserts that each row is one document.
    """
    positions, packing = kwargs.get("position_ids"), {n: kwargs[n] for n in ARGUMENTS if kwargs.get(n) is not None}
    fits = isinstance(positions, Tensor) and tuple(positions.shape) in (tokens, (1, tokens[1]))
    crossed = getattr(module, "is_cross_attention", False) or "Cross" in type(module).__name__
    if not fits or crossed:  # those of images have more axes; those of other keys say nothing of these
        positions = None
    if positions is None and not packing:
        return None
    if positions is None or torch.compiler.is_compiling():
        return _look(tokens, keys, causal, mask, positions, packing)
    held = (mask, *packing.values())
    asked = [tokens, keys, causal, *packing, *map(_stamp, (positions, *held))]
    known = _FOUND.get(positions)
    if known is None or known[0] != asked:
        known = asked, held, _look(tokens, keys, causal, mask, positions, packing)
        _FOUND[positions] = known
    return known[2]


def _stamp(x: object) -> object:
    """Something that stays equal while x, which is held, stays the same; a tensor that keeps no count of its changes
    never does."""
    if not isinstance(x, Tensor):
        return id(x)
    return object() if x.is_inference() else (id(x), x._version)


def _look(
    tokens: tuple[int, int],
    keys: int,
    causal: bool,
    mask: Tensor | None,
    positions: Tensor | None,
    packing: dict[str, Any],
) -> Tensor | None:
    """As `_documents`, of the arguments that count."""
    rows = getattr(mask, _ROWS, None)
    if mask is not None and mask.dim() == 2:
        rows = mask[:, mask.shape[1] - tokens[1] :]
    told = Documents.of(CALL, tokens, rows, None, packing) if packing else None
    begun = None if positions is None else Documents.of(CALL, tokens, rows, positions, {})
    found = begun if told is None else told
    if found is None:
        return None
    faults = dict(found.faults)
    if told is not None and begun is not None:
        faults[
            f"position_ids do not begin again where the documents of {' and '.join(packing)} do; give position_ids "
            f"that count from the same number in every document"
        ] = (told.begins != begun.begins).any()
    blind = torch.compiler.is_compiling() and not _of_pairs(mask)  # segments for all calls would cost those without
    for wrong, why in (
        (not causal, "but this layer is not causal; give each document a row of its own, or a 4-D mask"),
        (keys != tokens[1], "but keys come from a cache, which holds one document a row; call with use_cache=False"),
        (blind, "which a compiled model keeps apart only if called without attention_mask and with use_cache=False"),
    ):
        if wrong:
            faults[f"the rows hold several documents, {why}"] = found.begins.any()
    segments = replace(found, faults=faults).segments(CALL, cache_kept=False, cache_asked=False)
    return None if blind else segments


def _keep_apart(seen: dict[str, Any], documents: Tensor) -> None:
    """Add documents to the arguments of `regard.attention`: to the pairs of a mask where there are some."""
    if _of_pairs(seen.get("attn_mask")):
        seen["attn_mask"] = seen["attn_mask"] & (documents[:, None, :, None] == documents[:, None, None, :])
    else:
        seen["segment_ids"] = documents


def _of_pairs(mask: Tensor | None) -> bool:
    """Whether a mask has an entry for every query and key."""
    return mask is not None and mask.dim() == 4 and mask.shape[2] > 1


def _boolean(mask: Tensor) -> Tensor:
    """The mask as booleans. Masks made here are; others are looked into once per layer, since a bias on the scores
    has the same form as a mask and would silently hide everything."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise ArgumentError(
            f"{CALL}: attention_mask has dtype {mask.dtype}, expected torch.bool with True where a key may be "
            f"attended; write mask != 0."
        )
    allowed = mask == 0
    if not torch.compiler.is_compiling() and not bool((allowed | (mask <= HIDDEN)).all()):
        raise ArgumentError(
            f"{CALL}: attention_mask adds numbers to the scores (ALiBi, a relative bias), expected 0 or below "
            f"{HIDDEN:g} everywhere; give a boolean mask, True where a key may be attended."
        )
    return allowed
