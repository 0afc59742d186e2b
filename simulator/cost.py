"""Batch → seconds, with the reason. The roofline (docs/simulator.md, What a step costs).

All counts and times are of one device; under tensor parallelism every rank does the same share.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from itertools import accumulate
from typing import Any, NamedTuple

from engine.core.batch import Batch
from simulator.hardware import Hardware
from simulator.modelspec import ModelSpec
from simulator.shape import Shape, shape_of

PARTS = ("compute", "weights", "kv", "comm", "overhead")


class StepCost(NamedTuple):
    """What one step takes and why. The five parts add up to `seconds`."""

    seconds: float
    compute: float = 0.0  # share of GEMM time owed to FLOPs, and prefill attention's FLOPs
    weights: float = 0.0  # share of GEMM time owed to streaming weights
    kv: float = 0.0  # reading and writing K/V, copy-on-write included
    comm: float = 0.0  # all-reduces, and swapped blocks over PCIe
    overhead: float = 0.0  # launches, host, per-sequence work, element-wise kernels
    flops: float = 0.0
    bytes: float = 0.0  # device memory traffic

    @property
    def bound(self) -> str:
        """The largest part, one of PARTS."""
        return PARTS[max(range(5), key=self[1:6].__getitem__)]

    def as_event(self, source: str = "modelled") -> dict[str, Any]:
        """The breakdown for the log's `time` event, whose `seconds` the loop writes itself."""
        parts = {name: round(value, 9) for name, value in zip(PARTS, self[1:6])}
        return {"source": source, **parts, "flops": round(self.flops), "bytes": round(self.bytes),
                "bound": self.bound}


class CostModel(ABC):
    """Prices steps. Depends on the batch alone, so that a run can be repeated byte for byte.

    A new model implements `cost`; the other two only save time and may not change a bit.
    """

    @abstractmethod
    def cost(self, batch: Batch) -> StepCost:
        """The price of this step, with its breakdown."""

    def seconds(self, batch: Batch) -> float:
        """`cost(batch).seconds`."""
        return self.cost(batch).seconds

    def end_times(self, batch: Batch, begin: float, most: int, horizon: float) -> list[float]:
        """When this step and its equal repetitions end, if it begins at `begin`.

        At least one, at most `most` (<= batch.stable_steps()), none after the first that is not
        before `horizon`. Each row's context grows by one a step.
        """
        return [begin + self.seconds(batch)]


def growing_ends(begin: float, fixed: float, rate: float, context: int, rows: int, most: int,
                 horizon: float) -> list[float]:
    """End times of up to `most` steps of fixed + context · rate seconds, context growing by `rows`
    a step; none after the first that is not before `horizon`. Adds in the order single steps do."""
    if horizon < math.inf:  # steps only get longer, so that many at the most are needed
        first = fixed + context * rate
        most = min(most, int((horizon - begin) / first) + 2) if first > 0 else 1
    ends = list(accumulate([fixed + tokens * rate for tokens in
                            range(context, context + rows * most, rows)], initial=begin))
    return ends[1:bisect_left(ends, horizon, 1) + 1]


class _Linear(NamedTuple):
    """The part of a step that depends only on the number of tokens (or of sampled rows)."""

    seconds: float  # the sum of the four parts behind it
    compute: float
    weights: float
    comm: float
    overhead: float
    flops: float
    bytes: float


