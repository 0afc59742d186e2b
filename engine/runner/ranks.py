"""Tensor parallelism, step by step: one scheduler a rank, all making the same decisions.

    rank 0                                worker
    schedule() ── turn: the intake ─────> submit, abort, schedule()
               ── step: its digest ─────> compare
    forward  <════ activations ═════════> forward
    sample, commit() ── the ids ────────> commit()

Nothing else crosses the wire. A worker has no tokenizer, no log, no clock; what it computes follows
from the intake and the ids.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from engine.core.batch import Batch, RowFailed
from engine.core.config import SchedulerConfig
from engine.core.errors import ConfigError, TandemError
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.hub import GRACE, Follower, Hub, RankLost
from engine.layers.shard import Shard
from engine.parallel import Lead, connect, follower_store, spawned_follower
from engine.runner.device import pick_device
from engine.runner.model_runner import ModelRunner, Prepared, StepOutput

SECONDS_TO_AGREE = 5.0  # within which all ranks must have failed, if one has


def digest(batch: Batch) -> bytes:
    """8 bytes that stand for a step's decisions: rows, where they start, how far they go, and the
    blocks. Of a lone token's row the last block is enough: the others were there before."""
    numbers = array("q", batch.starts)
    numbers.extend(batch.counts)
    for request, count in zip(batch.requests, batch.counts, strict=True):
        table = request.block_table
        numbers.extend((request.seq, len(table), *(table if count > 1 else table[-1:])))
    for pairs in (batch.copies, batch.swap_outs, batch.swap_ins):
        numbers.extend((-1, *(block for pair in pairs for block in pair)))
    return blake2b(numbers.tobytes(), digest_size=8).digest()


def summary(batch: Batch) -> str:
    """What a rank scheduled, in a few words."""
    rows = ", ".join(f"{request.id} {start}+{count}" for request, start, count in zip(
        batch.requests[:4], batch.starts, batch.counts, strict=False))
    return f"{len(batch)} rows, {sum(batch.counts)} tokens ({rows or 'none'})"


# ------------------------------------------------------------------------ rank 0

class LeadScheduler(Scheduler):
    """Rank 0's scheduler: tells the workers what came in, what it decided, what was sampled."""

    def __init__(self, hub: Hub, config: SchedulerConfig, **parts: Any):
        super().__init__(config, **parts)
        self.hub = hub
        self._door = threading.RLock()  # nothing may come in between telling and taking

    def submit(self, request: Request) -> None:
        with self._door:
            super().submit(request)

    def reject(self, request: Request, sentence: str) -> None:
        with self._door:
            super().reject(request, sentence)

    def abort(self, request: Request | str, reason: str = "abort",
              error: str | None = None) -> None:
        with self._door:
            super().abort(request, reason, error)

    def _open_inbox(self) -> list[Request]:
        with self._door:
            news = self._pack_news()
            self.hub.send("turn", news)
            return super()._open_inbox()

    def _pack_news(self) -> list[tuple]:
        """The inbox as plain data. Aborts become ids here: a worker has other Request objects."""
        named: dict[str, Request] = dict(self.live)
        news: list[tuple] = []
        kept: deque[tuple[str, Any]] = deque()
        for what, payload in self._inbox:
            if what == "submit":
                parent = payload.parent
                known = parent is not None and named.get(parent.id) is parent
                news.append(("submit", _pack_request(payload, parent.id if known else None)))
                named.setdefault(payload.id, payload)
            elif what == "abort":
                who: Any = payload[0]
                if not isinstance(who, str):
                    known = named.get(who.id) is who
                    if not known:
                        continue  # it has ended, and its id may be another's by now
                    payload = (who.id, *payload[1:])
                news.append(("abort", payload))
            kept.append((what, payload))
        self._inbox = kept
        return news

    def schedule(self) -> Batch:
        batch = super().schedule()
        self.hub.send("step", (batch.step, digest(batch), summary(batch)))
        return batch

    def commit(self, batch: Batch, tokens: Sequence[int | None | RowFailed], *, steps: int = 1,
               stopped: Any = ()) -> list[Request]:
        self.hub.send("commit", (batch.step, list(tokens), tuple(stopped)))
        return super().commit(batch, tokens, steps=steps, stopped=stopped)

    def fail(self, batch: Batch, reason: str) -> list[Request]:
        self.hub.send("fail", (batch.step, reason))
        return super().fail(batch, reason)

    def undo(self, batch: Batch) -> list[Request]:
        self.hub.send("undo", batch.step)
        return super().undo(batch)

    def reset_prefix_cache(self) -> bool:
        self.hub.send("reset", None)
        return super().reset_prefix_cache()


