"""The student's side of the disk: work/e02.py, the progress made, and reports written safely."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from exercises.grader.manifest import Exercise, ExerciseError
from exercises.grader.report import Report


class Workdir:
    """A folder of student files, one an exercise, and `progress.json` beside them."""

    def __init__(self, folder: Path):
        self.folder = folder

    def file(self, exercise: Exercise) -> Path:
        """Where the student's file for this exercise lies."""
        return self.folder / f"{exercise.id}.py"

    def start(self, exercise: Exercise) -> bool:
        """Put the starter there. False, with nothing changed, if the student has a file already."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = (exercise.folder / "starter.py").read_text()
        try:
            with open(self.file(exercise), "x") as file:
                file.write(text)
        except FileExistsError:
            return False
        return True

    def read(self, exercise: Exercise, path: Path | None = None) -> str:
        """The student's source. ExerciseError if it is not there, or no text."""
        path = path or self.file(exercise)
        try:
            return path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ExerciseError(f"{path} does not exist: python -m exercises start {exercise.id} "
                                f"puts the starter there") from None
        except (UnicodeDecodeError, OSError) as error:
            raise ExerciseError(f"{path} cannot be read: {error}") from error

    # --------------------------------------------------------------------- progress
    def progress(self) -> dict[str, dict[str, Any]]:
        """What is known of each exercise: best score, hints seen. Empty if there is nothing."""
        try:
            data = json.loads((self.folder / "progress.json").read_text())
        except (OSError, ValueError):
            return {}
        return data if isinstance(data, dict) else {}

    def note(self, exercise: Exercise, **facts: Any) -> None:
        """Add to what is known of an exercise."""
        data = self.progress()
        data.setdefault(exercise.id, {}).update(facts)
        write_safely(self.folder / "progress.json", json.dumps(data, indent=2) + "\n")

    def note_report(self, exercise: Exercise, report: Report) -> None:
        """Remember the best score of a whole grade."""
        best = self.progress().get(exercise.id, {}).get("best", 0.0)
        self.note(exercise, best=max(best, report.score), last=report.score)


def write_safely(path: Path, text: str) -> None:
    """Write a file all at once. ExerciseError if a symbolic link stands in its place."""
    if path.is_symlink():
        raise ExerciseError(f"{path} is a symbolic link: the report is not written through it")
    handle, name = tempfile.mkstemp(dir=path.parent or Path("."), prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
