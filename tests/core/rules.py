"""The rules of one step, written down a second time, slowly, from outside."""

from __future__ import annotations

from collections import Counter
from typing import Any

from engine.core import Batch, Request, RequestStatus, Scheduler

RUNNING, WAITING = RequestStatus.RUNNING, RequestStatus.WAITING
SWAPPED = RequestStatus.SWAPPED


class StepRules:
    """Looks at a scheduler before and after each schedule(), and asserts what must hold."""

    def __init__(self, scheduler: Scheduler, reached: Counter[str]):
        self.scheduler, self.reached = scheduler, reached
        self.config = scheduler.config

    def before(self, *, overlapped: bool) -> None:
        scheduler = self.scheduler
        self.overlapped = overlapped
        self.status = {r: r.status for r in scheduler.live.values()}
        self.hidden = {child for r in scheduler.live.values() for child in r.children}
        self.tables = {r: list(r.block_table) for r in scheduler.running}
        self.computed = {r: r.num_computed for r in scheduler.live.values()}
        self.in_line = list(scheduler.running)
        self.key = self._keys()
        self.steps = scheduler.num_steps
        self.blocked = scheduler.blocked

    def _keys(self) -> dict[Request, Any]:
        order, manager = self.scheduler.order, self.scheduler.manager
        return {r: order.key(r, manager) for r in self.scheduler.live.values()}

    def after(self, batch: Batch) -> None:
        scheduler, config = self.scheduler, self.config
        assert batch.step == self.steps
        assert len(batch.starts) == len(batch.counts) == len(batch.requests)
        assert len(set(batch.requests)) == len(batch.requests), "a request has two rows"
        assert sum(batch.counts) == batch.num_tokens <= config.max_num_batched_tokens
        assert len(scheduler.running) <= config.max_num_seqs
        self._rows(batch)
        self._tables(batch)
        self._admissions(batch)
        self._victims(batch)
        self._progress(batch)
        self._refusal(batch)
        self.pools()

    def pools(self) -> None:
        """The pools' own invariants, with the tables of everybody who lives."""
        scheduler = self.scheduler
        live = list(scheduler.live.values())
        scheduler.manager.pool.check([r.block_table for r in live] + [[]])
        scheduler.manager.cpu_pool.check([r.cpu_table for r in live] + [[]])
        assert all(r.block_table if r.status is RUNNING else not r.block_table for r in live)
        assert all(r.cpu_table if r.status is SWAPPED else not r.cpu_table for r in live)

    # ------------------------------------------------------------------ one rule a method
    def _rows(self, batch: Batch) -> None:
        """Rows: at least one token, from num_computed on, never past what is known."""
        left = self.config.max_num_batched_tokens
        cap = self.config.long_prefill_token_threshold
        for index, (request, start, count, samples) in enumerate(batch.rows):
            assert request.status is RUNNING and count >= 1
            assert start + count == request.num_computed <= request.num_tokens < request.limit
            assert samples == (request.num_computed == request.num_tokens)
            if self.status.get(request) is RUNNING:
                assert start == self.computed[request]
            wanted = request.num_tokens - start
            if cap and len(self.scheduler.live) > 1:
                wanted = min(wanted, cap)
            if not batch.preempted:  # a roll-back gives budget back that earlier rows did not see
                assert count == min(wanted, left), f"row {index} computes {count} of {wanted}"
            left -= count
        if self.config.batching != "prefill_first" and not batch.preempted and left:
            assert all(r in batch.requests or r.num_computed == r.num_tokens
                       for r in self.scheduler.running), "somebody was left out"
        order = [self.in_line.index(r) for r in batch.requests if r in self.in_line]
        assert order == sorted(order), "running requests are not served in their order"
        new = [r not in self.in_line for r in batch.requests]
        assert new == sorted(new), "a newcomer's row stands before a running request's"

    def _tables(self, batch: Batch) -> None:
        """Tables only grow, and hold exactly what is computed; copies fill new blocks of forks."""
        size = self.config.block_size
        for request in self.scheduler.running:
            table, old = request.block_table, self.tables.get(request)
            assert len(table) == -(-request.num_computed // size)
            if old is not None and request not in batch.preempted:
                assert table[:len(old)] == old
        targets = [target for _, target in batch.copies + batch.swap_ins]
        assert len(targets) == len(set(targets))
        assert all(self.scheduler.manager.pool.refcount(target) >= 1 for target in targets)
        self.reached["same-step share"] += self._shared_in_step(batch)

    def _shared_in_step(self, batch: Batch) -> int:
        """How many blocks published in this step another row of it already reads."""
        published = {block: owner for owner, blocks in batch.published for block in blocks}
        return sum(published.get(block, request) is not request
                   for request in batch.requests for block in request.block_table)

    def _admissions(self, batch: Batch) -> None:
        """Nobody overtakes; swapped ones come first; nobody comes into a step that preempted."""
        scheduler = self.scheduler
        came_in = [r for r in scheduler.running if self.status.get(r) is not RUNNING]
        stayed = [r for r, was in self.status.items() if was is WAITING and r.status is WAITING
                  and r not in self.hidden]
        back = [r for r in came_in if self.status.get(r) is SWAPPED]
        new = [r for r in came_in if self.status.get(r) is WAITING and r not in self.hidden]
        keyed = self.scheduler.order.dynamic
        # A dynamic order sees hits from before this step; arrivals and released forks are new.
        for r in new:
            for waiting in stayed:
                assert self.key[r] < self.key[waiting], f"{r} overtook {waiting}"
        if new:
            assert all(r.status is not SWAPPED for r in self.status), "swapped ones come first"
        if came_in:
            assert not batch.preempted or not came_in, "admitted in a step that preempted"
        forming = self.blocked is not None and self.blocked[1] == "budget"
        if self.config.batching == "static" and not forming and any(
                was in (RUNNING, SWAPPED) and r not in batch.ended
                for r, was in self.status.items()):
            assert all(r.num_preemptions or r.parent is not None and not r.parent.finished
                       for r in came_in), "static let a newcomer in"
        assert all(request in batch.requests for request in came_in)
        if not keyed:
            assert came_in == back + [r for r in came_in if r not in back]

    def _victims(self, batch: Batch) -> None:
        """The one served last gives its blocks first; `reserve` never takes any."""
        assert self.config.batching != "reserve" or not batch.preempted
        for victim in batch.preempted:
            assert victim.status in (WAITING, SWAPPED) and victim not in batch.requests
            for other in self.in_line:
                if other.status is RUNNING:
                    if self.scheduler.order.dynamic:
                        assert other.seq < victim.seq
                    else:
                        assert self.key[other] < self.key[victim]

    def _refusal(self, batch: Batch) -> None:
        """Who is left in line was refused for a reason that holds: nothing idles without need."""
        scheduler, config = self.scheduler, self.config
        line = [*scheduler.swapped, *scheduler.waiting]
        if batch.preempted or not line:
            return
        assert scheduler.blocked is not None, "nobody looked at the line"
        name, reason, need, have = scheduler.blocked
        head, free = scheduler.live[name], scheduler.manager.pool.num_free
        assert head in line and (not scheduler.swapped or head in scheduler.swapped)
        assert need > have
        if reason == "seqs":
            assert len(scheduler.running) == config.max_num_seqs
        elif reason == "budget":
            assert batch.num_tokens == config.max_num_batched_tokens
        elif reason == "static":
            assert config.batching == "static" and scheduler.running
        elif reason == "reserve":
            assert config.batching == "reserve" and scheduler.running
        elif self._decodes_followed(batch):
            return  # the pool has changed since
        elif head in scheduler.swapped:
            assert (need, have) == (self._blocks(head.num_computed, self._chunk(head, batch)), free)
        elif head.parent is not None and head.parent.status is RUNNING \
                and not head.num_preemptions:
            assert have == free and need <= -(-head.num_tokens // config.block_size)
        else:
            self._check_need(head, batch, need, have, free)

    def _check_need(self, head: Request, batch: Batch, need: int, have: int, free: int) -> None:
        config, manager = self.config, self.scheduler.manager
        hit = manager.find_hit(head)
        cached = len(hit) * config.block_size
        whole = head.num_tokens if config.full_sequence_must_fit else (
            cached + self._chunk(head, batch, cached))
        gone = sum(manager.pool.refcount(block) == 0 for block in hit)
        assert need == self._blocks(0, whole) - len(hit) + gone
        kept = int(config.watermark * config.num_blocks) if self.scheduler.running else 0
        assert have == free - kept

    def _blocks(self, start: int, count: int) -> int:
        return -(-(start + count) // self.config.block_size)

    def _chunk(self, head: Request, batch: Batch, start: int | None = None) -> int:
        wanted = head.num_tokens - (head.num_computed if start is None else start)
        cap = self.config.long_prefill_token_threshold
        if cap and len(self.scheduler.live) > 1:
            wanted = min(wanted, cap)
        return min(wanted, self.config.max_num_batched_tokens - batch.num_tokens)

    def _decodes_followed(self, batch: Batch) -> bool:
        """Under prefill_first the running ones decode after nobody could be admitted."""
        return self.config.batching == "prefill_first" and any(
            r in batch.requests and self.status.get(r) is RUNNING for r in self.in_line)

    def _progress(self, batch: Batch) -> None:
        """A step without rows has a reason: somebody was preempted, or all is still in flight."""
        scheduler = self.scheduler
        if batch.requests or batch.preempted or not scheduler.live:
            return
        assert self.overlapped and any(
            r.num_computed == r.num_tokens for r in scheduler.running), "nothing moves"
