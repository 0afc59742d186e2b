"""Where event logs are: the shipped ones, and the runs folder that simulations and runs write to.

The folder is $TANDEM_RUNS, or ./runs where the app was started. Links name a log by its id, which
is only ever looked up in the list of logs that are there: an id is no path.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

SHIPPED = Path(__file__).resolve().parent / "data"
SUFFIXES = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True, slots=True)
class Entry:
    """A log that can be opened."""

    id: str  # "shipped/NAME" or "runs/NAME"
    path: Path

    @property
    def title(self) -> str:
        where, name = self.id.split("/", 1)
        return ("★ " if where == "shipped" else "") + stem(name).replace("_", " ")


def stem(name: str) -> str:
    """A log's name without its suffix."""
    return name.removesuffix(".gz").removesuffix(".jsonl")


def runs_folder() -> Path:
    """Where new logs go. Not created by looking."""
    return Path(os.environ.get("TANDEM_RUNS") or "runs")


def catalog() -> list[Entry]:
    """Shipped logs by name, then runs, newest first."""
    shipped = [Entry(f"shipped/{path.name}", path) for path in sorted(_logs(SHIPPED))]
    runs = sorted(_logs(runs_folder()), key=lambda path: path.stat().st_mtime, reverse=True)
    return shipped + [Entry(f"runs/{path.name}", path) for path in runs]


def find(log_id: str) -> Entry | None:
    """The log of that id, if there is one."""
    return next((entry for entry in catalog() if entry.id == log_id), None)


def new_log(what: str, now: datetime | None = None) -> Entry:
    """A free name in the runs folder for a log about to be written, such as "sim_0412_093015"."""
    folder = runs_folder()
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{what}_{(now or datetime.now()):%m%d_%H%M%S}"
    number, path = 1, folder / f"{name}.jsonl"
    while path.exists():
        number += 1
        path = folder / f"{name}_{number}.jsonl"
    return Entry(f"runs/{path.name}", path)


def save_upload(content: bytes, name: str) -> Entry:
    """Keep an uploaded log, named by its content, so that a link to it survives a restart."""
    folder = runs_folder()
    folder.mkdir(parents=True, exist_ok=True)
    suffix = ".jsonl.gz" if content[:2] == b"\x1f\x8b" else ".jsonl"
    plain = "".join(c if c.isalnum() or c in "-_" else "_" for c in stem(Path(name).name))[:40]
    digest = hashlib.blake2b(content, digest_size=4).hexdigest()
    path = folder / f"upload_{plain}_{digest}{suffix}"
    path.write_bytes(content)
    return Entry(f"runs/{path.name}", path)


def _logs(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from (path for path in folder.iterdir() if path.name.endswith(SUFFIXES))
