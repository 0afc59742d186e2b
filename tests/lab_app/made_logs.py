"""Small event logs made by running the real core with a scripted executor: no model, no clock."""

from __future__ import annotations

import random
from typing import Any

from engine.core import Request, SamplingParams, Scheduler, SchedulerConfig
from engine.core.events import EventLog, LoadedLog
from engine.loop import EngineLoop, StepResult


def make_log(requests: list[dict[str, Any]], *, seconds: float = 0.01, model: str = "scripted",
             target: Any = None, **config: Any) -> LoadedLog:
    """Run `requests` (id, prompt, max_tokens [, at, priority, parent]) through the core.

    Prompts are token ids or a length; every step takes `seconds`; the sampled token is the
    position modulo 50, so equal requests cache equal content. Requests with `at` come in then.
    """
    settings = SchedulerConfig(**config)
    header = {"mode": "real", "config": {name: getattr(settings, name)
                                         for name in settings.__dataclass_fields__},
              "model": {"name": model}, "hardware": {"name": "none"}, "versions": {}, "seed": 0}
    log = EventLog(target, header)
    scheduler = Scheduler(settings, emit=log.emit)
    loop, now = EngineLoop(scheduler, log), 0.0
    made: dict[str, Request] = {}
    line = sorted(requests, key=lambda spec: spec.get("at", 0.0))

    def arrivals() -> None:
        while line and line[0].get("at", 0.0) <= now:
            spec = line.pop(0)
            made[spec["id"]] = Request(
                spec["id"], spec["prompt"], SamplingParams(max_tokens=spec["max_tokens"]),
                arrival_time=spec.get("at", 0.0), priority=spec.get("priority", 0),
                parent=made.get(spec.get("parent")),
                keys=[] if isinstance(spec["prompt"], int) else None)
            try:
                loop.submit(made[spec["id"]])
            except Exception:  # the refusal is in the log
                pass

    while line or scheduler.has_unfinished():
        arrivals()
        if not scheduler.has_unfinished():
            now = line[0]["at"]
            continue
        turn, result = loop.steps(lambda: now), None
        try:
            batch = next(turn)
            while True:
                now = round(now + seconds, 9)
                tokens = [None if row in batch.partial
                          else (batch.starts[row] + batch.counts[row]) % 50
                          for row in range(len(batch))]
                arrivals()
                result = StepResult(tokens, seconds)
                batch = turn.send(result)
        except StopIteration:
            pass
    log.close()
    return LoadedLog(log.header, log.events or [])


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
