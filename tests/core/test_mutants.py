"""The mutation tester makes mutants that run, and changes what their names say."""

from __future__ import annotations

import ast

import pytest

from tests.core.mutants import EQUIVALENT, changes, reason
from tests.core.mutate import CORE, MutantFinder, compiled, mutants_of
from tests.core.nursery import other_code

SOURCE = '''
LIMIT = 2

def f(x, y, more=1):
    """Not this."""
    if x > LIMIT and y:
        return min(x, y) + more
    while not y:
        y += 1
        continue
    return -x
'''


def mutated(part):
    """The function f after the one change whose name contains `part`."""
    tree = ast.parse(SOURCE)
    [change] = [change for change in changes(tree) if part in change.name]
    change.apply()
    space = {}
    exec(compile(ast.fix_missing_locations(tree), "source", "exec"), space)
    return space["f"]


@pytest.mark.parametrize(("part", "args", "right"), [
    ("x > LIMIT -> GtE", (2, 5), 3), ("x > LIMIT and y -> Or", (1, 5), 2),
    ("x > LIMIT and y -> without x > LIMIT", (1, 5), 2),
    ("x > LIMIT and y -> without y", (3, 0), 1), ("min(x, y) -> max", (3, 9), 10),
    ("+ more -> Sub", (3, 9), 2), ("1 -> 2 in def f", (3, 9), 5),
    ("2 -> 3 in LIMIT", (3, 9), -3), ("-x -> without USub", (1, 1), 1),
    ("if x > LIMIT and y -> if True", (1, 5), 2), ("if not y -> if False", (1, 0), -1),
    ("continue -> break", (1, 0), -1), ("return -x -> return None", (1, 1), None)])
def test_a_change_does_what_its_name_says(part, args, right):
    assert mutated(part)(*args) == right


def test_docstrings_are_no_behaviour():
    assert not any("Not this" in change.name for change in changes(ast.parse(SOURCE)))


def test_every_mutant_of_a_module_compiles_and_differs_from_the_original():
    path = CORE / "eviction.py"
    original = compile(path.read_text(), str(path), "exec")
    mutants = list(mutants_of("eviction"))
    assert len({mutant.key for mutant in mutants}) == len(mutants) > 90
    codes = [compiled(mutant) for mutant in mutants[::4]]
    assert all(code != original for code in codes)
    # Nearly all change one function's body; the others a class or module body.
    assert sum(other_code(original, code) is not None for code in codes) > 0.9 * len(codes)


def test_a_mutant_is_served_instead_of_its_module_and_no_other():
    finder = MutantFinder(next(mutants_of("registry")))
    assert finder.find_spec("engine.core.registry", None) is not None
    assert finder.find_spec("engine.core.request", None) is None


def test_a_reason_is_found_by_place_and_part_of_the_change():
    (where, part), why = next(iter(EQUIVALENT.items()))
    assert reason(f"{where}: before {part} after") == why
    assert reason(f"{where}x: {part}") is None and reason(f"{where}: x -> y") is None
