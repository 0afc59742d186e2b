"""How large the KV pool is and how long a request may get, with the arithmetic in the errors."""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.core.errors import ConfigError
from engine.footprint import TooLittleMemory, size_text
from engine.models.config import ModelConfig
from engine.runner.kv_cache import block_bytes

MIB = 2**20
DEFAULT_CPU_BUDGET = 1024 * MIB


class TandemWarning(UserWarning):
    """A setting that was changed to one that works; the message has the numbers."""


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """A GPU's memory in bytes, as runner/profiling.py measured it."""

    total: int
    outside: int  # not PyTorch's of this process: other processes, CUDA's own
    weights: int  # allocated once the model is loaded
    activations: int = 0  # the most that the largest step allocates beside them
    graphs: int = 0  # what recording all CUDA graphs takes

    @property
    def free(self) -> int:
        return self.total - self.outside - self.weights

    def budget(self, utilization: float) -> int:
        """What is left for the KV pool of `utilization` times the GPU's memory."""
        return int(self.total * utilization) - (self.outside + self.weights + self.activations
                                                + self.graphs)

    def arithmetic(self, utilization: float) -> str:
        """budget() as a sum in words."""
        return (f"{utilization:g} of {size_text(self.total)} is "
                f"{size_text(int(self.total * utilization))}; outside this engine "
                f"{size_text(self.outside)}, weights {size_text(self.weights)}, activations "
                f"{size_text(self.activations)} and graphs {size_text(self.graphs)} leave "
                f"{size_text(self.budget(utilization))}")


def plan_pool(config: EngineConfig, model: ModelConfig, dtype: torch.dtype,
              gpu: GpuMemory | None = None) -> tuple[int, int]:
    """(num_blocks, max_model_len) for this model under this config, on a CPU or on `gpu`.

    The pool is num_kv_blocks, or what kv_cache_bytes holds; by default what gpu_memory_
    utilization leaves of a GPU, or on a CPU 1 GiB and at most a quarter of the free memory. It is
    no more than max_num_seqs requests could ever fill. max_model_len is lowered, with a
    TandemWarning, to what the pool holds. ConfigError, TooLittleMemory if that is not one block.
    """
    longest = longest_request(config, model)
    size = block_bytes(model.num_hidden_layers, config.kvcache_block_size,
                       model.num_key_value_heads, model.head_dim, dtype.itemsize)
    free = free_memory() if gpu is None else gpu.free
    num_blocks = config.num_kvcache_blocks
    if num_blocks is None:
        usable = config.max_num_seqs * -(-longest // config.kvcache_block_size)
        num_blocks = min(_blocks_of_budget(config, model, size, gpu), usable)
    if num_blocks * size > free:
        raise ConfigError(f"a pool of {num_blocks} blocks takes {num_blocks * size / MIB:,.0f} MiB "
                          f"of KV cache, {free / MIB:,.0f} MiB are free: at most "
                          f"{max(free // size, 0)} blocks fit")
    held = num_blocks * config.kvcache_block_size
    if held < longest:
        warnings.warn(f"max_model_len lowered from {longest} to {held}: the pool holds "
                      f"{num_blocks} blocks of {config.kvcache_block_size} tokens "
                      f"({num_blocks * size / MIB:.0f} MiB)", TandemWarning, stacklevel=3)
        longest = held
    return num_blocks, longest


def _blocks_of_budget(config: EngineConfig, model: ModelConfig, size: int,
                      gpu: GpuMemory | None) -> int:
    """How many blocks of `size` bytes the memory budget holds: at least 1, or an error."""
    if gpu is not None and config.kv_cache_bytes is None:
        share = config.gpu_memory_utilization
        blocks = gpu.budget(share) // size - 1  # one more is the padding block
        if blocks < 1:
            raise TooLittleMemory(
                f"no KV cache fits for {model.name}: gpu_memory_utilization="
                f"{gpu.arithmetic(share)}, and 1 + 1 blocks of {config.kvcache_block_size} tokens "
                f"take {size_text(2 * size)}: raise gpu_memory_utilization, lower "
                f"max_num_batched_tokens or max_num_seqs, or free memory of the GPU")
        return blocks
    free = free_memory() if gpu is None else gpu.free
    budget = config.kv_cache_bytes or min(DEFAULT_CPU_BUDGET, free // 4)
    if budget < size:
        raise ConfigError(f"one KV block of {config.kvcache_block_size} tokens of {model.name} "
                          f"takes {size} bytes, the budget is {budget}: raise kv_cache_bytes "
                          f"or take smaller blocks")
    if gpu is not None and budget > free:
        raise ConfigError(f"kv_cache_bytes={budget} is {size_text(budget)}, and "
                          f"{size_text(free)} of the GPU are free: lower it")
    return budget // size


def check_swap_pool(num_cpu_blocks: int, size: int) -> None:
    """ConfigError if the swap pool's blocks of `size` bytes do not fit this machine's memory."""
    if num_cpu_blocks * size > free_memory():
        raise ConfigError(f"num_cpu_blocks={num_cpu_blocks} take {size_text(num_cpu_blocks * size)}"
                          f" of this machine's memory, {size_text(free_memory())} are free: at "
                          f"most {free_memory() // size} fit, or take preemption=\"recompute\"")


def longest_request(config: EngineConfig, model: ModelConfig) -> int:
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
    """Bytes of this machine that can be had without swapping, files that are only kept in memory
    included; where the system does not tell these apart, what nothing uses; else 4 GiB."""
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvail")) * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # not on every system
        return 4 * DEFAULT_CPU_BUDGET
