"""Causal language models on transformers' `PreTrainedModel`.

Importing this package files them with `AutoConfig`, `AutoModel` and `AutoModelForCausalLM`, so that saved
models load by path alone. It needs the extra `lm`.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .cache import RegardCacheLayer, hybrid_cache
from .configuration_hybrid import HybridConfig
from .hybrid import HybridForCausalLM, HybridModel

AutoConfig.register(HybridConfig.model_type, HybridConfig, exist_ok=True)
AutoModel.register(HybridConfig, HybridModel, exist_ok=True)
AutoModelForCausalLM.register(HybridConfig, HybridForCausalLM, exist_ok=True)

__all__ = ["HybridConfig", "HybridForCausalLM", "HybridModel", "RegardCacheLayer", "hybrid_cache"]
