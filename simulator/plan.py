"""Sweep plans: `[base]` and `[grid]` become points, each with a key that tells it from all others.

The key is a digest of a point's values and of what is in the files it names: an edited file makes
another point, a moved one the same.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simulator.errors import WorkloadError
from simulator.scenario import check_names
from simulator.tables import read_toml

FORMAT = 2  # of keys and rows; a new one makes every point run again
OF_TRACE = "trace:"  # before the file of input_len and output_len

# What a value of a plan must be, by name: of the wrong type it would be taken for another one
# ("false" is true), or break the simulation far from its cause.
KINDS: dict[str, type] = {
    **dict.fromkeys(("enforce_eager", "skip_bad_rows", "enable_prefix_caching",
                     "full_sequence_must_fit"), bool),
    **dict.fromkeys(("trace", "input_len", "output_len", "columns", "model", "hardware", "cost",
                     "router", "fail", "disaggregate", "batching", "order", "preemption",
                     "eviction"), str),
    **dict.fromkeys(("poisson", "chats", "think", "burstiness", "rate_scale", "sample",
                     "client_ms", "max_minutes", "kv_link", "kv_latency_us", "watermark",
                     "gpu_memory_utilization"), float),
    **dict.fromkeys(("users", "turns", "system_prompt", "num_requests", "seed", "tp", "replicas",
                     "max_queue", "num_blocks", "block_size", "max_model_len",
                     "max_num_batched_tokens", "max_num_seqs", "num_cpu_blocks",
                     "long_prefill_token_threshold"), int)}
_IN_WORDS = {bool: "true or false, without quotes", str: "text in quotes",
             float: "a number below 1e308", int: "a whole number"}


@dataclass(frozen=True, slots=True)
class Point:
    """One simulation of a sweep."""

    key: str
    values: dict[str, Any]
    files: tuple[Path, ...] = ()  # those its values name


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
    digest_of = functools.cache(_digest)  # a file is read once, however many points name it
    points = {}
    for combination in itertools.product(*grid.values()):
        point = _point({**base, **dict(zip(grid, combination))}, path.parent, digest_of)
        points[point.key] = point  # equal points count once
    return list(points.values())


def check_values(values: Mapping[str, Any]) -> None:
    """WorkloadError for the first value that is not of the type its name has."""
    for name, value in values.items():
        kind = KINDS[name]
        good = type(value) is kind
        if kind is float and type(value) is int:
            good = value.bit_length() < 1024  # float64 holds no larger
        if not good or isinstance(value, float) and math.isnan(value):
            raise WorkloadError(f"{name} = {spelled(value)} must be {_IN_WORDS[kind]}")
    if not 0 <= values.get("client_ms", 0) < math.inf:
        raise WorkloadError(f"client_ms = {spelled(values['client_ms'])} must be at least 0")


def plain(value: Any) -> str | int | float | bool:
    """A value as JSON Lines and a table's columns can hold it: what is too large, not finite, or
    no scalar becomes text."""
    if isinstance(value, int) and value.bit_length() > 63:
        return str(value) if value.bit_length() < 10_000 else hex(value)  # Python spells no larger
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, (str, int, float)):
        return value
    try:
        return str(value)
    except ValueError:
        return f"a {type(value).__name__} with a number of thousands of digits"


def spelled(value: Any) -> str:
    """A value as a sentence can name it."""
    text = repr(value) if isinstance(value, str) else str(plain(value))
    return text if len(text) <= 60 else f"{text[:40]}… ({len(text):,} characters)"


def _point(values: dict[str, Any], folder: Path, digest_of: Callable[[Path], str]) -> Point:
    values, known, files = dict(values), {}, []
    for name, value in values.items():
        known[name] = [type(value).__name__, plain(value)]
        mark = OF_TRACE if name in ("input_len", "output_len") else ""
        if not isinstance(value, str) or not value.startswith(mark):
            continue
        path = _file(name, value.removeprefix(mark), folder)
        if path is not None:
            values[name] = f"{mark}{path}"
            content = path / "config.json" if path.is_dir() else path
            known[name] = [mark, path.name, digest_of(content)]  # whatever its folder
            files.append(content)
    text = json.dumps([FORMAT, known], sort_keys=True)
    return Point(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=10).hexdigest(),
                 values, tuple(files))


def _file(name: str, text: str, folder: Path) -> Path | None:
    """The file or the model's folder that a value names, beside the plan first; None if none."""
    for path in (folder / text, Path(text)):
        try:
            named = {"model": path.suffix == ".json" or path.is_dir(),
                     "hardware": path.suffix == ".toml"}.get(
                name, name in ("trace", "cost", "input_len", "output_len"))
            if text and named and path.exists():
                return path
        except OSError:  # a name too long for any file
            return None
    return None


def _digest(path: Path) -> str:
    """Of a file's content; empty where it cannot be read, which the simulation will say."""
    if not path.is_file():  # opening a pipe would wait for its writer
        return ""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "blake2b").hexdigest()
    except OSError:
        return ""
