"""The student bundle: the exercises room without its instructor tree."""

from __future__ import annotations

import shutil
from pathlib import Path

from engine.mistakes import file_sentence
from exercises.grader.manifest import EXERCISES, ExerciseError, exercise_ids, load_exercise

# The instructor's files. Everything else of the room goes to students.
SECRET_FILES = ("hidden.py", "integrate.py", "solution.py", "verify.py", "mutate.py", "zoo.py",
                "release.py")
SECRET_GLOBS = ("alt_*.py",)
SECRET_FOLDERS = ("chaffs", "attacks", "__pycache__")


def is_secret(path: Path) -> bool:
    """Whether a file of the room, by its path below exercises/, stays with the instructor."""
    return (path.name in SECRET_FILES or any(path.match(glob) for glob in SECRET_GLOBS)
            or any(part in SECRET_FOLDERS for part in path.parts))


def release(out: Path) -> list[Path]:
    """Copy the student's part of the room to `out`/exercises; the files written, relative to `out`.

    ExerciseError if `out`/exercises exists, or if a solution would be in the bundle.
    """
    target = out / "exercises"
    if target.exists():
        raise ExerciseError(f"{target} exists already: remove it, or choose another --out")
    written = []
    try:
        for path in sorted(EXERCISES.rglob("*")):
            relative = path.relative_to(EXERCISES)
            if path.is_file() and not is_secret(relative):
                destination = target / relative
                destination.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, destination)
                written.append(destination.relative_to(out))
    except OSError as error:
        raise ExerciseError(file_sentence(error, out, "another --out")) from error
    for leaked in _leaks(target):
        shutil.rmtree(target)
        raise ExerciseError(f"{leaked} repeats the solution: nothing was released")
    return written


def _leaks(target: Path) -> list[str]:
    """Files of the bundle that hold a solution's method bodies (a long run of its lines)."""
    texts = {path: path.read_text() for path in sorted(target.rglob("*.py"))}
    found = []
    for exercise_id in exercise_ids():
        lines = (load_exercise(exercise_id).folder / "solution.py").read_text().splitlines()
        body = [line for line in lines if line.startswith("        ") and len(line.strip()) > 12]
        found += [path.name for path, text in texts.items()
                  if body and sum(line in text for line in body) > len(body) // 2]
    return found
