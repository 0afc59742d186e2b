"""The stand-ins refuse what flash-attn refuses, have its signatures, and compute attention."""

from __future__ import annotations

import inspect

import pytest
import torch

from tests.attention.flash_standin import FlashAttn2, FlashAttn3, Refused
from tests.attention.oracle import attention

VARLEN_2 = ("q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, "
            "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
            "alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None")
KVCACHE_2 = ("q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
             "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, "
             "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
             "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False")
KVCACHE_3 = ("q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
             "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, "
             "cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, "
             "q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, "
             "window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
             "scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, "
             "return_softmax_lse=False")


@pytest.mark.parametrize(("function", "signature"), [
    (FlashAttn2.flash_attn_varlen_func, VARLEN_2), (FlashAttn2.flash_attn_with_kvcache, KVCACHE_2),
    (FlashAttn3.flash_attn_with_kvcache, KVCACHE_3)])
def test_signatures_are_the_packages_own(function, signature):
    assert str(inspect.signature(function)) == f"({signature})"


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def varlen(**changes) -> dict:
    """A right call of flash_attn_varlen_func: rows of 2 and 3 queries over 2 and 300 positions."""
    torch.manual_seed(0)
    cache = torch.randn(4, 256, 2, 16).half()
    return dict(q=torch.randn(5, 4, 16).half(), k=cache, v=cache.clone(),
                cu_seqlens_q=ints(0, 2, 5), cu_seqlens_k=ints(0, 2, 302), max_seqlen_q=3,
                max_seqlen_k=300, causal=True,
                block_table=torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)) | changes


def kvcache(**changes) -> dict:
    """A right call of flash_attn_with_kvcache: two rows of one query over 5 and 300 positions."""
    torch.manual_seed(0)
    cache = torch.randn(4, 256, 2, 16).bfloat16()
    return dict(q=torch.randn(2, 1, 4, 16).bfloat16(), k_cache=cache, v_cache=cache.clone(),
                cache_seqlens=ints(5, 300), causal=True,
                block_table=torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)) | changes


def kvcache_3(**changes) -> dict:
    """A right call of flash-attn 3: rows of 2 and 3 queries, pages of 16."""
    torch.manual_seed(0)
    cache = torch.randn(4, 16, 2, 16).half()
    return dict(q=torch.randn(5, 4, 16).half(), k_cache=cache, v_cache=cache.clone(),
                cache_seqlens=ints(5, 30), cu_seqlens_q=ints(0, 2, 5), max_seqlen_q=3, causal=True,
                page_table=torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)) | changes


def test_varlen_computes_causal_attention_from_the_bottom_right():
    call = varlen()
    out = FlashAttn2.flash_attn_varlen_func(**call)
    keys = torch.cat([call["k"][3], call["k"][1]])[:300].double().numpy()
    expected, _ = attention(call["q"][2:].double().numpy(), keys, keys)
    assert torch.allclose(out[2:].double(), torch.from_numpy(expected), atol=2e-3)


def test_the_three_functions_agree_where_they_overlap():
    call = kvcache()
    decode = FlashAttn2.flash_attn_with_kvcache(**call)
    rows = FlashAttn2.flash_attn_varlen_func(
        call["q"].squeeze(1), call["k_cache"], call["v_cache"], ints(0, 1, 2), ints(0, 5, 305), 1,
        300, causal=True, block_table=call["block_table"])
    call["page_table"] = call.pop("block_table")
    newer = FlashAttn3.flash_attn_with_kvcache(**call)
    assert torch.equal(decode.squeeze(1), rows) and torch.equal(decode, newer)


def test_a_query_that_sees_nothing_gives_0():
    assert not FlashAttn2.flash_attn_with_kvcache(**kvcache(cache_seqlens=ints(0, 3)))[0].any()


