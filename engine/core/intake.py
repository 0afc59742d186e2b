"""What a request must satisfy to be accepted, and how its arrival is written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from engine.core.config import SchedulerConfig
from engine.core.errors import RequestError
from engine.core.params import is_number, is_whole, shown
from engine.core.request import Request, SamplingParams


def check_request(request: Request, config: SchedulerConfig) -> None:
    """Set `request.limit`, or raise RequestError if the request can never run here.

    Whoever passes can finish alone: its limit is at most max_model_len, which the pool holds.
    """
    name, prompt, longest = request.id, request.num_prompt, config.max_model_len
    if request.limit:
        raise RequestError(f"request {name} was submitted before: make a new Request")
    _check_fields(request)
    if prompt < 1:
        raise RequestError(f"request {name}: the prompt is empty; give at least 1 token")
    if prompt >= longest:
        raise RequestError(
            f"request {name}: the prompt has {shown(prompt)} tokens and needs room for 1 more, but "
            f"max_model_len is {longest}: shorten it to {longest - 1} or raise max_model_len")
    if type(request.num_received) is not int or not 0 <= request.num_received < prompt:
        raise RequestError(f"request {name}: received={shown(request.num_received)} must be a "
                           f"whole number from 0 to {prompt - 1}: the last token is always "
                           f"computed here")
    _check_content(request)
    if request.parent is not None:
        _check_fork(request, request.parent)
    if request.params.max_tokens is None:
        request.limit = longest
    else:
        request.limit = min(prompt + request.params.max_tokens, longest)


def _check_fields(request: Request) -> None:
    for name, attribute, good, rule in _FIELDS:
        value = getattr(request, attribute)
        if not good(value):
            raise RequestError(f"request {request.id}: {name}={shown(value)} {rule}")


# What would otherwise fail inside a step: in a policy's key, a comparison, a hash, the log.
_FIELDS: tuple[tuple[str, str, Callable[[Any], bool], str], ...] = (
    ("params", "params", lambda it: isinstance(it, SamplingParams), "must be SamplingParams"),
    ("priority", "priority", is_whole, "must be a whole number of at most 64 bits"),
    ("arrival_time", "arrival_time", is_number, "must be a number of seconds"),
    ("deadline", "deadline", lambda it: it is None or is_number(it), "must be a number of seconds"),
    ("cache_salt", "cache_salt", lambda it: isinstance(it, str), "must be a string"),
    ("keys", "own_keys", lambda it: it is None or isinstance(it, Sequence), "must be a list"),
    ("stop ids", "stop_ids", lambda it: all(map(is_whole, it)), "must be whole numbers"),
    ("parent", "parent", lambda it: it is None or isinstance(it, Request), "must be a Request"))


def _check_content(request: Request) -> None:
    """What would otherwise fail inside a step: token ids and keys that cannot be hashed."""
    tokens, keys = request.tokens, request.own_keys
    if tokens is not None and (set(map(type, tokens)) != {int} or min(tokens) < 0
                               or max(tokens) >= 1 << 63):
        raise RequestError(f"request {request.id}: token ids must be whole numbers of at least 0 "
                           f"and below 2**63")
    if isinstance(keys, (list, tuple)):  # a lazy sequence vouches for itself
        try:
            different = len(set(keys))
        except TypeError as error:
            raise RequestError(f"request {request.id}: block keys: {error}") from None
        if different < len(keys):
            raise RequestError(f"request {request.id}: {len(keys)} block keys, but only "
                               f"{different} different ones: a key names a block and all before it")


def _check_fork(request: Request, parent: Request) -> None:
    ours, theirs = request.tokens, parent.tokens
    same = (request.num_prompt == parent.num_prompt and request.cache_salt == parent.cache_salt
            and (ours is None) == (theirs is None)
            and (ours is None or theirs is None or ours == theirs[:parent.num_prompt]))
    if not same:
        raise RequestError(f"request {request.id}: a further sample must have the prompt and the "
                           f"salt of its parent {parent.id}")


_DEFAULTS = SamplingParams()


def arrival_fields(request: Request) -> dict[str, Any]:
    """The `arrive` event: all that a replay needs to submit the same request again."""
    params = {field.name: getattr(request.params, field.name) for field in fields(SamplingParams)
              if getattr(request.params, field.name) != getattr(_DEFAULTS, field.name)}
    event: dict[str, Any] = {
        "request": request.id, "prompt": request.num_prompt, "limit": request.limit,
        "at": request.arrival_time, "params": params, "stop_ids": sorted(request.stop_ids)}
    if request.tokens is not None:
        event["tokens"] = list(request.tokens)
    if request.own_keys is not None:
        event["keys"] = [key if isinstance(key, (int, str)) else str(key)
                         for key in request.own_keys]
    if request.priority:
        event["priority"] = request.priority
    if request.deadline is not None:
        event["deadline"] = request.deadline
    if request.cache_salt:
        event["salt"] = request.cache_salt
    if request.num_received:
        event["received"] = request.num_received
    if request.parent is not None:
        event["parent"] = request.parent.id
    return event
