"""Small event logs made by running the real core with a scripted executor: no model, no clock."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from typing import Any

from engine.core import Request, RequestError, SamplingParams, Scheduler, SchedulerConfig
from engine.core.events import EventLog, LoadedLog
from engine.loop import EngineLoop, StepResult
from lab_app.viewmodel.loglines import LogLines
from lab_app.viewmodel.run import Run, open_run


def make_log(requests: list[dict[str, Any]], *, seconds: float = 0.01, model: str = "scripted",
             target: Any = None, ahead: bool = False, **config: Any) -> LoadedLog:
    """Run `requests` (id, prompt, max_tokens [, at, priority, parent]) through the core.

    Prompts are token ids or a length; every step takes `seconds`; the sampled token is the
    position modulo 50, so equal requests cache equal content. Requests with `at` come in then.
    `ahead`: each step is scheduled before the tokens of the one before it are known.
    """
    settings = SchedulerConfig(**config)
    header = {"mode": "real", "config": {name: getattr(settings, name)
                                         for name in settings.__dataclass_fields__},
              "model": {"name": model}, "hardware": {"name": "none"}, "versions": {}, "seed": 0}
    log = EventLog(target, header)
    _Script(Scheduler(settings, emit=log.emit), log, requests, seconds, ahead).run()
    log.close()
    return LoadedLog(log.header, log.events or [])


def log_text(log: LoadedLog) -> bytes:
    """The log as the bytes of its file."""
    return b"".join(json.dumps(line, separators=(",", ":")).encode() + b"\n"
                    for line in (log.header, *log.events))


def opened(log: LoadedLog) -> Run:
    """The log as the lab opens it."""
    return open_run(LogLines(log_text(log), "made.jsonl"))


class _Script:
    """The executor, the clock and the arrivals."""

    def __init__(self, scheduler: Scheduler, log: EventLog, requests: list[dict[str, Any]],
                 seconds: float, ahead: bool):
        self.scheduler, self.loop = scheduler, EngineLoop(scheduler, log)
        self.ahead, self.due = ahead, None
        self.now, self.seconds = 0.0, seconds
        self.line = sorted(requests, key=lambda spec: spec.get("at", 0.0))
        self.made: dict[str, Request] = {}

    def run(self) -> None:
        while self.line or self.scheduler.has_unfinished():
            self.arrive()
            if not self.scheduler.has_unfinished():
                self.now = self.line[0]["at"]
                continue
            turn, self.due = self.loop.steps(lambda: self.now, ahead=self.ahead), None
            batch = next(turn, None)
            while batch is not None:
                batch = self.answer(turn, batch)

    def answer(self, turn: Any, batch: Any) -> Any:
        self.now = round(self.now + self.seconds, 9)
        told, self.due = (self.due if self.ahead else batch), batch
        tokens = [] if told is None else [
            None if row in told.partial else (told.starts[row] + told.counts[row]) % 50
            for row in range(len(told))]
        self.arrive()
        try:
            return turn.send(StepResult(tokens, self.seconds))
        except StopIteration:
            return None

    def arrive(self) -> None:
        while self.line and self.line[0].get("at", 0.0) <= self.now:
            spec = self.line.pop(0)
            self.made[spec["id"]] = request = Request(
                spec["id"], spec["prompt"], SamplingParams(max_tokens=spec["max_tokens"]),
                arrival_time=spec.get("at", 0.0), priority=spec.get("priority", 0),
                parent=self.made.get(spec.get("parent")),
                keys=[] if isinstance(spec["prompt"], int) else None)
            with suppress(RequestError):  # the refusal is in the log
                self.loop.submit(request)


def crowded(num_requests: int = 24, seed: int = 7, target: Any = None) -> LoadedLog:
    """A run with everything in it: chunked prefill, prefix hits, evictions, preemptions."""
    draw = random.Random(seed)
    system = [draw.randrange(50) for _ in range(20)]
    specs = []
    for number in range(num_requests):
        own = [draw.randrange(50) for _ in range(draw.randrange(4, 40))]
        prompt = system + own if number % 3 else own
        specs.append({"id": f"r{number}", "prompt": prompt, "max_tokens": draw.randrange(8, 30),
                      "at": round(number * 0.03, 3)})
    return make_log(specs, num_blocks=28, block_size=8, max_model_len=128,
                    max_num_batched_tokens=48, max_num_seqs=6, target=target)


def ahead() -> LoadedLog:
    """A run whose steps are each scheduled while the one before is still being executed."""
    return make_log([{"id": f"a{number}", "prompt": [number] * 12, "max_tokens": 40 + 9 * number,
                      "at": 0.3 * number} for number in range(5)], ahead=True, num_blocks=80,
                    block_size=8, max_model_len=160)
