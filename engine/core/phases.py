"""The three phases of a step: who goes on, what becomes shareable, who may come in.

The batching policy calls them in its order (`Batching.fill`). They are the whole of the decision:
no clock, no tokens, no results. `Scheduler` adds intake before and results after.
"""

from __future__ import annotations

from engine.core.batch import Batch
from engine.core.block_manager import BlockManager
from engine.core.block_pool import BlockPool, Emit
from engine.core.cohort import Cohort
from engine.core.config import SchedulerConfig
from engine.core.eviction import Eviction
from engine.core.insight import PrefixStats
from engine.core.policies import (
    BATCHINGS,
    ORDERS,
    PREEMPTIONS,
    Batching,
    Order,
    Preemption,
    WaitingQueue,
)
from engine.core.request import Request, RequestStatus

RUNNING, WAITING = RequestStatus.RUNNING, RequestStatus.WAITING
SWAPPED, FINISHED = RequestStatus.SWAPPED, RequestStatus.FINISHED


class Step:
    """A step while it is being made."""

    __slots__ = ("batch", "left", "filled", "started")

    def __init__(self, number: int, budget: int):
        self.batch = Batch(number)
        self.left = budget  # tokens
        self.filled: list[Request] = []  # rows whose last block becomes full in this step
        self.started: list[Request] = []  # admitted or swapped in by this step


