"""`python -m exercises`: everything a student and an instructor do with the exercises."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, NoReturn

from engine.mistakes import (
    INTERRUPTED,
    file_sentence,
    hear_interrupts,
    leave_if_interrupted,
    usage_sentence,
)

if __name__ == "__main__":  # before anything is imported that takes a while
    leave_if_interrupted()

import typer
from rich.console import Console
from rich.table import Table

from engine.core.errors import TandemError
from exercises.grader.exporters import FORMATS
from exercises.grader.manifest import Exercise, ExerciseError, exercise_ids, load_exercise
from exercises.grader.report import Report
from exercises.grader.stages import commitment, grade, new_seed
from exercises.grader.text import show
from exercises.grader.workdir import Workdir, check_place, write_safely

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
                  help="Re-implement parts of the engine; your part is graded inside the real one.")
console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 140)
Id = Annotated[str, typer.Argument(metavar="EXERCISE", help="for instance e02")]
Work = Annotated[Path, typer.Option("--work", help="folder of your files")]
File = Annotated[Path | None, typer.Option("--file", help="your file, if it is not in --work")]
DEFAULT_WORK = Path("work")
POLL_S = 0.2  # how often `watch` looks at the file


@app.command("list")
def list_exercises(work: Work = DEFAULT_WORK) -> None:
    """Show the exercises and how far you are."""
    desk = Workdir(work)
    progress = desk.progress()
    table = Table("", "title", "minutes", "builds on", "state", box=None)
    for exercise_id in exercise_ids():
        exercise = load_exercise(exercise_id)
        known = progress.get(exercise_id, {})
        state = "started" if desk.file(exercise).exists() else "not started"
        if "best" in known:
            state = f"best grade {known['best']:g} of 100"
        table.add_row(exercise_id, exercise.title, str(exercise.minutes),
                      ", ".join(exercise.deps) or "–", state)
    console.print(table)


@app.command()
def start(exercise_id: Id, work: Work = DEFAULT_WORK) -> None:
    """Put the starter into your folder; a file that is there already stays as it is."""
    exercise, desk = load_exercise(exercise_id), Workdir(work)
    made = desk.start(exercise)
    what = "is there for you" if made else "is there already and stays as it is"
    console.print(f"{desk.file(exercise)} {what}", highlight=False)
    console.print(f"rules: exercises/{exercise.folder.name}/README.md", highlight=False)
    console.print(f"next:  python -m exercises check {exercise.id}", highlight=False)


@app.command()
def check(exercise_id: Id, work: Work = DEFAULT_WORK, file: File = None) -> None:
    """Quick feedback, no points: the visible cases, some random ones, the cost. Exit 1 if wrong."""
    exercise = load_exercise(exercise_id)
    report = _check(exercise, Workdir(work), file)
    raise typer.Exit(0 if report.status == "pass" else 1)


@app.command()
def watch(exercise_id: Id, work: Work = DEFAULT_WORK, file: File = None) -> None:
    """Check again whenever you save, until you press Ctrl-C."""
    exercise, desk = load_exercise(exercise_id), Workdir(work)
    path = file or desk.file(exercise)
    desk.read(exercise, path)
    seen = None
    try:
        while True:
            stamp = path.stat().st_mtime_ns if path.exists() else seen
            if stamp != seen:
                seen = stamp
                console.clear()
                console.print(f"[dim]{time.strftime('%H:%M:%S')}  {path}  (Ctrl-C ends)[/]")
                _check(exercise, desk, path)
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        console.print()


def _check(exercise: Exercise, desk: Workdir, file: Path | None) -> Report:
    report = grade(exercise, desk.read(exercise, file), new_seed(), quick=True)
    show(console, report, points=False)
    if report.status == "pass":
        console.print(f"[green]all right so far:[/] python -m exercises grade {exercise.id}")
    return report


@app.command()
def hint(exercise_id: Id, number: Annotated[int | None, typer.Argument()] = None,
         work: Work = DEFAULT_WORK) -> None:
    """Show the next hint, or hint NUMBER."""
    exercise, desk = load_exercise(exercise_id), Workdir(work)
    seen = desk.progress().get(exercise.id, {}).get("hints", 0)
    number = number or min(seen + 1, len(exercise.hints))
    if not 1 <= number <= len(exercise.hints):
        raise ExerciseError(f"{exercise.id} has hints 1 to {len(exercise.hints)}, not {number}")
    console.print(f"[bold]hint {number} of {len(exercise.hints)}[/]  {exercise.hints[number - 1]}")
    if work.is_dir():
        desk.note(exercise, hints=max(seen, number))


@app.command("grade")
def grade_command(
    exercise_id: Id, work: Work = DEFAULT_WORK, file: File = None,
    seed: Annotated[str | None, typer.Option(help="of an earlier grade, to repeat it")] = None,
    format: Annotated[str, typer.Option(help=", ".join(FORMATS))] = "native",
    json: Annotated[Path | None, typer.Option(help="write the result there")] = None,
) -> None:
    """The whole grade, with a secret seed. Exit 1 below 100 points, in the native format only.

    The other formats go to --json, or alone to standard output; their exit code is 0, because the
    systems that read them ask for that.
    """
    if format not in FORMATS:
        raise ExerciseError(f"there is no format {format!r}; there are: {', '.join(FORMATS)}")
    exercise, desk = load_exercise(exercise_id), Workdir(work)
    if json is not None:
        check_place(json)
    source = desk.read(exercise, file)
    seed = seed or new_seed()
    to_screen = console if format == "native" or json else Console(stderr=True, soft_wrap=True)
    to_screen.print(f"seed commitment {commitment(seed)}", highlight=False)
    with to_screen.status("grading") as status:
        report = grade(exercise, source, seed, progress=lambda stage: status.update(f"{stage} …"))
    show(to_screen, report, points=True)
    to_screen.print(f"seed {seed}", highlight=False)
    to_screen.print(f"[bold]{report.score:g} of {report.max_score} points[/]")
    if work.is_dir():
        desk.note_report(exercise, report)
    if json is not None:
        write_safely(json, FORMATS[format](report))
    elif format != "native":
        sys.stdout.write(FORMATS[format](report))
    raise typer.Exit(1 if format == "native" and report.status != "pass" else 0)


@app.command()
def verify(exercise_id: Id,
           mutants: Annotated[bool, typer.Option(help="mutate the reference")] = True) -> None:
    """Instructors: test the exercise's tests. Exit 1 if anything is not as declared."""
    exercise = load_exercise(exercise_id)
    if not exercise.has("solution"):
        raise ExerciseError(f"{exercise.id}'s solution is not part of this copy of the lab, "
                            f"so there is nothing to verify it with")
    from exercises.grader.verify import Verifier

    begun = time.perf_counter()
    table = Table("", "", "", "", box=None, show_header=False)
    bad = missed = total = 0
    with console.status("verifying") as status:
        for done in Verifier(exercise).run(with_mutants=mutants):
            total += 1
            bad += done.ok is False
            missed += done.ok is None
            sign = {True: "[green]✓[/]", False: "[red]✗[/]", None: "[yellow]–[/]"}[done.ok]
            table.add_row(sign, done.group, done.name, done.detail)
            status.update(f"{done.group}: {done.name}")
    console.print(table)
    console.print(f"{total} checks, {bad} not as declared, {missed} not possible here, "
                  f"{time.perf_counter() - begun:.0f} s")
    raise typer.Exit(1 if bad else 0)


@app.command()
def release(out: Annotated[Path, typer.Option(help="folder to write to")] = Path("dist")) -> None:
    """Instructors: the student bundle, without solutions and hidden tests."""
    try:
        from exercises.grader.release import release as make_release
    except ImportError:
        raise ExerciseError("this copy of the lab is a student bundle itself") from None
    written = make_release(out)
    console.print(f"{len(written)} files in {out}/exercises, no solution among them",
                  highlight=False)


def main() -> None:
    """Run a command. SystemExit with its exit code: 2, with one sentence, for a user's mistake."""
    try:
        hear_interrupts()
        status = app(prog_name="python -m exercises", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        raise SystemExit(INTERRUPTED) from None
    except TandemError as error:
        _complain(str(error))
    except OSError as error:
        _complain(file_sentence(error))
    except Exception as error:
        sentence = usage_sentence(error)
        if sentence is None:
            raise
        _complain(sentence)
    else:
        raise SystemExit(status if isinstance(status, int) else 0)


def _complain(sentence: str) -> NoReturn:
    Console(stderr=True, soft_wrap=True).print(sentence, style="red", markup=False, highlight=False)
    raise SystemExit(2) from None


if __name__ == "__main__":
    main()
