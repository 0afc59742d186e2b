"""Strict stand-ins for the two flash-attn packages, for machines without a GPU.

FlashAttn2 and FlashAttn3 have the functions that our back end calls, with the packages' own
signatures (flash-attn 2.8.3; hopper/flash_attn_interface.py), refuse what the packages document or
check as unsupported, and compute with the float64 oracle. They are stricter in one way: what the
kernels would answer with garbage (a table entry past the cache, a maximum that is too small) is an
error here. What our back end never passes (dropout, windows, rotary...) is refused outright.
"""

from __future__ import annotations

import torch

from tests.attention.oracle import attention


class Refused(RuntimeError):
    """A call that the real package refuses, or answers with garbage."""


def check(condition: bool, message: str) -> None:
    if not condition:
        raise Refused(message)


class FlashAttn2:
    """The module flash_attn."""

    @staticmethod
    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                               dropout_p=0.0, softmax_scale=None, causal=False,
                               window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                               deterministic=False, return_attn_probs=False, block_table=None):
        unused(dropout_p == 0.0, window_size == (-1, -1), softcap == 0.0, alibi_slopes is None,
               not deterministic, not return_attn_probs)
        check(q.dim() == 3, "q must be [total, heads, head_dim]")
        check_tensors(q, k, v, paged=block_table is not None)
        batch = cu_seqlens_q.numel() - 1
        check(batch > 0, "batch size must be positive")
        bounds_q = check_bounds("cu_seqlens_q", cu_seqlens_q, batch, q.shape[0], max_seqlen_q)
        if block_table is None:
            bounds_k = check_bounds("cu_seqlens_k", cu_seqlens_k, batch, k.shape[0], max_seqlen_k)
            pages = None
        else:
            check(k.shape[1] % 256 == 0, "page size must be divisible by 256")
            bounds_k = check_bounds("cu_seqlens_k", cu_seqlens_k, batch, None, max_seqlen_k)
            pages = check_table(block_table, batch, k)
        out = torch.empty_like(q)
        for row in range(batch):
            length = bounds_k[row + 1] - bounds_k[row]
            if pages is None:
                keys, values = (x[bounds_k[row]:bounds_k[row + 1]] for x in (k, v))
            else:
                keys, values = gather(k, v, pages[row], length)
            mine = slice(bounds_q[row], bounds_q[row + 1])
            out[mine] = compute(q[mine], keys, values, softmax_scale, causal)
        return out

    @staticmethod
    def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None,
                                rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
                                cache_leftpad=None, block_table=None, softmax_scale=None,
                                causal=False, window_size=(-1, -1), softcap=0.0,
                                rotary_interleaved=True, alibi_slopes=None, num_splits=0,
                                return_softmax_lse=False):
        check(not (block_table is not None and cache_batch_idx is not None),
              "paged K/V does not support cache_batch_idx")
        check(not (block_table is not None and cache_leftpad is not None),
              "paged K/V does not support cache_leftpad")
        unused(k is None, v is None, rotary_cos is None, rotary_sin is None,
               cache_batch_idx is None, cache_leftpad is None, window_size == (-1, -1),
               softcap == 0.0, alibi_slopes is None, not return_softmax_lse,
               block_table is not None)
        check(q.dim() == 4, "q must be [batch, queries, heads, head_dim]")
        check_tensors(q, k_cache, v_cache, paged=True)
        check(k_cache.shape[1] % 256 == 0, "page size must be divisible by 256")
        return over_pages(q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale, causal)


class FlashAttn3:
    """The module flash_attn_interface."""

    @staticmethod
    def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None,
                                rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
                                cache_leftpad=None, page_table=None, cu_seqlens_q=None,
                                cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
                                q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
                                causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
                                rotary_interleaved=True, scheduler_metadata=None, num_splits=0,
                                pack_gqa=None, sm_margin=0, return_softmax_lse=False):
        unused(k is None, v is None, qv is None, rotary_cos is None, rotary_sin is None,
               cache_batch_idx is None, cache_leftpad is None, cu_seqlens_k_new is None,
               rotary_seqlens is None, q_descale is None, k_descale is None, v_descale is None,
               window_size == (-1, -1), attention_chunk == 0, softcap == 0.0,
               scheduler_metadata is None, not return_softmax_lse, page_table is not None)
        check(q.dim() == (4 if cu_seqlens_q is None else 3),
              "q must be [batch, queries, heads, head_dim], or [total, heads, head_dim] with "
              "cu_seqlens_q")
        check_tensors(q, k_cache, v_cache, paged=True)
        if cu_seqlens_q is None:
            return over_pages(q, k_cache, v_cache, cache_seqlens, page_table, softmax_scale, causal)
        check(max_seqlen_q is not None, "max_seqlen_q must be given with cu_seqlens_q")
        batch = cu_seqlens_q.numel() - 1
        check(batch > 0, "batch size must be positive")
        bounds = check_bounds("cu_seqlens_q", cu_seqlens_q, batch, q.shape[0], max_seqlen_q)
        lengths = check_lengths(cache_seqlens, batch)
        pages = check_table(page_table, batch, k_cache)
        out = torch.empty_like(q)
        for row in range(batch):
            mine = slice(bounds[row], bounds[row + 1])
            keys, values = gather(k_cache, v_cache, pages[row], lengths[row])
            out[mine] = compute(q[mine], keys, values, softmax_scale, causal)
        return out


