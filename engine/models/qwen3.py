"""Qwen3: Llama with q and k normalised head by head before they are rotated."""

from __future__ import annotations

import torch

from engine.layers.norm import RMSNorm
from engine.layers.shard import Shard
from engine.models.config import ModelConfig
from engine.models.llama import LlamaAttention, LlamaForCausalLM, LlamaLayer


class Qwen3Attention(LlamaAttention):
    """One weight vector [head_dim] for all query heads, one for all key heads."""

    def __init__(self, config: ModelConfig, layer: int, shard: Shard, dtype: torch.dtype):
        super().__init__(config, layer, shard, dtype)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype)

    def normalize(self, qk: torch.Tensor) -> torch.Tensor:
        q, k = qk.split((self.heads, self.kv_heads), dim=1)
        return torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)


class Qwen3Layer(LlamaLayer):
    attention_class = Qwen3Attention


class Qwen3ForCausalLM(LlamaForCausalLM):
    layer_class = Qwen3Layer
