"""The block-table lens: one request's tokens, cut into logical blocks, and where each one lies."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.replay import RequestState
from lab_app.viewmodel.moment import Moment
from lab_app.viewmodel.palette import Palette

MAX_BLOCKS = 12  # drawn; the first ones of a longer table are counted


@dataclass(frozen=True, slots=True)
class Slot:
    """One token's place. `state`: computed, now (written in this step), known (not computed yet),
    empty (a slot without a token)."""

    position: int
    slot: int  # block * block_size + offset
    state: str
    prompt: bool
    token: int | None  # id, where the log has it


@dataclass(frozen=True, slots=True)
class LensRow:
    """One logical block. `block` is None for known tokens that have no slot yet."""

    logical: int
    block: int | None
    refs: int
    others: tuple[str, ...]  # further holders
    indexed: bool  # its content can be shared
    slots: list[Slot]


@dataclass(frozen=True, slots=True)
class Lens:
    request: str
    colour: str
    status: str
    sentence: str
    rows: list[LensRow]
    hidden: int  # logical blocks before the first row shown


def lens(moment: Moment, phase: str, name: str, block_size: int, palette: Palette) -> Lens | None:
    """The request's table in a phase of the step; None if it has not arrived by then."""
    state = moment.state(phase)
    request = state.requests.get(name)
    if request is None:
        return None
    start, end = written_range(moment, name) if phase != "before" else (0, 0)
    tokens = _known_ids(request)
    count = max(-(-request.num_tokens // block_size), len(request.block_table))
    finished = request.status == "finished"
    rows = []
    for logical in range(max(count - MAX_BLOCKS, 0), 0 if finished else count):
        block = request.block_table[logical] if logical < len(request.block_table) else None
        owners = tuple(state.owners.get(block, ())) if block is not None else ()
        slots = [_slot(request, position, block, block_size, now=(start, end),
                       tokens=tokens)
                 for position in range(logical * block_size, (logical + 1) * block_size)]
        rows.append(LensRow(logical, block, len(owners),
                            tuple(owner for owner in owners if owner != name),
                            block in state.cached, slots))
    return Lens(name, palette.colour(name), request.status, _sentence(request), rows,
                0 if finished else max(count - MAX_BLOCKS, 0))


def written_range(moment: Moment, name: str) -> tuple[int, int]:
    """Positions [start, end) that the step computes for a request; (0, 0) if it has no row."""
    batch = moment.batch
    if batch is None or name not in batch["requests"]:
        return 0, 0
    row = batch["requests"].index(name)
    return batch["starts"][row], batch["starts"][row] + batch["counts"][row]


def _slot(request: RequestState, position: int, block: int | None, block_size: int, *,
          now: tuple[int, int], tokens: dict[int, int]) -> Slot:
    if position >= request.num_tokens:
        state = "empty"
    elif now[0] <= position < now[1]:
        state = "now"
    else:
        state = "computed" if position < request.num_computed else "known"
    slot = -1 if block is None else block * block_size + position % block_size
    return Slot(position, slot, state, position < request.prompt, tokens.get(position))


def _known_ids(request: RequestState) -> dict[int, int]:
    """Position -> token id. Logs of simulated requests hold output ids only, or none."""
    offset = 0 if request.has_prompt_ids else request.prompt
    return dict(enumerate(request.known_tokens(), start=offset))


def _sentence(request: RequestState) -> str:
    out = request.num_tokens - request.prompt
    text = (f"prompt {request.prompt}, output {out} of at most {request.limit - request.prompt}; "
            f"{request.num_computed} of {request.num_tokens} tokens computed")
    if request.preemptions:
        text += f"; preempted {request.preemptions} time{'s' * (request.preemptions > 1)}"
    if request.status == "finished":
        text += f"; finished ({request.reason}), so it holds no blocks"
    if request.cpu_table:
        text += f"; {len(request.cpu_table)} blocks in CPU memory"
    return text


def slot_text(slot: Slot, block_size: int) -> str:
    """The hover text: how the slot number comes about."""
    if slot.state == "empty":
        return f"slot {slot.slot}: empty, for token {slot.position}"
    name = f"token {slot.position}" + ("" if slot.token is None else f" (id {slot.token})")
    kind = "prompt" if slot.prompt else "output"
    what = {"computed": "computed", "now": "written in this step",
            "known": "known, its K/V not computed yet"}[slot.state]
    if slot.slot < 0:
        return f"{name}, {kind}: {what}; no slot"
    block, offset = divmod(slot.slot, block_size)
    return f"{name}, {kind}: {what}\nslot {slot.slot} = {block} × {block_size} + {offset}"
