"""What a request must satisfy to be accepted, and how its arrival is written down."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from engine.core.config import SchedulerConfig
from engine.core.errors import RequestError
from engine.core.request import Request, SamplingParams


def check_request(request: Request, config: SchedulerConfig) -> None:
    """Set `request.limit`, or raise RequestError if the request can never run here.

    Whoever passes can finish alone: its limit is at most max_model_len, which the pool holds.
    """
    name, prompt, longest = request.id, request.num_prompt, config.max_model_len
    if prompt < 1:
        raise RequestError(f"request {name}: the prompt is empty; give at least 1 token")
    if prompt >= longest:
        raise RequestError(
            f"request {name}: the prompt has {prompt} tokens and needs room for 1 more, but "
            f"max_model_len is {longest}: shorten it to {longest - 1} or raise max_model_len")
    if request.params.max_tokens is None:
        request.limit = longest
    else:
        request.limit = min(prompt + request.params.max_tokens, longest)


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
    for name in ("priority", "deadline"):
        if getattr(request, name):
            event[name] = getattr(request, name)
    if request.cache_salt:
        event["salt"] = request.cache_salt
    if request.parent is not None:
        event["parent"] = request.parent.id
    return event
