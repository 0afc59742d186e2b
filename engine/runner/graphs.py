"""Decode steps over static buffers: recorded once for a few batch sizes, then replayed.

A CUDA graph repeats kernels with the very addresses they were recorded with. So a step's arrays are
copied into buffers that stay where they are, and a batch between two recorded sizes is filled up
with padding rows: token 0 at position 0, slot -1 (nothing is written), a context of length 1 in the
padding block (length 0 would be 0/0 in some kernels). Their results are thrown away. The results
of all sizes share one buffer, and the head, which would need the largest one, is left outside.

All of this is ordinary code. `CudaRecorder` records real graphs; `EagerRecorder` remembers the
function and calls it again on the same buffers, on any device: tests and `verify` use that.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from engine.attention.base import StepInputs
from engine.attention.upload import upload
from engine.core.errors import ConfigError
from engine.mistakes import reason_of

Call = Callable[[], torch.Tensor]
Fill = Callable[[torch.Tensor], None]  # puts token ids that only the device knows into the ids
LARGEST = 512  # rows: at such sizes a step's kernels outlast their launches, so it runs eagerly


def bucket_sizes(max_num_seqs: int, largest: int = LARGEST) -> list[int]:
    """The batch sizes to record, ascending. The last is min(max_num_seqs, largest) itself, so that
    no batch up to it is without a graph."""
    last = min(max_num_seqs, largest)
    steps = [1, 2, 4, *range(8, 256, 8), *range(256, last, 32)]
    return [size for size in steps if size < last] + [last]


class Recorder(Protocol):
    """Turns a call that works on static tensors into its replay, which returns the same tensor
    every time. `lasting`: what the call does on the host happens only while recording."""

    lasting: bool

    def record(self, call: Call) -> Call: ...


class EagerRecorder:
    """The stand-in: a replay is the call itself."""

    lasting = False

    def record(self, call: Call) -> Call:
        return call


class CudaRecorder:
    """Real graphs. They share one memory pool, so record the largest first."""

    lasting = True

    def __init__(self) -> None:
        self.pool: Any = None

    def record(self, call: Call) -> Call:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compile kernels, let libraries make their handles
            call()
            call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use CUDA meanwhile (NCCL's does): only this one is watched.
        with torch.cuda.graph(graph, pool=self.pool, stream=side,  # else one of the first device
                              capture_error_mode="thread_local"):
            out = call()
        self.pool = self.pool or graph.pool()

        def replay() -> torch.Tensor:
            graph.replay()
            return out
        return replay


class Buffers:
    """The static arrays of a decode step, for up to `rows` rows of `width` blocks each."""

    def __init__(self, rows: int, width: int, padding_block: int, device: torch.device):
        def full(shape: tuple[int, ...], value: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)
        self.width, self.padding_block, self.device = width, padding_block, device
        self.input_ids = full((rows,), 0, torch.int64)
        self.positions = full((rows,), 0, torch.int64)
        self.slots = full((rows,), -1, torch.int64)
        self.seqlens_k = full((rows,), 1, torch.int32)
        self.tables = full((rows, width), padding_block, torch.int32)

    def fill(self, inputs: StepInputs, size: int, late: Fill | None = None) -> None:
        """Take over a step of at most `size` rows of one token, padded to `size` rows."""
        tables = np.full((size, self.width), self.padding_block, dtype=np.int32)
        rows, pages = inputs.block_tables.shape
        tables[:rows, :min(pages, self.width)] = inputs.block_tables[:, :self.width]
        arrays = upload((
            _padded(inputs.input_ids, size, 0), _padded(inputs.positions, size, 0),
            _padded(inputs.slot_mapping, size, -1), _padded(inputs.seqlens_k, size, 1), tables),
            self.device)
        static = (self.input_ids, self.positions, self.slots, self.seqlens_k, self.tables)
        for buffer, array in zip(static, arrays, strict=True):
            buffer[:size].copy_(array)
        if late is not None:
            late(self.input_ids)

    def as_inputs(self, size: int) -> StepInputs:
        """The first `size` rows as host arrays, for a back end that plans on the host."""
        def host(tensor: torch.Tensor) -> np.ndarray:
            return tensor[:size].cpu().numpy()
        return StepInputs(host(self.input_ids), host(self.positions), host(self.slots),
                          np.arange(size + 1, dtype=np.int32), host(self.seqlens_k),
                          host(self.tables), np.arange(size))


def _padded(values: np.ndarray, size: int, padding: int) -> np.ndarray:
    out = np.full(size, padding, dtype=values.dtype)
    out[:len(values)] = values
    return out


class DecodeGraphs:
    """The recorded sizes of one runner.

    `compute(ids, positions, plan)` is the forward pass of rows of one token up to the last norm;
    `attention` makes the plan: once over the buffers if the recorder lasts, else every time.
    """

    def __init__(self, compute: Callable[..., torch.Tensor], attention: Any, *, num_blocks: int,
                 width: int, sizes: list[int], recorder: Recorder, out: torch.Tensor):
        """`width`: blocks of the longest request. `out` [sizes[-1], hidden]: where the results go.
        ConfigError if the recording fails."""
        self.compute, self.attention, self.num_blocks = compute, attention, num_blocks
        self.sizes, self.recorder, self.out = sizes, recorder, out
        self.buffers = Buffers(sizes[-1], width, num_blocks, out.device)
        self._replays: dict[int, Call] = {}
        gc.collect()  # what is freed while recording would be freed into the graphs' pool
        for size in reversed(sizes):
            try:
                self._replays[size] = recorder.record(self._call(size))
            except RuntimeError as error:
                raise ConfigError(
                    f"no CUDA graph could be recorded for {size} rows "
                    f"({reason_of(error)}): enforce_eager=True runs without, "
                    f"and a lower max_num_seqs or gpu_memory_utilization needs less memory"
                ) from error

    def _call(self, size: int) -> Call:
        buffers, out = self.buffers, self.out[:size]
        ids, positions = buffers.input_ids[:size], buffers.positions[:size]
        fixed = None
        if self.recorder.lasting:
            fixed = self.attention.decode_plan(buffers.slots[:size], buffers.seqlens_k[:size],
                                               buffers.tables[:size])

        def call() -> torch.Tensor:
            plan = fixed if fixed is not None else self.attention.plan(buffers.as_inputs(size),
                                                                       self.num_blocks)
            return out.copy_(self.compute(ids, positions, plan))
        return call

    def size_for(self, inputs: StepInputs) -> int | None:
        """The recorded size to replay for this step; None if it must run eagerly: a row has
        several tokens, or there are more rows than the largest size."""
        rows = len(inputs.seqlens_k)
        if len(inputs.input_ids) != rows or rows > self.sizes[-1]:
            return None
        return next(size for size in self.sizes if size >= rows)

    def run(self, inputs: StepInputs, size: int, late: Fill | None = None) -> torch.Tensor:
        """[sampling rows, hidden] of a step for which size_for() gave `size`, for the head. They
        lie in memory that the next replay overwrites."""
        self.buffers.fill(inputs, size, late)
        hidden = self._replays[size]()
        wanted = inputs.logits_indices
        if len(wanted) == len(inputs.seqlens_k):
            return hidden[:len(wanted)]
        return hidden.index_select(0, upload((wanted,), hidden.device)[0])


def why_no_graphs(attention: Any, model: Any) -> str | None:
    """What keeps decode steps out of CUDA graphs; None: nothing does."""
    if not hasattr(attention, "decode_plan"):
        return f"the {attention.name} back end plans every step on the host"
    return attention.why_no_graphs or model.why_no_graphs
