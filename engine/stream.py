"""What LLM.stream() returns: deltas as they come, and the owner of the sessions they come from."""

from __future__ import annotations

from collections.abc import Iterator

from engine.core.errors import RequestError
from engine.outputs import Delta
from engine.runner.engine import Engine
from engine.runner.interrupts import interrupt_again, interrupts_held
from engine.runner.session import Session


class Stream(Iterator[Delta]):
    """Runs the engine as far as the next delta. Over with the last one, or with whatever a step
    raises; that, closing it and dropping it abort what still runs. RequestError, which costs
    nothing, for who reads while another does.

    No generator: a Ctrl-C at the beginning of its clean-up would end that, and leave the rest.
    """

    def __init__(self, engine: Engine, sessions: list[Session]):
        self._engine, self._sessions = engine, sessions
        self._deltas = _deltas(engine, sessions)  # knows nothing of us, or we were never dropped

    def __next__(self) -> Delta:
        if not self._sessions:
            raise StopIteration
        try:
            return next(self._deltas)
        except BaseException as error:
            if _never_began(error):  # somebody else is reading, and goes on
                raise RequestError("this stream is being read already, by another thread or by "
                                   "what called this: give each reader a stream of its own, or "
                                   "have them take turns") from None
            self.close()
            raise

    def close(self) -> None:
        """Abort what still runs, and bring no more. Safe to call twice."""
        with interrupts_held():
            sessions, self._sessions = self._sessions, []
            if not self._engine.closed:  # else it took all of them with it
                self._engine.close(*sessions)

    def __del__(self) -> None:
        try:
            if self._sessions:
                self.close()
        except KeyboardInterrupt:
            interrupt_again()  # nobody would hear of it here
            self.close()  # it may have come before they were held


def _never_began(error: BaseException) -> bool:
    """True if it is Python's refusal to enter a generator that runs: no frame of it is in there."""
    trace = error.__traceback__
    return isinstance(error, ValueError) and trace is not None and trace.tb_next is None


def _deltas(engine: Engine, sessions: list[Session]) -> Iterator[Delta]:
    waiting = list(sessions)
    while waiting:
        for session in waiting:
            while (delta := session.take()) is not None:
                yield delta
        # Done is asked first: whoever is done brings no delta after that.
        waiting = [session for session in waiting if not session.done or session.inbox]
        if waiting and not any(session.inbox for session in waiting):
            engine.step()
