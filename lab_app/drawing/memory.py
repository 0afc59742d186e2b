"""Markup of the block wall and the block-table lens."""

from __future__ import annotations

from lab_app.drawing.markup import paint, panel, text, tip, who
from lab_app.viewmodel.lens import Lens, LensRow, Slot, slot_text
from lab_app.viewmodel.palette import Palette
from lab_app.viewmodel.wall import KINDS, Cell, Wall, cell_text

LEGEND = {"used": "used", "shared": "shared", "cached": "free, cached", "clean": "free, clean"}


def draw_wall(view: Wall, palette: Palette) -> str:
    """One cell a block, with the pool's counts above and the legend below."""
    cells = "".join(_cell(cell, view.block_size, palette) for cell in view.cells)
    counts = view.counts
    total = max(view.num_blocks, 1)
    pool = "".join(f'<span class="{kind}" style="width:{100 * counts[kind] / total:.2f}%" '
                   f'{tip(f"{counts[kind]:,} of {total:,} blocks: {KINDS[kind]}")}></span>'
                   for kind in KINDS)
    legend = "".join(f'<span class="key"><u class="{kind}"></u>{LEGEND[kind]} '
                     f"<b>{counts[kind]:,}</b></span>" for kind in KINDS)
    legend += ('<span class="key"><u class="now"></u>written now</span>'
               '<span class="key">+ taken</span><span class="key">✕ content evicted</span>')
    where = ""
    if view.num_pages > 1:
        last = view.first + len(view.cells) - 1
        where = f"blocks {view.first:,}–{last:,} of {view.num_blocks:,}"
    label = (f"{view.num_blocks} blocks of {view.block_size} slots: {counts['used']} used, "
             f"{counts['shared']} shared, {counts['cached']} free and cached, "
             f"{counts['clean']} free and clean")
    size = "" if len(view.cells) <= 96 else " small"
    body = (f'<div class="pool">{pool}</div>'
            f'<div class="cells{size}" role="img" aria-label="{text(label)}">{cells}</div>'
            f'<div class="legend">{legend}<span class="key">{view.unused_slots:,} slots of held '
            "blocks are empty</span></div>")
    return panel("wall", f"Block wall: the KV cache {view.when}", body, where)


def _cell(cell: Cell, block_size: int, palette: Palette) -> str:
    marks = "".join(f" {name}" for flag, name in ((cell.written, "now"), (cell.fresh, "fresh"),
                                                  (cell.evicted, "evicted")) if flag)
    fill = ""
    if cell.owners:
        fill = f'<i style="height:{100 * cell.fill:.0f}%;background:{_bands(cell.colours)}"></i>'
    elif cell.kind == "cached":
        fill = '<i style="height:100%"></i>'
    label = text(cell.owners[0]) if cell.refs == 1 else ""
    badge = f"<s>×{cell.refs}</s>" if cell.refs > 1 else ""
    corner = "✕" * cell.evicted + "+" * cell.fresh
    return (f'<div class="cell {cell.kind}{marks}" data-block="{cell.block}" '
            f'{who(palette, cell.owners)} {tip(cell_text(cell, block_size))}>{fill}'
            f"<b>{cell.block}</b><em>{label}</em>{badge}<q>{corner}</q></div>")


def _bands(colours: tuple[str, ...]) -> str:
    """One colour, or as many upright bands as there are owners."""
    if len(colours) == 1:
        return colours[0]
    width = 100 / len(colours)
    stops = [f"{colour} {place * width:.0f}% {(place + 1) * width:.0f}%"
             for place, colour in enumerate(colours)]
    return f"linear-gradient(90deg,{','.join(stops)})"


# --------------------------------------------------------------------------- lens
def draw_lens(view: Lens | None, block_size: int, palette: Palette) -> str:
    """The selected request's block table; an invitation if none is selected."""
    if view is None:
        body = '<p class="none">Select a request: click one anywhere on this page.</p>'
        return panel("lens", "Block table", body)
    rows = "".join(_row(row, block_size, palette) for row in view.rows)
    if view.hidden:
        rows = f'<div class="row none">the first {view.hidden:,} blocks are not shown</div>{rows}'
    chip = (f'<span class="chip" {paint(view.colour)} {who(palette, [view.request])}>'
            f"{text(view.request)}</span>")
    legend = ('<span class="key"><u class="tok prompt"></u>prompt, computed</span>'
              '<span class="key"><u class="tok"></u>output, computed</span>'
              '<span class="key"><u class="tok now"></u>written now</span>'
              '<span class="key"><u class="tok known"></u>known, not computed</span>'
              '<span class="key"><u class="tok empty"></u>empty slot</span>')
    body = (f'<p>{chip} {text(view.status)}: {text(view.sentence)}</p>'
            f'<div class="rows" {paint(view.colour)}>{rows}</div>'
            f'<div class="legend">{legend}</div>')
    return panel("lens", "Block table", body, "logical block → physical block, token by token")


def _row(row: LensRow, block_size: int, palette: Palette) -> str:
    slots = "".join(_slot(slot, block_size) for slot in row.slots)
    if row.block is None:
        place = '<span class="to none">no block yet</span>'
    else:
        shared = f" ×{row.refs}" if row.refs > 1 else ""
        hint = f"physical block {row.block}"
        hint += f", shared with {', '.join(row.others)}" if row.others else ""
        hint += ", content indexed" if row.indexed else ""
        place = (f'<span class="to{" indexed" if row.indexed else ""}" {tip(hint)} '
                 f"{who(palette, row.others)}>→ {row.block}{shared}</span>")
    return f'<div class="row"><span class="no">{row.logical}</span>{place}{slots}</div>'


def _slot(slot: Slot, block_size: int) -> str:
    label = slot.position if slot.state != "empty" else ""
    kind = "prompt" if slot.prompt else "output"
    return (f'<span class="tok {slot.state} {kind}" {tip(slot_text(slot, block_size))}>'
            f"{label}</span>")
