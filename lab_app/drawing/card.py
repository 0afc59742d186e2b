"""Markup of the step card."""

from __future__ import annotations

from lab_app.drawing.markup import paint, panel, text, tip, who
from lab_app.viewmodel.palette import Palette
from lab_app.viewmodel.step_card import Chip, Piece, StepCard

BEATS = {"decide": "Decide", "place": "Place", "compute": "Compute", "commit": "Commit"}
SIGNS = {"out": "✕", "lost": "↩", "in": "✓"}


def draw_card(card: StepCard, palette: Palette) -> str:
    """Queues, budget bar, reasons, and the four beats of the step."""
    beats = "".join(f"<div><b>{BEATS[name]}</b>{text(sentence)}</div>"
                    for name, sentence in card.beats)
    body = (f'<div class="beats">{beats}</div>{_queues(card, palette)}{_budget(card, palette)}'
            f"{_lines(card, palette)}")
    return panel("card", f"Step {card.step}: why this batch?", body)


def _queues(card: StepCard, palette: Palette) -> str:
    shown = [queue for queue in card.queues
             if queue.name in ("waiting", "running") or queue.before or queue.after]
    cells = []
    for queue in shown:
        cells.append(f"<div><h4>{queue.name}</h4>"
                     f'<div class="q was">{_chips(queue.before, queue.more_before, palette)}</div>'
                     f'<div class="q">{_chips(queue.after, queue.more_after, palette)}</div></div>')
    return ('<div class="queues"><div class="when"><span>before</span><span>after</span></div>'
            + "".join(cells) + "</div>")


def _chips(chips: list[Chip], more: int, palette: Palette) -> str:
    drawn = "".join(
        f'<span class="chip{" moved" if chip.moved else ""}" {paint(chip.colour)} '
        f'{who(palette, [chip.request])} {tip(f"{chip.request}: {chip.note}")}>'
        f"{text(chip.request)}</span>" for chip in chips)
    drawn += f'<span class="more">+{more:,}</span>' if more else ""
    return drawn or '<span class="none">–</span>'


def _budget(card: StepCard, palette: Palette) -> str:
    """Pieces keep their proportions as far as a small one stays visible; the unused rest never
    takes more than half of the bar."""
    left = max(card.budget - card.spent, 0)
    pieces = "".join(_piece(piece, palette) for piece in card.pieces)
    if left:
        share = min(left, card.spent or left)
        pieces += (f'<span class="left" style="flex-grow:{share}" '
                   f'{tip(f"{left:,} tokens of the budget are not used")}>{left:,} unused</span>')
    bar = f'<div class="bar">{pieces}</div>'
    if card.cached:
        cached = "".join(_piece(piece, palette) for piece in card.cached)
        bar += f'<div class="bar free"><i>from the prefix cache, free:</i>{cached}</div>'
    legend = ('<span class="key"><u class="decode"></u>decode</span>'
              '<span class="key"><u class="prefill"></u>prefill chunk</span>'
              '<span class="key"><u class="cached"></u>cached</span>')
    return (f'<h4>token budget <b>{card.spent:,}</b> of {card.budget:,}'
            f'<span class="aside">{legend}</span></h4>{bar}')


def _piece(piece: Piece, palette: Palette) -> str:
    label = text(piece.request or f"{piece.tokens} more")
    if piece.kind != "decode":
        label += f" <small>{piece.tokens:,}</small>"
    owner = [piece.request] if piece.request is not None else []
    style = paint(piece.colour)[:-1] + f';flex-grow:{piece.tokens}"'
    return (f'<span class="piece {piece.kind}" {style} {who(palette, owner)} {tip(piece.text)}>'
            f"<em>{label}</em></span>")


def _lines(card: StepCard, palette: Palette) -> str:
    rows = "".join(
        f'<li class="{line.kind}" {who(palette, [line.request])} {tip(line.rule)}>'
        f"<i>{SIGNS[line.kind]}</i>"
        f'<span class="chip" {paint(palette.colour(line.request))}>{text(line.request)}</span>'
        f"<span>{text(line.text)}</span></li>" for line in card.lines)
    if card.more_behind:
        rows += f'<li class="out"><i>✕</i><span>{card.more_behind:,} more behind them</span></li>'
    if not rows:
        rows = '<li class="in"><i>✓</i><span>everyone who is here was scheduled</span></li>'
    return f'<h4>why not, and why</h4><ul class="why">{rows}</ul>'