class LeadRunner:
    """Rank 0's executor: a ModelRunner that knows when its step failed on every rank or on one."""

    def __init__(self, runner: ModelRunner, lead: Lead):
        self.runner, self.lead = runner, lead

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def run(self, batch: Batch) -> StepOutput:
        """ModelRunner.run. ParallelError if the ranks cannot go on; anything else it raises was
        raised on all ranks at the same place, and only this step has failed."""
        with self._guarded(batch):
            return self.runner.run(batch)

    def launch(self, step: Prepared) -> None:
        """ModelRunner.launch, which raises as run() does."""
        with self._guarded(step.batch):
            self.runner.launch(step)

    @contextmanager
    def _guarded(self, batch: Batch) -> Iterator[None]:
        self.lead.hub.check()
        try:
            yield
        except Exception as error:
            self._all_failed(batch, error)
            raise
        except BaseException:
            self.lead.hub.lose(RankLost(f"rank 0 was interrupted in step {batch.step}"))
            raise

    def _all_failed(self, batch: Batch, error: Exception) -> None:
        hub, wire = self.lead.hub, self.lead.shard.wire
        assert wire is not None
        where = (batch.step, wire.num_sums, wire.num_joins, wire.num_shares)
        others = hub.gather("raised", SECONDS_TO_AGREE)
        if len(others) == len(hub.peers) and all(other[:4] == where for other in others):
            return
        if not hub.wait_lost(0.0):
            said = {other[4]: other[5] for other in others}
            states = [f"{peer.name} {said.get(peer.rank, 'did not answer')}" for peer in hub.peers]
            hub.lose(RankLost(f"step {batch.step} failed: rank 0 {_short(error)}; "
                              f"{'; '.join(states)}"))
        hub.check()


# ------------------------------------------------------------------------ workers

class Worker:
    """A rank that follows: scheduler and runner, and the batches not yet committed."""

    def __init__(self, follower: Follower, scheduler: Scheduler, runner: ModelRunner):
        self.follower, self.scheduler, self.runner = follower, scheduler, runner
        self.batches: dict[int, Batch] = {}
        self.flight: Prepared | None = None  # the last step

    def run(self) -> None:
        """Do what rank 0 says until it says close."""
        while (message := self.follower.receive())[0] != "close":
            getattr(self, "_" + message[0])(message[1])

    def _turn(self, news: list[tuple]) -> None:
        named = dict(self.scheduler.live)
        for what, payload in news:
            if what == "submit":
                request = _unpack_request(payload, named)
                named.setdefault(request.id, request)
                self.scheduler.submit(request)
            else:
                self.scheduler.abort(*payload)
        batch = self.scheduler.schedule()
        step, theirs, words = self.follower.expect("step")
        if (step, theirs) != (batch.step, digest(batch)):
            rank = self.follower.rank
            self.follower.send("disagrees", f"the ranks disagree in step {step}: rank 0 scheduled "
                               f"{words}, rank {rank} {summary(batch)} in its step {batch.step}")
            threading.Event().wait()  # rank 0 ends us
        self.batches[batch.step] = batch
        ahead = self.runner.shares_tokens
        before, self.flight = self.flight, Prepared(batch)  # stays so if it fails: nothing drawn
        try:
            self.flight = self.runner.follow(batch, before if ahead else None)
        except Exception as error:  # rank 0 decides whether all failed alike
            wire = self.runner.shard.wire
            assert wire is not None
            self.follower.send("raised", (batch.step, wire.num_sums, wire.num_joins,
                                          wire.num_shares, self.follower.rank, _short(error)))

    def _commit(self, content: tuple) -> None:
        step, tokens, stopped = content
        self.scheduler.commit(self.batches.pop(step), tokens, stopped=stopped)

    def _fail(self, content: tuple) -> None:
        step, reason = content
        self.scheduler.fail(self.batches.pop(step), reason)

    def _undo(self, step: int) -> None:
        self.scheduler.undo(self.batches.pop(step))

    def _reset(self, _: None) -> None:
        self.scheduler.reset_prefix_cache()


def serve(follower: Follower, model: str | None = None) -> None:
    """Build this rank's engine and follow rank 0 to the end. `model`: where it lies here, if not
    where it lies for rank 0."""
    from engine.runner.build import build_worker  # it imports us
    packed, port = follower.receive_boot()
    try:
        config, options = _unpack_boot(packed)
        if model is not None:
            config = replace(config, model=model)
        follower.send("hello", None)
        device = pick_device(config.device, Shard(follower.rank, follower.size))
        shard = connect(follower_store(port), follower.rank, follower.size, device)
        scheduler, runner = build_worker(config, options, shard, follower.minimum)
    except Exception as error:
        follower.send("failed", _short(error))
        threading.Event().wait(GRACE)  # rank 0 may be telling its user a better reason
        raise SystemExit(1) from None
    follower.send("ready", None)
    Worker(follower, scheduler, runner).run()


def _unpack_boot(packed: bytes) -> Any:
    """What rank 0 packed. ConfigError if it holds objects of a class that is not found here."""
    try:
        return pickle.loads(packed)
    except Exception as error:  # whatever an object's own unpickling raises
        raise ConfigError(f"scheduler_options cannot be read here ({_short(error)}): take objects "
                          f"of classes that every rank can import, or names") from None


def main() -> None:
    """The whole life of a worker that rank 0 started."""
    serve(spawned_follower(sys.argv[1:]))
    os._exit(0)  # nothing of ours is left to tidy, and torch takes a second over it


def _pack_request(request: Request, parent: str | None) -> tuple:
    """A request as plain data: the arguments that make it again, and its parent's id."""
    options = {
        "priority": request.priority, "arrival_time": request.arrival_time,
        "deadline": request.deadline, "cache_salt": request.cache_salt, "keys": request.own_keys,
        "eos_ids": sorted(request.stop_ids)}
    return request.id, request.tokens or request.num_prompt, request.params, options, parent


def _unpack_request(values: tuple, named: dict[str, Request]) -> Request:
    name, prompt, params, options, parent = values
    eos_ids = options.pop("eos_ids")
    request = Request(name, prompt, params, parent=named.get(parent), **options)
    request.stop_ids = frozenset(eos_ids)
    return request


def _short(error: Exception) -> str:
    if isinstance(error, TandemError):
        return str(error)
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
