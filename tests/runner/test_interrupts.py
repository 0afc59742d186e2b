"""A Ctrl-C at every place in the calls of LLM: what it interrupts is aborted and forgotten."""

from __future__ import annotations

import contextlib
import dis
import gc
import signal
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import engine
from engine import LLM, SamplingParams
from engine.core.errors import TandemError
from engine.runner import interrupts
from engine.runner.interrupts import deliver_interrupts, interrupts_held

SHORT = SamplingParams(temperature=0, max_tokens=2, n=2, ignore_eos=True)
HOME = Path(engine.__file__).parent
FILES = {contextlib.__file__, *(str(HOME / name) for name in (
    "llm.py", "stream.py", "loop.py", "runner/engine.py", "runner/interrupts.py"))}
Place = tuple[CodeType, int]  # a bytecode


@pytest.fixture(autouse=True)
def interruptible():
    """A shell that starts a job in the background has it ignore Ctrl-C, and so its tests. The
    collector would come at other places each time."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()
    yield
    gc.enable()
    signal.signal(signal.SIGINT, before)


def traced(action: Callable[[], Any], wanted: Callable[[CodeType], bool],
           visit: Callable[[Place], None]) -> None:
    """Run `action`; visit each bytecode of the `wanted` code before it is executed."""
    def local(frame: FrameType, event: str, _: Any):
        if event == "opcode":
            visit((frame.f_code, frame.f_lasti))
        return local

    def enter(frame: FrameType, *_: Any):
        if not wanted(frame.f_code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return local
    before = sys.gettrace()
    sys.settrace(enter)
    try:
        action()
    finally:
        sys.settrace(before)


def places_of(action: Callable[[], Any]) -> list[Place]:
    """Where Python may notice a signal while `action` runs: as a function begins, after a call,
    as a loop turns. Not where it would drop what is raised: before the `try` of a finalizer."""
    seen: dict[Place, None] = {}
    traced(action, lambda code: code.co_filename in FILES, lambda place: seen.setdefault(place))
    return [(code, byte) for code, byte in seen
            if byte in borders(code) and not (code.co_name == "__del__" and byte < 4)]


@cache
def borders(code: CodeType) -> set[int]:
    found, before = set(), ""
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if before.startswith("CALL") or name.startswith(("RESUME", "JUMP_BACKWARD")):
            found.add(instruction.offset)
        before = name
    return found


def interrupted_at(action: Callable[[], Any], place: Place) -> bool:
    """Run `action`, with a Ctrl-C where it first comes to `place`. True if it was interrupted."""
    sent = []

    def visit(here: Place) -> None:
        if here == place and not sent:
            sent.append(signal.raise_signal(signal.SIGINT))
    try:
        traced(action, lambda code: code is place[0], visit)
    except KeyboardInterrupt:
        return True
    return False


def generate(llm: LLM) -> None:
    llm.generate([[5, 6, 7]], SHORT)


def stream_to_the_end(llm: LLM) -> None:
    for _ in llm.stream([[5, 6, 7]], SHORT):
        pass


def close_a_stream(llm: LLM) -> None:
    stream = llm.stream([[5, 6, 7]], SHORT)
    next(stream)
    stream.close()


def drop_a_stream(llm: LLM) -> None:
    next(llm.stream([[5, 6, 7]], SHORT))


@pytest.mark.parametrize("overlap", [False, True], ids=["blocking", "overlap"])
@pytest.mark.parametrize("call", [generate, stream_to_the_end, close_a_stream, drop_a_stream])
def test_an_interrupt_leaves_nothing_behind_wherever_it_is_noticed(call, overlap, monkeypatch):
    again: list[int] = []
    monkeypatch.setattr("engine.stream.interrupt_again", lambda: again.append(1))
    with LLM("tiny", num_kv_blocks=20, overlap=overlap) as llm:
        def action() -> None:
            call(llm)
        expected = llm.generate([[5, 6, 7]], SHORT)
        action()
        for code, byte in places_of(action):
            where = f"{code.co_qualname} byte {byte}"
            again.clear()
            assert interrupted_at(action, (code, byte)) or again, where
            state = llm.engine
            assert not state.sessions and not state.scheduler.has_unfinished(), where
            assert not state._threads and state.lost is None, where
            assert not state.scheduler.manager.pool.used, where
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, where
        assert llm.generate([[5, 6, 7]], SHORT)[0].token_ids == expected[0].token_ids


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_one_that_is_held_takes_effect_at_the_outermost_end_or_where_it_is_let():
    did = []
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        with interrupts_held():
            press()
            did.append("inner")
        did.append("outer")
    with interrupts_held():
        deliver_interrupts()  # there is none
        press()
        with pytest.raises(KeyboardInterrupt):
            deliver_interrupts()
        did.append("goes on")
    assert did == ["inner", "outer", "goes on"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_is_held_is_not_lost_with_what_is_raised():
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        press()
        raise ValueError


def test_a_further_one_is_an_echo_until_patience_ends(monkeypatch):
    did = []
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        press()
        press()
        did.append("echo")
        monkeypatch.setattr(interrupts, "PATIENCE", 0.0)
        press()
        did.append("never")
    assert did == ["echo"]


def test_one_in_a_finalizer_comes_again_after_it_however_long_that_takes():
    ended = []

    class Dropped:
        def __del__(self) -> None:
            interrupts.interrupt_again()
            self.tidy()
            ended.append("whole")

        def tidy(self) -> None:
            time.sleep(0.1)
    with pytest.raises(KeyboardInterrupt):
        Dropped()
        time.sleep(5)
    assert ended == ["whole"]


def cut(monkeypatch, owner: Any, name: str) -> None:
    """Ctrl-C twice, in the middle of the second call of `owner`'s method, after PATIENCE."""
    monkeypatch.setattr(interrupts, "PATIENCE", 0.0)
    method, calls = getattr(owner, name), []

    def cutting(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            press()
            press()
        return method(*arguments)
    monkeypatch.setattr(owner, name, cutting)


@pytest.mark.parametrize("overlap, part", [(False, "runner"), (True, "pipeline")])
def test_a_step_that_is_cut_in_its_computation_or_the_wait_for_it_costs_no_engine(
        overlap, part, monkeypatch):
    with LLM("tiny", num_kv_blocks=20, overlap=overlap) as llm:
        expected = llm.generate([[5, 6, 7]], SHORT)[0].token_ids
        with monkeypatch.context() as patch:
            cut(patch, getattr(llm.engine, part), "run" if part == "runner" else "finish")
            with pytest.raises(KeyboardInterrupt):
                llm.generate([[5, 6, 7]], SHORT)
        assert llm.engine.lost is None and not llm.engine.sessions
        assert llm.generate([[5, 6, 7]], SHORT)[0].token_ids == expected
        assert not llm.engine.scheduler.manager.pool.used


@pytest.mark.parametrize("overlap, part", [(False, "scheduler"), (True, "runner")])
def test_an_engine_with_half_a_step_in_it_says_so(overlap, part, monkeypatch):
    with LLM("tiny", num_kv_blocks=20, overlap=overlap) as llm:
        name = "schedule" if part == "scheduler" else "prepare_step"
        cut(monkeypatch, getattr(llm.engine, part), name)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, 6, 7]], SHORT)
        with pytest.raises(TandemError, match="lost, make a new one: a step was cut in half"):
            llm.generate([[5, 6, 7]], SHORT)
        assert not llm.engine.sessions
