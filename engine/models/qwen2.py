"""Qwen2 and Qwen2.5: Llama with a bias on q, k and v."""

from __future__ import annotations

from engine.models.llama import LlamaAttention, LlamaForCausalLM, LlamaLayer


class Qwen2Attention(LlamaAttention):
    """Always biased, though Qwen2's config says nothing of it."""

    qkv_bias = True


class Qwen2Layer(LlamaLayer):
    attention_class = Qwen2Attention


class Qwen2ForCausalLM(LlamaForCausalLM):
    layer_class = Qwen2Layer