class StepPhases:
    """The queues, the blocks, and the decisions of one step over them."""

    def __init__(self, config: SchedulerConfig, *, emit: Emit | None = None,
                 batching: Batching | None = None, order: Order | None = None,
                 preemption: Preemption | None = None, eviction: Eviction | None = None,
                 pool: BlockPool | None = None):
        self.config = config
        self.manager = BlockManager(config, pool=pool, eviction=eviction, emit=emit)
        self.batching = batching or BATCHINGS.make(config.batching)
        self.order = order or ORDERS.make(config.order)
        self.preemption = preemption or PREEMPTIONS.make(config.preemption)
        self.waiting = WaitingQueue(self.order, self.manager)
        self.running: list[Request] = []  # in order of admission
        self.cohort = Cohort(self.manager)  # the first of the running ones, if simulated
        self.swapped: list[Request] = []  # in order of preemption
        self.live: dict[str, Request] = {}  # every request from intake to finish
        self.blocked: tuple[str, str, int, int] | None = None  # head of the line, why, need, have
        self.prefix_stats = PrefixStats()
        self._emit = emit
        self._watermark = int(config.watermark * config.num_blocks)

    # ------------------------------------------------------------------ phase 1
    def continue_running(self, step: Step, candidates: list[Request]) -> None:
        """Give each running candidate, in order, what it can use of the budget."""
        if self._decode_as_cohort(step, candidates):
            together = len(self.cohort.rows)
        else:
            together = self._decode_together(step, candidates)
        for request in candidates[together:]:
            self._continue_one(step, request)

    def _decode_as_cohort(self, step: Step, candidates: list[Request]) -> bool:
        """The quickest way for the first so many candidates, if they are a cohort."""
        cohort = self.cohort
        if not cohort.rows:
            return False
        if candidates is self.running and not step.batch.requests and cohort.schedule(step):
            return True
        if any([request.in_cohort for request in candidates]):
            cohort.dissolve()  # they are looked at one by one
        return False

    def _decode_together(self, step: Step, candidates: list[Request]) -> int:
        """The common rows, all at once: the first so many candidates decode one token each.

        Only if budget and free blocks are there for all of them: then nobody is preempted, and
        the order in which they are looked at makes no difference. Else nothing is done, and the
        answer is 0. None of them is in a cohort.
        """
        wanted = [request.own_tokens - request.own_computed for request in candidates]
        count = len(wanted) if wanted.count(1) == len(wanted) else next(
            index for index, tokens in enumerate(wanted) if tokens != 1)
        rows = candidates[:count]
        room = [request.writable - request.own_tokens for request in rows]
        growing = [request for request, slots in zip(rows, room) if slots < 0]
        if not rows or count > step.left or len(growing) > self.manager.pool.num_free:
            return 0
        self.manager.grow_each(growing)
        step.batch.requests += rows
        step.batch.starts += [request.own_computed for request in rows]
        step.batch.counts += [1] * count
        step.left -= count
        for request in rows:
            request.own_computed = request.own_tokens
        size = self.config.block_size
        filled = [request for request, slots in zip(rows, room) if not slots % size]
        step.filled += [request for request in filled if request.own_keys is None
                        or request.own_computed <= request.num_prompt]  # see publish()
        return count

    def _continue_one(self, step: Step, request: Request) -> None:
        """The uncommon row: a chunk, no budget, or no block."""
        if request.status is not RUNNING:
            return  # a victim of this very step
        wanted = request.num_tokens - request.num_computed
        if wanted == 0:
            return  # look-ahead: its last token is already in flight
        if not step.left:
            self._consider(request, "skipped", "budget", wanted, 0)
            return
        count = self._chunk(wanted, step.left)
        start = request.num_computed
        while start + count > request.writable:
            if self.manager.grow(request, start + count):
                break
            victim = self._victim()
            self._consider(request, "blocked", "blocks",
                           self.manager.blocks_for(start + count) - len(request.block_table),
                           self.manager.pool.num_free)
            self._preempt(step, victim)
            if victim is request:
                return
        self._add_row(step, request, start, count)

    def _chunk(self, wanted: int, left: int) -> int:
        """How many of the wanted tokens this step computes: budget, and the cap on long prefills,
        which protects others and so is idle for a request that is alone."""
        cap = self.config.long_prefill_token_threshold
        if cap and wanted > cap and len(self.live) > 1:
            wanted = cap
        return min(wanted, left)

    def _add_row(self, step: Step, request: Request, start: int, count: int) -> None:
        batch, end = step.batch, start + count
        if end < request.num_tokens:
            batch.partial.add(len(batch.requests))
        batch.requests.append(request)
        batch.starts.append(start)
        batch.counts.append(count)
        request.num_computed = end
        step.left -= count
        if end // self.config.block_size > request.num_published:
            step.filled.append(request)

    def _victim(self) -> Request:
        """The running request that the order policy would serve last."""
        key, manager = self.order.key, self.manager
        if self.order.dynamic:
            return max(self.running, key=lambda request: request.seq)
        return max(self.running, key=lambda request: key(request, manager))

    def _preempt(self, step: Step, victim: Request) -> None:
        """Take the victim's blocks. If it already has a row in this step, undo that row first."""
        batch = step.batch
        self.cohort.leave(victim)
        rolled_back = self._roll_back(step, victim)
        self.running.remove(victim)
        computed = victim.num_computed
        saved = self.preemption.preempt(self.manager, victim, batch)
        if saved:
            victim.status = SWAPPED
            self.swapped.append(victim)
        else:
            victim.num_computed = victim.num_received = 0  # what it had received is lost as well
            victim.status = WAITING
            self.waiting.push(victim)
        victim.num_preemptions += 1
        batch.preempted.append(victim)
        if self._emit is not None:
            self._emit("preempt", request=victim.id, mode="swap" if saved else "recompute",
                       computed=computed, rolled_back=rolled_back)

    def _roll_back(self, step: Step, victim: Request) -> bool:
        """Undo the victim's row of this step, if it has one. Its new blocks go with the rest; it
        has published nothing yet, and a running request never has a pending copy."""
        batch = step.batch
        if victim not in batch.requests:
            return False
        index = batch.requests.index(victim)
        del batch.requests[index]
        victim.num_computed = batch.starts.pop(index)
        step.left += batch.counts.pop(index)
        batch.partial = {i - (i > index) for i in batch.partial if i != index}
        step.filled = [request for request in step.filled if request is not victim]
        return True

    # ------------------------------------------------------------------ phase 2
    def publish_filled(self, step: Step) -> None:
        """Index the blocks that this step fills. Not earlier: a row could still be rolled back,
        and another request would then share K/V that nobody writes."""
        for request in step.filled:
            self.manager.publish(request, step.batch)
        step.filled = []

    # ------------------------------------------------------------------ phase 3
    def admit_waiting(self, step: Step) -> None:
        """Bring in who waits: swapped requests first, then the queue; nobody overtakes its head."""
        for request in self._in_order(self.swapped) if self.swapped else ():
            if not self._swap_in(step, request):
                return self._explain_queue(request)
        while (head := self.waiting.peek()) is not None:
            if not self._admit(step, head):
                return self._explain_queue(head)

    def _in_order(self, requests: list[Request]) -> list[Request]:
        key, manager = self.order.key, self.manager
        if self.order.dynamic:
            return sorted(requests, key=lambda request: request.seq)
        return sorted(requests, key=lambda request: key(request, manager))

    def _swap_in(self, step: Step, request: Request) -> bool:
        if not self._has_room(step, request):
            return False
        start = request.num_computed
        count = self._chunk(request.num_tokens - start, step.left)
        if not self.manager.swap_in(request, start + count, step.batch):
            return self._block(request, "blocks", self.manager.blocks_for(start + count),
                               self.manager.pool.num_free)
        self.swapped.remove(request)
        self._start(step, request, count)
        return True

    def _admit(self, step: Step, request: Request) -> bool:
        if not self._has_room(step, request):
            return False
        parent = request.parent
        if parent is not None and parent.status is RUNNING and not request.num_preemptions:
            return self._admit_fork(step, request, parent)
        manager, config = self.manager, self.config
        hit = manager.find_hit(request)
        cached = max(len(hit) * config.block_size, request.num_received)
        count = self._chunk(request.num_tokens - cached, step.left)
        refused = self.batching.refuses(self, request, hit)
        if refused is not None:
            return self._block(request, *refused)
        must_fit = request.num_tokens if config.full_sequence_must_fit else cached + count
        need = manager.blocks_taken(hit, must_fit)
        have = manager.pool.num_free - (self._watermark if self.running else 0)
        if need > have:
            return self._block(request, "blocks", need, have)
        manager.admit(request, hit, cached + count)
        request.num_computed = cached
        self._count_hit(request, len(hit) * config.block_size)
        if request.num_received and self._emit is not None:
            self._emit("share", request=request.id, blocks=[], tokens=cached, source="received")
        self._consider(request, "admitted", "ok", need, have)
        self.waiting.pop()
        self._start(step, request, count)
        return True

    def _admit_fork(self, step: Step, request: Request, parent: Request) -> bool:
        """A further sample of a prompt: share the parent's blocks, compute the last prompt token
        again (it is the one whose logits the first sample is drawn from)."""
        cached = min(request.num_prompt - 1, parent.num_computed)
        settled = parent.num_computed
        if parent in step.batch.requests:
            settled = step.batch.starts[step.batch.requests.index(parent)]
        if parent in step.started or settled < cached:
            # The parent's tail is written (or swapped in) by this very step, after the copies
            # are made: share whole blocks only.
            cached -= cached % self.config.block_size
        need = self.manager.blocks_for(request.num_tokens) - cached // self.config.block_size
        have = self.manager.pool.num_free
        refused = self.batching.refuses(self, request, ())
        if refused is not None:
            return self._block(request, *refused)
        if need > have:
            return self._block(request, "blocks", need, have)
        count = self._chunk(request.num_tokens - cached, step.left)
        self.manager.fork(parent, request, cached, cached + count, step.batch)
        self._count_hit(request, cached)
        self._consider(request, "admitted", "ok", need, have)
        self.waiting.pop()
        self._start(step, request, count)
        return True

    def _count_hit(self, request: Request, cached: int) -> None:
        if not request.num_preemptions:
            request.num_hit = cached
            self.prefix_stats.count(request.num_prompt, cached)

    def _start(self, step: Step, request: Request, count: int) -> None:
        """A request joins the running ones with its first row. It is published at once, so that
        an equal prompt admitted next, in this very step, shares its blocks."""
        request.status = RUNNING
        self.running.append(request)
        step.started.append(request)
        self._add_row(step, request, request.num_computed, count)
        self.publish_filled(step)

    def _has_room(self, step: Step, request: Request) -> bool:
        if len(self.running) >= self.config.max_num_seqs:
            return self._block(request, "seqs", len(self.running) + 1, self.config.max_num_seqs)
        if not step.left:
            return self._block(request, "budget", 1, 0)
        return True

    # ------------------------------------------------------------------ why not
    def _consider(self, request: Request, verdict: str, reason: str, need: int, have: int) -> None:
        if self._emit is not None:
            self._emit("consider", request=request.id, verdict=verdict, reason=reason,
                       need=need, have=have)

    def _block(self, request: Request, reason: str, need: int, have: int) -> bool:
        """Remember and report why the head of the line stays out. Always False."""
        self.blocked = (request.id, reason, need, have)
        self._consider(request, "blocked", reason, need, have)
        return False

    def _explain_queue(self, head: Request) -> None:
        """One event for all who wait behind a blocked head: nobody overtakes."""
        behind = len(self.waiting) + len(self.swapped) - 1
        if behind and self._emit is not None:
            self._emit("consider", request=None, verdict="blocked", reason="behind",
                       need=0, have=0, behind=head.id, count=behind)
