"""From words to a workload: what the commands, sweep plans and capacity searches all understand."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from simulator.chats import chats
from simulator.errors import WorkloadError
from simulator.lengths import Draw, empirical, parse_lengths
from simulator.metrics import GOODPUT
from simulator.traces import read_trace
from simulator.workload import Workload, closed_loop, poisson

# Option, as a plan spells it → the sources of requests that read it.
GOES_WITH: dict[str, tuple[str, ...]] = {
    "rate_scale": ("trace",), "sample": ("trace",), "columns": ("trace",),
    "skip_bad_rows": ("trace",), "burstiness": ("poisson",), "think": ("users", "chats"),
    "turns": ("chats",), "system_prompt": ("chats",), "max_queue": ("trace", "poisson"),
    "input_len": ("poisson", "users", "chats"), "output_len": ("poisson", "users", "chats")}
# An option, one beside which it is never read, and why.
Beside = tuple[str, str, str]
NEVER_READ: tuple[Beside, ...] = (
    ("enforce_eager", "cost", "the machine file tells what a step takes"),
    ("gpu_memory_utilization", "num_blocks", "the blocks are counted already"))
SOURCES = {"trace": "--trace", "poisson": "--poisson", "users": "--users", "chats": "--chats"}


def check_used(given: Collection[str], sources: Mapping[str, str] = SOURCES,
               beside: Iterable[Beside] = NEVER_READ, mark: str = "--") -> None:
    """WorkloadError for the first option that somebody gave and nothing would read.

    `sources` are those that there are to choose from, in words; one of them is among `given`.
    `mark` is what stands before a name: a plan spells `input_len`, a command `--input-len`.
    """
    def spelled(name: str) -> str:
        return mark + name.replace("_", "-") if mark else name

    named = [name for name in sources if name in given]
    for option in sorted(given) if len(named) == 1 else ():  # else there are no requests at all
        if named[0] not in (wanted := GOES_WITH.get(option, named)):
            known = " or ".join(sources[name] for name in wanted if name in sources)
            raise WorkloadError(f"{spelled(option)} goes with {known}, not with "
                                f"{sources[named[0]]}: leave it out, or choose the other")
    for option, other, why in beside:
        if option in given and other in given:
            raise WorkloadError(f"{spelled(option)} does nothing beside {spelled(other)}, because "
                                f"{why}: leave one of the two out")


def make_workload(*, trace: str | Path | None = None, rate: float | None = None,
                  users: int | None = None, chat_rate: float | None = None, think: float = 0.0,
                  turns: int = 4, system: int = 0, burstiness: float = 1.0,
                  num_requests: int | None = None, input_len: str = "100:1024",
                  output_len: str = "100:1024", rate_scale: float = 1.0,
                  sample: float = 1.0,
                  columns: str | None = None, skip_bad: bool = False, seed: int = 0) -> Workload:
    """The workload the words describe. WorkloadError unless exactly one source is named.

    `num_requests` counts conversations for chats, and cuts a trace; 1000 where nothing is said
    (chats: 250). A trace is first thinned to the share `sample`, then cut, then sped up.
    """
    named = [name for name, value in (("--trace", trace), ("--poisson", rate), ("--users", users),
                                      ("--chats", chat_rate)) if value is not None]
    if len(named) != 1:
        raise WorkloadError(f"give exactly one of --trace, --poisson, --users and --chats, "
                            f"not {' and '.join(named) or 'none'}")
    if trace is not None:
        work = read_trace(trace, columns=named_columns(columns), skip_bad=skip_bad)
        work = work if sample == 1.0 else work.sample(sample, seed)
        work = work if num_requests is None else work.first(num_requests)
        return work if rate_scale == 1.0 else work.faster(rate_scale)
    if sample != 1.0 or rate_scale != 1.0:
        raise WorkloadError("--sample and --rate-scale are for --trace: a generator has a rate")
    inputs, outputs = _lengths(input_len, output_len)
    if chat_rate is not None:
        return chats(chat_rate, 250 if num_requests is None else num_requests, inputs, outputs,
                     turns=turns, think=think, system=system, seed=seed)
    count = 1000 if num_requests is None else num_requests
    if users is not None:
        return closed_loop(users, count, inputs, outputs, think=think, seed=seed)
    assert rate is not None
    return poisson(rate, count, inputs, outputs, seed=seed, burstiness=burstiness)


def _lengths(inputs: str, outputs: str) -> tuple[Draw, Draw]:
    """Distributions, or with `trace:FILE` that file's own lengths, drawn with replacement. A file
    named twice is read once: it may be a pipe."""
    works = {text: read_trace(text.removeprefix("trace:")) for text in {inputs, outputs}
             if text.startswith("trace:")}
    return (empirical(works[inputs].prompts) if inputs in works
            else parse_lengths(inputs, "--input-len"),
            empirical(works[outputs].outputs) if outputs in works
            else parse_lengths(outputs, "--output-len"))


def named_columns(text: str | None) -> dict[str, str]:
    """`at=A,prompt=B` → {"at": "A", "prompt": "B"}. WorkloadError if one has two names."""
    pairs = [part.partition("=") for part in text.split(",")] if text else []
    if any(not key or not value for key, _, value in pairs):
        raise WorkloadError(f"--columns {text!r} is not of the form "
                            f"at=NAME,prompt=NAME,output=NAME")
    columns = {key.strip(): value.strip() for key, _, value in pairs}
    if len(columns) < len(pairs):
        raise WorkloadError(f"--columns {text!r} names one column twice: give each once")
    return columns


def slo_bounds(text: str | None) -> Mapping[str, float] | None:
    """`ttft:500,tpot:50` (ms) → seconds by name. WorkloadError where a run could not be judged."""
    if not text:
        return None
    try:
        pairs = [part.split(":") for part in text.replace(" ", ",").split(",") if part]
        bounds = {{"e2e": "e2el"}.get(name, name): float(ms) / 1e3 for name, ms in pairs}
    except ValueError:
        bounds, pairs = {}, []
    if len(bounds) < len(pairs):
        raise WorkloadError(f"--goodput {text!r} bounds one latency twice: give each once")
    if not bounds or any(not 0 < bound < float("inf") for bound in bounds.values()):
        raise WorkloadError(f"--goodput {text!r} is not of the form ttft:500,tpot:50,e2el:10000 "
                            f"(milliseconds above 0)")
    if unknown := sorted(set(bounds) - GOODPUT):
        raise WorkloadError(f"--goodput bounds {unknown[0]!r}; it takes ttft, tpot and e2el")
    return bounds


def parse_failures(text: str | None) -> list[tuple[int, float]]:
    """`0@30,2@45.5` → [(0, 30.0), (2, 45.5)]: replica and seconds. WorkloadError if one stops
    twice: none comes back."""
    try:
        failures = [(int(number), float(at)) for number, at in
                    (part.split("@") for part in (text or "").split(",") if part)]
    except ValueError:
        raise WorkloadError(f"--fail {text!r} is not of the form REPLICA@SECONDS[,…], "
                            f"such as 0@30") from None
    if len(dict(failures)) < len(failures):
        raise WorkloadError(f"--fail {text!r} stops one replica twice, and none comes back: give "
                            f"each once")
    return failures
