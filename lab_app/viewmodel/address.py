"""What a link says: which log, step, request and phase; and what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lab_app.viewmodel.moment import PHASES


@dataclass(frozen=True, slots=True)
class Address:
    """A place in a replay."""

    step: int = 0
    request: str | None = None
    phase: str = "during"


def parse_address(params: Mapping[str, str], num_steps: int, requests: Mapping[str, int],
                  ) -> tuple[Address, list[str]]:
    """The place that a link's parameters name, in a run of `num_steps` steps; and a sentence for
    each parameter that names nothing. What is wrong falls back to the start."""
    problems: list[str] = []
    step, written = 0, params.get("step")
    if written is not None:
        number = _whole(written)
        if number is None:
            problems.append(f"The link asks for step {written!r}, which is no whole number: "
                            "showing step 0.")
        else:
            step = min(max(number, 0), num_steps - 1)
            if step != number:
                problems.append(f"The link asks for step {number}, this log has steps 0 to "
                                f"{num_steps - 1}: showing step {step}.")
    request = params.get("request")
    if request is not None and request not in requests:
        problems.append(f"The link selects request {request!r}, which is not in this log.")
        request = None
    phase = params.get("phase", "during")
    if phase not in PHASES:
        problems.append(f"The link asks for the phase {phase!r}; there are "
                        f"{', '.join(PHASES)}: showing during.")
        phase = "during"
    return Address(step, request, phase), problems


def _whole(written: str) -> int | None:
    try:
        return int(written) if len(written) < 12 else None
    except ValueError:
        return None


def as_params(log_id: str, address: Address) -> dict[str, str]:
    """The parameters of a link to a place; defaults are left out."""
    params = {"log": log_id, "step": str(address.step)}
    if address.request is not None:
        params["request"] = address.request
    if address.phase != "during":
        params["phase"] = address.phase
    return params
