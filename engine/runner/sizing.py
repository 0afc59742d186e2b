"""How large the KV pool is and how long a request may get, with the arithmetic in the errors."""

from __future__ import annotations

import os
import warnings

import torch

from engine.config import EngineConfig
from engine.core.errors import ConfigError
from engine.models.config import ModelConfig
from engine.runner.kv_cache import block_bytes

MIB = 2**20
DEFAULT_CPU_BUDGET = 1024 * MIB


class TandemWarning(UserWarning):
    """A setting that was changed to one that works; the message has the numbers."""


def plan_pool(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> tuple[int, int]:
    """(num_blocks, max_model_len) for this model under this config, on a CPU.

    The pool is num_kvcache_blocks, or what kv_cache_bytes (1 GiB by default, at most a quarter of
    the free memory) holds, but no more than max_num_seqs requests could ever fill. max_model_len
    is lowered, with a TandemWarning, to what the pool holds. ConfigError if that is not one block.
    """
    longest = _longest(config, model)
    size = block_bytes(model.num_hidden_layers, config.kvcache_block_size,
                       model.num_key_value_heads, model.head_dim, dtype.itemsize)
    num_blocks = config.num_kvcache_blocks
    if num_blocks is None:
        budget = config.kv_cache_bytes or min(DEFAULT_CPU_BUDGET, free_memory() // 4)
        if budget < size:
            raise ConfigError(f"one KV block of {config.kvcache_block_size} tokens of {model.name} "
                              f"takes {size} bytes, the budget is {budget}: raise kv_cache_bytes "
                              f"or lower kvcache_block_size")
        usable = config.max_num_seqs * -(-longest // config.kvcache_block_size)
        num_blocks = min(budget // size, usable)
    elif num_blocks * size > free_memory():
        raise ConfigError(f"num_kvcache_blocks={num_blocks} take {num_blocks * size / MIB:,.0f} MiB"
                          f" of KV cache, {free_memory() / MIB:,.0f} MiB are free: at most "
                          f"{free_memory() // size} blocks fit")
    held = num_blocks * config.kvcache_block_size
    if held < longest:
        warnings.warn(f"max_model_len lowered from {longest} to {held}: the pool holds "
                      f"{num_blocks} blocks of {config.kvcache_block_size} tokens "
                      f"({num_blocks * size / MIB:.0f} MiB)", TandemWarning, stacklevel=3)
        longest = held
    return num_blocks, longest


def _longest(config: EngineConfig, model: ModelConfig) -> int:
    """max_model_len before the pool is asked: what the user wants and the model can."""
    trained = model.max_position_embeddings
    if model.rope.type in ("linear", "dynamic"):
        trained = int(trained * float(model.rope.scaling.get("factor") or 1.0))
    elif model.rope.type == "yarn":
        scaling = model.rope.scaling
        first = scaling.get("original_max_position_embeddings") or trained
        trained = max(trained, int(first * float(scaling.get("factor") or 1.0)))
    window = model.sliding_window
    able = trained if window is None else min(trained, window)
    if config.max_model_len is None:
        return able
    if config.max_model_len > able:
        why = "is trained for" if able == trained else "attends fully only within"
        raise ConfigError(f"max_model_len={config.max_model_len} is more than the {able} tokens "
                          f"that {model.name} {why}: lower it to {able}")
    return config.max_model_len


def free_memory() -> int:
    """Bytes of this machine that nothing uses; 4 GiB where the system does not tell."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # not on every system
        return 4 * DEFAULT_CPU_BUDGET
