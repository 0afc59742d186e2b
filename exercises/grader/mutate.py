"""Small mistakes, made one at a time: the mutants that an exercise's tests must tell from the right
solution. Each is just another submission."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator

COMPARISONS: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt), ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,)}
ARITHMETIC: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult}
RENAMES = {"popleft": "pop", "append": "appendleft", "pop": "popleft", "appendleft": "append",
           "min": "max", "max": "min"}

Edit = tuple[str, Callable[[ast.AST], ast.AST | None]]  # what it says, and the changed copy


def mutants(source: str) -> Iterator[tuple[str, str]]:
    """(description, source) of every mutant, in the order of the file. Docstrings stay."""
    tree = ast.parse(source)
    for index, node in enumerate(ast.walk(tree)):
        for what, edit in _edits(node):
            changed = copy.deepcopy(tree)
            target = next(n for i, n in enumerate(ast.walk(changed)) if i == index)
            replacement = edit(target)
            if replacement is not target:
                _replace(changed, target, replacement)
            ast.fix_missing_locations(changed)
            yield f"line {getattr(node, 'lineno', 0)}: {what}", ast.unparse(changed)


def _edits(node: ast.AST) -> Iterator[Edit]:
    """The small mistakes one can make at this node."""
    if isinstance(node, ast.Compare):
        yield from _comparison_edits(node)
    elif isinstance(node, ast.BoolOp):
        swapped = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield f"{type(swapped).__name__.lower()} in {ast.unparse(node)}", _set("op", swapped)
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in ARITHMETIC:
        operator = ARITHMETIC[type(node.op)]()
        yield f"{type(operator).__name__} in {ast.unparse(node)}", _set("op", operator)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield f"{node.value} becomes {node.value + 1}", _set("value", node.value + 1)
    elif isinstance(node, ast.If | ast.IfExp):
        text = ast.unparse(node.test)
        yield f"if True for {text}", _set("test", ast.Constant(True))
        yield f"if False for {text}", _set("test", ast.Constant(False))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"drops not in {ast.unparse(node)}", lambda n: n.operand  # type: ignore[attr-defined]
    elif isinstance(node, ast.Attribute) and node.attr in RENAMES:
        yield f"{RENAMES[node.attr]} for {node.attr}", _set("attr", RENAMES[node.attr])
    elif isinstance(node, ast.Return) and node.value is not None:
        yield f"returns None for {ast.unparse(node.value)}", _set("value", None)
    if isinstance(node, ast.Assign | ast.AugAssign | ast.Raise) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield f"without {ast.unparse(node)}", lambda n: ast.Pass()


def _comparison_edits(node: ast.Compare) -> Iterator[Edit]:
    for place, operator in enumerate(node.ops):
        for other in COMPARISONS.get(type(operator), ()):
            def edit(target: ast.AST, place: int = place, other: type = other) -> ast.AST:
                target.ops[place] = other()  # type: ignore[attr-defined]
                return target

            yield f"{other.__name__} in {ast.unparse(node)}", edit


def _set(field: str, value: object) -> Callable[[ast.AST], ast.AST]:
    def edit(target: ast.AST) -> ast.AST:
        setattr(target, field, value)
        return target

    return edit


def _replace(tree: ast.AST, old: ast.AST, new: ast.AST | None) -> None:
    """Put `new` where `old` is."""
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, field, new)
            elif isinstance(value, list):
                setattr(parent, field, [new if item is old else item for item in value])
