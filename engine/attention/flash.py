"""The `flash` back end: calls into flash-attn 2, or flash-attn 3 on Hopper where it is found.

flash-attn 2 (package flash-attn): rows of one token that lie first go through
flash_attn_with_kvcache, which splits long contexts; all others through flash_attn_varlen_func.
Its pages must be a multiple of 256 tokens. flash-attn 3 (module flash_attn_interface, built from
the repository's hopper folder): flash_attn_with_kvcache takes rows of any number of tokens, pages
of any size. Both align causal masks at the bottom right, give 0 where a query sees nothing, and
read no slot past a row's length. Paper: FlashAttention-2 (Dao 2023), FlashAttention-3 (Shah et al.
2024).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch

from engine.attention.base import AttentionShape, StepInputs
from engine.attention.upload import upload
from engine.core.errors import ConfigError
from engine.mistakes import reason_of

DTYPES = (torch.float16, torch.bfloat16)
PAGE_MULTIPLE = 256  # flash-attn 2 only
LARGEST_HEAD_DIM = 256
MODULES = {3: "flash_attn_interface", 2: "flash_attn"}  # tried in this order
PACKAGES = {3: "flash-attn 3 (hopper)", 2: "flash-attn"}

Store = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Library:
    """One of the two packages."""

    version: int  # 2 or 3
    module: Any


@dataclass(frozen=True, slots=True)
class Plan:
    """One step's index tensors, on the device; the counts are host numbers."""

    slots: torch.Tensor  # [tokens] int64
    seqlens_k: torch.Tensor  # [rows] int32
    tables: torch.Tensor  # [rows, width] int32
    decodes: int  # rows of one token that lie first: tokens [0, decodes)
    cu_seqlens_q: torch.Tensor  # [other rows + 1] int32, from 0
    cu_seqlens_k: torch.Tensor  # [other rows + 1] int32, from 0
    most_queries: int  # of the other rows
    longest: int  # context of the other rows
    fresh: bool  # no other row has older context: K and V of this step are all of it


def unavailable(shape: AttentionShape) -> str | None:
    """Why this back end cannot serve `shape` here; None: it can."""
    found = find_library(shape)
    return found if isinstance(found, str) else None


def find_library(shape: AttentionShape) -> Library | str:
    """The newest package that is here and can serve `shape`, or why there is none."""
    if shape.device.type != "cuda":
        return f"needs a CUDA device, not {shape.device.type}"
    capability = torch.cuda.get_device_capability(shape.device)
    reasons = []
    for version, name in MODULES.items():
        reason = refusal(version, shape) or _too_old(version, capability)
        if reason is None:
            try:
                return Library(version, import_module(name))
            except ModuleNotFoundError:
                reason = "is not installed"
            except (ImportError, OSError, RuntimeError) as error:  # built for another torch
                reason = f"does not import ({reason_of(error)})"
        reasons.append(f"{PACKAGES[version]} {reason}")
    return "; ".join(reasons)


def _too_old(version: int, capability: tuple[int, int]) -> str | None:
    if version == 3 and capability[0] != 9:
        return f"needs compute capability 9.x, not {capability[0]}.{capability[1]}"
    if version == 2 and capability[0] < 8:
        return f"needs compute capability 8.0 or higher, not {capability[0]}.{capability[1]}"
    return None


def refusal(version: int, shape: AttentionShape) -> str | None:
    """What about `shape` the package does not take; None: it takes it."""
    if shape.dtype not in DTYPES:
        return f"takes float16 and bfloat16, not {str(shape.dtype).split('.')[-1]}"
    if shape.head_dim % 8 or shape.head_dim > LARGEST_HEAD_DIM:
        return f"takes head_dim up to {LARGEST_HEAD_DIM} in multiples of 8, not {shape.head_dim}"
    if version == 2 and shape.block_size % PAGE_MULTIPLE:
        return f"takes blocks of a multiple of {PAGE_MULTIPLE} tokens, not {shape.block_size}"
    return None


