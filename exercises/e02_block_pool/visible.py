"""E02's visible stage: one small case a rule, for everybody to read."""

from __future__ import annotations

from exercises.grader.cases import Case, call, get, new
from exercises.grader.report import TestResult
from exercises.grader.stages import StageRun, run_cases

CASES = [
    Case("R1", "a new pool of 3 has 3 free blocks", [
        new("BlockPool", 3, 16), get("num_free", 3), get("num_blocks", 3), get("block_size", 16)]),
    Case("R1", "a pool of 0 blocks, or with blocks of 0 tokens, is a ValueError", [
        new("BlockPool", 1, 1), get("num_free", 1),
        new("BlockPool", 0, 16, raises="ValueError"), new("BlockPool", 3, 0, raises="ValueError")]),
    Case("R2", "a fresh pool hands out 0, 1, 2", [
        new("BlockPool", 3, 16), call("alloc", returns=0), call("alloc", returns=1),
        call("alloc", returns=2), get("num_free", 0)]),
    Case("R2", "a block that was freed comes back when it is the only free one", [
        new("BlockPool", 2, 16), call("alloc", returns=0), call("alloc", returns=1),
        call("free", 0, returns=None), call("alloc", returns=0)]),
    Case("R3", "an allocated block has reference count 1", [
        new("BlockPool", 2, 16), call("refcount", 0, returns=0), call("alloc", returns=0),
        call("refcount", 0, returns=1), call("refcount", 1, returns=0)]),
    Case("R4", "alloc on an empty pool raises OutOfBlocks", [
        new("BlockPool", 1, 16), call("alloc", returns=0), call("alloc", raises="OutOfBlocks")]),
    Case("R5", "a block shared twice has reference count 3", [
        new("BlockPool", 2, 16), call("alloc", returns=0), call("share", 0, returns=None),
        call("share", 0, returns=None), call("refcount", 0, returns=3), get("num_free", 1)]),
    Case("R6", "a shared block is free again only after the second free", [
        new("BlockPool", 1, 16), call("alloc", returns=0), call("share", 0, returns=None),
        call("free", 0, returns=None), get("num_free", 0),
        call("free", 0, returns=None), get("num_free", 1)]),
    Case("R7", "freeing a block that was never allocated is a ValueError", [
        new("BlockPool", 2, 16), call("free", 0, raises="ValueError"), get("num_free", 2),
        call("alloc", returns=0)]),
    Case("R7", "freeing a block twice is a ValueError", [
        new("BlockPool", 2, 16), call("alloc", returns=0), call("free", 0, returns=None),
        call("free", 0, raises="ValueError"), get("num_free", 2)]),
    Case("R8", "ids that the pool does not have are a ValueError", [
        new("BlockPool", 2, 16), call("alloc", returns=0), call("share", 2, raises="ValueError"),
        call("free", 7, raises="ValueError"), call("refcount", 2, raises="ValueError")]),
    Case("R9", "allocating from one pool leaves another one full", [
        new("BlockPool", 2, 16, on="a"), new("BlockPool", 3, 16, on="b"),
        call("alloc", on="a", returns=0), get("num_free", 3, on="b"), get("num_free", 1, on="a"),
        call("alloc", on="b", returns=0)]),
]


def run(stage: StageRun) -> list[TestResult]:
    """One test a case."""
    return run_cases(stage, CASES)
