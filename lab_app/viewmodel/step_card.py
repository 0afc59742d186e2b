"""The step card: the queues before and after, what the token budget was spent on, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.core.replay import RequestState, State
from lab_app.viewmodel.moment import Moment
from lab_app.viewmodel.palette import Palette
from lab_app.viewmodel.reasons import Line, counted, why_lines

MAX_CHIPS = 14  # a queue; the rest is counted
MAX_PIECES = 28  # of the budget bar; further decodes become one piece


@dataclass(frozen=True, slots=True)
class Chip:
    """A request in a queue. `moved` if it was not in this queue before the step."""

    request: str
    colour: str
    note: str  # progress, for the hover text
    moved: bool


@dataclass(frozen=True, slots=True)
class Queue:
    """One column of the card."""

    name: str  # waiting running swapped finished
    before: list[Chip]
    after: list[Chip]
    more_before: int  # chips not shown
    more_after: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one request in the batch. `kind`: decode, prefill, cached (costs no budget)."""

    request: str | None  # None: several decodes drawn as one
    kind: str
    tokens: int
    colour: str
    text: str  # for the hover


@dataclass(frozen=True, slots=True)
class StepCard:
    step: int
    queues: list[Queue]
    pieces: list[Piece]  # in row order; their tokens sum up to `spent`
    cached: list[Piece]
    spent: int
    budget: int
    lines: list[Line]
    more_behind: int  # waiting requests without a line of their own
    beats: list[tuple[str, str]]  # (decide | place | compute | commit, sentence)


def step_card(moment: Moment, config: dict[str, Any], palette: Palette) -> StepCard:
    """All that the card shows. An unfinished last step (a log cut off) has what there is of it."""
    lines, more = why_lines(moment, config)
    pieces = _pieces(moment, palette)
    budget = next((event["budget"] for event in moment.of_kind("step_begin")), 0)
    return StepCard(
        moment.step, _queues(moment, palette), pieces, _cached(moment, palette),
        sum(piece.tokens for piece in pieces), budget, lines, more, _beats(moment))


def progress(request: RequestState) -> str:
    """"prefill 32 of 57 tokens" or "6 of at most 20 output tokens"."""
    out = request.num_tokens - request.prompt
    if request.num_computed < request.num_tokens - 1 or out == 0:
        return f"{request.num_computed} of {request.num_tokens} tokens computed"
    return f"{counted(out, 'output token')}, at most {request.limit - request.prompt}"


# --------------------------------------------------------------------------- queues
def _queues(moment: Moment, palette: Palette) -> list[Queue]:
    before, after = moment.before, moment.after
    queues = [_queue(name, getattr(before, name), getattr(after, name), moment, palette)
              for name in ("waiting", "running", "swapped")]
    done = [event["request"] for event in moment.of_kind("finish")]
    queues.append(_queue("finished", [], done, moment, palette))
    return queues


def _queue(name: str, before: list[str], after: list[str], moment: Moment,
           palette: Palette) -> Queue:
    def chips(ids: list[str], state: State, old: set[str]) -> list[Chip]:
        return [Chip(request, palette.colour(request), progress(state.requests[request]),
                     request not in old) for request in ids[:MAX_CHIPS]]
    return Queue(name, chips(before, moment.before, set(before)),
                 chips(after, moment.after, set(before)),
                 max(len(before) - MAX_CHIPS, 0), max(len(after) - MAX_CHIPS, 0))


# --------------------------------------------------------------------------- budget
def _pieces(moment: Moment, palette: Palette) -> list[Piece]:
    batch = moment.batch
    if batch is None:
        return []
    pieces: list[Piece] = []
    spilled = 0
    for name, start, count in zip(batch["requests"], batch["starts"], batch["counts"],
                                  strict=True):
        request = moment.during.requests[name]
        if is_decode(request, start, count):
            if len(pieces) >= MAX_PIECES:
                spilled += 1
                continue
            text = f"{name} decodes: computes token {start}, samples token {start + 1}"
            pieces.append(Piece(name, "decode", count, palette.colour(name), text))
        else:
            text = (f"{name} prefills {counted(count, 'token')}: positions {start} to "
                    f"{start + count - 1} of {request.num_tokens}")
            pieces.append(Piece(name, "prefill", count, palette.colour(name), text))
    if spilled:
        pieces.append(Piece(None, "decode", spilled, palette.colour(None),
                            f"{counted(spilled, 'more decode')}"))
    return pieces