class Roofline(CostModel):
    """Per operation the p-norm of compute time and memory time, plus named overheads.

    `graphs=False` prices eager launches: a layer takes at least kernels_per_layer · launch_us.
    With graphs a pure decode step is padded to the next captured batch size.
    """

    def __init__(self, model: ModelSpec, hardware: Hardware, *, tp: int = 1, block_size: int = 16,
                 graphs: bool = True):
        model.check_tp(tp)
        eff = hardware.efficiency
        self.model, self.hardware, self.tp, self.graphs = model, hardware, tp, graphs
        self._flops = hardware.tflops * 1e12
        self._bandwidth = hardware.bandwidth * 1e9
        kv = model.rank_kv_bytes_per_token(tp)
        self._kv_bytes = kv
        self._decode_rate = kv / (eff.decode_bandwidth * self._bandwidth)  # seconds a token read
        self._chunk_rate = kv / (eff.prefill_bandwidth * self._bandwidth)
        self._write_rate = kv / (eff.gemm_bandwidth * self._bandwidth)
        self._pair_flops = 4 * model.layers * model.heads * model.head_dim / tp
        self._pair_rate = self._pair_flops / (eff.prefill_flops * self._flops)
        self._row_rate = model.layers * eff.decode_seq_us * 1e-6
        self._copy_rate = 2 * block_size * self._write_rate
        self._swap_rate = block_size * kv / (eff.pcie * hardware.pcie * 1e9)
        self._capture = _capture_sizes(eff.graph_max) if graphs else []
        self._layers_of: dict[int, _Linear] = {}
        self._head_of: dict[int, _Linear] = {}
        self._decode_of: dict[int, float] = {}
        self._step = eff.step_us * 1e-6

    def cost(self, batch: Batch) -> StepCost:
        return self.price(shape_of(batch))

    def seconds(self, batch: Batch) -> float:
        rows = len(batch.starts)
        if batch.num_tokens != rows or batch.partial or batch.copies or batch.swap_ins \
                or batch.swap_outs or not rows:
            return self._seconds(shape_of(batch))
        fixed = self._decode_of.get(rows) or self._decode(rows)
        seconds = fixed + (sum(batch.starts) + rows) * self._decode_rate
        return seconds if self.graphs else max(seconds, self._floor(rows, rows, rows))

    def end_times(self, batch: Batch, begin: float, most: int, horizon: float) -> list[float]:
        rows = len(batch.starts)
        if not self.graphs or batch.num_tokens != rows:
            return [begin + self.seconds(batch)]
        fixed, rate = self._decode_of.get(rows) or self._decode(rows), self._decode_rate
        return growing_ends(begin, fixed, rate, sum(batch.starts) + rows, rows, most, horizon)

    def price(self, shape: Shape) -> StepCost:
        """The price of a step of this shape. A step without rows costs its host time and moves."""
        if not shape.tokens:
            moved, step = shape.swapped * self._swap_rate, self._step
            return StepCost(step + moved, comm=moved, overhead=step)
        layers, head = self._layers_at(shape), self._head_at(shape.sampled)
        seconds = self._seconds(shape)
        compute = layers.compute + head.compute + shape.chunk_pairs * self._pair_rate
        weights = layers.weights + head.weights
        kv = (shape.chunk_context * self._chunk_rate + shape.tokens * self._write_rate
              + shape.copied * self._copy_rate + shape.context * self._decode_rate)
        comm = layers.comm + head.comm + shape.swapped * self._swap_rate
        attended = shape.context + shape.chunk_context
        return StepCost(
            seconds, compute, weights, kv, comm,
            max(0.0, seconds - compute - weights - kv - comm),  # all that is left is overhead
            layers.flops + head.flops + self._pair_flops * (shape.chunk_pairs + shape.context),
            layers.bytes + head.bytes + self._kv_bytes * (attended + shape.tokens))

    def _seconds(self, shape: Shape) -> float:
        if not shape.tokens:
            return self._step + shape.swapped * self._swap_rate
        seconds = self._device(shape)
        if self.graphs:
            return seconds
        return max(seconds, self._floor(shape.tokens, shape.sampled, shape.decodes))

    def _device(self, shape: Shape) -> float:
        """The one sum that every price is: end_times() adds the growing read to the same rest."""
        rest = (self._layers_at(shape).seconds + self._head_at(shape.sampled).seconds
                + shape.chunk_pairs * self._pair_rate + shape.chunk_context * self._chunk_rate
                + shape.tokens * self._write_rate + shape.decodes * self._row_rate
                + shape.copied * self._copy_rate + shape.swapped * self._swap_rate)
        return rest + shape.context * self._decode_rate

    def _decode(self, rows: int) -> float:
        """A pure decode step of so many rows, without the reading of their context."""
        fixed = self._device(Shape(rows, rows, rows, 0, 0, 0, 0, 0.0))
        self._decode_of[rows] = fixed
        return fixed

    def _floor(self, tokens: int, sampled: int, decodes: int) -> float:
        """What an eager step takes at least: the host launching its kernels one by one."""
        eff = self.hardware.efficiency
        launches = self.model.layers * eff.kernels_per_layer * eff.launch_us * 1e-6
        overhead = self._layers_for(tokens).overhead + self._head_at(sampled).overhead
        return launches + overhead + decodes * self._row_rate

    # ----------------------------------------------------------------- per token count, kept

    def _layers_at(self, shape: Shape) -> _Linear:
        tokens = shape.tokens if shape.chunks else self._padded(shape.tokens)
        return self._layers_for(tokens)

    def _layers_for(self, tokens: int) -> _Linear:
        return self._layers_of.get(tokens) or self._layers(tokens)

    def _head_at(self, rows: int) -> _Linear:
        return self._head_of.get(rows) or self._head(rows)

    def _layers(self, tokens: int) -> _Linear:
        """Everything of all layers that only depends on how many tokens go through them."""
        m, p, n = self.model, self.tp, self.model.layers
        q, kv = m.heads * m.head_dim / p, m.rank_kv_heads(p) * m.head_dim
        f = m.intermediate / p
        gemms = [(m.hidden, q + 2 * kv), (q, m.hidden), (m.hidden, 2 * f), (f, m.hidden)]
        parts = [self._gemm(tokens, k, width) for k, width in gemms]
        compute, weights, flops, moved = (n * sum(column) for column in zip(*parts))
        eff = self.hardware.efficiency
        activations = n * tokens * m.dtype_bytes * (8 * m.hidden + 3 * f + 2 * (q + kv))
        elementwise = activations / (eff.elementwise * self._bandwidth)
        overhead = elementwise + n * eff.layer_us * 1e-6 + eff.step_us * 1e-6
        comm = 2 * n * self._allreduce(tokens)
        line = _Linear(compute + weights + comm + overhead, compute, weights, comm, overhead, flops,
                       moved + activations)
        self._layers_of[tokens] = line
        return line

    def _head(self, rows: int) -> _Linear:
        """The LM head: only over rows that sample."""
        m, eff = self.model, self.hardware.efficiency
        if rows:
            compute, weights, flops, moved = self._gemm(rows, m.hidden, m.vocab / self.tp)
        else:
            compute = weights = flops = moved = 0.0
        overhead = rows * eff.sampled_seq_us * 1e-6
        line = _Linear(compute + weights + overhead, compute, weights, 0.0, overhead, flops, moved)
        self._head_of[rows] = line
        return line

    def _gemm(self, t: int, k: float, n: float) -> tuple[float, float, float, float]:
        """[t, k] x [k, n]: (seconds owed to compute, to memory, FLOPs, bytes)."""
        eff = self.hardware.efficiency
        flops = 2.0 * t * k * n
        moved = self.model.dtype_bytes * (k * n + t * (k + n))
        c = flops / (eff.gemm_flops * self._flops)
        w = moved / (eff.gemm_bandwidth * self._bandwidth)
        if math.isinf(eff.p_norm):
            return (c, 0.0, flops, moved) if c >= w else (0.0, w, flops, moved)
        powers = c**eff.p_norm, w**eff.p_norm
        both = sum(powers)
        seconds = both ** (1 / eff.p_norm)
        return seconds * powers[0] / both, seconds * powers[1] / both, flops, moved

    def _allreduce(self, tokens: int) -> float:
        """Seconds of one ring all-reduce of [tokens, hidden]; 0 for one rank."""
        if self.tp == 1:
            return 0.0
        eff, hw = self.hardware.efficiency, self.hardware
        ring = 2 * (self.tp - 1) / self.tp * tokens * self.model.hidden * self.model.dtype_bytes
        latency = eff.allreduce_us_nvlink if hw.link_kind == "nvlink" else eff.allreduce_us_pcie
        return ring / (hw.link * 1e9) + latency * 1e-6

    def _padded(self, tokens: int) -> int:
        """The captured batch size a pure decode step of `tokens` rows runs at."""
        index = bisect_left(self._capture, tokens)
        return self._capture[index] if index < len(self._capture) else tokens


def _capture_sizes(largest: int) -> list[int]:
    """1, 2, 4, then every 8 up to 256, then every 16: vLLM's default list."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)]
    return [size for size in sizes if size <= largest]
