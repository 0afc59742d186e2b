"""E02's tests are tested: right pools pass, wrong ones are caught as declared, attacks fail.

`python -m exercises verify e02` looks at more seeds and all mutants; nightly runs it whole.
"""

from __future__ import annotations

import doctest

import pytest

from exercises.grader import zoo
from exercises.grader.manifest import load_exercise
from exercises.grader.mutate import mutants
from exercises.grader.stages import grade
from exercises.grader.verify import Verifier

E02 = load_exercise("e02")
ATTACKS = {attack.file: attack for attack in zoo.attacks(E02)}
SLOW_ATTACKS = ("a13_memory", "a21_forged_counters")  # seconds each


def source(name):
    return (E02.folder / f"{name}.py").read_text()


@pytest.mark.parametrize("name", ["solution", *E02.alternatives])
def test_a_right_pool_passes_visible_hidden_and_complexity(name):
    report = grade(E02, source(name), "test-right", only=lambda spec: spec.file != "integrate")
    assert (report.score, report.first_failure()) == (80, None)


@pytest.mark.parametrize("chaff", E02.chaffs, ids=lambda chaff: chaff.file)
def test_a_wrong_pool_is_caught_first_at_its_declared_rule(chaff):
    check = Verifier(E02, seeds=("test-wrong",))._chaff(chaff)
    assert check.ok, check


@pytest.mark.parametrize("name", [name for name in ATTACKS if name not in SLOW_ATTACKS])
def test_an_attack_ends_as_declared_and_reaches_nothing(name):
    before = zoo.tree_hash()
    check = Verifier(E02, seeds=("test-attack",))._attack(ATTACKS[name])
    assert zoo.tree_hash() == before
    if check.ok is None:
        pytest.skip(check.detail)
    assert check.ok, check


def test_there_are_at_least_ten_attacks_six_wrong_pools_and_two_alternatives():
    assert len({attack.threat for attack in ATTACKS.values()}) >= 10
    assert len(E02.chaffs) >= 6 and sum(chaff.subtle for chaff in E02.chaffs) >= 2
    assert len(E02.alternatives) >= 2


def test_every_seventh_mutant_of_the_reference_is_killed():
    def survives(mutant):
        report = grade(E02, mutant, "test-mutant", only=lambda spec: spec.file != "integrate")
        return report.status == "pass"

    chosen = list(mutants(source("solution")))[::7]
    assert [what for what, mutant in chosen if what not in E02.mutants and survives(mutant)] == []


def test_the_starter_has_the_reference_s_signatures_and_none_of_its_bodies():
    import ast

    def signatures(text):
        (pool,) = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
        return {node.name: [argument.arg for argument in node.args.args] for node in pool.body
                if isinstance(node, ast.FunctionDef)}

    starter, reference = signatures(source("starter")), signatures(source("solution"))
    assert starter == {name: reference[name] for name in starter}
    assert set(reference) - set(starter) == {"_check_id", "_check_used"}
    assert source("starter").count("raise NotImplementedError") == len(starter)


def test_the_worked_example_of_the_readme_is_what_the_reference_does():
    namespace: dict = {}
    exec(compile(source("solution"), "solution", "exec"), namespace)
    text = (E02.folder / "README.md").read_text().replace("```", "")
    example = doctest.DocTestParser().get_doctest(text, namespace, "README", None, 0)
    assert len(example.examples) >= 8
    assert doctest.DocTestRunner().run(example).failed == 0


@pytest.mark.nightly
def test_verify_finds_everything_as_declared():
    checks = list(Verifier(E02).run())
    assert [check for check in checks if check.ok is False] == []
