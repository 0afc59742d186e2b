"""Simulated requests that decode together, moved by one counter.

Without token ids nothing can end a request early, so a step changes only two numbers of a decoding
row: it computes one token more and knows one token more, like all its neighbours. A cohort makes
these two changes once for all: its members' counters are offsets from its clock. What differs from
row to row is known long before it is due: the step in which a row needs another block, and the one
that brings its last token. So a step costs what changes in it, not the number of its rows.

Nobody else can tell: `num_tokens` and `num_computed` of a member read as ever, blocks are taken in
the same order, and a row leaves the cohort before anything uncommon happens to it.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

from engine.core.block_manager import BlockManager
from engine.core.request import NO_COHORT, Request, StepClock

if TYPE_CHECKING:
    from engine.core.phases import Step


class Cohort(StepClock):
    """The first of the running requests, as many as decode without token ids, in their order.

    At rest the clock reads the same twice; between a step's schedule and its commit `computed` is
    ahead of `tokens`.
    """

    __slots__ = ("rows", "_manager", "_starts", "_grows", "_ends", "_number")

    def __init__(self, manager: BlockManager):
        super().__init__()
        self.rows: list[Request] = []
        self._manager = manager
        self._starts: list[int] = []  # num_computed of each row, in steps that are settled
        # What is due at which reading of the clock: rows that need a block, and a heap of
        # (reading, number, row) that reach their limit, or would have had they not left.
        self._grows: dict[int, list[Request]] = {}
        self._ends: list[tuple[int, int, Request]] = []
        self._number = 0  # of the latest to join: numbers grow in the order of the rows

    @property
    def in_step(self) -> bool:
        """True from the moment a step has given every row its token until it is committed."""
        return self.computed > self.tokens

    # ------------------------------------------------------------------ who belongs to it
    def welcome(self, running: list[Request]) -> None:
        """Take in the running requests that follow its rows, up to the first that cannot join:
        it has token ids or stop ids, or does something else than to decode. At rest only."""
        for request in running[len(self.rows):]:
            if request.tokens is not None or request.stop_ids or \
                    request.num_tokens <= request.num_prompt or \
                    request.num_tokens - request.num_computed != 1:
                return
            self._join(request)

    def _join(self, request: Request) -> None:
        known, computed = request.num_tokens, request.num_computed
        self._number += 1
        self.rows.append(request)
        self._starts.append(computed)
        request.number, request.clock = self._number, self
        # The step that moves the clock to `tokens` + j computes the row's token known + j - 1.
        due = request.grows_at = self.tokens + 2 + request.writable - known
        self._grows.setdefault(due, []).append(request)
        request.num_tokens, request.num_computed = known, computed
        heappush(self._ends, (self.tokens + request.limit - known, self._number, request))

    def leave(self, request: Request) -> None:
        """Let go of a request, if it is a member; its counters are its own again."""
        if request.clock is self:
            place = self.rows.index(request)
            del self.rows[place], self._starts[place]
            self._grows[request.grows_at].remove(request)
            self._let_go(request)

    def dissolve(self) -> None:
        """Let go of all."""
        for request in self.rows:
            self._let_go(request)
        self.rows, self._starts, self._ends = [], [], []
        self._grows.clear()
        self.computed = self.tokens

    def _let_go(self, request: Request) -> None:
        known, computed = request.num_tokens, request.num_computed
        request.number, request.clock = 0, NO_COHORT
        request.num_tokens, request.num_computed = known, computed

    # ------------------------------------------------------------------ a step
    def schedule(self, step: Step) -> bool:
        """Give every row its token of an empty step. False, with nothing changed, if the budget or
        the free blocks do not reach for all."""
        rows, batch = self.rows, step.batch
        if len(rows) > step.left or not self._grow(self.computed + 1):
            return False
        self.computed += 1
        batch.requests += rows
        batch.starts += self._starts
        batch.counts += [1] * len(rows)
        step.left -= len(rows)
        return True

    def commit(self) -> list[Request]:
        """The step's tokens are there. The rows that have reached their limit, in order."""
        moved = self.computed - self.tokens
        self.tokens = self.computed
        self._starts = [start + moved for start in self._starts]
        ended: list[Request] = []
        while self._ends and self._ends[0][0] <= self.tokens:
            _, number, request = heappop(self._ends)
            if request.number == number:  # else it has left since
                ended.append(request)
        return ended

    # ------------------------------------------------------------------ many steps
    def steps_to_an_end(self) -> int:
        """How many steps, the one just scheduled included, until the first row ends."""
        while self._ends[0][1] != self._ends[0][2].number:
            heappop(self._ends)  # it has left since
        return self._ends[0][0] - self.tokens

    def advance(self, steps: int) -> None:
        """Do what `steps` more steps do to blocks and counters."""
        growing: list[Request] = []
        for due in range(self.computed + 1, self.computed + steps + 1):
            if due in self._grows:
                growing += self._due(due)
        self._manager.grow_each(growing)
        self.computed += steps

    def _grow(self, due: int) -> bool:
        """Give a block to each row that needs one when the clock is moved to `due`. False, with
        nothing changed, if so many are not free."""
        if due in self._grows:
            if len(self._grows[due]) > self._manager.pool.num_free:
                return False
            self._manager.grow_each(self._due(due))
        return True

    def _due(self, due: int) -> list[Request]:
        """The rows that need a block when the clock is moved to `due`, in order. They will need
        the next one when it has been moved on by a block's size."""
        # Nobody is due at `later` yet: a row is due within a block's size of joining. So who joins
        # from now on comes behind these, as in the order of the rows.
        rows, later = self._grows.pop(due), due + self._manager.block_size
        for request in rows:
            request.grows_at = later
        self._grows[later] = rows
        return rows
