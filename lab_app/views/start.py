"""Start: what the lab is, and three things to look at."""

from __future__ import annotations

import streamlit as st

from lab_app.drawing.card import draw_card
from lab_app.drawing.memory import draw_wall
from lab_app.drawing.stage import stage
from lab_app.parts.suggestions import first_run, suggestions
from lab_app.viewmodel.moment import moment_at
from lab_app.viewmodel.run import Run
from lab_app.viewmodel.step_card import step_card
from lab_app.viewmodel.wall import wall


def _example(run: Run) -> None:
    """One step of the shipped run: the one with its first preemption."""
    step = run.timeline.next_step("preempt", -1) or 0
    moment = moment_at(run.replayer, step)
    card = step_card(moment, run.config, run.palette)
    cells = wall(moment, "during", run.num_blocks, run.block_size, run.palette)
    stage(f'<div class="two">{draw_card(card, run.palette)}{draw_wall(cells, run.palette)}</div>',
          None, key="example", on_pick=lambda: None)


st.title("Tandem: see an inference engine think")
st.markdown(
    "An LLM server decides, many times a second, **which requests compute how many tokens next** "
    "and **where their keys and values lie in memory**. Tandem has one scheduler and one block "
    "manager, driven either by a real engine or by a simulator. Both write down every decision, "
    "and this lab replays them one step at a time, with the reason for each.")

for column, (title, text, page, params) in zip(st.columns(3), suggestions(), strict=True):
    with column.container(border=True, height="stretch"):
        st.markdown(f"#### {title}\n{text}")
        st.page_link(page, label="Look at it", icon=":material/arrow_forward:",
                     query_params=params)

st.subheader("How to read a step")
for column, (name, text) in zip(st.columns(4), (
        ("1 · Decide", "Running requests come first, then waiting ones, until the token budget, "
                       "the seats or the blocks run out. The step card says why each is in or "
                       "out."),
        ("2 · Place", "Every token needs a slot in a block. The block wall shows who holds which "
                      "block, how full it is, and what is only kept as cache."),
        ("3 · Compute", "One forward pass over all rows: decodes bring one token each, prefill "
                        "chunks bring many. The strip shows how long it took."),
        ("4 · Commit", "Sampled tokens join their requests; who is done leaves, and its blocks "
                       "become free, but their content stays cached.")), strict=True):
    column.markdown(f"**{name}**  \n{text}")
if (shown := first_run()) is not None:
    _example(shown)
st.caption("In Replay, ← and → step, Space plays, P, E, F and H jump to the next preemption, "
           "eviction, finish and prefix hit. Click a request or a block to see its block table.")
