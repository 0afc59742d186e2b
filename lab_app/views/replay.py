"""Replay: any event log, step by step."""

from __future__ import annotations

import streamlit as st

from engine.core.errors import LogError
from lab_app.drawing.card import draw_card
from lab_app.drawing.memory import draw_lens, draw_wall
from lab_app.drawing.stage import picked, stage
from lab_app.drawing.timeaxis import draw_lanes, draw_strip
from lab_app.parts.chooser import choose_log
from lab_app.parts.opened import open_entry
from lab_app.parts.place import arrive, go, here, write_url
from lab_app.parts.transport import advance, tick_seconds, transport
from lab_app.viewmodel.metrics import latency_rows
from lab_app.viewmodel.picture import Picture, picture
from lab_app.viewmodel.run import Run, facts
from lab_app.viewmodel.step_card import queue_rows, why_rows
from lab_app.viewmodel.wall import PAGE, wall_rows


def page() -> None:
    entry = choose_log()
    if entry is None:
        return
    run = open_entry(entry)
    if run is None:
        return
    if run.problem:
        st.warning(run.problem.replace(str(entry.path), entry.path.name) + ".")
    arrive(entry.id, run)
    st.caption(" · ".join(f"{name} **{value}**" for name, value in facts(run)))
    st.fragment(_steps, run_every=tick_seconds())(entry.id, run)


def _steps(log_id: str, run: Run) -> None:
    """Everything that changes from step to step; reruns alone."""
    advance(run)
    transport(run)
    write_url(log_id)
    for problem in st.session_state.get("place_problems", ()):
        st.warning(problem)
    try:
        shown = picture(run, here(), _wall_page(run))
    except LogError as error:
        st.error(f"{error}.")
        return
    stage(_draw(run, shown), run.palette.index.get(here().request or ""), key="stage",
          on_pick=lambda: _picked(run))
    _tables(run, shown)


def _draw(run: Run, shown: Picture) -> str:
    palette = run.palette
    return (draw_strip(run.strip, here().step, shown.values, shown.latencies)
            + f'<div class="two">{draw_card(shown.card, palette)}'
            + f"{draw_wall(shown.wall, palette)}</div>"
            + draw_lanes(shown.lanes, palette) + draw_lens(shown.lens, run.block_size, palette))


def _wall_page(run: Run) -> int | None:
    """A pool too large for one picture is drawn in pages; None follows the step."""
    pages = -(-run.num_blocks // PAGE)
    if pages <= 1:
        return None
    chosen = st.selectbox(
        "Blocks shown", range(pages + 1), key="wall_page", width=330, format_func=lambda page: (
            "blocks: where this step writes" if page == 0 else
            f"blocks {(page - 1) * PAGE:,} to {min(page * PAGE, run.num_blocks) - 1:,}"),
        label_visibility="collapsed")
    return chosen - 1 if chosen else None


def _picked(run: Run) -> None:
    """A click on a step goes there, one on a request selects it."""
    pick = picked("stage")
    if isinstance(pick.get("step"), int):
        go(run, step=pick["step"])
    elif isinstance(pick.get("request"), int) and 0 <= pick["request"] < len(run.requests):
        go(run, request=run.requests[pick["request"]])


def _tables(run: Run, shown: Picture) -> None:
    """The text alternative. Built only while it is open."""
    opened = st.expander("The same as tables", key="tables", on_change="rerun")
    if not opened.open:
        return
    with opened:
        for title, rows in (
                ("The queues of this step", queue_rows(shown.card.queues)),
                ("Why each one is in or out", why_rows(shown.card.lines)),
                ("The blocks", wall_rows(shown.wall)),
                ("Latencies of all finished requests", latency_rows(run.timeline))):
            st.caption(title)
            st.dataframe(rows, hide_index=True)


page()
