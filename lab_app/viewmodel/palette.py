"""One colour a request, chosen to stay apart for colour-blind eyes; never the only channel.

The hues are Okabe and Ito's, with three of Paul Tol's. A request keeps its colour in all views.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.replay import State

HUES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#882255",
        "#44AA99", "#AA7744")
NOBODY = "#8a8f98"


@dataclass(frozen=True, slots=True)
class Palette:
    """Colours of the requests of one run, by order of arrival."""

    index: dict[str, int]  # request id -> place in the order of arrival

    def colour(self, request: str | None) -> str:
        """A `#rrggbb`; grey for nobody and for ids that never arrived."""
        place = self.index.get(request) if request is not None else None
        return NOBODY if place is None else HUES[place % len(HUES)]


def palette_of(state: State) -> Palette:
    """Colours for all requests that the state knows. Later states extend them, change none."""
    return Palette({name: place for place, name in enumerate(state.requests)})


def ink_on(colour: str) -> str:
    """Black or white, whichever reads better on the colour (WCAG relative luminance)."""
    channels = [int(colour[start:start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#ffffff" if luminance < 0.30 else "#111111"
