"""Markup of what runs along the time axis: the request lanes and the metrics strip."""

from __future__ import annotations

from functools import lru_cache

from lab_app.drawing.markup import paint, panel, text, tip, who
from lab_app.viewmodel.lanes import KINDS, Lane, Lanes, Segment, segment_text
from lab_app.viewmodel.metrics import Curve, Strip
from lab_app.viewmodel.palette import Palette

MARKS = {"first": "●", "hit": "★", "preempt": "▼", "finish": "◆"}
NAMES = {"first": "first token", "hit": "prefix hit", "preempt": "preempted", "finish": "finished"}


def draw_lanes(view: Lanes, palette: Palette) -> str:
    """One lane a request; a click on a step goes there."""
    rows = "".join(_lane(lane, view, palette) for lane in view.lanes)
    width = view.last - view.first + 1
    cursor = f"left:{100 * (view.cursor - view.first) / width:.3f}%;width:{100 / width:.3f}%"
    ticks = "".join(f'<span style="left:{100 * (step - view.first) / width:.3f}%">{step}</span>'
                    for step in range(view.first, view.last + 1) if step % _tick(width) == 0)
    legend = "".join(f'<span class="key"><u class="seg {kind}"></u>{name}</span>'
                     for kind, name in KINDS.items())
    legend += "".join(f'<span class="key">{MARKS[kind]} {name}</span>'
                      for kind, name in NAMES.items())
    more = f"{view.hidden:,} more requests in these steps are not shown" if view.hidden else ""
    body = (f'<div class="lanes"><div class="names">{_names(view, palette)}</div>'
            f'<div class="tracks" data-axis="{view.first},{width}">{rows}'
            f'<div class="cursor" style="{cursor}"></div><div class="ticks">{ticks}</div></div>'
            f'</div><div class="legend">{legend}</div>')
    return panel("gantt", "Request lanes", body, more)


def _tick(width: int) -> int:
    return next(size for size in (1, 2, 5, 10, 20, 50, 100, 500) if width / size <= 14)


def _names(view: Lanes, palette: Palette) -> str:
    return "".join(f'<div {who(palette, [lane.request])} {paint(lane.colour)}><u></u>'
                   f"{text(lane.request)}</div>" for lane in view.lanes)


def _lane(lane: Lane, view: Lanes, palette: Palette) -> str:
    width = view.last - view.first + 1
    parts = "".join(_segment(lane, part, view, width) for part in lane.segments)
    for place, (step, kind, words) in enumerate(lane.marks):
        same = sum(other[0] == step for other in lane.marks[:place])  # shift what would overlap
        left = 100 * (step - view.first + 0.5) / width
        parts += (f'<b class="m {kind}" style="left:calc({left:.3f}% + {9 * same}px)" '
                  f'{tip(f"{lane.request}: {words}, step {step}")}>{MARKS[kind]}</b>')
    return (f'<div class="lane" {who(palette, [lane.request])} {paint(lane.colour)}>'
            f"{parts}</div>")


def _segment(lane: Lane, part: Segment, view: Lanes, width: int) -> str:
    left = 100 * (part.first - view.first) / width
    return (f'<span class="seg {part.kind}" style="left:{left:.3f}%;'
            f'width:{100 * (part.last - part.first + 1) / width:.3f}%" '
            f"{tip(segment_text(lane.request, part))}></span>")


# --------------------------------------------------------------------------- strip
def draw_strip(view: Strip, step: int, values: dict[str, str],
               latencies: list[tuple[str, str, str]]) -> str:
    """Small curves with the value at the cursor in large type; a click goes to a step."""
    cells = "".join(_curve(curve, view, step, values[curve.name]) for curve in view.curves)
    cells += '<div class="facts">' + "".join(
        f"<div {tip(why)}><span>{name}</span><b>{text(value)}</b></div>"
        for name, value, why in latencies) + "</div>"
    return f'<section class="strip">{cells}</section>'


def _curve(curve: Curve, view: Strip, step: int, value: str) -> str:
    drawn = _area(curve.values, None, curve.top, "first")
    if curve.second is not None:
        drawn += _area(curve.second, curve.values, curve.top, "second")
    hint = f"{curve.title}, 0 to {curve.top:,.4g} {curve.unit} over all {view.num_steps:,} steps"
    if view.stride > 1:
        hint += f"; one point for {view.stride} steps, the {curve.rule}"
    marks = ""
    if curve.name == "kv":
        marks = "".join(f'<i class="p" style="left:{_percent(at, view):.3f}%"></i>'
                        for at in _thin(view.preemptions, view.stride))
    return (f'<div class="curve" {tip(hint)}><span>{text(curve.title)}</span><b>{value}'
            f'<small>{text(curve.unit)}</small></b><div class="plot" '
            f'data-axis="0,{view.num_steps}"><svg viewBox="0 0 100 30" '
            f'preserveAspectRatio="none">{drawn}</svg>{marks}<i class="cursor" '
            f'style="left:{_percent(step, view):.3f}%"></i></div></div>')


def _percent(step: int, view: Strip) -> float:
    return 100 * (step + 0.5) / max(view.num_steps, 1)


def _thin(steps: list[int], stride: int) -> list[int]:
    return sorted({step // stride * stride for step in steps})


@lru_cache(maxsize=64)  # a curve is the same for every step of its run
def _area(values: tuple[float, ...], base: tuple[float, ...] | None, top: float,
          kind: str) -> str:
    """A filled step curve on `base`, in a box of 100 by 30."""
    floor = base or (0.0,) * len(values)
    width = 100 / max(len(values), 1)
    there, back = ["M0,30"], []
    for place, (value, below) in enumerate(zip(values, floor, strict=True)):
        there.append(f"V{30 - 30 * (value + below) / top:.1f}H{(place + 1) * width:.1f}")
        back.append(f"V{30 - 30 * below / top:.1f}H{place * width:.1f}")
    return f'<path class="{kind}" d="{"".join(there + back[::-1])}Z"/>'
