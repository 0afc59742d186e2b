"""From options to a workload and to SLO bounds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from simulator.errors import WorkloadError
from simulator.lengths import parse_lengths
from simulator.traces import read_trace
from simulator.workload import Workload, closed_loop, poisson


def make_workload(*, trace: Path | None, rate: float | None, users: int | None, think: float,
                  burstiness: float, num_requests: int | None, input_len: str, output_len: str,
                  rate_scale: float, columns: str | None, skip_bad: bool, seed: int) -> Workload:
    """The workload the options describe. WorkloadError unless exactly one source is named."""
    named = [name for name, value in (("--trace", trace), ("--poisson", rate), ("--users", users))
             if value is not None]
    if len(named) != 1:
        raise WorkloadError(f"give exactly one of --trace, --poisson and --users, "
                            f"not {' and '.join(named) or 'none'}")
    if trace is not None:
        work = read_trace(trace, columns=named_columns(columns), skip_bad=skip_bad)
        work = work if num_requests is None else work.first(num_requests)
        return work if rate_scale == 1.0 else work.faster(rate_scale)
    count = 1000 if num_requests is None else num_requests
    inputs = parse_lengths(input_len, "--input-len")
    outputs = parse_lengths(output_len, "--output-len")
    if users is not None:
        return closed_loop(users, count, inputs, outputs, think=think, seed=seed)
    assert rate is not None
    return poisson(rate, count, inputs, outputs, seed=seed, burstiness=burstiness)


def named_columns(text: str | None) -> dict[str, str]:
    """`at=A,prompt=B` → {"at": "A", "prompt": "B"}."""
    pairs = [part.partition("=") for part in text.split(",")] if text else []
    if any(not key or not value for key, _, value in pairs):
        raise WorkloadError(f"--columns {text!r} is not of the form "
                            f"at=NAME,prompt=NAME,output=NAME")
    return {key.strip(): value.strip() for key, _, value in pairs}


def slo_bounds(text: str | None) -> Mapping[str, float] | None:
    """`ttft:500,tpot:50` (ms) → seconds by name."""
    if not text:
        return None
    try:
        pairs = [part.split(":") for part in text.replace(" ", ",").split(",") if part]
        return {{"e2e": "e2el"}.get(name, name): float(ms) / 1e3 for name, ms in pairs}
    except ValueError:
        raise WorkloadError(f"--goodput {text!r} is not of the form "
                            f"ttft:500,tpot:50,e2el:10000") from None
