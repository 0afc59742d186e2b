"""Where most mutants live: a pytest session that has imported and collected everything once.

A mutant of a function's body is a fork of that session in which the function got other code; it
runs the tests that call the function, nearest and shortest first, until one fails. That takes a
tenth of the time of a fresh start. What changes a module or class body needs the fresh start.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

FUNCTION = inspect.CO_OPTIMIZED | inspect.CO_NEWLOCALS


def functions(code: CodeType) -> dict[str, CodeType]:
    """The functions and methods of a compiled module by their qualified names."""
    found: dict[str, CodeType] = {}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_flags & FUNCTION == FUNCTION:
                if "<" not in inner.co_qualname:
                    found[inner.co_qualname] = inner
            else:
                found |= functions(inner)
    return found


def other_code(original: CodeType, mutant: CodeType) -> tuple[str, CodeType] | None:
    """The one function whose body the mutant changes, and its new code; None if it is not one."""
    before, after = functions(original), functions(mutant)
    changed = [name for name in after if before.get(name) != after[name]]
    if len(changed) != 1 or before[changed[0]].co_freevars != after[changed[0]].co_freevars:
        return None
    return changed[0], after[changed[0]]


def live_function(module: str, name: str) -> FunctionType:
    """The function object that callers call, whatever is wrapped around it."""
    found: Any = importlib.import_module(f"engine.core.{module}")
    for part in name.split("."):
        found = inspect.getattr_static(found, part)
    if isinstance(found, property):
        found = found.fget
    found = inspect.unwrap(getattr(found, "__func__", found))
    assert isinstance(found, FunctionType), f"{module}.{name} is {found!r}"
    return found


class Nursery:
    """A pytest plugin that runs mutants instead of the tests."""

    def __init__(self, work: Callable[[Nursery], None], core: Path,
                 nearest: dict[str, list[str]]):
        """`work(nursery)` is called when all is ready; `nearest` names test files by module."""
        self._work, self._core, self._nearest = work, str(core), nearest
        self._items: list[Any] = []
        self._reach: list[tuple[float, set[str]]] = []  # of each item: seconds, functions called

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._session, self._items = session, session.items
        self._measure()
        self._work(self)
        return True

    def _measure(self) -> None:
        """One run without any mutant: how long each test takes and what of the core it calls."""
        with tempfile.TemporaryDirectory() as folder:
            told = Path(folder) / "reach"
            pid = os.fork()
            if pid == 0:
                self._quietly(lambda: told.write_bytes(pickle.dumps(
                    [self._watched(item) for item in self._items])))
            os.waitpid(pid, 0)
            if not told.exists():
                raise SystemExit("the tests fail without any mutant; mend them first")
            self._reach = pickle.loads(told.read_bytes())

    def _watched(self, item: Any) -> tuple[float, set[str]]:
        called: set[CodeType] = set()

        def trace(frame: Any, event: str, arg: Any) -> None:
            called.add(frame.f_code)

        begin = time.perf_counter()
        threading.settrace(trace)
        sys.settrace(trace)
        failed = self._run([item])
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        assert not failed, f"{item.nodeid} fails without any mutant"
        return time.perf_counter() - begin, {
            f"{Path(code.co_filename).stem}.{code.co_qualname}" for code in called
            if code.co_filename.startswith(self._core)}

    def has_callers(self, function: str) -> bool:
        """False for what runs at import only, when it is too late to change it."""
        return bool(self._callers(function))

    def start(self, function: str, code: CodeType, limits: Callable[[], None]) -> int:
        """Fork a session in which "module.function" has that code: the process id. It exits with
        0 if no test notices."""
        pid = os.fork()
        if pid == 0:
            def live() -> None:
                limits()
                live_function(*function.split(".", 1)).__code__ = code
                if self._run(self._callers(function)):
                    os._exit(1)
            self._quietly(live)
        return pid

    def _callers(self, function: str) -> list[Any]:
        """Tests that call the function or what is defined in it, those of its module first."""
        inner, near = function + ".<locals>", self._nearest.get(function.partition(".")[0], [])
        chosen = [(item.path.stem.removeprefix("test_") not in near, seconds, index)
                  for index, (item, (seconds, called)) in enumerate(zip(self._items, self._reach))
                  if function in called or any(name.startswith(inner) for name in called)]
        return [self._items[index] for _, _, index in sorted(chosen)]

    def _run(self, items: list[Any]) -> bool:
        """True as soon as one fails."""
        for item, after in zip(items, [*items[1:], None]):
            item.ihook.pytest_runtest_protocol(item=item, nextitem=after)
            if self._session.testsfailed:
                return True
        return False

    def _quietly(self, do: Callable[[], Any]) -> None:
        """Do it in this forked process, without output, and leave: with 0 if all went well."""
        code = 1
        try:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, 1)
            os.dup2(nothing, 2)
            do()
            code = 0
        finally:
            os._exit(code)
