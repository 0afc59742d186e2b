"""The forms a prompt may take, and how they become token ids."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from numbers import Integral
from operator import index
from typing import Any, NamedTuple

from engine.core.errors import ConfigError, RequestError
from engine.core.params import SamplingParams, shown
from engine.runner.tokenizer import TextTokenizer

Prompt = str | Sequence[int] | dict[str, Any]
DICT_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "priority")


class PromptError(RequestError):
    """A prompt that cannot be served, one of `many` or alone."""

    def __init__(self, index: int, many: bool, error: RequestError):
        self.index = index  # its place in the list, from 0
        # Ids are the engine's own; what the user knows is the list.
        self.reason = re.sub(r"^request \S+: ", "", str(error))
        super().__init__(f"prompts[{index}]: {self.reason}" if many else self.reason)


class PromptInput(NamedTuple):
    """A prompt as the engine takes it."""

    token_ids: list[int]
    text: str | None  # None if it was given as token ids
    extra: dict[str, Any]  # cache_salt and priority, where a dict held them


def read_prompt(name: str, prompt: Prompt, tokenizer: TextTokenizer | None) -> PromptInput:
    """Tokenize one prompt; `name` is the request's, for messages.

    RequestError if it is none of the forms, or text for a model without tokenizer.
    """
    extra: dict[str, Any] = {}
    if isinstance(prompt, Mapping):
        unknown = [key for key in prompt if key not in DICT_KEYS]
        if unknown or ("prompt" in prompt) == ("prompt_token_ids" in prompt):
            raise RequestError(f"request {name}: a prompt dict has `prompt` or `prompt_token_ids`, "
                               f"and may have cache_salt and priority; this one has "
                               f"{shown(list(prompt)) if prompt else 'nothing'}")
        extra = {key: prompt[key] for key in ("cache_salt", "priority")
                 if prompt.get(key) is not None}
        prompt = prompt["prompt" if "prompt" in prompt else "prompt_token_ids"]
    if not isinstance(prompt, str):
        return PromptInput(_token_ids(name, prompt), None, extra)
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"request {name}: the prompt is no valid text at character "
                           f"{error.start}: {prompt[error.start:error.end]!r}") from None
    if tokenizer is None:
        raise RequestError(f"request {name}: the model directory has no tokenizer, so a prompt "
                           f"must be a list of token ids")
    return PromptInput(tokenizer.encode(prompt), prompt, extra)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many? A list of whole numbers is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    try:
        items: list[Any] = _plain(prompts)
    except TypeError:
        raise RequestError(f"prompts are text, token ids, dicts or a list of those, not "
                           f"{type(prompts).__name__}") from None
    numbers = bool(items) and all(issubclass(kind, Integral) for kind in set(map(type, items)))
    return [items] if numbers else items


def as_conversations(messages: Any) -> tuple[list[list[Any]], bool]:
    """The conversations, and whether it was a list of them or just one.

    RequestError if it is neither; a PromptError names the first of a list that is none.
    """
    try:
        given = _plain(None if isinstance(messages, (str, Mapping)) else messages)
    except TypeError:
        raise RequestError(f"messages are a list of {{\"role\", \"content\"}}, or a list of such "
                           f"lists, not {type(messages).__name__}") from None
    if given and isinstance(given[0], Mapping):
        return [given], False
    for place, one in enumerate(given):
        if not isinstance(one, (list, tuple)):
            wrong = RequestError(f"a conversation is a list of messages, and this one is "
                                 f"{shown(one)} ({type(one).__name__})")
            raise PromptError(place, True, wrong)
    return [list(one) for one in given], True


def one_each(what: str, value: Any, number: int) -> list[Any]:
    """`value` for each of `number` prompts. ConfigError if it is something else, or a list of
    another length."""
    wanted = SamplingParams if what == "sampling_params" else int
    if isinstance(value, wanted):
        return [value] * number
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, wanted) for one in value):
        raise ConfigError(f"{what} must be one {wanted.__name__} for all prompts, or a list with "
                          f"one each; this is {shown(value)}")
    values = list(value)
    if len(values) != number:
        raise ConfigError(f"{number} prompts and {len(values)} {what}: "
                          f"give one for all, or one each")
    return values


def _token_ids(name: str, prompt: Any) -> list[int]:
    """The prompt's whole numbers, of whatever integer type. RequestError for anything else."""
    try:
        tokens = _plain(prompt)
        if bool in set(map(type, tokens)):
            raise TypeError
        ids = [index(token) for token in tokens]
    except TypeError:
        raise RequestError(f"request {name}: a prompt is text, a list of token ids or a dict, and "
                           f"this one is {shown(prompt)} ({type(prompt).__name__})") from None
    if ids and max(max(ids), -min(ids)) >= 1 << 63:
        raise RequestError(f"request {name}: token ids must be whole numbers below 2**63")
    return ids


def _plain(values: Any) -> list[Any]:
    """A list; of plain numbers if it was an array or a tensor. TypeError if it is nothing like one,
    or bytes, which would read as token ids."""
    if isinstance(values, (bytes, bytearray, memoryview)):
        raise TypeError
    return list(values.tolist() if hasattr(values, "tolist") else values)
