"""What the core can be told. Plain numbers and policy names; nothing about models or devices."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.errors import ConfigError

MOST_BLOCKS = 50_000_000  # about 5 GB of book-keeping


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The scheduler's and the block manager's settings. Names are vLLM's where vLLM has the thing.

    Raises ConfigError, naming the value, the limit and the way out, when a setting cannot work.
    """

    num_blocks: int  # KV blocks of the device pool
    block_size: int = 16  # tokens a block
    max_model_len: int = 2048  # tokens a request may reach, prompt and output together
    max_num_batched_tokens: int = 2048  # token budget of one step
    max_num_seqs: int = 128  # requests running at once
    num_cpu_blocks: int = 0  # blocks of the swap pool; used by preemption="swap" only
    long_prefill_token_threshold: int = 0  # longest chunk while others are there; 0: no cap
    watermark: float = 0.0  # share of the pool an admission leaves free while others run
    enable_prefix_caching: bool = True
    full_sequence_must_fit: bool = True  # admit only what could be held whole (no chunk-only start)
    batching: str = "mixed"
    order: str = "fcfs"
    preemption: str = "recompute"
    eviction: str = "lru"

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_model_len", "max_num_batched_tokens",
                     "max_num_seqs"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least 1")
        for name in ("num_cpu_blocks", "long_prefill_token_threshold"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least 0")
        for name in ("enable_prefix_caching", "full_sequence_must_fit"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be True or False")
        if self.num_blocks > MOST_BLOCKS:
            raise ConfigError(f"num_blocks={self.num_blocks} is more than the {MOST_BLOCKS} blocks "
                              f"a scheduler can keep books on: take fewer or larger blocks")
        if type(self.watermark) not in (int, float) or not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark={self.watermark!r} must lie in [0, 1)")
        if self.max_model_len < 2:
            raise ConfigError("max_model_len=1 leaves no room for a prompt token and an output "
                              "token: give at least 2, and a pool of at least 2 token slots")
        held = self.num_blocks * self.block_size
        if held < self.max_model_len:
            need = -(-self.max_model_len // self.block_size)
            raise ConfigError(
                f"max_model_len={self.max_model_len} needs {need} blocks of {self.block_size} "
                f"tokens, the pool has {self.num_blocks}: lower max_model_len to {held} "
                f"or give the pool {need} blocks")
