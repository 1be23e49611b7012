"""All public calls that the fuzzer draws, by name: those that the modules imported here register."""

from . import attention_calls, layer_calls, memory_calls, other_calls, recurrent_calls, score_calls
from .draw import CALLS

__all__ = ["CALLS", "attention_calls", "layer_calls", "memory_calls", "other_calls", "recurrent_calls", "score_calls"]
