"""Falcon fast-weight language models for transformers, registered with its Auto classes on import."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .cache_falcon_fast_weight import cache_nbytes, falcon_cache
from .configuration_falcon_fast_weight import FalconFastWeightConfig
from .generation_falcon_fast_weight import NotOnDevice, generate_on_device
from .inspection_falcon_fast_weight import MemoryTrace, inspect_memory
from .memory_falcon_fast_weight import load_memory, save_memory
from .memory_store_falcon_fast_weight import MemoryStore
from .modeling_falcon_fast_weight import (
    FalconFastWeightAttention,
    FalconFastWeightForCausalLM,
    FalconFastWeightForSequenceClassification,
    FalconFastWeightForTokenClassification,
    FalconFastWeightModel,
    FalconFastWeightPreTrainedModel,
)

AutoConfig.register(FalconFastWeightConfig.model_type, FalconFastWeightConfig, exist_ok=True)
AutoModel.register(FalconFastWeightConfig, FalconFastWeightModel, exist_ok=True)
AutoModelForCausalLM.register(FalconFastWeightConfig, FalconFastWeightForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(
    FalconFastWeightConfig, FalconFastWeightForSequenceClassification, exist_ok=True
)
AutoModelForTokenClassification.register(FalconFastWeightConfig, FalconFastWeightForTokenClassification, exist_ok=True)

__all__ = [
    "FalconFastWeightAttention",
    "FalconFastWeightConfig",
    "FalconFastWeightForCausalLM",
    "FalconFastWeightForSequenceClassification",
    "FalconFastWeightForTokenClassification",
    "FalconFastWeightModel",
    "FalconFastWeightPreTrainedModel",
    "MemoryStore",
    "MemoryTrace",
    "NotOnDevice",
    "cache_nbytes",
    "falcon_cache",
    "generate_on_device",
    "inspect_memory",
    "load_memory",
    "save_memory",
]
