"""Prefill here, decode there: two kinds of replicas, and a link that carries K/V between them.

Each replica is the same loop over the same core as ever. A prefill replica gets every request as
one for a single token. When that token is there, the prompt's K/V goes over the prefill replica's
link, one transfer after the other; then a decode replica gets the prompt and its first token, with
the prompt computed (`Request.num_received`). The user sees the first token when prefill ends, the
second when the first decode step does.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import simpy

from engine.core.errors import RequestError
from engine.core.request import Request, SamplingParams
from engine.loop import EngineLoop
from simulator.bounds import Bounds
from simulator.chats import ANSWER
from simulator.cost import CostModel
from simulator.metrics import Summary, summarize
from simulator.replica import Replica
from simulator.router import Router
from simulator.split import Split
from simulator.timings import FAILED, NEVER, REJECTED, Live, Timings
from simulator.workload import Workload
from simulator.world import World


class Link:
    """Transfers one after the other: bytes / bandwidth each, then the latency."""

    def __init__(self, split: Split):
        self._rate, self._latency = split.bandwidth * 1e9, split.latency
        self._free_at = 0.0
        self.busy = 0.0  # seconds in which bytes went over it

    def send(self, now: float, size: int) -> tuple[float, float]:
        """When the last of `size` bytes that are ready at `now` has left, and when it is there."""
        seconds = size / self._rate
        self._free_at = max(self._free_at, now) + seconds
        self.busy += seconds
        return self._free_at, self._free_at + self._latency

    def cut(self, now: float) -> None:
        """Nothing more goes over it: bytes that have not left were never sent."""
        self.busy -= max(0.0, self._free_at - now)
        self._free_at = min(self._free_at, now)


@dataclass(slots=True)
class Transfers:
    """What arrived over the links."""

    bytes: int = 0
    seconds: array = field(default_factory=lambda: array("d"))  # of each, waiting included
    links: list[Link] = field(default_factory=list)  # one a prefill replica

    def summary(self) -> Summary:
        """Seconds from the end of prefill to the arrival of the K/V."""
        return summarize(np.asarray(self.seconds))

    def link_use(self, duration: float) -> list[float]:
        """The share of the run in which each link was busy."""
        return [link.busy / duration if duration else 0.0 for link in self.links]

    def as_json(self, duration: float) -> dict[str, Any]:
        """Keys of our own, in the manner of vLLM's."""
        took, use = self.summary(), self.link_use(duration)
        return {"kv_transfers": took.count, "kv_transfer_bytes": self.bytes,
                "mean_kv_transfer_ms": took.mean * 1e3, "p99_kv_transfer_ms": took.p99 * 1e3,
                "max_kv_link_use": max(use)}


