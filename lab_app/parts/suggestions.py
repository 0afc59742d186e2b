"""The three things that the start page points at, found in the first shipped log."""

from __future__ import annotations

from lab_app.parts.opened import open_entry
from lab_app.store import Entry, catalog
from lab_app.viewmodel.run import Run
from lab_app.viewmodel.suggest import Suggestion, suggest


def first_run() -> Run | None:
    """The first shipped log, opened; None if there is none that opens."""
    shipped = _shipped()
    return open_entry(shipped) if shipped is not None else None


def suggestions() -> list[Suggestion]:
    shipped, run = _shipped(), first_run()
    return suggest(None if shipped is None else shipped.id, run)


def _shipped() -> Entry | None:
    return next((entry for entry in catalog() if entry.id.startswith("shipped/")), None)
