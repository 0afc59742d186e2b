"""How the tokens of a request are drawn and when it ends: checked when it is said, so that nothing
a user writes can fail inside a step, where others compute too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from engine.core.errors import RequestError

WHOLE = ("top_k", "n", "min_tokens", "max_tokens", "logprobs", "seed")
OPTIONAL = ("max_tokens", "logprobs", "seed")
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty",
           "frequency_penalty")
MOST_SAMPLES = 16384  # of one prompt; vLLM's bound
# Bounds under which no float32 logit overflows, whatever comes together.
LARGEST_BIAS = 1e20
PENALTIES = (1e-6, 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are drawn and when it ends. Names and meanings are vLLM's.

    Raises RequestError at construction when a value is of another type or out of range. The core
    itself reads only n, max_tokens, min_tokens, stop_token_ids and ignore_eos; the rest is for the
    runner.
    """

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # -inf forbids a token
    logprobs: int | None = None  # how many alternatives a token to report
    seed: int | None = None  # None: derived from the engine's seed and the request's place in line
    n: int = 1  # samples of one prompt
    max_tokens: int | None = 16  # None: what max_model_len leaves
    min_tokens: int = 0  # no stop before that many output tokens
    stop: tuple[str, ...] = ()  # stop strings, matched by the detokenizer
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "logit_bias"):
            object.__setattr__(self, name, _as_tuple(name, getattr(self, name)))
        for rules in (self._types, self._rules):  # what the second compares, the first has seen
            for name, good, rule in rules():
                if not good:
                    raise RequestError(f"{name}={shown(getattr(self, name))} {rule}")
        object.__setattr__(self, "logit_bias", tuple(map(_bias, self.logit_bias)))

    def _types(self) -> Iterator[tuple[str, bool, str]]:
        for name in WHOLE:
            value = getattr(self, name)
            unset = value is None and name in OPTIONAL
            yield name, unset or type(value) is int, "must be a whole number"
            yield name, unset or is_whole(value), "must fit in 64 bits"
        for name in NUMBERS:
            yield name, is_number(getattr(self, name)), "must be a number"
        for name in ("include_stop_str_in_output", "ignore_eos"):
            yield name, type(getattr(self, name)) is bool, "must be True or False"
        yield "stop_token_ids", all(map(is_whole, self.stop_token_ids)), "must hold whole numbers"
        yield ("stop", all(isinstance(s, str) and s for s in self.stop),
               "must hold non-empty strings")

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        yield "temperature", 0.0 <= self.temperature <= 1e308, "must be finite and at least 0"
        yield "top_k", self.top_k >= -1, "must be -1 or 0 (off) or at least 1"
        yield "top_p", 0.0 < self.top_p <= 1.0, "must lie in (0, 1]"
        yield "min_p", 0.0 <= self.min_p <= 1.0, "must lie in [0, 1]"
        low, high = PENALTIES
        yield ("repetition_penalty", low <= self.repetition_penalty <= high,
               f"must lie in [{low:g}, {high:g}]")
        yield "presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "must lie in [-2, 2]"
        yield "frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "must lie in [-2, 2]"
        yield "logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "must lie in [0, 20]"
        yield "n", 1 <= self.n <= MOST_SAMPLES, f"must lie in [1, {MOST_SAMPLES}]"
        yield ("max_tokens", self.max_tokens is None or self.max_tokens >= 1,
               "must be at least 1: a request for no tokens has nothing to do")
        yield ("min_tokens", self.min_tokens >= 0 and
               (self.max_tokens is None or self.min_tokens <= self.max_tokens),
               "must lie between 0 and max_tokens")


def is_whole(value: Any) -> bool:
    """A whole number that every array and every log can hold."""
    return type(value) is int and value.bit_length() <= 64


def is_number(value: Any) -> bool:
    """A number, infinity included; not NaN, and not True or False."""
    return is_whole(value) or isinstance(value, float) and value == value


def shown(value: Any) -> str:
    """A value in a message: its repr on one line, cut where it is long."""
    try:
        text = repr(value).replace("\n", " ")
    except ValueError:  # Python writes no number of more than 4,300 digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    if name == "stop" and isinstance(value, str):
        return (value,)
    if name == "logit_bias" and isinstance(value, dict):
        return tuple(value.items())
    try:
        if isinstance(value, (str, bytes, bytearray, dict)):  # would read as a list of something
            raise TypeError
        return tuple(value)
    except TypeError:
        raise RequestError(f"{name}={shown(value)} must be a list") from None


def _bias(entry: Any) -> tuple[int, float]:
    """An entry of logit_bias; RequestError names the one that is none."""
    if isinstance(entry, (tuple, list)) and len(entry) == 2:
        token, bias = entry
        if is_whole(token) and is_number(bias) and (
                bias == float("-inf") or -LARGEST_BIAS <= bias <= LARGEST_BIAS):
            return token, bias
    raise RequestError(f"logit_bias holds {shown(entry)}: an entry must be a token id and a number "
                       f"in [-{LARGEST_BIAS:g}, {LARGEST_BIAS:g}], or -inf to forbid the token")
