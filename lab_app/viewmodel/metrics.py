"""The metrics strip: small curves over the whole run, and the numbers at the cursor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from lab_app.viewmodel.timeline import Timeline

POINTS = 240  # of a curve, at most


@dataclass(frozen=True, slots=True)
class Curve:
    """One quantity over the run, thinned out: each value stands for `stride` steps."""

    name: str
    title: str
    unit: str
    values: tuple[float, ...]
    second: tuple[float, ...] | None  # stacked on `values` (tokens: prefill on decode), or None
    top: float  # of the axis
    rule: str  # what it is, and how it was thinned


@dataclass(frozen=True, slots=True)
class Strip:
    stride: int
    num_steps: int
    curves: list[Curve]
    preemptions: list[int]  # steps


def strip(line: Timeline, num_blocks: int) -> Strip:
    """The curves of a run. The same for every step: build it once a log."""
    stride = max(-(-line.num_steps // POINTS), 1)

    def thin(column: Sequence[float], pick: Callable[[Sequence[float]], float]
             ) -> tuple[float, ...]:
        return tuple(pick(column[start:start + stride])
                     for start in range(0, len(column), stride))

    kv = thin([100.0 * (num_blocks - free) / max(num_blocks, 1) for free in line.free], max)
    decode, prefill = thin(line.decode, _mean), thin(line.prefill, _mean)
    running, waiting = thin(line.running, max), thin(line.waiting, max)
    ms = thin([seconds * 1e3 for seconds in line.seconds], max)
    curves = [
        Curve("kv", "KV blocks in use", "%", kv, None, 100.0, "highest of the steps"),
        Curve("running", "Running", "", running, None, _top(running), "highest of the steps"),
        Curve("waiting", "Waiting", "", waiting, None, _top(waiting), "highest of the steps"),
        Curve("tokens", "Tokens a step", "", decode, prefill,
              _top([a + b for a, b in zip(decode, prefill, strict=True)]), "mean of the steps"),
        Curve("ms", "Step time", "ms", ms, None, _top(ms), "slowest of the steps")]
    return Strip(stride, line.num_steps, curves, line.marks["preempt"])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _top(values: Sequence[float]) -> float:
    return max(values, default=0.0) or 1.0


def values_at(line: Timeline, step: int, num_blocks: int) -> dict[str, str]:
    """What the strip says at the cursor, by curve name, as text."""
    used = 100 * (num_blocks - line.free[step]) / max(num_blocks, 1)
    return {"kv": f"{used:.0f}", "running": f"{line.running[step]:,}",
            "waiting": f"{line.waiting[step] + line.swapped[step]:,}",
            "tokens": f"{line.decode[step] + line.prefill[step]:,}",
            "ms": f"{line.seconds[step] * 1e3:.3g}"}


def latency_texts(line: Timeline, step: int) -> list[tuple[str, str, str]]:
    """(name, value, explanation) of the requests finished up to and with the step."""
    done = line.latencies_until(step)
    ttft = [entry.ttft for entry in done if entry.ttft is not None]
    tpot = [entry.tpot for entry in done if entry.tpot is not None]
    return [
        ("Finished", f"{len(done):,}", "requests that have ended by this step"),
        ("TTFT", _ms(ttft), "median time from arrival to first token of the finished requests"),
        ("TPOT", _ms(tpot), "median time per token after the first, of the finished requests"),
        ("Preemptions", f"{line.preempted[step]:,}", "up to and with this step")]


def _ms(values: list[float]) -> str:
    return f"{median(values) * 1e3:.3g} ms" if values else "–"


def latency_rows(line: Timeline) -> list[dict[str, Any]]:
    """A table of all finished requests, milliseconds."""
    def ms(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds * 1e3, 3)
    return [{"request": entry.request, "finished in step": entry.step, "TTFT ms": ms(entry.ttft),
             "TPOT ms": ms(entry.tpot), "E2E ms": ms(entry.e2e)} for entry in line.latencies]
