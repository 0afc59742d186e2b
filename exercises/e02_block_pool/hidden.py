"""E02's hidden stage: random walks over tiny pools beside a slow, obvious model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from exercises.grader.cases import Step, call, get, new
from exercises.grader.report import TestResult
from exercises.grader.stages import StageRun
from exercises.grader.walks import Op, Walk, run_walks

BAD_SIZES = ((0, 1), (-1, 2), (2, 0), (3, -4), (True, 1), (2, True), ("2", 1), (2.0, 1), (None, 1))
BAD_TYPES = (True, False, "0", 0.0, None)


class PoolModel:
    """What a pool must do, in the plainest words: a list of free ids and a dict of counts."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.free_ids = list(range(num_blocks))  # the one free for longest first
        self.counts: dict[int, int] = {}  # of the blocks in use
        self.seen: set[int] = set()  # ids that were in use before

    def refcount(self, block: Any) -> int | None:
        """The block's count, or None if there is no such block."""
        if type(block) is not int or not 0 <= block < self.num_blocks:
            return None
        return self.counts.get(block, 0)

    def alloc(self) -> int | None:
        """The next block, or None if none is free."""
        if not self.free_ids:
            return None
        block = self.free_ids.pop(0)
        self.counts[block] = 1
        return block

    def share(self, block: int) -> None:
        self.counts[block] += 1

    def free(self, block: int) -> None:
        self.counts[block] -= 1
        if self.counts[block] == 0:
            del self.counts[block]
            self.free_ids.append(block)
            self.seen.add(block)


class PoolSubject:
    """Draws walks and says what is right. A walk's setup is (num_blocks, block_size, other), where
    `other` is the size of a second pool beside the first, 0 for none."""

    rules = {
        "R1": "walks: only sizes of at least 1 make a pool",
        "R2": "walks: the block free for longest is handed out",
        "R3": "walks: an allocated block has reference count 1",
        "R4": "walks: a refused alloc changes nothing",
        "R5": "walks: share adds one reference",
        "R6": "walks: the last free makes a block free",
        "R7": "walks: free blocks can be neither freed nor shared",
        "R8": "walks: only ids of the pool are accepted",
        "R9": "walks: two pools do not disturb each other",
    }

    # ----------------------------------------------------------------------- drawing
    def draw(self, rng: Random, length: int) -> Walk:
        setup = (rng.randint(1, 5), rng.randint(1, 3), rng.choice((0, 0, rng.randint(1, 3))))
        models = _models(setup)
        eager = rng.choice((0.3, 0.5, 0.7))  # how much this walk likes to allocate
        ops: list[Op] = []
        for _ in range(length):
            on = rng.choice(list(models))
            op = self._draw_op(rng, models[on], eager, on)
            ops.append(op)
            _advance(models, op)
        return Walk(setup, tuple(ops))

    def _draw_op(self, rng: Random, model: PoolModel, eager: float, on: str) -> Op:
        if rng.random() < 0.03:
            return ("bad", "new", rng.choice(BAD_SIZES))
        if rng.random() < (eager if model.free_ids else 0.15):
            return (on, "alloc", None)
        name = rng.choices(("share", "free", "refcount"), (2, 7, 1))[0]
        return (on, name, self._draw_id(rng, model))

    @staticmethod
    def _draw_id(rng: Random, model: PoolModel) -> Any:
        luck = rng.random()
        if luck < 0.75 and model.counts:
            return rng.choice(sorted(model.counts))
        if luck < 0.9 and model.free_ids:
            return rng.choice(sorted(model.free_ids))
        size = model.num_blocks
        return rng.choice((-1, -size, -size - 1, size, size + 1, 10**20, rng.choice(BAD_TYPES)))

    # ----------------------------------------------------------------------- judging
    def script(self, walk: Walk, reached: Counter[str] | None = None) -> list[Step]:
        num_blocks, block_size, other = walk.setup
        models = _models(walk.setup)
        steps = [new("BlockPool", num_blocks, block_size, rule="R1"),
                 _probe(get("num_free", num_blocks, rule="R1"))]
        if other:
            steps += [new("BlockPool", other, block_size, on="other", rule="R1"),
                      _probe(get("num_free", other, on="other", rule="R1")),
                      _probe(get("num_free", num_blocks, rule="R9"))]
        counts: Counter[str] = Counter(two_pools=1 if other else 0)
        for op in walk.ops:
            if op[1] != "new" and op[0] not in models:
                continue  # shrinking took the second pool away
            steps += self._steps(models, op, counts)
        if reached is not None:
            reached.update(counts)
        return steps

    def _steps(self, models: dict[str, PoolModel], op: Op, counts: Counter[str]) -> list[Step]:
        """One operation, and the looks after it that would show a change it must not make."""
        on, name, argument = op
        if name == "new":
            counts["bad_new"] += 1
            return [new("BlockPool", *argument, on="bad", raises="ValueError", rule="R1")]
        model = models[on]
        step, rule, touched = _judge(model, op, counts)
        _advance(models, op)
        looks = [get("num_free", len(model.free_ids), on=on, rule=rule)]
        if touched is not None:
            looks.append(call("refcount", touched, on=on, returns=model.refcount(touched),
                              rule="R3" if name == "alloc" else rule))
        for neighbour in models.keys() - {on}:
            looks.append(get("num_free", len(models[neighbour].free_ids), on=neighbour, rule="R9"))
        return [step, *map(_probe, looks)]

    # ---------------------------------------------------------------------- shrinking
    def simpler(self, walk: Walk) -> Sequence[Walk]:
        num_blocks, block_size, other = walk.setup
        found = []
        if other:
            kept = tuple(op for op in walk.ops if op[0] != "other")
            found.append(Walk((num_blocks, block_size, 0), kept))
        if block_size > 1:
            found.append(replace(walk, setup=(num_blocks, 1, other)))
        if num_blocks > 1:
            found.append(replace(walk, setup=(num_blocks - 1, block_size, other)))
        return found


