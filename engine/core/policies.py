"""The choices of a scheduler, each a small class: who is next, what a step is made of, what happens
to a victim. Chosen by name in SchedulerConfig, or replaced by passing an object of the same shape.

A policy holds no clock and no random state, and changes nothing but what its docstring says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any, Protocol

from engine.core.registry import Registry
from engine.core.request import Request

if TYPE_CHECKING:
    from engine.core.batch import Batch
    from engine.core.block_manager import BlockManager
    from engine.core.phases import Step, StepPhases


# --------------------------------------------------------------------------- order
class Order(Protocol):
    """Who is served first, and so who is preempted last."""

    dynamic: bool  # True: keys change while a request waits, so the queue asks anew each step

    def key(self, request: Request, manager: BlockManager) -> Any:
        """Sort key, smallest first. Must end in `request.seq`, so that no two are equal."""


ORDERS: Registry[Order] = Registry("order")


@ORDERS.register("fcfs")
class Fcfs:
    """First come, first served. A preempted request came before all who still wait, so it is at
    the front of the queue again by itself."""

    dynamic = False

    def key(self, request: Request, manager: BlockManager) -> Any:
        return request.seq


@ORDERS.register("priority")
class Priority:
    """Smaller `priority` first, ties by arrival."""

    dynamic = False

    def key(self, request: Request, manager: BlockManager) -> Any:
        return (request.priority, request.seq)


@ORDERS.register("sjf")
class ShortestJobFirst:
    """Fewest tokens in all (prompt and max_tokens) first. Long ones may wait for ever in theory;
    in any finite workload they end."""

    dynamic = False

    def key(self, request: Request, manager: BlockManager) -> Any:
        return (request.limit, request.seq)


@ORDERS.register("longest_prefix")
class LongestPrefix:
    """Longest cached prefix first, so that content is used before it is evicted (SGLang's idea)."""

    dynamic = True

    def key(self, request: Request, manager: BlockManager) -> Any:
        return (-len(manager.find_hit(request)), request.seq)


class WaitingQueue:
    """The requests that hold nothing yet, in the order policy's order."""

    def __init__(self, order: Order, manager: BlockManager):
        self._order, self._manager = order, manager
        self._heap: list[tuple[Any, Request]] = []
        self._gone: set[int] = set()  # seq of requests removed from the middle

    def push(self, request: Request) -> None:
        heappush(self._heap, (self._order.key(request, self._manager), request))

    def refresh(self) -> None:
        """Ask a dynamic order for its keys again. Once a step."""
        if self._order.dynamic and self._heap:
            key, manager = self._order.key, self._manager
            self._heap = [(key(request, manager), request) for request in self]
            self._gone.clear()
            heapify(self._heap)

    def peek(self) -> Request | None:
        """The next one, left where it is; None if nobody waits."""
        heap, gone = self._heap, self._gone
        while heap and heap[0][1].seq in gone:
            gone.remove(heappop(heap)[1].seq)
        return heap[0][1] if heap else None

    def pop(self) -> Request:
        """Take the one that `peek` shows."""
        return heappop(self._heap)[1]

    def remove(self, request: Request) -> None:
        self._gone.add(request.seq)

    def __len__(self) -> int:
        return len(self._heap) - len(self._gone)

    def __iter__(self) -> Iterator[Request]:
        """In order. O(n log n): for looking, not for scheduling."""
        keyed = [entry for entry in self._heap if entry[1].seq not in self._gone]
        return (request for _, request in sorted(keyed, key=lambda entry: entry[0]))


# --------------------------------------------------------------------------- batching
class Batching(Protocol):
    """What one step is made of."""

    def fill(self, scheduler: StepPhases, step: Step) -> None:
        """Put rows into the step by calling the scheduler's phases in the policy's order."""

    def refuses(self, scheduler: StepPhases, request: Request, hit: Sequence[int]
                ) -> tuple[str, int, int] | None:
        """A reason not to admit this waiting request now, as (reason, need, have); or None."""


BATCHINGS: Registry[Batching] = Registry("batching")


@BATCHINGS.register("mixed")
class Mixed:
    """Chunked prefill beside decode (Sarathi-Serve; vLLM's default): running requests first, then
    new ones fill what the token budget leaves."""

    def fill(self, scheduler: StepPhases, step: Step) -> None:
        scheduler.continue_running(step, scheduler.running)
        scheduler.publish_filled(step)
        if not step.batch.preempted:
            scheduler.admit_waiting(step)

    def refuses(self, scheduler: StepPhases, request: Request, hit: Sequence[int]
                ) -> tuple[str, int, int] | None:
        return None


@BATCHINGS.register("prefill_first")
class PrefillFirst(Mixed):
    """A step is all prefill or all decode, prefill winning: nano-vllm's and early vLLM's way. New
    requests start soonest; everyone's decoding stalls meanwhile."""

    def fill(self, scheduler: StepPhases, step: Step) -> None:
        prefilling = [request for request in scheduler.running
                      if request.num_tokens - request.num_computed > 1]
        scheduler.continue_running(step, prefilling)
        scheduler.publish_filled(step)
        if not step.batch.preempted:
            scheduler.admit_waiting(step)
        if not len(step.batch):
            scheduler.continue_running(step, scheduler.running)
            scheduler.publish_filled(step)


@BATCHINGS.register("static")
class Static(Mixed):
    """One batch at a time: nobody joins until all have finished. The baseline that shows why
    continuous batching (Orca, Yu et al. 2022) exists. A batch takes several steps to form if its
    prompts exceed the token budget of one."""

    _forming = False

    def fill(self, scheduler: StepPhases, step: Step) -> None:
        self._closed = bool(scheduler.running or scheduler.swapped) and not self._forming
        super().fill(scheduler, step)
        blocked = scheduler.blocked
        self._forming = not self._closed and blocked is not None and blocked[1] == "budget"

    def refuses(self, scheduler: StepPhases, request: Request, hit: Sequence[int]
                ) -> tuple[str, int, int] | None:
        # A preempted member of the batch comes back, and a member's further samples belong to it;
        # a newcomer waits for the next batch.
        parent = request.parent
        member = request.num_preemptions or (
            parent is not None and scheduler.live.get(parent.id) is parent)
        return ("static", 1, 0) if self._closed and not member else None


@BATCHINGS.register("reserve")
class Reserve(Mixed):
    """Admission reserves room for prompt and max_tokens, so nothing is ever preempted
    (mini-sglang's way). Outputs that end early leave reserved blocks unused."""

    def refuses(self, scheduler: StepPhases, request: Request, hit: Sequence[int]
                ) -> tuple[str, int, int] | None:
        manager = scheduler.manager
        promised = sum(manager.blocks_for(running.limit - 1) - len(running.block_table)
                       for running in scheduler.running)
        need = manager.blocks_taken(list(hit), request.limit - 1)
        have = manager.pool.num_free - promised
        return ("reserve", need, have) if need > have else None


# --------------------------------------------------------------------------- preemption
class Preemption(Protocol):
    """What becomes of a running request that must give up its blocks."""

    name: str

    def preempt(self, manager: BlockManager, request: Request, batch: Batch) -> bool:
        """Free the device blocks. True if the K/V was saved in the CPU pool, False if not."""


PREEMPTIONS: Registry[Preemption] = Registry("preemption")


@PREEMPTIONS.register("recompute")
class Recompute:
    """Forget the K/V; prompt and output so far are prefilled again later."""

    name = "recompute"

    def preempt(self, manager: BlockManager, request: Request, batch: Batch) -> bool:
        manager.free(request, comes_back=True)
        return False


@PREEMPTIONS.register("swap")
class Swap:
    """Copy the K/V to CPU memory and back. Falls to recompute when the CPU pool is full."""

    name = "swap"

    def preempt(self, manager: BlockManager, request: Request, batch: Batch) -> bool:
        if manager.swap_out(request, batch):
            return True
        manager.free(request, comes_back=True)
        return False