HALF_ROW = torch.randn(5, 4, 32).half()[..., ::2]  # last dimension not contiguous
WRONG_VARLEN = {
    "float32": dict(q=torch.randn(5, 4, 16)),
    "mixed dtypes": dict(q=torch.randn(5, 4, 16).bfloat16()),
    "q not contiguous": dict(q=HALF_ROW),
    "page size": dict(k=torch.randn(4, 128, 2, 16).half(), v=torch.randn(4, 128, 2, 16).half()),
    "head_dim over 256": dict(q=torch.randn(5, 4, 264).half(), k=torch.randn(4, 256, 2, 264).half(),
                              v=torch.randn(4, 256, 2, 264).half()),
    "head_dim 12": dict(q=torch.randn(5, 4, 12).half(), k=torch.randn(4, 256, 2, 12).half(),
                        v=torch.randn(4, 256, 2, 12).half()),
    "heads do not divide": dict(q=torch.randn(5, 3, 16).half()),
    "int64 bounds of q": dict(cu_seqlens_q=torch.tensor([0, 2, 5])),
    "int64 bounds of k": dict(cu_seqlens_k=torch.tensor([0, 2, 302])),
    "int64 table": dict(block_table=torch.tensor([[2, 0], [3, 1]])),
    "table not contiguous": dict(block_table=torch.zeros(2, 4, dtype=torch.int32)[:, ::2]),
    "table of other rows": dict(block_table=torch.zeros(3, 2, dtype=torch.int32)),
    "empty batch": dict(q=torch.randn(0, 4, 16).half(), cu_seqlens_q=ints(0), cu_seqlens_k=ints(0)),
    "page outside": dict(block_table=torch.tensor([[2, 0], [3, 4]], dtype=torch.int32)),
    "more context than pages": dict(cu_seqlens_k=ints(0, 2, 600), max_seqlen_k=598),
    "maximum of q too small": dict(max_seqlen_q=2),
    "maximum of k too small": dict(max_seqlen_k=299),
    "bounds that fall": dict(cu_seqlens_q=ints(0, 6, 5)),
    "bounds short of the tokens": dict(cu_seqlens_q=ints(0, 2, 4)),
    "no causal mask": dict(causal=False),
}
WRONG_KVCACHE = {
    "float32": dict(q=torch.randn(2, 1, 4, 16)),
    "three dimensions": dict(q=torch.randn(2, 4, 16).bfloat16()),
    "page size": dict(k_cache=torch.randn(4, 16, 2, 16).bfloat16(),
                      v_cache=torch.randn(4, 16, 2, 16).bfloat16()),
    "int64 lengths": dict(cache_seqlens=torch.tensor([5, 300])),
    "lengths not contiguous": dict(cache_seqlens=ints(5, 0, 300, 0)[::2]),
    "lengths of other rows": dict(cache_seqlens=ints(5)),
    "int64 table": dict(block_table=torch.tensor([[2, 0], [3, 1]])),
    "cache_batch_idx with pages": dict(cache_batch_idx=ints(0, 1)),
    "leftpad with pages": dict(cache_leftpad=ints(0, 0)),
    "empty batch": dict(q=torch.randn(0, 1, 4, 16).bfloat16(), cache_seqlens=ints(),
                        block_table=torch.zeros(0, 2, dtype=torch.int32)),
    "other scale": dict(softmax_scale=1.0),
}
WRONG_3 = {
    "float32": dict(q=torch.randn(5, 4, 16)),
    "no maximum": dict(max_seqlen_q=None),
    "int64 bounds": dict(cu_seqlens_q=torch.tensor([0, 2, 5])),
    "int64 table": dict(page_table=torch.tensor([[2, 0], [3, 1]])),
    "four dimensions with bounds": dict(q=torch.randn(5, 1, 4, 16).half()),
    "heads do not divide": dict(q=torch.randn(5, 3, 16).half()),
    "head_dim 12": dict(q=torch.randn(5, 4, 12).half(), k_cache=torch.randn(4, 16, 2, 12).half(),
                        v_cache=torch.randn(4, 16, 2, 12).half()),
}


@pytest.mark.parametrize(("function", "right", "wrong"), [
    pytest.param(function, right, wrong, id=f"{name}-{what}")
    for name, function, right, table in (
        ("varlen", FlashAttn2.flash_attn_varlen_func, varlen, WRONG_VARLEN),
        ("kvcache", FlashAttn2.flash_attn_with_kvcache, kvcache, WRONG_KVCACHE),
        ("kvcache 3", FlashAttn3.flash_attn_with_kvcache, kvcache_3, WRONG_3))
    for what, wrong in table.items()])
def test_refuses(function, right, wrong):
    function(**right())  # right without the change
    with pytest.raises(Refused):
        function(**right(**wrong))


@pytest.mark.parametrize(("function", "right", "argument"), [
    (FlashAttn2.flash_attn_varlen_func, varlen, dict(dropout_p=0.1)),
    (FlashAttn2.flash_attn_varlen_func, varlen, dict(window_size=(8, 0))),
    (FlashAttn2.flash_attn_with_kvcache, kvcache, dict(k=torch.zeros(2, 1, 2, 16).bfloat16())),
    (FlashAttn3.flash_attn_with_kvcache, kvcache_3, dict(attention_chunk=4))])
def test_does_not_pretend_to_know_the_rest(function, right, argument):
    with pytest.raises(NotImplementedError):
        function(**right(**argument))
