"""Tensor parallelism, step by step: one scheduler a rank, all making the same decisions.

    rank 0                                worker
    schedule() ── turn: the intake ─────> submit, abort, schedule()
               ── step: its digest ─────> compare, prepare
    launch()   ── run ──────────────────> follow()
    forward  <════ activations ═════════> forward
    sample, commit() ── the ids ────────> commit()

Nothing else crosses the wire. A worker has no tokenizer, no log, no clock; what it computes follows
from the intake and the ids.

Whether a step is executed is decided in one place: a worker executes those that LeadRunner.launch()
tells it to run, in that order, and no others. If one raises there, the worker says where; rank 0
answers that it has raised at the same place, or else the engine is lost. So no rank ever takes part
in an exchange that the others count as another one.
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
from typing import Any, NoReturn

from engine.core.batch import Batch, RowFailed
from engine.core.config import SchedulerConfig
from engine.core.errors import ConfigError, TandemError
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.hub import GRACE, Follower, Hub, RankLost
from engine.layers.shard import Shard
from engine.mistakes import reason_of
from engine.parallel import Lead, connect, follower_store, spawned_follower
from engine.runner.device import pick_device
from engine.runner.model_runner import ModelRunner, Prepared, StepOutput

SECONDS_TO_AGREE = 5.0  # within which all ranks must have failed, if one has


def place(step: int, runner: ModelRunner) -> tuple[int, ...]:
    """How far a rank has come: the step, and the exchanges it has begun since it was made."""
    wire = runner.shard.wire
    assert wire is not None
    return step, wire.num_sums, wire.num_joins, wire.num_shares, runner.num_replays


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
        """ModelRunner.run. ParallelError if the ranks cannot go on; after anything else it raises
        all ranks are in step, and only this step has failed."""
        with self._uninterrupted(batch):
            step = self.runner.prepare_step(batch)  # here and in read() rank 0 is on its own
            self.launch(step)
            return step.read()

    def launch(self, step: Prepared) -> None:
        """ModelRunner.launch, on all ranks; raises as run() does."""
        hub, batch = self.lead.hub, step.batch
        with self._uninterrupted(batch):
            hub.send("run", batch.step)
            try:
                self.runner.launch(step)
            except Exception as error:
                self._agree(batch, error)
                raise

    @contextmanager
    def _uninterrupted(self, batch: Batch) -> Iterator[None]:
        """A step cut in half cannot be done again: then the engine is lost."""
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self.lead.hub.lose(RankLost(f"rank 0 was interrupted in step {batch.step}"))
            raise

    def _agree(self, batch: Batch, error: Exception) -> None:
        """`error` is only this step's if all ranks raised where rank 0 did, after the same
        exchanges: tell them so. Else the engine is lost."""
        hub, where = self.lead.hub, place(batch.step, self.runner)
        others = hub.gather("raised", SECONDS_TO_AGREE)
        if len(others) < len(hub.peers) or any(other[0] != where for other in others):
            said = {rank: sentence for _, rank, sentence in others}
            states = [f"{peer.name} {said.get(peer.rank, 'did not answer')}" for peer in hub.peers]
            hub.lose(RankLost(f"step {batch.step} failed: rank 0 {_short(error)}; "
                              f"{'; '.join(states)}"))
        hub.check()
        hub.send("agreed", None)


# ------------------------------------------------------------------------ workers

class Worker:
    """A rank that follows: scheduler and runner, and the steps that are in flight."""

    scheduled: Batch  # the newest step

    def __init__(self, follower: Follower, scheduler: Scheduler, runner: ModelRunner):
        self.follower, self.scheduler, self.runner = follower, scheduler, runner
        self.batches: dict[int, Batch] = {}  # scheduled, and neither committed nor failed
        self.ready: dict[int, Prepared | Exception] = {}  # not run yet; or why one cannot be
        self.newest: Prepared | Exception | None = None
        self.verdict: threading.Timer | None = None  # runs while rank 0 has yet to say: here too
        self.alone = ""  # what we say if it does not

    def run(self) -> None:
        """Do what rank 0 says until it says close. Under look-ahead "run" and "agreed" come from
        another thread of it: between any two other messages."""
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
        self.scheduled = self.scheduler.schedule()

    def _step(self, content: tuple) -> None:
        step, theirs, words = content
        batch = self.scheduled
        if (step, theirs) != (batch.step, digest(batch)):
            rank = self.follower.rank
            self._give_up("disagrees", f"the ranks disagree in step {step}: rank 0 scheduled "
                          f"{words}, rank {rank} {summary(batch)} in its step {batch.step}")
        self.batches[step] = batch
        self.newest = self.ready[step] = self._prepare(batch)

    def _prepare(self, batch: Batch) -> Prepared | Exception:
        """The step while its requests are as they were scheduled, or why it cannot be run. It may
        be that nobody will run it: rank 0 says so, or not."""
        before = self.newest if batch.step - 1 in self.batches else None
        try:
            return self.runner.prepare_step(batch, before if isinstance(before, Prepared) else None)
        except Exception as error:
            return error

    def _run(self, step: int) -> None:
        if self.verdict is not None:
            self._give_up("failed", self.alone)
        ready = self.ready.pop(step)
        try:
            if isinstance(ready, Exception):
                raise ready
            self.runner.follow(ready)
        except Exception as error:
            self._raised(step, error)

    def _raised(self, step: int, error: Exception) -> None:
        """Rank 0 decides whether all have failed alike. If it has not failed, it may wait for us in
        an exchange, and we are the ones to say that we shall not come."""
        sentence = _short(error)
        self.follower.send("raised", (place(step, self.runner), self.follower.rank, sentence))
        self.alone = f"{sentence}, in step {step}, where rank 0 went on"
        self.verdict = threading.Timer(2 * SECONDS_TO_AGREE, self.follower.send,
                                       ("failed", self.alone))
        self.verdict.daemon = True
        self.verdict.start()

    def _agreed(self, _: None) -> None:
        assert self.verdict is not None
        self.verdict.cancel()
        self.verdict = None

    def _give_up(self, kind: str, sentence: str) -> NoReturn:
        self.follower.send(kind, sentence)
        while True:
            threading.Event().wait()  # rank 0 ends us

    def _commit(self, content: tuple) -> None:
        step, tokens, stopped = content
        self.scheduler.commit(self.batches.pop(step), tokens, stopped=stopped)

    def _fail(self, content: tuple) -> None:
        step, reason = content
        self.scheduler.fail(self._never_was(step), reason)

    def _undo(self, step: int) -> None:
        self.scheduler.undo(self._never_was(step))

    def _never_was(self, step: int) -> Batch:
        """The batch of a step that failed or is undone, and may not have been run."""
        self.ready.pop(step, None)
        return self.batches.pop(step)

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
    return f"{type(error).__name__}: {reason_of(error)}"
