"""What a model's authors recommend for sampling: its generation_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.core.errors import RequestError
from engine.core.params import SamplingParams, shown
from engine.models.config import read_json
from engine.weights.errors import UnsupportedModel

NAMES = {  # theirs: ours
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens",
    "stop_strings": "stop"}


def read_sampling_defaults(directory: Path) -> SamplingParams:
    """The parameters for requests that bring none: SamplingParams' own, but where the directory's
    generation_config.json says otherwise. `"do_sample": false` means greedy.

    UnsupportedModel names a value that cannot be.
    """
    where = f"{directory}/generation_config.json"
    given = read_json(directory / "generation_config.json") or {}
    values: dict[str, Any] = {ours: given[theirs] for theirs, ours in NAMES.items()
                              if given.get(theirs) is not None}
    draws = given.get("do_sample")
    if draws is not None and not isinstance(draws, bool):
        raise UnsupportedModel(f"{where}: do_sample={shown(draws)} must be true or false")
    if draws is False:
        values = {name: value for name, value in values.items()
                  if name not in ("temperature", "top_k", "top_p", "min_p")} | {"temperature": 0.0}
    try:
        return SamplingParams(**values)
    except RequestError as error:
        raise UnsupportedModel(f"{where}: {error}") from None
