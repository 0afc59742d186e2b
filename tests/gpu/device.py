"""A CUDA device, or a CPU that plays one so that the scripts can be rehearsed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

ROUND = 0.05  # seconds of one round of repeated runs
L2_TIMES = 4  # a timed loop walks over this many times the L2 cache, or it would time the cache


@dataclass(frozen=True)
class Device:
    """Where the parts run. `rehearsal`: a CPU under Triton's interpreter, sizes divided."""

    name: str
    rehearsal: bool
    end: float  # time.monotonic() at which the part should be done

    @classmethod
    def get(cls, rehearsal: bool, seconds: float) -> Device | None:
        """None where there is no CUDA device. The part has `seconds` from now."""
        end = time.monotonic() + 0.85 * seconds - 5
        if rehearsal:
            os.environ["TRITON_INTERPRET"] = "1"  # before anybody imports Triton
            return cls("cpu", True, end)
        return cls("cuda", False, end) if torch.cuda.is_available() else None

    def late(self) -> bool:
        """Whether a part of many measurements must stop, to keep those it has."""
        return time.monotonic() > self.end

    def size(self, real: int, small: int) -> int:
        return small if self.rehearsal else real

    def capture(self, call: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """(replay, out): `call` in a CUDA graph, as the runner would take it; out is its result."""
        if self.rehearsal:
            out = call().clone()
            return lambda: out.copy_(call()), out
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.inference_mode():
            for _ in range(3):  # compile, and let libraries make their handles
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph):
            out = call()
        return graph.replay, out

    def seconds(self, run: Callable[[], object], rounds: int = 5) -> list[float]:
        """Seconds of one run() in each of `rounds` rounds, each of as many runs as ROUND holds."""
        run()
        started = time.perf_counter()
        run()
        if self.rehearsal:
            return [time.perf_counter() - started]
        torch.cuda.synchronize()
        repeats = max(2, min(50, int(ROUND / (time.perf_counter() - started))))
        measured = []
        for _ in range(rounds):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            for _ in range(repeats):
                run()
            end.record()
            end.synchronize()
            measured.append(start.elapsed_time(end) / 1000 / repeats)
        return measured

    def beyond_l2(self, bytes_of_one: int, most: int = 28) -> int:
        """How many such buffers to walk over so that none is in the L2 cache at its turn."""
        if self.rehearsal:
            return 1
        l2 = torch.cuda.get_device_properties(0).L2_cache_size
        return max(1, min(most, -(-L2_TIMES * l2 // bytes_of_one)))


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def guarded(run, *arguments, **named) -> dict[str, Any]:
    """run(...)'s result, or its error as a result: one size too many must not lose the others."""
    try:
        return run(*arguments, **named)
    except Exception as error:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return {"error": f"{type(error).__name__}: {str(error)[:500]}"}
