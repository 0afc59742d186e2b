"""Short words for tests of the core: make a scheduler, drive it, look at what it did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.core import Batch, Request, SamplingParams, Scheduler, SchedulerConfig
from engine.core.block_manager import BlockManager
from engine.core.events import EventLog
from tests.core.recorder import Recorder

Row = tuple[str, int, int]  # request id, start, number of tokens


def config(num_blocks: int = 64, block_size: int = 4, **settings: Any) -> SchedulerConfig:
    """A roomy pool unless the test says otherwise; max_model_len is what the pool holds."""
    settings.setdefault("max_model_len", num_blocks * block_size)
    return SchedulerConfig(num_blocks=num_blocks, block_size=block_size, **settings)


def scheduler(num_blocks: int = 64, block_size: int = 4, *, emit: Any = None,
              parts: dict[str, Any] | None = None, **settings: Any) -> Scheduler:
    return Scheduler(config(num_blocks, block_size, **settings), emit=emit, **(parts or {}))


def request(name: str, prompt: Sequence[int] | int, max_tokens: int | None = 16, *,
            params: dict[str, Any] | None = None, **fields: Any) -> Request:
    """No eos unless `eos_ids` is among the fields."""
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, **(params or {})), **fields)


def submit(scheduler: Scheduler, *requests: Request) -> None:
    for one in requests:
        scheduler.submit(one)


def results(batch: Batch, token: int | dict[str, int] = 7) -> list[int | None]:
    """The same token for each row that samples, or one by request id."""
    return [None if not row.samples else token if isinstance(token, int)
            else token[row.request.id] for row in batch.rows]


def step(scheduler: Scheduler, token: int | dict[str, int] = 7) -> Batch:
    """Schedule and commit one step."""
    batch = scheduler.schedule()
    scheduler.commit(batch, results(batch, token))
    return batch


def rows(batch: Batch) -> list[Row]:
    return [(row.request.id, row.start, row.num_tokens) for row in batch.rows]


def steps(scheduler: Scheduler, count: int, token: int = 7) -> list[list[Row]]:
    """The rows of the next `count` steps."""
    return [rows(step(scheduler, token)) for _ in range(count)]


def run(scheduler: Scheduler, token: int = 7, most: int = 1000) -> list[list[Row]]:
    """Drive until nothing is unfinished; the rows of each step."""
    story = []
    while scheduler.has_unfinished():
        story.append(rows(step(scheduler, token)))
        assert len(story) <= most, "it does not come to an end"
    return story


def names(requests: Any) -> list[str]:
    return [one.id for one in requests]


def events(recorder: Recorder | EventLog, *kinds: str) -> list[dict[str, Any]]:
    """The recorded events of these kinds, without number and time."""
    return [{name: value for name, value in event.items() if name not in ("n", "t")}
            for event in recorder.events or [] if event["e"] in kinds]


def timeline(recorder: Recorder, *kinds: str) -> list[tuple[Any, ...]]:
    """(step, kind, request, …) of these kinds: the story of a run, short enough to write down."""
    shown = {"preempt": ("request", "mode", "computed", "rolled_back"),
             "free": ("request", "blocks"), "alloc": ("request", "blocks"),
             "batch": ("requests",), "share": ("request", "blocks"),
             "copy": ("request", "from", "to"), "evict": ("block",), "cache": ("request", "blocks"),
             "swap": ("request", "direction", "pairs"), "finish": ("request", "reason"),
             "withdraw": ("blocks",), "arrive": ("request",), "reject": ("request",),
             "consider": ("request", "verdict", "reason", "need", "have")}
    now, story = -1, []
    for event in recorder.events:
        if event["e"] == "step_begin":
            now = event["step"]
        if event["e"] in kinds:
            story.append((now, event["e"], *(event[name] for name in shown[event["e"]])))
    return story


def snapshot(manager: BlockManager, *requests: Request) -> Any:
    """Everything a refused call must leave as it was."""
    pool = manager.pool
    return (pool.num_free, dict(pool.refs), dict(pool.keys),
            {key: list(there) if isinstance(there, dict) else there
             for key, there in pool.index.items()},
            list(pool._clean), list(pool.eviction), list(manager.cpu_pool._clean),
            [(list(r.block_table), list(r.cpu_table), r.num_computed, r.num_tokens, r.writable,
              r.num_published, r.status, r.num_preemptions) for r in requests])


def watch(calls: list[Any]) -> Callable[..., None]:
    """A sink that appends (kind, fields)."""
    return lambda kind, **fields: calls.append((kind, fields))
