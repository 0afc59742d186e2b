"""A case: what is done to the student's code, step by step, and what must come back.

    Case("R4", "an empty pool refuses", [
        new("BlockPool", 1, 16),
        call("alloc", returns=0),
        call("alloc", raises="OutOfBlocks"),
    ])

The expected values stay in the grader; the worker only ever sees the calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from exercises.grader.compare import ANY, Expected, Raises, Value
from exercises.grader.session import Call

_UNSET = object()
EXCEPTIONS = {
    "ValueError": "builtins.ValueError", "TypeError": "builtins.TypeError",
    "KeyError": "builtins.KeyError", "OutOfBlocks": "exercises.labkit.errors.OutOfBlocks",
}


@dataclass(frozen=True, slots=True)
class Step:
    """One thing done, what must come of it, and the rule that says so (None: the case's own)."""

    op: str  # new, call, get, fn: see worker.py
    on: str  # the variable: "pool"
    name: str
    args: tuple[Any, ...]
    expect: Expected
    rule: str | None = None
    probe: bool = False  # a look that changes nothing; left out of a counterexample's text

    @property
    def call(self) -> Call:
        return self.op, self.on, self.name, self.args

    def __str__(self) -> str:
        arguments = ", ".join(map(repr, self.args))
        if self.op == "new":
            return f"{self.on} = {self.name}({arguments})"
        if self.op == "get":
            return f"{self.on}.{self.name}"
        return f"{self.on + '.' if self.op == 'call' else ''}{self.name}({arguments})"


@dataclass(frozen=True, slots=True)
class Case:
    """A short script that shows one rule."""

    rule: str
    name: str  # a sentence that states the right behaviour
    steps: Sequence[Step]


def _expected(returns: Any, raises: str | None) -> Expected:
    if raises is not None:
        return Raises(raises, EXCEPTIONS[raises])
    return ANY if returns is _UNSET else Value(returns)


def new(class_name: str, *args: Any, on: str = "pool", raises: str | None = None,
        rule: str | None = None) -> Step:
    """Build an object and call it `on`; it must work, or raise what is said."""
    return Step("new", on, class_name, args, _expected(_UNSET, raises), rule)


def call(method: str, *args: Any, on: str = "pool", returns: Any = _UNSET,
         raises: str | None = None, rule: str | None = None) -> Step:
    """Call a method. Without `returns` any value will do, but no exception."""
    return Step("call", on, method, args, _expected(returns, raises), rule)


def get(attribute: str, value: Any, *, on: str = "pool", rule: str | None = None) -> Step:
    """Read an attribute or property."""
    return Step("get", on, attribute, (), Value(value), rule)


def fn(function: str, *args: Any, returns: Any = _UNSET, raises: str | None = None,
       rule: str | None = None) -> Step:
    """Call a function of the student's file."""
    return Step("fn", "", function, args, _expected(returns, raises), rule)
