"""Counted mode: a student's file runs with its work counted instead of timed.

The file's syntax tree is rewritten before it runs, inside the worker: each loop iteration, each
comprehension element and each function call of the student's ticks once; lists and deques count the
elements they move or compare in C; integers handed in by the grader, and those that come out of
`range`, count their comparisons and hashes. Counts are deterministic, so a limit on them is fair on
any machine. They live in the student's process and could be forged: the grader cross-checks them
against the worker's CPU time (see stages).
"""

from __future__ import annotations

import ast
import builtins
import collections
from collections.abc import Iterable, Iterator
from typing import Any


class Counts:
    """What a worker has done so far, in units of one elementary action."""

    __slots__ = ("compared", "hashed", "moved", "ticks")

    def __init__(self) -> None:
        self.compared = self.hashed = self.moved = self.ticks = 0

    def as_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__slots__}


COUNTS = Counts()


# --------------------------------------------------------------------------- counting values

class CountedInt(int):
    """An int that counts how often it is compared or hashed. Arithmetic gives plain ints."""

    __slots__ = ()

    def __hash__(self) -> int:
        COUNTS.hashed += 1
        return int.__hash__(self)


def _comparison(name: str) -> Any:
    plain = getattr(int, name)

    def compare(self: CountedInt, other: Any) -> Any:
        COUNTS.compared += 1
        return plain(self, other)

    return compare


for _name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"):
    setattr(CountedInt, _name, _comparison(_name))


def unwrap(value: Any) -> Any:
    """The plain value behind an instrumented one; anything else as it is."""
    kind = type(value)
    if kind is CountedInt:
        return int(value)
    if kind is CountedList:
        return list(value)
    return value


def instrument(value: Any) -> Any:
    """The counted twin of an argument: ints, also inside lists and tuples."""
    if type(value) is int:
        return CountedInt(value)
    if type(value) is list:
        return CountedList(map(instrument, value))
    if type(value) is tuple:
        return tuple(map(instrument, value))
    return value


class CountedList(list):
    """A list that counts the elements its methods move, copy or look at."""

    def pop(self, index: Any = -1) -> Any:
        size = len(self)
        COUNTS.moved += 1 + (size - 1 - index if index >= 0 else -1 - index)
        return list.pop(self, index)

    def insert(self, index: Any, value: Any) -> None:
        COUNTS.moved += 1 + max(0, len(self) - index if index >= 0 else -index)
        list.insert(self, index, value)

    def __getitem__(self, index: Any) -> Any:
        found = list.__getitem__(self, index)
        if isinstance(index, slice):
            COUNTS.moved += len(found)
            return CountedList(found)
        return found

    def __delitem__(self, index: Any) -> None:
        COUNTS.moved += len(self) - (index % len(self) if isinstance(index, int) and self else 0)
        list.__delitem__(self, index)

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, slice):
            COUNTS.moved += len(self)
        list.__setitem__(self, index, value)

    def __mul__(self, times: Any) -> Any:
        COUNTS.moved += len(self) * max(0, int(times))
        return CountedList(list.__mul__(self, times))

    def extend(self, values: Iterable[Any]) -> None:
        before = len(self)
        list.extend(self, values)
        COUNTS.moved += len(self) - before

    def __iadd__(self, values: Iterable[Any]) -> Any:  # type: ignore[misc]
        self.extend(values)
        return self

    def __iter__(self) -> Iterator[Any]:
        for value in list.__iter__(self):
            COUNTS.moved += 1
            yield value


class CountedDeque(collections.deque):
    """A deque that counts the elements its slow methods look at or move."""

    def rotate(self, steps: int = 1) -> None:
        COUNTS.moved += min(abs(int(steps)), len(self))
        super().rotate(steps)


def _whole(base: type, name: str, result: Any = None) -> Any:
    plain = getattr(base, name)

    def method(self: Any, *arguments: Any, **options: Any) -> Any:
        COUNTS.moved += len(self)
        found = plain(self, *arguments, **options)
        return found if result is None or found is NotImplemented else result(found)

    return method


