"""All public calls that the fuzzer draws, by name."""

from __future__ import annotations

from collections.abc import Callable

from . import attention_calls as a
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
}
