"""The SimPy world: requests arrive, a router chooses a replica, a replica turns the engine's loop.

A replica drives `engine.loop.EngineLoop` exactly as the real engine does, except that executing a
batch means letting `cost(batch)` seconds go by. Nothing here decides anything about scheduling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from random import Random
from typing import Any

import simpy

from engine.core.batch import Batch
from engine.core.errors import RequestError
from engine.core.request import Request, SamplingParams
from engine.loop import EngineLoop, StepResult
from simulator.cost import CostModel
from simulator.router import Router
from simulator.timings import REJECTED, Live, Recorder, Timings
from simulator.workload import Closed, Workload

PROGRESS_EVERY = 128  # finished requests between two calls of `on_progress`


class Replica:
    """One engine: a loop, a cost model, and the process that turns them in simulated time."""

    def __init__(self, env: simpy.Environment, loop: EngineLoop, cost: CostModel, timings: Timings):
        self.env, self.loop, self.cost = env, loop, cost
        self.recorder = Recorder(timings)
        self.horizon: Callable[[], float] = env.peek  # nothing can be submitted before this time
        self.outstanding = 0  # requests here that have not ended
        self._work = env.event()  # succeeds when the idle loop gets something to do
        env.process(self._run())

    def submit(self, request: Request) -> None:
        """Hand a request to the loop and wake it. RequestError if it can never run here."""
        try:
            self.loop.submit(request)
            self.outstanding += 1
        finally:  # the refusal is an event, too: the loop writes it at its next turn
            self.wake()

    def wake(self) -> None:
        """Let an idle loop look at its inbox."""
        if not self._work.triggered:
            self._work.succeed()

    def _run(self) -> Generator[simpy.Event, Any, None]:
        env, scheduler = self.env, self.loop.scheduler
        while True:
            if not scheduler.has_unfinished():
                self._work = env.event()
                yield self._work
            turns = self.loop.steps(self._clock)
            batch = next(turns, None)
            while batch is not None:
                begin = env.now
                result, ends = self._execute(batch, begin)
                # End minus begin is exact in floating point here, so `now` becomes the very end.
                yield env.timeout(ends[-1] - begin)
                if self.horizon() <= env.now:
                    yield env.timeout(0)  # whoever arrives at this instant is seen by this turn
                self.recorder.step(batch, begin, ends)
                try:
                    batch = turns.send(result)
                except StopIteration:
                    batch = None

    def _clock(self) -> float:
        return self.env.now

    def _execute(self, batch: Batch, begin: float) -> tuple[StepResult, Sequence[float]]:
        """The result of a step, or of several equal ones, and the times at which they end."""
        tokens: list[Any] = [0] * len(batch.requests)
        for row in batch.partial:
            tokens[row] = None
        if self.loop.log is not None:
            cost = self.cost.cost(batch)
            return StepResult(tokens, cost.seconds, cost.as_event()), (begin + cost.seconds,)
        if batch.stable > 1:
            ends = self.cost.end_times(batch, begin, batch.stable, self.horizon())
            return StepResult(tokens, ends[-1] - begin, steps=len(ends)), ends
        seconds = self.cost.seconds(batch)
        return StepResult(tokens, seconds), (begin + seconds,)


class World:
    """A workload, replicas, and a router between them. Build, `run()`, read `timings`.

    `make_loop(number)` gives each replica its loop; `on_progress(done, total)` is called now and
    then. The same workload, configuration and seed give the same run, byte for byte.
    """

    def __init__(self, workload: Workload, make_loop: Callable[[int], EngineLoop],
                 cost: CostModel, *, router: Router, replicas: int = 1,
                 on_progress: Callable[[int, int], None] | None = None):
        self.env = simpy.Environment()
        self.workload = workload
        self.timings = Timings.expecting(workload.at, workload.prompts)
        self.errors: list[str] = []  # the first sentences of refusals
        self.cut = 0  # requests whose output the model's length cut short
        self.router = router
        self._on_progress = on_progress
        self._done = 0
        self._params: dict[int, SamplingParams] = {}
        self._next_arrival = math.inf
        self._waiting_users: dict[int, simpy.Event] = {}  # request index → its user, closed loop
        self.replicas = [Replica(self.env, make_loop(number), cost, self.timings)
                         for number in range(replicas)]
        for replica in self.replicas:
            replica.loop.on_finish = self._finisher(replica)
            if workload.closed is None:
                replica.horizon = lambda: self._next_arrival

    def run(self) -> Timings:
        """Until every request has ended."""
        if self.workload.closed is None:
            self.env.process(self._open_arrivals())
        else:
            self._start_users(self.workload.closed)
        self.env.run()
        return self.timings

    # ----------------------------------------------------------------- arrivals
    def _open_arrivals(self) -> Generator[simpy.Event, Any, None]:
        env = self.env
        for index, at in enumerate(self.workload.at):
            if at > env.now:
                self._next_arrival = at
                yield env.timeout(at - env.now)
            self.arrive(index, at)
        self._next_arrival = math.inf

    def _start_users(self, closed: Closed) -> None:
        numbers = iter(range(len(self.workload)))
        for user in range(closed.users):
            self.env.process(self._user(closed, Random(f"{closed.seed}:user:{user}"), numbers))

    def _user(self, closed: Closed, rng: Random, numbers: Any) -> Generator[simpy.Event, Any, None]:
        """Think, send, wait for the answer; until the workload has no request left."""
        while True:
            pause = closed.think(rng)
            if pause:
                yield self.env.timeout(pause)
            index = next(numbers, None)
            if index is None:
                return
            answered = self._waiting_users[index] = self.env.event()
            if self.arrive(index, self.env.now):
                yield answered

    def arrive(self, index: int, at: float) -> bool:
        """Request `index` of the workload arrives. False if it was refused."""
        work = self.workload
        prompt, output = work.prompts[index], work.outputs[index]
        self.timings.at[index] = at
        params = self._params.get(output)
        if params is None:
            params = self._params[output] = SamplingParams(
                temperature=0.0, max_tokens=output, ignore_eos=True)
        replica = self.replicas[self.router.choose(self.replicas)]
        config = replica.loop.scheduler.config
        keys = work.keys(index, config.block_size) if work.keys else ()
        request = Request(f"r{index}", prompt, params, arrival_time=at, keys=keys,
                          user=Live(index))
        try:
            replica.submit(request)
        except RequestError as error:
            self.timings.state[index] = REJECTED
            if len(self.errors) < 10:
                self.errors.append(str(error))
            self._ended()
            return False
        if prompt + output > config.max_model_len:
            self.cut += 1
        return True

    # ----------------------------------------------------------------- ends
    def _finisher(self, replica: Replica) -> Callable[[Request], None]:
        finished, users = replica.recorder.finished, self._waiting_users
        closed = self.workload.closed is not None

        def finish(request: Request) -> None:
            finished(request)
            replica.outstanding -= 1
            self._ended()
            if closed:
                users.pop(request.user.index).succeed()

        return finish

    def _ended(self) -> None:
        self._done += 1
        if self._on_progress is not None and not self._done % PROGRESS_EVERY:
            self._on_progress(self._done, len(self.workload))
