"""Attention in float64 with plain loops, and steps made to be hard on a back end.

Independent of every back end: nothing here reads a cache through a block table. Each request's keys
and values are kept as dense arrays, and the paged step is laid out from them. Needs only numpy and
torch, so that a GPU machine without pytest can run it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.base import AttentionShape, StepInputs


@dataclass(frozen=True)
class Row:
    """One request's share of a step: `new` query tokens after `cached` older positions."""

    new: int
    cached: int = 0
    owner: int | None = None  # the row whose first `shared` blocks are this row's first blocks
    shared: int = 0
    written: bool = False  # K/V of the new tokens lie in the cache already: their slots are -1
    padding: bool = False  # as a CUDA graph pads: one token, slot -1, the padding block, length 1


@dataclass(frozen=True)
class Case:
    """A step by its rows, and the shape it runs in."""

    name: str
    rows: tuple[Row, ...]
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    block_size: int = 4
    logits: float = 0.0  # scores are about this large in both directions; 0: about 1
    shuffled: bool = False  # rows in random order instead of the runner's: decodes first
    fused: bool = False  # q, k and v are slices of one projection's output
    seed: int = 0

    def shape(self, dtype: torch.dtype, device: torch.device | str) -> AttentionShape:
        return AttentionShape(self.kv_heads * self.group, self.kv_heads, self.head_dim,
                              self.block_size, dtype, torch.device(device))


@dataclass
class Step:
    """What a back end is given, and what it must return and leave behind."""

    inputs: StepInputs
    num_blocks: int
    q: torch.Tensor  # [tokens, heads, head_dim]
    k: torch.Tensor  # [tokens, kv_heads, head_dim]
    v: torch.Tensor
    k_cache: torch.Tensor  # [num_blocks + 1, block_size, kv_heads, head_dim]
    v_cache: torch.Tensor
    out: np.ndarray  # [tokens, heads * head_dim] float64
    k_after: torch.Tensor
    v_after: torch.Tensor
    largest_score: float
    largest_value: float


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, float]:
    """Causal attention, bottom right, of q [queries, heads, d] over k, v [context, kv_heads, d],
    all float64; and the largest score. A query that sees nothing gives 0."""
    out = np.zeros(q.shape)
    largest = 0.0
    for query in range(q.shape[0]):
        seen = k.shape[0] - q.shape[0] + query + 1
        for head in range(q.shape[1]):
            of = head // (q.shape[1] // k.shape[1])
            if seen <= 0:
                continue
            scores = k[:seen, of] @ q[query, head] / math.sqrt(q.shape[2])
            largest = max(largest, float(np.abs(scores).max()))
            weights = np.exp(scores - scores.max())
            out[query, head] = (weights / weights.sum()) @ v[:seen, of]
    return out, largest


def build(case: Case, dtype: torch.dtype, device: torch.device | str) -> Step:
    """Lay `case` out: permuted blocks, NaN in every slot that no row reads, bottom-right rows."""
    rng = np.random.default_rng(case.seed)
    rows = list(case.rows)
    order = rng.permutation(len(rows)) if case.shuffled else np.argsort(
        [row.new != 1 for row in rows], kind="stable")
    keys, values, tables, num_blocks = _contents(case, rows, rng, dtype)

    page = (num_blocks + 1, case.block_size, case.kv_heads, case.head_dim)
    k_after, v_after = torch.full((2, *page), math.nan, dtype=dtype)
    k_after[num_blocks], v_after[num_blocks] = 0, 0
    slots_of = [_slots(table, len(key), case.block_size) for table, key in zip(tables, keys)]
    flat = (-1, case.kv_heads, case.head_dim)
    for where, key, value in zip(slots_of, keys, values):
        k_after.view(flat)[where], v_after.view(flat)[where] = key, value
    # Before the step: what is cached, less what any row writes in it (shared blocks included).
    k_cache, v_cache = k_after.clone(), v_after.clone()
    for row, where in zip(rows, slots_of):
        if not row.written and not row.padding:
            k_cache.view(flat)[where[row.cached:]] = math.nan
            v_cache.view(flat)[where[row.cached:]] = math.nan

    tokens = sum(row.new for row in rows)
    heads = case.kv_heads * case.group
    q, k, v = _projections(case, tokens, heads, rng, dtype)
    out = np.zeros((tokens, heads, case.head_dim))
    slots, positions, first, largest = [], [], 0, 0.0
    for index in order:
        row, mine = rows[index], slice(first, first + rows[index].new)
        positions += range(row.cached, row.cached + row.new)
        if row.written or row.padding:
            slots += [-1] * row.new
        else:
            slots += slots_of[index][row.cached:].tolist()
            k[mine], v[mine] = keys[index][row.cached:], values[index][row.cached:]
        out[mine], score = attention(_exact(q[mine]), _exact(keys[index]), _exact(values[index]))
        largest = max(largest, score)
        first += row.new

    inputs = StepInputs(
        input_ids=np.zeros(tokens, np.int64),
        positions=np.array(positions, np.int64),
        slot_mapping=np.array(slots, np.int64),
        cu_seqlens_q=np.cumsum([0] + [rows[index].new for index in order]).astype(np.int32),
        seqlens_k=np.array([len(keys[index]) for index in order], np.int32),
        block_tables=_pad([tables[index] for index in order], num_blocks, rng),
        logits_indices=np.zeros(0, np.int64),
    )
    q, k, v = (x.to(device) for x in (q, k, v)) if not case.fused else _fuse(q, k, v, device)
    return Step(inputs, num_blocks, q, k, v, k_cache.to(device), v_cache.to(device),
                out.reshape(tokens, -1), k_after, v_after, largest,
                max(float(np.abs(_exact(value)).max()) for value in values))


