"""The place in the replay: kept in the session, mirrored in the URL, so that a link opens it."""

from __future__ import annotations

import streamlit as st

from lab_app.viewmodel.address import Address, as_params, parse_address
from lab_app.viewmodel.run import Run

STATE = "place"


def url_is_news() -> bool:
    """True if the URL says something that this session did not write itself: a link was opened."""
    params = dict(st.query_params)
    return bool(params) and params != st.session_state.get("place_written")


def url_log() -> str | None:
    return st.query_params.get("log")


def arrive(log_id: str, run: Run) -> None:
    """When another log or a link is opened, go where the link says, or to the start."""
    news = url_is_news()
    if st.session_state.get("place_log") == log_id and not news:
        return
    params = dict(st.query_params) if news and url_log() in (None, log_id) else {}
    address, problems = parse_address(params, run.num_steps, run.palette.index)
    st.session_state["place_log"] = log_id
    st.session_state[STATE] = address
    st.session_state["place_problems"] = problems
    st.session_state["playing"] = False


def here() -> Address:
    return st.session_state.get(STATE, Address())


def go(run: Run, *, step: int | None = None, request: str | None = None,
       phase: str | None = None) -> None:
    """Move to a step (kept inside the run), select a request, or change the phase."""
    now = here()
    if step is None:
        step = now.step
    elif step != now.step:
        st.session_state["place_problems"] = []
    st.session_state[STATE] = Address(min(max(step, 0), run.num_steps - 1),
                                      now.request if request is None else request,
                                      phase or now.phase)


def forget_request() -> None:
    now = here()
    st.session_state[STATE] = Address(now.step, None, now.phase)


def write_url(log_id: str) -> None:
    """Make the URL say where we are."""
    wanted = as_params(log_id, here())
    if dict(st.query_params) != wanted:
        st.query_params.from_dict(wanted)
    st.session_state["place_written"] = wanted
