"""Run: the real engine on this machine's CPU, streaming, then its own log to replay."""

from __future__ import annotations

import time

import streamlit as st

from engine.core.errors import TandemError
from lab_app.parts.askrun import ask
from lab_app.parts.engine import NO_TORCH, has_torch, run_prompts
from lab_app.store import Entry, new_log
from lab_app.viewmodel.runform import RunForm, Transcript, read_prompts

REDRAW = 0.08  # seconds between two drawings of the streaming text


def page() -> None:
    if not has_torch():
        st.info(NO_TORCH)
        return
    left, right = st.columns([4, 7], gap="large")
    with left:
        form = ask()
    with right:
        board, below = st.empty(), st.empty()
        if form is not None:
            _run(form, board)
        elif "run_result" not in st.session_state:
            board.info("The real engine runs on this machine's CPU: real weights, real paged "
                       "attention. The pool is small on purpose, so requests get preempted; the "
                       "answers stay the same.")
        if "run_result" in st.session_state:
            _draw(board, st.session_state["run_result"][1])
            with below.container():
                _footer(*st.session_state["run_result"])


def _run(form: RunForm, board) -> None:
    """Stream the texts into `board`; keep the result for this session."""
    st.session_state.pop("run_result", None)
    drawn = [0.0]

    def show(scripts: list[Transcript]) -> None:
        now = time.monotonic()
        if now - drawn[0] >= REDRAW:
            drawn[0] = now
            _draw(board, scripts)

    entry: Entry | None = None
    try:
        prompts = read_prompts(form)
        entry = new_log("run")
        with st.spinner("The engine is at work …"):
            begun = time.perf_counter()
            scripts, notes = run_prompts(form, prompts, entry, show)
            seconds = time.perf_counter() - begun
    except (TandemError, OSError, ImportError) as error:
        if entry is not None:
            entry.path.unlink(missing_ok=True)
        board.error(str(error).rstrip(".") + ".")
        return
    st.session_state["run_result"] = (entry, scripts, notes, seconds)


def _footer(entry: Entry, scripts: list[Transcript], notes: list[str], seconds: float) -> None:
    for note in notes:
        st.caption(note)
    tokens = sum(script.tokens for script in scripts)
    st.caption(f"{len(scripts)} prompts, {tokens:,} tokens in {seconds:.2f} s, loading the model "
               "included")
    st.page_link("views/replay.py", label="Open this run in Replay", icon=":material/play_circle:",
                 query_params={"log": entry.id, "step": "0"})


def _draw(board, scripts: list[Transcript]) -> None:
    """Two columns of answers. Texts are shown as they are, never as markup."""
    with board.container():
        columns = st.columns(2)
        for place, script in enumerate(scripts):
            with columns[place % 2].container(border=True):
                st.caption(f"r{place} · {script.state}")
                st.text(script.prompt)
                st.code(script.text or " ", language=None, wrap_lines=True)


page()