def _contents(case: Case, rows: list[Row], rng: np.random.Generator, dtype: torch.dtype):
    """Each row's dense K and V [length, kv_heads, head_dim] and its block table, permuted; and how
    many blocks there are in all."""
    need = [-(-(row.cached + row.new) // case.block_size) for row in rows]
    own = [0 if row.padding else count - row.shared for row, count in zip(rows, need)]
    num_blocks = sum(own) + 2
    free = rng.permutation(num_blocks).tolist()
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    tables: list[list[int]] = []
    for row, count in zip(rows, own):
        size = (row.cached + row.new, case.kv_heads, case.head_dim)
        key, value = _random(rng, size, dtype, case), _random(rng, size, dtype)
        table = [free.pop() for _ in range(count)]
        if row.padding:
            key, value, table = torch.zeros_like(key), torch.zeros_like(value), [num_blocks]
        if row.owner is not None:
            common = row.shared * case.block_size
            key[:common], value[:common] = keys[row.owner][:common], values[row.owner][:common]
            table = tables[row.owner][:row.shared] + table
        keys.append(key)
        values.append(value)
        tables.append(table)
    return keys, values, tables, num_blocks


def _slots(table: list[int], length: int, block_size: int) -> np.ndarray:
    """The slot of each position of a row, [length] int64."""
    position = np.arange(length)
    return np.array(table, np.int64)[position // block_size] * block_size + position % block_size


def _random(rng: np.random.Generator, size: tuple[int, ...], dtype: torch.dtype,
            case: Case | None = None) -> torch.Tensor:
    """Normal numbers; with `case.logits`, so large that products of two come to that score."""
    factor = 1.0
    if case is not None and case.logits:
        factor = math.sqrt(case.logits / 3.0)  # 3: about the largest normal number of a few hundred
    return torch.from_numpy(rng.standard_normal(size) * factor).to(dtype)


def _projections(case: Case, tokens: int, heads: int, rng: np.random.Generator, dtype: torch.dtype):
    """q, and k and v full of numbers that nobody may see where the slot is -1."""
    return (_random(rng, (tokens, heads, case.head_dim), dtype, case),
            _random(rng, (tokens, case.kv_heads, case.head_dim), dtype),
            _random(rng, (tokens, case.kv_heads, case.head_dim), dtype))


def _pad(tables: list[list[int]], num_blocks: int, rng: np.random.Generator) -> np.ndarray:
    """[rows, longest] int32; what pads a row is any valid block."""
    width = max([len(table) for table in tables] + [1])
    padded = rng.integers(0, num_blocks, (len(tables), width)).astype(np.int32)
    for row, table in zip(padded, tables):
        row[:len(table)] = table
    return padded


def _fuse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, device: torch.device | str):
    """The same q, k and v as slices of one [tokens, (heads + 2 kv_heads) * head_dim] tensor."""
    tokens, dim = q.shape[0], q.shape[2]
    fused = torch.cat([x.reshape(tokens, -1) for x in (q, k, v)], dim=1).to(device)
    parts = fused.split([x.shape[1] * dim for x in (q, k, v)], dim=1)
    return tuple(part.view(tokens, -1, dim) for part in parts)


def _exact(x: torch.Tensor) -> np.ndarray:
    return x.to(torch.float64).numpy()


def tolerance(step: Step) -> float:
    """Largest absolute error allowed: rounding of the weights and the output in the step's dtype,
    and of the scores where they are summed (fp32, or fp64), times the largest value."""
    dtype = step.q.dtype
    summed = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    rounding = 2 * torch.finfo(dtype).eps + 8 * summed * (4 + step.largest_score)
    return rounding * max(1.0, step.largest_value)


def differences(step: Step, out: torch.Tensor, k_cache: torch.Tensor,
                v_cache: torch.Tensor) -> list[str]:
    """What is wrong with a back end's output and with the caches it leaves; [] if nothing is."""
    if tuple(out.shape) != step.out.shape or out.dtype != step.q.dtype:
        return [f"output is {tuple(out.shape)} {out.dtype}, not {step.out.shape} {step.q.dtype}"]
    problems = []
    error = np.nan_to_num(np.abs(_exact(out.cpu()) - step.out), nan=np.inf)
    if error.size and not error.max() <= tolerance(step):
        token, column = np.unravel_index(error.argmax(), error.shape)
        problems.append(f"token {token}, column {column}: off by {error.max():.3g}, allowed "
                        f"{tolerance(step):.3g}")
    for name, cache, wanted in (("K", k_cache, step.k_after), ("V", v_cache, step.v_after)):
        cache = cache.cpu()
        same = (cache == wanted) | (cache.isnan() & wanted.isnan())
        if not bool(same.all()):
            block, offset = (~same).nonzero()[0][:2].tolist()
            problems.append(f"{name} cache is wrong first at block {block}, offset {offset}")
    return problems
