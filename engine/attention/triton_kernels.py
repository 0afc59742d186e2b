"""Triton kernels over a paged K/V cache: store, decode, reduce, prefill.

Layout, all kernels: K and V caches are contiguous [blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM], so slot
s of head h starts at (s * KV_HEADS + h) * HEAD_DIM; that product is taken in 64 bits, since a cache
of more than 2**31 elements is common. q, k, v have their heads and dims contiguous; the stride from
token to token is free (a slice of a fused qkv projection will do). out is contiguous.
Row r of a step owns tokens [cu_seqlens_q[r], cu_seqlens_q[r + 1]) and the first seqlens_k[r]
positions of its blocks, tables[r]; its last token is the last of those positions.

The query heads of one K/V head are folded into the rows of one tile: K and V are read once for the
whole group, and any group size works (rows past the last one are masked, tl.dot wants 16).
HEAD_DIM may be no power of two (BLOCK_D is the next one); scores, sums and accumulators are fp32.
Slots past seqlens_k are never loaded, so whatever lies there, NaN included, has no effect.

Papers: PagedAttention (Kwon et al. 2023) for the cache; FlashAttention-2 (Dao 2023) for the online
softmax over tiles; Flash-Decoding (Dao et al. 2023) for one row split over several programs.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def store_kernel(k, v, k_cache, v_cache, slots, k_stride, v_stride,
                 WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write each token's K and V, WIDTH = KV_HEADS * HEAD_DIM elements, to its slot.

    Grid (tokens, ceil(WIDTH / BLOCK)). slots [tokens] int64; a negative slot is skipped.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < WIDTH
        key = tl.load(k + token * k_stride + column, mask=inside)
        value = tl.load(v + token * v_stride + column, mask=inside)
        tl.store(k_cache + slot * WIDTH + column, key, mask=inside)
        tl.store(v_cache + slot * WIDTH + column, value, mask=inside)


@triton.jit
def _fold_in(acc, peak, total, q, last, k_head, v_head, table, begin, end, scale,
             MASKED: tl.constexpr, BLOCK_SIZE: tl.constexpr, STRIDE: tl.constexpr,
             HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr):
    """Online softmax of q over positions [begin, end): the new (acc, peak, total).

    acc [M, BLOCK_D], peak and total [M]: unnormalized output, largest raw score, sum of weights.
    last [M]: the last position a row sees. MASKED False promises that every row sees all of the
    range and that it is whole tiles. begin is a multiple of BLOCK_N.
    """
    dim = tl.arange(0, BLOCK_D)
    for start in range(begin, end, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        inside = position < end
        if BLOCK_SIZE % BLOCK_N == 0:  # the tile lies in one block
            block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
            slot = block * BLOCK_SIZE + start % BLOCK_SIZE + tl.arange(0, BLOCK_N)
        elif MASKED:
            block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            slot = block * BLOCK_SIZE + position % BLOCK_SIZE
        else:
            block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
            slot = block * BLOCK_SIZE + position % BLOCK_SIZE
        where = slot[:, None] * STRIDE + dim[None, :]
        if MASKED:
            loaded = inside[:, None] & (dim < HEAD_DIM)[None, :]
            key = tl.load(k_head + where, mask=loaded, other=0.0)
            value = tl.load(v_head + where, mask=loaded, other=0.0)
        elif HEAD_DIM != BLOCK_D:
            key = tl.load(k_head + where, mask=(dim < HEAD_DIM)[None, :], other=0.0)
            value = tl.load(v_head + where, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        else:
            key = tl.load(k_head + where)
            value = tl.load(v_head + where)
        score = tl.dot(q, tl.trans(key), input_precision="ieee")  # [M, BLOCK_N]
        if MASKED:
            score = tl.where(position[None, :] <= last[:, None], score, float("-inf"))
        # Not -inf from the first tile on: position 0 is seen by every row.
        highest = tl.maximum(peak, tl.max(score, 1))
        weight = tl.math.exp2(score * scale - (highest * scale)[:, None])
        shrink = tl.math.exp2((peak - highest) * scale)
        total = total * shrink + tl.sum(weight, 1)
        acc = tl.dot(weight.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
        peak = highest
    return acc, peak, total


@triton.jit(do_not_specialize=["table_stride"])  # it changes from step to step
def decode_kernel(out, partial, lse, q, k_cache, v_cache, rows, cu_seqlens_q, seqlens_k, tables,
                  q_stride, table_stride, scale,
                  KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
                  BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
                  BLOCK_N: tl.constexpr, LEAST_TILES: tl.constexpr, SPLIT: tl.constexpr):
    """One query token a row, the row's context cut into up to grid[2] parts.

    Grid (KV_HEADS, decode rows, parts); rows [decode rows] int32 names the step's rows. A part has
    at least LEAST_TILES tiles; parts past the end of a short row do nothing. Not SPLIT (one part):
    writes out [tokens, heads * HEAD_DIM]. SPLIT: writes each part's own softmax average to partial
    [decode rows, parts, heads, HEAD_DIM] fp32 and the base-2 logarithm of its sum of exponentials
    to lse [decode rows, parts, heads] fp32, for reduce_kernel. scale includes log2(e). A row
    with no context gives 0.
    """
    kv_head, index, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(rows + index).to(tl.int64)
    length = tl.load(seqlens_k + row)
    span = tl.maximum(tl.cdiv(tl.cdiv(length, BLOCK_N), tl.num_programs(2)), LEAST_TILES) * BLOCK_N
    begin = part * span
    if (begin < length) | (part == 0):
        token = tl.load(cu_seqlens_q + row).to(tl.int64)
        member, dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        head = kv_head * GROUP + member
        real = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
        inner = head[:, None] * HEAD_DIM + dim[None, :]
        query = tl.load(q + token * q_stride + inner, mask=real, other=0.0)
        end = tl.minimum(begin + span, length)
        whole = end // BLOCK_N * BLOCK_N
        last = tl.zeros([BLOCK_M], tl.int32) + length - 1
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        k_head, v_head = k_cache + kv_head * HEAD_DIM, v_cache + kv_head * HEAD_DIM
        table = tables + row * table_stride
        acc, peak, total = _fold_in(acc, peak, total, query, last, k_head, v_head, table, begin,
                                    whole, scale, False, BLOCK_SIZE, KV_HEADS * HEAD_DIM, HEAD_DIM,
                                    BLOCK_D, BLOCK_N)
        acc, peak, total = _fold_in(acc, peak, total, query, last, k_head, v_head, table, whole,
                                    end, scale, True, BLOCK_SIZE, KV_HEADS * HEAD_DIM, HEAD_DIM,
                                    BLOCK_D, BLOCK_N)
        total = tl.where(length > 0, total, 1.0)
        acc = acc / total[:, None]
        if SPLIT:
            slice_ = (index.to(tl.int64) * tl.num_programs(2) + part) * (KV_HEADS * GROUP)
            tl.store(partial + slice_ * HEAD_DIM + inner, acc, mask=real)
            level = tl.where(length > 0, peak * scale + tl.math.log2(total), 0.0)
            tl.store(lse + slice_ + head, level, mask=member < GROUP)
        else:
            tl.store(out + token * (KV_HEADS * GROUP * HEAD_DIM) + inner,
                     acc.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["parts"])
def reduce_kernel(out, partial, lse, rows, cu_seqlens_q, seqlens_k, parts,
                  HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
                  BLOCK_N: tl.constexpr, LEAST_TILES: tl.constexpr):
    """Merge a row's parts, weighted by the exponentials of their lse. Grid (HEADS, decode rows).

    BLOCK_N, LEAST_TILES and `parts` must be decode_kernel's: they say which parts were written.
    """
    head, index = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + index).to(tl.int64)
    length = tl.load(seqlens_k + row)
    span = tl.maximum(tl.cdiv(tl.cdiv(length, BLOCK_N), parts), LEAST_TILES) * BLOCK_N
    written = tl.maximum(tl.cdiv(length, span), 1)
    dim = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    peak = float("-inf")
    total = 0.0
    first = index.to(tl.int64) * parts * HEADS + head
    for part in range(written):
        where = first + part * HEADS
        level = tl.load(lse + where)
        average = tl.load(partial + where * HEAD_DIM + dim, mask=dim < HEAD_DIM, other=0.0)
        highest = tl.maximum(peak, level)
        shrink, weight = tl.math.exp2(peak - highest), tl.math.exp2(level - highest)
        acc = acc * shrink + average * weight
        total = total * shrink + weight
        peak = highest
    token = tl.load(cu_seqlens_q + row).to(tl.int64)
    tl.store(out + (token * HEADS + head) * HEAD_DIM + dim, (acc / total).to(out.dtype.element_ty),
             mask=dim < HEAD_DIM)


@triton.jit(do_not_specialize=["table_stride"])
def prefill_kernel(out, q, k_cache, v_cache, tile_rows, tile_starts, cu_seqlens_q, seqlens_k,
                   tables, q_stride, table_stride, scale,
                   KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
                   BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
                   BLOCK_N: tl.constexpr):
    """Rows of any number of query tokens, causal from the bottom right.

    Grid (tiles, KV_HEADS); a tile is BLOCK_M consecutive (query token, member of the group) pairs
    of row tile_rows[t], from pair tile_starts[t] on (both [tiles] int32). scale includes log2(e).
    Writes out [tokens, heads * HEAD_DIM].
    """
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    row = tl.load(tile_rows + tile).to(tl.int64)
    start = tl.load(tile_starts + tile)
    token = tl.load(cu_seqlens_q + row)
    count = tl.load(cu_seqlens_q + row + 1) - token
    length = tl.load(seqlens_k + row)
    pair, dim = start + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    query = pair // GROUP
    real = (query < count)[:, None] & (dim < HEAD_DIM)[None, :]
    head = kv_head * GROUP + pair % GROUP
    inner = head[:, None] * HEAD_DIM + dim[None, :]
    tokens = (token + query).to(tl.int64)[:, None]
    queries = tl.load(q + tokens * q_stride + inner, mask=real, other=0.0)
    cached = length - count
    last = cached + tl.minimum(query, count - 1)  # [BLOCK_M]
    whole = (cached + start // GROUP + 1) // BLOCK_N * BLOCK_N  # all rows see all before this
    end = cached + tl.minimum((start + BLOCK_M - 1) // GROUP, count - 1) + 1
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    k_head, v_head = k_cache + kv_head * HEAD_DIM, v_cache + kv_head * HEAD_DIM
    table = tables + row * table_stride
    acc, peak, total = _fold_in(acc, peak, total, queries, last, k_head, v_head, table, 0, whole,
                                scale, False, BLOCK_SIZE, KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_D,
                                BLOCK_N)
    acc, peak, total = _fold_in(acc, peak, total, queries, last, k_head, v_head, table, whole, end,
                                scale, True, BLOCK_SIZE, KV_HEADS * HEAD_DIM, HEAD_DIM, BLOCK_D,
                                BLOCK_N)
    tl.store(out + tokens * (KV_HEADS * GROUP * HEAD_DIM) + inner,
             (acc / total[:, None]).to(out.dtype.element_ty), mask=real)
