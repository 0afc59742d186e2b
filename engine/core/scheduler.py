"""The scheduler: which request computes how many tokens in the next step, and why the others wait.

There is no prefill and no decode here, only requests whose `num_computed` chases their
`num_tokens` (vLLM v1's view). One step:

    schedule()   intake, then the batching policy calls the phases
                 1. continue_running   each running request, in order; may preempt
                 2. publish_filled     full blocks become shareable: nothing is rolled back any more
                 3. admit_waiting      swapped ones, then waiting ones, in the order policy's order
    commit()     sampled tokens are appended; who is done leaves

`submit` and `abort` may be called from any thread: they only append to an inbox. Everything else
belongs to one thread by design: a step is a chain of decisions about shared blocks, each seeing the
one before, so a lock inside it could only ever be held from end to end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any

from engine.core.batch import Batch, RowFailed
from engine.core.block_pool import BlockPool, Emit
from engine.core.config import SchedulerConfig
from engine.core.errors import RequestError
from engine.core.eviction import Eviction
from engine.core.insight import Explanation, explain
from engine.core.intake import arrival_fields, check_request
from engine.core.phases import FINISHED, RUNNING, SWAPPED, WAITING, Step, StepPhases
from engine.core.policies import Batching, Order, Preemption
from engine.core.request import Request
from engine.core.stable import advance, stable_steps

Ending = tuple[Request, str, str | None]  # who, finish reason, error sentence


class Scheduler(StepPhases):
    """Drives requests from submit to finish over a BlockManager.

    Policies come by name from the config or as objects; `pool` replaces the block pool (that is
    how a student's part is plugged in); `emit(kind, **fields)` receives every event.
    """

    def __init__(self, config: SchedulerConfig, *, emit: Emit | None = None,
                 batching: Batching | None = None, order: Order | None = None,
                 preemption: Preemption | None = None, eviction: Eviction | None = None,
                 pool: BlockPool | None = None):
        """UnknownPolicy if a name in the config is not registered."""
        super().__init__(config, emit=emit, batching=batching, order=order, preemption=preemption,
                         eviction=eviction, pool=pool)
        self.num_steps = 0
        self._inbox: deque[tuple[str, Any]] = deque()
        self._seq = 0
        self._parents: list[Request] = []  # their further samples wait for their prompt
        self._in_flight: list[Batch] = []  # scheduled, not committed: at most 2, under look-ahead

    # ------------------------------------------------------------------ intake, from any thread
    def submit(self, request: Request) -> None:
        """Queue a request. RequestError, with nothing changed, if it can never run here."""
        try:
            check_request(request, self.config)
        except RequestError as error:
            self.reject(request, str(error))
            raise
        self._inbox.append(("submit", request))

    def reject(self, request: Request, sentence: str) -> None:
        """Put a refusal into the log: for checks outside the core, such as the vocabulary's."""
        self._inbox.append(("reject", (request.id, sentence)))

    def abort(self, request: Request | str, reason: str = "abort",
              error: str | None = None) -> None:
        """End a request, given itself or its id, wherever it is. What is not there is ignored."""
        self._inbox.append(("abort", (request, reason, error)))

    def has_unfinished(self) -> bool:
        """True while a request is anywhere between submit and finish, or the inbox holds news."""
        return bool(self.live or self._inbox)

    def has_news(self) -> bool:
        """True if the next schedule() will find newcomers or aborts."""
        return bool(self._inbox or self._parents)

    def _open_inbox(self) -> list[Request]:
        """Take what came in since the last step; the requests that an abort ended."""
        ended: list[Request] = []
        while self._inbox:
            what, payload = self._inbox.popleft()
            if what == "submit":
                if not self._arrive(payload):
                    ended.append(payload)
            elif what == "abort":
                named, reason, error = payload
                request = self.live.get(named if isinstance(named, str) else named.id)
                if request is not None and (isinstance(named, str) or request is named):
                    self._finish(request, reason, error)
                    ended.append(request)
            elif self._emit is not None:
                self._emit("reject", request=payload[0], error=payload[1])
        return ended

    def _arrive(self, request: Request) -> bool:
        """Take a request in. False if its id is taken: it ends with an error at once."""
        if request.id in self.live:
            sentence = f"request id {request.id!r} is already taken by a request that still runs"
            request.status, request.finish_reason, request.error = FINISHED, "error", sentence
            if self._emit is not None:
                self._emit("reject", request=request.id, error=sentence)
            return False
        request.seq = self._seq
        self._seq += 1
        self.live[request.id] = request
        if self._emit is not None:
            self._emit("arrive", **arrival_fields(request))
        parent = request.parent
        if parent is None or self.live.get(parent.id) is not parent or parent.num_output:
            self.waiting.push(request)
        else:
            if not parent.children:
                self._parents.append(parent)
            parent.children.append(request)
        return True

    # ------------------------------------------------------------------ one step
    def schedule(self) -> Batch:
        """Decide the next step. Computed counters move at once; tokens come with `commit`.

        May be called once more before the last batch is committed (look-ahead): the tokens that
        one will bring then count as known, but never past a request's limit. ValueError, with
        nothing changed, if two are in flight already.
        """
        if len(self._in_flight) > 1:
            raise ValueError(f"steps {self._in_flight[0].step} and {self._in_flight[1].step} are "
                             f"in flight: commit the first before a third is scheduled")
        step = Step(self.num_steps, self.config.max_num_batched_tokens)
        self.num_steps += 1
        batch = step.batch
        if self._emit is not None:
            self._emit("step_begin", step=batch.step, budget=step.left)
        batch.ended = self._open_inbox()
        if self._in_flight:
            self.cohort.dissolve()
            self._expect_tokens(self._in_flight[-1])
        if self._parents:
            self._release_children()
        self.waiting.refresh()
        self.blocked = None
        self.batching.fill(self, step)
        batch.num_tokens = self.config.max_num_batched_tokens - step.left
        batch.overlapped = bool(self._in_flight)
        for other in self._in_flight:
            other.overlapped = True
        self._in_flight.append(batch)
        if self._emit is not None:
            self._emit("batch", step=batch.step, requests=[r.id for r in batch.requests],
                       starts=batch.starts, counts=batch.counts, partial=sorted(batch.partial),
                       waiting=len(self.waiting), running=len(self.running),
                       swapped=len(self.swapped), free=self.manager.pool.num_free)
        else:
            batch.stable = stable_steps(self, step)
        return batch

    def _expect_tokens(self, batch: Batch) -> None:
        """Look-ahead: count the token each sampling row of an uncommitted step will bring. Not for
        a row that reaches its limit with it: there is nothing to compute after that."""
        for index, request in enumerate(batch.requests):
            if index not in batch.partial and request.status is RUNNING:
                known = batch.starts[index] + batch.counts[index] + 1
                if known < request.limit:
                    request.num_tokens = known

    def _release_children(self) -> None:
        """Further samples join the queue once their parent's prompt is computed, or never will."""
        for parent in self._parents:
            if parent.finished or parent.num_output:
                for child in parent.children:
                    self.waiting.push(child)
                parent.children = []
        self._parents = [parent for parent in self._parents if parent.children]

    # ------------------------------------------------------------------ results
    def commit(self, batch: Batch, tokens: Sequence[int | None | RowFailed], *, steps: int = 1,
               stopped: Iterable[str] = ()) -> list[Request]:
        """End a step with its sampled tokens, one entry a row; the requests that finished in it.

        `stopped` are ids whose text completed a stop string. `steps` > 1 (at most
        `batch.stable_steps()`) stands for that many equal steps of requests without token ids.
        Results for requests that were aborted or preempted meanwhile are kept or dropped without
        moving a counter. ValueError if the entries do not match the rows.
        """
        self._check_oldest(batch)
        if len(tokens) != len(batch.requests):
            raise ValueError(f"{len(tokens)} results for {len(batch.requests)} rows")
        if any(tokens[index] is not None for index in batch.partial):
            raise ValueError(f"a partial chunk samples nothing: rows {sorted(batch.partial)}")
        del self._in_flight[0]
        if self._emit is not None:
            self._emit("token", step=batch.step,
                       tokens=[token if token.__class__ is int else None for token in tokens])
        if steps > 1:
            advance(self, batch, steps)
        done: list[Ending] = []
        if stopped or batch.overlapped or not _all_there(tokens, batch.partial):
            self.cohort.dissolve()
            stopped = frozenset(stopped)
            for index, token in enumerate(tokens):
                if index not in batch.partial:
                    self._commit_row(batch, index, token, stopped, done)
        else:
            first = self._commit_cohort(done) if self.cohort.in_step else 0
            self._commit_tokens(batch, tokens, first, done)
        for request, reason, error in done:
            self._finish(request, reason, error)
        if not self._in_flight:
            self.cohort.welcome(self.running)
        return batch.ended + [request for request, _, _ in done]

    def _check_oldest(self, batch: Batch) -> None:
        """Results come in the order of the steps: each builds on the one before."""
        if not self._in_flight or batch is not self._in_flight[0]:
            oldest = self._in_flight[0].step if self._in_flight else "none"
            raise ValueError(f"step {batch.step} cannot be settled now: the oldest step in flight "
                             f"is {oldest}")

    def _commit_cohort(self, done: list[Ending]) -> int:
        """The first rows of the batch, if they were scheduled as one; how many they are."""
        done += [(request, "length", None) for request in self.cohort.commit()]
        return len(self.cohort.rows)

    def _commit_tokens(self, batch: Batch, tokens: Sequence[Any], first: int,
                       done: list[Ending]) -> None:
        """The common rows, from `first` on: a token each, and nothing else happened since
        schedule()."""
        requests, results = batch.requests[first:], tokens[first:]
        if batch.partial:
            sampling = [index not in batch.partial for index in range(first, len(tokens))]
            requests = list(compress(requests, sampling))
            results = list(compress(results, sampling))
        for request, token in zip(requests, results):
            if request.tokens is not None:
                request.tokens.append(token)
            known = request.own_tokens = request.own_computed + 1  # none is in a cohort
            if known >= request.limit or token in request.stop_ids:
                self._end_by_token(request, token, done)

    def _commit_row(self, batch: Batch, index: int, token: int | None | RowFailed,
                    stopped: frozenset[str], done: list[Ending]) -> None:
        """The uncommon row: it failed, its text stopped, or the request changed while in flight."""
        request = batch.requests[index]
        if request.finished:
            return  # aborted in flight: the result comes too late
        if not isinstance(token, int):
            reason = token.reason if isinstance(token, RowFailed) else "no token was returned"
            self.manager.withdraw(batch, request)
            request.num_computed = batch.starts[index]
            request.num_tokens = request.num_computed + batch.counts[index]
            done.append((request, "error", reason))
            return
        if request.tokens is not None:
            request.tokens.append(token)
        request.num_tokens = batch.starts[index] + batch.counts[index] + 1
        if request.status is RUNNING:
            # Under look-ahead a block can fill before its last token is known: now it is.
            self.manager.publish(request, self._in_flight[-1] if self._in_flight else batch)
        if request.id in stopped:
            done.append((request, "stop", None))
        else:
            self._end_by_token(request, token, done)

    def _end_by_token(self, request: Request, token: int,
                      done: list[Ending]) -> None:
        """Stop tokens count from min_tokens on; the length limit always does."""
        if token in request.stop_ids and request.num_output >= request.params.min_tokens:
            done.append((request, "stop", None))
        elif request.num_tokens >= request.limit:
            done.append((request, "length", None))

    def fail(self, batch: Batch, reason: str) -> list[Request]:
        """The executor raised: nothing of this step was written. Its requests end with an error,
        what it published is withdrawn, and who it swapped out computes again. Under look-ahead,
        undo() the batch scheduled on top of it. Returns the requests that ended."""
        self._never_was(batch)
        ended: list[Request] = []
        for row in batch.rows:
            if not row.request.finished:
                # Under look-ahead the token that now never comes may have been counted already.
                row.request.num_computed = row.start
                if row.samples:
                    row.request.num_tokens = row.start + row.num_tokens
                self._finish(row.request, "error", reason)
                ended.append(row.request)
        return batch.ended + ended

    def undo(self, batch: Batch) -> list[Request]:
        """The step before failed, and this one was scheduled on top of it: nothing of it was
        written either. Whoever is still there goes back in line, to be computed again. Returns the
        requests that had ended when it was scheduled."""
        self._never_was(batch)
        for request, start in zip(batch.requests, batch.starts):
            if not request.finished:
                request.num_computed = start
                self.running.remove(request)
                # Not as one who comes back: what a swap was to bring here never came, and must not
                # be found again.
                self.manager.free(request)
                self._compute_again(request)
        return batch.ended

    def _never_was(self, batch: Batch) -> None:
        """Of this batch nothing was written, sampled or swapped out."""
        self._check_oldest(batch)
        del self._in_flight[0]
        self.cohort.dissolve()
        self.manager.withdraw(batch)
        if self._emit is not None:
            self._emit("token", step=batch.step, tokens=[None] * len(batch))
        for request in batch.preempted:
            if request.status is SWAPPED:  # its copy to the CPU pool was never made
                self.swapped.remove(request)
                self.manager.drop_swapped(request)
                self._compute_again(request)

    def _compute_again(self, request: Request) -> None:
        """Back in line, with nothing of it left here."""
        if self._emit is not None:
            self._emit("preempt", request=request.id, mode="recompute",
                       computed=request.num_computed, rolled_back=False)
        request.num_computed = request.num_received = 0
        request.status = WAITING
        self.waiting.push(request)

    def _finish(self, request: Request, reason: str, error: str | None = None) -> None:
        """Take a request out, wherever it is, and give back all it holds."""
        if request.status is RUNNING:
            self.running.remove(request)
            self.cohort.leave(request)
        elif request.status is SWAPPED:
            self.swapped.remove(request)
            self.manager.drop_swapped(request)
        elif request.parent is not None and request in request.parent.children:
            request.parent.children.remove(request)
        else:
            self.waiting.remove(request)
        self.manager.free(request)
        request.status, request.finish_reason, request.error = FINISHED, reason, error
        del self.live[request.id]
        if self._emit is not None:
            more = {} if error is None else {"error": error}
            self._emit("finish", request=request.id, reason=reason, outputs=request.num_output,
                       **more)

    def explain(self) -> list[Explanation]:
        """Why each live request is where it is, as of the last schedule()."""
        return explain(self, [child for parent in self._parents for child in parent.children])

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content. False, with nothing changed, while any block is in use."""
        return self.manager.pool.reset()


def _all_there(tokens: Sequence[Any], partial: set[int]) -> bool:
    """True if every row that samples brought a token; those that do not are None."""
    if tokens.count(0) + len(partial) == len(tokens):
        return True  # a simulator's tokens are all the same
    kinds = set(map(type, tokens))
    return kinds <= {int} or (kinds <= {int, type(None)} and tokens.count(None) == len(partial))
