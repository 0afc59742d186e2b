"""Which log: shipped, from the runs folder, or uploaded."""

from __future__ import annotations

from datetime import datetime

import streamlit as st

from lab_app.parts.place import url_is_news, url_log
from lab_app.store import Entry, catalog, find, save_upload


def choose_log() -> Entry | None:
    """The log that the URL or the reader names; None, with a sentence, if there is none."""
    entries = {entry.id: entry for entry in catalog()}
    wanted = st.session_state.pop("next_log", None) or (url_log() if url_is_news() else None)
    if wanted in entries:
        st.session_state["log"] = wanted
    elif wanted is not None:
        st.warning(f"The link names the log {wanted!r}, which is not here: it may have been "
                   "deleted, or made on another machine.")
    if st.session_state.get("log") not in entries:
        last = st.session_state.get("place_log")
        st.session_state["log"] = last if last in entries else next(iter(entries), None)
    with st.container(horizontal=True, vertical_alignment="center"):
        st.selectbox("Event log", list(entries), key="log", label_visibility="collapsed",
                     format_func=lambda log_id: _title(entries[log_id]), width=330)
        with st.popover("Upload a log", icon=":material/upload:"):
            _upload()
    if not entries:
        st.info("There is no event log yet: simulate or run something, or upload one.")
        return None
    return find(st.session_state["log"])


def _title(entry: Entry) -> str:
    if entry.id.startswith("shipped/"):
        return f"{entry.title} (shipped)"
    made = datetime.fromtimestamp(entry.path.stat().st_mtime)
    return f"{entry.title} · {made:%d %b %H:%M}"


def _upload() -> None:
    """Keeps an uploaded file in the runs folder and selects it, once a file."""
    file = st.file_uploader("An event log (.jsonl, .jsonl.gz)", key="upload")
    if file is None or st.session_state.get("uploaded") == file.file_id:
        return
    st.session_state["uploaded"] = file.file_id
    try:
        entry = save_upload(file.getvalue(), file.name)
    except OSError as error:
        st.error(f"The upload cannot be kept in the runs folder: {error.strerror or error}.")
        return
    st.session_state["next_log"] = entry.id
    st.rerun()
