"""What a caller gets back: results of finished requests, and deltas of running ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Logprob(NamedTuple):
    """One candidate at one position, as the model itself saw it: before temperature and so on."""

    logprob: float
    rank: int  # 1: the most likely
    decoded_token: str | None


@dataclass(slots=True)
class Timings:
    """Moments in seconds since the engine started; None while they have not come."""

    arrival: float
    first_token: float | None = None
    finish: float | None = None

    @property
    def ttft(self) -> float | None:
        """Time to first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def e2e(self) -> float | None:
        """Arrival to finish."""
        return None if self.finish is None else self.finish - self.arrival


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a prompt."""

    index: int
    text: str
    token_ids: list[int]  # the token that stopped it included
    finish_reason: str | None  # stop, length, abort, error; None while it runs
    stop_reason: str | int | None = None  # the stop string, or a stop id of the request's own
    error: str | None = None  # the sentence that goes with finish_reason "error"
    logprobs: list[dict[int, Logprob]] | None = None  # one a token, where asked for
    cumulative_logprob: float | None = None
    num_preemptions: int = 0
    timings: Timings = field(default_factory=lambda: Timings(0.0))


@dataclass(slots=True)
class RequestOutput:
    """A finished prompt with its samples. `.text`, `.token_ids`, `.finish_reason`, `.error` and
    `.timings` are the first sample's; `out["text"]` works too, as nano-vllm's dicts do."""

    request_id: str
    prompt: str | None  # None if it was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    finished: bool = True

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason

    @property
    def error(self) -> str | None:
        return self.outputs[0].error

    @property
    def timings(self) -> Timings:
        return self.outputs[0].timings

    @property
    def ttft(self) -> float | None:
        return self.timings.ttft

    @property
    def e2e(self) -> float | None:
        return self.timings.e2e

    def __getitem__(self, key: str) -> Any:
        if key.startswith("_") or not hasattr(self, key):
            raise KeyError(key)
        return getattr(self, key)

    def keys(self) -> list[str]:
        """What nano-vllm's dicts hold."""
        return ["text", "token_ids"]


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one sample. The last one carries the finish reason."""

    request_id: str
    index: int  # which sample of the prompt
    text: str  # may be empty: half a character, or text that may become a stop string
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    error: str | None = None
