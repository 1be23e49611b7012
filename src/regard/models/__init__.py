"""Causal language models on transformers' `PreTrainedModel`.

Importing this package files them with `AutoConfig`, `AutoModel` and `AutoModelForCausalLM`, so that saved
models load by path alone. It needs the extra `lm`.
"""

from .base_config import RegardConfig
from .cache import RegardCacheLayer, hybrid_cache
from .catalogue import LanguageModel, language_models
from .configuration_hybrid import HybridConfig
from .configuration_iclm import ICLMConfig
from .configuration_memory_mosaic import MemoryMosaicConfig
from .gated_delta_net import GatedDeltaNet
from .hybrid import HybridForCausalLM, HybridModel
from .iclm import ICLMForCausalLM, ICLMModel
from .iclm_cache import ICLMCache
from .iclm_contributions import Contributions
from .iclm_parity import ParityReport, parity_report, transformer_like
from .matching import Matched, count_parameters, match_parameters
from .memory_mosaic import MemoryMosaicForCausalLM, MemoryMosaicModel
from .memory_mosaic_released import from_released
from .token_mixers import TokenMixer, token_mixers

__all__ = [
    "Contributions",
    "GatedDeltaNet",
    "HybridConfig",
    "HybridForCausalLM",
    "HybridModel",
    "ICLMCache",
    "ICLMConfig",
    "ICLMForCausalLM",
    "ICLMModel",
    "LanguageModel",
    "Matched",
    "MemoryMosaicConfig",
    "MemoryMosaicForCausalLM",
    "MemoryMosaicModel",
    "ParityReport",
    "RegardCacheLayer",
    "RegardConfig",
    "TokenMixer",
    "count_parameters",
    "from_released",
    "hybrid_cache",
    "language_models",
    "match_parameters",
    "parity_report",
    "token_mixers",
    "transformer_like",
]
