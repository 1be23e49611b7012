"""Causal language models on transformers' `PreTrainedModel`.

Importing this package files them with `AutoConfig`, `AutoModel` and `AutoModelForCausalLM`, so that saved
models load by path alone. It needs the extra `lm`.
"""

from .base_config import RegardConfig
from .cache import RegardCacheLayer, hybrid_cache
from .catalogue import LanguageModel, language_models
from .configuration_hybrid import HybridConfig
from .hybrid import HybridForCausalLM, HybridModel
from .matching import Matched, count_parameters, match_parameters

__all__ = [
    "HybridConfig",
    "HybridForCausalLM",
    "HybridModel",
    "LanguageModel",
    "Matched",
    "RegardCacheLayer",
    "RegardConfig",
    "count_parameters",
    "hybrid_cache",
    "language_models",
    "match_parameters",
]
