"""Grids of simulations: a plan's points, run in parallel, kept as they come in, resumable.

Each result is appended to one JSON Lines file at once, so a sweep that is killed goes on where it
was. A point that breaks, or takes its process with it, is a row with the reason; the others go on.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

from engine.core.errors import TandemError
from engine.mistakes import file_sentence
from simulator.errors import WorkloadError
from simulator.plan import Point, check_values, plain
from simulator.results import Results, Row
from simulator.scenario import run_scenario

KILLED = ("the process that simulated it was killed, most often for want of memory: make the point "
          "smaller, or run fewer at a time with --workers")


def run_point(point: Point) -> Row:
    """Simulate one point: its values, then its figures, or the sentence why there are none."""
    try:
        check_values(point.values)
        result = run_scenario(point.values)
    except Exception as problem:  # whatever it is: the other points are worth their simulation
        return _without_result(point, _sentence(problem))
    growth = result.divergence
    figures = result.as_json() | {
        "prefix_hit_rate": result.prefix_hit_rate, "stopped": result.stopped,
        "utilisation": growth.utilisation if growth else None,
        "num_blocks": result.config.num_blocks, "simulation_seconds": result.loop_seconds}
    return _without_result(point, None) | {name: None if value is None else plain(value)
                                           for name, value in figures.items()}


def _without_result(point: Point, error: str | None) -> Row:
    values = {name: plain(value) for name, value in point.values.items()}
    return {"key": point.key, **values, "error": error}


def _sentence(problem: Exception) -> str:
    if isinstance(problem, TandemError):
        return str(problem)
    if isinstance(problem, MemoryError):
        return "it needs more memory than there is: make the point smaller"
    if isinstance(problem, OSError):
        return file_sentence(problem)
    return (f"the simulation cannot go on with these values ({type(problem).__name__}: {problem}): "
            f"leave them out one by one to find which")


Runner = Callable[[Iterable[Point]], Iterator[Row]]
Simulate = Callable[[Point], Row]


def local_runner(workers: int, simulate: Simulate = run_point) -> Runner:
    """Points in so many processes; rows in the order in which they are ready. One worker is this
    process itself."""
    def run(points: Iterable[Point]) -> Iterator[Row]:
        left = deque(points)
        if workers <= 1:
            yield from map(simulate, left)
            return
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes are the parallelism
        while left:
            for point in (yield from _until_broken(left, workers, simulate)):
                # It ran when a process died. Alone it shows whether it was the cause.
                if (yield from _until_broken(deque([point]), 1, simulate)):
                    yield _without_result(point, KILLED)
    return run


def _until_broken(left: deque[Point], workers: int, simulate: Simulate
                  ) -> Generator[Row, None, list[Point]]:
    """Rows of points taken from `left`, until none is left or a process dies. Returns the points
    that were running then."""
    running: dict[Future[Row], Point] = {}
    pool = ProcessPoolExecutor(min(workers, len(left)), mp_context=get_context("spawn"),
                               initializer=_leave_with, initargs=(os.getpid(),))
    try:
        while left or running:
            while left and len(running) < workers:
                running[pool.submit(simulate, left[0])] = left[0]
                left.popleft()
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                row = done.result()
                del running[done]
                yield row
    except BrokenProcessPool:
        return list(running.values())
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return []


def _leave_with(parent: int) -> None:
    """In a worker: end when the sweep is gone, also if it was killed and could not say so."""
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def ray_runner(address: str) -> Runner:
    """The same on a Ray cluster; "auto" joins a running one or starts one here."""
    try:
        import ray
    except ImportError:
        raise WorkloadError("--ray needs the ray package: install tandem-lab[ray], or leave --ray "
                            "out to use this machine's cores") from None

    def run(points: Iterable[Point]) -> Iterator[Row]:
        try:
            ray.init(address=address, log_to_driver=False, logging_level="error")
        except ConnectionError:
            if address != "auto":
                raise WorkloadError(f"no Ray cluster answers at {address!r}") from None
            ray.init(log_to_driver=False, logging_level="error")
        try:
            remote = ray.remote(run_point)
            waiting = {remote.remote(point): point for point in points}
            while waiting:
                for ready in ray.wait(list(waiting))[0]:
                    try:
                        row = ray.get(ready)
                    except ray.exceptions.RayError:
                        row = _without_result(waiting[ready], KILLED)
                    del waiting[ready]
                    yield row
        finally:
            ray.shutdown()
    return run


def has_result(results: Results, point: Point) -> bool:
    """Whether a point was simulated before."""
    row = results.rows.get(point.key)
    return row is not None and row["error"] is None


def sweep(points: list[Point], results: Results, runner: Runner,
          on_progress: Callable[[int, int], None] | None = None) -> list[Row]:
    """Run the points without a result; the rows of all points, in the plan's order. A point that
    could not work before runs again: what it lacked may be there now."""
    left = [point for point in points if not has_result(results, point)]
    done = len(points) - len(left)
    for row in runner(left):
        results.add(row)
        done += 1
        if on_progress is not None:
            on_progress(done, len(points))
    return [results.rows[point.key] for point in points]
