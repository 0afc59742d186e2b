"""Rotary position embedding: frequencies by type, tables, and the rotation itself.

The frequency rules are those of the papers (linear and "NTK" interpolation, YaRN, Llama 3.1) as
Hugging Face checkpoints parametrise them; tables are made in float32, as transformers makes them,
whatever the model's dtype, so that logits can be compared.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from engine.layers.kernels import LayerKernels
from engine.models.config import ModelConfig
from engine.weights.errors import UnsupportedModel


class RopeTable:
    """cos and sin of every position below `max_len`, [max_len, 1, head_dim], in the model dtype."""

    def __init__(self, config: ModelConfig, max_len: int, dtype: torch.dtype,
                 device: torch.device | str = "cpu"):
        inv_freq, scale = frequencies(config, max_len)
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), inv_freq)
        cos, sin = angles.cos() * scale, angles.sin() * scale
        # rotate() swaps the halves without negating, so the sign of the first half lives here.
        self.cos = torch.cat((cos, cos), -1).to(dtype).unsqueeze(1).to(device)
        self.sin = torch.cat((-sin, sin), -1).to(dtype).unsqueeze(1).to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) of `positions` [tokens]: [tokens, 1, head_dim] each."""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
           kernels: LayerKernels | None = None) -> torch.Tensor:
    """`x` [tokens, heads, head_dim] turned by its tokens' angles; the halves are the pairs. With
    `kernels`, which must fit head_dim / 2, in place."""
    if kernels is not None:
        return kernels.rotate(x, cos, sin)
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return torch.addcmul(x * cos, swapped, sin)


def frequencies(config: ModelConfig, max_len: int) -> tuple[torch.Tensor, float]:
    """Angle a position adds for each pair of channels, [head_dim / 2] float32, and the factor on
    cos and sin (1 but for yarn).

    `dynamic` depends on how long a sequence is. A paged cache keeps old keys, so one answer must
    hold for a request's whole life: it is the answer for `max_len`, the longest it may become.
    UnsupportedModel if the config's numbers give none: each in its range, but not together.
    """
    try:
        inv_freq, scale = _by_type(config, max_len)
    except (ArithmeticError, ValueError):  # a division by zero, a power or a logarithm of nothing
        inv_freq, scale = torch.tensor(math.nan), math.nan
    if not (math.isfinite(scale) and bool(inv_freq.isfinite().all())):
        numbers = {"rope_theta": config.rope.theta, "head_dim": config.head_dim,
                   **config.rope.scaling}
        said = ", ".join(f"{key}={value}" for key, value in numbers.items())
        raise UnsupportedModel(f"{config.name}: rope type {config.rope.type!r} gives no finite "
                               f"angles with {said}: correct config.json")
    return inv_freq, scale


def _by_type(config: ModelConfig, max_len: int) -> tuple[torch.Tensor, float]:
    """frequencies(), unchecked."""
    rope, dim = config.rope, config.head_dim
    read = _Scaling(config)
    if rope.type == "dynamic":
        return _dynamic(config, read, max_len), 1.0
    inv_freq = _plain(rope.theta, dim)
    if rope.type == "linear":
        return inv_freq / read("factor"), 1.0
    if rope.type == "llama3":
        return _llama3(inv_freq, read), 1.0
    if rope.type == "yarn":
        return _yarn(config, inv_freq, read)
    return inv_freq, 1.0


class _Scaling:
    """Reads a type's numbers; UnsupportedModel names the one that is missing or no number."""

    def __init__(self, config: ModelConfig):
        self.config = config

    def __call__(self, key: str, default: Any = None) -> float:
        value = self.config.rope.scaling.get(key)
        value = default if value is None else value
        if not isinstance(value, (int, float)):
            raise UnsupportedModel(f"{self.config.name}: rope type {self.config.rope.type!r} needs "
                                   f"a number for {key!r}, the config has {value!r}")
        return float(value)


def _plain(theta: float, dim: int) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)


def _dynamic(config: ModelConfig, read: _Scaling, max_len: int) -> torch.Tensor:
    """NTK-aware: a larger base once sequences outgrow the trained length."""
    dim, factor, trained = config.head_dim, read("factor"), config.max_position_embeddings
    stretch = factor * max(max_len, trained) / trained - (factor - 1.0)
    return _plain(config.rope.theta * stretch ** (dim / (dim - 2)), dim)


def _llama3(inv_freq: torch.Tensor, read: _Scaling) -> torch.Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between blended."""
    factor, low, high = read("factor"), read("low_freq_factor"), read("high_freq_factor")
    trained = read("original_max_position_embeddings")
    waves = trained / (2 * math.pi / inv_freq)  # periods within the trained length
    keep = ((waves - low) / (high - low)).clamp(0.0, 1.0)
    return keep * inv_freq + (1.0 - keep) * inv_freq / factor


def _yarn(config: ModelConfig, inv_freq: torch.Tensor,
          read: _Scaling) -> tuple[torch.Tensor, float]:
    """Fast channels kept, slow ones interpolated, a ramp between, and attention sharpened."""
    dim, theta = config.head_dim, config.rope.theta
    trained = read("original_max_position_embeddings", config.max_position_embeddings)
    factor = read("factor")

    def channel(turns: float) -> float:  # the channel that turns so often in the trained length
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = channel(read("beta_fast", 32.0)), channel(read("beta_slow", 1.0))
    if config.rope.scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - first) / max(last - first, 0.001)
    slow = ramp.clamp(0.0, 1.0)
    mixed = inv_freq / factor * slow + inv_freq * (1.0 - slow)
    return mixed, _yarn_scale(config, factor, read)


def _yarn_scale(config: ModelConfig, factor: float, read: _Scaling) -> float:
    def sharpen(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    scaling = config.rope.scaling
    if scaling.get("attention_factor") is not None:
        return read("attention_factor")
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return sharpen(read("mscale")) / sharpen(read("mscale_all_dim"))
    return sharpen(1.0)