def is_decode(request: RequestState, start: int, count: int) -> bool:
    """A row that computes one token past the prompt; all else is prefill (or its recomputing)."""
    return count == 1 and start >= request.prompt


def _cached(moment: Moment, palette: Palette) -> list[Piece]:
    return [Piece(event["request"], "cached", event["tokens"], palette.colour(event["request"]),
                  f"{event['request']} found {counted(event['tokens'], 'token')} already computed: "
                  "free of charge")
            for event in moment.of_kind("share") if event["tokens"]]


# --------------------------------------------------------------------------- the four beats
def _beats(moment: Moment) -> list[tuple[str, str]]:
    return [("decide", _decide(moment)), ("place", _place(moment)),
            ("compute", _compute(moment)), ("commit", _commit(moment))]


def _decide(moment: Moment) -> str:
    batch = moment.batch
    if batch is None:
        return "the log ends here"
    decodes = sum(is_decode(moment.during.requests[name], start, count) for name, start, count
                  in zip(batch["requests"], batch["starts"], batch["counts"], strict=True))
    prefills = len(batch["requests"]) - decodes
    parts = [counted(decodes, "decode")] * bool(decodes)
    parts += [counted(prefills, "prefill chunk")] * bool(prefills)
    left = batch["waiting"] + batch["swapped"]
    text = " and ".join(parts) or "nothing to compute"
    return f"{text}, {left} left waiting" if left else text


def _place(moment: Moment) -> str:
    def blocks(kind: str) -> int:
        return sum(len(event["blocks"]) for event in moment.of_kind(kind))
    decided = [event["e"] for event in moment.events]
    freed = sum(len(event["blocks"]) for event in moment.events[:decided.index("batch")]
                if event["e"] == "free") if "batch" in decided else 0
    parts = [f"{counted(number, 'block')} {what}" for number, what in (
        (freed, "given back"), (blocks("share"), "shared"), (blocks("alloc"), "taken"),
        (len(moment.of_kind("evict")), "evicted"), (len(moment.of_kind("copy")), "copied"),
        (blocks("cache"), "indexed")) if number]
    return ", ".join(parts) or "no block moved: every token had a slot"


def _compute(moment: Moment) -> str:
    time = next((event for event in moment.result if event["e"] == "time"), None)
    if time is None:
        return "not in the log"
    text = f"{counted(sum(moment.batch['counts']) if moment.batch else 0, 'token')} in "
    text += f"{time['seconds'] * 1e3:.3g} ms"
    if time.get("source"):
        text += f", {time['source']}"
    if isinstance(time.get("bound"), str):
        text += f"; bound by {time['bound']}"
    return text


def _commit(moment: Moment) -> str:
    sampled = sum(token is not None for event in moment.result if event["e"] == "token"
                  for token in event["tokens"])
    parts = [f"{counted(sampled, 'token')} sampled"]
    parts += [f"{event['request']} finished ({event['reason']})"
              for event in moment.of_kind("finish")]
    return ", ".join(parts)


# --------------------------------------------------------------------------- as tables
def queue_rows(queues: list[Queue]) -> list[dict[str, str]]:
    """The queues as a table."""
    return [{"queue": queue.name, "before": ", ".join(chip.request for chip in queue.before),
             "after": ", ".join(chip.request for chip in queue.after)} for queue in queues]


def why_rows(lines: list[Line]) -> list[dict[str, str]]:
    """The reasons as a table, each with the rule behind it."""
    return [{"request": line.request, "verdict": line.text, "rule": line.rule} for line in lines]
