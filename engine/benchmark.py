"""Run a workload through an LLM and say what it took: the measuring behind `engine bench`."""

from __future__ import annotations

import os
import resource
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from time import perf_counter, process_time
from typing import Any

import torch

from engine.core.batch import Batch
from engine.core.errors import ConfigError, TandemError
from engine.core.request import Request, SamplingParams
from engine.llm import LLM
from engine.runner.session import Session
from engine.step_profile import StepProfile, StepProfiler
from engine.workload import Workload

THREADS_A_CORE = 16  # more of them only wait for each other


class BenchError(TandemError):
    """A run that did not compute what was asked for, so that its figures mean nothing."""


@dataclass(slots=True)
class Phase:
    """Steps of one kind. `seconds` are whole steps: schedule, forward, sample, detokenize."""

    steps: int = 0
    prompt_tokens: int = 0  # computed, preempted prompts again; cached ones are not
    output_tokens: int = 0  # sampled
    seconds: float = 0.0
    runner_seconds: float = 0.0  # of these, inside the executor

    def add(self, batch: Batch, tokens: list[Any], seconds: float, inside: float) -> None:
        self.steps += 1
        self.prompt_tokens += prompt_tokens(batch)
        self.output_tokens += sum(isinstance(token, int) for token in tokens)
        self.seconds += seconds
        self.runner_seconds += inside


@dataclass(slots=True)
class Figures:
    """One run, warm-up excluded. Seconds are of the wall clock unless they say cpu."""

    requests: int
    input_tokens: int
    output_tokens: int
    wall_seconds: float
    cpu_seconds: float  # all threads of this process
    output_tokens_per_second: float
    total_tokens_per_second: float
    prefill: Phase  # steps that compute any prompt token, with the decodes that ride along
    decode: Phase  # all others
    preemptions: int
    peak_rss_bytes: int  # of the process, load and warm-up included
    peak_cuda_bytes: int | None  # allocated by PyTorch; None without CUDA
    profile: StepProfile | None = None  # of the decode steps, if it was asked for

    def to_json(self) -> dict[str, Any]:
        profile = self.profile
        return {**asdict(self), "profile": None if profile is None else profile.to_json()}


def prompt_tokens(batch: Batch) -> int:
    """How many of the batch's tokens belong to prompts."""
    return sum(min(max(request.num_prompt - start, 0), count) for request, start, count
               in zip(batch.requests, batch.starts, batch.counts, strict=True))


class StepTimer:
    """Watches an LLM's executor; `turn()` is one engine step, put on its phase's account."""

    def __init__(self, llm: LLM, profiler: StepProfiler | None = None):
        """`profiler` gets the decode steps."""
        self.engine, self.profiler = llm.engine, profiler
        self.prefill, self.decode = Phase(), Phase()
        self.ran: list[tuple[Batch, list[Any], float]] = []
        self.inner = self.engine.runner.run

    def __enter__(self) -> StepTimer:
        if self.engine.pipeline is not None:  # nothing is inside the executor alone then
            self.engine.on_step = lambda batch, output, seconds: self.ran.append(
                (batch, output.tokens, seconds))
        else:
            self.engine.runner.run = self._run  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        if self.engine.pipeline is not None:
            self.engine.on_step = None
        else:
            del self.engine.runner.run  # the class's own method shows again

    def _run(self, batch: Batch) -> Any:
        started = perf_counter()
        output = self.inner(batch)
        self.ran.append((batch, output.tokens, perf_counter() - started))
        return output

    def turn(self) -> bool:
        """False if nothing is unfinished."""
        started = perf_counter()
        went_on = self.engine.step()
        seconds = perf_counter() - started
        for batch, tokens, inside in self.ran:
            phase = self.prefill if prompt_tokens(batch) else self.decode
            phase.add(batch, tokens, seconds / len(self.ran), inside)
        if self.profiler is not None:
            self._profile(self.profiler, seconds)
        self.ran.clear()
        return went_on

    def _profile(self, profiler: StepProfiler, seconds: float) -> None:
        if len(self.ran) == 1 and not prompt_tokens(self.ran[0][0]) and len(self.ran[0][0]):
            batch, _, inside = self.ran[0]
            profiler.add(sum(batch.counts), seconds, inside)
        else:
            profiler.drop()


def warm_up(llm: LLM, workload: Workload) -> None:
    """Two prompts of the workload and a few tokens: pages faulted in, buffers and threads made.
    The prefix cache is emptied afterwards."""
    params = SamplingParams(temperature=1.0, ignore_eos=True,
                            max_tokens=min(4, min(workload.outputs)))
    llm.generate([list(prompt) for prompt in workload.prompts[:2]], params)
    llm.engine.scheduler.reset_prefix_cache()


def measure(llm: LLM, workload: Workload, temperature: float, profile: bool = False) -> Figures:
    """All requests at once, to their end. BenchError if a request fails or a token is missing;
    ConfigError if a `profile` is asked for where there can be none."""
    profiler = StepProfiler(llm.engine) if profile else None
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    sessions = [submit(llm, number, workload, temperature)
                for number in range(len(workload.prompts))]
    with profiler or nullcontext(), StepTimer(llm, profiler) as timer:
        wall, cpu = perf_counter(), process_time()
        while timer.turn():
            pass
        wall, cpu = perf_counter() - wall, process_time() - cpu
    made = _check(sessions, workload)
    for session in sessions:
        llm.engine.close(session)
    return Figures(
        len(sessions), workload.input_tokens, made, wall, cpu, made / wall,
        (made + workload.input_tokens) / wall, timer.prefill, timer.decode,
        sum(session.request.num_preemptions for session in sessions), peak_rss(),
        torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        None if profiler is None else profiler.finish())


def submit(llm: LLM, number: int, workload: Workload, temperature: float) -> Session:
    params = SamplingParams(temperature=temperature, ignore_eos=True,
                            max_tokens=workload.outputs[number])
    request = Request(f"b{number}", workload.prompts[number], params,
                      arrival_time=llm.engine.clock())
    return llm.engine.submit(request)


def _check(sessions: list[Session], workload: Workload) -> int:
    """Output tokens of all sessions, each exactly as many as the workload asks for."""
    made = 0
    for session, wanted in zip(sessions, workload.outputs, strict=True):
        request = session.request
        if request.error or request.num_output != wanted:
            why = request.error or f"it ended by {request.finish_reason}"
            raise BenchError(f"request {request.id} brought {request.num_output} of {wanted} "
                             f"tokens, so the figures are void: {why}")
        made += request.num_output
    return made


def peak_rss() -> int:
    """The largest resident set this process ever had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def core_ids() -> list[int]:
    """The cores this process may run on; empty where the system does not tell."""
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:
        return []


def set_threads(num_threads: int | None) -> None:
    """PyTorch's threads; None leaves them. ConfigError if there must not be so many: PyTorch takes
    any number, and the process dies when it starts more than the system allows."""
    if num_threads is None:
        return
    if num_threads < 1:
        raise ConfigError(f"num_threads={num_threads} must be at least 1")
    most = THREADS_A_CORE * (os.cpu_count() or 1)
    if num_threads > most:
        raise ConfigError(f"num_threads={num_threads} is more than {most}, which is already "
                          f"{THREADS_A_CORE} for each of this machine's {os.cpu_count() or 1} "
                          f"cores: lower --num-threads, best to the number of cores")
    torch.set_num_threads(num_threads)
