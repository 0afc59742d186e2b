"""A log, opened: everything that stays the same while one steps through it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.core.errors import LogError
from lab_app.viewmodel.loglines import LogLines
from lab_app.viewmodel.metrics import Strip, strip
from lab_app.viewmodel.palette import Palette, palette_of
from lab_app.viewmodel.replaying import Replaying
from lab_app.viewmodel.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Run:
    """Read-only and shared by all sessions that look at the same log."""

    header: dict[str, Any]
    config: dict[str, Any]
    problem: str | None  # what is wrong with the log's end
    replayer: Replaying
    timeline: Timeline
    strip: Strip
    palette: Palette
    num_blocks: int
    block_size: int

    @property
    def num_steps(self) -> int:
        return self.replayer.num_steps

    @property
    def requests(self) -> list[str]:
        """All of them, in order of arrival."""
        return list(self.palette.index)


def open_run(log: LogLines) -> Run:
    """Index a log. One that contradicts itself is opened up to there, and `problem` says so.

    LogError if there is no step to show, or an event lacks what its kind must have.
    """
    config = log.header.get("config")
    config = config if isinstance(config, dict) else {}
    replayer = Replaying(log, str(config.get("order", "fcfs")))
    problem = replayer.problem or log.problem
    if not replayer.num_steps:
        why = f" ({problem})" if problem else ""
        raise LogError(f"the log holds {replayer.num_events} events but no step, so there is "
                       f"nothing to replay{why}: choose a log of a run that got as far as its "
                       "first step")
    if problem is None and (live := replayer.final.live()):
        problem = (f"The log ends while {len(live)} requests are unfinished: the run was stopped, "
                   "or the file is cut off")
    timeline = replayer.timeline
    num_blocks = max(_number(config.get("num_blocks"), 0), timeline.num_blocks)
    return Run(log.header, config, problem, replayer, timeline, strip(timeline, num_blocks),
               palette_of(replayer.final), num_blocks, _number(config.get("block_size"), 16))


def _number(value: Any, default: int) -> int:
    return value if isinstance(value, int) and value > 0 else default


def facts(run: Run) -> list[tuple[str, str]]:
    """(name, value) pairs that say what one is looking at."""
    header, config = run.header, run.config
    mode = {"real": "real engine", "simulated": "simulation", "replayed": "replayed times"}
    policies = [str(config[name]) for name in ("batching", "order", "preemption", "eviction")
                if name in config]
    pairs = [("source", mode.get(str(header.get("mode")), "unknown source")),
             ("model", _name(header.get("model"))), ("hardware", _name(header.get("hardware"))),
             ("pool", f"{run.num_blocks:,} blocks × {run.block_size}"),
             ("budget", f"{config.get('max_num_batched_tokens', '?')} tokens"),
             ("seats", str(config.get("max_num_seqs", "?"))), ("policies", " · ".join(policies)),
             ("requests", f"{len(run.requests):,}"), ("steps", f"{run.num_steps:,}")]
    return [(name, value) for name, value in pairs if value]


def _name(described: Any) -> str:
    if isinstance(described, dict):
        described = described.get("name") or described.get("id") or described.get("model") or ""
    return str(described or "")
