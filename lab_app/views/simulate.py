"""Simulate: a workload from a form, through the same scheduler in modelled time."""

from __future__ import annotations

import plotly.graph_objects as go
import streamlit as st

from engine.core.errors import TandemError
from lab_app.parts.asksim import ask, choose_preset
from lab_app.store import Entry, new_log, stem
from lab_app.viewmodel.simulation import (
    Form,
    build_workload,
    history_row,
    latency_points,
    latency_table,
    settings,
    tiles,
)
from simulator.api import Simulation, simulate

BLUE, ORANGE = "#0072B2", "#E69F00"


def page() -> None:
    left, right = st.columns([5, 6], gap="large")
    with left:
        choose_preset()
        form = ask()
    with right:
        if form is not None:
            _run(form)
        if "sim_result" in st.session_state:
            _show(*st.session_state["sim_result"])
        elif form is None:
            st.info("The simulator drives the same scheduler and block manager as the real engine; "
                    "only the time of each step is modelled. Choose a start on the left and press "
                    "Simulate.")


def _run(form: Form) -> None:
    """Simulate, keep the result for this session; one sentence if it cannot be done."""
    st.session_state.pop("sim_result", None)
    bar = st.progress(0.0, "Simulating …")

    def progress(done: int, total: int) -> None:
        bar.progress(min(done / max(total, 1), 1.0), f"{done:,} of {total:,} requests")

    entry: Entry | None = None
    try:
        workload = build_workload(form)
        entry = new_log("sim")
        result = simulate(workload, form.model, form.hardware, settings(form), seed=form.seed,
                          log=entry.path, on_progress=progress)
    except (TandemError, OSError) as error:
        if entry is not None:
            entry.path.unlink(missing_ok=True)
        st.error(str(error).rstrip(".") + ".")
        return
    finally:
        bar.empty()
    st.session_state["sim_result"] = (entry, form, result)
    history = st.session_state.setdefault("sim_history", [])
    history.insert(0, history_row(form, result, stem(entry.path.name)))
    del history[20:]


def _show(entry: Entry, form: Form, result: Simulation) -> None:
    for note in result.notes:
        st.caption(note)
    columns = st.columns(3)
    for place, (name, value, why) in enumerate(tiles(result.metrics)):
        columns[place % 3].metric(name, value, help=why)
    st.page_link("views/replay.py", label="Open this run in Replay", icon=":material/play_circle:",
                 query_params={"log": entry.id, "step": "0"})
    st.dataframe(latency_table(result.metrics), hide_index=True,
                 column_config={stat: st.column_config.NumberColumn(format="localized")
                                for stat in ("mean", "median", "p90", "p99")})
    st.plotly_chart(_chart(result), key="sim_chart", config={"displayModeBar": False})
    if len(st.session_state["sim_history"]) > 1:
        st.markdown("**This session's simulations** (medians)")
        st.dataframe(st.session_state["sim_history"], hide_index=True)


def _chart(result: Simulation) -> go.Figure:
    points = latency_points(result)
    figure = go.Figure()
    for name, title, colour, symbol in (("e2el", "last token", ORANGE, "circle-open"),
                                        ("ttft", "first token", BLUE, "circle")):
        figure.add_scatter(
            x=[point["at"] for point in points], y=[point[name] for point in points], name=title,
            mode="markers", marker={"color": colour, "symbol": symbol, "size": 7},
            customdata=[[point["request"], point["prompt"], point["output"]] for point in points],
            hovertemplate="request %{customdata[0]}: %{y:.3f} s<br>prompt %{customdata[1]}, "
                          "output %{customdata[2]} tokens<extra></extra>")
    figure.update_layout(height=300, margin={"l": 10, "r": 10, "t": 30, "b": 10},
                         xaxis_title="arrival, s", yaxis_title="s after arrival",
                         yaxis_rangemode="tozero", legend={"orientation": "h", "y": 1.12})
    return figure


page()
