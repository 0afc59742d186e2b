"""Small worlds with prices that can be checked by hand."""

from __future__ import annotations

from collections.abc import Callable

from engine.core.config import SchedulerConfig
from engine.core.events import EventLog
from engine.core.scheduler import Scheduler
from engine.loop import EngineLoop
from simulator.cost import CostModel, StepCost
from simulator.router import make_router
from simulator.workload import Workload, fixed_list
from simulator.world import World


class Price(CostModel):
    """A cost model from one function batch → seconds."""

    def __init__(self, seconds: Callable):
        self._seconds = seconds

    def cost(self, batch):
        return StepCost(self._seconds(batch))


def config(**values) -> SchedulerConfig:
    base = {"num_blocks": 4096, "block_size": 16, "max_model_len": 4096}
    return SchedulerConfig(**{**base, **values})


def world(work: Workload | list, cost, *, replicas=1, router="least_loaded", log=None, seed=0,
          **values) -> World:
    """A world over one scheduler config; `log` is an EventLog for replica 0."""
    work = work if isinstance(work, Workload) else fixed_list(work)
    settings = config(**values)

    def loop(number: int) -> EngineLoop:
        events: EventLog | None = log if number == 0 else None
        return EngineLoop(Scheduler(settings, emit=events and events.emit), events)

    return World(work, loop, cost, router=make_router(router, seed), replicas=replicas)