class SplitWorld(World):
    """A World whose first `split.prefill` replicas prefill; the others decode.

    `decode_router` chooses among those, when the transfer begins. A prefill replica's blocks are
    free again when its token is there (their content stays cached), and K/V on its way, or waiting
    for room, lies outside the pools: buffers of the network are not counted.
    """

    def __init__(self, workload: Workload, make_loop: Callable[[int], EngineLoop],
                 cost: CostModel, *, split: Split, kv_bytes: int, router: Router,
                 decode_router: Router, bounds: Bounds | None = None,
                 failures: Sequence[tuple[int, float]] = (),
                 on_progress: Callable[[int, int], None] | None = None, client: float = 0.0):
        """`kv_bytes` a token, all ranks together; the rest as of World."""
        self.split, self._kv_bytes, self._decode_router = split, kv_bytes, decode_router
        self.transfers = Transfers(links=[Link(split) for _ in range(split.prefill)])
        # By prefill replica and request: the transfer, and when its last byte leaves.
        self._sending: list[dict[int, tuple[simpy.Process, float]]] = [
            {} for _ in range(split.prefill)]
        super().__init__(workload, make_loop, cost, router=router, replicas=split.replicas,
                         bounds=bounds, failures=failures, on_progress=on_progress, client=client)
        self.timings.decoding = array("d", [NEVER]) * len(self.workload)
        self.entrance, self._decoders = (self.replicas[:split.prefill],
                                         self.replicas[split.prefill:])
        for replica in self._decoders:
            replica.horizon = self.env.peek  # fed by transfers, not by arrivals

    def run(self) -> Timings:
        """As World's; a link that the end of the run cuts off was busy until then."""
        timings = super().run()
        for link in self.transfers.links:
            link.cut(self.env.now)
        return timings

    def _fail(self, replica: Replica, sentence: str, at: float
              ) -> Generator[simpy.Event, Any, None]:
        """K/V that a prefill replica had not sent yet is lost with it."""
        yield from super()._fail(replica, sentence, at)
        if replica in self.entrance:
            number = self.entrance.index(replica)
            self.transfers.links[number].cut(at)
            for process, left in self._sending[number].values():
                if left > at:
                    process.interrupt()

    def _request(self, index: int, block_size: int) -> Request:
        """As it goes to prefill: for its first token only."""
        request = super()._request(index, block_size)
        request.params = self._params_for(1)
        return request

    def _params_for(self, output: int) -> SamplingParams:
        if output not in self._params:
            self._params[output] = SamplingParams(temperature=0.0, max_tokens=output,
                                                  ignore_eos=True)
        return self._params[output]

    def _left(self, index: int) -> int:
        """Output tokens after the first one, as many as the model's length allows."""
        longest = self.replicas[0].loop.scheduler.config.max_model_len
        work = self.workload
        return min(work.outputs[index], longest - work.prompts[index]) - 1

    def _finisher(self, replica: Replica) -> Callable[[Request], None]:
        finish, prefills = super()._finisher(replica), replica in self.replicas[:self.split.prefill]

        def finish_prefill(request: Request) -> None:
            if request.finish_reason != "length" or not self._left(request.user.index):
                return finish(request)
            replica.outstanding -= 1
            self._hand_over(replica, request)

        def finish_decode(request: Request) -> None:
            finish(request)
            if request.finish_reason == "length":
                self.timings.outputs[request.user.index] += 1  # the one that prefill brought

        return finish_prefill if prefills else finish_decode

    def _hand_over(self, replica: Replica, request: Request) -> None:
        """Send the prompt's K/V to a decode replica, to which the request belongs from now on."""
        up = [other for other in self._decoders if other.down is None]
        if not up:
            self._refuse_late(request, FAILED, f"request {request.id}: no decode replica is left "
                                               f"({self._decoders[-1].down})")
            return
        target = up[self._decode_router.choose(up, request)]
        target.outstanding += 1
        number = self.replicas.index(replica)
        size = request.num_prompt * self._kv_bytes
        left, arrives = self.transfers.links[number].send(self.env.now, size)
        self.timings.decoding[request.user.index] = NEVER
        sending = self._sending[number]
        process = self.env.process(self._deliver(target, request, size, arrives, sending))
        sending[request.user.index] = process, left

    def _deliver(self, target: Replica, request: Request, size: int, arrives: float,
                 sending: dict[int, Any]) -> Generator[simpy.Event, Any, None]:
        ready = self.env.now
        lost = False
        try:
            yield self.env.timeout(arrives - ready)
            self.transfers.bytes += size
            self.transfers.seconds.append(arrives - ready)
        except simpy.Interrupt:  # its source failed before the last byte had left
            lost = True
        sending.pop(request.user.index)
        target.outstanding -= 1
        if lost or target.down is not None:  # there is no K/V to go on with: from the beginning
            self.moved += 1
            if not self._send(request.user.index):
                self._answer(request)
            return
        try:
            target.submit(self._received(request, target))
        except RequestError as error:
            self._refuse_late(request, REJECTED, str(error))

    def _refuse_late(self, request: Request, state: int, sentence: str) -> None:
        self._refuse(request.user.index, state, sentence)
        self._answer(request)

    def _answer(self, request: Request) -> None:
        """Whoever waits for the answer has it, such as it is."""
        if self.workload.waits:
            self._waiting_users.pop(request.user.index).succeed()

    def _received(self, request: Request, target: Replica) -> Request:
        """The request as a decode replica gets it: one token longer, and its prompt computed."""
        index, prompt = request.user.index, request.num_prompt
        live = Live(index)
        live.last = self.timings.first[index]
        params = self._params_for(self._left(index))
        if request.tokens is not None:
            tokens: Sequence[int] | int = request.tokens[:prompt] + [ANSWER]
            return Request(request.id, tokens, params, arrival_time=self.env.now,
                           received=prompt, user=live)
        size, keys = target.loop.scheduler.config.block_size, self.workload.keys
        return Request(request.id, prompt + 1, params, arrival_time=self.env.now, received=prompt,
                       keys=keys(index, size)[:prompt // size] if keys else (), user=live)
