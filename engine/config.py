"""The real engine's settings, under the names people know from vLLM and nano-vllm."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, fields
from typing import Any

from engine.core.config import SchedulerConfig
from engine.core.errors import ConfigError

ALIASES = {"block_size": "kvcache_block_size", "num_kv_blocks": "num_kvcache_blocks",
           "num_gpu_blocks_override": "num_kvcache_blocks", "attention": "attention_backend"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything an LLM can be told. Build it with `make_config`, which checks the names.

    ConfigError names the value and the way out; what the scheduler alone reads, it checks itself.
    """

    model: str  # tiny, smollm2, a directory, or a hub id
    dtype: str = "auto"  # auto: the checkpoint's, float32 on a CPU; or float32, bfloat16, float16…
    load_format: str = "auto"  # dummy: random weights, for timing
    attention_backend: str = "auto"
    tensor_parallel_size: int = 1  # processes that share the model; under torchrun: all of its
    device: str = "auto"  # cuda where there is a GPU, else cpu; or cpu, cuda, cuda:1
    enforce_eager: bool = False  # never record CUDA graphs
    compile: bool = False  # torch.compile the layers between attentions
    overlap: bool | None = None  # start a step while the last one runs; None: on CUDA
    seed: int = 0  # of requests that bring none
    max_model_len: int | None = None  # None: what the model was trained for
    max_num_batched_tokens: int = 2048  # token budget of one step
    max_num_seqs: int = 128  # requests running at once
    kvcache_block_size: int = 16  # tokens a block
    num_kvcache_blocks: int | None = None  # None: what the memory budget holds
    kv_cache_bytes: int | None = None  # memory budget of the pool; None: see runner/sizing.py
    gpu_memory_utilization: float = 0.9  # of a GPU's memory; a CPU pool goes by kv_cache_bytes
    num_cpu_blocks: int | None = None  # swap pool; None: as many as the device's under "swap"
    long_prefill_token_threshold: int = 0  # longest chunk while others are there; 0: no cap
    watermark: float = 0.0  # share of the pool an admission leaves free
    enable_prefix_caching: bool = True
    full_sequence_must_fit: bool = True
    batching: str = "mixed"
    order: str = "fcfs"
    preemption: str = "recompute"
    eviction: str = "lru"

    def __post_init__(self) -> None:
        for name in ("max_model_len", "num_kvcache_blocks", "kv_cache_bytes"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name}={value!r} must be a whole number of at least 1, or None")
        if None not in (self.num_kvcache_blocks, self.kv_cache_bytes):
            raise ConfigError(f"num_kvcache_blocks={self.num_kvcache_blocks} and kv_cache_bytes="
                              f"{self.kv_cache_bytes} both say how large the pool is: give one")
        for name in ("tensor_parallel_size", "kvcache_block_size", "max_num_seqs",
                     "max_num_batched_tokens"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least 1")
        for name in ("enforce_eager", "compile", "overlap"):
            value = getattr(self, name)
            if type(value) is not bool and not (name == "overlap" and value is None):
                raise ConfigError(f"{name}={value!r} must be True or False")
        if type(self.seed) is not int:
            raise ConfigError(f"seed={self.seed!r} must be a whole number")
        utilization = self.gpu_memory_utilization
        if type(utilization) not in (int, float) or not 0.0 < utilization <= 1.0:
            raise ConfigError(f"gpu_memory_utilization={self.gpu_memory_utilization!r} must lie in "
                              f"(0, 1]")
        if self.load_format not in ("auto", "dummy"):
            raise ConfigError(f"load_format={self.load_format!r} is not known; known: auto, dummy")

    def scheduler_config(self, num_blocks: int, max_model_len: int) -> SchedulerConfig:
        """The core's part, with the pool that memory allows."""
        shared = {field.name for field in fields(SchedulerConfig)} & {
            field.name for field in fields(self)}
        values = {name: getattr(self, name) for name in shared}
        swap = self.num_cpu_blocks
        if swap is None:
            swap = num_blocks if self.preemption == "swap" else 0
        values.update(num_blocks=num_blocks, block_size=self.kvcache_block_size,
                      max_model_len=max_model_len, num_cpu_blocks=swap)
        return SchedulerConfig(**values)


def make_config(model: str, **options: Any) -> EngineConfig:
    """An EngineConfig from keywords; aliases are taken, an unknown one is an error that names the
    nearest known one. Options that are None take their default."""
    known = [field.name for field in fields(EngineConfig)]
    values: dict[str, Any] = {}
    for given, value in options.items():
        name = ALIASES.get(given, given)
        if name not in known:
            near = difflib.get_close_matches(given, [*known, *ALIASES], n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"the engine has no setting {given!r}; {hint}")
        if name in values:
            raise ConfigError(f"{given} and {name} are the same setting: give one of them")
        if value is not None:
            values[name] = value
    try:
        return EngineConfig(model=str(model), **values)
    except ConfigError as error:  # says the field; the user knows what they wrote
        words = str(error)
        for given in options:
            words = re.sub(rf"\b{ALIASES.get(given, given)}\b", given, words)
        raise ConfigError(words) from None
