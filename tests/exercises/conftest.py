"""Shared by the exercises' tests: E02, and a worker with some source in it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from exercises.grader.manifest import Exercise, load_exercise
from exercises.grader.session import WorkerSession


@pytest.fixture(scope="session")
def e02() -> Exercise:
    return load_exercise("e02")


@pytest.fixture
def worker(e02):
    """`with worker(source) as session`: any source; `entry` names what it must define."""
    from dataclasses import replace

    @contextmanager
    def start(source: str, entry: tuple[str, ...] = (), limits: dict | None = None,
              **options) -> Iterator[WorkerSession]:
        exercise = replace(e02, entry=entry, limits=replace(e02.limits, **(limits or {})))
        with WorkerSession(exercise, textwrap.dedent(source), **options) as session:
            yield session

    return start
