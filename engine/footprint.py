"""What a model takes of a memory budget: weights, activations, and the KV blocks that are left."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Any

import torch

from engine.core.errors import ConfigError
from engine.layers.shard import ALONE
from engine.models.config import ModelConfig
from engine.models.registry import build_model
from engine.runner.graphs import LARGEST
from engine.runner.kv_cache import block_bytes

MIB = 2**20
MOST_BYTES = 2**60
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class TooLittleMemory(ConfigError):
    """A budget that cannot hold the model and one request; the message has the arithmetic."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes, where a name does not say tokens, blocks or requests."""

    budget: int
    weights: dict[str, int]  # by part of the model
    activations: int  # estimated: the largest set of tensors alive in one full step
    graphs: int  # estimated: the same of the largest recorded decode; 0 without CUDA graphs
    kv_per_token: int
    kv_per_block: int
    block_size: int
    request_tokens: int  # the length of request that `requests` counts
    blocks: int
    requests: int  # of that length, at once

    @property
    def total_weights(self) -> int:
        return sum(self.weights.values())

    @property
    def kv_budget(self) -> int:
        return self.budget - self.total_weights - self.activations - self.graphs

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "total_weights": self.total_weights, "kv_budget": self.kv_budget,
                "activations_are": "estimated", "graphs_are": "estimated",
                "tokens": self.blocks * self.block_size}


def plan_footprint(config: ModelConfig, dtype: torch.dtype, *, budget: int, block_size: int,
                   step_tokens: int, num_seqs: int, request_tokens: int,
                   graphs: bool = False) -> Footprint:
    """The budget, divided. `graphs`: decodes are recorded as CUDA graphs, which keep their tensors.
    TooLittleMemory if not one request of `request_tokens` is left."""
    weights = weight_bytes(config, dtype)
    activations = activation_bytes(config, dtype.itemsize, step_tokens, num_seqs)
    token = config.kv_bytes_per_token(dtype.itemsize)
    block = block_bytes(config.num_hidden_layers, block_size, config.num_key_value_heads,
                        config.head_dim, dtype.itemsize)
    kept = activation_bytes(config, dtype.itemsize, min(num_seqs, LARGEST), 0) if graphs else 0
    left = budget - sum(weights.values()) - activations - kept
    blocks = max(left // block - 1, 0)  # one block is the padding block
    each = -(-request_tokens // block_size)
    if blocks < each:
        held = sum(weights.values())
        need = held + activations + kept + (each + 1) * block
        recorded = f"graphs {size_text(kept)} + " if graphs else ""
        raise TooLittleMemory(
            f"{config.name} does not fit {size_text(budget)}: weights {size_text(held)} + "
            f"activations {size_text(activations)} + {recorded}{each} + 1 KV blocks of "
            f"{size_text(block)} "
            f"for one request of {request_tokens} tokens make {size_text(need)}, which is "
            f"{size_text(need - budget)} more: raise the budget, or count shorter requests or "
            f"steps of fewer tokens")
    return Footprint(budget, weights, activations, kept, token, block, block_size, request_tokens,
                     blocks, blocks // each)


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> dict[str, int]:
    """Bytes of the parameters by part; a tied head counts once, as the embedding. No memory is
    taken for it."""
    with torch.device("meta"):
        model = build_model(config, ALONE, dtype)
    parts = dict.fromkeys(("embedding", "attention", "feed-forward", "norms", "head"), 0)
    for name, parameter in model.named_parameters():  # a shared parameter comes once
        parts[_part(name)] += parameter.numel() * parameter.element_size()
    return parts


def _part(name: str) -> str:
    for mark, part in (("norm", "norms"), ("embed_tokens", "embedding"), ("self_attn", "attention"),
                       ("lm_head", "head")):
        if mark in name:
            return part
    return "feed-forward"


def activation_bytes(config: ModelConfig, itemsize: int, step_tokens: int, num_seqs: int) -> int:
    """The most that one step keeps alive, estimated from the shapes.

    Beside the residual stream and its normalised copy [tokens, hidden] live either q, k, v, their
    rotated copies and the attention's output, or gate and up twice (each expert's, where a token
    has several, with a copy of the token). The logits of all sequences
    come after the layers, in the model's dtype and once more in float32, which sampling needs.
    """
    hidden = config.hidden_size
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    attention = 2 * heads + config.num_attention_heads * config.head_dim
    experts = config.num_experts_per_tok * (hidden + 3 * config.moe_intermediate_size)
    inner = max(attention, 3 * config.intermediate_size, experts)
    layer = step_tokens * (2 * hidden + inner) * itemsize
    head = num_seqs * config.vocab_size * (itemsize + 4) + step_tokens * hidden * itemsize
    return max(layer, head)


def parse_size(text: str) -> int:
    """Bytes of `512MiB`, `1.5G`, `800000`. ConfigError if that is no size."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?\s*", text.upper())
    if found is None:
        raise ConfigError(f"{text!r} is no amount of memory: write a number of bytes, 512MiB or "
                          f"1.5GiB")
    size = int(Decimal(found[1]) * UNITS[found[2]])
    if size > MOST_BYTES:
        raise ConfigError(f"{text if len(text) <= 40 else text[:37] + '...'!r} is more memory than "
                          f"any machine has: write at most {MOST_BYTES // UNITS['T']}TiB")
    return size


def size_text(size: int) -> str:
    """A size as people write it."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(size) >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size} bytes"
