"""exercise.toml, read and checked: what an exercise is, may use, and is worth."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from engine.core.errors import TandemError

EXERCISES = Path(__file__).resolve().parents[1]


class ExerciseError(TandemError):
    """A mistake in using the exercises: unknown name, missing file, broken manifest."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a worker may use. Wall seconds are the grader's; the rest are the kernel's rlimits."""

    load_s: float = 3.0  # to load the file
    call_s: float = 2.0  # for one request: up to a few hundred small calls
    stage_s: float = 30.0  # for all of a stage's requests together
    cpu_s: int = 20  # CPU seconds of one worker
    memory_mib: int = 1024
    output_kib: int = 1024  # printed, or written to any file
    open_files: int = 32
    processes: int = 0  # children and threads
    source_kib: int = 256  # the student's file

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One stage of an exercise. It runs only if the stage named in `after` passed."""

    id: str
    points: int
    file: str  # module in the exercise's folder, without .py
    after: str | None = None
    check: bool = True  # part of the quick `check`
    secret: bool = False  # drawn from the secret seed; shown to students after publication
    settings: dict[str, Any] = field(default_factory=dict)  # the stage's own numbers


@dataclass(frozen=True, slots=True)
class Chaff:
    """A wrong solution and where it must be caught first."""

    file: str
    stage: str
    rule: str
    subtle: bool  # it must pass the visible stage
    why: str


@dataclass(frozen=True)
class Exercise:
    """Everything exercise.toml says, plus where it lies."""

    folder: Path
    id: str
    title: str
    minutes: int
    deps: tuple[str, ...]
    entry: tuple[str, ...]  # names the student's file must define
    allowed_imports: tuple[str, ...]
    rules: dict[str, str]  # R1 -> the rule in a few words
    hints: tuple[str, ...]
    limits: Limits
    stages: tuple[StageSpec, ...]
    chaffs: tuple[Chaff, ...]
    alternatives: tuple[str, ...]
    reach: dict[str, int]  # counter of the hidden walk -> least count over one grade
    mutants: dict[str, str]  # surviving mutant -> why it is equivalent

    @cached_property
    def preload(self) -> list[str]:
        """The modules a worker imports before it locks itself."""
        return [name for name in self.allowed_imports
                if name != "__future__" and not name.startswith("exercises")]

    def preload_paths(self) -> list[str]:
        """Folders the worker needs on its path only while it preloads (numpy's, if allowed)."""
        found = []
        for name in self.preload:
            if name.split(".")[0] not in sys.stdlib_module_names:
                spec = importlib.util.find_spec(name)
                if spec is None or spec.origin is None:
                    raise ExerciseError(f"{self.id} needs {name}, which is not installed: "
                                        f"pip install {name}")
                found.append(str(Path(spec.origin).parents[1]))
        return found

    def has(self, module: str) -> bool:
        """Whether this copy of the lab has the file (a student bundle lacks the instructor's)."""
        return (self.folder / f"{module}.py").is_file()


def exercise_ids() -> list[str]:
    """e01, e02, … in order, as far as they exist here."""
    return sorted(path.parent.name.split("_")[0] for path in EXERCISES.glob("e*_*/exercise.toml"))


def load_exercise(exercise_id: str) -> Exercise:
    """Read the manifest of `e02` (or its folder's name). ExerciseError names what is wrong."""
    wanted = exercise_id.lower().split("_")[0]
    found = sorted(EXERCISES.glob(f"{wanted}_*/exercise.toml"))
    if not found or wanted not in exercise_ids():
        raise ExerciseError(f"there is no exercise {exercise_id!r}; there are: "
                            f"{', '.join(exercise_ids())}")
    try:
        data = tomllib.loads(found[0].read_text())
        return _build(found[0].parent, data)
    except (tomllib.TOMLDecodeError, TypeError, KeyError) as error:
        raise ExerciseError(f"{found[0].parent.name}/exercise.toml is broken: {error}") from error


def _build(folder: Path, data: dict[str, Any]) -> Exercise:
    stage_names = {spec.name for spec in fields(StageSpec)} - {"settings"}

    def stage(entry: dict[str, Any]) -> StageSpec:
        own = {key: entry[key] for key in entry if key in stage_names}
        rest = {key: entry[key] for key in entry if key not in stage_names}
        return StageSpec(**own, settings=rest)

    exercise = Exercise(
        folder=folder, id=data["id"], title=data["title"], minutes=data["minutes"],
        deps=tuple(data["deps"]), entry=tuple(data["entry"]),
        allowed_imports=tuple(data["allowed_imports"]), rules=dict(data["rules"]),
        hints=tuple(data["hints"]), limits=Limits(**data.get("limits", {})),
        stages=tuple(map(stage, data["stages"])),
        chaffs=tuple(Chaff(**entry) for entry in data.get("chaffs", ())),
        alternatives=tuple(data.get("alternatives", ())), reach=dict(data.get("reach", {})),
        mutants=dict(data.get("equivalent_mutants", {})))
    _check(exercise)
    return exercise


def _check(exercise: Exercise) -> None:
    total = sum(stage.points for stage in exercise.stages)
    if total != 100:
        raise KeyError(f"the stages' points add up to {total}, not 100")
    known: set[str | None] = {None}
    for stage in exercise.stages:
        if stage.after not in known:
            raise KeyError(f"stage {stage.id} comes after {stage.after!r}, no stage before it")
        known.add(stage.id)
    for chaff in exercise.chaffs:
        if chaff.stage not in known or chaff.rule not in exercise.rules:
            raise KeyError(f"chaff {chaff.file} names an unknown stage or rule")
