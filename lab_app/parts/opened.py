"""Logs opened once and kept: their text and its index are shared by all sessions."""

from __future__ import annotations

import gc
from pathlib import Path

import streamlit as st

from engine.core.errors import TandemError
from lab_app.store import Entry
from lab_app.viewmodel.loglines import LogLines
from lab_app.viewmodel.run import Run, open_run


@st.cache_resource(max_entries=3, show_spinner="Reading the log …")
def _open(path: str, changed: int, size: int) -> Run:
    """`changed` (ns) and `size` are part of the key: a rewritten file is read again."""
    collecting = gc.isenabled()
    gc.disable()  # what is made here holds no cycle, and walking it again and again costs time
    try:
        return open_run(LogLines.read(Path(path)))
    finally:
        gc.freeze()  # nor shall later collections walk them; they still go by ref count
        if collecting:
            gc.enable()


def open_entry(entry: Entry) -> Run | None:
    """The run of a log; None, with the reason on the page, if it cannot be opened."""
    try:
        stat = entry.path.stat()
        return _open(str(entry.path), stat.st_mtime_ns, stat.st_size)
    except TandemError as error:
        st.error(_sentence(error, entry))
    except OSError as error:
        st.error(f"The log {entry.path.name} cannot be read: {error}.")
    return None


def _sentence(error: TandemError, entry: Entry) -> str:
    """Without the folder: a reader of the page need not know where the app keeps its files."""
    text = str(error).replace(str(entry.path), entry.path.name)
    return text[0].upper() + text[1:] + ("" if text.endswith(".") else ".")
