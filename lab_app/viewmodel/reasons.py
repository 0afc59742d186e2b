"""Why each request was or was not scheduled, one sentence each, with the numbers of the log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lab_app.viewmodel.moment import Moment

MAX_LINES = 12  # behind one head; the rest is counted

RULES = {  # reason -> the rule behind it
    "ok": "A waiting request is admitted when a seat, token budget and blocks for it are there.",
    "blocks": "Every computed token needs a slot, so a request without enough free blocks waits.",
    "budget": "One step computes at most max_num_batched_tokens tokens.",
    "seqs": "At most max_num_seqs requests run at once.",
    "behind": "Nobody overtakes the head of the line: otherwise large requests could starve.",
    "static": "Static batching admits nobody until the whole batch has finished.",
    "reserve": "Reserving admission holds back all blocks a request may ever need.",
    "preempted": "A step that had to preempt admits nobody: the pool is already too small.",
    "parent": "Further samples of a prompt share its blocks, so the prompt is computed first.",
    "decodes": "Under prefill-first batching a step is all prefill or all decode.",
    "in flight": "Its last token is already being computed by the step before.",
    "victim": "Without a free block the running request served last gives all its blocks back.",
}


@dataclass(frozen=True, slots=True)
class Line:
    """One sentence about one request. `kind`: out (not scheduled), lost (preempted), in."""

    request: str
    kind: str
    reason: str  # a key of RULES, or the log's own word for it
    text: str

    @property
    def rule(self) -> str:
        return RULES.get(self.reason, "")


def why_lines(moment: Moment, config: dict[str, Any]) -> tuple[list[Line], int]:
    """Lines for everyone without a row and everyone admitted or preempted; and how many more wait
    behind the same head. Those without a row come first, in queue order."""
    verdicts = {event["request"]: event for event in moment.of_kind("consider")}
    behind = verdicts.pop(None, None)
    out = list(_running_without_row(moment, config, verdicts))
    held, more = _held_back(moment, config, verdicts, behind)
    return out + held + list(_preempted(moment)) + list(_admitted(moment, verdicts)), more


def _held_back(moment: Moment, config: dict[str, Any], verdicts: dict[Any, dict[str, Any]],
               behind: dict[str, Any] | None) -> tuple[list[Line], int]:
    """Everyone who waits or is swapped out after the decisions."""
    lines: list[Line] = []
    state, more = moment.during, 0
    if moment.batch is None:
        return lines, more  # the log ends in the middle of the decisions
    lost = {event["request"] for event in moment.of_kind("preempt")}
    for name in [*state.swapped, *state.waiting]:
        verdict = verdicts.get(name)
        if verdict is not None and verdict["verdict"] == "blocked" and name not in lost:
            lines.append(Line(name, "out", verdict["reason"], blocked_text(verdict, config)))
        elif name in lost:
            continue
        elif len(lines) >= MAX_LINES:
            more += 1
        elif behind is not None:
            lines.append(Line(name, "out", "behind", f"behind {behind['behind']}"))
        elif lost:
            lines.append(Line(name, "out", "preempted",
                              f"nobody is admitted in a step that preempts ({', '.join(lost)})"))
        else:
            lines.append(Line(name, "out", "parent", "waits for the prompt it is a sample of"))
    return lines, more


def blocked_text(verdict: dict[str, Any], config: dict[str, Any]) -> str:
    """The binding constraint of a `consider` event, with its numbers."""
    need, have, reason = verdict["need"], verdict["have"], verdict["reason"]
    if reason == "blocks":
        return f"needs {counted(need, 'block')}, {have} free"
    if reason == "budget":
        budget = config.get("max_num_batched_tokens", "all")
        return f"token budget spent ({budget} of {budget} tokens)"
    if reason == "seqs":
        return f"all {have} seats taken (max_num_seqs = {have})"
    if reason == "static":
        return "the running batch must finish first"
    if reason == "reserve":
        return f"must reserve {counted(need, 'block')} up to its limit, {have} not promised"
    return f"{reason}: needs {need}, has {have}"


def _running_without_row(moment: Moment, config: dict[str, Any],
                         verdicts: dict[Any, dict[str, Any]]) -> Iterator[Line]:
    rows = set(moment.batch["requests"]) if moment.batch else set()
    for name in moment.during.running if moment.batch else ():
        if name in rows:
            continue
        verdict = verdicts.get(name)
        if verdict is not None and verdict["reason"] == "budget":
            yield Line(name, "out", "budget",
                       f"wants {counted(verdict['need'], 'token')}, the budget is spent")
        elif config.get("batching") == "prefill_first":
            yield Line(name, "out", "decodes", "its decode waits: this step is for prefill")
        else:
            yield Line(name, "out", "in flight", "its last token is already in flight")


def _preempted(moment: Moment) -> Iterator[Line]:
    """Who lost the blocks, for whom, and what that costs."""
    short: dict[str, Any] | None = None
    for event in moment.of_kind("consider", "preempt"):
        if event["e"] == "consider":
            short = event if event["reason"] == "blocks" and event["request"] else short
            continue
        lost = counted(event["computed"], "computed token")
        cost = f"{lost} saved to CPU memory" if event["mode"] == "swap" else f"{lost} lost"
        cause = ""
        if short is not None:
            whose = "it" if short["request"] == event["request"] else short["request"]
            cause = f"{whose} needs {counted(short['need'], 'block')}, {short['have']} free; "
        undone = "; its row in this step is undone" if event["rolled_back"] else ""
        yield Line(event["request"], "lost", "victim", f"preempted: {cause}{cost}{undone}")


def _admitted(moment: Moment, verdicts: dict[Any, dict[str, Any]]) -> Iterator[Line]:
    hits = {event["request"]: event for event in moment.of_kind("share")}
    for name, verdict in verdicts.items():
        if verdict["verdict"] != "admitted":
            continue
        text = f"admitted: needs {counted(verdict['need'], 'block')}, {verdict['have']} free"
        hit = hits.get(name)
        if hit is not None:
            where = "in the cache" if hit["source"] == "cache" else "in its parent's blocks"
            text += f"; {counted(hit['tokens'], 'token')} found {where}"
        yield Line(name, "in", "ok", text)
    for event in moment.of_kind("swap"):
        if event["direction"] == "in":
            yield Line(event["request"], "in", "ok",
                       f"swapped in: {counted(len(event['pairs']), 'block')} copied back")


def counted(number: int, noun: str) -> str:
    """"1 block", "2 blocks", "1,234 blocks"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
