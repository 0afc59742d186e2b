"""Questions one asks of a running core: why is it where it is, what is wasted, who holds what.

Nothing here takes part in a decision. `explain` reads a live scheduler; `BlockWatch` listens to the
event stream, live as a sink or afterwards from a log.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from engine.core.phases import StepPhases
    from engine.core.request import Request


class Explanation(NamedTuple):
    """Why one request is where it is."""

    request: str
    place: str  # running swapped waiting
    because: str  # one sentence with the numbers


_BECAUSE = {
    "seqs": "it would be running request {need}, max_num_seqs is {have}",
    "budget": "the step's token budget was spent before its turn",
    "blocks": "it needs {need} blocks, {have} are to be had",
    "reserve": "prompt and max_tokens need {need} blocks, {have} are not promised to others",
    "static": "the static batch runs until all its requests have finished",
}


def explain(scheduler: StepPhases, samples: Sequence[Request] = ()) -> list[Explanation]:
    """One entry a live request: running ones first, then who waits, in line, then the further
    `samples` not yet in line. Read it between schedule() and the next one: it tells of the last
    decision. `Scheduler.explain` calls it."""
    found = [Explanation(request.id, "running",
                         f"{request.num_computed} of {request.num_tokens} tokens computed, "
                         f"{len(request.block_table)} blocks held")
             for request in scheduler.running]
    queue = [(request, "swapped") for request in scheduler.swapped]
    queue += [(request, "waiting") for request in scheduler.waiting]
    blocked = scheduler.blocked
    for request, place in queue:
        if blocked is None:
            because = "no admission in a step that preempts, or it came after the last step"
        elif request.id == blocked[0]:
            because = _BECAUSE.get(blocked[1], blocked[1]).format(need=blocked[2], have=blocked[3])
        else:
            because = f"behind {blocked[0]}: nobody overtakes the head of the line"
        found.append(Explanation(request.id, place, because))
    found += [Explanation(request.id, "waiting", f"for the prompt of {request.parent.id}, "
                                                 f"whose blocks it will share")
              for request in samples if request.parent is not None]
    return found


# --------------------------------------------------------------------------- fragmentation

class Waste(NamedTuple):
    """Internal fragmentation of one block size over a set of sequence lengths."""

    block_size: int  # tokens
    blocks: int  # held in all
    wasted_slots: int  # allocated token slots that hold no token
    share: float  # wasted / allocated, in [0, 1)


def fragmentation(lengths: Iterable[int], block_sizes: Sequence[int]) -> list[Waste]:
    """What each block size would waste on sequences of these lengths (tokens each, >= 0)."""
    lengths = list(lengths)
    report = []
    for size in block_sizes:
        blocks = sum(-(-length // size) for length in lengths)
        slots = blocks * size
        wasted = slots - sum(lengths)
        report.append(Waste(size, blocks, wasted, wasted / slots if slots else 0.0))
    return report


def best_block_size(lengths: Iterable[int], block_sizes: Sequence[int],
                    tolerance: float = 0.04) -> int:
    """The largest block size that wastes at most `tolerance` of its slots, else the smallest size.

    Larger blocks mean shorter tables and longer runs of memory; 4 % is the waste that the
    PagedAttention paper reports for its blocks.
    """
    fitting = [waste.block_size for waste in fragmentation(lengths, block_sizes)
               if waste.share <= tolerance]
    return max(fitting) if fitting else min(block_sizes)


# --------------------------------------------------------------------------- prefix hits

@dataclass(slots=True)
class PrefixStats:
    """Hits of the prefix cache, each request counted once, at its first admission: what it finds
    of its own after a preemption is no merit of the cache."""

    requests: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0

    def count(self, queried: int, hit: int) -> None:
        self.requests += 1
        self.queried_tokens += queried
        self.hit_tokens += hit

    @property
    def hit_rate(self) -> float:
        """Hit tokens a queried token, in [0, 1]; 0 while nothing was asked."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0


# --------------------------------------------------------------------------- blocks over time

@dataclass(slots=True)
class BlockWatch:
    """Who holds which block since when, how long blocks live and rest. All times in steps.

    Feed it events: `watch.emit` is a sink (chain it with a log by `tee`), `watch.read(events)`
    takes a loaded log.
    """

    step: int = -1
    holders: dict[int, dict[str, int]] = field(default_factory=dict)  # block -> request -> since
    lifetimes: list[int] = field(default_factory=list)  # first hold to last release
    reuse_gaps: list[int] = field(default_factory=list)  # release to the hit that brought it back
    idle_before_evict: list[int] = field(default_factory=list)  # release to eviction
    _since: dict[int, int] = field(default_factory=dict)
    _released: dict[int, int] = field(default_factory=dict)

    def read(self, events: Iterable[dict[str, Any]]) -> BlockWatch:
        for event in events:
            self.emit(event["e"], **{key: value for key, value in event.items() if key != "e"})
        return self

    def emit(self, kind: str, **event: Any) -> None:
        if kind == "step_begin":
            self.step = event["step"]
        elif kind in ("alloc", "share"):
            for block in event["blocks"]:
                self._hold(block, event["request"], shared=kind == "share")
        elif kind == "free":
            for block in event["blocks"]:
                self._release(block, event["request"])
        elif kind == "evict" and event["block"] in self._released:
            self.idle_before_evict.append(self.step - self._released.pop(event["block"]))

    def _hold(self, block: int, request: str, shared: bool) -> None:
        holders = self.holders.setdefault(block, {})
        if not holders:
            self._since[block] = self.step
            released = self._released.pop(block, None)
            if shared and released is not None:
                self.reuse_gaps.append(self.step - released)
        holders[request] = self.step

    def _release(self, block: int, request: str) -> None:
        holders = self.holders[block]
        del holders[request]
        if not holders:
            del self.holders[block]
            self.lifetimes.append(self.step - self._since.pop(block))
            self._released[block] = self.step

    def leaks(self, live: Iterable[str]) -> list[str]:
        """One sentence a block that is held by a request not among the live ones."""
        alive = set(live)
        return [f"block {block} is held since step {since} by {request}, which is no longer there"
                for block, holders in sorted(self.holders.items())
                for request, since in holders.items() if request not in alive]


def tee(*sinks: Any) -> Any:
    """One emit that passes each event to several."""
    def emit(kind: str, **fields: Any) -> None:
        for sink in sinks:
            sink(kind, **fields)
    return emit
