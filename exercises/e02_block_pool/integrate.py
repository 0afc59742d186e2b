"""E02's integration stage: the student's pool, locked in its process, serves the real engine.

Three runs, each against the same run on the grader's own model of the pool; every event must be the
same, to the block id: the core's scheduler alone with forked requests, the simulator, and the real
engine on the tiny model, whose tokens must be the same too.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import lru_cache
from random import Random
from typing import Any

from engine.core.batch import RowFailed
from engine.core.config import SchedulerConfig
from engine.core.events import EventLog
from engine.core.request import Request, SamplingParams
from engine.core.scheduler import Scheduler
from engine.loop import EngineLoop, StepResult
from exercises.e02_block_pool.hidden import PoolModel
from exercises.grader.outcomes import WorkerFailure
from exercises.grader.pool_adapter import PoolAdapter, PoolMisbehaved, RemotePool
from exercises.grader.report import TestResult
from exercises.grader.schedules import (
    num_steps,
    schedule_difference,
    token_difference,
    without_times,
)
from exercises.grader.stages import MissingPart, StageRun

MakePool = Callable[[int, int], Any]  # (num_blocks, block_size) -> what Scheduler takes as pool
Outputs = dict[str, list[int]]
Run = tuple[list[dict[str, Any]], Outputs]  # schedule, output tokens by request


AUDIT_EVERY = 8  # steps between two looks at every reference count


class ModelPool:
    """The grader's model as a SmallPool."""

    def __init__(self, num_blocks: int):
        self.model = PoolModel(num_blocks)

    def alloc_many(self, count: int) -> list[int]:
        blocks = [self.model.alloc() for _ in range(count)]
        return [block for block in blocks if block is not None]

    def share(self, block: int) -> None:
        self.model.share(block)

    def free_many(self, blocks: list[int]) -> None:
        for block in blocks:
            self.model.free(block)

    def num_free(self) -> int:
        return len(self.model.free_ids)

    def refcounts(self, blocks: list[int]) -> list[int]:
        return [self.model.refcount(block) or 0 for block in blocks]


def reference_pool(num_blocks: int, block_size: int) -> PoolAdapter:
    """The pool of the reference runs."""
    return PoolAdapter(ModelPool(num_blocks), num_blocks)


# ---------------------------------------------------------------------------------- the runs

def run_scheduler(seed: str, make_pool: MakePool) -> Run:
    """The core's loop alone: forked samples, aborts, and a pool small enough to preempt."""
    rng = Random(seed)
    config = SchedulerConfig(num_blocks=24, block_size=4, max_model_len=64, max_num_seqs=8,
                             max_num_batched_tokens=48, enable_prefix_caching=False)
    log = EventLog(None, {})
    pool = make_pool(24, 4)
    scheduler = Scheduler(config, emit=log.emit, pool=pool)
    loop = EngineLoop(scheduler, log)
    requests = _requests(rng)
    aborts = {rng.randrange(5, 60): rng.choice(requests).id for _ in range(4)}
    for request in requests:
        loop.submit(request)
    turns = loop.steps(lambda: 0.0)
    batch = next(turns, None)
    while batch is not None:
        if batch.step in aborts:
            loop.abort(aborts[batch.step])
        if batch.step % AUDIT_EVERY == 0:
            pool.check([request.block_table for request in scheduler.running])
        tokens: list[int | None | RowFailed] = [
            None if row in batch.partial else (request.seq * 31 + request.num_tokens) % 97
            for row, request in enumerate(batch.requests)]
        try:
            batch = turns.send(StepResult(tokens))
        except StopIteration:
            break
    return without_times(log.events or []), {r.id: r.output_tokens for r in requests}


def _requests(rng: Random) -> list[Request]:
    requests = []
    for number in range(24):
        prompt = [rng.randrange(97) for _ in range(rng.randint(1, 30))]
        params = SamplingParams(max_tokens=rng.randint(1, 24), ignore_eos=True)
        parent = Request(f"r{number}", prompt, params)
        samples = [Request(f"r{number}.{k}", prompt, params, parent=parent)
                   for k in range(1, rng.choice((1, 1, 2, 3)))]
        requests += [parent, *samples]
    return requests


def run_simulator(seed: str, make_pool: MakePool) -> Run:
    """The simulator: requests arriving over time at a modelled H100 with few blocks."""
    from simulator.api import simulate
    from simulator.workload import fixed_list

    rng = Random(seed)
    workload = fixed_list((rng.random() * 0.4, rng.randint(1, 120), rng.randint(1, 60))
                          for _ in range(50))
    config = SchedulerConfig(num_blocks=40, block_size=16, max_model_len=256, max_num_seqs=12,
                             max_num_batched_tokens=160, enable_prefix_caching=False)
    done = simulate(workload, "llama-3.1-8b", "h100", config, keep_events=True,
                    parts={"pool": lambda: make_pool(40, 16)})
    return without_times(done.events or []), {}


def run_engine(seed: str, make_pool: MakePool) -> Run:
    """The real engine on the tiny model: greedy and forked requests. MissingPart without torch."""
    for needed in ("torch", "engine.llm"):
        if importlib.util.find_spec(needed) is None:
            raise MissingPart(f"the real engine needs {needed}, which is not installed here")
    from exercises.grader.tiny_engine import run_tiny

    rng = Random(seed)
    work = [([rng.randrange(3, 200) for _ in range(rng.randint(2, 40))], rng.randint(4, 24),
             rng.choice((1, 1, 2))) for _ in range(10)]
    events, tokens = run_tiny(work, num_blocks=20, block_size=8, pool=make_pool(20, 8))
    return without_times(events), tokens


# --------------------------------------------------------------------------------- the tests

RUNS = {
    "scheduler": (run_scheduler, "the scheduler alone runs on it, with forks and aborts"),
    "simulator": (run_simulator, "the simulator serves fifty requests on it"),
    "engine": (run_engine, "the real engine generates on it"),
}


@lru_cache(maxsize=32)
def reference(name: str, seed: str) -> Run:
    """The reference's run; kept, because `verify` grades many files with one seed."""
    return RUNS[name][0](seed, reference_pool)


def run(stage: StageRun) -> list[TestResult]:
    """One test a run."""
    return [_one(stage, name) for name in RUNS]


def _one(stage: StageRun, name: str) -> TestResult:
    drive, sentence = RUNS[name]
    seed = f"{stage.seed}/{name}"
    try:
        right_events, right_tokens = reference(name, seed)
        with stage.session() as session:
            made: list[PoolAdapter] = []

            def make_pool(blocks: int, size: int) -> PoolAdapter:
                made.append(PoolAdapter(RemotePool(session, blocks, size), blocks))
                return made[-1]

            events, tokens = drive(seed, make_pool)
            made[0].check()  # everything is over: nobody holds a block
    except MissingPart as missing:
        stage.notices.append(f"{name}: skipped, {missing}")
        return stage.test("R11", sentence, "skipped", message=str(missing))
    except PoolMisbehaved as broken:
        return stage.test("R11", sentence, "fail", message=f"while serving: {broken}")
    except WorkerFailure as failure:
        return stage.test("R11", sentence, failure.status, message=f"while serving: {failure}")
    steps = num_steps(right_events)
    why = schedule_difference(right_events, events) or token_difference(right_tokens, tokens)
    if why is not None:
        return stage.test("R11", sentence, "fail", message=why)
    return stage.test("R11", f"{sentence}: {steps} steps as on the reference", "pass",
                      ops={"steps": float(steps)})
