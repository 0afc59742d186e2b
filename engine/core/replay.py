"""From the log alone back to the full state: queues, block tables, ref counts, content index.

The replayer applies events; it does not decide anything. So what it shows is what the log says,
and a state that contradicts itself is a fault of the log (LogError with the event's number).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from engine.core.errors import LogError

SNAPSHOT_EVERY = 64  # steps, at least: a long log has at most MAX_SNAPSHOTS, further apart
MAX_SNAPSHOTS = 128


@dataclass(slots=True)
class RequestState:
    """One request at one moment of a replay."""

    id: str
    prompt: int  # tokens
    limit: int
    num_tokens: int  # tokens known
    num_computed: int = 0  # tokens whose K/V is written
    block_table: list[int] = field(default_factory=list)
    cpu_table: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # ids, where the log has them: append-only and
    # shared by all copies of this state, so it may run ahead; known_tokens() cuts it
    seq: int = 0  # place in line
    status: str = "waiting"  # waiting running swapped finished
    reason: str | None = None  # of finishing
    priority: int = 0
    arrived: float = 0.0
    first_token: float | None = None
    finished_at: float | None = None
    preemptions: int = 0
    has_prompt_ids: bool = False

    def known_tokens(self) -> list[int]:
        """The token ids known at this moment: prompt (if the log has its ids) and output."""
        return self.tokens[:self.num_tokens - (0 if self.has_prompt_ids else self.prompt)]

    def copy(self) -> RequestState:
        """Its own tables, the shared token list."""
        twin = copy(self)
        twin.block_table, twin.cpu_table = list(self.block_table), list(self.cpu_table)
        return twin


@dataclass(slots=True)
class State:
    """Everything at one moment. `owners[b]` lists the holders of block b, so its ref count is
    their number; a block without owners is free, and still cached if it is in `cached`."""

    order: str = "fcfs"  # name of the order policy, as in the header's config
    step: int = -1
    time: float = 0.0
    requests: dict[str, RequestState] = field(default_factory=dict)  # in order of arrival
    waiting: list[str] = field(default_factory=list)
    running: list[str] = field(default_factory=list)
    swapped: list[str] = field(default_factory=list)
    finished: dict[str, str] = field(default_factory=dict)  # id -> reason
    rejected: dict[str, str] = field(default_factory=dict)  # id -> sentence
    owners: dict[int, tuple[str, ...]] = field(default_factory=dict)
    cached: dict[int, str] = field(default_factory=dict)  # block -> content key
    in_flight: dict[int, list[str]] = field(default_factory=dict)  # step -> its rows, no tokens yet

    def refcount(self, block: int) -> int:
        return len(self.owners.get(block, ()))

    def apply(self, event: dict[str, Any]) -> None:
        """Advance by one event. LogError if the event contradicts the state."""
        try:
            HANDLERS[event["e"]](self, event)
        except (KeyError, ValueError, IndexError, TypeError, AttributeError) as error:
            raise LogError(f"event {event.get('n')} ({event.get('e')}) contradicts the log before "
                           f"it: {type(error).__name__} {error}") from error
        self.time = event["t"]

    def copy(self) -> State:
        """A state of its own. What never changes again (finished requests) is shared."""
        twin = copy(self)
        for name in ("waiting", "running", "swapped"):
            setattr(twin, name, list(getattr(self, name)))
        for name in ("requests", "finished", "rejected", "owners", "cached", "in_flight"):
            setattr(twin, name, dict(getattr(self, name)))
        for name in self.live():
            twin.requests[name] = self.requests[name].copy()
        return twin

    def live(self) -> list[str]:
        """Ids of the requests that are not finished."""
        return self.waiting + self.running + self.swapped

    # ------------------------------------------------------------------ one method a kind
    def _on_arrive(self, event: dict[str, Any]) -> None:
        name = event["request"]
        self.requests[name] = RequestState(
            name, event["prompt"], event["limit"], event["prompt"],
            tokens=list(event.get("tokens", ())), has_prompt_ids="tokens" in event,
            priority=event.get("priority", 0), arrived=event["at"], seq=len(self.requests))
        self._wait(name)

    def _on_reject(self, event: dict[str, Any]) -> None:
        self.rejected[event["request"]] = event["error"]

    def _on_step_begin(self, event: dict[str, Any]) -> None:
        self.step = event["step"]

    def _on_consider(self, event: dict[str, Any]) -> None:
        if event["verdict"] == "admitted":
            self._move(event["request"], self.running, "running")

    def _on_share(self, event: dict[str, Any]) -> None:
        request = self.requests[event["request"]]
        request.num_computed = event["tokens"]
        for block in event["blocks"]:
            self._hold(request, block)

    def _on_alloc(self, event: dict[str, Any]) -> None:
        request = self.requests[event["request"]]
        if len(request.block_table) != event["first"]:
            raise ValueError(f"table of {request.id} has {len(request.block_table)} blocks")
        for block in event["blocks"]:
            if self.owners.get(block):
                raise ValueError(f"block {block} is in use")
            self._hold(request, block)

    def _on_evict(self, event: dict[str, Any]) -> None:
        del self.cached[event["block"]]

    def _on_cache(self, event: dict[str, Any]) -> None:
        self.cached.update(zip(event["blocks"], event["keys"], strict=True))

    def _on_withdraw(self, event: dict[str, Any]) -> None:
        for block in event["blocks"]:
            self.cached.pop(block, None)

    def _on_reset(self, event: dict[str, Any]) -> None:
        if self.owners:
            raise ValueError(f"blocks {sorted(self.owners)} are in use")
        self.cached.clear()

    def _on_copy(self, event: dict[str, Any]) -> None:
        if event["to"] not in self.requests[event["request"]].block_table:
            raise ValueError(f"block {event['to']} is not {event['request']}'s")

    def _on_swap(self, event: dict[str, Any]) -> None:
        request = self.requests[event["request"]]
        if event["direction"] == "out":
            request.cpu_table = [to for _, to in event["pairs"]]
        else:
            request.cpu_table = []
            self._move(request.id, self.running, "running")

    def _on_free(self, event: dict[str, Any]) -> None:
        request = self.requests[event["request"]]
        if list(reversed(event["blocks"])) != request.block_table:
            raise ValueError(f"table of {request.id} is {request.block_table}")
        for block in event["blocks"]:
            self._let_go(request.id, block)
        request.block_table = []

    def _on_preempt(self, event: dict[str, Any]) -> None:
        request = self.requests[event["request"]]
        request.preemptions += 1
        if event["mode"] == "swap":
            self._move(request.id, self.swapped, "swapped")
            request.num_computed = event["computed"]
        else:
            self._move(request.id, None, "waiting")
            self._wait(request.id)
            request.num_computed, request.cpu_table = 0, []

    def _on_batch(self, event: dict[str, Any]) -> None:
        for name, start, count in zip(event["requests"], event["starts"], event["counts"],
                                      strict=True):
            request = self.requests[name]
            if request.num_computed != start:
                raise ValueError(f"{name} has {request.num_computed} tokens computed, not {start}")
            request.num_computed = start + count
        self.in_flight[event["step"]] = event["requests"]

    def _on_token(self, event: dict[str, Any]) -> None:
        rows = self.in_flight.pop(event["step"])
        for name, token in zip(rows, event["tokens"], strict=True):
            request = self.requests[name]
            if token is None or request.status == "finished":
                continue
            request.num_tokens += 1
            known = request.num_tokens - (0 if request.has_prompt_ids else request.prompt)
            if len(request.tokens) < known:
                request.tokens.append(token)
            if request.first_token is None:
                request.first_token = event["t"]

    def _on_time(self, event: dict[str, Any]) -> None:
        pass

    def _on_finish(self, event: dict[str, Any]) -> None:
        name = event["request"]
        self._move(name, None, "finished")
        self.finished[name] = event["reason"]
        request = self.requests[name]
        request.reason, request.finished_at, request.cpu_table = event["reason"], event["t"], []

    # ------------------------------------------------------------------ helpers
    def _hold(self, request: RequestState, block: int) -> None:
        request.block_table.append(block)
        self.owners[block] = (*self.owners.get(block, ()), request.id)

    def _let_go(self, name: str, block: int) -> None:
        holders = list(self.owners[block])
        holders.remove(name)
        if holders:
            self.owners[block] = tuple(holders)
        else:
            del self.owners[block]

    def _wait(self, name: str) -> None:
        """Into the waiting line, where the order policy puts it."""
        insort(self.waiting, name, key=lambda other: ORDER_KEYS.get(self.order, _by_arrival)(
            self.requests[other]))

    def _move(self, name: str, queue: list[str] | None, status: str) -> None:
        request = self.requests[name]
        old = {"waiting": self.waiting, "running": self.running, "swapped": self.swapped}
        if request.status in old:
            old[request.status].remove(name)
        request.status = status
        if queue is not None:
            queue.append(name)


def _by_arrival(request: RequestState) -> tuple[int, int]:
    return (0, request.seq)


ORDER_KEYS: dict[str, Callable[[RequestState], tuple[int, int]]] = {
    "priority": lambda request: (request.priority, request.seq),
    "sjf": lambda request: (request.limit, request.seq),
}

HANDLERS = {name.removeprefix("_on_"): method for name, method in vars(State).items()
            if name.startswith("_on_")}


class Replayer:
    """Random access to the states of a log. States are copies: look at them, change nothing.

    A step's events run from its `step_begin` up to the next one. LogError, naming the event, if
    the log contradicts itself. O(log) once; a seek applies the steps since the last snapshot.
    `order` is the order policy of the run (header["config"]["order"]): it sorts who waits; a
    policy whose order changes while requests wait is shown in order of arrival.
    """

    def __init__(self, events: Sequence[dict[str, Any]], order: str = "fcfs"):
        self.events = events
        self._first = [number for number, event in enumerate(events)
                       if event["e"] == "step_begin"]  # index of each step's first event
        self._every = max(SNAPSHOT_EVERY, len(self._first) // MAX_SNAPSHOTS)
        self._snapshots: list[State] = []  # the states before steps 0, _every, …
        state = State(order)
        number = 0
        for step in range(0, self.num_steps, self._every):
            while number < self._first[step]:
                state.apply(events[number])
                number += 1
            self._snapshots.append(state.copy())
        for event in events[number:]:
            state.apply(event)
        self.final = state

    @property
    def num_steps(self) -> int:
        return len(self._first)

    def events_of(self, step: int) -> Sequence[dict[str, Any]]:
        """The events of step `step` (0-based), its arrivals first. IndexError if there is none."""
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} of {self.num_steps}")
        end = self._first[step + 1] if step + 1 < self.num_steps else len(self.events)
        return self.events[self._first[step]:end]

    def state_before(self, step: int) -> State:
        """The state when the step's first event has not happened yet."""
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} of {self.num_steps}")
        snapshot = step // self._every
        state = self._snapshots[snapshot].copy()
        for event in self.events[self._first[snapshot * self._every]:self._first[step]]:
            state.apply(event)
        return state

    def state_after(self, step: int) -> State:
        """The state when the step is committed."""
        state = self.state_before(step)
        for event in self.events_of(step):
            state.apply(event)
        return state
