"""The transport bar: first, back, play, forward, last, jumps, and the slider."""

from __future__ import annotations

import time

import streamlit as st

from lab_app.parts.place import go, here
from lab_app.viewmodel.moment import PHASES
from lab_app.viewmodel.run import Run

SPEEDS = {"1 a second": 1.0, "2 a second": 0.5, "5 a second": 0.2}
JUMPS = {"preempt": ("preemption", "P"), "evict": ("eviction", "E"), "finish": ("finish", "F"),
         "hit": ("prefix hit", "H")}


def tick_seconds() -> float | None:
    """How often the replay must run by itself; None while it stands still."""
    if not st.session_state.get("playing"):
        return None
    return SPEEDS[st.session_state.get("speed") or next(iter(SPEEDS))]


def advance(run: Run) -> None:
    """While playing, one step on when its time has come; at the end playing stops."""
    seconds, now = tick_seconds(), time.monotonic()
    if seconds is None or now - st.session_state.get("played_at", 0.0) < 0.7 * seconds:
        return
    st.session_state["played_at"] = now
    if here().step + 1 < run.num_steps:
        go(run, step=here().step + 1)
    else:
        st.session_state["playing"] = False
        st.rerun()


def transport(run: Run) -> None:
    """All of it. Callbacks move the place before anything is drawn."""
    step, last = here().step, run.num_steps - 1
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        _move("First", "first", run, 0, disabled=step == 0, shortcut="Home",
              icon=":material/first_page:", explained="First step")
        _move("Back", "back", run, step - 1, disabled=step == 0, shortcut="Left",
              icon=":material/chevron_left:", explained="One step back")
        playing = bool(st.session_state.get("playing"))
        if st.button("Pause" if playing else "Play", key="play", shortcut="Space", type="primary",
                     icon=f":material/{'pause' if playing else 'play_arrow'}:",
                     help="Play or pause",
                     disabled=step == last and not playing):
            st.session_state["playing"] = not playing
            st.session_state["played_at"] = time.monotonic()
            st.rerun()
        _move("Forward", "forward", run, step + 1, disabled=step == last, shortcut="Right",
              icon=":material/chevron_right:", explained="One step on")
        _move("Last", "last", run, last, disabled=step == last, shortcut="End",
              icon=":material/last_page:", explained="Last step")
        st.selectbox("Speed", list(SPEEDS), key="speed", label_visibility="collapsed", width=125)
        _jumps(run)
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        if last:
            st.session_state["slider"] = step
            st.slider("Step", 0, last, key="slider", label_visibility="collapsed",
                      on_change=lambda: go(run, step=st.session_state["slider"]))
        _phase(run)


def _jumps(run: Run) -> None:
    with st.container(horizontal=True, vertical_alignment="center", gap="small", width="content"):
        st.caption("next", width="content")
        for kind, (name, shortcut) in JUMPS.items():
            target = run.timeline.next_step(kind, here().step)
            total = len(run.timeline.marks[kind])
            _move(name, f"next_{kind}", run, here().step if target is None else target,
                  disabled=target is None, shortcut=shortcut,
                  explained=f"Next step with a {name}; {total:,} in this log")


def _move(label: str, key: str, run: Run, target: int, *, disabled: bool, shortcut: str,
          explained: str, icon: str | None = None) -> None:
    st.button(label, key=key, on_click=lambda: go(run, step=target), disabled=disabled,
              shortcut=shortcut, help=explained, icon=icon)


def _phase(run: Run) -> None:
    """Which of the three states of the step the wall and the block table show."""
    st.session_state["phase"] = here().phase
    st.caption("memory", width="content")
    st.segmented_control("Show the memory", list(PHASES), key="phase",
                         format_func=lambda phase: PHASES[phase],
                         label_visibility="collapsed", selection_mode="single", required=True,
                         on_change=lambda: go(run, phase=st.session_state["phase"]))
