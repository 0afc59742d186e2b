"""Ctrl-C where everything is whole, not in the middle of something."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter, sleep
from types import FrameType
from typing import Any

PATIENCE = 2.0  # seconds within which a further Ctrl-C is taken for the echo of the first
POLL = 0.001  # seconds between two looks at whether a finalizer has ended


class _Hold:
    """The handler of SIGINT while interrupts are held."""

    def __init__(self, before: Callable[[int, Any], Any]):
        self.before = before
        self.since: float | None = None  # when the one that waits came

    def __call__(self, number: int, frame: Any) -> None:
        now = perf_counter()
        if self.since is None:
            self.since = now
        elif now - self.since > PATIENCE:
            self.before(number, frame)

    def deliver(self) -> None:
        if self.since is not None:
            self.since = None
            self.before(signal.SIGINT, None)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """A Ctrl-C inside takes effect at the end: a step cut in half would move blocks twice when it
    is done again, and part the ranks; a request cut off from who submitted it would run for nobody.
    The outermost of several counts. A further one, PATIENCE later, takes effect at once."""
    before = signal.getsignal(signal.SIGINT)
    if isinstance(before, _Hold) or not callable(before) or not _is_main():
        yield  # held already; ignored, or the end of the process; another thread's to handle
        return
    hold = _Hold(before)
    try:
        signal.signal(signal.SIGINT, hold)
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        hold.deliver()


def deliver_interrupts() -> None:
    """Let a held Ctrl-C take effect now: for places where it finds everything whole."""
    hold = signal.getsignal(signal.SIGINT)
    if isinstance(hold, _Hold) and _is_main():
        hold.deliver()


def interrupt_again() -> None:
    """Let a Ctrl-C that fell into a finalizer, where Python drops it, come once more after that:
    to be called there, in the main thread."""
    threading.Thread(target=_send_after_finalizers, name="tandem-interrupt", daemon=True).start()


def _send_after_finalizers() -> None:
    main = threading.main_thread().ident
    assert main is not None
    while _is_finalizing(sys._current_frames().get(main)):
        sleep(POLL)
    signal.pthread_kill(main, signal.SIGINT)


def _is_finalizing(frame: FrameType | None) -> bool:
    """True if `frame`, or one that waits for it, is a finalizer's."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
