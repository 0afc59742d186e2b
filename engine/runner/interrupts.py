"""Ctrl-C between steps, not inside one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_held() -> Iterator[None]:
    """A Ctrl-C inside takes effect at the end: a step cut in half would move blocks twice when it
    is done again, and part the ranks. A second one takes effect at once."""
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield  # not ours to handle
        return
    held = []

    def hold(number: int, frame: Any) -> None:
        held.append(number)
        if len(held) > 1 and callable(before):
            before(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        signal.raise_signal(signal.SIGINT)
