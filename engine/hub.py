"""The connections between rank 0 and its workers: messages, and who is gone.

Rank 0 has a thread that hears everything the workers say, and their end; each worker has one that
hears rank 0. So a death is known within milliseconds, whatever a rank is waiting for.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from queue import SimpleQueue
from typing import Any

from engine.core.errors import TandemError

GRACE = 3.0  # seconds a worker has to end by itself


class ParallelError(TandemError):
    """The ranks cannot go on together; the engine may not be used any more."""


class RankLost(ParallelError):
    """A rank died, or failed where the others did not; the message names it."""


class RanksDisagree(ParallelError):
    """Two ranks scheduled different steps; the message names the step."""


@dataclass
class Peer:
    """A worker as rank 0 sees it."""

    rank: int
    size: int
    connection: Any
    process: subprocess.Popen | None  # None: somebody else's child
    place: str = ""
    heard: deque[tuple] = field(default_factory=deque)

    @property
    def name(self) -> str:
        place = self.place if self.process is None else f"pid {self.process.pid}"
        return f"rank {self.rank} of {self.size} ({place})"

    def epitaph(self) -> str:
        """How it ended, as well as we can know."""
        if self.process is None:
            return f"{self.name} is gone: its connection closed"
        try:
            code = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return f"{self.name} closed its connection"
        how = f"ended with status {code}" if code >= 0 else f"was killed by {_signal_name(-code)}"
        return f"{self.name} {how}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Hub:
    """Rank 0's side. Once a rank is lost, every call raises the same ParallelError."""

    def __init__(self, peers: list[Peer]):
        self.peers = peers
        self.lost: ParallelError | None = None
        self.on_lost: Callable[[], None] | None = None  # called once, in the thread that noticed
        self._closing = False
        self._sending = threading.Lock()  # look-ahead: one thread schedules, another executes
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._listen, name="tandem-hub", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ talking
    def send(self, *message: Any) -> None:
        """To all workers."""
        self.check()
        data = pickle.dumps(message)
        for peer in self.peers:
            try:
                with self._sending:
                    peer.connection.send_bytes(data)
            except OSError:  # it has gone: the listener is about to say how
                self.wait_lost(GRACE)
                self.lose(RankLost(peer.epitaph()))
                self.check()

    def gather(self, kind: str, seconds: float | None = None) -> list[Any]:
        """The next message of `kind` from each worker, in the order of the ranks; those that said
        nothing within `seconds` (forever by default) are missing."""
        until = None if seconds is None else time.monotonic() + seconds
        found: dict[int, Any] = {}
        with self._news:
            while True:
                for peer in self.peers:
                    if peer.rank not in found and peer.heard and peer.heard[0][0] == kind:
                        found[peer.rank] = peer.heard.popleft()[1]
                left = None if until is None else until - time.monotonic()
                if len(found) == len(self.peers) or left is not None and left <= 0:
                    return [found[rank] for rank in sorted(found)]
                self.check()
                self._news.wait(left)

    def check(self) -> None:
        """Raise if a rank is lost."""
        if self.lost is not None:
            raise type(self.lost)(*self.lost.args)

    def wait_lost(self, seconds: float) -> bool:
        """True as soon as a rank is lost; False if none is after `seconds`."""
        with self._news:
            return self._news.wait_for(lambda: self.lost is not None, seconds)

    def lose(self, error: ParallelError) -> None:
        """The ranks cannot go on: tell the workers why, so that they end. The first reason counts.
        """
        with self._news:
            if self.lost is not None or self._closing:
                return
            self.lost = error
            self._news.notify_all()
        self._tell(("stop", str(error)))
        if self.on_lost is not None:
            self.on_lost()

    def _tell(self, message: tuple) -> None:
        for peer in self.peers:
            with suppress(OSError):
                peer.connection.send_bytes(pickle.dumps(message))

    # ------------------------------------------------------------------ listening
    def _listen(self) -> None:
        open_ends = {peer.connection: peer for peer in self.peers}
        while open_ends:
            for connection in wait(list(open_ends)):
                peer = open_ends[connection]  # type: ignore[index]
                try:
                    message = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    del open_ends[connection]  # type: ignore[arg-type]
                    self.lose(RankLost(peer.epitaph()))
                else:
                    self._hear(peer, message)

    def _hear(self, peer: Peer, message: tuple) -> None:
        if message[0] == "failed":
            self.lose(RankLost(f"{peer.name} failed: {message[1]}"))
        elif message[0] == "disagrees":
            self.lose(RanksDisagree(message[1]))
        else:
            with self._news:
                peer.heard.append(message)
                self._news.notify_all()

    # ------------------------------------------------------------------ the end
    def close(self) -> None:
        """Ask the workers to end, then make them. No process of ours is left behind."""
        with self._news:
            if self._closing:
                return
            self._closing = True
        self._tell(("close",))
        until = time.monotonic() + (GRACE if self.lost is None else 0.2)
        for peer in self.peers:
            if peer.process is not None:
                try:
                    peer.process.wait(max(0.0, until - time.monotonic()))
                except subprocess.TimeoutExpired:
                    peer.process.kill()  # also wakes a stopped one, which a SIGTERM does not
                    peer.process.wait()
        if threading.current_thread() is not self._thread:
            self._thread.join(GRACE)
        for peer in self.peers:
            peer.connection.close()


class Follower:
    """A worker's side. When rank 0 is gone or says stop, the process ends, whatever it does."""

    def __init__(self, rank: int, size: int, connection: Any, *, quiet: bool = False):
        """`quiet`: rank 0 reports its own errors to the user, so we say nothing of them."""
        self.rank, self.size, self.quiet = rank, size, quiet
        self._connection = connection
        self._messages: SimpleQueue[tuple] = SimpleQueue()
        threading.Thread(target=self._listen, name="tandem-follower", daemon=True).start()

    def receive(self) -> tuple:
        """The next message from rank 0; waits as long as it takes."""
        return self._messages.get()

    def expect(self, kind: str) -> Any:
        """The content of the next message, which is of `kind` or the end."""
        message = self.receive()
        if message[0] == "close":
            raise SystemExit(0)
        assert message[0] == kind, f"rank 0 said {message[0]}, not {kind}"
        return message[1]

    def receive_boot(self) -> tuple[bytes, int]:
        """The first message: what to build, and the port of the store where the ranks meet."""
        message = self.receive()
        if message[0] == "close":
            raise SystemExit(0)
        return message[1], message[2]

    def send(self, *message: Any) -> None:
        with suppress(OSError):  # rank 0 is gone: the listener ends us
            self._connection.send_bytes(pickle.dumps(message))

    def minimum(self, value: int) -> int:
        """The smallest `value` of all ranks."""
        self.send("minimum", value)
        return self.expect("minimum")

    def _listen(self) -> None:
        while True:
            try:
                message = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                self._die(f"rank 0 of {self.size} is gone: its connection closed", quiet=False)
            if message[0] == "stop":
                self._die(message[1], quiet=self.quiet)
            self._messages.put(message)
            if message[0] == "close":
                time.sleep(GRACE)  # the main thread ends the process, unless it hangs somewhere
                os._exit(0)

    def _die(self, reason: str, quiet: bool) -> None:
        if not quiet:
            print(f"error: {reason}; rank {self.rank} ends with it", file=sys.stderr, flush=True)
        os._exit(1)