class FlashPaged:
    """K and V are stored first, then read back through the block tables."""

    name = "flash"

    def __init__(self, shape: AttentionShape, library: Library | None = None):
        """ConfigError if there is no package, or if `library` does not take `shape`."""
        found = library or find_library(shape)
        if isinstance(found, Library):
            found = refusal(found.version, shape) or found
        if isinstance(found, str):
            raise ConfigError(f"attention back end 'flash' cannot serve this model: {found}")
        self.shape, self.library = shape, found
        self.scale = shape.head_dim ** -0.5
        self.store = choose_store(shape)

    @property
    def why_no_graphs(self) -> str | None:
        """What keeps its decode steps out of CUDA graphs; None: nothing does."""
        waits = self.store is store_by_index
        return "storing K and V by index waits for the device: install triton" if waits else None

    # ------------------------------------------------------------------ once a step

    def plan(self, inputs: StepInputs, num_blocks: int) -> Plan:
        queries, lengths = np.diff(inputs.cu_seqlens_q), inputs.seqlens_k
        longer = np.flatnonzero(queries != 1)
        decodes = int(longer[0]) if len(longer) else len(queries)
        if self.library.version == 3 and len(longer):
            decodes = 0  # one call takes all rows
        rest, contexts = queries[decodes:], lengths[decodes:]
        slots, seqlens_k, tables, cu_q, cu_k = upload(
            (inputs.slot_mapping, lengths, inputs.block_tables, _bounds(rest), _bounds(contexts)),
            self.shape.device)
        return Plan(slots, seqlens_k, tables, decodes, cu_q, cu_k, int(rest.max(initial=0)),
                    int(contexts.max(initial=0)), bool((rest == contexts).all()))

    def decode_plan(self, slots: torch.Tensor, seqlens_k: torch.Tensor,
                    tables: torch.Tensor) -> Plan:
        """A plan over device tensors that may change between the replays of a CUDA graph.

        Token r is row r's only one. slots [rows] int64 (-1: write nothing), seqlens_k [rows] int32,
        tables [rows, width] int32.
        """
        nothing = torch.zeros(1, dtype=torch.int32, device=self.shape.device)
        return Plan(slots, seqlens_k, tables, len(slots), nothing, nothing, 0, 0, True)

    # ------------------------------------------------------------------ once a layer

    def attend(self, plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
               k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        self.store(k, v, k_cache, v_cache, plan.slots)
        first = plan.decodes
        parts = []
        if first:
            parts.append(self._decode(plan, q[:first], k_cache, v_cache))
        if first < len(q):
            if self.library.version == 3:
                parts.append(self._rows(plan, q, k_cache, v_cache))
            elif plan.fresh:
                parts.append(self._varlen(plan, q[first:], k[first:], v[first:], None))
            else:
                parts.append(self._varlen(plan, q[first:], k_cache, v_cache, plan.tables[first:]))
        out = parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty_like(q)
        return out.reshape(q.shape[0], -1)

    def _decode(self, plan: Plan, q: torch.Tensor, k_cache: torch.Tensor,
                v_cache: torch.Tensor) -> torch.Tensor:
        """Rows of one token: [rows, heads, head_dim]. The packages name the table differently."""
        table = "page_table" if self.library.version == 3 else "block_table"
        out = self.library.module.flash_attn_with_kvcache(
            q.unsqueeze(1), k_cache, v_cache, cache_seqlens=plan.seqlens_k[:plan.decodes],
            softmax_scale=self.scale, causal=True, **{table: plan.tables[:plan.decodes]})
        return out.squeeze(1)

    def _varlen(self, plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                tables: torch.Tensor | None) -> torch.Tensor:
        return self.library.module.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=plan.cu_seqlens_q, cu_seqlens_k=plan.cu_seqlens_k,
            max_seqlen_q=plan.most_queries, max_seqlen_k=plan.longest, softmax_scale=self.scale,
            causal=True, block_table=tables)

    def _rows(self, plan: Plan, q: torch.Tensor, k_cache: torch.Tensor,
              v_cache: torch.Tensor) -> torch.Tensor:
        return self.library.module.flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=plan.seqlens_k, page_table=plan.tables,
            cu_seqlens_q=plan.cu_seqlens_q, max_seqlen_q=plan.most_queries,
            softmax_scale=self.scale, causal=True)


def _bounds(counts: np.ndarray) -> np.ndarray:
    """[len(counts) + 1] int32: where each of them starts, and the end."""
    bounds = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=bounds[1:])
    return bounds


def choose_store(shape: AttentionShape) -> Store:
    """How K and V reach their slots: Triton's kernel on CUDA (graphs can hold it), else torch."""
    if shape.device.type == "cuda":
        try:
            from engine.attention.triton_paged import store_kv
        except ImportError:
            return store_by_index
        return store_kv
    return store_by_index


def store_by_index(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                   slots: torch.Tensor) -> None:
    """Write k and v [tokens, kv_heads, head_dim] to their slots of the caches, by indexing; tokens
    with a negative slot are left out. Waits for the device, so no CUDA graph can hold it."""
    kept = (slots >= 0).nonzero().squeeze(1)
    shape = (-1, k.shape[1], k.shape[2])
    k_cache.view(shape)[slots[kept]] = k[kept]
    v_cache.view(shape)[slots[kept]] = v[kept]
