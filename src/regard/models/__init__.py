"""Causal language models on transformers' `PreTrainedModel`.

Importing this package registers them with `AutoConfig`, `AutoModel` and `AutoModelForCausalLM`, so that saved models
can be loaded by path. It requires the extra `lm`.
"""

from ..errors import extra_imports

with extra_imports():
    from .base.base_config import RegardConfig

from .base.catalogue import LanguageModel, Matched, count_parameters, language_models, match_parameters
from .hybrid.cache import RegardCacheLayer, hybrid_cache
from .hybrid.configuration_hybrid import HybridConfig
from .hybrid.memories import (
    chunk_size,
    count_fast_weights,
    flush_memory,
    frozen_memory,
    keep_memory,
    memory_modules,
    memory_states,
    reset_memory,
    with_memory,
)
from .hybrid.mixers.gated_delta_net import GatedDeltaNet
from .hybrid.modeling_hybrid import HybridForCausalLM, HybridModel
from .hybrid.token_mixers import TokenMixer, token_mixers
from .iclm.configuration_iclm import ICLMConfig
from .iclm.contributions import Contributions
from .iclm.iclm_cache import ICLMCache
from .iclm.modeling_iclm import ICLMForCausalLM, ICLMModel
from .iclm.parity import ParityReport, parity_report, transformer_like
from .mosaic.configuration_memory_mosaic import MemoryMosaicConfig
from .mosaic.modeling_memory_mosaic import MemoryMosaicForCausalLM, MemoryMosaicModel
from .mosaic.released import from_released

__all__ = [
    "Contributions", "GatedDeltaNet", "HybridConfig", "HybridForCausalLM", "HybridModel", "ICLMCache", "ICLMConfig",
    "ICLMForCausalLM", "ICLMModel", "LanguageModel", "Matched", "MemoryMosaicConfig", "MemoryMosaicForCausalLM",
    "MemoryMosaicModel", "ParityReport", "RegardCacheLayer", "RegardConfig", "TokenMixer", "chunk_size",
    "count_fast_weights", "count_parameters", "flush_memory", "from_released", "frozen_memory", "hybrid_cache",
    "keep_memory", "language_models", "match_parameters", "memory_modules", "memory_states", "parity_report",
    "reset_memory", "token_mixers", "transformer_like", "with_memory",
]  # fmt: skip
