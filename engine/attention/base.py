"""What every attention back end is given, and what it must do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's flat tokens, rows one after the other. Everything is host memory (numpy), built
    without a Python loop over tokens; a back end moves what its kernels read.

    Row r owns tokens [cu_seqlens_q[r], cu_seqlens_q[r + 1]), the last of the first `seqlens_k[r]`
    positions of its request: causal masks are aligned at the bottom right. Rows may come in any
    order; the runner sorts decodes first, by context length, which lets back ends take slices.
    """

    input_ids: np.ndarray  # [tokens] int64
    positions: np.ndarray  # [tokens] int64
    slot_mapping: np.ndarray  # [tokens] int64: block * block_size + offset; -1: write nothing
    cu_seqlens_q: np.ndarray  # [rows + 1] int32
    seqlens_k: np.ndarray  # [rows] int32: tokens of context, those of this step included
    block_tables: np.ndarray  # [rows, most blocks of a row] int32, padded with any valid block
    logits_indices: np.ndarray  # [sampling rows] int64: the last token of each, as a flat index


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a back end is built for. Heads are those of one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    device: torch.device


class AttentionBackend(Protocol):
    """Attention over a paged cache.

    A layer's caches are [num_blocks + 1, block_size, kv_heads, head_dim]; the last block is the
    padding block, which is zero and stays zero. Slots that hold no token of a row may hold
    anything, NaN included, and must not show in the output.
    """

    name: str

    def plan(self, inputs: StepInputs, num_blocks: int) -> Any:
        """Whatever all layers of one step share: index tensors, masks, work lists."""
        ...

    def attend(self, plan: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
               k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        """Write k, v [tokens, kv_heads, head_dim] to their slots, then attend: [tokens, heads *
        head_dim]. All rows are written before any row reads: rows of one step may share blocks."""
        ...
