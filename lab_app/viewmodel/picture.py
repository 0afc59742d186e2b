"""All that the replay shows of one step, put together."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.errors import LogError
from lab_app.viewmodel.address import Address
from lab_app.viewmodel.lanes import Lanes, lanes
from lab_app.viewmodel.lens import Lens, lens
from lab_app.viewmodel.metrics import latency_texts, values_at
from lab_app.viewmodel.moment import moment_at
from lab_app.viewmodel.run import Run
from lab_app.viewmodel.step_card import StepCard, step_card
from lab_app.viewmodel.wall import Wall, wall


@dataclass(frozen=True, slots=True)
class Picture:
    card: StepCard
    wall: Wall
    lens: Lens | None  # None: no request is selected, or it has not arrived yet
    lanes: Lanes
    values: dict[str, str]  # of the strip, at this step
    latencies: list[tuple[str, str, str]]


def picture(run: Run, place: Address, wall_page: int | None = None) -> Picture:
    """The views of a place in the run. LogError, naming the step, if its events lack a field."""
    try:
        moment = moment_at(run.replayer, place.step)
        selected = None if place.request is None else lens(
            moment, place.phase, place.request, run.block_size, run.palette)
        return Picture(
            step_card(moment, run.config, run.palette),
            wall(moment, place.phase, run.num_blocks, run.block_size, run.palette,
                 page=wall_page),
            selected, lanes(run.replayer, place.step, run.palette, place.request),
            values_at(run.timeline, place.step, run.num_blocks),
            latency_texts(run.timeline, place.step))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise LogError(f"step {place.step} cannot be shown: an event around it lacks what its kind "
                       f"must have ({type(error).__name__} {error})") from error
