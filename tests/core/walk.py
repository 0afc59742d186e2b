"""A seeded walk over one scheduler: random operations, every rule checked after each.

`Walk(seed, combo).run(ticks)` raises at the first broken rule; the message begins with the seed,
and the same seed walks the same way again. `Walk.reached` counts what was reached, so that a test
can refuse a walk that proves nothing.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

from engine.core import Batch, Request, RequestStatus, RowFailed, Scheduler
from engine.core.replay import Replayer
from tests.core.model import ContentModel, expected
from tests.core.recorder import Recorder, StateMirror
from tests.core.rules import StepRules
from tests.core.workload import Combo, RequestMaker, random_config

WAITING, SWAPPED = RequestStatus.WAITING, RequestStatus.SWAPPED


def steps_bound(requests: list[Request]) -> int:
    """How many steps the given live requests can need if nobody interferes any more.

    Let n be their number, W the sum of their limits, and `key` the order by which victims are
    chosen. The running request with the least key is never preempted: a victim has the greatest
    key, and one that runs alone finds all blocks free, of which the pool has max_model_len worth.
    Cut the run into epochs that end when a request finishes (at most n), and each epoch where the
    least-key running request changes (at most n times: it can only be replaced by one with a
    smaller key). Within such a segment call it m. A step either computes a token of m, at most
    limit(m) times, or spends its budget on those who stand before m in `running`; nobody joins
    them, and who is preempted leaves them, so they compute at most W tokens. Under look-ahead a
    step may find m's token still in flight: that doubles it. No step is empty: if nobody runs,
    the head of the line finds everything free. So n * n * 2 * (W + n) steps do for `mixed`,
    `static` and `reserve`. Under `prefill_first` steps in which only others prefill come in
    between; the same number is asserted there, as measured and not as proved.
    """
    count = len(requests)
    work = sum(request.limit or request.num_prompt + 16 for request in requests)
    return 2 * count * count * (work + count) + 4


class Walk:
    """One scheduler under random operations."""

    def __init__(self, seed: int, combo: Combo, *, ahead: bool | None = None,
                 sink: bool | None = None):
        rng = self.rng = Random(f"{seed} {combo}")
        self.seed, self.combo = seed, combo
        self.config = random_config(rng, combo)
        self.ahead = rng.random() < 0.4 if ahead is None else ahead
        self.reached: Counter[str] = Counter()
        self.recorder = Recorder(self.reached) if sink or sink is None and rng.random() < 0.7 \
            else None
        self.scheduler = Scheduler(self.config, emit=self.recorder)
        self.model = ContentModel(self.config)
        self.maker = RequestMaker(rng, self.config, simulated=rng.random() < 0.15)
        self.rules = StepRules(self.scheduler, self.reached)
        self.mirror = StateMirror(self.scheduler, self.recorder) if self.recorder else None
        self.failing = rng.random() < 0.4  # steps of this walk may fail
        self.aborting = rng.random() < 0.6
        self.operations = 0
        self.requests: list[Request] = []
        self.disturbed: set[Request] = set()  # aborted, or in a step that failed
        self.returned: Counter[Request] = Counter()  # how often commit or fail gave it back
        self.pending: tuple[Batch, list[Any] | None] | None = None  # look-ahead: None = it fails

    def run(self, ticks: int) -> None:
        """`ticks` rounds of operations, then until everything has finished, then the audit."""
        try:
            for _ in range(ticks):
                self._intake()
                self._step()
                if self.rng.random() < 0.03:
                    self._reset()
            self._drain()
            self._audit()
        except Exception as error:
            error.add_note(f"seed {self.seed}, {self.combo}, ahead={self.ahead}, {self.config}")
            raise

    # ------------------------------------------------------------------ operations
    def _intake(self) -> None:
        rng, live = self.rng, len(self.scheduler.live)
        if rng.random() < (0.8 if live < 3 else 0.35 if live < 8 else 0.1):
            for request in self.maker.make():
                self.operations += 1
                self.requests.append(request)
                self.scheduler.submit(request)
        if self.aborting and rng.random() < 0.15 and self.requests:
            victim = rng.choice(self.scheduler.swapped or self.requests[-10:])
            for _ in range(rng.choice((1, 1, 2))):
                self.operations += 1
                self.scheduler.abort(victim.id)
            if not victim.finished:
                self.disturbed.add(victim)
                self.reached[f"abort {victim.status.value}"] += 1
                if self.pending and victim in self.pending[0].requests:
                    self.reached["abort in flight"] += 1
        if rng.random() < 0.02:
            self.scheduler.abort("nobody")

    def _step(self) -> None:
        """Schedule one batch; under look-ahead commit the one before it, otherwise itself."""
        if self.pending and self.rng.random() < 0.1:
            self._settle()  # the overlapped loop may also wait
        fails = self.failing and self.rng.random() < 0.06
        doomed = self.pending is not None and self.pending[1] is None
        self.rules.before(overlapped=self.pending is not None)
        batch = self.scheduler.schedule()
        self.operations += 1
        self.rules.after(batch)
        if self.mirror:
            self.mirror.check()
        tokens = None
        if fails or doomed:
            self.model.ruin(batch)
        else:
            tokens = self.model.execute(batch)
            self.model.check_index(self.scheduler.manager.pool.keys)
        if fails and not doomed:
            self.disturbed.update(batch.requests)
        if self.pending:
            self._settle()
        if doomed:
            self._undo(batch)
            return
        self.pending = (batch, tokens)
        if not self.ahead:
            self._settle()

    def _undo(self, batch: Batch) -> None:
        """The step before has failed: of this one's requests none ends, but those that were in it.
        """
        still = [request for request in batch.requests if not request.finished]
        self.reached["undone row"] += len(still)
        self.operations += 1
        self.returned.update(self.scheduler.undo(batch))
        assert all(request.status is WAITING and not request.block_table for request in still)
        self.rules.pools()
        if self.mirror:
            self.mirror.check()

    def _settle(self) -> None:
        """End the pending step with what its execution brought."""
        assert self.pending is not None
        batch, tokens = self.pending
        self.pending = None
        self.operations += 1
        if tokens is None:
            self.reached["failed step"] += bool(batch.requests)
            before = set(self.scheduler.live.values())
            done = self.scheduler.fail(batch, "the device is gone")
            left = before - set(self.scheduler.live.values())
            assert left <= set(batch.requests), "a failed step ended a request not in it"
            assert all(request.finished for request in batch.requests)
        else:
            stopped = [row.request.id for row, token in zip(batch.rows, tokens, strict=True)
                       if isinstance(token, int) and not row.request.finished
                       and row.request.user.stop_string_at == row.start + row.num_tokens]
            self.reached["row failed"] += sum(isinstance(token, RowFailed) for token in tokens)
            self.reached["token of a victim in flight"] += sum(
                row.samples and row.request.status in (WAITING, SWAPPED) for row in batch.rows)
            done = self.scheduler.commit(batch, tokens, stopped=stopped)
        self.returned.update(done)
        self.rules.pools()
        if self.mirror:
            self.mirror.check()

    def _reset(self) -> None:
        pool = self.scheduler.manager.pool
        idle = pool.num_free == pool.num_blocks
        before = dict(pool.keys)
        self.operations += 1
        assert self.scheduler.reset_prefix_cache() is idle
        assert pool.keys == ({} if idle else before)
        self.reached["reset done" if idle else "reset refused"] += 1
        if self.mirror:
            self.mirror.check()

    # ------------------------------------------------------------------ the end
    def _drain(self) -> None:
        self.failing = False
        todo = [request for request in self.requests if not request.finished]
        bound, steps = steps_bound(todo) + 2, 0
        while self.scheduler.has_unfinished() or self.pending:
            if self.scheduler.has_unfinished():
                self._step()
            else:
                self._settle()
            steps += 1
            assert steps <= bound, f"{steps} steps for {len(todo)} requests"
        self.reached["worst steps a token, in percent"] = max(
            self.reached["worst steps a token, in percent"],
            100 * steps // max(1, sum(request.limit for request in todo)))

    def _audit(self) -> None:
        """All have ended with a reason and the right output; nothing is held; a reset frees all."""
        scheduler, pool = self.scheduler, self.scheduler.manager.pool
        assert not scheduler.running and not scheduler.swapped and not len(scheduler.waiting)
        assert not scheduler.live
        for request in self.requests:
            self._audit_request(request)
        pool.check([[]])
        scheduler.manager.cpu_pool.check([[]])
        assert pool.num_free == pool.num_blocks and scheduler.reset_prefix_cache()
        assert not pool.index and not pool.keys
        if self.mirror:
            self.mirror.check()
            self.mirror.check_seeks(Replayer(self.recorder.events, self.config.order), self.rng)

    def _audit_request(self, request: Request) -> None:
        output, reason = expected(request, self.config.max_model_len)
        assert request.finished and not request.block_table and not request.cpu_table
        assert self.returned[request] == 1, f"{request} was returned {self.returned[request]} times"
        if request in self.disturbed and request.finish_reason in ("abort", "error"):
            assert request.num_output <= len(output)
        else:
            assert (request.num_output, request.finish_reason) == (len(output), reason)
        if request.tokens is not None:
            assert request.output_tokens == output[:request.num_output]
        assert (request.error is not None) == (request.finish_reason == "error")
        self.reached[f"finish {request.finish_reason}"] += 1