def _models(setup: tuple[Any, ...]) -> dict[str, PoolModel]:
    models = {"pool": PoolModel(setup[0])}
    if setup[2]:
        models["other"] = PoolModel(setup[2])
    return models


def _advance(models: dict[str, PoolModel], op: Op) -> None:
    """Let the model do the operation, if it is a legal one."""
    on, name, block = op
    if name == "new":
        return
    model = models[on]
    if name == "alloc":
        model.alloc()
    elif model.refcount(block):
        if name == "share":
            model.share(block)
        elif name == "free":
            model.free(block)


def _judge(model: PoolModel, op: Op, counts: Counter[str]) -> tuple[Step, str, int | None]:
    """The operation as a step with what is right; its rule; the block whose count to look at."""
    on, name, block = op
    if name == "alloc":
        return _judge_alloc(model, on, counts)
    held = model.refcount(block)
    if held is None:
        sign = "bad_negative" if type(block) is int and block < 0 else "bad_high"
        counts[sign if type(block) is int else "bad_type"] += 1
        return call(name, block, on=on, raises="ValueError", rule="R8"), "R8", None
    if name == "refcount":
        return call(name, block, on=on, returns=held, rule="R6"), "R6", block
    if held == 0:
        counts["double_free" if name == "free" else "share_free"] += 1
        return call(name, block, on=on, raises="ValueError", rule="R7"), "R7", block
    rule = "R5" if name == "share" else "R6"
    counts["share" if name == "share" else "release" if held == 1 else "unshare"] += 1
    return call(name, block, on=on, returns=None, rule=rule), rule, block


def _judge_alloc(model: PoolModel, on: str, counts: Counter[str]) -> tuple[Step, str, int | None]:
    if not model.free_ids:
        counts["refusal"] += 1
        return call("alloc", on=on, raises="OutOfBlocks", rule="R4"), "R4", 0
    block = model.free_ids[0]
    counts["alloc"] += 1
    counts["reuse"] += block in model.seen
    counts["queue_choice"] += len(set(model.free_ids) & model.seen) > 1
    return call("alloc", on=on, returns=block, rule="R2"), "R2", block


def _probe(step: Step) -> Step:
    return replace(step, probe=True)


SUBJECT = PoolSubject()


def run(stage: StageRun) -> list[TestResult]:
    """One test a rule, R1 to R9."""
    return run_walks(stage, SUBJECT)
