"""What a model's layers see of one step: the tokens' rotary angles, and somewhere to attend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class Attend(Protocol):
    """Writes k and v [tokens, kv_heads, head_dim] of all rows to layer `layer`'s cache, then
    returns the attention of q [tokens, heads, head_dim] over each row's whole context, as
    [tokens, heads * head_dim]."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor,
                 v: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class ModelStep:
    """One step's context, the same for every layer."""

    cos: torch.Tensor  # [tokens, 1, head_dim], model dtype
    sin: torch.Tensor
    attend: Attend
    logits_indices: torch.Tensor | None  # [sampling rows] int64: the flat tokens whose logits are
    # wanted; None: all
