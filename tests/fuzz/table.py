"""All public calls that the fuzzer draws, by name."""

from __future__ import annotations

from collections.abc import Callable

from . import attention_calls as a
from . import layer_calls as y
from . import memory_calls as m
from . import other_calls as o
from . import recurrent_calls as r
from .draw import Call, Draw

CALLS: dict[str, Callable[[Draw], Call]] = {
    "attention": a.attention,
    "local_linear_attention": a.local_linear,
    "explain": a.explain,
    "entmax": a.entmax,
    "sparsemax": a.sparsemax,
    "relumax": a.relumax,
    "normrelu": a.normrelu,
    "topk_softmax": a.topk_softmax,
    "topk_uniform": a.topk_uniform,
    "Spec": a.spec,
    "Spec.parse": a.parse,
    "Spec.from_json": a.from_json,
    "AssociativeMemory": m.associative,
    "AssociativeMemory.write": m.write,
    "AssociativeMemory.read": m.read,
    "AssociativeMemory.energy": m.energy,
    "AssociativeMemory.forget": m.forget,
    "AssociativeMemory.forget-pairs": m.forget_pairs,
    "AssociativeMemory.transform": m.transform,
    "product_key_search": m.product_key_search,
    "product_key_read": m.product_key_read,
    "slot_weights": m.slot_weights,
    "fast_weight_memory": m.fast_weight_memory,
    "fast_weight_memory.flush": m.flush_memory,
    "WriteRule": m.write_rule,
    "fast_weight_mlp": m.fast_weight_mlp,
    "large_chunk_ttt": m.large_chunk_ttt,
    "leaky_average": m.leaky_average,
    "nn.Attention": y.attention,
    "nn.Attention.forward": y.attention_forward,
    "nn.ContextualMemory": y.contextual,
    "nn.ContextualMemory.forward": y.contextual_forward,
    "nn.PersistentMemory": y.persistent,
    "nn.PersistentMemory.forward": y.persistent_forward,
    "nn.FunctionalGradient": y.gradient,
    "nn.FunctionalGradient.forward": y.gradient_forward,
    "nn.FastWeightMLP": y.fast_mlp,
    "nn.FastWeightProductKeyMemory": y.fwpkm,
    "nn.ProductKeyMemory": y.pkm,
    "nn.LargeChunkTTT": y.lact,
    "nn.LargeChunkTTT.forward": y.lact_forward,
    "memory layers.forward": y.memory_forward,
    "GatedDeltaNet": y.gated_delta,
    "expected_embedding": y.expected_embedding,
    "rotary_angles": y.rotary_angles,
    "rotate": y.rotate,
    "optimizer_groups": y.optimizer_groups,
    "as_temperature": y.temperature,
    "as_ridge": y.ridge,
    "HybridConfig": o.hybrid,
    "MemoryMosaicConfig": o.mosaic,
    "ICLMConfig": o.iclm,
    "match_parameters": o.match,
    "count_parameters": o.count,
    "ConeRegression": o.cone,
    "CrossDocumentRecall": o.recall,
    "NeedleInHaystack": o.needle,
    "tasks.example": o.example,
    "wilson": o.wilson,
    "sinks": o.sinks,
    "copying": o.copying,
    "induction": o.induction,
    "repeated_blocks": o.repeated,
    "copying_eigenvalues": o.eigenvalues,
    "histogram": o.histogram,
    "token_surprisal": o.surprisal,
    "word_surprisal": o.words,
    "rank_correlation": o.correlation,
    "capture": o.capture,
    "hooked": o.hooked,
    "named_hook_points": o.points,
    "run_with_cache": o.with_cache,
    "run_with_hooks": o.with_hooks,
    "attention_maps": o.maps,
    "register": o.register,
    "convert": o.convert,
}

VALID_ONLY: dict[str, Callable[[Draw], Call]] = {
    "linear_attention": r.linear,
    "mesa_attention": r.mesa,
    "delta_rule": r.delta,
}
"""Calls that are drawn without bad arguments, which tests of their own try."""
