"""The SimPy world: requests arrive, a router chooses a replica, a replica turns the engine's loop.

Arrivals are open (at given times), closed (users who wait for their answer) or chats (turns that
re-send their history). Replicas may fail; what they held goes to others, from its beginning.
"""

from __future__ import annotations

import gc
import math
from array import array
from collections.abc import Callable, Generator, Sequence
from random import Random
from typing import Any

import simpy

from engine.core.errors import RequestError
from engine.core.request import Request, SamplingParams
from engine.loop import EngineLoop
from simulator.bounds import Bounds, Stopped
from simulator.chats import Chats
from simulator.cost import CostModel
from simulator.errors import WorkloadError
from simulator.replica import Replica
from simulator.router import Router
from simulator.timings import FAILED, REJECTED, Live, Timings
from simulator.workload import Closed, Workload

GARBAGE_EVERY = 100_000  # objects: a run makes many that live long, and hardly a cycle
PROGRESS_EVERY = 128  # finished requests between two calls of `on_progress`


class World:
    """A workload, replicas, and a router between them. Build, `run()`, read `timings`.

    `make_loop(number)` gives each replica its loop; `on_progress(done, total)` is called now and
    then. A user who waits for an answer has it `client` seconds after the engine. The same
    workload, configuration and seed give the same run, byte for byte.
    """

    def __init__(self, workload: Workload, make_loop: Callable[[int], EngineLoop],
                 cost: CostModel, *, router: Router, replicas: int = 1,
                 bounds: Bounds | None = None, failures: Sequence[tuple[int, float]] = (),
                 on_progress: Callable[[int, int], None] | None = None, client: float = 0.0):
        self.env = simpy.Environment(0.0)  # not 0: a time is written as a float, also the first
        self.workload = workload
        never = array("d", [math.inf])  # sent: users who wait for answers say when
        self.timings = Timings.expecting(never * len(workload) if workload.waits else workload.at,
                                         workload.prompts)
        self.errors: list[str] = []  # the first sentences of refusals
        self.cut = 0  # requests whose output the model's length cut short
        self.moved = 0  # requests sent again because their replica stopped
        self.stopped: str | None = None  # the bound that ended the run
        self.router = router
        self._bounds = bounds or Bounds()
        self._on_progress = on_progress
        self._client = client
        self._done = 0
        self._params: dict[int, SamplingParams] = {}
        self._next_arrival = math.inf
        self._waiting_users: dict[int, simpy.Event] = {}  # request index → its user, closed loop
        self.replicas = [Replica(self.env, make_loop(number), cost, self.timings)
                         for number in range(replicas)]
        self.entrance: Sequence[Replica] = self.replicas  # those that arrivals go to
        for replica in self.replicas:
            replica.loop.on_finish = self._finisher(replica)
            if not workload.waits and not failures:  # a failure sends requests again
                replica.horizon = lambda: self._next_arrival
        self._plan_failures(failures)

    def run(self) -> Timings:
        """Until every request has ended, or a bound is reached: `stopped` names it then."""
        if self.workload.closed is not None:
            self._start_users(self.workload.closed)
        elif self.workload.chats is not None:
            self._start_chats(self.workload.chats)
        else:
            self.env.process(self._open_arrivals())
        most = self._bounds.max_seconds
        often = gc.get_threshold()
        gc.set_threshold(max(often[0], GARBAGE_EVERY), *often[1:])
        try:
            self.env.run(until=most)
        except Stopped as stop:
            self.stopped = str(stop)
        finally:
            gc.set_threshold(*often)
        for replica in self.replicas:
            replica.record_whole_steps()
        if most is not None and self._done < len(self.workload):
            self.stopped = self.stopped or (
                f"stopped at the bound of {most:,g} s of simulated time, with "
                f"{len(self.workload) - self._done:,} requests not answered or not yet there")
        return self.timings

    # ----------------------------------------------------------------- arrivals
    def _open_arrivals(self) -> Generator[simpy.Event, Any, None]:
        env = self.env
        for index, at in enumerate(self.workload.at):
            if at > env.now:
                self._next_arrival = at
                yield env.timeout(at - env.now)
            self.arrive(index, at)
            if self._bounds.max_queue is not None:
                self._check_queue(self._bounds.max_queue)
        self._next_arrival = math.inf

    def _check_queue(self, most: int) -> None:
        """Stopped if more requests wait than the bound allows. All-at-once arrivals may."""
        queue = sum(replica.queue for replica in self.replicas)
        if queue > most and self.workload.span > 0:
            raise Stopped(f"stopped after {self.env.now:,.0f} s of simulated time, with {queue:,} "
                          f"requests waiting (the bound is {most:,})")

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
            yield from self._ask(index)

    def _ask(self, index: int) -> Generator[simpy.Event, Any, None]:
        """Send a request now and wait until its answer, or its refusal, has come back."""
        answered = self._waiting_users[index] = self.env.event()
        if self.arrive(index, self.env.now):
            yield answered
        if self._client:
            yield self.env.timeout(self._client)

    def _start_chats(self, chats: Chats) -> None:
        for turns in chats.conversations:
            self.env.process(self._conversation(chats, turns))

    def _conversation(self, chats: Chats, turns: range) -> Generator[simpy.Event, Any, None]:
        """Each turn follows the answer to the one before and a pause to read, think and type."""
        yield self.env.timeout(self.workload.at[turns.start])
        for index in turns:
            if index > turns.start:
                yield self.env.timeout(chats.pauses[index])
            yield from self._ask(index)

    def arrive(self, index: int, at: float) -> bool:
        """Request `index` of the workload arrives. False if it was refused or nobody is there."""
        work = self.workload
        self.timings.at[index] = at
        prompt, output = work.prompts[index], work.outputs[index]
        accepted = self._send(index)
        if accepted and prompt + output > self.replicas[0].loop.scheduler.config.max_model_len:
            self.cut += 1
        return accepted

    def _send(self, index: int) -> bool:
        """Hand a request to the replica the router chooses among those that are up."""
        up = [r for r in self.entrance if r.down is None] if self._failing else self.entrance
        if not up:
            return self._refuse(index, FAILED, f"request r{index}: no replica is left "
                                               f"({self.entrance[-1].down})")
        request = self._request(index, up[0].loop.scheduler.config.block_size)
        replica = up[self.router.choose(up, request)]
        try:
            replica.submit(request)
        except RequestError as error:
            return self._refuse(index, REJECTED, str(error))
        return True

    def _request(self, index: int, block_size: int) -> Request:
        work = self.workload
        output = work.outputs[index]
        params = self._params.get(output)
        if params is None:
            params = self._params[output] = SamplingParams(
                temperature=0.0, max_tokens=output, ignore_eos=True)
        at = self.timings.at[index]
        tokens = work.tokens if work.chats is None else work.chats.prompt
        if tokens is not None:
            return Request(f"r{index}", tokens(index), params, arrival_time=at, user=Live(index))
        keys = work.keys(index, block_size) if work.keys else ()
        return Request(f"r{index}", work.prompts[index], params, arrival_time=at, keys=keys,
                       user=Live(index))

    def _refuse(self, index: int, state: int, sentence: str) -> bool:
        self.timings.state[index] = state
        if len(self.errors) < 10:
            self.errors.append(sentence)
        self._ended()
        return False

    # ----------------------------------------------------------------- failures
    def _plan_failures(self, failures: Sequence[tuple[int, float]]) -> None:
        self._failing = bool(failures)
        for number, at in failures:
            if not 0 <= number < len(self.replicas) or not 0 <= at < math.inf:
                raise WorkloadError(f"replica {number} cannot fail at {at:g} s: replicas are "
                                    f"0 to {len(self.replicas) - 1}, times at least 0")
            replica = self.replicas[number]
            replica.stops_at = min(replica.stops_at, at)
            self.env.process(self._fail(replica, f"replica {number} stopped at {at:g} s", at))

    def _fail(self, replica: Replica, sentence: str, at: float
              ) -> Generator[simpy.Event, Any, None]:
        yield self.env.timeout(at)
        if replica.down is None:
            replica.stop(sentence)

    # ----------------------------------------------------------------- ends
    def _finisher(self, replica: Replica) -> Callable[[Request], None]:
        finished, users = replica.recorder.finished, self._waiting_users
        waits = self.workload.waits

        def finish(request: Request) -> None:
            replica.outstanding -= 1
            index = request.user.index
            if replica.down is not None and request.finish_reason == "error":
                self.moved += 1
                if self._send(index):  # again from its beginning, on another replica
                    return
            else:
                finished(request)
                self._ended()
            if waits:
                users.pop(index).succeed()

        return finish

    def _ended(self) -> None:
        self._done += 1
        if self._on_progress is not None and not self._done % PROGRESS_EVERY:
            self._on_progress(self._done, len(self.workload))
