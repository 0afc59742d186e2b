"""One model, one scheduler, one log: requests go in, steps turn, deltas come out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import RLock, current_thread, get_ident
from time import perf_counter
from typing import Any

from engine.core.batch import Batch
from engine.core.errors import RequestError, TandemError
from engine.core.events import EventLog
from engine.core.request import Request, SamplingParams
from engine.core.scheduler import Scheduler
from engine.hub import ParallelError
from engine.loop import EngineLoop, StepResult
from engine.outputs import Delta, Timings
from engine.parallel import Lead
from engine.runner.interrupts import interrupts_held
from engine.runner.model_runner import ModelRunner, StepOutput
from engine.runner.pipeline import InFlight, Pipeline
from engine.runner.ranks import LeadRunner
from engine.runner.session import Session
from engine.runner.tokenizer import TextTokenizer
from engine.runner.vocabulary import check_tokens, within

INSIDE = ("this thread is inside a step of this engine: run requests after it, not from a callback "
          "or a finalizer")


class StepCut(TandemError):
    """A step was cut in half by force; the engine may not be used any more."""


class Engine:
    """Drives the loop with an executor and a wall clock; with a pipeline, one step ahead.

    `submit`, `abort` and `close` may be called from any thread, and so may `step`: one thread steps
    at a time. A session's deltas go to its inbox, so several consumers can share one engine. A
    dropped stream may be finalized at any moment, in the middle of a step too, and by a thread that
    a step waits for: then `close` leaves the rest to that step, or to the next.
    """

    def __init__(self, scheduler: Scheduler, runner: ModelRunner | LeadRunner,
                 tokenizer: TextTokenizer | None, log: EventLog | None = None,
                 lead: Lead | None = None, pipeline: Pipeline | None = None,
                 defaults: SamplingParams | None = None):
        """`lead`: the other ranks, if the model is shared with some. `defaults`: the parameters of
        requests that bring none."""
        self.scheduler, self.runner, self.tokenizer, self.log = scheduler, runner, tokenizer, log
        self.lead, self.pipeline = lead, pipeline
        self.defaults = defaults or SamplingParams()
        self.on_step: Callable[[Batch, StepOutput, float], None] | None = None  # hears of each
        self.loop = EngineLoop(scheduler, log, on_finish=self._on_finish)
        self.sessions: dict[str, Session] = {}  # by request id, until their consumer drops them
        self.started = perf_counter()
        self.closed = False
        self.lost: ParallelError | StepCut | None = None  # why no step can be done any more
        self._lock = RLock()
        self._threads: set[int] = set()  # those inside a call of this engine
        self._dropped: deque[Request] = deque()  # of sessions closed there, not aborted yet
        self._ending: list[Request] = []  # aborted for them
        self._wheel: Any = None  # the loop's generator, while something is unfinished
        self._batch: Batch | None = None  # scheduled, not yet computed
        self._flight: InFlight | None = None  # the last step that was started
        self._done: tuple[Batch, StepOutput, float] | None = None  # by the turn that is on
        self._before: InFlight | None = None  # and the one before that, if not handed out yet
        self._whole = True  # False while nothing may stop the step that is on, or it is lost
        self._cut: BaseException | None = None  # what stopped the computation that is over

    def clock(self) -> float:
        """Seconds since the engine was made."""
        return perf_counter() - self.started

    # ------------------------------------------------------------------ requests
    def submit(self, request: Request, owner: str = "", index: int = 0) -> Session:
        """Queue a request and open its session. RequestError, with nothing changed, if bad;
        ParallelError if a rank is lost. After a KeyboardInterrupt it may be queued: abort() it, or
        submit where interrupts_held() until you have the session."""
        if self.closed:
            raise RequestError(f"request {request.id}: this engine is closed; make a new one")
        self._check_lost()
        with interrupts_held(), self._inside():
            return self._submit(request, owner, index)

    def _submit(self, request: Request, owner: str, index: int) -> Session:
        try:
            check_tokens(request, self.runner.config.vocab_size, self.tokenizer)
        except RequestError as error:
            self.scheduler.reject(request, str(error))
            raise
        session = Session(request, owner or request.id, index, self.tokenizer,
                          Timings(request.arrival_time))
        other = self.sessions.setdefault(request.id, session)
        if not other.done and other is not session:
            raise RequestError(f"request id {request.id!r} is already taken by a request that "
                               f"still runs: give each its own")
        self.sessions[request.id] = session
        try:
            self.loop.submit(request)
        except RequestError:
            del self.sessions[request.id]
            raise
        return session

    def abort(self, request_id: str) -> None:
        """End a request at the next step, wherever it is; unknown ids are ignored."""
        with interrupts_held(), self._inside():
            self.loop.abort(request_id)

    def close(self, *sessions: Session) -> None:
        """Forget sessions; their requests, if they still run, are aborted and give back their
        blocks, unless the engine is closed or lost, and all requests with it."""
        with interrupts_held():
            running = [session for session in sessions if not session.done]
            try:
                if running and not self.closed and self.lost is None:
                    self._end(running)
            finally:
                for session in sessions:
                    name = session.request.id
                    if self.sessions.get(name) is session:  # the name may be another's by now
                        del self.sessions[name]

    def _end(self, running: list[Session]) -> None:
        if self._is_inside():  # the collector came here: nothing may be waited for, no lock either
            self._dropped.extend(session.request for session in running)
            return
        for session in running:
            self.abort(session.request.id)
        while not all(session.done for session in running) and not self.closed and self.step():
            pass

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Marks this thread: it may hold what a step needs, or be a step. Inside interrupts_held()
        only: a mark that stays would bar the thread for good."""
        here = get_ident()
        if here in self._threads:
            yield
            return
        try:
            self._threads.add(here)
            yield
        finally:
            self._threads.discard(here)

    def _is_inside(self) -> bool:
        """True where only a callback, or a finalizer that the garbage collector runs at any moment,
        can ask: in the middle of a call of this engine, or in a thread that steps wait for."""
        return get_ident() in self._threads or current_thread().name.startswith("tandem-")

    def shut_down(self) -> None:
        """Finish the log and end the other ranks, after the step in hand. Safe to call twice."""
        with interrupts_held():
            with self._lock:
                self.closed = True
                if self.log is not None:
                    self.log.close()
            if self.lead is not None:
                self.lead.close()
            if self.pipeline is not None:  # last: a rank that is gone has ended what a step awaits
                self.pipeline.close()

    # ------------------------------------------------------------------ steps
    def step(self) -> bool:
        """Compute one step and hand out what it brought; with a pipeline, start one and hand out
        what the one before brought. False if nothing is unfinished.

        ParallelError if a rank is lost, StepCut after a second Ctrl-C that left half a step behind:
        the engine may then only be shut down. RequestError if it was shut down, or if this thread
        is in a step already: a callback or a finalizer may not run requests.
        """
        if self._is_inside():
            raise RequestError(INSIDE)
        with self._lock, interrupts_held(), self._inside():
            if self.closed:
                raise RequestError("this engine is closed, and what was unfinished with it: make a "
                                   "new one")
            self._check_lost()
            try:
                return self._step()
            except ParallelError as error:
                self.lost = error  # steps are in flight that nobody will ever settle
                raise
            except Exception:
                raise
            except BaseException as error:
                if not self._whole:
                    self.lost = StepCut(f"a step was cut in half ({type(error).__name__})")
                raise

    def _check_lost(self) -> None:
        if self.lost is not None:
            raise type(self.lost)(f"this engine is lost, make a new one: {self.lost}")

    def _step(self) -> bool:
        self._whole = False
        self._abort_dropped()
        if self._batch is None:
            self._wheel = self.loop.steps(self.clock, ahead=self.pipeline is not None)
            self._batch = next(self._wheel, None)
            if self._batch is None:
                self._whole = True
                return False
        self._turn(self._batch)
        # Nobody may ever ask for these: a step that is in flight for nothing, what a stop token cut
        # off; and the end of a request whose stream was dropped in this very step.
        while self._batch is not None and (self._some_dropped()
                                           or not self.scheduler.has_unfinished()):
            self._turn(self._batch)
        return True

    def _abort_dropped(self) -> None:
        """Do what sessions that were closed inside a call left to be done."""
        while self._dropped:
            request = self._dropped.popleft()
            self.loop.abort(request.id)
            self._ending.append(request)

    def _some_dropped(self) -> bool:
        """True while a request of such a session is there."""
        self._abort_dropped()
        self._ending = [request for request in self._ending if not request.finished]
        return bool(self._ending)

    def _turn(self, batch: Batch) -> None:
        """Execute `batch`, or with a pipeline start it; tell the loop, which schedules the next."""
        self._done, self._whole = None, False
        result = (self._compute(batch) if self.pipeline is None
                  else self._advance(self.pipeline, batch))
        self._batch = None
        with suppress(StopIteration):
            self._batch = self._wheel.send(result)
        if self._batch is None:
            self._rest()
        self._whole = True
        if self._cut is not None:
            cut, self._cut = self._cut, None
            raise cut
        if self._done is not None and self.on_step is not None:
            self.on_step(*self._done)  # last: what it raises finds the step whole

    def _compute(self, batch: Batch) -> StepResult:
        started = perf_counter()
        try:
            output = self.runner.run(batch)
        except ParallelError:
            raise
        except Exception as error:  # whatever the model raises ends this step's requests only
            return _failed(error, perf_counter() - started)
        except BaseException as error:
            if self.lead is not None:
                raise  # the ranks have parted
            self._cut = error  # the same, and raised when the step is settled
            return _failed(error, perf_counter() - started)
        return self._take(batch, output, perf_counter() - started)

    def _advance(self, pipeline: Pipeline, batch: Batch) -> StepResult:
        """Start `batch`; the result of the step before, if there is one."""
        if self._flight is None or self._flight.batch is not batch:  # not started before a Ctrl-C
            self._before, self._flight = self._flight, pipeline.start(batch, self._flight)
        before = self._before
        if before is None:
            return StepResult([])
        self._whole = True  # a wait can be done again
        try:
            output, seconds = pipeline.finish(before)
        except ParallelError:
            raise
        except BaseException as error:
            if error is not before.error and not isinstance(error, Exception):
                raise  # an interrupt of the wait
            self._whole = False
            if not isinstance(error, Exception):
                if self.lead is not None:
                    raise  # the ranks have parted
                self._cut = error
            assert self._flight is not None
            self._flight.discard()  # it stands on what has failed
            self._before = self._flight = None
            return _failed(error, pipeline.lap(before))
        self._whole = False
        self._before = None
        return self._take(before.batch, output, seconds)

    def _take(self, batch: Batch, output: StepOutput, seconds: float) -> StepResult:
        if self.lead is not None:  # what was summed up without a rank that is lost is no token
            self.lead.hub.check()
        output = within(output, self.runner.config.vocab_size)
        stopped = self._hand_out(batch, output)
        self._done = batch, output, seconds
        return StepResult(output.tokens, seconds, {"source": "measured"}, stopped)

    def _rest(self) -> None:
        """Nothing is unfinished."""
        if self._flight is not None:  # it had no rows
            self._flight.discard()
            self._flight = None
        if self.log is not None:
            self.log.flush()  # whoever reads the log now finds it whole

    def _hand_out(self, batch: Batch, output: StepOutput) -> tuple[str, ...]:
        """Give each sampled token to its session; ids of those whose text is complete by it."""
        now, stopped = self.clock(), []
        for row, token in enumerate(output.tokens):
            session = self.sessions.get(batch.requests[row].id)
            if session is None or not isinstance(token, int) or session.request.finished:
                continue
            number = batch.starts[row] + batch.counts[row] + 1 - session.request.num_prompt
            text = session.push(token, number, now, output.logprobs.get(row))
            session.inbox.append(Delta(session.owner, session.index, text, (token,)))
            if session.stopped:
                stopped.append(session.request.id)
        return tuple(stopped)

    def _on_finish(self, request: Request) -> None:
        """The loop reports an end."""
        session = self.sessions.get(request.id)
        if session is not None:
            session.finish(self.clock())


def _failed(error: BaseException, seconds: float) -> StepResult:
    return StepResult([], seconds, {"source": "measured"},
                      error=f"the step failed: {type(error).__name__}: {error}")