# Priced as if they went through everything: they may stop early, but not on the whole.
for _name in ("remove", "index", "count", "__contains__", "sort", "reverse"):
    setattr(CountedList, _name, _whole(list, _name))
for _name in ("copy", "__add__"):
    setattr(CountedList, _name, _whole(list, _name, CountedList))
for _name in ("remove", "index", "count", "__contains__", "insert", "copy", "__getitem__",
              "__delitem__"):
    setattr(CountedDeque, _name, _whole(collections.deque, _name))


# ------------------------------------------------------------------------- rewriting the file

def tick() -> None:
    COUNTS.ticks += 1


def ticking(values: Iterable[Any]) -> Iterator[Any]:
    """Pass the values through, one tick each."""
    for value in values:
        COUNTS.ticks += 1
        yield value


class _Rewriter(ast.NodeTransformer):
    """Puts the calls of this module into a student's syntax tree; line numbers stay."""

    def _ticked(self, node: Any) -> Any:
        self.generic_visit(node)
        call = ast.Expr(ast.Call(ast.Name("__tick__", ast.Load()), [], []))
        first = 1 if ast.get_docstring(node, clean=False) is not None else 0
        node.body.insert(first, call)
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = _ticked

    def visit_While(self, node: ast.While) -> ast.AST:
        self.generic_visit(node)
        node.body.insert(0, ast.Expr(ast.Call(ast.Name("__tick__", ast.Load()), [], [])))
        return node

    def _wrap_iterable(self, node: Any) -> Any:
        self.generic_visit(node)
        node.iter = ast.Call(ast.Name("__ticking__", ast.Load()), [node.iter], [])
        return node

    visit_For = visit_comprehension = _wrap_iterable

    def _wrap_list(self, node: Any) -> Any:
        self.generic_visit(node)
        if isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            return ast.Call(ast.Name("__list__", ast.Load()), [node], [])
        return node

    visit_List = visit_ListComp = _wrap_list


def rewrite(tree: ast.Module) -> ast.Module:
    """The counted form of a module's syntax tree."""
    return ast.fix_missing_locations(_Rewriter().visit(tree))


def counted_builtins() -> dict[str, Any]:
    """The builtins a counted module sees."""

    def through(plain: Any) -> Any:
        def counted(*arguments: Any, **options: Any) -> Any:
            if len(arguments) == 1 and hasattr(arguments[0], "__len__"):
                COUNTS.moved += len(arguments[0])
            return plain(*arguments, **options)

        return counted

    table = dict(vars(builtins))
    for name in ("sorted", "min", "max", "sum", "any", "all"):
        table[name] = through(table[name])
    table["range"] = lambda *bounds: _CountedRange(*map(int, bounds))
    table["list"] = CountedList
    table["type"] = _plain_type
    table.update(__tick__=tick, __ticking__=ticking, __list__=CountedList)
    return table


class _CountedRange:
    """A range whose elements are counted ints."""

    def __init__(self, *bounds: int):
        self._range = range(*bounds)

    def __iter__(self) -> Iterator[int]:
        return map(CountedInt, self._range)

    def __reversed__(self) -> Iterator[int]:
        return map(CountedInt, reversed(self._range))

    def __len__(self) -> int:
        return len(self._range)

    def __contains__(self, value: Any) -> bool:
        return int(value) in self._range if isinstance(value, int) else value in self._range

    def __getitem__(self, index: Any) -> Any:
        found = self._range[index]
        return CountedInt(found) if isinstance(found, int) else CountedList(map(CountedInt, found))


def _plain_type(*arguments: Any) -> Any:
    """`type(x)` that shows an instrumented value's plain type, so exact type checks still hold."""
    kind = type(*arguments)
    return {CountedInt: int, CountedList: list, CountedDeque: collections.deque}.get(kind, kind)
