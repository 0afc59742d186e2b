"""The block wall: every physical KV block, who holds it, how full it is, what the step did."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.core.replay import State
from lab_app.viewmodel.moment import WHEN, Moment
from lab_app.viewmodel.palette import Palette
from lab_app.viewmodel.reasons import counted

PAGE = 192  # cells drawn at once

KINDS = {  # of a cell -> what it means
    "used": "used by one request", "shared": "shared: two or more hold it",
    "cached": "free, content still cached", "clean": "free, nothing in it"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One block. `fill` is used slots / block size; a free block with cached content is full."""

    block: int
    kind: str  # of KINDS
    owners: tuple[str, ...]
    colours: tuple[str, ...]  # of the owners, at most four
    used: int  # slots
    fill: float
    written: bool  # this step writes into it
    fresh: bool  # this step took it from the free ones
    evicted: bool  # this step dropped its old content
    key: str | None  # content key, if indexed

    @property
    def refs(self) -> int:
        return len(self.owners)


@dataclass(frozen=True, slots=True)
class Wall:
    cells: list[Cell]  # of the page shown
    first: int  # block number of the first cell
    num_blocks: int
    block_size: int
    counts: dict[str, int]  # of KINDS, over the whole pool
    unused_slots: int  # in used blocks: internal fragmentation
    page: int
    num_pages: int
    when: str  # "after step 7"


def wall(moment: Moment, phase: str, num_blocks: int, block_size: int, palette: Palette,
         *, page: int | None = None) -> Wall:
    """The wall in a phase of the step; without `page`, the page of the first block written."""
    state = moment.state(phase)
    written = set() if phase == "before" else written_blocks(moment, block_size)
    fresh, evicted = set[int](), set[int]()
    if phase != "before":
        fresh = {block for event in moment.of_kind("alloc") for block in event["blocks"]}
        fresh |= {event["to"] for event in moment.of_kind("copy")}
        evicted = {event["block"] for event in moment.of_kind("evict")}
    num_pages = max(-(-num_blocks // PAGE), 1)
    if page is None:
        page = min(written, default=0) // PAGE
    page = min(max(page, 0), num_pages - 1)
    used, unused = _used_slots(state, block_size)
    first = page * PAGE
    cells = [_cell(block, state, used.get(block, 0), block_size, palette,
                   marks=(block in written, block in fresh, block in evicted))
             for block in range(first, min(first + PAGE, num_blocks))]
    return Wall(cells, first, num_blocks, block_size, _counts(state, num_blocks), unused, page,
                num_pages, WHEN[phase].format(moment.step))


def written_blocks(moment: Moment, block_size: int) -> set[int]:
    """The blocks that this step's batch writes K/V into."""
    batch, blocks = moment.batch, set[int]()
    if batch is None:
        return blocks
    for name, start, count in zip(batch["requests"], batch["starts"], batch["counts"],
                                  strict=True):
        table = moment.during.requests[name].block_table
        blocks.update(table[start // block_size:(start + count - 1) // block_size + 1])
    return blocks


def _live(state: State) -> Iterable[str]:
    return [*state.running, *state.waiting, *state.swapped]


def _used_slots(state: State, block_size: int) -> tuple[dict[int, int], int]:
    """Used slots of each held block, and how many slots of held blocks hold nothing."""
    used: dict[int, int] = {}
    for name in _live(state):
        request = state.requests[name]
        for index, block in enumerate(request.block_table):
            here = min(max(request.num_computed - index * block_size, 0), block_size)
            used[block] = max(here, used.get(block, 0))
    return used, len(used) * block_size - sum(used.values())


def _cell(block: int, state: State, used: int, block_size: int, palette: Palette, *,
          marks: tuple[bool, bool, bool]) -> Cell:
    owners = tuple(state.owners.get(block, ()))
    key = state.cached.get(block)
    if owners:
        kind = "shared" if len(owners) > 1 else "used"
    else:
        kind = "cached" if key is not None else "clean"
        used = block_size if kind == "cached" else 0
    colours = tuple(palette.colour(owner) for owner in owners[:4])
    return Cell(block, kind, owners, colours, used, used / block_size, *marks, key)


def _counts(state: State, num_blocks: int) -> dict[str, int]:
    held = [len(owners) for owners in state.owners.values() if owners]
    shared = sum(number > 1 for number in held)
    cached = sum(not state.owners.get(block) for block in state.cached)
    return {"used": len(held) - shared, "shared": shared, "cached": cached,
            "clean": num_blocks - len(held) - cached}


def cell_text(cell: Cell, block_size: int) -> str:
    """The hover text, and the row of the text alternative."""
    parts = [f"block {cell.block}: {KINDS[cell.kind]}"]
    if cell.owners:
        parts.append(f"held by {', '.join(cell.owners)} (ref count {cell.refs})")
        parts.append(f"{cell.used} of {counted(block_size, 'slot')} filled")
    if cell.key is not None:
        parts.append(f"content key {cell.key[:12]}")
    marks = [word for flag, word in ((cell.evicted, "old content evicted"), (cell.fresh, "taken"),
                                     (cell.written, "written")) if flag]
    if marks:
        parts.append(f"in this step: {', '.join(marks)}")
    return "\n".join(parts)


def wall_rows(view: Wall) -> list[dict[str, object]]:
    """The wall as a table, for those who cannot see it and for copying."""
    return [{"block": cell.block, "state": KINDS[cell.kind], "held by": ", ".join(cell.owners),
             "ref count": cell.refs, "slots filled": cell.used,
             "written now": cell.written, "cached key": (cell.key or "")[:12]}
            for cell in view.cells]
