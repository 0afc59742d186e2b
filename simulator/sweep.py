"""Grids of simulations: a plan's points, run in parallel, kept as they come in, resumable.

A point is a scenario with a key: a digest of its values and of the files it names. Each result is
appended to one JSON Lines file at once, so a sweep that is killed goes on where it was.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from engine.core.errors import TandemError
from simulator.errors import WorkloadError
from simulator.scenario import FILES, check_names, run_scenario
from simulator.tables import read_toml

FORMAT = 1  # of a row; a new one makes every point run again
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Point:
    """One simulation of a sweep."""

    key: str
    values: dict[str, Any]


def read_plan(path: Path) -> list[Point]:
    """The points of a plan file: `[base]` holds what they share, `[grid]` a list a name.

    Files are looked for beside the plan first. SpecError or WorkloadError names what is wrong.
    """
    plan = read_toml(path, "a plan with the tables [base] and [grid]")
    base, grid = plan.get("base", {}), plan.get("grid", {})
    if set(plan) - {"base", "grid"} or not isinstance(base, dict) or not isinstance(grid, dict):
        found = ", ".join(plan) or "nothing"
        raise WorkloadError(f"{path}: a plan has the tables [base] and [grid], found {found}")
    check_names({**base, **grid}, str(path))
    if both := sorted(set(base) & set(grid)):
        raise WorkloadError(f"{path}: {both[0]!r} is in [base] and in [grid]: keep one")
    for name, values in grid.items():
        if not isinstance(values, list) or not values:
            raise WorkloadError(f"{path}: [grid] {name} must be a list of at least one value")
    points = {}
    for combination in itertools.product(*grid.values()):
        point = _point({**base, **dict(zip(grid, combination))}, path.parent)
        points[point.key] = point  # equal points count once
    return list(points.values())


def _point(values: dict[str, Any], folder: Path) -> Point:
    values = dict(values)
    digest = hashlib.blake2b(f"{FORMAT}".encode(), digest_size=10)
    contents = []
    for name in FILES:
        text = values.get(name)
        if not isinstance(text, str):
            continue
        here = folder / text
        if here.exists():
            values[name] = str(here)
        path = Path(values[name])
        if path.is_file():
            contents.append(name.encode() + path.read_bytes())
            text = path.name  # a file that moved is the same file
        digest.update(f"{name}={text}\n".encode())
    rest = {name: value for name, value in values.items() if name not in FILES}
    digest.update(json.dumps(rest, sort_keys=True, default=str).encode())
    for content in contents:
        digest.update(hashlib.blake2b(content).digest())
    return Point(digest.hexdigest(), values)


def run_point(point: Point) -> Row:
    """Simulate one point: its values, then its figures, or the sentence why there are none."""
    row: Row = {"key": point.key, **point.values, "error": None}
    try:
        result = run_scenario(point.values)
    except TandemError as problem:
        return row | {"error": str(problem)}
    except (TypeError, ValueError, AttributeError) as problem:
        return row | {"error": f"a value of the plan has the wrong type: {problem}"}
    growth = result.divergence
    return row | result.as_json() | {
        "prefix_hit_rate": result.prefix_hit_rate, "stopped": result.stopped,
        "utilisation": growth.utilisation if growth else None,
        "num_blocks": result.config.num_blocks, "simulation_seconds": result.loop_seconds}


class Results:
    """The rows of a sweep in a JSON Lines file: what is there, and a way to add."""

    def __init__(self, path: Path):
        self.path = path
        self.rows: dict[str, Row] = {}
        whole = 0
        if path.exists():
            for line in path.read_bytes().splitlines(keepends=True):
                try:
                    row = json.loads(line) if line.endswith(b"\n") else None
                except ValueError:
                    row = None
                if not isinstance(row, dict) or "key" not in row:
                    break  # the sweep was killed while it wrote this line
                self.rows[row["key"]] = row
                whole += len(line)
            if not whole and not b'{"key"'.startswith(path.read_bytes()[:6]):
                raise WorkloadError(f"{path} holds something else than the results of a sweep, and "
                                    f"stays as it is: choose another --out")
            with path.open("r+b") as file:
                file.truncate(whole)

    def add(self, row: Row) -> None:
        """Keep a row, on disk before this returns."""
        self.rows[row["key"]] = row
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


Runner = Callable[[Iterable[Point]], Iterator[Row]]


def local_runner(workers: int) -> Runner:
    """Points in so many processes; rows in the order in which they are ready."""
    def run(points: Iterable[Point]) -> Iterator[Row]:
        points = list(points)
        if workers <= 1 or len(points) <= 1:
            yield from map(run_point, points)
            return
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes are the parallelism
        pool = ProcessPoolExecutor(min(workers, len(points)), mp_context=get_context("spawn"),
                                   initializer=_leave_with, initargs=(os.getpid(),))
        try:
            for done in as_completed([pool.submit(run_point, point) for point in points]):
                yield done.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return run


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
            waiting = [remote.remote(point) for point in points]
            while waiting:
                ready, waiting = ray.wait(waiting)
                yield from ray.get(ready)
        finally:
            ray.shutdown()
    return run


def sweep(points: list[Point], results: Results, runner: Runner,
          on_progress: Callable[[int, int], None] | None = None) -> list[Row]:
    """Run the points that have no row yet; the rows of all points, in the plan's order."""
    left = [point for point in points if point.key not in results.rows]
    done = len(points) - len(left)
    for row in runner(left):
        results.add(row)
        done += 1
        if on_progress is not None:
            on_progress(done, len(points))
    return [results.rows[point.key] for point in points]


def write_table(rows: list[Row], stem: Path) -> Path:
    """The rows as Parquet, or as CSV where pyarrow is not installed. The path written."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        path = stem.with_suffix(".csv")
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows)
        return path
    path = stem.with_suffix(".parquet")
    columns = {name: _column([row.get(name) for row in rows]) for name in names}
    pq.write_table(pa.table(columns), path)
    return path


def _column(values: list[Any]) -> list[Any]:
    """Of one type: a name that is text in one row and a number in another becomes text."""
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) <= 1 or kinds == {int, float}:
        return values if kinds != {int, float} else [
            None if value is None else float(value) for value in values]
    return [None if value is None else str(value) for value in values]
