"""E02's complexity stage: what a call costs in counted units, on a pool of thousands of blocks."""

from __future__ import annotations

from math import gcd

from exercises.grader.costs import judge_costs
from exercises.grader.report import TestResult
from exercises.grader.session import Call
from exercises.grader.stages import StageRun


def workload(num_blocks: int) -> list[Call]:
    """Take all blocks, share some, give them back in a scrambled order, and take half again."""
    stride = next(n for n in range(num_blocks // 3 + 1, num_blocks) if gcd(n, num_blocks) == 1)
    scrambled = [block * stride % num_blocks for block in range(num_blocks)]
    steps: list[Call] = [("call", "pool", "alloc", ())] * num_blocks
    for block in range(0, num_blocks, 3):
        steps += [("call", "pool", "share", (block,)), ("call", "pool", "free", (block,))]
    steps += [("call", "pool", "free", (block,)) for block in scrambled]
    steps += [("call", "pool", "alloc", ())] * (num_blocks // 2)
    return steps


def build(num_blocks: int) -> Call:
    """The pool the workload needs."""
    return "new", "pool", "BlockPool", (num_blocks, 16)


def run(stage: StageRun) -> list[TestResult]:
    """One test: units a call, and CPU time that must not contradict them."""
    return judge_costs(stage, "R10", build, workload)
