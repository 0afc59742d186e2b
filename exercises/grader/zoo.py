"""The attack zoo: submissions that cheat or break things, each with the outcome it must have.

A file in attacks/ (shared) or attacks/e02/ (that exercise's own) opens with a line such as

    # A12 | visible | timeout | loops for ever and ignores every signal

threat number, the stage that must stop it, the statuses it may have there (separated by `/`), what
it does, and, where that matters, the locks of sandbox.py of which one must hold. Shared ones define
a class `Attack`, which stands for every name the exercise wants; an exercise's own are whole files.
`@LAB@` in a file becomes the repository's path: an attacker knows where an open repository lies.
A file that gets somewhere it must not raises an error that says BREACH.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from exercises.grader.manifest import EXERCISES, Exercise, ExerciseError

LAB = EXERCISES.parent


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack as it is submitted, and what must become of it."""

    file: str
    threat: str
    stage: str
    statuses: tuple[str, ...]
    what: str
    needs: tuple[str, ...]  # locks, one of which must hold; empty: safe under any isolation
    source: str


def attacks(exercise: Exercise) -> list[Attack]:
    """Every attack that the exercise must withstand."""
    shared = sorted((EXERCISES / "attacks").glob("a*.py"))
    own = sorted((EXERCISES / "attacks" / exercise.id).glob("a*.py"))
    names = "".join(f"{name} = Attack\n" for name in exercise.entry)
    return [_read(path, f"\n{names}") for path in shared] + [_read(path, "") for path in own]


def _read(path: Path, ending: str) -> Attack:
    text = path.read_text()
    parts = [part.strip() for part in text.splitlines()[0].lstrip("# ").split("|")]
    if len(parts) not in (4, 5):
        raise ExerciseError(f"attacks/{path.name} must open with # threat | stage | status | what")
    threat, stage, statuses, what = parts[:4]
    needs = tuple(parts[4].split()) if len(parts) == 5 else ()
    source = text.replace("@LAB@", str(LAB)) + ending
    return Attack(path.stem, threat, stage, tuple(statuses.split("/")), what, needs,
                  source)


def tree_hash() -> str:
    """A digest of the exercises room's files: their names and contents."""
    digest = hashlib.sha256()
    for path in sorted(EXERCISES.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(str(path).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def survivors() -> list[int]:
    """Ids of this process's workers, and of what they started, that are still alive."""
    mark = f'"grader": {os.getpid()}}}'.encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if b"worker.py" in command and mark in command and state != "Z":
            found.append(int(folder.name))
    return found
