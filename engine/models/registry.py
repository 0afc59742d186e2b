"""Which class computes which architecture. A new model is one module and one line here."""

from __future__ import annotations

import torch

from engine.layers.shard import Shard
from engine.models.config import ModelConfig
from engine.models.llama import LlamaForCausalLM
from engine.models.qwen2 import Qwen2ForCausalLM
from engine.models.qwen3 import Qwen3ForCausalLM
from engine.models.qwen3_moe import Qwen3MoeForCausalLM
from engine.weights.errors import TooLargeModel, UnsupportedModel

# What torch says where memory ends, on a CPU, on a GPU, and before it has asked for any.
NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "overflow")

MODELS: dict[str, type[LlamaForCausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
}


def build_model(config: ModelConfig, shard: Shard, dtype: torch.dtype) -> LlamaForCausalLM:
    """The model with uninitialised weights.

    UnsupportedModel lists the known architectures; ConfigError if its heads cannot be split;
    TooLargeModel if the memory is not there.
    """
    known = MODELS.get(config.architecture)
    if known is None:
        raise UnsupportedModel(f"architecture {config.architecture!r} of {config.name} is not "
                               f"known; known: {', '.join(sorted(MODELS))}")
    check_split(config, shard)
    try:
        return known(config, shard, dtype)
    except (MemoryError, RuntimeError) as error:  # torch has no class of its own for a CPU's
        if not any(sign in str(error).lower() for sign in NO_MEMORY):
            raise
        raise TooLargeModel(_too_large(config, shard, dtype)) from None


def _too_large(config: ModelConfig, shard: Shard, dtype: torch.dtype) -> str:
    """The sentence, with the sum that config.json's shape makes; biases and norms left out."""
    heads = 2 * (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
    blocks = 3 * max(config.intermediate_size, config.num_experts * config.moe_intermediate_size)
    tables = config.vocab_size * (1 if config.tie_word_embeddings else 2)
    size = config.hidden_size * (tables + config.num_hidden_layers * (heads + blocks))
    share = f" in {shard.size} shares" if shard.size > 1 else ""
    return (f"the weights of {config.name} take about {size * dtype.itemsize / 2**30:,.1f} GiB in "
            f"{str(dtype)[6:]}{share}, which are not free here: vocab_size={config.vocab_size}, "
            f"hidden_size={config.hidden_size}, {config.num_hidden_layers} layers; take a smaller "
            f"model or dtype, or correct its config.json")


def check_split(config: ModelConfig, shard: Shard) -> None:
    """ConfigError, naming what cannot be split evenly, if the ranks cannot share this model."""
    for what in ("num_attention_heads", "intermediate_size", "moe_intermediate_size"):
        shard.share(getattr(config, what), what)
    shard.of_kv_heads(config.num_key_value_heads)
