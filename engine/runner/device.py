"""Which device a rank computes on."""

from __future__ import annotations

import os

import torch

from engine.core.errors import ConfigError
from engine.layers.shard import Shard


def pick_device(name: str, shard: Shard) -> torch.device:
    """The device called `name` ("auto": a GPU where there is one) for this rank: each its own GPU.
    ConfigError if there is no such device here, or fewer GPUs than ranks on this machine."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device={name!r} is not known; known: auto, cpu, cuda, cuda:N") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ConfigError(f"device={name!r} is not served here; known: auto, cpu, cuda, cuda:N")
    if not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}: PyTorch finds no GPU here; take device=\"cpu\"")
    return torch.device("cuda", _index(device, shard, torch.cuda.device_count()))


def _index(device: torch.device, shard: Shard, num_gpus: int) -> int:
    """The GPU of this rank, of `num_gpus` on this machine."""
    local = shard.rank
    if os.environ.get("WORLD_SIZE") == str(shard.size):  # of the group that torchrun started
        local = int(os.environ.get("LOCAL_RANK", shard.rank))
    index = (device.index or 0) + local
    if index >= num_gpus:
        whose = f" for rank {shard.rank} of {shard.size}" if shard.size > 1 else ""
        raise ConfigError(f"device cuda:{index}{whose} is not here: this machine has {num_gpus} "
                          f"GPU{'s' if num_gpus != 1 else ''}; lower tensor_parallel_size, or take "
                          f"device=\"cpu\"")
    return index
