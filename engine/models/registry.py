"""Which class computes which architecture. A new model is one module and one line here."""

from __future__ import annotations

import torch

from engine.layers.shard import Shard
from engine.models.config import ModelConfig
from engine.models.llama import LlamaForCausalLM
from engine.models.qwen2 import Qwen2ForCausalLM
from engine.models.qwen3 import Qwen3ForCausalLM
from engine.models.qwen3_moe import Qwen3MoeForCausalLM
from engine.weights.errors import UnsupportedModel

MODELS: dict[str, type[LlamaForCausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
}


def build_model(config: ModelConfig, shard: Shard, dtype: torch.dtype) -> LlamaForCausalLM:
    """The model with uninitialised weights.

    UnsupportedModel lists the known architectures; ConfigError if its heads cannot be split.
    """
    known = MODELS.get(config.architecture)
    if known is None:
        raise UnsupportedModel(f"architecture {config.architecture!r} of {config.name} is not "
                               f"known; known: {', '.join(sorted(MODELS))}")
    check_split(config, shard)
    return known(config, shard, dtype)


def check_split(config: ModelConfig, shard: Shard) -> None:
    """ConfigError, naming what cannot be split evenly, if the ranks cannot share this model."""
    for what in ("num_attention_heads", "intermediate_size", "moe_intermediate_size"):
        shard.share(getattr(config, what), what)
    shard.of_kv_heads(config.num_key_value_heads)
