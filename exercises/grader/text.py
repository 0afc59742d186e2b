"""A report as a student reads it in a terminal."""

from __future__ import annotations

import os
import secrets

from rich.console import Console
from rich.markup import escape

from exercises.grader.report import Report, StageResult, TestResult

SIGNS = {"pass": "[green]✓[/]", "skipped": "[dim]–[/]"}
MAX_SHOWN = 3  # failing tests shown in full, each with another message


def show(console: Console, report: Report, *, points: bool) -> None:
    """The stages, then the first failing tests with their counterexamples, then the notices."""
    for stage in report.stages:
        _show_stage(console, stage, points)
    wrong = [test for stage in report.stages for test in stage.tests
             if test.status not in ("pass", "skipped")]
    told = list({test.message: test for test in reversed(wrong)}.values())[::-1][:MAX_SHOWN]
    for test in told:
        _show_test(console, test)
    if len(wrong) > len(told):
        console.print(f"[dim]… and {len(wrong) - len(told)} more[/]")
    if report.user_output:
        _show_output(console, report.user_output)
    for notice in report.notices:
        console.print(f"[yellow]note:[/] {escape(notice)}")
    console.print(f"[dim]{isolation_sentence(report.isolation)} · {report.wall_s:.1f} s · "
                  f"worker CPU {report.cpu_s:.1f} s[/]")


LOCKS = ("rlimits", "pidns", "netns", "uid", "landlock", "seccomp")  # all that there are


def isolation_sentence(isolation: str) -> str:
    """Which locks held while the student's file ran, and what it means if not all did."""
    held = isolation.split("+")
    missing = [lock for lock in LOCKS if lock not in held]
    if missing == list(LOCKS):
        return "isolation none, because nothing of your file was run"
    if not missing:
        return f"isolation {isolation}"
    return (f"isolation {isolation}, without {', '.join(missing)} on this machine: enough for your "
            f"own work, not for grading others' (exercises/README.md says what each lock does)")


def _show_stage(console: Console, stage: StageResult, points: bool) -> None:
    passed = sum(test.status == "pass" for test in stage.tests)
    score = f"  {stage.points:g}/{stage.max} points" if points else ""
    what = stage.message if stage.status == "skipped" else f"{passed} of {len(stage.tests)} tests"
    sign = SIGNS.get(stage.status, "[red]✗[/]")
    console.print(f"{sign} {stage.id:<12}{escape(what)}{score}", highlight=False)


def _show_test(console: Console, test: TestResult) -> None:
    console.print(f"\n[bold red]{test.rule}[/] {escape(test.name)}: {escape(test.status)}",
                  highlight=False)
    if test.message:
        console.print(f"  {escape(test.message)}", highlight=False)
    for line in test.counterexample:
        console.print(f"    {escape(line)}", highlight=False)


def _show_output(console: Console, output: str) -> None:
    """What the student printed, fenced so that it cannot issue workflow commands under CI."""
    fence = secrets.token_hex(8) if os.environ.get("GITHUB_ACTIONS") else ""
    if fence:
        console.print(f"::stop-commands::{fence}", highlight=False)
    console.print("\n[dim]your file printed:[/]")
    console.print(output[:2000], markup=False, highlight=False)
    if fence:
        console.print(f"::{fence}::", highlight=False)
