"""What a model takes of a GPU beside its KV cache, found out by doing the largest step once."""

from __future__ import annotations

import gc
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch

from engine.attention.base import StepInputs
from engine.core.request import Request, SamplingParams
from engine.runner.graphs import Call, CudaRecorder, Recorder, bucket_sizes
from engine.runner.logits import SampleRow
from engine.runner.model_runner import ModelRunner
from engine.runner.sampler import Draw
from engine.runner.sizing import GpuMemory


class Meter(Protocol):
    """Reads memory, in bytes."""

    def settle(self) -> None:
        """Wait for the device, give back what is cached, forget the peak."""

    def total(self) -> int: ...

    def free(self) -> int:
        """Of the whole device, whoever asks."""

    def reserved(self) -> int:
        """Held by PyTorch in this process, used or cached."""

    def allocated(self) -> int: ...

    def peak(self) -> int:
        """The most that was allocated since settle()."""


class CudaMeter:
    """PyTorch's and the driver's own counters."""

    def __init__(self, device: torch.device):
        self.device = device

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def total(self) -> int:
        return torch.cuda.mem_get_info(self.device)[1]

    def free(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]

    def reserved(self) -> int:
        return torch.cuda.memory_reserved(self.device)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)


def read_memory(meter: Meter) -> GpuMemory:
    """What a loaded model leaves, before any step."""
    meter.settle()
    total = meter.total()
    return GpuMemory(total, total - meter.free() - meter.reserved(), meter.allocated())


def profile(runner: ModelRunner, meter: Meter, *, step_tokens: int, num_seqs: int,
            graphs: bool) -> GpuMemory:
    """Measure with `runner`, whose pool may be as small as one block. `graphs`: count those of
    batches up to `num_seqs` too."""
    seen = read_memory(meter)
    largest_step(runner, step_tokens, num_seqs)
    activations = meter.peak() - seen.weights
    # The step made CUDA load kernels, and NCCL its buffers, which stay.
    outside = max(seen.outside, read_memory(meter).outside)
    taken = graph_memory(runner, meter, num_seqs) if graphs else 0
    return GpuMemory(seen.total, outside, seen.weights, max(activations, 0), taken)


@torch.inference_mode()
def largest_step(runner: ModelRunner, step_tokens: int, num_seqs: int) -> None:
    """Compute prompts of `step_tokens` tokens in all and draw `num_seqs` tokens. Writes no slot:
    every position reads the padding block."""
    longest = min(step_tokens, runner.max_model_len)
    counts = [longest] * (step_tokens // longest)
    if rest := step_tokens - sum(counts):
        counts.append(rest)
    positions = np.concatenate([np.arange(count) for count in counts])
    pages = -(-longest // runner.block_size)
    last = np.cumsum(counts) - 1
    inputs = StepInputs(
        np.zeros(step_tokens, np.int64), positions, np.full(step_tokens, -1, np.int64),
        np.concatenate([[0], last + 1]).astype(np.int32), np.array(counts, np.int32),
        np.full((len(counts), pages), runner.cache.num_blocks, np.int32),
        np.resize(last, num_seqs).astype(np.int64))
    logits = runner.forward(inputs)
    worst = SamplingParams(top_p=1 - 1e-9, logprobs=20, repetition_penalty=1.1)  # sorts all tokens
    request = Request("profile", [0], worst)
    Draw(logits, [SampleRow(request, 1)] * num_seqs, 0).read()


class MeasuringRecorder:
    """Records as another does, and notes how much of the device was in use after each."""

    def __init__(self, inner: Recorder, meter: Meter):
        self.inner, self.meter, self.lasting = inner, meter, inner.lasting
        self.used: list[int] = [meter.total() - meter.free()]

    def record(self, call: Call) -> Call:
        replay = self.inner.record(call)
        self.used.append(self.meter.total() - self.meter.free())
        return replay


@torch.inference_mode()
def graph_memory(runner: ModelRunner, meter: Meter, num_seqs: int,
                 recorder: Recorder | None = None) -> int:
    """Bytes that the graphs of all batch sizes take, told from the two largest and the smallest,
    whose rows the kernels split: the others lie in the same pool, and cost no more than these."""
    sizes = bucket_sizes(num_seqs)
    meter.settle()
    measuring = MeasuringRecorder(recorder or CudaRecorder(), meter)
    trial = runner.make_graphs(sorted({sizes[0], *sizes[-2:]}), measuring)
    del trial
    meter.settle()
    return extrapolate(measuring.used, len(sizes))


def extrapolate(used: list[int], number: int) -> int:
    """Of memory in use before and after each of the first few graphs, what `number` take."""
    first, *others = [max(after - before, 0) for before, after in pairwise(used)]
    return first + (number - 1) * max(others, default=0)