# ---------------------------------------------------------------------- what both packages check


def unused(*defaults: bool) -> None:
    if not all(defaults):
        raise NotImplementedError("the stand-in covers only what the `flash` back end uses")


def check_tensors(q, k, v, *, paged: bool) -> None:
    check(q.dtype in (torch.float16, torch.bfloat16), "only fp16 and bf16 are supported")
    check(k.dtype == q.dtype and v.dtype == q.dtype, "q, k and v must have the same dtype")
    for x in (q, k, v):
        check(x.stride(-1) == 1, "the last dimension must be contiguous")
    check(k.dim() == (4 if paged else 3) and k.shape == v.shape, "k and v have a wrong shape")
    check(k.shape[-1] == q.shape[-1], "q and k must have the same head_dim")
    check(q.shape[-1] <= 256, "head_dim is at most 256")
    check(q.shape[-1] % 8 == 0, "head_dim must be a multiple of 8")
    check(q.shape[-2] % k.shape[-2] == 0, "heads of q must be a multiple of heads of k and v")


def check_int32(name: str, x: torch.Tensor) -> None:
    check(x is not None and x.dtype == torch.int32, f"{name} must have dtype int32")


def check_bounds(name: str, bounds: torch.Tensor, batch: int, total: int | None,
                 most: int) -> list[int]:
    check_int32(name, bounds)
    check(bounds.is_contiguous() and bounds.shape == (batch + 1,), f"{name} has a wrong shape")
    values = bounds.tolist()
    counts = [end - start for start, end in zip(values, values[1:])]
    check(values[0] == 0 and min(counts) >= 0, f"{name} must start at 0 and not decrease")
    check(total is None or values[-1] == total, f"{name} must end at the number of tokens")
    check(max(counts) <= most, f"{name} has a row longer than its maximum, {most}")
    return values


def check_lengths(cache_seqlens: torch.Tensor, batch: int) -> list[int]:
    check_int32("cache_seqlens", cache_seqlens)
    check(cache_seqlens.is_contiguous(), "cache_seqlens must be contiguous")
    check(cache_seqlens.shape == (batch,), "cache_seqlens must be [batch]")
    return cache_seqlens.tolist()


def check_table(table: torch.Tensor, batch: int, cache: torch.Tensor) -> list[list[int]]:
    check_int32("the block table", table)
    check(table.stride(-1) == 1, "the block table must have a contiguous last dimension")
    check(table.dim() == 2 and table.shape[0] == batch, "the block table must be [batch, pages]")
    pages = table.tolist()
    check(all(0 <= page < len(cache) for row in pages for page in row), "a page outside the cache")
    return pages


def over_pages(q, k_cache, v_cache, cache_seqlens, table, scale, causal) -> torch.Tensor:
    check(q.shape[0] > 0, "batch size must be positive")
    lengths = check_lengths(cache_seqlens, q.shape[0])
    pages = check_table(table, q.shape[0], k_cache)
    rows = [compute(q[row], *gather(k_cache, v_cache, pages[row], lengths[row]), scale, causal)
            for row in range(q.shape[0])]
    return torch.stack(rows)


def gather(k_cache, v_cache, pages: list[int], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    size = k_cache.shape[1]
    check(length <= len(pages) * size, "a row is longer than its pages")
    used = pages[:-(-length // size)]
    return tuple(x[used].reshape(-1, *x.shape[2:])[:length] for x in (k_cache, v_cache))


def compute(q, keys, values, scale, causal: bool) -> torch.Tensor:
    """The oracle knows only causal attention with the usual scale."""
    check(causal or q.shape[0] <= 1, "our back end must ask for a causal mask")
    usual = q.shape[-1] ** -0.5
    check(scale is None or abs(scale - usual) < 1e-9, f"softmax_scale {scale} is not {usual}")
    out, _ = attention(*(x.to(torch.float64).numpy() for x in (q, keys, values)))
    return torch.from_numpy(out).to(q.dtype)
