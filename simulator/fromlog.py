"""A recorded run as a workload: what arrived when, how long it became, what it shared."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from engine.core.events import LoadedLog
from simulator.answers import answers_of, retell, tokens_of
from simulator.blockkeys import TokenKeys
from simulator.errors import ReplayError, WorkloadError
from simulator.workload import Workload


def tp_of(header: Mapping[str, Any], name: str) -> int:
    """Ranks that shared the model: 1 in logs that do not tell. ReplayError for no such number."""
    device = header.get("hardware")
    tp = device.get("tp", 1) if isinstance(device, Mapping) else 1
    if type(tp) is not int or tp < 1:
        raise ReplayError(f"{name}: the log's header has tp={tp!r}, must be a whole number of at "
                          f"least 1")
    return tp


def graphs_of(header: Mapping[str, Any]) -> bool:
    """Whether decodes ran as CUDA graphs: yes, unless the log says otherwise."""
    device = header.get("hardware")
    return not isinstance(device, Mapping) or device.get("graphs") is not False


def workload_from_log(log: LoadedLog, name: str) -> Workload:
    """The requests of a log, each with the number of tokens it really produced.

    Requests that were aborted, failed or never ended count with what they had produced until then;
    those without any output are left out, with a note. Requests that waited for an idle engine to
    be turned again (an offline run submits all of them first) arrive when it was. WorkloadError if
    no request is left.
    """
    arrived, outputs = _arrivals(log.events), _outputs(log.events)
    kept = _kept(arrived, outputs)
    if not kept:
        raise WorkloadError(f"{name}: no request of the log produced a token")
    left = len(arrived) - len(kept)
    notes = [f"{left} requests without output left out"] if left else []
    if received := sum("received" in event for event in kept):
        notes.append(f"{received} requests came with K/V from another engine: here their prompts "
                     f"are computed, so TTFT is not comparable")
    contents = [event.get("tokens") or event.get("keys") or () for event in kept]
    salts = [event.get("salt", "") for event in kept]
    tokens = any("tokens" in event for event in kept)
    size = log.header.get("config", {}).get("block_size", 16)
    told = None
    if all("tokens" in event for event in kept):
        said = answers_of(log.events)
        told = retell(contents, [said.get(event["request"], []) for event in kept], salts, size)
    return Workload(
        name, array("d", (event["at"] for event in kept)),
        array("q", (event["prompt"] for event in kept)),
        array("q", (outputs[event["request"]] for event in kept)),
        TokenKeys(contents, salts) if tokens else GivenKeys(contents, size),
        tokens=None if told is None else lambda index: told[index], notes=notes)


def _kept(arrived: Mapping[str, dict[str, Any]], outputs: Mapping[str, int]
          ) -> list[dict[str, Any]]:
    """The arrivals with output, in the order of the workload."""
    return sorted((event for request, event in arrived.items() if outputs.get(request)),
                  key=lambda event: event["at"])


def incomplete_of(log: LoadedLog) -> tuple[list[int], int]:
    """Requests of `workload_from_log` that the real run did not complete (aborted, failed, or not
    over when the log ends); and how many requests, with output or not, the log's end cut off."""
    ends = {event["request"]: event["reason"] for event in log.events if event["e"] == "finish"}
    arrived = _arrivals(log.events)
    kept = _kept(arrived, _outputs(log.events))
    return ([index for index, event in enumerate(kept)
             if ends.get(event["request"]) not in ("stop", "length")],
            sum(request not in ends for request in arrived))


def _arrivals(events: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The `arrive` events by request, `at` moved to the turn that woke an idle engine.

    Who came while the last step of others ran did not wait for an idle engine."""
    arrived: dict[str, dict[str, Any]] = {}
    alive, idle, turn, ended, latest = 0, True, 0.0, -math.inf, -math.inf
    for event in events:
        kind = event["e"]
        if kind == "step_begin":
            idle, turn, ended = alive == 0, event["t"], latest
        elif kind == "arrive":
            alive += 1
            moved = idle and event["at"] >= ended
            arrived[event["request"]] = event | {"at": turn} if moved else event
        elif kind == "finish":
            alive -= 1
        latest = event["t"]
    return arrived


def _outputs(events: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Tokens each request produced."""
    ends = {event["request"]: event["outputs"] for event in events if event["e"] == "finish"}
    return {**Counter(request for request, _ in tokens_of(events)), **ends}


class GivenKeys:
    """Keys as a simulated run recorded them, for the block size they were made for."""

    def __init__(self, keys: Sequence[Sequence[Any]], block_size: int):
        self._keys, self._block_size = keys, block_size

    def __call__(self, index: int, block_size: int) -> Sequence[Any]:
        if block_size != self._block_size and any(self._keys):
            raise WorkloadError(f"the log shares content in blocks of {self._block_size} tokens: "
                                f"it cannot be run with block_size={block_size}")
        return self._keys[index]


def occupancy(log_events: Sequence[Mapping[str, Any]], num_blocks: int) -> dict[str, list[float]]:
    """Curves over time: "time", "running", "waiting" and "kv" (share of blocks in use) a step, and
    when the engine falls idle."""
    curves: dict[str, list[float]] = {"time": [], "running": [], "waiting": [], "kv": []}
    alive = 0

    def point(*values: float) -> None:
        for curve, value in zip(curves.values(), values):
            curve.append(value)

    for event in log_events:
        kind = event["e"]
        if kind == "batch":
            used = 1 - event["free"] / num_blocks
            point(event["t"], event["running"], event["waiting"], used)
        elif kind == "arrive":
            alive += 1
        elif kind == "finish":
            alive -= 1
            if not alive:
                point(event["t"], 0, 0, 0.0)
    return curves
