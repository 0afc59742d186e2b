"""Llama, and whoever shares its shape: SmolLM2, TinyLlama, Mistral."""

from __future__ import annotations

import torch
from torch import nn

from engine.layers.embedding import LMHead, VocabEmbedding
from engine.layers.kernels import LayerKernels
from engine.layers.linear import ColumnLinear, RowLinear
from engine.layers.mlp import GatedMLP
from engine.layers.norm import RMSNorm
from engine.layers.rope import rotate
from engine.layers.shard import Shard
from engine.models.config import ModelConfig
from engine.models.step import ModelStep


class LlamaAttention(nn.Module):
    """Grouped-query attention; q, k and v come from one matrix product."""

    qkv_bias: bool | None = None  # None: as config.attention_bias says

    def __init__(self, config: ModelConfig, layer: int, shard: Shard, dtype: torch.dtype):
        super().__init__()
        self.layer = layer
        self.head_dim = dim = config.head_dim
        self.heads = shard.share(config.num_attention_heads, "num_attention_heads")
        kv_shard = shard.of_kv_heads(config.num_key_value_heads)
        self.kv_heads = kv_shard.share(config.num_key_value_heads, "num_key_value_heads")
        sizes = {"q_proj": config.num_attention_heads * dim,
                 "k_proj": config.num_key_value_heads * dim,
                 "v_proj": config.num_key_value_heads * dim}
        bias = config.attention_bias if self.qkv_bias is None else self.qkv_bias
        self.qkv_proj = ColumnLinear(config.hidden_size, sizes, shard, dtype, bias,
                                     {"k_proj": kv_shard, "v_proj": kv_shard})
        self.o_proj = RowLinear(config.num_attention_heads * dim, config.hidden_size, shard, dtype,
                                config.attention_bias)
        self.kernels: LayerKernels | None = None

    def use_kernels(self, kernels: LayerKernels) -> None:
        self.kernels = kernels if kernels.fits(self.head_dim // 2) else None

    def forward(self, x: torch.Tensor, step: ModelStep) -> torch.Tensor:
        # [tokens, heads + 2 kv_heads, head_dim]: q, k, v side by side
        qkv = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
        qk = rotate(self.normalize(qk), step.cos, step.sin, self.kernels)
        q, k = qk.split((self.heads, self.kv_heads), dim=1)
        return self.o_proj(step.attend(self.layer, q, k, v))

    def normalize(self, qk: torch.Tensor) -> torch.Tensor:
        """What some families do to q and k before they are rotated; nothing here."""
        return qk


class LlamaLayer(nn.Module):
    """Attention and feed-forward, each on the normalised residual stream."""

    attention_class: type[LlamaAttention] = LlamaAttention

    def __init__(self, config: ModelConfig, layer: int, shard: Shard, dtype: torch.dtype):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = self.attention_class(config, layer, shard, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = self.make_mlp(config, layer, shard, dtype)

    def make_mlp(self, config: ModelConfig, layer: int, shard: Shard,
                 dtype: torch.dtype) -> nn.Module:
        """The layer's feed-forward block."""
        return GatedMLP(config.hidden_size, config.intermediate_size, shard, dtype,
                        config.mlp_bias)

    def forward(self, x: torch.Tensor, step: ModelStep) -> torch.Tensor:
        attended = self.self_attn(self.input_layernorm(x), step)
        normed, x = self.post_attention_layernorm(x, attended)  # of their sum, and the sum
        return self.mlp(normed).add_(x)


class LlamaModel(nn.Module):
    """Embedding, layers, last norm: ids [tokens] to vectors [sampling rows, hidden]."""

    def __init__(self, config: ModelConfig, layer_class: type[LlamaLayer], shard: Shard,
                 dtype: torch.dtype):
        super().__init__()
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, shard, dtype)
        self.layers = nn.ModuleList(layer_class(config, index, shard, dtype)
                                    for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)

    def forward(self, ids: torch.Tensor, step: ModelStep) -> torch.Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, step)
        wanted = step.logits_indices
        return self.norm(x if wanted is None else x.index_select(0, wanted))


class LlamaForCausalLM(nn.Module):
    """The whole model: logits [sampling rows, vocabulary] of the tokens that `step` asks for."""

    layer_class: type[LlamaLayer] = LlamaLayer

    @property
    def why_no_graphs(self) -> str | None:
        """What keeps decode steps out of CUDA graphs; None: nothing does."""
        return None

    def __init__(self, config: ModelConfig, shard: Shard, dtype: torch.dtype):
        super().__init__()
        self.config = config
        self.model = LlamaModel(config, self.layer_class, shard, dtype)
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, shard, dtype,
                              self.model.embed_tokens if config.tie_word_embeddings else None)

    def forward(self, ids: torch.Tensor, step: ModelStep) -> torch.Tensor:
        return self.lm_head(self.model(ids, step))
