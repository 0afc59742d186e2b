"""One locked worker process with one student file in it, seen from the grader.

Use it as a context manager. Every method may raise one of the WorkerFailure classes; after that the
session is dead and only `close` is useful. All waiting is bounded: a call that does not answer
within its wall deadline gets the whole process group, and the pid namespace, killed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exercises.grader import wire
from exercises.grader.manifest import Exercise, ExerciseError
from exercises.grader.outcomes import (
    Outcome,
    ProtocolBroken,
    WorkerCrash,
    WorkerFailure,
    WorkerTimeout,
    load_failure,
    read_raised,
    tidy_output,
)
from exercises.labkit import WIRE_TYPES

_WORKER = Path(__file__).with_name("worker.py")
_START_S = 10.0  # until the worker has locked itself; no student code runs before
_MAX_BACK_CALLS = 1_000_000  # calls to grader-side objects that one session may make


Call = tuple[str, str, str, Sequence[Any]]  # op, variable, name, arguments: see worker.py


@dataclass(slots=True)
class Budget:
    """Seconds that the grader will still wait for workers, over several sessions."""

    left: float


class WorkerSession:
    """Starts a worker, loads `source` into it and runs calls there.

    `counted` loads it in counted mode: `counts` then holds the latest counters. `remotes` are
    grader-side objects that student code may call back, by the name in a wire.RemoteRef. `budget`
    bounds the waiting of several sessions together.
    """

    def __init__(self, exercise: Exercise, source: str, *, counted: bool = False,
                 remotes: dict[str, Any] | None = None, lock: bool = True,
                 budget: Budget | None = None):
        self.exercise = exercise
        self.counts: dict[str, int] = {}
        self.isolation: tuple[str, ...] = ()
        self.round_trips = 0
        self.cpu_s = 0.0  # final after close()
        self._budget = budget or Budget(math.inf)
        self._remotes = remotes or {}
        self._back_calls = 0
        self._next_id = 0
        self._init_pid: int | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()
        self._dead: WorkerFailure | None = None
        try:
            self._start(lock)
            self._load(source, counted)
        except BaseException as error:
            if isinstance(error, WorkerFailure):
                error.isolation = self.isolation
            self.close()
            raise

    def __enter__(self) -> WorkerSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------- life

    def _start(self, lock: bool) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(_START_S)  # bounds a send; receiving holds its own deadline
        self._sock = ours
        boot = {"imports": self.exercise.preload, "paths": self.exercise.preload_paths(),
                "limits": self.exercise.limits.as_dict(), "lock": lock, "grader": os.getpid()}
        environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1",
                       "OPENBLAS_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_WORKER), str(theirs.fileno()),
                 json.dumps(boot)],
                stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output, cwd="/",
                env=environment, pass_fds=[theirs.fileno()], start_new_session=True)
        try:
            self.isolation = tuple(self._hello(time.monotonic() + _START_S)["isolation"])
        except (wire.Closed, TimeoutError) as error:
            self._kill()
            said = tidy_output(self._output).strip().splitlines()
            raise ExerciseError(f"the worker process does not start on this machine: "
                                f"{said[-1] if said else 'it said nothing'}") from error

    def _hello(self, deadline: float) -> dict[str, Any]:
        """Wait for the locked worker. Frames are trusted here: no student code has run yet."""
        hello: dict[str, Any] | None = None
        while hello is None or ("pidns" in hello["isolation"] and self._init_pid is None):
            frame = self._receive(deadline)
            if "init" in frame:
                self._init_pid = frame["init"]
            else:
                hello = frame
        return hello

    def _load(self, source: str, counted: bool) -> None:
        reply = self._request({
            "op": "load", "source": source, "filename": f"work/{self.exercise.id}.py",
            "entry": list(self.exercise.entry), "allowed": list(self.exercise.allowed_imports),
            "counted": counted}, self.exercise.limits.load_s, "loading the file")
        error = reply.get("error")
        if error is not None:
            raise self._fail(load_failure(self.exercise, error))

    def close(self) -> None:
        """End the worker and everything it started; read its CPU time and what it printed."""
        self._kill()
        if hasattr(self, "_sock"):
            self._sock.close()
        if not self._output.closed:
            self.user_output = tidy_output(self._output)
            self._output.close()

    def _kill(self) -> None:
        process = getattr(self, "_process", None)
        if process is None or process.returncode is not None:
            return
        self.cpu_s = self.cpu_so_far()
        if self._init_pid is not None:  # the namespace's first process: the kernel kills the rest
            _kill_quietly(os.kill, self._init_pid)
        _kill_quietly(os.killpg, process.pid)
        process.wait()

    def cpu_so_far(self) -> float:
        """CPU seconds of the process that runs student code, by the kernel's account."""
        pid = self._init_pid or self._process.pid
        try:
            return time.clock_gettime((~pid << 3) | 2)  # its CPU clock: clock_getcpuclockid(3)
        except OSError:
            return self.cpu_s

    # ------------------------------------------------------------------------- calls

    def run(self, steps: Sequence[Call], *, fresh: bool = False,
            wall_s: float | None = None) -> list[Outcome]:
        """Do the steps in order, one outcome each, in one round trip.

        `fresh` forgets the variables of earlier runs first. The deadline is for all steps together
        (default: the exercise's call_s).
        """
        data = [[op, on, name, [wire.encode(value, WIRE_TYPES) for value in arguments]]
                for op, on, name, arguments in steps]
        reply = self._request({"op": "run", "steps": data, "fresh": fresh},
                              wall_s or self.exercise.limits.call_s, "a call")
        outcomes = reply.get("ok")
        if not isinstance(outcomes, list) or len(outcomes) != len(steps):
            raise self._fail(ProtocolBroken("the worker's reply does not fit the request"))
        self._read_counts(reply.get("counts"))
        return [self._outcome(outcome) for outcome in outcomes]

    def _read_counts(self, counts: Any) -> None:
        if isinstance(counts, dict) and all(type(n) is int and 0 <= n < 1 << 53
                                            for n in counts.values()):
            self.counts = counts

    def _outcome(self, data: Any) -> Outcome:
        try:
            kind, body = data
            if kind == "v":
                return Outcome(wire.decode(body, WIRE_TYPES), None)
            return Outcome(None, read_raised(body))
        except wire.WireError as error:
            raise self._fail(ProtocolBroken(f"the worker sent {error}")) from error
        except (TypeError, ValueError, KeyError, RecursionError) as error:
            raise self._fail(ProtocolBroken("the worker sent a garbled outcome")) from error

    def _request(self, message: dict[str, Any], wall_s: float, doing: str) -> dict[str, Any]:
        """Send, serve call-backs, and return the one reply that carries this request's id."""
        if self._dead is not None:
            raise self._dead
        self._next_id += 1
        self.round_trips += 1
        if wall_s > self._budget.left:
            wall_s, doing = self._budget.left, f"{doing}, with the time for this stage used up"
        begun = time.monotonic()
        try:
            return self._converse(message, begun + wall_s, wall_s, doing)
        finally:
            self._budget.left = max(0.0, self._budget.left - (time.monotonic() - begun))

    def _converse(self, message: dict[str, Any], deadline: float, wall_s: float,
                  doing: str) -> dict[str, Any]:
        if select.select([self._sock], [], [], 0)[0] and self._process.poll() is None:
            raise self._fail(ProtocolBroken("the worker sent something that nobody asked for"))
        try:
            wire.send_frame(self._sock, {"id": self._next_id, **message})
            while True:
                frame = self._receive(deadline)
                if not (isinstance(frame, dict) and "back" in frame):
                    break
                wire.send_frame(self._sock, self._serve_back(frame["back"]))
        except wire.Closed:
            raise self._fail(WorkerCrash(f"{self._describe_end()} during {doing}")) from None
        except wire.WireError as error:
            raise self._fail(ProtocolBroken(f"the worker sent {error}")) from error
        except TimeoutError:
            raise self._fail(WorkerTimeout(f"no answer within {wall_s:.3g} s: {doing}")) from None
        if not isinstance(frame, dict) or frame.get("id") != self._next_id:
            raise self._fail(ProtocolBroken("a reply that nobody asked for"))
        if "too_large" in frame:
            raise self._fail(ProtocolBroken("an answer too large to send"))
        return frame

    def _receive(self, deadline: float) -> Any:
        def wait() -> None:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._sock], [], [], left)[0]:
                raise TimeoutError

        return wire.receive_frame(self._sock, wait)

    def _serve_back(self, back: Any) -> dict[str, Any]:
        """Call a grader-side object for the student. Its refusals travel; its bugs do not hide."""
        self._back_calls += 1
        try:
            name, method, raw = back
            target = self._remotes[name]
            if method not in target.remote_methods or self._back_calls > _MAX_BACK_CALLS:
                raise KeyError(method)
            arguments = wire.decode(raw, WIRE_TYPES)
        except (TypeError, ValueError, KeyError, RecursionError) as error:
            raise wire.WireError("a call to an object or method that is not there") from error
        try:
            return {"value": wire.encode(getattr(target, method)(*arguments), WIRE_TYPES)}
        except tuple(target.remote_errors) as error:
            return {"raise": [type(error).__name__, str(error)]}

    def _fail(self, failure: WorkerFailure) -> WorkerFailure:
        self._kill()
        self._dead = failure
        return failure

    def _describe_end(self) -> str:
        """How the process ended, in words; it has closed its socket already."""
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "the worker closed its connection"
        if code < 0 or code > 128:
            number = -code if code < 0 else code - 128
            name = signal.Signals(number).name if number in set(signal.Signals) else str(number)
            return f"your code ended the process (signal {name})"
        return f"your code ended the process (exit code {code})"


def _kill_quietly(kill: Callable[[int, int], None], pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it may be gone already
        kill(pid, signal.SIGKILL)
