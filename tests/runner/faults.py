"""Faults for ranks that are processes of their own: an order policy carries them there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine.core.policies import Fcfs
from engine.layers.shard import Collectives
from engine.runner import model_runner, ranks
from engine.runner.model_runner import ModelRunner, Prepared

Faults = dict[int, str]  # by step: where it goes wrong


class Faulty(Fcfs):
    """First come, first served; where it is unpickled, in a worker, the runner has `faults`."""

    def __init__(self, faults: Faults, patience: float = ranks.SECONDS_TO_AGREE):
        self.faults, self.patience = faults, patience

    def __reduce__(self) -> Any:
        return _arrive, (self.faults, self.patience)


def _arrive(faults: Faults, patience: float) -> Fcfs:
    inject(faults, setattr)
    ranks.SECONDS_TO_AGREE = patience
    return Fcfs()


def inject(faults: Faults, put: Callable[[Any, str, Any], None]) -> list[int]:
    """Break this process's runners in the steps of `faults`; the steps where it did, as they fail.

    "prepare" on the host; "moves" before anything is computed; "sums" between two exchanges;
    "head" with the logits there; "draw" in the sampling; "share" before the tokens are shared;
    "read" when they are read; "nan" makes the first row's logits NaN.
    """
    fired: list[int] = []
    now = sums = -1

    def fail(where: str, step: int) -> None:
        if faults.get(step) == where:
            fired.append(step)
            raise ValueError(f"boom in {where}")

    prepare, move, forward = (ModelRunner.prepare_step, ModelRunner.move_blocks,
                              ModelRunner.forward)
    add, share, read, draw = Collectives.sum, Collectives.share, Prepared.read, model_runner.Draw

    def prepare_step(self, batch, before=None):
        fail("prepare", batch.step)
        return prepare(self, batch, before)

    def move_blocks(self, batch):
        nonlocal now, sums
        now, sums = batch.step, 0
        fail("moves", now)
        move(self, batch)

    def summed(self, x):
        nonlocal sums
        sums += 1
        if sums == 3:
            fail("sums", now)
        return add(self, x)

    def forwarded(self, inputs, late=None):
        logits = forward(self, inputs, late)
        fail("head", now)
        if faults.get(now) == "nan" and len(logits):
            fired.append(now)
            logits[0] = torch.nan
        return logits

    def drawn(*arguments):
        fail("draw", now)
        return draw(*arguments)

    def shared(self, x):
        fail("share", now)
        return share(self, x)

    def read_out(self):
        fail("read", self.batch.step)
        return read(self)

    for owner, name, broken in (
            (ModelRunner, "prepare_step", prepare_step), (ModelRunner, "move_blocks", move_blocks),
            (ModelRunner, "forward", forwarded), (Collectives, "sum", summed),
            (Collectives, "share", shared), (Prepared, "read", read_out),
            (model_runner, "Draw", drawn)):
        put(owner, name, broken)
    return fired
