"""The contract between the scheduler and whoever executes a step: plain data, read-only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.core.request import Request


class Row(NamedTuple):
    """One request's share of a step, as a readable view of the batch's columns."""

    request: Request
    start: int  # position of the first token computed here
    num_tokens: int  # tokens computed here, >= 1: positions [start, start + num_tokens)
    samples: bool  # True if it reaches the last known token; a partial chunk draws nothing


@dataclass(slots=True)
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
    requests: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    partial: set[int] = field(default_factory=set)  # indices of rows that do not sample
    copies: list[tuple[int, int]] = field(default_factory=list)
    swap_outs: list[tuple[int, int]] = field(default_factory=list)
    swap_ins: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)  # lost their blocks in this step
    published: list[tuple[Request, list[int]]] = field(default_factory=list)  # newly indexed blocks
    ended: list[Request] = field(default_factory=list)  # ended by an abort when this was scheduled
    num_tokens: int = 0  # sum of counts
    overlapped: bool = False  # another batch was in flight between this one's schedule and commit
    stable: int = 1  # see stable_steps()

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
