"""The student's side of the disk: work/e02.py, the progress made, and reports written safely."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from engine.mistakes import FILE_ERRORS, file_sentence
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
        """Put the starter there. False, with nothing changed, if the student has a file already.
        ExerciseError if it cannot be put there."""
        text = (exercise.folder / "starter.py").read_text(encoding="utf-8")
        path = self.file(exercise)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(path, "x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError as error:
            if not path.is_file():
                place = path if path.exists() else self.folder
                raise ExerciseError(f"{place} is in the way: remove it, or choose another folder "
                                    f"with --work") from error
            return False
        except OSError as error:
            raise ExerciseError(file_sentence(error, want="another folder with --work")) from error
        return True

    def read(self, exercise: Exercise, path: Path | None = None) -> str:
        """The student's source. ExerciseError if it is not there, or no text."""
        path = path or self.file(exercise)
        try:
            return path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ExerciseError(f"{path} does not exist: python -m exercises start {exercise.id} "
                                f"puts the starter there") from None
        except FILE_ERRORS as error:
            raise ExerciseError(file_sentence(error, path, "your Python file")) from error

    # --------------------------------------------------------------------- progress
    def progress(self) -> dict[str, dict[str, Any]]:
        """What is known of each exercise: best score, hints seen. Empty if there is nothing."""
        try:
            data = json.loads((self.folder / "progress.json").read_text(encoding="utf-8"))
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


def check_place(path: Path) -> None:
    """ExerciseError before any work whose result could not be written there after it."""
    if path.is_symlink():
        raise ExerciseError(f"{path} is a symbolic link: the report is not written through it")
    if path.is_dir():
        raise ExerciseError(f"{path} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise ExerciseError(f"{path} cannot be written: there is no folder {path.parent}; create "
                            f"it first")


def write_safely(path: Path, text: str) -> None:
    """Write a file all at once. ExerciseError if it cannot be, or a symbolic link is in its place.
    """
    check_place(path)
    name = ""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent or Path("."), prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise ExerciseError(file_sentence(error, path, "another place")) from error
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
