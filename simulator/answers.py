"""Prompts of a log that repeat its answers, with token ids that a simulation finds again.

A simulated engine answers with ANSWER tokens, whatever was said, and its blocks are found in the
prefix cache by what they hold. So an answer that a later prompt repeats becomes ANSWER there, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from simulator.blockkeys import TokenKeys
from simulator.chats import ANSWER


def tokens_of(events: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, int]]:
    """(request, token id) of every token of a log, in order. One that a step ahead computed for a
    request that had ended meanwhile is none."""
    rows: dict[int, list[str]] = {}
    ended: set[str] = set()
    for event in events:
        kind = event["e"]
        if kind == "batch":
            rows[event["step"]] = event["requests"]
        elif kind == "token":
            for request, token in zip(rows.pop(event["step"], ()), event["tokens"]):
                if token is not None and request not in ended:
                    yield request, token
        elif kind == "finish":
            ended.add(event["request"])
        elif kind == "arrive":
            ended.discard(event["request"])  # a name may be used again


def answers_of(events: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """The token ids each request of a log was answered with."""
    answers: dict[str, list[int]] = {}
    for request, token in tokens_of(events):
        answers.setdefault(request, []).append(token)
    return answers


def retell(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]],
           salts: Sequence[str], block_size: int) -> list[list[int]] | None:
    """The prompts, in order of arrival, with every answer to an earlier one as ANSWER.

    What is repeated is told by whole blocks, as the cache tells it. Other ids are moved out of
    ANSWER's way, those under different salts out of each other's. None if nobody repeats a block
    with part of an answer: then prompts have all there is to share.
    """
    keys = TokenKeys([[*prompt, *answer] for prompt, answer in zip(prompts, answers)], salts)
    places = {salt: number << 40 for number, salt in enumerate(sorted(set(salts)))}
    owner: dict[int, int] = {}  # key of a block → the first request that held it
    told: list[list[int]] = []
    repeated = False
    for index, prompt in enumerate(prompts):
        own, same, source = keys(index, block_size), 0, -1
        for key in own[:len(prompt) // block_size]:
            if key not in owner:
                break
            same, source = same + block_size, owner[key]
        place = places[salts[index]] + ANSWER + 1
        text = [place + token for token in prompt[same:]]
        if same:
            text = (told[source] + [ANSWER] * len(answers[source]))[:same] + text
            repeated |= same > len(prompts[source])
        told.append(text)
        for key in own:
            owner.setdefault(key, index)
    return told if repeated else None
