"""The contract between the scheduler and whoever executes a step: plain data, read-only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.core.request import Request


class Row(NamedTuple):
    """One request's share of a step, as a readable view of the batch's columns."""

    request: Request
    start: int  # position of the first token computed here
    num_tokens: int  # tokens computed here, >= 1: positions [start, start + num_tokens)
    samples: bool  # True if it reaches the last known token; a partial chunk draws nothing


@dataclass(slots=True, init=False)
class Batch:
    """One step, as decided by Scheduler.schedule().

    Rows are columns, because a step of 256 decodes must not build 256 objects; `rows` reads them
    back one by one. Before the forward pass an executor does, in this order: every pair of
    `swap_outs` (device block, cpu block), of `copies` (device, device: copy-on-write), and of
    `swap_ins` (cpu, device). Each layer then writes the K/V of *all* rows before any row's
    attention reads, which is why two equal prompts of one step may share blocks.

    A batch may be empty (no rows): something was only swapped, or preempted, or nothing is due.
    """

    step: int  # 0, 1, 2, … in the order of schedule() calls
    requests: list[Request]
    starts: list[int]
    counts: list[int]
    partial: set[int]  # indices of rows that do not sample
    copies: list[tuple[int, int]]
    swap_outs: list[tuple[int, int]]
    swap_ins: list[tuple[int, int]]
    preempted: list[Request]  # lost their blocks in this step
    published: list[tuple[Request, list[int]]]  # newly indexed blocks
    ended: list[Request]  # ended by an abort when this was scheduled
    num_tokens: int  # sum of counts
    overlapped: bool  # another batch was in flight between this one's schedule and commit
    stable: int  # see stable_steps()

    def __init__(self, step: int, requests: Sequence[Request] = (), starts: Sequence[int] = (),
                 counts: Sequence[int] = (), partial: Iterable[int] = ()):
        # By hand: a dataclass would call nine default factories in every step.
        self.step = step
        self.requests, self.starts, self.counts = [*requests], [*starts], [*counts]
        self.partial = {*partial}
        self.copies, self.swap_outs, self.swap_ins = [], [], []
        self.preempted, self.published, self.ended = [], [], []
        self.num_tokens = sum(counts)
        self.overlapped, self.stable = False, 1

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def rows(self) -> Iterator[Row]:
        """The rows in execution order."""
        partial = self.partial
        for index, request in enumerate(self.requests):
            yield Row(request, self.starts[index], self.counts[index], index not in partial)

    def stable_steps(self) -> int:
        """For how many steps, this one included, the schedule is certain to repeat (>= 1).

        1 whenever in doubt. `Scheduler.commit(batch, tokens, steps=k)` for k up to this number
        equals k single steps. Only requests without token ids can make it more than 1.
        """
        return 1 if self.overlapped else self.stable


@dataclass(frozen=True, slots=True)
class RowFailed:
    """Stands in an executor's token list for a row that went wrong alone (NaN logits, an id
    outside the vocabulary): that request ends with an error, the others go on."""

    reason: str
